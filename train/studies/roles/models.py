"""Tracing of models: the graph of a loss, and parameter shapes at several sizes.

A model is one of the zoo, or anyone's `build(sizes)`. The graph is read from the loss' jaxpr, which
never runs: calls are entered, loops run twice, and all branches are taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.presets.roles import AXES, ParamSpec, PresetError
from mupax.train.core.loss import cross_entropy, cross_entropy_from_logits
from mupax.train.studies.roles import operations
from mupax.train.studies.roles.deduce import Roles, Sample, deduce
from mupax.train.studies.roles.graph import Graph, Node, fresh
from mupax.zoo import families
from mupax.zoo.definition import Definition, definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.functional.tree import named_leaves
from mupax.zoo.layers.linear import readout_method
from mupax.zoo.partition import ONE_DEVICE, Layout

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters in which an equation holds the jaxpr that it calls."""
OPAQUE = frozenset({"shard_map", "pallas_call", "xla_pmap"})
"""Calls that are not entered, because their jaxpr is about parts of arrays or about memory."""

# Not 1, because the graph of a loss cannot follow a dimension of size 1.
BATCH = 2
_FOLLOWING = {
    "head_dim": "heads_dim",
    "num_kv_heads": "kv_heads",
    "encoder_depth": "encoder_blocks",
    "target_len": "targets",
}
"""Fields that follow other fields if they are `None`, and the properties with their values then."""
_TOGETHER = (("num_heads", "num_kv_heads"), ("image_size", "patch_size"))
"""Fields that can only be doubled together in some models."""


def trace(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any) -> Graph:
    """Trace a loss and return its graph. Nothing is computed.

    Args:
        loss: Function of parameters and a batch that returns a scalar.
        params: Tree of arrays, or of shapes such as `jax.ShapeDtypeStruct`.
        batch: Tree of arrays, or of shapes such as `jax.ShapeDtypeStruct`.
    """
    closed = jax.make_jaxpr(loss)(params, batch)
    graph = Graph()
    inputs = []
    for name, leaf in named_leaves(params).items():
        inputs.append(graph.parameter(name, tuple(leaf.shape)))
    for leaf in jax.tree.leaves(batch):
        floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        inputs.append(graph.add("batch", (), fresh(leaf.shape), floating, "data"))
    outputs = _Interpreter(graph).run(closed.jaxpr, closed.consts, inputs)
    graph.add("loss", outputs[:1], (), True, outputs[0].kind)
    return graph


class _Output(NamedTuple):
    """Shape of an output of an equation, and whether its dtype is floating-point."""

    shape: tuple[int, ...]
    floating: bool


