"""Choice of how a sweep trains points: at once, in turn or side by side, by memory and trials."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from mupax.train.studies.sweep import sweep, work
from mupax.train.studies.sweep import trainer as sweep_pack
from mupax.train.studies.sweep.rows import Row
from tests.train.studies.sweep.small_sweeps import (
    RATES,
    STEPS,
    Noted,
    config_of,
    points,
    shared_trainers,
    text,
)

__all__ = ["shared_trainers", "text"]  # fixtures

pytestmark = pytest.mark.usefixtures("shared_trainers")


@pytest.fixture(autouse=True)
def _no_second_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no trial pay for another program; a shared one compiles in no time.

    Tests of trials of several points at once set 0.
    """
    monkeypatch.setattr(sweep, "MIN_COMPILATIONS", 1e12)


@pytest.mark.core
def test_points_are_packed_by_memory(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [[(_, program)]] = sweep.grouped([config_of(text)], {}).values()
    state = 3 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract))
    for room, points_, fits in ((100, 10, 10), (4.1, 10, 4), (4.1, 7, 4), (0.1, 10, 1)):
        monkeypatch.setattr(
            sweep_pack.fit, "room", lambda device, room=room: int(room * state / 0.8)
        )
        assert sweep_pack.points_per_batch(program, points_) == fits
    monkeypatch.setattr(sweep_pack.fit, "room", lambda device: None)
    assert sweep_pack.points_per_batch(program, 10) == 10


def timed(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, int], float], cores: int = 8
) -> None:
    """Trials find these seconds per pack of (points at once, packs side by side)."""
    monkeypatch.setattr(
        sweep.ExecutionTrial,
        "_step_seconds",
        lambda self, trainer, points, concurrent=1: seconds[trainer.count, concurrent],
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)


