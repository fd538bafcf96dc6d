"""Roles of parameters that products contract: by what a product reads, and by what next takes it.

A loss attends where the softmax of a product weighs a sum: which matrices make queries, keys and values of it is found first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mupax.presets.roles import Role
from mupax.train.studies.roles.flow import Flow
from mupax.train.studies.roles.graph import Node, OperandUse
from mupax.train.studies.roles.operations import LAYOUT

Matrix = tuple[Node, str]
"""A product with a parameter, and the parameter."""

FIXED = frozenset(
    {
        "vocab",
        "classes",
        "patch",
        "pooled",
        "position",
        "source",
        "distance",
        "input",
        "output",
        "active",
    }
)
"""Axes that no limit takes to infinity: those of data, and of what is read out."""


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
            exps = [
                source.node for source in flow.sources(mix.inputs[side]) if source.node in flow.exps
            ]
            of = [
                source.node for exp in exps for source in flow.sources(exp.inputs[0], through=True)
            ]
            logits = list(dict.fromkeys(node for node in of if flow.mixes(node)))
            if len(logits) == 1 and len(exps) == 1 and _over_keys(flow, mix, side, exps[0]):
                products.append((mix, side, logits[0]))
    of_attention = {node for mix, _, logits in products for node in (mix, logits)}
    flow.products = of_attention | {
        node for node in flow.products if node not in of_attention and not _weighed(flow, node)
    }
    for mix, side, logits in products:
        summed = [atom for dim in mix.info["contracted"][side] for atom in dim]
        key = next(
            (at for at in (0, 1) if any(atom.is_of(logits.info["kept"][at]) for atom in summed)),
            None,
        )
        if key is None:
            continue
        query, keys, values = (
            _matrices(flow, x)
            for x in (logits.inputs[1 - key], logits.inputs[key], mix.inputs[1 - side])
        )
        out.append(
            Attention(
                logits, mix, query, keys, values, _streams(flow, query) != _streams(flow, keys)
            )
        )
    return out


def _over_keys(flow: Flow, mix: Node, side: int, exp: Node) -> bool:
    """Whether a softmax is over what its weights are then summed over, as attention's is."""
    summed = [atom for dim in mix.info["contracted"][side] for atom in dim]
    roots = {root for atom in summed for root in atom.line()}
    totals = [
        node for node in flow.denominators if node.op == "reduce_sum" and flow.precedes(exp, node)
    ]
    over = {root for node in totals for atom in node.info["summed"] for root in atom.line()}
    return bool(roots & over)


def _weighed(flow: Flow, node: Node) -> bool:
    """Whether one side is made of scores of which the largest choose, as an expert's weight is."""
    for x in node.inputs:
        sources = flow.sources(x, through=True)
        if sources and all(
            source.params and any(end.op == "top_k" for end, _, _ in flow.reaches(source.node))
            for source in sources
        ):
            return True
    return False


def _matrices(flow: Flow, node: Node) -> frozenset[Matrix]:
    return frozenset(
        (source.node, param) for source in flow.sources(node) for param in source.params
    )


def _streams(flow: Flow, matrices: frozenset[Matrix]) -> set[Node]:
    inputs = [
        use.other for node, param in matrices for use in flow.matrices[node] if use.param == param
    ]
    return {
        source.node for x in inputs if x is not None for source in flow.sources(x, through=True)
    }


