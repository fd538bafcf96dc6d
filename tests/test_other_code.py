"""Models of linen, Equinox, plain arrays and Flax NNX, as people write them, trained under a preset."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax
import numpy as np
import pytest

from mupax import presets, train, zoo
from mupax.train.studies.check import check, theory
from scripts import other_code

ADAM = train.OptimizerConfig(name="adam", peak_lr=2e-3, schedule="constant", eps=1e-12)
WIDTHS = (64, 128)


@pytest.fixture(params=other_code.EXAMPLES)
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
        findings = check.judge(series.measure(preset, batch(definitions[0]), seeds=3), WIDTHS, expected)
        assert len(findings) > 20
        assert check.passes(findings) == right, [f for f in findings if not f.ok]


def test_an_example_trains_at_two_widths(example: ModuleType):
    for width in WIDTHS:
        losses = jax.jit(example.run(width, presets.get("mup", base=example.base(32)), 30))(2**-6, 0)
        assert losses[-5:].mean() < losses[0] - 0.5
