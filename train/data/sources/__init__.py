"""Loaders of data, one for each kind of `data.name`.

They raise the errors that `mupax.train.data.load` documents.
"""
