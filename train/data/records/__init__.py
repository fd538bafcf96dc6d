"""Data on disk: prepared TFDS data sets, and a user's files in parts for training and evaluation."""
