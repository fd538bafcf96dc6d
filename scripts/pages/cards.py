"""Page of the tuned presets: writes docs/reference/tuned.md from the presets' files.

python -m scripts.pages.cards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mupax.presets.tuned import find
from mupax.presets.tuned.judgement import BOUND, TOLERANCE
from scripts import ROOT, harness
from scripts.pages import published

PAGE = ROOT / "docs" / "reference" / "tuned.md"
HEAD = f"""# Tuned presets

A tuned preset holds the learning rate and the constants that were best at one size, or that
[others published](#published). If a size of your model is more than three doublings from the studied
sizes, `mupax train` prints a warning.

```text
mupax train lm-tiny --preset mup:lm-python-v1
mupax presets tuned mup:lm-python-v1
```

The second command prints base sizes, evidence and the command that made the preset.
`--save-tuned NAME` of `sweep`, `transfer` and `tune` saves your own preset.

| verdict | drift of the best learning rate as a size grows |
|---|---|
| transfers | estimate within ± {TOLERANCE:.2f} octaves a doubling, 95 % interval inside ± {BOUND:.2f} |
| drifts | 95 % interval entirely above +{TOLERANCE:.2f} or entirely below -{TOLERANCE:.2f} |
| undecided | neither: sweep at one larger size before you rely on it |
| one size | never tried at another size |

## Measured here

Each learning rate was the best on the data of its row. On other data, another may be best.

| preset | verdict | optimizer, learning rate at the smallest size, log2 [95 %] | measured on | drift, octaves a doubling [95 %] |
|---|---|---|---|---|"""
EVIDENCE_FOLDER = ROOT / "docs" / "evidence" / "tuned"
"""Folder of tuned presets that no longer come with mupax."""
MOVED_HEAD = """## No longer shipped

A new run refuses these presets. A run that began with one continues with `--resume`. To use one
again, copy its file to a folder `tuned` where you run mupax.

| preset | why | optimizer | rate | file |
|---|---|---|---|---|"""


def row(preset: find.Tuned) -> str:
    """Return the table row of one tuned preset."""
    study = preset.provenance
    optimizer = preset.optimizer
    optimum = study["log2_optimum"]
    rate = f"{optimizer['name']} {optimizer['peak_lr']:.4g}"
    interval = f"{optimum['value']:.2f} {_interval(optimum)}"
    runs = f"{study['steps']:,} steps of batch {study['batch']}, {study['seeds']} seeds"
    grown = [f"{axis['axis']}={_span(axis['sizes'])}: {_drift(axis)}" for axis in study["transfer"]]
    cells = [
        f"`{preset.use}`",
        preset.evidence,
        f"{rate}, {interval}",
        f"`{study['recipe']}`, {study['data']}, {runs}",
        "; ".join(grown),
    ]
    return f"| {' | '.join(cells)} |"


def _span(sizes: list[int]) -> str:
    """Return sizes as `--grow` takes them, with commas between."""
    return ",".join(map(str, sizes))


def _drift(grown: Mapping[str, Any]) -> str:
    drift = grown["drift"]
    if drift["value"] is None:
        return "no drift could be fitted"
    return f"{drift['value']:+.2f} {_interval(drift)}"


def _interval(interval: Mapping[str, float | None]) -> str:
    low = interval["low"]
    high = interval["high"]
    if low is None or high is None:
        return "(no interval)"
    return f"[{low:.2f}, {high:.2f}]"


def page() -> str:
    """Return the text of docs/reference/tuned.md."""
    shipped = [find.load(path) for path in sorted(find.FOLDER.glob("*.json"))]
    moved = [find.load(path) for path in sorted(EVIDENCE_FOLDER.glob("*.json"))]
    return "\n".join([HEAD, *map(row, shipped), "", *published.section(), *_moved(moved)])


def _moved(presets: Sequence[find.Tuned]) -> list[str]:
    """Return the section about tuned presets that no longer come with mupax, as lines."""
    lines = [MOVED_HEAD]
    for tuned in presets:
        cells = [
            tuned.use,
            find.MOVED[tuned.use],
            tuned.optimizer["name"],
            f"{tuned.optimizer['peak_lr']:.4g}",
            f"`docs/evidence/tuned/{tuned.preset}.{tuned.name}.json`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> int:
    """Write the page and return 0."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    harness.refuse_words()
    raise SystemExit(main())
