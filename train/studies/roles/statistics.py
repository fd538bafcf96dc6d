"""Norms and softmaxes of a traced loss: what only scales a signal by a statistic of its own, and carries none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mupax.train.studies.roles.graph import Graph, Node, users
from mupax.train.studies.roles.operations import LAYOUT

SQUARES = frozenset({"square", "integer_pow"})
_LINEAR = LAYOUT | {"add", "add_any", "sub", "mul", "div", "max", "reduce_sum"}


def norms(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Values within a norm's statistic, and what a norm multiplies or divides by, times its gain or not.

    A statistic is a root of sums of squares, with what is added and the means that are subtracted.
    """
    inside: set[Node] = set()
    factors: set[Node] = set()
    for root in graph.nodes:
        if root.op in ("rsqrt", "sqrt", "pow") and root.kind == "activation" and (chain := _statistic(root)):
            inside |= chain
            factors.add(root)
    for node in graph.nodes:
        signals = [x for x in node.inputs if x.kind == "activation"]
        if signals and all(x in factors for x in signals) and node.op in LAYOUT | {"mul", "div"}:
            factors.add(node)
    return inside, factors


def _statistic(root: Node) -> set[Node]:
    """What a root is taken of, back to squares; empty where that is no sum of squares."""
    chain: set[Node] = set()
    stack, summed, squared = [root.inputs[0]], False, False
    while stack:
        node = stack.pop()
        if node in chain or node.kind != "activation":
            continue
        chain.add(node)
        summed |= node.op == "reduce_sum"
        if node.op in SQUARES or (node.op == "mul" and node.inputs[0] is node.inputs[1]):
            squared = True
            continue
        if node.op not in _LINEAR:
            return set()
        stack.extend(node.inputs)
    return chain if summed and squared else set()


def softmaxes(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Exponentials that are divided by their sums, and those sums or one over them."""
    after = users(graph)
    exps: set[Node] = set()
    sums: set[Node] = set()
    for exp in graph.nodes:
        if exp.op != "exp" or exp.kind != "activation":
            continue
        moved = _closure([exp], after, LAYOUT)
        totals = {user for x in (exp, *moved) for user in after.get(x, []) if user.op == "reduce_sum"}
        below = totals | _closure(totals, after, LAYOUT)
        over = {user for x in below for user in after.get(x, []) if _inverse(user, x)}
        divides = any(user.op == "div" and user.inputs[1] is x for x in below for user in after.get(x, []))
        if divides or over:
            exps.add(exp)
            sums |= below | over | _closure(over, after, LAYOUT)
    return exps, sums


def _inverse(node: Node, of: Node) -> bool:
    if node.op == "div":
        return node.inputs[1] is of and node.inputs[0].kind == "constant"
    return node.op == "integer_pow" and node.info["power"] == -1


def _closure(nodes: Iterable[Node], after: Mapping[Node, list[Node]], ops: frozenset[str]) -> set[Node]:
    """All that these operations make of values."""
    stack, out = list(nodes), set()
    while stack:
        for user in after.get(stack.pop(), []):
            if user.op in ops and user not in out:
                out.add(user)
                stack.append(user)
    return out
