"""Declarations of a dump's parameters: a `ParamSpec` each, and the model's sizes.

A dump is the file of another program with shape, std, learning rate and so on of every parameter. A
parameter's name shows its role (`names`), and the role shows what its dimensions are. Where the
order of the dimensions is open, the width, which every role has, shows it. A width that is read
from the wrong array makes every exponent wrong, so the `check_` functions refuse such files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mupax.presets.roles import MATRICES, ParamSpec, PresetError, Role, of_cross, of_encoder
from mupax.presets.verify import layers, names
from mupax.presets.verify.formats.dump import Dump, Entry
from mupax.presets.verify.names import FUSED, SKIPPED, Label
from mupax.presets.verify.sizes import Parameter, Shape, sizes_of

ROUNDING = 0.01
"""Relative difference up to which growth factors count as equal. Hidden sizes are rounded."""
TABLES = ("token_embedding", "position")
"""Roles of arrays with one row per token or position. Their last dimension is always the width."""
UNSHARED = frozenset(
    {Role.HIDDEN, Role.READOUT, Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION}
)
"""Roles with an axis that no other parameter has, so that its growth cannot be cross-checked."""
LAYER_AXES = ("layers", "encoder_layers")

_MATRIX_SPECS = {spec.role: spec for spec in MATRICES.values()} | {
    Role.HIDDEN: ParamSpec(role=Role.HIDDEN, axes=("input", "output"), fan_in=("input",)),
    Role.PATCH_EMBEDDING: ParamSpec(
        role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)
    ),
    Role.POSITION: ParamSpec(role=Role.POSITION, axes=("position", "embed")),
    Role.RELATIVE_BIAS: ParamSpec(
        role=Role.RELATIVE_BIAS, axes=("distance", "heads"), in_block=True
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Model that a dump describes, with a declaration of every parameter.

    A dump has the values that a training program gives each parameter of the model.

    Attributes:
        dump: Dump as it was read.
        parameters: Parameters by name. A star in a name stands for the number of a layer.
        sizes: Size of every logical axis.
        skipped: Names of parameters that are not judged.
        guessed: Roles by parameter name, for parameters whose shapes show the role and whose names
            do not.
    """

    dump: Dump
    parameters: Mapping[str, Parameter]
    sizes: Mapping[str, int]
    skipped: tuple[str, ...] = ()
    guessed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def entries_per_layer(self, name: str) -> float:
        """Return the number of entries that one layer's parameter should have by its axes' sizes.

        If an array fuses queries, keys and values, all three are counted. Axes without a known size
        count as 1.
        """
        parameter = self.parameters[name]
        sizes = {**self.sizes, **dict.fromkeys(LAYER_AXES, 1)}
        count = math.prod(sizes.get(axis, 1) for axis in parameter.spec.axes)
        if parameter.fused:
            # The declaration is that of the values. Queries and keys are in the array too.
            return count * (sizes["heads"] / sizes["kv_heads"] + 2)
        return count


def models(dumps: Sequence[Dump], overrides: Mapping[str, str]) -> list[Model]:
    """Return the models that dumps describe, with a declaration of every parameter.

    Args:
        dumps: Dumps of one model at one size or more.
        overrides: Roles by pattern of names, from `--role`.

    Raises:
        PresetError: The dumps have different parameters, a parameter's role is not known, a pattern
            of `overrides` fits no parameter, a shape does not fit the other shapes, a language
            model has no readout, or all learning rates of a dump are 0.
    """
    for dump in dumps:
        _check_learning_rates(dump)
    merged_dumps = layers.merge(dumps)
    stacks = []
    for parameters in merged_dumps:
        stacks.append({name: list(entries.values()) for name, entries in parameters.items()})
    _check_same_parameters(dumps, stacks)
    _check_same_readout(dumps)

    sources = [dump.source for dump in dumps]
    shapes = {}
    for name in stacks[0]:
        shapes[name] = [entries[name][0].shape for entries in stacks]
    check_ranks(sources, shapes)
    labels = _labels(sources[0], stacks[0], shapes, overrides)
    check_widths(sources, shapes, labels)

    judged = layers.split(merged_dumps)
    for name in judged[0]:
        # A layer that is judged by itself has the label of all layers.
        if name not in labels:
            labels[name] = labels[names.merged(name)]
    declared = []
    for dump, entries, judged_entries in zip(dumps, stacks, judged, strict=True):
        declared.append(_model(dump, judged_entries, labels, _count_layers(entries)))
    for model in declared[1:]:
        check_growth(declared[0], model)
    return declared


