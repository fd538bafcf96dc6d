"""Choice of the preset that dumps are compared with: the closest one.

A dump holds the values that a training program gives each parameter at one size. A preset that is
itself not stable as the sizes grow is not chosen, unless it is asked for by name. Dumps that are
exactly `sp` are compared with `mup`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from mupax import presets
from mupax.mappings import drop_keys
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.verdicts import DESCRIPTIVE, entries
from mupax.presets.preset import Preset
from mupax.presets.roles import EMBEDDINGS, VECTORS, PresetError, Role
from mupax.presets.rule import Decay
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference, Laws, differences
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries

ORDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mup", {}),
    ("depth-mup", {"alpha_l": 0.5}),
    ("completep", {}),
    ("depth-mup", {"alpha_l": 1.0}),
    ("mup-half", {}),
    ("depth-mup", {"alpha_a": 0.5, "alpha_l": 0.5}),
    ("depth-mup", {"alpha_a": 0.5, "alpha_l": 1.0}),
    ("u-mup", {}),
    ("spectral", {}),
    ("maximal-update", {}),
    ("sp-layerwise", {}),
    ("hybrid", {}),
    ("ntk", {}),
)
"""Presets with their constants that dumps are compared with, in order of preference.

Of presets that fit equally well the first one is chosen, so `mup` comes before all others.
"""
_FAMILY = ("mup", "depth-mup", "completep", "mup-half")
"""Presets among which the closest is chosen if the dumps fit none of `ORDER` exactly."""
_WEIGHTS = {LOGITS: 0.9, BRANCH: 4.0, "eps": 0.0, "pull": 0.0}
"""Weight of a difference in `Reference.distance`, by kind of parameter or by quantity.

