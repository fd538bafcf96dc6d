"""Feeds every reader files that are broken at random: none may crash, hang or fill the memory. Writes docs/fuzz.{json,md}.

    python -m scripts.campaigns.fuzz [--inputs 12000] [--workers 2] [--again] [--page FILE]

A broken file must be read, or refused by an error of this project, which is a message and an exit code. What else is raised
counts as a traceback. Each file has `SECONDS` of processor time and `MEMORY` more than the process had. What the table has
counts; the rest is run. An input is known by its reader and number: `--only NAME --number N` shows one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.campaigns import workers
from scripts.pages.markdown import table

PAGE = ROOT / "docs" / "fuzz.md"
COMMAND = "python -m scripts.campaigns.fuzz"
SECONDS = 5.0
"""Processor time of one file at most; a good one takes a hundredth."""
PATIENCE_S = 120.0
"""Until a process that does not answer is ended."""
MEMORY = 512 * 2**20
"""How much larger a process may become at one file."""
AT_ONCE = 50
"""Inputs of one question to a worker."""


def outcomes(name: str, numbers: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """What became of these inputs of a target: read, refused, or what is wrong."""
    from mupax.errors import MupaxError, MupaxFailure
    from scripts.campaigns.targets import TARGETS

    target, results = TARGETS[name], []
    place = folder / name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    file = target.make(place)
    content = file.read_bytes()
    target.read(place)  # the good one; what it imports and caches is no input's
    for number in numbers:
        # Readers may write, as a run does that goes on; each input finds the good files but for the broken one.
        if not file.parent.exists() or name in ("metrics.jsonl", "config.json of a run"):
            target.make(place)
        broken = target.broken[number % len(target.broken)](content, random.Random(f"{name} {number}"))
        file.write_bytes(broken)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        outcome, message = "read", ""
        try:
            target.read(place)
        except (MupaxError, MupaxFailure) as error:
            outcome, message = "refused", str(error)
        except BaseException:
            outcome, message = "traceback", traceback.format_exc()[-1500:]
        seconds = time.process_time() - began
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if seconds > SECONDS:
            outcome, message = "slow", f"{seconds:.1f} s"
        elif grown > MEMORY:
            outcome, message = "large", f"{grown / 2**20:.0f} MiB"
        elif outcome == "refused" and len(message) > 2000:
            outcome, message = "traceback", f"a message of {len(message)} characters: {message[:200]}"
        results.append({"number": number, "outcome": outcome, "seconds": seconds, "grown": grown, "said": message})
        file.write_bytes(content)
    return results


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The text of docs/fuzz.md."""
    total = {
        key: sum(row[key] for row in rows.values())
        for key in ("inputs", "read", "refused", "tracebacks", "hangs", "large")
    }
    slowest, largest = (max(row[key] for row in rows.values()) for key in ("slowest_s", "grown_mib"))
    cells = [
        ["reader", "inputs", "read", "refused", "tracebacks", "hangs", "too much memory", "slowest", "most memory"]
    ]
    for name, row in rows.items():
        counts = [str(row[key]) for key in ("inputs", "read", "refused", "tracebacks", "hangs", "large")]
        cells.append([name, *counts, f"{row['slowest_s']:.2f} s", f"{row['grown_mib']:.0f} MiB"])
    return (
        f"# Broken files\n\nMade by `{COMMAND}`: {total['inputs']:,} files broken at random (bits, bytes, values of JSON, headers), "
        "each given to what reads it, as a command does. A file is read, or refused with a message: "
        f"{total['tracebacks']} tracebacks, {total['hangs']} files that took more than {SECONDS:g} s of processor time "
        f"(the slowest {slowest:.2f} s), {total['large']} that took more than {MEMORY // 2**20} MiB (the most {largest:.0f} MiB).\n\n"
        f"{table(cells)}\n"
    )


def counted(row: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table with these outcomes too."""
    keys = {"read": "read", "refused": "refused", "traceback": "tracebacks", "slow": "hangs", "large": "large"}
    row = {**dict.fromkeys(("inputs", *keys.values()), 0), "slowest_s": 0.0, "grown_mib": 0.0, **row}
    for one in results:
        row["inputs"] += 1
        row[keys[one["outcome"]]] += 1
        row["slowest_s"] = round(max(row["slowest_s"], one["seconds"]), 3)
        row["grown_mib"] = round(max(row["grown_mib"], one["grown"] / 2**20), 1)
    return row


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    inputs: int = 12000
    """Inputs of all readers together."""
    workers: int = 2
    """Processes."""
    only: tuple[str, ...] = ()
    """Readers."""
    number: int | None = None
    """Feed this one, and show what is said."""
    again: Switch = False
    """Forget what the table holds."""
    page: Path = PAGE
    """Write here, and the rows beside it."""
    worker: Path | None = None
    """Folder of a worker of this command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Feed what is missing, then write the page; 0 where nothing crashed, hung or filled the memory."""
    from scripts.campaigns.targets import TARGETS

    args = harness.parse(Options, argv)
    harness.check_names(args.only, TARGETS)
    names = args.only or tuple(TARGETS)
    if args.worker is not None:
        workers.serve(lambda question: outcomes(question[0], question[1], args.worker))
        return 0
    if args.number is not None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MUPAX_DATA"] = f"{folder}/data"
            print(json.dumps(outcomes(names[0], [args.number], Path(folder)), indent=1).replace("\\n", "\n"))
        return 0
    path = args.page.with_suffix(".json")
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() and not args.again else {}
    each, bad = -(-args.inputs // len(TARGETS)), 0
    questions = []
    for start in range(0, each, AT_ONCE):
        for name in names:
            if start >= rows.get(name, {}).get("inputs", 0):
                questions.append((name, list(range(start, min(each, start + AT_ONCE)))))
    with tempfile.TemporaryDirectory() as temporary:
        environ = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pool = [
            workers.Worker("scripts.campaigns.fuzz", folder, {**environ, "MUPAX_DATA": str(folder / "data")})
            for folder in (Path(temporary) / str(k) for k in range(args.workers))
        ]
        for (name, numbers), answer in workers.answers(pool, questions, PATIENCE_S):
            results = answer or [
                {"number": numbers[0], "outcome": "slow", "seconds": PATIENCE_S, "grown": 0, "said": "no answer"}
            ]
            for one in results:
                if one["outcome"] not in ("read", "refused"):
                    bad += 1
                    print(f"{name} {one['number']}: {one['outcome']}: {one['said']}", file=sys.stderr, flush=True)
            rows[name] = counted(rows.get(name, {}), results)
            rows = {name: rows[name] for name in TARGETS if name in rows}
            path.write_text(json.dumps(rows, indent=1) + "\n")
            args.page.write_text(page(rows))
    return int(any(row["tracebacks"] or row["hangs"] or row["large"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
