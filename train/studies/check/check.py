"""The coordinate check: grow one size, measure, fit log-log slopes, and hold them against the theory of the preset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from scipy import stats

from mupax.presets import Preset, PresetError
from mupax.train.config import sizes
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, optimizer
from mupax.train.core.step import StepInputs
from mupax.train.studies.check import observables, theory
from mupax.train.studies.check.theory import STEPS, Expected
from mupax.zoo.definition import Definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.transformer import TransformerConfig, transformer

_WIDTH, _HEADS, _DEPTH, _POSITIONS, _VOCAB, _EXAMPLES = 64, 4, 2, 16, 64, 8
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
        expected: by theory.
    """

    observable: str
    step: int
    slope: float
    low: float
    high: float
    values: tuple[float, ...]
    expected: Expected

    @property
    def agrees(self) -> bool:
        """Whether the interval meets the band that theory allows; one that is not a number does not."""
        floor, ceiling = self.expected.slope - self.expected.below, self.expected.slope + self.expected.above
        return self.low <= ceiling and self.high >= floor

    @property
    def trouble(self) -> str | None:
        """What theory foretold and the measurement shows, such as "explodes"; None where nothing is wrong."""
        return self.expected.trouble if self.slope > _MOVES else None

    @property
    def ok(self) -> bool:
        """Agrees with theory, and is no trouble."""
        return self.agrees and not self.trouble

    @property
    def roles(self) -> tuple[str, ...]:
        """Whose steps theory blames for the trouble."""
        return self.expected.roles if self.trouble else ()

    @property
    def verdict(self) -> str:
        """A word for a person."""
        if self.agrees:
            return self.trouble or "as predicted"
        if any(self.values):
            return "contradicts theory"
        return "frozen" if self.step else "zero"


def smallest(model: ModelConfig) -> TransformerConfig:
    """The model's structure at the check's smallest size: width 64, 4 heads, depth 2, 16 positions."""
    model = transformer(model, "growing one size")
    inputs = {"tokens": {"vocab_size": _VOCAB, "seq_len": _POSITIONS}, "images": {"image_size": 8, "patch_size": 2}}
    return dataclasses.replace(
        model,
        width=_WIDTH,
        num_heads=_HEADS,
        head_dim=None,
        num_kv_heads=None if model.num_kv_heads is None else max(1, _HEADS * model.kv_heads // model.num_heads),
        depth=_DEPTH,
        mlp_ratio=round(model.mlp_ratio * _WIDTH) / _WIDTH,
        # A few steps of small models: what takes time is compiling them.
        compute=dataclasses.replace(model.compute, layers="scan"),
        centered=False,
        **inputs[model.task],
    )


def grow(model: ModelConfig, axis: str, count: int) -> list[TransformerConfig]:
    """`count` models from the smallest on, one size doubling.

    Args:
        model: whose structure.
        axis: head_dim, heads, depth, width (heads and head_dim in turn), mlp alone, or kv_heads alone (of 8 query heads).
        count: how many.
    """
    start, most = smallest(model), 2 * _HEADS
    if axis == "kv_heads":
        if 2 ** (count - 1) > most:
            raise ConfigError(f"key heads grow from 1 to {most}; write --sizes {most.bit_length()} or fewer")
        return [dataclasses.replace(start, num_heads=most, num_kv_heads=2**k) for k in range(count)]
    if axis not in sizes.AXES:
        raise ConfigError(f"no size is named {axis!r}; write head_dim, heads, width, depth, mlp or kv_heads")
    if axis != "width":
        return [sizes.grown(start, axis, sizes.of(start, axis) * 2**k) for k in range(count)]
    wider = [sizes.grown(start, "heads", start.num_heads * 2 ** (k // 2)) for k in range(count)]
    return [sizes.grown(one, "head_dim", one.heads_dim * 2 ** ((k + 1) // 2)) for k, one in enumerate(wider)]


def batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Random inputs with random labels, from a fixed seed: what every size trains on."""
    rng = np.random.default_rng(0)
    outputs, example = model.sizes()[model.output_axis], model.example()["inputs"].shape
    if model.task == "images":
        shape = (2 * _EXAMPLES, *example)
        targets = rng.integers(0, outputs, shape[0]).astype(np.int32)
        inputs = rng.standard_normal(shape).astype(np.float32)
    else:
        tokens = rng.integers(0, outputs, (_EXAMPLES, example[0] + 1)).astype(np.int32)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


class Series:
    """A model at growing sizes, ready to be measured under any preset: each size compiles once.

    Args:
        definitions: the model at growing sizes.
        config: optimizer; its schedule should be constant.
        steps: optimizer steps.
    """

    def __init__(self, definitions: Sequence[Definition], config: OptimizerConfig, steps: int = STEPS[-1]) -> None:
        self.definitions, self.config, self.steps = list(definitions), config, steps
        self._programs = [observables.program(d, optimizer.build(config, d.specs), steps) for d in definitions]

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
        hyper = optimizer.hyper(self.config, self.steps + 1)
        recorded: list[dict[str, np.ndarray]] = []
        for program, definition in zip(self._programs, self.definitions, strict=True):
            run = StepInputs(factors.resolve(preset, definition, self.config.name, self.config.decay), hyper)
            stds = factors.init_stds(preset, definition)
            recorded.append(jax.device_get(program(np.arange(seeds, dtype=np.uint32), run, stds, dict(batch))))
        if any(one.keys() != recorded[0].keys() for one in recorded):
            raise PresetError("the models to compare have different parameters; grow sizes only, not structure")
        return {name: np.stack([np.asarray(one[name], np.float64) for one in recorded]) for name in recorded[0]}


def judge(
    measured: Mapping[str, np.ndarray], sizes: Sequence[float], expected: Mapping[tuple[str, int], Expected]
) -> list[Finding]:
    """Log-log slopes of every observable that theory speaks of, with 95 % intervals over seeds, and what it says of each.

    Args:
        measured: from `Series.measure`.
        sizes: the grown size (or its ratio to the smallest), one per definition.
        expected: from `mupax.train.studies.check.theory.of`.
    """
    x = np.log2(np.asarray(sizes, np.float64))
    x = x - x.mean()
    findings = []
    for name, values in measured.items():
        for step in (step for step in range(values.shape[2]) if (name, step) in expected):
            something = np.any(values[:, :, step])
            y = np.log2(np.maximum(values[:, :, step], _FLOOR))
            slopes = x @ y / (x @ x) if something else np.array([math.nan])
            mean, seeds = float(slopes.mean()), len(slopes)
            half = float(stats.sem(slopes) * stats.t.ppf(0.975, seeds - 1)) if seeds > 1 else 0.0
            typical = tuple(map(float, something * 2.0 ** y.mean(axis=1)))
            findings.append(Finding(name, step, mean, mean - half, mean + half, typical, expected[name, step]))
    return findings


def passes(findings: Sequence[Finding]) -> bool:
    """Whether every judged observable is as predicted and healthy."""
    return bool(findings) and all(finding.ok for finding in findings)


def study(
    definitions: Sequence[Definition], preset: Preset, config: OptimizerConfig, batch: observables.Batch, seeds: int = 4
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
    return judge(Series(definitions, config).measure(preset, batch, seeds), ratios, expected)
