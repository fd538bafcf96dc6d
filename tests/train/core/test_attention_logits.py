"""The largest attention logit of a step equals a plain computation, for every model and mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import (
    Config,
    LogConfig,
    MeshConfig,
    OptimizerConfig,
    PresetConfig,
)
from mupax.train.core import step as steps
from mupax.train.core.program import Program
from mupax.train.core.state import shardings_of
from mupax.zoo.configs import (
    ComputeConfig,
    ConfigError,
    DecoderConfig,
    EncoderDecoderConfig,
    ModelConfig,
    ViTConfig,
)
from mupax.zoo.encoder_decoder import model as encoder_decoder
from mupax.zoo.layers import kernels
from mupax.zoo.layers.kernels import largest_logits
from tests.fixtures.devices import one_device
from tests.fixtures.small_runs import folder, rows, train
from tests.fixtures.tiny import (
    program_of,
    random_example,
    random_params,
    run_of,
    scalars,
    state_with,
)

__all__ = ["folder", "one_device"]  # fixtures

BATCH = 8
PAIRS_TOLERANCE = 2e-6
"""Relative. float32 sums of at most 16 products in another order: 3e-7 was seen."""
MODEL_TOLERANCE = 1e-5
"""Relative. A whole model's forward pass in another order of sums: 2e-6 was seen."""

DECODER = DecoderConfig(
    width=22, depth=3, num_heads=6, num_kv_heads=2, head_dim=5, mlp_ratio=1.5, vocab_size=17,
    seq_len=13, compute=ComputeConfig(layers="unrolled"),
)  # fmt: skip
VIT = ViTConfig(
    width=20, depth=2, num_heads=5, head_dim=3, mlp_ratio=1.3, image_size=9, patch_size=3, channels=2,
    num_classes=7, registers=2, compute=ComputeConfig(layers="unrolled"),
)  # fmt: skip
ENCODER_DECODER = EncoderDecoderConfig(
    width=22, depth=2, encoder_depth=3, num_heads=6, num_kv_heads=2, head_dim=5, mlp_ratio=1.5, vocab_size=17,
    seq_len=13, target_len=11, compute=ComputeConfig(layers="unrolled"),
)  # fmt: skip

replace = dataclasses.replace
MODELS: dict[str, ModelConfig] = {
    "decoder": DECODER,
    "rotary": replace(DECODER, positions="rotary", head_dim=4, rotary_fraction=0.5),
    "window": replace(DECODER, window=3, full_every=2),
    "qk-norm": replace(DECODER, qk_norm=True),
    "soft cap": replace(DECODER, attention_softcap=0.7),
    "experts": replace(DECODER, experts=3, expert_dim=11, value_dim=7),
    "vit": VIT,
    "encoder-decoder": ENCODER_DECODER,
    "relative": replace(ENCODER_DECODER, positions="relative", distance_buckets=8, longest_distance=9),
}  # fmt: skip


def config_of(model: ModelConfig, **fields: Any) -> Config:
    """Return a run that measures logits. Its base is a small model, so that logits are large."""
    bases = {DecoderConfig: "lm-proxy", ViTConfig: "vit-proxy", EncoderDecoderConfig: "ed-proxy"}
    values: dict[str, Any] = {
        "preset": PresetConfig(name="mup", base=bases[type(model)]),
        "optimizer": OptimizerConfig(name="sgd", peak_lr=0.1, schedule="constant"),
        "log": LogConfig(attention_logits=True),
    }
    return run_of(model, **{**values, **fields})


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """Return a batch with documents of uneven length, or with padding in the encoder."""
    random = np.random.default_rng(0)
    batch = random_example(config.model)
    if "input_mask" in batch:
        lengths = random.integers(1, batch["inputs"].shape[1], (BATCH, 1))
        batch["input_mask"] = (np.arange(batch["inputs"].shape[1]) < lengths).astype(np.int32)
    if config.data.document_mask:
        segments = random.integers(0, 3, batch["inputs"].shape, np.int32)
        batch["segments"] = np.sort(segments, axis=1)
    return batch


def params_of(program: Program) -> dict[str, np.ndarray]:
    """Return random parameters.

    Queries and keys differ by head and layer, so that logits are not all alike.
    """
    params = random_params(program)
    for name, w in params.items():
        if name.rpartition(".")[2] in ("query", "key"):
            heads = np.linspace(1, 3, w.shape[2], dtype=np.float32)[:, None]
            layers = np.linspace(1, 2, w.shape[0], dtype=np.float32)[:, None, None, None]
            params[name] = w * heads * layers
    return params


