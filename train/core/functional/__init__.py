"""Preset for a model of any framework: initial values, multipliers and an optax transformation."""
