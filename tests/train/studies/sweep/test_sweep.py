"""Sweeps: the same losses as runs alone, one compilation per shape, and nothing lost on the way."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.checkpoints.folder import CheckpointFolder
from mupax.train.checkpoints.layout import Manifest
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program
from mupax.train.studies.sweep import losses as saved
from mupax.train.studies.sweep import rows as sweep_rows
from mupax.train.studies.sweep import sweep, work
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.trainer import Trainer
from mupax.zoo.configs import DecoderConfig
from scripts.bench.runs import sweep_cost

STEPS = 12
RATES = (2.0**-9, 2.0**-7)


def data_of(folder: Path) -> str:
    """The name of a text of a few words, written there."""
    path, choose = folder / "text.txt", random.Random(0)
    words = (
        "def",
        "return",
        "import",
        "class",
        "self",
        "value",
        "lambda",
        "yield",
        "while",
        "None",
    )
    path.write_text("\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600)))
    return f"text:{path}"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return data_of(tmp_path_factory.mktemp("sweep"))


def config_of(text: str, **changes: Any) -> Config:
    recipe = RECIPES["lm-tiny"]()
    assert isinstance(recipe.model, DecoderConfig)
    model = dataclasses.replace(recipe.model, width=16, num_heads=2, depth=1, seq_len=16)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(model, **changes.pop("model", {})),
        data=DataConfig(name=text, batch_size=16, eval_batch_size=16, eval_examples=20, seed=0),
        optimizer=dataclasses.replace(
            recipe.optimizer, warmup_steps=2, **changes.pop("optimizer", {})
        ),
        steps=STEPS,
        **changes,
    )


def points(config: Config, rates: Iterable[float] = RATES, seeds: int = 2) -> list[Config]:
    return [
        dataclasses.replace(
            config, seed=seed, optimizer=dataclasses.replace(config.optimizer, peak_lr=lr)
        )
        for lr in rates
        for seed in range(seeds)
    ]


Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def run() -> Run:
    """`sweep.run` of engines that know what those before them have compiled, as one engine does of its own points (below)."""
    programs: dict[str, Program] = {}
    trainers: dict[bool, dict[tuple[object, int], Trainer]] = {False: {}, True: {}}

    def run(
        configs: list[Config],
        folder: Path,
        *,
        watcher: sweep.SweepCallback | None = None,
        **how: Any,
    ) -> list[Row]:
        engine = sweep.Sweep(folder, **how)
        engine._programs, engine._trial._trainers = programs, trainers[engine._evaluated]
        return engine.run(configs, watcher)

    return run


@pytest.fixture(scope="module")
def in_turn(text: str, run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return run(points(config_of(text)), tmp_path_factory.mktemp("rows"), how="in-turn")


def curves(rows: Iterable[Row]) -> np.ndarray:
    return np.array([row.curve for row in rows])


def test_in_turn_a_point_has_the_bits_of_its_run_alone(in_turn: list[Row], tmp_path: Path) -> None:
    row = in_turn[-1]
    words = shlex.split(row.command)
    assert words[:2] == ["mupax", "train"]
    assert (
        main(
            [
                *words[1:],
                "--workdir",
                str(tmp_path / "alone"),
                "--log.no-tensorboard",
                "--log.no-samples",
            ]
        )
        == 0
    )
    rows = [
        json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    ]
    # Nine digits tell all float32 apart.
    assert [float(f"{record['loss']:.9g}") for record in rows if "loss" in record] == list(
        row.curve
    )
    assert [record["eval_loss"] for record in rows if "eval_loss" in record] == [row.eval_loss]
    assert row.loss == row.curve[-1] < row.curve[0]
    assert len({point.curve for point in in_turn}) == len(in_turn)


@pytest.mark.core
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (MeshConfig(data=1, tensor=2, sweep=4), {"accumulation_steps": 2}),
        (MeshConfig(data=1, sweep=8), {"model": {"centered": True}}),
    ],
    ids=["split over tensor and sweep", "centred, split over sweep"],
)
def test_together_points_train_as_in_turn(
    text: str, tmp_path: Path, mesh: MeshConfig, changes: dict[str, Any]
) -> None:
    assert len(jax.devices()) == 8
    config = config_of(text, **changes)
    two = [points(config, RATES[:1], 1)[0], points(config, RATES[1:], 2)[1]]
    wrong = points(config, (1.01 * RATES[0],), 1)
    *one, near = sweep.run([*two, *wrong], tmp_path / "turn", how="in-turn", evaluated=False)
    many = sweep.run(
        [dataclasses.replace(c, mesh=mesh) for c in two], tmp_path / "all", how="together"
    )
    assert [row.how for row in [*one, *many]] == ["in turn"] * 2 + ["together"] * 2
    np.testing.assert_allclose(curves(many)[:, :10], curves(one)[:, :10], rtol=1e-5)
    assert [row.key for row in many] == [
        row.key for row in one
    ]  # where it runs is no part of what it is
    # The control: a rate of one percent more is seen.
    assert np.abs(np.array(near.curve[:10]) / one[0].curve[:10] - 1).max() > 3e-5


def test_a_point_that_diverges_leaves_the_others_as_they_are(
    text: str, run: Run, in_turn: list[Row], tmp_path: Path
) -> None:
    config = config_of(text)
    wild = points(config, (1e30,), 1)
    for how in ("in-turn", "together"):
        rows = run([*points(config)[:3], *wild], tmp_path / how, how=how, evaluated=True)
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


@pytest.mark.core
def test_numbers_share_a_program_and_shapes_do_not(text: str) -> None:
    config = config_of(text)
    numbers: list[Callable[[Config], Config]] = [
        lambda c: dataclasses.replace(c, seed=3),
        lambda c: dataclasses.replace(
            c, preset=PresetConfig(name="mup-half", base=None, gamma0=0.3)
        ),
        lambda c: dataclasses.replace(
            c, preset=PresetConfig(name="depth-mup", alpha_l=0.7, beta0=2.0)
        ),
        lambda c: dataclasses.replace(c, preset=PresetConfig(name="sp", zero_readout=True)),
        lambda c: dataclasses.replace(
            c, optimizer=dataclasses.replace(c.optimizer, weight_decay=0.1, eps=1e-6)
        ),
        lambda c: dataclasses.replace(
            c, optimizer=dataclasses.replace(c.optimizer, warmup_steps=5, schedule="linear")
        ),
    ]
    shapes: list[Callable[[Config], Config]] = [
        lambda c: dataclasses.replace(c, model=dataclasses.replace(c.model, depth=2)),
        lambda c: dataclasses.replace(
            c, preset=PresetConfig(name="u-mup", base=None)
        ),  # moves the skip
        lambda c: dataclasses.replace(c, optimizer=dataclasses.replace(c.optimizer, b2=0.99)),
        lambda c: dataclasses.replace(c, optimizer=OptimizerConfig(name="sgd")),
        lambda c: dataclasses.replace(c, steps=STEPS + 1),
        lambda c: dataclasses.replace(c, data=dataclasses.replace(c.data, batch_size=32)),
    ]
    assert len(sweep.grouped([config, *(change(config) for change in numbers)], {})) == 1
    groups = sweep.grouped([config, *(change(config) for change in shapes)], {})
    assert [[i for i, _ in group] for group in groups.values()] == [
        [i] for i in range(len(shapes) + 1)
    ]


def test_a_shape_compiles_once_and_a_finished_point_never_again(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Program] = []
    compile_train = Program.compile_train
    monkeypatch.setattr(
        Program, "compile_train", lambda self: (compiled.append(self), compile_train(self))[1]
    )
    config = config_of(text)
    engine = sweep.Sweep(tmp_path, how="in-turn", evaluated=False)
    first = engine.run(points(config, RATES[:1], 1)) + engine.run(points(config, RATES, 1))[1:]
    assert len(compiled) == 1
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, width=32))
    again = sweep.run([*points(config, seeds=1), wider], tmp_path, evaluated=False)
    assert len(compiled) == 2
    assert compiled[1].config.model.width == 32
    assert again[:2] == first
    assert len((tmp_path / sweep_rows.FILE_NAME).read_text().splitlines()) == 3
    # Asked for a score that a row has not, the point is trained again; the last row counts.
    (scored,) = sweep.run(points(config, RATES[:1], 1), tmp_path)
    assert scored.eval_loss is not None
    assert scored.curve == first[0].curve


@pytest.mark.parametrize("how", ["in-turn", "together"])
def test_what_was_in_training_goes_on(
    text: str,
    run: Run,
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
        run(chosen, tmp_path, how=how, stop=stop)
    notes: list[str] = []
    rows = run(chosen, tmp_path, how=how, watcher=Noted(notes))
    assert [note for note in notes if note.startswith("going on at step 7")]
    np.testing.assert_allclose(curves(rows), curves(in_turn), rtol=1e-5 if how == "together" else 0)
    assert not list((tmp_path / "unfinished").iterdir())


def test_other_points_do_not_go_on_from_those_in_training(
    text: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FETCH_EVERY", 1)
    first, second, third = points(config_of(text), (*RATES, 2.0**-5), seeds=1)
    with pytest.raises(sweep.Stopped):
        run([first, second], tmp_path, how="together", stop=lambda: True, evaluated=False)
    notes: list[str] = []
    run([first, third], tmp_path, how="together", watcher=Noted(notes), evaluated=False)
    assert notes == []


def test_a_save_that_fails_leaves_the_one_before_to_go_on_from(
    text: str, run: Run, in_turn: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            run(chosen, tmp_path, how="in-turn", stop=stop, watcher=Noted(notes))
    assert notes == [
        f"checkpoint {k} could not be saved: no space left; the last good one is 4" for k in (8, 9)
    ]
    (row,) = run(chosen, tmp_path, how="in-turn", watcher=Noted(notes))
    assert notes[2:] == ["going on at step 4 with 1 point"]
    assert row.curve == in_turn[0].curve


def test_a_signal_stops_the_command_which_then_goes_on(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep",
        "lm-tiny",
        *shlex.split(sweep_cost.TINY),
        "--data.name",
        text,
        "--steps",
        "120",
        "--how",
        "in-turn",
    ]
    words += ["--lr", "2^-9:2^-6:4", "--no-eval", "--out", str(tmp_path)]
    command = [sys.executable, "-u", "-m", "mupax", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert any(line.startswith("1/4") for line in child.stdout)
        child.terminate()
        out, err = child.communicate(timeout=60)
    assert child.returncode == 143, err
    assert "stopped by SIGTERM" in out
    assert "Traceback" not in err
    before = (tmp_path / "points.jsonl").read_text()
    assert 1 <= len(before.splitlines()) < 4
    assert main(words) == 0
    assert "going on at step" in capsys.readouterr().out
    after = (tmp_path / "points.jsonl").read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 4


class Noted(sweep.SweepCallback):
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def note(self, text: str) -> None:
        self.notes.append(text)


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


COMMAND = (
    "lm-tiny --model.width 16 --model.num-heads 2 --model.depth 1 --model.seq-len 16 --data.batch-size 8 "
    "--data.eval-examples 20 --optimizer.warmup-steps 2 --steps 4"
)


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
    broken = [json.dumps({**fields, **edit}) for edit in edits] + [
        "[" * 100_000,
        '{"loss": ' + "9" * 6000 + "}",
        "\ud800",
    ]
    for line in broken:
        path.write_text(f"{lines[0]}{line}\n", errors="surrogatepass")
        with pytest.raises(
            sweep_rows.RowsError, match=r"points\.jsonl line 2 is not as it was written"
        ):
            Rows(tmp_path)
    # Rows of older versions have no digest, and are taken.
    bare = {name: value for name, value in fields.items() if name != "digest"}
    path.write_text(f"{lines[0]}{json.dumps(bare)}\n")
    notes: list[str] = []
    assert Rows(tmp_path, notes.append)[in_turn[1].key] == in_turn[1]
    assert notes == [
        "1 rows of points.jsonl were written without a digest by an older version: taken as they are"
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
