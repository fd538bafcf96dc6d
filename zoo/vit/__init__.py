"""Vision transformers. `config` has the family as data, `model` its module."""
