"""What the searches cost beside the full grid, in one run: writes docs/search_cost.json.

    python -m scripts.studies.search_cost [--out FOLDER]

Four commands of `mupax train`, on one model. Of the best rate of three widths: `sweep` of nine rates with three seeds, and
`transfer --search frugal`. Of three constants at once: `sweep` of all of their octaves with three seeds, and `tune` over the same
ranges. Cost is in training FLOPs, of the grid's. What a search ends at is held against what the grid ends at: best rates in octaves,
constants by the loss of seeds that neither has seen. Rows are kept in FOLDER: the command goes on where it was
stopped. `python -m scripts.studies.transfer --render` draws the result.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.train.config.record import words_of
from mupax.train.studies.forecast import points
from mupax.train.studies.sweep import command as sweep
from mupax.train.studies.sweep.rows import Rows
from mupax.train.studies.transfer import command as transfer
from mupax.train.studies.transfer.fit import fit
from mupax.train.studies.tune import command as tune
from mupax.zoo import flops
from scripts import ROOT
from scripts.quality.page import difference

OUT = ROOT / "docs" / "search_cost.json"
RUN = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 --data.batch-size 8 --data.seed 0 --steps 100 "
    "--preset.base embed=32,head_dim=16,heads=2,kv_heads=2,mlp=80,layers=2 "
    "--optimizer.warmup-steps 20 --optimizer.clip-norm None --optimizer.name adam --optimizer.peak-lr 0.015625"
)
SEEDS = 3
FRESH = 12
"""Seeds of both ends, from the first that no search has."""
WIDTHS = "head_dim=16,32,64"
RATES = "2^-10:2^-2:9"
CONSTANTS = {
    "optimizer.peak_lr": "2^-9:2^-3:7",
    "preset.rates.readout": "2^-1:2^4:6",
    "preset.stds.readout": "2^-2:2^1:4",
}
"""Field to the octaves of the grid."""
WORDS = ("lr", "readout.lr", "readout.std")
"""Of `tune --over`, for the same."""


def commands(out: Path) -> dict[str, list[str]]:
    """Name to the words after `mupax train`.

    Args:
        out: folder of all rows.
    """
    seeds = f"--seeds {SEEDS} --no-eval"
    vary = " ".join(f"--vary {name}={grid}" for name, grid in list(CONSTANTS.items())[1:])
    over = ",".join(
        f"{word}={':'.join(grid.split(':')[:2])}" for word, grid in zip(WORDS, CONSTANTS.values(), strict=True)
    )
    lines = {
        "grid of rates": f"sweep {RUN} --sizes {WIDTHS} --lr {RATES} {seeds}",
        "frugal": f"transfer {RUN} --grow {WIDTHS} --search frugal --seeds {SEEDS}",
        "grid of constants": f"sweep {RUN} --lr {CONSTANTS['optimizer.peak_lr']} {vary} {seeds}",
        "tune": f"tune {RUN} --over {over} --confirm 0 {seeds}",
    }
    return {name: [*shlex.split(line), "--out", str(out / name.replace(" ", "-"))] for name, line in lines.items()}


def train(words: Sequence[str]) -> None:
    """Run one of the commands in this process.

    Args:
        words: after `mupax train`.

    Raises:
        SystemExit: it was stopped.
    """
    of = {"sweep": sweep, "transfer": transfer, "tune": tune}[words[0]]
    if code := of.main(list(words[1:])):
        raise SystemExit(code)


def settings(folder: Path) -> list[points.Setting]:
    """Every width with its rows; the base is the same model under every preset, and has whatever name its rows do.

    Args:
        folder: of rows.
    """
    return [setting for rows in points.load([folder]) for setting in rows.settings]


def cost(folder: Path) -> float:
    """FLOPs of all runs in a folder."""

    def one(setting: points.Setting) -> float:
        config = setting.config
        return flops.train_flops(config.model) * config.steps * config.data.batch_size

    return sum(int(np.sum(~np.isnan(setting.losses))) * one(setting) for setting in settings(folder))


def least(folder: Path) -> tuple[list[str], int]:
    """The flags of the point whose mean loss over all seeds is least, without its seed, and the number of runs.

    Args:
        folder: of rows.
    """
    losses: dict[str, list[float]] = {}
    rows = Rows(folder)
    for row in rows.values():
        words = words_of(row.command)
        if "--seed" in words:
            at = words.index("--seed")
            del words[at : at + 2]
        losses.setdefault(shlex.join(words), []).append(np.inf if row.diverged else row.loss)
    whole = {text: float(np.mean(each)) for text, each in losses.items() if len(each) == SEEDS}
    return shlex.split(min(whole, key=lambda text: whole[text])), len(rows)


def fresh(words: Sequence[str], out: Path) -> np.ndarray:
    """Losses of a run from seeds that no search has [FRESH].

    Args:
        words: recipe and flags.
        out: folder of its rows.
    """
    train(["sweep", *words, "--seed", "100", "--seeds", str(FRESH), "--no-eval", "--out", str(out)])
    rows = sorted(
        Rows(out).values(), key=lambda row: int(shlex.split(row.command)[shlex.split(row.command).index("--seed") + 1])
    )
    return np.array([row.loss for row in rows])


def measured(out: Path) -> dict[str, Any]:
    """What the record has.

    Args:
        out: folder of all rows.
    """
    folder = {name: Path(words[-1]) for name, words in commands(out).items()}
    reference = [fit(one.curve, one.curve.first).optimum for one in settings(folder["grid of rates"])]
    sizes = json.loads((folder["frugal"] / "frugal.json").read_text())["studies"][0]["sizes"]
    rates = [
        {"size": size["size"], "grid": round(best, 3), "frugal": size["log2_optimum"], "runs": size["runs"]}
        for size, best in zip(sizes, reference, strict=True)
    ]
    grid, grid_runs = least(folder["grid of constants"])
    tuned, tune_runs = least(folder["tune"])
    ends = [fresh(words, out / name) for words, name in ((grid, "fresh-grid"), (tuned, "fresh-tune"))]
    mean, _, half = difference(list(ends[1] - ends[0]))
    return {
        "command": "python -m scripts.studies.search_cost",
        "frugal": {"ratio": round(cost(folder["frugal"]) / cost(folder["grid of rates"]), 4), "rates": rates},
        "tune": {
            "ratio": round(tune_runs / grid_runs, 4), "constants": len(CONSTANTS), "runs": tune_runs, "grid_runs": grid_runs,
            "grid_point": _changed(grid), "tune_point": _changed(tuned),
            "less_grid": [round(float(mean), 5), round(float(half), 5)], "seeds": FRESH,
        },
    }  # fmt: skip


def _changed(words: Sequence[str]) -> str:
    """The flags that the search set."""
    names = [f"--{name.replace('_', '-')}" for name in ("optimizer.peak_lr", "preset.constants")]
    return " ".join(words[i] for at, word in enumerate(words) if word in names for i in _upto(words, at))


def _upto(words: Sequence[str], at: int) -> range:
    after = (i for i in range(at + 1, len(words)) if words[i].startswith("--"))
    return range(at, next(after, len(words)))


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the record and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.studies.search_cost", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "search-cost", metavar="FOLDER", help="for the rows"
    )
    args = parser.parse_args(argv)
    for words in commands(args.out).values():
        train(words)
    disk.write_whole(OUT, json.dumps(measured(args.out), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
