"""Roles and axes of all parameters, deduced from a traced loss, with the evidence for each.

The result is a declaration (`ParamSpec`) per parameter, or the reason why its role is not certain
("refused"). Axes come from the parameters' shapes at several sizes. A dimension can hold two axes:
if a Linear to heads * head_dim is reshaped to [..., heads, head_dim], the graph shows how the loss
cuts it.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from mupax.mappings import drop_keys
from mupax.presets import adapters
from mupax.presets.roles import ADAPTERS, RANK, ParamSpec, PresetError, Role
from mupax.train.studies.roles.flow import ADDS, Flow, SignalSource
from mupax.train.studies.roles.graph import Atom, Dim, Graph, Node, OperandUse, ParamDim
from mupax.train.studies.roles.matrices import (
    FACTORIZED,
    FIXED,
    Attention,
    Constraint,
    Matrices,
    Refusal,
    attentions,
    has_short_rows,
    split_names,
)
from mupax.train.studies.roles.operations import LAYOUT

_ENDS = frozenset({Role.MLP_OUT, Role.EXPERT_OUT})
_STREAM = frozenset({Role.ROUTER, Role.PATCH_EMBEDDING, Role.TOKEN_EMBEDDING})
"""Roles of matrices to which no gain belongs, because they make the stream or choose experts."""
_LOOKUPS = {"position": Role.POSITION, "source": Role.POSITION, "distance": Role.RELATIVE_BIAS}
"""Roles of tables that are looked up along an axis. All others are token embeddings."""
_JOINS = ("concatenate", "select_n", "scatter", "dynamic_update_slice", "stack")

DIRECT_QUERY = (
    "it is a query itself, without a matrix of queries; declare it as a bias of queries, "
    "ParamSpec(role=Role.BIAS, of=Role.QUERY, axes=('heads', 'head_dim'))"
)
"""Reason to refuse a learned query that is multiplied by keys."""

Shapes = Mapping[str, tuple[int, ...]]


def fact(matrices: Matrices, use: OperandUse) -> Constraint:
    """Return the role that a parameter has in one operation other than a matrix product.

    The operation is a sum, an elementwise product, a lookup or a concatenation.

    Raises:
        Refusal: The role is not certain.
    """
    flow = matrices.flow
    node = use.node
    names = matrices.names.get(use.param, ())
    if has_short_rows(use, names):
        raise Refusal(FACTORIZED)
    if RANK in names:
        raise Refusal(
            "its axis rank is that of a low-rank adapter, and only its two matrices have roles; "
            "leave it out, or declare its role"
        )
    # In h + x @ w + b the bias is added to the stream itself, which the next test would refuse.
    if node.op in ADDS and use.other in flow.branches:
        bias = _bias_after_branch(matrices, use)
        if bias is not None:
            return bias
    if flow.between(node) and node not in flow.branches:
        raise Refusal(
            "it acts on the stream itself between two branches, where in_block is not settled; "
            "declare its role"
        )
    if node.info.get("learned"):
        return _learned(matrices, use)
    if node.op == "lookup":
        return _looked_up(matrices, use)
    if node.op in ADDS:
        return _added(matrices, use)
    if node.op in ("mul", "div"):
        return _multiplied(matrices, use)
    # A class token joins the sequence before the first block.
    if node.op in _JOINS and flow.branch_of(node) is None:
        return Constraint(
            role=Role.TOKEN_EMBEDDING, evidence="joins the sequence as a row of its own"
        )
    raise Refusal(
        f"it meets an activation in {node.op}; none of the roles does so: "
        "declare one, or write it as a product or sum"
    )


def _learned(matrices: Matrices, use: OperandUse) -> Constraint:
    """Return the role of learned queries of attention, such as those of a pooling head.

    Raises:
        Refusal: The parameter is added to other tokens or multiplies them, or no matrix of queries
            reads it.
    """
    flow = matrices.flow
    node = use.node
    for user in _before_others(flow, node):
        # Tokens start a stream. What is added to other tokens is a bias or a position, and what
        # multiplies them is a gain.
        tokens = [operand for operand in user.inputs if not flow.precedes(node, operand)]
        if user.op in ADDS and tokens:
            raise Refusal("it is added to other tokens; declare its role")
        if user.op in ("mul", "div") and any(token.kind == "activation" for token in tokens):
            raise Refusal("it multiplies other tokens; declare its role")
    for attention in matrices.attentions:
        logits = attention.logits
        if not attention.queries:
            for operand in logits.inputs:
                if any(source.node is node for source in flow.sources(operand)):
                    raise Refusal(DIRECT_QUERY)
        # The matrix of queries writes the axis of a head, which the logits sum over. The learned
        # vector does not, so that the two cannot be taken for each other.
        summed = itertools.chain(*logits.info["contracted"][0], *logits.info["contracted"][1])
        writers = set()
        for atom in summed:
            writers.update(param for param, _ in atom.param_dims)
        for product, param in attention.queries:
            for query in flow.matrices[product]:
                assert query.other is not None
                sources = flow.sources(query.other, through=True)
                is_read = any(source.node is node for source in sources)
                if is_read and param in writers and use.param not in writers:
                    evidence = f"is a learned query, which {param} reads"
                    return Constraint(role=Role.TOKEN_EMBEDDING, evidence=evidence)
    raise Refusal("no matrix of queries reads it; declare its role")


def _before_others(flow: Flow, node: Node) -> list[Node]:
    """Return the results of all operations that read a value, or a function of the value alone.

    Such functions are other layouts and operations with one operand, such as a sigmoid.
    """
    results = []
    stack = [node]
    while stack:
        for user in flow.users(stack.pop()):
            results.append(user)
            if user.op in LAYOUT or len(user.inputs) == 1:
                stack.append(user)
    return results


def _looked_up(matrices: Matrices, use: OperandUse) -> Constraint:
    """Return the role of a table that the batch looks up: a token or position embedding.

    Raises:
        Refusal: The batch looks up distances in a table of relative positions.
    """
    names = matrices.names[use.param]
    axes = set()
    for param, index in use.node.info["chosen"]:
        if param == use.param:
            axes.add(names[index])
    role = Role.TOKEN_EMBEDDING
    # Tested in the order of `_LOOKUPS`, because the order of a set of strings differs from process
    # to process.
    for axis, looked_up in _LOOKUPS.items():
        if axis in axes:
            role = looked_up
            break
    if role is Role.RELATIVE_BIAS:
        raise Refusal("the batch says which distance to look up; compute distances of positions")
    return Constraint(
        role=role,
        evidence=f"is looked up along {', '.join(sorted(axes))} by integers of the batch",
    )


def _bias_after_branch(matrices: Matrices, use: OperandUse) -> Constraint | None:
    """Return the role of a bias that is added after its branch was added, as in h + x @ w + b.

    There (h + x @ w) + b adds the bias b to the residual stream, after the product x @ w has ended
    the branch. The result is `None` if the parameter is no such bias.
    """
    flow = matrices.flow
    assert use.other is not None
    sources = flow.sources(flow.branches[use.other].last)
    constraints = _constraints(matrices, sources)
    if len(constraints) != 1 or constraints[0] is None:
        return None
    if not set(_axes(matrices, use)) <= _output_axes(matrices, sources):
        return None
    matrix = constraints[0]
    evidence = f"is added after the product of the {matrix.role.value}, which ends the branch"
    return _bias_of(matrix, evidence)


def _bias_of(matrix: Constraint, evidence: str) -> Constraint:
    return dataclasses.replace(matrix, role=Role.BIAS, evidence=evidence, fan_in=(), of=matrix.role)


def _constraints(matrices: Matrices, sources: Iterable[SignalSource]) -> list[Constraint | None]:
    """Return the role of every parameter whose product is among the sources of a signal.

    The entry is `None` for a parameter whose role in the product is not certain.
    """
    constraints = []
    for source in sources:
        for param in source.params:
            constraints.append(matrices.constraints.get((source.node, param)))
    return constraints


def _accepted(matrices: Matrices, sources: Iterable[SignalSource]) -> list[Constraint]:
    """Return the roles of the parameters whose products are sources.

    Uncertain ones are left out, and adapters, whose product is a part of the adapted matrix's.
    """
    accepted = []
    for constraint in _constraints(matrices, sources):
        if constraint is not None and constraint.role not in ADAPTERS:
            accepted.append(constraint)
    return accepted


def _role_names(roles: Iterable[Role]) -> str:
    """Return the names of roles with "and" between, or "no matrix's product" without roles."""
    return " and ".join(sorted(role.value for role in roles)) or "no matrix's product"


def _added(matrices: Matrices, use: OperandUse) -> Constraint:
    """Return the role of a parameter that is added: a bias, a position or a relative bias.

    Raises:
        Refusal: The parameter is none of these, or is added to the product of a parameter whose own
            role is not certain.
    """
    flow = matrices.flow
    other = use.other
    assert other is not None
    in_block = flow.branch_of(use.node) is not None
    if flow.norm(other) is not None:
        return Constraint(
            role=Role.BIAS,
            evidence="is added to a norm's result",
            in_block=in_block,
            of=Role.NORM_GAIN,
        )

    sources = flow.sources(other, through=True)
    all_logits = {attention.logits for attention in matrices.attentions}
    # Tested before biases of matrices, because logits are products of two activations and no matrix
    # makes them.
    if sources and all(source.node in all_logits for source in sources):
        return _added_to_logits(use, in_block)

    for source in sources:
        for param in source.params:
            if (source.node, param) not in matrices.constraints:
                raise Refusal(f"it is added to the product of {param}, which is refused itself")
    constraints = _accepted(matrices, sources)
    roles = {fact.role for fact in constraints}
    if len(roles) == 1 and all(source.params for source in sources):
        matrix = constraints[0]
        # A router's bias may be added after its softmax or sigmoid.
        is_direct = matrix.role is Role.ROUTER or all(source.plain for source in sources)
        if is_direct and set(_axes(matrices, use)) <= _output_axes(matrices, sources):
            return _bias_of(matrix, f"is added to the product of the {matrix.role.value}")
    if not in_block and not {"position", "source"}.isdisjoint(_axes(matrices, use)):
        return Constraint(
            role=Role.POSITION,
            evidence="is added to the stream before its blocks, a row a position",
        )
    target = _role_names(roles)
    raise Refusal(
        f"it is added to {target}, as neither their bias nor a position; declare its role"
    )


def _added_to_logits(use: OperandUse, in_block: bool) -> Constraint:
    """Return the role of a relative bias, for a parameter that is added to attention logits.

    The rows of its table must be chosen by distances of positions, which do not depend on the
    batch.

    Args:
        use: Use of the parameter as a summand of attention logits.
        in_block: Whether the sum is in a residual branch.

    Raises:
        Refusal: The parameter is added to the logits in another way, for which there is no role.
    """
    for (param, _), index_kind in use.view.picks:
        # Distances of positions do not depend on the batch, so their index is a constant.
        if param == use.param and index_kind == "constant":
            return Constraint(
                role=Role.RELATIVE_BIAS,
                evidence="distances look it up; it is added to logits of attention",
                in_block=in_block,
            )
    raise Refusal("it is added to logits of attention and no distance chose it; declare its role")


def _output_axes(matrices: Matrices, sources: Iterable[SignalSource]) -> set[str]:
    """Return the output axes of the parameters whose products are among the sources of a signal.

    Output axes are those that the product does not sum over. Other sources, and parameters whose
    role is not certain, add nothing.
    """
    axes: set[str] = set()
    for source in sources:
        for param in source.params:
            constraint = matrices.constraints.get((source.node, param))
            if constraint is None:
                continue
            names = matrices.names.get(param, ())
            outputs = []
            for index, axis in enumerate(names):
                if index not in constraint.fan_in:
                    outputs.append(axis)
            axes.update(split_names(outputs))
    return axes


def _axes(matrices: Matrices, use: OperandUse) -> tuple[str, ...]:
    """Return the axes of the parameter in a use, in order. A dimension of two axes gives both."""
    return split_names(matrices.names[use.param])


def _multiplied(matrices: Matrices, use: OperandUse) -> Constraint:
    """Return the role of a norm gain, for a parameter in an elementwise product.

    Raises:
        Refusal: The parameter multiplies neither a normalized stream, nor the normalized product of
            one matrix, nor the product of one matrix that ends a branch.
    """
    flow = matrices.flow
    node = use.node
    other = use.other
    assert other is not None
    in_block = flow.branch_of(node) is not None
    norm_input = flow.norm(other)
    if other in flow.normalizers:
        norm_input = _normalized(matrices, node)
    elif norm_input is None and flow.norm_after(node):
        norm_input = other
    if norm_input is None and not in_block:
        raise Refusal("it multiplies what no norm made, outside of all branches; declare its role")

    scaled = other if norm_input is None else norm_input
    sources = flow.sources(scaled, through=True)
    direct_sources = sources if norm_input is None else flow.sources(norm_input)
    constraints = _accepted(matrices, sources)
    roles = {fact.role for fact in constraints} - _STREAM
    if norm_input is not None and not roles and _are_streams(flow, direct_sources):
        return Constraint(
            role=Role.NORM_GAIN, evidence="multiplies a norm of the stream", in_block=in_block
        )

    if roles and roles <= _ENDS and "experts" not in _axes(matrices, use):
        # A gain without an axis of experts scales the sum of all experts, like the output of one
        # MLP.
        roles = {Role.MLP_OUT}
    if len(roles) != 1:
        target = _role_names(roles)
        raise Refusal(
            f"it multiplies {target}; a gain belongs to a norm, or to one matrix: declare its role"
        )
    role = roles.pop()
    ends_branch = role in _ENDS | {Role.ATTENTION_OUT}
    are_products = all(source.params for source in direct_sources)
    if norm_input is not None and not ends_branch and not are_products:
        raise Refusal(
            f"it multiplies a norm of what a nonlinearity made of the {role.value}; "
            "declare its role"
        )
    if norm_input is None and not ends_branch:
        raise Refusal(
            f"it multiplies the product of the {role.value}, which no norm made; declare its role"
        )
    target = "the product" if norm_input is None else "a norm of the product"
    matrix = constraints[0]
    return Constraint(
        role=Role.NORM_GAIN,
        evidence=f"multiplies {target} of the {role.value}",
        in_block=matrix.in_block,
        of=role,
        cross=matrix.cross,
    )


def _are_streams(flow: Flow, sources: Sequence[SignalSource]) -> bool:
    """Return whether a signal with these sources can be the residual stream.

    Every source must be the end of a branch, a lookup, or a product with parameters, and there must
    be at least one.
    """
    if not sources:
        return False
    for source in sources:
        is_stream = source.node in flow.branches or source.node.op == "lookup"
        if not is_stream and not source.params:
            return False
    return True


def _normalized(matrices: Matrices, factor: Node) -> Node | None:
    """Return the input of a norm whose gain is multiplied first with the norm's factor.

    An example is x * (rsqrt(mean square of x) * gain), where the result is x.

    Args:
        factor: Product of the gain and the factor of the norm.

    Returns:
        The input of the norm, or `None` if the factor does not multiply a single signal.
    """
    stack = [factor]
    while stack:
        node = stack.pop()
        for user in matrices.flow.users(node):
            if user in matrices.flow.normalizers:
                stack.append(user)
                continue
            steps = matrices.flow.carriers(user)
            if len(steps) == 1:
                return steps[0].source
    return None


def cuts_of(graph: Graph) -> dict[ParamDim, set[tuple[int, ...]]]:
    """Return the sizes of the parts that reshapes in the loss cut each parameter dimension into.

    A tuple has the sizes of one cut, the outermost part first. A dimension that is not cut has no
    entry.
    """
    cuts: dict[ParamDim, set[tuple[int, ...]]] = {}
    for node in graph.nodes:
        for dim in node.dims:
            for atom in dim:
                _add_cuts(cuts, atom.param_dims, (atom,))
    for use in graph.uses:
        for param_dim, dim in _aligned_dims(use):
            _add_cuts(cuts, [param_dim], dim)
    return cuts


def _add_cuts(
    cuts: dict[ParamDim, set[tuple[int, ...]]], param_dims: Iterable[ParamDim], dim: Dim
) -> None:
    """Add the ways in which a dimension is cut to the entries of `param_dims` in `cuts`.

    Args:
        cuts: Result of `cuts_of`, changed in place.
    """
    parts = _parts(dim)
    if parts:
        for param_dim in param_dims:
            cuts.setdefault(param_dim, set()).update(parts)


def _parts(dim: Dim) -> set[tuple[int, ...]]:
    """Return the ways in which a dimension is cut, as tuples of sizes, outermost first.

    A dimension of several atoms is cut into these atoms. An atom can be cut further into two parts.
    """
    parts: set[tuple[int, ...]] = set()
    if len(dim) > 1:
        parts.add(tuple(atom.size for atom in dim))
    smallest = tuple(itertools.chain.from_iterable(map(_smallest_parts, dim)))
    if len(smallest) > 2:
        parts.add(smallest)
    for atom in dim:
        for descendant in _descendants(atom):
            if descendant.parts is not None:
                outer, inner = descendant.parts
                parts.add((outer.size, inner.size))
    return parts


def _smallest_parts(atom: Atom) -> tuple[int, ...]:
    """Return the sizes of the parts that are not cut further, the outermost first."""
    if atom.parts is None:
        return (atom.size,)
    outer, inner = atom.parts
    return (*_smallest_parts(outer), *_smallest_parts(inner))


def _descendants(atom: Atom) -> list[Atom]:
    """Return the atom, the parts that it was cut into, the parts of these, and so on."""
    if atom.parts is None:
        return [atom]
    outer, inner = atom.parts
    return [atom, *_descendants(outer), *_descendants(inner)]


def _aligned_dims(use: OperandUse) -> list[tuple[ParamDim, Dim]]:
    """Return pairs of a parameter's dimension and the activation's dimension that it meets.

    A matrix product pairs the dimensions that it sums over. An elementwise operation pairs
    dimensions at the same index. The list is empty for a use without another operand, and for an
    elementwise operation whose operands differ in their number of dimensions.
    """
    view = use.view
    node = use.node
    if use.other is None:
        return []
    if node.op == "dot":
        side = 0 if node.inputs[0] is view else 1
        view_dims = node.info["contracted"][side]
        other_dims = node.info["contracted"][1 - side]
    elif len(view.dims) == len(node.dims):
        view_dims = view.dims
        other_dims = node.dims
    else:
        return []

    aligned = []
    for view_dim, other_dim in zip(view_dims, other_dims, strict=True):
        param_dims: set[ParamDim] = set()
        for atom in view_dim:
            for path, index in atom.param_dims:
                if path == use.param:
                    param_dims.add((path, index))
        # Sorted, because the order of a set of strings differs from process to process.
        for param_dim in sorted(param_dims):
            aligned.append((param_dim, other_dim))
    return aligned


class Sample(NamedTuple):
    """Size of every axis, and the shapes of the parameters at these sizes, by path."""

    sizes: Mapping[str, int]
    shapes: Shapes


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles and axes of all parameters of a model, traced from its loss.

    A parameter is "refused" if its role is not certain.

    Attributes:
        specs: Declaration of each parameter, by path. Refused parameters have none.
        evidence: Reason for each declaration, in words, by path.
        refused: Reason why a parameter's role is not certain, and what to write instead, by path.
        tied: Declaration of a readout that shares the token embedding's table, or `None`.
    """

    specs: dict[str, ParamSpec]
    evidence: dict[str, str]
    refused: dict[str, str]
    tied: ParamSpec | None = None