def _check_learning_rates(dump: Dump) -> None:
    # The first steps of a warm-up have the rate 0, and 0 has no growth.
    rates = {entry.lr for entry in dump.parameters.values() if entry.lr is not None}
    if rates == {0.0}:
        raise PresetError(
            f"{dump.source}: every learning rate is 0; "
            "dump the model after the first steps of its warm-up"
        )


def _check_same_parameters(
    dumps: Sequence[Dump], layer_entries: Sequence[Mapping[str, Sequence[Entry]]]
) -> None:
    for dump, entries in zip(dumps[1:], layer_entries[1:], strict=True):
        unmatched = sorted(entries.keys() ^ layer_entries[0].keys())
        if unmatched:
            raise PresetError(
                f"{dump.source} and {dumps[0].source} have different parameters, "
                f"such as {', '.join(unmatched[:3])}; dump one model at two sizes"
            )


def check_ranks(sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]]) -> None:
    """Raise an error if a parameter has another number of dimensions in one file than in the first.

    Args:
        sources: Names of the files, for messages. Each is compared with the first.
        shapes: Shapes by parameter, in the order of `sources`.

    Raises:
        PresetError: The message names the parameter and both shapes.
    """
    for name, file_shapes in shapes.items():
        first = file_shapes[0]
        for source, shape in zip(sources[1:], file_shapes[1:], strict=True):
            if len(shape) != len(first):
                raise PresetError(
                    f"{name} has the shape {list(first)} in {sources[0]} and "
                    f"{list(shape)} in {source}, which is another number of dimensions; "
                    "write the shape of the same array of one model into both"
                )


def check_widths(
    sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]], labels: Mapping[str, Label]
) -> None:
    """Raise an error if the last dimension of an embedding table cannot be the model's width.

    Tables are token embeddings and positions. The last dimension is the width if some parameter of
    a block has a dimension of the same sizes, both in the first file and in the file compared with
    it. A single file or a model without blocks passes.

    Args:
        sources: Names of the files, for messages. Each is compared with the first.
        shapes: Shapes by parameter, in the order of `sources`.
        labels: Role and other properties of each parameter, by parameter.

    Raises:
        PresetError: The message names the table and both shapes.
    """
    block_shapes = []
    for name, file_shapes in shapes.items():
        if labels[name].in_block:
            block_shapes.append(file_shapes)
    tables = []
    for name, label in labels.items():
        if label.role in TABLES and not label.in_block and shapes[name][0]:
            tables.append(name)

    for index in range(1, len(sources)):
        # Compare pairs of sizes (first file, this file). A dimension of 64 and then 256 is the
        # width in both files, but 256 and then 256 may be a vocabulary.
        pairs: set[tuple[int, int]] = set()
        for file_shapes in block_shapes:
            pairs.update(zip(file_shapes[0], file_shapes[index], strict=True))
        if not pairs:
            continue
        for name in tables:
            first = shapes[name][0]
            shape = shapes[name][index]
            if (first[-1], shape[-1]) not in pairs:
                raise PresetError(
                    f"{name} has the shape {list(first)} in {sources[0]} and {list(shape)} in "
                    f"{sources[index]}, and no parameter of a block has a dimension of "
                    f"{first[-1]} and then {shape[-1]}; "
                    "write shapes of one model, with the width last in a table, or leave it out by "
                    f"--role '{name}=none'"
                )


