"""Positions split over devices, alone and with every other axis: the same five steps as on one device, to rounding."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.sharding import MeshError
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ViTConfig

STEPS = 5
TOLERANCE = 3e-5
"""Of a parameter's largest change in five steps, as in test_mesh: float32 sums in another order."""

CHUNKED = ComputeConfig(cross_entropy="chunked")
# Decoders loop over their blocks, as on accelerators; those of the vision transformer are unrolled.
MODELS = {
    # Rotary positions, grouped queries, a vocabulary that tensor does not divide.
    "rotary": DecoderConfig(
        width=16, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=1.5, vocab_size=17, seq_len=8,
        positions="rotary", norm="rmsnorm", activation="swiglu", qk_norm=True, compute=ComputeConfig(cross_entropy="vocab", layers="scan"),
    ),
    # Learned positions, a tied readout over a split vocabulary.
    "learned": DecoderConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=18, seq_len=8, tied=True,
        compute=dataclasses.replace(CHUNKED, layers="scan"),
    ),
    "vit": ViTConfig(
        width=16, depth=2, num_heads=2, mlp_ratio=1.5, image_size=6, patch_size=3, channels=2, num_classes=7,
        compute=CHUNKED,
    ),
}  # fmt: skip
MESHES = {
    "one": MeshConfig(data=1),
    "sequence 8": MeshConfig(data=1, sequence=8),
    "data 2 x sequence 4": MeshConfig(data=2, sequence=4),
    "fsdp 2 x sequence 2 x tensor 2": MeshConfig(data=1, fsdp=2, sequence=2, tensor=2),
    "fsdp 4 x tensor 2": MeshConfig(data=1, fsdp=4, tensor=2),
    "rules": MeshConfig(
        data=2,
        fsdp=2,
        tensor=2,
        rules=("mlp=fsdp,tensor", "embed=none", "vocab=none", "batch=data"),
    ),
}
CASES = [
    ("rotary", "data 2 x sequence 4"),
    ("rotary", "fsdp 2 x sequence 2 x tensor 2"),
    ("learned", "sequence 8"),
    ("learned", "fsdp 4 x tensor 2"),
    ("learned", "rules"),
    ("vit", "data 2 x sequence 4"),
    ("vit", "fsdp 2 x sequence 2 x tensor 2"),
]


RING = "data 2 x sequence 4"
"""Where keys go round in a ring; the others gather them."""


@functools.cache
def program_of(model: str, mesh: str) -> Program:
    devices = jax.devices()
    assert len(devices) == 8
    compute = dataclasses.replace(
        MODELS[model].compute, attention="ring" if mesh == RING else "auto"
    )
    config = Config(
        recipe=model,
        model=dataclasses.replace(MODELS[model], compute=compute),
        data=DataConfig(
            name="digits" if model == "vit" else "text:x", batch_size=8, eval_batch_size=4
        ),
        preset=PresetConfig(name="mup", base=None),
        # An eps far below the gradients would enlarge the rounding of those near zero.
        optimizer=OptimizerConfig(
            peak_lr=0.01, eps=1e-2, warmup_steps=2, weight_decay=0.1, clip_norm=1.0
        ),
        mesh=MESHES[mesh],
        steps=9,
        accumulation_steps=2,
    )
    return assemble(config, devices[:1] if mesh == "one" else devices)


def batch(model: str, step: int, size: int = 8) -> dict[str, np.ndarray]:
    random, config = np.random.default_rng(step), MODELS[model]
    if isinstance(config, DecoderConfig):
        shape = (size, 8)
        inputs = random.integers(0, 17, shape, np.int32)
    else:
        shape = (size,)
        inputs = random.standard_normal((size, 6, 6, 2)).astype(np.float32)
    weights = (random.random(shape) < 0.7).astype(np.float32)
    return {"inputs": inputs, "targets": random.integers(0, 7, shape, np.int32), "weights": weights}


