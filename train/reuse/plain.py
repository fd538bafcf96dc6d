"""Absorb a preset's multipliers into the weights of a plain pre-norm transformer, and restore them.

A model here computes with multiplier * w, scales attention logits by a factor of its own, and adds
branches by h <- skip * h + branch * f(norm(h)). A plain transformer has neither multipliers nor
scales: logits q.k N^-1/2, h <- h + f(norm(h)). Both compute one function when every parameter is
multiplied by one factor (per layer, in the stack):

| parameter                              | its multiplier, and                       |
|----------------------------------------|-------------------------------------------|
| query and its bias; under qk_norm the gain after them | times logit_scale * N^1/2  |
| attention, MLP, expert out, biases; a gain after them | times branch / c      |
| gain and bias of the norm before a tied readout | times the readout's multiplier   |

An encoder-decoder has these in either stack, with a third branch, `cross`, in the decoder's. c is
the product of a branch's skip and all skips before it in the stack: with h = c h', the stream h'
has skip 1 (u-mup only). A norm does not see c except through its eps, which counts as eps / c^2.
Only that part is inexact, and it is no larger than eps (c^-2 - 1) / 2 of the norm's output where
the stream's variance is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mupax import MupaxError
from mupax.presets import Preset, Role
from mupax.presets.roles import ParamSpec
from mupax.train.config.run import PresetConfig
from mupax.train.core.factors import Factors
from mupax.zoo.definition import Definition

Scales = dict[str, np.ndarray]
"""Factor that turns a stored weight into one of the plain network, by parameter name.

Each factor is float64, [] or [layers]. The plain network has no multipliers (see the top)."""

NORM = "norm."
"""Prefix of the names of the last norm's parameters."""
GAIN = "norm.gain"
"""Name of the last norm's gain. It absorbs a tied readout's multiplier, and is made if missing."""


class AbsorbError(MupaxError):
    """A model whose multipliers cannot be absorbed into its weights, or restored from them."""


def scales(definition: Definition, factors: Factors) -> Scales:
    """Return the factor of each stored weight by which it absorbs the preset's multipliers.

    A stored weight times its factor is the weight of a plain transformer without multipliers, which
    computes the same function. For a tied readout with a multiplier other than 1, the result has an
    entry `norm.gain` even if the model has no such parameter.

    If queries are normalized without a gain (qk_norm, norm_gain false), no weight can hold the
    scale of the attention logits. A definition does not show this case, so callers must compare the
    scales of source and target themselves (`logits_of`).

    Args:
        factors: multipliers and forward factors from `mupax.train.core.factors.resolve`.

    Raises:
        AbsorbError: a factor is zero or not finite.
    """
    roles_with_gain = {spec.of for spec in definition.specs.values() if spec.role is Role.NORM_GAIN}
    by_name: Scales = {}
    for name, spec in definition.specs.items():
        scale = np.asarray(factors.multiplier[name], np.float64)
        stack, _, path_in_block = name.rpartition("block.")
        module = path_in_block.partition(".")[0].removesuffix("_gain")
        role = _absorbing_role(spec)
        # If a gain follows a matrix, the gain absorbs the factor of the matrix' output. The matrix
        # itself then does not absorb it.
        is_last = spec.role is Role.NORM_GAIN or role not in roles_with_gain
        match role:
            case Role.QUERY if is_last:
                logit_scale = _factor(definition, factors, f"{stack}block.{module}.logit_scale")
                # The plain network scales logits by N^-1/2 itself, so the query carries the rest.
                scale = scale * logit_scale * definition.sizes.get("head_dim", 1) ** 0.5
            case Role.ATTENTION_OUT | Role.MLP_OUT if is_last:
                scale = scale * _branch(definition, factors, f"{stack}block.", module)
            case Role.NORM_GAIN if name.startswith(NORM):
                scale = scale * _factor(definition, factors, "tied_readout")
        by_name[name] = scale

    readout = _factor(definition, factors, "tied_readout")
    # A gain is added for the multiplier of a tied readout, whose weight the embedding shares.
    if GAIN not in by_name and readout != 1:
        by_name[GAIN] = readout
    for name, scale in by_name.items():
        if not (np.isfinite(scale).all() and (scale != 0).all()):
            raise AbsorbError(f"{name}: its multiplier is {scale}, which a weight cannot carry")
    return by_name


def _absorbing_role(spec: ParamSpec) -> Role:
    """Return the role by which `scales` selects the forward factors that a parameter absorbs.

    A gain or bias has the role of its matrix, LoRA's B the role of the adapted matrix, and the
    output matrix of an expert the role `MLP_OUT`.
    """
    role = spec.of or spec.role
    if role is Role.LORA_B and spec.adapts:
        # LoRA's A absorbs its own multiplier. So B absorbs the rest of the adapted matrix' scale.
        role = spec.adapts.role
    if role is Role.EXPERT_OUT:
        # Experts take the place of the MLP in a block, and absorb the same branch factor.
        return Role.MLP_OUT
    return role


