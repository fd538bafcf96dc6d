"""`finetune --lora.rank`: adapters alone are trained, resumed bitwise, merged on export; what they add does not grow with width."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.checkpoints.saved_run import find
from mupax.train.config.preset import PresetConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, OptimizerConfig
from mupax.train.core.program import assemble
from mupax.train.reuse import runs, trained
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.definition import definition
from mupax.zoo.transformer import LoraConfig
from tests.fixtures.programs import shared_programs
from tests.train.reuse.huggingface.test_push import TOKEN, Hub
from tests.train.reuse.test_source import published

__all__ = ["shared_programs"]  # a fixture

MODEL = DecoderConfig(
    width=8, depth=1, num_heads=2, num_kv_heads=1, mlp_ratio=1.5, vocab_size=256, seq_len=8, positions="rotary", norm="rmsnorm",
    activation="swiglu", bias=False,
)  # fmt: skip
RUN = (
    "finetune lm text.txt --from weights --data.tokenizer bytes --lora.rank 3 --steps 4 --checkpoint.every-steps 2 --data.batch-size 8 "
    "--data.eval-examples 8 --log.no-samples --log.no-tensorboard --log.no-progress --log.eval-every-steps 4"
)


def run(words: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(out):
        return main(words.split()), " ".join(out.getvalue().split())


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Published weights, a text, and a run of four steps on it."""
    path = tmp_path_factory.mktemp("lora")
    published(path / "weights", MODEL)
    (path / "text.txt").write_text(
        "adapters of low rank are added to matrices that stay as they are. " * 40
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        code, output = run(f"{RUN} --workdir run")
        assert code == 0, output
        assert "adapters of rank 3; tokens of bytes; rate" in output
        yield path


def state(workdir: str, step: int = 4) -> Any:
    config = find(Path(workdir)).config
    return runs.whole_state(
        Path(workdir).absolute() / "checkpoints" / str(step), runs.on_one_device(config)
    )


def test_adapters_alone_move_and_have_moments() -> None:
    after, before = state("run"), trained.read(Path("weights")).params
    adapters = {name for name in after.params if "_lora." in name}
    assert len(adapters) == 2 * 7  # query, key, value, out, up, gate, down
    assert all(np.abs(after.params[name]).max() > 0 for name in adapters)
    for name, w in before.items():
        np.testing.assert_array_equal(after.params[name], w)
    moments = {
        str(path[-1].key) for path, leaf in jax.tree.leaves_with_path(after.opt_state) if leaf.ndim
    }
    assert moments == adapters


def test_a_run_resumes_bitwise() -> None:
    shutil.copytree("run", "again")
    code, output = run(f"{RUN} --workdir again --resume --resume-from 2")
    assert code == 0, output
    for one, other in zip(
        *(jax.tree.leaves(state(each)) for each in ("run", "again")), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def logits(config: Config, params: Any) -> np.ndarray:
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) * 7
    program = runs.on_one_device(config)
    factors = program.inputs.factors
    return np.asarray(
        jax.jit(program.definition.apply)(params, factors.multiplier, factors.forward, tokens)
    )


def test_export_merges_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "--out", "merged"]) == 0
    assert "adapters of rank 3 are merged into their matrices" in capsys.readouterr().out
    merged, config = trained.read(Path("merged")), find(Path("run")).config
    assert merged.model.lora.rank is None  # pyright: ignore
    assert set(merged.params) == set(definition(MODEL).specs)
    params = state("run").params
    without = dataclasses.replace(config, model=merged.model, train_only=())
    expected = logits(config, params)
    np.testing.assert_allclose(
        logits(without, merged.params), expected, atol=2e-6 * np.abs(expected).max()
    )
    base = logits(
        without, trained.read(Path("weights")).params
    )  # the control: without adapters it is another function
    assert np.abs(base - expected).max() > 1e-3 * np.abs(expected).max()


def test_push_sends_what_export_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["export", "run", "--out", "model"]) == 0
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    for name, value in {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(Path("home").absolute()),
    }.items():
        monkeypatch.setenv(name, value)
    code, output = run("push run --to me/model")
    hub.shutdown()
    hub.server_close()
    thread.join()
    assert code == 0, output
    assert hub.files == {path.name: path.read_bytes() for path in Path("model").glob("[!.]*")}