def check_growth(base: Model, model: Model) -> None:
    """Raise an error if a block's parameter does not grow as its axes do in other parameters.

    The number of entries is compared with the product of the axes' sizes. Growth factors may differ
    by `ROUNDING`. Parameters with a role in `UNSHARED`, and their biases, are not checked.

    Args:
        base: First model, to which growth is relative.

    Raises:
        PresetError: The message names the parameter, both shapes and the axes.
    """
    for name, parameter in model.parameters.items():
        spec = parameter.spec
        # A bias grows as the output of its matrix does.
        role = spec.of if spec.role is Role.BIAS else spec.role
        if role in UNSHARED or not spec.in_block:
            continue
        shape = parameter.entry.shape
        base_shape = base.parameters[name].entry.shape
        growth = math.prod(shape) / math.prod(base_shape)
        expected = model.entries_per_layer(name) / base.entries_per_layer(name)
        # Sizes are rounded to whole numbers, so a parameter need not grow by exactly the ratio of
        # its axes.
        if abs(growth / expected - 1) >= ROUNDING:
            axes = " x ".join(axis for axis in spec.axes if axis not in LAYER_AXES)
            raise PresetError(
                f"{name} has the shape {list(base_shape)} in {base.dump.source} and {list(shape)} "
                f"in {model.dump.source}: it is {growth:.3g} times as large, and {axes} of the "
                f"other parameters {expected:.3g} times; write shapes of one model, or "
                f"--role '{name}=ROLE' if it is no {spec.role.value}"
            )


def _labels(
    source: str,
    layer_entries: Mapping[str, Sequence[Entry]],
    shapes: Mapping[str, Sequence[Shape]],
    overrides: Mapping[str, str],
) -> dict[str, Label]:
    """Return the role and other properties of every parameter.

    The role comes from `--role`, else from the file, else from the name, else from the shapes.

    Args:
        source: Name of the first file, for messages about its parameters.
        layer_entries: Entries of all layers in the first file, by parameter.
        shapes: Shapes by parameter, one for each file.
        overrides: Roles by pattern of names, from `--role`.

    Raises:
        PresetError: Nothing shows the role of some parameters. The message names them.
    """
    _check_overrides(overrides, layer_entries)
    dual = _has_two_stacks(layer_entries)
    with_experts = names.modules_of_experts(layer_entries)
    labels: dict[str, Label] = {}
    for name, entries in layer_entries.items():
        label = names.label(name, dual, with_experts)
        # `--role` comes before the file's own role, and that comes before the name.
        role = names.chosen(name, overrides) or entries[0].role
        if role:
            label = _with_role(label, role, name, source)
            _check_hidden(source, name, label, shapes[name])
        if label.role == names.EMBEDDING:
            label = label._replace(role=_role_of_embedding(name, label, shapes))
        if not label.role:
            role = _role_by_growth(name, label, shapes)
            # A bias has the role of its matrix, for which there is a note already.
            guessed = bool(role) and label.leaf != "bias"
            label = label._replace(role=role, guessed=guessed)
        labels[name] = label

    unknown = [name for name, label in labels.items() if not label.role]
    if unknown:
        more = ""
        if len(unknown) > 4:
            more = f" and {len(unknown) - 4} more"
        verb = "is" if len(unknown) == 1 else "are"
        raise PresetError(
            f"{source}: nothing says what {', '.join(unknown[:4])}{more} {verb}; "
            f"write --role '{unknown[0]}=ROLE', where a role is one of {', '.join(names.ROLES)} "
            f"(which leaves it out), and that of a bias is such as query.bias"
        )
    return labels


def _check_hidden(source: str, name: str, label: Label, file_shapes: Sequence[Shape]) -> None:
    """Raise `PresetError` for a hidden matrix with heads, whose fan-in no shape shows."""
    if label.role != "hidden" or label.leaf == "bias" or not _has_heads(name, label, file_shapes):
        return
    raise PresetError(
        f"{source}: {name} has the shape {list(file_shapes[0])}, and nothing shows which dimensions "
        f"a hidden matrix of this shape reads; write --role '{name}=value' for [width, heads, "
        "head_dim], or attention_out for [heads, head_dim, width], which are judged alike"
    )


def _check_overrides(
    overrides: Mapping[str, str], layer_entries: Mapping[str, Sequence[Entry]]
) -> None:
    for pattern, role in overrides.items():
        # A pattern that fits nothing is a typing error, and would be ignored silently.
        if not any(names.chosen(name, {pattern: role}) for name in layer_entries):
            examples = ", ".join(list(layer_entries)[:3])
            raise PresetError(
                f"--role {pattern!r} fits no parameter; they are named like {examples}"
            )


def _has_two_stacks(parameters: Mapping[str, Sequence[Entry]]) -> bool:
    """Return whether parameters are those of an encoder-decoder, judged by their names."""
    has_encoder = False
    has_decoder_blocks = False
    for name in parameters:
        if name.startswith("encoder."):
            has_encoder = True
        elif "block" in name:
            has_decoder_blocks = True
    return has_encoder and has_decoder_blocks


