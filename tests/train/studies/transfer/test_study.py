"""Transfer studies: fits and intervals on curves of known optimum, trained runs, and reports."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from mupax.train.config import sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config, OptimizerConfig, PresetConfig
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import study as transfer
from mupax.train.studies.transfer.command import shared
from mupax.train.studies.transfer.drift import TOLERANCE, Interval, Scatter, analyse
from mupax.train.studies.transfer.fit import Curve, fit
from mupax.zoo.configs import ConfigError, DecoderConfig

SIZES = (16, 32, 64, 128)


def curve(
    optimum: float,
    seeds: int = 3,
    *,
    noise: float = 0.0,
    shift: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Curve:
    """Return a parabola of 0.1 nats per octave squared at nine rates.

    Each seed's optimum is moved, and each loss is noisy.
    """
    rng = rng or np.random.default_rng(0)
    x = round(optimum * 2) / 2 + np.arange(-4, 5) / 2
    moved = optimum + shift * rng.normal(size=seeds)
    return Curve(
        x, 3 + 0.1 * (x[:, None] - moved) ** 2 + noise * rng.normal(size=(9, seeds)), seeds
    )


# The fit


@pytest.mark.parametrize("optimum", [-8.0, -7.9, -7.75, -7.6])
def test_a_parabola_gives_back_its_own_minimum(optimum: float):
    estimate = fit(curve(optimum), 3)
    assert (estimate.optimum, estimate.loss, estimate.curvature) == pytest.approx(
        (optimum, 3, 0.1), abs=1e-6
    )


def test_a_rate_past_the_edge_of_stability_does_not_pull_the_optimum():
    parabola = curve(-8.0)
    for blown in (4.0, math.inf):
        losses = parabola.losses.copy()
        losses[6:] = blown  # an octave above the minimum
        assert fit(Curve(parabola.x, losses, 3), 3).optimum == pytest.approx(-8.0, abs=0.01)


def test_what_has_no_minimum_says_so():
    x = np.arange(-10, -5.5, 0.5)
    falling, hill = (
        3 - 0.1 * x[:, None] + np.zeros(3),
        3 - 0.1 * (x[:, None] + 8) ** 2 + np.zeros(3),
    )
    assert "end of the grid" in fit(Curve(x, falling, 3), 3).trouble
    assert "end of the grid" in fit(Curve(x, hill, 3), 3).trouble
    assert "diverged" in fit(Curve(x, falling * math.inf, 3), 3).trouble
    edge = np.array([1.4, 1.2, 1.0, 0.9, math.inf])[:, None] + np.zeros(3)
    assert "outside the rates" in fit(Curve(x[:5], edge, 3), 3).trouble


def test_missing_rates_are_those_beside_the_best():
    parabola = curve(-8.0)
    assert parabola.missing() == []
    assert Curve(parabola.x[4:], parabola.losses[4:], 3).missing() == [-8.5, -9.0]
    assert Curve(parabola.x[:6], parabola.losses[:6], 3).missing() == [-7.0]
    diverged = parabola.losses[:6].copy()
    diverged[5] = math.inf
    assert Curve(parabola.x[:6], diverged, 3).missing() == []
    # A rate far away, trained for the price, is no neighbour.
    apart = np.r_[3:5, 8]
    assert Curve(parabola.x[apart], parabola.losses[apart], 3).missing() == [-9.0, -7.5, -7.0]


# Intervals


def covered(seeds: int, noise: float = 0.01, trials: int = 150) -> tuple[float, float]:
    """Return shares of trials whose intervals hold the truth.

    Returns:
        Share of the drift's interval, and of 1.96 standard errors around the first optimum.
    """
    rng = np.random.default_rng(seeds)
    hits = 0
    plain = 0
    for _ in range(trials):
        first, drift = rng.uniform(-8.5, -7.5), rng.uniform(-0.3, 0.3)
        curves = [
            curve(first + drift * i, seeds, noise=noise, shift=0.15, rng=rng) for i in range(4)
        ]
        analysis = analyse(SIZES, curves)
        hits += analysis.drift.low <= drift <= analysis.drift.high
        error = 1.96 * analysis.scatters[0].optimum / math.sqrt(seeds)
        plain += abs(analysis.optima[0].value - first) <= error
    return hits / trials, plain / trials


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int):
    # 150 trials at 95 %: outside 0.90 to 0.99 once in a hundred.
    share, plain = covered(seeds)
    assert 0.90 <= share <= 0.99
    assert (
        seeds > 3 or plain < 0.87
    )  # the control: three seeds without Student's quantile are too sure


def test_curves_that_noise_makes_flat_have_wide_intervals_not_none():
    assert covered(4, noise=0.06)[0] >= 0.90
    rng = np.random.default_rng(1)
    curves = [curve(-8.0, 4, noise=0.002, rng=rng) for _ in SIZES]
    sure = analyse(SIZES, curves)
    flat = curves[1].losses.copy()
    flat[2:7] = 3 + 0.05 * rng.normal(size=(5, 4))
    flat[3:6] -= 0.02
    curves[1] = Curve(curves[1].x, flat, 4)
    analysis = analyse(SIZES, curves)
    assert not analysis.fits[1].trouble
    assert sure.optima[1].half_width < TOLERANCE
    assert 0.5 < analysis.optima[1].half_width < math.inf
    assert sure.drift.half_width < analysis.drift.half_width < math.inf


def test_a_seed_at_one_size_says_nothing_of_another():
    """Its order at a size changes no interval, and the sizes' degrees of freedom add up."""
    rng = np.random.default_rng(5)
    x = np.arange(-20, -11) / 2
    curves = [
        Curve(x, 3 + 0.1 * (x[:, None] + 8 - 0.4 * rng.normal(size=3)) ** 2, 3) for _ in SIZES
    ]
    shuffled = [Curve(x, c.losses[:, rng.permutation(3)], 3) for c in curves]
    analysis, other = analyse(SIZES, curves), analyse(SIZES, shuffled)
    assert other.drift.half_width == pytest.approx(analysis.drift.half_width, rel=1e-6)
    error = math.sqrt(
        sum(
            (weight * scatter.optimum) ** 2 / 3
            for weight, scatter in zip((-0.3, -0.1, 0.1, 0.3), analysis.scatters, strict=True)
        )
    )
    assert (
        2.2 < analysis.drift.half_width / error < 4.3
    )  # Student's quantiles of 11 and of 2 degrees


