"""How a loss takes dimensions of parameters apart: a Linear to heads * head_dim, whose output is reshaped to [..., heads, head_dim]."""

from __future__ import annotations

from collections.abc import Iterable

from mupax.train.studies.roles.graph import Atom, Dim, Graph, Place, Use


def cuts_of(graph: Graph) -> dict[Place, set[tuple[int, ...]]]:
    """Return, of every dimension of a parameter, the sizes of parts that the loss cuts it into, the outermost first."""
    cuts: dict[Place, set[tuple[int, ...]]] = {}
    for node in graph.nodes:
        for dim in node.dims:
            for atom in dim:
                _note(cuts, atom.places, [(atom,)])
    for use in graph.uses:
        for place, dims in _met(use):
            _note(cuts, [place], dims)
    return cuts


def _note(cuts: dict[Place, set[tuple[int, ...]]], places: Iterable[Place], dims: list[Dim]) -> None:
    parts = {sizes for dim in dims for sizes in _parts(dim)}
    for place in places if parts else ():
        cuts.setdefault(place, set()).update(parts)


def _parts(dim: Dim) -> set[tuple[int, ...]]:
    """Return the parts that a dimension is cut into, or is made of."""
    parts = {tuple(atom.size for atom in dim)} if len(dim) > 1 else set[tuple[int, ...]]()
    for atom in dim:
        for cut in [root.parts for root in _line(atom) if root.parts is not None]:
            parts.add((cut[0].size, cut[1].size))
    return parts


def _line(atom: Atom) -> list[Atom]:
    """Return the atom and all parts that it was cut into."""
    parts = [] if atom.parts is None else [*_line(atom.parts[0]), *_line(atom.parts[1])]
    return [atom, *parts]


def _met(use: Use) -> list[tuple[Place, list[Dim]]]:
    """Return the dimensions of activations that a parameter's dimensions lie along: contracted with them, or added to them."""
    view = use.view
    node = use.node
    other = use.other
    if other is None:
        return []
    if node.op == "dot":
        side = 0 if node.inputs[0] is view else 1
        pairs = list(zip(node.info["contracted"][side], node.info["contracted"][1 - side], strict=True))
    elif len(view.dims) == len(node.dims):
        pairs = list(zip(view.dims, node.dims, strict=True))
    else:
        pairs = []
    return [
        (place, [theirs])
        for own, theirs in pairs
        for place in sorted({place for atom in own for place in atom.places if place[0] == use.param})
    ]
