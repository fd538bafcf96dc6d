"""One file a kind of data that a config can name."""
