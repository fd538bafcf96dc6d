"""Training steps of two recipes, compiled for TPUs: digest, bytes and cycles. Needs `make tpu`."""

from __future__ import annotations

from typing import Any

from mupax.train.pods import topology

topology.ready()  # has to run before JAX is imported

import jax  # noqa: E402

from mupax.train.config import cli  # noqa: E402
from mupax.train.pods.compiled import compile_for  # noqa: E402
from scripts.house.compiled import without_metadata  # noqa: E402
from scripts.house.digests import digest  # noqa: E402

RECIPES = {"lm-1b": "v5e:4x4", "lm-8b": "v5e:16x16"}
"""Recipe to the TPU topology for which its step is compiled."""


def record() -> dict[str, Any]:
    """Compile the steps, and return digest, bytes in use and expected cycles of each."""
    # The compiled text holds Pallas kernels as bytes, and those hold line numbers of our source.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    values: dict[str, Any] = {}
    for name, chips in RECIPES.items():
        compiled = compile_for(cli.recipe(name)(), chips)
        cycles = compiled.module.cycles if compiled.module else None
        values[name] = {
            "step": digest(without_metadata(compiled.text)),
            "bytes": compiled.used_bytes,
            "cycles": cycles,
        }
    return values
