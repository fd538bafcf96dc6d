"""Encoder-decoders: BART (pre-norm), R2C2, T5. `config` has the family as data, `model` its module."""