def test_a_run_that_starts_from_it_has_them_merged() -> None:
    code, output = run(f"{RUN.replace('weights', 'run').replace('--lora.rank 3', '')} --dry-run")
    assert code == 0, output
    assert "lora" not in output
    assert "0.33 times that of the source, itself fine-tuned by adapters," in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora.rank 0", "lora.rank is 0; write a whole number of at least 1"),
        ("--lora.alpha 4", "there are none; write lora.rank too"),
        ("--lora.rank 2 --lora.alpha -1", "lora.alpha is -1.0; write a number above 0"),
        ("--lora.rank 2 --lora.on embedding", "embedding"),
        ("--lora.rnk 2", "--lora.rank"),
    ],
)
def test_wrong_words_are_answered(words: str, message: str) -> None:
    code, output = run(f"finetune text.txt --from weights --data.tokenizer bytes {words} --dry-run")
    assert (code, message in output) == (2, True), output


def test_their_moments_are_not_those_of_merged_matrices() -> None:
    start = RUN.replace("weights", "run").replace("--lora.rank 3", "--workdir moments")
    code, output = run(f"{start} --init-optimizer")
    assert (
        code,
        "trained low-rank adapters, which are merged into their matrices here" in output,
    ) == (2, True), output


def test_adapters_do_not_grow() -> None:
    code, output = run("grow run --set width=16 num_heads=4 --out larger")
    assert (code, "holds adapters" in output) == (2, True), output


def test_adapters_without_a_frozen_model_are_refused() -> None:
    code, output = run("train lm-tiny --model.lora.rank 4 --dry-run")
    assert code == 2
    assert "--train-only lora_a lora_b" in output
    with pytest.raises(ConfigError, match="not of an encoder-decoder"):
        dataclasses.replace(RECIPES["ed-tiny"]().model, lora=LoraConfig(rank=2))


WIDTHS = (16, 128)


def test_what_adapters_add_grows_with_width_under_sp_alone() -> None:
    """The operator norm of A B, as rms of outputs over inputs, after four steps of Adam: exponents in the width."""
    tokens, start = (
        np.random.default_rng(0).integers(0, 8, (8, 5)).astype(np.int32),
        RECIPES["lm-tiny"](),
    )
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((8, 4), np.float32),
    }
    norms: dict[str, list[float]] = {"mup": [], "sp": []}
    for width in WIDTHS:
        model = dataclasses.replace(
            MODEL, width=width, num_heads=width // 8, num_kv_heads=width // 8, seq_len=4, vocab_size=8, lora=LoraConfig(rank=2, on=("mlp",))
        )  # fmt: skip
        step = None
        for name, values in norms.items():
            base = "embed=16,heads=2,kv_heads=2,mlp=24,head_dim=8,layers=1"
            config = dataclasses.replace(
                start,
                model=model,
                data=dataclasses.replace(start.data, batch_size=8, eval_batch_size=8),
                preset=PresetConfig(name=name, base=base),
                optimizer=OptimizerConfig(
                    name="adam", peak_lr=0.02, schedule="constant", eps=1e-12
                ),
                train_only=("lora_a", "lora_b"),
            )
            program = assemble(config, jax.devices()[:1])
            step = program.compile_train() if step is None else step
            state, feed = program.placed(program.initial_state(), step), program.train_feed()
            for _ in range(4):
                state, _ = step(state, program.step_inputs(), feed.shard_batch(batch))
            a, b = (np.asarray(state.params[f"block.mlp.up_lora.{each}"])[0] for each in "ab")
            values.append(float(np.linalg.norm(a @ b, 2) * (width / b.shape[1]) ** 0.5))
    slopes = {
        name: np.log(values[1] / values[0]) / np.log(WIDTHS[1] / WIDTHS[0])
        for name, values in norms.items()
    }
    assert abs(slopes["mup"]) < 0.15, slopes
    assert slopes["sp"] > 0.3, slopes
