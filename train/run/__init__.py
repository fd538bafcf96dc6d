"""A run from its config to its last checkpoint."""
