"""The handwritten digits that come with this package: 8 x 8 pixels of 17 grey levels, 1,797 of them.

They are the test part of UCI's "optical recognition of handwritten digits" (Alpaydin and Kaynak 1998, CC BY 4.0), in the order
that scikit-learn ships them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np


class DigitImages(NamedTuple):
    """All digits in their order.

    Attributes:
        pixels: uint8 [1797, 8, 8], from 0 (white) to 16.
        labels: uint8 [1797].
        held_out: bool [1797], the usual stratified fifth: scikit-learn's `train_test_split` from state 0.
    """

    pixels: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray


def read() -> DigitImages:
    """Read the digits from the package."""
    with np.load(Path(__file__).with_name("digit_images.npz")) as arrays:
        return DigitImages(arrays["pixels"], arrays["labels"], arrays["held_out"])
