"""Flax NNX transformers that say of every parameter what it is, and nothing of meshes, optimizers or presets."""
