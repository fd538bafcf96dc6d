"""Muon: orthogonalized momentum for hidden matrices, Adam for all other parameters.

Muon replaces the momentum of a matrix by its nearest orthogonal matrix. On a mesh each device
computes that for whole matrices of its own, so that no iteration communicates. Matrices travel
twice: their parts are exchanged by an all-to-all before the iterations, and the results by another
one after them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Role
from mupax.presets.roles import ADAPTERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.optimizer import Specs, adam
from mupax.zoo.partition import ONE_DEVICE, Layout

Coefficients = Sequence[tuple[float, float, float]]
"""Triple (a, b, c) of every iteration."""

NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of five iterations of Jordan et al. 2024 (modded-nanogpt)."""


def _with_margin(coefficients: Coefficients, margin: float) -> Coefficients:
    """Return coefficients for matrices whose singular values may exceed 1 by a factor `margin`."""
    return tuple((a / margin, b / margin**3, c / margin**5) for a, b, c in coefficients)


# The last triple of the paper's code has no margin, but it is the eighth.
POLAR_EXPRESS = _with_margin(
    (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ),
    1.01,
)
"""Coefficients of the first five iterations of Amsel et al. 2025 (2505.16932, algorithm 1).

Each is the best polynomial for the singular values that the iterations before it can leave, from
1e-3 on. The margin is for roundings in bfloat16.
"""
ORTHOGONALIZERS: dict[str, Coefficients] = {
    "newton_schulz": NEWTON_SCHULZ,
    "polar_express": POLAR_EXPRESS,
}
"""Coefficients by `OptimizerConfig.orthogonalizer`."""
ITERATIONS = "newton_schulz"
"""Name of the scope of the iterations, by which a compiled program tells their operations."""
_EPS = 1e-8


class ScaleByMuonState(NamedTuple):
    """State of `muon`."""

    count: jax.Array
    mu: optax.Updates
    """Momentum of every parameter."""
    nu: optax.Updates
    """Second moments of the parameters that use Adam. Matrices have an `optax.MaskedNode`."""


def muon(config: OptimizerConfig, specs: Specs) -> optax.GradientTransformationExtraArgs:
    """Return Muon's direction: orthogonalized Nesterov momentum for every hidden matrix.

    All other parameters get Adam's direction. The direction has no factor that depends on a
    matrix's shape, as `optax.contrib.muon` has (sqrt(max(1, out/in))). The preset's learning rate
    has that factor, once.

    Args:
        config: `momentum` is for the matrices, `b1` and `b2` for the other parameters.
        specs: Specs of the trained parameters. Their roles tell which are hidden matrices.
    """
    matrix_specs = hidden_matrices(specs)
    beta = config.momentum
    coefficients = ORTHOGONALIZERS[config.orthogonalizer]
    adam_direction = adam(config, specs)

    def init(params: optax.Params) -> ScaleByMuonState:
        def second_moment(path: tuple, w: jax.Array) -> jax.Array | optax.MaskedNode:
            if path[-1].key in matrix_specs:
                return optax.MaskedNode()
            return jnp.zeros_like(w)

        nu = jax.tree_util.tree_map_with_path(second_moment, params)
        return ScaleByMuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), nu)

    def matrices_of(tree: Mapping) -> dict:
        return {name: leaf for name, leaf in tree.items() if name in matrix_specs}

    def others_of(tree: Mapping) -> dict:
        return {name: leaf for name, leaf in tree.items() if name not in matrix_specs}

    def update(updates, state, params=None, *, factors, hyper, layout=ONE_DEVICE, **_):
        del params
        grads = matrices_of(updates)
        matrix_mu = optax.tree.update_moment(grads, matrices_of(state.mu), beta, 1)
        count = optax.safe_increment(state.count)
        # The next step's momentum, if it had this step's gradient again, as `optax.contrib` has it.
        mu_hat = optax.tree.bias_correction(matrix_mu, beta, optax.safe_increment(count))
        grad_hat = optax.tree.bias_correction(grads, beta, count)
        nesterov = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu_hat, grad_hat)
        matrix_updates = orthogonalize(
            nesterov, matrix_specs, layout=layout, coefficients=coefficients
        )

        adam_state: Any = optax.ScaleByAdamState(
            state.count, others_of(state.mu), others_of(state.nu)
        )
        other_updates, adam_state = cast("Any", adam_direction.update)(
            others_of(updates), adam_state, factors=factors, hyper=hyper
        )

        directions = {**matrix_updates, **other_updates}
        mu = {**matrix_mu, **adam_state.mu}
        nu = {**state.nu, **adam_state.nu}
        # Results have the order of the names in `updates`.
        directions = {name: directions[name] for name in updates}
        mu = {name: mu[name] for name in updates}
        return directions, ScaleByMuonState(adam_state.count, mu, nu)

    return optax.GradientTransformationExtraArgs(cast("Any", init), cast("Any", update))


