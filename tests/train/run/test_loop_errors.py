"""Runs that cannot start or go on, and a dry run: what they say and leave behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mupax.train.run.report import metrics
from mupax.zoo import configs
from mupax.zoo.definition import definition
from tests.fixtures.commands import refusal
from tests.fixtures.small_runs import STEPS, completed, folder, refused, train

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.core


def test_a_run_that_diverges_fails_and_says_what_to_try(folder: Path) -> None:
    done = train("--workdir diverged --optimizer.peak-lr 1e30 --log.no-tensorboard")
    assert done.code == 1
    assert "Lower --optimizer.peak-lr" in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 10
    last = metrics.read(Path("diverged/metrics.jsonl"))[-1]
    assert {"loss", "grad_norm"} & last["nonfinite"].keys()
    assert last["step"] < STEPS
    steps = [int(path.name) for path in Path("diverged/checkpoints").glob("[0-9]*")]
    assert all(step < last["step"] for step in steps)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.name text:nowhere.txt", "nowhere.txt"),
        ("--mesh.data 3", "the mesh needs 3 devices"),
        ("--mesh.fsdp 3", "a multiple of 3 devices"),
        ("--mesh.tensor 4", "mesh.tensor 4 does not divide axis 'heads' of size 2"),
        ("--data.batch-size 12", "write a multiple of 8"),
        ("--data.eval-batch-size 12", "data.eval_batch_size 12 does not split over 8 devices"),
        ("--mesh.sweep 2", "write 1"),
        ("--no-such-flag 3", "no flag is named --no-such-flag"),
        ("--preset depth-mup --preset.alpha-l 0.3", "write a value from 0.5 to 1"),
        ("--preset mop", "did you mean 'mup'?"),
        ("--model.vocab-size 7", "vocab"),
        ("--profile 5:5", "write START:STOP with 1 <= START < STOP"),
        (
            "--profile 5:9",
            "log.profile 5:9 ends after the last step, which is 7; write a STOP of at most 8",
        ),
    ],
)
def test_bad_input_is_answered_shortly_and_leaves_nothing(
    words: str, message: str, folder: Path, tmp_path: Path
) -> None:
    assert message in refused(f"--workdir {tmp_path}/new", words)
    check_restartable(tmp_path / "new")


def test_data_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    model = "--model vit-tiny --model.image-size 32 --model.channels 3 --preset.base vit-proxy"
    words = f"train lm-tiny --data.name cifar5m {model} --steps 2 --optimizer.warmup-steps 1"
    assert "part0.npz" in refusal(words, f"--workdir {tmp_path}/new")
    check_restartable(tmp_path / "new")


def check_restartable(workdir: Path) -> None:
    """Check that a second try would not be refused."""
    left = {path.name for path in workdir.iterdir()} if workdir.exists() else set()
    assert left <= {".lock"}


def test_dry_run_of_a_dimension_that_several_mesh_axes_split(folder: Path) -> None:
    experts = "--model.experts 4 --model.active-experts 2"
    done = completed(f"{experts} --mesh.fsdp 2 --mesh.experts 2 --dry-run")
    # What experts do not have is split over both axes.
    assert re.search(r"^norm\.gain +16/4 ", done.out, re.MULTILINE), done.out
    assert re.search(r"^block\.experts\.up +\dx4/2x16/2x\d+ ", done.out, re.MULTILINE), done.out


def test_dry_run_writes_nothing(folder: Path) -> None:
    done = completed("--workdir dry --dry-run --mesh.fsdp 2")
    for words in ("parameters", "FLOPs", "state per device", "data 4 x fsdp 2", "1x16/2x2x8"):
        assert words in done.out
    for name in definition(configs.get("lm-tiny")).specs:
        assert f"{name} " in done.out, "a name is cut at 80 columns"
    assert not Path("dry").exists()
