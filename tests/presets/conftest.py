"""Theory is tested without JAX: in a second or two, on a laptop that has none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


@pytest.fixture(scope="session", autouse=True)
def no_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where these tests run by themselves, none of them may import JAX."""
    only = all(item.path.is_relative_to(FOLDER) for item in request.session.items)
    yield
    assert not only or "jax" not in sys.modules, "a test of presets, or what it imports, imported JAX"