def split_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the axes of dimensions of which some are several: "heads head_dim" is two."""
    return tuple(axis for name in names for axis in name.split())


class Refusal(Exception):
    """Why a parameter's role cannot be told; what to write instead stands in the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """Constraint on a parameter's role that follows from one use of it.

    Attributes:
        role: it acts as.
        evidence: the words that say so.
        fan_in: dimensions that are summed over.
        in_block: whether a residual branch has it.
        cross: whether it is of attention to another stream.
        of: role of the matrix or norm that a vector belongs to.
        value_dim: of a query or key, whether values have a size of their own.
        encoder: whether all it does goes into what another stack attends to.
        tied: whether it is a readout of a table that is looked up elsewhere.
        shared: growing axes of what it meets that it has not itself.
    """

    role: Role
    evidence: str
    fan_in: tuple[int, ...] = ()
    in_block: bool = False
    cross: bool = False
    of: Role | None = None
    value_dim: bool = False
    encoder: bool = False
    tied: bool = False
    shared: tuple[str, ...] = ()


class Matrices:
    """Facts of every product with a parameter.

    Args:
        flow: of the loss.
        attentions: in it.
        names: axes of every parameter whose dimensions have names.
    """

    def __init__(
        self, flow: Flow, attentions: list[Attention], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.flow, self.attentions, self.names = flow, attentions, names
        self.at: dict[tuple[Node, str], Constraint] = {}
        self.refused: dict[str, str] = {}
        for use in (use for uses in flow.matrices.values() for use in uses):
            if use.param in names:
                try:
                    self.at[use.node, use.param] = self._fact(use)
                except Refusal as reason:
                    self.refused.setdefault(use.param, str(reason))

    def _fact(self, use: OperandUse) -> Constraint:
        flow, node, other = self.flow, use.node, use.other
        assert other is not None
        if use.view.kind == "derived":
            raise Refusal(
                f"it is computed with ({use.view.op}) before it meets an activation; apply it as it is stored"
            )
        side = 0 if node.inputs[0] is use.view else 1
        fan_in, names = (
            whole(use, flow.graph.shapes[use.param], node.info["contracted"][side]),
            self.names[use.param],
        )
        reads = ", ".join(names[at] for at in fan_in)
        if not fan_in:
            raise Refusal(
                "it is multiplied with an activation and nothing is summed over; write the product as a matrix product"
            )
        if other.kind == "data":
            if _one_hot(other):
                return Constraint(
                    role=Role.TOKEN_EMBEDDING,
                    evidence=f"is multiplied by one-hot vectors over {reads}",
                )
            return Constraint(
                role=Role.PATCH_EMBEDDING,
                evidence=f"contracts {reads} with the batch itself",
                fan_in=fan_in,
            )
        ends = list(flow.reaches(node, use.param))
        of_attention = self._of_attention(use)
        if len(of_attention) > 1:
            roles = " and ".join(sorted(of.role.value for of in of_attention))
            raise Refusal(
                f"its product acts as {roles} of attention; make them parameters of their own"
            )
        if of_attention:
            return dataclasses.replace(of_attention[0], fan_in=fan_in)
        in_block = flow.branch_of(node) is not None
        same = {"fan_in": fan_in, "in_block": in_block}
        contracts = f"contracts {reads}"
        if any(end.op == "top_k" for end, _, _ in ends):
            return Constraint(
                role=Role.ROUTER, evidence=f"{contracts}; top_k of its product chooses", **same
            )
        sources = flow.sources(other)
        if blind := [
            x
            for x in (*(s.node for s in sources), *(end for end, _, _ in ends))
            if x in flow.opaque
        ]:
            raise Refusal(
                f"it reads or feeds {blind[0].op}, through which nothing can be seen; declare its role"
            )
        if mixes := [
            of for of in self.attentions if any(source.node is of.mix for source in sources)
        ]:
            if len(sources) > len(mixes):
                raise Refusal("it reads attention and something else at once; project them apart")
            cross = any(of.cross for of in mixes)
            return Constraint(
                role=Role.ATTENTION_OUT,
                evidence=f"{contracts} of values that a softmax weighed",
                cross=cross,
                **same,
            )
        if any(source.node in flow.products for source in flow.sources(other, through=True)) or any(
            end in flow.products for end, _, _ in ends
        ):
            raise Refusal(
                "a product of two activations, which is no softmax's attention, takes or makes it; declare its role"
            )
        if all(end.op == "loss" for end, _, _ in ends):
            if not ends:
                raise Refusal("its product does not reach the loss; leave the parameter out")
            return Constraint(
                role=Role.READOUT,
                evidence=f"{contracts}; its product reaches the loss through no other matrix",
                **same,
            )
        return self._hidden(use, contracts, ends, side, same)

    def _hidden(
        self,
        use: OperandUse,
        contracts: str,
        ends: list[tuple[Node, Node, bool]],
        side: int,
        same: dict,
    ) -> Constraint:
        """Of an MLP, of experts or neither."""
        flow, names = self.flow, self.names[use.param]
        assert use.other is not None
        rows = [*use.places(use.node.info["batched"][side])]
        rows += [
            at
            for (param, at), kind in use.view.picks
            if param == use.param and kind == "activation"
        ]
        experts = bool(rows) and same["in_block"]
        outputs = [
            at
            for at in range(len(names))
            if at not in (*same["fan_in"], *rows) and self._in_output(use, at)
        ]
        grows = all(names[at] not in FIXED for at in (*same["fan_in"], *outputs))
        nexts = [plain for end, _, plain in ends if flow.matrix(end)]
        reads = [source for source in flow.sources(use.other, through=True) if source.params]
        ended = any(end in flow.branches for end, _, _ in ends)
        inner = any(flow.branch_of(source.node) is not None for source in reads)
        if "experts" in names and not experts:
            raise Refusal(
                "it has an axis of experts, and no index or batch dimension has a matrix each; declare its role"
            )
        if same["in_block"] and grows:
            if nexts and not ended and not inner and not any(nexts):
                role = Role.EXPERT_IN if experts else Role.MLP_IN
                return Constraint(
                    role=role,
                    evidence=f"{contracts}; a nonlinearity or gate follows, then another matrix",
                    **same,
                )
            if ended and not nexts and inner and not any(source.plain for source in reads):
                role = Role.EXPERT_OUT if experts else Role.MLP_OUT
                return Constraint(
                    role=role,
                    evidence=f"{contracts} of a hidden layer; its product ends the branch",
                    **same,
                )
        if experts:
            raise Refusal(
                "an index chooses among its matrices, and it is neither the first nor the last of an MLP; declare its role"
            )
        return Constraint(
            role=Role.HIDDEN,
            evidence=f"{contracts}; between other matrices, in no part of attention or an MLP",
            **same,
        )

    def _in_output(self, use: OperandUse, at: int) -> bool:
        places = {place for side in use.node.info["kept"] for atom in side for place in atom.places}
        return (use.param, at) in places

    def _of_attention(self, use: OperandUse) -> list[Constraint]:
        """As query, key and value: one fact each that holds."""
        facts: dict[Role, Constraint] = {}
        for of in self.attentions:
            branch = any(self.flow.branch_of(node) for node, _ in of.queries)
            own = any(
                "value_dim" in split_names(self.names.get(param, ())) for _, param in of.values
            )
            keys = ", ".join(sorted({param for _, param in of.keys}))
            queries = ", ".join(sorted({param for _, param in of.queries}))
            for role, group, evidence in (
                (
                    Role.QUERY,
                    of.queries,
                    f"its products with those of {keys} go through a softmax over the latter",
                ),
                (
                    Role.KEY,
                    of.keys,
                    f"its products with those of {queries} go through a softmax over its own rows",
                ),
                (Role.VALUE, of.values, "its product is weighed by a softmax and summed"),
            ):
                if (use.node, use.param) in group:
                    wide = own and role is not Role.VALUE
                    facts[role] = Constraint(
                        role=role,
                        evidence=evidence,
                        in_block=branch,
                        cross=of.cross,
                        value_dim=wide,
                    )
        return list(facts.values())


def whole(use: OperandUse, shape: tuple[int, ...], dims: tuple) -> tuple[int, ...]:
    """Dimensions of a parameter that these of its view are; all of each.

    Args:
        use: of the parameter.
        shape: of the parameter.
        dims: of the view.
    """
    for at in use.places(dims):
        atoms = [atom for dim in dims for atom in dim if (use.param, at) in atom.places]
        size = 1
        for atom in atoms:
            size *= atom.size
        if size != shape[at] and len(use.view.params) == 1:
            raise Refusal(
                f"a product sums over {size} of the {shape[at]} along its dimension {at}, or mixes axes; keep axes apart"
            )
    return use.places(dims)


def _one_hot(node: Node) -> bool:
    while node.op in LAYOUT and node.inputs:
        node = node.inputs[0]
    return not node.floating and node.op == "eq"
