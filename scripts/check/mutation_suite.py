"""Studies of wrong rules: mutants of a right rule are trained, judged and counted.

A study is one right rule on one model, growing one size under one optimizer. Its mutants share the
compiled programs. Used by `mutations` and `campaign`.
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
from mupax.train.studies.check.observables import LOSS
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts.check import mutants
from scripts.check.mutants import Mutant

SIZES = 4
SEEDS = 4
STEPS = 1
"""Sizes and seeds of `mupax check`, but one step in place of ten.

Later steps cost the most, and can only show more errors.
"""

MORE_SEEDS = 16
"""Seeds for a mutant that passes with `SEEDS`: the spread over seeds may hide the error."""

ROUND_OFF = 1e-3
"""Largest |log2| of a ratio of activations of two runs that count as the same training."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One right rule on one model, from which the mutants are made.

    Attributes:
        name: Text that people read, and the key by which a record is continued.
        model: Name of a model, whose smallest size is trained first.
        eps: Adam's eps. Far above the gradients an update is gradient / eps, so that a wrong eps
            acts as a wrong learning rate.
        peak_lr: Learning rate at base size.
        preset: Name of the right rule.
        grow: Size that grows, such as "head_dim".
        size: Logical axis that grows with `grow`. Mutants are wrong by a power of its ratio.
        tied: Tie the readout to the token embedding and mutate only these two groups.
        besides: Name of a model whose parameter groups are not mutated.
        changes: Fields of the model's config to replace.
        doublings: Number of doublings of `grow` in each model of the series. The first is 0.
        columns: Columns of the rule to mutate.
        exponents: Powers of the ratio by which a column is wrong.
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
    "model": "ed-proxy",
    "besides": "lm-proxy",
    "changes": {"positions": "relative", "tied": False},
    **_IN_HEADS,
}
"""Fields of a study on the parts that a decoder lacks: encoder, cross-attention, relative bias."""

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
    """Verdict of the check on one mutant.

    Attributes:
        group, column, exponent: Fields of the mutant.
        same_numbers: The program gets bitwise the values of the right rule, so nothing was run.
        change: Largest |log2| of the ratio of any activation, or change of one, to the right rule's
            at the same seed, size and step.
        seeds: Number of initializations that the verdict is based on.
        by: Observable farthest outside its band, with its slope and theory's; `None` if the mutant
            passed.
        by_activations: Same as `by`, among activations and their changes only. These do not say
            which weights are at fault.
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
        """`True` if the mutant trains as the right rule does, which makes it no error."""
        return self.change <= ROUND_OFF


class Suite:
    """Compiled programs and right rule of one study, ready to run mutants.

    Args:
        doublings: Series of sizes in place of the study's own.
    """

    def __init__(self, study: Study, doublings: Sequence[int] | None = None) -> None:
        self.study = study
        self._doublings = study.doublings if doublings is None else doublings

        changes = dict(study.changes)
        if study.tied:
            changes["tied"] = True
        model: configs.ModelConfig = replace(configs.get(study.model), **changes)
        inputs = {"vocab_size", "seq_len"} & study.changes.keys()
        doubled = check.grow(model, study.grow, self._doublings[-1] + 1, inputs)
        grown = [doubled[count] for count in self._doublings]

        config = OptimizerConfig(
            name=study.optimizer,
            peak_lr=study.peak_lr,
            schedule="constant",
            eps=study.eps,
            decay="coupled",
        )
        self._definitions = [definition(model) for model in grown]
        self.series = check.Series(self._definitions, config, STEPS)
        self._batch = check.batch(grown[0])
        self._right = presets.get(study.preset, base=grown[0].base_sizes())

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant of the study."""
        study = self.study
        specs = list(self._definitions[0].specs.values())
        readout = self._definitions[0].tied_readout
        if readout is not None:
            specs = [spec for spec in specs if spec.role is Role.TOKEN_EMBEDDING]
            # A tied readout is no parameter of its own, but has a multiplier that can be wrong.
            specs.append(readout)
        if study.besides is not None:
            excluded = definition(check.smallest(configs.get(study.besides))).specs.values()
            excluded_groups = {spec.group for spec in excluded}
            specs = [spec for spec in specs if spec.group not in excluded_groups]
        return mutants.all_of(specs, study.size, study.exponents, study.columns)

    def right(self, seeds: int = SEEDS) -> list[Finding]:
        """Return the findings on the right rule itself: the control, which must pass."""
        return self._findings(self._right, seeds)

    def run(self, mutant: Mutant, seeds: int = SEEDS) -> Outcome:
        """Train a mutant and judge it by the right rule's theory."""
        wrong = mutant.of(self._right)
        # A run on the same numbers would give the right rule's own result.
        if digest(self.series.numbers(wrong)) == digest(self.series.numbers(self._right)):
            return Outcome(
                mutant.group, mutant.column, mutant.exponent, same_numbers=True, seeds=seeds
            )

        bad = []
        bad_activations = []
        for finding in self._findings(wrong, seeds):
            if finding.ok:
                continue
            bad.append(finding)
            if is_activation(finding.observable):
                bad_activations.append(finding)
        return Outcome(
            mutant.group,
            mutant.column,
            mutant.exponent,
            change=_change(self._measured(self._right, seeds), self._measured(wrong, seeds)),
            seeds=seeds,
            by=_worst(bad),
            by_activations=_worst(bad_activations),
        )

    def _measured(self, preset: presets.Preset, seeds: int) -> dict[str, np.ndarray]:
        return self.series.measure(preset, self._batch, seeds)

    @functools.cached_property
    def _expected(self) -> Mapping[tuple[str, int], theory.Expected]:
        """Slopes that theory expects under the right rule, by observable and step."""
        first = self._definitions[0]
        last = self._definitions[-1]
        if self.study.eps < 1e-6:
            return theory.of(self._right, first, last, self.study.optimizer)

        # Only training counts here. The ratio of gradient to eps would name a wrong eps before
        # any step.
        expected = theory.of(mutants.eps_dominates(self._right), first, last, "sgd")
        expectations = {}
        for (name, step), expectation in expected.items():
            if not name.startswith("gradient"):
                expectations[name, step] = expectation
        return expectations

    def _findings(self, preset: presets.Preset, seeds: int) -> list[Finding]:
        """Return the findings on a preset's training, judged by the right rule's theory."""
        sizes = [2.0**count for count in self._doublings]
        return check.measure_and_judge(
            self.series, preset, self._batch, seeds, sizes, self._expected
        )


