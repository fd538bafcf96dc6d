"""A larger model of a checkpoint, with the same function."""
