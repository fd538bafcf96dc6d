"""Drop path, soft labels and layer-wise rates in the step: formulas, any mesh, a resume, and evaluations without them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax.train.config.data import TransformsConfig
from mupax.train.config.run import DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.loss import cross_entropy
from mupax.train.core.program import Program
from mupax.train.run import dry_run
from mupax.zoo.configs import ViTConfig
from mupax.zoo.layers.drop_path import Drop, scales
from mupax.zoo.layers.linear import ReadoutInputs
from tests.fixtures.tiny import batch_of, program_of, random_params, run_of, state_with

VIT = ViTConfig(
    width=16, depth=3, num_heads=2, mlp_ratio=2, image_size=8, patch_size=4, channels=1,
    num_classes=10, drop_path=0.5,
)  # fmt: skip
RUN = run_of(
    VIT,
    seed=3,
    data=DataConfig(name="digits", batch_size=8, transforms=TransformsConfig(label_smoothing=0.1)),
    preset=PresetConfig(name="mup", base="vit-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.02, layer_decay=0.5),
)


def batch() -> dict[str, Any]:
    hard = batch_of(VIT)
    labels = 0.01 + 0.9 * np.eye(10)[hard["targets"]]
    weights = np.ones(8, np.float32)
    return {**hard, "weights": weights, "labels": labels.astype(np.float32)}


@functools.cache
def program_on(mesh: MeshConfig = RUN.mesh) -> Program:
    return program_of(dataclasses.replace(RUN, mesh=mesh))


def trained(program: Program) -> tuple[list[Any], list[float]]:
    """States 0 to 2 on the host, and the losses of both steps."""
    step, numbers = program.compile_train(), program.step_inputs()
    state = state_with(program, random_params(program))
    states, losses = [jax.device_get(state)], []
    for _ in range(2):
        state, metrics = step(state, numbers, program.train_feed().shard_batch(batch()))
        states.append(jax.device_get(state))
        losses.append(float(metrics["loss"]))
    if program.mesh.size == 1:
        again, _ = step(
            jax.device_put(states[1]), numbers, program.train_feed().shard_batch(batch())
        )
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again).params, states[2].params)
    return states, losses


def test_what_stays_keeps_its_expectation_and_rates_rise_evenly() -> None:
    rates = np.array(VIT.drop_rates)
    np.testing.assert_allclose(rates, [0, 0.25, 0.5])
    times = np.asarray(scales(Drop(np.uint32(0), np.float32(rates)), jnp.int32(0), 4000))
    assert times.shape == (4000, 3, 2)
    for layer, rate in enumerate(rates):
        assert set(np.unique(times[:, layer])) <= {np.float32(0), np.float32(1 / (1 - rate))}
        np.testing.assert_allclose(
            times[:, layer].mean(0), 1, atol=5 * np.sqrt(rate / (1 - rate) / 4000) + 1e-6
        )
    one, other, next_step = (
        np.asarray(scales(Drop(np.uint32(seed), np.float32(rates)), jnp.int32(step), 64)) for seed, step in ((0, 0), (1, 0), (0, 1))
    )  # fmt: skip
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, next_step)
    assert not np.array_equal(one[:, 2, 0], one[:, 2, 1]), (
        "attention and MLP are left out by themselves"
    )


def test_a_block_left_out_passes_the_stream_on() -> None:
    model = nnx.jit(lambda: VIT.module(nnx.Rngs(0)))()
    images = jnp.asarray(batch()["inputs"])
    times = jnp.ones((8, 3, 2)).at[:4, 2].set(0.0)
    read = nnx.jit(lambda model, times: model.readout_inputs(images, times).logits())
    some, whole = read(model, times), read(model, jnp.ones_like(times))
    np.testing.assert_allclose(some[4:], whole[4:], rtol=1e-6)
    for name in ("attention.out", "attention.out_bias", "mlp.down", "mlp.down_bias"):
        owner, leaf = name.split(".")
        weight = getattr(getattr(model.block, owner), leaf)
        weight[...] = weight[...].at[2].set(0.0)
    np.testing.assert_allclose(
        some[:4], read(model, jnp.ones_like(times))[:4], rtol=1e-5, atol=1e-6
    )
    assert np.abs(some[:4] - whole[:4]).max() > 1e-3


@pytest.mark.core
def test_a_step_is_the_same_on_a_mesh_and_after_a_resume_and_evaluations_leave_nothing_out() -> (
    None
):
    """On the mesh parameters and batch are split, and gradients summed by hand; sums over devices round elsewhere."""
    program = program_on()
    states, losses = trained(program)
    split, on_mesh = trained(program_on(MeshConfig(data=2, fsdp=4)))
    np.testing.assert_allclose(on_mesh, losses, rtol=1e-5)
    for name, w in states[2].params.items():
        np.testing.assert_allclose(split[2].params[name], w, rtol=2e-3, atol=2e-5, err_msg=name)
    whole = dataclasses.replace(VIT, drop_path=0.0)
    without = program_of(dataclasses.replace(RUN, model=whole))
    hard = {name: x for name, x in batch().items() if name != "labels"}
    sums = [
        one.compile_eval()(
            jax.device_put(states[1].params), one.step_inputs(), one.eval_feed().shard_batch(hard)
        )
        for one in (program, without)
    ]
    assert float(sums[0].loss) == float(sums[1].loss)
    assert without.inputs.drop is None


@pytest.mark.core
def test_the_loss_of_soft_labels_is_their_cross_entropy() -> None:
    random, labels = np.random.default_rng(1), jnp.asarray(batch()["labels"])
    features, weight = (
        jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((8, 5), (5, 10))
    )
    logits = np.asarray(features @ weight, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets, weights = jnp.asarray(batch()["targets"]), jnp.ones(8).at[3].set(0.0)
    nll = -(np.asarray(labels, np.float64) * log_p).sum(-1)

    @jax.jit
    def summed(labels: jax.Array | None) -> Any:
        return cross_entropy(ReadoutInputs(features, weight), targets, weights, labels=labels)

    sums = summed(labels)
    assert float(sums.loss) == pytest.approx(nll.sum() - nll[3], rel=1e-5)
    assert float(sums.weight) == 7
    hard = summed(jax.nn.one_hot(targets, 10))
    assert float(hard.loss) == pytest.approx(float(summed(None).loss), rel=1e-5)


@pytest.mark.core
def test_rates_fall_by_a_factor_a_block_and_the_table_shows_it() -> None:
    program = program_on()
    plain = program_of(dataclasses.replace(RUN, optimizer=OptimizerConfig(peak_lr=0.02)))
    factors = {
        name: lr / plain.inputs.factors.lr[name] for name, lr in program.inputs.factors.lr.items()
    }
    for name in ("patch", "patch_bias", "position"):
        assert factors[name] == pytest.approx(0.5**4)
    for name in ("block.mlp.up", "block.attention_norm.gain", "block.mlp.down_bias"):
        np.testing.assert_allclose(factors[name], [0.125, 0.25, 0.5])
    for name in ("norm.gain", "readout", "readout_bias"):
        assert factors[name] == 1
    row = next(
        line
        for line in dry_run._parameters(program).splitlines()
        if line.startswith("block.mlp.up ")
    )
    assert "0.005..0.02" in row, row
