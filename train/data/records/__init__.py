"""Prepared data sets on disk: TFDS, npz files and the corpus that any Python installation has."""
