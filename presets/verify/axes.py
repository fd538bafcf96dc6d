"""Parameters of a dump as this project declares them: a `ParamSpec` each and the model's sizes, from names and shapes.

A name says the role (`names`), the role says what the dimensions are, and the width, which every role shares, says which is which: a
layout is asked for only where it would make a difference.

A width that is read from the wrong array makes every exponent wrong, so such files are refused and the parameter is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mupax.presets.matrices import MATRICES, of_cross, of_encoder
from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.presets.verify import names, sizes
from mupax.presets.verify.formats.dump import COLUMNS, Dump, Entry
from mupax.presets.verify.names import FUSED, SKIPPED, Label
from mupax.presets.verify.sizes import Parameter

Shape = tuple[int, ...]
ROUNDING = 0.01
"""Relative difference between two growth factors up to which they are equal: hidden sizes are rounded."""
TABLES = ("token_embedding", "position")
"""Roles whose last dimension is the width, in PyTorch and in JAX."""
UNTOLD = frozenset(
    {Role.HIDDEN, Role.READOUT, Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION}
)
"""Roles with an axis that no other parameter has, so that its growth cannot be held against theirs."""

_OF_ROLE = {spec.role: spec for spec in MATRICES.values()}
_HIDDEN = ParamSpec(role=Role.HIDDEN, axes=("input", "output"), fan_in=("input",))
_PATCH = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
_POSITION = ParamSpec(role=Role.POSITION, axes=("position", "embed"))
_RELATIVE = ParamSpec(role=Role.RELATIVE_BIAS, axes=("distance", "heads"), in_block=True)


def check_ranks(sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]]) -> None:
    """Refuse a parameter that has another number of dimensions in one of the files.

    Args:
        sources: the files, for the message.
        shapes: parameter to its shape in every file.

    Raises:
        PresetError: names the parameter and both shapes.
    """
    for name, in_files in shapes.items():
        for source, shape in zip(sources[1:], in_files[1:], strict=True):
            if len(shape) != len(in_files[0]):
                raise PresetError(
                    f"{name} has the shape {list(in_files[0])} in {sources[0]} and {list(shape)} in {source}, "
                    "which is another number of dimensions; write the shape of the same array of one model into both"
                )


def check_widths(
    sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]], labels: Mapping[str, Label]
) -> None:
    """Refuse a table whose width is no dimension of any block's parameter.

    Args:
        sources: the files, for the message.
        shapes: parameter to its shape in every file.
        labels: parameter to what its name says.

    Raises:
        PresetError: names the table and both shapes.
    """
    blocks = [in_files for name, in_files in shapes.items() if labels[name].in_block]
    tables = [
        name
        for name, label in labels.items()
        if label.role in TABLES and not label.in_block and shapes[name][0]
    ]
    for index in range(1, len(sources)):
        # Sizes in pairs: 64 beside 256 is the width of both, and 256 beside 256 may be a vocabulary.
        dimensions = {
            pair for in_files in blocks for pair in zip(in_files[0], in_files[index], strict=True)
        }
        for name in tables if dimensions else ():
            first = shapes[name][0]
            other = shapes[name][index]
            if (first[-1], other[-1]) not in dimensions:
                raise PresetError(
                    f"{name} has the shape {list(first)} in {sources[0]} and {list(other)} in {sources[index]}, and no "
                    f"parameter of a block has a dimension of {first[-1]} and then {other[-1]}; write shapes of one "
                    "model, with the width last in a table"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized:
    """One file's parameters and the sizes that they have together.

    Attributes:
        source: the file, for messages.
        parameters: by name.
        sizes: of every logical axis.
    """

    source: str
    parameters: Mapping[str, Parameter]
    sizes: Mapping[str, int]

    def entries(self, name: str) -> float:
        """Return the number of entries that a layer's parameter has by its axes."""
        parameter = self.parameters[name]
        sizes = {**self.sizes, "layers": 1, "encoder_layers": 1}
        count = math.prod(sizes.get(axis, 1) for axis in parameter.spec.axes)
        if parameter.fused:  # its declaration is that of the values
            return count * (sizes["heads"] / sizes["kv_heads"] + 2)
        return count


