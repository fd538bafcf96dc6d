"""Muon: orthogonalized momentum for hidden matrices, Adam for all other parameters.

Muon replaces the momentum of a matrix by its nearest orthogonal matrix. On a mesh each device
computes that for whole matrices of its own, so that no iteration communicates. Matrices travel
twice: their parts are exchanged by an all-to-all before the iterations, and the results by another
one after them.

A preset may have blocks of a matrix orthogonalized apart, or each step divided by its measured
spectral norm (`MuonRule` of the presets). The device that has the whole matrix does both. Measuring
takes (4 k + 2) m n FLOPs for k iterations and a matrix with the sides m <= n. Orthogonalizing the
matrix takes 20 m^2 n + 10 m^3, or 8 m^2 n + 28 m^3 by Gram matrices, so measuring adds less than
1 / m of that at k = 1. The vectors of the power iterations are a part of the state. One all-gather
of vectors for each stack of matrices brings them together, after the loop over the matrices.
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

from mupax.mappings import drop_keys, select_keys
from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Role
from mupax.presets.preset import WHOLE_MATRICES, MatrixSteps
from mupax.presets.roles import ADAPTERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.optimizer import Specs, adam
from mupax.train.parallel.sharding import crosses_islands
from mupax.zoo.partition import ONE_DEVICE, Layout

Coefficients = Sequence[tuple[float, float, float]]
"""Triple (a, b, c) of every iteration X <- a X + b (X X') X + c (X X')^2 X."""

NEWTON_SCHULZ: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of five iterations of Jordan et al. 2024 (modded-nanogpt)."""


def _with_margin(coefficients: Coefficients, margin: float) -> Coefficients:
    """Return coefficients for matrices whose singular values may exceed 1 by a factor `margin`."""
    scaled = []
    for a, b, c in coefficients:
        scaled.append((a / margin, b / margin**3, c / margin**5))
    return tuple(scaled)


# The paper's code has eight triples, of which only the last has no margin. These are the first
# five, so all have it.
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
"""Name of the `jax.named_scope` of the orthogonalizing iterations, seen in traces and HLO."""
POWER_ITERATIONS = "power_iteration"
"""Name of the `jax.named_scope` in which power iterations measure spectral norms."""
GRAM_RATIO = 2
"""Ratio of a matrix's longer to its shorter side from which `newton_schulz` may use Gram matrices.

Products of Gram matrices take fewer FLOPs from a ratio of 1.5.
"""
_GRAM_RESTART = 2
"""Number of iterations after which the Gram matrix is computed from the matrix again.

Rounding errors of a Gram matrix grow from iteration to iteration. In float32 with one restart, the
result is within 1e-4 of that of float64 for singular values from 1 down to 0, as it is without Gram
matrices. Without a restart it is within 3e-3.
"""
WARMUP_STEPS = 100
"""Number of first steps with `WARMUP_ITERATIONS` of the power iteration.

A fixed number, because the length of a run's warm-up is data and no part of the program.
"""
WARMUP_ITERATIONS = 5
"""Power iterations of a first step (Qiu et al. 2025, 2512.05620). A later step has one."""
_EPS = 1e-8


class ScaleByMuonState(NamedTuple):
    """Optimizer state of `muon`: step count, momenta, and Adam's second moments."""

    count: jax.Array
    """Number of steps done, int32 []."""
    mu: optax.Updates
    """Momentum of every parameter."""
    nu: optax.Updates
    """Second moments of the parameters that use Adam. Matrices have an `optax.MaskedNode`."""


class ScaleByMeasuredMuonState(NamedTuple):
    """State of `muon` if each step is divided by its measured spectral norm.

    The fields `count`, `mu` and `nu` are those of `ScaleByMuonState`.
    """

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    vectors: dict[str, jax.Array]
    """Vector of the power iteration of every hidden matrix, float32 [stack axes, fan-in axes]."""


