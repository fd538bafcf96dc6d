"""QK-clip: heads whose logits exceed the limit are shrunk to it after the update, and no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import (
    Config,
    EmaConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core.program import Program
from mupax.train.core.qk_clip import param_scales
from mupax.train.core.state import averaged
from mupax.train.studies.sweep.sweep import shape_of
from mupax.zoo.configs import (
    ComputeConfig,
    DecoderConfig,
    EncoderDecoderConfig,
    ViTConfig,
)
from mupax.zoo.definition import definition
from tests.fixtures import small_runs
from tests.fixtures.commands import Done
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import folder, interrupted, rows
from tests.fixtures.tiny import (
    assert_close,
    program_of,
    random_example,
    random_params,
    run_of,
    state_with,
)

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

replace = dataclasses.replace
DECODER = DecoderConfig(
    width=22, depth=2, num_heads=3, head_dim=4, mlp_ratio=1.5, vocab_size=17, seq_len=7, positions="rotary",
    norm_gain=False, activation="relu",
)  # fmt: skip
GROUPED = replace(DECODER, num_heads=6, num_kv_heads=2)
EVEN = DecoderConfig(
    width=64, depth=2, num_heads=4, head_dim=16, mlp_ratio=2, vocab_size=17, seq_len=16,
    norm_gain=False, activation="relu", compute=ComputeConfig(layers="scan"),
)  # fmt: skip
RUN = run_of(
    replace(DECODER, depth=1),
    preset=PresetConfig(name="mup", base="lm-proxy"),
    optimizer=OptimizerConfig(peak_lr=0.01, weight_decay=0.1, qk_clip=1.0),
    ema=EmaConfig(decay=0.9),
)
PLAIN = replace(
    RUN, ema=EmaConfig(), optimizer=OptimizerConfig(name="sgd", peak_lr=0.01, qk_clip=1.0)
)
"""Compiles in less time, for tests of models and meshes, which no optimizer matters to."""
TAU = 1.0
NO_LIMIT = 1e9
"""Limit that no logit reaches. The limit is an input of a program, so it needs no other one."""


def with_optimizer(config: Config, **fields: Any) -> Config:
    return replace(config, optimizer=replace(config.optimizer, **fields))


def is_query(name: str) -> bool:
    return name.rpartition(".")[2] in ("query", "query_bias")


def is_key(name: str) -> bool:
    return name.rpartition(".")[2] in ("key", "key_bias")


def stepped(
    config: Config, count: int = 1, limit: float | None = None, params: dict | None = None
) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return the states before and after steps on one batch, and each step's metrics, on the host.

    The first head's query is small, so that its logits stay below the limit. The others exceed it.

    Args:
        limit: Largest logit of a head. Default: the config's.
        params: Parameters to begin with, before queries are scaled. Default: random ones.
    """
    program = program_of(config)
    step = program.compile_train()
    params = dict(params or random_params(program))
    for name, w in params.items():
        if name.rpartition(".")[2] == "query":
            heads = np.geomspace(0.02, 4, w.shape[2], dtype=np.float32)[:, None]
            params[name] = (w * heads).astype(w.dtype)
        elif name.endswith("query_bias"):
            params[name] = np.full(w.shape, 0.003, w.dtype)
        elif name.endswith("key_bias"):
            params[name] = np.full(w.shape, 0.1, w.dtype)
    state = state_with(program, params)
    before = jax.device_get(state)
    step_inputs = program.step_inputs()
    if limit is not None:
        step_inputs = step_inputs._replace(qk_clip=np.float32(limit))
    rows = []
    for _ in range(count):
        batch = program.train_feed().shard_batch(random_example(config.model))
        state, metrics = step(state, step_inputs, batch)
        rows.append(jax.device_get(metrics))
    return before, jax.device_get(state), rows


