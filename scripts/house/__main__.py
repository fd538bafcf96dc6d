"""Record what mupax does today, or compare this checkout with such a record.

    python -m scripts.house record OUT [--only SECTION ...]
    python -m scripts.house compare OUT [--only SECTION ...]

`record` writes OUT/SECTION.json. `compare` measures this checkout, prints every difference, and
exits with 1 if there is one. Sections, with minutes on two cores: inventory (1), tables (1), losses
(2), losses-8 (2), programs (4), compiled (1), tpu (8; needs `make tpu` once), outputs (3), sizes
(1), traces (2). A record is valid for the machine and the versions that made it: XLA chooses
kernels by the processor, so losses and compiled programs of two machines may differ. Programs of
checkouts before 4326352f differ in all cases, because metrics were not yet computed from statistics
of tokens. `python -m scripts.house.mutants` is a separate command, because it takes hours.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tyro.conf import Positional

from mupax import disk
from scripts import ROOT, harness


class Section(NamedTuple):
    """Part of the record of what mupax does, measured in a process of its own.

    Attributes:
        module: Module of this folder, with a function `record() -> dict`.
        devices: Number of CPU devices that the process sees; more than one are virtual.
    """

    module: str
    devices: int = 1


SECTIONS = {
    "inventory": Section("inventory"),
    "tables": Section("tables"),
    "losses": Section("losses"),
    "losses-8": Section("losses", devices=8),
    "programs": Section("programs", devices=8),
    "compiled": Section("compiled", devices=8),
    "tpu": Section("tpu", devices=8),
    "outputs": Section("outputs"),
    "sizes": Section("sizes"),
    "traces": Section("traces"),
}
"""Name of a section to its module and number of devices, in the order of measuring."""
LIBTPU = ROOT / ".cache" / "libtpu"
"""Folder in which `make tpu` puts the TPU compiler, in a subfolder with the environment's name."""
SHOWN = 20
"""Largest number of differences that are printed for a section."""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    command: Positional[Literal["record", "compare", "section"]]
    """record, compare, or section: measure one section in this process."""
    out: Positional[Path]
    """Folder of the record; for `section`: file to write."""
    only: tuple[str, ...] = tuple(SECTIONS)
    """Sections to measure; all by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `record`, `compare` or `section`, and return the exit code."""
    args = harness.parse(Options, argv)
    harness.check_names(args.only, SECTIONS)
    if args.command == "section":
        (name,) = args.only
        module = importlib.import_module(f"scripts.house.{SECTIONS[name].module}")
        args.out.write_text(json.dumps(module.record(), sort_keys=True))
        return 0
    if args.command == "record":
        return record(args.out, args.only)
    return compare(args.out, args.only)


def record(out: Path, sections: Sequence[str]) -> int:
    """Measure sections, write OUT/SECTION.json for each, and return 0."""
    out.mkdir(parents=True, exist_ok=True)
    for name in sections:
        values = measured(name)
        disk.write_whole(out / f"{name}.json", json.dumps(values, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {sum(1 for _ in leaves(values)):,} values recorded", flush=True)
    return 0


def compare(out: Path, sections: Sequence[str]) -> int:
    """Measure sections, print their differences from the record, and return 1 if there are any."""
    changed = 0
    for name in sections:
        path = out / f"{name}.json"
        if not path.is_file():
            print(
                f"{name}: not recorded in {out}; write "
                f"`python -m scripts.house record {out} --only {name}` in the older checkout"
            )
            changed += 1
            continue
        lines = list(differences(json.loads(path.read_text()), measured(name)))
        for line in lines[:SHOWN]:
            print(f"{name}: {line}")
        if len(lines) > SHOWN:
            print(f"{name}: and {len(lines) - SHOWN:,} more")
        outcome = f"{len(lines):,} differences" if lines else "as recorded"
        print(f"{name}: {outcome}", flush=True)
        changed += len(lines)
    return int(changed > 0)


def measured(name: str) -> dict[str, Any]:
    """Measure one section of this checkout in a new process, and return its values.

    Raises:
        SystemExit: The section failed; its reason is on standard error.
    """
    paths = [str(ROOT)]
    # Without `make tpu` there is no such folder.
    for folder in LIBTPU.glob(Path(sys.prefix).name):
        paths.append(str(folder))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if SECTIONS[name].devices > 1:
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={SECTIONS[name].devices}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.json"
        words = [sys.executable, "-m", "scripts.house", "section", str(path), "--only", name]
        # What the section prints is not part of the comparison on standard output.
        finished = subprocess.run(words, cwd=ROOT, env=environment, stdout=sys.stderr)
        if finished.returncode:
            raise SystemExit(f"error: section {name} failed; the reason stands above")
        return json.loads(path.read_text())


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested dicts: its keys joined by `/`, and its value."""
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from leaves(value, f"{prefix}/{key}" if prefix else key)


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each value of a section that was removed, added or changed.

    Lists of strings are compared as sets: there is a line for each string that is gone or new.

    Args:
        before: Values of a section in the record, as nested dicts.
        now: Values of the section in this checkout.
    """
    old = dict(leaves(before))
    new = dict(leaves(now))
    for path in sorted(old.keys() - new.keys()):
        yield f"{path}: removed, was {_short(old[path])}"
    for path in sorted(new.keys() - old.keys()):
        yield f"{path}: new, {_short(new[path])}"
    for path in sorted(old.keys() & new.keys()):
        was = old[path]
        value = new[path]
        if was == value:
            continue
        if _names(was) and _names(value):
            for name in sorted(set(was) - set(value)):
                yield f"{path}: removed {name}"
            for name in sorted(set(value) - set(was)):
                yield f"{path}: new {name}"
            if set(was) == set(value):
                yield f"{path}: in another order"
        else:
            yield f"{path}: {_short(was)} -> {_short(value)}"


def _names(value: Any) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _short(value: Any) -> str:
    """Return a value as JSON, cut to 80 characters."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


if __name__ == "__main__":
    sys.exit(main())
