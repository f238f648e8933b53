"""The `probe` command: from a checkpoint to a report of what the next update does to entropy."""
