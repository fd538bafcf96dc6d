"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep prepared data in an empty folder beside `tmp_path`."""
    folder = tmp_path.with_name(f"{tmp_path.name}-cache")
    monkeypatch.setenv("MUPAX_DATA", str(folder))
    return folder


@pytest.fixture
def work_folder(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in `tmp_path`, with an empty cache of prepared data."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def packed(cache_folder: Path) -> Callable[[], set[str]]:
    """Return a function that lists the names of all prepared texts."""
    return lambda: {path.name for path in (cache_folder / "packed").iterdir() if path.is_dir()}
