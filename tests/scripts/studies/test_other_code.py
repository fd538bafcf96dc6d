"""Models of linen, Equinox, plain arrays and NNX, trained under a preset."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import jax
import numpy as np
import pytest

from mupax import presets, train, zoo
from mupax.train.studies.check import check, theory
from scripts import ROOT

ADAM = train.OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
WIDTHS = (32, 64)
EXAMPLES = ("linen_transformer", "equinox_transformer", "plain_optax", "foreign_nnx")
PAGE = ROOT / "docs" / "howto" / "other_code.md"
EXPONENTS = tuple(range(-9, -2))
"""Learning rates of the record, as powers of two."""


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example and give it one block, which compiles in half of the time."""
    if request.param.startswith("equinox"):
        pytest.importorskip(
            "equinox",
            reason="an environment older than the lock file: requirements-dev.txt has equinox",
        )
    module = importlib.import_module(f"examples.{request.param}")
    monkeypatch.setattr(module, "DEPTH", 1)
    return module


def batch(definition: zoo.FunctionDefinition) -> dict[str, np.ndarray]:
    """Return few random examples with every token among them, as those of the check."""
    rng = np.random.default_rng(0)
    sizes = definition.sizes
    if "vocab" in sizes:
        inputs = rng.permutation(sizes["vocab"]).reshape(-1, sizes["position"]).astype(np.int32)
        targets = rng.integers(0, sizes["vocab"], inputs.shape).astype(np.int32)
    else:
        inputs = rng.standard_normal((16, 8, 8, 1)).astype(np.float32)
        targets = rng.integers(0, sizes["classes"], 16).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def test_an_example_passes_the_check_and_without_rules_fails(example: ModuleType):
    definitions = [example.definition(width) for width in WIDTHS]
    series = check.Series(definitions, ADAM)
    examples = batch(definitions[0])
    for name, right in (("mup", True), ("sp", False)):
        preset = presets.get(name, base=example.base(WIDTHS[0]))
        expected = theory.of(preset, definitions[0], definitions[-1], ADAM.name)
        measured = series.measure(preset, examples, seeds=2)
        findings = check.judge(measured, WIDTHS, expected)
        assert len(findings) > 20
        assert check.passes(findings) == right, [f for f in findings if not f.ok]


def test_an_example_trains_away_from_its_base(example: ModuleType):
    preset = presets.get("mup", base=example.base(16))
    losses = jax.jit(example.run(WIDTHS[0], preset, steps=20))(2**-5, 0)
    assert losses[-5:].mean() < losses[0] - 0.5


def best_exponent(losses: list[float]) -> float:
    """Return the vertex of the parabola through the lowest loss and its neighbours.

    A lowest loss at an end of the grid gives that end.
    """
    lowest = int(np.argmin(losses))
    if lowest in (0, len(losses) - 1):
        return float(EXPONENTS[lowest])
    left, middle, right = losses[lowest - 1 : lowest + 2]
    return EXPONENTS[lowest] + (left - right) / (2 * (left - 2 * middle + right))


def test_the_page_has_the_record_and_rates_stay():
    record = json.loads((ROOT / "docs" / "evidence" / "other_code.json").read_text())
    assert set(record) == set(EXAMPLES)
    for name, by_preset in record.items():
        for preset, by_width in by_preset.items():
            first, last = map(best_exponent, by_width.values())
            shift = last - first
            lowest = ", ".join(f"{min(losses):.3g}" for losses in by_width.values())
            widths = ", ".join(by_width)
            cells = f"| {name} | {widths} | {preset} | 2^{first:.1f}, 2^{last:.1f} | {shift:+.1f} | {lowest} |"
            assert cells in PAGE.read_text()
            assert (abs(shift) < 0.75) == (preset == "mup")
