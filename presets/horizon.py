"""Joint rules: how an optimizer's settings change with batch size B and tokens T.

B is the batch over the base's batch, T is the training tokens over the base's, and steps are T/B.
The base is the run at which the settings were tuned. The rules come from different sources, which
contradict each other on T. `RULES` has all of them; `--joint` applies only rules with
`applied=True`, and only when asked. Rules for width and depth are in `mupax.presets.papers`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from mupax.mappings import drop_keys
from mupax.presets.optimizers import Family
from mupax.presets.roles import PresetError
from mupax.presets.rule import ONE, Power, axis

Applied = Literal["none", "sde", "complete-d", "completed-muon"]
"""Literal type with the names of the rules that `--joint` accepts."""
COLUMNS = ("lr", "weight_decay", "eps", "one_minus_b1", "one_minus_b2", "durations")
"""Fields of `JointRule` that hold a power law for a setting of Adam."""
COLUMNS_OF_MUON = ("lr", "adam_lr", *COLUMNS[1:])
"""Fields of `JointRule` that hold a power law for a setting of Muon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointRule:
    """Joint rule of one source: for each optimizer setting a power law in batch B and tokens T.

    B and T are relative to the base's. A power law is `None` if the source says nothing about the
    setting.

    Attributes:
        name: Name for `--joint` and for tables.
        lr: Factor on the peak learning rate.
        adam_lr: Factor on the peak learning rate of the parameters that Muon leaves to Adam. `lr`
            is then the factor for Muon's matrices. `None` for a rule of another optimizer.
        weight_decay: Factor on coupled weight decay, w -= lr*wd*w. Independent weight decay is
            multiplied by `weight_decay` and `lr`, so that lr*wd scales the same.
        eps: Factor on Adam's eps.
        one_minus_b1: Factor on 1 - beta1.
        one_minus_b2: Factor on 1 - beta2.
        durations: Factor on the steps of warm-up and of a final decay.
        families: Optimizer families that the rule is for.
        applied: Whether `--joint` accepts the rule.
        source: Authors, year and paper.
        tested: Models, data and sizes that the source tested.
        limits: Smallest and largest tested ratio of `batch` or `tokens`, as far as known.
        status: "verified" if read in the author's own text, "reported" if read in an account of it,
            "derived" if worked out in mupax.
        remark: Caveat of the formula.
        concessions: Observables of `mupax.presets.analysis.joint_limits` that the rule does not
            hold fixed, with their power laws in B and T.
    """

    name: str
    lr: Power | None = None
    adam_lr: Power | None = None
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
        """Return the factor on a setting, or 1 if the source says nothing about the setting.

        Args:
            column: Member of `COLUMNS_OF_MUON`.
            ratios: `batch` and `tokens` of the run, divided by the base's.
        """
        power = getattr(self, column) or ONE
        return power(ratios)

    def cautions(self, ratios: Mapping[str, float]) -> list[str]:
        """Return one sentence for each ratio that is outside of the range that the source tested.

        Without a known range (`limits`) every ratio but 1 counts as outside.

        Args:
            ratios: `batch` and `tokens` of the run, divided by the base's.
        """
        cautions = []
        for name, ratio in ratios.items():
            # A ratio of 1 is always within range: at the base a rule changes nothing.
            low, high = self.limits.get(name, (1.0, 1.0))
            if low <= ratio <= high:
                continue
            if name in self.limits:
                evidence = f"it was tested from {low:.3g} to {high:.3g} times"
            elif self.speaks_of(name):
                evidence = "the range that it was tested in is not known"
            else:
                evidence = f"it says nothing about {name}"
            distance = f"{ratio:.3g} times the base's {name}"
            cautions.append(f"the joint rule {self.name}: {distance}, and {evidence}")
        return cautions

    def speaks_of(self, name: str) -> bool:
        """Return whether the rule makes any setting depend on the batch or on the tokens.

        Durations do not count. They may follow the number of steps in a rule that says nothing
        about tokens.

        Args:
            name: "batch" or "tokens".
        """
        for column in COLUMNS:
            # `_FRACTION` depends on T even in a rule that says nothing about T.
            if column == "durations":
                continue
            power = getattr(self, column) or ONE
            if name in dict(power.exponents):
                return True
        return False

    @property
    def of_adam_part(self) -> JointRule:
        """Copy of this Muon rule for the parameters that Muon leaves to Adam.

        `adam_lr` becomes its `lr`, and its only family is "adam".
        """
        return dataclasses.replace(
            self,
            name=f"Adam part of {self.name}",
            lr=self.adam_lr,
            adam_lr=None,
            families=("adam",),
        )

    def described(self) -> str:
        """Return the rule in one line, for the user.

        The line has the rule's name (and its flag, if `--joint` accepts it), `source`, `status`,
        `families`, what the source `tested`, and the `remark`.
        """
        use = self.name
        if self.applied:
            use = f"{self.name} (`--joint {self.name}`)"
        families = ", ".join(self.families)
        remark = ""
        if self.remark:
            remark = f" {self.remark[0].upper()}{self.remark[1:]}."
        return f"{use}: {self.source}: {self.status}. For {families}; {self.tested}.{remark}"

    def to_json(self, ratios: Mapping[str, float]) -> dict[str, Any]:
        """Return the rule as values that JSON can hold, with formulas as text.

        A formula or factor is `None` if the source says nothing about the setting.

        Args:
            ratios: `batch` and `tokens` of the run, divided by the base's. The entry "factors" has
                the factor on each setting at these ratios.
        """
        entries = drop_keys(vars(self), COLUMNS_OF_MUON)
        entries["concessions"] = {name: formula(power) for name, power in self.concessions.items()}

        formulas = {}
        factors = {}
        for column in COLUMNS_OF_MUON:
            power = getattr(self, column)
            formulas[column] = None if power is None else formula(power)
            factors[column] = None if power is None else power(ratios)
        return {**entries, **formulas, "factors": factors}