def test_one_seed_has_no_interval():
    analysis = analyse(SIZES, [curve(-8.0, 1) for _ in SIZES])
    assert analysis.drift.value == pytest.approx(0, abs=1e-6)
    assert math.isinf(analysis.drift.half_width)
    assert analysis.verdict == "undecided"


@pytest.mark.parametrize(
    ("drift", "noise", "verdict"),
    [(0.0, 0.002, "transfers"), (-1.0, 0.002, "drifts"), (0.22, 0.05, "undecided")],
)
def test_the_verdict(drift: float, noise: float, verdict: str):
    rng = np.random.default_rng(3)
    assert (
        analyse(SIZES, [curve(-8 + drift * i, noise=noise, rng=rng) for i in range(4)]).verdict
        == verdict
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (0.0, -0.1, 0.1, "transfers"),
        (0.15, 0.0, 0.30, "transfers"),
        (-0.12, -0.29, 0.05, "transfers"),
        (0.1, 0.05, 0.15, "transfers"),  # its interval leaves zero out, and it is small for sure
        (-0.12, -0.31, 0.07, "undecided"),
        (0.16, 0.03, 0.29, "undecided"),
        (0.28, 0.14, 0.42, "undecided"),  # hybrid on the leaderboard passed as transferring once
        (0.22, 0.155, 0.285, "drifts"),
        (-1.0, -1.5, -0.16, "drifts"),
        (-1.0, -1.9, -0.1, "undecided"),
        (0.0, -math.inf, math.inf, "undecided"),
        (math.nan, -math.inf, math.inf, "undecided"),
    ],
)
def test_the_definition_of_the_verdict(value: float, low: float, high: float, verdict: str):
    exact = analyse(SIZES, [curve(-8.0) for _ in SIZES])
    assert dataclasses.replace(exact, drift=Interval(value, low, high)).verdict == verdict


def test_nothing_transfers_to_a_size_without_a_minimum():
    curves = [curve(-8.0) for _ in SIZES]
    assert analyse(SIZES, curves).verdict == "transfers"
    curves[-1] = Curve(curves[-1].x, curves[-1].losses * math.inf, 3)
    analysis = analyse(SIZES, curves)
    assert (analysis.drift.value, analysis.verdict) == (pytest.approx(0, abs=1e-6), "undecided")