def two_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials train points together, too, two at a time."""
    monkeypatch.setattr(sweep, "MIN_COMPILATIONS", 0)
    monkeypatch.setattr(sweep_pack, "points_per_batch", lambda program, count, *rest: min(count, 2))


def test_a_trial_says_what_is_faster(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {(1, 1): 0.01, (2, 1): 0.01}
    timed(monkeypatch, seconds, cores=1)
    two_fit(monkeypatch)
    notes: list[str] = []
    chosen, one = points(config_of(text)), jax.devices()[:1]
    rows = sweep.run(chosen, tmp_path / "a", watcher=Noted(notes), devices=one)
    assert {row.how for row in rows} == {"together"}
    assert "together: a step takes 10 ms one by one, 5 ms together" in notes
    seconds[2, 1] = 0.05
    rows = sweep.run(chosen, tmp_path / "b", watcher=Noted(notes), devices=one)
    assert {row.how for row in rows} == {"in turn"}
    assert "in turn: a step takes 10 ms one by one, 25 ms together" in notes


def test_together_a_later_round_of_fewer_points_compiles_nothing_until_half_a_pack_is_idle(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [group] = sweep.grouped(points(config_of(text), RATES, 4), {}).values()
    programs, compiled = [program for _, program in group], []

    def trainer(program: Any, count: int, evaluated: bool) -> sweep_pack.Trainer:
        compiled.append(count)
        nothing: Any = None
        return sweep_pack.Trainer(program, count, nothing, nothing, nothing, None, 0)

    monkeypatch.setattr(sweep_pack, "compile_trainer", trainer)
    chooser = sweep.ExecutionTrial("together", sweep_pack.Batches(), False)
    counts = [
        chooser.trainer("key", programs[:count], lambda text: None).count
        for count in (8, 5, 8, 4, 3, 2)
    ]
    assert counts == [8, 8, 8, 8, 3, 3]
    assert compiled == [8, 3]


@pytest.fixture(scope="module")
def on_one(text: str, shared_trainers: None, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("one")
    return sweep.run(points(config_of(text)), folder, how="in-turn", devices=jax.devices()[:1])


def test_side_by_side_points_have_the_same_bits(
    text: str, on_one: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {(1, 1): 0.01, (1, 2): 0.006, (1, 4): 0.0059})
    at_once, most = [0], [0]
    whole = work.Work.train

    def train(self: Any, members: Any) -> Any:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        try:
            return whole(self, members)
        finally:
            at_once[0] -= 1

    monkeypatch.setattr(work.Work, "train", train)
    notes: list[str] = []
    chosen, one = points(config_of(text)), jax.devices()[:1]
    rows = sweep.run(chosen, tmp_path / "a", watcher=Noted(notes), devices=one)
    note = "in turn: a step takes 10 ms one by one, 6 ms by 2 side by side, 6 ms by 4 side by side"
    assert note in notes
    assert most == [2]
    assert [(row.curve, row.eval_loss) for row in rows] == [
        (row.curve, row.eval_loss) for row in on_one
    ]
    # Devices of one program would wait for each other.
    two = jax.devices()[:2]
    sweep.run(chosen, tmp_path / "b", watcher=Noted(notes), evaluated=False, devices=two)
    assert notes[-1] == "in turn: a step takes 10 ms one by one"


def test_side_by_side_a_stop_saves_all_and_an_error_ends_all(
    text: str, on_one: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {(1, 1): 0.01, (1, 2): 0.006, (1, 4): 0.01})
    chosen, one = points(config_of(text)), jax.devices()[:1]
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) >= 15

    with pytest.raises(sweep.Stopped):
        sweep.run(chosen, tmp_path, stop=stop, devices=one)
    notes: list[str] = []
    rows = sweep.run(chosen, tmp_path, watcher=Noted(notes), devices=one)
    assert [note for note in notes if note.startswith("going on at step")]
    assert [row.curve for row in rows] == [row.curve for row in on_one]
    assert not list((tmp_path / "unfinished").iterdir())

    class Fails(sweep.SweepCallback):
        def training(self, points: Any, step: int, losses: Any) -> None:
            raise OSError("the screen is gone")

    with pytest.raises(OSError, match="the screen is gone"):
        sweep.run(chosen, tmp_path / "fails", watcher=Fails(), devices=one)


class Crowded(sweep.SweepCallback):
    """A watcher that takes its time, and knows whether it was told two things at once."""

    def __init__(self) -> None:
        self.inside, self.most, self.calls = 0, 0, 0

    def _told(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.inside -= 1
        self.calls += 1

    def training(self, points: Any, step: int, losses: Any) -> None:
        self._told()

    def finished(self, point: int, row: Row) -> None:
        self._told()


def test_side_by_side_the_watcher_is_told_one_thing_at_a_time(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {(1, 1): 0.01, (1, 2): 0.006, (1, 4): 0.01})
    monkeypatch.setattr(work, "FETCH_EVERY", 1)
    crowded = Crowded()
    sweep.run(points(config_of(text)), tmp_path, watcher=crowded, devices=jax.devices()[:1])
    assert crowded.calls == 4 * (STEPS + 1)
    assert crowded.most == 1


def test_side_by_side_an_error_is_said_before_a_stop(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {(1, 1): 0.01, (1, 2): 0.006, (1, 4): 0.01})
    barrier, order = threading.Barrier(2), iter((sweep.Stopped(), OSError("no space left")))

    def train(self: Any, members: Any) -> Any:
        barrier.wait(60)
        error = next(order)
        if isinstance(error, OSError):
            time.sleep(0.2)  # the stop comes first
        raise error

    monkeypatch.setattr(work.Work, "train", train)
    with pytest.raises(OSError, match="no space left"):
        sweep.run(points(config_of(text)), tmp_path, devices=jax.devices()[:1])


def test_a_trial_times_real_steps_and_says_what_went_wrong(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    notes: list[str] = []
    chosen, one = points(config_of(text)), jax.devices()[:1]
    sweep.run(chosen, tmp_path / "a", watcher=Noted(notes), devices=one)
    assert re.fullmatch(
        r"in turn: a step takes \d+ ms one by one, \d+ ms by 2 side by side", notes[-1]
    )

    compiled = sweep_pack.compile_trainer

    def broken(*args: Any) -> Any:
        trainer, begun = compiled(*args), [0]

        def begin(points: Any) -> Any:
            begun[0] += 1
            if begun[0] == 3:  # the second of the two side by side
                raise MemoryError("no room for a second state")
            return trainer.begin(points)

        return dataclasses.replace(trainer, begin=begin)

    monkeypatch.setattr(sweep_pack, "compile_trainer", broken)
    with pytest.raises(MemoryError, match="no room for a second state"):
        sweep.run(chosen, tmp_path / "b", devices=one)


def test_later_rounds_keep_what_the_trial_found(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {(1, 1): 0.01, (2, 1): 0.002}, cores=1)
    two_fit(monkeypatch)
    engine = sweep.Sweep(tmp_path, devices=jax.devices()[:1])
    hows = [
        [row.how for row in engine.run(points(config_of(text), rates))]
        for rates in (RATES, (2.0**-6, 2.0**-5))
    ]
    assert hows == [["together"] * 4] * 2
    (alone,) = engine.run(points(config_of(text), (2.0**-4,), seeds=1))
    assert alone.how == "in turn"