@pytest.mark.core
@pytest.mark.parametrize("model", [DECODER, GROUPED], ids=["own keys", "shared keys"])
def test_the_factors_multiply_each_heads_logits_by_gamma(model: DecoderConfig) -> None:
    random = np.random.default_rng(0)
    largest = random.uniform(-1, 4, (2, model.num_heads)).astype(np.float32)
    assert (largest < 0).any()
    gamma = np.where(largest > TAU, TAU / largest, 1)
    scales = param_scales(
        {"block.attention": jnp.asarray(largest)}, jnp.float32(TAU), definition(model)
    )
    factors = {name: np.asarray(scale) for name, scale in scales.items()}

    queries = np.broadcast_to(factors["block.attention.query"], (2, 1, model.num_heads, 1))
    bias = factors["block.attention.query_bias"]
    np.testing.assert_array_equal(queries[:, 0], bias)
    keys = factors.get("block.attention.key", np.ones((2, 1, 1, 1)))
    np.testing.assert_allclose((queries * keys)[:, 0, :, 0], gamma, rtol=1e-6)
    if model is GROUPED:
        # A factor on a key would shrink the logits of other heads.
        assert list(factors) == ["block.attention.query", "block.attention.query_bias"]
    else:
        np.testing.assert_array_equal(keys, queries)
        assert len(factors) == 4
    assert (queries[:, 0, :, 0][largest <= TAU] == 1).all()


@pytest.mark.core
@pytest.mark.parametrize("model", [DECODER, GROUPED], ids=["own keys", "shared keys"])
def test_only_heads_above_the_limit_change_and_come_down_to_it(model: DecoderConfig) -> None:
    """Nothing else moves at a learning rate of 0, so the next logits are known exactly."""
    still = with_optimizer(replace(PLAIN, model=replace(model, depth=1)), peak_lr=0.0)
    before, after, rows = stepped(still, 2)
    assert rows[0]["attention_logit_max"] > 2 * TAU
    np.testing.assert_allclose(rows[1]["attention_logit_max"], TAU, rtol=1e-6)
    for name, w in before.params.items():
        changed = np.abs(after.params[name] - w).reshape(w.shape[0], -1).any()
        is_scaled = is_query(name) or (is_key(name) and model is DECODER)
        assert changed == is_scaled, name
        if is_scaled:
            moved = np.moveaxis(after.params[name] != w, -2, 0)
            by_head = moved.reshape(len(moved), -1).any(axis=1)
            assert not by_head[0]
            assert by_head[-1]
    # The control: without the limit the logits are as large at the second step.
    _, _, free = stepped(still, 2, limit=NO_LIMIT)
    assert free[0]["attention_logit_max"] == rows[0]["attention_logit_max"]
    assert free[1]["attention_logit_max"] == free[0]["attention_logit_max"]


@pytest.mark.core
def test_logits_of_a_run_that_learns_stay_at_the_limit() -> None:
    config = with_optimizer(RUN, schedule="constant", peak_lr=1e-3)
    _, _, rows = stepped(config, 8)
    _, _, free = stepped(config, 8, limit=NO_LIMIT)
    clipped = [float(row["attention_logit_max"]) for row in rows]
    assert min(float(row["attention_logit_max"]) for row in free) > 2 * TAU
    # The clip goes by the logits before the update, so one update's growth comes on top of the limit.
    assert max(clipped[1:]) < 1.25 * TAU
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


@pytest.mark.core
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if ":" not in n])
def test_every_optimizer_updates_first_and_is_clipped_then(name: str) -> None:
    config = with_optimizer(RUN, name=name)
    if "weight_decay" not in OPTIMIZERS[name].reads:
        config = with_optimizer(config, weight_decay=0.0)
    _, free, _ = stepped(config, limit=NO_LIMIT)
    before, clipped, rows = stepped(config)
    assert rows[0]["attention_logit_max"] > TAU
    moments = (jax.tree.leaves(free.opt_state), jax.tree.leaves(clipped.opt_state))
    for one, other in zip(*moments, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-9)
    for parameter, w in free.params.items():
        ratio = clipped.params[parameter] / np.where(w == 0, 1, w)
        if is_query(parameter) or is_key(parameter):
            # One factor for each layer and head, decay and update included.
            by_head = np.moveaxis(ratio, -2, 0).reshape(w.shape[-2], w.shape[0], -1)
            spread = np.ptp(by_head, axis=-1)
            assert spread.max() < 1e-3, parameter
            np.testing.assert_allclose(by_head[0], 1, rtol=1e-4)
            assert by_head[-1].max() < 0.9
        else:
            np.testing.assert_allclose(clipped.params[parameter], w, rtol=1e-5, atol=1e-8)
    # The average takes in the clipped parameters.
    ema = averaged(before.ema, clipped.params, jnp.float32(0.9), jnp.int32(0))
    for parameter, value in ema.items():
        np.testing.assert_allclose(clipped.ema[parameter], value, rtol=1e-5, atol=1e-8)