Weights that are not listed are 1. The factor on branches counts most, because nobody writes one by
accident.
"""
_KINDS_OF_A_RUN = 3
"""Smallest number of kinds of parameters by which a common factor is that of the whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Preset that the user's models are compared with, and the differences from it.

    Differences within their tolerance are included.
    """

    preset: Preset
    differences: tuple[Difference, ...]

    @property
    def distance(self) -> float:
        """Measure of how far the user's models are from the preset, 0 if they follow it.

        It is the weighted number of pairs (kind of parameter, quantity) in which they differ, such
        as ("embeddings", "rate"). Differences in eps and weight decay have the weight 0.
        """
        kinds = set()
        is_common = self.common_rate_excess != 0
        for difference in self.differences:
            if difference.wrong:
                # One rate for the run is one mistake, however many parameters it reaches.
                is_rate = difference.quantity == "rate"
                kind = "all" if is_common and is_rate else _kind(difference)
                kinds.add((kind, difference.quantity))
        total = 0.0
        for kind, quantity in kinds:
            total += _WEIGHTS.get(kind, _WEIGHTS.get(quantity, 1.0))
        return total

    @property
    def common_rate_excess(self) -> float:
        """Power of the size by which all learning rates are off alike, 0 if they are not.

        The rate of the whole run then differs between the sizes, and those of parameters are right
        relative to each other.
        """
        rates = [d for d in self.differences if d.quantity == "rate"]
        kinds = {_kind(d) for d in rates}
        are_wrong = all(d.wrong and d.slope is not None and not d.has_outlier for d in rates)
        # With fewer kinds it may as well be a mistake of one kind.
        if len(kinds) < _KINDS_OF_A_RUN or not are_wrong:
            return 0.0
        excesses = [d.excess for d in rates]
        is_one = max(excesses) - min(excesses) < TOLERANCE
        return sum(excesses) / len(excesses) if is_one else 0.0


def _kind(difference: Difference) -> str:
    """Return the kind of parameter that a difference is about, for `Reference.distance`.

    Kinds are "readout", "vectors" (gains and biases), "embeddings", "queries and keys" and
    "matrices". A difference without a parameter, such as that of the factor on logits, has its own
    name.
    """
    spec = difference.spec
    if spec is None:
        return difference.name
    if spec.role is Role.READOUT:
        return "readout"
    if spec.role in VECTORS:
        return "vectors"
    if spec.role in EMBEDDINGS:
        return "embeddings"
    if spec.role in (Role.QUERY, Role.KEY):
        return "queries and keys"
    return "matrices"


def closest(
    line: GrowthSeries, optimizer: str, decay: Decay, named: Preset | None = None
) -> Reference:
    """Choose the preset that fits the user's models best, and compare the models with it.

    Only presets in `ORDER` that are stable as these sizes grow are considered. The first that fits
    exactly is chosen, where eps and weight decay do not count. If none fits, the closest of muP's
    family (`_FAMILY`) is chosen, or of all if none of the family is stable. For models in standard
    parameterization it is the first of the family, whatever the distances.

    Args:
        line: Models of the user's code, the smallest first.
        optimizer: A name of `OPTIMIZERS`.
        decay: "coupled" if weight decay is multiplied by the learning rate.
        named: Preset that a user asks for, which is then chosen. `None` chooses among `ORDER`.

    Raises:
        PresetError: The named preset has no rule for the optimizer or for a tied readout, or no
            preset of `ORDER` has.
    """
    if named is not None:
        laws = Laws(named, named.family(optimizer))
        return _reference(laws, line, optimizer, decay)

    references = []
    for laws in _stable_laws(line, optimizer):
        reference = _reference(laws, line, optimizer, decay)
        if not _may_have_its_attention(reference, line):
            continue
        references.append(reference)
        # `ORDER` is by preference, so that the first preset that fits exactly ends the search.
        if not any(difference.wrong for difference in reference.differences):
            return reference
    if not references:
        raise PresetError(
            f"no preset has a rule for {optimizer} that is stable as {line.word} grows; "
            "name one with --preset"
        )

    best = min(references, key=lambda reference: reference.distance)
    # The distance counts eps and weight decay with weight 0, so at distance 0 only these two may
    # differ.
    if best.distance == 0:
        return best
    family = [reference for reference in references if reference.preset.name in _FAMILY]
    candidates = family or references
    # The distances of standard parameterization do not show which preset was meant.
    if is_standard(line, optimizer, decay):
        return candidates[0]
    return min(candidates, key=lambda reference: reference.distance)


def _reference(laws: Laws, line: GrowthSeries, optimizer: str, decay: Decay) -> Reference:
    all_differences = differences(laws, line, optimizer, decay)
    return Reference(preset=laws.preset, differences=all_differences)


def _may_have_its_attention(reference: Reference, line: GrowthSeries) -> bool:
    """Return whether learning rates of queries and keys allow that models follow this preset.

    Presets whose attention logits fall more slowly than 1/head_dim train queries and keys more
    slowly in return. For such a preset these rates must be known and right. Otherwise models would
    fit by chance.

    Args:
        reference: Preset to try, with the differences of the user's models from it.
    """
    growth = line.growth.get("head_dim", 0.0)
    if not growth or reference.preset.logits.growth({"head_dim": 1.0}) < -1 + TOLERANCE:
        return True

    rates = [d for d in reference.differences if d.quantity == "rate"]
    if not rates:
        return True
    attention_rates = [d for d in rates if d.fused or _is_query_or_key(d)]
    return bool(attention_rates) and not any(d.wrong for d in attention_rates)


def _is_query_or_key(difference: Difference) -> bool:
    return difference.spec is not None and difference.spec.role in (Role.QUERY, Role.KEY)


def is_standard(line: GrowthSeries, optimizer: str, decay: Decay) -> bool:
    """Return whether all the user's models are in standard parameterization (preset `sp`).

    Only growth of the width can show this.

    Args:
        line: Models of the user's code. The result is false unless `line.axis` is the width.
        optimizer: A name of `OPTIMIZERS`.
        decay: "coupled" if weight decay is multiplied by the learning rate.
    """
    if line.axis != "embed":
        return False
    standard = presets.get("sp")
    laws = Laws(standard, standard.family(optimizer))
    all_differences = differences(laws, line, optimizer, decay)
    return not any(d.wrong and not _is_standard_choice(d) for d in all_differences)


def _is_standard_choice(d: Difference) -> bool:
    """Return whether code with this difference from `sp` still is in standard parameterization.

    Such differences are in eps and weight decay, one std for all widths, and a tied readout without
    a multiplier.
    """
    if d.quantity in ("eps", "pull"):
        return True
    does_not_grow = d.slope is not None and abs(d.slope) <= d.tolerance
    if d.name == TIED:
        return d.quantity == "start" or does_not_grow
    return d.quantity == "start" and does_not_grow


def _stable_laws(line: GrowthSeries, optimizer: str) -> tuple[Laws, ...]:
    """Return the power laws of each preset in `ORDER` that is stable as these sizes grow, in order.

    A preset is left out if an observable explodes, or if it has no rule for the optimizer or for a
    tied readout.
    """
    # Rounded and sorted, so that similar lines have one key in the cache.
    growth = []
    for axis, power in sorted(line.growth_in_step.items()):
        growth.append((axis, round(power, 3)))
    tied = line.models[0].dump.readout is not None
    return _cached_stable_laws(optimizer, tuple(growth), line.limit, tied)


@functools.lru_cache(maxsize=64)
def _cached_stable_laws(
    optimizer: str, growth: tuple[tuple[str, float], ...], limit_name: str, tied: bool
) -> tuple[Laws, ...]:
    """Return the power laws of each preset in `ORDER` that is stable in one limit, in order.

    A preset is left out if an observable explodes, or if it has no rule for the optimizer or for a
    tied readout.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        growth: Pairs of an axis and the power with which it grows.
        limit_name: Key of `analysis.model.LIMITS` that is closest to the growth.
        tied: Whether the readout is the embedding's array.
    """
    stable = []
    for name, constants in ORDER:
        preset = presets.get(name, **constants)
        if optimizer not in preset.optimizers:
            continue
        family = preset.family(optimizer)
        try:
            limit = Limit(preset, family, dict(growth), tied=tied)
        except PresetError:
            # The preset has no rule for a tied readout.
            continue
        verdicts = entries(limit, limit_name)
        judging = drop_keys(verdicts, DESCRIPTIVE)
        if not any(entry.verdict == "explodes" for entry in judging.values()):
            stable.append(Laws(preset, family))
    return tuple(stable)
