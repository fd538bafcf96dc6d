"""Where a traced loss attends: products whose softmax weighs a sum, and which matrices make queries, keys and values of them."""

from __future__ import annotations

from typing import NamedTuple

from mupax.train.studies.roles.flow import Flow
from mupax.train.studies.roles.graph import Node

Matrix = tuple[Node, str]
"""A product with a parameter, and the parameter."""


class Attention(NamedTuple):
    """One softmax over keys.

    Attributes:
        logits: product of queries and keys.
        mix: product of weights and values.
        queries, keys, values: the products with parameters that they are.
        cross: whether keys are made of another stream than queries.
    """

    logits: Node
    mix: Node
    queries: frozenset[Matrix]
    keys: frozenset[Matrix]
    values: frozenset[Matrix]
    cross: bool


def attentions(flow: Flow) -> list[Attention]:
    """All of a loss. `Flow.products` has no sums that a router weighed afterwards."""
    out, products = [], []
    for mix in (node for node in flow.graph.nodes if flow.mixes(node)):
        for side in (0, 1):
            exps = [source.node for source in flow.sources(mix.inputs[side]) if source.node in flow.exps]
            of = [source.node for exp in exps for source in flow.sources(exp.inputs[0], through=True)]
            logits = list(dict.fromkeys(node for node in of if flow.mixes(node)))
            if len(logits) == 1 and len(exps) == 1 and _over_keys(flow, mix, side, exps[0]):
                products.append((mix, side, logits[0]))
    of_attention = {node for mix, _, logits in products for node in (mix, logits)}
    flow.products = of_attention | {
        node for node in flow.products if node not in of_attention and not _weighed(flow, node)
    }
    for mix, side, logits in products:
        summed = [atom for dim in mix.info["contracted"][side] for atom in dim]
        key = next((at for at in (0, 1) if any(atom.is_of(logits.info["kept"][at]) for atom in summed)), None)
        if key is None:
            continue
        query, keys, values = (
            _matrices(flow, x) for x in (logits.inputs[1 - key], logits.inputs[key], mix.inputs[1 - side])
        )
        out.append(Attention(logits, mix, query, keys, values, _streams(flow, query) != _streams(flow, keys)))
    return out


def _over_keys(flow: Flow, mix: Node, side: int, exp: Node) -> bool:
    """Whether a softmax is over what its weights are then summed over, as attention's is."""
    summed = [atom for dim in mix.info["contracted"][side] for atom in dim]
    roots = {root for atom in summed for root in atom.line()}
    totals = [node for node in flow.denominators if node.op == "reduce_sum" and flow.precedes(exp, node)]
    over = {root for node in totals for atom in node.info["summed"] for root in atom.line()}
    return bool(roots & over)


def _weighed(flow: Flow, node: Node) -> bool:
    """Whether one side is made of scores of which the largest choose, as an expert's weight is."""
    for x in node.inputs:
        sources = flow.sources(x, through=True)
        if sources and all(
            source.params and any(end.op == "top_k" for end, _, _ in flow.reaches(source.node)) for source in sources
        ):
            return True
    return False


def _matrices(flow: Flow, node: Node) -> frozenset[Matrix]:
    return frozenset((source.node, param) for source in flow.sources(node) for param in source.params)


def _streams(flow: Flow, matrices: frozenset[Matrix]) -> set[Node]:
    inputs = [use.other for node, param in matrices for use in flow.matrices[node] if use.param == param]
    return {source.node for x in inputs if x is not None for source in flow.sources(x, through=True)}