def hidden_matrices(specs: Specs) -> dict[str, ParamSpec]:
    """Return the specs of the matrices that Muon orthogonalizes.

    A matrix is its fan-in axes against its fan-out axes. Other axes ("layers") count matrices.
    """
    not_hidden = VECTORS | EMBEDDINGS | ADAPTERS | {Role.READOUT, Role.ROUTER}
    return {name: spec for name, spec in specs.items() if spec.role not in not_hidden}


def with_adam_lr(lr: Mapping[str, Any], specs: Specs, adam_lr: Any, peak_lr: Any) -> dict[str, Any]:
    """Return learning-rate factors with which the Adam part of Muon peaks at `adam_lr`.

    All factors are relative to `peak_lr`, the peak of the matrices. Both peaks are thus data to
    the compiled step, and a sweep over either compiles once.

    Args:
        lr: Factor of every trained parameter, from the preset.
        specs: Specs that tell which parameters are hidden matrices.
        peak_lr: Number above 0. Like `adam_lr`, it may be traced.
    """
    ratio = adam_lr / peak_lr
    matrix_specs = hidden_matrices(specs)
    result = {}
    for name, factor in lr.items():
        if name in matrix_specs:
            result[name] = factor
        else:
            result[name] = factor * ratio
    return result


@dataclass(frozen=True)
class Sides:
    """Dimensions of an array as a stack of matrices [stack, s, t].

    Attributes:
        stack: Dimensions that count matrices, such as layers and experts.
        s: Dimensions of the side that FSDP splits. The parts that a device receives of a matrix are
            then runs of rows, and putting them together is free.
        t: Dimensions of the other side.
    """

    stack: tuple[int, ...]
    s: tuple[int, ...]
    t: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All dimensions in the order [stack, s, t]."""
        return (*self.stack, *self.s, *self.t)


def sides(spec: ParamSpec, layout: Layout) -> Sides:
    """Return which dimensions of a parameter are the two sides of its matrices.

    The sides follow from the rules of the layout and not from the mesh, so that a matrix is
    computed in the same way, and has the same bits, on every mesh.

    Args:
        spec: Spec of a hidden matrix. Its fan-in is one side, its fan-out the other.
    """
    fan_in = tuple(spec.axes.index(axis) for axis in spec.fan_in)
    fan_out = tuple(spec.axes.index(axis) for axis in spec.fan_out)
    stack = tuple(i for i in range(len(spec.axes)) if i not in (*fan_in, *fan_out))

    def is_split(side: tuple[int, ...]) -> bool:
        return "fsdp" in layout.rules.get(spec.axes[side[0]], ())

    if is_split(fan_out) and not is_split(fan_in):
        return Sides(stack, fan_out, fan_in)
    return Sides(stack, fan_in, fan_out)


@dataclass(frozen=True)
class Split:
    """Mesh axes that split one parameter's matrices.

    Attributes:
        s: Mesh axes that split the rows of every matrix.
        t: Mesh axes that split the columns.
        shared: Mesh axes that split nothing of the parameter. Their devices hold the same parts,
            and share the matrices among them.
    """

    s: tuple[str, ...]
    t: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter as the stack of matrices that is orthogonalized.

    Attributes:
        sides: Dimensions of the matrices.
        split: Mesh axes that split them.
        placed: Partition spec of the array while it is orthogonalized.
    """

    sides: Sides
    split: Split
    placed: PartitionSpec


