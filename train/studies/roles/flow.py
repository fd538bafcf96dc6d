"""How signals go through a traced loss: what carries them on unchanged in kind, where they meet, branches, softmaxes and norms.

A signal is carried by layout operations, sums, scalings, gains and norms; elementwise nonlinearities and gates carry it too but
are noted. Statistics (of norms, of softmax) and integers carry none.

Norms and softmaxes only scale a signal by a statistic of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mupax.train.studies.roles.graph import Graph, Node, OperandUse, users
from mupax.train.studies.roles.operations import LAYOUT

SQUARES = frozenset({"square", "integer_pow"})
_SCALES = LAYOUT | {"add", "add_any", "sub", "mul", "div", "max", "reduce_sum"}

ADDS = frozenset({"add", "add_any", "sub"})
BRANCHES = frozenset({"add", "add_any"})
NONLINEAR = frozenset({
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "max", "min", "square", "integer_pow", "pow", "sin",
    "cos", "abs", "sqrt", "rsqrt", "cbrt", "clamp", "atan", "tan", "sinh", "cosh", "asinh", "cumsum", "cumlogsumexp", "sign",
    "reduce_prod",
})  # fmt: skip
STILL = frozenset(
    {
        "reduce_max",
        "reduce_min",
        "argmax",
        "argmin",
        "top_k",
        "sort",
        "is_finite",
        "floor",
        "round",
        "sign",
    }
)
"""What a signal ends in: orders and extremes, which other operations take for what they cost no gradient."""


def norms(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Values within a norm's statistic, and what a norm multiplies or divides by, times its gain or not.

    A statistic is a root of sums of squares, with what is added and the means that are subtracted.
    """
    inside: set[Node] = set()
    factors: set[Node] = set()
    for root in graph.nodes:
        if (
            root.op in ("rsqrt", "sqrt", "pow")
            and root.kind == "activation"
            and (chain := _statistic(root))
        ):
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
        if node.op not in _SCALES:
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
        totals = {
            user for x in (exp, *moved) for user in after.get(x, []) if user.op == "reduce_sum"
        }
        below = totals | _closure(totals, after, LAYOUT)
        over = {user for x in below for user in after.get(x, []) if _inverse(user, x)}
        divides = any(
            user.op == "div" and user.inputs[1] is x for x in below for user in after.get(x, [])
        )
        if divides or over:
            exps.add(exp)
            sums |= below | over | _closure(over, after, LAYOUT)
    return exps, sums


def _inverse(node: Node, of: Node) -> bool:
    if node.op == "div":
        return node.inputs[1] is of and node.inputs[0].kind == "constant"
    return node.op == "integer_pow" and node.info["power"] == -1


def _closure(
    nodes: Iterable[Node], after: Mapping[Node, list[Node]], ops: frozenset[str]
) -> set[Node]:
    """All that these operations make of values."""
    stack, out = list(nodes), set()
    while stack:
        for user in after.get(stack.pop(), []):
            if user.op in ops and user not in out:
                out.add(user)
                stack.append(user)
    return out


class Step(NamedTuple):
    """One operand that carries a signal into a value."""

    source: Node
    plain: bool
    """Whether without a nonlinearity, a gate or a product of two signals."""


class SignalSource(NamedTuple):
    """Origin of a signal."""

    node: Node
    params: frozenset[str]
    """Matrices whose products it is, of a product with a parameter; empty of any other."""
    plain: bool


