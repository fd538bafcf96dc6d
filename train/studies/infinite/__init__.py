"""Training of infinitely wide models, with finite models by the zoo's training step."""
