"""`--preset PRESET:NAME`: a tuned preset's base, constants and optimizer as the defaults of a run's flags.

The config that comes of it has every number written out and names the preset alone, so a run's record needs no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mupax import terminal
from mupax.presets.constants import means_something, read
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.papers import CONSTANT_FLAGS, PRESETS
from mupax.train.config.preset import base_parts, base_text
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, PresetConfig
from mupax.zoo.configs import CONFIGS, ConfigError

if TYPE_CHECKING:
    from mupax.presets.tuned.find import Tuned

FLAGS = ("--preset", "--preset.name")
_MOVED: dict[str, dict[str, Any]] = {
    "depth-mup:lm-python-half-v1": {
        "name": "depth-mup",
        "base": "embed=64,heads=4,kv_heads=4,head_dim=16,mlp=160,layers=2",
        "alpha_a": 1.0,
        "alpha_l": 0.5,
        "constants": [],
    },
    "mup:vit-endless-v1": {
        "name": "mup",
        "base": "embed=64,head_dim=16,heads=4,kv_heads=4,mlp=256,layers=4",
        "alpha_a": 1.0,
        "constants": [
            "rates.patch_embedding=11.8146",
            "rates.readout=64.0",
            "stds.readout=1.09051",
        ],
    },
}
"""Fields of `preset` that tuned presets of `find.MOVED` stand for, in records that name one there."""


def applied(
    config: Config, argv: Sequence[str], steps: str | None
) -> tuple[Config, list[str], Tuned | None]:
    """The config with a tuned preset's numbers, and the words with the preset's plain name; both as they were without one.

    Args:
        config: of the recipe, whose preset and optimizer are replaced.
        argv: flags to come, of which the last `--preset` counts.
        steps: what `--steps` says there, for the length of the warm-up.

    Raises:
        PresetError: no such tuned preset, or a file that is none.
    """
    from mupax.presets.tuned import find as tuned

    words, study = list(argv), None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            where = at if equals else at + 1
            value = value if equals else (words[where] if where < len(words) else "")
            study = (
                tuned.find(value) if ":" in value and value.partition(":")[0] in PRESETS else None
            )
            if study:
                words[where] = f"{flag}={study.preset}" if equals else study.preset
    if study is None:
        return config, words, None
    own, groups = read(study.constants)
    flags: dict[str, Any] = {name: float(x) for name, x in own.items() if name in CONSTANT_FLAGS}
    preset = PresetConfig(
        name=study.preset,
        base=None if study.base is None else base_text(study.base),
        form=study.form,
        constants=tuple(
            f"{name}={value}" for name, value in {**own, **groups}.items() if name not in flags
        ),
        **flags,
    )
    total = int(steps) if steps and steps.isascii() and steps.isdigit() else config.steps
    numbers = dict(study.optimizer)
    if "warmup_fraction" in numbers:  # a published source may leave it open
        numbers["warmup_steps"] = round(numbers.pop("warmup_fraction") * total)
    optimizer = dataclasses.replace(config.optimizer, **numbers, decay_steps=None)
    return dataclasses.replace(config, preset=preset, optimizer=optimizer), words, study


def fitted(config: Config, study: Tuned) -> Config:
    """Return the config without those constants of a published preset that its model has no parameters for.

    A published table is of the source's models, and a run may have another: rotary positions, or a readout of its own. Constants
    that the command line names stay, and are refused where they mean nothing.
    """
    if not study.is_published:
        return config
    idle = _idle_constants(config, study)
    constants = [text for text in config.preset.constants if text not in idle]
    return dataclasses.replace(
        config, preset=dataclasses.replace(config.preset, constants=tuple(constants))
    )


def _idle_constants(config: Config, study: Tuned) -> list[str]:
    """Return constants of a tuned preset, as NAME=VALUE, that the run's model has no parameters for."""
    _, groups = read(study.constants)
    model = config.model
    tied = [model.tied_readout] if model.tied_readout else []
    specs = [*model.parameters().values(), *tied]
    return [f"{name}={value}" for name, value in groups.items() if not means_something(name, specs)]


