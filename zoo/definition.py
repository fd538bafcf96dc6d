"""Between declarations and NNX modules: `Init` makes a module's parameters, `define` takes a module apart into a `Definition`.

    self.query = init.param("query")

makes the `nnx.Param` that the config declares under this name, in the scope of the module. Any NNX module comes apart whose
every `nnx.Param` carries a `spec`; names are paths joined by dots.

The numbers that parameters start with are drawn here too, each parameter's from its own key, by themselves or all in one loop.

A CPU's compiler takes 0.4 s for every draw of its own, so there the loop makes the random bits of all of them: integers, the same
however they are computed. Normal numbers are then made of them parameter by parameter, as `jax.random.normal` does.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.random import threefry_2x32

from mupax.presets.roles import VECTORS, ZERO, Distribution, ParamSpec, PresetError
from mupax.zoo.families import ModelConfig
from mupax.zoo.partition import ONE_DEVICE, Layout, place

_BLOCK_BITS = 14
_BLOCK = 1 << _BLOCK_BITS
"""Numbers of a turn of the loop."""

Arrays = dict[str, Any]
"""Parameter (or factor) name to array, or to its shape: what the step, the optimizer and checkpoints see."""
SHARED_INIT = "like "
"""Stands before a parameter's name where `Definition.initialize` is to draw it with another's `zlib.crc32` of its name."""


def initial_value(
    key: jax.Array,
    spec: ParamSpec,
    shape: tuple[int, ...],
    std: jax.Array | float,
    dtype: jnp.dtype,
    normal: jax.Array | None = None,
) -> jax.Array:
    """A parameter as it starts: std times numbers of deviation 1 from the declared distribution, of gains and biases exactly std.

    With a leading "layers" axis every layer draws from its own key, folded from `key` by its index, and std may be
    per layer: a stacked parameter starts as the separate layers would, on any mesh. (With jax 0.12 on CPU to the last
    bit only if made whole: how a row is split decides which numbers its vector instructions leave over.)

    Args:
        key: of this parameter alone.
        spec: its declaration.
        shape: a size for every axis of the spec.
        std: [], or [layers] for a stacked parameter; 0 for a bias.
        dtype: that it is stored in; numbers are drawn in float32.
        normal: the numbers, where they are drawn already (`normals`).
    """
    if spec.stacked:
        std = jnp.broadcast_to(jnp.asarray(std, jnp.float32), shape[:1]).reshape(
            -1, *[1] * (len(shape) - 1)
        )
    if spec.role in VECTORS:
        return jnp.broadcast_to(jnp.asarray(std, dtype), shape)
    if normal is None and spec.stacked:
        normal = jax.vmap(lambda layer_key: jax.random.normal(layer_key, shape[1:]))(
            _layer_keys(key, shape[0])
        )
    elif normal is None:
        normal = jax.random.normal(key, shape)
    return (std * _spread(normal, spec.distribution)).astype(dtype)


_CUT = 2.0
"""Deviations of a normal distribution beyond which a truncated one has nothing, and by what that leaves it narrower: 0.8796."""
_CUT_DEVIATION = math.sqrt(
    1 - 2 * _CUT * math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi) / math.erf(_CUT / math.sqrt(2))
)


def _spread(normal: jax.Array, distribution: Distribution) -> jax.Array:
    """Numbers of another distribution with deviation 1, by the shares of a normal one that lie below them.

    uniform: in +-3^1/2, as Glorot and Bengio 2010. truncated: what Flax's truncated initializers draw.
    """
    if distribution == "normal":
        return normal
    share = jax.lax.erf(normal / math.sqrt(2))  # even in (-1, 1)
    if distribution == "uniform":
        return math.sqrt(3) * share
    return math.sqrt(2) / _CUT_DEVIATION * jax.lax.erf_inv(share * math.erf(_CUT / math.sqrt(2)))


def _layer_keys(key: jax.Array, layers: int) -> jax.Array:
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))


def normals(
    keys: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """What `initial_value` would draw for each parameter, bit for bit, by name, float32.

    None of them where JAX's random bits are not Threefry's of every position, its default.

    Args:
        keys: of the parameters.
        specs: their declarations.
        shapes: a size for every axis of the spec.
    """
    names = [name for name, spec in specs.items() if spec.role not in VECTORS]
    if not (
        names
        and jax.config.jax_default_prng_impl == "threefry2x32"
        and jax.config.jax_threefry_partitionable
    ):  # pyright: ignore
        return {}
    stacked = [name for name in names if specs[name].stacked]
    rows = {name: keys[name][None] for name in names}
    if stacked:
        most = max(shapes[name][0] for name in stacked)
        each = jax.vmap(_layer_keys, (0, None))(jnp.stack([keys[name] for name in stacked]), most)
        rows |= {name: of[: shapes[name][0]] for name, of in zip(stacked, each, strict=True)}
    sizes = {name: math.prod(shapes[name]) // len(rows[name]) for name in names}
    blocks = {name: -(-sizes[name] // _BLOCK) for name in names}
    data = jax.random.key_data(jnp.concatenate([rows[name] for name in names]))
    data = data[
        np.repeat(np.arange(len(data)), [blocks[name] for name in names for _ in rows[name]])
    ]
    numbers = np.concatenate(
        [np.tile(np.arange(blocks[name], dtype=np.uint32), len(rows[name])) for name in names]
    )

    def block(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        key, number = of  # the position of a number has 64 bits
        high = jnp.full(_BLOCK, number >> (32 - _BLOCK_BITS))
        low = (number << _BLOCK_BITS) | jnp.arange(_BLOCK, dtype=jnp.uint32)
        first, second = threefry_2x32((key[0], key[1]), jnp.concatenate([high, low])).reshape(
            2, _BLOCK
        )
        return first ^ second

    bits, start, drawn = jax.lax.map(block, (data, numbers)), 0, {}
    for name in names:
        stop = start + len(rows[name]) * blocks[name]
        drawn[name] = _normal(
            bits[start:stop].reshape(len(rows[name]), -1)[:, : sizes[name]].reshape(shapes[name])
        )
        start = stop
    return drawn


def _normal(bits: jax.Array) -> jax.Array:
    """uint32 to Normal(0, 1) as in `jax.random.normal`: 23 bits to (-1, 1), and sqrt(2) times the inverse of erf."""
    low, one = np.nextafter(np.float32(-1), np.float32(0)), np.float32(1)
    uniform = jax.lax.bitcast_convert_type((bits >> 9) | one.view(np.uint32), jnp.float32) - one
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (one - low) + low))


class Factor(nnx.Variable):
    """A float32 number the forward pass multiplies by (attention logits, branches), with its `FactorSpec`'s kind and spec.

    A parameterization sets it; nothing trains or saves it.
    """


class Init:
    """Makes what a config declares, in one scope of its module tree.

    Args:
        config: declares parameters, factors and sizes.
        rngs: source of the `params` stream; None: parameters and factors are shapes alone.
        prefix: the scope's path, with a dot at its end.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None, prefix: str = "") -> None:
        self._config, self._rngs, self._prefix = config, rngs, prefix
        self._specs, self._sizes = config.parameters(), config.sizes()

    def scope(self, name: str) -> Init:
        """The same config's `Init` for the module kept as `name`."""
        return Init(self._config, self._rngs, f"{self._prefix}{name}.")

    def param(self, name: str) -> nnx.Param:
        """The parameter of this name as it starts without a preset: at fan_in^-1/2 (1 where there is none), biases at 0."""
        spec = self._specs[self._prefix + name]
        shape, dtype = (
            tuple(self._sizes[axis] for axis in spec.axes),
            jnp.dtype(self._config.compute.param_dtype),
        )
        if self._rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)
        std = (
            0.0
            if spec.role in ZERO
            else spec.start * math.prod(self._sizes[axis] for axis in spec.fan_in) ** -0.5
        )
        return nnx.Param(initial_value(self._rngs.params(), spec, shape, std, dtype), spec=spec)

    def has(self, name: str) -> bool:
        """Whether the config declares a parameter of this name."""
        return self._prefix + name in self._specs

    def maybe(self, name: str) -> nnx.Param | None:
        """The parameter of this name, None where the config declares none."""
        return self.param(name) if self.has(name) else None

    def factor(self, name: str) -> Factor:
        """The multiplier of this name, at its value without a preset."""
        spec = self._config.factors()[self._prefix + name]
        shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        value = shape if self._rngs is None else jnp.full(spec.shape, spec.value, jnp.float32)
        return Factor(value, kind=spec.kind, spec=spec.spec, stack=spec.stack)


