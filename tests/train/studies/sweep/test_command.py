"""The sweep command: its table and files, its best rate, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from mupax import command_line, presets
from mupax.__main__ import main
from mupax.presets.tuned import find
from mupax.train.config.run import Config, PresetConfig
from mupax.train.studies.sweep import command as sweep_command
from mupax.train.studies.sweep import grids, sweep, trainer
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import figure as transfer_figure
from mupax.train.studies.transfer import tuned as transfer_tuned
from mupax.zoo import configs
from scripts.bench.runs import sweep_cost
from tests.fixtures.programs import shared_programs
from tests.train.studies.sweep.small_sweeps import COMMAND, config_of, points, text

__all__ = ["shared_programs", "text"]  # fixtures


def test_the_command_ends_in_a_table_and_a_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    vary = ["--vary", "preset.rates.readout=0.5,1", "--sizes", "heads=4"]
    words = words_of(text, tmp_path / "out", "2^-9:2^-7:2", *vary)
    assert main([*words, "--dry-run"]) == 0
    assert "4 points in 1 program" in capsys.readouterr().out
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "heads 4 rates.readout 0.5" in out
    assert "2^-9" in out
    answer = out.index("With mup rates.readout 0.5: No best learning rate by training loss: ")
    following = out.index("Next: train the point of the lowest evaluation loss")
    assert answer < following < out.index("loss, mean over seeds")
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert len(record["points"]) == 4
    assert all(point["eval_loss"] > 0 for point in record["points"])
    flag = "--preset.constants rates.readout=0.5"
    assert {point["command"].count(flag) for point in record["points"]} == {0, 1}
    assert len({point["loss"] for point in record["points"]}) == 4
    assert main(words) == 0
    assert "4 of 4 points are done already" in capsys.readouterr().out


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm-tin --lr 0.1", "no recipe is named 'lm-tin'"),
        ("lm-tiny --lr 2^-12:2^-4", "write START:STOP:COUNT"),
        ("lm-tiny --lr 0:1:3", "needs numbers above 0"),
        ("lm-tiny --lr a,b", "'a' is not a number"),
        ("lm-tiny --sizes girth=3", "no size is named 'girth'"),
        ("lm-tiny --sizes heads=2,2", "different whole numbers"),
        (
            "lm-tiny --sizes width=100",
            "no whole number of heads, where width 128 has 4; write width 96",
        ),
        ("lm-tiny --seeds 0", "--seeds is 0"),
        ("lm-tiny --vary preset.gamma0", "write FLAG=VALUE,VALUE"),
        (
            "lm-tiny --vary preset.rates.reedout=1,2",
            "rates.reedout: no parameter group is named 'reedout'; did you mean 'readout'",
        ),
        (
            "lm-tiny --vary preset.rates.patch_embedding=1,2",
            "the model has no parameters 'patch_embedding'",
        ),
        (
            "lm-tiny --vary preset.gama0=1",
            "no flag is named --preset.gama0; did you mean --preset.gamma0",
        ),
        (
            "lm-tiny --dry-run --lr 0.1,0.2 --vary optimizer.peak-lr=0.3,0.4",
            "both say the learning rate",
        ),
        ("lm-tiny --dry-run --lr 0.1 --optimizer.peak_lr=0.3", "both say the learning rate"),
        ("lm-tiny --no-such 3", "no flag is named --no-such"),
        ("lm-tiny --lrs 3", "no flag is named --lrs; did you mean --lr?"),
        ("lm-tiny --workdir x", "a sweep has --out"),
        ("lm-tiny --lr 2^-9:2^-5:1001 --seeds 2", "more than 2000 points"),
        (
            "lm-tiny --how in-turn --mesh.data 4 --mesh.sweep 2",
            "in turn uses no mesh axis sweep, which is 2",
        ),
    ],
)
def test_what_is_no_sweep_is_refused(
    words: str, message: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        words
        if "--mesh" not in words
        else f"{COMMAND} {words.partition(' ')[2]} --data.name {text}"
    )
    assert main(["sweep", *flags.split(), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 10


@pytest.mark.parametrize("steps", [1, 2])
def test_points_that_train_together_accumulate_gradients_as_often_as_is_written(
    steps: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Losses are equal up to rounding, so only the step that is compiled shows the number.
    step_counts: list[int] = []

    def make(definition: Any, tx: Any, accumulation_steps: int = 0, *_: Any, **__: Any) -> None:
        step_counts.append(accumulation_steps)
        raise configs.ConfigError("nothing is compiled")

    monkeypatch.setattr(trainer, "make_train_step", make)
    more = ["--how", "together", "--data.batch-size", "16"]
    words = words_of(text, tmp_path, "2^-9:2^-7:2", *more)
    assert main([*words, "--accumulation-steps", str(steps)]) == 2
    assert step_counts == [steps]


@pytest.mark.parametrize(
    "words", [("sweep",), ("tune", "--over", "lr"), ("transfer", "--grow", "depth=1,2")]
)
def test_points_that_would_start_from_a_checkpoint_are_refused(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Points have fresh parameters, so the flag would be ignored.
    monkeypatch.setattr(sweep.ExecutionTrial, "trainer", lambda *_: pytest.fail("trained"))
    command, *flags = words
    run = [command, *COMMAND.split(), "--data.name", text, "--init-from", "runs/x", *flags]
    assert main([*run, "--out", str(tmp_path / "out")]) == 2
    assert "init.init_from is for single runs" in capsys.readouterr().err


@pytest.mark.core
def test_the_best_rate_of_a_sweep_becomes_a_tuned_preset(text: str, tmp_path: Path) -> None:
    rates, best = 2.0 ** np.arange(-10, -4.9, 0.5), -7.3
    plans = [
        sweep_command.Planned(
            0, "", "", dataclasses.replace(config, preset=PresetConfig(name="mup", base="lm-proxy"))
        )
        for config in points(config_of(text), rates)
    ]
    losses = [
        1 + (np.log2(p.config.optimizer.peak_lr) - best) ** 2 + 0.01 * p.config.seed for p in plans
    ]
    rows = [row(index, loss) for index, loss in enumerate(losses)]
    judged = sweep_command.judged(plans, rows, "")
    path, word = transfer_tuned.save(str(tmp_path / "mup.mine.json"), "mup", judged, "the command")
    assert word == f"mup:{path}"
    saved = find.load(path)
    assert np.log2(saved.optimizer["peak_lr"]) == pytest.approx(best, abs=0.001)
    assert saved.base == presets.get("mup", base=configs.get("lm-proxy").base_sizes()).base
    assert saved.provenance["transfer"] == []
    transfer_figure.draw(tmp_path / "sweep.png", judged, "a title")
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def row(index: int, loss: float, eval_loss: float | None = None) -> Row:
    return Row(str(index), "", loss, eval_loss, None, (), 4, 1.0, "in turn")


def words_of(text: str, folder: Path, lr: str, *more: str) -> list[str]:
    words = ["sweep", *COMMAND.split(), "--data.name", text, "--lr", lr, "--out", str(folder)]
    return [*words, *more]


def swept(
    lr: str,
    losses: Iterable[float],
    text: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
) -> tuple[int, list[Figure]]:
    """Run the command on points that end with these losses.

    Returns:
        Exit code, and the figures that it drew. They are not rendered.
    """
    rows = [row(index, loss) for index, loss in enumerate(losses)]
    drawn: list[Figure] = []
    monkeypatch.setattr(sweep.Sweep, "run", lambda self, configs, *_: rows[: len(configs)])
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    return main(words_of(text, folder, lr, *more)), drawn


def test_a_sweep_over_whole_octaves_has_a_best_rate_and_all_its_points_in_sight(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, path = [2.960, 2.799, 2.725, 2.758, 2.885], tmp_path / "mup.mine.json"
    code, [figure] = swept(
        "2^-8:2^-4:5", losses, text, tmp_path, monkeypatch, "--save-tuned", str(path)
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.startswith("Best learning rate: 2^-5.81 = 0.0178 (")
    # The vertex of the parabola through the three lowest.
    assert np.log2(find.load(path).optimizer["peak_lr"]) == pytest.approx(
        -6 + 0.041 / 0.214, abs=1e-3
    )
    (panel,) = figure.axes
    assert panel.get_ylim()[0] < min(losses) < max(losses) < panel.get_ylim()[1]
    assert panel.get_xlim()[0] < -8 < -4 < panel.get_xlim()[1]


def test_under_a_joint_rule_the_saved_rate_is_that_of_the_batch_that_was_swept(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, path = [2.9, 2.7, 2.6, 2.7, 2.9], tmp_path / "mup.mine.json"
    # The sweep's batch is 8, four times the base's, so `sde` doubles the rate.
    rule = ["--joint", "sde", "--preset.base", "lm-proxy,batch=2,tokens=512"]
    words = [*rule, "--optimizer.warmup-steps", "4", "--save-tuned", str(path)]
    code, _ = swept("2^-8:2^-4:5", losses, text, tmp_path, monkeypatch, *words)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.startswith("joint sde: peak learning rates are the base's; runs use 2 times them\n")
    saved = find.load(path)
    assert (saved.provenance["batch"], saved.provenance["seen"]) == (8, 512)
    assert np.log2(saved.optimizer["peak_lr"]) == pytest.approx(-5, abs=1e-3)
    assert saved.optimizer["b1"] == pytest.approx(1 - 4 * 0.1)
    assert saved.optimizer["warmup_fraction"] == 1 / 4
    assert saved.provenance["log2_lr"] == [-7, -6, -5, -4, -3]
    assert saved.provenance["log2_optimum"]["value"] == pytest.approx(-5, abs=1e-3)


@pytest.mark.parametrize(
    "lr",
    ["2^-8:2^-4:17", "2^-8:2^-4:7", "2^-10:2^-2:5", "0.001,0.003,0.01,0.03,0.1", "0.01,0.02,0.05"],
)
def test_the_best_rate_is_fitted_on_any_spacing(
    lr: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, best = tmp_path / "mup.mine.json", -5.7
    losses = 2 + 0.1 * (np.log2(grids.parse(lr)) - best) ** 2
    code, _ = swept(lr, losses, text, tmp_path, monkeypatch, "--save-tuned", str(path))
    assert code == 0, capsys.readouterr().err
    assert np.log2(find.load(path).optimizer["peak_lr"]) == pytest.approx(best, abs=1e-3)


def test_where_examples_repeat_the_best_rate_is_that_of_evaluation(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training losses fall with the rate, because the examples are learned by heart."""
    evaluated = [2.960, 2.799, 2.725, 2.758, 2.885]
    rows = [row(index, 0.1**index, loss) for index, loss in enumerate(evaluated)]
    monkeypatch.setattr(sweep.Sweep, "run", lambda self, configs, *_: rows)
    path = tmp_path / "mup.mine.json"
    words = words_of(text, tmp_path, "2^-8:2^-4:5", "--save-tuned", str(path))
    assert main(words) == 1
    assert "No best learning rate by training loss" in capsys.readouterr().out
    assert main([*words, "--judge", "evaluation"]) == 0
    saved = find.load(path)
    assert np.log2(saved.optimizer["peak_lr"]) == pytest.approx(-6 + 0.041 / 0.214, abs=1e-3)
    assert saved.provenance["loss"] == evaluated
    assert "of evaluation loss: 2^-8 2.9600" in find.described(saved)
    assert main([*words, "--judge", "evaluation", "--no-eval"]) == 2
    assert "--judge evaluation needs what --no-eval leaves out" in capsys.readouterr().err