def absorb_multipliers(params: Mapping[str, Any], by_name: Scales) -> dict[str, np.ndarray]:
    """Return weights that need no multipliers: float32, each stored weight times its scale.

    These are the weights of the plain network (see the top of this file). If `by_name` has a scale
    for the last norm's gain and the model has no such parameter, a gain filled with that scale is
    added.

    Args:
        by_name: result of `scales` for the model and preset of the weights.
    """
    absorbed = {name: times(weight, by_name[name]) for name, weight in params.items()}
    if GAIN in by_name and GAIN not in absorbed:
        width = absorbed["token"].shape[-1]
        absorbed[GAIN] = np.full(width, by_name[GAIN], np.float32)
    return absorbed


def restore_multipliers(params: Mapping[str, Any], by_name: Scales) -> dict[str, np.ndarray]:
    """Return the weights to store: float32, each weight of the plain network divided by its scale.

    This reverses `absorb_multipliers`.

    Args:
        params: weights of the plain network by name.
        by_name: result of `scales` for the model and preset that store the weights.
    """
    return {name: times(weight, 1 / by_name[name]) for name, weight in params.items()}


def times(weight: Any, scale: np.ndarray) -> np.ndarray:
    """Return `weight * scale` as float32, rounded once.

    Args:
        weight: array of any dtype; [layers, ...] if the scale is per layer.
        scale: float64 [] or [layers].
    """
    weight = np.asarray(weight).astype(np.float32)
    if np.ndim(scale) > 0:
        layers = [times(layer, factor) for layer, factor in zip(weight, scale, strict=True)]
        return np.stack(layers)
    if scale == 1:
        return weight
    # The product is float64, so that the weight is rounded only once.
    return (weight * np.float64(scale)).astype(np.float32)


def logits_of(definition: Definition, factors: Factors) -> Any:
    """Return a preset's scale of the attention logits: a number, or a list if layers differ.

    The scale is the preset's factor `block.attention.logit_scale`. If the preset has no such
    factor, the scale is N^-1/2 for the head dimension N.

    Args:
        factors: forward factors from `mupax.train.core.factors.resolve`.
    """
    logit_scale = factors.forward.get("block.attention.logit_scale")
    if logit_scale is None:
        return definition.sizes.get("head_dim", 1) ** -0.5
    return number(logit_scale)


def preset_record(
    fields: PresetConfig, preset: Preset, model: Definition, factors: Factors
) -> dict[str, Any]:
    """Return the JSON record of a preset that is written beside weights.

    Its keys are `described` (the preset in words), `fields` (fields of the config that are set),
    `base`, `factors` (forward factors by kind, such as `logits`), and `scales` (result of `scales`,
    by parameter name). If multipliers of skip connections were absorbed, there is also
    `norm_eps_times`: the eps of norms then acts as if it were up to that many times larger. No
    weight can correct this.

    Args:
        fields: preset as the run's config has it.
        preset: the preset that the config resolves to.
        factors: multipliers and forward factors of the preset for this model.
    """
    names: dict[str, str] = {}
    for name, declared in model.factors.items():
        if name in factors.forward:
            # The first factor of a kind is listed by its kind, those of further stacks by name.
            key = declared["kind"]
            if key in names:
                key = name
            names[key] = name

    record: dict[str, Any] = {}
    skips = []
    for name in names.values():
        if model.factors[name]["kind"] == "skip":
            skips.append(factors.forward[name])
    if skips:
        # The norm of a stream that is divided by c, the product of its skips, sees eps / c^2.
        eps_times = [float(np.prod(skip, dtype=np.float64) ** -2) for skip in skips]
        record["norm_eps_times"] = max(eps_times)

    record["described"] = preset.describe()
    unset = (None, (), False, "none")
    record["fields"] = {name: value for name, value in vars(fields).items() if value not in unset}
    record["base"] = dict(preset.base) if preset.base else None
    record["factors"] = {key: number(factors.forward[name]) for key, name in names.items()}
    record["scales"] = {name: number(scale) for name, scale in scales(model, factors).items()}
    return record


def number(values: np.ndarray) -> Any:
    """Return values per layer as JSON: one number if all are equal, otherwise a list."""
    if np.ptp(values) == 0:
        return float(values.flat[0])
    return np.asarray(values).tolist()


def _branch(definition: Definition, factors: Factors, block: str, module: str) -> np.ndarray:
    """Return a branch's multiplier divided by all skip multipliers up to its own, [layers].

    The result is a scalar 1 if the model has no branch factors.

    Args:
        block: name prefix of the stack, such as "block.".
        module: name of the branch, such as `attention`, `mlp` or `experts`.
    """
    if f"{block}branch" not in definition.factors:
        return np.ones(())
    skip = _factor(definition, factors, f"{block}skip")
    # Dividing a branch by c gives a stream with skip 1 (see the top of this file).
    skips_so_far = np.cumprod(skip.reshape(-1)).reshape(skip.shape)
    branch = _factor(definition, factors, f"{block}branch") / skips_so_far

    branches = definition.factors[f"{block}branch"]["stack"].branches
    column = branches.index("mlp" if module == "experts" else module)
    return branch[:, column]


def _factor(definition: Definition, factors: Factors, name: str) -> np.ndarray:
    """Return a forward factor as float64, or ones if the preset or the model does not have it."""
    if name in factors.forward:
        return np.asarray(factors.forward[name], np.float64)
    declared = definition.factors.get(name)
    return np.ones(declared["shape"] if declared else ())
