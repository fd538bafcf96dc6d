"""Traced models: a model of the zoo, or anyone's `build(sizes)`, at a base and with every size changed; and the graphs of their losses.

A loss' graph is read from its jaxpr, which never runs: calls are entered, loops go round twice, branches are all taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.presets.roles import AXES, ParamSpec, PresetError
from mupax.train.core.loss import cross_entropy, cross_entropy_from_logits
from mupax.train.studies.roles import operations
from mupax.train.studies.roles.deduce import Roles, Sample, deduce
from mupax.train.studies.roles.graph import Graph, Node, fresh
from mupax.zoo.definition import Definition, definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.functional.tree import named_leaves
from mupax.zoo.layers.linear import readout_method
from mupax.zoo.partition import ONE_DEVICE, Layout

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Where an equation that calls keeps what it calls."""
OPAQUE = frozenset({"shard_map", "pallas_call", "xla_pmap"})
"""Calls whose insides are in another world: of a device's part, or of memory."""

BATCH = 2
_ALONE = {
    "head_dim": "heads_dim", "num_kv_heads": "kv_heads", "encoder_depth": "encoder_blocks", "target_len": "targets",
}  # fmt: skip
"""Fields that follow others unless given, and what they then are."""
_TOGETHER = (("num_heads", "num_kv_heads"), ("image_size", "patch_size"))


def trace(loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any) -> Graph:
    """The graph of a loss; nothing is computed.

    Args:
        loss: of parameters and a batch, a number.
        params: tree of arrays or shapes.
        batch: the same.
    """
    closed = jax.make_jaxpr(loss)(params, batch)
    graph = Graph()
    leaves = named_leaves(params)
    inputs = [graph.parameter(name, tuple(leaf.shape)) for name, leaf in leaves.items()]
    for leaf in jax.tree.leaves(batch):
        floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        inputs.append(graph.add("batch", (), fresh(leaf.shape), floating, "data"))
    outputs = _Interpreter(graph).run(closed.jaxpr, closed.consts, inputs)
    graph.add("loss", outputs[:1], (), True, outputs[0].kind)
    return graph


