"""Roles of parameters that are added, multiplied by, looked up or laid beside activations."""

from __future__ import annotations

import dataclasses

from mupax.presets.roles import Role
from mupax.train.studies.roles.flow import ADDS
from mupax.train.studies.roles.graph import Node, Use
from mupax.train.studies.roles.matrices import Fact, Matrices, Refusal, split_names

_ENDS = frozenset({Role.MLP_OUT, Role.EXPERT_OUT})
_STREAM = frozenset({Role.ROUTER, Role.PATCH_EMBEDDING, Role.TOKEN_EMBEDDING})
"""Matrices that no gain belongs to: what they write is the stream, or chooses."""
_LOOKUPS = {"position": Role.POSITION, "source": Role.POSITION, "distance": Role.RELATIVE_BIAS}


def fact(matrices: Matrices, use: Use) -> Fact:
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
            raise Refusal("the batch says which distance to look up; compute distances of positions")
        return Fact(role=role, evidence=f"is looked up along {', '.join(sorted(axes))} by integers of the batch")
    if node.op in ADDS:
        return _added(matrices, use)
    if node.op in ("mul", "div"):
        return _multiplied(matrices, use)
    if (
        node.op in ("concatenate", "select_n", "scatter", "dynamic_update_slice", "stack")
        and matrices.flow.branch_of(node) is None
    ):
        return Fact(role=Role.TOKEN_EMBEDDING, evidence="joins the sequence as a row of its own")
    raise Refusal(
        f"it meets an activation in {node.op}; none of the roles does so: declare one, or write it as a product or sum"
    )


def _of_branch(matrices: Matrices, use: Use) -> Fact | None:
    """Return the bias of the matrix that ended the branch before, as in h + x @ w + b; None where that is no such sum."""
    flow = matrices.flow
    end = use.other
    assert end is not None
    sources = flow.sources(flow.branches[end][1])
    facts = [matrices.at.get((source.node, param)) for source in sources for param in source.params]
    if len(facts) != 1 or facts[0] is None or not set(_axes(matrices, use)) <= _outputs(matrices, sources):
        return None
    evidence = f"is added after the product of the {facts[0].role.value}, which ends the branch"
    return dataclasses.replace(facts[0], role=Role.BIAS, evidence=evidence, fan_in=(), of=facts[0].role)


def _added(matrices: Matrices, use: Use) -> Fact:
    flow, node, other = matrices.flow, use.node, use.other
    assert other is not None
    in_block = flow.branch_of(node) is not None
    if flow.norm(other) is not None:
        return Fact(role=Role.BIAS, evidence="is added to a norm's result", in_block=in_block, of=Role.NORM_GAIN)
    sources = flow.sources(other, through=True)
    if sources and all(any(source.node is of.logits for of in matrices.attentions) for source in sources):
        if not any(kind == "constant" for (param, _), kind in use.view.picks if param == use.param):
            raise Refusal("it is added to logits of attention and no distance chose it; declare its role")
        return Fact(
            role=Role.RELATIVE_BIAS,
            evidence="distances look it up; it is added to logits of attention",
            in_block=in_block,
        )
    facts = {matrices.at.get((source.node, param)) for source in sources for param in source.params}
    if blind := [p for source in sources for p in source.params if (source.node, p) not in matrices.at]:
        raise Refusal(f"it is added to the product of {blind[0]}, which is refused itself")
    roles = {fact.role for fact in facts if fact is not None}
    if len(roles) == 1 and all(source.params for source in sources):
        of = next(fact for fact in facts if fact is not None)
        direct = of.role is Role.ROUTER or all(source.plain for source in sources)
        if direct and set(_axes(matrices, use)) <= _outputs(matrices, sources):
            evidence = f"is added to the product of the {of.role.value}"
            return dataclasses.replace(of, role=Role.BIAS, evidence=evidence, fan_in=(), of=of.role)
    if not in_block and any(axis in ("position", "source") for axis in _axes(matrices, use)):
        return Fact(role=Role.POSITION, evidence="is added to the stream before its blocks, a row a position")
    what = " and ".join(sorted(role.value for role in roles)) or "no matrix's product"
    raise Refusal(f"it is added to {what}, as neither their bias nor a position; declare its role")


def _outputs(matrices: Matrices, sources: list) -> set[str]:
    """Axes that products with parameters are made of, without those that they sum over."""
    axes: set[str] = set()
    for source in sources:
        for param in source.params:
            of = matrices.at.get((source.node, param))
            names = matrices.names.get(param, ())
            outputs = [axis for at, axis in enumerate(names) if of is not None and at not in of.fan_in]
            axes |= set(split_names(outputs))
    return axes


def _axes(matrices: Matrices, use: Use) -> tuple[str, ...]:
    return split_names(matrices.names[use.param])


def _multiplied(matrices: Matrices, use: Use) -> Fact:
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
    streams = [source.node in flow.branches or source.node.op == "lookup" or bool(source.params) for source in plain]
    if base is not None and not roles and all(streams or [False]):
        return Fact(role=Role.NORM_GAIN, evidence="multiplies a norm of the stream", in_block=in_block)
    if roles and roles <= _ENDS:
        roles = {Role.MLP_OUT} if "experts" not in _axes(matrices, use) else roles
    if len(roles) != 1:
        what = " and ".join(sorted(role.value for role in roles)) or "no matrix's product"
        raise Refusal(f"it multiplies {what}; a gain belongs to a norm, or to one matrix: declare its role")
    role = roles.pop()
    ends = role in _ENDS | {Role.ATTENTION_OUT}
    if base is not None and not ends and not all(source.params for source in plain):
        raise Refusal(f"it multiplies a norm of what a nonlinearity made of the {role.value}; declare its role")
    if base is None and not ends:
        raise Refusal(f"it multiplies the product of the {role.value}, which no norm made; declare its role")
    of = next(fact for fact in facts if fact is not None)
    evidence = f"multiplies {'a norm of ' if base is not None else ''}the product of the {role.value}"
    return Fact(role=Role.NORM_GAIN, evidence=evidence, in_block=of.in_block, of=role, cross=of.cross)


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
