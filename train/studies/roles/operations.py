"""What each primitive of JAX makes of its operands: the atoms of what comes out, and whether it is still a view of a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mupax.train.studies.roles.graph import (
    Atom,
    Dim,
    Graph,
    Kind,
    Node,
    Place,
    fresh,
    regrouped,
    sliced,
)

SAME = frozenset({
    "convert_element_type", "copy", "copy_p", "optimization_barrier", "sharding_constraint", "name", "reduce_precision",
    "stop_gradient", "device_put", "pvary", "pbroadcast", "reshard", "layout_constraint",
})  # fmt: skip
LAYOUT = SAME | {
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "split", "concatenate",
    "stack", "pad", "rev", "gather", "scatter", "dynamic_update_slice", "select_n", "taken",
}  # fmt: skip
"""Primitives that move numbers and compute none."""
SCALING = frozenset({"mul", "div", "neg"})
REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "argmax",
        "argmin",
        "reduce_and",
        "reduce_or",
    }
)
ELEMENTWISE = frozenset({
    "add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf",
    "erfc", "sqrt", "rsqrt", "cbrt", "square", "integer_pow", "pow", "sin", "cos", "abs", "sign", "clamp", "is_finite", "floor",
    "round", "sort", "cumsum", "cumlogsumexp", "cummax", "cumprod", "atan2", "tan", "asinh", "sinh", "cosh", "atan",
})  # fmt: skip
"""Primitives that keep the shape of their operands."""


def kind_of(op: str, inputs: Sequence[Node]) -> Kind:
    """What the result depends on.

    Args:
        op: the primitive.
        inputs: its operands.
    """
    kinds = {node.kind for node in inputs}
    if not kinds & {"view", "derived", "activation"}:
        return "data" if "data" in kinds else "constant"
    if kinds & {"activation", "data"}:
        return "activation"
    scales = (
        op in SCALING
        and [node.kind for node in inputs].count("view") == 1
        and (op != "div" or inputs[0].kind == "view")
    )
    return "view" if kinds <= {"view", "constant"} and (op in LAYOUT or scales) else "derived"


def combined(inputs: Sequence[Node], shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Dimensions of an elementwise result: of an activation's operand before a parameter's, those before a constant's.

    Args:
        inputs: operands.
        shape: of the result.
    """
    order = ("activation", "view", "derived", "data", "constant")
    ranked = sorted(
        (node for node in inputs if node.shape == shape), key=lambda node: order.index(node.kind)
    )
    dims = []
    for at in range(len(shape)):
        choices = [
            node.dims[at] for node in ranked if not any(atom.broadcast for atom in node.dims[at])
        ]
        dims.append(next(iter(choices), ranked[0].dims[at] if ranked else fresh(shape)[at]))
    return tuple(dims)


def joined(inputs: Sequence[Node], at: int) -> tuple[Dim, ...]:
    """Dimensions of arrays laid end to end.

    Args:
        inputs: the arrays, in order.
        at: dimension along which they lie.
    """
    first = max(inputs, key=lambda node: node.kind == "activation")
    if any(node.kind == "activation" for node in inputs) or not all(
        node.kind == "view" for node in inputs
    ):
        total = sum(node.shape[at] for node in inputs)
        return tuple(fresh([total])[0] if i == at else dim for i, dim in enumerate(first.dims))
    dims: list[Dim] = []
    for i, each in enumerate(zip(*(node.dims for node in inputs), strict=True)):
        places = frozenset().union(*(atom.places for dim in each for atom in dim))
        if i != at:
            alike = all([a.size for a in dim] == [a.size for a in each[0]] for dim in each)
            columns = zip(*each, strict=True) if alike else ()
            same = tuple(
                Atom(c[0].size, frozenset().union(*(a.places for a in c))) for c in columns
            )
            dims.append(same if alike else (Atom(first.shape[i], places),))
            continue
        stop, segments = 0, []
        for node in inputs:
            stop += node.shape[at]
            segments.append((stop, node.params))
        dims.append((Atom(stop, places, segments=tuple(segments)),))
    return tuple(dims)


