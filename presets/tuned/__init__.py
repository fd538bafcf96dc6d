"""Tuned presets: constants with their provenance, as data, and how one is looked up."""
