"""Words of `--over`: the constants that a search varies, such as lr, readout.std or b1=0.8:0.99.

| word                                                | constant                                   |
|-----------------------------------------------------|--------------------------------------------|
| lr, weight_decay, eps, b1, b2, momentum, clip_norm, | field of the optimizer                     |
| warmup_steps, final_lr_fraction                     |                                            |
| GROUP.lr, GROUP.std, GROUP.multiplier, GROUP.decay  | factor on the preset's rule for a group    |
| embedding.lr, ...                                   | that of token_embedding, or of             |
|                                                     | patch_embedding in models of images        |
| attention.multiplier                                | c_a, a factor on attention logits          |
| branch.multiplier                                   | beta0, a factor on every residual branch   |
| gamma0, beta0, c_a, alpha_res, alpha_ratio          | number of that name, where a preset has it |

A constant is searched on a grid of sixteenths of an octave around the run's own value. A constant
near 1, such as b1, is searched by its distance from 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mupax.presets import CONSTANT_FLAGS, PRESETS, read_constants
from mupax.presets.constants import COLUMNS
from mupax.presets.constants import check as check_constants
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.presets.rule import names as group_names
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.run import Config
from mupax.train.studies.sweep import grids
from mupax.zoo.configs import ConfigError

STEPS_PER_OCTAVE = 16
"""Number of grid steps per octave."""
OCTAVES = {
    "rates": 4.0,
    "stds": 3.0,
    "multipliers": 3.0,
    "decays": 4.0,
    "peak_lr": 3.0,
    "adam_lr": 3.0,
    "weight_decay": 4.0,
    "preset": 3.0,
}
"""Octaves of a default range on either side of the run's own value, by a part of the flag.

For example, the flag preset.rates.readout has the part "rates". A constant whose flag has none of
these parts needs a written range.
"""
ALIASES = {"lr": "peak_lr", "attention.multiplier": "c_a", "branch.multiplier": "beta0"}
FACTORS = ("gamma0", "beta0", "c_a", "alpha_res", "alpha_ratio")
"""Constants of presets that a search may vary, because they are factors.

