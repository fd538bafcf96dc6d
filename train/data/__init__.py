"""Data: batches by index from text and images. `load` is the way in; importing this package imports nothing heavy.

`mupax.train.config.data.SOURCES` names a loader for each kind of data, all in sources/. A loader finds its examples, on disk
by records/, and gives them out as batches by text/ or images.py, behind `interface.Data`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mupax.table import function_of
from mupax.train.config.data import source
from mupax.train.data.interface import Data, DataError, ReadError, Reference, reading

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig
    from mupax.zoo.configs import ModelConfig

__all__ = ["Data", "DataError", "ReadError", "Reference", "load", "reading"]


def load(
    config: DataConfig, model: ModelConfig, *, seed: int, note: Callable[[str], None] = print
) -> Data:
    """The data a config names, prepared if it is not, and checked against the model.

    One process prepares while others wait for it, and help it tokenize what takes long. Call it before building the model:
    it answers at once when something is missing or does not fit.

    Args:
        config: which data, in what batches.
        model: whose vocabulary, sequence length, image size, channels and classes the data must fit.
        seed: seed of the order and of augmentation.
        note: told, in a line, what takes time.

    Raises:
        DataError: the data is missing, damaged or does not fit; the text says what to write or which command to run.
    """
    if seed < 0:
        raise DataError(f"seed is {seed}; write a whole number of at least 0")
    if config.noise is not None:
        from mupax.train.data.text import denoising

        return denoising.load(config, model, seed=seed, note=note)
    if config.stream and config.name.startswith(("text:", "records:")):
        from mupax.train.data.sources import streams

        return streams.own_files(config, model, seed, note)
    return function_of(source(config.name).loader)(config, model, seed, note)
