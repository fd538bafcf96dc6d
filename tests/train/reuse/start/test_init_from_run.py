"""Runs that start from others, by `--init-from` and `mupax grow`: from their files, and needing the source once."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.config import cli, record
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json
from mupax.train.core.program import assemble
from mupax.train.reuse import runs, trained
from mupax.train.reuse.start import init_from
from tests.fixtures.programs import shared_programs
from tests.train.reuse.test_source import published

__all__ = ["shared_programs"]  # a fixture

RUN = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 8 "
    "--data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 8 --checkpoint.every-steps 2 --log.no-tensorboard "
    "--log.no-samples --optimizer.warmup-steps 0 --log.no-progress"
)


def train(words: str) -> int:
    return main(["train", *RUN.split(), *words.split()])


def prepared(words: str) -> init_from.Start:
    """What a run would start with."""
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], [*RUN.split()[1:], *words.split()]).config
    return init_from.prepare(assemble(config))


def metrics(folder: str) -> dict[int, float]:
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that keeps an average."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text("something to read, again and again. " * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        assert train("--steps 4 --workdir old --ema.decay 0.9") == 0
    return folder


@pytest.fixture
def here(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and the current folder."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    return tmp_path


def test_a_run_starts_from_another_and_needs_it_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--steps 2 --workdir plain --init-from old --init-optimizer") == 0
    out = capsys.readouterr().out
    assert "starting from" in out
    assert "12 kept" in out
    words = "--preset.form mean-field --model.compute.layers scan --mesh.fsdp 8 --init-optimizer"
    assert train(f"--steps 2 --workdir other --init-from old/checkpoints/4 {words}") == 0
    assert "x 0.5, the presets' multipliers" in capsys.readouterr().out
    one, other = metrics("plain"), metrics("other")
    # The same function; and with the moments converted the same second step, but for clipping, which sees the form.
    np.testing.assert_allclose(one[1], other[1], rtol=1e-5)
    recorded = json.loads(Path("plain/config.json").read_text())["config"]["init"]
    assert recorded["init_from"] == str(here / "old" / "checkpoints" / "4")
    shutil.rmtree("old")
    assert train("--steps 4 --workdir plain --resume") == 0
    assert "resuming lm-tiny at step 2 of 4" in capsys.readouterr().out
    assert json.loads(Path("plain/config.json").read_text())["config"]["init"] == recorded
    # Stopped before its first checkpoint it would need the source again, and says so.
    shutil.rmtree("plain/checkpoints")
    assert train("--steps 4 --workdir plain --resume") == 2
    assert "old holds no run (config.json is missing)" in capsys.readouterr().err


def test_what_does_not_fit_leaves_nothing_behind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "hf").mkdir()
    for words, text in (
        ("--init-from old --model.vocab-size 300", "add --init-resize readout token"),
        ("--init-from none", "none: no run and no weights there"),
        (
            "--init-from old --init-drop nothing",
            "--init-drop nothing: no parameter has this role or name",
        ),
        (
            "--init-from old --optimizer.name lion --init-optimizer",
            "moments of one optimizer mean nothing to another",
        ),
        (
            "--init-new readout",
            "--init-new says how to start from a checkpoint; add --init-from PATH",
        ),
    ):
        assert train(f"--steps 2 --workdir new {words}") == 2
        assert text in capsys.readouterr().err
        assert {path.name for path in Path("new").glob("*")} <= {".lock"}
    folder = published(here / "published")
    size = "--model.width 12 --model.depth 2 --model.mlp-ratio 1.5 --model.vocab-size 256 --model.seq-len 7"
    capsys.readouterr()
    assert (
        train(
            f"--steps 2 --workdir new --init-from {folder} --init-optimizer {size} --init-resize token readout"
        )
        == 2
    )
    assert "holds no optimizer state, only weights" in capsys.readouterr().err
    begun = prepared(f"--init-from {folder} {size} --init-resize token readout")
    assert ("resized", "first 17 kept, 239 new") in {(row.action, row.reason) for row in begun.rows}
    np.testing.assert_array_equal(begun.params["token"][:17], trained.read(folder).params["token"])


def test_a_run_starts_from_the_average(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = here / "old" / "checkpoints" / "4"
    plain, average = (trained.read(path, part=part) for part in ("params", "ema"))
    assert np.abs(plain.stored["token"] - average.stored["token"]).max() > 0
    begun = prepared("--init-from old --init-ema")
    np.testing.assert_array_equal(begun.params["token"], average.stored["token"])
    np.testing.assert_array_equal(
        prepared("--init-from old").params["token"], plain.stored["token"]
    )
    config = json.loads(Path("old/config.json").read_text())
    config["config"]["ema"]["decay"] = None
    Path("old/config.json").write_text(json.dumps(config))
    assert train("--steps 1 --workdir none --init-from old --init-ema") == 2
    assert "kept no moving average" in capsys.readouterr().err


def test_a_run_is_grown_and_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "grow old --set num_heads=4 head_dim=8 mlp_ratio=3 depth=2 --steps 6 --out grown"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "mlp 40 to 48, new: 0" in out
    largest, top = (
        float(out.split(word)[1].split()[0].strip(","))
        for word in ("differ by at most", "largest being")
    )
    assert largest < 2e-5 * top
    config = from_json(json.loads(Path("grown/config.json").read_text())["config"])
    command = next(line for line in out.splitlines() if "--resume" in line).split()
    assert command[0].endswith("mupax")
    assert command[1:] == ["train", "--resume", "--workdir", "grown"]
    state = runs.whole_state(here / "grown" / "checkpoints" / "4", runs.on_one_device(config))
    assert int(state.step) == 4
    assert state.ema is not None
    np.testing.assert_array_equal(state.ema["block.mlp.down"][1], 0)
    assert main(command[1:]) == 0
    assert "resuming lm-tiny at step 4 of 6" in capsys.readouterr().out
    assert set(metrics("grown")) == {5, 6}
    for words, text in (
        ("grow old --out x", "say what to grow: --to MODEL"),
        ("grow old --to lm-tiny --out grown", "is not an empty folder"),
        ("grow old --set depth=1 mlp_ratio=1 --out x", "mlp_dim would shrink"),
        ("grow old --set height=3 --out x", "--set height=3: write FIELD=VALUE"),
        ("grow old --set depth=three --out x", "model.depth is 'three'"),
        ("grow old --to lm-tniy --out x", "no model is named 'lm-tniy'; did you mean lm-tiny"),
    ):
        assert main(words.split()) == 2
        assert text in capsys.readouterr().err
        assert not Path("x").exists()
    assert record.words(dataclasses.replace(config, recipe="mine")) is None