class _Interpreter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Node]) -> list[Node]:
        """What comes out of a jaxpr.

        Args:
            jaxpr: open.
            consts: arrays, or nodes of an outer one.
            inputs: its arguments.
        """
        values: dict[Any, Node] = {}
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            values[var] = const if isinstance(const, Node) else self._constant(const)
        values.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = [
                self._constant(v.val) if hasattr(v, "val") else values[v] for v in eqn.invars
            ]
            values.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [self._constant(v.val) if hasattr(v, "val") else values[v] for v in jaxpr.outvars]

    def _constant(self, value: Any) -> Node:
        shape = tuple(np.shape(value))
        floating = jax.numpy.issubdtype(
            np.asarray(value).dtype if shape == () else value.dtype, jax.numpy.floating
        )
        info = {"value": value.item() if hasattr(value, "item") else value} if shape == () else {}
        return self.graph.add("constant", (), fresh(shape), floating, "constant", **info)

    def _equation(self, eqn: Any, operands: list[Node]) -> list[Node]:
        name, params = eqn.primitive.name, eqn.params
        outputs = [
            (tuple(v.aval.shape), jax.numpy.issubdtype(v.aval.dtype, jax.numpy.floating))
            for v in eqn.outvars
        ]
        if name == "scan":
            return self._scan(params, operands, outputs)
        if name == "cond":
            branches = [self.run(*_opened(b), operands[1:]) for b in params["branches"]]
            return [
                self._op("select_n", {}, [operands[0], *each], *out)
                for each, out in zip(zip(*branches, strict=True), outputs, strict=True)
            ]
        if (
            name not in OPAQUE
            and name != "while"
            and (inner := next((params[k] for k in CALLS if k in params), None))
        ):
            return self.run(*_opened(inner), operands)
        if name == "unstack":
            return [self._row(operands[0], index, params["axis"]) for index in range(len(outputs))]
        if name == "split":
            sizes = [shape[params["axis"]] for shape, _ in outputs]
            starts = itertools.accumulate(sizes, initial=0)
            return [
                self._slice(operands[0], params["axis"], start, size)
                for start, size in zip(starts, sizes, strict=False)
            ]
        if name == "optimization_barrier":
            return [
                self._op("copy", {}, [x], *out) for x, out in zip(operands, outputs, strict=True)
            ]
        return [self._op(name, params, operands, *out) for out in outputs]

    def _op(
        self,
        name: str,
        params: dict[str, Any],
        operands: list[Node],
        shape: tuple[int, ...],
        floating: bool,
    ) -> Node:
        graph = self.graph
        op = "scatter" if name.startswith("scatter") else name
        if op in ("dot_general", "ragged_dot_general"):
            node = (
                operations.dot(graph, operands, params)
                if op == "dot_general"
                else operations.ragged(graph, operands, params, shape)
            )
        elif op in operations.LAYOUT:
            node = operations.layout(graph, op, operands, params, shape)
            node.floating = floating
        elif op in operations.REDUCTIONS:
            gone = set(params["axes"])
            dims = [dim for at, dim in enumerate(operands[0].dims) if at not in gone]
            summed = {atom for at in gone for atom in operands[0].dims[at]}
            node = graph.add(
                op, operands, dims, floating, operations.kind_of(op, operands), summed=summed
            )
        elif op in operations.ELEMENTWISE or math.prod(shape) == 1:
            node = graph.add(
                op,
                operands,
                operations.combined(operands, shape),
                floating,
                operations.kind_of(op, operands),
                **_info(op, params),
            )
        else:
            node = graph.add(op, operands, fresh(shape), floating, operations.kind_of(op, operands))
        if node.kind == "derived" and op == "sub" and _same(operands):
            node.kind, node.params = "constant", frozenset()
        if node.kind == "activation" and node.op != "lookup":
            activations = [x for x in operands if x.kind in ("activation", "data")]
            for x in operands:
                if x.kind in ("view", "derived"):
                    graph.use(node, x, activations[0])
        return node

    def _scan(self, params: dict[str, Any], operands: list[Node], outputs: list[Any]) -> list[Node]:
        """A loop, gone round twice, so that what a round makes of the first one's result is seen too."""
        body, length = _opened(params["jaxpr"]), params["length"]
        if "ft_in" in params:  # jax 0.12
            consts, carried, _ = map(len, params["ft_in"].unpack())
        else:
            consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry, xs = (
            operands[:consts],
            operands[consts : consts + carried],
            operands[consts + carried :],
        )
        rounds = []
        for at in range(min(length, 2)):
            rows = [self._row(x, at, 0) for x in xs]
            results = self.run(*body, [*fixed, *carry, *rows])
            carry, ys = results[:carried], results[carried:]
            rounds.append(ys)
        stacked = []
        for each, (shape, floating) in zip(
            zip(*rounds, strict=True), outputs[carried:], strict=True
        ):
            kind = operations.kind_of("copy", each) if each[0].kind != "derived" else "derived"
            dims = (*fresh(shape[:1]), *each[0].dims)
            stacked.append(self.graph.add("stacked", each, dims, floating, kind))
        return [*carry, *stacked]

    def _row(self, x: Node, index: int, axis: int) -> Node:
        row = self._slice(x, axis, index, 1)
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        return self._op("squeeze", {"dimensions": (axis,)}, [row], shape, x.floating)

    def _slice(self, x: Node, axis: int, start: int, size: int) -> Node:
        """Return a range along one axis, as the primitive makes it."""
        starts = [0] * len(x.dims)
        stops = list(x.shape)
        starts[axis] = start
        stops[axis] = start + size
        params = {"start_indices": starts, "limit_indices": stops, "strides": None}
        shape = tuple(stop - first for first, stop in zip(starts, stops, strict=True))
        return self._op("slice", params, [x], shape, x.floating)


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, of one that is closed or open."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _info(op: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"power": params["y"]} if op == "integer_pow" else {}


def _same(operands: Sequence[Node]) -> bool:
    """Whether both sides of a difference are one parameter, cut alike: x - stop_gradient(x), which is 0."""
    while operands[0].op in operations.SAME or operands[1].op in operations.SAME:
        operands = [x.inputs[0] if x.op in operations.SAME else x for x in operands]
    return operands[0] is operands[1]


class Build(Protocol):
    """A model of one's own: (sizes) to its parameters' shapes, loss(params, batch), and the batch's shapes."""

    def __call__(
        self, sizes: Mapping[str, int], /
    ) -> tuple[Any, Callable[[Any, Any], jax.Array], Any]: ...


class _Sizes(dict[str, int]):
    def __missing__(self, axis: str) -> int:
        raise PresetError(
            f"the model asks for the size of {axis!r}, which is not among {', '.join(self)}; name it too"
        )


def roles_of(build: Build, sizes: Mapping[str, int]) -> Roles:
    """Declarations of a model of one's own, from its loss.

    Args:
        build: makes it at any sizes; shapes (`jax.ShapeDtypeStruct`) do, nothing is computed.
        sizes: of the base, by logical axis (`mupax.presets.roles.AXES`); each is doubled alone.

    Raises:
        PresetError: an axis that there is none of, or a tree of another structure at other sizes.
    """
    for axis in sizes:
        if axis not in AXES:
            raise PresetError(f"no logical axis is named {axis!r}; the axes are {', '.join(AXES)}")
    sizes = _Sizes(sizes)
    params, loss, batch = build(sizes)
    samples = [Sample(sizes, _shapes(params))]
    for axis, size in sizes.items():
        other = _Sizes({**sizes, axis: 2 * size})
        samples.append(Sample(other, _shapes(build(other)[0])))
        if axis != "layers" and samples[-1].shapes.keys() != samples[0].shapes.keys():
            changed = sorted(samples[-1].shapes.keys() ^ samples[0].shapes.keys())
            raise PresetError(
                f"with {axis} {2 * size} the model has other parameters: {', '.join(changed[:3])}"
            )
    shared = [s for s in samples if samples[0].shapes.keys() <= s.shapes.keys()]
    return deduce(trace(loss, params, batch), shared)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    # By the names of `define_function`, which takes the declarations: of an nnx.Variable without ".value".
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params).items()}


