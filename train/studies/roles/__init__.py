"""Roles and axes of parameters, traced in a model's loss and compared with declarations."""
