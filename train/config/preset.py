"""Which parameterization a run has, the preset that it names, and the flags of commands that name one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from tyro import conf

from mupax import presets
from mupax.command_line import UsageError
from mupax.config_fields import Affects, Listed
from mupax.presets.papers import ALIASES, CONSTANT_FLAGS, read_constants
from mupax.presets.roles import RUN_AXES
from mupax.zoo.configs import CONFIGS, ConfigError, ModelConfig
from mupax.zoo.configs import get as get_model
from mupax.zoo.transformer import TransformerConfig

_EXPERTS = {"experts", "active", "expert_dim"}


class Parameterized(Protocol):
    """A run's config, as far as its parameterization goes."""

    @property
    def preset(self) -> PresetConfig: ...
    @property
    def model(self) -> ModelConfig: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetConfig:
    """Which parameterization, and its constants. A constant left out takes the preset's default."""

    name: Annotated[str, conf.arg(aliases=("--preset",)), Listed("model", "sp")] = "mup"
    """Preset name (`mupax presets` lists them), or measured:PATH, a file of `mupax presets balance`."""
    base: Annotated[str | None, conf.arg(metavar="MODEL|AXIS=N,..."), Listed("model", None)] = None
    """What factors are relative to: a model (with the run's experts, where it has none), or sizes such as embed=64,head_dim=16,layers=2;
    None is the absolute form (base 1)."""
    form: Annotated[
        Literal["plain", "readout-multiplier", "mean-field", "table-9"] | None,
        Affects("model", "mean-field"),
    ] = None
    """Where multipliers sit. Changes numbers, never training, but for clip_norm, which sees gradients as the form has them."""
    alpha_a: Annotated[float | None, Affects("model", 0.75)] = None
    """Attention logits scale as head_dim^-alpha_a, in [1/2, 1]."""
    alpha_l: Annotated[float | None, Listed("model", 0.75, given={"model.depth": 5})] = None
    """Residual branches scale as depth^-alpha_l, in [1/2, 1] (depth-mup)."""
    gamma0: Annotated[float | None, Affects("model", 0.5)] = None
    """Amount of feature learning: the readout is divided by it."""
    beta0: Annotated[float | None, Affects("model", 0.5)] = None
    """Constant on every residual branch."""
    constants: Annotated[
        tuple[str, ...], conf.arg(metavar="NAME=VALUE ..."), Listed("model", ("beta0=0.25",))
    ] = ()
    """Any other constants, such as s=0.5 (ntk), eps_scope=everywhere (completep), c_a=0.5 (mup); and factors on what one
    parameter group has at the base, written --preset.rates.GROUP X, --preset.stds., --preset.multipliers. or --preset.decays."""
    zero_readout: Annotated[bool, Affects("model", True)] = False
    """Start the readout at zero."""
    joint: Annotated[
        Literal["none", "sde", "complete-d"],
        conf.arg(aliases=("--joint",)),
        Listed("model", "sde", given={"preset.base": "lm-proxy,batch=4,tokens=768"}),
    ] = "none"
    """Scale rate, betas, eps, decay, warm-up from the recipe's batch and tokens, or base MODEL,batch=N,tokens=N: `presets joint`."""
    noise_scale: Annotated[
        float | None,
        conf.arg(aliases=("--noise-scale",)),
        Affects("guards", test="train/config/test_joint.py"),
    ] = None
    """Gradient noise scale in examples, from `mupax noise`; a joint rule is refused at a larger batch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", ALIASES.get(self.name, self.name))
        if self.noise_scale is not None and not self.noise_scale > 0:
            raise ConfigError(
                f"preset.noise_scale is {self.noise_scale}; write a number of examples above 0, or None"
            )


def preset_of(config: Parameterized) -> presets.Preset:
    """The run's parameterization, relative to the sizes of `config.preset.base`.

    Raises:
        PresetError: no such preset, or a constant it does not take or that is out of range.
        ConfigError: the base is neither sizes nor a model's name, or a model of another family.
    """
    return preset_for(config.preset, config.model)


def rules_of(config: Parameterized) -> tuple[Any, ...]:
    """Return all that decides how a run's values change with size, but for the base: equal where two runs have one preset.

    A constant that is written with its default value counts as left out, as those of a tuned preset are.

    Raises:
        PresetError, ConfigError: as `preset_of`.
    """
    choices = preset_of(config).choices
    return (
        config.preset.name,
        config.preset.joint,
        config.preset.zero_readout,
        tuple(sorted(choices.items())),
    )


def same_preset(config: Parameterized, other: Parameterized) -> bool:
    """Return whether two runs have equal rules and one base, however their flags write them."""
    if rules_of(config) != rules_of(other):
        return False
    return preset_of(config).base == preset_of(other).base and _run_base(config) == _run_base(other)


def _run_base(config: Parameterized) -> dict[str, int]:
    """Return the batch and tokens that a base names, which joint rules are relative to."""
    _, sizes = base_parts(config.preset.base)
    return {axis: size for axis, size in sizes.items() if axis in RUN_AXES}


def preset_for(config: PresetConfig, model: ModelConfig) -> presets.Preset:
    """A parameterization for a model of this family; raises as `preset_of`.

    Args:
        config: name, base, form and constants.
        model: whose family the base must be of; constants of parameter groups must mean one of its own.
    """
    name, sizes = base_parts(config.base)
    base: dict[str, int] | None = {
        axis: size for axis, size in sizes.items() if axis not in RUN_AXES
    }
    if name == "None":
        base = base or None
    elif name:
        named = get_model(name)
        if named.family != model.family:
            alike = [name for name, other in CONFIGS.items() if other.family == model.family]
            raise ConfigError(
                f"preset.base {name} is a {named.family} and the model a {model.family}; "
                f"write one of {', '.join(alike) or 'its sizes, as embed=64,layers=2'}, or None for the absolute form"
            )
        base = {**_with_experts_of(model, named).base_sizes(), **base}
    if base is not None and (missing := _EXPERTS & model.sizes().keys() - base.keys()):
        raise ConfigError(
            f"preset.base {config.base} has no {', '.join(sorted(missing))} and the model has experts; "
            f"write {config.base},{base_text({axis: model.sizes()[axis] for axis in sorted(missing)})}, those of the base"
        )
    flags = {name: getattr(config, name) for name in CONSTANT_FLAGS}
    preset = presets.get(
        config.name,
        base=base,
        form=config.form,
        zero_readout=config.zero_readout,
        **read_constants(config.constants, flags),
    )
    if preset.constants:
        from mupax.presets.constants import check

        tied = [model.tied_readout] if model.tied_readout else []
        specs = [*model.parameters().values(), *tied]
        if ":" in config.name and config.name.partition(":")[0] in presets.PRESETS:
            preset = _without_idle_constants(preset, config, specs)
        check(preset.constants, specs, preset.name)
    return preset


def _without_idle_constants(
    preset: presets.Preset, config: PresetConfig, specs: Sequence[presets.ParamSpec]
) -> presets.Preset:
    """Return a published preset without the constants of its file that the model has no parameters for.

    A published table is of the source's models. Constants that the flags name stay, and are refused where they mean nothing.
    """
    from mupax.presets.constants import means_something
    from mupax.presets.tuned import find

    if not find.find(config.name).is_published:
        return preset
    named = {text.partition("=")[0] for text in config.constants}
    constants = {
        n: x for n, x in preset.constants.items() if n in named or means_something(n, specs)
    }
    return dataclasses.replace(preset, constants=constants)


def _with_experts_of(model: ModelConfig, named: ModelConfig) -> ModelConfig:
    """A base that has no experts with as many as the model, as large beside its width; as it is where it has its own."""
    if not isinstance(model, TransformerConfig) or not isinstance(named, TransformerConfig):
        return named
    if model.experts is None or named.experts is not None:
        return named
    size = max(1, round(model.expert_size * named.width / model.width))
    counts = {
        name: getattr(model, name) for name in ("experts", "active_experts", "shared_experts")
    }
    return dataclasses.replace(named, **counts, expert_dim=size)


def base_parts(text: str | None) -> tuple[str, dict[str, int]]:
    """The model that a base names, "" for none and "None" for the absolute form, and the sizes behind it by logical axis.

    Raises:
        ConfigError: a part that is no AXIS=N. Axes that do not exist are for `presets.get` to refuse.
    """
    first, *parts = ("None" if text is None else text).split(",")
    name, parts = (first.strip(), parts) if first and "=" not in first else ("", [first, *parts])
    sizes: dict[str, int] = {}
    for part in parts:
        axis, _, size = (word.strip() for word in part.partition("="))
        if not (axis and size.isascii() and size.isdigit()) or axis in sizes:
            raise ConfigError(
                f"preset.base {text}: {part!r} is no AXIS=N; write each axis once, as embed=64,head_dim=16"
            )
        sizes[axis] = int(size)
    return name, sizes


def base_text(sizes: Mapping[str, int]) -> str:
    """Sizes as `preset.base` takes them: what `base_parts` reads."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantFlags:
    """Constants of the preset that a command names, with the flags that a recipe has for them or shorter ones."""

    alpha_a: Annotated[float | None, conf.arg(aliases=("--preset.alpha-a",), metavar="X")] = None
    """Attention logits scale as head_dim^-alpha_a."""
    alpha_l: Annotated[float | None, conf.arg(aliases=("--preset.alpha-l",), metavar="X")] = None
    """Residual branches scale as depth^-alpha_l (depth-mup)."""
    gamma0: Annotated[float | None, conf.arg(aliases=("--preset.gamma0",), metavar="X")] = None
    """Amount of feature learning."""
    beta0: Annotated[float | None, conf.arg(aliases=("--preset.beta0",), metavar="X")] = None
    """Constant on every residual branch."""
    constants: Annotated[
        tuple[str, ...],
        conf.arg(aliases=("--preset.constants", "--constant"), metavar="NAME=VALUE ..."),
    ] = ()
    """Any other constants, such as s=0.5 or eps_scope=everywhere."""

    def values(self) -> dict[str, Any]:
        """Constant to its value; raises PresetError for one that is no NAME=VALUE or comes twice."""
        return read_constants(
            self.constants, {name: getattr(self, name) for name in CONSTANT_FLAGS}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetFlags(ConstantFlags):
    """A preset's base, form and constants, for a command that names the preset."""

    base: Annotated[
        str | None, conf.arg(aliases=("--preset.base",), metavar="MODEL|AXIS=N,...")
    ] = None
    """What factors are relative to, a model or sizes; without it the absolute form, base 1."""
    form: Annotated[presets.Form | None, conf.arg(aliases=("--preset.form",))] = None
    """Where multipliers sit; the preset's own form unless given."""

    def config(self, name: str) -> PresetConfig:
        """The preset of that name; raises as `values`."""
        constants = tuple(f"{constant}={value}" for constant, value in self.values().items())
        return PresetConfig(name=name, base=self.base, form=self.form, constants=constants)


def with_group_constants(argv: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The words with every --preset.COLUMN.GROUP X as COLUMN.GROUP=X behind --preset.constants.

    Args:
        argv: the words.
        default: constants that hold where the words name none.

    Raises:
        UsageError: such a flag without a value.
    """
    words, rest, named, groups = list(argv), [], None, {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--preset.").replace("-", "_")
        if flag in ("--preset.constants", "--constants", "--constant"):
            named = [value] if equals else []
            while words and not equals and not words[0].startswith("--"):
                named.append(words.pop(0))
        elif flag.startswith("--preset.") and "." in name:
            if not equals and (not words or words[0].startswith("--")):
                raise UsageError(f"{flag} needs a value after it")
            groups[name] = value if equals else words.pop(0)
        else:
            rest.append(word)
    if not groups:
        return list(argv)
    texts = (
        [text for text in default if text.partition("=")[0] not in groups]
        if named is None
        else named
    )
    return [
        *rest,
        "--preset.constants",
        *texts,
        *(f"{name}={value}" for name, value in groups.items()),
    ]
