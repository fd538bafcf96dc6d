"""Differences between dumps and a preset, as exponents with which each value grows.

A dump holds the values that a training program gives each parameter of one model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import BIASES, VECTORS, ParamSpec, Role
from mupax.presets.rule import Decay, Power
from mupax.presets.verify.axes import Model
from mupax.presets.verify.fit import TOLERANCE, GrowthSeries, Quantity, expected, observed, value
from mupax.presets.verify.layers import OUTLIER
from mupax.presets.verify.names import FUSED
from mupax.presets.verify.sizes import Parameter

# Names in reports of values that belong to no single parameter.
LOGITS = "attention logits"
BRANCH = "residual branches"
TIED = "tied readout"
TIED_READOUT = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
_EMBEDDING = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Growth of one value of one parameter in the user's models, compared with that in a preset.

    t is the size of the axis `GrowthSeries.axis`, divided by its size in the base model.

    Attributes:
        name: Name of the parameter, or one of `LOGITS`, `BRANCH` and `TIED`.
        quantity: Value that is compared: "start" (initial size), "rate" (learning rate), "eps" or
            "pull" (lr * weight decay).
        spec: Declaration of the parameter. `None` for `LOGITS` and `BRANCH`.
        slope: Power of t with which the value grows in the user's models. `None` if it is 0 at some
            sizes.
        target: Power of t with which the value grows in the preset.
        tolerance: Largest difference of slope and target that counts as right. It includes the
            noise of a standard deviation that was measured.
        fused: Whether the parameter has queries, keys and values in one array.
        outlier: Index of the model whose value is farthest from the power law that fits all models.
        outlier_factor: Value of that model, divided by that law. 1 if the distance is within the
            noise.
    """

    name: str
    quantity: Quantity
    spec: ParamSpec | None
    slope: float | None
    target: float
    tolerance: float = TOLERANCE
    fused: bool = False
    outlier: int = 0
    outlier_factor: float = 1.0

    @property
    def role(self) -> str:
        """Group of the parameter, such as "block.query". For `LOGITS` and `BRANCH`, the name."""
        if self.spec is None:
            return self.name
        if self.fused:
            return self.spec.group.replace("value", FUSED).replace("query", FUSED)
        return self.spec.group

    @property
    def excess(self) -> float:
        """Power of t by which the value grows faster than it should. 0 if `slope` is `None`."""
        return 0.0 if self.slope is None else self.slope - self.target

    @property
    def wrong(self) -> bool:
        """True if the value grows in another way than the preset says.

        Then the excess is larger than the tolerance, one size is an outlier, or `slope` is `None`.
        """
        return self.slope is None or abs(self.excess) > self.tolerance or self.has_outlier

    @property
    def has_outlier(self) -> bool:
        """True if one size's value is off the fitted power law by more than a factor `OUTLIER`."""
        # By logarithms, so that half of the law counts as much as twice the law.
        return abs(math.log(self.outlier_factor)) > math.log(OUTLIER)


