"""Decoder language models: `config` has the family's config, `model` its NNX module."""
