"""Roles of the parameters of matrix products, from a product's inputs and destinations.

Attention is recognized as a softmax of a product whose weights multiply and sum values. The
matrices that make its queries, keys and values are found first, then all others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mupax.presets.roles import RANK, Role
from mupax.train.studies.roles.flow import BRANCHES, Destination, Flow, SignalSource
from mupax.train.studies.roles.graph import Atom, Dim, Node, OperandUse
from mupax.train.studies.roles.operations import LAYOUT

Matrix = tuple[Node, str]
"""Matrix product with a parameter, and the path of this parameter."""

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
"""Axes of the data and of the readout, whose sizes stay constant in every limit."""


class Attention(NamedTuple):
    """One softmax over keys.

    Attributes:
        logits: Product of queries and keys.
        mix: Product of softmax weights and values.
        queries: Matrix products with parameters that make the queries.
        keys: Matrix products with parameters that make the keys.
        values: Matrix products with parameters that make the values.
        cross: Whether keys come from another stream than queries (cross-attention).
        latent: Matrix products that make queries, keys or values from features of a fixed number
            alone, as in latent attention.
    """

    logits: Node
    mix: Node
    queries: frozenset[Matrix]
    keys: frozenset[Matrix]
    values: frozenset[Matrix]
    cross: bool
    latent: frozenset[Matrix]


class _SoftmaxProduct(NamedTuple):
    """Product `mix` of the weights of a softmax over keys with the values.

    `logits` is the product whose softmax gives the weights.
    """

    mix: Node
    side: int
    """Index of the operand of `mix` that has the weights, 0 or 1."""
    logits: Node


def attentions(flow: Flow, names: Mapping[str, tuple[str, ...]]) -> list[Attention]:
    """Find all attention in a loss, and return one entry for each softmax over keys.

    `flow.products`, the products of two activations, changes in place. Products with the weights
    that a router gives its experts are removed from it.

    Args:
        names: Axis names of each parameter's dimensions, as for `Matrices`.
    """
    products = []
    for mix in flow.graph.nodes:
        if not flow.mixes(mix):
            continue
        for side in (0, 1):
            logits = _logits(flow, mix, side)
            if logits is not None:
                products.append(_SoftmaxProduct(mix, side, logits))

    of_attention: set[Node] = set()
    for product in products:
        of_attention |= {product.mix, product.logits}
    # `flow.sources` stops at members of `flow.products`, so the set changes only after all products
    # are tested.
    unweighed = set()
    for node in flow.products:
        if node not in of_attention and not _is_weighed(flow, node):
            unweighed.add(node)
    flow.products = of_attention | unweighed

    result = []
    for mix, side, logits in products:
        key_side = _key_side(mix, side, logits)
        if key_side is None:
            continue
        queries = _matrices(flow, logits.inputs[1 - key_side], names)
        keys = _matrices(flow, logits.inputs[key_side], names)
        values = _matrices(flow, mix.inputs[1 - side], names)
        latent: set[Matrix] = set()
        for operand in (*logits.inputs, mix.inputs[1 - side]):
            latent |= _latent(flow, operand, names)
        # In self-attention queries and keys are computed from the same stream. Learned queries are
        # no stream.
        query_streams = _streams(flow, queries or latent)
        is_learned = all(node.info.get("learned") for node in query_streams)
        cross = not is_learned and query_streams != _streams(flow, keys or latent)
        result.append(Attention(logits, mix, queries, keys, values, cross, frozenset(latent)))
    return result


def _logits(flow: Flow, mix: Node, side: int) -> Node | None:
    """Return the product of queries and keys whose softmax is one side of a product, or `None`.

    Args:
        mix: Product of two activations, perhaps of softmax weights and values.
        side: Index of the operand of `mix` that may have the weights, 0 or 1.
    """
    sources = flow.sources(mix.inputs[side])
    exps = []
    for source in sources:
        if source.node in flow.exps:
            exps.append(source.node)
    logits: dict[Node, None] = {}
    for exp in exps:
        # A soft cap (tanh) may lie between the product of queries and keys and its softmax.
        for source in flow.sources(exp.inputs[0], through=True):
            if flow.mixes(source.node):
                logits[source.node] = None
    # A softmax over another axis, such as a router's over experts, is no attention.
    if len(logits) != 1 or len(exps) != 1 or not _is_over_keys(flow, mix, side, exps[0]):
        return None
    return next(iter(logits))


def _key_side(mix: Node, side: int, logits: Node) -> int | None:
    """Return the index (0 or 1) of the operand of the logits that has the keys, or `None`.

    The keys are on the side whose rows the product with the values sums over.

    Args:
        mix: Product of softmax weights and values, as in `Attention`.
        side: Index of the operand of `mix` with the weights, 0 or 1.
    """
    summed = list(itertools.chain(*mix.info["contracted"][side]))
    for key_side in (0, 1):
        key_atoms = logits.info["kept"][key_side]
        # A reshape after the logits may have cut the axis of keys into parts.
        if any(atom.is_from(key_atoms) for atom in summed):
            return key_side
    return None


def _is_over_keys(flow: Flow, mix: Node, side: int, exp: Node) -> bool:
    """Return whether a softmax normalizes over the same axis that the product `mix` sums over.

    Args:
        mix: Product of two activations, perhaps of softmax weights and values.
        side: Index of the operand of `mix` that may have the weights, 0 or 1.
        exp: Exponential of the softmax, a member of `flow.exps`.
    """
    summed: set[Atom] = set()
    for atom in itertools.chain(*mix.info["contracted"][side]):
        summed.update(atom.ancestors())
    normalized: set[Atom] = set()
    for node in flow.denominators:
        # `denominators` has the sums of all softmaxes of the loss. Only those of this softmax
        # count.
        if node.op == "reduce_sum" and flow.precedes(exp, node):
            for atom in node.info["summed"]:
                normalized.update(atom.ancestors())
    return bool(summed & normalized)


def _is_weighed(flow: Flow, node: Node) -> bool:
    """Return whether one operand of a product comes from scores that a `top_k` chooses by.

    An example is the product of experts' outputs with the router's weights.
    """
    for operand in node.inputs:
        sources = flow.sources(operand, through=True)
        if sources and _are_all_chosen_by(flow, sources):
            return True
    return False


def _are_all_chosen_by(flow: Flow, sources: list[SignalSource]) -> bool:
    """Return whether all sources are products with parameters that a `top_k` chooses by."""
    for source in sources:
        if not source.params:
            return False
        if not any(destination.end.op == "top_k" for destination in flow.reaches(source.node)):
            return False
    return True


def _matrices(flow: Flow, node: Node, names: Mapping[str, tuple[str, ...]]) -> frozenset[Matrix]:
    """Return the matrix products with parameters that a value comes from.

    No nonlinearity may lie between. Matrices of low-rank adapters are left out, because they read
    and write what the matrix does that they are added to.
    """
    matrices = set()
    for source in flow.sources(node):
        for param in source.params:
            if RANK not in names.get(param, ()):
                matrices.add((source.node, param))
    return frozenset(matrices)


def _latent(flow: Flow, node: Node, names: Mapping[str, tuple[str, ...]]) -> set[Matrix]:
    """Return the matrix products that a value comes from, if all read a fixed number of features.

    Otherwise the result is empty. A low-rank adapter is added to the product of another matrix, so
    that its product is not all that the value comes from.
    """
    matrices = set()
    for source in flow.sources(node):
        for param in source.params:
            if _LATENT_AXES.isdisjoint(names.get(param, ())):
                return set()
            matrices.add((source.node, param))
    return matrices


def _streams(flow: Flow, matrices: Iterable[Matrix]) -> set[Node]:
    """Return the values of the stream from which the inputs of these matrix products come."""
    nodes = set()
    visited = set()
    stack = list(matrices)
    while stack:
        node, param = stack.pop()
        if (node, param) in visited:
            continue
        visited.add((node, param))
        for use in flow.matrices[node]:
            if use.param != param or use.other is None:
                continue
            for source in flow.sources(use.other, through=True):
                # In latent attention another matrix of the branch lies before that of the keys.
                if source.params and flow.branch_of(source.node) is not None:
                    stack += [(source.node, before) for before in source.params]
                else:
                    nodes.add(source.node)
    return nodes


def split_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the axes in dimension names; a name such as "heads head_dim" has two of them."""
    axes: list[str] = []
    for name in names:
        axes += name.split()
    return tuple(axes)


