"""Wrong rules, made from right ones, that the coordinate check must catch.

A mutant changes one column of one parameter group by a power of the grown size. The mutant is
trained and compared with theory of the right rule. A check that passes it has missed an error that
a person could make. Used by `mutation_suite` and `campaign`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mupax.presets import ParamSpec, Power, Preset, Rule
from mupax.presets.rule import axis

COLUMNS = ("init_std", "multiplier", "lr", "eps")
"""Columns of a rule that a mutant changes."""
EXPONENTS = (0.5, -0.5, 0.25, -0.25, 1.0, -1.0)
"""Powers of m by which a mutant's column is wrong."""


@dataclass(frozen=True)
class Mutant:
    """Error in a rule: `column` of `group` is m^`exponent` too large.

    Attributes:
        group: `ParamSpec.group` of the rows to change.
        column: One of `COLUMNS`.
        size: Logical axis whose ratio to its base is m.
    """

    group: str
    column: str
    exponent: float
    size: str = "embed"

    def __str__(self) -> str:
        return f"{self.group} {self.column} x m^{self.exponent:g}"

    def of(self, preset: Preset) -> Preset:
        """Return the preset with this error in its rules."""
        factor = axis(self.size) ** self.exponent

        def rule(spec: ParamSpec) -> Rule:
            row = preset.rule(spec)
            if spec.group == self.group:
                return _changed(row, self.column, factor)
            return row

        return replace(preset, rule=rule)


def _changed(row: Rule, column: str, factor: Power) -> Rule:
    match column:
        case "init_std":
            return replace(row, init_std=row.init_std * factor)
        case "multiplier":
            return replace(row, multiplier=row.multiplier * factor)
        case "lr":
            return replace(row, sgd=row.sgd * factor, adam=row.adam * factor)
        case "eps":
            return replace(row, eps=row.eps * factor)
    raise ValueError(f"no column is named {column!r}; write {', '.join(COLUMNS)}")


def all_of(
    specs: Iterable[ParamSpec],
    size: str = "embed",
    exponents: Iterable[float] = EXPONENTS,
    columns: Iterable[str] = COLUMNS,
) -> Iterator[Mutant]:
    """Yield every mutant of a model: each exponent with each parameter group and column.

    In depth (`size` "layers") only groups inside a block are changed, because only these have depth
    in their rules. A tied readout has only its multiplier changed.

    Args:
        specs: Parameters of the model; a tied readout is one of them.
        size: Logical axis whose ratio to its base is m, "embed" by default.
    """
    tied = {}
    for spec in specs:
        if size != "layers" or spec.in_block:
            tied[spec.group] = spec.tied
    for exponent in exponents:
        for group in tied:
            for column in columns:
                if column == "multiplier" or not tied[group]:
                    yield Mutant(group, column, exponent, size)


def eps_dominates(preset: Preset) -> Preset:
    """Return the preset with each learning rate of SGD replaced by Adam's rate divided by eps.

    With eps far above every gradient, Adam's update is gradient / eps: SGD at the learning rate lr
    / eps.
    """

    def rule(spec: ParamSpec) -> Rule:
        row = preset.rule(spec)
        return replace(row, sgd=row.adam / row.eps)

    return replace(preset, rule=rule)
