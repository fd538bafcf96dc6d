"""A loss' graph from its jaxpr, which is read and never run: calls are entered, loops go round twice, branches are all taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.train.studies.roles import operations
from mupax.train.studies.roles.graph import Graph, Node, fresh
from mupax.zoo.functional.tree import named_leaves

CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Where an equation that calls keeps what it calls."""
OPAQUE = frozenset({"shard_map", "pallas_call", "xla_pmap"})
"""Calls whose insides are in another world: of a device's part, or of memory."""


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
            operands = [self._constant(v.val) if hasattr(v, "val") else values[v] for v in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [self._constant(v.val) if hasattr(v, "val") else values[v] for v in jaxpr.outvars]

    def _constant(self, value: Any) -> Node:
        shape = tuple(np.shape(value))
        floating = jax.numpy.issubdtype(np.asarray(value).dtype if shape == () else value.dtype, jax.numpy.floating)
        info = {"value": value.item() if hasattr(value, "item") else value} if shape == () else {}
        return self.graph.add("constant", (), fresh(shape), floating, "constant", **info)

    def _equation(self, eqn: Any, operands: list[Node]) -> list[Node]:
        name, params = eqn.primitive.name, eqn.params
        outputs = [(tuple(v.aval.shape), jax.numpy.issubdtype(v.aval.dtype, jax.numpy.floating)) for v in eqn.outvars]
        if name == "scan":
            return self._scan(params, operands, outputs)
        if name == "cond":
            branches = [self.run(*_opened(b), operands[1:]) for b in params["branches"]]
            return [
                self._op("select_n", {}, [operands[0], *each], *out)
                for each, out in zip(zip(*branches, strict=True), outputs, strict=True)
            ]
        if name not in OPAQUE and name != "while" and (inner := next((params[k] for k in CALLS if k in params), None)):
            return self.run(*_opened(inner), operands)
        if name == "unstack":
            rows = [
                self._op("slice", _at(i, params["axis"], operands[0]), operands, *out) for i, out in enumerate(outputs)
            ]
            squeezed = {"dimensions": (params["axis"],)}
            return [self._op("squeeze", squeezed, [row], *out) for row, out in zip(rows, outputs, strict=True)]
        if name == "split":
            return self._split(params, operands[0], outputs)
        if name == "optimization_barrier":
            return [self._op("copy", {}, [x], *out) for x, out in zip(operands, outputs, strict=True)]
        return [self._op(name, params, operands, *out) for out in outputs]

    def _op(
        self, name: str, params: dict[str, Any], operands: list[Node], shape: tuple[int, ...], floating: bool
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
            node = graph.add(op, operands, dims, floating, operations.kind_of(op, operands), summed=summed)
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

    def _split(self, params: dict[str, Any], x: Node, outputs: list[Any]) -> list[Node]:
        start, out, at = [0] * len(x.dims), [], params["axis"]
        for shape, floating in outputs:
            stop = [first + n for first, n in zip(start, shape, strict=True)]
            of = {"start_indices": list(start), "limit_indices": stop, "strides": None}
            out.append(self._op("slice", of, [x], shape, floating))
            start[at] = stop[at]
        return out

    def _scan(self, params: dict[str, Any], operands: list[Node], outputs: list[Any]) -> list[Node]:
        """A loop, gone round twice, so that what a round makes of the first one's result is seen too."""
        body, length = _opened(params["jaxpr"]), params["length"]
        if "ft_in" in params:  # jax 0.12
            consts, carried, _ = map(len, params["ft_in"].unpack())
        else:
            consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry, xs = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
        rounds = []
        for at in range(min(length, 2)):
            rows = [self._row(x, at) for x in xs]
            results = self.run(*body, [*fixed, *carry, *rows])
            carry, ys = results[:carried], results[carried:]
            rounds.append(ys)
        stacked = []
        for each, (shape, floating) in zip(zip(*rounds, strict=True), outputs[carried:], strict=True):
            kind = operations.kind_of("copy", each) if each[0].kind != "derived" else "derived"
            dims = (*fresh(shape[:1]), *each[0].dims)
            stacked.append(self.graph.add("stacked", each, dims, floating, kind))
        return [*carry, *stacked]

    def _row(self, x: Node, at: int) -> Node:
        row = self._op("slice", _at(at, 0, x), [x], (1, *x.shape[1:]), x.floating)
        return self._op("squeeze", {"dimensions": (0,)}, [row], x.shape[1:], x.floating)


def _at(index: int, axis: int, x: Node) -> dict[str, Any]:
    """A slice of one row, as the primitive has it."""
    start, stop = [0] * len(x.dims), list(x.shape)
    start[axis], stop[axis] = index, index + 1
    return {"start_indices": start, "limit_indices": stop, "strides": None}


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
