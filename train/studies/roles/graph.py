"""Graph of a traced loss, which follows the dimensions of parameters from value to value.

Every dimension of every value is made of atoms. An atom is an axis of an array or a part of one.
Reshapes cut and join atoms, transposes move them, and products copy the atoms that they do not sum
over. For every value the graph therefore knows which dimensions of which parameters its own
dimensions are, through any layout operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

ParamDim = tuple[str, int]
"""Path of a parameter, and the index of one of its dimensions."""
Kind = Literal["constant", "data", "view", "derived", "activation"]
"""Kind of a value, by the arrays that it depends on.

* constant: on nothing.
* data: on the batch alone.
* view: a parameter in another layout.
* derived: computed from parameters alone.
* activation: on parameters and the batch.
"""


@dataclasses.dataclass(eq=False, slots=True)
class Atom:
    """Axis of an array, or a part that a reshape cut it into.

    Attributes:
        size: Number of elements along the atom.
        param_dims: Dimensions of parameters that the atom is, or is a part of.
        source: Atom that this one was cut out of. `None` for a complete axis.
        parts: Outer and inner atom that this one was last cut into. `None` before a cut.
        segments: For an axis along which parameters are concatenated: the end index and the
            parameter paths of each array, in order. Otherwise empty.
        broadcast: Whether all elements along the atom are equal.
    """

    size: int
    param_dims: frozenset[ParamDim] = frozenset()
    source: Atom | None = None
    parts: tuple[Atom, Atom] | None = None
    segments: tuple[tuple[int, frozenset[str]], ...] = ()
    broadcast: bool = False

    def copy(self) -> Atom:
        """Return a new atom of the same size, parameters and segments, for a product's result.

        The copy has no `source` and no `parts`.
        """
        # Without `broadcast`, because the product may differ along the axis.
        return Atom(self.size, self.param_dims, segments=self.segments)

    def is_from(self, atoms: set[Atom]) -> bool:
        """Return whether this atom is one of `atoms`, or was cut out of one."""
        return any(atom in atoms for atom in self.ancestors())

    def ancestors(self) -> list[Atom]:
        """Return this atom, the atom that it was cut out of, and so on."""
        if self.source is None:
            return [self]
        return [self, *self.source.ancestors()]

    def cut(self, outer_size: int) -> tuple[Atom, Atom]:
        """Cut the atom into an outer part of `outer_size` and an inner part, and return both.

        `outer_size` must divide the size of the atom.

        The parts are kept in `parts`. If the next cut has the same size, it returns the same two
        atoms.
        """
        if self.parts is None or self.parts[0].size != outer_size:
            inner_size = self.size // outer_size
            outer = Atom(outer_size, self.param_dims, self, broadcast=self.broadcast)
            inner = Atom(inner_size, self.param_dims, self, broadcast=self.broadcast)
            # Segments stay known only if the cut does not go through one of them.
            if all(stop % inner_size == 0 for stop, _ in self.segments):
                segments = []
                for stop, params in self.segments:
                    segments.append((stop // inner_size, params))
                outer.segments = tuple(segments)
            self.parts = (outer, inner)
        return self.parts


Dim = tuple[Atom, ...]
"""Atoms of a dimension, the outermost first. A dimension of size 1 has none."""


def size_of(dim: Dim) -> int:
    """Return the number of elements along a dimension."""
    return math.prod(atom.size for atom in dim)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """Value in the graph.

    Attributes:
        number: Index in the order of computation.
        op: Primitive that made the value, or "parameter", "batch", "constant", "lookup", "loss".
        inputs: Operands of the primitive.
        dims: Atoms of each dimension.
        kind: What the value depends on: parameters, batch, both or neither.
        floating: Whether the value has real numbers. Others carry no gradient.
        params: Paths of the parameters that a view consists of. A derived value has those of the
            views among its inputs. Empty for other kinds.
        picks: Dimensions of these parameters from which a gather took rows, with the kind of the
            gather's index.
        info: Further facts about the operation, by name: "contracted", "batched" and "kept" of a
            product (`operations.dot`), "summed" of a reduction, "chosen" of a lookup, "selected" of
            a slice of a concatenation, "power" of `integer_pow`, "value" of a scalar constant,
            "learned" of a parameter that counts as an activation.
    """

    number: int
    op: str
    inputs: tuple[Node, ...]
    dims: tuple[Dim, ...]
    kind: Kind
    floating: bool
    params: frozenset[str] = frozenset()
    picks: frozenset[tuple[ParamDim, Kind]] = frozenset()
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(size_of, self.dims))


@dataclasses.dataclass(frozen=True, eq=False)
class OperandUse:
    """Use of a parameter: an operation in which it meets an activation or the batch.

    Attributes:
        param: Path of the parameter.
        node: Result of the operation.
        view: Operand that holds the parameter.
        other: The other operand. `None` for a lookup.
    """

    param: str
    node: Node
    view: Node
    other: Node | None

    def dims_of_param(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        """Return the indices of the parameter's dimensions that occur in `dims`, sorted."""
        indices = set()
        for dim in dims:
            for atom in dim:
                indices.update(index for name, index in atom.param_dims if name == self.param)
        return tuple(sorted(indices))


