"""Digests of training steps that XLA compiles for CPUs, without references to source lines."""

from __future__ import annotations

import re
from typing import Any

import jax

from scripts.house import programs
from scripts.house.digests import digest

NAMES = (
    "plain",
    "accumulated",
    "centred",
    "tied",
    "scanned",
    "window, scanned",
    "bfloat16",
    "documents",
    "experts",
    "images, drop path",
    "encoder-decoder",
    "optimizer muon",
    "loss chunked, one device",
    "loss vocab, tensor 2",
    "loss auto, fsdp 8",
    "loss auto, data 2 fsdp 4",
    "loss auto, sequence 2",
    "images, fsdp 8",
    "experts, fsdp 8",
    "scanned, fsdp 8",
)
"""Cases of `programs` that are compiled."""
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
_TABLES = re.compile(
    r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", re.MULTILINE
)


def record() -> dict[str, Any]:
    """Return a digest of the compiled training step of each case."""
    programs.with_small_chunks()
    configs = programs.cases()
    digests: dict[str, Any] = {}
    for name in NAMES:
        compiled = programs.program_of(configs[name]).compile_train()
        digests[name] = digest(without_metadata(compiled.as_text() or ""))
        # Otherwise the programs of all cases stay in memory.
        jax.clear_caches()
    return digests


def without_metadata(text: str) -> str:
    """Return HLO text without the files, lines and functions of its instructions."""
    return _TABLES.sub("", _METADATA.sub("", text))
