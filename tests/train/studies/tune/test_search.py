"""Search on made-up losses: it finds the valley, drops worse points and keeps its budget."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.tune import over, report, surrogate
from mupax.train.studies.tune.search import FRESH, Limits, Run, Search, measure

LM = RECIPES["lm-tiny"]()
START = LM.optimizer.peak_lr
WORDS = ["lr", "readout.lr", "readout.std", "embedding.lr"]
BEST = (1.0, 2.0, 0.0, -1.5)
CURVATURE = (0.1, 0.05, 0.0, 0.01)
"""Nats per octave squared; the third constant does nothing."""


class Losses:
    """Runner whose losses are a valley and differ from seed to seed.

    They diverge far above the best rate.
    """

    def __init__(self, search: Search, after: int | None = None) -> None:
        self.search, self.trained, self.after = search, list[Run](), after

    def __call__(self, configs: Sequence[Config]) -> list[Row]:
        return [self.row(config) for config in configs]

    def row(self, config: Config) -> Row:
        constants = dict(text.split("=") for text in config.preset.constants)
        names = ("rates.readout", "stds.readout", "rates.token_embedding")
        octaves = [math.log2(config.optimizer.peak_lr / LM.optimizer.peak_lr)]
        octaves += [math.log2(float(constants.get(name, 1))) for name in names]
        point = tuple(round(16 * x) for x in octaves)
        if self.after is not None and len(self.trained) >= self.after:
            raise InterruptedError
        self.trained.append((point, config.seed))
        shared, own = (
            np.random.default_rng(config.seed).normal(0, 0.05),
            np.random.default_rng([config.seed, *(x + 200 for x in point)]).normal(0, 0.002),
        )
        loss = (
            2
            + sum(c * (x - b) ** 2 for c, x, b in zip(CURVATURE, octaves, BEST, strict=True))
            + shared
            + own
        )
        diverged = 1 if octaves[0] + octaves[1] > 5 else None
        return Row("", "", math.inf if diverged else loss, None, diverged, (), 100, 10.0, "in turn")


def new(**limits: float) -> Search:
    return Search(LM, over.parse(WORDS, LM), Limits(**{"points": 40, "minutes": 1e6, **limits}))  # pyright: ignore


@pytest.fixture(scope="module")
def done() -> tuple[Search, Losses]:
    search = new()
    runner = Losses(search)
    measure(search, runner)
    return search, runner


def regret(point: over.Point) -> float:
    return sum(c * (x / 16 - b) ** 2 for c, x, b in zip(CURVATURE, point, BEST, strict=True))


def test_the_valley_is_reached_and_by_spread_points_alone_is_not(
    done: tuple[Search, Losses],
) -> None:
    search, _ = done
    assert len(search.points) == 40
    assert regret(search.winner) < 0.01 < regret(search.start) / 20
    spread = surrogate.spread(search.constants, 0, 40, 0)
    assert min(map(regret, spread)) > 3 * regret(search.winner)


def test_the_start_is_met_on_seeds_that_the_search_did_not_use(done: tuple[Search, Losses]) -> None:
    search, runner = done
    fresh = [run for run in runner.trained if run[1] >= FRESH]
    assert {point for point, _ in fresh} == {search.winner, search.start}
    assert len(fresh) == len(set(fresh)) == 10
    difference = search.difference()
    assert difference is not None
    truth = regret(search.winner) - regret(search.start)
    assert difference.low < truth < difference.high
    assert difference.half_width < 0.01  # paired: alone a seed moves a loss by 0.05


def test_what_is_worse_by_more_than_the_noise_gets_no_further_seeds(
    done: tuple[Search, Losses],
) -> None:
    search, runner = done
    standing = search.race()
    assert standing.sigma == pytest.approx(0.002, rel=0.5)
    searched = [run for run in runner.trained if run[1] < FRESH]
    assert len(searched) == len(set(searched)) < 0.7 * 40 * 3
    seeds = (~np.isnan(search.losses)).sum(axis=1)
    assert (seeds[standing.stays] == 3).all()
    assert seeds[standing.dropped == np.arange(40)].max() == 1  # diverged


@pytest.mark.parametrize(
    ("loss", "confirm", "message"),
    [
        (lambda config: math.inf, 5, "No best point: all 6 points diverged, the start too"),
        (lambda config: 2.0, 5, "nothing better than the start was found"),
        (
            lambda config: math.inf if config.optimizer.peak_lr == START else 2.0,
            5,
            "diverged 0 times, the start 5",
        ),
        (
            lambda config: 2 - config.optimizer.peak_lr,
            5,
            "note: the best point is at the end of a range: lr 0.06",
        ),
        (
            lambda config: 2 - config.optimizer.peak_lr,
            0,
            "the best point has met the start on no fresh seeds; --confirm 5 trains them",
        ),
        # Differences from -0.03 to 0.01, whose mean decides at t(n - 1) * 0.0158 / sqrt(n) < 0.01.
        (
            lambda config: 2.0 if config.optimizer.peak_lr == START else 0.97 + config.seed / 100,
            5,
            "0.0100 nats below the start, difference [-0.0296, +0.0096]; --confirm 13 would",
        ),
        (
            lambda config: 2.0 if config.optimizer.peak_lr == START else 0.981 + config.seed / 100,
            5,
            "0.0010 nats above the start, difference [-0.0186, +0.0206]; more fresh seeds would",
        ),
    ],
)
def test_a_search_without_a_valley_says_what_it_is(
    loss: Callable[[Config], float],
    confirm: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = Search(LM, over.parse(["lr"], LM), Limits(points=6, batch=3, confirm=confirm))

    def run(configs: Sequence[Config]) -> list[Row]:
        each = [(value, 1 if math.isinf(value) else None) for value in map(loss, configs)]
        return [
            Row("", "", value, None, diverged, (), 10, 1.0, "in turn") for value, diverged in each
        ]

    measure(search, run)
    summary = report.summary(search, "a command")
    report.draw(
        tmp_path / "tune.png", search, [constant["importance"] for constant in summary["constants"]]
    )
    report.report_of(summary, "training loss").show()
    assert message in capsys.readouterr().out
    has_equal_losses = message.startswith(("nothing better", "No best point"))
    assert (summary["constants"][0]["importance"] == 0) == has_equal_losses


def test_new_points_move_some_of_many_constants() -> None:
    more = ["embedding.std", "branch.multiplier", "query.decay", "weight_decay"]
    constants = over.parse([*WORDS, *more], LM)
    middle = np.mean([constant.steps for constant in constants], axis=1)
    unchanged = []
    for seed in range(3):
        points = surrogate.spread(constants, 0, 16, seed)
        losses = ((np.array(points) - middle) ** 2).sum(axis=1)
        for new in surrogate.ask(constants, points, losses, 8, seed):
            unchanged.append(max(int((np.array(point) == new).sum()) for point in points))
    # A point that moves in all of the eight keeps one or two, whose moves round to the old step.
    assert sum(count >= 4 for count in unchanged) >= 4


def test_importance_names_what_matters(done: tuple[Search, Losses]) -> None:
    search, _ = done
    shares = surrogate.importance(search.constants, search.points, search.race().means)
    assert shares[0] > 0.3
    assert shares[2] < 0.05


def test_a_search_that_was_killed_asks_for_the_same_points_and_trains_none_twice(
    done: tuple[Search, Losses],
) -> None:
    whole, runner = done
    rows: dict[str, Row] = {}
    trained: list[Run] = []
    for after in (1, 11, 30, None):
        search = new()
        killed = Losses(search, after)

        def run(configs: Sequence[Config], killed: Losses = killed) -> list[Row]:
            for config in configs:
                if repr(config) not in rows:
                    rows[repr(config)] = killed.row(config)
            return [rows[repr(config)] for config in configs]

        try:
            measure(search, run)
        except InterruptedError:
            assert after is not None
        trained += killed.trained
    assert trained == runner.trained
    assert search.points == whole.points


def test_the_budget_has_room_for_the_comparison_at_the_end() -> None:
    search = new(minutes=10)  # of ten seconds each: 60 runs
    runner = Losses(search)
    measure(search, runner)
    assert "10 minutes would not hold" in search.stopped
    assert 30 < len(runner.trained) <= 60
    assert sum(seed >= FRESH for _, seed in runner.trained) in (0, 10)
    assert len(search.points) < 40
    assert not np.isnan(search.losses[:, 0]).any()


def test_the_example_of_the_documentation_is_its_record() -> None:
    docs = Path(__file__).resolve().parents[4] / "docs"
    text, record = (
        (docs / "concepts" / "presets.md").read_text(),
        json.loads((docs / "evidence" / "tune.json").read_text()),
    )
    apart = record["winner_less_start"]
    assert f"by {-apart['value']:.4f} nats [{-apart['high']:.4f}, {-apart['low']:.4f}]" in text
    assert f"{len(record['points'])} points in {record['runs']} runs" in text


def test_a_start_of_zero_is_drawn_beside_the_other_values() -> None:
    panel = Figure().subplots()
    constant = over.Constant("weight_decay", "optimizer.weight_decay", 0.0, 0.01, 1.0)
    values = np.array([0.0, 0.25, 1.0])
    report._draw_panel(panel, constant, values, values, np.ones(3, bool), best=1)
    assert panel.get_xlabel() == "log2(value), 0 at the left end"
    assert panel.get_xlim()[0] > -4
