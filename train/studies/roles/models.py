"""Tracing of models: the graph of a loss, and parameter shapes at several sizes.

A model is one of the zoo, or anyone's `build(sizes)`. The graph is read from the jaxpr of the loss,
which is never executed. Calls are entered, the body of a scan is entered for two rounds, and all
branches of a conditional are entered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.presets.roles import AXES, ParamSpec, PresetError
from mupax.train.core.loss import cross_entropy, cross_entropy_from_logits
from mupax.train.studies.roles import operations
from mupax.train.studies.roles.deduce import DIRECT_QUERY, Roles, Sample, deduce
from mupax.train.studies.roles.graph import Graph, Node, fresh
from mupax.zoo import families
from mupax.zoo.definition import Definition, definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.functional.tree import is_bare_shape, named_leaves, shape_hint
from mupax.zoo.layers.linear import readout_method
from mupax.zoo.partition import ONE_DEVICE, Layout

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the parameters of a jaxpr equation that can hold the jaxpr that it calls."""
OPAQUE = frozenset({"shard_map", "pallas_call", "xla_pmap"})
"""Primitives whose inner jaxpr is not entered, because it works on shards or memory blocks."""

# Not 1, because the graph of a loss cannot follow a dimension of size 1.
BATCH = 2
_FOLLOWING = {
    "head_dim": "heads_dim",
    "num_kv_heads": "kv_heads",
    "encoder_depth": "encoder_blocks",
    "target_len": "targets",
}
"""Properties with the values of config fields that are `None`, by the name of the field."""
_TOGETHER = (("num_heads", "num_kv_heads"), ("image_size", "patch_size"))
"""Fields that can only be doubled together in some models."""


Loss = Callable[[Any, Any], jax.Array]
"""Function of parameters and a batch that returns a scalar."""


def trace(loss: Loss, params: Any, batch: Any, learned: Collection[str] = ()) -> Graph:
    """Trace a loss and return its graph, without computing any array.

    Args:
        params: Tree of arrays, or of shapes such as `jax.ShapeDtypeStruct`.
        batch: Tree of arrays, or of shapes such as `jax.ShapeDtypeStruct`.
        learned: Paths of parameters that count as activations, such as learned queries.
    """
    closed = jax.make_jaxpr(loss)(params, batch)
    graph = Graph()
    inputs = []
    for name, leaf in named_leaves(params).items():
        add = graph.learned_vectors if name in learned else graph.parameter
        inputs.append(add(name, tuple(leaf.shape)))
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
            consts: Values of the jaxpr's constants: arrays, or nodes of an outer jaxpr.
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

        Calls, scans and conditionals are entered: their inner equations are added, too. While loops
        and the primitives in `OPAQUE` are added as single operations.
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
        """Add all branches of a conditional to the graph.

        Return a node for each output, as if `select_n` chose among the results of the branches.
        """
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
        """Add the body of a scan to the graph for the first two steps (or one if it has only one).

        The second step reads the carry of the first. Return the nodes of the last carry and of the
        stacked outputs.

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
    """Return the open jaxpr and the constants of a jaxpr.

    An open jaxpr is returned unchanged, without constants.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _is_zero(operands: Sequence[Node]) -> bool:
    """Return whether the difference of two operands is always 0, as in x - stop_gradient(x)."""
    left, right = operands
    while left.op in operations.SAME or right.op in operations.SAME:
        if left.op in operations.SAME:
            left = left.inputs[0]
        if right.op in operations.SAME:
            right = right.inputs[0]
    return left is right


class Build(Protocol):
    """User's function that builds a model at given sizes, for `roles_of`.

    It returns three values: a tree with the shapes of the model's parameters, the function
    loss(params, batch), and a tree with the shapes of a batch.
    """

    def __call__(
        self, sizes: Mapping[str, int], /
    ) -> tuple[Any, Callable[[Any, Any], jax.Array], Any]: ...


class _Sizes(dict[str, int]):
    """Dict of sizes by axis, where a missing axis raises a PresetError that says what to write."""

    def __missing__(self, axis: str) -> int:
        raise PresetError(
            f"the model asks for the size of {axis!r}, which is not among {', '.join(self)}; "
            "name it too"
        )


def roles_of(build: Build, sizes: Mapping[str, int]) -> Roles:
    """Deduce the role and axes of every parameter of a user's model from its loss.

    The loss is traced and never runs. The shapes at several sizes tell the axes.

    Args:
        build: Function that makes the model at any sizes. Shapes (`jax.ShapeDtypeStruct`) suffice,
            because nothing is computed.
        sizes: Base sizes by logical axis (`mupax.presets.roles.AXES`). Each is doubled alone.

    Raises:
        PresetError: An axis does not exist or has the size 1, the model asks for a size that is not
            given, it has other parameters at other sizes or the same shapes at all sizes, or
            `build` returns something else.
    """
    for axis in sizes:
        if axis not in AXES:
            raise PresetError(f"no logical axis is named {axis!r}; the axes are {', '.join(AXES)}")
        if sizes[axis] < 2:
            raise PresetError(
                f"the size of {axis} is {sizes[axis]}; write 2 or more, because a size of 1 leaves "
                "no trace in the loss, and roles do not depend on sizes"
            )
    base_sizes = _Sizes(sizes)
    params, loss, batch = _built(build, base_sizes)
    base = Sample(base_sizes, _shapes(params))
    if not base.shapes:
        raise PresetError("the model has no parameters; return their shapes as the first value")
    samples = [base]
    for axis, size in sizes.items():
        # One axis alone, so that a dimension that changes is that axis.
        doubled_sizes = _Sizes({**sizes, axis: 2 * size})
        doubled_params, _, _ = _built(build, doubled_sizes)
        doubled = Sample(doubled_sizes, _shapes(doubled_params))
        # A deeper model can have parameters of further layers.
        if axis not in ("layers", "encoder_layers") and doubled.shapes.keys() != base.shapes.keys():
            changed = sorted(doubled.shapes.keys() ^ base.shapes.keys())
            raise PresetError(
                f"with {axis} {2 * size} the model has other parameters: {', '.join(changed[:3])}"
            )
        samples.append(doubled)
    if all(sample.shapes == base.shapes for sample in samples):
        raise PresetError(
            "the model has the same shapes at all sizes; make it of the sizes that it is given, "
            "such as sizes['embed']"
        )
    complete = []
    for sample in samples:
        if base.shapes.keys() <= sample.shapes.keys():
            complete.append(sample)
    return _traced_roles(loss, params, batch, complete)


