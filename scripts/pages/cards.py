"""A card of every tuned preset that comes with the project: writes docs/tuned.md.

python -m scripts.pages.cards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mupax import spellings
from mupax.presets.tuned import find
from mupax.presets.tuned.judgement import BOUND, TOLERANCE
from scripts import ROOT
from scripts.pages import published

PAGE = ROOT / "docs" / "tuned.md"
HEAD = f"""# Tuned presets

One card for each that comes with the project: what it gives a run, what it was measured on, and how far from there it was ever tried.
**transfers** and **drifts** are of the best learning rate as a size grows: a drift within ± {TOLERANCE:.2f} octaves a doubling whose 95 %
interval lies inside ± {BOUND:.2f}, and one whose interval lies wholly outside ± {TOLERANCE:.2f}; **undecided** is anything else,
**one size** a rate that was never tried on another. A run whose sizes lie beyond those measured prints a warning.
Numbers that others have published are [below](#published), and were not measured here.
Of what came with the project once, only [the data](#no-longer-shipped) are kept.
Losses are nats on data of this project's own machine, so they say which rate is best and nothing about other data.

Made by `python -m scripts.pages.cards` from `presets/tuned/`, `docs/evidence/*.json` and `scripts/pages/published.py`; yours are
made by `--save-tuned` of `sweep`, `transfer` and `tune`.
"""
EVIDENCE_FOLDER = ROOT / "docs" / "evidence"
MOVED_HEAD = """## No longer shipped

These came with mupax once. Their names are refused for a new run; a run that one began goes on with its own command, or with
`mupax train --resume --workdir FOLDER`. `mupax presets tuned mup:docs/evidence/mup.vit-endless-v1.json` says everything about that
one, and once its file is copied into a folder `tuned` here its name works as before.

| preset | why | optimizer | rate | data |
|---|---|---|---|---|"""
EVIDENCE = {
    "transfers": "The best rate was measured to stay where it is as the model grows.",
    "drifts": "The best rate was measured to move as the model grows: tune again before you rely on it at another size.",
    "undecided": "Whether the best rate stays as the model grows is not known: sweep at one larger size before you rely on it.",
    "one size": "Tuned at one size and never tried at another; what carries it over is the preset's rule.",
}
"""What `Tuned.evidence` means for who uses it."""


def card(preset: find.Tuned) -> list[str]:
    """Lines of one."""
    study, optimizer = preset.provenance, preset.optimizer
    optimum = study["log2_optimum"]
    constants = (
        " ".join(f"`{name}={value}`" for name, value in preset.constants.items())
        or "those of the preset"
    )
    lines = [
        f"## {preset.use}",
        "",
        f"**{preset.evidence.capitalize()}.** {EVIDENCE[preset.evidence]}",
        "",
    ]
    lines += ["```text", f"mupax train {study['recipe']} --preset {preset.use}", "```", ""]
    lines += [
        f"- Gives: {optimizer['name']} at {optimizer['peak_lr']:.4g}, {_decay(optimizer)}, schedule {optimizer['schedule']}; "
        f"constants {constants}.",
        f"- Base: {_sizes(preset.base) if preset.base else 'none'}.",
        f"- Measured on: `{study['recipe']}` with {study['data']}, {study['steps']:,} steps of batch {study['batch']}, "
        f"{study['seen']:,} {study['unit']}s a run, {study['seeds']} paired seeds.",
        f"- Best rate there: 2^{optimum['value']:.2f} {_interval(optimum)}, by {study.get('judged', 'training')} loss.",
        *(
            f"- Grown in {each['axis']}, {_span(each['sizes'])}: {_drift(each)}."
            for each in study["transfer"]
        ),
        *(
            f"- Searched: {each['word']} from {each['low']:.4g} to {each['high']:.4g}, {each['winner']:.4g} won "
            f"(importance {each['importance']:.0%})."
            for each in study.get("search", {}).get("constants", [])
        ),
    ]
    if "search" not in study:
        rates, losses = study["log2_lr"], study["loss"]
        lines += [
            "",
            f"| rate | {' | '.join(f'2^{rate:g}' for rate in rates)} |",
            "|---" * (len(rates) + 1) + "|",
        ]
        lines += [
            "| loss | " + " | ".join("diverged" if y is None else f"{y:.4f}" for y in losses) + " |"
        ]
    versions = ", ".join(f"{name} {version}" for name, version in study["versions"].items())
    return [
        *lines,
        "",
        "```text",
        spellings.current(study["command"]),
        "```",
        "",
        f"{study['date']}; {versions}.",
        "",
    ]


def _decay(optimizer: Mapping[str, Any]) -> str:
    if not optimizer["weight_decay"]:
        return "no weight decay"
    return f"{optimizer['decay']} weight decay {optimizer['weight_decay']:g}"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def _span(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _drift(grown: Mapping[str, Any]) -> str:
    drift = grown["drift"]
    if drift["value"] is None:
        return "no drift could be fitted"
    return f"{drift['value']:+.2f} {_interval(drift)} octaves a doubling"


def _interval(of: Mapping[str, float | None]) -> str:
    return (
        "(no interval)"
        if None in (of["low"], of["high"])
        else f"[{of['low']:.2f}, {of['high']:.2f}]"
    )


def page() -> str:
    """The page's text: cards by name, after a table of them."""
    shipped = [find.load(path) for path in sorted(find.FOLDER.glob("*.json"))]
    rows = [
        f"| [{each.use}](#{each.use.replace(':', '')}) | {each.evidence} | {each.optimizer['name']} | "
        f"{each.optimizer['peak_lr']:.4g} | {each.provenance['data']} |"
        for each in shipped
    ]
    moved = [find.load(path) for path in sorted(EVIDENCE_FOLDER.glob("*.json"))]
    table = ["| preset | evidence | optimizer | rate | data |", "|---|---|---|---|---|", *rows, ""]
    cards: list[str] = []
    for tuned in shipped:
        cards += card(tuned)
    return "\n".join([HEAD, *table, *cards, *published.section(), *_moved(moved)])


def _moved(presets: Sequence[find.Tuned]) -> list[str]:
    """Return the lines about tuned presets whose files are kept as data alone."""
    rows = [
        f"| {tuned.use} | {find.MOVED[tuned.use]} | {tuned.optimizer['name']} | {tuned.optimizer['peak_lr']:.4g} | "
        f"`docs/evidence/{tuned.preset}.{tuned.name}.json` |"
        for tuned in presets
    ]
    return [MOVED_HEAD, *rows, ""]


def main() -> int:
    """Writes the page; 0."""
    PAGE.write_text(page())
    print(f"wrote docs/{PAGE.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
