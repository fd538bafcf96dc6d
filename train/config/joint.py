"""Optimizer of a run under the joint rule of its preset.

The rule scales values that were tuned at the base's batch and tokens to those of the run. This file
also turns warm-up in tokens and weight decay as a timescale into the optimizer's fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable
from typing import Protocol

from mupax.mappings import select_keys
from mupax.presets import horizon, joint
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import RUN_AXES
from mupax.train.config.data import DataConfig
from mupax.train.config.preset import Parameterized, base_parts, base_text
from mupax.train.config.sections import OptimizerConfig
from mupax.zoo.configs import ConfigError

DURATIONS = {"warmup-tokens": "warmup-steps", "decay-timescale": "weight-decay"}
"""Flags that state an optimizer's field relative to a run, to the flag of the field itself."""


class Run(Parameterized, Protocol):
    """Fields of a run's config that the joint rule reads: preset, optimizer, data and steps."""

    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def steps(self) -> int: ...


def base_of(run: Run) -> dict[str, int]:
    """Return batch and tokens of the run's base.

    The keys are "batch", in examples, and "tokens", those of all steps of the base's run.

    Raises:
        ConfigError: The base does not name both, or one of them is 0.
    """
    _, sizes = base_parts(run.preset.base)
    base = select_keys(sizes, RUN_AXES)
    # `ratios` divides by both sizes, so neither may be 0.
    if len(base) < len(RUN_AXES) or not all(base.values()):
        name = "MODEL"
        if run.preset.base and "batch" not in run.preset.base:
            name = run.preset.base
        raise ConfigError(
            f"the joint rule {run.preset.joint} needs the batch and the tokens that the rate was "
            f"tuned at; write --preset.base {name},batch={run.data.batch_size},"
            f"tokens={_tokens(run)} with those numbers"
        )
    return base


def base_beside(base: str | None, run: Run) -> str:
    """Return a base as text with the batch and tokens of a run, as in `lm-proxy,batch=4,tokens=9`.

    A batch or a number of tokens that the base already names stays.

    Args:
        base: A `preset.base`. `None` is the absolute form.
        run: Run whose batch, in examples, and tokens of all steps are added.
    """
    name, sizes = base_parts(base)
    # `sizes` comes last, so that a batch or tokens in the base replace those of the run.
    sizes = {"batch": run.data.batch_size, "tokens": _tokens(run), **sizes}
    return ",".join(filter(None, [name, base_text(sizes)]))


def ratios(run: Run) -> dict[str, float]:
    """Return batch and tokens of a run over those of its base, by the keys of `base_of`.

    Raises:
        ConfigError: The base does not name both.
    """
    base = base_of(run)
    return {"batch": run.data.batch_size / base["batch"], "tokens": _tokens(run) / base["tokens"]}


def scaled(run: Run) -> OptimizerConfig:
    """Return the run's optimizer as the joint rule scales it from the base's batch and tokens.

    Learning rates, betas, eps, weight decay and warm-up are scaled.

    Raises:
        ConfigError: The base names no batch or tokens. Or the batches of run and base differ, and
            the larger one is above `preset.noise_scale`.
        PresetError: The rule says nothing about the optimizer, or a beta would leave (0, 1).
    """
    ratio = ratios(run)
    preset = run.preset
    opt = run.optimizer
    # The rule must hold at both ends, the base's batch and the run's.
    largest = max(run.data.batch_size, base_of(run)["batch"])
    if ratio["batch"] != 1 and preset.noise_scale is not None and largest > preset.noise_scale:
        raise ConfigError(
            f"the joint rule {preset.joint} holds below the noise scale, {preset.noise_scale:g} "
            f"examples, and a batch of {largest} is above it, where more examples change the "
            f"gradient little; write a batch of at most {int(preset.noise_scale)}, or "
            "--joint none and tune the rate at this batch"
        )
    values = {name: getattr(opt, name) for name in (*joint.NUMBERS, "adam_lr")}
    scaled_values = joint.scaled(preset.joint, ratio, opt.name, values, opt.decay)
    return dataclasses.replace(opt, **scaled_values)


