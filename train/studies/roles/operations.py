"""Rules for JAX's primitives in the graph of a loss: kind and dimensions of their results.

A kind says what a value depends on (parameters, batch, both or neither). Dimensions are made of
atoms, which are axes or parts of axes (`mupax.train.studies.roles.graph`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mupax.train.studies.roles.graph import (
    Atom,
    Dim,
    Graph,
    Kind,
    Node,
    ParamDim,
    Slice,
    fresh,
    param_dims_of,
    regrouped,
    size_of,
    sliced,
)

SAME = frozenset({
    "convert_element_type", "copy", "copy_p", "optimization_barrier", "sharding_constraint",
    "name", "reduce_precision", "stop_gradient", "device_put", "pvary", "pbroadcast", "reshard",
    "layout_constraint",
})  # fmt: skip
"""Primitives that return their operand unchanged, perhaps in another dtype or layout."""
LAYOUT = SAME | {
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice",
    "dynamic_slice", "split", "concatenate", "stack", "pad", "rev", "gather", "scatter",
    "dynamic_update_slice", "select_n", "taken",
}  # fmt: skip
"""Primitives that move elements and compute nothing."""
SCALING = frozenset({"mul", "div", "neg"})
"""Primitives that only scale a parameter by constants, so that the result counts as a view."""
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
    "add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "exp2", "log", "log1p",
    "expm1", "tanh", "logistic", "erf", "erfc", "sqrt", "rsqrt", "cbrt", "square", "integer_pow",
    "pow", "sin", "cos", "abs", "sign", "clamp", "is_finite", "floor", "round", "sort", "cumsum",
    "cumlogsumexp", "cummax", "cumprod", "atan2", "tan", "asinh", "sinh", "cosh", "atan",
})  # fmt: skip
"""Primitives that keep the shape of their operands."""


def kind_of(op: str, inputs: Sequence[Node]) -> Kind:
    """Return the kind of a primitive's result, from the kinds of its operands.

    The kind says what the value depends on. A parameter and an activation or the batch give an
    "activation". Parameters alone give a "view" under layout operations and constant factors, and
    "derived" under all others. Without parameters the kind is "data" if the batch is among the
    operands, and otherwise "constant".
    """
    kinds = {node.kind for node in inputs}
    if not kinds & {"view", "derived", "activation"}:
        return "data" if "data" in kinds else "constant"
    if kinds & {"activation", "data"}:
        return "activation"
    if not kinds <= {"view", "constant"}:
        return "derived"
    if op in LAYOUT or _is_scaled_view(op, inputs):
        return "view"
    return "derived"


def _is_scaled_view(op: str, inputs: Sequence[Node]) -> bool:
    """Return whether a primitive scales one view of a parameter by constants, or negates it.

    Args:
        inputs: Operands, all of them views or constants.
    """
    if op not in SCALING:
        return False
    num_views = [node.kind for node in inputs].count("view")
    # A constant divided by a view is no multiple of the view.
    return num_views == 1 and (op != "div" or inputs[0].kind == "view")


def combined(inputs: Sequence[Node], shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Return the dimensions of the result of an elementwise operation.

    Each dimension is taken from one operand of the same shape: from an activation if possible, then
    from a view, a derived value, the batch or a constant. Operands whose elements are all equal
    along the dimension (broadcast) are passed over if another operand varies.
    """
    order = ("activation", "view", "derived", "data", "constant")
    # Scalars have no dimensions that could say anything.
    full_inputs = [node for node in inputs if node.shape == shape]
    full_inputs.sort(key=lambda node: order.index(node.kind))
    dims = []
    for index in range(len(shape)):
        candidates = [node.dims[index] for node in full_inputs]
        if not candidates:
            candidates = [fresh(shape)[index]]
        # A dimension along which everything is equal says less than any other.
        varying = []
        for dim in candidates:
            if not any(atom.broadcast for atom in dim):
                varying.append(dim)
        dims.append(varying[0] if varying else candidates[0])
    return tuple(dims)