def deduce(graph: Graph, samples: Sequence[Sample]) -> Roles:
    """Deduce the role and axes of every parameter of a traced loss.

    Args:
        graph: Graph of the loss at the sizes of the first sample.
        samples: Shapes at the base sizes, then with each size changed alone.
    """
    names, refused = axis_names(samples, graph)
    named = drop_keys(names, refused)
    flow = Flow(graph)
    all_attention = attentions(flow, named)
    matrices = Matrices(flow, all_attention, named)
    for param, reason in matrices.refused.items():
        # A reason about axis names stays, because a role can only be found for dimensions with
        # names.
        refused.setdefault(param, reason)
    uses: dict[str, list[OperandUse]] = {}
    for use in graph.uses:
        uses.setdefault(use.param, []).append(use)

    has_kv_heads = "kv_heads" in samples[0].sizes
    specs: dict[str, ParamSpec] = {}
    evidence: dict[str, str] = {}
    adapted: dict[str, str] = {}
    tied = None
    for param, axes in named.items():
        if param in refused:
            continue
        try:
            facts = [_fact(matrices, all_attention, use) for use in uses.get(param, [])]
            if not facts and _meets_parameters(graph, param):
                raise Refusal(
                    "it meets other parameters before anything of the batch; multiply it with an "
                    "activation first, as x @ a @ b in place of x @ (a @ b), or declare its role"
                )
            agreed, readout = _agreed(facts)
            if agreed.adapts:
                # The declaration of an adapter follows from that of its matrix.
                evidence[param] = agreed.evidence
                adapted[param] = agreed.adapts
                continue
            owner = Role(agreed.of or agreed.role)
            if not has_kv_heads and owner in (Role.KEY, Role.VALUE):
                # Presets scale keys and values by kv_heads, even if a model names only heads.
                axes = tuple(axis.replace("heads", "kv_heads") for axis in axes)
            specs[param] = _spec(axes, agreed)
            evidence[param] = agreed.evidence
            if readout is not None:
                tied = dataclasses.replace(_spec(axes, readout), tied=True)
                evidence[param] += f"; tied: {readout.evidence}"
        # `ParamSpec` raises PresetError where the fields of a role contradict each other.
        except (Refusal, PresetError) as reason:
            refused[param] = str(reason)
    for param, matrix in adapted.items():
        if matrix not in specs:
            del evidence[param]
            refused[param] = f"it adapts {matrix}, which is refused itself"
            continue
        a, b = adapters.pair(specs[matrix])
        reads_rank = named[param].index(RANK) < len(named[param]) - 1
        specs[param] = b if reads_rank else a
    return Roles(specs, evidence, refused, tied)