class Flow:
    """The signals of a graph.

    Args:
        graph: of a loss.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.matrices: dict[Node, list[OperandUse]] = {}
        for use in graph.uses:
            if use.node.op == "dot":
                self.matrices.setdefault(use.node, []).append(use)
        self._users = users(graph)
        self.before = [0] * len(graph.nodes)
        for node in graph.nodes:
            for x in node.inputs:
                self.before[node.number] |= self.before[x.number] | 1 << x.number
        self.still: set[Node] = set()
        for node in graph.nodes:
            signals = [x for x in node.inputs if x.kind == "activation" and x.floating]
            if node.op in STILL or (signals and all(x in self.still for x in signals)):
                self.still.add(node)
        self.opaque = {
            n
            for n in graph.nodes
            if n.floating and n.kind in ("activation", "derived") and n.op not in _ALL
        }
        self.statistics, self.normalizers = norms(graph)
        self.exps, self.denominators = softmaxes(graph)
        self.consumers: dict[Node, list[tuple[Node, bool]]] = {}
        for node in graph.nodes:
            for source, plain in self.carriers(node):
                self.consumers.setdefault(source, []).append((node, plain))
        self.products = {node for node in graph.nodes if self.mixes(node)}
        self.branches: dict[Node, tuple[Node, Node]] = {}
        for node in graph.nodes:
            if (branch := self._branch(node)) is not None:
                self.branches[node] = branch

    def precedes(self, node: Node, other: Node) -> bool:
        """Whether a value is the other one, or what it is made of.

        Args:
            node: that may come first.
            other: that may be made of it.
        """
        return node is other or bool(self.before[other.number] >> node.number & 1)

    def carriers(self, node: Node) -> list[Step]:
        """The operands whose signal goes on in a value."""
        if (
            not node.floating
            or node.kind != "activation"
            or node in self.statistics
            or node in self.still
        ):
            return []
        signals = [
            x for x in node.inputs if x.kind == "activation" and x.floating and x not in self.still
        ]
        signals = [x for x in signals if x not in self.normalizers and x not in self.denominators]
        if node in self.normalizers:
            return []
        if node.op == "dot":
            return [Step(x, len(signals) < 2) for x in signals]
        if node.op in ADDS or node.op in LAYOUT:
            return [Step(x, True) for x in signals]
        if node.op == "mul":
            return [Step(x, len(signals) < 2) for x in signals]
        if node.op == "div":
            return [Step(x, x is node.inputs[0] and len(signals) < 2) for x in signals]
        return [Step(x, node.op not in NONLINEAR and node.op in _LINEAR) for x in signals]

    def matrix(self, node: Node) -> bool:
        """Whether it is the product of an activation, or the batch, with parameters."""
        return node in self.matrices

    def mixes(self, node: Node) -> bool:
        """Whether it is a product of two activations."""
        return (
            node.op == "dot"
            and not self.matrix(node)
            and sum(x.kind == "activation" for x in node.inputs) == 2
        )

    def sources(self, node: Node, *, through: bool = False) -> list[SignalSource]:
        """Where the signal of a value comes from: products with parameters or of two signals, streams, lookups, the batch.

        Args:
            node: the value.
            through: go on where a nonlinearity is, which `Source.plain` then says.
        """
        out: dict[tuple[Node, frozenset[str]], SignalSource] = {}
        stack: list[tuple[Node, frozenset[str] | None, bool]] = [(node, None, True)]
        visited: set[tuple[Node, frozenset[str] | None, bool]] = set()
        while stack:
            at, only, plain = stack.pop()
            if (at, only, plain) in visited:
                continue
            visited.add((at, only, plain))
            if "selected" in at.info:
                only = (
                    at.info["selected"]
                    if only is None
                    else only & at.info["selected"] or at.info["selected"]
                )
            steps = self.carriers(at)
            if at in self.matrices:
                params = frozenset(use.param for use in self.matrices[at])
                params = params & only if only else params
                out.setdefault((at, params), SignalSource(at, params, plain))
            elif (
                self._begins(at) or not steps or not (through or all(step.plain for step in steps))
            ):
                out.setdefault((at, frozenset()), SignalSource(at, frozenset(), plain))
            else:
                stack.extend((step.source, only, plain and step.plain) for step in steps)
        return list(out.values())

    def _begins(self, node: Node) -> bool:
        return (
            any(node in nodes for nodes in (self.products, self.opaque, self.branches))
            or node.op == "lookup"
        )

    def reaches(self, node: Node, param: str = "") -> Iterator[tuple[Node, Node, bool]]:
        """Where the signal of a value goes: every next product, branch's end or end of all, as (there, from where, plain).

        Args:
            node: the value.
            param: whose signal it is: where products of several were laid side by side, only its part is followed.
        """
        stack, visited = [(node, True)], set()
        while stack:
            at, plain = stack.pop()
            if (at, plain) in visited:
                continue
            visited.add((at, plain))
            nexts = self.consumers.get(at, [])
            if any(x.op == "top_k" for x in self.users(at)):
                yield next(x for x in self.users(at) if x.op == "top_k"), at, plain
            for other, step in nexts:
                if param and param not in other.info.get("selected", (param,)):
                    continue
                ends = (
                    other.op in ("dot", "loss")
                    or other in self.opaque
                    or (other in self.branches and self.branches[other][1] is at)
                )
                if ends:
                    yield other, at, plain
                if not ends or (other.op == "dot" and not self.matrix(other)):
                    stack.append((other, plain and step))

    def users(self, node: Node) -> list[Node]:
        """Values made of a value."""
        return self._users.get(node, [])

    def norm(self, node: Node) -> Node | None:
        """What a norm was taken of, where a value is that norm's result, times gains and plus biases or not; None elsewhere."""
        while node.kind == "activation":
            signals = [step.source for step in self.carriers(node)]
            if len(signals) != 1:
                return None
            if any(x in self.normalizers for x in node.inputs):
                return signals[0]
            if node.op not in LAYOUT | ADDS | {"mul"} or self.matrix(node):
                return None
            node = signals[0]
        return None

    def norm_after(self, node: Node) -> bool:
        """Whether a norm's factor that is no statistic of this value multiplies it next."""
        for user in self.users(node):
            factors = [x for x in user.inputs if x in self.normalizers]
            if any(not self.precedes(node, x) for x in factors) or (
                user.op in LAYOUT and self.norm_after(user)
            ):
                return True
        return False

    def branch_of(self, node: Node) -> Node | None:
        """The sum that ends the residual branch which a value is in, the innermost one; None outside of all."""
        for end, (fork, last) in self.branches.items():
            if fork is not node and self.precedes(fork, node) and self.precedes(node, last):
                return end
        return None

    @functools.cached_property
    def _streams(self) -> set[Node]:
        return {node for fork, _ in self.branches.values() for node in self._stream(fork)}

    def between(self, node: Node) -> bool:
        """Whether a value is the stream itself after one branch and before another, as where a norm follows the sum."""
        if node not in self._streams or self.branch_of(node) is not None:
            return False
        return any(end is not node and self.precedes(end, node) for end in self.branches)

    def _branch(self, node: Node) -> tuple[Node, Node] | None:
        """Of a sum of a stream and what a branch made of it: where the branch left the stream, and its last value."""
        if (
            node.op not in BRANCHES
            or len(node.inputs) != 2
            or any(x.kind != "activation" for x in node.inputs)
        ):
            return None
        for stream, last in (node.inputs, node.inputs[::-1]):
            forks = [x for x in self._stream(stream) if self.precedes(x, last) and x is not last]
            fork = max(forks, key=lambda x: x.number, default=None)
            if fork is not None and any(
                self.precedes(fork, dot) and self.precedes(dot, last) and dot is not fork
                for dot in self.matrices
            ):
                return fork, last
        return None

    def _stream(self, node: Node) -> list[Node]:
        """A value and all that were summed up in it."""
        stack, out = [node], []
        while stack:
            at = stack.pop()
            if at in out:
                continue
            out.append(at)
            signals = [x for x in at.inputs if x.kind == "activation" and x.floating]
            if (
                at.op in BRANCHES
                or at.op in LAYOUT
                or (at.op == "mul" and len(signals) == 1 and _scaled(at))
            ):
                stack.extend(signals)
        return out


_LINEAR = LAYOUT | ADDS | {"mul", "div", "neg", "reduce_sum", "dot", "loss", "stacked"}
_ALL = _LINEAR | NONLINEAR | STILL | {"lookup"}


def _scaled(node: Node) -> bool:
    return any(x.kind == "constant" for x in node.inputs)