class _Interpreter:
    """Interpreter of jaxprs that adds every value to a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Node]) -> list[Node]:
        """Add all values of a jaxpr to the graph, and return the nodes of its outputs.

        Args:
            consts: Arrays, or nodes of an outer jaxpr.
        """
        values: dict[Any, Node] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = const if isinstance(const, Node) else self._constant(const)
        values.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [self._value(var, values) for var in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [self._value(var, values) for var in jaxpr.outvars]

    def _value(self, var: Any, values: Mapping[Any, Node]) -> Node:
        """Return the node of a variable. A literal is added to the graph as a constant."""
        if hasattr(var, "val"):
            return self._constant(var.val)
        return values[var]

    def _constant(self, value: Any) -> Node:
        """Add a constant to the graph, with its value if it is a scalar, and return its node."""
        shape = tuple(np.shape(value))
        # A scalar can be a Python number, which has no dtype.
        dtype = np.asarray(value).dtype if shape == () else value.dtype
        floating = jax.numpy.issubdtype(dtype, jax.numpy.floating)
        info = {}
        if shape == ():
            info["value"] = value.item() if hasattr(value, "item") else value
        return self.graph.add("constant", (), fresh(shape), floating, "constant", **info)

    def _equation(self, eqn: Any, operands: list[Node]) -> list[Node]:
        """Add the outputs of an equation to the graph, and return their nodes.

        Calls, scans and conditionals are entered, except while loops and the calls in `OPAQUE`.
        """
        name = eqn.primitive.name
        params = eqn.params
        outputs = []
        for var in eqn.outvars:
            floating = jax.numpy.issubdtype(var.aval.dtype, jax.numpy.floating)
            outputs.append(_Output(tuple(var.aval.shape), floating))

        if name == "scan":
            return self._scan(params, operands, outputs)
        if name == "cond":
            return self._cond(params["branches"], operands, outputs)
        callee = next((params[key] for key in CALLS if key in params), None)
        if callee and name not in OPAQUE and name != "while":
            return self.run(*_opened(callee), operands)
        # The graph has operations for rows and slices, so `unstack` and `split` become these.
        if name == "unstack":
            rows = []
            for index in range(len(outputs)):
                rows.append(self._row(operands[0], index, params["axis"]))
            return rows
        if name == "split":
            sizes = [output.shape[params["axis"]] for output in outputs]
            starts = itertools.accumulate(sizes, initial=0)
            parts = []
            for start, size in zip(starts, sizes, strict=False):
                parts.append(self._slice(operands[0], params["axis"], start, size))
            return parts
        if name == "optimization_barrier":
            # Each output equals one operand, so it must not count as a use of the other operands.
            copies = []
            for operand, output in zip(operands, outputs, strict=True):
                copies.append(self._op("copy", {}, [operand], output))
            return copies
        return [self._op(name, params, operands, output) for output in outputs]

    def _cond(
        self, branches: Sequence[Any], operands: list[Node], outputs: list[_Output]
    ) -> list[Node]:
        """Add all branches of a conditional to the graph. Return a `select_n` for each output."""
        # The first operand chooses the branch.
        results = [self.run(*_opened(branch), operands[1:]) for branch in branches]
        selected = []
        for alternatives, output in zip(zip(*results, strict=True), outputs, strict=True):
            selected.append(self._op("select_n", {}, [operands[0], *alternatives], output))
        return selected

    def _op(self, name: str, params: dict[str, Any], operands: list[Node], output: _Output) -> Node:
        """Add the result of a primitive to the graph, record uses of parameters, and return it.

        Args:
            params: Parameters of the primitive in its jaxpr, such as `axes` of a reduction.
        """
        op = "scatter" if name.startswith("scatter") else name
        node = self._result(op, params, operands, output)
        if node.kind == "derived" and op == "sub" and _is_zero(operands):
            node.kind = "constant"
            # x - stop_gradient(x) is 0 whatever x is, so it uses no parameter.
            node.params = frozenset()
        # A lookup has recorded its use itself.
        if node.kind == "activation" and node.op != "lookup":
            activations = []
            for operand in operands:
                if operand.kind in ("activation", "data"):
                    activations.append(operand)
            for operand in operands:
                if operand.kind in ("view", "derived"):
                    self.graph.use(node, operand, activations[0])
        return node

    def _result(
        self, op: str, params: dict[str, Any], operands: list[Node], output: _Output
    ) -> Node:
        """Add the result of a primitive to the graph without recording uses, and return it.

        The result of an unknown primitive gets dimensions that belong to no parameter.

        Args:
            op: Name of the primitive, "scatter" for each kind of scatter.
            params: Parameters of the primitive in its jaxpr, such as `axes` of a reduction.
        """
        graph = self.graph
        shape = output.shape
        floating = output.floating
        if op == "dot_general":
            return operations.dot(graph, operands, params)
        if op == "ragged_dot_general":
            return operations.ragged(graph, operands, params, shape)
        if op in operations.LAYOUT:
            node = operations.layout(graph, op, operands, params, shape)
            node.floating = floating
            return node
        kind = operations.kind_of(op, operands)
        if op in operations.REDUCTIONS:
            axes = set(params["axes"])
            dims = []
            summed = set()
            for index, dim in enumerate(operands[0].dims):
                if index in axes:
                    summed.update(dim)
                else:
                    dims.append(dim)
            return graph.add(op, operands, dims, floating, kind, summed=summed)
        if op in operations.ELEMENTWISE or math.prod(shape) == 1:
            dims = operations.combined(operands, shape)
            info = {"power": params["y"]} if op == "integer_pow" else {}
            return graph.add(op, operands, dims, floating, kind, **info)
        return graph.add(op, operands, fresh(shape), floating, kind)

    def _scan(
        self, params: dict[str, Any], operands: list[Node], outputs: list[_Output]
    ) -> list[Node]:
        """Add the body of a scan to the graph for its first two rounds (or one if it has one).

        The second round reads the carry of the first. Return the last carry and stacked outputs.

        Args:
            params: Parameters of the `scan` in its jaxpr.
        """
        body = _opened(params["jaxpr"])
        if "ft_in" in params:  # jax 0.12
            num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
        else:
            num_consts = params["num_consts"]
            num_carry = params["num_carry"]
        consts = operands[:num_consts]
        carry = operands[num_consts : num_consts + num_carry]
        xs = operands[num_consts + num_carry :]
        rounds = []
        # Two rounds show the recurrence, and depth does not change any role.
        for index in range(min(params["length"], 2)):
            rows = [self._row(x, index, 0) for x in xs]
            results = self.run(*body, [*consts, *carry, *rows])
            carry = results[:num_carry]
            rounds.append(results[num_carry:])

        stacked = []
        for ys, output in zip(zip(*rounds, strict=True), outputs[num_carry:], strict=True):
            kind = "derived"
            if ys[0].kind != "derived":
                kind = operations.kind_of("copy", ys)
            dims = (*fresh(output.shape[:1]), *ys[0].dims)
            stacked.append(self.graph.add("stacked", ys, dims, output.floating, kind))
        return [*carry, *stacked]

    def _row(self, array: Node, index: int, axis: int) -> Node:
        """Add one row along an axis to the graph, without the axis, and return its node."""
        row = self._slice(array, axis, index, 1)
        shape = (*array.shape[:axis], *array.shape[axis + 1 :])
        output = _Output(shape, array.floating)
        return self._op("squeeze", {"dimensions": (axis,)}, [row], output)

    def _slice(self, array: Node, axis: int, start: int, size: int) -> Node:
        """Add a range along one axis to the graph as a `slice`, and return its node."""
        starts = [0] * len(array.dims)
        stops = list(array.shape)
        starts[axis] = start
        stops[axis] = start + size
        params = {"start_indices": starts, "limit_indices": stops, "strides": None}
        shape = list(array.shape)
        shape[axis] = size
        return self._op("slice", params, [array], _Output(tuple(shape), array.floating))


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return the open jaxpr and the constants of a closed jaxpr. An open one has no constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _is_zero(operands: Sequence[Node]) -> bool:
    """Return whether both operands of a difference are one value, as in x - stop_gradient(x)."""
    left, right = operands
    while left.op in operations.SAME or right.op in operations.SAME:
        if left.op in operations.SAME:
            left = left.inputs[0]
        if right.op in operations.SAME:
            right = right.inputs[0]
    return left is right


class Build(Protocol):
    """Function that builds a model at given sizes.

    It returns the shapes of its parameters, loss(params, batch), and the shapes of a batch.
    """

    def __call__(
        self, sizes: Mapping[str, int], /
    ) -> tuple[Any, Callable[[Any, Any], jax.Array], Any]: ...


class _Sizes(dict[str, int]):
    """Sizes by axis. A missing axis raises a PresetError that says what to write."""

    def __missing__(self, axis: str) -> int:
        raise PresetError(
            f"the model asks for the size of {axis!r}, which is not among {', '.join(self)}; "
            "name it too"
        )


def roles_of(build: Build, sizes: Mapping[str, int]) -> Roles:
    """Return the declarations of the parameters of a user's model, traced from its loss.

    Args:
        build: Function that makes the model at any sizes. Shapes (`jax.ShapeDtypeStruct`) suffice,
            because nothing is computed.
        sizes: Base sizes by logical axis (`mupax.presets.roles.AXES`). Each is doubled alone.

    Raises:
        PresetError: An axis does not exist, the model asks for a size that is not given, or it has
            other parameters at other sizes.
    """
    for axis in sizes:
        if axis not in AXES:
            raise PresetError(f"no logical axis is named {axis!r}; the axes are {', '.join(AXES)}")
    base_sizes = _Sizes(sizes)
    params, loss, batch = build(base_sizes)
    base = Sample(base_sizes, _shapes(params))
    samples = [base]
    for axis, size in sizes.items():
        # One axis alone, so that a dimension that changes is that axis.
        doubled_sizes = _Sizes({**sizes, axis: 2 * size})
        doubled_params, _, _ = build(doubled_sizes)
        doubled = Sample(doubled_sizes, _shapes(doubled_params))
        # A deeper model can have parameters of further layers.
        if axis != "layers" and doubled.shapes.keys() != base.shapes.keys():
            changed = sorted(doubled.shapes.keys() ^ base.shapes.keys())
            raise PresetError(
                f"with {axis} {2 * size} the model has other parameters: {', '.join(changed[:3])}"
            )
        samples.append(doubled)
    complete = []
    for sample in samples:
        if base.shapes.keys() <= sample.shapes.keys():
            complete.append(sample)
    return deduce(trace(loss, params, batch), complete)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by path."""
    # The paths must be those of `define_function`, where the declarations are used. There the path
    # of an nnx.Variable has no ".value".
    shapes = {}
    for name, leaf in named_leaves(params).items():
        shapes[name] = tuple(leaf.shape)
    return shapes