def roles_of_config(config: ModelConfig) -> Roles:
    """Declarations of a model of the zoo, from the loss that it trains with."""
    model = definition(config)
    example = {
        k: jax.ShapeDtypeStruct((BATCH, *a.shape), a.dtype) for k, a in config.example().items()
    }
    samples = [_sample(of) for of in (config, *variations(config))]
    # As for a CPU, where attention is made of operations: through a kernel nothing could be seen.
    cpu = Layout(Mesh(np.array(jax.devices("cpu")[:1]), "data"), {})
    graph = trace(loss_of(model, cpu), model.abstract, example)
    return deduce(graph, samples)


def loss_of(
    model: Definition, layout: Layout = ONE_DEVICE
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], jax.Array]:
    """Return the loss of a model of the zoo, of parameters and a batch, every factor being 1.

    Args:
        model: taken apart.
        layout: of the devices that the loss is traced for.
    """
    ones = {name: np.ones(of["shape"], np.float32) for name, of in model.factors.items()}

    def loss(params: Mapping[str, Any], batch: Mapping[str, Any]) -> jax.Array:
        module: Any = model.bind(params, ones, layout=layout)
        inputs = {
            name: x for name, x in batch.items() if name not in ("inputs", "targets", "weights")
        }
        read = readout_method(module)
        if read is None:
            return cross_entropy_from_logits(
                module(batch["inputs"], **inputs), batch["targets"], batch["weights"]
            ).loss
        readout_inputs = read(batch["inputs"], **inputs)
        sums = cross_entropy(
            readout_inputs, batch["targets"], batch["weights"], how="plain", layout=layout
        )
        return sums.loss if sums.routing is None else sums.loss + sums.routing.penalty

    return loss


def variations(config: ModelConfig) -> list[ModelConfig]:
    """The same model with every size that can be changed doubled, one at a time or two that must go together."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    alone = {
        name: getattr(config, of)
        for name, of in _ALONE.items()
        if name in values and values[name] is None
    }
    values |= alone
    counts = [
        (name,) for name, value in values.items() if type(value) is int or name == "mlp_ratio"
    ]
    out = []
    for fields in (*counts, *_TOGETHER):
        changed = {name: 2 * values[name] for name in fields if values.get(name) is not None}
        try:
            other = dataclasses.replace(config, **alone | changed)
        except ConfigError:
            continue
        if other.sizes() != config.sizes():
            out.append(other)
    return out


def _sample(config: ModelConfig) -> Sample:
    """Sizes and shapes of a config, whose modules make every parameter so (`mupax.zoo.definition.Init.param`)."""
    sizes = config.sizes()
    shapes = {
        name: tuple(sizes[axis] for axis in spec.axes) for name, spec in config.parameters().items()
    }
    return Sample(sizes, shapes)


def differences(
    config: ModelConfig, roles: Roles, declared: Mapping[str, ParamSpec] | None = None
) -> dict[str, str]:
    """What differs from declarations, by parameter, in words; what a gain starts at is in no loss and not compared.

    Args:
        config: of the model.
        roles: what its loss says.
        declared: in place of the config's declarations.
    """
    declared, out = config.parameters() if declared is None else declared, {}
    for name in sorted(declared.keys() | roles.specs.keys()):
        spec, other = declared.get(name), roles.specs.get(name)
        if spec is None:
            out[name] = f"is not declared: {roles.evidence[name]}"
        elif other is not None and (words := _fields(spec, other)):
            out[name] = f"{words}: {roles.evidence[name]}"
    if config.tied_readout != roles.tied:
        out["tied readout"] = f"is declared {config.tied_readout} and traced {roles.tied}"
    return out


def refuse_wrong_declarations(config: ModelConfig) -> None:
    """Raises PresetError where declarations of a model are not what its loss does; what tracing refuses is let through."""
    if differing := differences(config, roles_of_config(config)):
        lines = "\n".join(f"{name}: {words}" for name, words in differing.items())
        raise PresetError(
            f"the declarations of {config.family} are not what its loss does; mend them:\n{lines}"
        )


def _fields(spec: ParamSpec, other: ParamSpec) -> str:
    names = [field.name for field in dataclasses.fields(spec) if field.name != "start"]
    pairs = [(name, getattr(spec, name), getattr(other, name)) for name in names]
    return "; ".join(
        f"{name} is declared {_text(a)} and traced {_text(b)}" for name, a, b in pairs if a != b
    )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(value)})"
    return str(getattr(value, "value", value))
