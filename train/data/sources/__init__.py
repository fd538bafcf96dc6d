"""Loaders of data, one for each kind of `data.name`."""
