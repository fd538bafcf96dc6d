"""Tokenizer files that tests write."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers


def byte_vocabulary(path: Path | str, *special: str) -> Path:
    """Write a tokenizer of 256 bytes, without merges, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(path))
    return Path(path)
