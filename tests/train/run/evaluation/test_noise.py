"""`mupax noise`: the estimate on gradients whose noise is known, and the command on a real run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mupax.train.reuse.trained import open_model
from mupax.train.run.noise import measured, noise_scale, stretch
from tests.fixtures.commands import Done, refusal, succeeded
from tests.fixtures.small_runs import folder, train

__all__ = ["folder"]  # a fixture

BATCH = 8


def drawn(rng: np.random.Generator, ratio: float, many: int) -> np.ndarray:
    """Draw gradients of 400 entries and mean length 1, with `ratio` as the variance of their noise."""
    return np.full(400, 0.05) + math.sqrt(ratio / 400) * rng.standard_normal((many, 400))


def covered(ratio: float, many: int, shared: float = 0.0) -> tuple[float, float]:
    """Return how often the interval holds the truth, and the median estimate over the truth."""
    rng, hits, values = np.random.default_rng(0), [], []
    for _ in range(200):
        grads = drawn(rng, ratio, many) + math.sqrt(shared * ratio / 400) * rng.standard_normal(400)
        scale = noise_scale(grads @ grads.T, BATCH)
        hits.append(scale.low <= BATCH * ratio <= scale.high)
        values.append(scale.value / BATCH / ratio)
    return float(np.mean(hits)), float(np.median(values))


@pytest.mark.core
@pytest.mark.parametrize("many", [4, 16])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 10.0])
def test_the_interval_holds_the_truth_as_often_as_it_says(ratio: float, many: int):
    share, median = covered(ratio, many)
    assert 0.91 < share <= 1
    assert median == pytest.approx(1, abs=0.05 if many == 16 else 0.2)


@pytest.mark.core
def test_control_batches_that_share_their_noise_are_seen_as_less_noisy():
    share, median = covered(10.0, 16, shared=1.0)
    assert share < 0.1
    assert median < 0.2


@pytest.mark.core
def test_the_estimate_by_hand():
    # Gradients (1, e_i): |G|^2 = 1 and tr(Sigma) / B = 1, so the noise scale is the batch.
    scale = noise_scale(np.ones([5, 5]) + np.eye(5), BATCH)
    assert scale == pytest.approx((BATCH, BATCH, BATCH))
    assert noise_scale(np.ones([4, 4]), BATCH) == (0, 0, 0)  # all alike: no noise
    assert noise_scale(np.eye(4), BATCH) == (math.inf, math.inf, math.inf)  # nothing else


@pytest.fixture(scope="module")
def trained(folder: Path) -> Done:
    return train("--workdir noisy --steps 4 --model.vocab-size 300 --log.no-tensorboard")


def test_gradients_are_those_of_the_runs_next_steps(trained: Done):
    products, groups = measured(open_model(Path("noisy"), 2, False, needs_run=True), 3)
    lines = Path("noisy/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    norms = {row["step"]: row["grad_norm"] for row in rows if "grad_norm" in row}
    third = math.sqrt(sum(product[0, 0] for product in products.values()))
    assert third == pytest.approx(norms[3], rel=1e-5)
    assert sorted(name for names in groups.values() for name in names) == sorted(products)
    # The fourth step is taken at other parameters: near, and not the same.
    fourth = math.sqrt(sum(product[1, 1] for product in products.values()))
    assert fourth != pytest.approx(norms[4], rel=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("trained_examples", "batch", "epoch", "expected"),
    [
        (320, 64, 1437, (5, False)),
        (64 * 17, 64, 1437, (23, False)),  # 16 of them reach into the second epoch
        (100, 64, 1437, (2, False)),
        (0, 100, 1437, (15, True)),
        (640, 64, None, (10, False)),
    ],
)
def test_batches_of_two_epochs_are_not_compared(
    trained_examples: int, batch: int, epoch: int | None, expected: tuple[int, bool]
):
    assert stretch(trained_examples, 16, batch, epoch) == expected


def test_batches_that_share_examples_are_said(trained: Done):
    done = succeeded("noise noisy --step 4 --batches 3 --data.batch-size 704")
    assert "caution: 3 batches of 704 reach into another epoch of" in done.err


def test_the_command(trained: Done):
    done = succeeded("noise noisy --step 4 --batches 4 --json noise.json")
    assert not done.err
    numbers = json.loads(Path("noise.json").read_text())
    scale = numbers["noise_scale"]
    assert (numbers["step"], numbers["batch"], numbers["batches"]) == (4, 16, 4)
    assert f"noise scale {scale['value']:.3g} examples [{scale['low']:.3g}, " in done.out
    assert "at step 4 (95 %), from 4 batches of 16" in done.out
    assert set(numbers["groups"]) >= {"readout", "block.query", "token_embedding"}
    assert all(f"\n{group} " in done.out for group in numbers["groups"])
    assert f"--noise-scale {scale['value']:.3g} refuses them at a larger batch" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("noisy --batches 2", "--batches is 2; write a number of at least 3"),
        ("noisy --optimizer.b1 0.5", "noise does not read --optimizer.b1"),
        ("noisy --data.tokenizer bpe:300", "the model was trained on tokens of bytes"),
        ("noisy --step 3", "no checkpoint of step 3; there are 2, 4"),
        ("nowhere", "nowhere"),
    ],
)
def test_what_is_refused(trained: Done, words: str, message: str):
    assert message in refusal("noise", words)
