"""Streams of text that is tokenized while a run trains on it: token files, and batches."""
