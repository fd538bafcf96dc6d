"""Whether the best learning rate stays as the model grows."""
