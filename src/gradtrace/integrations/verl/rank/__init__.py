"""What runs on verl's ranks, where the sharded model is."""
