"""Logits of the same weights here and in `transformers`: docs/howto/huggingface.md."""
