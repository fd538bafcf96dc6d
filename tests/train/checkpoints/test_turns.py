"""Several runs that save and load in one process, as points of a sweep side by side do."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from orbax.checkpoint import v1 as ocp

from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.sections import CheckpointConfig
from tests.train.checkpoints.test_manifest import FACTS, abstract, same, state_at


def test_two_runs_in_one_process_take_turns_with_orbax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Orbax numbers its operations per process: of saves at the same time some failed, and some waited minutes for nothing.
    at_work, most, start, load = [0], [0], ocp.save_async, ocp.load

    def begins() -> None:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        time.sleep(0.02)

    def ends() -> None:
        at_work[0] -= 1

    class Watched:
        def __init__(self, response: Any) -> None:
            self.response = response

        def result(self) -> None:
            self.response.result()
            ends()

    def saving(*args: Any) -> Watched:
        begins()
        return Watched(start(*args))

    def loading(*args: Any) -> Any:
        begins()
        try:
            return load(*args)
        finally:
            ends()

    monkeypatch.setattr(ocp, "save_async", saving)
    monkeypatch.setattr(ocp, "load", loading)
    notes: list[str] = []

    def run(name: str) -> bool:
        with Checkpoints(tmp_path / name, CheckpointConfig(keep=1), log=notes.append) as saves:
            for step in (1, 2, 3):
                saves.save(step, state_at(step, devices=1), FACTS, last=True)
            return same(
                saves.restore(abstract(state_at(3, devices=1)), FACTS), state_at(3, devices=1)
            )

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, "abc")) == [True] * 3
    assert notes == []
    assert most == [1]


def test_a_save_that_is_interrupted_leaves_orbax_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ocp, "save_async", interrupted)
        with (
            Checkpoints(tmp_path, CheckpointConfig(keep=1)) as saves,
            pytest.raises(KeyboardInterrupt),
        ):
            saves.save(1, state_at(1), FACTS)
    with Checkpoints(tmp_path, CheckpointConfig(keep=1)) as saves:
        saves.save(2, state_at(2), FACTS)
        assert saves.wait() is None
