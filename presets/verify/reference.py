"""The preset that a dump is closest to, and where the two differ: what a parameter should get is what that preset gives it.

A preset that is itself not stable as these sizes grow is no reference unless it is asked for by name: a dump that is exactly `sp` is
held against `mup`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from mupax import presets
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.verdicts import DESCRIPTIVE, entries
from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, VECTORS, PresetError, Role
from mupax.presets.rule import Decay
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference, Laws, differences
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries

ORDER = (
    ("mup", {}), ("depth-mup", {"alpha_l": 0.5}), ("completep", {}), ("depth-mup", {"alpha_l": 1.0}), ("mup-half", {}),
    ("depth-mup", {"alpha_a": 0.5, "alpha_l": 0.5}), ("depth-mup", {"alpha_a": 0.5, "alpha_l": 1.0}), ("u-mup", {}), ("spectral", {}),
    ("maximal-update", {}), ("sp-layerwise", {}), ("hybrid", {}), ("ntk", {}),
)  # fmt: skip
"""Presets that a dump is compared with. Of several that fit equally well the first one is the reference, so `mup` before all others."""
_FAMILY = ("mup", "depth-mup", "completep", "mup-half")
"""What a dump is held against that is no preset's."""
_WEIGHTS = {LOGITS: 0.9, BRANCH: 4.0, "eps": 0.0, "pull": 0.0}
"""How much a kind of parameter, or a number, counts where it differs; 1 the others. Who has written a branch's multiplier has meant it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A preset, and all differences from it, those within tolerance too."""

    preset: Preset
    differences: tuple[Difference, ...]

    @property
    def distance(self) -> float:
        """How many kinds of parameters differ, in which numbers."""
        kinds = {(_kind(d), d.quantity) for d in self.differences if d.wrong}
        return sum(_WEIGHTS.get(kind, _WEIGHTS.get(quantity, 1.0)) for kind, quantity in kinds)


def _kind(difference: Difference) -> str:
    spec = difference.spec
    if spec is None or spec.role is Role.READOUT:
        return difference.name if spec is None else "readout"
    if spec.role in VECTORS or spec.role in EMBEDDINGS:
        return "vectors" if spec.role in VECTORS else "embeddings"
    return "queries and keys" if spec.role in (Role.QUERY, Role.KEY) else "matrices"


def closest(
    line: GrowthSeries, optimizer: str, decay: Decay, named: Preset | None = None
) -> Reference:
    """The reference of a line: the preset that is named, else the closest that is stable along it.

    Args:
        line: the dumps.
        optimizer: a name of `OPTIMIZERS`.
        decay: how weight decay enters.
        named: the one asked for.

    Raises:
        PresetError: the preset named has no rule for the optimizer, or none for a tied readout.
    """
    if named is not None:
        return _reference(Laws(named, named.family(optimizer)), line, optimizer, decay)
    tied = line.models[0].dump.readout is not None
    stable = _stable(
        optimizer, tuple(sorted((a, round(x, 3)) for a, x in line.growth.items())), line.limit, tied
    )
    references = []
    for laws in stable:
        reference = _reference(laws, line, optimizer, decay)
        if not _shows_its_attention(reference, line):
            continue
        references.append(reference)
        if not any(difference.wrong for difference in reference.differences):
            return reference
    if not references:
        raise PresetError(
            f"no preset has a rule for {optimizer} that is stable as {line.word} grows; name one with --preset"
        )
    best = min(references, key=lambda reference: reference.distance)
    if best.distance == 0:
        return best
    family = [
        reference for reference in references if reference.preset.name in _FAMILY
    ] or references
    if is_standard(line, optimizer, decay):
        return family[0]
    return min(family, key=lambda reference: reference.distance)


def _reference(laws: Laws, line: GrowthSeries, optimizer: str, decay: Decay) -> Reference:
    return Reference(preset=laws.preset, differences=differences(laws, line, optimizer, decay))


def _shows_its_attention(reference: Reference, line: GrowthSeries) -> bool:
    """Return whether the dumps may be of this preset, judged by what it gives queries and keys.

    A preset whose logits fall slower than 1/d slows queries and keys down in return. Dumps with 1/sqrt(d) are of that preset
    only if those rates are in them and are right: hidden matrices of any name have `mup`'s rates, and fit by chance.
    """
    growth = line.growth.get("head_dim", 0.0)
    if not growth or reference.preset.logits.growth({"head_dim": 1.0}) < -1 + TOLERANCE:
        return True
    rates = [d for d in reference.differences if d.quantity == "rate"]
    attention = [
        d
        for d in rates
        if d.fused or (d.spec is not None and d.spec.role in (Role.QUERY, Role.KEY))
    ]
    return not rates or (bool(attention) and not any(d.wrong for d in attention))


def is_standard(line: GrowthSeries, optimizer: str, decay: Decay) -> bool:
    """Return whether everything in the dumps is standard parameterization's, along a line of widths.

    Args:
        line: the dumps.
        optimizer: whose rates.
        decay: how weight decay enters.
    """
    if line.axis != "embed":
        return False
    plain = presets.get("sp")
    of_plain = differences(Laws(plain, plain.family(optimizer)), line, optimizer, decay)
    return not any(d.wrong and not _as_plain(d) for d in of_plain)


def _as_plain(d: Difference) -> bool:
    """Whether it is a choice of standard parameterization: one std for every width, a readout that nothing is multiplied by, eps, decay."""
    stays = d.slope is not None and abs(d.slope) <= d.tolerance
    return (
        d.quantity in ("eps", "pull")
        or (d.quantity == "start" and (stays or d.name == TIED))
        or (d.name == TIED and stays)
    )


@functools.lru_cache(maxsize=64)
def _stable(
    optimizer: str, growth: tuple[tuple[str, float], ...], name: str, tied: bool
) -> tuple[Laws, ...]:
    """Presets with a rule for the optimizer, and for a tied readout, without those of which something explodes."""
    stable = []
    for preset in (presets.get(name, **_any(constants)) for name, constants in ORDER):
        if optimizer not in preset.optimizers:
            continue
        try:
            limit = Limit(preset, preset.family(optimizer), dict(growth), tied=tied)
        except PresetError:  # it has none for a tied readout
            continue
        if not any(
            entry.verdict == "explodes" and row not in DESCRIPTIVE
            for row, entry in entries(limit, name).items()
        ):
            stable.append(Laws(preset, preset.family(optimizer)))
    return tuple(stable)


def _any(constants: Mapping[str, float]) -> dict[str, Any]:
    return dict(constants)
