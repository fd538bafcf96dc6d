"""Vision transformers: `config` has the family's config, `model` its NNX module."""
