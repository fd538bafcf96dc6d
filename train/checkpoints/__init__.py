"""Checkpoints with manifests, and the work folder that holds them."""