def test_the_price_of_not_tuning():
    prices = [p.value for p in analyse(SIZES, [curve(-8 - i) for i in range(4)]).prices]
    # On the parabola an octave away, then between measured rates (two octaves are the grid's end),
    # then beyond all.
    assert prices[:3] == pytest.approx([0, 0.1, 0.4], abs=1e-6)
    assert math.isnan(prices[3])
    assert all(p.value < 1e-9 for p in analyse(SIZES, [curve(-8.0) for _ in SIZES]).prices)


def test_bigger_is_worse_where_it_is():
    better = [Curve(c.x, c.losses - 0.1 * i, 3) for i, c in enumerate([curve(-8.0)] * 4)]
    analysis = analyse(SIZES, better)
    assert (analysis.worse, analysis.compared) == ((), 15)
    losses = better[2].losses.copy()
    losses[4] += 0.3
    better[2] = Curve(better[2].x, losses, 3)
    assert [(size, x) for size, x, _ in analyse(SIZES, better).worse] == [(64, -8.0)]


@pytest.mark.parametrize("diverged", [1, 2])
def test_a_late_seed_that_diverges_at_a_size_makes_that_size_worse(diverged: int):
    """It does not make the next larger size worse, whose seed did not diverge."""
    curves = []
    for index, c in enumerate([curve(-8.0)] * 4):
        losses = np.concatenate([c.losses - 0.1 * index, c.losses[:, :1] - 0.1 * index], axis=1)
        curves.append(Curve(c.x, losses, 3))
    curves[diverged].losses[4, 3] = math.inf
    worse = [(size, x) for size, x, _ in analyse(SIZES, curves).worse]
    assert worse == [(SIZES[diverged], -8.0)]


# What a study trains


class Trained:
    """Stand-in for the engine, whose losses have a known optimum.

    Under sp it drifts an octave per doubling of head_dim.
    """

    def __init__(
        self, shift: float = 0.05, seconds: float = 1.0, optimum: float = -6.3, moves: float = 0.0
    ) -> None:
        self.configs: list[Config] = []
        self._optimum, self._moves = optimum, moves
        self._shift, self._seconds = shift, seconds

    def __call__(self, configs: Sequence[Config]) -> list[Row]:
        self.configs += configs
        return [self._row(config) for config in configs]

    def _row(self, config: Config) -> Row:
        x, doublings = math.log2(config.optimizer.peak_lr), math.log2(config.model.heads_dim / 16)
        moved = self._shift * np.random.default_rng([config.seed, config.model.heads_dim]).normal()
        drift = self._moves * doublings - (doublings if config.preset.name == "sp" else 0)
        off = x - (self._optimum + drift + moved)
        loss = 2 - 0.1 * doublings + 0.05 * off**2 if off < 2.2 else math.inf
        at = None if math.isfinite(loss) else 3
        return Row(
            f"{len(self.configs)}", "", loss, None, at, (), config.steps, self._seconds, "in turn"
        )


def study(preset: str = "mup", sizes: Sequence[int] = SIZES) -> transfer.Study:
    return transfer.plan(RECIPES["lm-tiny"](), "head_dim", sizes, PresetConfig(name=preset), preset)


@pytest.mark.core
def test_a_study_is_relative_to_its_smallest_size():
    planned = study(sizes=(64, 16, 32))
    assert planned.sizes == (16, 32, 64)
    assert {c.preset.base for c in planned.configs} == {
        "embed=64,heads=4,kv_heads=4,head_dim=16,mlp=160,layers=4"
    }
    assert study("u-mup").configs[0].preset.base is None
    preset = PresetConfig(base="lm-proxy")
    assert (
        transfer.plan(RECIPES["lm-tiny"](), "depth", (2, 4), preset, "").configs[0].preset.base
        == "lm-proxy"
    )


@pytest.mark.core
def test_key_heads_grow_alone():
    planned = transfer.plan(RECIPES["lm-tiny"](), "kv_heads", (1, 2, 4), PresetConfig(), "")
    assert [config.model.kv_heads for config in planned.configs] == [1, 2, 4]  # pyright: ignore
    assert {c.model.num_heads for c in planned.configs} == {4}  # pyright: ignore
    assert {c.preset.base for c in planned.configs} == {
        "embed=128,heads=4,kv_heads=1,head_dim=32,mlp=320,layers=4"
    }
    with pytest.raises(
        ConfigError,
        match=r"num_heads 4 is not a multiple of model.num_kv_heads 3; write num_kv_heads 2",
    ):
        transfer.plan(RECIPES["lm-tiny"](), "kv_heads", (1, 3), PresetConfig(), "")


