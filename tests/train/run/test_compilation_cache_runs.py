"""A command started twice: the second compiles nothing, and trains bitwise as the first; without a folder it trains all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fixtures.xla import QUICKLY

ROOT = Path(__file__).resolve().parents[3]
FLAGS = (
    "--data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 "
    "--model.mlp-ratio 2 --model.seq-len 16 --model.no-norm-gain "
    "--data.batch-size 8 --data.eval-examples 16 --steps 4 --optimizer.warmup-steps 1 --log.no-progress --log.no-tensorboard "
    "--log.no-samples"
)
PROGRAM = """
import atexit, collections, json, sys
import jax.monitoring
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
atexit.register(lambda: open("events.json", "w").write(json.dumps(events)))
from pathlib import Path
from mupax.train.__main__ import main
from mupax.train.run.report import finish
finish.loss_plot = lambda metrics, image, *_, **__: Path(image).touch()  # drawing takes a second
sys.exit(main(sys.argv[1:]))
"""


class Done(NamedTuple):
    hits: int
    misses: int
    rows: list[Any]
    error: str


def start(folder: Path, workdir: str, *words: str) -> Done:
    """A run of the recipe to its end, of a user who has set nothing."""
    inherited = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    inherited["XLA_FLAGS"] = " ".join(QUICKLY)  # one device
    flags = ["lm-tiny", *FLAGS.split(), "--workdir", workdir, *words]
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}){PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        cwd=folder,
        env={**inherited, "MUPAX_DATA": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    events = json.loads((folder / "events.json").read_text())
    rows = [
        json.loads(line) for line in (folder / workdir / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [
        {name: row[name] for name in ("step", "loss", "grad_norm", "eval_loss") if name in row}
        for row in rows
    ]
    return Done(events.get("cache_hits", 0), events.get("cache_misses", 0), losses, done.stderr)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    folder = tmp_path_factory.mktemp("started")
    (folder / "text.txt").write_text(
        "".join(f"{number} is the square of {number**0.5:.3f}\n" for number in range(600))
    )
    return folder, start(folder, "first")


def test_the_second_start_compiles_nothing_and_trains_bitwise_the_same(
    first: tuple[Path, Done],
) -> None:
    folder, cold = first
    assert cold.misses > 5
    warm = start(folder, "second")
    assert "caution: compiled" not in cold.error + warm.error
    assert (warm.misses, warm.hits) == (0, cold.hits + cold.misses)
    assert len(warm.rows) >= 5
    assert warm.rows == cold.rows


def test_a_run_trains_the_same_without_a_folder_for_programs(first: tuple[Path, Done]) -> None:
    folder, cold = first
    alone = start(folder, "alone", "--compilation-cache", "text.txt")
    assert (alone.hits, alone.misses) == (0, 0)
    cautions = [
        line
        for line in alone.error.splitlines()
        if line.startswith("caution: compiled programs are not kept")
    ]
    assert len(cautions) == 1
    assert "Not a directory" in cautions[0]
    assert alone.rows == cold.rows
