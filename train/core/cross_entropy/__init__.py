"""Cross-entropy on one device in parts: chunks of tokens, or parts of the vocabulary."""
