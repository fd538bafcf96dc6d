"""Models of linen, Equinox, plain arrays and Flax NNX, as people write them, trained under a preset: `docs/other_code.md`."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import jax
import numpy as np
import pytest

from mupax import presets, train, zoo
from mupax.train.studies.check import check, theory
from scripts.studies import other_code

ADAM = train.OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
WIDTHS = (32, 64)


@pytest.fixture(params=[*other_code.RUNS])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example of one block, which compiles in half of the time."""
    if request.param.startswith("equinox"):
        pytest.importorskip(
            "equinox", reason="an environment older than the lock file: requirements-dev.txt has equinox"
        )
    module = importlib.import_module(f"examples.{request.param}")
    monkeypatch.setattr(module, "DEPTH", 1)
    return module


def batch(definition: zoo.FunctionDefinition) -> dict[str, np.ndarray]:
    """As the check's own: few random examples, with every token among them."""
    rng, sizes = np.random.default_rng(0), definition.sizes
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
    for name, right in (("mup", True), ("sp", False)):
        preset = presets.get(name, base=example.base(WIDTHS[0]))
        expected = theory.of(preset, definitions[0], definitions[-1], ADAM.name)
        findings = check.judge(series.measure(preset, batch(definitions[0]), seeds=2), WIDTHS, expected)
        assert len(findings) > 20
        assert check.passes(findings) == right, [f for f in findings if not f.ok]


def test_an_example_trains_at_two_widths(example: ModuleType):
    for width in (16, 32):
        losses = jax.jit(example.run(width, presets.get("mup", base=example.base(16)), 20))(2**-5, 0)
        assert losses[-5:].mean() < losses[0] - 0.5


def test_the_page_has_the_record_and_rates_stay():
    record = json.loads(other_code.OUT.read_text())
    assert set(record) == set(other_code.RUNS)
    assert other_code.markdown(record) in other_code.OUT.with_suffix(".md").read_text()
    for of in record.values():
        moved = {preset: abs(np.subtract(*map(other_code.best, by_width.values()))) for preset, by_width in of.items()}
        assert moved["mup"] < 0.75 <= moved["sp"]