class ScaledParam(NamedTuple):
    """A parameter times its multiplier, not multiplied yet: of a stack or, inside of the loop over its layers, of one of them."""

    weight: jax.Array
    """As it is stored, w."""
    multiplier: jax.Array
    """a, float32; its dimensions are the first of w's."""

    def array(self) -> jax.Array:
        """a * w, in w's dtype."""
        a = self.multiplier.reshape(
            self.multiplier.shape + (1,) * (self.weight.ndim - self.multiplier.ndim)
        )
        return (self.weight * a).astype(self.weight.dtype)


def multiplied(params: Mapping[str, Any], multipliers: Mapping[str, Any]) -> dict[str, jax.Array]:
    """a * w for every parameter w, in its dtype.

    Args:
        params: w by name.
        multipliers: a by the same names, [] or [layers].
    """
    return {name: ScaledParam(w, multipliers[name]).array() for name, w in params.items()}


@dataclasses.dataclass(frozen=True)
class Definition:
    """A model without its numbers.

    Attributes:
        graph: NNX graph definition.
        specs: name to declaration, one per parameter.
        abstract: name to shape and dtype.
        factors: name to `Factor` metadata ("kind", "shape", "spec", "stack") of every forward multiplier.
        sizes: size of every logical axis.
    """

    graph: nnx.GraphDef
    specs: dict[str, ParamSpec]
    abstract: dict[str, jax.ShapeDtypeStruct]
    factors: dict[str, dict[str, Any]]
    sizes: dict[str, int]

    def bind(
        self, params: Mapping[str, Any], factors: Mapping[str, Any], *, layout: Layout = ONE_DEVICE
    ) -> nnx.Module:
        """The model with these numbers; multipliers must already be in `params` (see `apply`).

        A skip factor that is not given is the constant 1, which the compiler removes. As data it would cost a twentieth of
        the step's memory traffic: a sum with a scaled stream is no longer written by the product that ends the branch.

        Args:
            params: arrays by name.
            factors: numbers of the forward pass by name (`mupax.train.core.factors.Factors.forward`).
            layout: how arrays lie on devices. Modules with a field `layout` get it; a module without one computes as on one device.
        """
        ones = {
            n: np.ones(f["shape"], np.float32)
            for n, f in self.factors.items()
            if f["kind"] == "skip"
        }
        variables = {name: Factor(value) for name, value in {**ones, **factors}.items()}
        params = layout.gather_outside_layers(params, self.specs)
        variables |= {
            name: nnx.Param(value, spec=self.specs[name]) for name, value in params.items()
        }
        module = nnx.merge(
            self.graph, nnx.from_flat_state({_path(name): leaf for name, leaf in variables.items()})
        )
        if layout is not ONE_DEVICE:
            place(module, layout)
        return module

    def model(
        self,
        params: Mapping[str, jax.Array],
        multipliers: Arrays,
        factors: Arrays,
        *,
        layout: Layout = ONE_DEVICE,
    ) -> Any:
        """The model with every parameter taken as multiplier * w.

        Of a matrix that a layout reads by layer the product is taken there. Before the loop over layers the compiler would keep
        it of all of them, in the type of products, through the whole step.

        Args:
            params: as they are stored, w.
            multipliers: float32 [] or [layers], by the same names.
            factors, layout: as `bind`.
        """
        by_layer = {name: w for name, w in params.items() if layout.by_layer(self.specs[name])}
        rest = {name: w for name, w in params.items() if name not in by_layer}
        later = {
            n: ScaledParam(w, jnp.broadcast_to(multipliers[n], w.shape[:1]))
            for n, w in by_layer.items()
        }
        return self.bind({**multiplied(rest, multipliers), **later}, factors, layout=layout)

    def apply(
        self,
        params: Mapping[str, jax.Array],
        multipliers: Arrays,
        factors: Arrays,
        *inputs: jax.Array,
        layout: Layout = ONE_DEVICE,
    ) -> Any:
        """Return `model(params, multipliers, factors, layout=layout)(*inputs)`: float32 logits.

        Args:
            params: as they are stored.
            multipliers: as `model`.
            factors, layout: as `bind`.
            *inputs: what the module's call takes: tokens [batch, position], or images [batch, height, width, channel].
        """
        return self.model(params, multipliers, factors, layout=layout)(*inputs)

    def initialize(
        self,
        seed: jax.Array | int,
        stds: Mapping[str, jax.Array | float],
        draw: Callable | None = None,
    ) -> Arrays:
        """Fresh parameters, each from its own key (seed, name): the same bits on every mesh. Call under `jax.jit`.

        Args:
            seed: uint32 [].
            stds: standard deviation, of gains the value, float32 [] or [layers] by name; whom names after `SHARED_INIT` start as.
            draw: `normals`, to draw all numbers at once; each parameter's by themselves unless given.
        """
        each = [
            stds.get(SHARED_INIT + name, np.uint32(zlib.crc32(name.encode())))
            for name in self.specs
        ]
        sums = jnp.array(each, jnp.uint32)
        keys = dict(
            zip(
                self.specs,
                jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), sums),
                strict=True,
            )
        )
        normals = (
            draw(keys, self.specs, {name: leaf.shape for name, leaf in self.abstract.items()})
            if draw
            else {}
        )
        return {
            name: initial_value(
                keys[name], self.specs[name], leaf.shape, stds[name], leaf.dtype, normals.get(name)
            )
            for name, leaf in self.abstract.items()
        }

    @property
    def tied_readout(self) -> ParamSpec | None:
        """Declaration of a readout that shares the token embedding's table; None for any other model."""
        return next(
            (factor["spec"] for factor in self.factors.values() if factor["kind"] == "readout"),
            None,
        )

    def count(self) -> int:
        """Trainable numbers."""
        return sum(leaf.size for leaf in self.abstract.values())