def plain_logits(
    q_BTHN: Any,
    k_BSKN: Any,
    *,
    causal: bool,
    window: int | None = None,
    mask_BS: Any = None,
    segments_BT: Any = None,
    hides: bool = True,
) -> np.ndarray:
    """Return the largest logits [H] by NumPy. With `hides` off all pairs count: a wrong answer."""
    q = np.asarray(q_BTHN, np.float64)
    groups = q.shape[2] // np.shape(k_BSKN)[2]
    k = np.repeat(np.asarray(k_BSKN, np.float64), groups, axis=2)
    logits = np.einsum("bthn,bshn->bhts", q, k)
    t = np.arange(q.shape[1])[:, None]
    s = np.arange(k.shape[1])[None, :]
    visible = np.ones((len(q), len(t), k.shape[1]), bool)
    if causal:
        visible &= s <= t
        if window is not None:
            visible &= s > t - window
    if mask_BS is not None:
        visible &= np.asarray(mask_BS)[:, None, :]
    if segments_BT is not None:
        segments = np.asarray(segments_BT)
        visible &= segments[:, :, None] == segments[:, None, :]
    if hides:
        logits = np.where(visible[:, None], logits, -np.inf)
    return logits.max(axis=(0, 2, 3))


class Recorder:
    """Keeps queries, keys and masks of every attention that is traced while `on` is entered."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._depth = 0

    @contextlib.contextmanager
    def on(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "attend", self._recording(kernels.attend))
            patch.setattr(encoder_decoder, "attend", self._recording(encoder_decoder.attend))
            yield

    def _recording(self, attend: Any) -> Any:
        @functools.wraps(attend)
        def wrapped(q: Any, k: Any, v: Any, **how: Any) -> Any:
            # One implementation calls another, or itself with wider values.
            if self._depth == 0:
                names = ("causal", "window", "mask_BS", "segments_BT")
                arguments = {name: how[name] for name in names if name in how}
                self.calls.append({"q_BTHN": q, "k_BSKN": k, **arguments})
            self._depth += 1
            try:
                return attend(q, k, v, **how)
            finally:
                self._depth -= 1

        return wrapped


def measured(program: Program, batch: dict[str, Any], recorder: Recorder) -> dict[str, np.ndarray]:
    """Return the largest logits of each attention, [layers, heads], by the step's own function.

    The arrays that the recorder has kept become concrete.
    """

    def sums(params: Any, batch: Any) -> Any:
        recorder.calls.clear()
        sums = steps.batch_sums(
            program.definition, params, program.inputs, batch, measure_logits=True
        )
        # Arrays leave the traced function, the other arguments stay where they are.
        arrays = []
        for call in recorder.calls:
            arrays.append({n: a for n, a in call.items() if isinstance(a, jax.Array)})
        return sums.attention_logits, arrays

    result, arrays = jax.device_get(jax.jit(sums)(params_of(program), batch))
    for call, concrete in zip(recorder.calls, arrays, strict=True):
        call.update(concrete)
    return result


@pytest.mark.core
@pytest.mark.parametrize("name", [*MODELS, "documents"])
def test_the_step_measures_the_largest_visible_logit_of_every_head(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(MODELS.get(name, DECODER))
    if name == "documents":
        config = replace(config, data=replace(config.data, document_mask=True))
    program = program_of(config)
    recorder = Recorder()
    with recorder.on(monkeypatch):
        result = measured(program, batch_of(config), recorder)

    # Layers run in order: all of the encoder, then self- and cross-attention of each decoder block.
    rows = np.stack([plain_logits(**call) for call in recorder.calls])
    blind = np.stack([plain_logits(**call, hides=False) for call in recorder.calls])
    if "cross" in " ".join(result):
        expected = {
            "encoder.block.attention": rows[:3],
            "block.attention": rows[3::2],
            "block.cross": rows[4::2],
        }
    else:
        expected = {"block.attention": rows}
    assert set(result) == set(expected)
    for attention, largest in expected.items():
        np.testing.assert_allclose(result[attention], largest, rtol=PAIRS_TOLERANCE)
    # A reference that counts hidden pairs gives other values, except where nothing is hidden.
    assert np.array_equal(rows, blind) == (name == "vit")
    assert len(np.unique(rows)) == rows.size


def layer_norm(x: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.core
def test_a_decoder_in_numpy_has_the_same_logits() -> None:
    """Everything of the model is written again, from the token to the logits of the last layer."""
    model = replace(DECODER, activation="relu", bias=False, norm_gain=False)
    config = config_of(model)
    program = program_of(config)
    batch = batch_of(config)
    inputs = program.inputs
    weights = {}
    for name, w in params_of(program).items():
        multiplier = np.asarray(inputs.factors.multiplier[name], np.float64)
        w = np.asarray(w, np.float64)
        weights[name] = w * multiplier.reshape(multiplier.shape + (1,) * (w.ndim - multiplier.ndim))
    forward = {name: np.asarray(value) for name, value in inputs.factors.forward.items()}

    h = weights["token"][batch["inputs"]] + weights["position"]
    rows = []
    for layer in range(model.depth):
        matrix = {n.removeprefix("block."): w[layer] for n, w in weights.items() if "block" in n}
        skip = forward.get("block.skip", np.ones((model.depth, 2)))[layer]
        branch = forward["block.branch"][layer]
        x = layer_norm(h)
        q = np.einsum("btd,dhn->bthn", x, matrix["attention.query"])
        q = q * forward["block.attention.logit_scale"][layer]
        k = np.einsum("btd,dkn->btkn", x, matrix["attention.key"])
        v = np.einsum("btd,dkn->btkn", x, matrix["attention.value"])
        rows.append(plain_logits(q, k, causal=True))
        logits = np.einsum("bthn,bshn->bhts", q, np.repeat(k, 3, axis=2))
        logits = np.where(np.tri(13, dtype=bool), logits, -np.inf)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares = shares / shares.sum(-1, keepdims=True)
        y = np.einsum("bhts,bshn->bthn", shares, np.repeat(v, 3, axis=2))
        h = skip[0] * h + branch[0] * np.einsum("bthn,hnd->btd", y, matrix["attention.out"])
        up = np.maximum(layer_norm(h) @ matrix["mlp.up"], 0)
        h = skip[1] * h + branch[1] * up @ matrix["mlp.down"]

    (result,) = measured(program, batch, Recorder()).values()
    np.testing.assert_allclose(result, np.stack(rows), rtol=MODEL_TOLERANCE)


@pytest.mark.core
@pytest.mark.parametrize("block", [2, 7, 64])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3), (True, 11)])
def test_blocks_of_queries_and_keys_cover_all_visible_pairs(
    block: int, causal: bool, window: int | None
) -> None:
    random = np.random.default_rng(block)
    q = random.standard_normal((3, 23, 6, 5)).astype(np.float32)
    k = random.standard_normal((3, 23, 2, 5)).astype(np.float32)
    segments = np.sort(random.integers(0, 4, (3, 23)), axis=1)
    mask = random.random((3, 23)) < 0.5
    visible = {"causal": causal, "window": window}
    cases: list[dict[str, Any]] = [
        visible,
        {**visible, "segments_BT": segments},
        {**visible, "mask_BS": mask},
    ]

    @jax.jit
    def measure(q: Any, k: Any) -> list[Any]:
        return [largest_logits(q, k, block=block, **how) for how in cases]

    for result, how in zip(measure(q, k), cases, strict=True):
        np.testing.assert_allclose(result, plain_logits(q, k, **how), rtol=PAIRS_TOLERANCE)


@pytest.mark.core
def test_no_array_of_all_pairs_exists() -> None:
    q = jax.ShapeDtypeStruct((2, 2048, 3, 4), jnp.float32)
    jaxpr = str(jax.make_jaxpr(functools.partial(largest_logits, causal=True))(q, q))
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\w+\d+\[([\d,]+)\]", jaxpr)]
    assert max(np.prod(shape) for shape in shapes) == 2 * 3 * 256 * 256


@functools.cache
def lowered(config: Config) -> Any:
    return program_of(config).trace_train().lower()


@functools.cache
def stepped(config: Config) -> tuple[Any, dict[str, float]]:
    """Return the parameters after one step, and the metrics of the step.

    Later steps would compare how rounding grows under an attention that is nearly an argmax.
    """
    program = program_of(config)
    step = lowered(config).compile(compiler_options=program.compiler_options())
    state = state_with(program, params_of(program))
    batch = program.train_feed().shard_batch(batch_of(config))
    state, metrics = step(state, program.step_inputs(), batch)
    return jax.device_get(state.params), scalars(metrics)


def logits_and_loss(
    config: Config, params: dict[str, Any], batch: dict[str, Any]
) -> tuple[dict[str, np.ndarray], float]:
    """Return the largest logits of each attention, [layers, heads], and the mean loss on a mesh.

    They come from the step's own function of gradients. Only the readout has a gradient, because
    the backward pass of the others would be most of what is compiled.
    """
    program = program_of(replace(config, train_only=("readout",)))

    @jax.jit
    def compute(params: Any, batch: Any) -> Any:
        _, sums = steps.gradients(
            program.definition,
            params,
            program.inputs,
            batch,
            config.accumulation_steps,
            measure_logits=True,
            layout=program.layout,
        )
        return sums.attention_logits, sums.loss / sums.weight

    placed = jax.device_put(params, shardings_of(program.abstract).params)
    return jax.device_get(compute(placed, program.train_feed().shard_batch(batch)))


@functools.cache
def measured_on_mesh(config: Config) -> tuple[dict[str, np.ndarray], float]:
    return logits_and_loss(config, params_of(program_of(config)), batch_of(config))


def assert_same_measurements(config: Config, other: Config) -> None:
    logits, loss = measured_on_mesh(config)
    other_logits, other_loss = measured_on_mesh(other)
    assert other_logits.keys() == logits.keys()
    for attention, largest in logits.items():
        np.testing.assert_allclose(other_logits[attention], largest, rtol=MODEL_TOLERANCE)
    np.testing.assert_allclose(other_loss, loss, rtol=MODEL_TOLERANCE)


SCAN = ComputeConfig(layers="scan")
"""Compiles much faster on a mesh than layers that are written out."""
EVEN = replace(
    DECODER, num_heads=4, num_kv_heads=2, head_dim=8, width=32, seq_len=16, depth=2, mlp_ratio=2,
    bias=False, norm_gain=False,
)  # fmt: skip
EVEN_SCAN = replace(EVEN, compute=SCAN)
EVEN_VIT = replace(
    VIT, num_heads=4, head_dim=8, width=32, mlp_ratio=2, registers=None, image_size=12, pool="mean",
    compute=SCAN,
)  # fmt: skip
EVEN_SPANS = replace(
    ENCODER_DECODER, num_heads=4, head_dim=8, width=32, seq_len=16, target_len=8, mlp_ratio=2,
    bias=False, norm_gain=False, tied=False, compute=SCAN,
)  # fmt: skip
EVEN_MODELS: dict[str, ModelConfig] = {
    "decoder": EVEN_SCAN,
    "unrolled": EVEN,
    "window": replace(EVEN_SCAN, window=5, full_every=2, depth=3),
    "encoder-decoder": EVEN_SPANS,
}
MESHES = {
    "fsdp 8": MeshConfig(data=1, fsdp=8),
    "data 2 fsdp 4": MeshConfig(data=2, fsdp=4),
    "tensor 2": MeshConfig(data=2, tensor=2),
    "sequence 2": MeshConfig(data=2, sequence=2),
    "all": MeshConfig(data=1, fsdp=2, sequence=2, tensor=2),
}
ON_MESHES = [
    ("unrolled", "fsdp 8"),
    ("decoder", "tensor 2"),
    ("decoder", "all"),
    ("window", "data 2 fsdp 4"),
    ("window", "sequence 2"),
    ("encoder-decoder", "fsdp 8"),
    ("encoder-decoder", "all"),
]


@pytest.mark.parametrize(("model", "mesh"), ON_MESHES)
def test_every_mesh_measures_the_same(model: str, mesh: str) -> None:
    config = config_of(EVEN_MODELS[model])
    assert_same_measurements(config, replace(config, mesh=MESHES[mesh]))


@pytest.mark.parametrize("model", ["rotary", "vit"])
def test_ring_attention_and_images_on_a_mesh(model: str) -> None:
    """The ring holds positions in another order, so its masks go by the positions themselves."""
    split = EVEN_VIT
    config = config_of(EVEN_VIT)
    if model == "rotary":
        rotary = replace(EVEN_SCAN, positions="rotary")
        split = replace(rotary, compute=replace(SCAN, attention="ring"))
        config = config_of(rotary)
    assert_same_measurements(config, replace(config, model=split, mesh=MESHES["sequence 2"]))


@pytest.mark.core
@pytest.mark.parametrize(
    ("layers", "remat", "mesh"),
    [
        ("scan", "none", "one"),
        ("unrolled", "dots", "one"),
        ("scan", "block", "data 2 fsdp 4"),
    ],
)
def test_scan_and_remat_measure_the_same_in_a_step(layers: Any, remat: Any, mesh: str) -> None:
    config = config_of(EVEN)
    _, plain = stepped(config)
    model = replace(EVEN, compute=ComputeConfig(layers=layers, remat=remat))
    mesh_config = MESHES.get(mesh, config.mesh)
    _, other = stepped(replace(config, model=model, mesh=mesh_config))
    for metric in ("attention_logit_max", "loss"):
        assert plain[metric] == pytest.approx(other[metric], rel=MODEL_TOLERANCE)


@pytest.mark.core
@pytest.mark.parametrize("mesh", ["one", "data 2 fsdp 4"])
def test_microbatches_give_the_maximum_over_all_of_them(mesh: str) -> None:
    """All logits are negative here, so that a maximum that begins at 0 would be wrong."""
    config = config_of(EVEN_SCAN, mesh=MESHES.get(mesh, MeshConfig(data=1)))
    config = replace(config, data=replace(config.data, batch_size=16))
    params = params_of(program_of(config))
    # Positions of an example are alike, and a query is its key times -1.
    params["position"] = 0 * params["position"]
    key = params["block.attention.key"]
    params["block.attention.query"] = -np.repeat(key, 2, axis=2)
    small = batch_of(config)
    batch = {name: np.concatenate([array, array]) for name, array in small.items()}
    batch["inputs"] = np.repeat(np.arange(16, dtype=np.int32)[:, None], 16, axis=1)

    results = []
    for count in (1, 2):
        split = replace(config, accumulation_steps=count)
        (largest,) = logits_and_loss(split, params, batch)[0].values()
        assert (largest < 0).all()
        results.append(largest)
    np.testing.assert_allclose(results[1], results[0], rtol=MODEL_TOLERANCE)


@pytest.mark.core
def test_a_run_without_the_flag_pays_nothing() -> None:
    config = config_of(EVEN)
    off = replace(config, log=LogConfig())
    # As many products as before: one for each matrix, the logits and the values, and no more.
    counts = [lowered(c).as_text().count("stablehlo.dot_general") for c in (off, config)]
    assert counts[1] == counts[0] + EVEN.depth
    plain_params, plain_metrics = stepped(off)
    measured_params, _ = stepped(config)
    assert "attention_logit_max" not in plain_metrics
    for name, w in plain_params.items():
        np.testing.assert_array_equal(w, measured_params[name])


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "log.attention_logits needs attention logits, and those of the model .*leave it out"),
        (
            {"log": LogConfig(), "optimizer": OptimizerConfig(qk_clip=1.0)},
            "^optimizer.qk_clip needs attention logits",
        ),
    ],
    ids=["measured", "clipped"],
)
def test_a_model_without_attention_is_refused_before_anything_is_compiled(
    changes: dict[str, Any], message: str
) -> None:
    from examples import mlp_mixer

    mixer = mlp_mixer.MixerConfig(
        width=20, depth=2, image_size=9, patch_size=3, channels=2, num_classes=7
    )
    changes = {"preset": PresetConfig(name="mup", base=None), **changes}
    with pytest.raises(ConfigError, match=message):
        program_of(replace(config_of(VIT), model=mixer, **changes))


@pytest.mark.core
def test_rows_screen_summary_and_tensorboard_have_it() -> None:
    done = train(
        "--data.tokenizer bytes --data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 16",
        "--steps 5 --optimizer.warmup-steps 1 --workdir out --log.attention-logits",
    )
    assert done.code == 0, done.err
    values = [row["attention_logit_max"] for row in rows("out") if "loss" in row]
    assert len(values) == 5
    assert all(np.isfinite(values))
    assert f"attention logit {values[-1]:.4g}" in done.out
    assert f"at most {max(values):.4g}, at step {1 + int(np.argmax(values))}" in done.out
    events = b"".join(path.read_bytes() for path in Path("out/tensorboard").rglob("events*"))
    assert b"train/attention_logit_max" in events
