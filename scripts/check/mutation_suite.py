"""How much of what a person could get wrong the coordinate check sees: mutants trained, judged and counted.

A study is one right rule on one model, growing one size under one optimizer. Its mutants share the compiled programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mupax import presets
from mupax.presets import Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, theory
from mupax.train.studies.check.check import Finding, digest
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts.check import mutants
from scripts.check.mutants import Mutant

SIZES, SEEDS, STEPS = 4, 4, 1
"""As `mupax check`, but one step of its ten: later steps cost the most and can only reveal more."""

MORE_SEEDS = 16
"""For a mutant that passes with fewer, `mupax check --seeds 16`: is it the spread of seeds that hides it?"""

ROUND_OFF = 1e-3
"""Two trainings are the same when no activation differs by more than this power of two, at any size, seed or step read."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the mutants are made from.

    Attributes:
        name: for people and for resuming.
        model: whose structure.
        optimizer: adam or sgd.
        eps: Adam's. Far above the gradients an update is gradient over eps, so that a wrong eps is a wrong rate.
        peak_lr: rate at base size.
        preset: the right rule, by name.
        grow: the size that grows; mutants are powers of `size`, the axis that grows with it.
        tied: the model with its readout tied to the token embedding; of its mutants those of this table and its readout.
        besides: leave out the parameter groups that this model has too.
        changes: fields of the model that are not as its name has them.
        doublings: of the size that grows, one number for every model; zero first.
        columns: which to mutate.
        exponents: by how much.
    """

    name: str
    model: str
    optimizer: Literal["adam", "sgd"] = "adam"
    eps: float = 1e-12
    peak_lr: float = OPTIMIZERS["adam"].check_lr
    preset: str = "mup"
    grow: str = "head_dim"
    size: str = "embed"
    tied: bool = False
    besides: str | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    doublings: Sequence[int] = range(SIZES)
    columns: tuple[str, ...] = mutants.COLUMNS
    exponents: tuple[float, ...] = mutants.EXPONENTS


_SMALL = (0.5, -0.5, 0.25, -0.25)
_EPS_MATTERS: dict[str, Any] = {
    "eps": 1.0,
    "peak_lr": OPTIMIZERS["sgd"].check_lr,
    "columns": ("eps",),
    "exponents": _SMALL,
}
_IN_HEADS: dict[str, Any] = {"grow": "heads", "doublings": (0, 2)}
_EXPERTS: dict[str, Any] = {"model": "lm-proxy", "besides": "lm-proxy", "changes": {"experts": 4}}
_ENCODER_DECODER: dict[str, Any] = {
    "model": "ed-proxy", "besides": "lm-proxy", "changes": {"positions": "relative", "tied": False}, **_IN_HEADS,
}  # fmt: skip
"""Of an encoder-decoder: its encoder, attention to what that wrote, and relative positions."""

STUDIES = (
    Study(name="decoder, Adam", model="lm-proxy"),
    Study(name="ViT's other roles, Adam", model="vit-proxy", besides="lm-proxy"),
    Study(name="decoder, Adam with eps above the gradients", model="lm-proxy", **_EPS_MATTERS),
    Study(
        name="ViT's other roles, Adam with eps above the gradients",
        model="vit-proxy",
        besides="lm-proxy",
        **_EPS_MATTERS,
    ),
    Study(
        name="decoder, SGD",
        model="lm-proxy",
        optimizer="sgd",
        peak_lr=OPTIMIZERS["sgd"].check_lr,
        exponents=(0.5, -0.5),
    ),
    Study(name="tied decoder, Adam", model="lm-proxy", tied=True),
    Study(name="encoder-decoder's other roles, Adam", exponents=_SMALL, **_ENCODER_DECODER),
    Study(
        name="encoder-decoder's other roles, SGD",
        optimizer="sgd",
        peak_lr=OPTIMIZERS["sgd"].check_lr,
        exponents=(0.5,),
        **_ENCODER_DECODER,
    ),
    Study(
        name="tied encoder-decoder, Adam",
        model="ed-proxy",
        tied=True,
        exponents=(0.5,),
        **_IN_HEADS,
    ),
    Study(name="experts, Adam", exponents=_SMALL, **_EXPERTS),
    Study(
        name="experts, SGD",
        optimizer="sgd",
        peak_lr=OPTIMIZERS["sgd"].check_lr,
        exponents=(0.5, -0.5),
        **_EXPERTS,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What the check made of one mutant.

    Attributes:
        group, column, exponent: the mutant.
        same_numbers: the program was given bitwise the right rule's numbers, so that nothing had to be run.
        change: the farthest that any activation, or change of one, lies from the right rule's at the same seed, size and
            step, as a power of two.
        seeds: how many initializations the verdict took.
        by: the observable farthest outside its band, its slope and theory's; None if the mutant passed.
        by_activations: the same among activations and their changes, which no longer say whose weights are at fault.
    """

    group: str
    column: str
    exponent: float
    same_numbers: bool = False
    change: float = 0.0
    seeds: int = SEEDS
    by: str | None = None
    by_activations: str | None = None

    @property
    def trains_alike(self) -> bool:
        """Whether training is the right rule's: such a mutant is no error."""
        return self.change <= ROUND_OFF


