"""What a search varies: words such as lr, readout.std or weight_decay=0.01:1, each a number of a run and its range.

| word | number |
|---|---|
| lr, weight_decay, eps, b1, b2, momentum, clip_norm, warmup_steps, final_lr_fraction | of the optimizer |
| GROUP.lr, GROUP.std, GROUP.multiplier, GROUP.decay | the preset's constant of a parameter group, a factor on its rule |
| embedding.lr, ... | the same of what reads the input: token_embedding, or patch_embedding of images |
| attention.multiplier, branch.multiplier | c_a, on attention logits, and beta0, on every residual branch |
| gamma0, beta0, c_a, alpha_res, alpha_ratio | the number of that name, of presets that have it |

A number is searched on a grid of sixteenths of an octave around the run's own; one near 1 (b1) by its distance from 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mupax.presets.constants import COLUMNS
from mupax.presets.constants import check as check_constants
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import CONSTANT_FLAGS, PRESETS, read_constants
from mupax.presets.roles import PresetError, Role
from mupax.presets.rule import names
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.run import Config
from mupax.train.studies.sweep import grids
from mupax.zoo.configs import ConfigError

STEPS = 16
"""Grid steps to an octave."""
OCTAVES = {
    "rates": 4.0,
    "stds": 3.0,
    "multipliers": 3.0,
    "decays": 4.0,
    "peak_lr": 3.0,
    "weight_decay": 4.0,
    "preset": 3.0,
}
"""How far a range without numbers goes to either side of the run's own; others need one written."""
ALIASES = {"lr": "peak_lr", "attention.multiplier": "c_a", "branch.multiplier": "beta0"}
FACTORS = ("gamma0", "beta0", "c_a", "alpha_res", "alpha_ratio")
"""Numbers of presets that are factors; exponents do nothing at the base."""
_SUFFIXES = {"lr": "rates", "std": "stds", "multiplier": "multipliers", "decay": "decays"}
_NEAR_ONE = ("b1", "b2", "momentum")
_WHOLE = ("warmup_steps",)
_EVERY_OPTIMIZER = ("peak_lr", "clip_norm", "warmup_steps", "final_lr_fraction")

Point = tuple[int, ...]
"""Grid steps from the run's own value, one per constant; all 0 is the run itself."""


@dataclasses.dataclass(frozen=True)
class Constant:
    """One number that is searched.

    Attributes:
        word: as it was written, without its range.
        flag: of a run, without dashes: optimizer.peak_lr, preset.rates.readout.
        own: value that the run has, which may lie outside the range.
        low: least value.
        high: greatest.
    """

    word: str
    flag: str
    own: float
    low: float
    high: float

    @property
    def near_one(self) -> bool:
        """Whether octaves are counted in the distance from 1."""
        return self.flag.rpartition(".")[2] in _NEAR_ONE

    @property
    def steps(self) -> tuple[int, int]:
        """Least and greatest grid step inside the range."""
        ends = sorted(self._octaves(value) * STEPS for value in (self.low, self.high))
        return math.ceil(ends[0] - 1e-6), math.floor(ends[1] + 1e-6)

    def value(self, step: int) -> float:
        """The number at a grid step; the run's own, to the bit, at 0."""
        if step == 0:
            return self.own
        factor = 2.0 ** (step / STEPS)
        number = 1 - (1 - self.own) * factor if self.near_one else self._reference * factor
        return (
            float(round(number))
            if self.flag.rpartition(".")[2] in _WHOLE
            else float(f"{number:.6g}")
        )

    def cells(self) -> list[str]:
        """Return the ends of the range and the run's own value, as tables show them."""
        return [f"{number:.4g}" for number in (self.low, self.high, self.own)]

    @property
    def _reference(self) -> float:
        return self.own or self.low * 2.0 ** (-1 / STEPS)  # so that no step of the range is 0

    def _octaves(self, value: float) -> float:
        return math.log2((1 - value) / (1 - self.own) if self.near_one else value / self._reference)


def parse(words: Sequence[str], config: Config) -> tuple[Constant, ...]:
    """The constants that words name, checked at both ends of their ranges.

    Args:
        words: NAME or NAME=LOW:HIGH.
        config: the run whose numbers they are.

    Raises:
        ConfigError, PresetError: a name that means nothing here, named with the nearest, or a range that cannot be searched.
    """
    if not words:
        raise ConfigError(
            "--over names nothing; write constants with commas, as --over lr,readout.lr,weight_decay=0.01:1"
        )
    by_word = vocabulary(config)
    constants = tuple(_constant(word, by_word, config) for word in words)
    flags = [constant.flag for constant in constants]
    for first, second in (
        (a, b) for i, a in enumerate(constants) for b in constants[:i] if a.flag == b.flag
    ):
        raise ConfigError(
            f"--over: {second.word} and {first.word} are both --{first.flag}; write one of them"
        )
    for at in range(len(flags)):
        for step in constants[at].steps:
            preset_of(
                applied(config, constants, tuple(step * (i == at) for i in range(len(flags))))
            )
    return constants


