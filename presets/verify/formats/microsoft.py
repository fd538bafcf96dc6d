"""Base shapes of microsoft/mup (`.bsh`, which `save_base_shapes` writes) as a base model's dump.

The file is YAML with a list of sizes per parameter. A size is null if the dimension does not grow
with width. mup leaves some parameters' learning rates unscaled (`mup/optim.py`): under Adam those
of parameters with at most one width dimension, under SGD those of matrices. The base trains with
these unscaled values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.dump import Dump, Entry


def base(contents: Any, source: str, target: Dump) -> Dump:
    """Return the dump of the base model that a `.bsh` file describes.

    The file has shapes only. Learning rate, weight decay and eps are those of a parameter of the
    model whose learning rate mup does not scale.

    Args:
        contents: Contents of the `.bsh` file: a list of sizes per parameter, `None` for a dimension
            that does not grow with width.
        source: Name of the `.bsh` file.
        target: Dump of the model whose base the file describes.

    Raises:
        PresetError: The file has other parameters than the dump, or the shapes of the model itself.
    """
    _check_contents(contents, source, target)
    shapes = {}
    for name, shape in contents.items():
        shapes[name] = _full_shape(name, shape, source, target)
    # `set_base_shapes(model, None)` gives equal shapes. Such a model trains without muP.
    if all(shape == target.parameters[name].shape for name, shape in shapes.items()):
        raise PresetError(
            f"{source} has the shapes of {target.source} itself: to mup it is its own base, and "
            "all of it is standard parameterization; make base shapes from a narrower model, "
            "mup.make_base_shapes(base, delta, file) (microsoft/mup, issue 41)"
        )

    unscaled = _unscaled_entry(contents, source, target)
    parameters = {}
    for name, shape in shapes.items():
        parameters[name] = Entry(
            shape=shape,
            lr=unscaled.lr,
            wd=unscaled.wd,
            eps=unscaled.eps,
            role=target.parameters[name].role,
        )
    note = (
        f"{source} has no initial sizes: they are not judged; "
        "dump the base model to have them judged"
    )
    return dataclasses.replace(
        target,
        source=source,
        parameters=parameters,
        attention=None,
        branch=None,
        notes=(*target.notes, note),
    )


def _check_contents(contents: Any, source: str, target: Dump) -> None:
    is_base_shapes = isinstance(contents, dict) and all(
        isinstance(shape, list) for shape in contents.values()
    )
    if not is_base_shapes:
        raise PresetError(
            f"{source} is no file of base shapes: "
            f"write one with mup.make_base_shapes(base, delta, {source!r})"
        )
    unmatched = sorted(contents.keys() ^ target.parameters.keys())
    if unmatched:
        examples = ", ".join(map(str, unmatched[:3]))
        raise PresetError(
            f"{source} and {target.source} have different parameters, such as {examples}"
        )


def _full_shape(name: str, shape: list[Any], source: str, target: Dump) -> tuple[int, ...]:
    """Return a parameter's shape in the base model. Dimensions that do not grow keep their size.

    Args:
        shape: Sizes in the file. `None` is a dimension that does not grow with width.
        source: Name of the `.bsh` file, for the message.
        target: Dump of the model, which has the sizes of dimensions that do not grow.

    Raises:
        PresetError: The shape has another number of dimensions than the model's, or no whole
            numbers.
    """
    target_shape = target.parameters[name].shape
    are_sizes = all(size is None or type(size) is int for size in shape)
    if len(shape) != len(target_shape) or not are_sizes:
        raise PresetError(
            f"{source}: {name} has the shape {shape}, and {list(target_shape)} in {target.source}"
        )
    return tuple(size or full for size, full in zip(shape, target_shape, strict=True))


def _unscaled_entry(contents: dict[str, list[Any]], source: str, target: Dump) -> Entry:
    """Return the first parameter of the model whose learning rate mup does not scale.

    Under Adam it is one with fewer than two width dimensions, under SGD a matrix with two.

    Args:
        contents: Sizes by parameter. `None` is a dimension that does not grow with width.

    Raises:
        PresetError: The model has no such parameter.
    """
    sgd = target.optimizer in ("sgd", "momentum")
    for name, entry in target.parameters.items():
        width_dimensions = sum(size is not None for size in contents[name])
        # mup's optimizers scale matrices under Adam, and vectors under SGD.
        is_matrix = width_dimensions == 2
        if is_matrix == sgd:
            return entry
    raise PresetError(
        f"{source}: no parameter of {target.source} shows the rate that mup does not scale; "
        "dump the base model too"
    )
