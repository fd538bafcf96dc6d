"""A dump against one preset: every number of every parameter, as powers of what grows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import BIASES, VECTORS, ParamSpec, Role
from mupax.presets.rule import Decay, Power
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries, Quantity, expected, observed, value
from mupax.presets.verify.formats.dump import Entry
from mupax.presets.verify.names import FUSED
from mupax.presets.verify.sizes import Parameter

BENT = 1.3
"""How many times one size may be from the law that the others follow."""
LOGITS, BRANCH, TIED = "attention logits", "residual branches", "tied readout"
"""What is no parameter of its own, by the names of the report."""
TIED_READOUT = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
_EMBEDDING = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One number of one parameter against a preset's.

    Attributes:
        name: of the parameter, or one of `LOGITS`, `BRANCH`, `TIED`.
        quantity: which number.
        spec: of the parameter; None for what is none.
        slope: power of t that the dumps have; None where one of them is 0.
        target: power of t that the preset has.
        tolerance: of an exponent, with the noise of a standard deviation that was measured.
        fused: it is of queries, keys and values in one.
        off: how many times one size is from the law that the others follow, and which, at most.
    """

    name: str
    quantity: Quantity
    spec: ParamSpec | None
    slope: float | None
    target: float
    tolerance: float = TOLERANCE
    fused: bool = False
    off: tuple[float, int] = (1.0, 0)

    @property
    def role(self) -> str:
        """What the parameter is; of what is none, its name."""
        if self.spec is None:
            return self.name
        return (
            self.spec.group.replace("value", FUSED).replace("query", FUSED)
            if self.fused
            else self.spec.group
        )

    @property
    def excess(self) -> float:
        """How much faster it grows than it should."""
        return 0.0 if self.slope is None else self.slope - self.target

    @property
    def wrong(self) -> bool:
        return self.slope is None or abs(self.excess) > self.tolerance or self.bent

    @property
    def bent(self) -> bool:
        """Whether one size is off the law that the others follow."""
        return abs(math.log(self.off[0])) > math.log(BENT)


class Laws:
    """What a preset gives each declaration, worked out once.

    Args:
        preset: in any form.
        family: of the optimizer.
    """

    def __init__(self, preset: Preset, family: Family) -> None:
        self.preset = preset
        self.family: Family = family
        self._of: dict[ParamSpec, dict[Quantity, Power]] = {}

    def of(self, spec: ParamSpec) -> dict[Quantity, Power]:
        """Quantity to its power law."""
        if spec not in self._of:
            self._of[spec] = expected(self.preset.row(spec), self.family)
        return self._of[spec]


def differences(
    laws: Laws, line: GrowthSeries, optimizer: str, decay: Decay
) -> tuple[Difference, ...]:
    """All numbers of the dumps against a preset's.

    Args:
        laws: of the preset.
        line: the dumps.
        optimizer: whose rates.
        decay: how weight decay enters.
    """
    preset, family = laws.preset, laws.family
    base = line.models[0]
    rows: list[Difference] = []
    for name, parameter in base.parameters.items():
        each = [model.parameters[name] for model in line.models]
        observations = [observed(p.entry, family, decay) for p in each]
        for quantity, law in laws.of(parameter.spec).items():
            if not _has_rule(parameter, quantity, optimizer):
                continue
            values = [x[quantity] for x in observations]
            row = _difference(name, quantity, parameter.spec, values, law, line, each)
            if parameter.fused:  # its rows of queries and keys have a law of their own, and the worse of the two counts
                as_query = dataclasses.replace(
                    parameter.spec, **_OF_QUERIES[parameter.spec.role is Role.BIAS]
                )
                queries = _difference(
                    name, quantity, as_query, values, laws.of(as_query)[quantity], line, each
                )
                row = max(
                    row, queries, key=lambda differences: [abs(d.excess) for d in differences]
                )
                row = [dataclasses.replace(difference, fused=True) for difference in row]
            rows += row
    for name, law, values in (
        (LOGITS, preset.logits, [model.dump.attention for model in line.models]),
        (BRANCH, preset.branch, [model.dump.branch for model in line.models]),
    ):
        rows += _difference(name, "start", None, values, law, line)
    if base.dump.readout is not None:
        rows += _tied(preset, line, optimizer, decay)
    return tuple(rows)