def _meets_parameters(graph: Graph, param: str) -> bool:
    """Return whether a value of the loss is computed from a parameter, but not from the batch."""
    return any(node.kind == "derived" and param in node.params for node in graph.nodes)


def _fact(matrices: Matrices, all_attention: list[Attention], use: OperandUse) -> Constraint:
    """Return the role of a parameter in one use of the loss.

    In the result, `encoder` says whether the use is in an encoder, `cross` is set for a norm before
    the queries of cross-attention, and `shared` has the axes that the parameter is shared along.

    Raises:
        Refusal: The role is not certain.
    """
    flow = matrices.flow
    if use.node in flow.opaque:
        raise Refusal(
            f"it goes into {use.node.op}, through which nothing can be seen; declare its role"
        )
    if use.view.kind == "derived":
        raise Refusal(
            f"it is computed with ({use.view.op}) before it meets an activation; "
            "apply it as it is stored"
        )
    if use.node in flow.matrices:
        constraint = matrices.constraints[use.node, use.param]
    else:
        constraint = fact(matrices, use)
    cross_attention = [attention for attention in all_attention if attention.cross]
    encoder = _is_in_encoder(flow, cross_attention, use.node)

    # A norm belongs to cross-attention if all matrices that read it make queries of
    # cross-attention.
    is_gain_or_bias = constraint.role in (Role.NORM_GAIN, Role.BIAS)
    is_norm = is_gain_or_bias and constraint.of in (None, Role.NORM_GAIN)
    if is_norm and constraint.in_block and not encoder:
        cross = _makes_cross_queries(flow, cross_attention, use.node)
        constraint = dataclasses.replace(constraint, cross=cross)
    shared = _shared(matrices, use, constraint)
    return dataclasses.replace(constraint, encoder=encoder, shared=shared)


