"""Tuned presets on a command line, `--preset PRESET:NAME`.

The base, constants and optimizer of the tuned preset become the defaults of the run's flags. The
config that results has every value written out and names the plain preset, so the record of a run
needs no file of tuned constants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mupax import terminal
from mupax.mappings import drop_none
from mupax.presets import CONSTANT_FLAGS, PRESETS
from mupax.presets.constants import means_something, read
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.preset import base_parts, base_text
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, PresetConfig
from mupax.zoo.configs import CONFIGS, ConfigError

if TYPE_CHECKING:
    from mupax.presets.tuned.find import Tuned

FLAGS = ("--preset", "--preset.name")
"""Flags that name a preset."""
_MOVED: dict[str, dict[str, Any]] = {
    "depth-mup:lm-python-half-v1": {
        "name": "depth-mup",
        "base": "embed=64,heads=4,kv_heads=4,head_dim=16,mlp=160,layers=2",
        "alpha_a": 1.0,
        "alpha_l": 0.5,
        "constants": [],
    },
    "mup:lm-laptop-v1": {
        "name": "mup",
        "base": "embed=64,heads=2,kv_heads=2,head_dim=32,mlp=160,layers=2",
        "alpha_a": 1.0,
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
"""Tuned preset that mupax no longer has, to the fields of `preset` that it set.

Records of older runs still name these presets (`find.MOVED`).
"""


def applied(
    config: Config, argv: Sequence[str], steps: str | None
) -> tuple[Config, list[str], Tuned | None]:
    """Apply the tuned preset that the words name to a recipe's config.

    Args:
        config: Config of the recipe. Its preset is replaced. So are the fields of its optimizer
            that the tuned preset has; `decay_steps` becomes `None`, and the other fields stay.
        argv: Words of the command line. The last flag that names a preset counts.
        steps: Value of `--steps` among the words, for the length of the warm-up. `None` takes the
            recipe's.

    Returns:
        The config with the tuned values, the words with the plain name of the preset, and the
        tuned preset. Without a tuned preset: the config unchanged, a copy of the words, and `None`.

    Raises:
        PresetError: The tuned preset does not exist, or its file is damaged.
    """
    from mupax.presets.tuned import find as tuned

    words = list(argv)
    study = None
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            continue
        value_index = index if equals else index + 1
        if not equals:
            # A flag without a value is refused when tyro reads the flags.
            value = words[value_index] if value_index < len(words) else ""
        study = None
        if ":" in value and value.partition(":")[0] in PRESETS:
            study = tuned.find(value)
            # Replace the tuned name by the plain preset, so that the run's record names no tuned
            # file.
            words[value_index] = study.preset
            if equals:
                words[value_index] = f"{flag}={study.preset}"
    if study is None:
        return config, words, None

    total_steps = config.steps
    # Other values are refused when tyro reads the flags.
    if steps and steps.isascii() and steps.isdigit():
        total_steps = int(steps)
    # The study's values replace the recipe's. A tuned file leaves out these two fields if they have
    # their default, so the defaults are set first.
    values = {"adam_lr": None, "orthogonalizer": "newton_schulz", **study.optimizer}
    if "warmup_fraction" in values:  # a published source may leave the warm-up open
        values["warmup_steps"] = round(values.pop("warmup_fraction") * total_steps)
    # The recipe's decay_steps belong to its own schedule, which the tuned values replace.
    optimizer = dataclasses.replace(config.optimizer, **values, decay_steps=None)
    config = dataclasses.replace(config, preset=_preset_config(study), optimizer=optimizer)
    return config, words, study


def _preset_config(study: Tuned) -> PresetConfig:
    """Return the section `preset` of a config that has the constants of a tuned preset."""
    run_constants, group_constants = read(study.constants)
    # Constants with a field of their own, such as alpha_a, are set in that field.
    flags: dict[str, Any] = {}
    for name, value in run_constants.items():
        if name in CONSTANT_FLAGS:
            flags[name] = float(value)
    constants = []
    for name, value in {**run_constants, **group_constants}.items():
        if name not in flags:
            constants.append(f"{name}={value}")
    return PresetConfig(
        name=study.preset,
        base=None if study.base is None else base_text(study.base),
        form=study.form,
        constants=tuple(constants),
        **flags,
    )


def fitted(config: Config, study: Tuned) -> Config:
    """Return the config without the published constants that its model has no parameters for.

    The config is unchanged if the tuned preset is not a published one. A published table is for the
    models of its source. Another model may have rotary positions, or a readout of its own.
    Constants that the command line names are kept, and refused elsewhere if they do not apply.
    """
    if not study.is_published:
        return config
    idle = _idle_constants(config, study)
    constants = tuple(text for text in config.preset.constants if text not in idle)
    preset = dataclasses.replace(config.preset, constants=constants)
    return dataclasses.replace(config, preset=preset)


def _idle_constants(config: Config, study: Tuned) -> list[str]:
    """Return the tuned preset's group constants that match no parameter, as NAME=VALUE."""
    _, groups = read(study.constants)
    specs = list(config.model.parameters().values())
    if config.model.tied_readout:
        # A tied readout has no array, so it is not among the parameters, but it has a multiplier.
        specs.append(config.model.tied_readout)
    idle = []
    for name, value in groups.items():
        if not means_something(name, specs):
            idle.append(f"{name}={value}")
    return idle


