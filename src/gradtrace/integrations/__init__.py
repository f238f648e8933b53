"""Other hosts for the same instruments: `verl` (several GPUs, several machines) and `trl` (a GRPOTrainer of yours)."""