def finished(
    self: sweep.Sweep, configs: Sequence[Config], watcher: sweep.SweepCallback
) -> list[Row]:
    """Stand-in for `Sweep.run`. Point n ends at the loss 2 + n / 8."""
    rows = [row(index, 2 + index / 8, 2 + index / 8) for index in range(len(configs))]
    watcher.begin(configs, dict(enumerate(rows)))
    return rows


def test_without_evaluation_the_table_has_training_losses_though_an_earlier_sweep_evaluated(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(index, 3.25 + index, 2.75 + index) for index in range(2)]

    def run(self: sweep.Sweep, configs: list[Any], watcher: sweep.SweepCallback) -> list[Row]:
        watcher.begin(configs, dict(enumerate(rows)))
        return rows

    monkeypatch.setattr(sweep.Sweep, "run", run)
    words = words_of(text, tmp_path, "2^-8:2^-7:2")
    for flags, shown, hidden in (([], "2.7500", "3.2500"), (["--no-eval"], "3.2500", "2.7500")):
        assert main([*words, *flags]) == 0
        out = capsys.readouterr().out
        assert shown in out
        assert hidden not in out


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_table_of_long_labels_has_a_legend_and_80_columns(
    is_terminal: bool,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_terminal:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sweep.Sweep, "run", finished)
    # 11 columns, of which 80 columns of text hold seven.
    words = words_of(text, tmp_path, "2^-8:2^-7:2")
    scales = ",".join(f"{1 + i / 8}" for i in range(11))
    assert main([*words, "--vary", f"preset.rates.token_embedding={scales}"]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table = out.partition("mean over seeds\n")[2].partition("rows in")[0].splitlines()
    assert max(map(len, table)) <= 80
    assert table[0].split() == ["(1)", "rates.token_embedding", "1.0"]
    assert table[10].split() == ["(11)", "rates.token_embedding", "2.25"]
    # Two rates in each table; the points have the losses 2, 2.125, 2.25 and so on.
    losses = [line.split() for line in table[11:]]
    assert losses[0] == ["rate", *(f"({i})" for i in range(1, 8))]
    assert losses[1][:3] == ["2^-8", "2.0000", "2.2500"]
    assert losses[3] == ["rate", *(f"({i})" for i in range(8, 12))]
    assert losses[5][-1] == f"{2 + 21 / 8:.4f}"


def test_a_sweep_of_one_point_is_no_plural(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(text, tmp_path, "2^-8", "--steps", "1", "--optimizer.warmup-steps", "0")
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "1 point in 1 program\n" in out
    assert ": 1 point, " in out
    assert out.endswith(", 1 step\n")


def test_control_a_table_of_short_labels_has_them_at_its_head(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep.Sweep, "run", finished)
    assert main([*words_of(text, tmp_path, "2^-8:2^-7:2"), "--vary", "optimizer.b2=0.9,0.99"]) == 0
    table = capsys.readouterr().out.partition("mean over seeds\n")[2].splitlines()
    assert table[0].split() == ["rate", "b2", "0.9", "b2", "0.99"]


@pytest.mark.parametrize(
    ("lr", "losses", "message"),
    [
        ("2^-8:2^-4:5", [3.0, 2.9, 2.8, 2.7, 2.65], "at the end of the grid; train at 2^-3 too"),
        ("2^-8:2^-4:5", [2.6, 2.9, 2.8, 2.7, 2.65], "at the end of the grid; train at 2^-9 too"),
        ("2^-6:2^-4:5", [3.0, 2.9, 2.8, 2.7, 2.75], "at the end of the grid; train at 2^-3.5 too"),
        ("2^-8:2^-4:5", [2.5] * 5, "every rate that trained has the same loss"),
        (
            "2^-8:2^-4:5",
            [2.5, 2.5, 2.5, np.inf, np.inf],
            "every rate that trained has the same loss",
        ),
        ("0.001,0.01,0.1", [3.0, 2.9, 2.8], "at the end of the grid; train at 2^0 too"),
        (
            "2^-8:2^-4:5",
            [3.0, 2.9, 2.8, np.inf, np.inf],
            "from every seed; train at 2^-6.5, 2^-5.5 too",
        ),
    ],
)
def test_a_sweep_without_a_best_rate_says_what_to_add(
    lr: str,
    losses: list[float],
    message: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, figures = swept(lr, losses, text, tmp_path, monkeypatch)
    assert (code, len(figures)) == (0, 1)
    answer, then, *_ = capsys.readouterr().out.splitlines()
    assert answer.startswith("No best learning rate by training loss: ")
    assert answer.endswith(f"{message}.")
    assert then.startswith("Next: ")
    path = tmp_path / "mup.mine.json"
    code, _ = swept(lr, losses, text, tmp_path, monkeypatch, "--save-tuned", str(path))
    assert code == 1
    out, err = capsys.readouterr()
    error = err.splitlines()[-1]
    assert error.startswith(
        "error: every point is trained, but there is no rate to save: at width 16, "
    )
    assert error.endswith(message)
    assert (tmp_path / "sweep.json").exists()
    assert "picture in" in out
    assert not path.exists()


def test_rates_that_are_a_choice_have_no_best_one_and_two_rates_save_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(index, 3.0 - 0.1 * index) for index in range(2)]
    monkeypatch.setattr(sweep.Sweep, "run", lambda *_: rows)
    words = ["sweep", *COMMAND.split(), "--data.name", text, "--out", str(tmp_path / "out")]
    assert main([*words, "--vary", "optimizer.peak-lr=0.01,0.02"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Next: train the point of the lowest evaluation loss, 2.9000, alone")
    monkeypatch.setattr(sweep.Sweep, "run", lambda *_: pytest.fail("trained"))
    for rates, count in ((["--lr", "0.01,0.02"], 2), ([], 1)):
        assert main([*words, *rates, "--save-tuned", "mine"]) == 2
        message = f"a best rate lies between others, and the sweep has {count}; write --lr"
        assert message in capsys.readouterr().err


def test_a_sweep_that_diverged_proposes_none_of_its_points(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = swept("2^-8:2^-4:5", [np.inf] * 5, text, tmp_path, monkeypatch)
    assert code == 0
    answer, then, *_ = capsys.readouterr().out.splitlines()
    assert answer == "No best learning rate by training loss: every rate diverged."
    assert then == "Next: sweep smaller learning rates, because every point diverged"


@pytest.mark.parametrize(("warmup", "share"), [("3", "75%"), ("0", None)])
def test_a_long_warm_up_is_saved_with_a_caution(
    warmup: str,
    share: str | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--save-tuned", str(tmp_path / "mup.mine.json"), "--steps", "4"]
    words += ["--optimizer.warmup-steps", warmup]
    code, _ = swept("2^-8:2^-4:5", [3.0, 2.8, 2.7, 2.8, 3.0], text, tmp_path, monkeypatch, *words)
    assert code == 0
    out, err = capsys.readouterr()
    for printed, flag in ((out, "--optimizer.warmup-steps"), (err, "--optimizer.warmup-steps 0")):
        cautions = [line for line in printed.splitlines() if line.startswith("caution: ")]
        assert len(cautions) == (share is not None)
        assert all(share in line and flag in line for line in cautions if share)


def test_a_tuned_preset_of_several_choices_is_refused_before_training(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep.Sweep, "run", lambda *_: pytest.fail("trained"))
    words = words_of(text, tmp_path, "2^-8:2^-4:5")
    assert main([*words, "--vary", "preset.gamma0=0.5,1", "--save-tuned", "mine"]) == 2
    err = capsys.readouterr().err
    assert "--save-tuned mine: the sweep varied more than rate, seed and size" in err


def test_the_benchmark_counts_whole_commands(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(words: list[str]) -> float:
        ran.append(words[0])
        assert main([*words, "--data.name", text, "--log.no-tensorboard", "--log.no-samples"]) == 0
        return 3.0

    monkeypatch.setattr(sweep_cost, "_seconds", run)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    words = ["--tiny", "--rates", "2", "--seeds", "1", "--steps", "3", "--alone", "1", "--json"]
    assert sweep_cost.main([*words, str(tmp_path / "cost.json")]) == 0
    assert ran == ["train", "sweep", "train"]
    record = json.loads((tmp_path / "cost.json").read_text())
    whole, step = record["results"]
    assert whole["ms"] == {"sweep": 3000.0, "runs of their own": 6000.0}
    assert whole["ratio"] == {"runs of their own": 0.5}
    assert step["ratio"]["runs of their own"] > 0
    assert (step["model"] == "a step (wall time)") == (record["cores"] == 1)
    capsys.readouterr()


@pytest.mark.core
def test_on_one_core_the_benchmark_counts_the_cpu_time_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        return real_run([sys.executable, "-S", "-c", "import time; time.sleep(1)"])

    real_run = subprocess.run
    monkeypatch.setattr(sweep_cost.subprocess, "run", sleep)
    assert sweep_cost._seconds(["--version"]) > 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert 0 < sweep_cost._seconds(["--version"]) < 0.9


@pytest.mark.core
def test_the_title_of_the_picture_has_what_all_points_share() -> None:
    words = "lm-tiny --lr 0.01,0.02 --steps 30 --optimizer.warmup-steps 0"

    def title(*more: str) -> str:
        args, rest = command_line.parse_known(
            sweep_command.Sweep, "mupax sweep", [*words.split(), *more]
        )
        configs = [point.config for point in sweep_command.points(args, rest)]
        return sweep_command.picture_title("lm-tiny", configs)

    assert title() == "lm-tiny, adamw, 30 steps: loss against learning rate"
    varied = title("--vary", "optimizer.name=adam,lion")
    assert varied == "lm-tiny, 30 steps: loss against learning rate"
    assert title("--vary", "steps=30,40") == "lm-tiny, adamw: loss against learning rate"