def without_moved(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's `preset` with the numbers of a tuned preset that no longer comes with mupax, where it names one.

    What the record itself says of base and constants holds, as it did beside the name.
    """
    moved = _MOVED.get(str(preset.get("name")))
    if moved is None:
        return dict(preset)
    written = {name: value for name, value in preset.items() if value is not None}
    recorded = [text for text in written.get("constants", []) if isinstance(text, str)]
    names = {text.partition("=")[0] for text in recorded}
    constants = [text for text in moved["constants"] if text.partition("=")[0] not in names]
    return {
        **preset,
        **moved,
        **written,
        "name": moved["name"],
        "constants": [*constants, *recorded],
    }


def named_moved(argv: Sequence[str]) -> str | None:
    """Return the tuned preset that the words name, where it no longer comes with mupax and no folder has it."""
    from mupax.presets.tuned import find

    named = [word for word in _named(argv) if word in find.MOVED]
    return named[-1] if named and named[-1] not in find.files() else None


def _named(argv: Sequence[str]) -> Iterator[str]:
    """Yield every value of the flags that name a preset."""
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            yield value if equals else after


def without_preset(argv: Sequence[str]) -> list[str]:
    """Return the words without the flags that name a preset."""
    words: list[str] = []
    is_value = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if not is_value and flag not in FLAGS:
            words.append(word)
        is_value = not is_value and flag in FLAGS and not equals
    return words


def check(study: Tuned, config: Config) -> None:
    """Refuse another optimizer than the tuned one, and warn on stderr of a model `FAR` from the studied sizes.

    Args:
        study: the tuned preset that the run names.
        config: of the run, all flags applied.

    Raises:
        ConfigError: the optimizer's name, and what to write instead.
    """
    own, name = study.optimizer["name"], config.optimizer.name
    if OPTIMIZERS[name].family != OPTIMIZERS[own].family:
        raise ConfigError(
            f"{study.use} is tuned for {own}, and its rate means nothing to {name}; leave --optimizer.name out, "
            f"or write --preset {study.preset} and tune {name}"
        )
    from mupax.presets.tuned import published
    from mupax.presets.tuned.find import FAR

    if study.is_published:
        idle = _idle_constants(config, study)
        left_out = (
            f" Left out, as this model has no such parameters: {', '.join(idle)}." if idle else ""
        )
        terminal.note(published.rests_on(study) + left_out)
    distance = study.distance(config.model.base_sizes())
    far = {axis: doublings for axis, doublings in distance.items() if abs(doublings) > FAR}
    if far:
        distances = ", ".join(f"{axis} {doublings:+.1f}" for axis, doublings in far.items())
        terminal.note(
            f"warning: this model is more than {FAR:g} doublings beyond the sizes that {study.use} was studied at: {distances} "
            f"(`mupax presets tuned {study.use}`)"
        )


def with_run_base(config: Config, start: Config, study: Tuned | None) -> Config:
    """The config whose base names batch and tokens: as written, else of the recipe it names, of the study, or of this recipe.

    Args:
        config: of the run.
        start: of its recipe, before flags.
        study: of its tuned preset.

    Raises:
        ConfigError, PresetError: they are no whole number of examples of this length, or the rule cannot be applied.
    """
    name, sizes = base_parts(config.preset.base)
    if name in RECIPES:
        start, study = RECIPES[name](), None
        if start.model.family != config.model.family:
            return config  # which `preset_of` refuses
        if name not in CONFIGS:
            name, sizes = "", {**start.model.base_sizes(), **sizes}
    batch, steps, tokens = (
        start.data.batch_size,
        start.steps,
        start.steps * start.data.batch_size * start.model.units,
    )
    if study:
        batch, steps, tokens = (study.provenance[field] for field in ("batch", "steps", "seen"))
        if None in (batch, steps, tokens):
            raise ConfigError(
                f"--joint {config.preset.joint}: {study.use} does not say the batch and tokens of its runs; "
                "write them, as --preset.base MODEL,batch=N,tokens=N"
            )
    of_this_length, rest = divmod(tokens // steps, config.model.units)
    if rest and "batch" not in sizes:
        raise ConfigError(
            f"--joint {config.preset.joint}: the base's batch of {batch} is no whole number of examples of this model's length; "
            "write it yourself, as --preset.base MODEL,batch=N,tokens=N"
        )
    text = ",".join(
        filter(
            None, [name, base_text({**sizes, "batch": of_this_length, "tokens": tokens, **sizes})]
        )
    )
    config = dataclasses.replace(config, preset=dataclasses.replace(config.preset, base=text))
    _ = config.scaled_optimizer  # refused here, if at all
    return config
