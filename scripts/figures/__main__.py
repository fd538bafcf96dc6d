"""Measure and draw the papers' figures, and write docs/evidence/reproduction.md from their records.

    python -m scripts.figures [NAME ...] [--full] [--out FOLDER] [--again] [--render] [--list]

Every figure leaves NAME.json (settings, numbers, rows with their verdicts) and NAME.png. With
`--full`, which has the paper's sizes, the files are named NAME-full. A figure whose record has the
same settings is only drawn again.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from mupax import MupaxError
from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.figures import page

OUT = ROOT / "docs" / "evidence" / "figures"
"""Default folder of records and pictures."""
WORK = Path("runs") / "figures"
"""Parent of the folders in which figures keep unfinished work, relative to the current folder."""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    names: Positional[tuple[str, ...]] = ()
    """Figures to measure; all by default."""
    full: Switch = False
    """Measure the paper's sizes, which takes hours on an accelerator."""
    out: Path = OUT
    """Folder of the records and pictures."""
    again: Switch = False
    """Measure even figures whose record has the same settings."""
    render: Switch = False
    """Measure nothing: draw the records and write the page."""
    list: Switch = False
    """Print the figures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Bad input, such as a damaged row of an earlier run, ends the process with code 2.
    """
    figure_names = page.names()
    args = harness.parse(Options, argv)
    harness.check_names(args.names, figure_names, "figure")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or figure_names:
        if args.list:
            is_measured = (args.out / f"{name}.json").exists()
            suffix = "" if is_measured else " (not measured yet)"
            print(f"{name:16} {page.load(name).title}{suffix}")
        else:
            try:
                _run(name, args)
            except MupaxError as error:
                # Such as runs in WORK that are damaged, or that another process trains.
                harness.refuse(str(error))
    if not args.list:
        document = args.out.parent / "reproduction.md"
        document.write_text(page.text(args.out))
        print(f"wrote {document}")
    return 0


def _run(name: str, args: Options) -> None:
    """Measure a figure unless its record has the same settings, draw it, and print its rows.

    Args:
        name: Name of the figure's module, such as `fig4`.
    """
    from scripts.figures import result

    figure = page.load(name)
    settings = figure.full if args.full else figure.small
    stem = args.out / (f"{name}-full" if args.full else name)
    path = stem.with_suffix(".json")
    record = None
    if path.exists():
        stored = result.load(path)
        if result.same_settings(stored, settings):
            record = stored
    if record is None and args.render:
        print(f"{stem.name}: nothing measured with these settings")
        return

    if record is not None and not args.again:
        about = {key: record[key] for key in ("command", "versions", "seconds")}
        data = record["data"]
    else:
        work = WORK / stem.name
        work.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        data = figure.measure(settings, work)
        command = f"python -m scripts.figures {name}" + (" --full" if args.full else "")
        seconds = round(time.process_time() - started)
        if record is not None and figure.keeps_runs:
            # Runs that were finished before take no time now, so the first measurement's counts.
            seconds = max(seconds, record["seconds"])
        about = {"command": command, "versions": _versions(), "seconds": seconds}

    record = result.record(figure, settings, data, **about)
    result.save(path, record)
    figure.draw(record["settings"], record["data"]).savefig(stem.with_suffix(".png"))
    print(f"{stem.name}: {figure.title} ({about['seconds']} s of CPU)", flush=True)
    for row in record["rows"]:
        print(f"  {page.sentence(row)}", flush=True)


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the numbers depend on."""
    from importlib.metadata import version

    versions = {"python": platform.python_version()}
    for name in ("jax", "flax", "numpy"):
        versions[name] = version(name)
    return versions


if __name__ == "__main__":
    sys.exit(main())