@pytest.mark.core
def test_a_limit_that_no_logit_reaches_changes_nothing() -> None:
    """The control of all tests that take such a limit for none."""
    _, without, _ = stepped(with_optimizer(PLAIN, qk_clip=None))
    _, unreached, _ = stepped(PLAIN, limit=NO_LIMIT)
    assert_close(unreached, without)


def test_a_mesh_that_splits_the_batch_clips_by_the_largest_logit_of_all() -> None:
    """Only logits decide the factors, and a device computes those of its own examples.

    Not to the bit: a logit may differ from one device's in the last bit, since XLA fuses its sum
    in another way. 1e-6 is eight such bits.
    """
    config = with_optimizer(replace(PLAIN, model=EVEN), peak_lr=0.0)
    before, one, one_rows = stepped(config, 2)
    _, many, many_rows = stepped(replace(config, mesh=MeshConfig(data=2, fsdp=4)), 2)
    largest = many_rows[0]["attention_logit_max"]
    np.testing.assert_allclose(largest, one_rows[0]["attention_logit_max"], rtol=1e-6)
    assert (one.params["block.attention.query"] != before.params["block.attention.query"]).any()
    for name, w in one.params.items():
        np.testing.assert_allclose(many.params[name], w, rtol=1e-6, err_msg=name)