FACTORIZED = (
    "it is one of two factors of a table, of a fixed rank; make them one table of vocab x embed, "
    "or declare the table TOKEN_EMBEDDING with axes=('vocab', 'input'), shared=('embed',), and the "
    "factor PATCH_EMBEDDING with axes=('input', 'embed'), fan_in=('input',)"
)
"""Reason to refuse the factors of an embedding, for which no preset has rows."""

LATENT = (
    "it is one of the factors of queries, keys or values of a fixed rank (latent attention), for "
    "which no preset has rows; let the rank grow with the width and name its size representation, "
    "or make the factors one matrix"
)
"""Reason to refuse the matrices of latent attention whose rank is fixed."""

_LATENT_AXES = frozenset({RANK, "input", "output"})
"""Axes of a fixed size that a matrix between the stream and the heads may write."""


class Refusal(Exception):
    """Error for a parameter whose role is not certain. The text says what to write instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraint:
    """Constraint on a parameter's role that follows from one use of it.

    Attributes:
        role: Role in this use.
        evidence: Reason for the role, in words.
        fan_in: Indices of the parameter's dimensions that a product sums over.
        in_block: Whether the use is in a residual branch.
        cross: Whether the use is in attention to another stream.
        of: For a gain or bias, the role of its matrix, or `Role.NORM_GAIN` for the bias of a norm.
            `None` otherwise.
        value_dim: For a query or key, whether values have a head dimension of their own.
        encoder: Whether the use is in an encoder: keys of cross-attention are computed from it.
        shared: Growing axes along which the parameter is shared. The operand that it meets has
            these axes, and the parameter has not.
        adapts: Path of the matrix that an adapter is added to. Empty for all other roles.
    """

    role: Role
    evidence: str
    fan_in: tuple[int, ...] = ()
    in_block: bool = False
    cross: bool = False
    of: Role | None = None
    value_dim: bool = False
    encoder: bool = False
    shared: tuple[str, ...] = ()
    adapts: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """Matrix product with a parameter whose role is to be found.

    Attributes:
        use: Use of the parameter.
        other: The other operand.
        side: Index of the parameter's operand, 0 or 1.
        fan_in: Indices of the parameter's dimensions that are summed over.
        names: Axes of all dimensions of the parameter.
        in_block: Whether the product is in a residual branch.
        destinations: Next products, ends of branches and so on that the product's signal reaches.
    """

    use: OperandUse
    other: Node
    side: int
    fan_in: tuple[int, ...]
    names: tuple[str, ...]
    in_block: bool
    destinations: list[Destination]

    @property
    def summed_axes(self) -> str:
        """Axes that the product sums over, with commas between."""
        return ", ".join(self.names[index] for index in self.fan_in)

    @property
    def contraction(self) -> str:
        """Beginning of the evidence: "contracts " and the axes that the product sums over."""
        return f"contracts {self.summed_axes}"

    def constraint(self, role: Role, evidence: str, *, cross: bool = False) -> Constraint:
        """Return a `Constraint` by which the product's parameter has the given role.

        Args:
            evidence: Reason for the role, written after `contraction`.
        """
        return Constraint(
            role=role,
            evidence=f"{self.contraction}{evidence}",
            fan_in=self.fan_in,
            in_block=self.in_block,
            cross=cross,
        )


class Matrices:
    """Roles of the parameters in all matrix products of a loss, deduced by the constructor.

    The attribute `constraints` has the role by (product, parameter). `refused` has the reason why a
    role is not certain, by parameter.

    Args:
        attentions: All attention of the loss, from the function `attentions`.
        names: Axis names of each parameter's dimensions. Parameters without an entry get no role.
    """

    def __init__(
        self, flow: Flow, attentions: list[Attention], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.flow = flow
        self.attentions = attentions
        self.names = names
        self.constraints: dict[Matrix, Constraint] = {}
        self.refused: dict[str, str] = {}
        """Reason of the first refusal, by parameter."""
        for uses in flow.matrices.values():
            for use in uses:
                if use.param not in names:
                    continue
                try:
                    self.constraints[use.node, use.param] = self._constraint(use)
                except Refusal as reason:
                    # One uncertain parameter must not hide the roles of the others.
                    self.refused.setdefault(use.param, str(reason))

    def _constraint(self, use: OperandUse) -> Constraint:
        """Return the role of a parameter in one product.

        Raises:
            Refusal: The role is not certain.
        """
        product = self._product(use)
        if self._is_latent(product):
            raise Refusal(LATENT)
        if RANK in product.names:
            return self._adapter(product)
        # "input" stands for a fixed size, such as the short rows of a table.
        if "input" in product.names and self._is_of_table(product):
            raise Refusal(FACTORIZED)
        if product.other.kind == "data":
            return _constraint_on_data(product)
        of_attention = self._of_attention(use)
        if len(of_attention) > 1:
            roles = " and ".join(sorted(constraint.role.value for constraint in of_attention))
            raise Refusal(
                f"its product acts as {roles} of attention; make them parameters of their own"
            )
        if of_attention:
            return dataclasses.replace(of_attention[0], fan_in=product.fan_in)
        if any(destination.end.op == "top_k" for destination in product.destinations):
            return product.constraint(Role.ROUTER, "; top_k of its product chooses")

        sources = self.flow.sources(product.other)
        self._refuse_opaque(product, sources)
        # Tested first, because attention itself is a product of two activations, and these are
        # refused below.
        output = self._attention_out(product, sources)
        if output is not None:
            return output
        self._refuse_products(product)
        if all(destination.end.op == "loss" for destination in product.destinations):
            if not product.destinations:
                raise Refusal("its product does not reach the loss; leave the parameter out")
            return product.constraint(
                Role.READOUT, "; its product reaches the loss through no other matrix"
            )
        return self._mlp_or_hidden(product)

    def _product(self, use: OperandUse) -> _Product:
        """Return the operands, summed axes and destinations of a product, which determine the role.

        Raises:
            Refusal: The parameter is changed by a computation before the product, or the product
                sums over only a part of a dimension, or over nothing.
        """
        assert use.other is not None
        if use.view.kind == "derived":
            raise Refusal(
                f"it is computed with ({use.view.op}) before it meets an activation; "
                "apply it as it is stored"
            )
        node = use.node
        side = 0 if node.inputs[0] is use.view else 1
        shape = self.flow.graph.shapes[use.param]
        fan_in = complete_dims(use, shape, node.info["contracted"][side])
        if not fan_in and 1 in shape:
            axis = self.names[use.param][shape.index(1)]
            raise Refusal(
                f"its axis {axis} has the size 1, and sums over a size of 1 leave no trace; "
                f"trace the model with {axis} of 2 or more, as roles do not depend on sizes"
            )
        if not fan_in:
            raise Refusal(
                "it is multiplied with an activation and nothing is summed over; "
                "write the product as a matrix product"
            )
        return _Product(
            use=use,
            other=use.other,
            side=side,
            fan_in=fan_in,
            names=self.names[use.param],
            in_block=self.flow.branch_of(node) is not None,
            destinations=list(self.flow.reaches(node, use.param)),
        )

    def _adapter(self, product: _Product) -> Constraint:
        """Return the role of one of the two matrices of a low-rank adapter (LoRA).

        With matrices A and B, x A B is added to the product x W of the adapted matrix W.

        Raises:
            Refusal: The product is no part of such a sum.
        """
        reads_rank = [product.names[index] for index in product.fan_in] == [RANK]
        last = product.use if reads_rank else self._after(product)
        first = None if last is None else self._before(last)
        adapted = None
        if first is not None and last is not None and product.use in (first, last):
            adapted = self._adapted(first, last)
        if adapted is None:
            if self._is_of_table(product):
                raise Refusal(FACTORIZED)
            raise Refusal(
                "its axis rank is that of a low-rank adapter, x @ w + x @ a @ b with a "
                "[inputs, rank] and b [rank, outputs], and there is no such sum; make the two "
                "factors one matrix, or declare their roles"
            )
        role = Role.LORA_B if reads_rank else Role.LORA_A
        evidence = f"; x @ a @ b is added to the product of {adapted}"
        constraint = product.constraint(role, evidence)
        return dataclasses.replace(constraint, in_block=True, adapts=adapted)

    def _is_latent(self, product: _Product) -> bool:
        """Return whether a product is before or after the features of a latent attention."""
        nodes = {product.use.node}
        if any(product.names[index] in _LATENT_AXES for index in self._fan_out(product)):
            nodes |= {destination.end for destination in product.destinations}
        latent = set()
        for attention in self.attentions:
            latent |= {node for node, _ in attention.latent}
        return not nodes.isdisjoint(latent)

    def _fan_out(self, product: _Product) -> list[int]:
        """Return the indices of the parameter's dimensions that the product does not sum over."""
        return [index for index in range(len(product.names)) if index not in product.fan_in]

    def _is_of_table(self, product: _Product) -> bool:
        """Return whether a product's parameter is a table, or the factor that reads a table."""
        factors = {product.use.param}
        for source in self.flow.sources(product.other):
            factors |= source.params
            if source.node.op == "lookup":
                factors |= {param for param, _ in source.node.info.get("chosen", ())}
        uses = [use for use in self.flow.graph.uses if use.param in factors]
        return any(has_short_rows(use, self.names.get(use.param, ())) for use in uses)

    def _before(self, last: OperandUse) -> OperandUse | None:
        """Return the use of the matrix A whose product is all that the matrix B reads, if any.

        The result is `None` if a norm or a nonlinearity lies between.
        """
        assert last.other is not None
        sources = self.flow.sources(last.other)
        if len(sources) != 1 or len(sources[0].params) != 1 or self.flow.norm(last.other):
            return None
        # The matrices A of several adapters can be concatenated in one product.
        for use in self.flow.matrices[sources[0].node]:
            if use.param in sources[0].params:
                return use
        return None

    def _after(self, product: _Product) -> OperandUse | None:
        """Return the use of the matrix B that reads the product of the matrix A, if any.

        Raises:
            Refusal: Several matrices read it.
        """
        ends = {destination.end for destination in product.destinations}
        uses = []
        for end in ends:
            for use in self.flow.matrices.get(end, ()):
                if RANK in self.names.get(use.param, ()):
                    uses.append(use)
        if len(uses) > 1:
            readers = ", ".join(sorted(use.param for use in uses))
            raise Refusal(
                f"its axis rank is that of a low-rank adapter, and {readers} read its product; "
                "make a matrix for each of them"
            )
        return uses[0] if uses else None

    def _adapted(self, first: OperandUse, last: OperandUse) -> str | None:
        """Return the path of the matrix to whose product an adapter is added, or `None`.

        With matrices A and B, the adapter is x A B. The matrix sums over the axes of A and writes
        those of B.

        Args:
            first: Use of A, which reads what the matrix reads.
            last: Use of B, which writes what the matrix writes.
        """
        flow = self.flow
        inputs = self._axes_of_one(first.param)
        outputs = self._axes_of_one(last.param)
        if inputs[-1:] != (RANK,) or outputs[:1] != (RANK,):
            return None
        axes = (*inputs[:-1], *outputs[1:])
        stack = [last.node]
        while stack:
            for user, plain in flow.consumers.get(stack.pop(), ()):
                # A gate or a norm of x A B makes something else of it than an adapter.
                is_normed = any(operand in flow.normalizers for operand in user.inputs)
                if not plain or is_normed or user.op not in LAYOUT | BRANCHES | {"mul", "div"}:
                    continue
                if user not in flow.branches:
                    stack.append(user)
                if user.op in BRANCHES:
                    adapted = self._matrix_of_sum(user, first, axes)
                    if adapted is not None:
                        return adapted
        return None

    def _matrix_of_sum(self, total: Node, first: OperandUse, axes: tuple[str, ...]) -> str | None:
        """Return the path of a matrix with certain axes whose product is a term of a sum, or `None`.

        Args:
            total: Result of adding an adapter, and perhaps more, to the product of a matrix.
            first: Use of a matrix that reads the same activation.
            axes: Axes that the matrix sums over, then those that it writes.
        """
        for source in self.flow.sources(total):
            for use in self.flow.matrices.get(source.node, ()):
                is_source = use.param in source.params
                reads_same = _before_layout(use.other) is _before_layout(first.other)
                if is_source and reads_same and self._axes_of_one(use.param) == axes:
                    return use.param
        return None

    def _axes_of_one(self, param: str) -> tuple[str, ...]:
        """Return the axes of a parameter without those that count the blocks of a stack."""
        axes = split_names(self.names.get(param, ()))
        return tuple(axis for axis in axes if axis not in ("layers", "encoder_layers"))

    def _refuse_opaque(self, product: _Product, sources: list[SignalSource]) -> None:
        """Raise Refusal for a product that reads, or is read by, an unsupported operation."""
        neighbors = []
        for source in sources:
            neighbors.append(source.node)
        for destination in product.destinations:
            neighbors.append(destination.end)
        for node in neighbors:
            if node in self.flow.opaque:
                raise Refusal(
                    f"it reads or feeds {node.op}, through which nothing can be seen; "
                    "declare its role"
                )

    def _attention_out(self, product: _Product, sources: list[SignalSource]) -> Constraint | None:
        """Return the role of a product that reads the output of attention, otherwise `None`.

        Raises:
            Refusal: The product reads the output of attention and something else.
        """
        read = []
        for attention in self.attentions:
            if any(source.node is attention.mix for source in sources):
                read.append(attention)
        if not read:
            return None
        # Each attention is one source, so that any further source is something else.
        if len(sources) > len(read):
            raise Refusal("it reads attention and something else at once; project them apart")
        cross = any(attention.cross for attention in read)
        evidence = " of values that a softmax weighed"
        return product.constraint(Role.ATTENTION_OUT, evidence, cross=cross)

    def _refuse_products(self, product: _Product) -> None:
        """Raise Refusal for a product that reads, or is read by, a product of two activations.

        Products of experts' outputs with a router's weights do not count.
        """
        products = self.flow.products
        sources = self.flow.sources(product.other, through=True)
        reads = any(source.node in products for source in sources)
        if reads or any(destination.end in products for destination in product.destinations):
            raise Refusal(
                "a product of two activations that is not known as a softmax's attention takes or makes "
                "it; "
                "declare its role"
            )

    def _mlp_or_hidden(self, product: _Product) -> Constraint:
        """Return the role of a product of an MLP or of experts, or `Role.HIDDEN` for any other.

        Raises:
            Refusal: The parameter has an axis of experts, but no product or routing treats it as
                one matrix per expert. Or it has one matrix per expert, but is neither the first
                nor the last of an MLP.
        """
        flow = self.flow
        use = product.use
        rows = self._rows(product)
        experts = bool(rows) and product.in_block
        if "experts" in product.names and not experts:
            raise Refusal(
                "it has an axis of experts, and no index or batch dimension has a matrix each; "
                "declare its role"
            )

        outputs = []
        for index in range(len(product.names)):
            is_fan_out = index not in (*product.fan_in, *rows)
            if is_fan_out and self._is_in_output(use, index):
                outputs.append(index)
        grows = all(product.names[index] not in FIXED for index in (*product.fan_in, *outputs))
        if product.in_block and grows:
            sources = flow.sources(product.other, through=True)
            hidden = []
            reads_branch = False
            for source in sources:
                if source.params:
                    hidden.append(source)
                    reads_branch = reads_branch or flow.branch_of(source.node) is not None
            matrices = []
            ends_branch = False
            for destination in product.destinations:
                ends_branch = ends_branch or destination.end in flow.branches
                if flow.matrix(destination.end):
                    matrices.append(destination)

            only_nonlinear = bool(matrices) and not any(dest.plain for dest in matrices)
            if only_nonlinear and not ends_branch and not reads_branch:
                role = Role.EXPERT_IN if experts else Role.MLP_IN
                return product.constraint(
                    role, "; a nonlinearity or gate follows, then another matrix"
                )
            reads_nonlinear = reads_branch and not any(source.plain for source in hidden)
            if reads_nonlinear and ends_branch and not matrices:
                role = Role.EXPERT_OUT if experts else Role.MLP_OUT
                return product.constraint(role, " of a hidden layer; its product ends the branch")
        if experts:
            raise Refusal(
                "an index chooses among its matrices, and it is neither the first nor the last of "
                "an MLP; declare its role"
            )
        return product.constraint(
            Role.HIDDEN, "; between other matrices, in no part of attention or an MLP"
        )

    def _rows(self, product: _Product) -> list[int]:
        """Return the indices of the parameter's dimensions that count matrices, as for experts.

        These are batch dimensions of the product, and dimensions that routing indexes.
        """
        use = product.use
        rows = [*use.dims_of_param(use.node.info["batched"][product.side])]
        for (param, index), kind in use.view.picks:
            # Routing depends on activations. Constants, such as positions, choose no expert.
            if param == use.param and kind == "activation":
                rows.append(index)
        return rows

    def _is_in_output(self, use: OperandUse, index: int) -> bool:
        """Return whether a dimension of the parameter is one of the product's result."""
        left_atoms, right_atoms = use.node.info["kept"]
        return any((use.param, index) in atom.param_dims for atom in left_atoms | right_atoms)

    def _of_attention(self, use: OperandUse) -> list[Constraint]:
        """Return the roles in attention that a product has: none or some of query, key and value.

        The field `fan_in` of the results is not set.
        """
        # By role, because several attentions may use a matrix in one role without contradiction.
        constraints: dict[Role, Constraint] = {}
        matrix = (use.node, use.param)
        for attention in self.attentions:
            in_block = any(self.flow.branch_of(node) for node, _ in attention.queries)
            has_value_dim = False
            for _, param in attention.values:
                if "value_dim" in split_names(self.names.get(param, ())):
                    has_value_dim = True
            keys = ", ".join(sorted({param for _, param in attention.keys}))
            queries = ", ".join(sorted({param for _, param in attention.queries}))
            queries = queries or "learned queries"
            if matrix in attention.queries:
                constraints[Role.QUERY] = Constraint(
                    role=Role.QUERY,
                    evidence=f"its products with those of {keys} go through a softmax over the "
                    "latter",
                    in_block=in_block,
                    cross=attention.cross,
                    value_dim=has_value_dim,
                )
            if matrix in attention.keys:
                constraints[Role.KEY] = Constraint(
                    role=Role.KEY,
                    evidence=f"its products with those of {queries} go through a softmax over its "
                    "own rows",
                    in_block=in_block,
                    cross=attention.cross,
                    value_dim=has_value_dim,
                )
            if matrix in attention.values:
                constraints[Role.VALUE] = Constraint(
                    role=Role.VALUE,
                    evidence="its product is weighed by a softmax and summed",
                    in_block=in_block,
                    cross=attention.cross,
                )
        return list(constraints.values())


