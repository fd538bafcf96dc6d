"""The infinitely wide transformer's own training, by arrays: the only room of `presets` that imports NumPy, and only where asked for."""
