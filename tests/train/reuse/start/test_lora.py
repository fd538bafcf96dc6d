"""`finetune --lora.rank`: adapters alone are trained, resumed bitwise and merged on export."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.checkpoints.saved_run import find
from mupax.train.config.preset import PresetConfig
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, OptimizerConfig
from mupax.train.core.program import assemble
from mupax.train.reuse import runs, trained
from mupax.zoo.configs import ConfigError
from mupax.zoo.definition import definition
from mupax.zoo.transformer import LoraConfig
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import call, succeed
from tests.train.reuse.huggingface.push_hub import push_hub
from tests.train.reuse.random_weights import LLAMA, published

__all__ = ["shared_programs"]  # a fixture

MODEL = dataclasses.replace(LLAMA, width=8, depth=1, num_kv_heads=1, vocab_size=256, seq_len=8)
RUN = (
    "finetune lm text.txt --from weights --data.tokenizer bytes --lora.rank 3 --steps 4 "
    "--checkpoint.every-steps 2 --data.batch-size 8 --data.eval-examples 8 --log.no-samples "
    "--log.no-tensorboard --log.no-progress --log.eval-every-steps 4"
)
FROM_RUN = RUN.replace("weights", "run").replace("--lora.rank 3", "")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the current folder, with published weights, a text, and a run of four steps on it."""
    path = tmp_path_factory.mktemp("lora")
    published(path / "weights", MODEL)
    text = "adapters of low rank are added to matrices that stay as they are. "
    (path / "text.txt").write_text(text * 40)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        err = succeed(RUN, "--workdir run").err
        assert "adapters of rank 3; tokens of bytes; rate" in err
        yield path


def state_of(workdir: str) -> Any:
    """Return the state after four steps."""
    path = Path(workdir).absolute()
    return runs.whole_state(path / "checkpoints" / "4", runs.on_one_device(find(path).config))


def test_adapters_alone_move_and_have_moments() -> None:
    state = state_of("run")
    adapters = {name for name in state.params if "_lora." in name}
    assert len(adapters) == 2 * 7  # query, key, value, out, up, gate, down
    assert all(np.abs(state.params[name]).max() > 0 for name in adapters)
    for name, w in trained.read(Path("weights")).params.items():
        np.testing.assert_array_equal(state.params[name], w)
    leaves = jax.tree.leaves_with_path(state.opt_state)
    moments: set[Any] = {path[-1] for path, leaf in leaves if leaf.ndim}
    assert {str(entry.key) for entry in moments} == adapters


def test_a_run_resumes_bitwise() -> None:
    shutil.copytree("run", "again")
    succeed(RUN, "--workdir again --resume --resume-from 2")
    jax.tree.map(np.testing.assert_array_equal, state_of("run"), state_of("again"))


def logits(config: Config, params: Any) -> np.ndarray:
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) * 7
    program = runs.on_one_device(config)
    factors = program.inputs.factors
    apply = jax.jit(program.definition.apply)
    return np.asarray(apply(params, factors.multiplier, factors.forward, tokens))


def test_export_merges_them_and_push_sends_the_same(folder: Path) -> None:
    out = succeed("export run --out merged").out
    assert "adapters of rank 3 are merged into their matrices" in out
    merged = trained.read(Path("merged"))
    assert merged.model.lora.rank is None  # pyright: ignore
    assert set(merged.params) == set(definition(MODEL).specs)
    config = find(Path("run")).config
    expected = logits(config, state_of("run").params)
    largest = np.abs(expected).max()
    without = dataclasses.replace(config, model=merged.model, train_only=())
    np.testing.assert_allclose(logits(without, merged.params), expected, atol=2e-6 * largest)
    # The control: without adapters it is another function.
    base = logits(without, trained.read(Path("weights")).params)
    assert np.abs(base - expected).max() > 1e-3 * largest
    with push_hub(folder / "home") as hub:
        succeed("push run --to me/merged")
    assert hub.files == {path.name: path.read_bytes() for path in Path("merged").glob("[!.]*")}