def is_activation(name: str) -> bool:
    """Return whether an observable is an activation, or change of one, and not a role's weights."""
    # Other names with a slash are about the weights of one role.
    return name != LOSS and ("/" not in name or name.startswith("contribution"))


def _change(right: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray]) -> float:
    """Return how far any activation, or change of one, is from the right rule's.

    Returns:
        Largest |log2| of a ratio, at most 99. A ratio that is no number counts as 99.
    """
    farthest = 0.0
    for name, values in right.items():
        if not is_activation(name):
            continue
        # Zeros in both runs are equal. Their quotient would count as the largest distance.
        differ = values != wrong[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            distance = np.abs(np.log2(wrong[name][differ] / values[differ]))
        distance = np.nan_to_num(distance, nan=99.0)
        farthest = max(farthest, float(np.max(distance, initial=0.0)))
    return min(farthest, 99.0)


def _worst(bad: list[Finding]) -> str | None:
    """Return the finding whose slope is farthest from theory, in words; `None` without findings."""
    if not bad:
        return None

    def distance(finding: Finding) -> float:
        # A slope that is no number is the farthest.
        return abs(np.nan_to_num(finding.slope - finding.expected.slope, nan=np.inf))

    finding = max(bad, key=distance)
    slopes = f"{finding.slope:+.2f}, theory {finding.expected.slope:+.2f}"
    return f"{finding.observable} @{finding.step}: {slopes}"
