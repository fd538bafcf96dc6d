"""Tuned presets: constants found by tuning, as data files with their provenance."""
