"""Text from a language model, with a cache of keys and values."""