class Graph:
    """All values of a loss, and all uses of its parameters."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.uses: list[OperandUse] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shape of every parameter, by path."""

    def add(
        self,
        op: str,
        inputs: Sequence[Node],
        dims: Sequence[Dim],
        floating: bool,
        kind: Kind,
        **info: Any,
    ) -> Node:
        """Add a value and return its node. The arguments are the attributes of `Node`.

        A view or derived value gets the `params` and `picks` of the views among its inputs.
        """
        params: frozenset[str] = frozenset()
        picks: frozenset[tuple[ParamDim, Kind]] = frozenset()
        if kind in ("view", "derived"):
            for node in inputs:
                if node.kind == "view":
                    params |= node.params
                    picks |= node.picks
        node = Node(
            len(self.nodes), op, tuple(inputs), tuple(dims), kind, floating, params, picks, info
        )
        self.nodes.append(node)
        return node

    def parameter(self, path: str, shape: tuple[int, ...]) -> Node:
        """Add a parameter as a view in its stored layout, and return its node.

        Args:
            path: Keys of the parameter in the tree, joined by dots.
        """
        self.shapes[path] = shape
        dims: list[Dim] = []
        for index, size in enumerate(shape):
            dims.append(() if size == 1 else (Atom(size, frozenset({(path, index)})),))
        node = self.add("parameter", (), dims, True, "view")
        # `add` takes parameters from the inputs, and this node has none.
        node.params = frozenset({path})
        return node

    def learned_vectors(self, path: str, shape: tuple[int, ...]) -> Node:
        """Add a parameter as an activation, as tokens that do not depend on the batch, and return it.

        Its only use is this activation itself.
        """
        dims = [(Atom(size, frozenset({(path, index)})),) for index, size in enumerate(shape)]
        self.shapes[path] = shape
        node = self.add("lookup", (), dims, True, "activation", learned=True)
        self.uses.append(OperandUse(path, node, node, None))
        return node

    def use(self, node: Node, view: Node, other: Node | None) -> None:
        """Record a use of every parameter of a view. Arguments are attributes of `OperandUse`."""
        # Sorted, because the order of a set of strings differs between processes.
        for param in sorted(view.params):
            self.uses.append(OperandUse(param, node, view, other))


def users(graph: Graph) -> dict[Node, list[Node]]:
    """Return, for each value, the results of the operations that read the value.

    Values that no operation reads have no entry.
    """
    result: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.inputs:
            result.setdefault(operand, []).append(node)
    return result


def fresh(shape: Iterable[int], broadcast: bool = False) -> tuple[Dim, ...]:
    """Return new dimensions of these sizes that belong to no parameter.

    Args:
        broadcast: Whether all elements along these dimensions are equal.
    """
    dims = []
    for size in shape:
        if size == 1:
            dims.append(())
        else:
            dims.append((Atom(size, broadcast=broadcast),))
    return tuple(dims)


def param_dims_of(atoms: Iterable[Atom]) -> frozenset[ParamDim]:
    """Return the dimensions of parameters that any of the atoms is a part of."""
    param_dims: frozenset[ParamDim] = frozenset()
    for atom in atoms:
        param_dims |= atom.param_dims
    return param_dims


def regrouped(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...] | None:
    """Return the dimensions of an array after a reshape, which joins and cuts its atoms.

    `dims` are the dimensions before the reshape, and `shape` is the shape after it. The result is
    `None` if a new dimension begins or ends inside an atom that cannot be cut there.
    """
    # A stack of the atoms, the outermost on top.
    atoms = list(itertools.chain(*dims))
    atoms.reverse()
    result = []
    for size in shape:
        dim: list[Atom] = []
        while size > 1:
            if not atoms:
                return None
            atom = atoms.pop()
            if size % atom.size:
                if atom.size % size:
                    return None
                atom, inner = atom.cut(size)
                atoms.append(inner)
            dim.append(atom)
            size //= atom.size
        result.append(tuple(dim))
    return None if atoms else tuple(result)


class Slice(NamedTuple):
    """Part of a dimension, and the parameters in this part."""

    dim: Dim
    params: frozenset[str] | None
    """Paths of the parameters in this part of a concatenation of parameters.

    `None` for any other dimension, and for all of a dimension.
    """


def sliced(dim: Dim, start: int, stop: int, stride: int = 1) -> Slice:
    """Return the part of a dimension from `start` to `stop`.

    If the range is all of the dimension, return the dimension unchanged. Otherwise the part is one
    new atom, or no atom at size 1. If the dimension is a concatenation of parameters, the result
    has the paths of the parameters in the range.
    """
    size = size_of(dim)
    count = len(range(start, stop, stride))
    if count == size:
        return Slice(dim, None)

    params = None
    segments = dim[0].segments
    if segments:
        # Segments are counted along the outermost atom, `start` and `stop` along the dimension.
        inner_size = size // dim[0].size
        params = frozenset()
        segment_start = 0
        for segment_stop, segment_params in segments:
            if segment_start * inner_size < stop and start < segment_stop * inner_size:
                params |= segment_params
            segment_start = segment_stop
    if count == 1:
        return Slice((), params)
    # An atom can name only one source.
    source = dim[0] if len(dim) == 1 else None
    return Slice((Atom(count, param_dims_of(dim), source),), params)