def test_a_mesh_that_splits_heads_and_positions_clips_alike() -> None:
    mesh = MeshConfig(data=1, fsdp=2, sequence=2, tensor=2)
    config = replace(PLAIN, model=EVEN)
    _, one, _ = stepped(config, 2)
    _, many, _ = stepped(replace(config, mesh=mesh), 2)
    for name, w in one.params.items():
        np.testing.assert_allclose(many.params[name], w, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.core
def test_microbatches_clip_by_the_largest_logit_of_all() -> None:
    still = with_optimizer(PLAIN, peak_lr=0.0)
    _, one, _ = stepped(still)
    _, several, rows = stepped(replace(still, accumulation_steps=4))
    assert rows[0]["attention_logit_max"] > TAU
    for name, w in one.params.items():
        np.testing.assert_allclose(several.params[name], w, rtol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("family", ["encoder-decoder", "vit"])
def test_all_attentions_of_other_models_are_clipped(family: str) -> None:
    model: Any = EncoderDecoderConfig(
        width=22, depth=1, num_heads=3, head_dim=4, mlp_ratio=1.5, vocab_size=17, seq_len=7,
        target_len=5, norm_gain=False,
    )  # fmt: skip
    if family == "vit":
        model = ViTConfig(
            width=22, depth=2, num_heads=3, head_dim=5, mlp_ratio=1.5, image_size=9, patch_size=3,
            channels=2, num_classes=7, norm_gain=False,
        )  # fmt: skip
    base = "vit-proxy" if family == "vit" else "ed-proxy"
    config = run_of(model, preset=PresetConfig(base=base), optimizer=PLAIN.optimizer)
    before, after, rows = stepped(with_optimizer(config, peak_lr=0.0), 3)
    matrices = [name for name in before.params if name.rpartition(".")[2] in ("query", "key")]
    assert len(matrices) == (2 if family == "vit" else 6)
    for name in matrices:
        assert (after.params[name] != before.params[name]).any(), name
    # Layers below change what a layer reads, so the limit is reached layer by layer.
    np.testing.assert_allclose(rows[2]["attention_logit_max"], TAU, rtol=0.05)


@pytest.mark.core
def test_parameters_stored_in_bfloat16_are_clipped_before_they_are_rounded() -> None:
    compute = ComputeConfig(param_dtype="bfloat16")
    config = with_optimizer(replace(PLAIN, model=replace(RUN.model, compute=compute)), peak_lr=0.0)  # fmt: skip
    before, after, rows = stepped(config, 2)
    assert after.params["block.attention.query"].dtype == before.params["token"].dtype
    np.testing.assert_allclose(rows[1]["attention_logit_max"], TAU, rtol=0.02)
    np.testing.assert_array_equal(after.params["token"], before.params["token"])


@pytest.mark.core
def test_a_skipped_step_clips_nothing() -> None:
    program = program_of(RUN)
    state = state_with(program, random_params(program))
    before = jax.device_get(state.params)
    batch = random_example(RUN.model)
    batch["weights"][0, 0] = np.nan
    after, metrics = program.compile_train()(state, program.step_inputs(), batch)
    assert metrics["verdict"][0] == 1
    for name, w in before.items():
        np.testing.assert_array_equal(after.params[name], w)


@pytest.mark.core
def test_points_of_a_sweep_share_a_program_whatever_their_limit() -> None:
    one, other = (with_optimizer(RUN, qk_clip=tau) for tau in (1.0, 50.0))
    assert shape_of(one) == shape_of(other)
    assert shape_of(one) != shape_of(with_optimizer(RUN, qk_clip=None))


def train(*words: str) -> Done:
    return small_runs.train(
        "--data.tokenizer bytes --data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 16",
        "--steps 6 --optimizer.warmup-steps 1 --checkpoint.every-steps 3 --log.no-tensorboard",
        *words,
    )


def test_a_command_clips_and_a_resumed_run_has_the_same_bits() -> None:
    flags = (
        "--seed 1 --optimizer.qk-clip 0.05 --optimizer.peak-lr 2e-4 --optimizer.schedule constant"
    )
    done = train(flags, "--workdir whole")
    assert done.code == 0, done.err
    largest = [row["attention_logit_max"] for row in rows("whole") if "loss" in row]
    assert largest[0] > 0.1
    # A factor goes by the logits of the batch before. Of seeds 0 to 3, 0 reaches 0.063 at any lr.
    assert max(largest[1:]) < 0.055

    interrupted("whole", "parts", 3)
    done = train(flags, "--workdir parts --resume")
    assert done.code == 0, done.err
    assert "resuming" in done.out
    assert rows("parts") == rows("whole")
    # A limit that changes is announced.
    done = train(flags, "--workdir parts --resume --steps 7 --optimizer.qk-clip 7")
    assert done.code == 0, done.err
    assert "optimizer.qk_clip 0.05 -> 7" in done.text


REFUSED = {
    "--optimizer.qk-clip 0": "optimizer.qk_clip is 0.0; write the largest attention logit",
    "--optimizer.qk-clip -3": "optimizer.qk_clip is -3.0",
    "--optimizer.qk-clip nan": "optimizer.qk_clip is nan",
    "--optimizer.qk-clip 9 --model.qk-norm": "model.qk_norm normalizes their outputs",
    "--optimizer.qk-clip 9 --freeze query": "block.attention.query is frozen; leave it out",
    "--optimizer.qk-clip 9 --freeze block.attention.key": "block.attention.key is frozen",
    "--optimizer.qk-clip 9 --model.lora.rank 2 --train-only lora_a": "model.lora adds adapters",
}


@pytest.mark.core
@pytest.mark.parametrize("flags", REFUSED)
def test_wrong_settings_get_one_line_before_anything_is_compiled(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Program, "compile_train")
    done = train("--workdir out", flags)
    assert done.code == 2
    assert REFUSED[flags] in done.message
    assert len(done.err.strip().splitlines()) == 1
