"""`Definition`: an NNX model taken apart into a graph, plain dicts of arrays, and their specs.

Works for any NNX model whose every `nnx.Param` carries a `spec`; names are paths joined by dots.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax.presets.roles import ParamSpec, PresetError
from mupax.zoo.families import ModelConfig
from mupax.zoo.param import Factor, initial_value, multiplied

Arrays = dict[str, Any]
"""Parameter (or factor) name to array, or to its shape: what the step, the optimizer and checkpoints see."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """A model without its numbers.

    Attributes:
        graph: NNX graph definition.
        specs: name to declaration, one per parameter.
        abstract: name to shape and dtype.
        factors: name to `Factor` metadata ("kind", "shape", "spec") of every forward multiplier.
        sizes: size of every logical axis.
    """

    graph: nnx.GraphDef
    specs: dict[str, ParamSpec]
    abstract: dict[str, jax.ShapeDtypeStruct]
    factors: dict[str, dict[str, Any]]
    sizes: dict[str, int]

    def bind(self, params: Mapping[str, Any], factors: Mapping[str, Any]) -> nnx.Module:
        """The model with these numbers; multipliers must already be in `params` (see `apply`).

        A skip factor that is not given is the constant 1, which the compiler removes. As data it would cost a twentieth of
        the step's memory traffic: a sum with a scaled stream is no longer written by the product that ends the branch.
        """
        ones = {n: np.ones(f["shape"], np.float32) for n, f in self.factors.items() if f["kind"] == "skip"}
        variables = {name: Factor(value) for name, value in {**ones, **factors}.items()}
        variables |= {name: nnx.Param(value) for name, value in params.items()}
        return nnx.merge(self.graph, nnx.from_flat_state({_path(name): leaf for name, leaf in variables.items()}))

    def model(self, params: Mapping[str, jax.Array], multipliers: Arrays, factors: Arrays) -> Any:
        """The model with every parameter taken as multiplier * w."""
        return self.bind(multiplied(dict(params), multipliers), factors)

    def apply(self, params: Mapping[str, jax.Array], multipliers: Arrays, factors: Arrays, *inputs: jax.Array) -> Any:
        """model(*inputs) with every parameter taken as multiplier * w."""
        return self.model(params, multipliers, factors)(*inputs)

    def initialize(self, seed: jax.Array | int, stds: Mapping[str, jax.Array | float]) -> Arrays:
        """Fresh parameters, each from its own key (seed, name): the same bits on every mesh. Call under `jax.jit`."""
        key = jax.random.key(seed)
        keys = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in self.specs}
        return {
            name: initial_value(keys[name], self.specs[name], leaf.shape, stds[name], leaf.dtype)
            for name, leaf in self.abstract.items()
        }

    @property
    def tied_readout(self) -> ParamSpec | None:
        """Declaration of a readout that shares the token embedding's table; None for any other model."""
        return next((factor["spec"] for factor in self.factors.values() if factor["kind"] == "readout"), None)

    def count(self) -> int:
        """Trainable numbers."""
        return sum(leaf.size for leaf in self.abstract.values())


def define(make: Callable[[], nnx.Module], *, sizes: Mapping[str, int] | None = None) -> Definition:
    """Take a model apart without allocating it.

    Args:
        make: builds the model, e.g. `lambda: MyModel(rngs=nnx.Rngs(0))`.
        sizes: logical sizes that no parameter shows, such as "layers" of a stack kept as separate modules.

    Raises:
        PresetError: a parameter without a spec, a spec that does not fit its array, an axis with two sizes, or
            state that is neither `nnx.Param` nor `Factor`.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    specs, abstract, factors = {}, {}, {}
    axes: dict[str, tuple[int, str]] = {axis: (size, "the sizes given") for axis, size in (sizes or {}).items()}
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        leaf, metadata = variable.get_value(), variable.get_metadata()
        if isinstance(variable, Factor):
            factors[name] = {"kind": metadata["kind"], "shape": leaf.shape, "spec": metadata.get("spec")}
            continue
        if not isinstance(variable, nnx.Param):
            raise PresetError(
                f"{name} is {type(variable).__name__}; only nnx.Param and Factor state can be trained here"
            )
        spec = metadata.get("spec")
        if not isinstance(spec, ParamSpec):
            raise PresetError(
                f"parameter {name} {leaf.shape} has no spec; write nnx.Param(value, spec=ParamSpec(role=..., axes=...))"
            )
        if len(spec.axes) != len(leaf.shape):
            raise PresetError(
                f"parameter {name} has shape {leaf.shape} but axes {spec.axes}; name one axis per dimension"
            )
        for axis, size in zip(spec.axes, leaf.shape, strict=True):
            if axes.setdefault(axis, (size, name))[0] != size:
                raise PresetError(f"axis {axis!r} is {size} in {name} but {axes[axis][0]} in {axes[axis][1]}")
        specs[name], abstract[name] = spec, jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    return Definition(graph, specs, abstract, factors, {axis: size for axis, (size, _) in axes.items()})


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


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
