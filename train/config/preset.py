"""Parameterization of a run: the config of its preset, and the flags of commands that name one.

`PresetConfig` is the section `preset` of a run's config. `preset_of` makes the preset of a run,
which the optimizer, the initialization and the studies read.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from tyro import conf

from mupax import presets
from mupax.command_line import UsageError, repeated
from mupax.config_fields import Affects, Listed
from mupax.presets import ALIASES, CONSTANT_FLAGS, read_constants
from mupax.presets.roles import FOLLOWS, RUN_AXES
from mupax.zoo.configs import CONFIGS, ConfigError, ModelConfig
from mupax.zoo.configs import get as get_model
from mupax.zoo.transformer import TransformerConfig

_EXPERTS = {"experts", "active", "expert_dim"}
"""Axes of a mixture of experts, which a base must have if the model has them."""


class Parameterized(Protocol):
    """Fields of a run's config that its parameterization reads: preset and model."""

    @property
    def preset(self) -> PresetConfig: ...
    @property
    def model(self) -> ModelConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetConfig:
    """Preset of a run and its constants.

    A constant that is left out takes the preset's default.
    """

    name: Annotated[str, conf.arg(aliases=("--preset",)), Listed("model", "sp")] = "mup"
    """Name of a preset (`mupax presets` lists them), PRESET:NAME of a tuned preset, or
    measured:PATH, a file of `mupax presets balance`."""
    base: Annotated[str | None, conf.arg(metavar="MODEL|AXIS=N,..."), Listed("model", None)] = None
    """Model that factors are relative to, or its sizes, such as embed=64,head_dim=16,layers=2. A
    base model without experts gets as many as the run's model. None is the absolute form (every
    base size is 1)."""
    form: Annotated[
        Literal["plain", "readout-multiplier", "mean-field", "table-9"] | None,
        Affects("model", "mean-field"),
    ] = None
    """Where multipliers are kept. None: the preset's own form. Changes the size of weights and
    gradients, but not training, except through clip_norm, which reads the gradients."""
    alpha_a: Annotated[float | None, Affects("model", 0.75)] = None
    """Attention logits scale as head_dim^-alpha_a, with alpha_a in [1/2, 1]."""
    alpha_l: Annotated[float | None, Listed("model", 0.75, given={"model.depth": 5})] = None
    """Residual branches scale as depth^-alpha_l, with alpha_l in [1/2, 1] (depth-mup)."""
    gamma0: Annotated[float | None, Affects("model", 0.5)] = None
    """Amount of feature learning: the readout is divided by it."""
    beta0: Annotated[float | None, Affects("model", 0.5)] = None
    """Constant factor on every residual branch."""
    constants: Annotated[
        tuple[str, ...], conf.arg(metavar="NAME=VALUE ..."), Listed("model", ("beta0=0.25",))
    ] = ()
    """Other constants of the preset, such as s=0.5 (ntk), eps_scope=everywhere (completep) or
    c_a=0.5 (mup). Also factors on the values of one parameter group at base size, which have flags
    of their own: --preset.rates.GROUP X, --preset.stds., --preset.multipliers., --preset.eps. and
    --preset.decays."""
    zero_readout: Annotated[bool, Affects("model", True)] = False
    """Initialize the readout to zero."""
    joint: Annotated[
        Literal["none", "sde", "complete-d", "completed-muon"],
        conf.arg(aliases=("--joint",)),
        Listed("model", "sde", given={"preset.base": "lm-proxy,batch=4,tokens=768"}),
    ] = "none"
    """Scale learning rate, betas, eps, weight decay and warm-up by this rule (`mupax presets
    joint`). Their values were tuned at the recipe's batch and tokens, or at those of a base written
    MODEL,batch=N,tokens=N."""
    noise_scale: Annotated[
        float | None,
        conf.arg(aliases=("--noise-scale",)),
        Affects("guards", test="train/config/test_joint.py"),
    ] = None
    """Gradient noise scale in examples, from `mupax noise`. A joint rule between two batches is
    refused if one of them is larger."""

    def __post_init__(self) -> None:
        # Records, messages and comparisons have one name for a preset, whichever alias was written.
        # `object.__setattr__`, because the dataclass is frozen.
        object.__setattr__(self, "name", ALIASES.get(self.name, self.name))
        # Comparing NaN by order gives False, so this form refuses NaN. `<= 0` would accept it.
        if self.noise_scale is not None and not self.noise_scale > 0:
            raise ConfigError(
                f"preset.noise_scale is {self.noise_scale}; "
                "write a number of examples above 0, or None"
            )


