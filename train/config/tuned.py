"""`--preset PRESET:NAME`: a tuned preset's base, constants and optimizer as the defaults of a run's flags.

The config that comes of it has every number written out and names the preset alone, so a run's record needs no file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mupax.presets import PRESETS, constants
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import sizes
from mupax.train.config.run import Config, PresetConfig
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.presets.tuned.find import Tuned

FLAGS = ("--preset", "--preset.name")


def applied(config: Config, argv: Sequence[str], steps: str | None) -> tuple[Config, list[str], Tuned | None]:
    """The config with a tuned preset's numbers, and the words with the preset's plain name; both as they were without one.

    Args:
        config: of the recipe, whose preset and optimizer are replaced.
        argv: flags to come, of which the last `--preset` counts.
        steps: what `--steps` says there, for the length of the warm-up.

    Raises:
        PresetError: no such tuned preset, or a file that is none.
    """
    from mupax.presets.tuned import find as tuned

    words, found = list(argv), None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            where = at if equals else at + 1
            value = value if equals else (words[where] if where < len(words) else "")
            found = tuned.find(value) if ":" in value and value.partition(":")[0] in PRESETS else None
            if found:
                words[where] = f"{flag}={found.preset}" if equals else found.preset
    if found is None:
        return config, words, None
    flags: dict[str, Any] = {name: float(x) for name, x in found.constants.items() if name in constants.FLAGS}
    preset = PresetConfig(
        name=found.preset,
        base=None if found.base is None else sizes.text(found.base),
        form=found.form,
        constants=tuple(f"{name}={value}" for name, value in found.constants.items() if name not in flags),
        **flags,
    )
    total = int(steps) if steps and steps.isascii() and steps.isdigit() else config.steps
    numbers = {name: value for name, value in found.optimizer.items() if name != "warmup_fraction"}
    warmup_steps = round(found.optimizer["warmup_fraction"] * total)
    optimizer = dataclasses.replace(config.optimizer, **numbers, warmup_steps=warmup_steps, decay_steps=None)
    return dataclasses.replace(config, preset=preset, optimizer=optimizer), words, found


def check(found: Tuned, config: Config) -> None:
    """Refuse another optimizer than the tuned one, and warn on stderr of a model `FAR` from the studied sizes.

    Raises:
        ConfigError: the optimizer's name, and what to write instead.
    """
    own, name = found.optimizer["name"], config.optimizer.name
    if OPTIMIZERS[name].family != OPTIMIZERS[own].family:
        raise ConfigError(
            f"{found.use} is tuned for {own}, and its rate means nothing to {name}; leave --optimizer.name out, "
            f"or write --preset {found.preset} and tune {name}"
        )
    from mupax.presets.tuned.find import FAR

    distance = found.distance(config.model.base_sizes())
    far = {axis: doublings for axis, doublings in distance.items() if abs(doublings) > FAR}
    if far:
        said = ", ".join(f"{axis} {doublings:+.1f}" for axis, doublings in far.items())
        print(
            f"warning: this model is more than {FAR:g} doublings beyond the sizes that {found.use} was studied at: {said} "
            f"(`python -m presets tuned {found.use}`)",
            file=sys.stderr,
        )
