"""Cross-entropy on one device, where all logits at once would be large: by chunks of tokens, or parts of the vocabulary."""