class Suite:
    """One study's mutants, ready to run.

    Args:
        study: what is measured.
        doublings: in place of the study's.
    """

    def __init__(self, study: Study, doublings: Sequence[int] | None = None) -> None:
        doublings = study.doublings if doublings is None else doublings
        self.study, self._doublings = study, doublings
        changes = {**study.changes, **({"tied": True} if study.tied else {})}
        model: configs.ModelConfig = replace(configs.get(study.model), **changes)
        inputs = {"vocab_size", "seq_len"} & study.changes.keys()
        doubled = check.grow(model, study.grow, doublings[-1] + 1, inputs)
        grown = [doubled[count] for count in doublings]
        config = OptimizerConfig(
            name=study.optimizer,
            peak_lr=study.peak_lr,
            schedule="constant",
            eps=study.eps,
            decay="coupled",
        )
        self._definitions = [definition(one) for one in grown]
        self.series = check.Series(self._definitions, config, STEPS)
        self._batch = check.batch(grown[0])
        self._right = presets.get(study.preset, base=grown[0].base_sizes())

    def mutants(self) -> Iterator[Mutant]:
        """Every mutant of the study."""
        study, specs = self.study, list(self._definitions[0].specs.values())
        if (readout := self._definitions[0].tied_readout) is not None:
            specs = [*(spec for spec in specs if spec.role is Role.TOKEN_EMBEDDING), readout]
        if study.besides is not None:
            other_specs = definition(check.smallest(configs.get(study.besides))).specs.values()
            specs = [spec for spec in specs if spec.group not in {one.group for one in other_specs}]
        return mutants.all_of(specs, study.size, study.exponents, study.columns)

    def right(self, seeds: int = SEEDS) -> list[Finding]:
        """The right rule itself, judged: the control, which must pass."""
        return self._judge(self._measured(self._right, seeds))

    def run(self, mutant: Mutant, seeds: int = SEEDS) -> Outcome:
        """Train a mutant and judge it by the right rule's theory."""
        wrong = mutant.of(self._right)
        what = (mutant.group, mutant.column, mutant.exponent)
        if digest(self.series.numbers(wrong)) == digest(self.series.numbers(self._right)):
            return Outcome(*what, same_numbers=True, seeds=seeds)
        measured = self._measured(wrong, seeds)
        bad = [finding for finding in self._judge(measured) if not finding.ok]
        return Outcome(
            *what,
            change=_change(self._measured(self._right, seeds), measured),
            seeds=seeds,
            by=_worst(bad),
            by_activations=_worst([finding for finding in bad if "/" not in finding.observable]),
        )

    def _measured(self, preset: presets.Preset, seeds: int) -> dict[str, np.ndarray]:
        return self.series.measure(preset, self._batch, seeds)

    @functools.cached_property
    def _expected(self) -> Mapping[tuple[str, int], theory.Expected]:
        first, last, optimizer = self._definitions[0], self._definitions[-1], self.study.optimizer
        if self.study.eps < 1e-6:
            return theory.of(self._right, first, last, optimizer)
        # Only what training does counts here: not the gradient over eps, which names a wrong eps without any step.
        expected = theory.of(mutants.eps_dominates(self._right), first, last, "sgd")
        return {
            key: expectation
            for key, expectation in expected.items()
            if not key[0].startswith("gradient")
        }

    def _judge(self, measured: Mapping[str, np.ndarray]) -> list[Finding]:
        return check.judge(measured, [2.0**count for count in self._doublings], self._expected)


def _change(right: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray]) -> float:
    """The farthest that an activation or its change lies from the right rule's, as a power of two; 99 and more are 99."""
    farthest = 0.0
    for name, values in right.items():
        if "/" in name:
            continue
        differ = values != wrong[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = np.abs(np.log2(wrong[name][differ] / values[differ]))
        farthest = max(farthest, float(np.max(np.nan_to_num(apart, nan=99.0), initial=0.0)))
    return min(farthest, 99.0)


def _worst(bad: list[Finding]) -> str | None:
    if not bad:
        return None

    def outside(finding: Finding) -> float:
        return abs(np.nan_to_num(finding.slope - finding.expected.slope, nan=np.inf))

    finding = max(bad, key=outside)
    return f"{finding.observable} @{finding.step}: {finding.slope:+.2f}, theory {finding.expected.slope:+.2f}"