def joined(inputs: Sequence[Node], axis: int) -> tuple[Dim, ...]:
    """Return the dimensions of the concatenation of arrays.

    If all arrays are views of parameters, the dimension `axis` has an `Atom` with a segment for
    each array.

    Args:
        axis: Dimension along which the arrays are concatenated.
    """
    if not all(node.kind == "view" for node in inputs):
        return _joined_values(inputs, axis)

    dims: list[Dim] = []
    for index in range(len(inputs[0].dims)):
        if index == axis:
            dims.append(_segmented(inputs, axis))
        else:
            dims.append(_merged([node.dims[index] for node in inputs], inputs[0].shape[index]))
    return tuple(dims)


def _joined_values(inputs: Sequence[Node], axis: int) -> tuple[Dim, ...]:
    """Return the dimensions of the concatenation of arrays that are not all views of parameters.

    The dimensions are those of the first activation (without one, of the first array), with a new
    dimension along `axis`.
    """
    # `max` returns the first of equals: the first activation, or the first array without one.
    leading = max(inputs, key=lambda node: node.kind == "activation")
    dims = list(leading.dims)
    total = sum(node.shape[axis] for node in inputs)
    dims[axis] = fresh([total])[0]
    return tuple(dims)


def _segmented(views: Sequence[Node], axis: int) -> Dim:
    """Return the dimension along which views are concatenated. Its atom has a segment per view."""
    param_dims: frozenset[ParamDim] = frozenset()
    segments = []
    stop = 0
    for view in views:
        param_dims |= param_dims_of(view.dims[axis])
        stop += view.shape[axis]
        segments.append((stop, view.params))
    return (Atom(stop, param_dims, segments=tuple(segments)),)


def _merged(dims: Sequence[Dim], size: int) -> Dim:
    """Return one dimension in place of a dimension of several views.

    It has the parameter dimensions of all of them, atom by atom if their atoms have equal sizes.
    """
    sizes = []
    for dim in dims:
        sizes.append([atom.size for atom in dim])
    if any(atom_sizes != sizes[0] for atom_sizes in sizes):
        return (Atom(size, param_dims_of(itertools.chain(*dims))),)
    atoms = []
    for column in zip(*dims, strict=True):
        atoms.append(Atom(column[0].size, param_dims_of(column)))
    return tuple(atoms)