def layout(
    graph: Graph, op: str, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """The result of an operation that computes nothing.

    Args:
        graph: to which it is added.
        op: the primitive.
        inputs: operands; indices are among them.
        params: of the equation.
        shape: of the result.
    """
    x, kind, info = inputs[0], kind_of(op, inputs), {}
    dims: Sequence[Dim] | None
    match op:
        case "reshape":
            dims = regrouped(x.dims, shape)
            if dims is None:
                info["mixed"] = True
                places = frozenset().union(*(atom.places for dim in x.dims for atom in dim))
                dims = [() if size == 1 else (Atom(size, places),) for size in shape]
        case "transpose":
            dims = [x.dims[at] for at in params["permutation"]]
        case "broadcast_in_dim":
            dims = list(fresh(shape, broadcast=True))
            for at, to in enumerate(params["broadcast_dimensions"]):
                dims[to] = x.dims[at] if x.shape[at] == shape[to] else dims[to]
        case "squeeze":
            dropped = {at % len(x.dims) for at in params["dimensions"]}
            dims = [dim for at, dim in enumerate(x.dims) if at not in dropped]
        case "expand_dims":
            dims = list(x.dims)
            for at in sorted(params["dimensions"]):
                dims.insert(at, ())
        case "slice":
            strides = params["strides"] or (1,) * len(x.dims)
            ranges = zip(
                x.dims, params["start_indices"], params["limit_indices"], strides, strict=True
            )
            dims, info = _cut([sliced(*of) for of in ranges])
        case "dynamic_slice":
            starts = [node.info.get("value") for node in inputs[1:]]
            offsets = [0 if start is None else start for start in starts]
            dims, info = _cut(
                [sliced(d, at, at + n) for d, at, n in zip(x.dims, offsets, shape, strict=True)]
            )
            if None in [s for s, d, n in zip(starts, x.shape, shape, strict=True) if d != n]:
                info = {}
            kind = kind_of(op, [x])
        case "concatenate":
            dims = joined(inputs, params["dimension"])
        case "stack":
            at = params["axis"] if "axis" in params else params["dimension"]
            rows = [_with_row(graph, node, at) for node in inputs]
            dims = joined(rows, at)
        case "select_n":
            kind = kind_of(op, inputs[1:])
            dims = combined(inputs[1:], shape)
        case "pad" | "scatter" | "dynamic_update_slice" | "rev":
            same = [
                dim if n == m else d
                for dim, n, m, d in zip(x.dims, x.shape, shape, fresh(shape), strict=True)
            ]
            dims = same if op in ("pad", "rev") or x.kind == "activation" else fresh(shape)
        case "gather":
            return _gathered(graph, inputs, params, shape)
        case _:
            dims = x.dims
    if (
        x.kind in ("data", "constant")
        and dims is not None
        and op not in ("concatenate", "stack", "select_n")
    ):
        info = {}
    node = graph.add(op, inputs, dims or (), True, kind, **info)
    return node


def _with_row(graph: Graph, node: Node, at: int) -> Node:
    dims = list(node.dims)
    dims.insert(at, ())
    return graph.add("expand_dims", (node,), dims, node.floating, node.kind)


def _cut(parts: Sequence[tuple[Dim, frozenset[str] | None]]) -> tuple[list[Dim], dict[str, Any]]:
    chosen = [params for _, params in parts if params is not None]
    return [dim for dim, _ in parts], {
        "selected": frozenset.intersection(*chosen)
    } if chosen else {}


def _gathered(
    graph: Graph, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """Rows that an index chose: of a parameter by the batch a lookup; by routing or by positions alone, a view."""
    x, index = inputs[0], inputs[1]
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    dims, axes = list(fresh(shape)), [at for at in range(len(x.dims)) if at not in gone]
    for at, to in zip(axes, numbers.offset_dims, strict=True):
        dims[to] = x.dims[at] if sizes[at] == x.shape[at] else dims[to]
    rest = [at for at in range(len(shape)) if at not in numbers.offset_dims]
    for at, dim in zip(rest, index.dims[:-1], strict=True):
        dims[at] = dim
    if x.kind != "view":
        return graph.add("gather", inputs, dims, x.floating, kind_of("gather", inputs))
    chosen = {
        place for at in numbers.start_index_map for atom in x.dims[at] for place in atom.places
    }
    if index.kind == "data":
        node = graph.add("lookup", (x, index), dims, True, "activation", chosen=chosen)
        graph.use(node, x, None)
        return node
    node = graph.add("gather", (x, index), dims, True, "view")
    picks: frozenset[tuple[Place, Kind]] = frozenset((place, index.kind) for place in chosen)
    node.params, node.picks = x.params, x.picks | picks
    return node


def dot(graph: Graph, inputs: Sequence[Node], params: dict[str, Any]) -> Node:
    """A product, with the dimensions that it sums over and those of each side that it keeps.

    Args:
        graph: to which it is added.
        inputs: both sides.
        params: of the equation.
    """
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    left, right = inputs[0], inputs[1]
    free = [
        [d for at, d in enumerate(x.dims) if at not in (*c, *b)]
        for x, c, b in ((left, lc, lb), (right, rc, rb))
    ]
    sides = [[tuple(atom.copy() for atom in dim) for dim in dims] for dims in free]
    act = [x for x in inputs if x.kind in ("activation", "data")]
    lead = next(iter(act), left)
    dims = [*(lead.dims[at] for at in (lb if lead is left else rb)), *sides[0], *sides[1]]
    contracted = tuple(tuple(x.dims[at] for at in c) for x, c in ((left, lc), (right, rc)))
    batched = tuple(tuple(x.dims[at] for at in b) for x, b in ((left, lb), (right, rb)))
    atoms = [{atom for dim in side for atom in dim} for side in sides]
    info = {"contracted": contracted, "batched": batched, "kept": atoms}
    return graph.add("dot", inputs, dims, True, kind_of("dot", inputs), **info)


def ragged(
    graph: Graph, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """A product of rows in groups with a matrix a group, which counts as a batch dimension of the matrices.

    Args:
        graph: to which it is added.
        inputs: rows, matrices, sizes of groups.
        params: of the equation.
        shape: of the result.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (lc, rc), _ = numbers.dot_dimension_numbers
    x, w, group = inputs[0], inputs[1], numbers.rhs_group_dimensions
    out = [w.dims[at] for at in range(len(w.dims)) if at not in (*rc, *group)]
    dims = [
        *(d for at, d in enumerate(x.dims) if at not in lc),
        *(tuple(a.copy() for a in d) for d in out),
    ]
    contracted = (tuple(x.dims[at] for at in lc), tuple(w.dims[at] for at in rc))
    info = {
        "contracted": contracted,
        "batched": ((), tuple(w.dims[at] for at in group)),
        "kept": [set(), set()],
    }
    assert tuple(math.prod(a.size for a in d) for d in dims) == shape
    return graph.add("dot", (x, w), dims, True, kind_of("dot", (x, w)), **info)
