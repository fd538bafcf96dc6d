"""Checkpoints are verified: damage is found and named, the one before is used, and a save that fails stops nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from mupax import MupaxFailure
from mupax.train.checkpoints import checkpointer, command, layout
from mupax.train.checkpoints import folder as disk
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import steps, verified
from mupax.train.checkpoints.layout import RenameCommit
from mupax.train.checkpoints.workdir import WorkdirError
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.state import TrainState

FACTS = {"name": "primes", "digest": "d1"}


def state_at(step: int, devices: int = 8) -> TrainState:
    """A state whose arrays are split, whole, scalar and in bfloat16, on so many devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices), ("fsdp",))
    random = np.random.default_rng(step)

    def placed(value: Any, *axes: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    params = {
        "token": placed(random.normal(size=(16, 151)).astype(np.float32), "fsdp"),
        "block.mlp": placed(random.normal(size=(3, 40)).astype(jnp.bfloat16), None, "fsdp"),
        "gain": placed(np.ones(5, np.float32)),
    }
    moments = (
        {"mu": placed(random.normal(size=(16, 151)).astype(np.float32), "fsdp")},
        None,
        [placed(np.zeros(2))],
    )
    health = jax.tree.map(placed, TrainState._field_defaults["health"])
    return TrainState(placed(np.int32(step)), params, moments, None, health)


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def same(one: TrainState, other: TrainState) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def save(workdir: Path, *steps: int, devices: int = 8) -> None:
    """Save the states of these steps, one after another. Two are kept."""
    with Checkpoints(workdir, CheckpointConfig(keep=2)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_at(step, devices), FACTS)
            assert checkpoints.wait() is None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 3 and 5."""
    workdir = tmp_path_factory.mktemp("saved")
    save(workdir, 2, 3, 5)
    (workdir / "config.json").write_text('{"config": {}}')
    return workdir


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def data_file(step: Path) -> Path:
    """The file that the arrays are in."""
    return max(
        (path for path in step.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip(path: Path, bit: int = 4001) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def restored(workdir: Path, like: TrainState | None = None) -> tuple[TrainState, list[str]]:
    notes: list[str] = []
    with Checkpoints(workdir, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
        return checkpoints.restore(abstract(like or state_at(0)), FACTS), notes


def notes_of_restoring(workdir: Path, step: int, devices: int = 8) -> list[str]:
    """Restore the state of a step, to the bit, and return what is logged."""
    state, notes = restored(workdir, state_at(0, devices))
    assert same(state, state_at(step, devices))
    return notes


# What is good


@pytest.mark.core
@pytest.mark.parametrize("devices", [8, 4, 2, 1])
def test_every_bit_comes_back_on_any_mesh(devices: int, saved: Path) -> None:
    state, notes = restored(saved, state_at(0, devices))
    assert same(state, state_at(5, devices))
    assert not notes
    assert state.params["token"].sharding.num_devices == devices


@pytest.mark.core
def test_the_manifest_has_a_digest_of_every_shard_and_every_file(saved: Path) -> None:
    folder = saved / "checkpoints" / "5"
    listing = verified(folder)
    assert listing.data == FACTS
    shards = {name: len(entry["shards"]) for name, entry in listing.arrays.items()}
    assert shards.items() >= {"params.token": 8, "params.block.mlp": 8, "params.gain": 1}.items()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*listing.files, layout.MANIFEST}
    assert disk.damaged_arrays(folder, listing.arrays) == []
    assert steps(saved / "checkpoints") == [3, 5]


@pytest.mark.core
def test_a_state_saved_on_two_devices_is_checked_on_eight(tmp_path: Path) -> None:
    save(tmp_path, 7, devices=2)
    loaded, _ = restored(tmp_path)
    assert same(loaded, state_at(7))
    listed = layout.read(tmp_path / "checkpoints" / "7").arrays
    # Control: the same check finds one number that differs in its last bit.
    other = np.asarray(loaded.params["token"]).copy()
    other.view(np.int32)[15, 6] ^= 1
    wrong = loaded._replace(params={**loaded.params, "token": jnp.asarray(other)})
    assert layout.check_loaded(layout.by_name(wrong.arrays()), listed) == ["params.token"]


# What is damaged


@pytest.mark.core
def test_control_orbax_alone_restores_a_flipped_bit_without_a_word(tmp_path: Path) -> None:
    arrays = {"a": jnp.zeros((64, 64))}
    with RenameCommit(tmp_path).context():
        ocp.save(str(tmp_path / "plain"), arrays)
    flip(data_file(tmp_path / "plain"), 8 * 5000 + 3)
    loaded = ocp.load(str(tmp_path / "plain"), arrays)
    assert np.count_nonzero(np.asarray(loaded["a"])) == 1


@pytest.mark.core
def test_a_flipped_bit_is_named_set_aside_and_the_one_before_used(run: Path) -> None:
    damaged = run / "checkpoints" / "5"
    listing = layout.read(damaged)
    file = data_file(damaged)
    content = file.read_bytes()
    at = content.index(np.asarray(state_at(5).params["token"])[:2].tobytes())
    flip(file, 8 * at + 1)
    with pytest.raises(
        layout.DamagedError,
        match=r"has other contents than were written, which spoils params\.token$",
    ):
        verified(damaged)
    (note,) = notes_of_restoring(run, 3)
    for words in (
        "checkpoint 5 is damaged",
        file.name,
        "params.token",
        "set-aside/5",
        "going back to checkpoint 3",
    ):
        assert words in note
    assert steps(run / "checkpoints") == [3]
    assert (run / "checkpoints" / "set-aside" / "5" / layout.MANIFEST).is_file()
    assert listing.step == 5
    # Control: nothing is said of what is good.
    assert restored(run)[1] == []


def _edited(folder: Path) -> None:
    path = folder / layout.MANIFEST
    whole = json.loads(path.read_text())
    whole["manifest"]["step"] = 6
    path.write_text(json.dumps(whole))


def _swapped(folder: Path) -> None:
    one, other = data_file(folder), folder / "_CHECKPOINT_METADATA"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _exchanged(folder: Path) -> None:
    """The whole data of another step, which has the same files and sizes."""
    shutil.rmtree(folder / "state")
    shutil.copytree(folder.parent / "3" / "state", folder / "state")


DAMAGE: dict[str, Any] = {
    "truncated": (lambda folder: os.truncate(data_file(folder), 100), "has 100 bytes, not"),
    "zeroed": (
        lambda folder: data_file(folder).write_bytes(bytes(data_file(folder).stat().st_size)),
        "other contents",
    ),
    "missing": (lambda folder: data_file(folder).unlink(), "is missing"),
    "swapped": (_swapped, "bytes, not"),
    "exchanged": (_exchanged, "is missing"),
    "no manifest": (lambda folder: (folder / layout.MANIFEST).unlink(), "manifest.json is missing"),
    "manifest edited": (_edited, "does not have the digest it names"),
    "manifest cut": (lambda folder: os.truncate(folder / layout.MANIFEST, 900), "not JSON"),
    "manifest of another step": (
        lambda folder: shutil.copy(folder.parent / "3" / layout.MANIFEST, folder / layout.MANIFEST),
        "manifest.json is of step 3",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_every_kind_is_named(kind: str, run: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(run / "checkpoints" / "5")
    (note,) = notes_of_restoring(run, 3)
    assert message in note


@pytest.mark.core
def test_where_none_is_good_the_run_refuses_and_goes_on_refusing(run: Path) -> None:
    for step in ("3", "5"):
        flip(data_file(run / "checkpoints" / step))
    for _ in range(2):
        with pytest.raises(
            WorkdirError, match=r"no good checkpoint is left .*\(3, 5\).*Nothing was overwritten"
        ):
            restored(run)
    assert sorted(path.name for path in (run / "checkpoints" / "set-aside").iterdir()) == ["3", "5"]


@pytest.mark.core
def test_arrays_that_differ_behind_right_files_are_found(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ocp.load

    def wrong(path: str, *arguments: Any) -> Any:
        loaded = load(path, *arguments)
        if path.endswith("/5"):
            loaded["params"]["gain"] = loaded["params"]["gain"].at[2].set(3)
        return loaded

    monkeypatch.setattr(checkpointer.ocp, "load", wrong)
    notes = notes_of_restoring(run, 3)
    assert "the array params.gain is not what was saved" in notes[0]


@pytest.mark.core
def test_another_state_or_other_data_is_refused_and_not_set_aside(run: Path) -> None:
    target = abstract(state_at(0))
    with Checkpoints(run, CheckpointConfig(keep=2)) as checkpoints:
        with pytest.raises(
            WorkdirError,
            match="trained on primes with digest d1, this machine has primes with digest d2",
        ):
            checkpoints.restore(target, {**FACTS, "digest": "d2"})
        with pytest.raises(
            WorkdirError,
            match=r"checkpoint 5 has another state than this run: ema\.gain is missing there",
        ):
            checkpoints.restore(target._replace(ema={"gain": target.params["gain"]}), FACTS)
        gain = target.params["gain"]
        half_gain = jax.ShapeDtypeStruct(gain.shape, jnp.bfloat16, sharding=gain.sharding)
        half = {**target.params, "gain": half_gain}
        with pytest.raises(
            WorkdirError, match=r"params\.gain is float32 \[\d+\] there and bfloat16 \[\d+\] here"
        ):
            checkpoints.restore(target._replace(params=half), FACTS)
    assert steps(run / "checkpoints") == [3, 5]


@pytest.mark.core
def test_what_an_interrupted_save_left_is_removed(run: Path) -> None:
    folder = run / "checkpoints"
    for name in ("7.saving", "8.saving.orbax-checkpoint-tmp-1", "2.deleting"):
        shutil.copytree(folder / "5", folder / name)
    notes_of_restoring(run, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "5"]


@pytest.mark.core
def test_a_manifest_of_a_stranger_reads_no_file_outside(run: Path) -> None:
    folder = run / "checkpoints" / "5"
    listing = layout.read(folder)
    for path in ("/etc/passwd", "../3/_CHECKPOINT_METADATA", "state/../../3/manifest.json"):
        listing.files[path] = [1, "0"]
        layout.write(folder, listing)  # with a digest that is right
        with pytest.raises(layout.DamagedError, match="another form"):
            layout.read(folder)
        del listing.files[path]


# Saves that fail


@pytest.mark.core
def test_a_save_that_fails_is_told_and_tried_again_at_the_next(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with Checkpoints(run, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(
                layout,
                "write",
                lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
            )
            checkpoints.save(6, state_at(6), FACTS)
            assert "No space left on device" in (checkpoints.wait() or "")
        assert steps(run / "checkpoints") == [
            3,
            5,
        ]  # none was deleted for the one that is not there
        assert not list((run / "checkpoints").glob("6*"))
        assert "checkpoint 6 could not be saved" in notes[0]
        assert "the last good one is 5" in notes[0]
        checkpoints.save(6, state_at(6), FACTS)
        assert checkpoints.wait() is None
    assert steps(run / "checkpoints") == [5, 6]
    assert len(notes) == 1


@pytest.mark.core
def test_a_disk_that_gives_back_something_else_is_found_before_an_older_one_is_deleted(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_digests, notes = disk.file_digests, []

    def broken(folder: Path, process: int, count: int) -> Any:
        flip(data_file(folder))
        return file_digests(folder, process, count)

    monkeypatch.setattr(disk, "file_digests", broken)
    with Checkpoints(run, CheckpointConfig(keep=1), log=notes.append) as checkpoints:
        checkpoints.save(6, state_at(6), FACTS)
        assert "gives back other arrays than it was given" in (checkpoints.wait() or "")
    assert steps(run / "checkpoints") == [3, 5]


@pytest.mark.core
def test_a_disk_that_is_too_slow_does_not_stop_training(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, disk = [], threading.Event()
    write = layout.write

    def slow(*arguments: Any) -> None:
        assert disk.wait(60)
        write(*arguments)

    monkeypatch.setattr(layout, "write", slow)
    monkeypatch.setattr(checkpointer, "_PATIENCE_S", 0.1)
    with Checkpoints(run, CheckpointConfig(keep=3), log=notes.append) as checkpoints:
        checkpoints.save(6, state_at(6), FACTS)
        checkpoints.save(7, state_at(7), FACTS)
        assert notes == ["checkpoint 7 is left out: the disk has not yet taken the one of step 6"]
        disk.set()
        checkpoints.save(8, state_at(8), FACTS, last=True)
    assert steps(run / "checkpoints") == [5, 6, 8]


def save_under_a_limit(run: Path) -> None:
    """Save under a limit on files, in a process of its own: tensorstore writes on and breaks later."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    notes: list[str] = []
    with Checkpoints(run, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        checkpoints.save(6, state_at(6), FACTS)
        assert checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert steps(run / "checkpoints") == [3, 5]
        checkpoints.save(7, state_at(7), FACTS)
        assert checkpoints.wait() is None
    assert "File too large" in notes[0]


def test_a_real_limit_on_files_fails_the_save_and_not_the_run(run: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    name = "tests.train.checkpoints.test_manifest"
    code = f"import sys; from pathlib import Path; from {name} import save_under_a_limit as save; save(Path(sys.argv[1]))"
    environ = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert steps(run / "checkpoints") == [5, 7]


# The command


@pytest.mark.core
def test_the_command_lists_health_and_verifies(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main([str(run), "--verify", "--json", str(tmp_path / "a" / "all.json")]) == 0
    rows = json.loads((tmp_path / "a" / "all.json").read_text())
    assert [row["step"] for row in rows] == [3, 5]
    assert all(
        row["arrays"] > 5 and row["bytes"] > 1000 and row["verified"] and not row["damaged"]
        for row in rows
    )
    flip(data_file(run / "checkpoints" / "5"))
    assert command.main([str(run)]) == 0  # what sizes show
    assert command.main([str(run), "--verify"]) == 1
    assert "damaged" in capsys.readouterr().out
    restored(run)
    assert command.main([str(run), "--verify"]) == 0
    assert "set aside" in capsys.readouterr().out
    with pytest.raises(WorkdirError, match="holds no run"):
        command.main([str(tmp_path)])


def test_a_checkpoint_is_merged_only_if_every_process_has_saved() -> None:
    first = {"files": {"a": 1}, "arrays": {"w": {"shards": [0]}}}
    second = {"files": {"b": 2}, "arrays": {"w": {"shards": [1]}}}
    with pytest.raises(MupaxFailure, match="disk full"):
        checkpointer.merge_parts([first, {"error": "disk full"}])
    merged = checkpointer.merge_parts([first, second])
    assert merged == {"files": {"a": 1, "b": 2}, "arrays": {"w": {"shards": [0, 1]}}}
