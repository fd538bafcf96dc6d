"""Data on disk: prepared TFDS data sets, a user's files by format, and their split by side.

The sides of a split are "train" and "eval".
"""
