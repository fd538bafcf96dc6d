"""Joint rules: how an optimizer's numbers change with batch B and tokens T, as sources have it, beside width and depth.

Everything is a ratio to the base: B is batch over base batch, T is tokens seen over the base's, and steps are T/B. Sources
contradict each other on T, so all rules stand side by side; `--joint` applies those marked so, and only when asked.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from mupax.presets.optimizers import Family
from mupax.presets.roles import PresetError
from mupax.presets.rule import ONE, Power, axis

Applied = Literal["none", "sde", "complete-d"]
"""The rules that `--joint` takes, as a type."""
COLUMNS = ("lr", "weight_decay", "eps", "one_minus_b1", "one_minus_b2", "durations")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointRule:
    """What one source says. A column is None where it says nothing.

    Attributes:
        name: for `--joint` and the table.
        lr: peak learning rate.
        weight_decay: coupled, w -= lr*wd*w; the independent one has this times `lr`, so that the pull is the same.
        eps: Adam's.
        one_minus_b1: 1 - beta1.
        one_minus_b2: 1 - beta2.
        durations: steps of warm-up and of a final decay.
        families: optimizers that it speaks for.
        applied: whether `--joint` takes it.
        source: who, where, year.
        tested: on what.
        limits: axis to the smallest and largest ratio of it that was tested, as far as known.
        status: verified: read in its author's own text; reported: in an account of it; derived: worked out here.
        remark: what to know beside the formula.
        concessions: what the source lets go as B or T grows, an observable of `mupax.presets.analysis.joint_limits` to its power.
    """

    name: str
    lr: Power | None = None
    weight_decay: Power | None = None
    eps: Power | None = None
    one_minus_b1: Power | None = None
    one_minus_b2: Power | None = None
    durations: Power | None = None
    families: tuple[Family, ...] = ("adam",)
    applied: bool = False
    source: str
    tested: str
    limits: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    status: Literal["verified", "reported", "derived"]
    remark: str = ""
    concessions: Mapping[str, Power] = dataclasses.field(default_factory=dict)

    def factor(self, column: str, ratios: Mapping[str, float]) -> float:
        """What a column is multiplied by; 1 where the source says nothing.

        Args:
            column: one of `COLUMNS`.
            ratios: of `batch` and `tokens` to the base's.
        """
        return (getattr(self, column) or ONE)(ratios)

    def cautions(self, ratios: Mapping[str, float]) -> list[str]:
        """What to know before the rule is trusted so far from the base, one sentence each."""
        cautions = []
        for name, ratio in ratios.items():
            least, most = self.limits.get(name, (1.0, 1.0))
            if not least <= ratio <= most:
                if name in self.limits:
                    evidence = f"it was tested from {least:.3g} to {most:.3g} times"
                elif self.speaks_of(name):
                    evidence = "the range that it was tested in is not known"
                else:
                    evidence = f"it says nothing about {name}"
                cautions.append(
                    f"the joint rule {self.name}: {ratio:.3g} times the base's {name}, and {evidence}"
                )
        return cautions

    def speaks_of(self, name: str) -> bool:
        """Whether a number but that of warm-up depends on `batch` or `tokens`."""
        powers = (getattr(self, column) or ONE for column in COLUMNS if column != "durations")
        return any(name in dict(power.exponents) for power in powers)

    def described(self) -> str:
        """What the rule rests on, in a line."""
        use = f"{self.name} (`--joint {self.name}`)" if self.applied else self.name
        remark = f" {self.remark[0].upper()}{self.remark[1:]}." if self.remark else ""
        return f"{use}: {self.source}: {self.status}. For {', '.join(self.families)}; {self.tested}.{remark}"

    def to_json(self, ratios: Mapping[str, float]) -> dict[str, Any]:
        """Plain values: formulas as text, and their factors at some ratios; null where the source says nothing."""
        powers = {column: getattr(self, column) for column in COLUMNS}
        plain = {name: value for name, value in vars(self).items() if name not in powers}
        formulas = {column: power and formula(power) for column, power in powers.items()}
        plain["concessions"] = {name: formula(power) for name, power in self.concessions.items()}
        return {
            **plain,
            **formulas,
            "factors": {column: power and power(ratios) for column, power in powers.items()},
        }


_B, _T = axis("batch"), axis("tokens")
_FRACTION = _T / _B
"""Warm-up and decay as fractions of the run: in steps, batch studies would measure the warm-up."""

RULES: dict[str, JointRule] = {
    rule.name: rule
    for rule in (
        JointRule(
            name="none", applied=True, families=get_args(Family), status="verified",
            source="one set of numbers for every batch", tested="the control: its best rate moves",
        ),
        JointRule(
            name="sde", applied=True, lr=_B**0.5, weight_decay=_B**0.5, eps=_B**-0.5, one_minus_b1=_B, one_minus_b2=_B,
            durations=_FRACTION, status="verified", limits={"batch": (1 / 16, 16)},
            source="Malladi et al. 2022 (2205.10287; the formula in its first author's text), decay of Complete(d)P",
            tested="its vision and language runs; at ratio 16 in a public pull request of Fast-LLM (539), 0.5 B parameters",
            remark="at fixed tokens, while the batch is well below the noise scale; says nothing about tokens",
        ),
        JointRule(
            name="complete-d", applied=True, lr=(_B / _T) ** 0.5, weight_decay=(_B / _T) ** 0.5, eps=(_T / _B) ** 0.5,
            one_minus_b1=_B / _T, one_minus_b2=_B / _T, durations=_FRACTION, status="reported",
            source="Complete(d)P, Mlodozeniec et al. 2025 (2512.22382), Table 1",
            tested="one lab, cosine, 50 M to 7.2 B parameters",
            remark="equal in B to sde; in T the whole run is one stretch of the SDE, though eps grows against noise that T leaves alone",
            concessions={"eps over noise": _T**0.5},
        ),
        JointRule(
            name="linear", lr=_B, families=("sgd",), status="reported", source="Goyal et al. 2017 (1706.02677)",
            tested="ResNet-50 on ImageNet, batches of 256 to 8192", limits={"batch": (1, 32)},
        ),
        JointRule(
            name="b2-half-life", one_minus_b2=_B, status="reported", source="Marek et al. 2025 (2507.07101), abstract",
            tested="down to batches of one",
            remark="beta2^B, whose half-life in tokens is fixed: 1 - beta2 times B to first order, as sde",
        ),
        JointRule(
            name="horizon", lr=_T**-0.32, status="reported", source="Bjorck et al. 2024 (2409.19913)",
            tested="760 M to 2.7 B parameters", remark="exponents of single sizes go from -0.32 to -0.70, 50 M to 2.7 B",
        ),
        JointRule(
            name="sqrt-horizon", lr=_T**-0.5, status="reported", source="Schaipp et al. 2025 (2501.18965)",
            tested="convex theory at a fixed fraction of cooldown",
        ),
        JointRule(
            name="step-law", lr=_T**0.307, status="reported", source="Step Law, Li et al. 2025 (2503.04715)",
            tested="3700 runs", remark="for the best batch, which grows as T^0.571; N^-0.713 in parameters",
        ),
        JointRule(
            name="deepseek", lr=_T**-0.125, status="reported", source="DeepSeek LLM 2024 (2401.02954)",
            tested="standard parameterization",
            remark="C^-0.125 in compute, at fixed parameters; the batch grows as C^0.327",
        ),
        JointRule(
            name="timescale", weight_decay=_B / _T, status="reported", source="Wang and Aitchison 2024 (2405.13698)",
            tested="at a fixed rate", remark="holds tau = B/(lr*wd*T), the share of the run that AdamW averages over",
        ),
        JointRule(
            name="power-lines", weight_decay=_B * _T**-0.48, status="reported",
            source="Power Lines, Bergsma et al. 2025 (2505.13738)", tested="one lab, mu-P, 111 M to 3.3 B parameters",
            remark="best tau falls as (tokens per parameter)^-0.52, at a fixed rate and model",
        ),
    )
}  # fmt: skip
"""Name to rule."""


def formula(power: Power) -> str:
    """A column in B and T."""
    return str(power).replace("batch", "B").replace("tokens", "T")


def rule(name: str) -> JointRule:
    """A rule that can be applied.

    Raises:
        PresetError: there is none of that name, or it is only shown.
    """
    takes = [each.name for each in RULES.values() if each.applied]
    if name not in takes:
        near = difflib.get_close_matches(name, takes, n=1)
        why = (
            "is only shown, beside rules that contradict it" if name in RULES else "does not exist"
        )
        hint = f"did you mean {near[0]}?" if near else f"write {', '.join(takes)}"
        raise PresetError(f"the joint rule {name} {why}; {hint} (`mupax presets joint` has all)")
    return RULES[name]
