"""Fold a preset's multipliers into the weights of a plain pre-norm transformer, and take them out again.

A model here computes with multiplier * w, scales attention logits by a number of its own, and adds branches by
h <- skip * h + branch * f(norm(h)). A plain one has neither multipliers nor scales: logits q.k N^-1/2, h <- h + f(norm(h)).
Both are one function when every parameter is taken times one number (per layer, in the stack):

| parameter                              | its multiplier, and                       |
|----------------------------------------|-------------------------------------------|
| query and its bias; under qk_norm the gain after them | times logit_scale * N^1/2  |
| attention out, MLP out and their biases| times branch / c                          |
| gain and bias of the norm before a tied readout | times the readout's multiplier   |

c is the product of the skips so far: with h = c h', the stream h' has skip 1 (u-mup only). A norm does not see c but
through its eps, which counts as eps / c^2: that part alone is not exact, and is no larger than eps (c^-2 - 1) / 2 of the norm's
output where the stream's variance is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import Role
from mupax.train.core.factors import Factors
from mupax.zoo.definition import Definition

Scales = dict[str, np.ndarray]
"""Parameter to the number that its weight is taken times, float64 [] or [layers]."""

GAIN = "norm.gain"
"""The gain that a tied readout's multiplier goes into, also where the model has none (it is 1 then)."""


class FoldError(MupaxError):
    """A model whose multipliers cannot be folded, or not undone."""


def scales(definition: Definition, factors: Factors) -> Scales:
    """What each parameter is times as large in the plain network.

    Args:
        definition: a model of the zoo.
        factors: from `mupax.train.core.factors.resolve`.

    Raises:
        FoldError: a factor is zero or not finite.

    Where queries are normalized without a gain (qk_norm, norm_gain false) no weight can carry the logits' scale; a definition
    does not show that, so whoever folds such a model must compare the two scales itself.
    """
    forward = {kind: _factor(definition, factors, kind) for kind in ("logits", "branch", "skip", "readout")}
    query = forward["logits"] * definition.sizes.get("head_dim", 1) ** 0.5
    normalized = any(spec.role is Role.NORM_GAIN and spec.of is Role.QUERY for spec in definition.specs.values())
    branch = forward["branch"] / np.cumprod(forward["skip"].reshape(-1)).reshape(forward["skip"].shape)
    found: Scales = {}
    for name, spec in definition.specs.items():
        scale = np.asarray(factors.multiplier[name], np.float64)
        match spec.of or spec.role:
            case Role.QUERY if normalized == (spec.role is Role.NORM_GAIN):
                scale = scale * query
            case Role.ATTENTION_OUT:
                scale = scale * branch[:, 0]
            case Role.MLP_OUT:
                scale = scale * branch[:, 1]
            case Role.NORM_GAIN if not spec.in_block:
                scale = scale * forward["readout"]
        found[name] = scale
    if GAIN not in found and forward["readout"] != 1:
        found[GAIN] = forward["readout"]
    for name, scale in found.items():
        if not (np.isfinite(scale).all() and (scale != 0).all()):
            raise FoldError(f"{name}: its multiplier is {scale}, which a weight cannot carry")
    return found


def ones(params: Mapping[str, Any]) -> Scales:
    """Those of weights that are the plain network's already."""
    return {name: np.ones(()) for name in params}


def fold(params: Mapping[str, Any], by: Scales) -> dict[str, np.ndarray]:
    """Weights of the plain network, float32: what is stored times its scale. A gain that was not there is added."""
    folded = {name: times(w, by[name]) for name, w in params.items()}
    if GAIN in by and GAIN not in folded:
        width = next(w.shape[-1] for name, w in folded.items() if name == "token")
        folded[GAIN] = np.full(width, by[GAIN], np.float32)
    return folded


def unfold(params: Mapping[str, Any], by: Scales) -> dict[str, np.ndarray]:
    """The inverse of `fold`, for parameters that the model has."""
    return {name: times(w, 1 / by[name]) for name, w in params.items()}


def times(w: Any, scale: np.ndarray) -> np.ndarray:
    """w * scale (one number, or one per layer) as float32, rounded once."""
    w = np.asarray(w).astype(np.float32)
    if np.ndim(scale) == 0:
        return w if scale == 1 else (w * np.float64(scale)).astype(np.float32)
    return np.stack([times(layer, s) for layer, s in zip(w, scale, strict=True)])


def to_json(by: Scales) -> dict[str, float | list[float]]:
    """Scales as plain numbers: one where all layers have the same, to the last bit."""
    return {n: float(s.flat[0]) if np.ptp(s) == 0 else [float(x) for x in s] for n, s in by.items()}


def _factor(definition: Definition, factors: Factors, kind: str) -> np.ndarray:
    """The forward factor of a kind; ones where the preset left a skip out or the readout is not tied."""
    for name, declared in definition.factors.items():
        if declared["kind"] == kind and name in factors.forward:
            return np.asarray(factors.forward[name], np.float64)
    layers = definition.sizes["layers"]
    return np.ones({"logits": (layers,), "readout": ()}.get(kind, (layers, 2)))