def muon(
    config: OptimizerConfig, specs: Specs, steps: MatrixSteps = WHOLE_MATRICES
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation to Muon's update: each hidden matrix's momentum, orthogonalized.

    The momentum is Nesterov's. All other parameters get Adam's update. Learning rate, weight decay
    and sign are applied later in the chain (`optimizer.build`). Unlike `optax.contrib.muon`, the
    update has no factor for a matrix's shape (sqrt(max(1, out/in))): the preset's learning rate has
    that factor.

    Args:
        config: `momentum` is for the matrices, `b1` and `b2` for the other parameters.
        specs: Specs of the trained parameters. Their roles tell which are hidden matrices.
        steps: Blocks of matrices, and whether norms are measured (`Preset.matrix_steps`).
    """
    matrix_specs = hidden_matrices(specs)
    beta = config.momentum
    coefficients = ORTHOGONALIZERS[config.orthogonalizer]
    adam_direction = adam(config, specs)

    def init(params: optax.Params) -> ScaleByMuonState | ScaleByMeasuredMuonState:
        def second_moment(path: tuple, w: jax.Array) -> jax.Array | optax.MaskedNode:
            if path[-1].key in matrix_specs:
                return optax.MaskedNode()
            return jnp.zeros_like(w)

        nu = jax.tree_util.tree_map_with_path(second_moment, params)
        count = jnp.zeros([], jnp.int32)
        mu = optax.tree.zeros_like(params)
        if not steps.measured:
            return ScaleByMuonState(count, mu, nu)
        # Made from sizes, not from `params`, so that no vector is sharded like its parameter.
        vectors = {}
        for name, spec in matrix_specs.items():
            axes = [spec.axes[i] for i in _vector_dims(spec)]
            vectors[name] = first_vector(tuple(steps.sizes[axis] for axis in axes))
        return ScaleByMeasuredMuonState(count, mu, nu, vectors)

    def matrices_of(tree: Mapping) -> dict:
        return select_keys(tree, matrix_specs)

    def others_of(tree: Mapping) -> dict:
        return drop_keys(tree, matrix_specs)

    def update(updates, state, params=None, *, factors, hyper, layout=ONE_DEVICE, **_):
        del params
        grads = matrices_of(updates)
        matrix_mu = optax.tree.update_moment(grads, matrices_of(state.mu), beta, 1)
        count = optax.safe_increment(state.count)
        # Nesterov momentum as in `optax.contrib`: the momentum that the next step would have if it
        # had the gradient of this step again.
        mu_hat = optax.tree.bias_correction(matrix_mu, beta, optax.safe_increment(count))
        grad_hat = optax.tree.bias_correction(grads, beta, count)
        nesterov = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mu_hat, grad_hat)
        vectors: dict[str, jax.Array] | None = None
        num_iterations: Any = None
        if steps.measured:
            vectors = state.vectors
            num_iterations = jnp.where(state.count < WARMUP_STEPS, WARMUP_ITERATIONS, 1)
        matrix_updates, vectors = matrix_steps(
            nesterov,
            matrix_specs,
            layout=layout,
            coefficients=coefficients,
            blocks=steps.blocks,
            vectors=vectors,
            num_iterations=num_iterations,
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
        directions = {name: directions[name] for name in updates}
        mu = {name: mu[name] for name in updates}
        if vectors is None:
            return directions, ScaleByMuonState(adam_state.count, mu, nu)
        return directions, ScaleByMeasuredMuonState(adam_state.count, mu, nu, vectors)

    return optax.GradientTransformationExtraArgs(cast("Any", init), cast("Any", update))


def hidden_matrices(specs: Specs) -> dict[str, ParamSpec]:
    """Return the specs of the matrices that Muon orthogonalizes, by name.

    They are all parameters but embeddings, readout, routers, adapters, gains and biases. A matrix
    is its fan-in axes against its fan-out axes. Other axes ("layers") count matrices.
    """
    # Jordan et al. (2024) leave embeddings, readout and vectors to Adam.
    not_hidden = VECTORS | EMBEDDINGS | ADAPTERS | {Role.READOUT, Role.ROUTER}
    hidden = {}
    for name, spec in specs.items():
        if spec.role not in not_hidden:
            hidden[name] = spec
    return hidden


def first_vector(shape: tuple[int, ...]) -> jax.Array:
    """Return a vector to begin a power iteration with, float32, of any shape.

    Its numbers are fixed, from 0.5 to 1.5, and have no pattern that a matrix is likely to be
    orthogonal to.
    """
    position = jnp.arange(math.prod(shape), dtype=jnp.float32)
    # Fractional parts of multiples of the golden ratio are spread evenly over [0, 1).
    return ((position * 0.6180339887 + 0.5) % 1.0 + 0.5).reshape(shape)


def _vector_dims(spec: ParamSpec) -> tuple[int, ...]:
    """Return the dimensions that the power-iteration vector of a parameter has.

    They are the dimensions that count matrices, followed by those of the fan-in.
    """
    fan_in = tuple(spec.axes.index(axis) for axis in spec.fan_in)
    fan_out = {spec.axes.index(axis) for axis in spec.fan_out}
    stack = tuple(i for i in range(len(spec.axes)) if i not in (*fan_in, *fan_out))
    return (*stack, *fan_in)


def with_adam_lr(lr: Mapping[str, Any], specs: Specs, adam_lr: Any, peak_lr: Any) -> dict[str, Any]:
    """Return learning-rate factors with which the Adam part of Muon peaks at `adam_lr`.

    All factors are relative to `peak_lr`, the peak of the matrices. Both peaks are thus data to
    the compiled step, and a sweep over either compiles once.

    Args:
        lr: Factor of every trained parameter, from the preset.
        specs: Specs that tell which parameters are hidden matrices.
        peak_lr: Number above 0. Like `adam_lr`, it may be traced.
    """
    # `scale_by_schedule` multiplies every update by the matrices' peak. For other parameters the
    # ratio replaces this peak by `adam_lr`.
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
    """Return which dimensions of a parameter are the two sides, s and t, of its matrices.

    Side s is the fan-in, unless the layout's rules split the fan-out by fsdp and not the fan-in.
    The size of the mesh does not count, so a matrix is computed in the same way, and has the same
    bits, on every mesh.

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
class Grid:
    """Blocks of a complete matrix [s, t] that are orthogonalized apart.

    Attributes:
        s: Pair (number of blocks, size of a block) of each dimension of side s.
        t: The pairs of side t.
    """

    s: tuple[tuple[int, int], ...]
    t: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MatrixRule:
    """Rule by which a device turns a complete matrix [s, t] into a step.

    Attributes:
        grid: Blocks that are orthogonalized apart. `None` is the whole matrix.
        vector_on_s: Whether the vector of the power iteration is on side s. `None` if the norm is
            not measured.
    """

    grid: Grid | None = None
    vector_on_s: bool | None = None


@dataclass(frozen=True)
class Parameter:
    """One parameter as the stack of matrices that is orthogonalized.

    Attributes:
        sides: Dimensions of the matrices.
        split: Mesh axes that split them.
        placed: Partition spec of the array while it is orthogonalized.
        rule: How each matrix is turned into a step.
    """

    sides: Sides
    split: Split
    placed: PartitionSpec
    rule: MatrixRule = MatrixRule()


Vectors = dict[str, jax.Array]


def orthogonalize(
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    *,
    layout: Layout,
    coefficients: Coefficients = NEWTON_SCHULZ,
    blocks: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, jax.Array]:
    """Return every matrix of every array orthogonalized, with the arrays' shapes and dtypes.

    The bits do not depend on the mesh.

    Args:
        arrays: Arrays by name, such as Muon's momenta, in global view.
        specs: Spec of every array, by the same names.
        layout: Placement of the arrays. Its `matrix_dtype` is the dtype in which matrices are
            exchanged and iterated.
        coefficients: Coefficients of the iterations (`newton_schulz`).
        blocks: Size along each axis of the blocks that are orthogonalized apart, by name. It must
            divide the array's. Matrices of a name that is left out are one block each.
    """
    return matrix_steps(
        arrays, specs, layout=layout, coefficients=coefficients, blocks=blocks or {}
    )[0]


def matrix_steps(
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    *,
    layout: Layout,
    coefficients: Coefficients,
    blocks: Mapping[str, tuple[int, ...]],
    vectors: Vectors | None = None,
    num_iterations: Any = None,
) -> tuple[dict[str, jax.Array], Vectors | None]:
    """Return every matrix orthogonalized as by `orthogonalize`, and vectors for the next call.

    With `vectors`, each result is also divided by its spectral norm, which power iterations
    measure. Without them the second result is `None`.

    Args:
        vectors: Vectors that the power iterations start from, by name, [stack axes, fan-in axes].
            `None` measures no norm.
        num_iterations: Number of power iterations, int32 [].
    """
    if not arrays:
        return {}, vectors
    parameters: dict[str, Parameter] = {}
    for name, array in arrays.items():
        block = blocks.get(name)
        parameters[name] = _parameter(specs[name], array.shape, layout, block, vectors is not None)

    def local(
        parts: dict[str, jax.Array], part_vectors: Vectors | None, num_iterations: Any
    ) -> tuple[dict[str, jax.Array], Vectors | None]:
        return _orthogonalize_parts(
            parts, parameters, layout, coefficients, part_vectors, num_iterations
        )

    # One device has every matrix, and needs no exchange.
    if layout.mesh.size == 1:
        return local(dict(arrays), vectors, num_iterations)
    placed = {name: parameter.placed for name, parameter in parameters.items()}
    placed_vectors = None
    if vectors is not None:
        placed_vectors = {}
        for name, parameter in parameters.items():
            on_stack = [parameter.placed[i] for i in parameter.sides.stack]
            placed_vectors[name] = PartitionSpec(*on_stack)
    replicated = None if num_iterations is None else PartitionSpec()
    spread = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(placed, placed_vectors, replicated),
        out_specs=(placed, placed_vectors),
        check_vma=False,
    )
    return spread(dict(arrays), vectors, num_iterations)


