"""NNX modules and their declarations: `Init` makes a module's parameters, `define` splits a module.

In a module, `self.query = init.param("query")` makes the `nnx.Param` that the config declares under
that name. `define` splits any NNX module whose every `nnx.Param` carries a `spec` into a
`Definition`, whose parameter names are paths joined by dots.
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
from mupax.zoo import families
from mupax.zoo.families import ModelConfig
from mupax.zoo.partition import ONE_DEVICE, Layout, place

_BLOCK_BITS = 14
_BLOCK = 1 << _BLOCK_BITS
"""Number of random numbers that one iteration of the loop in `normals` draws."""

Arrays = dict[str, Any]
"""Arrays, or their shapes, by name of the parameter or factor."""
SHARED_INIT = "like "
"""Prefix of keys in the `stds` of `Definition.initialize` that let parameters share random draws.

`stds["like NAME"]` is the `zlib.crc32` hash of another parameter's name. Parameter NAME is then
drawn with the random key of that other parameter.
"""


def initial_value(
    key: jax.Array,
    spec: ParamSpec,
    shape: tuple[int, ...],
    std: jax.Array | float,
    dtype: jnp.dtype,
    normal: jax.Array | None = None,
) -> jax.Array:
    """Draw a parameter's initial value: std times unit-variance noise of the declared distribution.

    Gains and biases are not random: every entry is std. With a leading "layers" axis, every layer
    draws from its own key, folded from `key` by its index. A layer's values therefore depend
    neither on the number of layers nor on the mesh.

    Args:
        key: Random key of this parameter, [].
        shape: One size for every axis of `spec`.
        std: Standard deviation (gain: value) [], or [layers] for a stacked parameter; 0 for a bias.
        dtype: Storage type. Draws are float32.
        normal: Standard normal draws of this shape, if `normals` has made them already.
    """
    # Draw each array whole. The vector instructions of a CPU leave over some entries of a row,
    # which jax 0.12 rounds differently. Splitting a row changes which entries these are, and layers
    # drawn one by one would then differ from stacked layers in the last bit.
    if spec.stacked:
        std_L = jnp.broadcast_to(jnp.asarray(std, jnp.float32), shape[:1])
        std = std_L.reshape(-1, *[1] * (len(shape) - 1))
    if spec.role in VECTORS:
        return jnp.broadcast_to(jnp.asarray(std, dtype), shape)
    if normal is None and spec.stacked:
        layer_keys = _layer_keys(key, shape[0])
        normal = jax.vmap(lambda layer_key: jax.random.normal(layer_key, shape[1:]))(layer_keys)
    elif normal is None:
        normal = jax.random.normal(key, shape)
    return (std * _with_distribution(normal, spec.distribution)).astype(dtype)


_CUT = 2.0
"""Largest absolute value of the truncated normal distribution, in standard deviations."""
_CUT_DEVIATION = math.sqrt(
    1 - 2 * _CUT * math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi) / math.erf(_CUT / math.sqrt(2))
)
"""Standard deviation of a normal distribution truncated at `_CUT`: 0.8796."""


def _with_distribution(normal: jax.Array, distribution: Distribution) -> jax.Array:
    """Map standard normal draws to another distribution of variance 1, quantile by quantile.

    "uniform" is uniform in ±3^1/2, as in Glorot and Bengio 2010. "truncated" is what Flax's
    truncated normal initializers draw.
    """
    if distribution == "normal":
        return normal
    # erf(x / 2^1/2) is 2 cdf(x) - 1, which is uniform in (-1, 1) for normal x.
    uniform = jax.lax.erf(normal / math.sqrt(2))
    if distribution == "uniform":
        return math.sqrt(3) * uniform
    return math.sqrt(2) / _CUT_DEVIATION * jax.lax.erf_inv(uniform * math.erf(_CUT / math.sqrt(2)))


def _layer_keys(key: jax.Array, layers: int) -> jax.Array:
    """Return one key per layer, folded from `key` by the layer's index."""
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))


class _Rows(NamedTuple):
    """Rows of one parameter. A row is what one key draws: a layer, or an unstacked parameter."""

    count: int
    """Number of rows."""
    size: int
    """Numbers in a row."""
    blocks: int
    """Number of blocks of `_BLOCK` numbers that cover a row. The last may have some to spare."""


