"""A run's optimizer by the joint rule of its preset: numbers tuned at the base's batch and tokens, at the run's own."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Protocol

from mupax.presets import horizon, joint
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import RUN_AXES
from mupax.train.config.data import DataConfig
from mupax.train.config.preset import Parameterized, base_parts, base_text
from mupax.train.config.sections import OptimizerConfig
from mupax.zoo.configs import ConfigError

DURATIONS = {"warmup-tokens": "warmup-steps", "decay-timescale": "weight-decay"}
"""Flags of the optimizer that are relative to a run's tokens or length, and the number that each becomes."""


class Run(Parameterized, Protocol):
    """A run's config, as far as batch, tokens and optimizer go."""

    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def steps(self) -> int: ...


def base_of(run: Run) -> dict[str, int]:
    """Batch and tokens of the run's base.

    Raises:
        ConfigError: it does not name them.
    """
    _, sizes = base_parts(run.preset.base)
    base = {axis: size for axis, size in sizes.items() if axis in RUN_AXES}
    if len(base) < len(RUN_AXES) or not all(base.values()):
        name = run.preset.base if run.preset.base and "batch" not in run.preset.base else "MODEL"
        raise ConfigError(
            f"the joint rule {run.preset.joint} needs the batch and the tokens that the rate was tuned at; write "
            f"--preset.base {name},batch={run.data.batch_size},tokens={_tokens(run)} with those numbers"
        )
    return base


def base_beside(base: str | None, run: Run) -> str:
    """A base with the batch and tokens of a run behind it, where it names none itself.

    Args:
        base: a `preset.base`; None is the absolute form.
        run: gives the batch in examples, and the tokens of all its steps.
    """
    name, sizes = base_parts(base)
    sizes = {"batch": run.data.batch_size, "tokens": _tokens(run), **sizes}
    return ",".join(filter(None, [name, base_text(sizes)]))


def ratios(run: Run) -> dict[str, float]:
    """Batch and tokens over the base's; raises as `base_of`."""
    base = base_of(run)
    return {"batch": run.data.batch_size / base["batch"], "tokens": _tokens(run) / base["tokens"]}


def scaled(run: Run) -> OptimizerConfig:
    """The run's optimizer, its numbers scaled from the base.

    Raises:
        ConfigError: a base without batch and tokens, or a batch above the noise scale.
        PresetError: the rule says nothing about the optimizer, or a beta would leave (0, 1).
    """
    ratio, preset, opt = ratios(run), run.preset, run.optimizer
    largest = max(run.data.batch_size, base_of(run)["batch"])
    if ratio["batch"] != 1 and preset.noise_scale is not None and largest > preset.noise_scale:
        raise ConfigError(
            f"the joint rule {preset.joint} holds below the noise scale, {preset.noise_scale:g} examples, and a batch of {largest} is "
            f"above it, where more examples change the gradient little; write a batch of at most {int(preset.noise_scale)}, or "
            "--joint none and tune the rate at this batch"
        )
    numbers = {name: getattr(opt, name) for name in joint.NUMBERS}
    return dataclasses.replace(
        opt, **joint.scaled(preset.joint, ratio, opt.name, numbers, opt.decay)
    )


def described(run: Run) -> str:
    """One line: the rule, how far the run is from the base, and the numbers that it trains with."""
    ratio, far = ratios(run), numbers_text(scaled(run))
    return f"joint {run.preset.joint} at {ratio['batch']:.4g} times the base's batch, {ratio['tokens']:.4g} times its tokens: {far}"


def numbers_text(opt: OptimizerConfig) -> str:
    """The numbers that joint rules scale, in a line."""
    return (
        f"peak_lr {opt.peak_lr:.4g}, b1 {opt.b1:.4g}, b2 {opt.b2:.4g}, eps {opt.eps:.3g}, weight_decay {opt.weight_decay:.4g}, "
        f"warmup_steps {opt.warmup_steps}"
    )


def cautions(run: Run) -> list[str]:
    """What to know before the rule is trusted at this batch and these tokens, one sentence each."""
    ratio = ratios(run)
    unknown = run.preset.noise_scale is None and ratio["batch"] != 1
    return horizon.rule(run.preset.joint).cautions(ratio) + unknown * [
        f"the joint rule {run.preset.joint} holds below the noise scale, which is not known here: measure it with "
        "`mupax noise WORKDIR`, and write it behind --noise-scale"
    ]


def decay_text(optimizer: OptimizerConfig, steps: int) -> str:
    """Weight decay as a timescale, of the run and in steps.

    Args:
        optimizer: with a decay above 0, as the run trains with it.
        steps: of the run.
    """
    share = joint.timescale(optimizer.peak_lr, optimizer.weight_decay, steps, optimizer.decay)
    pull = "lr wd" if optimizer.decay == "coupled" else "wd"
    return f"{share:.3g} of the run, {share * steps:,.0f} steps (tau = batch / ({pull} tokens) at the peak)"


def with_durations(
    run: Run, tokens: str | None, tau: float | None, flags: Collection[str]
) -> OptimizerConfig:
    """The optimizer with warm-up in steps and weight decay as a number; under a joint rule both are of the base's run.

    Args:
        run: under a joint rule with a base that names batch and tokens.
        tokens: of warm-up, of images the images; None leaves the steps as they are.
        tau: share of the run that decayed weights average over, at the peak rate; None leaves the decay as it is.
        flags: that were written, with hyphens.

    Raises:
        ConfigError: a number in both forms, a warm-up beyond the run, or a timescale that no decay has.
    """
    for flag, value in zip(DURATIONS, (tokens, tau), strict=True):
        other = f"--optimizer.{DURATIONS[flag]}"
        if value is not None and other in flags:
            raise ConfigError(
                f"--optimizer.{flag} and {other} are one number in two forms; write one of them"
            )
    opt, each, steps = run.optimizer, run.data.batch_size * run.model.units, float(run.steps)
    if run.preset.joint != "none":
        base = base_of(run)
        each = base["batch"] * run.model.units
        steps = base["tokens"] / each
    if tokens is not None:
        warmup = amount("--optimizer.warmup-tokens", tokens)
        if warmup > steps * each:
            whose = "run" if run.preset.joint == "none" else "base's run"
            raise ConfigError(
                f"--optimizer.warmup-tokens {tokens} is more than the {steps * each:,.0f} of the {whose}; write at most that many"
            )
        opt = dataclasses.replace(opt, warmup_steps=max(1, round(warmup / each)))
    if tau is not None:
        if not 0 < tau < math.inf:
            raise ConfigError(
                f"--optimizer.decay-timescale is {tau:g}; write a share of the run above 0, such as 0.25"
            )
        if "weight_decay" not in OPTIMIZERS[opt.name].reads:
            raise ConfigError(
                f"--optimizer.decay-timescale is not read by {opt.name}; leave it out, or write --optimizer.name adamw"
            )
        if not opt.peak_lr:
            raise ConfigError(
                "--optimizer.decay-timescale is of a run that moves, and optimizer.peak_lr is 0; write a rate above 0"
            )
        pull = 1 / (tau * steps)
        opt = dataclasses.replace(
            opt, weight_decay=pull / opt.peak_lr if opt.decay == "coupled" else pull
        )
    return opt


def amount(flag: str, text: str) -> float:
    """The number that a text means.

    Args:
        flag: that it was written for.
        text: such as 10b, 1.5m or 2e9.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmbt]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"{flag} is {text}; write a number such as 10b, 300m or 2e9")
    return float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[match[2]]


def _tokens(run: Run) -> int:
    return run.steps * run.data.batch_size * run.model.units
