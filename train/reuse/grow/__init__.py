"""A larger model of a checkpoint, with almost the same function."""
