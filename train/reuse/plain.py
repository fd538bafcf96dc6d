"""Absorb a preset's multipliers into the weights of a plain pre-norm transformer, and restore them.

A model here computes with multiplier * w, scales attention logits by a number of its own, and adds branches by
h <- skip * h + branch * f(norm(h)). A plain one has neither multipliers nor scales: logits q.k N^-1/2, h <- h + f(norm(h)).
Both are one function when every parameter is taken times one number (per layer, in the stack):

| parameter                              | its multiplier, and                       |
|----------------------------------------|-------------------------------------------|
| query and its bias; under qk_norm the gain after them | times logit_scale * N^1/2  |
| attention, MLP, expert out, biases; a gain after them | times branch / c      |
| gain and bias of the norm before a tied readout | times the readout's multiplier   |

An encoder-decoder has these in either stack, with a third branch, `cross`, in the decoder's. c is the product of a stack's
skips so far: with h = c h', the stream h' has skip 1 (u-mup only). A norm does not see c but through its eps, which counts
as eps / c^2: that part alone is not exact, and is no larger than eps (c^-2 - 1) / 2 of the norm's output where the
stream's variance is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import Preset, Role
from mupax.train.config.run import PresetConfig
from mupax.train.core.factors import Factors
from mupax.zoo.definition import Definition

Scales = dict[str, np.ndarray]
"""Parameter to the number that its weight is taken times, float64 [] or [layers]."""

NORM, GAIN = "norm.", "norm.gain"
"""The last norm; its gain, which a tied readout's multiplier goes into, also where the model has none (it is 1 then)."""


class AbsorbError(MupaxError):
    """A model whose multipliers cannot be absorbed, or not restored."""


def scales(definition: Definition, factors: Factors) -> Scales:
    """What each parameter is times as large in the plain network.

    Args:
        definition: a model of the zoo.
        factors: from `mupax.train.core.factors.resolve`.

    Raises:
        AbsorbError: a factor is zero or not finite.

    Where queries are normalized without a gain (qk_norm, norm_gain false) no weight can hold the logits' scale; a definition
    does not show that, so callers must compare the two scales themselves.
    """
    gains = {spec.of for spec in definition.specs.values() if spec.role is Role.NORM_GAIN}
    by: Scales = {}
    for name, spec in definition.specs.items():
        scale = np.asarray(factors.multiplier[name], np.float64)
        stack, _, inside = name.rpartition("block.")
        module = inside.partition(".")[0].removesuffix("_gain")
        of = spec.of or spec.role
        if of is Role.LORA_B and spec.adapts:
            of = (
                spec.adapts.role
            )  # with A's multiplier in A, B has what is left of the matrix' scale
        of = Role.MLP_OUT if of is Role.EXPERT_OUT else of  # in its place
        last = (
            spec.role is Role.NORM_GAIN or of not in gains
        )  # of what a matrix' output is taken times
        match of:
            case Role.QUERY if last:
                logits = _factor(definition, factors, f"{stack}block.{module}.logit_scale")
                scale = scale * logits * definition.sizes.get("head_dim", 1) ** 0.5
            case Role.ATTENTION_OUT | Role.MLP_OUT if last:
                scale = scale * _branch(definition, factors, f"{stack}block.", module)
            case Role.NORM_GAIN if name.startswith(NORM):
                scale = scale * _factor(definition, factors, "tied_readout")
        by[name] = scale
    readout = _factor(definition, factors, "tied_readout")
    if GAIN not in by and readout != 1:
        by[GAIN] = readout
    for name, scale in by.items():
        if not (np.isfinite(scale).all() and (scale != 0).all()):
            raise AbsorbError(f"{name}: its multiplier is {scale}, which a weight cannot carry")
    return by


def absorb_multipliers(params: Mapping[str, Any], by: Scales) -> dict[str, np.ndarray]:
    """Weights of the plain network, float32: what is stored times its scale. A gain that was not there is added.

    Args:
        params: weights as they are stored, by name.
        by: of `scales`, for their model and preset.
    """
    absorbed = {name: times(w, by[name]) for name, w in params.items()}
    if GAIN in by and GAIN not in absorbed:
        absorbed[GAIN] = np.full(absorbed["token"].shape[-1], by[GAIN], np.float32)
    return absorbed


