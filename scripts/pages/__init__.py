"""Pages of docs/ that are written from what is committed, without training."""