@functools.cache
def trained(model: str, mesh: str) -> tuple[Any, Any, list[dict[str, float]], Any]:
    """The initial and the final parameters, the metrics of each of five steps, and the sums of an evaluation after them."""
    program = program_of(model, mesh)
    step, numbers, state, rows = (
        program.compile_train(),
        program.step_inputs(),
        program.initial_state(),
        [],
    )
    first = jax.device_get(state.params)
    for index in range(STEPS):
        state, metrics = step(state, numbers, program.train_feed().shard_batch(batch(model, index)))
        rows.append({name: float(value) for name, value in metrics.items() if value.ndim == 0})
    sums = program.compile_eval()(
        state.params, numbers, program.eval_feed().shard_batch(batch(model, STEPS, 4))
    )
    return first, jax.device_get(state.params), rows, jax.device_get(sums)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_five_steps_and_an_evaluation_agree_with_one_device(model: str, mesh: str) -> None:
    (first, one, expected, sums_one), (_, many, rows, sums) = (
        trained(model, name) for name in ("one", mesh)
    )
    for got, want in zip(rows, expected, strict=True):
        assert got == pytest.approx(want, rel=TOLERANCE / 10)
    for name, value in one.items():
        moved = np.abs(value - first[name]).max()
        assert moved > 1e-3, f"{name} was not trained"
        np.testing.assert_allclose(
            many[name], value, rtol=0, atol=TOLERANCE * moved + 1e-7, err_msg=name
        )
    assert [float(x) for x in jax.tree.leaves(sums)] == pytest.approx(
        [float(x) for x in jax.tree.leaves(sums_one)], rel=TOLERANCE / 10
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_initialization_is_the_same_to_the_bit(model: str, mesh: str) -> None:
    # Rows here are split into pieces that vector instructions do not fill, unlike those of test_mesh.
    for name, value in trained(model, "one")[0].items():
        np.testing.assert_array_equal(
            value.view(np.uint32), trained(model, mesh)[0][name].view(np.uint32), name
        )


@pytest.mark.slow
def test_control_positions_that_do_not_see_each_other_disagree() -> None:
    # Each half of the positions alone: what a device would compute that gathered no keys.
    program = program_of("rotary", "one")
    state, numbers, whole = program.initial_state(), program.step_inputs(), batch("rotary", 0, 4)
    evaluate = program.compile_eval()
    blind = {name: np.concatenate([x[:, 4:], x[:, :4]], axis=1) for name, x in whole.items()}
    loss, blind_loss = (float(evaluate(state.params, numbers, one).loss) for one in (whole, blind))
    assert abs(loss - blind_loss) > 100 * TOLERANCE * loss


def test_batches_and_activations_are_split_along_positions() -> None:
    program = program_of("rotary", "data 2 x sequence 4")
    on_mesh = program.train_feed().shard_batch(batch("rotary", 0))
    assert {shard.data.shape for x in on_mesh.values() for shard in x.addressable_shards} == {
        (4, 2)
    }
    images = program_of("vit", "data 2 x sequence 4").train_feed().shard_batch(batch("vit", 0))
    assert {shard.data.shape for shard in images["inputs"].addressable_shards} == {(4, 6, 6, 2)}
    lie = jax.jit(lambda x: program.layout.constrain(x, ("batch", "sequence", "mlp")))(
        jnp.zeros((4, 8, 24))
    )
    assert lie.sharding.is_equivalent_to(
        jax.sharding.NamedSharding(program.mesh, P("data", "sequence")), 3
    )


def test_rules_of_a_run_move_parameters() -> None:
    shardings = {
        name: leaf.sharding.spec
        for name, leaf in program_of("learned", "rules").abstract.params.items()
    }
    assert shardings["block.mlp.up"] == P(None, None, ("fsdp", "tensor"))
    assert shardings["block.attention.query"] == P(None, None, "tensor", None)
    assert shardings["token"] == P(None, None)
    assert program_of("learned", "rules").layout.batch({"targets": np.zeros((8, 8))})[
        "targets"
    ].spec == P("data", None)


def refused(model: Any, message: str, **mesh: Any) -> None:
    config = program_of("vit" if isinstance(model, ViTConfig) else "rotary", "one").config
    with pytest.raises(MeshError) as error:
        assemble(dataclasses.replace(config, model=model, mesh=MeshConfig(**mesh)))
    assert str(error.value) == message


def test_positions_that_do_not_split_say_what_does() -> None:
    cls = dataclasses.replace(MODELS["vit"], pool="cls")
    refused(
        cls,
        "mesh.sequence 4 does not divide the 5 positions (4 patches and the CLS token); write mesh.sequence 1, or "
        "--model.pool mean",
        data=2,
        sequence=4,
    )
    refused(
        MODELS["vit"],
        "mesh.sequence 8 does not divide the 4 positions (4 patches); write mesh.sequence 4, or another --model.patch-size",
        data=1,
        sequence=8,
    )
    refused(
        dataclasses.replace(MODELS["rotary"], seq_len=6),
        "mesh.sequence 4 does not divide the 6 positions; write mesh.sequence 3, or --model.seq-len with a multiple of 4",
        data=2,
        sequence=4,
    )
    refused(
        dataclasses.replace(MODELS["rotary"], width=18),
        "mesh.fsdp 4 x mesh.tensor 2 does not divide axis 'embed' of size 18 (block.attention.key); "
        "write sizes of fsdp and tensor whose product divides 18, or a model whose embed is a multiple of 8",
        data=1,
        fsdp=4,
        tensor=2,
        rules=("embed=fsdp,tensor",),
    )
