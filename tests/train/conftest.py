"""What all tests of training share: runs leave loss.png empty, except where a file asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.small_runs import without_loss_plot


@pytest.fixture(scope="module", autouse=True)
def empty_loss_plot(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave loss.png empty in the tests of a file that has no `DRAWS_LOSS = True`."""
    if getattr(request.module, "DRAWS_LOSS", False):
        yield
        return
    with without_loss_plot():
        yield