def _parameter(
    spec: ParamSpec,
    shape: tuple[int, ...],
    layout: Layout,
    block: tuple[int, ...] | None,
    measured: bool,
) -> Parameter:
    """Return the sides, the mesh axes and the rule with which a parameter is orthogonalized.

    Args:
        block: Size of a block along each axis. `None` is the whole matrix.
        measured: Whether the matrices are divided by their measured spectral norms.
    """
    dimensions = sides(spec, layout)
    names: list[tuple[str, ...]] = []
    for part in layout.sharding(spec.axes, shape).spec:
        names.append((part,) if isinstance(part, str) else tuple(part or ()))
    # A PartitionSpec may end before the last dimensions of its array.
    names += [()] * (len(shape) - len(names))

    # The exchange joins parts along the outermost dimension of a side. A mesh axis that splits an
    # inner dimension (only by a rule of the user) is gathered before and split after.
    for inner in (*dimensions.s[1:], *dimensions.t[1:]):
        names[inner] = ()

    used = set().union(*names)
    shared: list[str] = []
    for name, size in layout.mesh.shape.items():
        if size > 1 and name not in used and not crosses_islands(layout.mesh, name):
            shared.append(name)
    split = Split(names[dimensions.s[0]], names[dimensions.t[0]], tuple(shared))

    grid = None
    if block is not None:
        grid = Grid(_pairs(dimensions.s, shape, block), _pairs(dimensions.t, shape, block))
    vector_on_s = None
    if measured:
        vector_on_s = spec.axes[dimensions.s[0]] in spec.fan_in
    rule = MatrixRule(grid, vector_on_s)
    return Parameter(dimensions, split, PartitionSpec(*names), rule)


