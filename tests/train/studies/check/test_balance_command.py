"""Command `mupax presets balance`: its output, and its file as a preset of other commands."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mupax.__main__ import main
from mupax.command_line import parse_known
from mupax.presets.tuned.measured import load
from mupax.train import data
from mupax.train.config.cli import parse
from mupax.train.config.preset import preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json, to_json
from mupax.train.core.program import assemble
from mupax.train.studies.check.balance_command import Balance, batch_of, configured

GROUPS = {
    "block.query",
    "block.attention_out",
    "block.mlp_in",
    "readout",
    "patch_embedding",
    "norm_gain",
}
LAYERS = ("embedding", "block 0", "block 1", "readout")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A measured file of a small model under SGD, and what the command printed."""
    path, shown = tmp_path_factory.mktemp("balance") / "rates.json", io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert (
            main(["presets", "balance", "vit-proxy", "--optimizer", "sgd", "--out", str(path)]) == 0
        )
    return path, shown.getvalue()


def run_with(path: Path, *words: str) -> list[str]:
    return [
        "vit-digits",
        "--model",
        "vit-proxy",
        "--preset",
        f"measured:{path}",
        "--preset.base",
        "None",
        *words,
    ]


def column(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return line.replace(label, "").split()


def test_it_prints_layers_desiderata_and_rates(written: tuple[Path, str]):
    path, text = written
    for name in LAYERS:
        assert column(text, name)[-1] == "0.25", name  # four layers, equal parts after
    assert any(column(text, name)[-3] != "0.25" for name in LAYERS)
    assert column(text, "loss decay (nats)")[-1] == "1"
    assert float(column(text, "feature learning (speed rms, last)")[-1]) == pytest.approx(
        1, abs=0.011
    )
    before, after = map(float, column(text, "balance (largest part / smallest)")[1:])
    assert before > 1.5
    assert after == pytest.approx(1, abs=0.01)
    table = load(path)
    assert set(table.scales) >= GROUPS
    assert all(group in text for group in table.scales)
    assert f"--preset measured:{path}" in text.replace("\n", "")
    assert table.optimizer == "sgd"
    assert table.source.startswith("vit-proxy, balanced from sp")


def test_a_run_takes_the_file_as_its_preset(written: tuple[Path, str]):
    path, _ = written
    rates = load(path).scales["block.query"].lr
    assert isinstance(rates, tuple)
    for name in (f"measured:{path}", str(path)):
        words = ["--optimizer.name", "sgd", "--preset", name]
        config = parse("vit-digits", RECIPES["vit-digits"], [*run_with(path)[1:], *words]).config
        assert config.preset.name == name
        assert preset_of(from_json(json.loads(json.dumps(to_json(config))))) == preset_of(config)
        program = assemble(config)
        np.testing.assert_allclose(
            program.inputs.factors.lr["block.attention.query"], rates, rtol=1e-6
        )
        assert program.preset.describe().startswith("measured optimizer=sgd")


def test_the_table_of_presets_takes_it_too(
    written: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    path, _ = written
    words = ["table", f"measured:{path}", "--model", "vit-proxy", "--optimizer", "sgd"]
    assert main(["presets", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("vit-proxy under measured optimizer=sgd")
    assert ".." in next(line for line in out.splitlines() if "block.attention.query" in line)
    assert main(["presets", *words, "--json"]) == 0
    row = next(
        r for r in json.loads(capsys.readouterr().out) if r["name"] == "block.attention.query"
    )
    assert row["lr"] == list(load(path).scales["block.query"].lr)  # pyright: ignore[reportArgumentType]
    assert main(["presets", "table", str(path), "--model", "vit-tiny", "--optimizer", "sgd"]) == 2
    assert "the table is for embed=32 and the model has 64" in capsys.readouterr().err


def test_a_recipe_brings_its_data_optimizer_and_preset(tmp_path: Path):
    words = ["vit-digits", "--out", str(tmp_path / "x.json"), "--data.batch-size", "5"]
    args, rest = parse_known(Balance, "mupax presets balance", words)
    config, recipe = configured(args, rest), RECIPES["vit-digits"]()
    assert (config.preset, config.optimizer, config.model) == (
        recipe.preset,
        recipe.optimizer,
        recipe.model,
    )
    batch = batch_of(config, args.name, Console(quiet=True))
    first = data.load(config.data, config.model, seed=config.seed, note=lambda _: None).train_batch(
        0
    )
    np.testing.assert_array_equal(batch["inputs"], first["inputs"])
    assert batch["targets"].shape == (5,)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model.width", "16"], "the table is for embed=32 and the model has 16; measured numbers hold at one size"),
        (["--model.depth", "3"], "the table is for layers=2 and the model has 3"),
        (["--model.qk-norm"], "block.attention.key_bias: measured: the table has no row 'block.key.bias'"),
        (["--optimizer.name", "adamw"], "measured has no rule for the optimizer 'adamw' (it was measured with sgd)"),
        (["--preset.base", "vit-proxy"], "measured has no base: its numbers are absolute; leave the base out"),
        (["--preset.form", "plain"], "a table of numbers has no form 'plain'"),
        (["--preset.alpha-a", "1"], "measured scales take no constants, not alpha_a"),
        (["--preset.zero-readout"], "measured scales take no constants, not zero_readout"),
    ],
)  # fmt: skip
def test_a_run_it_does_not_fit_is_refused(
    words: list[str], text: str, written: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    path, _ = written
    optimizer = [] if "--optimizer.name" in words else ["--optimizer.name", "sgd"]
    assert main(["train", *run_with(path, *optimizer, *words), "--dry-run"]) == 2
    assert text in capsys.readouterr().err


def test_layers_missing_from_the_file_are_named(
    written: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    path, _ = written
    table = json.loads(path.read_text())
    table["scales"]["block.query"]["lr"].pop()
    broken = path.with_name("broken.json")
    broken.write_text(json.dumps(table))
    assert main(["train", *run_with(broken), "--optimizer.name", "sgd", "--dry-run"]) == 2
    assert "block.query lr has 1 numbers for 2 layers" in capsys.readouterr().err


def test_what_grows_has_no_measured_numbers(
    written: tuple[Path, str], capsys: pytest.CaptureFixture[str]
):
    path, _ = written
    for words in (
        ["check", "vit-proxy", "--optimizer", "sgd", "--dry-run", "--preset"],
        ["presets", "limits", "--optimizer", "sgd"],
    ):
        assert main([*words, f"measured:{path}"]) == 2
        assert "has numbers at one size and no power law behind them" in capsys.readouterr().err


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["no-such", "--out", "x.json"], "no model is named 'no-such'"),
        (["lm-tiny"], "this needs --out PATH.json"),
        (["lm-tiny", "--out", "no-such/x.json"], "there is no folder no-such"),
        (["lm-tiny", "--out", "x.json", "--steps", "3"], "balance does not read --steps"),
        (
            ["lm-tiny", "--out", "x.json", "--optimizer.peak-lr=3"],
            "--optimizer.peak-lr has no effect: balance derives the rates",
        ),
        (
            ["lm-tiny", "--out", "x.json", "--optimizer", "adagrad"],
            "no optimizer is named 'adagrad'; write adamw, adam, sgd, momentum, muon, lion",
        ),
        (["lm-tiny", "--out", "x.json", "--model.widht", "3"], "did you mean --model.width?"),
        (
            ["lm-tiny", "--out", "x.json", "--preset", "ntk", "--optimizer", "lion"],
            "ntk has no rule for the optimizer",
        ),
        (["gpt2", "--out", "x.json"], "write tied=False (--model.no-tied) to measure"),
    ],
)
def test_wrong_words(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["presets", "balance", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.core
def test_the_command_is_found(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", "--help"]) == 0
    assert "balance" in capsys.readouterr().out
    assert main(["presets", "balance", "--help"]) == 0
    assert "--out PATH.json" in capsys.readouterr().out
