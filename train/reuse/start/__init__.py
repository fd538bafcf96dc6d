"""A run that starts from another's parameters."""
