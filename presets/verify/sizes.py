"""Sizes of a model, from the shapes of parameters whose roles are known.

The width comes first, because every role has it. The other sizes follow from the width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mupax.presets.roles import ENCODER, OWN, ParamSpec, PresetError, Role
from mupax.presets.verify.formats.dump import Dump, Entry
from mupax.presets.verify.names import Label

Shape = tuple[int, ...]
Shapes = Mapping[Role, list[tuple[str, Shape]]]
"""Pairs (parameter name, shape) of the parameters of each role."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, or the merged parameters whose names differ only in the layer's number.

    Attributes:
        entry: Values, averaged over layers, and the shape without an axis of layers.
        spec: Declaration of the parameter. For an array of queries, keys and values it is that of
            the values.
        fused: Whether the parameter has queries, keys and values in one array.
        count: Number of entries in all arrays of the parameter.
        sizes: Sizes of axes that only this parameter has: fan-in and fan-out of a hidden matrix,
            and the fan-in of a readout.
    """

    entry: Entry
    spec: ParamSpec
    fused: bool = False
    count: int = 1
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def sizes_of(
    dump: Dump, parameters: Mapping[str, Parameter], labels: Mapping[str, Label], layers: int | None
) -> dict[str, int]:
    """Return the size of every logical axis of a model, by axis.

    Args:
        dump: Dump of the model, for sizes that shapes do not show, such as `Dump.head_dim`.
        parameters: Parameters by name, without those of the role "none".
        labels: Role and other properties of each parameter, by name.
        layers: Number of residual blocks. `None` counts as 1.

    Raises:
        PresetError: A shape does not fit the width, or no shape shows the size of a head.
    """
    shapes = _matrix_shapes(parameters, labels)
    embed = _width(shapes, labels)
    sizes = {
        "embed": embed,
        "memory": embed,
        "mlp": embed,
        OWN.axis: layers or 1,
        ENCODER.axis: dump.encoder_layers or layers or 1,
    }
    # The first matrix of a role stands for all of them. `axes.check_growth` compares the others.
    for role in (Role.MLP_IN, Role.MLP_OUT):
        for name, shape in shapes.get(role, ())[:1]:
            sizes["mlp"] = _mlp_size(dump, name, shape, embed)

    axes = {Role.READOUT: "classes", Role.TOKEN_EMBEDDING: "vocab", Role.PATCH_EMBEDDING: "patch"}
    for role, axis in axes.items():
        for _, shape in shapes.get(role, ())[:1]:
            size, remainder = divmod(math.prod(shape), embed)
            sizes[axis] = 1 if remainder else size
    return sizes | _head_sizes(dump, shapes, parameters, embed)


def _matrix_shapes(
    parameters: Mapping[str, Parameter], labels: Mapping[str, Label]
) -> dict[Role, list[tuple[str, Shape]]]:
    """Return pairs (name, shape) of parameters, grouped by role.

    Two kinds are left out: biases, and gains on the outputs of a matrix, such as queries
    (`ParamSpec.of`). Gains of the residual stream stay, because they show the width. An array of
    queries, keys and values is listed under the values.
    """
    shapes: dict[Role, list[tuple[str, Shape]]] = {}
    for name, parameter in parameters.items():
        spec = parameter.spec
        if spec.of is None and labels[name].leaf != "bias":
            role = Role.VALUE if parameter.fused else spec.role
            shapes.setdefault(role, []).append((name, parameter.entry.shape))
    return shapes


def _width(shapes: Shapes, labels: Mapping[str, Label]) -> int:
    for role in (Role.TOKEN_EMBEDDING, Role.POSITION, Role.NORM_GAIN):
        # A norm outside of blocks may be one of the inputs.
        in_blocks_first = sorted(
            shapes.get(role, ()), key=lambda matrix: not labels[matrix[0]].in_block
        )
        for name, shape in in_blocks_first:
            # A gain inside of attention may have the size of a head.
            in_attention = role is Role.NORM_GAIN and "attention" in name
            if shape and not in_attention:
                return shape[-1]
    for name, shape in shapes.get(Role.READOUT, ()):
        return shape[1] if labels[name].layout == "out, in" else shape[0]
    # An MLP without an embedding or a readout: the largest dimension of any matrix is taken as the
    # width.
    largest: list[int] = []
    for matrices in shapes.values():
        for _, shape in matrices:
            largest.append(max(shape, default=1))
    return max(largest)


def _mlp_size(dump: Dump, name: str, shape: Shape, embed: int) -> int:
    """Return the dimension of an MLP's matrix that is not the width.

    Raises:
        PresetError: The shape is not two dimensions of which one is the width.
    """
    if len(shape) == 2 and embed in shape:
        return shape[1] if shape[0] == embed else shape[0]
    remedy = "say what it is with --role"
    if len(shape) == 3:
        remedy = (
            'write the number of layers into "model" where one array has all of them ("layers": 2)'
        )
    raise PresetError(
        f"{dump.source}: {name} has the shape {list(shape)}, "
        f"which is not the width {embed} by the MLP's; {remedy}"
    )


def _head_sizes(
    dump: Dump, shapes: Shapes, parameters: Mapping[str, Parameter], embed: int
) -> dict[str, int]:
    """Return the sizes of the axes "heads", "kv_heads" and "head_dim".

    `Dump.head_dim` takes precedence over what shapes show.

    Raises:
        PresetError: Nothing shows the size of a head, or it does not divide the queries.
    """
    if not shapes.get(Role.QUERY) and not shapes.get(Role.VALUE):
        return _head_sizes_by_width(dump, parameters, embed)

    rows: dict[Role, int] = {}
    head_dim = dump.head_dim
    for role in (Role.QUERY, Role.KEY, Role.VALUE):
        for name, shape in shapes.get(role, ())[:1]:
            if parameters[name].fused:
                # Heads write as many entries as the matrix after them reads. The other rows of the
                # fused matrix are keys and values.
                fused_rows = math.prod(shape) // embed
                rows[Role.QUERY] = _rows_of_heads(shapes, embed)
                rows[Role.KEY] = max(1, (fused_rows - rows[Role.QUERY]) // 2)
                continue
            if len(shape) == 3:
                # (width, heads, head_dim), as in JAX.
                head_dim = head_dim or shape[2]
            rows[role] = math.prod(shape) // embed
    if head_dim is None:
        raise PresetError(
            f"{dump.source}: shapes do not show the size of a head, by which attention is judged; "
            'write --head-dim 64 (or 32,64: one a file), or "head_dim" into "model"'
        )

    query_rows = rows.get(Role.QUERY, rows.get(Role.VALUE, embed))
    key_rows = rows.get(Role.KEY, rows.get(Role.VALUE, query_rows))
    if query_rows % head_dim:
        raise PresetError(
            f"{dump.source}: queries have {query_rows} rows, which is no multiple of the head size "
            f"{head_dim}; write a head size that divides {query_rows} as --head-dim "
            '(one per file, such as 32,64), or as "head_dim" in "model"'
        )
    return {
        "heads": query_rows // head_dim,
        "kv_heads": max(1, key_rows // head_dim),
        "head_dim": head_dim,
    }


def _rows_of_heads(shapes: Shapes, embed: int) -> int:
    """Return the number of entries that all heads write: heads times head_dim.

    It is the width if no name shows the matrix that reads them.
    """
    for _, shape in shapes.get(Role.ATTENTION_OUT, ())[:1]:
        return math.prod(shape) // embed
    return embed


def _head_sizes_by_width(
    dump: Dump, parameters: Mapping[str, Parameter], embed: int
) -> dict[str, int]:
    """Return the sizes of heads for a model in which no name shows queries or values.

    The size of a head is `Dump.head_dim` or 1. The number of heads is the width divided by this
    size.

    Raises:
        PresetError: The dump has a factor on attention logits but no size of a head.
    """
    has_blocks = any(parameter.spec.in_block for parameter in parameters.values())
    if dump.attention is not None and dump.head_dim is None and has_blocks:
        raise PresetError(
            f'{dump.source}: "attention" is given, and no name says which parameters make queries '
            "and keys; write --head-dim 64 (or 32,64: one a file), "
            'or "head_dim" into "model"'
        )
    head_dim = dump.head_dim or 1
    heads = max(1, embed // head_dim)
    return {"heads": heads, "kv_heads": heads, "head_dim": head_dim}