def roles_of_config(config: ModelConfig) -> Roles:
    """Return the declarations of a model of the zoo, traced from the loss that it trains with.

    Nothing is computed.
    """
    model = definition(config)
    batch = {}
    for name, array in config.example().items():
        batch[name] = jax.ShapeDtypeStruct((BATCH, *array.shape), array.dtype)
    samples = [_sample(variation) for variation in (config, *variations(config))]
    # On a CPU attention consists of primitives. The kernels of other devices are opaque.
    cpu = Layout(Mesh(np.array(jax.devices("cpu")[:1]), "data"), {})
    graph = trace(loss_of(model, cpu), model.abstract, batch)
    return deduce(graph, samples)


def loss_of(
    model: Definition, layout: Layout = ONE_DEVICE
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array]:
    """Return the summed loss of a model of the zoo, a function of parameters and a batch.

    It includes the penalty of routers, if the model has experts. All multipliers are 1.

    Args:
        layout: Layout of the devices that the loss is traced for, by default one device.
    """
    ones = {}
    for name, info in model.factors.items():
        ones[name] = np.ones(info["shape"], np.float32)

    def loss(params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        module: Any = model.bind(params, ones, layout=layout)
        further_inputs = {}
        for name, array in batch.items():
            if name not in ("inputs", "targets", "weights"):
                further_inputs[name] = array
        readout_inputs = readout_method(module)
        if readout_inputs is None:
            logits = module(batch["inputs"], **further_inputs)
            return cross_entropy_from_logits(logits, batch["targets"], batch["weights"]).loss
        sums = cross_entropy(
            readout_inputs(batch["inputs"], **further_inputs),
            batch["targets"],
            batch["weights"],
            how="plain",
            layout=layout,
        )
        if sums.routing is None:
            return sums.loss
        return sums.loss + sums.routing.penalty

    return loss


def variations(config: ModelConfig) -> list[ModelConfig]:
    """Return the model with one size doubled, for every size that can be changed.

    Two sizes are doubled if they only change together.
    """
    values = {}
    for field in dataclasses.fields(config):
        values[field.name] = getattr(config, field.name)
    # Fields that follow another one are fixed, so that doubling the other changes one size alone.
    fixed = {}
    for name, source in _FOLLOWING.items():
        if name in values and values[name] is None:
            fixed[name] = getattr(config, source)
    values |= fixed

    single_fields = []
    for name, value in values.items():
        # Not `isinstance`, because a bool is an int, too, and no size.
        if type(value) is int or name == "mlp_ratio":
            single_fields.append((name,))
    result = []
    for names in (*single_fields, *_TOGETHER):
        doubled = {}
        for name in names:
            if values.get(name) is not None:
                doubled[name] = 2 * values[name]
        try:
            variation = dataclasses.replace(config, **fixed | doubled)
        except ConfigError:
            # Heads that do not divide the width, say: this field cannot change alone.
            continue
        if variation.sizes() != config.sizes():
            result.append(variation)
    return result


def _sample(config: ModelConfig) -> Sample:
    """Return the sizes of a model and the shapes of its parameters, from its declarations.

    Its modules make every parameter with this shape (`mupax.zoo.definition.Init.param`).
    """
    return Sample(config.sizes(), families.shapes(config))


def differences(
    config: ModelConfig, roles: Roles, declared: Mapping[str, ParamSpec] | None = None
) -> dict[str, str]:
    """Return the differences between declarations and traced roles, in words by parameter.

    Parameters that agree and parameters that tracing refused have no entry. The initial value of a
    gain is not compared, because no loss shows it. There is an entry "tied readout" if that of the
    config differs from the traced one, unless tracing refused its table.

    Args:
        declared: Declarations to compare. By default those of the config.
    """
    if declared is None:
        declared = config.parameters()
    result = {}
    for name in sorted(declared.keys() | roles.specs.keys()):
        spec = declared.get(name)
        traced = roles.specs.get(name)
        if spec is None:
            result[name] = f"is not declared: {roles.evidence[name]}"
        elif traced is not None:
            words = _different_fields(spec, traced)
            if words:
                result[name] = f"{words}: {roles.evidence[name]}"
    if config.tied_readout != roles.tied and not _is_table_refused(config, roles, declared):
        result["tied readout"] = f"is declared {config.tied_readout} and traced {roles.tied}"
    return result


def _is_table_refused(config: ModelConfig, roles: Roles, declared: Mapping[str, ParamSpec]) -> bool:
    """Return whether tracing refused the table of a declared tied readout.

    A refused table leaves no trace of the readout, which may be right.
    """
    readout = config.tied_readout
    if readout is None:
        return False
    # Only its table can have all axes of a readout, such as (vocab, embed).
    return any(
        spec.axes == readout.axes and name in roles.refused for name, spec in declared.items()
    )


def refuse_wrong_declarations(config: ModelConfig) -> None:
    """Raise an error if a model's declarations are not what tracing its loss shows.

    Parameters that tracing refuses pass.

    Raises:
        PresetError: A declaration differs from the role that the loss shows.
    """
    differing = differences(config, roles_of_config(config))
    if differing:
        lines = "\n".join(f"{name}: {words}" for name, words in differing.items())
        raise PresetError(
            f"the declarations of {config.family} are not what its loss does; mend them:\n{lines}"
        )


def _different_fields(declared: ParamSpec, traced: ParamSpec) -> str:
    """Return the different fields of two declarations but `start`, in words, or "" without any."""
    words = []
    for field in dataclasses.fields(declared):
        declared_value = getattr(declared, field.name)
        traced_value = getattr(traced, field.name)
        if field.name != "start" and declared_value != traced_value:
            declared_text = _text(declared_value)
            traced_text = _text(traced_value)
            words.append(f"{field.name} is declared {declared_text} and traced {traced_text}")
    return "; ".join(words)


def _text(value: Any) -> str:
    """Return the value of a declaration's field as text: a tuple in parentheses, a role's name."""
    if isinstance(value, tuple):
        return f"({', '.join(value)})"
    return str(getattr(value, "value", value))