def check_growth(base: Sized, other: Sized) -> None:
    """Refuse a block's parameter that does not grow as its axes do by the other parameters.

    Raises:
        PresetError: names the parameter, both shapes and its axes.
    """
    for name, parameter in other.parameters.items():
        spec = parameter.spec
        if spec.role in UNTOLD or not spec.in_block:
            continue
        first = base.parameters[name].entry.shape
        growth = math.prod(parameter.entry.shape) / math.prod(first)
        expected = other.entries(name) / base.entries(name)
        if not _alike(growth, expected):
            axes = " x ".join(
                axis for axis in spec.axes if axis not in ("layers", "encoder_layers")
            )
            raise PresetError(
                f"{name} has the shape {list(first)} in {base.source} and {list(parameter.entry.shape)} in "
                f"{other.source}: it is {growth:.3g} times as large, and {axes} of the other parameters {expected:.3g} "
                f"times; write shapes of one model, or --role '{name}=ROLE' if it is no {spec.role.value}"
            )


def _alike(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) < ROUNDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A dump whose parameters are known.

    Attributes:
        dump: as read.
        parameters: by name, a star for the number of a layer.
        sizes: of every logical axis that parameters have.
        skipped: names that are not judged.
        guessed: names that say nothing, and the role that their shapes gave them.
    """

    dump: Dump
    parameters: Mapping[str, Parameter]
    sizes: Mapping[str, int]
    skipped: tuple[str, ...] = ()
    guessed: Mapping[str, str] = dataclasses.field(default_factory=dict)


def models(dumps: Sequence[Dump], overrides: Mapping[str, str]) -> list[Model]:
    """The dumps with a declaration of every parameter.

    Args:
        dumps: at two sizes or more, of the same parameters.
        overrides: `--role`, pattern to role.

    Raises:
        PresetError: dumps of different parameters; a name whose role is not known; a shape that does not fit its role.
    """
    for dump in dumps:
        if {entry.lr for entry in dump.parameters.values()} - {None} == {0.0}:
            raise PresetError(
                f"{dump.source}: every learning rate is 0; dump the model after the first steps of its warm-up"
            )
    merged = [_merged(dump) for dump in dumps]
    for dump, entries in zip(dumps[1:], merged[1:], strict=True):
        if odd := sorted(entries.keys() ^ merged[0].keys()):
            raise PresetError(
                f"{dump.source} and {dumps[0].source} have different parameters, such as {', '.join(odd[:3])}; dump one model at two sizes"
            )
    sources = [dump.source for dump in dumps]
    of_name = {name: [entries[name][0].shape for entries in merged] for name in merged[0]}
    check_ranks(sources, of_name)
    labels = _labels(dumps, merged, overrides)
    check_widths(sources, of_name, labels)
    read = [_model(dump, entries, labels) for dump, entries in zip(dumps, merged, strict=True)]
    sized = [
        Sized(source=model.dump.source, parameters=model.parameters, sizes=model.sizes)
        for model in read
    ]
    for other in sized[1:]:
        check_growth(sized[0], other)
    return read


def _merged(dump: Dump) -> dict[str, list[Entry]]:
    entries: dict[str, list[Entry]] = {}
    for name, entry in dump.parameters.items():
        same = entries.setdefault(names.merged(name), [])
        if same and same[0].shape != entry.shape:
            raise PresetError(
                f"{dump.source}: {name} has the shape {list(entry.shape)} and other layers' {list(same[0].shape)}"
            )
        same.append(entry)
    return entries


def _labels(
    dumps: Sequence[Dump],
    merged: Sequence[Mapping[str, Sequence[Entry]]],
    overrides: Mapping[str, str],
) -> dict[str, Label]:
    """What every parameter is; raises PresetError that lists those of which nothing says it."""
    first, labels, unknown = merged[0], {}, []
    dual = any(n.startswith("encoder.") for n in first) and any(
        not n.startswith("encoder.") and "block" in n for n in first
    )
    unused = {
        pattern for pattern in overrides if not any(names.chosen(n, {pattern: "x"}) for n in first)
    }
    if unused:
        raise PresetError(
            f"--role {unused.pop()!r} fits no parameter; they are named like {', '.join([*first][:3])}"
        )
    for name, entries in first.items():
        label = names.label(name, dual)
        chosen = names.chosen(name, overrides) or entries[0].role
        if chosen:
            role, bias = chosen.removeprefix("block."), chosen.endswith(".bias")
            if role.removesuffix(".bias") not in names.ROLES:
                raise PresetError(
                    f"{dumps[0].source}: {name} has the role {chosen!r}; roles are {', '.join(names.ROLES)}"
                )
            label = label._replace(
                role=role.removesuffix(".bias"), in_block=label.in_block or role != chosen
            )
            label = label._replace(
                leaf="bias" if bias else "matrix" if label.leaf == "bias" else label.leaf
            )
        if not label.role:
            role = _by_growth(name, label, [m[name][0].shape for m in merged], merged)
            label = label._replace(role=role, guessed=bool(role) and label.leaf != "bias")
        labels[name] = label
        if not label.role:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise PresetError(
            f"{dumps[0].source}: nothing says what {', '.join(unknown[:4])}{more} "
            f"{'is' if len(unknown) == 1 else 'are'}; write --role '{unknown[0]}=ROLE', where a role is one of "
            f"{', '.join(names.ROLES)}"
        )
    return labels


def _by_growth(
    name: str,
    label: Label,
    shapes: Sequence[tuple[int, ...]],
    merged: Sequence[Mapping[str, Sequence[Entry]]],
) -> str:
    """The role of a matrix by which of its dimensions grow, as microsoft/mup has it; of a bias by that of its matrix."""
    if label.leaf == "bias":
        for leaf in ("weight", "kernel"):
            matrix = name[: -len("bias")] + leaf
            if matrix in merged[0]:
                other = names.label(matrix)
                role = other.role or _by_growth(
                    matrix, other, [m[matrix][0].shape for m in merged], merged
                )
                return "norm_gain" if role == "norm_gain" else role
        return ""
    rank = len(shapes[0])
    if rank == 1:  # of a norm without a name, such as a Sequential's
        return "norm_gain" if label.layout or label.leaf == "gain" else ""
    grows = [
        len({shape[axis] for shape in shapes}) > 1
        for axis in (range(2) if label.layout == "out, in" else (rank - 2, rank - 1))
    ]
    if rank < 2 or any(len({s[axis] for s in shapes}) > 1 for axis in range(rank)) is False:
        return ""
    if all(grows):
        return "hidden"
    if not label.layout:
        return ""
    of_in = grows[1] if label.layout == "out, in" else grows[0]
    return "readout" if of_in else "patch_embedding"


def _model(dump: Dump, merged: Mapping[str, Sequence[Entry]], labels: Mapping[str, Label]) -> Model:
    counted = max((len(entries) for name, entries in merged.items() if "*" in name), default=None)
    layers = dump.layers or counted
    parameters: dict[str, Parameter] = {}
    skipped = []
    for name, entries in merged.items():
        label = labels[name]
        if label.role == SKIPPED:
            skipped.append(name)
            continue
        entry = _averaged(entries)
        count = math.prod(entry.shape) * len(entries)
        blocks = (dump.encoder_layers or layers) if label.part == "encoder" else layers
        if (
            label.in_block
            and "*" not in name
            and entry.shape[:1] == (blocks,)
            and label.role != "relative_bias"
        ):
            entry = dataclasses.replace(entry, shape=entry.shape[1:])
        spec = _spec(name, label, entry)
        parameters[name] = Parameter(
            entry=entry,
            spec=spec,
            fused=label.role == FUSED,
            count=count,
            sizes=_fans(spec, entry.shape, label.layout),
        )
    if not parameters:
        raise PresetError(f"{dump.source}: no parameter is left to judge")
    matrices = [each for each in parameters.values() if len(each.entry.shape) > 1]
    if any(each.spec.role is Role.TOKEN_EMBEDDING for each in matrices):
        if dump.readout is None and not any(each.spec.role is Role.READOUT for each in matrices):
            raise PresetError(
                f'{dump.source} has no readout; where that is the embedding\'s table, write into "model" what its output is '
                'multiplied by, "readout": 1 where by nothing'
            )
    elif dump.readout is not None:
        raise PresetError(
            f'{dump.source}: "readout" is of one that is the embedding\'s table, and there is no such table'
        )
    return Model(
        dump=dump,
        parameters=parameters,
        sizes=sizes.sizes_of(dump, parameters, labels, layers),
        skipped=tuple(skipped),
        guessed={name: labels[name].role for name in parameters if labels[name].guessed},
    )


def _fans(spec: ParamSpec, shape: tuple[int, ...], layout: str) -> dict[str, int]:
    if spec.role not in (Role.HIDDEN, Role.READOUT) or len(shape) < 2:
        return {}
    ways = (
        (shape[-1], math.prod(shape[:-1]))
        if layout == "in, out"
        else (shape[0], math.prod(shape[1:]))
    )
    if spec.role is Role.HIDDEN:
        return {"input": ways[1], "output": ways[0]}
    return {"embed": ways[1]} if layout else {}


def _averaged(entries: Sequence[Entry]) -> Entry:
    """Geometric means over layers; a number that is 0 or unknown in one of them is that in all."""

    def mean(numbers: Sequence[float | None]) -> float | None:
        if any(x is None for x in numbers):
            return None
        positive = [x for x in numbers if x]
        return (
            math.exp(math.fsum(map(math.log, positive)) / len(positive))
            if len(positive) == len(numbers)
            else 0.0
        )

    columns = {column: mean([getattr(entry, column) for entry in entries]) for column in COLUMNS}
    if len(entries) == 1:
        return entries[0]
    return dataclasses.replace(entries[0], **{c: x for c, x in columns.items() if x is not None})


def _spec(name: str, label: Label, entry: Entry) -> ParamSpec:
    of, _, gain = label.role.partition(".")
    role = Role.VALUE if of == FUSED else Role(of)
    vector = label.leaf == "bias" or gain or role is Role.NORM_GAIN
    spec = _declared(role, label.in_block)
    spec = (
        dataclasses.replace(spec, part=label.part)
        if label.part and role is Role.NORM_GAIN
        else spec
    )
    if label.part == "encoder":
        spec = of_encoder(spec)
    elif label.part == "cross" and role is not Role.NORM_GAIN:
        spec = of_cross(spec)
    if gain:
        axes = (
            (*spec.copies, "head_dim")
            if len(entry.shape) == 1
            else (*spec.copies, "heads", "head_dim")
        )
        spec = dataclasses.replace(spec, role=Role.NORM_GAIN, axes=axes, fan_in=(), of=role)
    if label.leaf == "bias":
        spec = dataclasses.replace(spec.bias, of=spec.role)
    elif (
        not vector
        and role is not Role.RELATIVE_BIAS
        and len(entry.shape) < 2
        and role is not Role.TOKEN_EMBEDDING
    ):
        raise PresetError(
            f"{name} is said to be a {role.value} and has the shape {list(entry.shape)}; say what it is with --role"
        )
    return spec


def _declared(role: Role, in_block: bool) -> ParamSpec:
    if role is Role.NORM_GAIN:
        return ParamSpec(
            role=role, axes=("layers", "embed") if in_block else ("embed",), in_block=in_block
        )
    if role is Role.HIDDEN and in_block:
        return dataclasses.replace(_HIDDEN, axes=("layers", *_HIDDEN.axes), in_block=True)
    specs = {
        Role.HIDDEN: _HIDDEN,
        Role.PATCH_EMBEDDING: _PATCH,
        Role.POSITION: _POSITION,
        Role.RELATIVE_BIAS: _RELATIVE,
    }
    return specs.get(role) or _OF_ROLE[role]
