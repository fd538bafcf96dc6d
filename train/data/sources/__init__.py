"""Loaders of data by kind. They raise as `mupax.train.data.load` does."""
