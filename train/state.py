"""The training state: step, parameters, optimizer state. Every array is born on the devices it will live on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from train.layout import MeshLayout
from zoo.definition import Arrays, Definition


class TrainState(NamedTuple):
    """What a step reads and writes, and what a checkpoint holds."""

    step: Any
    """Optimizer steps done, int32 []."""
    params: Arrays
    opt_state: Any


def abstract_state(definition: Definition, tx: optax.GradientTransformation, layout: MeshLayout) -> TrainState:
    """Shapes, dtypes and shardings of the state; an optimizer moment lies where its parameter does."""
    whole, shardings = layout.whole, layout.parameters(definition)
    params = {
        n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[n])
        for n, leaf in definition.abstract.items()
    }

    def beside(leaf: jax.ShapeDtypeStruct | optax.MaskedNode, like: jax.ShapeDtypeStruct) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf  # a moment that this parameter does not have
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding)

    opt_state = optax.tree.map_params(
        tx,
        beside,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), params, opt_state)


def shardings_of(abstract: TrainState) -> TrainState:
    """The sharding of every leaf, in the shape of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def initial_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    abstract: TrainState,
    seed: int,
    stds: dict[str, np.ndarray],
) -> TrainState:
    """A fresh state, initialized under jit with its final shardings: the same bits on every mesh."""

    def beside(params: Arrays) -> TrainState:
        return TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))

    params = initial_params(definition, abstract, seed, stds)
    return jax.jit(beside, out_shardings=shardings_of(abstract), donate_argnums=0)(params)


def initial_params(definition: Definition, abstract: TrainState, seed: int, stds: dict[str, np.ndarray]) -> Arrays:
    """The parameters of `initial_state` alone: the frozen reference of a centred output.

    On a CPU mesh they are made whole and then split. Since jax 0.12 the numbers that a CPU's vector instructions leave over
    at the end of a row may differ in the last bit, and which ones are left over depends on how the row is split.
    """
    shardings, mesh = shardings_of(abstract).params, abstract.step.sharding.mesh
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    born = NamedSharding(mesh, PartitionSpec()) if on_cpu else shardings
    params = jax.jit(definition.initialize, out_shardings=born)(np.uint32(seed), stds)
    return jax.jit(lambda params: params, out_shardings=shardings)(params) if on_cpu else params
