"""Wrong rules, made from right ones: what the coordinate check must catch.

A mutant changes one column of one parameter group by a power of the grown size. Theory is asked about the right rule, the
mutant is what trains, so a check that passes it has missed an error a person could make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mupax.presets import ParamSpec, Power, Preset, Rule
from mupax.presets.rule import axis

COLUMNS = ("init_std", "multiplier", "lr", "eps")
EXPONENTS = (0.5, -0.5, 0.25, -0.25, 1.0, -1.0)


@dataclass(frozen=True)
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
    """Every mutant of the parameter groups that have the size in their rules: in depth, those inside a block.

    Args:
        specs: of the model's parameters; a tied readout among them has a multiplier and nothing else to get wrong.
        size: logical axis that carries the error.
        exponents: powers of the error.
        columns: which columns.
    """
    tied = {spec.group: spec.tied for spec in specs if size != "layers" or spec.in_block}
    for exponent in exponents:
        for group in tied:
            for column in columns:
                if column == "multiplier" or not tied[group]:
                    yield Mutant(group, column, exponent, size)


def eps_dominates(preset: Preset) -> Preset:
    """What Adam does where eps is far above every gradient: an update is gradient / eps, SGD at the rate lr / eps."""

    def rule(spec: ParamSpec) -> Rule:
        row = preset.rule(spec)
        return replace(row, sgd=row.adam / row.eps)

    return replace(preset, rule=rule)