def layout(
    graph: Graph, op: str, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """Add the result of a layout operation to the graph, and return it.

    A gather of a parameter's rows by the batch becomes a lookup, and its use is recorded.

    Args:
        inputs: Operands, the array first. Indices and start positions come after it.
        params: Parameters of the primitive in its jaxpr, such as `permutation` of a transpose.
    """
    if op == "gather":
        return _gathered(graph, inputs, params, shape)
    array = inputs[0]
    kind = kind_of(op, inputs)
    info: dict[str, Any] = {}
    dims: Sequence[Dim]
    match op:
        case "reshape":
            dims = _reshaped(array, shape)
        case "transpose":
            dims = _take(array.dims, params["permutation"])
        case "broadcast_in_dim":
            dims = list(fresh(shape, broadcast=True))
            for index, target in enumerate(params["broadcast_dimensions"]):
                if array.shape[index] == shape[target]:
                    dims[target] = array.dims[index]
        case "squeeze":
            dropped = {index % len(array.dims) for index in params["dimensions"]}
            dims = [dim for index, dim in enumerate(array.dims) if index not in dropped]
        case "expand_dims":
            dims = list(array.dims)
            for index in sorted(params["dimensions"]):
                dims.insert(index, ())
        case "slice":
            starts = params["start_indices"]
            stops = params["limit_indices"]
            strides = params["strides"] or (1,) * len(array.dims)
            ranges = zip(array.dims, starts, stops, strides, strict=True)
            slices = []
            for dim, start, stop, stride in ranges:
                slices.append(sliced(dim, start, stop, stride))
            dims = [part.dim for part in slices]
            info = _selection(slices)
        case "dynamic_slice":
            dims, info = _dynamically_sliced(inputs, shape)
            # The start of a slice may come from the batch, but a slice of a parameter stays a view.
            kind = kind_of(op, [array])
        case "concatenate":
            dims = joined(inputs, params["dimension"])
        case "stack":
            axis = params["axis"] if "axis" in params else params["dimension"]
            rows = [_with_row(graph, node, axis) for node in inputs]
            dims = joined(rows, axis)
        case "select_n":
            # The first operand only chooses between the others.
            kind = kind_of(op, inputs[1:])
            dims = combined(inputs[1:], shape)
        case "pad" | "rev":
            dims = _where_size_stays(array, shape)
        case "scatter" | "dynamic_update_slice":
            if array.kind == "activation":
                dims = _where_size_stays(array, shape)
            else:
                dims = fresh(shape)
        case _:
            dims = array.dims
    if array.kind in ("data", "constant") and op not in ("concatenate", "stack", "select_n"):
        info = {}
    return graph.add(op, inputs, dims, True, kind, **info)


def _reshaped(array: Node, shape: tuple[int, ...]) -> Sequence[Dim]:
    """Return the dimensions of an array after a reshape.

    If the reshape cuts atoms where they cannot be cut, nothing more is known: every new dimension
    then counts as part of all parameter dimensions of the array.
    """
    dims = regrouped(array.dims, shape)
    if dims is not None:
        return dims
    param_dims = param_dims_of(itertools.chain(*array.dims))
    dims_of_all: list[Dim] = []
    for size in shape:
        dims_of_all.append(() if size == 1 else (Atom(size, param_dims),))
    return dims_of_all


def _dynamically_sliced(
    inputs: Sequence[Node], shape: tuple[int, ...]
) -> tuple[list[Dim], dict[str, Any]]:
    """Return the dimensions of a dynamic slice, and its `info` for the graph.

    From a concatenation of parameters the info has "selected", the parameters in the slice. It is
    empty if a start is unknown, or if the array is no such concatenation.

    Args:
        inputs: Array, then the start index of every dimension.
    """
    array = inputs[0]
    slices = []
    is_known = True
    for dim, size, start_node, count in zip(
        array.dims, array.shape, inputs[1:], shape, strict=True
    ):
        start = start_node.info.get("value")
        if start is None and size != count:
            is_known = False
        offset = 0 if start is None else start
        slices.append(sliced(dim, offset, offset + count))
    dims = [part.dim for part in slices]
    return dims, _selection(slices) if is_known else {}


def _where_size_stays(array: Node, shape: tuple[int, ...]) -> list[Dim]:
    """Return the array's dimensions, with new ones where the size changes."""
    dims = []
    new_dims = fresh(shape)
    for dim, size, new_size, new_dim in zip(array.dims, array.shape, shape, new_dims, strict=True):
        dims.append(dim if size == new_size else new_dim)
    return dims


def _with_row(graph: Graph, node: Node, axis: int) -> Node:
    """Add an array with one more dimension of size 1 at `axis` to the graph, and return it."""
    dims = list(node.dims)
    dims.insert(axis, ())
    return graph.add("expand_dims", (node,), dims, node.floating, node.kind)


def _selection(slices: Sequence[Slice]) -> dict[str, Any]:
    """Return the `info` of a slice: under "selected", the parameters that are left in it.

    `slices` has the slice of every dimension. The result is empty if the array is no concatenation
    of parameters.
    """
    params = []
    for part in slices:
        if part.params is not None:
            params.append(part.params)
    if not params:
        return {}
    return {"selected": frozenset.intersection(*params)}


def _gathered(
    graph: Graph, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """Add the result of a gather to the graph, and return it.

    If a parameter's rows are gathered by an index of the batch alone, the result is a "lookup",
    which is recorded as a use of the parameter. If the index comes from constants, such as
    positions, or from activations, such as routing, the result is a view of the parameter.

    Args:
        params: Parameters of the primitive in its jaxpr, such as `dimension_numbers`.
    """
    array = inputs[0]
    index = inputs[1]
    numbers = params["dimension_numbers"]
    sizes = params["slice_sizes"]
    dropped = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    window_axes = [axis for axis in range(len(array.dims)) if axis not in dropped]
    dims = list(fresh(shape))
    for axis, target in zip(window_axes, numbers.offset_dims, strict=True):
        if sizes[axis] == array.shape[axis]:
            dims[target] = array.dims[axis]
    batch_axes = []
    for axis in range(len(shape)):
        if axis not in numbers.offset_dims:
            batch_axes.append(axis)
    # The last dimension of the index holds the coordinates of a row.
    for axis, dim in zip(batch_axes, index.dims[:-1], strict=True):
        dims[axis] = dim
    if array.kind != "view":
        return graph.add("gather", inputs, dims, array.floating, kind_of("gather", inputs))

    chosen: set[ParamDim] = set()
    for axis in numbers.start_index_map:
        for atom in array.dims[axis]:
            chosen |= atom.param_dims
    if index.kind == "data":
        node = graph.add("lookup", (array, index), dims, True, "activation", chosen=chosen)
        graph.use(node, array, None)
        return node
    node = graph.add("gather", (array, index), dims, True, "view")
    picks: set[tuple[ParamDim, Kind]] = set()
    for param_dim in chosen:
        picks.add((param_dim, index.kind))
    node.params = array.params
    node.picks = array.picks | picks
    return node


def dot(graph: Graph, inputs: Sequence[Node], params: dict[str, Any]) -> Node:
    """Add the result of a `dot_general` to the graph, and return it.

    Each entry of its `info` has a part for the left and the right operand: the dimensions that the
    product sums over ("contracted"), the batch dimensions ("batched"), and the atoms of the other
    dimensions, as they are in the result ("kept").

    Args:
        params: Parameters of the primitive in its jaxpr. Only `dimension_numbers` is read.
    """
    contracting_axes, batch_axes = params["dimension_numbers"]
    contracted = []
    batched = []
    all_free_dims: list[Dim] = []
    free_atoms = []
    for node, contracting, batch in zip(inputs, contracting_axes, batch_axes, strict=True):
        contracted.append(_take(node.dims, contracting))
        batched.append(_take(node.dims, batch))
        free_dims = []
        for axis, dim in enumerate(node.dims):
            if axis not in (*contracting, *batch):
                # Copies, because in x x' both sides would otherwise be the same atoms.
                free_dims.append(_copied(dim))
        all_free_dims += free_dims
        free_atoms.append(set(itertools.chain(*free_dims)))

    # Batch dimensions of the result are those of the activation, or of the left side.
    leading = 0
    if inputs[0].kind not in ("activation", "data") and inputs[1].kind in ("activation", "data"):
        leading = 1
    dims = [*batched[leading], *all_free_dims]
    info = {"contracted": tuple(contracted), "batched": tuple(batched), "kept": free_atoms}
    return graph.add("dot", inputs, dims, True, kind_of("dot", inputs), **info)


def _copied(dim: Dim) -> Dim:
    """Return a dimension of copied atoms, with the same parameters, for a product's result."""
    return tuple(atom.copy() for atom in dim)


def _take(dims: Sequence[Dim], axes: Sequence[int]) -> tuple[Dim, ...]:
    """Return the dimensions at the indices `axes`, in this order."""
    return tuple(dims[axis] for axis in axes)


def ragged(
    graph: Graph, inputs: Sequence[Node], params: dict[str, Any], shape: tuple[int, ...]
) -> Node:
    """Add the result of a `ragged_dot_general` to the graph, and return it.

    This primitive multiplies each group of rows by a matrix of its own, such as tokens by their
    expert's matrix. The dimension of groups counts as a batch dimension of the matrices.

    Args:
        inputs: Rows, matrices, and the sizes of the groups.
        params: Parameters of the primitive in its jaxpr.
        shape: Shape of the result, which is only checked.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (row_axes, matrix_axes), _ = numbers.dot_dimension_numbers
    group_axes = numbers.rhs_group_dimensions
    rows = inputs[0]
    matrices = inputs[1]
    dims: list[Dim] = []
    for axis, dim in enumerate(rows.dims):
        if axis not in row_axes:
            dims.append(dim)
    for axis, dim in enumerate(matrices.dims):
        if axis not in (*matrix_axes, *group_axes):
            dims.append(_copied(dim))
    info = {
        "contracted": (_take(rows.dims, row_axes), _take(matrices.dims, matrix_axes)),
        "batched": ((), _take(matrices.dims, group_axes)),
        "kept": [set(), set()],
    }
    assert tuple(map(size_of, dims)) == shape
    return graph.add("dot", (rows, matrices), dims, True, kind_of("dot", (rows, matrices)), **info)
