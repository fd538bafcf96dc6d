"""What every parameter of a model is, from its loss alone: roles and axes found by tracing, held against declared ones."""
