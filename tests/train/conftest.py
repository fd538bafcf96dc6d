"""Fixtures of all tests of training.

Runs draw no loss.png, and what never changes in a process is computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from tyro import _docstrings

from mupax.train.checkpoints import workdir
from mupax.train.parallel import environment
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
def code_is_read_once() -> Iterator[None]:
    """Keep what is read of the code, which is the same for all tests.

    Every run reads the digests of all files and the commit, in 0.15 s. For every command line tyro
    reads the classes of flags, in 0.1 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        digests = functools.cache(environment.sources)
        patch.setattr(environment, "sources", lambda: dict(digests()))  # tests change theirs
        patch.setattr(workdir, "_git_commit", functools.cache(workdir._git_commit))
        make = _docstrings._ClassTokenization.make
        patch.setattr(_docstrings._ClassTokenization, "make", functools.cache(make))
        yield