def _with_role(label: Label, text: str, name: str, source: str) -> Label:
    """Return the label with a role that a user or a file gives, such as "block.query.bias".

    "block." puts the parameter into a block, and ".bias" makes it a bias.

    Args:
        text: Role as the user or the file writes it.
        name: Name of the parameter, for the message.
        source: Name of the file, for the message.

    Raises:
        PresetError: No role has the name.
    """
    without_block = text.removeprefix("block.")
    role = without_block.removesuffix(".bias")
    if role not in names.ROLES:
        raise PresetError(
            f"{source}: {name} has the role {text!r}; roles are {', '.join(names.ROLES)}"
        )
    leaf = label.leaf
    if text.endswith(".bias"):
        leaf = "bias"
    elif leaf == "bias":
        # The user or the file calls it a matrix, which counts more than the name.
        leaf = "matrix"
    in_block = label.in_block or text.startswith("block.")
    return label._replace(role=role, in_block=in_block, leaf=leaf)


def _role_of_embedding(name: str, label: Label, shapes: Mapping[str, Sequence[Shape]]) -> str:
    """Return the role of a parameter that is called an embedding, or "" if only growth shows it.

    A matrix that reads the width, or that writes it from inputs of another size, has a role by its
    growth. Everything else is a table, such as [vocabulary, width].

    Args:
        shapes: Shapes of every parameter at all sizes, by name.
    """
    if label.leaf == "bias":
        return ""
    by_growth = _role_by_growth(name, label, shapes)
    # A table of PyTorch, [vocabulary, width], has the shape of a readout's matrix. A norm may be in
    # the module that embeds patches.
    if by_growth in ("hidden", "patch_embedding", "norm_gain"):
        return ""
    # The second factor of a table is called an embedding, too, and nothing looks it up.
    if names.PROJECTS.search(name.removesuffix(".weight").removesuffix(".kernel")):
        return ""
    return Role.TOKEN_EMBEDDING.value


def _role_by_growth(name: str, label: Label, shapes: Mapping[str, Sequence[Shape]]) -> str:
    """Return the role that a parameter's shapes at several sizes show, or "" if they show none.

    The role of a matrix follows from the dimensions that grow, as in microsoft/mup: "hidden" if
    both do, "readout" if only the input does, "patch_embedding" if only the output does. A bias has
    the role of its matrix. A gain is "norm_gain".

    Args:
        name: Name of the parameter, a key of `shapes`.
        label: Properties that the name shows, such as the order of dimensions.
        shapes: Shapes of every parameter at all sizes, by name.
    """
    if label.leaf == "bias":
        return _role_of_matrix(name, shapes)

    file_shapes = shapes[name]
    rank = len(file_shapes[0])
    if rank == 0:
        return ""
    if rank == 1:
        # This may be a norm whose module has no name, such as one in PyTorch's Sequential.
        is_gain = label.layout or label.leaf == "gain"
        if not is_gain:
            return ""
        return "norm_gain"

    if _has_heads(name, label, file_shapes):
        return ""
    grows = _growing_dimensions(file_shapes)
    # A PyTorch convolution is (out, in, height, width), a JAX one (height, width, in, out).
    if label.layout == "out, in":
        output_grows = grows[0]
        input_grows = grows[1]
    else:
        input_grows = grows[-2]
        output_grows = grows[-1]
    # No dimension grows with the width, so the matrix may be anything.
    if not any(grows):
        return ""
    if input_grows and output_grows:
        return "hidden"
    # Without a layout nothing shows which dimension is the input.
    if not label.layout:
        return ""
    return "readout" if input_grows else "patch_embedding"


def _growing_dimensions(file_shapes: Sequence[Shape]) -> list[bool]:
    return [len(set(sizes)) > 1 for sizes in zip(*file_shapes, strict=True)]


def _has_heads(name: str, label: Label, file_shapes: Sequence[Shape]) -> bool:
    """Return whether a matrix of more than two dimensions cannot be that of a convolution.

    The window of a convolution does not grow. The matrix has dimensions of heads then, such as
    [width, heads, head_dim], and nothing shows which dimensions it reads.
    """
    grows = _growing_dimensions(file_shapes)
    if label.layout == "out, in":
        window = grows[2:]
    else:
        window = grows[:-2]
        # The first dimension may count the layers of a stacked array.
        if label.in_block and "*" not in name:
            window = window[1:]
    return any(window)


