"""A disk that is unwell is given time, then a message: what is on it is neither moved nor taken for damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mupax import disk
from mupax.train.checkpoints import checkpointer
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import WorkdirError, steps
from mupax.train.config.sections import CheckpointConfig
from scripts.campaigns.injection import shim
from tests.fixtures.xla import QUICKLY
from tests.train.checkpoints.test_manifest import (
    FACTS,
    abstract,
    data_file,
    flip,
    notes_of_restoring,
    restored,
    same,
    save,
    state_at,
)

ROOT = Path(__file__).resolve().parents[3]
READING = ("open", "read", "pread", "stat", "list")
EFFECTS = ("EIO", "ESTALE", "EACCES")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("sick") / "run"
    save(workdir, 3, 5, devices=1)
    (workdir / "config.json").write_text('{"run": "a", "config": {}}')
    return workdir


def tree(workdir: Path) -> list[str]:
    return sorted(str(path.relative_to(workdir)) for path in workdir.rglob("*"))


def suffer(workdir: Path, control: shim.Control) -> list[list[object]]:
    """Return the outcome of a restore under every fault, short or endless, in a process with the shim."""
    target, whole = abstract(state_at(0, 1)), tree(workdir)
    outcomes: list[list[object]] = []
    for times, disk.PATIENCE_S in ((3, 30.0), (10**9, 0.3)):
        for kind in READING:
            for effect in EFFECTS:
                control.watch(workdir)
                control.arm(kind, effect, 0, times)
                try:
                    with Checkpoints(
                        workdir, CheckpointConfig(keep=2), log=lambda _: None
                    ) as checkpoints:
                        state = checkpoints.restore(target, FACTS)
                    outcome = "right" if same(state, state_at(5, 1)) else "wrong"
                except Exception as error:
                    outcome = f"{type(error).__name__}: {error}"
                fired = control.fired
                control.watch(None)
                outcomes.append([times, kind, effect, fired, outcome, tree(workdir) == whole])
    return outcomes


def test_no_error_of_a_disk_costs_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    library = shim.compiled(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    code = (
        "import json, sys; from pathlib import Path; from scripts.campaigns.injection import shim; "
        "from tests.train.checkpoints import test_sick_disk as test; file = Path(sys.argv[1]); "
        "control = shim.Control(file, file); "
        "print(json.dumps(test.suffer(Path(sys.argv[2]), control)))"
    )
    environ = {
        **os.environ,
        **shim.Control(tmp_path / "control", library).environ,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", code, str(tmp_path / "control"), str(saved)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == 2 * len(READING) * len(EFFECTS)
    for times, kind, effect, fired, outcome, whole in outcomes:
        what = (times, kind, effect, fired, outcome)
        assert fired >= min(times, 2), what  # control: the fault did come
        assert whole, what
        if times == 3:
            assert outcome == "right", what
        else:
            assert outcome.startswith("DiskError: "), what
            assert "nothing was changed" in outcome, what


def test_what_was_set_aside_and_is_whole_is_taken_back(saved: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    folder = run / "checkpoints"
    (folder / "set-aside").mkdir()
    for step in ("3", "5"):
        (folder / step).rename(folder / "set-aside" / step)
    flip(data_file(folder / "set-aside" / "5"))
    assert notes_of_restoring(run, 3, devices=1) == [
        "checkpoint 3, set aside as set-aside/3, is whole: taken back"
    ]
    assert steps(folder) == [3]
    assert (folder / "set-aside" / "5").is_dir()
    # Control: where it is damaged too, none is good.
    flip(data_file(folder / "3"))
    with pytest.raises(
        WorkdirError,
        match=r"no good checkpoint is left .* \(3, 5\) were read again and are damaged",
    ):
        restored(run, state_at(0, 1))


def test_what_only_one_read_sees_is_no_damage(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mupax.train.checkpoints import folder

    digest, wrong = folder._file_digest, []

    def once(path: Path) -> list[object]:
        if path not in wrong:
            wrong.append(path)
            return [path.stat().st_size, "0" * 32]
        return digest(path)

    monkeypatch.setattr(folder, "_file_digest", once)
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    assert notes_of_restoring(run, 5, devices=1) == []
    assert wrong


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    library = shim.compiled(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler (cc) for scripts/campaigns/injection/faults.c")
    control = shim.Control(tmp_path / "control", library)
    control.watch(tmp_path / "run")
    control.arm("write", "ENOSPC", 5, 10**9)  # from the first checkpoint on
    words = (
        "vit-digits --model.width 8 --model.num-heads 2 --model.depth 1 --data.batch-size 8 --data.eval-examples 8 --steps 2 "
        "--optimizer.warmup-steps 1 --checkpoint.every-steps 1 --log.no-samples --log.no-tensorboard --log.no-progress"
    )
    command = [sys.executable, "-m", "train", *words.split(), "--workdir", str(tmp_path / "run")]
    environ = {**os.environ, **control.environ, "XLA_FLAGS": " ".join(QUICKLY)}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line
    for line in done.stdout.splitlines():
        assert "Traceback" not in line
        assert "Error" not in line


@pytest.mark.core
def test_whatever_orbax_makes_of_an_unwell_disk_is_tried_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = checkpointer.ocp.load
    errors = [
        Exception("Encountered error while reading array index"),
        ValueError("there is no checkpoint"),
    ]

    def failing(*arguments: object) -> object:
        if errors:
            raise errors.pop()
        return load(*arguments)

    monkeypatch.setattr(checkpointer.ocp, "load", failing)
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    (note,) = notes_of_restoring(run, 5, devices=1)
    assert "checkpoints/5 cannot be read: there is no checkpoint; trying again for 30 s" in note
