"""Runs that start from other runs, by `--init-from` and `mupax grow`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from mupax import memory
from mupax.train.config import cli, record
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import from_json
from mupax.train.core.program import assemble
from mupax.train.reuse import runs, trained
from mupax.train.reuse.start import init_from
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import call, change_json, read_json, refuse, rows_with, succeed
from tests.train.reuse.random_weights import published

__all__ = ["one_device", "shared_programs"]  # fixtures

# All runs keep an average, so that they share a program.
FLAGS = (
    "--data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 "
    "--model.seq-len 8 --data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 8 "
    "--checkpoint.every-steps 2 --log.no-tensorboard --log.no-samples --log.no-progress "
    "--optimizer.warmup-steps 0 --ema.decay 0.9"
)
TRAIN = f"train lm-tiny {FLAGS}"


def prepared(words: str) -> init_from.Start:
    """Return what a run would start with."""
    flags = [*FLAGS.split(), *words.split()]
    return init_from.prepare(assemble(cli.parse("lm-tiny", RECIPES["lm-tiny"], flags).config))


def refused_run(*words: object) -> str:
    """Return why a run ends. It has printed its layout by then."""
    code, _, err = call(TRAIN, *words)
    assert code == 2, err
    return err


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `old` of four steps."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "text.txt").write_text("something to read, again and again. " * 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        succeed(TRAIN, "--steps 4 --workdir old")
    return folder


@pytest.fixture(autouse=True)
def current(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, and the current folder."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    return tmp_path


def test_a_run_starts_from_another_and_needs_it_once(current: Path) -> None:
    out = succeed(TRAIN, "--steps 2 --workdir plain --init-from old --init-optimizer").out
    assert "starting from" in out
    assert "12 kept" in out
    words = "--preset.form mean-field --model.compute.layers scan --mesh.fsdp 8 --init-optimizer"
    checkpoint = "--workdir other --init-from old/checkpoints/4"
    out = succeed(TRAIN, "--steps 2", checkpoint, words).out
    assert "x 0.5, the presets' multipliers" in out
    losses, other_losses = [
        [row["loss"] for row in rows_with("loss", workdir)] for workdir in ("plain", "other")
    ]
    # The same function. The second step differs by clipping, which sees the form.
    np.testing.assert_allclose(losses[0], other_losses[0], rtol=1e-5)

    recorded = read_json("plain/config.json")["config"]["init"]
    assert recorded["init_from"] == str(current / "old" / "checkpoints" / "4")
    shutil.rmtree("old")
    resume = f"{TRAIN} --steps 4 --workdir plain --resume"
    assert "resuming lm-tiny at step 2 of 4" in succeed(resume).out
    assert read_json("plain/config.json")["config"]["init"] == recorded
    assert "is not read" not in succeed(resume, "--init-from old").err
    goes_on = "old/checkpoints/4 and goes on, so that --init-from other is not read"
    assert goes_on in succeed(resume, "--init-from other").err
    assert read_json("plain/config.json")["config"]["init"] == recorded
    # Neither a run that goes on nor its dry run reads the source.
    succeed(resume, "--init-from old --dry-run")
    # Stopped before its first checkpoint it would need the source again, and says so.
    shutil.rmtree("plain/checkpoints")
    assert "old holds no run (config.json is missing)" in refuse(resume)


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
    ],
)
def test_what_does_not_fit_leaves_nothing_behind(words: str, message: str) -> None:
    # A dry run ends before it prints its first table.
    assert message in refuse(TRAIN, "--steps 2 --workdir new --dry-run", words)
    assert message in refused_run("--steps 2 --workdir new", words)
    assert {path.name for path in Path("new").glob("*")} <= {".lock"}


def test_weights_are_resized_and_have_no_optimizer_state(
    current: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(current / "published")
    size = (
        "--model.width 12 --model.depth 2 --model.mlp-ratio 1.5 --model.vocab-size 256 "
        f"--model.seq-len 7 --init-from {folder} --init-resize token readout"
    )
    err = refused_run("--steps 2 --workdir new --init-optimizer", size)
    assert "holds no optimizer state, only weights" in err
    begun = prepared(size)
    assert ("resized", "first 17 kept, 239 new") in {(row.action, row.reason) for row in begun.rows}
    np.testing.assert_array_equal(begun.params["token"][:17], trained.read(folder).params["token"])
    # A dry run may be for a larger machine than the one that it is on.
    monkeypatch.setattr(memory, "room", lambda: memory.Room(1000, "this machine"))
    assert "is not checked: out of memory" in succeed(TRAIN, "--dry-run", size).out


def test_a_run_starts_from_the_average(current: Path) -> None:
    path = current / "old" / "checkpoints" / "4"
    params = trained.read(path, part="params").stored["token"]
    average = trained.read(path, part="ema").stored["token"]
    assert np.abs(params - average).max() > 0
    begun = prepared("--init-from old --init-ema")
    np.testing.assert_array_equal(begun.params["token"], average)
    assert any("--no-init-ema takes the parameters" in note for note in begun.notes)
    plain = prepared("--init-from old")
    np.testing.assert_array_equal(plain.params["token"], params)
    assert any("--init-ema takes its moving average" in note for note in plain.notes)
    config = read_json("old/config.json")["config"]
    config["ema"]["decay"] = None
    change_json(Path("old/config.json"), config=config)
    err = refused_run("--steps 1 --workdir none --init-from old --init-ema")
    assert "kept no moving average" in err


def test_a_run_is_grown_and_goes_on(current: Path) -> None:
    config = read_json("old/config.json")["config"]
    config["data"]["eval_batch_size"] = 2
    change_json(Path("old/config.json"), config=config)
    sizes = "num_heads=4 head_dim=8 mlp_ratio=3 depth=2"
    out = succeed("grow old --steps 6 --out grown --set", sizes).out
    assert "mlp 40 to 48, new: 0" in out
    assert "logits of 2 evaluation examples" in out
    largest, top = [
        float(out.split(text)[1].split()[0].strip(","))
        for text in ("differ by at most", "largest being")
    ]
    assert largest < 2e-5 * top
    config = from_json(read_json("grown/config.json")["config"])
    program, *command = next(line for line in out.splitlines() if "--resume" in line).split()
    assert program.endswith("mupax")
    assert command == ["train", "--resume", "--workdir", "grown"]
    state = runs.whole_state(current / "grown" / "checkpoints" / "4", runs.on_one_device(config))
    assert int(state.step) == 4
    assert state.ema is not None
    np.testing.assert_array_equal(state.ema["block.mlp.down"][1], 0)
    assert "resuming lm-tiny at step 4 of 6" in succeed(command).out
    assert [row["step"] for row in rows_with("loss", "grown")] == [5, 6]
    assert record.words(dataclasses.replace(config, recipe="mine")) is None
    assert "is not an empty folder" in refuse("grow old --to lm-tiny --out grown")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "say what to grow: --to MODEL"),
        ("--set depth=1 mlp_ratio=1", "mlp_dim would shrink"),
        ("--set height=3", "--set height=3: write FIELD=VALUE"),
        ("--set depth=three", "model.depth is 'three'"),
        ("--to lm-tniy", "no model is named 'lm-tniy'; did you mean lm-tiny"),
        ("--set depth=2 --steps 4", "--steps 4 is the length of the whole run, and old has done 4"),
        ("--set depth=2 model.depth=3", "--set model.depth=3: depth is given twice"),
    ],
)
def test_what_cannot_be_grown_is_refused(words: str, message: str) -> None:
    assert message in refuse("grow old", words, "--out x")
    assert not Path("x").exists()