def _is_in_encoder(flow: Flow, cross_attention: list[Attention], node: Node) -> bool:
    """Return whether inputs of the keys of any cross-attention are computed from `node`."""
    for attention in cross_attention:
        for key, _ in attention.keys:
            for use in flow.matrices[key]:
                if use.other is not None and flow.precedes(node, use.other):
                    return True
    return False


def _makes_cross_queries(flow: Flow, cross_attention: list[Attention], node: Node) -> bool:
    """Return whether all matrices that read `node` make queries of cross-attention.

    Return False if no matrix reads `node`.
    """
    queries: set[Node] = set()
    for attention in cross_attention:
        for query, _ in attention.queries:
            queries.add(query)
    matrices = []
    for destination in flow.reaches(node):
        if flow.matrix(destination.end):
            matrices.append(destination.end)
    return bool(matrices) and all(matrix in queries for matrix in matrices)


def _shared(matrices: Matrices, use: OperandUse, constraint: Constraint) -> tuple[str, ...]:
    """Return the growing axes along which a parameter is shared.

    These are axes of the operand that the parameter meets in a use, but not of the parameter. An
    example is the axis of channels for a Mixer's MLP over patches. The parameter's gradient is a
    sum over them. The result is empty outside of residual branches, for a gain or bias of queries
    or keys, and for a relative bias.
    """
    # For a QK-norm's gain and a relative bias, rules and theory find this sum from the axes of the
    # parameter itself.
    is_qk_norm = constraint.of in (Role.QUERY, Role.KEY)
    if not constraint.in_block or is_qk_norm or constraint.role is Role.RELATIVE_BIAS:
        return ()
    excluded = set(split_names(matrices.names[use.param]))
    excluded |= FIXED | {"layers", "encoder_layers"}
    if use.node.op == "dot":
        side = 0 if use.node.inputs[0] is use.view else 1
        atoms = use.node.info["kept"][1 - side]
    else:
        atoms = set()
        for dim in use.node.dims:
            for atom in dim:
                atoms.add(atom)

    axes: dict[str, None] = {}
    # Sorted, because the order of a set of atoms differs from process to process.
    for atom in sorted(atoms, key=lambda atom: sorted(atom.param_dims)):
        if any(param == use.param for param, _ in atom.param_dims):
            continue
        names = set()
        for param, index in atom.param_dims:
            if param in matrices.names:
                names.add(matrices.names[param][index])
        if len(names) == 1 and not names & excluded:
            axes |= dict.fromkeys(names)
    # `shared` holds single axes, and "heads head_dim" is two.
    return tuple(axis for axis in axes if " " not in axis)


