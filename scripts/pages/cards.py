"""Table of the tuned presets that come with the project: writes docs/reference/tuned.md.

python -m scripts.pages.cards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mupax.presets.tuned import find
from mupax.presets.tuned.judgement import BOUND, TOLERANCE
from scripts import ROOT
from scripts.pages import published

PAGE = ROOT / "docs" / "reference" / "tuned.md"
HEAD = f"""# Tuned presets

A tuned preset holds the learning rate and the constants that were best at one size. `mupax train RECIPE --preset PRESET:NAME` uses it,
`mupax presets tuned PRESET:NAME` prints all that is known of it with the command that made it, and `--save-tuned` of `sweep`, `transfer`
and `tune` makes one of your own. A run far from the sizes that were measured prints a warning.

| verdict | the best learning rate as a size grows |
|---|---|
| transfers | drifts by at most ± {TOLERANCE:.2f} octaves a doubling, and the 95 % interval lies inside ± {BOUND:.2f} |
| drifts | drifts, and the 95 % interval lies wholly outside ± {TOLERANCE:.2f} |
| undecided | neither: sweep at one larger size before you rely on it |
| one size | was never tried at another size |

## Measured here

The rates are best on data of this project's own machine; they say nothing about other data. This page is made by
`python -m scripts.pages.cards` from the files in `presets/tuned/`. Other presets have numbers that [others published](#published).

| preset | verdict | learning rate, log2 [95 %] | base | measured on | drift, octaves a doubling [95 %] |
|---|---|---|---|---|---|"""
EVIDENCE_FOLDER = ROOT / "docs" / "evidence" / "tuned"
MOVED_HEAD = """## No longer shipped

These came with mupax once. Their names are refused for a new run; a run that one began goes on with its own command, or with
`mupax train --resume --workdir FOLDER`. `mupax presets tuned mup:docs/evidence/tuned/mup.vit-endless-v1.json` says everything about that
one, and once its file is copied into a folder `tuned` here its name works as before.

| preset | why | optimizer | rate | data |
|---|---|---|---|---|"""


def row(preset: find.Tuned) -> str:
    """Return the line of the table about one tuned preset."""
    study = preset.provenance
    optimizer = preset.optimizer
    optimum = study["log2_optimum"]

    rate = f"{optimizer['name']} {optimizer['peak_lr']:.4g}"
    interval = f"{optimum['value']:.2f} {_interval(optimum)}"
    runs = f"{study['steps']:,} steps of {study['batch']}, {study['seeds']} seeds"
    grown = [f"{axis['axis']} {_span(axis['sizes'])}: {_drift(axis)}" for axis in study["transfer"]]
    cells = [
        f"`{preset.use}`",
        preset.evidence,
        f"{rate}, {interval}",
        _sizes(preset.base) if preset.base else "none",
        f"`{study['recipe']}`, {study['data']}, {runs}",
        "; ".join(grown),
    ]
    return f"| {' | '.join(cells)} |"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def _span(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _drift(grown: Mapping[str, Any]) -> str:
    drift = grown["drift"]
    if drift["value"] is None:
        return "no drift could be fitted"
    return f"{drift['value']:+.2f} {_interval(drift)}"


def _interval(of: Mapping[str, float | None]) -> str:
    return (
        "(no interval)"
        if None in (of["low"], of["high"])
        else f"[{of['low']:.2f}, {of['high']:.2f}]"
    )


def page() -> str:
    """Return the text of the page."""
    shipped = [find.load(path) for path in sorted(find.FOLDER.glob("*.json"))]
    moved = [find.load(path) for path in sorted(EVIDENCE_FOLDER.glob("*.json"))]
    return "\n".join([HEAD, *map(row, shipped), "", *published.section(), *_moved(moved)])


def _moved(presets: Sequence[find.Tuned]) -> list[str]:
    """Return the lines about tuned presets whose files are kept as data alone."""
    rows = [
        f"| {tuned.use} | {find.MOVED[tuned.use]} | {tuned.optimizer['name']} | {tuned.optimizer['peak_lr']:.4g} | "
        f"`docs/evidence/tuned/{tuned.preset}.{tuned.name}.json` |"
        for tuned in presets
    ]
    return [MOVED_HEAD, *rows, ""]


def main() -> int:
    """Write the page, and return 0."""
    PAGE.write_text(page())
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
