"""Start of a run from the parameters of another run, or from weights."""
