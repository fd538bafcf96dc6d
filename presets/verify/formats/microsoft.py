"""A .bsh of microsoft/mup: the base shapes that `save_base_shapes` writes, as the dump of the base that a model has by them.

It is YAML, a list of sizes per parameter, null where a dimension is none of width. The base trains with the numbers that mup gives what is
not scaled (`mup/optim.py`): under Adam those of parameters with at most one dimension of width, under SGD those of a matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mupax.presets.roles import PresetError
from mupax.presets.verify.formats.dump import Dump, Entry


def base(contents: Any, source: str, target: Dump) -> Dump:
    """The base of a model: its shapes from the file, its numbers those of what mup does not scale.

    Args:
        contents: of the .bsh.
        source: its name.
        target: the dump of the model.

    Raises:
        PresetError: shapes of another model, or base shapes that are the model's own.
    """
    if not isinstance(contents, dict) or not all(
        isinstance(shape, list) for shape in contents.values()
    ):
        raise PresetError(
            f"{source} is no file of base shapes: write one with mup.make_base_shapes(base, delta, {source!r})"
        )
    if odd := sorted(contents.keys() ^ target.parameters.keys()):
        raise PresetError(
            f"{source} and {target.source} have different parameters, such as {', '.join(map(str, odd[:3]))}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in contents.items():
        full_shape = target.parameters[name].shape
        if len(shape) != len(full_shape) or not all(
            size is None or type(size) is int for size in shape
        ):
            raise PresetError(
                f"{source}: {name} has the shape {shape}, and {list(full_shape)} in {target.source}"
            )
        shapes[name] = tuple(size or have for size, have in zip(shape, full_shape, strict=True))
    if all(shape == target.parameters[name].shape for name, shape in shapes.items()):
        raise PresetError(
            f"{source} has the shapes of {target.source} itself: to mup it is its own base, and all of it is standard parameterization; "
            "make base shapes from a narrower model, mup.make_base_shapes(base, delta, file) (microsoft/mup, issue 41)"
        )
    sgd = target.optimizer in ("sgd", "momentum")
    plain = [
        entry for name, entry in target.parameters.items()
        if (sum(size is not None for size in contents[name]) == 2) == sgd
    ]  # fmt: skip
    if not plain:
        raise PresetError(
            f"{source}: no parameter of {target.source} shows the rate that mup does not scale; dump the base model too"
        )
    base_entry = plain[0]
    parameters = {
        name: Entry(
            shape=shape,
            lr=base_entry.lr,
            wd=base_entry.wd,
            eps=base_entry.eps,
            role=target.parameters[name].role,
        )
        for name, shape in shapes.items()
    }
    notes = (
        *target.notes,
        f"{source} has no initial sizes: they are not judged; dump the base model to have them judged",
    )
    return dataclasses.replace(
        target, source=source, parameters=parameters, attention=None, branch=None, notes=notes
    )