Exponents are left out. They have no effect at the base of a preset, where a search runs.
"""
_SUFFIXES = {"lr": "rates", "std": "stds", "multiplier": "multipliers", "decay": "decays"}
_NEAR_ONE = ("b1", "b2", "momentum")
EXAMPLES = {
    **dict.fromkeys(_NEAR_ONE, "0.9:0.999"),
    "eps": "1e-10:1e-6",
    "warmup_steps": "10:200",
}
"""Example ranges in error messages, by field of the optimizer. All others have 0.01:1."""
_INTEGERS = ("warmup_steps",)
_EVERY_OPTIMIZER = ("peak_lr", "clip_norm", "warmup_steps", "final_lr_fraction")

Point = tuple[int, ...]
"""Grid steps from the run's own value, one per constant. All steps are 0 for the run itself."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """Constant that a search varies, with its flag, its range and the run's own value.

    Attributes:
        word: Word of `--over` without its range, such as readout.lr.
        flag: Flag of a run, without dashes: optimizer.peak_lr, preset.rates.readout.
        start: The run's own value. It may lie outside the range.
        low: Least value.
        high: Greatest value.
    """

    word: str
    flag: str
    start: float
    low: float
    high: float

    @property
    def near_one(self) -> bool:
        """True if octaves are counted in the distance from 1, as for b1, b2 and momentum."""
        return self._field in _NEAR_ONE

    @property
    def steps(self) -> tuple[int, int]:
        """Least and greatest grid step inside the range, sixteenths of an octave from `start`."""
        # The tolerance admits an end of the range that lies on a grid step.
        ends = sorted(self.octaves(value) * STEPS_PER_OCTAVE for value in (self.low, self.high))
        return math.ceil(ends[0] - 1e-6), math.floor(ends[1] + 1e-6)

    def value(self, step: int) -> float:
        """Return the constant's value at a grid step, a sixteenth of an octave each.

        At step 0 it is exactly the run's own value. Other values have six digits, or are whole
        numbers for `warmup_steps`.
        """
        if step == 0:
            return self.start
        factor = 2.0 ** (step / STEPS_PER_OCTAVE)
        if self.near_one:
            # A moment averages over 1 / (1 - beta) steps, so octaves are of that length.
            number = 1 - (1 - self.start) * factor
        else:
            number = self._reference * factor
        if self._field in _INTEGERS:
            return float(round(number))
        # Six digits, which a command line repeats exactly.
        return float(f"{number:.6g}")

    def octaves(self, value: float) -> float:
        """Return the octaves from step 0 of the grid to a value, negative below it.

        Near 1 they are octaves of the distance from 1, so a larger value has fewer. The value must
        be above 0, and below 1 if octaves are counted from 1.
        """
        if self.near_one:
            return math.log2((1 - value) / (1 - self.start))
        return math.log2(value / self._reference)

    def cells(self) -> list[str]:
        """Return the range's low and high end and the run's own value as text, for a table."""
        return [f"{number:.4g}" for number in (self.low, self.high, self.start)]

    @property
    def _field(self) -> str:
        """Last part of the flag."""
        return self.flag.rpartition(".")[2]

    @property
    def _reference(self) -> float:
        """Value at step 0 of the grid. For a start of 0 it lies one step below the range."""
        return self.start or self.low * 2.0 ** (-1 / STEPS_PER_OCTAVE)


def parse(words: Sequence[str], config: Config) -> tuple[Constant, ...]:
    """Return the constants that words of `--over` name, each checked at both ends of its range.

    Args:
        words: Words such as `lr` or `weight_decay=0.01:1`.

    Raises:
        ConfigError: A word names no constant of this run, or a range cannot be searched.
        PresetError: The preset does not take an end of a range.
    """
    if not words:
        raise ConfigError(
            "--over names nothing; "
            "write constants with commas, as --over lr,readout.lr,weight_decay=0.01:1"
        )
    by_word = vocabulary(config)
    constants = tuple(_constant(word, by_word, config) for word in words)
    for index, constant in enumerate(constants):
        for earlier in constants[:index]:
            if constant.flag == earlier.flag:
                raise ConfigError(
                    f"--over: {earlier.word} and {constant.word} are both --{constant.flag}; "
                    f"write one of them"
                )

    for index, constant in enumerate(constants):
        for step in constant.steps:
            point = [0] * len(constants)
            point[index] = step
            # Called for its error alone: the preset may not take this end of the range.
            preset_of(with_point(config, constants, tuple(point)))
    return constants


def vocabulary(config: Config) -> dict[str, str]:
    """Return a dict from every name that `--over` accepts for a run to its flag without dashes.

    For example, "lr" has the flag "optimizer.peak_lr".
    """
    flags: dict[str, str] = {}
    own_fields = []
    for name in sorted(OPTIMIZERS[config.optimizer.name].reads):
        # A choice among names, such as coupled or independent decay, has no octaves.
        if not isinstance(getattr(config.optimizer, name), str):
            own_fields.append(name)
    for name in (*_EVERY_OPTIMIZER, *own_fields):
        flag = f"optimizer.{name}"
        flags[name] = flag
        flags[flag] = flag

    if config.preset.name in PRESETS:
        for name in inspect.signature(PRESETS[config.preset.name]).parameters:
            if name in FACTORS:
                flags[name] = f"preset.{name}"

    specs = _specs_by_group(config)
    roles = [spec.role for spec in specs.values()]
    is_of_images = Role.PATCH_EMBEDDING in roles
    embedding = Role.PATCH_EMBEDDING if is_of_images else Role.TOKEN_EMBEDDING
    for spec in specs.values():
        names = set(group_names(spec))
        if spec.role is embedding:
            names.add("embedding")
        for suffix, column in _SUFFIXES.items():
            constant = f"{column}.{spec.group}"
            try:
                # Asked for by trying, so that this list cannot differ from what a run accepts.
                check_constants({constant: 2.0}, specs.values(), config.preset.name)
            except PresetError:
                # The group has no such number.
                continue
            flag = f"preset.{constant}"
            for name in sorted(names):
                flags[f"{name}.{suffix}"] = flag
                flags[f"{column}.{name}"] = flag

    aliases = {}
    for alias, name in ALIASES.items():
        if name in flags:
            aliases[alias] = flags[name]
    return flags | aliases


def _specs_by_group(config: Config) -> dict[str, ParamSpec]:
    """Return the declaration of one parameter of each group, by name of the group.

    A tied readout counts as a group.
    """
    specs = {}
    for spec in config.model.parameters().values():
        specs[spec.group] = spec
    tied = config.model.tied_readout
    if tied:
        specs[tied.group] = tied
    return specs


def with_point(config: Config, constants: Sequence[Constant], point: Point) -> Config:
    """Return a run with the values of the constants at a point.

    Args:
        constants: Constants, in the order of the point's steps.
        point: Grid step of every constant. A constant at step 0 is left as it is.
    """
    changes = {}
    for constant, step in zip(constants, point, strict=True):
        # Step 0 keeps the run's own text, so that the start is the run itself.
        if step:
            changes[constant.flag] = constant.value(step)
    if not changes:
        return config
    for constant in constants:
        # An `adam_lr` that is not set follows `peak_lr`. If only `peak_lr` moves, `adam_lr` must
        # keep its start.
        if constant.flag == "optimizer.adam_lr" and config.optimizer.adam_lr is None:
            changes.setdefault(constant.flag, constant.start)

    optimizer: dict[str, Any] = {}
    preset: dict[str, Any] = {}
    texts = read_constants(config.preset.constants, {})
    for flag, value in changes.items():
        owner, _, name = flag.partition(".")
        if owner == "optimizer":
            optimizer[name] = int(value) if name in _INTEGERS else value
        elif name in CONSTANT_FLAGS:
            preset[name] = value
        else:
            texts[name] = f"{value:.10g}"
    preset["constants"] = tuple(f"{name}={value}" for name, value in texts.items())
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
        preset=dataclasses.replace(config.preset, **preset),
    )


def _constant(text: str, by_word: Mapping[str, str], config: Config) -> Constant:
    """Return the constant of one word, with its written range or a default one.

    Args:
        text: Word such as `lr` or `weight_decay=0.01:1`.
        by_word: Flags by word, from `vocabulary`.

    Raises:
        ConfigError: The word names no constant of the run, or its range cannot be searched.
    """
    word, equals, span = (part.strip() for part in text.partition("="))
    # Words may be written as flags: --lr, weight-decay, preset.rates.readout.
    name = word.lstrip("-").replace("-", "_")
    if name not in by_word:
        name = name.removeprefix("preset.")
    if name not in by_word:
        raise ConfigError(f"--over {word}: {_no_such_constant(name, by_word, config)}")

    flag = by_word[name]
    start = _start(flag, config)
    example = f"{word}={EXAMPLES.get(flag.rpartition('.')[2], '0.01:1')}"
    if equals:
        low, high = grids.span(span)
    elif start == 0:
        raise ConfigError(f"--over {word}: it is 0 in this run; write one, as {example}")
    else:
        octaves = _default_octaves(flag)
        if octaves is None:
            raise ConfigError(f"--over {word}: it has no range of its own; write one, as {example}")
        low = start * 2.0**-octaves
        high = start * 2.0**octaves

    too_high = name in _NEAR_ONE and high >= 1
    if not 0 < low < high or too_high:
        below = " and below 1" if name in _NEAR_ONE else ""
        raise ConfigError(f"--over {text}: write LOW:HIGH with LOW below HIGH, both above 0{below}")
    constant = Constant(word, flag, start, low, high)
    # Rounding to whole numbers may give every step of a narrow range the same value.
    if len({constant.value(step) for step in constant.steps}) < 2:
        raise ConfigError(f"--over {text}: the range has one number; write a wider one")
    return constant


def _no_such_constant(name: str, words: Iterable[str], config: Config) -> str:
    """Return an error message on an unknown name of a constant.

    It lists the presets that have the constant, otherwise it proposes the most similar name.
    """
    factor = ALIASES.get(name, name)
    if factor in FACTORS:
        owners = []
        for preset, make in PRESETS.items():
            if factor in inspect.signature(make).parameters:
                owners.append(preset)
        return f"{config.preset.name} has no constant {factor}; {', '.join(owners)} have it"
    nearest = difflib.get_close_matches(name, list(words), n=1, cutoff=0)[0]
    return f"no number of this run has that name; did you mean {nearest!r}?"


def _default_octaves(flag: str) -> float | None:
    """Return the octaves of a flag's default range on either side of the run's own value.

    Return `None` for a flag without a default range, such as `optimizer.b1`.
    """
    parts = flag.split(".")
    for part, octaves in OCTAVES.items():
        if part in parts:
            return octaves
    return None


def _start(flag: str, config: Config) -> float:
    """Return the run's own value of a flag.

    It is 1 for a factor of a parameter group that the run does not set, and 0 for an option of the
    optimizer that is off.
    """
    owner, _, name = flag.partition(".")
    if owner == "optimizer":
        value = getattr(config.optimizer, name)
        if name == "adam_lr" and value is None:
            value = config.optimizer.peak_lr
        # `None` stands for an option that is off, such as clipping.
        return float(value or 0.0)

    preset: PresetConfig = config.preset
    written = read_constants(preset.constants, {})
    if name in written:
        return float(written[name])
    column, dot, _ = name.partition(".")
    if dot and column in COLUMNS:
        return 1.0
    value = getattr(preset, name, None)
    if value is None:
        value = inspect.signature(PRESETS[preset.name]).parameters[name].default
    return float(value)
