"""Broken files, thousands of them, to everything that reads files of others: none may crash, hang or fill the memory.

    python -m scripts.campaigns.fuzz [--inputs 12000] [--only NAME ...] [--again] [--page FILE]

Hypothesis draws how a file is broken, and makes what fails as small as it can before it is shown. A broken file must be
read, or refused by an error of this project, which is a message and an exit code. What else is raised counts as a traceback.
Each file has `SECONDS` of processor time and `MEMORY` more than the process had. Readers that the table has are left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE
from scripts.pages.markdown import write_section

COMMAND = "python -m scripts.campaigns.fuzz"
SECONDS = 5.0
"""Processor time of one file at most; a good one takes a hundredth."""
PATIENCE_S = 120
"""Seconds until a reader that does not come back ends the process, with its traceback."""
MEMORY = 512 * 2**20
"""How much larger a process may become at one file."""
LONGEST_MESSAGE = 2000
COUNTS = ("inputs", "read", "refused", "tracebacks", "hangs", "large")
_SETTINGS = settings(
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)


class TooSlow(AssertionError):
    """A file that took more than `SECONDS`."""


class TooLarge(AssertionError):
    """A file that took more than `MEMORY`."""


_COLUMNS: dict[type[Exception], str] = {TooSlow: "hangs", TooLarge: "large"}


def fed(name: str, inputs: int, folder: Path) -> dict[str, Any]:
    """Feed broken files to a reader until one fails. Print that failure, and return the row of the table.

    Args:
        name: key of `TARGETS`.
        inputs: files at most.
        folder: for the files.
    """
    from mupax.errors import MupaxError, MupaxFailure
    from scripts.campaigns.targets import TARGETS

    target = TARGETS[name]
    place = folder / name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    file = target.make(place)
    content = file.read_bytes()
    target.read(place)  # the good one; what it imports and caches is no input's
    row = {**dict.fromkeys(COUNTS, 0), "slowest_s": 0.0, "grown_mib": 0.0}

    @seed(name)
    @settings(_SETTINGS, max_examples=inputs)
    @given(st.sampled_from(target.broken), st.randoms(use_true_random=False))
    def is_read_or_refused(break_file: Any, draw: Random) -> None:
        # Readers may write, as a run does that goes on; each input finds the good files but for the broken one.
        if not file.parent.exists() or name in ("metrics.jsonl", "config.json of a run"):
            target.make(place)
        broken = break_file(content, draw)
        note(f"{name}, broken: {broken[:1000]!r}")
        file.write_bytes(broken)
        row["inputs"] += 1
        message = ""
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=2)
        try:
            target.read(place)
            row["read"] += 1
        except (MupaxError, MupaxFailure) as error:
            row["refused"] += 1
            message = str(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            file.write_bytes(content)
        assert len(message) <= LONGEST_MESSAGE
        seconds = time.process_time() - began
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        row["slowest_s"] = round(max(row["slowest_s"], seconds), 3)
        row["grown_mib"] = round(max(row["grown_mib"], grown / 2**20), 1)
        if seconds > SECONDS:
            raise TooSlow(f"{seconds:.1f} s")
        if grown > MEMORY:
            raise TooLarge(f"{grown / 2**20:.0f} MiB")

    try:
        is_read_or_refused()
    except Exception as error:
        row[_COLUMNS.get(type(error), "tracebacks")] += 1
        traceback.print_exc()
    return row


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the section of the page.

    Args:
        rows: Counts of each reader, by its name.
    """
    total = {key: sum(row[key] for row in rows.values()) for key in COUNTS}
    slowest = max(row["slowest_s"] for row in rows.values())
    largest = max(row["grown_mib"] for row in rows.values())
    text = (
        f"{total['inputs']:,} files were broken at random (bits, bytes, values of JSON, headers) and read "
        f"as a command reads them. A file must be read or refused with a message. `{COMMAND}`"
    )
    lines = [
        f"- readers: {', '.join(rows)}",
        f"- read {total['read']:,}, refused {total['refused']:,}, tracebacks {total['tracebacks']}",
        f"- more than {SECONDS:g} s of processor time: {total['hangs']} (the slowest {slowest:.2f} s)",
        f"- more than {MEMORY // 2**20} MiB: {total['large']} (the most {largest:.0f} MiB)",
    ]
    return "\n".join(["## Broken files", "", text, "", *lines, ""])


def is_bad(row: dict[str, Any]) -> bool:
    """Return whether a reader failed."""
    return bool(row["tracebacks"] or row["hangs"] or row["large"])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    inputs: int = 12000
    """Inputs of all readers together."""
    only: tuple[str, ...] = ()
    """Readers."""
    again: Switch = False
    """Forget what the table holds."""
    page: Path = PAGE
    """Write here, and the rows beside it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Feed the readers that are missing, then write the page; 0 where nothing crashed, hung or filled the memory."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    from scripts.campaigns.targets import TARGETS

    args = harness.parse(Options, argv)
    harness.check_names(args.only, TARGETS)
    path = args.page.with_name("fuzz.json")
    rows: dict[str, dict[str, Any]] = (
        json.loads(path.read_text()) if path.exists() and not args.again else {}
    )
    inputs = -(-args.inputs // len(TARGETS))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MUPAX_DATA"] = f"{folder}/data"
        for name in args.only or tuple(TARGETS):
            if rows.get(name, {}).get("inputs", 0) < inputs:
                rows[name] = fed(name, inputs, Path(folder))
            path.write_text(json.dumps(rows, indent=1) + "\n")
    write_section(args.page, "fuzz", page({name: rows[name] for name in TARGETS if name in rows}))
    return int(any(map(is_bad, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
