"""Declarations of all parameters of a traced loss, each with its evidence, and what is refused and why.

A loss cuts dimensions apart: a Linear to heads * head_dim is reshaped to [..., heads, head_dim].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.train.studies.roles.flow import ADDS, Flow
from mupax.train.studies.roles.graph import Atom, Dim, Graph, Node, OperandUse, Place
from mupax.train.studies.roles.matrices import (
    FIXED,
    Attention,
    Constraint,
    Matrices,
    Refusal,
    attentions,
    split_names,
)

_ENDS = frozenset({Role.MLP_OUT, Role.EXPERT_OUT})
_STREAM = frozenset({Role.ROUTER, Role.PATCH_EMBEDDING, Role.TOKEN_EMBEDDING})
"""Matrices that no gain belongs to: what they write is the stream, or chooses."""
_LOOKUPS = {"position": Role.POSITION, "source": Role.POSITION, "distance": Role.RELATIVE_BIAS}

Shapes = Mapping[str, tuple[int, ...]]


def fact(matrices: Matrices, use: OperandUse) -> Constraint:
    """What a use that is no product says.

    Args:
        matrices: what products say.
        use: the other one.

    Raises:
        Refusal: it says nothing for sure.
    """
    node, names = use.node, matrices.names[use.param]
    if node.op in ADDS and use.other in matrices.flow.branches:
        fact = _of_branch(matrices, use)
        if fact is not None:
            return fact
    if matrices.flow.between(node) and node not in matrices.flow.branches:
        raise Refusal(
            "it acts on the stream itself between two branches, where in_block is not settled; declare its role"
        )
    if node.op == "lookup":
        axes = {names[at] for param, at in node.info["chosen"] if param == use.param}
        role = next((_LOOKUPS[axis] for axis in axes if axis in _LOOKUPS), Role.TOKEN_EMBEDDING)
        if role is Role.RELATIVE_BIAS:
            raise Refusal(
                "the batch says which distance to look up; compute distances of positions"
            )
        return Constraint(
            role=role,
            evidence=f"is looked up along {', '.join(sorted(axes))} by integers of the batch",
        )
    if node.op in ADDS:
        return _added(matrices, use)
    if node.op in ("mul", "div"):
        return _multiplied(matrices, use)
    if (
        node.op in ("concatenate", "select_n", "scatter", "dynamic_update_slice", "stack")
        and matrices.flow.branch_of(node) is None
    ):
        return Constraint(
            role=Role.TOKEN_EMBEDDING, evidence="joins the sequence as a row of its own"
        )
    raise Refusal(
        f"it meets an activation in {node.op}; none of the roles does so: declare one, or write it as a product or sum"
    )


def _of_branch(matrices: Matrices, use: OperandUse) -> Constraint | None:
    """Return the bias of the matrix that ended the branch before, as in h + x @ w + b; None where that is no such sum."""
    flow = matrices.flow
    end = use.other
    assert end is not None
    sources = flow.sources(flow.branches[end][1])
    facts = [matrices.at.get((source.node, param)) for source in sources for param in source.params]
    if (
        len(facts) != 1
        or facts[0] is None
        or not set(_axes(matrices, use)) <= _outputs(matrices, sources)
    ):
        return None
    evidence = f"is added after the product of the {facts[0].role.value}, which ends the branch"
    return dataclasses.replace(
        facts[0], role=Role.BIAS, evidence=evidence, fan_in=(), of=facts[0].role
    )


def _added(matrices: Matrices, use: OperandUse) -> Constraint:
    flow, node, other = matrices.flow, use.node, use.other
    assert other is not None
    in_block = flow.branch_of(node) is not None
    if flow.norm(other) is not None:
        return Constraint(
            role=Role.BIAS,
            evidence="is added to a norm's result",
            in_block=in_block,
            of=Role.NORM_GAIN,
        )
    sources = flow.sources(other, through=True)
    if sources and all(
        any(source.node is of.logits for of in matrices.attentions) for source in sources
    ):
        if not any(kind == "constant" for (param, _), kind in use.view.picks if param == use.param):
            raise Refusal(
                "it is added to logits of attention and no distance chose it; declare its role"
            )
        return Constraint(
            role=Role.RELATIVE_BIAS,
            evidence="distances look it up; it is added to logits of attention",
            in_block=in_block,
        )
    facts = {matrices.at.get((source.node, param)) for source in sources for param in source.params}
    if blind := [
        p for source in sources for p in source.params if (source.node, p) not in matrices.at
    ]:
        raise Refusal(f"it is added to the product of {blind[0]}, which is refused itself")
    roles = {fact.role for fact in facts if fact is not None}
    if len(roles) == 1 and all(source.params for source in sources):
        of = next(fact for fact in facts if fact is not None)
        direct = of.role is Role.ROUTER or all(source.plain for source in sources)
        if direct and set(_axes(matrices, use)) <= _outputs(matrices, sources):
            evidence = f"is added to the product of the {of.role.value}"
            return dataclasses.replace(of, role=Role.BIAS, evidence=evidence, fan_in=(), of=of.role)
    if not in_block and any(axis in ("position", "source") for axis in _axes(matrices, use)):
        return Constraint(
            role=Role.POSITION,
            evidence="is added to the stream before its blocks, a row a position",
        )
    what = " and ".join(sorted(role.value for role in roles)) or "no matrix's product"
    raise Refusal(f"it is added to {what}, as neither their bias nor a position; declare its role")


def _outputs(matrices: Matrices, sources: list) -> set[str]:
    """Axes that products with parameters are made of, without those that they sum over."""
    axes: set[str] = set()
    for source in sources:
        for param in source.params:
            of = matrices.at.get((source.node, param))
            names = matrices.names.get(param, ())
            outputs = [
                axis for at, axis in enumerate(names) if of is not None and at not in of.fan_in
            ]
            axes |= set(split_names(outputs))
    return axes


def _axes(matrices: Matrices, use: OperandUse) -> tuple[str, ...]:
    return split_names(matrices.names[use.param])


def _multiplied(matrices: Matrices, use: OperandUse) -> Constraint:
    flow, node = matrices.flow, use.node
    other: Node | None = use.other
    assert other is not None
    in_block = flow.branch_of(node) is not None
    base = flow.norm(other)
    if other in flow.normalizers:
        base = _normalized(matrices, node)
    elif base is None and flow.norm_after(node):
        base = other
    if base is None and not in_block:
        raise Refusal("it multiplies what no norm made, outside of all branches; declare its role")
    sources = flow.sources(other if base is None else base, through=True)
    plain = flow.sources(base) if base is not None else sources
    facts = [matrices.at.get((source.node, param)) for source in sources for param in source.params]
    roles = {fact.role for fact in facts if fact is not None} - _STREAM
    streams = [
        source.node in flow.branches or source.node.op == "lookup" or bool(source.params)
        for source in plain
    ]
    if base is not None and not roles and all(streams or [False]):
        return Constraint(
            role=Role.NORM_GAIN, evidence="multiplies a norm of the stream", in_block=in_block
        )
    if roles and roles <= _ENDS:
        roles = {Role.MLP_OUT} if "experts" not in _axes(matrices, use) else roles
    if len(roles) != 1:
        what = " and ".join(sorted(role.value for role in roles)) or "no matrix's product"
        raise Refusal(
            f"it multiplies {what}; a gain belongs to a norm, or to one matrix: declare its role"
        )
    role = roles.pop()
    ends = role in _ENDS | {Role.ATTENTION_OUT}
    if base is not None and not ends and not all(source.params for source in plain):
        raise Refusal(
            f"it multiplies a norm of what a nonlinearity made of the {role.value}; declare its role"
        )
    if base is None and not ends:
        raise Refusal(
            f"it multiplies the product of the {role.value}, which no norm made; declare its role"
        )
    of = next(fact for fact in facts if fact is not None)
    evidence = (
        f"multiplies {'a norm of ' if base is not None else ''}the product of the {role.value}"
    )
    return Constraint(
        role=Role.NORM_GAIN, evidence=evidence, in_block=of.in_block, of=role, cross=of.cross
    )


def _normalized(matrices: Matrices, factor: Node) -> Node | None:
    """What a norm is taken of whose factor is multiplied by the gain first."""
    stack = [factor]
    while stack:
        node = stack.pop()
        for user in matrices.flow.users(node):
            if user in matrices.flow.normalizers:
                stack.append(user)
            elif (steps := matrices.flow.carriers(user)) and len(steps) == 1:
                return steps[0].source
    return None


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


def _note(
    cuts: dict[Place, set[tuple[int, ...]]], places: Iterable[Place], dims: list[Dim]
) -> None:
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


def _met(use: OperandUse) -> list[tuple[Place, list[Dim]]]:
    """Return the dimensions of activations that a parameter's dimensions lie along: contracted with them, or added to them."""
    view = use.view
    node = use.node
    other = use.other
    if other is None:
        return []
    if node.op == "dot":
        side = 0 if node.inputs[0] is view else 1
        pairs = list(
            zip(node.info["contracted"][side], node.info["contracted"][1 - side], strict=True)
        )
    elif len(view.dims) == len(node.dims):
        pairs = list(zip(view.dims, node.dims, strict=True))
    else:
        pairs = []
    return [
        (place, [theirs])
        for own, theirs in pairs
        for place in sorted(
            {place for atom in own for place in atom.places if place[0] == use.param}
        )
    ]