def _role_of_matrix(name: str, shapes: Mapping[str, Sequence[Shape]]) -> str:
    """Return the role of the matrix that a bias is added to, such as "hidden".

    The matrix is the parameter with the same name but for the last word: "weight" or "kernel" in
    place of "bias". The result is "" if there is none, or if neither its name nor its shapes show
    a role.

    Args:
        name: Name of the bias, which ends in "bias".
        shapes: Shapes of every parameter at all sizes, by name.
    """
    for leaf in ("weight", "kernel"):
        matrix = name[: -len("bias")] + leaf
        if matrix in shapes:
            label = names.label(matrix)
            role = label.role
            if role == names.EMBEDDING:
                role = _role_of_embedding(matrix, label, shapes)
            return role or _role_by_growth(matrix, label, shapes)
    return ""


def _model(
    dump: Dump,
    layer_entries: Mapping[str, Sequence[Entry]],
    labels: Mapping[str, Label],
    count: int | None,
) -> Model:
    """Return a dump's model.

    Args:
        layer_entries: Entries of the layers that are judged together, by parameter.
        count: Number of residual blocks that the names show, or `None`.
    """
    num_layers = dump.layers or count
    parameters: dict[str, Parameter] = {}
    skipped = []
    for name, entries in layer_entries.items():
        label = labels[name]
        if label.role == SKIPPED:
            skipped.append(name)
            continue
        blocks = num_layers
        if label.part == "encoder":
            blocks = dump.encoder_layers or num_layers
        parameters[name] = _parameter(name, entries, label, blocks)

    if not parameters:
        raise PresetError(f"{dump.source}: no parameter is left to judge")
    _check_readout(dump, parameters)
    guessed = {name: labels[name].role for name in parameters if labels[name].guessed}
    return Model(
        dump=dump,
        parameters=parameters,
        sizes=sizes_of(dump, parameters, labels, num_layers),
        skipped=tuple(skipped),
        guessed=guessed,
    )


def _count_layers(layer_entries: Mapping[str, Sequence[Entry]]) -> int | None:
    counts = []
    for name, entries in layer_entries.items():
        # A star stands for the number of a layer, so such a name has one entry per layer.
        if "*" in name:
            counts.append(len(entries))
    return max(counts, default=None)


def _parameter(name: str, entries: Sequence[Entry], label: Label, blocks: int | None) -> Parameter:
    """Merge the entries that one parameter has in several layers into one `Parameter`.

    Args:
        name: Name with a star for the number of a layer, or the name of one layer's parameter.
        entries: Entries of the layers, all of one shape. An array that stacks all layers is one
            entry.
        label: Role and other properties of the parameter.
        blocks: Number of blocks in the parameter's stack. `None` if there are no blocks.
    """
    entry = layers.average(entries)
    count = math.prod(entry.shape) * len(entries)
    # A table of relative positions is shared by all blocks: its first dimension is no layer.
    is_numbered = "*" in names.merged(name)
    may_be_stacked = label.in_block and not is_numbered and label.role != "relative_bias"
    if may_be_stacked and entry.shape[:1] == (blocks,):
        entry = dataclasses.replace(entry, shape=entry.shape[1:])
    spec = _spec(name, label, entry)
    return Parameter(
        entry=entry,
        spec=spec,
        fused=label.role == FUSED,
        count=count,
        sizes=_own_sizes(spec, entry.shape, label.layout),
    )


def _check_same_readout(dumps: Sequence[Dump]) -> None:
    """Raise `PresetError` if the readout is tied to the embedding in only some of the dumps."""
    tied = [dump.source for dump in dumps if dump.readout is not None]
    untied = [dump.source for dump in dumps if dump.readout is None]
    if tied and untied:
        raise PresetError(
            f'{tied[0]} has "readout" in "model", for a readout that is the embedding\'s table, '
            f"and {untied[0]} has not; write it into every file, or into none"
        )


