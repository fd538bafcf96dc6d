"""Command `mupax tune`: one compilation, output, files, the saved preset, and refusals."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mupax.__main__ import main
from mupax.presets.tuned import find
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.studies.sweep import sweep
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.tune import over
from mupax.train.studies.tune.report import SearchTable
from mupax.train.studies.tune.search import FRESH, Limits, Search
from tests.train.studies.sweep.small_sweeps import COMMAND, text

__all__ = ["text"]  # fixtures
OVER = "lr,readout.lr,embedding.std,branch.multiplier,query.decay,weight_decay"


def test_a_search_compiles_once_confirms_its_winner_and_saves_it(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[Program] = []
    compile_train = Program.compile_train
    monkeypatch.setattr(
        Program, "compile_train", lambda self: (compiled.append(self), compile_train(self))[1]
    )
    preset = tmp_path / "mup.mine.json"
    words = [
        "tune",
        *COMMAND.split(),
        "--data.name",
        text,
        "--over",
        OVER,
        "--points",
        "6",
        "--batch",
        "3",
        "--seeds",
        "2",
    ]
    words += ["--confirm", "2", "--out", str(tmp_path / "out"), "--save-tuned", str(preset)]
    assert main(words) == 0
    assert len(compiled) == 1
    out = capsys.readouterr().out
    assert "ended: all 6 points are tried" in out
    lines = out.splitlines()
    answer = next(
        i
        for i, line in enumerate(lines)
        if line.startswith(("Take the best", "Keep the start", "Not decided"))
    )
    assert "on 2 fresh seeds" in lines[answer]
    assert lines[answer + 1].startswith("Next: ")
    assert any(line.startswith(" constant") for line in lines[answer + 2 :])
    record = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert len(record["points"]) == 6
    assert record["points"][0]["values"] == [constant["start"] for constant in record["constants"]]
    assert all(
        len(point["losses"]) == 2 or point["worse_than"] is not None for point in record["points"]
    )
    assert (tmp_path / "out" / "tune.png").stat().st_size > 5000

    # The saved preset is the winner, to the number.
    saved = find.load(preset)
    winner = {constant["flag"]: constant["winner"] for constant in record["constants"]}
    assert saved.optimizer["peak_lr"] == winner["optimizer.peak_lr"]
    run = [*COMMAND.split()[1:], "--preset", f"mup:{preset}", "--data.name", text]
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], run).config
    assert config.preset.beta0 == pytest.approx(winner["preset.beta0"])
    assert config.optimizer.weight_decay == pytest.approx(winner["optimizer.weight_decay"])
    assert "rates.readout=" in " ".join(config.preset.constants)
    assert "6 constants searched" in find.summary(saved)
    assert "readout.lr = " in find.described(saved)

    # Again: nothing is trained, and the same is found.
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(sweep.ExecutionTrial, "trainer", lambda *_: pytest.fail("trained"))
    assert main(words) == 0
    again = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert again == record


def test_the_table_fits_eighty_columns() -> None:
    config = RECIPES["lm-tiny"]()
    words = ["lr", "block.attention_out.multiplier=0.001234567:8"]
    search = Search(config, over.parse(words, config), Limits())
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(SearchTable(console, search, evaluated=True).table())
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert "block.attention_out.multiplier" in lines[2]


@pytest.mark.parametrize("rounds", [0, 1])
def test_ctrl_c_shows_the_best_so_far_and_says_that_the_same_command_goes_on(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = list[Config]()

    def run(self: sweep.Sweep, configs: Sequence[Config], *_: object) -> list[Row]:
        if len(trained) == rounds * 4:
            raise sweep.Stopped
        trained.extend(configs)
        # The start is the first point, and the last one is the best.
        return [Row("", "", 3.5, 3 - k / 4, None, (), 4, 1.0, "in turn") for k in range(4)]

    monkeypatch.setattr(sweep.Sweep, "run", run)
    words = ["tune", *COMMAND.split(), "--over", "lr", "--points", "9", "--batch", "4"]
    main([*words, "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "the same command goes on" in out
    assert ("4/9 points, best 2.2500, start 3.0000" in out) == (rounds == 1)
    best = [line.split()[-1] for line in out.splitlines() if line.startswith("lr ")]
    assert best == [f"{config.optimizer.peak_lr:.4g}" for config in trained[3:]]


@pytest.mark.core
def test_a_dry_run_lists_what_would_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "tune",
                "lm-tiny",
                "--over",
                "lr,readout.lr=2^-1:2^5",
                "--over",
                "b2=0.9:0.99",
                "--dry-run",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "--preset.rates.readout" in out
    assert "64 points of 800 steps" in out
    assert "every value of b2 compiles a program of its own" in out
    assert max(map(len, out.splitlines()[:4])) <= 80


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lm-tiny", "--over"),
        ("lm-tiny --over redout.lr", "did you mean 'readout.lr'"),
        ("lm-tin --over lr", "no recipe is named 'lm-tin'"),
        ("lm-tiny --over lr --workdir x", "a search has --out"),
        ("lm-tiny --over lr --points 2", "--points is 2; write a number of at least 3"),
        ("lm-tiny --over lr --seeds 101", "at most 1000 points and 100 seeds"),
        ("lm-tiny --over lr --confirm 1", "write 0, or at least 2"),
        ("lm-tiny --over lr --minutes 0", "--minutes is 0.0; write a number above 0"),
        ("lm-tiny --over lr --pionts 9", "no flag is named --pionts; did you mean --points"),
        ("lm-tiny --over lr --save-tuned Mine", "write small letters"),
    ],
)
def test_what_is_no_search_is_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words.split(), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_the_winner_is_below_the_start_where_there_is_room(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    # The recipe's rate over 64: what a search must mend.
    words = [
        "tune",
        *COMMAND.split(),
        "--data.name",
        text,
        "--optimizer.peak-lr",
        "0.000125",
        "--over",
        "lr=2^-14:2^-4",
    ]
    words += [
        "--points",
        "6",
        "--batch",
        "3",
        "--seeds",
        "1",
        "--confirm",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    record = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert record["winner_less_start"]["value"] < -0.05
    assert np.log2(record["constants"][0]["winner"]) > -11


@pytest.mark.parametrize(
    ("ends", "minutes", "answer", "trouble", "has_next_step"),
    [
        (
            ("worse", "better"),
            "9",
            "Keep the start: the best point is worse",
            "the best point is worse than the start",
            False,
        ),
        (
            ("diverged", "better"),
            "9",
            "Not decided by a difference: on 2 fresh seeds the best point diverged 2 times",
            "the best point is worse than the start",
            False,
        ),
        (
            ("diverged", "diverged"),
            "9",
            "No best point: all 6 points diverged, the start too",
            "every point diverged",
            False,
        ),
        (
            ("better", "worse"),
            "0.0001",
            "Take the best point",
            "it has 2 points, and needs 3; write more --minutes",
            True,
        ),
    ],
)
def test_a_search_proposes_and_saves_no_point_that_it_advises_against(
    ends: tuple[str, str],
    minutes: str,
    answer: str,
    trouble: str,
    has_next_step: bool,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ends` are those of all points but the start, and of the start, on fresh seeds."""
    losses = {"better": 2.0, "worse": 3.0, "diverged": math.inf}
    start = RECIPES["lm-tiny"]().optimizer.peak_lr

    def row(config: Config) -> Row:
        is_start = config.optimizer.peak_lr == start
        # Seeds of the search prefer any other point, unless all diverge.
        loss = 2.5 if is_start else 2.1 + config.optimizer.peak_lr
        if config.seed >= FRESH or ends == ("diverged", "diverged"):
            loss = losses[ends[is_start]] + 0.001 * config.seed * is_start
        diverged_at = None if math.isfinite(loss) else 2
        eval_loss = loss if diverged_at is None else None
        return Row(repr(config), "", loss, eval_loss, diverged_at, (), 4, 1.0, "in turn")

    def run(self: sweep.Sweep, configs: Sequence[Config], *_: object) -> list[Row]:
        return [row(config) for config in configs]

    monkeypatch.setattr(sweep.Sweep, "run", run)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    preset = tmp_path / "mup.mine.json"
    words = ["tune", *COMMAND.split(), "--data.name", text, "--over", "lr", "--minutes", minutes]
    words += ["--points", "6", "--batch", "2", "--seeds", "1", "--confirm", "2"]
    assert main([*words, "--out", str(tmp_path / "out"), "--save-tuned", str(preset)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(answer)
    assert ("Next: train the best point" in out) == has_next_step
    assert "--seed" not in out  # of the point's seeds, the run itself has the first
    assert f"the search has no point to save: {trouble}" in " ".join(err.split())
    assert not preset.exists()
    assert (tmp_path / "out" / "tune.json").exists()
