"""Fixtures of all tests of training: runs draw no loss.png, and tyro reads each class once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from tyro import _docstrings

from tests.fixtures.small_runs import without_loss_plot


@pytest.fixture(scope="module", autouse=True)
def empty_loss_plot(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave loss.png empty in the tests of a file that has no `DRAWS_LOSS = True`."""
    if getattr(request.module, "DRAWS_LOSS", False):
        yield
        return
    with without_loss_plot():
        yield


@pytest.fixture(scope="session", autouse=True)
def classes_are_tokenized_once() -> Iterator[None]:
    """Keep the tokens of the classes of flags, which tyro reads anew for every command line.

    It takes 0.1 s for each line that tyro parses.
    """
    with pytest.MonkeyPatch.context() as patch:
        make = _docstrings._ClassTokenization.make
        patch.setattr(_docstrings._ClassTokenization, "make", functools.cache(make))
        yield
