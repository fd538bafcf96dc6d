"""Training of the infinitely wide transformer, with NumPy arrays.

This is the only room of `presets` that imports NumPy, and no other room of `presets` imports it.
"""
