"""The mark of tests that need `transformers`, which `make parity` installs."""

from __future__ import annotations

import importlib.util

import pytest

_MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
needs_transformers = pytest.mark.skipif(
    bool(_MISSING), reason=f"{' and '.join(_MISSING)} not installed; `make parity` does it"
)