class Sample(NamedTuple):
    """One setting of all sizes, and the shapes of parameters there."""

    sizes: Mapping[str, int]
    shapes: Shapes


@dataclasses.dataclass(frozen=True)
class Roles:
    """What tracing says.

    Attributes:
        specs: path to declaration.
        evidence: path to the reason, in words.
        refused: path to why no role is certain, and what to write.
        tied: declaration of a readout that shares the token embedding's table; None without one.
    """

    specs: dict[str, ParamSpec]
    evidence: dict[str, str]
    refused: dict[str, str]
    tied: ParamSpec | None = None


def deduce(graph: Graph, samples: Sequence[Sample]) -> Roles:
    """The declarations of a traced loss.

    Args:
        graph: of the loss at the first of the samples.
        samples: shapes at the base, then with each size changed alone.
    """
    names, refused = axis_names(samples, graph)
    named = {param: axes for param, axes in names.items() if param not in refused}
    flow = Flow(graph)
    of_attention = attentions(flow)
    matrices = Matrices(flow, of_attention, named)
    refused |= {param: reason for param, reason in matrices.refused.items() if param not in refused}
    uses: dict[str, list[OperandUse]] = {}
    for use in graph.uses:
        uses.setdefault(use.param, []).append(use)
    specs: dict[str, ParamSpec] = {}
    evidence: dict[str, str] = {}
    tied = None
    for param, axes in named.items():
        if param in refused:
            continue
        try:
            facts = [_fact(matrices, of_attention, use) for use in uses.get(param, [])]
            one, readout = _one(facts)
            if "kv_heads" not in samples[0].sizes and Role(one.of or one.role) in (
                Role.KEY,
                Role.VALUE,
            ):
                axes = tuple(
                    axis.replace("heads", "kv_heads") for axis in axes
                )  # as presets call them
            specs[param], evidence[param] = _spec(axes, one), one.evidence
            if readout is not None:
                tied = dataclasses.replace(_spec(axes, readout), tied=True)
                evidence[param] += f"; tied: {readout.evidence}"
        except (Refusal, PresetError) as reason:
            refused[param] = str(reason)
    return Roles(specs, evidence, refused, tied)


