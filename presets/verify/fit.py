"""What grows from one dump to the next, and how fast each parameter's numbers follow: exponents of size, and what they should be.

A parameter's numbers are compared as what training depends on, whatever place a multiplier has (Tensor Programs IV; `Rule.moved`):
its start multiplier * std, its rate multiplier * lr (squared under SGD), eps / multiplier, and the pull lr * wd.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from mupax.presets.optimizers import Family
from mupax.presets.roles import AXES, PresetError
from mupax.presets.rule import Decay, Power, Rule
from mupax.presets.verify.axes import Model
from mupax.presets.verify.formats.dump import Entry
from mupax.presets.verify.sizes import Parameter

Quantity = Literal["start", "rate", "eps", "pull"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
GROWING = ("embed", "head_dim", "heads", "layers", "mlp", "kv_heads", "memory", "encoder_layers")
"""Axes that may grow, the one that a law is told in first."""
TOLERANCE = 0.1
"""An exponent beyond this is not zero; mistakes are of 1/4 or more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthSeries:
    """Models that grow along one line from a base.

    Attributes:
        models: the base first.
        growth: axis to the power of t by which it grows.
        t: of every model, 1 of the base.
        axis: the axis that is t.
    """

    models: Sequence[Model]
    growth: Mapping[str, float]
    t: Sequence[float]
    axis: str

    @property
    def word(self) -> str:
        """What grows, in a word."""
        named = {"embed": "width", "layers": "depth", "encoder_layers": "depth"}
        return named.get(self.axis, self.axis)

    @property
    def limit(self) -> str:
        """Key of the limit whose words say what becomes of it."""
        if self.axis in ("layers", "encoder_layers"):
            return "depth"
        return "head_dim" if self.growth.get("head_dim") else "heads"

    @property
    def grown(self) -> str:
        """Every axis that grows, and how many times at most."""
        ratios = {axis: self.t[-1] ** x for axis, x in self.growth.items() if axis in GROWING[:5]}
        return ", ".join(f"{axis} x{ratio:.3g}" for axis, ratio in ratios.items())

    def exponent(self, logs: Sequence[float]) -> float:
        """The power of t that fits factors best.

        Args:
            logs: logarithm of the factor of every model over the base's.
        """
        xs = [math.log(t) for t in self.t]
        return sum(x * y for x, y in zip(xs, logs, strict=True)) / sum(x * x for x in xs)


def lines(models: Sequence[Model]) -> list[GrowthSeries]:
    """The models along one line each, from the smallest.

    Raises:
        PresetError: fewer than two sizes, or models of which none is the smallest.
    """
    if len(models) < 2:
        raise PresetError(
            f"{models[0].dump.source} is one model, and growth shows between two; give a second file, at another width or depth"
        )
    base, *larger = sorted(
        models, key=lambda model: math.prod(model.sizes.get(axis, 1) for axis in GROWING)
    )
    directions: dict[tuple[float, ...], list[Model]] = {}
    for model in larger:
        ratios = _ratios(base, model)
        if (least := min(ratios, key=ratios.__getitem__)) and ratios[least] < 0.999:
            raise PresetError(
                f"{model.dump.source} has less {least} than {base.dump.source} ({model.sizes[least]}, {base.sizes[least]}) and more of "
                "another; dump one size that grows at a time"
            )
        fastest = max(ratios.values())
        if fastest < 1.001:
            raise PresetError(
                f"{model.dump.source} and {base.dump.source} have the same sizes; dump the model at another width or depth"
            )
        direction = tuple(
            round(math.log(ratio) / math.log(fastest), 1) for ratio in ratios.values()
        )
        directions.setdefault(direction, []).append(model)
    return [_line(base, along) for along in directions.values()]


def _ratios(base: Model, model: Model) -> dict[str, float]:
    ratios = {axis: model.sizes.get(axis, 1) / base.sizes.get(axis, 1) for axis in GROWING}
    if not any(
        p.spec.in_block for p in base.parameters.values()
    ):  # all widths of a model without blocks or heads are one
        ratios |= dict.fromkeys(("heads", "kv_heads"), ratios["embed"]) | {
            "layers": 1.0,
            "encoder_layers": 1.0,
        }
    return ratios


def _line(base: Model, along: Sequence[Model]) -> GrowthSeries:
    ratios = _ratios(base, along[-1])
    axis = max(GROWING, key=lambda axis: (round(math.log(ratios[axis]), 6), -GROWING.index(axis)))
    if ratios["embed"] > 1.001:
        axis = "embed"
    unit = math.log(ratios[axis])
    growth = {name: math.log(ratio) / unit for name, ratio in ratios.items() if ratio > 1.001}
    models = [base, *along]
    t = [model.sizes.get(axis, 1) / base.sizes.get(axis, 1) for model in models]
    return GrowthSeries(models=models, growth=growth, t=t, axis=axis)


def observed(
    entry: Entry, family: Family, decay: Decay, multiplier: float = 1.0
) -> dict[Quantity, float | None]:
    """What training depends on of a parameter's numbers; None of what is not known.

    Args:
        entry: the numbers.
        family: of the optimizer.
        decay: coupled: the pull is lr * wd.
        multiplier: another on what the parameter writes.
    """
    a = entry.multiplier * multiplier

    def times(*factors: float | None) -> float | None:
        return (
            None
            if any(factor is None for factor in factors)
            else math.prod(f for f in factors if f is not None)
        )

    return {
        "start": times(a, entry.std),
        "rate": times(a**2 if family == "sgd" else a, entry.lr),
        "eps": times(1 / a, entry.eps),
        "pull": entry.wd if decay == "independent" else times(entry.lr, entry.wd),
    }


def expected(rule: Rule, family: Family) -> dict[Quantity, Power]:
    """The same of a row of a table, as power laws; without eps where the optimizer has none.

    Args:
        rule: the row.
        family: of the optimizer.
    """
    a, rate = rule.multiplier, rule.lr(family)
    laws: dict[Quantity, Power] = {
        "start": a * rule.init_std,
        "rate": (a**2 if family == "sgd" else a) * rate,
        "pull": rule.decay,
    }
    on_adam = family == "adam" or (family == "muon" and rule.muon is None)
    return {**laws, "eps": rule.eps / a} if on_adam else laws


def value(power: Power, model: Model, parameter: Parameter | None = None) -> float:
    """A power law at a model's sizes, base 1.

    Args:
        power: the law.
        model: whose sizes.
        parameter: whose own sizes come before the model's.
    """
    return power(
        {**dict.fromkeys(AXES, 1), **model.sizes, **(parameter.sizes if parameter else {})}
    )