def _built(build: Build, sizes: Mapping[str, int]) -> tuple[Any, Callable[..., jax.Array], Any]:
    """Return what a user's function builds, after a test that it is of the right kind.

    Raises:
        PresetError: It is not three values with the loss in the middle, or the batch has a bare
            shape.
    """
    built = build(sizes)
    is_triple = isinstance(built, (tuple, list)) and len(built) == 3
    if not is_triple or not callable(built[1]):
        raise PresetError(
            "the function that builds the model has to return three values: the shapes of its "
            "parameters, the function loss(params, batch) and the shapes of a batch"
        )
    params, loss, batch = built
    # `named_leaves` refuses such shapes of parameters.
    for leaf in jax.tree.leaves(batch, is_leaf=is_bare_shape):
        if is_bare_shape(leaf):
            raise PresetError(f"the batch has {shape_hint(leaf)}, or jnp.int32 for token ids")
    return params, loss, batch


def _traced_roles(loss: Loss, params: Any, batch: Any, samples: Sequence[Sample]) -> Roles:
    """Return the roles of all parameters of a loss, also with learned queries of attention.

    A learned query meets the matrix of queries and nothing of the batch, so that both look like a
    computation on parameters alone. Each refused vector is therefore tried as an activation.
    """
    roles = deduce(trace(loss, params, batch), samples)
    learned: set[str] = set()
    for param in roles.refused:
        shape = samples[0].shapes[param]
        if len(shape) - shape.count(1) > 2:
            continue
        trial = deduce(trace(loss, params, batch, learned | {param}), samples)
        is_query = param in trial.specs or trial.refused.get(param) == DIRECT_QUERY
        # A query of shape [1, embed] stays refused for its shape, but what reads it is found.
        is_query |= 1 in shape and trial.refused.get(param) == roles.refused[param]
        if is_query and len(trial.refused) < len(roles.refused):
            learned.add(param)
            roles = trial
    return roles


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by path."""
    # The paths must be those of `define_function`, where the declarations are used. There the path
    # of an nnx.Variable has no ".value".
    shapes = {}
    for name, leaf in named_leaves(params).items():
        shapes[name] = tuple(leaf.shape)
    return shapes


def roles_of_config(config: ModelConfig) -> Roles:
    """Deduce the role and axes of every parameter of a zoo model from its training loss.

    The loss is traced and never runs. The result can be compared with the model's own declarations
    (`differences`).
    """
    model = definition(config)
    batch = {}
    for name, array in config.example().items():
        batch[name] = jax.ShapeDtypeStruct((BATCH, *array.shape), array.dtype)
    samples = [_sample(variation) for variation in (config, *variations(config))]
    # On a CPU attention consists of primitives. The kernels of other devices are opaque.
    cpu = Layout(Mesh(np.array(jax.devices("cpu")[:1]), "data"), {})
    return _traced_roles(loss_of(model, cpu), model.abstract, batch, samples)


def loss_of(
    model: Definition, layout: Layout = ONE_DEVICE
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array]:
    """Return a function of parameters and a batch that computes the summed loss of a zoo model.

    The loss includes the penalty of routers, if the model has experts. All multipliers are 1.

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
    """Return configs of a model in which one size is doubled, one config for every size.

    Two sizes are doubled together if the model cannot change one alone. Fields that cannot be
    doubled are left out.
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

    Declared shapes are the real ones: the modules make every parameter with the declared shape
    (`mupax.zoo.definition.Init.param`).
    """
    return Sample(config.sizes(), families.shapes(config))


def differences(
    config: ModelConfig, roles: Roles, declared: Mapping[str, ParamSpec] | None = None
) -> dict[str, str]:
    """Return the differences between declarations and traced roles, in words by parameter.

    Parameters that agree and parameters that tracing refused have no entry. The initial value of a
    gain is not compared, because no loss shows it. There is an entry "tied readout" if the config's
    tied readout differs from the traced one, unless tracing refused the table of the readout.

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

    Such a readout cannot be traced, so its absence is no difference.
    """
    readout = config.tied_readout
    if readout is None:
        return False
    # Only its table can have all axes of a readout, such as (vocab, embed).
    return any(
        spec.axes == readout.axes and name in roles.refused for name, spec in declared.items()
    )


def refuse_wrong_declarations(config: ModelConfig) -> None:
    """Raise an error if a model's declared roles contradict those traced from its loss.

    Parameters for which tracing finds no certain role pass.

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
    """Return words on the fields in which two declarations differ, or "" if there are none.

    The field `start`, the initial value of a gain, is not compared.
    """
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
    """Return a field's value as text: a tuple in parentheses, an enum member by its value."""
    if isinstance(value, tuple):
        return f"({', '.join(value)})"
    return str(getattr(value, "value", value))
