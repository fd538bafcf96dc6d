"""The coordinate check: grow one size, measure, fit log-log slopes, and hold them against the theory of the preset.

measure -> fit -> judge; `train/studies/check/report.py` shows the result, `train/studies/check/command.py` is its command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from mupax.presets import Preset, PresetError
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, optimizer
from mupax.train.core.step import StepInputs
from mupax.train.studies.check import observables, theory
from mupax.train.studies.check.theory import STEPS, Expected
from mupax.zoo.definition import Definition

_MOVES = 0.1
"""A slope above this is seen to grow."""

_FLOOR = 1e-30
"""Stands for an exact zero in a logarithm."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One observable at one step, measured and judged.

    Attributes:
        observable: name, as in `mupax.train.studies.check.observables`.
        step: optimizer steps taken.
        slope: mean over seeds of the log-log slope; `low` and `high` its 95 % interval. Not a number where all is zero.
        values: geometric mean over seeds at every size.
        expected: by theory, None where it has no prediction.
    """

    observable: str
    step: int
    slope: float
    low: float
    high: float
    values: tuple[float, ...]
    expected: Expected | None

    @property
    def agrees(self) -> bool:
        """Whether the interval meets the band that theory allows."""
        if self.expected is None:
            return True
        floor, ceiling = self.expected.slope - self.expected.below, self.expected.slope + self.expected.above
        return self.low <= ceiling and self.high >= floor

    @property
    def _troubled(self) -> bool:
        return self.expected is not None and self.expected.trouble is not None and self.slope > _MOVES

    @property
    def ok(self) -> bool:
        """Agrees with theory, and is not trouble that theory foretold and the measurement shows."""
        return self.agrees and not self._troubled

    @property
    def roles(self) -> tuple[str, ...]:
        """Whose steps theory blames, where the trouble it foretold is measured."""
        return self.expected.roles if self._troubled and self.expected is not None else ()

    @property
    def verdict(self) -> str:
        """A word for a person."""
        if not self.agrees:
            if not any(self.values):
                return "frozen" if self.step else "zero"
            return "contradicts theory"
        if self._troubled and self.expected is not None:
            return str(self.expected.trouble)
        return "as predicted" if self.expected is not None else "measured"


class Series:
    """A model at growing sizes, ready to be measured under any preset: each size compiles once.

    Args:
        definitions: the model at growing sizes.
        config: optimizer; its schedule should be constant.
        steps: optimizer steps.
    """

    def __init__(self, definitions: Sequence[Definition], config: OptimizerConfig, steps: int = STEPS[-1]) -> None:
        self.definitions, self.config, self.steps = list(definitions), config, steps
        self._probes = [observables.Probe(one, optimizer.build(config, one.specs), steps) for one in definitions]

    def measure(self, preset: Preset, batch: Mapping[str, np.ndarray], seeds: int = 4) -> dict[str, np.ndarray]:
        """Every observable at every size.

        Args:
            preset: relative to the smallest size.
            batch: one batch that every size takes.
            seeds: initializations per size.

        Returns:
            Observable to float64 [sizes, seeds, steps + 1].

        Raises:
            PresetError: the sizes show different observables, so no slope can be fitted.
        """
        numbers = optimizer.hyper(self.config, self.steps + 1)
        recorded: list[dict[str, np.ndarray]] = []
        for probe in self._probes:
            run = StepInputs(factors.resolve(preset, probe.definition, self.config.name, self.config.decay), numbers)
            stds = factors.init_stds(preset, probe.definition)
            recorded.append(probe.record(run, stds, batch, np.arange(seeds, dtype=np.uint32)))
        if any(one.keys() != recorded[0].keys() for one in recorded):
            raise PresetError("the models to compare have different parameters; grow sizes only, not structure")
        return {name: np.stack([np.asarray(one[name], np.float64) for one in recorded]) for name in recorded[0]}


def fit(measured: Mapping[str, np.ndarray], sizes: Sequence[float], steps: Sequence[int] = STEPS) -> list[Finding]:
    """Log-log slopes of every observable at the given steps, with 95 % intervals over seeds.

    Args:
        measured: from `Series.measure`.
        sizes: the grown size (or its ratio to the smallest), one per definition.
        steps: which steps to read; changes have none at step 0.
    """
    x = np.log2(np.asarray(sizes, np.float64))
    x = x - x.mean()
    findings = []
    for name, values in measured.items():
        for step in steps:
            at = values[:, :, step]
            if not np.any(at):
                findings.append(Finding(name, step, math.nan, math.nan, math.nan, (0.0,) * len(x), None))
                continue
            y = np.log2(np.maximum(at, _FLOOR))
            slopes = x @ y / (x @ x)
            mean, seeds = float(slopes.mean()), len(slopes)
            half = float(stats.sem(slopes) * stats.t.ppf(0.975, seeds - 1)) if seeds > 1 else 0.0
            typical = tuple(float(v) for v in 2.0 ** y.mean(axis=1))
            findings.append(Finding(name, step, mean, mean - half, mean + half, typical, None))
    return findings


def judge(findings: Sequence[Finding], expected: Mapping[tuple[str, int], Expected]) -> list[Finding]:
    """The findings that theory speaks of, each with what it says; not-a-number counts as a contradiction."""
    return [
        dataclasses.replace(finding, expected=expected[finding.observable, finding.step])
        for finding in findings
        if (finding.observable, finding.step) in expected
    ]


def passes(findings: Sequence[Finding]) -> bool:
    """Whether every judged observable is as predicted and healthy."""
    return bool(findings) and all(finding.ok for finding in findings)


def study(
    definitions: Sequence[Definition],
    preset: Preset,
    config: OptimizerConfig,
    batch: Mapping[str, np.ndarray],
    seeds: int = 4,
) -> list[Finding]:
    """The whole check of one preset on any model: measure at every size, fit, and hold against theory.

    Args:
        definitions: the model at sizes that grow evenly, from `mupax.zoo.definition.define`.
        preset: relative to the smallest size.
        config: optimizer; its schedule should be constant.
        batch: `inputs`, `targets`, `weights` for every size (see `mupax.train.core.step`).
        seeds: initializations per size.
    """
    _, factor = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    ratios = [factor ** (i / (len(definitions) - 1)) for i in range(len(definitions))]
    expected = theory.of(preset, definitions[0], definitions[-1], config.name)
    return judge(fit(Series(definitions, config).measure(preset, batch, seeds), ratios), expected)