@pytest.mark.core
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_heads"),
    [(4, None, [2, 4, 8]), (8, 128, [4, 8, 16]), (2, 16, [1, 2, 4])],
)
def test_a_width_is_the_width_that_was_asked_for(
    heads: int, head_dim: int | None, num_heads: list[int]
):
    # The heads together may be wider or narrower than the stream, as in lm-30b-a3b and mT5.
    model = DecoderConfig(
        width=256, depth=1, num_heads=heads, head_dim=head_dim, vocab_size=64, seq_len=16
    )
    grown = [sizes.grown(model, "width", width) for width in (128, 256, 512)]
    assert [model.width for model in grown] == [128, 256, 512]
    assert [model.num_heads for model in grown] == num_heads
    assert {model.heads_dim for model in grown} == {model.heads_dim}
    assert [sizes.of(model, "width") for model in grown] == [128, 256, 512]
    step = 256 // heads
    with pytest.raises(ConfigError, match=f"no whole number of heads.*write width {step}$"):
        sizes.grown(model, "width", step + 4)


@pytest.mark.core
def test_points_are_paired():
    point = study().config((1, -13, 2))
    assert (point.optimizer.peak_lr, point.seed, point.data.seed, point.model.heads_dim) == (
        2**-6.5,
        2,
        0,
        32,
    )


def test_presets_share_the_points_where_they_are_the_same():
    def trained(preset: PresetConfig, axis: str = "head_dim") -> list[str]:
        planned = transfer.plan(RECIPES["lm-tiny"](), axis, (2, 4), preset, "")
        return [c.preset.name for c in shared([planned])[0].trained]

    assert trained(PresetConfig(name="mup")) == ["sp", "mup"]
    assert trained(PresetConfig(name="depth-mup", alpha_l=1.0), "depth") == ["sp", "depth-mup"]
    assert trained(PresetConfig(name="mup"), "depth") == ["sp", "sp"]  # neither has a depth rule
    for apart in (
        PresetConfig(name="mup", gamma0=2.0),
        PresetConfig(name="ntk"),
        PresetConfig(name="mup", zero_readout=True),
    ):
        assert trained(apart) == [apart.name] * 2
    run = Trained()
    studies = shared([study(p, (16, 32)) for p in ("mup", "mup-half")])
    assert [[c.preset.name for c in one.trained] for one in studies] == [
        ["sp", "mup"],
        ["sp", "mup-half"],
    ]
    transfer.measure(studies, run)
    small = [
        (c.optimizer.peak_lr, c.seed, c.preset) for c in run.configs if c.model.heads_dim == 16
    ]
    assert len(small) == 2 * len(set(small))


def test_presets_with_other_steps_of_muon_share_no_points():
    muon = dataclasses.replace(
        RECIPES["lm-tiny"](),
        optimizer=OptimizerConfig(name="muon", peak_lr=0.03, weight_decay=0.0),
    )
    base = "embed=8,heads=4,kv_heads=4,head_dim=2,mlp=32,layers=4"

    def planned(*constants: str) -> transfer.Study:
        preset = PresetConfig(name="mup", base=base, constants=constants)
        return transfer.plan(muon, "head_dim", (2, 4), preset, " ".join(constants))

    # As heads stay, these presets give every parameter the same numbers.
    whole, heads, measured, named = shared(
        [
            planned(),
            planned("muon_blocks=heads"),
            planned("muon_scale=measured"),
            planned("muon_blocks=matrix"),
        ]
    )
    for one, other in itertools.combinations((whole, heads, measured), 2):
        assert all(a != b for a, b in zip(one.trained, other.trained, strict=True))
    assert named.trained == whole.trained  # the control


def test_presets_that_differ_in_another_dimension_share_all_points():
    planned = [
        transfer.plan(RECIPES["lm-tiny"](), "heads", (2, 4), PresetConfig(name=name), name)
        for name in ("mup", "mup-half", "ntk")
    ]
    mup, half, ntk = shared(planned)
    assert [c.preset.name for c in mup.trained] == ["sp", "mup"]
    assert half.trained == mup.trained
    assert half.configs != mup.configs
    assert ntk.trained[1].preset.name == "ntk"