def _fact(matrices: Matrices, of_attention: list[Attention], use: OperandUse) -> Constraint:
    flow = matrices.flow
    if use.node in flow.opaque:
        raise Refusal(
            f"it goes into {use.node.op}, through which nothing can be seen; declare its role"
        )
    if use.view.kind == "derived":
        raise Refusal(
            f"it is computed with ({use.view.op}) before it meets an activation; apply it as it is stored"
        )
    declared = (
        matrices.at[use.node, use.param] if use.node in flow.matrices else fact(matrices, use)
    )
    memory = [
        use.other
        for of in of_attention
        if of.cross
        for node, _ in of.keys
        for use in flow.matrices[node]
    ]
    encoder = any(x is not None and flow.precedes(use.node, x) for x in memory)
    if (
        declared.role in (Role.NORM_GAIN, Role.BIAS)
        and declared.in_block
        and not encoder
        and declared.of in (None, Role.NORM_GAIN)
    ):
        nexts = [end for end, _, _ in flow.reaches(use.node) if flow.matrix(end)]
        crossed = [
            any(node is end for of in of_attention if of.cross for node, _ in of.queries)
            for end in nexts
        ]
        declared = dataclasses.replace(declared, cross=bool(crossed) and all(crossed))
    return dataclasses.replace(declared, encoder=encoder, shared=_shared(matrices, use, declared))


