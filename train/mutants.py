"""Wrong rules, made from right ones: what the coordinate check must catch.

A mutant changes one column of one parameter group by a power of the grown size. Theory is asked about the right rule, the
mutant is what trains, so a check that passes it has missed an error a person could make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from presets import ParamSpec, Power, Preset, Role, Rule
from presets.scaling import axis

COLUMNS = ("init_std", "multiplier", "lr", "eps")
EXPONENTS = (0.5, -0.5, 1.0, -1.0)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`column` of `group` is m^exponent too large, m being the ratio of `size`.

    Attributes:
        group: `ParamSpec.group` of the rows to change.
        column: init_std, multiplier, lr or eps.
        exponent: power of the error.
        size: logical axis that carries it.
    """

    group: str
    column: str
    exponent: float
    size: str = "embed"

    def __str__(self) -> str:
        return f"{self.group} {self.column} x m^{self.exponent:g}"

    def of(self, preset: Preset) -> Preset:
        """The preset with this error in it."""
        factor = axis(self.size) ** self.exponent

        def rule(spec: ParamSpec) -> Rule:
            row = preset.rule(spec)
            return _changed(row, self.column, factor) if spec.group == self.group else row

        return dataclasses.replace(preset, rule=rule)

    def inert(self, spec: ParamSpec) -> str | None:
        """Why this error changes no training at all, or None."""
        if self.column == "init_std" and spec.role is Role.BIAS:
            return "a bias starts at zero whatever its std"
        return None


def _changed(row: Rule, column: str, factor: Power) -> Rule:
    match column:
        case "init_std":
            return dataclasses.replace(row, init_std=row.init_std * factor)
        case "multiplier":
            return dataclasses.replace(row, multiplier=row.multiplier * factor)
        case "lr":
            return dataclasses.replace(row, sgd=row.sgd * factor, adam=row.adam * factor)
        case "eps":
            return dataclasses.replace(row, eps=row.eps * factor)
    raise ValueError(f"no column is named {column!r}; write {', '.join(COLUMNS)}")


def all_of(specs: Iterable[ParamSpec], size: str = "embed", exponents: Iterable[float] = EXPONENTS) -> Iterator[Mutant]:
    """Every mutant of a model's parameter groups that can change training."""
    groups = {spec.group: spec for spec in specs}
    for group, spec in groups.items():
        for column in COLUMNS:
            for exponent in exponents:
                mutant = Mutant(group, column, exponent, size)
                if mutant.inert(spec) is None:
                    yield mutant
