"""What a frugal study says: the best rate of every size and how sure it is, on the terminal and as frugal.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import disk, terminal
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.transfer import tuned
from mupax.train.studies.transfer.drift import analyse, finite
from mupax.train.studies.transfer.frugal import Frugal
from mupax.train.studies.transfer.study import Measured
from mupax.zoo import flops


def report(
    folder: Path, measured: Sequence[Measured], about: dict[str, Any], save: str | None, label: str, command: str
) -> int:
    """Print, write and save; 1 where a size has no best rate.

    Args:
        folder: for frugal.json.
        measured: studies that are over, frugal ones.
        about: what was trained, for the record.
        save: name of a tuned preset for the smallest size's rate.
        label: of the studies that it is of.
        command: that was written.
    """
    records = [_study(one) for one in measured if isinstance(one, Frugal)]
    for study in records:
        terminal.say(f"{study['preset']}, growing {study['axis']}: {study['stopped']}")
        rows = [["size", "best rate", "log2", "known to", "runs"]]
        rows += [
            [
                str(s["size"]),
                _rate(s["log2_optimum"]),
                *map(_number, (s["log2_optimum"], s["deviation"])),
                str(s["runs"]),
            ]
            for s in study["sizes"]
        ]
        print(terminal.table(rows, left=(), indent=1))
        terminal.say(f"  {study['cost']:.2f} of the training of five rates with {study['seeds']} seeds at every size")
    path = folder / "frugal.json"
    disk.write_whole(path, json.dumps({**about, "studies": records}, indent=1) + "\n")
    terminal.say(f"record in {path}; this search has no verdict on transfer, which --search grid gives")
    if save:
        judged = [(one, analyse(one.study.sizes[:1], [one.curve(0)])) for one in measured if one.study.label == label]
        written, use = tuned.save(save, label, judged[:1], command)
        terminal.say(tuned.saved_message(written, use))
    return int(any(size["log2_optimum"] is None for study in records for size in study["sizes"]))


def _study(one: Frugal) -> dict[str, Any]:
    study, (_, optima) = one.study, one.state()
    each = [flops.train_flops(c.model) * c.steps * c.data.batch_size for c in study.configs]
    counts = [sum(at == i for i, _, _ in one.rows) for at in range(len(each))]
    sizes = [
        {
            "size": size, "log2_optimum": finite(optimum.value), "deviation": finite(optimum.deviation),
            "curvature": finite(optimum.curvature), "in_full": optimum.full, "runs": count,
        }
        for size, optimum, count in zip(study.sizes, optima, counts, strict=False)
    ]  # fmt: skip
    return {
        "preset": study.label,
        "axis": study.axis,
        "stopped": one.stopped,
        "seeds": one.first,
        "cost": round(sum(n * cost for n, cost in zip(counts, each, strict=True)) / (5 * one.first * sum(each)), 4),
        "train_seconds": round(one.seconds, 1),
        "sizes": sizes,
    }


def _rate(log2: float | None) -> str:
    return "none" if log2 is None else power(2.0**log2)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
