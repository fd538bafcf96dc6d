"""Training of a model with infinitely many heads, and of finite models, on one batch."""