def preset_of(config: Parameterized) -> presets.Preset:
    """Return the run's parameterization, relative to the sizes of `config.preset.base`.

    Raises:
        PresetError: The preset does not exist, or a constant does not fit it or is out of range.
        ConfigError: The base is neither sizes nor a model's name, is a model of another family, or
            is sizes that leave out the experts of the run's model.
    """
    return preset_for(config.preset, config.model)


def rules_of(config: Parameterized) -> tuple[Any, ...]:
    """Return name, joint rule, `zero_readout` and constants of a run's preset, for comparisons.

    The base is left out. Results that are equal mean that two runs use the same preset. A constant
    that is written with its default value counts as left out.

    Raises:
        PresetError, ConfigError: The preset cannot be made (`preset_of`).
    """
    choices = preset_of(config).choices
    return (
        config.preset.name,
        config.preset.joint,
        config.preset.zero_readout,
        # Sorted, because the order of flags changes nothing.
        tuple(sorted(choices.items())),
    )


def preset_of_step(config: Parameterized) -> PresetConfig:
    """Return a preset config with only the settings that a run's compiled step depends on.

    Sweeps use it to find points that share one compiled step. The settings are those of Muon: which
    blocks of a matrix it orthogonalizes, and whether it divides by measured norms. If the blocks
    have the size of the base's matrices ("tiles"), the base is kept, too. All other settings have
    their defaults, because the compiled step gets their effect as input arrays.

    Raises:
        PresetError, ConfigError: The preset cannot be made (`preset_of`).
    """
    muon = preset_of(config).muon
    if not muon.changes_steps:
        return PresetConfig()
    constants = (f"muon_scale={muon.scale}", f"muon_blocks={muon.blocks}")
    # Tiles have the size of the base's matrices. The other blocks do not depend on the base.
    base = config.preset.base if muon.blocks == "tiles" else None
    return PresetConfig(constants=constants, base=base)


def same_preset(first: Parameterized, second: Parameterized) -> bool:
    """Return whether two runs have equal `rules_of` and the same base, however they are written.

    The bases must also name the same batch and tokens.

    Raises:
        PresetError, ConfigError: A preset cannot be made (`preset_of`).
    """
    if rules_of(first) != rules_of(second):
        return False
    if preset_of(first).base != preset_of(second).base:
        return False
    return _run_base(first) == _run_base(second)


def _run_base(config: Parameterized) -> dict[str, int]:
    """Return the batch and the tokens that a base names. Joint rules are relative to them.

    The keys are "batch" and "tokens". One that the base does not name is missing.
    """
    _, sizes = base_parts(config.preset.base)
    return {axis: size for axis, size in sizes.items() if axis in RUN_AXES}


def preset_for(config: PresetConfig, model: ModelConfig) -> presets.Preset:
    """Return the preset that a config names, with its constants, for a model.

    Args:
        model: Model that the preset is applied to. The base must be of its family, and constants
            of parameter groups must name one of its groups.

    Raises:
        PresetError, ConfigError: The preset cannot be made (`preset_of`).
    """
    base = _base_sizes(config, model)
    flags = {name: getattr(config, name) for name in CONSTANT_FLAGS}
    preset = presets.get(
        config.name,
        base=base,
        form=config.form,
        zero_readout=config.zero_readout,
        **read_constants(config.constants, flags),
    )
    # Most runs have no constants to check, and then need no declarations of the model's parameters.
    if not preset.constants:
        return preset

    from mupax.presets.constants import check

    specs = list(model.parameters().values())
    # A tied readout has no array of its own, so it is not in `parameters`. It still has a
    # multiplier.
    if model.tied_readout:
        specs.append(model.tied_readout)
    # PRESET:NAME is a tuned preset. `measured:PATH` has a colon, too, but is not in `PRESETS`.
    if ":" in config.name and config.name.partition(":")[0] in presets.PRESETS:
        preset = _without_idle_constants(preset, config, specs)
    check(preset.constants, specs, preset.name)
    return preset


