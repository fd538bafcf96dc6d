"""Which checkpoints stay and why, as a table; and when a run saves one. Pure functions, no run."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mupax.train.config import sections
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import CheckpointConfig, Config
from mupax.train.config.sections import Best, EveryN, Newest, RunPart, SaveNeed, staying

pytestmark = pytest.mark.core

SAVED = (2, 3, 4, 6, 8, 9, 10)
LOSSES = {2: 3.0, 3: math.nan, 4: 2.0, 6: 2.0, 8: 5.0, 10: 4.0}
MEASURED = {step: {"eval_loss": loss, "eval_accuracy": loss / 10} for step, loss in LOSSES.items()}


def only(*policies: sections.Policy) -> list[RunPart]:
    return [RunPart(0, policies)]


@pytest.mark.parametrize(
    ("parts", "reasons"),
    [
        (only(Newest(1)), {10: "newest"}),
        (only(Newest(99)), dict.fromkeys(SAVED, "newest")),
        # Of equal losses the earlier one, and never one that is not finite or was not measured.
        (only(Newest(1), Best(1, "eval_loss")), {4: "best", 10: "newest"}),
        (
            only(Newest(1), Best(9, "eval_loss")),
            {**dict.fromkeys((2, 4, 6, 8), "best"), 10: "newest, best"},
        ),
        (only(Newest(1), Best(1, "eval_accuracy")), {8: "best", 10: "newest"}),
        (only(Newest(1), Best(1, "eval/code/loss")), {10: "newest"}),
        (only(Newest(1), EveryN(3)), {3: "every 3", 6: "every 3", 9: "every 3", 10: "newest"}),
        (
            only(Newest(2), Best(1, "eval_loss"), EveryN(2)),
            {
                2: "every 2",
                4: "best, every 2",
                6: "every 2",
                8: "every 2",
                9: "newest",
                10: "newest, every 2",
            },
        ),
        # A part without the policy goes on: it deletes none of those before it, and adds none.
        (
            [RunPart(0, (Newest(1), EveryN(2))), RunPart(4, (Newest(1),))],
            {2: "every 2", 4: "every 2", 10: "newest"},
        ),
        # Newest and best are of the last part alone.
        (
            [RunPart(0, (Newest(9), Best(1, "eval_loss"))), RunPart(4, (Newest(1),))],
            {10: "newest"},
        ),
        # The last part's interval is of all checkpoints, the part before keeps its own.
        (
            [RunPart(0, (Newest(1), EveryN(3))), RunPart(6, (Newest(1), EveryN(4)))],
            {3: "every 3", 4: "every 4", 6: "every 3", 8: "every 4", 10: "newest"},
        ),
        # The run went on to 8 with the policy, then back to 4 without it: 6 and 8 are of the last part.
        (
            [
                RunPart(0, (Newest(1),)),
                RunPart(2, (Newest(1), EveryN(2))),
                RunPart(4, (Newest(1),)),
            ],
            {4: "every 2", 10: "newest"},
        ),
        (
            [RunPart(0, (EveryN(2),)), RunPart(8, (EveryN(3),)), RunPart(4, (Newest(1),))],
            {2: "every 2", 4: "every 2", 10: "newest"},
        ),
    ],
)
def test_which_checkpoints_stay_and_why(parts: list[RunPart], reasons: dict[int, str]) -> None:
    assert staying(SAVED, MEASURED, parts) == reasons


def test_nothing_saved_is_nothing_that_stays() -> None:
    assert staying([], {}, only(Newest(1), Best(1, "eval_loss"), EveryN(1))) == {}


def record(**checkpoint: object) -> dict:
    return {"config": {"checkpoint": checkpoint}}


def test_the_parts_of_a_run_are_read_from_its_record() -> None:
    earlier = [
        {"until_step": 4, **record(keep=1, keep_every=2)},
        {"until_step": 8, **record(keep=3, of_a_later_version=1)},
    ]
    content = {**record(keep=2, keep_best=1, best_metric="eval_accuracy"), "segments": earlier}
    parts = [RunPart(0, (Newest(1), EveryN(2))), RunPart(4, (Newest(3),))]
    assert sections.run_parts(content) == [
        *parts,
        RunPart(8, (Newest(2), Best(1, "eval_accuracy"))),
    ]
    assert sections.run_parts(content, CheckpointConfig(keep=7)) == [
        *parts,
        RunPart(8, (Newest(7),)),
    ]


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"config": None},
        record(keep="many"),
        record(keep=0),
        {**record(), "segments": [None, {}]},
    ],
)
def test_a_record_that_says_nothing_means_the_defaults(content: dict) -> None:
    assert sections.run_parts(content) == [RunPart(0, CheckpointConfig().policies)]


def config(
    steps: int, rollback: bool = False, eval_every_steps: int | None = None, **checkpoint: int
) -> Config:
    start = RECIPES["lm-tiny"]()
    return dataclasses.replace(
        start,
        steps=steps,
        checkpoint=CheckpointConfig(**checkpoint),  # pyright: ignore[reportArgumentType]
        log=dataclasses.replace(start.log, eval_every_steps=eval_every_steps),
        faults=dataclasses.replace(start.faults, bad_numbers="rollback" if rollback else "raise"),
    )


@pytest.mark.parametrize(
    ("run", "optional", "required"),
    [
        (config(7, every_steps=3), {3, 6}, {7}),
        (config(6, every_steps=3), {3}, {6}),
        (config(7, every_steps=3, rollback=True), set(), {3, 6, 7}),
        (config(7, every_steps=3, eval_every_steps=2), {3, 6}, {7}),
        (config(7, every_steps=3, eval_every_steps=2, keep_best=1), {3}, {2, 4, 6, 7}),
        (config(9, every_steps=3, keep_every=4), {3, 6}, {4, 8, 9}),
        (config(9, every_steps=2, keep_every=4), {2, 6}, {4, 8, 9}),
    ],
)
def test_when_a_run_saves_and_waits(run: Config, optional: set[int], required: set[int]) -> None:
    needs = {step: run.save_need(step) for step in range(1, run.steps + 1)}
    assert {step for step, need in needs.items() if need is SaveNeed.OPTIONAL} == optional
    assert {step for step, need in needs.items() if need is SaveNeed.REQUIRED} == required
