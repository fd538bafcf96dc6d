"""Data: batches by index from text and images. `load` is the way in; importing this package imports nothing heavy.

Text goes text.py → tokenizer.py, packing.py → tokens.py; images go digits.py, folders.py → images.py, augment.py, or are
drawn as they are asked for, shapes.py → endless.py; data sets known to TFDS go published.py → either. All of them come
out behind interface.Data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from train.data.interface import Data, DataError, ReadError, Reference

if TYPE_CHECKING:
    from train.config import DataConfig
    from zoo.configs import ModelConfig

__all__ = ["Data", "DataError", "ReadError", "Reference", "load"]


def load(config: DataConfig, model: ModelConfig, *, seed: int, note: Callable[[str], None] = print) -> Data:
    """The data a config names, prepared if it is not, and checked against the model.

    One process prepares while others wait for it. Call it before building the model: it answers at once when something
    is missing or does not fit.

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
    name = config.name
    if name == "python_corpus" or name.startswith("text:"):
        from train.data import text

        opened = text.python_corpus if name == "python_corpus" else text.own_text
    elif name == "digits":
        from train.data.digits import digits as opened
    elif name == "shapes":
        from train.data.endless import striped_shapes as opened
    elif name.startswith("images:"):
        from train.data.folders import own_images as opened
    else:
        from train.data import published

        opened = published.cifar5m if name == "cifar5m" else published.tfds_data
    return opened(config, model, seed, note)
