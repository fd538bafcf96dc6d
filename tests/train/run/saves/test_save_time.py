"""What `--dry-run` prints: the time of a save, which leaves nothing behind, and published values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from examples import mlp_mixer
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.cli import recipe
from mupax.train.config.preset import PresetConfig
from mupax.train.core.costs import fit
from mupax.train.run import dry_run

pytestmark = pytest.mark.core


def leaf(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(
        shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
    )


def test_every_shard_counts_once() -> None:
    state = {
        "split": leaf((8, 6), "fsdp"),
        "whole": leaf((10,)),
        "both": leaf((8, 4), "fsdp", "data"),
    }
    assert dry_run.saved_bytes(state) == 4 * (48 + 10 + 32)


def test_the_speed_is_measured_where_the_workdir_will_be_and_nothing_stays(tmp_path: Path) -> None:
    text = dry_run.rows(str(tmp_path / "runs" / "new"), {"x": leaf((1000, 100))})["a save"]
    assert re.fullmatch(r"about \S+ s: 391 KiB from this host, as measured there now", text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "count"), [(14, 0), (16, 1), (59, 1), (61, 2), (149, 2), (151, 3)]
)
def test_a_grace_that_is_too_short_is_named(
    seconds: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "seconds", lambda workdir, size: seconds)
    text = dry_run.rows("run", {"x": leaf((8,))})["a save"]
    assert text.startswith(f"about {seconds} s: 32 B from this host, as measured there now")
    assert ("Caution" in text) == (count > 0)
    named = [
        "30 s that a spot machine of Google Cloud leaves",
        "120 s that SLURM's --signal=TERM@120",
        "300 s that the JobSet",
    ]
    assert [name in text for name in named] == [count > 0, count > 1, count > 2]


def test_a_disk_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, content: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "publish", full)
    text = dry_run.rows(str(tmp_path), {"x": leaf((8, 8))})["a save"]
    assert "its time is unknown" in text
    assert "No space left on device" in text
    assert list(tmp_path.iterdir()) == []


def test_beside_a_source_a_group_has_all_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    # Matrices that mix positions and matrices of the MLP have one role and two initial values.
    config = dataclasses.replace(
        recipe("vit-digits")(), model=mlp_mixer.MIXER, preset=PresetConfig(name="sp")
    )
    dry_run._print_beside_source(fit.program_of(config), "sp:deit")
    lines = capsys.readouterr().out.splitlines()
    stds = {line.split()[0]: line.split()[3] for line in lines if line.startswith("block.")}
    assert stds["block.hidden"] == "0.18..0.25"
    assert stds["block.mlp_in"] == "0.125"
