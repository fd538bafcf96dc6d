"""Samples: files from untrusted sources, each with a command that reads it and the right end."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.campaigns import forks

LOADS = (0,)
REFUSED = (2,)
EITHER = (0, 2)
"""Exit codes for damage that one version of a library reads and another refuses."""


@dataclass(frozen=True)
class Sample:
    """A file from an untrusted source, with the right end of a command that reads it.

    Attributes:
        name: Unique name, which is that of the trial.
        group: Kind of file.
        make: Function that writes the file into an empty folder.
        read: Function that reads the file from that folder as a command does, and returns the exit
            code.
        codes: Exit codes that are right. Default: `REFUSED`.
        says: Text that the output must have, such as the flag that raises a limit.
    """

    name: str
    group: str
    make: Callable[[Path], object]
    read: Callable[[Path], int]
    codes: Sequence[int] = REFUSED
    says: str = ""


def mupax(folder: Path, *words: str) -> int:
    """Run a `mupax` command in this process and the given folder, and return the exit code.

    Prepared data go into `cache` below the folder.
    """
    os.environ["MUPAX_DATA"] = str(folder / "cache")
    os.chdir(folder)
    sys.argv[1:] = words
    try:
        runpy.run_module("mupax", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return forks.exit_code(stop)
    return 0


def first_batches(folder: Path, name: str, **fields: Any) -> int:
    """Load data as a run does, make a training and an evaluation batch, and return the exit code.

    Args:
        folder: Working directory, with `cache` for prepared data.
        name: `data.name`.
        **fields: Further fields of `DataConfig`, and two others. `images=True` loads for a vision
            transformer and not a decoder. `model` is a dict with fields of the model's config.
    """
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
        names = ("train_tokens", "train_images")
        facts = {}
        for key in names:
            if key in loaded.facts:
                facts[key] = loaded.facts[key]
        print(facts)
        return 0

    return load([])


def command(line: str) -> Callable[[Path], int]:
    """Return a function for `Sample.read` that runs a `mupax` command in the sample's folder."""
    return lambda folder: mupax(folder, *line.split())


def loading(name: str, **fields: Any) -> Callable[[Path], int]:
    """Return a function for `Sample.read` that calls `first_batches` with these arguments."""
    return lambda folder: first_batches(folder, name, **fields)