def _base_sizes(config: PresetConfig, model: ModelConfig) -> dict[str, int] | None:
    """Return the sizes that a preset is relative to, or `None` for the absolute form.

    Batch and tokens of the base are left out.

    Raises:
        ConfigError: The base is of another family, or lacks the experts of the model.
    """
    name, sizes = base_parts(config.base)
    # Batch and tokens are read by joint rules alone.
    base = {axis: size for axis, size in sizes.items() if axis not in RUN_AXES}
    # `None,batch=N,tokens=N` is the absolute form too: its sizes are only for a joint rule.
    if name == "None" and not base:
        return None
    if name and name != "None":
        base_model = get_model(name)
        if base_model.family != model.family:
            alike = []
            for key, entry in CONFIGS.items():
                if entry.family == model.family:
                    alike.append(key)
            choices = ", ".join(alike) or "its sizes, as embed=64,layers=2"
            raise ConfigError(
                f"preset.base {name} is a {base_model.family} and the model a {model.family}; "
                f"write one of {choices}, or None for the absolute form"
            )
        # Sizes that are written after the name replace those of the named model.
        base = {**_with_experts_of(model, base_model).base_sizes(), **base}

    # Numbers and sizes of experts grow, so they are among the base sizes.
    model_sizes = model.base_sizes()
    missing = sorted(_EXPERTS & model_sizes.keys() - base.keys())
    if missing:
        added = base_text({axis: model_sizes[axis] for axis in missing})
        raise ConfigError(
            f"preset.base {config.base} has no {', '.join(missing)} and the model has experts; "
            f"write {config.base},{added}, those of the base"
        )
    return base


def unnamed_axes(run: Parameterized) -> list[str]:
    """Return the model's sizes that a base such as `embed=64` does not name, as "heads 4".

    A size that the base leaves out counts as equal to the base's (`Preset.base_size`), so no rule
    scales with it. With `embed=64` alone, for example, attention's output has the base's learning
    rate at any number of heads. The command line warns about this.

    An axis that takes its base size from a named axis (`FOLLOWS`) is not listed. The list is empty
    if the base is `None` or names a model.
    """
    if run.preset.base is None:
        return []
    name, base_sizes = base_parts(run.preset.base)
    if name or not base_sizes:
        return []
    unnamed = []
    for axis, size in run.model.base_sizes().items():
        if axis not in base_sizes and FOLLOWS.get(axis) not in base_sizes:
            unnamed.append(f"{axis} {size}")
    return unnamed


def _without_idle_constants(
    preset: presets.Preset, config: PresetConfig, specs: Sequence[presets.ParamSpec]
) -> presets.Preset:
    """Return a published preset without the constants that the model has no parameters for.

    A published table is for the models of its source, so a constant of its file may not apply.
    Constants that the flags name are kept, and refused elsewhere if they do not apply.
    """
    from mupax.presets.constants import means_something
    from mupax.presets.tuned import find

    if not find.find(config.name).is_published:
        return preset
    # A constant from a flag must not be dropped silently. The caller refuses it if it does not
    # apply.
    flag_names = {text.partition("=")[0] for text in config.constants}
    constants = {}
    for name, value in preset.constants.items():
        if name in flag_names or means_something(name, specs):
            constants[name] = value
    return dataclasses.replace(preset, constants=constants)


def _with_experts_of(model: ModelConfig, base: ModelConfig) -> ModelConfig:
    """Return a base model with as many experts as the model, in proportion to the base's width.

    A base with experts of its own, and a base for a model without experts, stays as it is.
    """
    if not isinstance(model, TransformerConfig) or not isinstance(base, TransformerConfig):
        return base
    if model.experts is None or base.experts is not None:
        return base
    # Keep the model's ratio of the experts' hidden size to the width.
    expert_dim = max(1, round(model.expert_size * base.width / model.width))
    return dataclasses.replace(
        base,
        experts=model.experts,
        active_experts=model.active_experts,
        shared_experts=model.shared_experts,
        expert_dim=expert_dim,
    )


def base_parts(text: str | None) -> tuple[str, dict[str, int]]:
    """Return the model that a base names, and the sizes that follow it.

    Axes that do not exist are left for `presets.get` to refuse.

    Args:
        text: A `preset.base`, such as "lm-proxy,batch=4" or "embed=64,layers=2".

    Returns:
        The model's name, "" without one and "None" for the absolute form, and the sizes by
        logical axis.

    Raises:
        ConfigError: A part is not AXIS=N, or an axis comes twice.
    """
    if text is None:
        text = "None"
    first, *parts = text.split(",")
    if first and "=" not in first:
        name = first.strip()
    else:
        name = ""
        parts = [first, *parts]

    sizes: dict[str, int] = {}
    for part in parts:
        axis, _, size = (word.strip() for word in part.partition("="))
        # `isdigit` alone accepts digits such as superscripts, which `int` refuses.
        is_size = size.isascii() and size.isdigit()
        if not axis or not is_size or axis in sizes:
            raise ConfigError(
                f"preset.base {text}: {part!r} is no AXIS=N; "
                "write each axis once, as embed=64,head_dim=16"
            )
        sizes[axis] = int(size)
    return name, sizes


