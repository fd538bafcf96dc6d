"""The campaign of damaged checkpoints in short, and its control without digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.checkpoints import folder, layout
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.state import TrainState
from scripts import harness
from scripts.campaigns import PAGE, corruptions
from scripts.campaigns.corruptions import STEPS, Saved, bits, campaign, page
from scripts.campaigns.injection.damage import KINDS
from tests.fixtures.emulator import bucket, emulator

__all__ = ["bucket", "emulator"]  # fixtures

TURNS = 2
FIRST = 3
"""Damages of every kind, and the first seed: the last turn damages both checkpoints."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save two checkpoints of a state whose values all differ between them."""
    workdir = tmp_path_factory.mktemp("saved")
    states: dict[int, Any] = {}
    health = jax.tree.map(jnp.asarray, TrainState._field_defaults["health"])
    with Checkpoints(workdir, CheckpointConfig(keep=2)) as checkpoints:
        for step in STEPS:
            random = np.random.default_rng(step)
            params = {
                name: jnp.asarray(random.normal(size=(31, 53)).astype(np.float32))
                for name in ("token", "readout")
            }
            states[step] = TrainState(jnp.asarray(step, jnp.int32), params, (), None, health)
            checkpoints.save(step, states[step], {"digest": "d"})
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), states[STEPS[0]]
    )
    return Saved(
        "small",
        workdir,
        {"digest": "d"},
        abstract,
        {step: bits(state) for step, state in states.items()},
    )


@pytest.fixture
def no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the campaign's control, which shows what orbax alone does."""
    monkeypatch.setattr(corruptions, "unverified", lambda saved, newest: "right")


def test_every_kind_of_damage_is_found_and_nothing_wrong_is_restored(
    saved: Saved, no_control: None, tmp_path: Path
) -> None:
    count = TURNS * len(KINDS)
    results = list(campaign([saved], count, FIRST, tmp_path))
    assert [result for result in results if not result["good"]] == []
    outcomes = {(result["kind"], result["outcome"]) for result in results}
    assert outcomes == {(kind, outcome) for kind in KINDS for outcome in ("fell back", "refused")}
    assert f"{count} corruptions on a disk took 7 s. 0 did not end as they must." in page(
        results, {"disk": 7, "bucket": 0}
    )


def test_every_kind_of_damage_is_found_in_a_bucket(
    saved: Saved, no_control: None, tmp_path: Path, bucket: str
) -> None:
    results = list(campaign([saved], len(KINDS), FIRST, tmp_path, bucket))
    assert [result for result in results if not result["good"]] == []
    assert {result["outcome"] for result in results} >= {"fell back"}


def test_what_is_known_is_not_run_again(saved: Saved, no_control: None, tmp_path: Path) -> None:
    kinds = list(KINDS)[:3]
    (result,) = campaign(
        [saved], 3, 0, tmp_path, skip={("small", kinds[0], 0), ("small", kinds[2], 0)}
    )
    assert (result["kind"], result["seed"]) == (kinds[1], 0)


def test_control_without_digests_the_campaign_sees_wrong_restores(
    saved: Saved, no_control: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "file_problems", lambda *_, **__: [])
    monkeypatch.setattr(layout, "check_loaded", lambda *_: [])
    monkeypatch.setattr(corruptions, "KINDS", {"bit flipped": _flip_a_weight})
    (result,) = campaign([saved], 1, 0, tmp_path)
    assert (result["outcome"], result["good"]) == ("wrong", False)


def _flip_a_weight(folder: Path, choose: Any) -> str:
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    return file.name


def test_the_committed_campaign_is_whole() -> None:
    record = harness.read_record(PAGE.with_name("corruptions.json.gz"))
    results = record["results"]
    assert len(results) >= 500
    assert all(result["good"] for result in results)
    assert {result["kind"] for result in results} == set(KINDS)
    assert len({result["run"] for result in results}) == 4
    assert sum(result["alone"] == "wrong" for result in results) > 0
    assert page(results, record["seconds"]) in PAGE.read_text()
