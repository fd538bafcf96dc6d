"""A file of a stranger, what reads it and how that should end; and the readers that samples share."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADS = (0,)
REFUSED = (2,)
EITHER = (0, 2)
"""For damage that one version of a library reads and another does not."""


@dataclass(frozen=True)
class Sample:
    """A file of a stranger.

    Attributes:
        name: unique.
        group: kind of file.
        make: writes it into an empty folder.
        read: reads it from there as a command of a user's does, and returns the exit code.
        codes: exit codes that are right.
        says: part of the output that has to be there, such as the flag that raises a limit.
    """

    name: str
    group: str
    make: Callable[[Path], object]
    read: Callable[[Path], int]
    codes: Sequence[int] = REFUSED
    says: str = ""


def mupax(folder: Path, *words: str) -> int:
    """Run a `mupax` command in this process, with prepared data below the folder."""
    os.environ["MUPAX_DATA"] = str(folder / "cache")
    os.chdir(folder)
    sys.argv[1:] = words
    try:
        runpy.run_module("mupax", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def first_batches(folder: Path, name: str, **fields: Any) -> int:
    """Load data as a run does, and make the first batches."""
    from mupax import terminal
    from mupax.train import data
    from mupax.train.config.data import DataConfig
    from mupax.zoo.configs import DecoderConfig, ViTConfig

    os.environ["MUPAX_DATA"] = str(folder / "cache")
    os.chdir(folder)
    sizes = fields.pop("model", {})

    @terminal.entry_point
    def load(argv: list[str]) -> int:
        if fields.pop("images", False):
            usual = {"image_size": 32, "patch_size": 8, "channels": 3, "num_classes": 2}
            model: Any = ViTConfig(width=8, depth=1, num_heads=1, **{**usual, **sizes})
        else:
            model = DecoderConfig(
                width=8, depth=1, num_heads=1, **{"seq_len": 16, "vocab_size": 1 << 20, **sizes}
            )
        loaded = data.load(DataConfig(name=name, batch_size=2, **fields), model, seed=0)
        loaded.train_batch(0)
        loaded.eval_batch(0)
        print(
            {
                name: loaded.facts[name]
                for name in ("train_tokens", "train_images")
                if name in loaded.facts
            }
        )
        return 0

    return load([])


def command(line: str) -> Callable[[Path], int]:
    """Return a reader: a `mupax` command in the folder of the sample."""
    return lambda folder: mupax(folder, *line.split())


def loading(name: str, **fields: Any) -> Callable[[Path], int]:
    """Return a reader: what a run does with data of a name before its first step."""
    return lambda folder: first_batches(folder, name, **fields)
