"""Encoder-decoders: BART (pre-norm), R2C2 and T5. `config` has their sizes, `model` the module."""
