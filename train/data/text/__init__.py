"""From text to batches of tokens: tokenizers, packing, order, and n-gram references."""
