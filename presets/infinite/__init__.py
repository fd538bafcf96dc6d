"""Training of the infinitely wide transformer, with NumPy arrays.

This is the only folder of `presets` that imports NumPy, and no other folder of `presets` imports
it.
"""