_B = axis("batch")
_T = axis("tokens")
_FRACTION = _T / _B
"""Factor on the steps of warm-up and decay that keeps them fractions of the run.

With a fixed number of warm-up steps, a study of the batch would measure the warm-up.
"""

RULES: dict[str, JointRule] = {
    rule.name: rule
    for rule in (
        JointRule(
            name="none",
            applied=True,
            families=get_args(Family),
            status="verified",
            source="one set of numbers for every batch",
            tested="the control: its best rate moves",
        ),
        JointRule(
            name="sde",
            applied=True,
            lr=_B**0.5,
            weight_decay=_B**0.5,
            eps=_B**-0.5,
            one_minus_b1=_B,
            one_minus_b2=_B,
            durations=_FRACTION,
            status="verified",
            limits={"batch": (1 / 16, 16)},
            source=(
                "Malladi et al. 2022 (2205.10287; the formula in its first author's text), "
                "decay of Complete(d)P"
            ),
            tested=(
                "its vision and language runs; "
                "at ratio 16 in a public pull request of Fast-LLM (539), 0.5 B parameters"
            ),
            remark=(
                "at fixed tokens, while the batch is well below the noise scale; "
                "says nothing about tokens"
            ),
        ),
        JointRule(
            name="complete-d",
            applied=True,
            lr=(_B / _T) ** 0.5,
            weight_decay=(_B / _T) ** 0.5,
            eps=(_T / _B) ** 0.5,
            one_minus_b1=_B / _T,
            one_minus_b2=_B / _T,
            durations=_FRACTION,
            status="reported",
            source="Complete(d)P, Mlodozeniec et al. 2025 (2512.22382), Table 1",
            tested="one lab, cosine, 50 M to 7.2 B parameters",
            remark=(
                "equal in B to sde; in T the whole run is one stretch of the SDE, "
                "though eps grows against noise that T leaves alone"
            ),
            concessions={"eps over noise": _T**0.5},
        ),
        JointRule(
            name="completed-muon",
            applied=True,
            lr=_B**0.5 * _T**-0.3,
            adam_lr=(_B / _T) ** 0.5,
            eps=(_T / _B) ** 0.5,
            one_minus_b2=_B,
            durations=_FRACTION,
            families=("muon",),
            status="derived",
            source=(
                "marin's completed_adamh.py, read in its code, applied to Muon, whose steps have a "
                "fixed norm as AdamH's; HyperP (2603.28743, abstract) has T^-0.32 for Muon at a "
                "fixed norm"
            ),
            tested="marin's runs of AdamH; refits have T^-0.28, and T^-0.40 for MuonH",
            remark=(
                "matrices and the Adam part have one column each, and one shared rate is split; "
                "b1 and the momentum stay, beta2^B stays to first order; the source decays no "
                "matrix and says nothing about weight decay"
            ),
        ),
        JointRule(
            name="linear",
            lr=_B,
            families=("sgd",),
            status="reported",
            source="Goyal et al. 2017 (1706.02677)",
            tested="ResNet-50 on ImageNet, batches of 256 to 8192",
            limits={"batch": (1, 32)},
        ),
        JointRule(
            name="b2-half-life",
            one_minus_b2=_B,
            status="reported",
            source="Marek et al. 2025 (2507.07101), abstract",
            tested="down to batches of one",
            remark=(
                "beta2^B, whose half-life in tokens is fixed: "
                "1 - beta2 times B to first order, as sde"
            ),
        ),
        JointRule(
            name="horizon",
            lr=_T**-0.32,
            status="reported",
            source="Bjorck et al. 2024 (2409.19913)",
            tested="760 M to 2.7 B parameters",
            remark="exponents of single sizes go from -0.32 to -0.70, 50 M to 2.7 B",
        ),
        JointRule(
            name="sqrt-horizon",
            lr=_T**-0.5,
            status="reported",
            source="Schaipp et al. 2025 (2501.18965)",
            tested="convex theory at a fixed fraction of cooldown",
        ),
        JointRule(
            name="step-law",
            lr=_T**0.307,
            status="reported",
            source="Step Law, Li et al. 2025 (2503.04715)",
            tested="3700 runs",
            remark="for the best batch, which grows as T^0.571; N^-0.713 in parameters",
        ),
        JointRule(
            name="deepseek",
            lr=_T**-0.125,
            status="reported",
            source="DeepSeek LLM 2024 (2401.02954)",
            tested="standard parameterization",
            remark="C^-0.125 in compute, at fixed parameters; the batch grows as C^0.327",
        ),
        JointRule(
            name="timescale",
            weight_decay=_B / _T,
            status="reported",
            source="Wang and Aitchison 2024 (2405.13698)",
            tested="at a fixed rate",
            remark="holds tau = B/(lr*wd*T), the share of the run that AdamW averages over",
        ),
        JointRule(
            name="power-lines",
            weight_decay=_B * _T**-0.48,
            status="reported",
            source="Power Lines, Bergsma et al. 2025 (2505.13738)",
            tested="one lab, mu-P, 111 M to 3.3 B parameters",
            remark="best tau falls as (tokens per parameter)^-0.52, at a fixed rate and model",
        ),
    )
}
"""Joint rules of all sources, by name."""


def formula(power: Power) -> str:
    """Return a power law as text in B and T."""
    return str(power).replace("batch", "B").replace("tokens", "T")


def rule(name: str) -> JointRule:
    """Return the rule of this name, if `--joint` accepts the rule.

    Raises:
        PresetError: No rule has the name, or the rule is only shown in tables.
    """
    names = [joint_rule.name for joint_rule in RULES.values() if joint_rule.applied]
    if name in names:
        return RULES[name]

    reason = "does not exist"
    if name in RULES:
        reason = "is only shown, beside rules that contradict it"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"write {', '.join(names)}"
    if near:
        hint = f"did you mean {near[0]}?"
    raise PresetError(f"the joint rule {name} {reason}; {hint} (`mupax presets joint` has all)")