def described(run: Run) -> str:
    """Return a line that says what the joint rule does to a run's optimizer.

    It names the rule, the run's batch and tokens as multiples of the base's, and the scaled values
    that the run trains with.

    Raises:
        ConfigError, PresetError: The rule cannot be applied (`scaled`).
    """
    ratio = ratios(run)
    return (
        f"joint {run.preset.joint} at {ratio['batch']:.4g} times the base's batch, "
        f"{ratio['tokens']:.4g} times its tokens: {numbers_text(scaled(run))}"
    )


def rates_note(runs: Iterable[Run]) -> str:
    """Return lines that say whose learning rates a study prints under joint rules.

    A study prints the peak learning rate of a run's config, which is the base's, and the run trains
    at what the joint rule makes of it. The text is "" if no rule changes a rate.

    Raises:
        ConfigError, PresetError: A rule cannot be applied (`scaled`).
    """
    factors: dict[str, set[float]] = {}
    for run in runs:
        rate = run.optimizer.peak_lr
        if run.preset.joint != "none" and rate:
            factors.setdefault(run.preset.joint, set()).add(scaled(run).peak_lr / rate)
    lines = []
    for rule, values in factors.items():
        smallest = f"{min(values):.3g}"
        largest = f"{max(values):.3g}"
        times = smallest if smallest == largest else f"{smallest} to {largest}"
        if times == "1":
            continue
        lines.append(
            f"joint {rule}: peak learning rates are the base's; runs use {times} times them"
        )
    return "\n".join(lines)


def numbers_text(opt: OptimizerConfig) -> str:
    """Return learning rates, betas, eps, weight decay and warm-up as one line of text."""
    adam_peak = ""
    if opt.adam_peak is not None:
        adam_peak = f"adam_lr {opt.adam_peak:.4g}, "
    return (
        f"peak_lr {opt.peak_lr:.4g}, {adam_peak}b1 {opt.b1:.4g}, b2 {opt.b2:.4g}, "
        f"eps {opt.eps:.3g}, weight_decay {opt.weight_decay:.4g}, warmup_steps {opt.warmup_steps}"
    )


def cautions(run: Run) -> list[str]:
    """Return sentences on why the joint rule may not hold at this batch and these tokens.

    One of them asks for the noise scale if the batch differs from the base's and the scale is not
    known.

    Raises:
        ConfigError: The base does not name batch and tokens.
    """
    ratio = ratios(run)
    sentences = list(horizon.rule(run.preset.joint).cautions(ratio))
    if run.preset.noise_scale is None and ratio["batch"] != 1:
        sentences.append(
            f"the joint rule {run.preset.joint} holds below the noise scale, which is not known "
            "here: measure it with `mupax noise WORKDIR`, and write it behind --noise-scale"
        )
    return sentences


def decay_text(optimizer: OptimizerConfig, steps: int) -> str:
    """Return a text with the timescale of weight decay, as a share of the run and in steps.

    Args:
        optimizer: Optimizer that the run trains with. Its weight decay is above 0.
        steps: Number of optimizer steps of the run.
    """
    share = joint.timescale(optimizer.peak_lr, optimizer.weight_decay, steps, optimizer.decay)
    decay_rate = "lr wd" if optimizer.decay == "coupled" else "wd"
    of_adam = ""
    adam_peak = optimizer.adam_peak
    if optimizer.decay == "coupled" and adam_peak:
        # Under Muon, coupled decay follows each of the two learning rates.
        adam_share = share * optimizer.peak_lr / adam_peak
        of_adam = f", of the Adam part {adam_share:.3g}, {adam_share * steps:,.0f} steps"
    return (
        f"{share:.3g} of the run, {share * steps:,.0f} steps{of_adam} "
        f"(tau = batch / ({decay_rate} tokens) at the peak)"
    )


