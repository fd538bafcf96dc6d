"""Loaders of the kinds of data that a config can name.

Every loader raises as `mupax.train.data.load` does.
"""
