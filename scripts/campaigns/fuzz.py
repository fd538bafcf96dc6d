"""Give thousands of broken files to every reader of files: none may crash, hang or fill the memory.

    python -m scripts.campaigns.fuzz [--inputs 12000] [--only NAME ...] [--again] [--page FILE]

Hypothesis draws how a file is broken, and makes a file that fails as small as it can before it is
shown. A broken file must be read, or refused by an error of this project, which is a message and an
exit code. Any other error counts as a traceback. A file may take `SECONDS` of processor time and
`MEMORY` more than the process had. Readers that the record has are left out.
"""

from __future__ import annotations

import faulthandler
import json
import math
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
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from mupax.command_line import Switch
from scripts import harness
from scripts.campaigns import PAGE
from scripts.pages.markdown import write_section

if TYPE_CHECKING:
    from scripts.campaigns.targets import Target

COMMAND = "python -m scripts.campaigns.fuzz"
SECONDS = 5.0
"""Processor time that one file may take, in seconds. A good file takes a hundredth."""
PATIENCE_S = 120
"""Seconds after which a reader that does not return ends the process with its traceback."""
MEMORY = 512 * 2**20
"""Bytes by which the process may grow at one file."""
LONGEST_MESSAGE = 2000
"""Largest number of characters in a refusal."""
COUNTS = ("inputs", "read", "refused", "tracebacks", "hangs", "large")
"""Fields of a reader's row that are counts. The page adds them up over all readers."""
_SETTINGS = settings(
    # A deadline counts wall time, which depends on what else the machine does.
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)


class TooSlow(AssertionError):
    """Error for a file that took more than `SECONDS`."""


class TooLarge(AssertionError):
    """Error for a file that took more than `MEMORY`."""


_COLUMNS: dict[type[Exception], str] = {TooSlow: "hangs", TooLarge: "large"}


def fed(name: str, inputs: int, folder: Path) -> dict[str, Any]:
    """Feed broken files to a reader until one fails. Print that failure, and return the counts.

    Args:
        name: Name of the reader, a key of `TARGETS`.
        inputs: Number of broken files that the reader gets if none fails.
        folder: Folder in which the reader's files get a subfolder.

    Returns:
        The counts of `COUNTS`, and the largest time `slowest_s` and memory growth `grown_mib` of
        one file.
    """
    from scripts.campaigns.targets import TARGETS

    target = TARGETS[name]
    place = folder / name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    file = target.make(place)
    content = file.read_bytes()
    # Read the good file first: what the reader imports and caches must not count for a broken one.
    target.read(place)
    row = {**dict.fromkeys(COUNTS, 0), "slowest_s": 0.0, "grown_mib": 0.0}

    @seed(name)
    @settings(_SETTINGS, max_examples=inputs)
    @given(st.sampled_from(target.broken), st.randoms(use_true_random=False))
    def is_read_or_refused(break_file: Any, draw: Random) -> None:
        # Some readers write as a resumed run does. Each input must find the good files again.
        if not file.parent.exists() or name in ("metrics.jsonl", "config.json of a run"):
            target.make(place)
        broken = break_file(content, draw)
        note(f"{name}, broken: {broken[:1000]!r}")
        file.write_bytes(broken)
        row["inputs"] += 1
        try:
            read_within_limits(target, place, row)
        finally:
            file.write_bytes(content)

    try:
        is_read_or_refused()
    except Exception as error:
        row[_COLUMNS.get(type(error), "tracebacks")] += 1
        traceback.print_exc()
    return row


def read_within_limits(target: Target, place: Path, row: dict[str, Any]) -> None:
    """Read a broken file, and add the result to a reader's counts.

    Args:
        row: Counts of the reader (see `fed`), which are changed.

    Raises:
        TooSlow: The reader took more than `SECONDS`.
        TooLarge: The process grew by more than `MEMORY`.
        AssertionError: The message of a refusal is longer than `LONGEST_MESSAGE`.
    """
    from mupax import MupaxError, MupaxFailure

    message = ""
    memory_before = peak_bytes()
    began = time.process_time()
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True, file=2)
    try:
        target.read(place)
        row["read"] += 1
    except (MupaxError, MupaxFailure) as error:
        row["refused"] += 1
        message = str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()

    assert len(message) <= LONGEST_MESSAGE
    seconds = time.process_time() - began
    grown = peak_bytes() - memory_before
    row["slowest_s"] = round(max(row["slowest_s"], seconds), 3)
    row["grown_mib"] = round(max(row["grown_mib"], grown / 2**20), 1)
    if seconds > SECONDS:
        raise TooSlow(f"{seconds:.1f} s")
    if grown > MEMORY:
        raise TooLarge(f"{grown / 2**20:.0f} MiB")


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    # Linux counts in KiB.
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return this campaign's Markdown section, with totals over all readers.

    Args:
        rows: Name of a reader to its counts (see `fed`).
    """
    total = dict.fromkeys(COUNTS, 0)
    slowest = 0.0
    largest = 0.0
    for row in rows.values():
        for key in COUNTS:
            total[key] += row[key]
        slowest = max(slowest, row["slowest_s"])
        largest = max(largest, row["grown_mib"])
    text = (
        f"{total['inputs']:,} files were broken at random. Each was given to one of {len(rows)} functions "
        "that read files for commands (listed in `fuzz.json`). It must read the file or refuse it "
        f"with a message. `{COMMAND}`"
    )
    lines = [
        f"- {total['read']:,} files were read, {total['refused']:,} refused. "
        f"There were {total['tracebacks']} tracebacks.",
        f"- {total['hangs']} files took more than {SECONDS:g} s of processor time "
        f"(slowest {slowest:.2f} s).",
        f"- {total['large']} files took more than {MEMORY // 2**20} MiB of memory "
        f"(most {largest:.0f} MiB).",
    ]
    return "\n".join(["## Broken files", "", text, "", *lines, ""])


def is_bad(row: dict[str, Any]) -> bool:
    """Return true if a reader failed at a file."""
    return bool(row["tracebacks"] or row["hangs"] or row["large"])


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    inputs: int = 12000
    """Number of broken files for all readers together."""
    only: tuple[str, ...] = ()
    """Names of the readers to feed. Default: all."""
    again: Switch = False
    """Forget what the record has."""
    page: Path = PAGE
    """Page to write. The record is `fuzz.json` in the same folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Feed the missing readers, and write the record and the page. Return 1 if a reader failed."""
    # NumPy and JAX read these variables when they are imported.
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    from scripts.campaigns.targets import TARGETS

    args = harness.parse(Options, argv)
    harness.check_names(args.only, TARGETS)
    path = args.page.with_name("fuzz.json")
    rows: dict[str, dict[str, Any]] = {}
    if path.exists() and not args.again:
        rows = json.loads(path.read_text())
    inputs = math.ceil(args.inputs / len(TARGETS))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MUPAX_DATA"] = f"{folder}/data"
        for name in args.only or tuple(TARGETS):
            if rows.get(name, {}).get("inputs", 0) < inputs:
                rows[name] = fed(name, inputs, Path(folder))
            path.write_text(json.dumps(rows, indent=1) + "\n")
    # The record may have readers that no longer exist.
    shown_rows = {}
    for name in TARGETS:
        if name in rows:
            shown_rows[name] = rows[name]
    write_section(args.page, "fuzz", page(shown_rows))
    return int(any(map(is_bad, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