def test_a_run_that_starts_from_it_has_them_merged() -> None:
    err = succeed(FROM_RUN, "--dry-run").text
    assert "lora" not in err
    assert "0.33 times that of the source, itself fine-tuned by adapters," in err


TUNE = "finetune text.txt --from weights --data.tokenizer bytes --dry-run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{TUNE} --lora.rank 0", "lora.rank is 0; write a whole number of at least 1"),
        (
            f"{TUNE} --lora.alpha 4",
            "lora.alpha is given, and only adapters read it; write lora.rank too",
        ),
        (f"{TUNE} --lora.rank 2 --lora.alpha -1", "lora.alpha is -1.0; write a number above 0"),
        (f"{TUNE} --lora.rank 2 --lora.on embedding", "embedding"),
        (f"{TUNE} --lora.rnk 2", "--lora.rank"),
        (f"{TUNE} --lora.rank 2 --train-only readout", "add lora_a lora_b to --train-only"),
        (f"{TUNE} --lora.rank 2 --freeze lora_a lora_b", "leave no parameter to train"),
        (
            f"{FROM_RUN} --workdir moments --init-optimizer",
            "trained low-rank adapters, which are merged into their matrices here",
        ),
        ("grow run --set width=16 num_heads=4 --out larger", "holds adapters"),
        ("train lm-tiny --model.lora.rank 4 --dry-run", "--train-only lora_a lora_b"),
    ],
)
def test_what_adapters_cannot_do_is_refused(words: str, message: str) -> None:
    code, _, err = call(words)
    assert code == 2, err
    assert message in err


def test_an_encoder_decoder_has_no_adapters() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model\.lora is for ViTs and decoders, and the model is an encoder-decoder",
    ):
        dataclasses.replace(RECIPES["ed-tiny"]().model, lora=LoraConfig(rank=2))


WIDTHS = (16, 128)


def operator_norms(width: int) -> dict[str, float]:
    """Return the norm of A B of an adapter after four steps of Adam, by preset.

    The norm is an operator norm, of rms of outputs over rms of inputs.
    """
    tokens = np.random.default_rng(0).integers(0, 8, (8, 5)).astype(np.int32)
    weights = np.ones((8, 4), np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    heads = width // 8
    model = dataclasses.replace(
        MODEL,
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        seq_len=4,
        vocab_size=8,
        lora=LoraConfig(rank=2, on=("mlp",)),
    )
    recipe = RECIPES["lm-tiny"]()
    data = dataclasses.replace(recipe.data, batch_size=8, eval_batch_size=8)
    base = "embed=16,heads=2,kv_heads=2,mlp=24,head_dim=8,layers=1"
    optimizer = OptimizerConfig(name="adam", peak_lr=0.02, schedule="constant", eps=1e-12)
    norms = {}
    step = None
    for name in ("mup", "sp"):
        config = dataclasses.replace(
            recipe,
            model=model,
            data=data,
            preset=PresetConfig(name=name, base=base),
            optimizer=optimizer,
            train_only=("lora_a", "lora_b"),
        )
        program = assemble(config, jax.devices()[:1])
        step = step or program.compile_train()  # factors are arguments
        state = program.placed(program.initial_state(), step)
        for _ in range(4):
            sharded = program.train_feed().shard_batch(batch)
            state, _ = step(state, program.step_inputs(), sharded)
        a = np.asarray(state.params["block.mlp.up_lora.a"])[0]
        b = np.asarray(state.params["block.mlp.up_lora.b"])[0]
        norms[name] = float(np.linalg.norm(a @ b, 2) * (width / b.shape[1]) ** 0.5)
    return norms


def test_what_adapters_add_grows_with_width_under_sp_alone() -> None:
    narrow, wide = [operator_norms(width) for width in WIDTHS]
    exponents = {
        name: np.log(wide[name] / narrow[name]) / np.log(WIDTHS[1] / WIDTHS[0]) for name in wide
    }
    assert abs(exponents["mup"]) < 0.15, exponents
    assert exponents["sp"] > 0.3, exponents
