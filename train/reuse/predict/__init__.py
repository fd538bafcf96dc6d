"""Predictions of an image model for image files."""