_OF_QUERIES: dict[bool, dict[str, Role]] = {False: {"role": Role.QUERY}, True: {"of": Role.QUERY}}
"""What a fused matrix, or (True) its bias, is as that of queries."""


def _has_rule(parameter: Parameter, quantity: Quantity, optimizer: str) -> bool:
    """Whether a preset says anything of it: a gain starts at 1 and a bias at 0, neither decays; L2 in Adam's gradient is no pull."""
    vector = parameter.spec.role in VECTORS
    if quantity == "pull" and (vector or optimizer == "adam"):
        return False
    if quantity == "start" and vector:
        return False
    return not (parameter.spec.role in BIASES and parameter.spec.of is Role.KEY)


def _tied(preset: Preset, line: GrowthSeries, optimizer: str, decay: Decay) -> Iterable[Difference]:
    """The table as a readout: what the embedding's numbers are where its output is multiplied by the readout's own factor."""
    tables = [
        next(
            p
            for p in m.parameters.values()
            if p.spec.role is Role.TOKEN_EMBEDDING and len(p.entry.shape) == 2
        )
        for m in line.models
    ]
    family, row = preset.family(optimizer), preset.row(_EMBEDDING)
    laws = expected(
        dataclasses.replace(row, multiplier=row.multiplier * preset.row(TIED_READOUT).multiplier),
        family,
    )
    for quantity in ("start", "rate"):
        values = []
        for model, table in zip(line.models, tables, strict=True):
            entry: Entry = dataclasses.replace(table.entry, multiplier=1.0)
            values.append(observed(entry, family, decay, model.dump.readout or 1.0)[quantity])
        yield from _difference(TIED, quantity, TIED_READOUT, values, laws[quantity], line, tables)


def _difference(
    name: str,
    quantity: Quantity,
    spec: ParamSpec | None,
    values: list[float | None],
    law: Power,
    line: GrowthSeries,
    each: list[Parameter] | None = None,
) -> list[Difference]:
    """One difference; none where a number is not known, or is 0 at every size."""
    numbers = [x for x in values if x is not None]
    if len(numbers) < len(values) or not any(numbers):
        return []
    laws = [value(law, model, each[i] if each else None) for i, model in enumerate(line.models)]
    log_laws = [math.log(x / laws[0]) for x in laws]
    target = line.exponent(log_laws)
    if not all(numbers):
        return [Difference(name=name, quantity=quantity, spec=spec, slope=None, target=target)]
    logs = [math.log(x / numbers[0]) for x in numbers]
    slope = line.exponent([y - w for y, w in zip(logs, log_laws, strict=True)])
    rest = [y - w - slope * math.log(t) for y, w, t in zip(logs, log_laws, line.t, strict=True)]
    worst = max(range(len(rest)), key=lambda i: abs(rest[i]))
    # The standard deviation of n numbers is known to 1/sqrt(2n) of itself, of which four are allowed at both ends.
    noise = (
        4 * math.hypot(*((2 * p.count) ** -0.5 for p in (each[0], each[-1])))
        if each and quantity == "start"
        else 0.0
    )
    tolerance = TOLERANCE + noise / math.log(line.t[-1])
    off = (1.0, 0) if abs(rest[worst]) < noise else (math.exp(rest[worst]), worst)
    return [
        Difference(
            name=name,
            quantity=quantity,
            spec=spec,
            slope=target + slope,
            target=target,
            tolerance=tolerance,
            off=off,
        )
    ]
