"""From a config to its model."""

from __future__ import annotations

from flax import nnx

from mupax.presets.roles import PresetError
from mupax.zoo.definition import Definition, define
from mupax.zoo.families import ModelConfig


def definition(config: ModelConfig) -> Definition:
    """The model of a config without its numbers; nothing is allocated.

    Raises:
        PresetError: the module's parameters are not those that the config declares.
    """
    model, declared = define(lambda: config.module(nnx.Rngs(0)), sizes=config.sizes()), config.parameters()
    for name in sorted(declared.keys() | model.specs.keys()):
        if declared.get(name) != model.specs.get(name):
            raise PresetError(
                f"{name}: the config of {config.family} declares {declared.get(name, 'no such parameter')}, and its module "
                f"makes {model.specs.get(name, 'none')}; make it with init.param({name.rpartition('.')[2]!r})"
            )
    return model
