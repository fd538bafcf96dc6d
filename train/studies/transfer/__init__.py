"""Transfer studies, which measure whether the best learning rate stays as a model grows."""
