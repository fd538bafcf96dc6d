"""What the TPU compiler makes of the step of two recipes: digest, bytes and cycles. Needs libtpu (`make tpu`)."""

from __future__ import annotations

from typing import Any

from mupax.train.pods import topology

topology.ready()  # before JAX is imported

from mupax.train.config import cli  # noqa: E402
from mupax.train.pods.compiled import compile_for  # noqa: E402
from scripts.house.compiled import without_metadata  # noqa: E402
from scripts.house.digests import digest  # noqa: E402

RECIPES = {"lm-1b": "v5e:4x4", "lm-8b": "v5e:16x16"}
"""Recipe to the topology that its step is compiled for."""


def record() -> dict[str, Any]:
    """Return the digest of each compiled step, with the bytes that it needs and the cycles that the compiler expects."""
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
