"""The instruments: each answers one question about training, on top of the attribution engine and the trace files."""
