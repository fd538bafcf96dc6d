"""The figures of the infinite limit in time: numbers from tiny runs, verdicts from made-up ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.figures.infinite import fig_dynamics, fig_proxy

AT = [1, 2]
STACK = {
    **fig_dynamics.FIGURE.small["stack"],
    "depth": [1],
    "heads": [3],
    "limit": 32,
    "seeds": 2,
    "draws": 2,
    "images": 2,
}
ONE = {**fig_dynamics.FIGURE.small["one_block"], "cases": [{"head_dim": 2, "alpha_a": 1.0, "heads": [3, 6]}], "seeds": 2,
       "parts": 2, "sampled": 50, "draws": 2, "images": 2}  # fmt: skip


def test_nets_beside_the_limit(tmp_path: Path) -> None:
    settings = {"at": AT, "one_block": ONE, "stack": STACK}
    data = fig_dynamics.measure(settings, tmp_path)
    assert np.shape(data["one_block"][0]["outputs"]) == (2, 2, 4)  # times, H, seeds
    assert np.shape(data["stack"][0]["kernels"]) == (2, 1, 2)
    assert np.shape(data["curves"]["nets"]) == (2, 3)
    fig_dynamics.draw(settings, data).savefig(tmp_path / "x.png")


def test_the_verdicts_on_made_up_errors() -> None:
    rng = np.random.default_rng(0)
    heads = [8, 16, 32]
    steps = 3
    seeds = 400
    limit = np.zeros((3, steps, 4))
    wrong = np.ones((1, steps, 4))
    kernels = np.zeros((3, steps, 2, 2))
    nets = [
        tuple(rng.standard_normal((seeds, *x.shape[1:])) / h**0.5 for x in (limit, kernels))
        for h in heads
    ]
    noisy = limit + 0.01 * rng.standard_normal(limit.shape)
    distances = fig_dynamics.compared(AT, nets, (noisy, kernels), wrong)
    settings = {"at": AT, "one_block": {"cases": []}, "stack": {**STACK, "heads": heads}}
    rows = fig_dynamics.rows(settings, {"one_block": [], "stack": [distances]})
    assert [row.verdict for row in rows] == ["reproduces"] * 5 + ["control: fails as it must"]


def made_up(settings: dict, a: float, b: float) -> dict:
    """Outputs that lie by sqrt(a / D) and b / N from infinity."""
    rng = np.random.default_rng(1)
    end, along = (x / np.linalg.norm(x) for x in rng.standard_normal((2, 300)))
    limit = [
        end + b / n * along + 0.001 * rng.standard_normal((6, 300))
        for n in settings["limit_head_dims"]
    ]
    proxies = [
        [
            end + b / n * along + (a / d / 300) ** 0.5 * rng.standard_normal((40, 300))
            for d in settings["widths"]
        ]
        for n in settings["head_dims"]
    ]
    losses = np.ones((len(proxies), len(settings["widths"]), 40))
    limit_losses = np.ones((len(limit), 6))
    return {"limit": limit, "proxies": proxies, "loss": losses, "limit_loss": limit_losses}


def test_the_terms_of_a_proxys_error_are_recovered(tmp_path: Path) -> None:
    settings = dict(fig_proxy.FIGURE.small)
    data = made_up(settings, a=4.0, b=0.3)
    assert fig_proxy.terms(settings, data) == (
        pytest.approx(4.0, rel=0.05),
        pytest.approx(0.3, rel=0.05),
    )
    assert fig_proxy.needed(4.0, 0.3, 0.1) == (8, pytest.approx(4 / (0.01 - (0.3 / 8) ** 2)))
    rows = fig_proxy.rows(settings, data)
    judged = [row.verdict for row in rows if row.predicted is not None]
    assert judged == ["reproduces"] * 8 + ["control: fails as it must"]
    assert all(row.low < row.measured < row.high for row in rows)
    fig_proxy.draw(settings, data).savefig(tmp_path / "x.png")


def test_proxies_are_measured(tmp_path: Path) -> None:
    small = {"limit_head_dims": [1, 2], "head_dims": [1], "widths": [4]}
    data = fig_proxy.measure(
        {**fig_proxy.FIGURE.small, **small, "at": AT, "stack": {**STACK, "limit": 64}}, tmp_path
    )
    assert np.shape(data["limit"]) == (2, 2, 20)
    assert np.shape(data["proxies"]) == (1, 1, 2, 20)
