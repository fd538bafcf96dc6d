"""Paths of signals in a traced loss, with the products, residual branches and norms on them.

A signal is a floating-point activation that is more than a statistic or scale of another. Layout
operations, sums, scalings, gains and norms carry a signal on unchanged in kind. Elementwise
nonlinearities and gates carry it on, too, but paths record that they were passed. Statistics of
norms and softmaxes carry no signal, because they only scale one, and integers carry none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from mupax.train.studies.roles.graph import Graph, Node, OperandUse, users
from mupax.train.studies.roles.operations import LAYOUT

SQUARES = frozenset({"square", "integer_pow"})
_SCALES = LAYOUT | {"add", "add_any", "sub", "mul", "div", "max", "reduce_sum"}
"""Operations that may lie between the squares and the root in a norm's root mean square."""

ADDS = frozenset({"add", "add_any", "sub"})
BRANCHES = frozenset({"add", "add_any"})
"""Sums that can end a residual branch."""
NONLINEAR = frozenset({
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "max", "min",
    "square", "integer_pow", "pow", "sin", "cos", "abs", "sqrt", "rsqrt", "cbrt", "clamp", "atan",
    "tan", "sinh", "cosh", "asinh", "cumsum", "cumlogsumexp", "sign", "reduce_prod",
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
"""Operations that end a signal: sorting, maxima and minima, rounding, signs.

Losses use their results only for choices and for numerical stability, and need no gradient of them.
"""


class Norms(NamedTuple):
    """Values of all norms in a graph."""

    statistics: set[Node]
    """Values from the squares of a norm's input up to the argument of the root."""
    factors: set[Node]
    """Roots that a norm multiplies or divides its input by, and their products with gains."""


def norms(graph: Graph) -> Norms:
    """Find the norms, such as LayerNorm and RMSNorm, in the graph of a traced loss.

    A norm is recognized by its root of a sum of squares. Before the root a constant (eps) may be
    added, and before the squares a mean subtracted.

    Returns:
        The values of all norms together.
    """
    statistics: set[Node] = set()
    factors: set[Node] = set()
    for root in graph.nodes:
        if root.op in ("rsqrt", "sqrt", "pow") and root.kind == "activation":
            chain = _statistic(root)
            if chain:
                statistics |= chain
                factors.add(root)
    for node in graph.nodes:
        signals = [operand for operand in node.inputs if operand.kind == "activation"]
        all_factors = bool(signals) and all(operand in factors for operand in signals)
        # A gain may multiply the root before the root multiplies the signal.
        if all_factors and node.op in LAYOUT | {"mul", "div"}:
            factors.add(node)
    return Norms(statistics, factors)


def _statistic(root: Node) -> set[Node]:
    """Return the values between a square root and the squares whose sum it takes, squares included.

    The result is empty if `root` is not the square root of a sum of squares.
    """
    chain: set[Node] = set()
    stack = [root.inputs[0]]
    has_sum = False
    has_squares = False
    while stack:
        node = stack.pop()
        if node in chain or node.kind != "activation":
            continue
        chain.add(node)
        has_sum |= node.op == "reduce_sum"
        if node.op in SQUARES or (node.op == "mul" and node.inputs[0] is node.inputs[1]):
            has_squares = True
            continue
        if node.op not in _SCALES:
            return set()
        stack.extend(node.inputs)
    return chain if has_sum and has_squares else set()


class Softmaxes(NamedTuple):
    """Values of all softmaxes in a graph."""

    exps: set[Node]
    """Exponentials that are divided by their sums."""
    denominators: set[Node]
    """Sums of these exponentials, and inverses of the sums."""


def softmaxes(graph: Graph) -> Softmaxes:
    """Find the softmaxes of a graph: exponentials that are divided by their sums.

    A product with the inverse of the sum counts as a division. Return the values of all softmaxes
    together.
    """
    users_of = users(graph)
    exps: set[Node] = set()
    denominators: set[Node] = set()
    for exp in graph.nodes:
        if exp.op != "exp" or exp.kind != "activation":
            continue
        # jax.nn.softmax divides by the sum. A kernel written by hand may multiply by its inverse.
        sums: set[Node] = set()
        for node in (exp, *_closure([exp], users_of, LAYOUT)):
            for user in users_of.get(node, []):
                if user.op == "reduce_sum":
                    sums.add(user)
        divisors = sums | _closure(sums, users_of, LAYOUT)
        inverses: set[Node] = set()
        divides = False
        for node in divisors:
            for user in users_of.get(node, []):
                if _is_inverse(user, node):
                    inverses.add(user)
                divides |= user.op == "div" and user.inputs[1] is node
        if divides or inverses:
            exps.add(exp)
            denominators |= divisors | inverses | _closure(inverses, users_of, LAYOUT)
    return Softmaxes(exps, denominators)


def _is_inverse(node: Node, operand: Node) -> bool:
    """Return whether a value is a constant divided by the operand, or its power -1."""
    if node.op == "div":
        return node.inputs[1] is operand and node.inputs[0].kind == "constant"
    return node.op == "integer_pow" and node.info["power"] == -1


def _closure(
    nodes: Iterable[Node], users_of: Mapping[Node, list[Node]], ops: frozenset[str]
) -> set[Node]:
    """Return all values that are computed from `nodes` by operations in `ops` alone.

    Args:
        users_of: Results of the operations that read each value, from `users`.
        ops: Names of the primitives to follow, such as `LAYOUT`.
    """
    stack = list(nodes)
    result: set[Node] = set()
    while stack:
        for user in users_of.get(stack.pop(), []):
            if user.op in ops and user not in result:
                result.add(user)
                stack.append(user)
    return result


class Step(NamedTuple):
    """Operand of an operation whose signal goes on in the result, from `Flow.carriers`."""

    source: Node
    plain: bool
    """True if the operation is no nonlinearity, gate or product of two signals."""


class SignalSource(NamedTuple):
    """Value that a signal comes from, as `Flow.sources` returns it."""

    node: Node
    params: frozenset[str]
    """Paths of the parameters, if `node` is a matrix product with parameters. Otherwise empty."""
    plain: bool
    """True if no nonlinearity, gate or product of two signals lies on the way."""


class Destination(NamedTuple):
    """Value to which a signal leads, as `Flow.reaches` returns it.

    This is a matrix product, the end of a branch, the loss, an unsupported operation or a `top_k`.
    """

    end: Node
    last: Node
    """Operand of `end` that carries the signal."""
    plain: bool
    """True if no nonlinearity, gate or product of two signals lies on the way."""


class Branch(NamedTuple):
    """Residual branch, from where it leaves the stream to the sum that adds it back."""

    fork: Node
    """Value of the stream at which the branch leaves it."""
    last: Node
    """Last value of the branch, which the sum adds to the stream."""


class Flow:
    """Analysis of a graph: the paths of its activations from operation to operation.

    It finds the matrix products, residual branches, norms and softmaxes on these paths. A signal is
    a floating-point activation that is more than a statistic or scale of another.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.matrices: dict[Node, list[OperandUse]] = {}
        """Uses of parameters in each matrix product with parameters."""
        for use in graph.uses:
            if use.node.op == "dot":
                self.matrices.setdefault(use.node, []).append(use)
        self._users = users(graph)

        # As bits of an integer, a set is far smaller than Python's, and a union is one `|`.
        self._ancestors = [0] * len(graph.nodes)
        """For each value a set of the values that it is computed from, as bits of an integer."""
        for node in graph.nodes:
            for operand in node.inputs:
                bits = self._ancestors[operand.number] | 1 << operand.number
                self._ancestors[node.number] |= bits

        self.still: set[Node] = set()
        """Values that carry no signal."""
        for node in graph.nodes:
            signals = _signals(node)
            if node.op in STILL or (signals and all(operand in self.still for operand in signals)):
                self.still.add(node)

        self.opaque: set[Node] = set()
        """Results of unsupported operations."""
        for node in graph.nodes:
            depends_on_params = node.kind in ("activation", "derived")
            if node.floating and depends_on_params and node.op not in _SUPPORTED:
                self.opaque.add(node)

        # Before the consumers, because `carriers` reads these sets.
        self.statistics, self.normalizers = norms(graph)
        self.exps, self.denominators = softmaxes(graph)
        self.consumers: dict[Node, list[tuple[Node, bool]]] = {}
        """Values in which the signal of each value goes on, each with its `Step.plain`."""
        for node in graph.nodes:
            for source, plain in self.carriers(node):
                self.consumers.setdefault(source, []).append((node, plain))
        self.products = {node for node in graph.nodes if self.mixes(node)}
        """Products of two activations. `matrices.attentions` removes sums that a router weighs."""

        self.branches: dict[Node, Branch] = {}
        """Residual branches by the sum that ends each."""
        for node in graph.nodes:
            branch = self._branch(node)
            if branch is not None:
                self.branches[node] = branch

    def precedes(self, ancestor: Node, node: Node) -> bool:
        """Return whether `ancestor` is `node`, or `node` is computed from it."""
        return ancestor is node or bool(self._ancestors[node.number] >> ancestor.number & 1)

    def carriers(self, node: Node) -> list[Step]:
        """Return the operands whose signal goes on in a value.

        The list is empty for statistics and factors of norms, results of operations in `STILL`
        (sorting, maxima, rounding), integers, and values that are no activations.
        """
        if not node.floating or node.kind != "activation":
            return []
        if node in self.statistics or node in self.still or node in self.normalizers:
            return []
        # The factor of a norm and the sum of a softmax only scale the other operand.
        signals = []
        for operand in _signals(node):
            is_factor = operand in self.normalizers or operand in self.denominators
            if operand not in self.still and not is_factor:
                signals.append(operand)
        is_single = len(signals) < 2

        if node.op in ("dot", "mul"):
            return [Step(operand, is_single) for operand in signals]
        if node.op in ADDS or node.op in LAYOUT:
            return [Step(operand, True) for operand in signals]
        if node.op == "div":
            steps = []
            for operand in signals:
                steps.append(Step(operand, operand is node.inputs[0] and is_single))
            return steps
        is_linear = node.op not in NONLINEAR and node.op in _LINEAR
        return [Step(operand, is_linear) for operand in signals]

    def matrix(self, node: Node) -> bool:
        """Return whether a value is a matrix product of parameters with an activation or batch."""
        return node in self.matrices

    def mixes(self, node: Node) -> bool:
        """Return whether a value is a matrix product of two activations, without parameters."""
        if node.op != "dot" or self.matrix(node):
            return False
        return sum(operand.kind == "activation" for operand in node.inputs) == 2

    def sources(self, node: Node, *, through: bool = False) -> list[SignalSource]:
        """Return the origins of a value's signal.

        An origin is a matrix product with parameters or of two signals, the end of a branch, a
        lookup, an unsupported operation, or a value without a signal among its operands, such as
        the batch.

        Args:
            through: Whether to follow the signal through nonlinearities and elementwise products of
                signals. `SignalSource.plain` is `False` then. By default they are origins, too.
        """
        result: dict[tuple[Node, frozenset[str]], SignalSource] = {}
        stack: list[tuple[Node, frozenset[str] | None, bool]] = [(node, None, True)]
        visited: set[tuple[Node, frozenset[str] | None, bool]] = set()
        while stack:
            entry = stack.pop()
            if entry in visited:
                continue
            visited.add(entry)
            # `selected` are the parameters of this part of a concatenation, such as the queries in
            # a fused projection. `None` if nothing was sliced on the way.
            current, selected, plain = entry
            if "selected" in current.info:
                in_slice = current.info["selected"]
                # If the two sets share no parameter, this slice is of another concatenation.
                if selected is not None and selected & in_slice:
                    selected = selected & in_slice
                else:
                    selected = in_slice

            steps = self.carriers(current)
            if current in self.matrices:
                params = frozenset(use.param for use in self.matrices[current])
                if selected:
                    params = params & selected
                result.setdefault((current, params), SignalSource(current, params, plain))
                continue
            is_passable = through or all(step.plain for step in steps)
            if self._is_origin(current) or not steps or not is_passable:
                no_params = frozenset[str]()
                result.setdefault((current, no_params), SignalSource(current, no_params, plain))
                continue
            for step in steps:
                stack.append((step.source, selected, plain and step.plain))
        return list(result.values())

    def _is_origin(self, node: Node) -> bool:
        """Return whether `sources` has to stop at a value.

        These are products of two activations, lookups, unsupported operations and ends of branches.
        Products with parameters are origins, too, but are not tested here.
        """
        is_product = node in self.products
        return is_product or node in self.opaque or node in self.branches or node.op == "lookup"

    def reaches(self, node: Node, param: str = "") -> Iterator[Destination]:
        """Yield the destinations of a value's signal.

        Destinations are the next matrix products, ends of branches, unsupported operations, `top_k`
        and the loss. At a product of two activations the signal is followed farther, so its
        destinations are yielded, too.

        Args:
            param: Path of the parameter whose product `node` is. If `node` is a product with
                several concatenated parameters, only the part of this parameter is followed. By
                default everything is followed.
        """
        stack = [(node, True)]
        visited = set()
        while stack:
            entry = stack.pop()
            if entry in visited:
                continue
            visited.add(entry)
            current, plain = entry
            for user in self.users(current):
                # `top_k` carries no signal, but a router is recognized only by it.
                if user.op == "top_k":
                    yield Destination(user, current, plain)
                    break
            for consumer, step_plain in self.consumers.get(current, []):
                # A slice of fused projections without this parameter leads to another projection.
                if param and param not in consumer.info.get("selected", (param,)):
                    continue
                is_branch_end = (
                    consumer in self.branches and self.branches[consumer].last is current
                )
                is_end = consumer.op in ("dot", "loss") or consumer in self.opaque or is_branch_end
                if is_end:
                    yield Destination(consumer, current, plain)
                # A product of two activations ends no signal: attention weights carry it on.
                is_product = consumer.op == "dot" and not self.matrix(consumer)
                if not is_end or is_product:
                    stack.append((consumer, plain and step_plain))

    def users(self, node: Node) -> list[Node]:
        """Return the results of all operations of which a value is an operand."""
        return self._users.get(node, [])

    def norm(self, node: Node) -> Node | None:
        """Return the input of the norm that a value is the result of, or `None` without a norm.

        Gains, biases and layout operations may lie between the norm and the value.
        """
        while node.kind == "activation":
            signals = [step.source for step in self.carriers(node)]
            if len(signals) != 1:
                return None
            # The factor multiplies the norm's input, which is the only other signal.
            if any(operand in self.normalizers for operand in node.inputs):
                return signals[0]
            if node.op not in LAYOUT | ADDS | {"mul"} or self.matrix(node):
                return None
            node = signals[0]
        return None

    def norm_after(self, node: Node) -> bool:
        """Return whether a norm's factor multiplies a value next, as in (x * gain) * factor.

        Only layout operations may lie between. A factor that is computed from the value itself does
        not count.
        """
        for user in self.users(node):
            for operand in user.inputs:
                if operand in self.normalizers and not self.precedes(node, operand):
                    return True
            if user.op in LAYOUT and self.norm_after(user):
                return True
        return False

    def branch_of(self, node: Node) -> Node | None:
        """Return the sum that ends the innermost residual branch that a value is in.

        A branch begins after its fork, the value at which it leaves the stream, and ends with the
        last value that the sum adds to the stream. A value in it is computed from the fork, and is
        the last value or used to compute it. The result is `None` if the value is in no branch.
        """
        # Sums are in the order of computation, so the first that fits ends the innermost branch.
        for end, branch in self.branches.items():
            is_after_fork = branch.fork is not node and self.precedes(branch.fork, node)
            if is_after_fork and self.precedes(node, branch.last):
                return end
        return None

    @functools.cached_property
    def _streams(self) -> set[Node]:
        """Values of the residual stream.

        They are the values at which branches leave the stream, and the partial sums of branches
        that these values were added up from.
        """
        nodes: set[Node] = set()
        for branch in self.branches.values():
            nodes.update(self._stream(branch.fork))
        return nodes

    def between(self, node: Node) -> bool:
        """Return whether a value is the stream itself, after one branch and before another.

        An example is the result of a norm that follows the sum of stream and branch.
        """
        if node not in self._streams or self.branch_of(node) is not None:
            return False
        return any(end is not node and self.precedes(end, node) for end in self.branches)

    def _branch(self, node: Node) -> Branch | None:
        """Return the residual branch that a sum adds to the stream, or `None` for any other value.

        A branch has at least one matrix product with parameters.
        """
        if node.op not in BRANCHES or len(node.inputs) != 2:
            return None
        # A bias or a position is added, too, and is no branch.
        if any(operand.kind != "activation" for operand in node.inputs):
            return None
        # Either operand of the sum can be the stream.
        for stream, last in (node.inputs, node.inputs[::-1]):
            forks = []
            for candidate in self._stream(stream):
                if self.precedes(candidate, last) and candidate is not last:
                    forks.append(candidate)
            # The branch begins at the latest fork. Earlier ones belong to branches before it.
            fork = max(forks, key=lambda candidate: candidate.number, default=None)
            if fork is not None and self._has_matrix_between(fork, last):
                return Branch(fork, last)
        return None

    def _has_matrix_between(self, first: Node, last: Node) -> bool:
        """Return whether a product with parameters is computed from `first` and leads to `last`.

        The product may be `last` itself, but not `first`.
        """
        for product in self.matrices:
            is_after_first = product is not first and self.precedes(first, product)
            if is_after_first and self.precedes(product, last):
                return True
        return False

    def _stream(self, node: Node) -> list[Node]:
        """Return a value and all that enters it through sums, layout or factors.

        If the value is the residual stream, these are its earlier values. Factors are constants,
        parameters, as of a skip connection, and values of the batch alone, such as a mask.
        """
        stack = [node]
        result: list[Node] = []
        while stack:
            current = stack.pop()
            if current in result:
                continue
            result.append(current)
            signals = _signals(current)
            is_sum = current.op in BRANCHES or current.op in LAYOUT
            is_scaled = current.op == "mul" and len(signals) == 1
            is_divided = current.op == "div" and signals == [current.inputs[0]]
            if is_sum or is_scaled or is_divided:
                stack.extend(signals)
        return result


_LINEAR = LAYOUT | ADDS | {"mul", "div", "neg", "reduce_sum", "dot", "loss", "stacked"}
_SUPPORTED = _LINEAR | NONLINEAR | STILL | {"lookup"}


def _signals(node: Node) -> list[Node]:
    """Return the operands that are floating-point activations."""
    activations = []
    for operand in node.inputs:
        if operand.kind == "activation" and operand.floating:
            activations.append(operand)
    return activations
