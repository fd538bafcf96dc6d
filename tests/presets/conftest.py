"""Theory is tested without JAX: in a few seconds, also where none is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_jax() -> Iterator[None]:
    """A test of presets may not import JAX; only another folder's test may have done it before."""
    before = "jax" in sys.modules
    yield
    imported = "jax" in sys.modules
    assert before or not imported, "this test of presets imported JAX"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nor may a file of them, by what it imports."""
    folder = str(session.config.rootpath / "tests" / "presets")
    if all(str(item.path).startswith(folder) for item in session.items):
        assert "jax" not in sys.modules, "a file of tests/presets, or what it imports, imports JAX"