def _check_readout(dump: Dump, parameters: Mapping[str, Parameter]) -> None:
    """Raise `PresetError` for a language model without readout, or a tied one without a table."""
    has_table = False
    has_readout = False
    for parameter in parameters.values():
        role = parameter.spec.role
        num_dimensions = len(parameter.entry.shape)
        # A class token has the role of a table too. It has the shape [width] or [1, 1, width].
        if role is Role.TOKEN_EMBEDDING and num_dimensions == 2:
            has_table = True
        elif role is Role.READOUT and num_dimensions > 1:
            has_readout = True
    if not has_table:
        if dump.readout is not None:
            raise PresetError(
                f'{dump.source}: "readout" says that the embedding\'s table is the readout, and no '
                'parameter is such a table; leave "readout" out, or write --role '
                "'NAME=token_embedding'"
            )
    elif dump.readout is None and not has_readout:
        raise PresetError(
            f"{dump.source} has no readout; where that is the embedding's table, "
            'write into "model" what its output is multiplied by, "readout": 1 where by nothing'
        )


def _own_sizes(spec: ParamSpec, shape: Shape, layout: str) -> dict[str, int]:
    """Return the sizes of axes that only this matrix has, for `Parameter.sizes`.

    These axes are "input" and "output" of a hidden matrix, and "embed" of a readout whose layout is
    known. The result is empty for other parameters.

    Args:
        layout: Order of the dimensions, "out, in" or "in, out". Empty if unknown.
    """
    if spec.role not in (Role.HIDDEN, Role.READOUT) or len(shape) < 2:
        return {}
    # Further dimensions are those of a convolution's window, which the fan-in includes.
    if layout == "in, out":
        fan_out = shape[-1]
        fan_in = math.prod(shape[:-1])
    else:
        fan_out = shape[0]
        fan_in = math.prod(shape[1:])
    if spec.role is Role.HIDDEN:
        return {"input": fan_in, "output": fan_out}
    # Without a layout nothing shows which dimension is the width.
    if not layout:
        return {}
    return {"embed": fan_in}


def _spec(name: str, label: Label, entry: Entry) -> ParamSpec:
    """Return the declaration of a parameter.

    Args:
        name: Name of the parameter, for the message.
        label: Role and other properties. The gain of a query or key norm has a role such as
            "query.norm_gain".
        entry: Entry of the parameter, for its shape.

    Raises:
        PresetError: The role is that of a matrix, and the shape has fewer than two dimensions.
    """
    role_name, _, gain = label.role.partition(".")
    # A fused array of queries, keys and values is declared as its values. `entries_per_layer`
    # counts the rest.
    if role_name == FUSED:
        role = Role.VALUE
    else:
        role = Role(role_name)
    spec = _declaration(role, label.in_block)

    if label.part and role is Role.NORM_GAIN:
        spec = dataclasses.replace(spec, part=label.part)
    if label.part == "encoder":
        spec = of_encoder(spec)
    elif label.part == "cross" and role is not Role.NORM_GAIN:
        spec = of_cross(spec)

    if gain:
        # A norm of queries or keys has one gain for all heads, or one for each head.
        axes = (*spec.copies, "heads", "head_dim")
        if len(entry.shape) == 1:
            axes = (*spec.copies, "head_dim")
        spec = dataclasses.replace(spec, role=Role.NORM_GAIN, axes=axes, fan_in=(), of=role)
    if label.leaf == "bias":
        return dataclasses.replace(spec.bias, of=spec.role)

    may_be_vector = gain or role in (Role.NORM_GAIN, Role.RELATIVE_BIAS, Role.TOKEN_EMBEDDING)
    if len(entry.shape) < 2 and not may_be_vector:
        raise PresetError(
            f"{name} is said to be a {role.value} and has the shape {list(entry.shape)}; "
            "say what it is with --role"
        )
    return spec


def _declaration(role: Role, in_block: bool) -> ParamSpec:
    """Return the declaration of a role's matrix or gain, as in a model with one stack.

    Args:
        in_block: Whether the parameter is in a residual block. Only norm gains and matrices of the
            role `HIDDEN` need it, because they may be in a block or outside.
    """
    if role is Role.NORM_GAIN:
        axes = ("layers", "embed") if in_block else ("embed",)
        return ParamSpec(role=role, axes=axes, in_block=in_block)
    spec = _MATRIX_SPECS[role]
    if role is Role.HIDDEN and in_block:
        return dataclasses.replace(spec, axes=("layers", *spec.axes), in_block=True)
    return spec
