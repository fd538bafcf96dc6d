"""A traced loss as a graph of values whose every dimension is made of atoms: which parameter's axes came to lie where.

An atom is an axis or a part of one. Reshapes cut and join atoms, transposes move them, products copy those they keep; so of any
value it is known which dimensions of which parameter its own are, whatever layout operations lie between.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

Place = tuple[str, int]
"""A parameter's path and one of its dimensions."""
Kind = Literal["constant", "data", "view", "derived", "activation"]
"""Of nothing; of the batch alone; a parameter in another layout; computed of parameters alone; of parameters and batch."""


@dataclasses.dataclass(eq=False, slots=True)
class Atom:
    """One axis, or a part of one.

    Attributes:
        size: numbers along it.
        places: dimensions of parameters that it is, or is a part of.
        source: the atom that it was cut out of.
        parts: what it was last cut into.
        segments: of arrays laid end to end: where each ends, and its parameters.
        broadcast: whether everything along it is equal.
    """

    size: int
    places: frozenset[Place] = frozenset()
    source: Atom | None = None
    parts: tuple[Atom, Atom] | None = None
    segments: tuple[tuple[int, frozenset[str]], ...] = ()
    broadcast: bool = False

    def copy(self) -> Atom:
        """The same axis of a product's result, which is another value along it."""
        return Atom(self.size, self.places, segments=self.segments)

    def is_of(self, atoms: set[Atom]) -> bool:
        """Whether it is one of these, or was cut out of one."""
        return any(atom in atoms for atom in self.line())

    def line(self) -> list[Atom]:
        """Itself, what it was cut out of, and so on."""
        return [self, *([] if self.source is None else self.source.line())]

    def cut(self, first: int) -> tuple[Atom, Atom]:
        """Its outer part, of size `first`, and the inner rest; the same two whenever it is cut so."""
        if self.parts is None or self.parts[0].size != first:
            rest = self.size // first
            whole = self.segments and all(stop % rest == 0 for stop, _ in self.segments)
            outer = tuple((stop // rest, params) for stop, params in self.segments) if whole else ()
            one, other = (
                Atom(size, self.places, self, broadcast=self.broadcast) for size in (first, rest)
            )
            one.segments = outer
            self.parts = (one, other)
        return self.parts


Dim = tuple[Atom, ...]
"""Atoms of a dimension, the outermost first; none where its size is 1."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A value.

    Attributes:
        number: in the order of computation.
        op: the primitive that made it, or "parameter", "batch", "constant", "lookup".
        inputs: its operands.
        dims: what each dimension is made of.
        kind: what it depends on.
        floating: whether it is of real numbers: others carry no gradient.
        params: parameters that a view shows.
        picks: dimensions of them that an index chose, and the kind of the index.
        info: what else is known of the operation.
    """

    number: int
    op: str
    inputs: tuple[Node, ...]
    dims: tuple[Dim, ...]
    kind: Kind
    floating: bool
    params: frozenset[str] = frozenset()
    picks: frozenset[tuple[Place, Kind]] = frozenset()
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(atom.size for atom in dim) for dim in self.dims)


@dataclasses.dataclass(frozen=True, eq=False)
class OperandUse:
    """One place where a parameter meets an activation or the batch.

    Attributes:
        param: its path.
        node: what comes out.
        view: the parameter as it was taken.
        other: what it met; None of a lookup.
    """

    param: str
    node: Node
    view: Node
    other: Node | None

    def places(self, dims: Iterable[Dim]) -> tuple[int, ...]:
        """Dimensions of the parameter that these of the view are made of."""
        return tuple(
            sorted(
                {
                    at
                    for dim in dims
                    for atom in dim
                    for name, at in atom.places
                    if name == self.param
                }
            )
        )


class Graph:
    """All values of a loss, and all uses of its parameters."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.uses: list[OperandUse] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(
        self,
        op: str,
        inputs: Sequence[Node],
        dims: Sequence[Dim],
        floating: bool,
        kind: Kind,
        **info: Any,
    ) -> Node:
        """A new value.

        Args:
            op, inputs, dims, floating, kind: as of `Node`.
            **info: what else is known.
        """
        views = (
            [node for node in inputs if node.kind == "view"] if kind in ("view", "derived") else []
        )
        params = frozenset().union(*(node.params for node in views)) if views else frozenset()
        picks = frozenset().union(*(node.picks for node in views)) if views else frozenset()
        node = Node(
            len(self.nodes), op, tuple(inputs), tuple(dims), kind, floating, params, picks, info
        )
        self.nodes.append(node)
        return node

    def parameter(self, path: str, shape: tuple[int, ...]) -> Node:
        """A parameter as it is stored.

        Args:
            path: its keys, joined by dots.
            shape: of the array.
        """
        self.shapes[path] = shape
        dims = [
            () if size == 1 else (Atom(size, frozenset({(path, at)})),)
            for at, size in enumerate(shape)
        ]
        node = self.add("parameter", (), dims, True, "view")
        node.params = frozenset({path})
        return node

    def use(self, node: Node, view: Node, other: Node | None) -> None:
        """Note that all parameters of a view meet something.

        Args:
            node: what comes out.
            view: of the parameters.
            other: what they meet; None of a lookup.
        """
        self.uses.extend(OperandUse(param, node, view, other) for param in sorted(view.params))


def users(graph: Graph) -> dict[Node, list[Node]]:
    """Of every value those made of it."""
    out: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for x in node.inputs:
            out.setdefault(x, []).append(node)
    return out


def fresh(shape: Iterable[int], broadcast: bool = False) -> tuple[Dim, ...]:
    """Dimensions that are no parameter's.

    Args:
        shape: sizes.
        broadcast: whether everything along them is equal.
    """
    return tuple(() if size == 1 else (Atom(size, broadcast=broadcast),) for size in shape)


def regrouped(dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...] | None:
    """The same numbers in another shape: atoms joined and cut; None where a cut goes across atoms.

    Args:
        dims: before.
        shape: after.
    """
    left, out = list(itertools.chain(*dims))[::-1], []
    for size in shape:
        atoms: list[Atom] = []
        while size > 1:
            if not left:
                return None
            atom = left.pop()
            if size % atom.size:
                if atom.size % size:
                    return None
                atom, rest = atom.cut(size)
                left.append(rest)
            atoms.append(atom)
            size //= atom.size
        out.append(tuple(atoms))
    return None if left else tuple(out)


def sliced(dim: Dim, start: int, stop: int, stride: int = 1) -> tuple[Dim, frozenset[str] | None]:
    """A range of a dimension, and the parameters that it is of, where arrays laid end to end were cut apart again.

    Args:
        dim: before.
        start, stop, stride: of the range.
    """
    size, count = math.prod(atom.size for atom in dim), len(range(start, stop, stride))
    if count == size:
        return dim, None
    places = frozenset().union(*(atom.places for atom in dim))
    chosen, inner = None, size // dim[0].size
    if segments := dim[0].segments:
        chosen, begin = frozenset(), 0
        for end, params in segments:
            if begin * inner < stop and start < end * inner:
                chosen |= params
            begin = end
    if count == 1:
        return (), chosen
    return (Atom(count, places, dim[0] if len(dim) == 1 else None),), chosen
