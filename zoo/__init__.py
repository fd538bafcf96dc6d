"""Flax NNX transformers that say of every parameter what it is, and nothing of meshes, optimizers or presets.

In Python::

    from mupax import zoo
    config = zoo.get("vit-s16")          # sizes, parameters() and factors() without JAX
    model = config.module(nnx.Rngs(0))   # the NNX module
    zoo.define(lambda: MyModel(...))     # specs, shapes and graph of any module whose parameters carry a spec
    zoo.define_function(apply, params, specs)   # the same of a model of any framework: a function of a pytree
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mupax.zoo.configs import (
        CONFIGS,
        ComputeConfig,
        ConfigError,
        DecoderConfig,
        ModelConfig,
        ViTConfig,
        get,
    )
    from mupax.zoo.definition import Definition, define
    from mupax.zoo.functional.definition import FunctionDefinition, define_function

__all__ = [
    "CONFIGS",
    "ComputeConfig",
    "ConfigError",
    "DecoderConfig",
    "ModelConfig",
    "ViTConfig",
    "get",
]
__all__ += ["Definition", "FunctionDefinition", "define", "define_function"]  # they import JAX

_PLACES = {
    "Definition": "definition",
    "FunctionDefinition": "functional.definition",
    "define": "definition",
    "define_function": "functional.definition",
}
"""Name to its module where that is not `configs`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"mupax.zoo.{_PLACES.get(name, 'configs')}"), name)
