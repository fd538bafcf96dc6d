"""Hooks of a run from Python: their calls, what they log, and how they stop a run or fail."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax import MupaxError, train
from mupax.train.checkpoints.layout import MANIFEST
from mupax.train.config.run import CheckpointConfig, Config, LogConfig
from mupax.train.run import hooks as run_hooks
from mupax.train.run import loop
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs

__all__ = ["one_device", "shared_programs"]  # fixtures

STEPS = 6


def config_of(workdir: Path, **changes: Any) -> Config:
    """Return the config of a small run that saves and evaluates after every second step."""
    recipe = train.RECIPES["vit-digits"]()
    small: Any = {"width": 16, "num_heads": 2, "depth": 1, "bias": False}
    model = dataclasses.replace(recipe.model, **small)
    data = dataclasses.replace(recipe.data, batch_size=16, eval_examples=16, eval_batch_size=16)
    log = LogConfig(eval_every_steps=2, tensorboard=False, progress=False, samples=False)
    values = {
        "model": model,
        "data": data,
        "log": log,
        "checkpoint": CheckpointConfig(every_steps=2),
        "steps": STEPS,
        "workdir": str(workdir),
        **changes,
    }
    return dataclasses.replace(recipe, **values)


def rows_with(run: train.Run, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in run.metrics if name in row]


def test_hooks_are_called_in_order_after_the_checkpoint_and_the_evaluation_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    norms: dict[int, float] = {}

    def note(name: str) -> None:
        """Note the steps at which the loop calls one of its functions."""
        real = getattr(loop, name)

        def noted(session: Any, report: Any, state: Any, step: int, **options: Any) -> None:
            calls.append((name, step))
            real(session, report, state, step, **options)

        monkeypatch.setattr(loop, name, noted)

    def first(step: int, state: Any, run: train.HookRun) -> None:
        calls.append(("first", step))
        assert int(state.step) == step
        assert run.workdir == tmp_path / "run"
        assert (run.process, run.process_count, run.config.steps) == (0, 1, STEPS)

    def second(step: int, state: Any, run: train.HookRun) -> None:
        calls.append(("second", step))
        params = jax.tree.leaves(jax.device_get(state.params))
        norms[step] = float(np.sqrt(sum(np.sum(np.square(array)) for array in params)))
        run.log({"my/norm": norms[step], "speed": np.float32(step)})

    note("save")
    note("evaluation")
    hooks = [train.every(3, first), train.every(2, second)]
    run = train.fit(config_of(tmp_path / "run"), hooks=hooks)
    assert calls == [
        *[("save", 2), ("evaluation", 2), ("second", 2)],
        ("first", 3),
        *[("save", 4), ("evaluation", 4), ("second", 4)],
        *[("save", 6), ("evaluation", 6), ("first", 6), ("second", 6)],
    ]
    assert rows_with(run, "my/norm") == list(norms.items())
    assert rows_with(run, "speed") == [(step, float(step)) for step in norms]
    assert len(set(norms.values())) == len(norms)
    assert run.step == STEPS
    # Hooks change no number of the run.
    plain = train.fit(config_of(tmp_path / "plain"))
    assert rows_with(plain, "loss") == rows_with(run, "loss")
    assert rows_with(plain, "eval_loss") == rows_with(run, "eval_loss")


def test_a_hook_stops_the_run_which_a_resume_takes_on(tmp_path: Path) -> None:
    calls: list[int] = []

    def stop_at_three(step: int, state: Any, run: train.HookRun) -> None:
        calls.append(step)
        run.log({"my/step": step})
        if step == 3 and len(calls) == 3:
            run.stop("three are enough")

    stopping = [train.every(1, stop_at_three)]
    run = train.fit(config_of(tmp_path), hooks=stopping)
    assert run.step == 3
    assert [row["stopped"] for row in run.metrics if "stopped" in row] == ["three are enough"]
    resumed = train.fit(config_of(tmp_path, resume=True), hooks=stopping)
    assert resumed.step == STEPS
    assert calls == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in rows_with(resumed, "my/step")] == calls


def test_an_exception_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    def fail(step: int, state: Any, run: train.HookRun) -> None:
        run.log({"my/step": step})
        if step == 3:
            raise ZeroDivisionError("nothing to divide by")

    with pytest.raises(
        train.HookError,
        match=r"fail at step 3: ZeroDivisionError: nothing to divide by[\s\S]*saved",
    ) as error:
        train.fit(config_of(tmp_path), hooks=[train.every(1, fail)])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    steps: list[int] = []
    again = train.fit(
        config_of(tmp_path, resume=True),
        hooks=[train.every(1, lambda step, state, run: steps.append(step))],
    )
    assert again.step == STEPS
    assert steps == [4, 5, 6]
    assert [step for step, _ in rows_with(again, "my/step")] == [1, 2, 3]


def test_an_interrupted_run_calls_the_hooks_of_steps_that_are_trained_again(tmp_path: Path) -> None:
    """Steps after the newest checkpoint are trained again."""
    steps: list[int] = []

    def leave(step: int, state: Any, run: train.HookRun) -> None:
        steps.append(step)
        if step == 5 and len(steps) == 5:
            # The checkpoint of step 4 is written in the background.
            end = time.monotonic() + 60
            while not (tmp_path / "checkpoints" / "4" / MANIFEST).exists():
                assert time.monotonic() < end
                time.sleep(0.002)
            raise SystemExit(1)  # as if the process were killed: nothing more is saved

    with pytest.raises(SystemExit):
        train.fit(config_of(tmp_path), hooks=[train.every(1, leave)])
    train.fit(config_of(tmp_path, resume=True), hooks=[train.every(1, leave)])
    assert steps == [1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "10"])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(MupaxError, match="write a whole number"):
        train.every(steps, lambda step, state, run: None)


def test_what_is_no_hook_is_refused_before_the_run(tmp_path: Path) -> None:
    not_a_function: Any = "print"
    with pytest.raises(MupaxError, match="write a function of"):
        train.every(1, not_a_function)
    not_a_hook: Any = print
    with pytest.raises(MupaxError, match=r"write train\.every"):
        train.fit(config_of(tmp_path / "run"), hooks=[not_a_hook])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": 1.0}, "'loss' is a name of mupax"),
        ({"eval/loss": 1.0}, "'eval/loss' is a name of mupax"),
        ({"perf_mfu": 1.0}, "'perf_mfu' is a name of mupax"),
        ({"my/text": "three"}, "my/text is 'three'; write one number"),
        ({"my/array": np.ones(2)}, "write one number"),
    ],
)
def test_what_cannot_be_logged_is_refused(
    values: dict[str, Any], text: str, tmp_path: Path
) -> None:
    runtime: Any = type("Runtime", (), {})()
    runtime.config = config_of(tmp_path)
    runtime.folder = tmp_path
    runtime.processes = type("Processes", (), {"index": 0, "count": 1})()
    with pytest.raises(MupaxError, match=text):
        run_hooks.HookRun(runtime).log(values)


def test_processes_agree_on_the_first_failure_and_the_first_reason() -> None:
    assert run_hooks.first_outcome([["", ""], ["", ""]]) == ["", ""]
    assert run_hooks.first_outcome([["", ""], ["", "done"], ["", "late"]]) == ["", "done"]
    assert run_hooks.first_outcome([["", ""], ["f at step 3: E", "done"]]) == [
        "on process 1, f at step 3: E",
        "done",
    ]
    assert run_hooks.first_outcome([["f at step 3: E", ""]]) == ["f at step 3: E", ""]
