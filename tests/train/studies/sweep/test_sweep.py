"""Sweeps have the losses of runs alone, compile once per shape, and lose nothing on the way."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.checkpoints.folder import CheckpointFolder
from mupax.train.checkpoints.layout import Manifest
from mupax.train.config.run import Config, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program
from mupax.train.studies.sweep import losses as saved
from mupax.train.studies.sweep import rows as sweep_rows
from mupax.train.studies.sweep import sweep, trainer, work
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.table import LiveTable
from scripts.bench.runs import sweep_cost
from tests.fixtures.commands import command
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


@pytest.fixture(scope="module")
def in_turn(
    text: str, shared_trainers: None, tmp_path_factory: pytest.TempPathFactory
) -> list[Row]:
    return sweep.run(points(config_of(text)), tmp_path_factory.mktemp("rows"), how="in-turn")


def curves(rows: Iterable[Row]) -> np.ndarray:
    return np.array([row.curve for row in rows])


def test_in_turn_a_point_has_the_bits_of_its_run_alone(in_turn: list[Row], tmp_path: Path) -> None:
    row = in_turn[-1]
    words = shlex.split(row.command)
    assert words[:2] == ["mupax", "train"]
    workdir = tmp_path / "alone"
    quiet = ["--workdir", str(workdir), "--log.no-tensorboard", "--log.no-samples"]
    assert main([*words[1:], *quiet]) == 0
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # Nine digits tell all float32 apart.
    losses = [float(f"{record['loss']:.9g}") for record in records if "loss" in record]
    assert losses == list(row.curve)
    scores = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert scores == [row.eval_loss]
    assert row.loss == row.curve[-1] < row.curve[0]
    assert len({point.curve for point in in_turn}) == len(in_turn)


@pytest.fixture(scope="module")
def accumulated(
    text: str, shared_trainers: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Config], list[Row]]:
    """Two centred points that accumulate gradients, and one more of a rate of one percent more.

    Their rows are of training in turn.
    """
    config = config_of(text, accumulation_steps=2, model={"centered": True})
    chosen = [points(config, RATES[:1], 1)[0], points(config, RATES[1:], 2)[1]]
    chosen += points(config, (1.01 * RATES[0],), 1)
    folder = tmp_path_factory.mktemp("turn")
    return chosen, sweep.run(chosen, folder, how="in-turn", evaluated=False)


@pytest.mark.core
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=1, tensor=2, sweep=4), MeshConfig(data=1, sweep=8)],
    ids=["split over tensor and sweep", "split over sweep"],
)
def test_together_points_train_as_in_turn(
    accumulated: tuple[list[Config], list[Row]], tmp_path: Path, mesh: MeshConfig
) -> None:
    assert len(jax.devices()) == 8
    configs, (*alone, near) = accumulated
    on_mesh = [dataclasses.replace(point, mesh=mesh) for point in configs[:2]]
    together = sweep.run(on_mesh, tmp_path, how="together")
    assert [row.how for row in alone] == ["in turn"] * 2
    assert [row.how for row in together] == ["together"] * 2
    np.testing.assert_allclose(curves(together)[:, :10], curves(alone)[:, :10], rtol=1e-5)
    # The mesh is no part of what a point is.
    assert [row.key for row in together] == [row.key for row in alone]
    # The control: a rate of one percent more is seen.
    assert np.abs(np.array(near.curve[:10]) / alone[0].curve[:10] - 1).max() > 3e-5


def test_a_point_that_diverges_leaves_the_others_as_they_are(
    text: str, in_turn: list[Row], tmp_path: Path
) -> None:
    config = config_of(text)
    wild = points(config, (1e30,), 1)
    for how in ("in-turn", "together"):
        rows = sweep.run([*points(config)[:3], *wild], tmp_path / how, how=how, evaluated=True)
        *good, bad = rows
        assert bad.diverged
        assert bad.loss == np.inf
        assert bad.eval_loss is None
        assert bad.diverged_at is not None
        assert 1 < bad.diverged_at < STEPS
        assert np.isinf(bad.curve[bad.diverged_at - 1 :]).all()
        assert np.isfinite(bad.curve[: bad.diverged_at - 1]).all()
        np.testing.assert_allclose(
            curves(good), curves(in_turn[:3]), rtol=1e-5 if how == "together" else 0
        )
    assert Row.from_json(json.loads(json.dumps(bad.to_json()))) == bad


def test_a_point_whose_evaluation_is_not_finite_has_diverged(
    text: str, shared_trainers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_finite(self: work.Work, *arguments: Any) -> np.ndarray:
        return np.full(self.trainer.count, np.nan)

    monkeypatch.setattr(work.Work, "_scores", not_finite)
    two = points(config_of(text))[:2]
    rows = sweep.run(two, tmp_path, how="in-turn", evaluated=True)
    for row in rows:
        assert (row.diverged_at, row.eval_loss, row.loss) == (STEPS, None, np.inf)
        assert np.isfinite(row.curve[:-1]).all()
    monkeypatch.setattr(work.Work, "_scores", None)  # nothing is trained again
    assert sweep.run(two, tmp_path, how="in-turn", evaluated=True) == rows


@pytest.mark.core
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_of_an_older_version_with_an_evaluation_of_nan_is_read_as_diverged(
    value: float, tmp_path: Path, in_turn: list[Row]
) -> None:
    fields = dataclasses.replace(in_turn[0], eval_loss=value).to_json()
    fields["digest"] = sweep_rows._digest(fields)
    path = tmp_path / sweep_rows.FILE_NAME
    path.write_text(json.dumps(fields) + "\n")  # NaN or Infinity, which is no JSON
    row = Rows(tmp_path)[in_turn[0].key]
    assert (row.diverged_at, row.eval_loss, row.loss) == (STEPS, None, np.inf)
    path.write_text(json.dumps({**fields, "seconds": 1e9}) + "\n")
    with pytest.raises(sweep_rows.RowsError, match="does not have the digest"):
        Rows(tmp_path)


@pytest.mark.core
def test_numbers_share_a_program_and_shapes_do_not(text: str) -> None:
    config = config_of(text)
    numbers: list[dict[str, Any]] = [
        {},
        {"seed": 3},
        {"preset": PresetConfig(name="mup-half", base=None, gamma0=0.3)},
        {"preset": PresetConfig(name="depth-mup", alpha_l=0.7, beta0=2.0)},
        {"preset": PresetConfig(name="sp", zero_readout=True)},
        {"optimizer": dataclasses.replace(config.optimizer, weight_decay=0.1, eps=1e-6)},
        {"optimizer": dataclasses.replace(config.optimizer, warmup_steps=5, schedule="linear")},
    ]
    shapes: list[dict[str, Any]] = [
        {},
        {"model": dataclasses.replace(config.model, depth=2)},
        {"preset": PresetConfig(name="u-mup", base=None)},  # moves the skip
        {"optimizer": dataclasses.replace(config.optimizer, b2=0.99)},
        {"optimizer": OptimizerConfig(name="sgd")},
        {"steps": STEPS + 1},
        {"data": dataclasses.replace(config.data, batch_size=32)},
    ]
    same = [dataclasses.replace(config, **changes) for changes in numbers]
    assert len(sweep.grouped(same, {})) == 1
    variants = [dataclasses.replace(config, **changes) for changes in shapes]
    groups = sweep.grouped(variants, {}).values()
    assert [[index for index, _ in group] for group in groups] == [[i] for i in range(len(shapes))]


def test_a_shape_compiles_once_and_a_finished_point_never_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Program] = []
    compile_trainer = trainer.compile_trainer

    def noted(program: Program, count: int, evaluated: bool) -> trainer.Trainer:
        compiled.append(program)
        return compile_trainer(program, count, evaluated)

    monkeypatch.setattr(trainer, "compile_trainer", noted)
    config = config_of(text)
    engine = sweep.Sweep(tmp_path, how="in-turn", evaluated=False)
    first = engine.run(points(config, RATES[:1], 1)) + engine.run(points(config, RATES, 1))[1:]
    assert len(compiled) == 1
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, width=32))
    again = sweep.run([*points(config, seeds=1), wider], tmp_path, evaluated=False)
    assert len(compiled) == 2
    assert compiled[1].config.model == wider.model
    assert again[:2] == first
    assert len((tmp_path / sweep_rows.FILE_NAME).read_text().splitlines()) == 3
    # Asked for a score that a row has not, the point is trained again; the last row counts.
    (scored,) = sweep.run(points(config, RATES[:1], 1), tmp_path)
    assert scored.eval_loss is not None
    assert scored.curve == first[0].curve


@pytest.mark.parametrize("how", ["in-turn", "together"])
def test_what_was_in_training_goes_on(
    text: str,
    in_turn: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: sweep.Mode,
) -> None:
    monkeypatch.setattr(work, "FETCH_EVERY", 4)
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == 7

    chosen = points(config_of(text))
    with pytest.raises(sweep.Stopped):
        sweep.run(chosen, tmp_path, how=how, stop=stop)
    notes: list[str] = []
    rows = sweep.run(chosen, tmp_path, how=how, watcher=Noted(notes))
    assert [note for note in notes if note.startswith("going on at step 7")]
    np.testing.assert_allclose(curves(rows), curves(in_turn), rtol=1e-5 if how == "together" else 0)
    assert not list((tmp_path / "unfinished").iterdir())


@pytest.mark.usefixtures("shared_trainers")
def test_other_points_do_not_go_on_from_those_in_training(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FETCH_EVERY", 1)
    *first, second, third = points(config_of(text), (*RATES, 2.0**-5))[:5]
    with pytest.raises(sweep.Stopped):
        sweep.run([*first, second], tmp_path, how="together", stop=lambda: True)
    notes: list[str] = []
    sweep.run([*first, third], tmp_path, how="together", watcher=Noted(notes))
    assert notes == []


def test_a_save_that_fails_leaves_the_one_before_to_go_on_from(
    text: str, in_turn: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FETCH_EVERY", 4)
    monkeypatch.setattr(work, "SAVE_EVERY_S", 0.0)
    calls: list[int] = []
    publish = CheckpointFolder.publish

    def full(self: CheckpointFolder, content: Manifest) -> None:
        if content.step > 4:
            raise OSError("no space left")
        publish(self, content)

    def stop() -> bool:
        calls.append(1)
        return len(calls) == 9

    chosen, notes = points(config_of(text))[:1], []
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "publish", full)
        with pytest.raises(sweep.Stopped):
            sweep.run(chosen, tmp_path, how="in-turn", stop=stop, watcher=Noted(notes))
    assert notes == [
        f"checkpoint {k} could not be saved: no space left; the last good one is 4" for k in (8, 9)
    ]
    (row,) = sweep.run(chosen, tmp_path, how="in-turn", watcher=Noted(notes))
    assert notes[2:] == ["going on at step 4 with 1 point"]
    assert row.curve == in_turn[0].curve


def test_a_signal_stops_the_command_which_then_goes_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FETCH_EVERY", 4)
    words = f"sweep lm-tiny {sweep_cost.TINY} --data.name {text} --steps 12 --how in-turn"
    words += f" --lr 2^-9:2^-6:4 --no-eval --out {tmp_path}"
    told: list[int] = []

    def training(self: LiveTable, points: Any, step: int, losses: Any) -> None:
        told.append(step)
        if told == [4, 8, 12, 4]:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LiveTable, "training", training)
        stopped = command(words)
    assert stopped.code == 143, stopped.err
    assert "stopped by SIGTERM" in stopped.out
    assert "Traceback" not in stopped.err
    before = (tmp_path / "points.jsonl").read_text()
    assert len(before.splitlines()) == 1
    continued = command(words)
    assert continued.code == 0, continued.err
    assert "going on at step" in continued.out
    after = (tmp_path / "points.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 4


@pytest.mark.core
def test_half_a_line_is_no_row(tmp_path: Path, in_turn: list[Row]) -> None:
    rows = Rows(tmp_path)
    for row in in_turn[:2]:
        rows.add(row)
    path = tmp_path / sweep_rows.FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    rows = Rows(tmp_path)
    assert rows.has(in_turn[0].key, evaluated=True)
    assert not rows.has(in_turn[1].key, evaluated=False)
    rows.add(in_turn[1])
    assert Rows(tmp_path)[in_turn[1].key] == in_turn[1]


@pytest.mark.core
def test_rows_of_a_compressed_study_are_read_and_new_rows_follow_them(
    tmp_path: Path, in_turn: list[Row]
) -> None:
    Rows(tmp_path).add(in_turn[0])
    path = tmp_path / sweep_rows.FILE_NAME
    compressed = tmp_path / sweep_rows.COMPRESSED_NAME
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert sweep_rows.has_rows(tmp_path)
    rows = Rows(tmp_path)
    assert rows == {in_turn[0].key: in_turn[0]}
    rows.add(in_turn[1])
    assert list(Rows(tmp_path).values()) == in_turn[:2]
    compressed.write_bytes(compressed.read_bytes()[:-9])
    with pytest.raises(sweep_rows.RowsError, match=r"points\.jsonl\.gz is damaged"):
        Rows(tmp_path)


@pytest.mark.core
def test_an_edited_row_is_refused_by_its_line(tmp_path: Path, in_turn: list[Row]) -> None:
    rows = Rows(tmp_path)
    for row in in_turn[:2]:
        rows.add(row)
    path = tmp_path / sweep_rows.FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    fields = json.loads(lines[1])
    edits = [
        {"loss": 0.001},
        {"loss": "low"},
        {"curve": [1, "2"]},
        {"key": 3},
        {"more": 1},
        {"digest": 3},
    ]
    broken = [json.dumps({**fields, **edit}) for edit in edits]
    broken += ["[" * 100_000, '{"loss": ' + "9" * 6000 + "}", "\ud800"]
    for line in broken:
        path.write_text(f"{lines[0]}{line}\n", errors="surrogatepass")
        words = r"points\.jsonl line 2 is not as it was written"
        with pytest.raises(sweep_rows.RowsError, match=words):
            Rows(tmp_path)
    # Rows of older versions have no digest, and are taken.
    bare = {name: value for name, value in fields.items() if name != "digest"}
    path.write_text(f"{lines[0]}{json.dumps(bare)}\n")
    notes: list[str] = []
    assert Rows(tmp_path, notes.append)[in_turn[1].key] == in_turn[1]
    assert notes == [
        "1 row of points.jsonl was written without a digest by an older version: taken as they are"
    ]


@pytest.mark.core
def test_losses_of_points_in_training_are_those_of_their_checkpoint(tmp_path: Path) -> None:
    losses = np.array([[1.5, np.nan], [2.5, 3.5], [0.1, np.inf]])
    digest = saved.save_losses(tmp_path, losses)
    back = saved.saved_losses(tmp_path, 3, 2, digest)
    assert back is not None
    np.testing.assert_array_equal(back, losses)
    path = tmp_path / "losses-3.npy"
    content = bytearray(path.read_bytes())
    for place in (0, 10, len(content) - 1):
        flipped = content.copy()
        flipped[place] ^= 1
        path.write_bytes(flipped)
        assert saved.saved_losses(tmp_path, 3, 2, digest) is None
    path.unlink()
    assert saved.saved_losses(tmp_path, 3, 2, digest) is None
    # What older versions wrote beside a checkpoint without a digest.
    (tmp_path / "losses.json").write_text("[[1.5, NaN], [2.5, 3.5], [0.1, Infinity], [7, 8]]")
    np.testing.assert_array_equal(saved.saved_losses(tmp_path, 3, 2, None), losses)
    for content in ("[[1.5], [2]]", "[" * 100_000, '{"a": 1}', "[[1, 2], [3]]"):
        (tmp_path / "losses.json").write_text(content)
        assert saved.saved_losses(tmp_path, 3, 2, None) is None
