"""Names of classes that are not those of the source."""

from __future__ import annotations

import pytest

from mupax.train.reuse.image_input import ONE_SIZE, ImageInput

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("names", "classes", "reason"),
    [
        (("a", "b"), ["a", "b"], ""),
        (None, ["a", "b"], "since nothing names the source's classes"),
        (("b", "a"), ["a", "b"], "since the source has the same classes in another order"),
        (
            ("a", "Cat"),
            ["a", "cat"],
            "since the source writes Cat for cat; folders of those names keep its readout",
        ),
        (("a", "b", "c"), ["a", "b"], "since the source has c too"),
        (
            tuple("abcdef"),
            ["a", "x\n"],
            "since the source has no x\ufffd among its 6 classes (a, b, c and 3 more)",
        ),
    ],
)
def test_the_difference_is_named(
    names: tuple[str, ...] | None, classes: list[str], reason: str
) -> None:
    assert ImageInput(names, ONE_SIZE).difference(classes) == reason