def test_rates_that_few_seeds_chose_wrongly_are_chosen_anew():
    """Of size 16 the first three seeds are best at 2^-5 in the mean, all others at 2^-8.5."""

    class Misled(Trained):
        def _row(self, config: Config) -> Row:
            if config.model.heads_dim != 16:
                return super()._row(config)
            x, first = math.log2(config.optimizer.peak_lr), config.seed < 3
            loss = 2 + (0.02 * (x + 6 - config.seed) ** 2 if first else 0.05 * (x + 8.5) ** 2)
            return Row(
                f"{len(self.configs)}", "", loss, None, None, (), config.steps, 1.0, "in turn"
            )

    run = Misled(shift=0.2)
    (measurement,) = transfer.measure([study()], run, seeds=3, max_seeds=8)
    assert list(measurement.chosen) == [0]
    analysis = measurement.analysis()
    assert analysis
    assert not analysis.fits[0].trouble
    extra = analysis.seeds - 3
    assert extra > 0
    assert analysis.fits[0].optimum == pytest.approx(
        -5 - 3.5 * 0.05 * extra / (0.06 + 0.05 * extra), abs=0.1
    )
    assert analysis.seeds == len({config.seed for config in run.configs})
    # The seeds of every rate near the new best one are the same.
    near = measurement.curve(0)
    assert np.isfinite(near.losses[near.window()][:, : analysis.seeds]).all()
    # Without noise nothing is chosen anew.
    (calm,) = transfer.measure([study()], Trained(), seeds=3, max_seeds=8)
    assert calm.chosen == {}


def test_a_study_finds_each_minimum_and_asks_for_no_point_twice():
    run = Trained()
    mup, sp = transfer.measure([study(), study("sp")], run)
    analysis, control = mup.analysis(), sp.analysis()
    assert analysis
    assert control
    assert (analysis.verdict, control.verdict) == ("transfers", "drifts")
    assert control.drift.value == pytest.approx(-1, abs=0.1)
    assert control.prices[1].value == pytest.approx(0.05, abs=0.03)
    assert control.prices[-1].value == math.inf  # three octaves above its optimum it diverges
    assert not any(f.trouble for f in (*analysis.fits, *control.fits))
    assert len(
        {(c.preset.name, c.model.width, c.optimizer.peak_lr, c.seed) for c in run.configs}
    ) == len(run.configs)
    for at in range(4):
        best, x = analysis.fits[at].optimum, mup.curve(at).x
        assert (x < best).sum() >= 2
        assert (x > best).sum() >= 2


def test_a_study_goes_on_alike():
    points = []
    for _ in range(2):
        run = Trained()
        transfer.measure([study()], run)
        points.append([(c.model.width, c.optimizer.peak_lr, c.seed) for c in run.configs])
    assert points[0] == points[1]


def test_seeds_are_added_until_the_drift_is_known_and_then_no_more():
    calm, noisy, hopeless = (
        transfer.measure([study()], Trained(shift))[0] for shift in (0.02, 0.5, 3.0)
    )
    seeds = [m.analysis().seeds for m in (calm, noisy)]  # pyright: ignore
    assert seeds[0] == 3 < seeds[1]
    assert "decided" in calm.stopped
    assert "decided" in noisy.stopped
    # Later seeds are trained near the minima only, at every size alike.
    added = {(at, rate) for at, rate, seed in noisy.rows if seed == 3}
    assert {at for at, _ in added} == {0, 1, 2, 3}
    assert len(added) < len({(at, rate) for at, rate, _ in noisy.rows})
    assert hopeless.stopped


def test_a_flat_curve_gets_more_seeds_and_a_size_that_diverges_does_not():
    def flat(configs: Sequence[Config]) -> list[Row]:
        rows = Trained(0.0)(configs)
        noise = [
            np.random.default_rng(
                [c.seed, c.model.heads_dim, round(1e6 * c.optimizer.peak_lr)]
            ).normal()
            for c in configs
        ]
        return [
            dataclasses.replace(r, loss=2 + 0.01 * (r.loss - 2) + 0.02 * n)
            for r, n in zip(rows, noise, strict=True)
        ]

    def diverging(configs: Sequence[Config]) -> list[Row]:
        return [dataclasses.replace(row, loss=math.inf) for row in Trained()(configs)]

    for run, message in ((flat, "all 8 seeds are used"), (diverging, "would not help")):
        [measured] = transfer.measure([study()], run)
        assert message in measured.stopped
        analysis = measured.analysis()
        assert analysis
        assert analysis.verdict == "undecided"


