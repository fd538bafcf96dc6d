"""Layers of a dump: parameters whose names differ in a layer's number are judged as one parameter.

Layers that do not belong together are kept apart: those of different shapes, such as an MLP's in a
list, and a layer whose values grow differently from those of the other layers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mupax.presets.verify import names
from mupax.presets.verify.formats.dump import COLUMNS, Column, Dump, Entry

OUTLIER = 1.3
"""Largest factor between one value and the law of the others that counts as right."""

Layers = dict[str, Entry]
"""Entries of one parameter's layers, by their names in the file."""


def merge(dumps: Sequence[Dump]) -> list[dict[str, Layers]]:
    """Return each dump's parameters by name, with a star for the number of a layer.

    Stacks in which a parameter has several shapes keep the numbers of their layers in all dumps, as
    do all other parameters of these stacks.
    """
    uneven: set[str] = set()
    for dump in dumps:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, entry in dump.parameters.items():
            merged_name = names.merged(name)
            if shapes.setdefault(merged_name, entry.shape) != entry.shape:
                uneven.add(_stack(merged_name))

    merged_dumps = []
    for dump in dumps:
        parameters: dict[str, Layers] = {}
        for name, entry in dump.parameters.items():
            merged_name = names.merged(name)
            key = name if _stack(merged_name) in uneven else merged_name
            parameters.setdefault(key, {})[name] = entry
        merged_dumps.append(parameters)
    return merged_dumps


def _stack(merged_name: str) -> str:
    """Return the part of a name before the number of a layer, "" without a number."""
    stack, star, _ = merged_name.partition("*")
    return stack if star else ""


def split(merged_dumps: Sequence[Mapping[str, Layers]]) -> list[dict[str, list[Entry]]]:
    """Return the entries that are judged as one parameter, by name, for each dump.

    A layer one of whose values grows differently from that of the other layers gets an item of its
    own, under its own name. If a dump has no such layer, because the depth grows, the mean of its
    layers stands for it.

    Args:
        merged_dumps: Parameters of each dump, as `merge` returns them.
    """
    split_dumps: list[dict[str, list[Entry]]] = [{} for _ in merged_dumps]
    for name in merged_dumps[0]:
        layers = [parameters[name] for parameters in merged_dumps]
        apart = _different_layers(layers)
        for split_dump, entries in zip(split_dumps, layers, strict=True):
            together = [entry for layer, entry in entries.items() if layer not in apart]
            if together:
                split_dump[name] = together
            for layer in apart:
                split_dump[layer] = [entries.get(layer) or average(list(entries.values()))]
    return split_dumps


def _different_layers(layers: Sequence[Layers]) -> list[str]:
    """Return the names of layers with a value that grows differently from the other layers'.

    Args:
        layers: One parameter's layers, an item for each dump.
    """
    different: dict[str, None] = {}
    # Files come in any order. Of two depths the smaller is the base.
    base = min(layers, key=len)
    for larger in layers:
        if larger is base:
            continue
        for column in COLUMNS:
            if larger.keys() == base.keys():
                outliers = _unlike_partners(base, larger, column)
            else:
                outliers = _unlike_the_base(base, larger, column)
            different.update(dict.fromkeys(outliers))
    return list(different)


def _unlike_partners(base: Layers, larger: Layers, column: Column) -> list[str]:
    """Return the layers whose value grows unlike that of most layers, for dumps of one depth."""
    growth = {name: _growth(base[name], entry, column) for name, entry in larger.items()}
    return _outliers(growth, _noise([*base.values(), *larger.values()], column))


def _unlike_the_base(base: Layers, larger: Layers, column: Column) -> list[str]:
    """Return the layers with an unusual value, for dumps of two depths, whose layers do not pair.

    Layers whose value is 0 while others' is not are among them. The larger model's others are
    compared with a layer of the base. They are not compared if values differ between the base's
    layers by design, such as learning rates that fall from layer to layer.
    """
    zeros = []
    trained: list[Layers] = []
    for own_layers in (base, larger):
        is_zero = {name: getattr(entry, column) == 0 for name, entry in own_layers.items()}
        zeros += [name for name, zero in is_zero.items() if zero]
        trained.append({name: own_layers[name] for name, zero in is_zero.items() if not zero})
    base_trained, larger_trained = trained
    if not base_trained or not larger_trained:
        return []
    if not _is_uniform(base_trained, column):
        return zeros
    first = next(iter(base_trained.values()))
    growth = {name: _growth(first, entry, column) for name, entry in larger_trained.items()}
    noise = _noise([*base.values(), *larger.values()], column)
    return [*zeros, *_outliers(growth, noise)]


def _is_uniform(layers: Layers, column: Column) -> bool:
    """Return whether a value is the same in all layers, up to the factor `OUTLIER`."""
    first = next(iter(layers.values()))
    growth = {name: _growth(first, entry, column) for name, entry in layers.items()}
    return not _outliers(growth, _noise(layers.values(), column))


def _growth(base: Entry, entry: Entry, column: Column) -> float | None:
    """Return the logarithm of a value over the base's. `None` if one is unknown.

    It is minus infinity if both are 0, and infinity if only one is, so that a layer which is frozen
    or starts at zero is not taken together with layers that are not.
    """
    first = getattr(base, column)
    last = getattr(entry, column)
    if first is None or last is None:
        return None
    if first == last == 0:
        return -math.inf
    if first == 0 or last == 0:
        return math.inf
    return math.log(last / first)


def _outliers(growth: Mapping[str, float | None], noise: float) -> list[str]:
    """Return the names of layers whose growth is not that of most layers.

    Args:
        noise: Difference of logarithms that is allowed in addition to the factor `OUTLIER`.
    """
    logarithms = [value for value in growth.values() if value is not None]
    if not logarithms:
        return []
    usual = statistics.median_low(logarithms)
    outliers = []
    for name, value in growth.items():
        if value is not None and value != usual and abs(value - usual) > math.log(OUTLIER) + noise:
            outliers.append(name)
    return outliers


def _noise(entries: Iterable[Entry], column: Column) -> float:
    """Return the noise of the logarithm of a measured standard deviation, 0 of other values."""
    if column != "std":
        return 0.0
    smallest = min(math.prod(entry.shape) for entry in entries)
    # The standard deviation of n numbers is known to 1/sqrt(2n) of itself. Four of these are
    # allowed for both numbers of a ratio.
    return 4 * math.hypot((2 * smallest) ** -0.5, (2 * smallest) ** -0.5)


def average(entries: Sequence[Entry]) -> Entry:
    """Return geometric means over layers.

    The mean is 0 if a layer's value is 0. If a layer's value is unknown, the first layer's value
    stands for all.
    """
    if len(entries) == 1:
        return entries[0]
    means = {}
    for column in COLUMNS:
        mean = _geometric_mean([getattr(entry, column) for entry in entries])
        if mean is not None:
            means[column] = mean
    return dataclasses.replace(entries[0], **means)


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    logs = []
    for value in values:
        if value is None:
            return None
        if value:
            logs.append(math.log(value))
    if len(logs) < len(values):
        return 0.0
    # Geometric, because growth is judged by logarithms, of which this is the mean.
    return math.exp(math.fsum(logs) / len(logs))
