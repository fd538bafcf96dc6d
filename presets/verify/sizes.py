"""A model's sizes, from the shapes of parameters whose roles are known: width first, which every role shares, then what follows from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mupax.presets.roles import ENCODER, OWN, ParamSpec, PresetError, Role
from mupax.presets.verify.formats.dump import Dump, Entry
from mupax.presets.verify.names import Label

Shapes = Mapping[Role, list[tuple[str, tuple[int, ...]]]]
"""Role to names and shapes of its matrices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, or all of a stack's that differ in their layer alone, with its numbers averaged over these.

    Attributes:
        entry: shape, without an axis of layers, and numbers.
        spec: what it is; of a fused matrix what its values are.
        fused: queries, keys and values in one.
        count: numbers in all its arrays.
        sizes: of axes that are its own: fan-in and fan-out of a matrix of no known place, and what a readout reads.
    """

    entry: Entry
    spec: ParamSpec
    fused: bool = False
    count: int = 1
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def sizes_of(
    dump: Dump, parameters: Mapping[str, Parameter], labels: Mapping[str, Label], layers: int | None
) -> dict[str, int]:
    """Size of every axis.

    Args:
        dump: of the model, for what shapes do not show.
        parameters: by name.
        labels: what their names say.
        layers: residual blocks, None without any.

    Raises:
        PresetError: shapes that do not fit the width, or do not show the size of a head.
    """
    roles: dict[Role, list[tuple[str, tuple[int, ...]]]] = {}
    for name, each in parameters.items():
        if each.spec.of is None and labels[name].leaf != "bias":
            roles.setdefault(Role.VALUE if each.fused else each.spec.role, []).append(
                (name, each.entry.shape)
            )
    embed = _width(roles, labels)
    sizes = dict.fromkeys(("embed", "memory", "mlp"), embed) | {
        OWN.axis: layers or 1,
        ENCODER.axis: dump.encoder_layers or layers or 1,
    }
    for role in (Role.MLP_IN, Role.MLP_OUT):
        for name, shape in roles.get(role, ())[:1]:
            sizes["mlp"] = _other(dump, name, shape, embed)
    for role, axis in (
        (Role.READOUT, "classes"),
        (Role.TOKEN_EMBEDDING, "vocab"),
        (Role.PATCH_EMBEDDING, "patch"),
    ):
        for _, shape in roles.get(role, ())[:1]:
            sizes[axis] = math.prod(shape) // embed if math.prod(shape) % embed == 0 else 1
    return sizes | _heads(dump, roles, parameters, embed)


def _width(roles: Shapes, labels: Mapping[str, Label]) -> int:
    for role in (Role.TOKEN_EMBEDDING, Role.POSITION, Role.NORM_GAIN):
        for name, shape in roles.get(role, ()):
            if shape and (role is not Role.NORM_GAIN or "attention" not in name):
                return shape[-1]
    for name, shape in roles.get(Role.READOUT, ()):
        return shape[1] if labels[name].layout == "out, in" else shape[0]
    shapes = [shape for matrices in roles.values() for _, shape in matrices]
    return max(max(shape, default=1) for shape in shapes)


def _other(dump: Dump, name: str, shape: tuple[int, ...], embed: int) -> int:
    if len(shape) == 2 and embed in shape:
        return shape[1] if shape[0] == embed else shape[0]
    stacked = (
        'write the number of layers into "model" where one array has all of them ("layers": 2)'
    )
    raise PresetError(
        f"{dump.source}: {name} has the shape {list(shape)}, which is not the width {embed} by the MLP's; "
        f"{stacked if len(shape) == 3 else 'say what it is with --role'}"
    )


def _heads(
    dump: Dump,
    roles: Shapes,
    parameters: Mapping[str, Parameter],
    embed: int,
) -> dict[str, int]:
    attention = [*roles.get(Role.QUERY, ()), *roles.get(Role.VALUE, ())]
    if not attention:
        blocks = any(parameter.spec.in_block for parameter in parameters.values())
        if dump.attention is not None and dump.head_dim is None and blocks:
            raise PresetError(
                f'{dump.source}: "attention" is given, and no name says which parameters make queries and keys; write '
                f'--head-dim 64 (or 32,64: one a file), or "head_dim" into "model"'
            )
        head_dim = dump.head_dim or 1
        return dict.fromkeys(("heads", "kv_heads"), max(1, embed // head_dim)) | {
            "head_dim": head_dim
        }
    rows: dict[Role, int] = {}
    head_dim = dump.head_dim
    for role in (Role.QUERY, Role.KEY, Role.VALUE):
        for name, shape in roles.get(role, ())[:1]:
            if len(shape) == 3 and not parameters[name].fused:
                head_dim = head_dim or shape[2]
            rows[role] = embed if parameters[name].fused else math.prod(shape) // embed
    if head_dim is None:
        raise PresetError(
            f"{dump.source}: shapes do not show the size of a head, by which attention is judged; write --head-dim 64 (or 32,64: one "
            'a file), or "head_dim" into "model"'
        )
    queries = rows.get(Role.QUERY, rows.get(Role.VALUE, embed))
    keys = rows.get(Role.KEY, rows.get(Role.VALUE, queries))
    if queries % head_dim:
        raise PresetError(
            f"{dump.source}: heads of {head_dim} do not divide the {queries} rows of queries"
        )
    return {
        "heads": queries // head_dim,
        "kv_heads": max(1, keys // head_dim),
        "head_dim": head_dim,
    }
