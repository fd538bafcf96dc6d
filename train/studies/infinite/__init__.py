"""The infinitely wide model's own loss curve, and the finite models of our own step beside it."""
