"""Searches over many constants of a run at its base size: which are tried, when one is given up, and what is saved."""
