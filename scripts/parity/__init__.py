"""Comparison of logits with `transformers`, for docs/howto/huggingface.md."""