def restore_multipliers(params: Mapping[str, Any], by: Scales) -> dict[str, np.ndarray]:
    """The inverse of `absorb_multipliers`, for parameters that the model has.

    Args:
        params: weights of the plain network, by name.
        by: of `scales`, for the model and preset that they are to be of.
    """
    return {name: times(w, 1 / by[name]) for name, w in params.items()}


def times(w: Any, scale: np.ndarray) -> np.ndarray:
    """w * scale as float32, rounded once.

    Args:
        w: weights of any dtype; [layers, ...] where the scale is per layer.
        scale: float64 [] or [layers].
    """
    w = np.asarray(w).astype(np.float32)
    if np.ndim(scale) == 0:
        return w if scale == 1 else (w * np.float64(scale)).astype(np.float32)
    return np.stack([times(layer, s) for layer, s in zip(w, scale, strict=True)])


def logits_of(definition: Definition, factors: Factors) -> Any:
    """What a preset takes attention logits times: a number, or one per layer where they differ.

    Args:
        definition: of the model; its head dimension N gives N^-1/2 where the factors have no logit scale.
        factors: its numbers under the preset (`mupax.train.core.factors.resolve`).
    """
    numbers = factors.forward.get("block.attention.logit_scale")
    return definition.sizes.get("head_dim", 1) ** -0.5 if numbers is None else number(numbers)


def preset_record(
    fields: PresetConfig, preset: Preset, model: Definition, factors: Factors
) -> dict[str, Any]:
    """Return the record that is written beside weights: the preset, its forward factors, and the scale of every weight.

    `norm_eps_times` is there where the stream's skips were absorbed: up to so many times the eps of a norm counts, which
    is the one thing that no weight can hold.

    Args:
        fields: the preset's config.
        preset: what it resolved to.
        model: whose weights.
        factors: the preset's, for this model.
    """
    names: dict[str, str] = {}
    for name, declared in model.factors.items():
        if name in factors.forward:  # by kind, and by name those of other stacks and branches
            names[declared["kind"] if declared["kind"] not in names else name] = name
    skips = [
        factors.forward[name] for name in names.values() if model.factors[name]["kind"] == "skip"
    ]
    return {
        **(
            {"norm_eps_times": max(float(np.prod(skip, dtype=np.float64) ** -2) for skip in skips)}
            if skips
            else {}
        ),
        "described": preset.describe(),
        "fields": {
            name: value
            for name, value in vars(fields).items()
            if value not in (None, (), False, "none")
        },
        "base": dict(preset.base) if preset.base else None,
        "factors": {key: number(factors.forward[name]) for key, name in names.items()},
        "scales": {name: number(scale) for name, scale in scales(model, factors).items()},
    }


def number(numbers: np.ndarray) -> Any:
    """Numbers as JSON has them: one where all layers have the same, to the last bit."""
    return float(numbers.flat[0]) if np.ptp(numbers) == 0 else np.asarray(numbers).tolist()


def _branch(definition: Definition, factors: Factors, block: str, module: str) -> np.ndarray:
    """What a branch of the blocks at a path is times in the stream divided by its skips so far, [layers]."""
    if f"{block}branch" not in definition.factors:
        return np.ones(())
    skip = _factor(definition, factors, f"{block}skip")
    branch = _factor(definition, factors, f"{block}branch") / np.cumprod(skip.reshape(-1)).reshape(
        skip.shape
    )
    return branch[
        :,
        definition.factors[f"{block}branch"]["stack"].branches.index(
            "mlp" if module == "experts" else module
        ),
    ]


def _factor(definition: Definition, factors: Factors, name: str) -> np.ndarray:
    """A forward factor; ones where the preset left a skip out, 1 where the readout is not tied."""
    if name in factors.forward:
        return np.asarray(factors.forward[name], np.float64)
    declared = definition.factors.get(name)
    return np.ones(declared["shape"] if declared else ())