def vocabulary(config: Config) -> dict[str, str]:
    """Every word that a search over this run can have, to its flag."""
    flags: dict[str, str] = {}
    for name in (*_EVERY_OPTIMIZER, *sorted(OPTIMIZERS[config.optimizer.name].reads - {"decay"})):
        flags |= {name: f"optimizer.{name}", f"optimizer.{name}": f"optimizer.{name}"}
    for name in (
        inspect.signature(PRESETS[config.preset.name]).parameters
        if config.preset.name in PRESETS
        else ()
    ):
        if name in FACTORS:
            flags[name] = f"preset.{name}"
    specs = {spec.group: spec for spec in config.model.parameters().values()}
    tied = [config.model.tied_readout] if config.model.tied_readout else []
    specs |= {spec.group: spec for spec in tied}
    roles = [spec.role for spec in specs.values()]
    read_in = Role.PATCH_EMBEDDING if Role.PATCH_EMBEDDING in roles else Role.TOKEN_EMBEDDING
    for spec in specs.values():
        for suffix, column in _SUFFIXES.items():
            constant = f"{column}.{spec.group}"
            try:
                check_constants({constant: 2.0}, specs.values(), config.preset.name)
            except PresetError:  # a number that this group does not have
                continue
            for name in sorted(names(spec) | ({"embedding"} if spec.role is read_in else set())):
                flags[f"{name}.{suffix}"] = flags[f"{column}.{name}"] = f"preset.{constant}"
    return flags | {alias: flags[name] for alias, name in ALIASES.items() if name in flags}


def applied(config: Config, constants: Sequence[Constant], point: Point) -> Config:
    """The run with the constants of a point.

    Args:
        config: the run.
        constants: what is searched.
        point: a grid step for each.
    """
    changes = {c.flag: c.value(step) for c, step in zip(constants, point, strict=True) if step}
    optimizer: dict[str, Any] = {}
    preset: dict[str, Any] = {}
    texts = read_constants(config.preset.constants, {})
    for flag, value in changes.items():
        owner, _, name = flag.partition(".")
        if owner == "optimizer":
            optimizer[name] = int(value) if name in _WHOLE else value
        elif name in CONSTANT_FLAGS:
            preset[name] = value
        else:
            texts[name] = f"{value:.10g}"
    if not changes:
        return config
    preset["constants"] = tuple(f"{name}={value}" for name, value in texts.items())
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
        preset=dataclasses.replace(config.preset, **preset),
    )


def _constant(text: str, by_word: Mapping[str, str], config: Config) -> Constant:
    word, equals, span = (part.strip() for part in text.partition("="))
    name = word.lstrip("-").replace("-", "_")
    name = name if name in by_word else name.removeprefix("preset.")
    if name not in by_word:
        if (constant := ALIASES.get(name, name)) in FACTORS:
            owners = [
                n for n, make in PRESETS.items() if constant in inspect.signature(make).parameters
            ]
            raise ConfigError(
                f"--over {word}: {config.preset.name} has no constant {constant}; {', '.join(owners)} have it"
            )
        raise ConfigError(
            f"--over {word}: no number of this run has that name; did you mean {_nearest(name, by_word)!r}?"
        )
    flag = by_word[name]
    start = _start(flag, config)
    if equals:
        low, high = grids.span(span)
    else:
        octaves = next((reach for part, reach in OCTAVES.items() if part in flag.split(".")), None)
        if octaves is None or start == 0:
            why = "is 0 in this run" if start == 0 else "has no range of its own"
            raise ConfigError(
                f"--over {word}: it {why}; write one, as {word}={'0.9:0.999' if name in _NEAR_ONE else '0.01:1'}"
            )
        low, high = start * 2.0**-octaves, start * 2.0**octaves
    if not 0 < low < high or (name in _NEAR_ONE and high >= 1):
        below = " and below 1" if name in _NEAR_ONE else ""
        raise ConfigError(f"--over {text}: write LOW:HIGH with LOW below HIGH, both above 0{below}")
    constant = Constant(word, flag, start, low, high)
    if len({constant.value(step) for step in constant.steps}) < 2:
        raise ConfigError(f"--over {text}: the range has one number; write a wider one")
    return constant


def _start(flag: str, config: Config) -> float:
    """The run's own value of a flag."""
    owner, _, name = flag.partition(".")
    if owner == "optimizer":
        return float(getattr(config.optimizer, name) or 0.0)
    preset: PresetConfig = config.preset
    written = read_constants(preset.constants, {})
    if name in written:
        return float(written[name])
    if name.partition(".")[0] in COLUMNS and "." in name:
        return 1.0
    value = getattr(preset, name, None)
    return float(
        inspect.signature(PRESETS[preset.name]).parameters[name].default if value is None else value
    )


def _nearest(name: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(name, [*words], n=1, cutoff=0)[0]