def _agreed(facts: list[Constraint]) -> tuple[Constraint, Constraint | None]:
    """Return the role on which all uses of a parameter agree.

    Uses as token embedding and as readout agree, too: the readout is then tied to the embedding.

    Returns:
        The role, and the role as a tied readout or `None`.

    Raises:
        Refusal: There are no uses, or they do not agree.
    """
    if not facts:
        raise Refusal("the loss does not use it; leave it out")
    # A parameter belongs to the encoder only if all its uses do.
    encoder = all(fact.encoder for fact in facts)
    distinct: dict[Constraint, Constraint] = {}
    for fact in facts:
        # Evidence is words for a reader: uses agree if all else is equal.
        distinct[dataclasses.replace(fact, evidence="", encoder=encoder)] = fact
    by_role = {}
    for fact in distinct.values():
        by_role[fact.role] = dataclasses.replace(fact, encoder=encoder)
    if len(distinct) == 1:
        return next(iter(by_role.values())), None
    if len(distinct) == 2 and set(by_role) == {Role.TOKEN_EMBEDDING, Role.READOUT}:
        # A table that an encoder reads, too, is still the decoder's readout.
        readout = dataclasses.replace(by_role[Role.READOUT], encoder=False)
        return by_role[Role.TOKEN_EMBEDDING], readout
    uses = sorted({fact.evidence for fact in facts})
    raise Refusal(
        f"its uses do not agree: {'; or '.join(uses)}; make them parameters of their own, or "
        "declare its role"
    )


