"""Flax NNX transformers that declare the role of every parameter.

They know nothing of meshes, optimizers or presets. In Python::

    from mupax import zoo
    config = zoo.get("vit-s16")          # sizes, parameters() and factors() without JAX
    model = config.module(nnx.Rngs(0))   # the NNX module

    # Specs, shapes and graph of any module whose parameters carry a spec.
    zoo.define(lambda: MyModel(...))
    # A definition of a model in any framework, from a function of a pytree of parameters.
    zoo.define_function(apply, params, specs)
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
# Defined in modules that import JAX, unlike the names above.
__all__ += ["Definition", "FunctionDefinition", "define", "define_function"]

_MODULES = {
    "Definition": "definition",
    "FunctionDefinition": "functional.definition",
    "define": "definition",
    "define_function": "functional.definition",
}
"""Module of each exported name that is not in `configs`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    # Imported on first use, so that `import mupax.zoo` does not import JAX.
    module = importlib.import_module(f"mupax.zoo.{_MODULES.get(name, 'configs')}")
    return getattr(module, name)
