"""Predictions of a model of images for image files."""
