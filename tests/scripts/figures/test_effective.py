"""Strategies of the effective theory have the paper's numbers, and its claims are judged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mupax.presets import Role
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config
from scripts.figures.effective import fig_effective_language, fig_effective_vision, strategies

LANGUAGE = fig_effective_language.FIGURE.small
VISION = fig_effective_vision.FIGURE.small
H = 2.0**-8


def numbers(config: Config) -> dict[str, tuple[float, float, float]]:
    """Return the initial std, the movement by a step of AdamW, and lr * wd of every parameter."""
    preset = preset_of(config)
    opt = config.optimizer
    by_name = {}
    for name, spec in config.model.parameters().items():
        scales = preset.scales(spec, config.model.sizes(), "adamw")
        columns = ("init_std", "multiplier", "lr", "weight_decay")
        std, multiplier, lr, wd = (
            float(np.ravel(getattr(scales, column))[0]) for column in columns
        )
        by_name[name] = (
            std * multiplier,
            lr * opt.peak_lr * multiplier,
            lr * opt.peak_lr * wd * opt.weight_decay,
        )
    return by_name


@pytest.mark.core
@pytest.mark.parametrize("width", [64, 256])
def test_the_language_runs_have_the_papers_numbers(width: int):
    """Standard has one std and rate; neural tangent starts tokens at 1 and moves tables n times."""
    std = 0.64 / math.sqrt(width)
    standard = fig_effective_language.config(LANGUAGE, "standard", width, H, 0)
    assert all(scales == pytest.approx((std, H, 0.01 * H)) for scales in numbers(standard).values())
    assert tied(standard) == pytest.approx(1)
    ntk = fig_effective_language.config(LANGUAGE, "ntk", width, H, 0)
    assert ntk.optimizer.peak_lr == pytest.approx(H * width**1.5)
    for name, scales in numbers(ntk).items():
        start = 1.0 if name == "token" else std
        rate = H * width if is_embedding(name) else H
        assert scales == pytest.approx((start, rate, 0.01 * H)), name
    assert tied(ntk) == pytest.approx(width**-0.5)


def is_embedding(name: str) -> bool:
    return name == "token" or name.endswith("position")


def tied(config: Config) -> float:
    """Return the multiplier of the tied head."""
    spec = config.model.tied_readout
    assert spec is not None
    return float(
        np.ravel(preset_of(config).scales(spec, config.model.sizes(), "adamw").multiplier)[0]
    )


@pytest.mark.core
def test_the_controls_raise_the_embeddings_alone():
    width = 256
    (name, _), *_ = LANGUAGE["embeddings"].items()
    by_name = numbers(fig_effective_language.config(LANGUAGE, name, width, H, 0))
    # As fast, over where they start, as ntk's.
    raised = 0.64 * math.sqrt(width) * H
    for name, (_, rate, _) in by_name.items():
        if is_embedding(name):
            assert rate == pytest.approx(raised)
        elif "block" in name:
            assert rate == pytest.approx(H)


@pytest.mark.core
@pytest.mark.parametrize("strategy", strategies.MAP)
def test_the_vision_runs_start_and_move_alike_inside(strategy: str):
    """The map keeps rate and decay of hidden matrices; the readout starts n^-s/2 lower."""
    config = fig_effective_vision.config(VISION, strategy, H, 0.5, 0)
    width = VISION["model"]["width"]
    specs = config.model.parameters()
    s = 3 - 2 * strategies.MAP[strategy] if strategy != "standard" else 0
    for name, (std, rate, pull) in numbers(config).items():
        assert pull == pytest.approx(0.5 * H)
        if specs[name].in_block:
            fan_in = width * (4 if specs[name].role is Role.MLP_OUT else 1)
            constant = fig_effective_vision.strategies.VARIANCES[specs[name].role]
            assert (std, rate) == pytest.approx((math.sqrt(constant / fan_in), H)), name
        elif specs[name].role is Role.READOUT:
            assert std == pytest.approx(width ** (-0.5 - s / 2))
        elif strategy == "standard":
            assert rate == pytest.approx(H)


def made_up(rates: dict[str, float], decay: float) -> dict:
    """Losses of every strategy whose best hidden rate is 2^rates, and whose best decay 2^decay."""
    noise = np.random.default_rng(0)
    by_strategy = {}
    for strategy, (low, high) in VISION["grid"].items():
        x = np.arange(low, high + 1.0)
        surface = (
            0.2 * (x - rates.get(strategy, -7.2)) ** 2
            + 0.05 * (np.array(VISION["decay"])[:, None] - decay) ** 2
        )
        losses = surface[..., None] + noise.normal(0, 0.005, (*surface.shape, VISION["seeds"]))
        by_strategy[strategy] = {"x": x.tolist(), "losses": losses.tolist()}
    return by_strategy


@pytest.mark.core
def test_strategies_that_share_their_best_place_reproduce_the_claim_and_others_do_not(tmp_path):
    alike = fig_effective_vision.rows(VISION, made_up({}, decay=-0.8))
    claims = [row for row in alike if row.predicted is not None and not row.control]
    assert len(claims) == 6
    assert {row.verdict for row in claims} == {"reproduces"}
    assert [row.verdict for row in alike if row.control] == ["control: fails as it must"]
    shifted = fig_effective_vision.rows(VISION, made_up({"ntk": -8.4}, decay=-0.8))
    (ntk,) = [
        row
        for row in shifted
        if "best hidden rate of standard to that of ntk, through the paper" in row.what
    ]
    assert (ntk.measured, ntk.verdict) == (pytest.approx(-1.2, abs=0.2), "does not reproduce")
    fig_effective_vision.draw(VISION, made_up({}, decay=-0.8)).savefig(tmp_path / "map.png")


@pytest.mark.core
def test_a_best_decay_at_the_end_of_the_grid_has_no_row():
    rows = fig_effective_vision.rows(VISION, made_up({}, decay=-7))
    assert not [row for row in rows if "best decay of" in row.what]
    assert all(np.isfinite(row.measured) for row in rows)