def _shared(matrices: Matrices, use: OperandUse, fact: Constraint) -> tuple[str, ...]:
    """Return the growing axes of what a parameter meets that it has not itself: along these its gradient is a sum.

    Of a QK-norm's gain and a relative bias its own axes say so already.
    """
    if not fact.in_block or fact.of in (Role.QUERY, Role.KEY) or fact.role is Role.RELATIVE_BIAS:
        return ()
    own = set(split_names(matrices.names[use.param])) | FIXED | {"layers", "encoder_layers"}
    axes: dict[str, None] = {}
    if use.node.op == "dot":
        side = 0 if use.node.inputs[0] is use.view else 1
        atoms = use.node.info["kept"][1 - side]
    else:
        atoms = {atom for dim in use.node.dims for atom in dim}
    for atom in sorted(atoms, key=lambda atom: sorted(atom.places)):
        if any(param == use.param for param, _ in atom.places):
            continue
        names = {matrices.names[param][at] for param, at in atom.places if param in matrices.names}
        if len(names) == 1 and not names & own:
            axes |= dict.fromkeys(names)
    return tuple(axis for axis in axes if " " not in axis)


def _one(facts: list[Constraint]) -> tuple[Constraint, Constraint | None]:
    """What all uses say together, and the fact of a readout that is tied to an embedding."""
    if not facts:
        raise Refusal("the loss does not use it; leave it out")
    encoder = all(fact.encoder for fact in facts)
    same = {dataclasses.replace(fact, evidence="", encoder=encoder): fact for fact in facts}
    roles = {fact.role: dataclasses.replace(fact, encoder=encoder) for fact in same.values()}
    if len(same) == 1:
        return next(iter(roles.values())), None
    if len(same) == 2 and set(roles) == {Role.TOKEN_EMBEDDING, Role.READOUT}:
        return roles[Role.TOKEN_EMBEDDING], dataclasses.replace(roles[Role.READOUT], encoder=False)
    uses = sorted({fact.evidence for fact in facts})
    raise Refusal(
        f"its uses do not agree: {'; or '.join(uses)}; make them parameters of their own, or declare its role"
    )


def _spec(names: tuple[str, ...], fact: Constraint) -> ParamSpec:
    if fact.cross and fact.role in (Role.KEY, Role.VALUE):
        names = tuple("memory" if at in fact.fan_in else axis for at, axis in enumerate(names))
    part = "cross" if fact.cross else "encoder" if fact.encoder else ""
    return ParamSpec(
        role=fact.role,
        axes=split_names(names),
        fan_in=split_names([names[at] for at in fact.fan_in]),
        in_block=fact.in_block,
        of=fact.of,
        part=part,
        value_dim=fact.value_dim,
        shared=fact.shared,
    )


