"""The papers' figures as measured exponents, one file each; `result.py` says what such a file holds."""