def _before_layout(node: Node | None) -> Node | None:
    """Return the value that a value is another layout of, or the value itself."""
    while node is not None and node.op in LAYOUT and len(node.inputs) == 1:
        node = node.inputs[0]
    return node


def _constraint_on_data(product: _Product) -> Constraint:
    """Return the role of a product with the batch itself: an embedding.

    It is a token embedding for one-hot vectors, otherwise a patch embedding.
    """
    if _is_one_hot(product.other):
        return Constraint(
            role=Role.TOKEN_EMBEDDING,
            evidence=f"is multiplied by one-hot vectors over {product.summed_axes}",
        )
    return Constraint(
        role=Role.PATCH_EMBEDDING,
        evidence=f"{product.contraction} with the batch itself",
        fan_in=product.fan_in,
    )


def complete_dims(
    use: OperandUse, shape: tuple[int, ...], dims: tuple[Dim, ...]
) -> tuple[int, ...]:
    """Return the sorted indices of the parameter's dimensions that `dims` consist of.

    Args:
        shape: Shape of the stored parameter, before any cut.
        dims: Dimensions of the parameter in the layout in which it is used (`use.view`), such as
            those that a product sums over.

    Raises:
        Refusal: `dims` have only a part of such a dimension, or mix dimensions. A view of several
            parameters, such as fused projections, is not tested for this.
    """
    indices = use.dims_of_param(dims)
    for index in indices:
        size = 1
        for atom in itertools.chain(*dims):
            if (use.param, index) in atom.param_dims:
                size *= atom.size
        # A view of several parameters, such as fused projections, has a part of each.
        if size != shape[index] and len(use.view.params) == 1:
            raise Refusal(
                f"a product sums over {size} of the {shape[index]} along its dimension {index}, "
                "or mixes axes; keep axes apart"
            )
    return indices


def has_short_rows(use: OperandUse, axes: tuple[str, ...]) -> bool:
    """Return whether a use takes rows of a fixed size from a table with these axes.

    The first factor of a factorized table has such rows.
    """
    node = use.node
    if "chosen" in node.info:
        rows = [index for param, index in node.info["chosen"] if param == use.param]
    elif node.op == "dot" and use.other is not None and _is_one_hot(use.other):
        side = 0 if node.inputs[0] is use.view else 1
        rows = use.dims_of_param(node.info["contracted"][side])
    else:
        return False
    row_axes = {axis for index, axis in enumerate(axes) if index not in rows}
    return not {RANK, "input"}.isdisjoint(row_axes)


def _is_one_hot(node: Node) -> bool:
    """Return whether a value is the result of a test for equality, as `jax.nn.one_hot` makes it.

    It may be in another layout or dtype.
    """
    # `jax.nn.one_hot` broadcasts the ids and a range of numbers, and compares them.
    while node.op in LAYOUT and node.inputs:
        node = node.inputs[0]
    return not node.floating and node.op == "eq"