def orthogonalize(
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    *,
    layout: Layout,
    coefficients: Coefficients = NEWTON_SCHULZ,
) -> dict[str, jax.Array]:
    """Return every matrix of every array orthogonalized, with the arrays' shapes and dtypes.

    The bits do not depend on the mesh.

    Args:
        arrays: Arrays by name, such as Muon's momenta, in global view.
        specs: Spec of every array, by the same names.
        layout: Placement of the arrays. Its `matrix_dtype` is the dtype in which matrices are
            exchanged and iterated.
        coefficients: Coefficients of the iterations (`newton_schulz`).
    """
    if not arrays:
        return {}
    parameters: dict[str, Parameter] = {}
    for name, array in arrays.items():
        parameters[name] = _parameter(specs[name], array.shape, layout)

    def local(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return _orthogonalize_parts(parts, parameters, layout, coefficients)

    if layout.mesh.size == 1:
        return local(dict(arrays))
    placed = {name: parameter.placed for name, parameter in parameters.items()}
    spread = jax.shard_map(
        local, mesh=layout.mesh, in_specs=(placed,), out_specs=placed, check_vma=False
    )
    return spread(dict(arrays))


def _parameter(spec: ParamSpec, shape: tuple[int, ...], layout: Layout) -> Parameter:
    """Return how one parameter is split over the mesh while it is orthogonalized."""
    dimensions = sides(spec, layout)
    names: list[tuple[str, ...]] = []
    for part in layout.sharding(spec.axes, shape).spec:
        names.append((part,) if isinstance(part, str) else tuple(part or ()))
    names += [()] * (len(shape) - len(names))

    # The exchange puts parts of a side's outermost dimension together. A mesh axis that splits an
    # inner dimension (only by a rule of the user's own) is gathered before and split after.
    for inner in (*dimensions.s[1:], *dimensions.t[1:]):
        names[inner] = ()

    used = set().union(*names)
    shared: list[str] = []
    for name, size in layout.mesh.shape.items():
        if size > 1 and name not in used and not _crosses_islands(layout.mesh, name):
            shared.append(name)
    split = Split(names[dimensions.s[0]], names[dimensions.t[0]], tuple(shared))
    return Parameter(dimensions, split, PartitionSpec(*names))


def _crosses_islands(mesh: jax.sharding.Mesh, axis: str) -> bool:
    """Return True if devices along a mesh axis are on different slices.

    Such devices repeat the work instead of sharing it, because the network between them is slow.
    """
    dimension = mesh.axis_names.index(axis)
    first = mesh.devices.take(0, dimension).flat[0]
    last = mesh.devices.take(-1, dimension).flat[0]
    # Devices of a CPU have no slice.
    return getattr(first, "slice_index", None) != getattr(last, "slice_index", None)


def _orthogonalize_parts(
    parts: dict[str, jax.Array],
    parameters: Mapping[str, Parameter],
    layout: Layout,
    coefficients: Coefficients,
) -> dict[str, jax.Array]:
    """Orthogonalize matrices of which this device holds parts.

    Matrices of equal shape are one stack, which zeros fill up to a multiple of the devices, so
    that every device has as many matrices. A parameter whose own matrices fill the devices is a
    stack of its own, which needs no copy.
    """
    stacks: dict[Any, list[str]] = {}
    matrices: dict[str, jax.Array] = {}
    for name, part in parts.items():
        parameter = parameters[name]
        matrices[name] = _as_matrices(part, parameter.sides)
        count = len(matrices[name])
        alone = count > 1 and count % _num_devices(parameter.split, layout) == 0
        key = name if alone else matrices[name].shape[1:]
        stacks.setdefault((key, parameter.split), []).append(name)

    results: dict[str, jax.Array] = {}
    for (_, split), names in stacks.items():
        dtype = layout.matrix_dtype or parts[names[0]].dtype
        stack = [matrices[name].astype(dtype) for name in names]
        joined = stack[0] if len(stack) == 1 else jnp.concatenate(stack)
        orthogonal = _orthogonalize_stack(joined, split, layout, coefficients)

        start = 0
        for name in names:
            stop = start + len(matrices[name])
            result = _from_matrices(orthogonal[start:stop], parts[name], parameters[name].sides)
            results[name] = result.astype(parts[name].dtype)
            start = stop
    return {name: results[name] for name in parts}


def _as_matrices(part: jax.Array, dimensions: Sides) -> jax.Array:
    """Return an array as its matrices, [number of matrices, s, t]."""
    sizes = [
        math.prod(part.shape[i] for i in group)
        for group in (dimensions.stack, dimensions.s, dimensions.t)
    ]
    return part.transpose(dimensions.order).reshape(sizes)


def _from_matrices(matrices: jax.Array, like: jax.Array, dimensions: Sides) -> jax.Array:
    """Return matrices as the array that `_as_matrices` took apart, with the shape of `like`."""
    order = dimensions.order
    ordered = matrices.reshape([like.shape[i] for i in order])
    return ordered.transpose(sorted(range(len(order)), key=order.__getitem__))


def _orthogonalize_stack(
    stack: jax.Array, split: Split, layout: Layout, coefficients: Coefficients
) -> jax.Array:
    """Orthogonalize a stack of matrices, one matrix per device at a time.

    Args:
        stack: This device's parts of the matrices, [number of matrices, s, t].
    """
    num_devices = _num_devices(split, layout)
    count = len(stack)
    if missing := -count % num_devices:
        zeros = jnp.zeros((missing, *stack.shape[1:]), stack.dtype)
        stack = jnp.concatenate([stack, zeros])

    def one_each(matrices: jax.Array) -> jax.Array:
        return _orthogonalize_one_each(matrices, split, layout, coefficients)

    if len(stack) == num_devices:
        return one_each(stack)[:count]
    # The exchange is inside of the loop: a device then holds one complete matrix at a time.
    rounds = stack.reshape(-1, num_devices, *stack.shape[1:])
    return jax.lax.map(one_each, rounds).reshape(stack.shape)[:count]


def _num_devices(split: Split, layout: Layout) -> int:
    """Return the number of devices among which a stack's matrices are distributed."""
    return math.prod(layout.mesh.shape[name] for name in (*split.s, *split.t, *split.shared))


def _orthogonalize_one_each(
    matrices: jax.Array, split: Split, layout: Layout, coefficients: Coefficients
) -> jax.Array:
    """Orthogonalize as many matrices as there are devices.

    Args:
        matrices: This device's parts of the matrices, [devices, s, t].
    """
    num_s = math.prod(layout.mesh.shape[name] for name in split.s)
    num_t = math.prod(layout.mesh.shape[name] for name in split.t)
    x = matrices
    if split.shared:
        # These devices hold the same parts. Each takes its share of the matrices.
        share = num_s * num_t
        start = jax.lax.axis_index(split.shared) * share
        x = jax.lax.dynamic_slice_in_dim(x, start, share)
    _, part_s, part_t = x.shape

    # Send every device the parts of its matrix: first columns, then rows.
    if split.t:
        x = jax.lax.all_to_all(x.reshape(num_t, num_s, part_s, part_t), split.t, 0, 0)
        x = x.transpose(1, 2, 0, 3).reshape(num_s, part_s, num_t * part_t)
    if split.s:
        x = jax.lax.all_to_all(x, split.s, 0, 0)
    x = x.reshape(num_s * part_s, num_t * part_t)

    # The barriers keep the compiler from fusing the exchange or a transposition into the
    # iterations, where it would round differently on different meshes.
    x = jax.lax.optimization_barrier(x)
    x = newton_schulz(x, coefficients)
    x = jax.lax.optimization_barrier(x)

    # Send the results back in the opposite order.
    x = x.reshape(num_s, part_s, num_t * part_t)
    if split.s:
        x = jax.lax.all_to_all(x, split.s, 0, 0)
    if split.t:
        x = x.reshape(num_s, part_s, num_t, part_t).transpose(2, 0, 1, 3)
        x = jax.lax.all_to_all(x, split.t, 0, 0)
    x = x.reshape(num_s * num_t, part_s, part_t)
    if split.shared:
        x = jax.lax.all_gather(x, split.shared, tiled=True)
    return x


@jax.named_scope(ITERATIONS)
def newton_schulz(x: jax.Array, coefficients: Coefficients = NEWTON_SCHULZ) -> jax.Array:
    """Return a matrix with the singular vectors of x and singular values near 1.

    Each iteration is X <- a X + b (X X') X + c (X X')^2 X, with the smaller of X X' and X' X.
    Products are summed in float32 and stored in the dtype of x.

    Args:
        x: Matrix [s, t], of any scale.
        coefficients: One triple (a, b, c) per iteration.
    """
    rows_are_few = x.shape[0] <= x.shape[1]
    wide = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(wide * wide)) + _EPS
    x = (wide / norm).astype(x.dtype)

    def product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)

    for a, b, c in coefficients:
        if rows_are_few:
            gram = product("st,ut->su", x, x).astype(x.dtype)
        else:
            gram = product("su,st->ut", x, x).astype(x.dtype)
        polynomial = (b * gram + c * product("ij,jk->ik", gram, gram)).astype(x.dtype)
        if rows_are_few:
            change = product("su,ut->st", polynomial, x)
        else:
            change = product("su,ut->st", x, polynomial)
        x = (a * x + change).astype(x.dtype)
    return x