def with_durations(
    run: Run, tokens: str | None, tau: float | None, flags: Collection[str]
) -> OptimizerConfig:
    """Return the optimizer with `warmup_steps` and `weight_decay` computed from two durations.

    The durations are a warm-up in tokens and a timescale of weight decay. Under a joint rule both
    are relative to the run that the base describes by its batch and tokens.

    Args:
        tokens: Warm-up in tokens, or in images, such as "500k". `None` leaves the steps.
        tau: Share of the run that decayed weights average over, at the peak learning rate. `None`
            leaves the weight decay.
        flags: Flags of the command line, with hyphens.

    Raises:
        ConfigError: A value in both forms, a text that is no number, a warm-up longer than the run,
            a timescale that is not above 0, an optimizer without weight decay or with a learning
            rate of 0, or a joint rule with a base that names no batch or tokens.
    """
    # If both forms were accepted, `tokens` and `tau` would always win, whatever the order of the
    # flags.
    for flag, value in zip(DURATIONS, (tokens, tau), strict=True):
        field_flag = f"--optimizer.{DURATIONS[flag]}"
        if value is not None and field_flag in flags:
            raise ConfigError(
                f"--optimizer.{flag} and {field_flag} are one number in two forms; "
                "write one of them"
            )

    opt = run.optimizer
    tokens_per_step = run.data.batch_size * run.model.units
    steps = float(run.steps)
    is_joint = run.preset.joint != "none"
    if is_joint:
        base = base_of(run)
        tokens_per_step = base["batch"] * run.model.units
        # Count in steps of the base's run: the joint rule later scales warm-up and decay to this
        # run.
        steps = base["tokens"] / tokens_per_step

    if tokens is not None:
        warmup = amount("--optimizer.warmup-tokens", tokens)
        if warmup > steps * tokens_per_step:
            owner = "base's run" if is_joint else "run"
            raise ConfigError(
                f"--optimizer.warmup-tokens {tokens} is more than the "
                f"{steps * tokens_per_step:,.0f} of the {owner}; write at most that many"
            )
        # At least one step: 0 would switch off a warm-up that was asked for.
        opt = dataclasses.replace(opt, warmup_steps=max(1, round(warmup / tokens_per_step)))
    if tau is not None:
        opt = dataclasses.replace(opt, weight_decay=_decay_of_timescale(opt, tau, steps))
    return opt


def _decay_of_timescale(opt: OptimizerConfig, tau: float, steps: float) -> float:
    """Return the weight decay with which decayed weights average over the share `tau` of a run.

    Each step then subtracts 1 / (tau * steps) of a weight, at the peak learning rate.

    Args:
        steps: Number of steps of the run, which need not be whole.

    Raises:
        ConfigError: `tau` is not above 0, the optimizer has no weight decay, or its peak learning
            rate is 0.
    """
    if not 0 < tau < math.inf:
        raise ConfigError(
            f"--optimizer.decay-timescale is {tau:g}; "
            "write a share of the run above 0, such as 0.25"
        )
    if "weight_decay" not in OPTIMIZERS[opt.name].reads:
        raise ConfigError(
            f"--optimizer.decay-timescale is not read by {opt.name}; "
            "leave it out, or write --optimizer.name adamw"
        )
    if not opt.peak_lr:
        raise ConfigError(
            "--optimizer.decay-timescale needs a learning rate to follow a weight decay from, and "
            "optimizer.peak_lr is 0; write a rate above 0, or leave --optimizer.decay-timescale out"
        )
    # Share of a weight that decay subtracts at each step, at the peak learning rate.
    decay_per_step = 1 / (tau * steps)
    if opt.decay == "coupled":
        # AdamW subtracts lr * wd * w, so wd is that share divided by the learning rate.
        return decay_per_step / opt.peak_lr
    return decay_per_step


def amount(flag: str, text: str) -> float:
    """Return the number that a text such as 10b, 1.5m or 2e9 means.

    Args:
        flag: Flag that has the text, for the message.

    Raises:
        ConfigError: The text is no number above 0.
    """
    # The pattern has no minus sign, so it refuses a negative number and a negative power such as
    # 2e-9.
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmbt]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"{flag} is {text}; write a number such as 10b, 300m or 2e9")
    factors = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    return float(match[1]) * factors[match[2]]


def _tokens(run: Run) -> int:
    """Return the number of tokens, or images, that a run trains on."""
    return run.steps * run.data.batch_size * run.model.units
