"""Muon's direction, with each matrix read as its spec says: fan-in axes by fan-out axes, stacked layers apart.

Embeddings, readout, gains and biases stay on Adam. No factor of shape is in here (`optax.contrib.muon` has one of its
own, sqrt(max(1, out/in))): the preset's rate brings it, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Role
from mupax.train.core.adam import scale_by_adam


class ScaleByMuonState(NamedTuple):
    """Momentum of every parameter; second moments only of those on Adam."""

    count: jax.Array
    mu: optax.Updates
    nu: optax.Updates


def dimension_numbers(specs: Mapping[str, ParamSpec]) -> dict[str, MuonDimensionNumbers]:
    """How each hidden matrix is orthogonalized: its fan-in axes against its fan-out axes, "layers" a batch."""
    return {
        name: MuonDimensionNumbers(
            tuple(spec.axes.index(axis) for axis in spec.fan_in), tuple(spec.axes.index(axis) for axis in spec.fan_out)
        )
        for name, spec in specs.items()
        if spec.role not in VECTORS | EMBEDDINGS | {Role.READOUT}
    }


def scale_by_muon(
    specs: Mapping[str, ParamSpec], beta: float, b1: float, b2: float
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalized Nesterov momentum of every hidden matrix, Adam's direction of everything else.

    Args:
        specs: name to declaration.
        beta: momentum of the matrices.
        b1: Adam's decay of the mean.
        b2: Adam's decay of the squares.
    """
    numbers = dimension_numbers(specs)
    muon = optax.contrib.scale_by_muon(beta=beta, weight_dimension_numbers=numbers)
    blank: Any = muon.init({})
    adam = scale_by_adam(b1, b2)

    def init(params: optax.Params) -> ScaleByMuonState:
        def squares(path: tuple, w: jax.Array) -> jax.Array | optax.MaskedNode:
            return optax.MaskedNode() if path[-1].key in numbers else jnp.zeros_like(w)

        nu = jax.tree_util.tree_map_with_path(squares, params)
        return ScaleByMuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), nu)

    def update(updates, state, params=None, *, factors, hyper, **_):
        del params
        matrices, others = ([n for n in updates if (n in numbers) == muons] for muons in (True, False))
        turned, done = cast("Any", muon.update)(
            _only(matrices, updates), MuonState(state.count, _only(matrices, state.mu), blank.ns_coeffs)
        )
        before = optax.ScaleByAdamState(state.count, _only(others, state.mu), _only(others, state.nu))
        eps = factors._replace(eps=_only(others, factors.eps))
        stepped, after = cast("Any", adam.update)(_only(others, updates), before, factors=eps, hyper=hyper)
        mu, moved = {**done.mu, **after.mu}, {**turned, **stepped}
        kept = {name: after.nu.get(name, optax.MaskedNode()) for name in updates}
        return {n: moved[n] for n in updates}, ScaleByMuonState(done.count, {n: mu[n] for n in updates}, kept)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _only(names: list[str], tree: Mapping) -> dict:
    return {name: tree[name] for name in names}