def define(make: Callable[[], nnx.Module], *, sizes: Mapping[str, int] | None = None) -> Definition:
    """A model taken apart, without allocating it.

    Args:
        make: builds the model, e.g. `lambda: MyModel(rngs=nnx.Rngs(0))`.
        sizes: logical sizes that no parameter shows, such as "layers" of a stack kept as separate modules.

    Raises:
        PresetError: a parameter without a spec, a spec that does not fit its array, an axis with two sizes, or
            state that is neither `nnx.Param` nor `Factor`.
    """
    return _definition(nnx.eval_shape(make), sizes or {})


def _definition(shapes: nnx.Module, sizes: Mapping[str, int]) -> Definition:
    graph, state = nnx.split(shapes)
    specs, abstract, factors = {}, {}, {}
    axes: dict[str, tuple[int, str]] = {
        axis: (size, "the sizes given") for axis, size in sizes.items()
    }
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        leaf, metadata = variable.get_value(), variable.get_metadata()
        if isinstance(variable, Factor):
            of = {key: metadata.get(key) for key in ("spec", "stack")}
            factors[name] = {"kind": metadata["kind"], "shape": leaf.shape, **of}
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
                raise PresetError(
                    f"axis {axis!r} is {size} in {name} but {axes[axis][0]} in {axes[axis][1]}"
                )
        specs[name], abstract[name] = spec, jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    return Definition(
        graph, specs, abstract, factors, {axis: size for axis, (size, _) in axes.items()}
    )


def definition(config: ModelConfig) -> Definition:
    """The model of a config without its numbers; nothing is allocated.

    Raises:
        PresetError: the module's parameters are not those that the config declares.
    """
    model, declared = _definition(config.module(None), config.sizes()), config.parameters()
    for name in sorted(declared.keys() | model.specs.keys()):
        if declared.get(name) != model.specs.get(name):
            raise PresetError(
                f"{name}: the config of {config.family} declares {declared.get(name, 'no such parameter')}, and its module "
                f"makes {model.specs.get(name, 'none')}; make it with init.param({name.rpartition('.')[2]!r})"
            )
    return model


def _path(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