def _spec(names: tuple[str, ...], constraint: Constraint) -> ParamSpec:
    """Return the declaration of a parameter with these axes and this role.

    The fan-in axis of keys and values of cross-attention is named "memory".

    Args:
        names: Axes of each dimension. Two axes of one dimension have a space between them.
    """
    if constraint.cross and constraint.role in (Role.KEY, Role.VALUE):
        # Keys and values of cross-attention read the encoder's output ("memory"), whose width is an
        # axis of its own.
        renamed = []
        for index, axis in enumerate(names):
            if index in constraint.fan_in:
                renamed.append("memory")
            else:
                renamed.append(axis)
        names = tuple(renamed)
    part = ""
    if constraint.cross:
        part = "cross"
    elif constraint.encoder:
        part = "encoder"
    return ParamSpec(
        role=constraint.role,
        axes=split_names(names),
        fan_in=split_names([names[index] for index in constraint.fan_in]),
        in_block=constraint.in_block,
        of=constraint.of,
        part=part,
        value_dim=constraint.value_dim,
        shared=constraint.shared,
    )


def axis_names(
    samples: Sequence[Sample], graph: Graph | None = None
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the name of the axis of every dimension of every parameter, from sizes and shapes.

    A dimension has the name of the axis whose size equals its own in all samples. A dimension of
    two axes has both names in order, with a space between: "heads head_dim" (`split_names`).

    Args:
        samples: Shapes at the base sizes first, then with each size changed.
        graph: Graph of the loss at the base sizes, which shows how a dimension of two axes is cut.
            By default such dimensions are refused.

    Returns:
        Names by parameter, and the reason for each parameter without certain names: a dimension
        belongs to no single axis, or two dimensions belong to the same axis. The names of such a
        parameter may be incomplete.
    """
    cuts = {} if graph is None else cuts_of(graph)
    # No parameter has an axis of active experts. The encoder's output ("memory") is as wide as the
    # stream, so `_spec` finds that axis by its use and not by its size.
    columns = {}
    for axis in samples[0].sizes:
        if axis not in ("active", "memory"):
            columns[axis] = tuple(sample.sizes[axis] for sample in samples)

    names: dict[str, tuple[str, ...]] = {}
    refused: dict[str, str] = {}
    for param, shape in samples[0].shapes.items():
        axes = []
        for index in range(len(shape)):
            column = tuple(sample.shapes[param][index] for sample in samples)
            matching = [axis for axis, sizes in columns.items() if sizes == column]
            if len(matching) == 1:
                axes.append(matching[0])
                continue
            two_axes = _cut_axes(column, columns, cuts.get((param, index), ()))
            if two_axes:
                axes.append(two_axes)
                continue
            refused.setdefault(param, _reason(index, column, matching, columns))
        axes = _as_heads(param, axes, samples[0].sizes, cuts)
        if "heads head_dim" in axes and _is_square(samples[0].sizes):
            heads = samples[0].sizes["heads"]
            refused.setdefault(
                param,
                f"dimension {axes.index('heads head_dim')} is heads x head_dim, both {heads}, so "
                "nothing shows which is the outer one; give other sizes, such as twice the width",
            )
        # Sizes are looked up by axis name, so the two dimensions of a square matrix need two names.
        if param not in refused and len(set(axes)) < len(axes):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            refused[param] = (
                f"two of its dimensions {shape} are the same axis, {twice}; give one of them a name "
                "and a number of its own in the sizes"
            )
        names[param] = tuple(axes)
    return names, refused


def _cut_axes(
    column: tuple[int, ...],
    columns: Mapping[str, tuple[int, ...]],
    cuts: Collection[tuple[int, ...]],
) -> str:
    """Return the names of the two axes whose product a dimension is, such as "heads head_dim".

    The outer axis comes first, as the loss cuts the dimension. The result is "" if no two axes fit,
    or if both have the same size, so that their order cannot be told.

    Args:
        column: Size of the dimension in every sample.
        columns: Size of every axis in every sample.
        cuts: Ways in which the loss cuts the dimension, each with the sizes of the parts, the
            outermost first.
    """
    for outer_axis, inner_axis in itertools.permutations(columns, 2):
        outer_sizes = columns[outer_axis]
        inner_sizes = columns[inner_axis]
        products_of_sizes = []
        for outer, inner in zip(outer_sizes, inner_sizes, strict=True):
            products_of_sizes.append(outer * inner)
        product = tuple(products_of_sizes)
        is_cut = any(outer_sizes[0] in _outer_sizes(parts) for parts in cuts)
        if product == column and is_cut:
            # At equal sizes the cut does not tell which of the two axes is the outer one.
            if outer_sizes[0] == inner_sizes[0]:
                return ""
            return f"{outer_axis} {inner_axis}"
    return ""


def _outer_sizes(parts: Sequence[int]) -> list[int]:
    """Return the size of the outer of two axes for every way in which parts make up two axes.

    Shared keys cut heads into key heads and queries per key, so that three parts, such as (2, 3,
    16), make up six heads of 16.

    Args:
        parts: Sizes of the parts of a dimension, the outermost first.
    """
    return list(itertools.accumulate(parts[:-1], operator.mul))


def _is_square(sizes: Mapping[str, int]) -> bool:
    """Return whether heads fill the width and their number equals their dimension."""
    return "head_dim" not in sizes and sizes["embed"] == sizes["heads"] ** 2


def _as_heads(
    param: str,
    names: list[str],
    sizes: Mapping[str, int],
    cuts: Mapping[ParamDim, Collection[tuple[int, ...]]],
) -> list[str]:
    """Return a parameter's axis names, with a width that the loss cuts into heads named as heads.

    Its name "embed" becomes "heads head_dim". This is for models without a size "head_dim", whose
    heads fill the width (embed = heads * head_dim). Other models keep their names.

    Args:
        names: Names of the parameter's dimensions, from `axis_names`.
        cuts: Sizes of the parts of each dimension that the loss cuts, from `cuts_of`.
    """
    if "head_dim" in sizes or "heads" not in sizes:
        return names
    num_heads = sizes["heads"]
    result = []
    for index, name in enumerate(names):
        is_cut = any(num_heads in _outer_sizes(parts) for parts in cuts.get((param, index), ()))
        result.append("heads head_dim" if name == "embed" and is_cut else name)
    return result


def _reason(
    index: int,
    column: tuple[int, ...],
    matching: Sequence[str],
    columns: Mapping[str, tuple[int, ...]],
) -> str:
    """Return the reason why a dimension has no name, and what to write instead.

    Args:
        column: Size of the dimension in every sample.
        matching: Names of the axes with these sizes, none or at least two.
        columns: Size of every axis in every sample.
    """
    if matching:
        return (
            f"dimension {index} is {' and '.join(matching)} at all sizes; "
            "build the model so that each can change alone"
        )
    # An axis whose size never changes could be a factor of any product, so it explains nothing.
    growing = {}
    for axis, sizes in columns.items():
        if len(set(sizes)) > 1:
            growing[axis] = sizes
    for count in (2, 3):
        for axes in itertools.combinations(growing, count):
            products = [1] * len(column)
            for axis in axes:
                for sample, size in enumerate(growing[axis]):
                    products[sample] *= size
            ratios = set()
            for size, product in zip(column, products, strict=True):
                ratios.add(size / product)
            if len(ratios) == 1:
                factor = column[0] / products[0]
                factors = [*axes] if factor == 1 else [f"{factor:g}", *axes]
                return (
                    f"dimension {index} is {' x '.join(factors)}; a declaration names one axis a "
                    f"dimension: keep {' and '.join(axes)} apart"
                )
    for axis, sizes in growing.items():
        ratios = set()
        for size, axis_size in zip(column, sizes, strict=True):
            ratios.add(size / axis_size)
        if len(ratios) == 1:
            return (
                f"dimension {index} is {ratios.pop():g} x {axis}; make {axis} a dimension of its "
                "own, or name this size"
            )
    if set(column) == {1}:
        return (
            f"dimension {index} has the size 1; leave it out of the parameter, and add it in the "
            "loss, as x[None] does, or, if it is an axis such as the rank of an adapter, name it "
            "among the sizes with 2 or more"
        )
    return (
        f"dimension {index}, of size {column[0]}, grows with none of {', '.join(columns)}; "
        "name it among the sizes"
    )