def _pairs(
    side: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the number of blocks and their size along each dimension of a side.

    Args:
        side: Dimensions of the array that make up the side.
        block: Size of a block along each dimension of the array, whose size it must divide.
    """
    return tuple((shape[i] // block[i], block[i]) for i in side)


def _orthogonalize_parts(
    parts: dict[str, jax.Array],
    parameters: Mapping[str, Parameter],
    layout: Layout,
    coefficients: Coefficients,
    vectors: Vectors | None,
    num_iterations: Any,
) -> tuple[dict[str, jax.Array], Vectors | None]:
    """Return this device's parts of the orthogonalized matrices, and the next vectors.

    Matrices of equal shape are put into one stack and distributed over the devices. Matrices of
    zeros fill the stack up to a multiple of the number of devices, so that all devices get equally
    many. A parameter whose own number of matrices is such a multiple is a stack of its own, which
    needs no copy. If `vectors` is `None`, no spectral norm is measured and the second result is
    `None`.

    Args:
        parts: Arrays by name, each the part of an array that this device holds.
    """
    stacks: dict[Any, list[str]] = {}
    matrices: dict[str, jax.Array] = {}
    for name, part in parts.items():
        parameter = parameters[name]
        matrices[name] = _as_matrices(part, parameter.sides)
        count = len(matrices[name])
        alone = count > 1 and count % _num_devices(parameter.split, layout) == 0
        key = name if alone else matrices[name].shape[1:]
        stacks.setdefault((key, parameter.split, parameter.rule), []).append(name)

    results: dict[str, jax.Array] = {}
    new_vectors: Vectors = {}
    for (_, split, rule), names in stacks.items():
        dtype = layout.matrix_dtype or parts[names[0]].dtype
        joined = _joined([matrices[name].astype(dtype) for name in names])
        joined_vectors = None
        if vectors is not None:
            rows = [vectors[name].reshape(len(matrices[name]), -1) for name in names]
            joined_vectors = _joined(rows)
        stack = _Stack(split, rule, layout, coefficients, num_iterations)
        orthogonal, iterated = stack.orthogonalized(joined, joined_vectors)

        start = 0
        for name in names:
            stop = start + len(matrices[name])
            result = _from_matrices(orthogonal[start:stop], parts[name], parameters[name].sides)
            results[name] = result.astype(parts[name].dtype)
            if vectors is not None and iterated is not None:
                new_vectors[name] = iterated[start:stop].reshape(vectors[name].shape)
            start = stop
    ordered = {name: results[name] for name in parts}
    if vectors is None:
        return ordered, None
    return ordered, {name: new_vectors[name] for name in parts}


def _joined(arrays: list[jax.Array]) -> jax.Array:
    """Return arrays concatenated along their first axis."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _as_matrices(part: jax.Array, dimensions: Sides) -> jax.Array:
    """Return an array as its matrices, [number of matrices, s, t]."""
    sizes = []
    for group in (dimensions.stack, dimensions.s, dimensions.t):
        sizes.append(math.prod(part.shape[i] for i in group))
    return part.transpose(dimensions.order).reshape(sizes)


def _from_matrices(matrices: jax.Array, like: jax.Array, dimensions: Sides) -> jax.Array:
    """Return matrices [number of matrices, s, t] as an array of the shape of `like`.

    This is the inverse of `_as_matrices`.
    """
    order = dimensions.order
    ordered = matrices.reshape([like.shape[i] for i in order])
    return ordered.transpose(sorted(range(len(order)), key=order.__getitem__))


def _num_devices(split: Split, layout: Layout) -> int:
    """Return the number of devices among which a stack's matrices are distributed."""
    return math.prod(layout.mesh.shape[name] for name in (*split.s, *split.t, *split.shared))


@dataclass(frozen=True)
class _Stack:
    """Distribution of the matrices of one stack, and the rule that all of them have.

    Attributes:
        split: Mesh axes that split every matrix.
        rule: How a device turns a complete matrix into a step.
        layout: Mesh.
        coefficients: Coefficients of `newton_schulz`.
        num_iterations: Number of power iterations, int32 []. `None` if no norm is measured.
    """

    split: Split
    rule: MatrixRule
    layout: Layout
    coefficients: Coefficients
    num_iterations: Any

    def orthogonalized(
        self, matrices: jax.Array, vectors: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return this device's parts of the orthogonalized stack, and the next vectors.

        Each device computes one matrix at a time. With `vectors`, each matrix is also divided by
        its measured spectral norm. Without them the second result is `None`.

        Args:
            matrices: This device's parts of the matrices, [number of matrices, s, t].
            vectors: Vectors of all matrices, [number of matrices, s or t].
        """
        num_devices = _num_devices(self.split, self.layout)
        count = len(matrices)
        if missing := -count % num_devices:
            matrices = _filled(matrices, missing)
        if vectors is None:
            if len(matrices) == num_devices:
                return self._one_each(matrices)[:count], None
            # The exchange is inside of the loop: a device then holds one complete matrix at a time.
            rounds = matrices.reshape(-1, num_devices, *matrices.shape[1:])
            results = jax.lax.map(self._one_each, rounds)
            return results.reshape(matrices.shape)[:count], None

        own_vectors = self._own(_filled(vectors, -count % num_devices))
        rounds = matrices.reshape(-1, num_devices, *matrices.shape[1:])
        results, own_vectors = jax.lax.map(self._one_each_measured, (rounds, own_vectors))
        return results.reshape(matrices.shape)[:count], self._of_all(own_vectors)[:count]

    @property
    def _devices(self) -> tuple[str, ...]:
        """Mesh axes whose combined index i numbers the devices that share a stack of matrices.

        The matrices are orthogonalized in rounds, and device i computes matrix i of each round.
        """
        return (*self.split.shared, *self.split.t, *self.split.s)

    def _own(self, vectors: jax.Array) -> jax.Array:
        """Return the power-iteration vectors of the matrices that this device orthogonalizes.

        In a round every device orthogonalizes one matrix, so the result is [rounds, s or t].

        Args:
            vectors: Vectors of all matrices, [rounds * devices, s or t].
        """
        by_round = vectors.reshape(-1, _num_devices(self.split, self.layout), vectors.shape[1])
        if not self._devices:
            return by_round[:, 0]
        return jax.lax.dynamic_index_in_dim(
            by_round, jax.lax.axis_index(self._devices), axis=1, keepdims=False
        )

    def _of_all(self, own_vectors: jax.Array) -> jax.Array:
        """Return the vectors of all matrices, [rounds * devices, s or t], gathered from devices.

        Args:
            own_vectors: Vectors of the matrices that this device orthogonalized, [rounds, s or t].
        """
        if not self._devices:
            return own_vectors
        by_round = jax.lax.all_gather(own_vectors, self._devices, axis=1)
        return by_round.reshape(-1, own_vectors.shape[1])

    def _one_each(self, matrices: jax.Array) -> jax.Array:
        """Orthogonalize as many matrices as there are devices, one on each device.

        Return this device's parts of all of them, [devices, s, t].

        Args:
            matrices: This device's parts of the matrices, [devices, s, t].
        """
        # The barriers keep the compiler from fusing the exchange or a transposition into the
        # iterations, where it would round differently on different meshes.
        x = jax.lax.optimization_barrier(self._gathered(matrices))
        x = self._orthogonalized(x)
        return self._parted(jax.lax.optimization_barrier(x), matrices.shape[1:])

    def _one_each_measured(
        self, matrices_and_vector: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Orthogonalize one matrix per device, and divide each by its spectral norm.

        Return this device's parts of all these matrices, [devices, s, t], and the next vector of
        the matrix that this device computed.

        Args:
            matrices_and_vector: This device's parts of the matrices, [devices, s, t], and the
                vector of the matrix that it orthogonalizes, [s or t].
        """
        matrices, vector = matrices_and_vector
        x = jax.lax.optimization_barrier(self._gathered(matrices))
        x = self._orthogonalized(x)
        x, vector = jax.lax.optimization_barrier((x, vector))
        along_s = x if self.rule.vector_on_s else x.T
        norm, vector = spectral_norm(along_s, vector, self.num_iterations)
        x = (x.astype(jnp.float32) / (norm + _EPS)).astype(x.dtype)
        x, vector = jax.lax.optimization_barrier((x, vector))
        return self._parted(x, matrices.shape[1:]), vector

    def _orthogonalized(self, x: jax.Array) -> jax.Array:
        """Return a matrix [s, t] with every block of the rule's grid orthogonalized on its own.

        Without a grid the whole matrix is orthogonalized.
        """
        # Other platforms round float32 products, and errors of Gram matrices grow.
        use_gram = self.layout.platform == "cpu"
        grid = self.rule.grid
        if grid is None:
            return newton_schulz(x, self.coefficients, use_gram=use_gram)
        pairs = (*grid.s, *grid.t)
        # Every dimension becomes two, the number of blocks and the size of a block.
        shape: list[int] = []
        for pair in pairs:
            shape.extend(pair)
        counts = range(0, 2 * len(pairs), 2)
        order = [*counts, *(i + 1 for i in counts)]
        size_s = math.prod(size for _, size in grid.s)
        size_t = math.prod(size for _, size in grid.t)
        split = x.reshape(shape).transpose(order)
        blocks = split.reshape(-1, size_s, size_t)

        # A norm of the complete matrix would make the step of one block depend on the others.
        def one_block(block: jax.Array) -> jax.Array:
            return newton_schulz(block, self.coefficients, use_gram=use_gram)

        results = jax.vmap(one_block)(blocks)
        back = sorted(range(len(order)), key=order.__getitem__)
        return results.reshape(split.shape).transpose(back).reshape(x.shape)

    def _gathered(self, matrices: jax.Array) -> jax.Array:
        """Exchange parts with other devices, and return this device's complete matrix, [s, t].

        Args:
            matrices: This device's parts of as many matrices as there are devices, [devices, s, t].
        """
        split = self.split
        num_s = math.prod(self.layout.mesh.shape[name] for name in split.s)
        num_t = math.prod(self.layout.mesh.shape[name] for name in split.t)
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
        return x.reshape(num_s * part_s, num_t * part_t)

    def _parted(self, x: jax.Array, part_shape: tuple[int, ...]) -> jax.Array:
        """Return this device's parts of the results of all devices, [devices, s, t].

        The results are exchanged in the opposite order of `_gathered`.

        Args:
            x: Complete matrix of this device, [s, t].
            part_shape: Shape of a device's part of a matrix.
        """
        split = self.split
        num_s = math.prod(self.layout.mesh.shape[name] for name in split.s)
        num_t = math.prod(self.layout.mesh.shape[name] for name in split.t)
        part_s, part_t = part_shape
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


def _filled(stack: jax.Array, missing: int) -> jax.Array:
    """Return a stack with `missing` matrices or vectors of zeros appended."""
    zeros = jnp.zeros((missing, *stack.shape[1:]), stack.dtype)
    return jnp.concatenate([stack, zeros])


@jax.named_scope(POWER_ITERATIONS)
def spectral_norm(
    x: jax.Array, vector: jax.Array, num_iterations: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Estimate the spectral norm of a matrix by power iteration, and return the last vector too.

    The next call for the matrix can start from that vector. The estimate is never above the norm,
    but for rounding. A matrix of zeros has norm 0 and leaves the vector unchanged.

    Args:
        x: Matrix [n, m]. It is read as float32.
        vector: Vector to begin with, float32 [n], of any norm above 0.
        num_iterations: Number of iterations, int32 [], at least 1.
    """
    wide = x.astype(jnp.float32)

    def iterate(_: Any, vector: jax.Array) -> jax.Array:
        image = wide @ (vector @ wide)
        length = jnp.linalg.norm(image)
        return jnp.where(length > 0, image / jnp.where(length > 0, length, 1), vector)

    vector = jax.lax.fori_loop(0, num_iterations, iterate, vector)
    return jnp.linalg.norm(vector @ wide) / (jnp.linalg.norm(vector) + _EPS), vector


@jax.named_scope(ITERATIONS)
def newton_schulz(
    x: jax.Array, coefficients: Coefficients = NEWTON_SCHULZ, *, use_gram: bool = False
) -> jax.Array:
    """Return a matrix with the singular vectors of x and singular values near 1.

    Each iteration is X <- a X + b (X X') X + c (X X')^2 X, with the smaller of X X' and X' X.
    Products are summed in float32 and stored in the dtype of x.

    Args:
        x: Matrix [s, t], of any scale.
        coefficients: One triple (a, b, c) per iteration.
        use_gram: Compute float32 matrices with a side at least `GRAM_RATIO` times as long as the
            other by products of Gram matrices, which are small (Gram Newton-Schulz, Dao-AILab
            2026). With sides m and 4 m that takes two thirds of the FLOPs. Products must be exact
            float32, which they are on CPU.
    """
    wide = x.astype(jnp.float32)
    # The Frobenius norm bounds the spectral norm, and the iterations need singular values up to 1.
    norm = jnp.sqrt(jnp.sum(wide * wide)) + _EPS
    x = (wide / norm).astype(x.dtype)
    long_enough = max(x.shape) >= GRAM_RATIO * min(x.shape)
    if use_gram and long_enough and x.dtype == jnp.float32:
        x = _iterated_by_gram(x, coefficients[:_GRAM_RESTART])
        return _iterated_by_gram(x, coefficients[_GRAM_RESTART:])
    for a, b, c in coefficients:
        gram = _gram(x)
        polynomial = (b * gram + c * _product("ij,jk->ik", gram, gram)).astype(x.dtype)
        x = (a * x + _times(polynomial, x)).astype(x.dtype)
    return x


def _iterated_by_gram(x: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Return a float32 matrix after iterations that are computed from its Gram matrix.

    Every iteration multiplies the matrix by a polynomial of its Gram matrix. All these polynomials
    are multiplied with each other first, and their product with the matrix.
    """
    gram = _gram(x)
    factor = jnp.eye(len(gram), dtype=x.dtype)
    for i, (a, b, c) in enumerate(coefficients):
        # The polynomial without a times the unit matrix, which is added without a product.
        polynomial = b * gram + c * (gram @ gram)
        if i == 0:
            factor = a * factor + polynomial
        else:
            factor = a * factor + polynomial @ factor
        if i < len(coefficients) - 1:
            # X <- P X makes the Gram matrix P G P, which is P P G, since polynomials commute.
            once = a * gram + polynomial @ gram
            gram = a * once + polynomial @ once
    return _times(factor, x)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Return a product of two matrices, float32."""
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


def _gram(x: jax.Array) -> jax.Array:
    """Return the smaller of X X' and X' X, in the dtype of x."""
    if x.shape[0] <= x.shape[1]:
        return _product("st,ut->su", x, x).astype(x.dtype)
    return _product("su,st->ut", x, x).astype(x.dtype)


def _times(polynomial: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply x by a symmetric polynomial of its Gram matrix, and return the product in float32.

    The polynomial is on the left if x has at most as many rows as columns, otherwise on the right.

    Args:
        polynomial: Square matrix of the shape of `_gram(x)`.
        x: Matrix [s, t].
    """
    if x.shape[0] <= x.shape[1]:
        return _product("su,ut->st", polynomial, x)
    return _product("su,ut->st", x, polynomial)
