"""Data: batches by index from text and images. `load` is the way in; importing this package imports nothing heavy.

Text goes text.py → tokenizer.py, packing.py → tokens.py; images go digits.py, folders.py → images.py, augment.py, or are
drawn as they are asked for, shapes.py → endless.py; data sets known to TFDS go published.py → either. All of them come
out behind interface.Data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mupax.train.data.interface import Data, DataError, ReadError, Reference, reading

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig
    from mupax.zoo.configs import ModelConfig

__all__ = ["Data", "DataError", "ReadError", "Reference", "load", "reading"]


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
        from mupax.train.data.sources import text

        opened = text.python_corpus if name == "python_corpus" else text.own_text
    elif name == "digits":
        from mupax.train.data.sources.digits import digits as opened
    elif name == "shapes":
        from mupax.train.data.sources.shapes import striped_shapes as opened
    elif name.startswith("images:"):
        from mupax.train.data.sources.folders import own_images as opened
    else:
        from mupax.train.data.sources import published

        opened = published.cifar5m if name == "cifar5m" else published.tfds_data
    return opened(config, model, seed, note)
