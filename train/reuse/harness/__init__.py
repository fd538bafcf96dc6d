"""Evaluation of language models on tasks of the lm-eval harness."""
