"""What runs in verl's driver process: the trainer, the plan of a step, and the run's files."""
