"""Batches by index from text and images. `load` opens the data that a config names.

`mupax.train.config.data.SOURCES` names a loader for each kind of data; all loaders are in sources/.
A loader finds examples on disk with records/. It returns batches, made by text/ or images.py, as an
`interface.Data`. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mupax.mappings import function_of
from mupax.train.config.data import source
from mupax.train.data.interface import Data, DataError, ReadError, Reference, reading

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig
    from mupax.zoo.configs import ModelConfig

__all__ = ["Data", "DataError", "ReadError", "Reference", "load", "reading"]


def load(
    config: DataConfig, model: ModelConfig, *, seed: int, note: Callable[[str], None] = print
) -> Data:
    """Return the data that a config names. Prepare it if needed, and check it against the model.

    Every process of a run calls this. One process prepares. Others that share its cache folder wait
    for it, and help it to tokenize if that takes long. Call this before building the model: it
    fails at once if data is missing or does not fit.

    Args:
        config: Data settings. With `noise`, the text is corrupted for an encoder-decoder.
        model: Model settings that the data must fit: vocabulary, sequence length, image size,
            channels and classes.
        seed: Seed of the order and of augmentation, at least 0.
        note: Function that takes one line of text about work that takes long.

    Raises:
        DataError: The data is missing, damaged or does not fit. The message says what to write or
            which command to run.
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
