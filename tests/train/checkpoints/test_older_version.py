"""Runs of version 0.1.0, before names and rooms changed, go on: tests/fixtures/runs-of-0.1.0.tar.xz holds two at step 3 of 6."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
WORDS = (
    "vit-digits --model.width 8 --model.num-heads 2 --model.head-dim 4 --model.depth 2 --data.batch-size 8 --steps 6 "
    "--checkpoint.every-steps 3 --optimizer.schedule constant --optimizer.warmup-steps 2 --log.no-tensorboard "
    "--log.no-samples --log.no-progress --data.eval-examples 8 --xla-flags none --log.eval-every-steps 6 --resume"
)
OWN_WORDS = {"adamw": "--model.no-bias", "muon": "--ema.decay 0.5"}
RESUME = """
import sys
from pathlib import Path
from mupax.train.__main__ import main
from mupax.train.core import muon
from mupax.train.run.report import finish
# The version before had no Gram matrices, which round in another order.
muon.GRAM_RATIO = float("inf")
finish.loss_plot = lambda metrics, image, *_, **__: Path(image).touch()  # drawing takes a second
sys.exit(max(main(line.split()) for line in sys.argv[1:]))
"""


def manifest_of(workdir: Path, step: int) -> dict[str, Any]:
    return json.loads((workdir / "checkpoints" / str(step) / "manifest.json").read_text())


def losses(workdir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, float]]]:
    """A folder with both runs, resumed by one process of one device, and their losses before."""
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(ROOT / "tests" / "fixtures" / "runs-of-0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    before: dict[str, dict[int, float]] = {}
    lines: list[str] = []
    for optimizer, words in OWN_WORDS.items():
        workdir = folder / optimizer
        assert manifest_of(workdir, 3)["format"] == "mupax-checkpoint-1"
        before[optimizer] = losses(workdir)
        lines.append(f"{WORDS} {words} --optimizer.name {optimizer} --workdir {workdir}")
    # One device and the XLA flags of users, as both had: others round the last bit otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", RESUME, *lines],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming vit-digits at step 3 of 6") == len(OWN_WORDS)
    return folder, before


@pytest.mark.parametrize("optimizer", OWN_WORDS)
def test_a_run_of_the_version_before_goes_on(
    optimizer: str, resumed: tuple[Path, dict[str, dict[int, float]]]
) -> None:
    folder, before = resumed
    workdir = folder / optimizer
    run = json.loads((workdir / "config.json").read_text())["run"]  # which it has from now on
    assert manifest_of(workdir, 6)["manifest"]["record"]["run"] == run
    after = losses(workdir)
    assert list(after) == [1, 2, 3, 4, 5, 6]
    # Another jax rounds in another order. The norm that gradients are clipped by is summed in another since: a last bit.
    same = (jax.__version__, sys.version_info[:2]) == ("0.10.2", (3, 11))
    tolerance = 1.2e-7 if same else 1e-4
    expected = list(before[optimizer].values())
    np.testing.assert_allclose(list(after.values()), expected, rtol=tolerance)
