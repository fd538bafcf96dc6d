"""When a trace begins and ends; that it holds the right steps is shown by a run, in test_loop.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, LogConfig
from mupax.train.run.report.progress import Profile
from mupax.zoo.configs import ConfigError

pytestmark = pytest.mark.core


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the profiler, in order, with pauses and notes between."""
    done: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: done.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append("stop"))
    return done


def profile(steps: range | None, events: list[str]) -> Profile:
    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        events.append("pause")
        yield
        events.append("go on")

    return Profile(
        steps, Path("there"), paused, lambda text: events.append(text.partition(" in ")[0])
    )


def run(steps: range | None, count: int, events: list[str]) -> None:
    with contextlib.closing(profile(steps, events)) as profiler:
        for number in range(1, count + 1):
            with profiler.step(number):
                events.append(f"step {number}")


def test_it_begins_before_the_first_step_asked_for_and_ends_after_the_last(
    events: list[str],
) -> None:
    run(range(2, 4), 4, events)
    assert events == [
        *("step 1", "pause", "start there", "go on", "step 2", "step 3"),
        *("pause", "stop", "profile from step 2", "go on", "step 4"),
    ]


def test_it_ends_with_the_loop(events: list[str]) -> None:
    run(range(2, 4), 3, events)
    assert events[-3:] == ["step 3", "stop", "profile from step 2"]


def test_it_ends_when_the_loop_fails(events: list[str]) -> None:
    with (
        pytest.raises(OSError, match="disk"),
        contextlib.closing(profile(range(1, 9), events)) as profiler,
        profiler.step(1),
    ):
        raise OSError("disk full")
    assert events[-2:] == ["stop", "profile from step 1"]


def test_a_run_resumed_within_the_range_traces_the_rest_and_one_after_it_nothing(
    events: list[str],
) -> None:
    with contextlib.closing(profile(range(2, 4), events)) as profiler, profiler.step(3):
        pass
    assert "start there" in events
    events.clear()
    with contextlib.closing(profile(range(2, 4), events)) as profiler, profiler.step(4):
        pass
    assert events == []


@pytest.mark.parametrize("steps", [None, range(0)])
def test_control_nothing_asked_for_nothing_done(steps: range | None, events: list[str]) -> None:
    run(steps, 3, events)
    assert events == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize(
    "text", ["", "3", "3:", ":3", "3:3", "4:3", "0:3", "-1:3", "a:b", "1:2:3", "1.5:3", "²:3"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write START:STOP with 1 <= START < STOP"):
        LogConfig(profile=text)


def test_a_range_is_that_of_python_counted_from_one() -> None:
    assert LogConfig(profile="10:13").profile_steps == range(10, 13)
    assert LogConfig().profile_steps is None


def test_a_range_past_the_end_is_refused() -> None:
    def of(profile: str) -> Config:
        recipe = RECIPES["lm-tiny"]()
        return dataclasses.replace(
            recipe, steps=20, log=dataclasses.replace(recipe.log, profile=profile)
        )

    assert of("19:21").log.profile == "19:21"
    with pytest.raises(
        ConfigError, match=r"ends after the last step, which is 20; write a STOP of at most 21"
    ):
        of("19:22")
