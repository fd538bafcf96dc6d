"""Growth of a checkpoint into a larger model with almost the same function."""