def without_moved(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded `preset` with a tuned preset that mupax no longer has written out.

    Any other preset is returned unchanged, as a copy. The base and constants that the record itself
    has take precedence, as they did then.
    """
    moved = _MOVED.get(str(preset.get("name")))
    if moved is None:
        return dict(preset)
    written = drop_none(preset)
    recorded = []
    for text in written.get("constants", []):
        if isinstance(text, str):
            recorded.append(text)
    names = {text.partition("=")[0] for text in recorded}
    constants = []
    for text in moved["constants"]:
        if text.partition("=")[0] not in names:
            constants.append(text)
    return {
        **preset,
        **moved,
        **written,
        "name": moved["name"],
        "constants": [*constants, *recorded],
    }


def named_moved(argv: Sequence[str]) -> str | None:
    """Return the tuned preset, no longer in mupax, that a command line names (`find.MOVED`).

    If there are several, the last one counts. `None` if the command line names no such preset, or
    if a file of tuned presets defines that name again.
    """
    from mupax.presets.tuned import find

    names = [word for word in _named(argv) if word in find.MOVED]
    if names and names[-1] not in find.files():
        return names[-1]
    return None


def _named(argv: Sequence[str]) -> Iterator[str]:
    """Yield every value of the flags that name a preset."""
    for word, follower in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            yield value if equals else follower


def without_preset(argv: Sequence[str]) -> list[str]:
    """Return the words without the flags that name a preset, and without their values."""
    words: list[str] = []
    is_value = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if not is_value and flag not in FLAGS:
            words.append(word)
        # The word after `--preset` is its value, even if it looks like a flag.
        is_value = not is_value and flag in FLAGS and not equals
    return words


def check(study: Tuned, config: Config) -> None:
    """Refuse an optimizer of another family than the tuned one, and print notes and warnings.

    A note on standard error says what a published preset rests on. A warning says that the model
    is more than `FAR` doublings larger or smaller than the studied sizes.

    Args:
        config: Config of the run with all flags applied.

    Raises:
        ConfigError: The optimizer is of another family.
    """
    tuned_name = study.optimizer["name"]
    name = config.optimizer.name
    if OPTIMIZERS[name].family != OPTIMIZERS[tuned_name].family:
        raise ConfigError(
            f"{study.use} is tuned for {tuned_name}, and its rate means nothing to {name}; "
            f"leave --optimizer.name out, or write --preset {study.preset} and tune {name}"
        )
    from mupax.presets.tuned import published
    from mupax.presets.tuned.find import FAR

    if study.is_published:
        idle = _idle_constants(config, study)
        note = published.rests_on(study)
        if idle:
            note += f" Left out, as this model has no such parameters: {', '.join(idle)}."
        terminal.note(note)

    distance = study.distance(config.model.base_sizes())
    far = {}
    for axis, doublings in distance.items():
        # Smaller than studied is as far from the evidence as larger.
        if abs(doublings) > FAR:
            far[axis] = doublings
    if far:
        distances = ", ".join(f"{axis} {doublings:+.1f}" for axis, doublings in far.items())
        terminal.note(
            f"warning: this model is more than {FAR:g} doublings from the sizes that "
            f"{study.use} was studied at: {distances} (`mupax presets tuned {study.use}`)"
        )


def with_run_base(config: Config, start: Config, study: Tuned | None) -> Config:
    """Return the config with a base that names batch and tokens, which joint rules need.

    Batch and tokens that the base names stay. The others are those of the recipe that the base
    names, or of the tuned preset, or of this run's recipe. The config is unchanged if the base
    names a recipe whose model is of another family.

    Args:
        start: Config of the run's recipe, before flags.
        study: Tuned preset of the run, or `None`.

    Raises:
        ConfigError: The batch is no whole number of examples of this length, or the tuned preset
            does not say its batch and tokens.
        PresetError: The joint rule cannot be applied.
    """
    name, sizes = base_parts(config.preset.base)
    if name in RECIPES:
        start = RECIPES[name]()
        study = None
        if start.model.family != config.model.family:
            return config  # `preset_of` refuses a base of another family
        if name not in CONFIGS:
            name = ""
            sizes = {**start.model.base_sizes(), **sizes}

    joint = config.preset.joint
    if study is not None:
        batch = study.provenance["batch"]
        steps = study.provenance["steps"]
        tokens = study.provenance["seen"]
        if None in (batch, steps, tokens):
            raise ConfigError(
                f"--joint {joint}: {study.use} does not say the batch and tokens of its runs; "
                "write them, as --preset.base MODEL,batch=N,tokens=N"
            )
    else:
        batch = start.data.batch_size
        steps = start.steps
        tokens = start.steps * start.data.batch_size * start.model.units

    # The base's batch in examples of this model's length, with as many tokens.
    examples, remainder = divmod(tokens // steps, config.model.units)
    if remainder and "batch" not in sizes:
        raise ConfigError(
            f"--joint {joint}: the base's batch of {batch} is no whole number of examples of this "
            "model's length; write it yourself, as --preset.base MODEL,batch=N,tokens=N"
        )
    # `sizes` twice: the first sets the order, the second the values that the base names.
    sizes_text = base_text({**sizes, "batch": examples, "tokens": tokens, **sizes})
    base = ",".join(filter(None, [name, sizes_text]))
    config = dataclasses.replace(config, preset=dataclasses.replace(config.preset, base=base))
    _ = config.scaled_optimizer  # raises if the rule cannot be applied
    return config