def base_text(sizes: Mapping[str, int]) -> str:
    """Return sizes as `preset.base` takes them: a text that `base_parts` reads."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantFlags:
    """Constants of the preset that a command names.

    Each flag has a short name, such as `--alpha-a`, and the name that it has in `mupax train`, such
    as `--preset.alpha-a`.
    """

    alpha_a: Annotated[float | None, conf.arg(aliases=("--preset.alpha-a",), metavar="X")] = None
    """Attention logits scale as head_dim^-alpha_a."""
    alpha_l: Annotated[float | None, conf.arg(aliases=("--preset.alpha-l",), metavar="X")] = None
    """Residual branches scale as depth^-alpha_l (depth-mup)."""
    gamma0: Annotated[float | None, conf.arg(aliases=("--preset.gamma0",), metavar="X")] = None
    """Amount of feature learning."""
    beta0: Annotated[float | None, conf.arg(aliases=("--preset.beta0",), metavar="X")] = None
    """Constant factor on every residual branch."""
    constants: Annotated[
        tuple[str, ...],
        conf.arg(aliases=("--preset.constants", "--constant"), metavar="NAME=VALUE ..."),
    ] = ()
    """Other constants of the preset, such as s=0.5 or eps_scope=everywhere."""

    def values(self) -> dict[str, Any]:
        """Return the value of each constant that is set, by name.

        Raises:
            PresetError: A constant is not NAME=VALUE, or comes twice.
        """
        flags = {name: getattr(self, name) for name in CONSTANT_FLAGS}
        return read_constants(self.constants, flags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetFlags(ConstantFlags):
    """Base, form and constants of a preset, for a command that names the preset."""

    base: Annotated[
        str | None, conf.arg(aliases=("--preset.base",), metavar="MODEL|AXIS=N,...")
    ] = None
    """Model or sizes that factors are relative to. None is the absolute form (every base size is
    1)."""
    form: Annotated[presets.Form | None, conf.arg(aliases=("--preset.form",))] = None
    """Where multipliers are kept. None: the preset's own form."""

    def config(self, name: str) -> PresetConfig:
        """Return the config of the preset `name` with these flags.

        Raises:
            PresetError: A constant is not NAME=VALUE, or comes twice.
        """
        constants = tuple(f"{constant}={value}" for constant, value in self.values().items())
        return PresetConfig(name=name, base=self.base, form=self.form, constants=constants)


def with_group_constants(argv: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """Return the words with each `--preset.COLUMN.GROUP X` moved behind `--preset.constants`.

    There it is written COLUMN.GROUP=X. Words without such a flag are returned as they are.

    Args:
        default: Constants that are used if the words have no `--preset.constants`.

    Raises:
        UsageError: A flag of this form has no value, `--preset.constants` is written twice, or
            `--preset.NAME` is written for a constant that has no such flag.
    """
    words = list(argv)
    remaining: list[str] = []
    constants: list[str] | None = None
    group_values: dict[str, str] = {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--preset.").replace("-", "_")
        if flag in ("--preset.constants", "--constants", "--constant"):
            if constants is not None:
                raise repeated(flag)
            if equals:
                constants = [value]
            else:
                constants = _pop_values(words)
        elif flag.startswith("--preset.") and "." in name:
            if equals:
                group_values[name] = value
            # One dash begins no flag here: the value may be a negative number.
            elif words and not words[0].startswith("--"):
                group_values[name] = words.pop(0)
            else:
                raise UsageError(f"{flag} needs a value after it")
        elif flag.startswith("--preset.") and name in _constants_without_flag():
            if not equals:
                value = words[0] if words and not words[0].startswith("--") else "VALUE"
            raise UsageError(
                f"{flag} is a constant without a flag of its own; "
                f"write --preset.constants {name}={value}"
            )
        else:
            remaining.append(word)

    # Unchanged words keep tyro's own messages for wrong flags.
    if not group_values:
        return list(argv)
    if constants is None:
        constants = []
        for text in default:
            if text.partition("=")[0] not in group_values:
                constants.append(text)
    assignments = [f"{name}={value}" for name, value in group_values.items()]
    return [*remaining, "--preset.constants", *constants, *assignments]


def _constants_without_flag() -> set[str]:
    """Return the names of all presets' constants that have no `--preset.NAME` of their own."""
    names: set[str] = set()
    for make in presets.PRESETS.values():
        names.update(inspect.signature(make).parameters)
    flags = {field.name for field in dataclasses.fields(PresetConfig)}
    return names - flags - set(CONSTANT_FLAGS)


def _pop_values(words: list[str]) -> list[str]:
    """Remove the words before the next flag from the front of the list, and return them."""
    values: list[str] = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values
