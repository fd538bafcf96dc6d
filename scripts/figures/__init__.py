"""The papers' figures, measured again: one file `fig*.py` for each (see `result.py`)."""
