"""Decoder language models. `config` has the family as data, `model` its module."""