class Laws:
    """Power laws of a preset for each declared parameter, computed once and cached.

    Args:
        family: Optimizer family, which chooses the preset's columns.
    """

    def __init__(self, preset: Preset, family: Family) -> None:
        self.preset = preset
        self.family: Family = family
        self._laws: dict[ParamSpec, dict[Quantity, Power]] = {}

    def by_quantity(self, spec: ParamSpec) -> dict[Quantity, Power]:
        """Return a parameter's power law for each quantity, such as "start" and "rate"."""
        if spec not in self._laws:
            self._laws[spec] = expected(self.preset.row(spec), self.family)
        return self._laws[spec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measurement:
    """Value of one parameter at every size, before its growth is fitted.

    Attributes:
        name: Name of the parameter, or one of `LOGITS`, `BRANCH` and `TIED`.
        quantity: Quantity that the values are of, such as "rate".
        spec: Declaration of the parameter. `None` for `LOGITS` and `BRANCH`.
        values: Value in each model. `None` if it is unknown.
        parameters: Parameter in each model. `None` for `LOGITS` and `BRANCH`.
    """

    name: str
    quantity: Quantity
    spec: ParamSpec | None
    values: Sequence[float | None]
    parameters: Sequence[Parameter] | None = None


def differences(
    laws: Laws, line: GrowthSeries, optimizer: str, decay: Decay
) -> tuple[Difference, ...]:
    """Compare each known value of the user's models with a preset, also values that are right.

    Compared are the values of all parameters, the factors on attention logits and on residual
    branches, and initial size and learning rate of a tied readout.

    Args:
        optimizer: A name of `OPTIMIZERS`.
        decay: "coupled" if weight decay is multiplied by the learning rate.
    """
    preset = laws.preset
    rows: list[Difference | None] = []
    for name in line.models[0].parameters:
        rows += _parameter_differences(name, laws, line, optimizer, decay)

    attention = [model.dump.attention for model in line.models]
    measured = _Measurement(name=LOGITS, quantity="start", spec=None, values=attention)
    rows.append(_difference(measured, preset.logits, line))

    branches = [model.dump.branch for model in line.models]
    measured = _Measurement(name=BRANCH, quantity="start", spec=None, values=branches)
    rows.append(_difference(measured, preset.branch, line))

    if line.models[0].dump.readout is not None:
        rows += _tied_readout_differences(preset, line, optimizer, decay)
    return tuple(difference for difference in rows if difference is not None)


def _parameter_differences(
    name: str, laws: Laws, line: GrowthSeries, optimizer: str, decay: Decay
) -> list[Difference | None]:
    """Return the difference of each value of one parameter for which presets have a rule.

    `None` stands for a value that is unknown or always 0.
    """
    parameters = [model.parameters[name] for model in line.models]
    spec = parameters[0].spec
    observations = [observed(parameter.entry, laws.family, decay) for parameter in parameters]

    rows: list[Difference | None] = []
    for quantity, law in laws.by_quantity(spec).items():
        if not has_rule(spec, quantity, optimizer):
            continue
        measured = _Measurement(
            name=name,
            quantity=quantity,
            spec=spec,
            values=[observation[quantity] for observation in observations],
            parameters=parameters,
        )
        if parameters[0].fused:
            rows.append(_fused_difference(measured, spec, laws, line))
        else:
            rows.append(_difference(measured, law, line))
    return rows


def _fused_difference(
    measured: _Measurement, spec: ParamSpec, laws: Laws, line: GrowthSeries
) -> Difference | None:
    """Compare an array that fuses queries, keys and values, or its bias, with a preset's rules.

    The array is compared with the rule of values and with that of queries. Return the difference
    with the larger excess, or `None` if the value is unknown or always 0.
    """
    as_values = _difference(measured, laws.by_quantity(spec)[measured.quantity], line)

    if spec.role is Role.BIAS:
        query_spec = dataclasses.replace(spec, of=Role.QUERY)
    else:
        query_spec = dataclasses.replace(spec, role=Role.QUERY)
    law = laws.by_quantity(query_spec)[measured.quantity]
    as_queries = _difference(dataclasses.replace(measured, spec=query_spec), law, line)

    if as_values is None or as_queries is None:
        return None
    worse = as_queries if abs(as_queries.excess) > abs(as_values.excess) else as_values
    return dataclasses.replace(worse, fused=True)


def has_rule(spec: ParamSpec, quantity: Quantity, optimizer: str) -> bool:
    """Return whether presets have a rule for a quantity of a parameter.

    They have none for the initial size and the weight decay of gains and biases, for any weight
    decay under "adam", and for the bias of keys.
    """
    is_vector = spec.role in VECTORS
    # Vectors do not decay. "adam" adds weight decay to the gradient, which the update normalizes,
    # so that lr * wd is not the share of w that a step subtracts.
    if quantity == "pull" and (is_vector or optimizer == "adam"):
        return False
    # A gain starts at 1 and a bias at 0 at every size.
    if quantity == "start" and is_vector:
        return False
    # The bias of keys shifts all logits of a query alike, and softmax removes that.
    return not (spec.role in BIASES and spec.of is Role.KEY)


def _tied_readout_differences(
    preset: Preset, line: GrowthSeries, optimizer: str, decay: Decay
) -> list[Difference | None]:
    """Compare how a tied readout grows in the user's models with how it grows in the preset.

    A tied readout uses the embedding's array. Return two differences, of its "start" (initial size)
    and its "rate" (learning rate), also if they are right. `None` stands for a value that is
    unknown at some size, or 0 at every size.
    """
    tables = [_table(model) for model in line.models]
    family = preset.family(optimizer)
    row = preset.row(_EMBEDDING)
    multiplier = row.multiplier * preset.row(TIED_READOUT).multiplier
    laws = expected(dataclasses.replace(row, multiplier=multiplier), family)

    rows: list[Difference | None] = []
    for quantity in ("start", "rate"):
        values = []
        for model, table in zip(line.models, tables, strict=True):
            # The embedding's own multiplier does not act on the logits.
            entry = dataclasses.replace(table.entry, multiplier=1.0)
            observation = observed(entry, family, decay, model.dump.readout or 1.0)
            values.append(observation[quantity])
        measured = _Measurement(
            name=TIED, quantity=quantity, spec=TIED_READOUT, values=values, parameters=tables
        )
        rows.append(_difference(measured, laws[quantity], line))
    return rows


def _table(model: Model) -> Parameter:
    """Return the model's first token embedding that is a matrix.

    Class tokens have the same role but are not 2-D.
    """
    tables = []
    for parameter in model.parameters.values():
        # A class token has the same role. It has the shape [width] or [1, 1, width].
        if parameter.spec.role is Role.TOKEN_EMBEDDING and len(parameter.entry.shape) == 2:
            tables.append(parameter)
    return tables[0]


def _difference(measured: _Measurement, law: Power, line: GrowthSeries) -> Difference | None:
    """Fit the growth of a value over all sizes, and return its difference from a preset's law.

    Return `None` if a value is unknown, or if all values are 0. If only some are 0, `slope` of the
    difference is `None`.
    """
    values = [number for number in measured.values if number is not None]
    if len(values) < len(measured.values) or not any(values):
        return None

    log_laws = _log_laws(measured.parameters, law, line)
    target = line.exponent(log_laws)
    if not all(values):
        return Difference(
            name=measured.name,
            quantity=measured.quantity,
            spec=measured.spec,
            slope=None,
            target=target,
        )

    # Fit the ratio of the value to the law of the preset. If sizes are rounded, the law itself is
    # no exact power of t, and dumps that follow it are right.
    log_ratios = []
    for number, log_law in zip(values, log_laws, strict=True):
        log_ratios.append(math.log(number / values[0]) - log_law)
    excess = line.exponent(log_ratios)
    residuals = []
    for log_ratio, t in zip(log_ratios, line.t, strict=True):
        residuals.append(log_ratio - excess * math.log(t))
    outlier = max(range(len(residuals)), key=lambda index: abs(residuals[index]))
    outlier_factor = math.exp(residuals[outlier])

    noise = _noise(measured)
    if abs(residuals[outlier]) < noise:
        outlier = 0
        outlier_factor = 1.0
    return Difference(
        name=measured.name,
        quantity=measured.quantity,
        spec=measured.spec,
        slope=target + excess,
        target=target,
        # The less a size grows, the more the same error of the logarithm changes the exponent.
        tolerance=TOLERANCE + noise / math.log(line.t[-1]),
        outlier=outlier,
        outlier_factor=outlier_factor,
    )


def _log_laws(
    parameters: Sequence[Parameter] | None, law: Power, line: GrowthSeries
) -> list[float]:
    """Return the natural logarithm of a law at each model's sizes, minus that at the base model's.

    Args:
        parameters: Parameter in each model, whose own sizes replace those of the model. `None` uses
            the sizes of the model alone.
    """
    laws = []
    for index, model in enumerate(line.models):
        parameter = None if parameters is None else parameters[index]
        laws.append(value(law, model, parameter))
    return [math.log(number / laws[0]) for number in laws]


def _noise(measured: _Measurement) -> float:
    """Return how far a measured standard deviation's logarithm may be off by chance; 0 for others.

    It is four standard errors of the logarithm of the ratio between the last and the first size.
    """
    if measured.parameters is None or measured.quantity != "start":
        return 0.0
    # The standard deviation of n numbers is known to 1/sqrt(2n) of itself. Four of these are
    # allowed at both ends of the line.
    first = (2 * measured.parameters[0].count) ** -0.5
    last = (2 * measured.parameters[-1].count) ** -0.5
    return 4 * math.hypot(first, last)