def axis_names(
    samples: Sequence[Sample], graph: Graph | None = None
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the axis of every dimension, by parameter; and why a parameter has none: what its dimension is instead.

    A dimension that is several axes has their names in order, with spaces between: "heads head_dim" (`split_names`).

    Args:
        samples: at the base first, then with each size changed.
        graph: of the loss at the base, which shows how a dimension of several axes is cut; None: such a one is refused.
    """
    cuts = {} if graph is None else cuts_of(graph)
    # No parameter counts active experts, and the memory's width is the stream's: what reads it is told apart by flow.
    columns = {
        axis: tuple(sample.sizes[axis] for sample in samples)
        for axis in samples[0].sizes
        if axis not in ("active", "memory")
    }
    names: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    for param, shape in samples[0].shapes.items():
        axes = []
        for at in range(len(shape)):
            column = tuple(sample.shapes[param][at] for sample in samples)
            fitting = [axis for axis, sizes in columns.items() if sizes == column]
            if len(fitting) == 1:
                axes.append(*fitting)
                continue
            several = _cut_axes(column, columns, cuts.get((param, at), ()))
            if several:
                axes.append(several)
                continue
            refused.setdefault(param, _why(at, column, fitting, columns))
        axes = _as_heads(param, axes, samples[0].sizes, cuts)
        if param not in refused and len(set(axes)) < len(axes):
            refused[param] = (
                f"two of its dimensions {shape} are the same axis; name them apart: {', '.join(axes)}"
            )
        names[param] = tuple(axes)
    return names, refused


def _cut_axes(
    column: tuple[int, ...],
    columns: Mapping[str, tuple[int, ...]],
    cuts: Collection[tuple[int, ...]],
) -> str:
    """Return the axes that a dimension is a product of, in the order in which the loss cuts it; empty where it does not.

    Args:
        column: sizes of the dimension in all samples.
        columns: those of every axis.
        cuts: sizes of the parts that the loss takes the dimension apart into, the outermost first.
    """
    for axes in itertools.permutations(columns, 2):
        first, second = (columns[axis] for axis in axes)
        product = tuple(outer * inner for outer, inner in zip(first, second, strict=True))
        if product == column and (first[0], second[0]) in cuts:
            if first[0] == second[0]:
                return ""  # the order cannot be told
            return " ".join(axes)
    return ""


def _as_heads(
    param: str,
    names: list[str],
    sizes: Mapping[str, int],
    cuts: Mapping[Place, Collection[tuple[int, ...]]],
) -> list[str]:
    """Return the names where a width that the loss cuts into heads is "heads head_dim".

    In models whose heads make up the width, embed = heads * head_dim, no size of a head is named.
    """
    if "head_dim" in sizes or "heads" not in sizes:
        return names
    heads = sizes["heads"]
    cut = {
        at
        for at in range(len(names))
        if any(parts[:1] == (heads,) for parts in cuts.get((param, at), ()))
    }
    return [
        "heads head_dim" if name == "embed" and at in cut else name for at, name in enumerate(names)
    ]


def _why(
    at: int, column: tuple[int, ...], fitting: Sequence[str], columns: Mapping[str, tuple[int, ...]]
) -> str:
    if fitting:
        return f"dimension {at} is {' and '.join(fitting)} at all sizes; build the model so that each can change alone"
    growing = {axis: sizes for axis, sizes in columns.items() if len(set(sizes)) > 1}
    for count in (2, 3):
        for axes in itertools.combinations(growing, count):
            products = [math.prod(of) for of in zip(*(growing[axis] for axis in axes), strict=True)]
            if len({n / m for n, m in zip(column, products, strict=True)}) == 1:
                times = column[0] / products[0]
                product = " x ".join([*([f"{times:g}"] if times != 1 else []), *axes])
                return f"dimension {at} is {product}; a declaration names one axis a dimension: keep {' and '.join(axes)} apart"
    for axis, sizes in growing.items():
        if len(ratios := {n / m for n, m in zip(column, sizes, strict=True)}) == 1:
            return f"dimension {at} is {ratios.pop():g} x {axis}; make {axis} a dimension of its own, or name this size"
    return f"dimension {at}, of size {column[0]}, grows with none of {', '.join(columns)}; name it among the sizes"