def test_noise_that_hides_most_curves_makes_no_drift():
    """Seeds that agree by chance would make a drift in every tenth of these studies."""
    curvature = 0.05  # of `Trained`, in nats per octave squared
    verdicts = Counter[str]()
    for trial in range(40):

        def noisy(configs: Sequence[Config], trial: int = trial) -> list[Row]:
            rows = []
            for config, row in zip(configs, Trained(0.0)(configs), strict=True):
                rate = round(1e6 * config.optimizer.peak_lr)
                key = [trial, config.seed, config.model.heads_dim, rate]
                noise = 4 * curvature * np.random.default_rng(key).normal()
                rows.append(dataclasses.replace(row, loss=row.loss + noise))
            return rows

        (measured,) = transfer.measure([study(sizes=SIZES[:3])], noisy)
        analysis = measured.analysis()
        verdicts[analysis.verdict if analysis else "undecided"] += 1
    assert verdicts["drifts"] <= 2  # 5 %; 4 if the curves of most sizes were trusted


def test_the_number_of_seeds_that_decides_counts_those_that_show_the_curves():
    exact = analyse(SIZES, [curve(-8.0) for _ in SIZES])
    assert exact.verdict == "transfers"
    scatters = (Scatter(0.0, 1.3), Scatter(0.0, 1.3), Scatter(0.0, 1.3), Scatter(0.0, 0.2))
    hidden = dataclasses.replace(exact, scatters=scatters)
    assert (hidden.unclear_sizes(), hidden.verdict, hidden.settled) == (3, "undecided", False)
    # 1.3 * sqrt(3 / 6) < 1 < 1.3 * sqrt(3 / 5)
    assert hidden.seeds_to_decide() == 3
    half = dataclasses.replace(exact, scatters=(*scatters[:2], *exact.scatters[2:]))
    assert (half.unclear_sizes(), half.verdict) == (2, "transfers")


def test_a_drift_that_is_not_fitted_yet_has_no_unit():
    # Noise alone: the first seeds find no minimum at the larger size.
    rng = np.random.default_rng(3)

    def noisy(configs: Sequence[Config]) -> list[Row]:
        rows = []
        for config, row in zip(configs, Trained(0.0)(configs), strict=True):
            noise = rng.normal() if config.model.sizes()["head_dim"] > 16 else 0.0
            rows.append(dataclasses.replace(row, loss=row.loss + noise))
        return rows

    lines: list[str] = []
    transfer.measure([study(sizes=(16, 32))], noisy, lines.append, minutes=99)
    assert any("(no drift yet): at most" in line for line in lines)


def test_the_minutes_end_a_study_and_it_says_so():
    # 20 points a size and seed: at 30 s each three sizes do not fit into 10 minutes.
    [late] = transfer.measure([study()], Trained(seconds=30), minutes=10)
    assert "10 minutes ended" in late.stopped
    [short] = transfer.measure([study()], Trained(0.8, seconds=30), minutes=38)
    assert "would not hold another seed" in short.stopped
    assert short.seconds <= 38 * 60
    analysis = short.analysis()
    assert analysis
    assert analysis.seeds == 3


def test_a_batch_grows_at_the_same_tokens_under_a_joint_rule_and_its_control():
    config = RECIPES["lm-tiny"]()
    rule, control = (
        transfer.plan(
            config,
            "batch",
            (64, 8, 16),
            PresetConfig(name="mup", base="lm-proxy", joint=joint),
            joint,
        )
        for joint in ("sde", "none")
    )
    for planned in (rule, control):
        assert [(c.data.batch_size, c.steps) for c in planned.configs] == [
            (8, 1600),
            (16, 800),
            (64, 200),
        ]
        assert [c.scaled_optimizer.warmup_steps for c in planned.configs] == pytest.approx(
            [100, 50, 12], abs=1
        )
    assert {c.preset.base for c in rule.configs} == {"lm-proxy,batch=8,tokens=1638400"}
    rates = [
        [c.scaled_optimizer.peak_lr / c.optimizer.peak_lr for c in p.configs]
        for p in (rule, control)
    ]
    assert rates[0] == pytest.approx([1, 2**0.5, 8**0.5])
    assert rates[1] == [1, 1, 1]
    studies = shared([rule, control])
    assert studies[0].trained[0] == studies[1].trained[0]  # at the base they are one
    assert all(a != b for a, b in zip(studies[0].trained[1:], studies[1].trained[1:], strict=True))
    assert [c.preset.joint for c in studies[0].trained[1:]] == ["sde", "sde"]


@pytest.mark.core
def test_a_joint_rule_of_a_study_that_grows_widths_changes_nothing():
    planned = transfer.plan(
        RECIPES["lm-tiny"](), "head_dim", (16, 32), PresetConfig(joint="complete-d"), ""
    )
    assert all(c.scaled_optimizer == c.optimizer for c in planned.configs)