def normals(
    keys: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """Draw the standard normal numbers of all parameters in one loop, float32 by name.

    One loop compiles faster than a draw per parameter. `initial_value` makes initial values from
    the numbers. They equal those that it would draw from the same keys itself, bit for bit. Gains
    and biases, which are not random, are left out. The result is empty if JAX does not use its
    default generator, Threefry with independent bits for every position
    (`jax_threefry_partitionable`).

    Args:
        keys: Random keys by parameter name, each [].
        specs: Declarations by parameter name. Only `keys` and `shapes` of these names are read.
        shapes: Shapes by parameter name, with one size for every axis of the spec.
    """
    # Compiling one draw takes 0.4 s on CPU, so one loop makes the random bits of all parameters.
    # Bits are integers, the same however they are computed. They become normal numbers parameter by
    # parameter, by the operations of `jax.random.normal`.
    names = [name for name, spec in specs.items() if spec.role not in VECTORS]
    default_generator = (
        jax.config.jax_default_prng_impl == "threefry2x32"  # pyright: ignore
        and jax.config.jax_threefry_partitionable  # pyright: ignore
    )
    if not names or not default_generator:
        return {}

    row_keys = {name: keys[name][None] for name in names}
    stacked = [name for name in names if specs[name].stacked]
    if stacked:
        # The deepest stack's keys serve all: a layer's key does not depend on the depth.
        most_layers = max(shapes[name][0] for name in stacked)
        stacked_keys = jnp.stack([keys[name] for name in stacked])
        layer_keys = jax.vmap(_layer_keys, (0, None))(stacked_keys, most_layers)
        for name, keys_L in zip(stacked, layer_keys, strict=True):
            row_keys[name] = keys_L[: shapes[name][0]]

    # Rows are drawn in blocks. The bits of a block depend only on the key of its row and on the
    # index of the block in the row.
    rows: dict[str, _Rows] = {}
    blocks_per_row = []
    block_indices = []
    for name in names:
        count = len(row_keys[name])
        size = math.prod(shapes[name]) // count
        blocks = -(-size // _BLOCK)
        rows[name] = _Rows(count, size, blocks)
        blocks_per_row += [blocks] * count
        block_indices += [np.arange(blocks, dtype=np.uint32)] * count
    key_data = jax.random.key_data(jnp.concatenate([row_keys[name] for name in names]))
    block_keys = key_data[np.repeat(np.arange(len(key_data)), blocks_per_row)]
    bits = jax.lax.map(_block_bits, (block_keys, np.concatenate(block_indices)))

    # The last block of a row may have excess bits, which the slice drops.
    drawn = {}
    start = 0
    for name, (count, size, blocks) in rows.items():
        stop = start + count * blocks
        row_bits = bits[start:stop].reshape(count, -1)[:, :size]
        drawn[name] = _normal_from_bits(row_bits.reshape(shapes[name]))
        start = stop
    return drawn


def _block_bits(key_and_index: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the random bits of one block of a row, uint32 [_BLOCK].

    A row is all numbers that one random key draws, and a block is `_BLOCK` consecutive ones. The
    bits equal those that JAX's default generator makes for the row.

    Args:
        key_and_index: Data of the row's key, uint32 [2], and index of the block in its row, [].
    """
    key, index = key_and_index
    # Threefry encrypts the position of an entry in its row, as two words of 32 bits.
    high = jnp.full(_BLOCK, index >> (32 - _BLOCK_BITS))
    low = (index << _BLOCK_BITS) | jnp.arange(_BLOCK, dtype=jnp.uint32)
    key_words = (key[0], key[1])
    words = threefry_2x32(key_words, jnp.concatenate([high, low]))
    first, second = words.reshape(2, _BLOCK)
    return first ^ second


def _normal_from_bits(bits: jax.Array) -> jax.Array:
    """Turn random bits, uint32, into standard normal numbers as `jax.random.normal` does.

    23 bits make a uniform number in (-1, 1), and sqrt(2) times its inverse erf is normal.
    """
    # erf_inv(-1) is -inf, so the lowest value is the next one above -1.
    low = np.nextafter(np.float32(-1), np.float32(0))
    one = np.float32(1)
    # The bits become the mantissa of a float32 in [1, 2).
    uniform = jax.lax.bitcast_convert_type((bits >> 9) | one.view(np.uint32), jnp.float32) - one
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (one - low) + low))


class Factor(nnx.Variable):
    """Float32 number that the forward pass multiplies by, such as the scale of attention logits.

    Its metadata are the fields "kind", "spec" and "stack" of its `FactorSpec`. A parameterization
    sets it. It is neither trained nor saved.
    """


class Init:
    """Factory of the parameters and factors that a config declares in one scope of its modules.

    Args:
        config: Config that declares parameters, factors and sizes.
        rngs: Source of the `params` stream. `None` makes shapes instead of arrays.
        prefix: Path of the scope, a submodule, with a dot at its end: "block.attention.". The empty
            prefix is the whole model.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs | None, prefix: str = "") -> None:
        self._config = config
        self._rngs = rngs
        self._prefix = prefix
        self._specs = config.parameters()
        self._sizes = config.sizes()

    def scope(self, name: str) -> Init:
        """Return the `Init` for the submodule kept in the attribute `name`."""
        # Scopes share one source of random keys, so no two parameters draw with the same key.
        return Init(self._config, self._rngs, f"{self._prefix}{name}.")

    def param(self, name: str) -> nnx.Param:
        """Make the declared parameter of this name, with the initial value used without a preset.

        A matrix has standard deviation fan_in^-1/2, an embedding 1. Gains begin at `spec.start`,
        biases and the second matrix of an adapter (LoRA) at 0. Without `rngs`, the parameter holds
        a shape.

        Raises:
            PresetError: The config declares no parameter of this name.
        """
        path = self._prefix + name
        if path not in self._specs:
            raise PresetError(
                f"{path}: the module makes it, and the config of {self._config.family} declares "
                "no such parameter; add it to parameters()"
            )
        spec = self._specs[path]
        shape = tuple(self._sizes[axis] for axis in spec.axes)
        dtype = jnp.dtype(self._config.compute.param_dtype)
        if self._rngs is None:
            return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)
        if spec.role in ZERO:
            std = 0.0
        else:
            std = spec.start * math.prod(self._sizes[axis] for axis in spec.fan_in) ** -0.5
        value = initial_value(self._rngs.params(), spec, shape, std, dtype)
        return nnx.Param(value, spec=spec)

    def has(self, name: str) -> bool:
        """Return True if the config declares a parameter of this name in this scope."""
        return self._prefix + name in self._specs

    def maybe(self, name: str) -> nnx.Param | None:
        """Make a parameter if the config declares it, otherwise return `None`."""
        if not self.has(name):
            return None
        return self.param(name)

    def factor(self, name: str) -> Factor:
        """Make the declared factor of this name, with the value that it has without a preset.

        Without `rngs`, the factor holds a shape.
        """
        spec = self._config.factors()[self._prefix + name]
        if self._rngs is None:
            value = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
        else:
            value = jnp.full(spec.shape, spec.value, jnp.float32)
        return Factor(value, kind=spec.kind, spec=spec.spec, stack=spec.stack)


class ScaledParam(NamedTuple):
    """Parameter and its multiplier, not multiplied yet.

    It holds all layers of a stack or, inside the loop over layers, one of them.
    """

    weight: jax.Array
    """Stored array w."""
    multiplier: jax.Array
    """Multiplier a, float32. Its dimensions are the first ones of `weight`."""

    def array(self) -> jax.Array:
        """Return a * w in the dtype of w."""
        # A multiplier per layer belongs to the first axis, where broadcasting would take the last.
        trailing = self.weight.ndim - self.multiplier.ndim
        a = self.multiplier.reshape(self.multiplier.shape + (1,) * trailing)
        return (self.weight * a).astype(self.weight.dtype)


def multiplied(params: Mapping[str, Any], multipliers: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return every parameter times its multiplier, in the parameter's dtype.

    Args:
        params: Arrays by name as they are stored, without multipliers.
        multipliers: Multipliers by the same names, [] or [layers].
    """
    return {name: ScaledParam(w, multipliers[name]).array() for name, w in params.items()}


@dataclasses.dataclass(frozen=True)
class Definition:
    """Model without arrays: its graph, and the declarations and shapes of its parameters.

    Attributes:
        graph: NNX graph definition.
        specs: Declaration of every parameter, by name.
        abstract: Shape and dtype of every parameter, by name.
        factors: Metadata of every `Factor` by name. The keys "kind", "shape", "spec" and "stack"
            have the meaning of the fields of `mupax.presets.roles.FactorSpec`.
        sizes: Size of every logical axis.
    """

    graph: nnx.GraphDef
    specs: dict[str, ParamSpec]
    abstract: dict[str, jax.ShapeDtypeStruct]
    factors: dict[str, dict[str, Any]]
    sizes: dict[str, int]

    def bind(
        self, params: Mapping[str, Any], factors: Mapping[str, Any], *, layout: Layout = ONE_DEVICE
    ) -> nnx.Module:
        """Return the module with these parameters and factors. `model` also applies multipliers.

        Args:
            params: Arrays by name, already times their multipliers or as `ScaledParam`.
            factors: Values of the factors by name (`mupax.train.core.factors.Factors.forward`). A
                skip factor that is missing is 1.
            layout: Placement of arrays on devices. Modules with a field `layout` get it. A module
                without the field computes as on one device.
        """
        # A missing skip factor is the constant 1, which the compiler removes. As an argument of the
        # step it would add 5 % of memory traffic, because the compiler would no longer add the
        # residual stream inside the matrix product that ends a branch.
        variables: dict[str, nnx.Variable] = {}
        for name, metadata in self.factors.items():
            if metadata["kind"] == "skip":
                variables[name] = Factor(np.ones(metadata["shape"], np.float32))
        for name, value in factors.items():
            variables[name] = Factor(value)
        params = layout.gather_outside_layers(params, self.specs)
        for name, value in params.items():
            variables[name] = nnx.Param(value, spec=self.specs[name])

        state = nnx.from_flat_state({_path(name): leaf for name, leaf in variables.items()})
        module = nnx.merge(self.graph, state)
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
        """Return the module in which every parameter w acts as multiplier * w.

        Args:
            params: Arrays by name as they are stored, without multipliers.
            multipliers: Multipliers by the same names, float32 [] or [layers].
            factors: Values of the factors by name, as in `bind`.
            layout: Placement of arrays on devices, as in `bind`.
        """
        by_layer = {name: w for name, w in params.items() if layout.by_layer(self.specs[name])}
        rest = {name: w for name, w in params.items() if name not in by_layer}

        # Under manual FSDP a stacked matrix is multiplied inside the loop over layers. Multiplied
        # before the loop, the matrices of all layers would stay in memory in the dtype of the
        # products for the whole step.
        scaled = {}
        for name, w in by_layer.items():
            scaled[name] = ScaledParam(w, jnp.broadcast_to(multipliers[name], w.shape[:1]))
        return self.bind({**multiplied(rest, multipliers), **scaled}, factors, layout=layout)

    def apply(
        self,
        params: Mapping[str, jax.Array],
        multipliers: Arrays,
        factors: Arrays,
        *inputs: jax.Array,
        layout: Layout = ONE_DEVICE,
    ) -> Any:
        """Bind the module as `model` does and call it. Return its result, such as float32 logits.

        Args:
            params: Arrays by name as they are stored, without multipliers.
            multipliers: Multipliers by the same names, as in `model`.
            factors: Values of the factors by name, as in `bind`.
            *inputs: Arguments of the module's call: tokens [batch, position], or images
                [batch, height, width, channel].
            layout: Placement of arrays on devices, as in `bind`.
        """
        return self.model(params, multipliers, factors, layout=layout)(*inputs)

    def initialize(
        self,
        seed: jax.Array | int,
        stds: Mapping[str, jax.Array | float],
        draw: Callable | None = None,
    ) -> Arrays:
        """Draw all parameters, each from a key made of the seed and the parameter's name.

        The bits are the same on every mesh. Call this function under `jax.jit`.

        Args:
            seed: uint32 [].
            stds: Standard deviations (gains: values) by name, float32 [] or [layers]. An entry
                `SHARED_INIT` + NAME makes parameter NAME share the random draws of another one. Its
                value is the `zlib.crc32` of the other one's name.
            draw: `normals`, to draw all numbers in one loop. By default every parameter is drawn by
                itself.
        """
        name_hashes = []
        for name in self.specs:
            own_hash = np.uint32(zlib.crc32(name.encode()))
            # A hash of the name, not the parameter's index: adding a parameter to the model must
            # not change the draws of the others.
            name_hashes.append(stds.get(SHARED_INIT + name, own_hash))
        hashes = jnp.array(name_hashes, jnp.uint32)
        param_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), hashes)
        keys = dict(zip(self.specs, param_keys, strict=True))

        normal_draws = {}
        if draw is not None:
            shapes = {name: leaf.shape for name, leaf in self.abstract.items()}
            normal_draws = draw(keys, self.specs, shapes)
        params = {}
        for name, leaf in self.abstract.items():
            params[name] = initial_value(
                keys[name],
                self.specs[name],
                leaf.shape,
                stds[name],
                leaf.dtype,
                normal_draws.get(name),
            )
        return params

    @property
    def tied_readout(self) -> ParamSpec | None:
        """Declaration of a readout that shares the token embedding's table. `None` without one."""
        for factor in self.factors.values():
            if factor["kind"] == "readout":
                return factor["spec"]
        return None

    def count(self) -> int:
        """Return the number of entries of all parameters together."""
        return sum(leaf.size for leaf in self.abstract.values())


def define(make: Callable[[], nnx.Module], *, sizes: Mapping[str, int] | None = None) -> Definition:
    """Build a model's shapes without allocating arrays, and split them into a `Definition`.

    Args:
        make: Function that builds the model, such as `lambda: MyModel(rngs=nnx.Rngs(0))`.
        sizes: Sizes of logical axes that no parameter shows, such as "layers" for a stack that is
            kept as separate modules.

    Raises:
        PresetError: If a parameter has no spec or one that does not fit its array, if an axis has
            two sizes, or if there is state other than `nnx.Param` and `Factor`.
    """
    return _definition_of(nnx.eval_shape(make), sizes or {})


def _definition_of(module: nnx.Module, sizes: Mapping[str, int]) -> Definition:
    """Split a module, whose leaves are shapes, into a `Definition`.

    Args:
        sizes: Sizes of logical axes that are known already. Arrays are checked against them.

    Raises:
        PresetError: For the reasons that `define` lists.
    """
    graph, state = nnx.split(module)
    specs: dict[str, ParamSpec] = {}
    abstract: dict[str, jax.ShapeDtypeStruct] = {}
    factors: dict[str, dict[str, Any]] = {}
    axis_sizes = dict(sizes)
    size_sources = dict.fromkeys(sizes, "the sizes given")
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        leaf = variable.get_value()
        metadata = variable.get_metadata()
        if isinstance(variable, Factor):
            factors[name] = {
                "kind": metadata["kind"],
                "shape": leaf.shape,
                "spec": metadata.get("spec"),
                "stack": metadata.get("stack"),
            }
            continue

        if not isinstance(variable, nnx.Param):
            raise PresetError(
                f"{name} is {type(variable).__name__}; only nnx.Param and Factor state can be "
                "trained here"
            )
        spec = metadata.get("spec")
        if not isinstance(spec, ParamSpec):
            raise PresetError(
                f"parameter {name} {leaf.shape} has no spec; write nnx.Param(value, "
                "spec=ParamSpec(role=..., axes=...))"
            )
        if len(spec.axes) != len(leaf.shape):
            raise PresetError(
                f"parameter {name} has shape {leaf.shape} but axes {spec.axes}; name one axis per "
                "dimension"
            )
        for axis, size in zip(spec.axes, leaf.shape, strict=True):
            if axis not in axis_sizes:
                axis_sizes[axis] = size
                size_sources[axis] = name
            if axis_sizes[axis] != size:
                raise PresetError(
                    f"axis {axis!r} is {size} in {name} but {axis_sizes[axis]} in "
                    f"{size_sources[axis]}"
                )
        specs[name] = spec
        abstract[name] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    return Definition(graph, specs, abstract, factors, axis_sizes)


def definition(config: ModelConfig) -> Definition:
    """Return the definition of a config's model. No arrays are allocated.

    Raises:
        PresetError: If the module's parameters are not exactly those that the config declares.
        ConfigError: If a parameter has an axis without a size.
    """
    # Before the module is built, which would end in a KeyError of the axis.
    families.shapes(config)
    model = _definition_of(config.module(None), config.sizes())
    declared = config.parameters()
    for name in sorted(declared.keys() | model.specs.keys()):
        if declared.get(name) != model.specs.get(name):
            attribute = name.rpartition(".")[2]
            raise PresetError(
                f"{name}: the config of {config.family} declares "
                f"{declared.get(name, 'no such parameter')}, and its module makes "
                f"{model.specs.get(name, 'none')}; make it with init.param({attribute!r})"
            )
    return model


def _path(name: str) -> tuple[str | int, ...]:
    """Split a parameter's name into its path in the module. Numbers are indices of a list."""
    path: list[str | int] = []
    for part in name.split("."):
        if part.isdigit():
            path.append(int(part))
        else:
            path.append(part)
    return tuple(path)
