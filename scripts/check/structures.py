"""Check every right preset on every structure, and list the wrong tables.

    python -m scripts.check.structures [--models "lm" ...] [--grow heads ...] [--again]

Writes docs/evidence/structures.json and its sections of the page. Right presets are trained, one
series of growing models at a time, and the record is written after each series. A series that the
record holds is not trained again without `--again`. Presets that give a series the same values are
trained once. Wrong tables are judged by theory, without training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mupax import presets
from mupax.command_line import Switch
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, groups, report, theory
from mupax.zoo.definition import Definition, definition
from scripts import harness
from scripts.check import PAGE, campaign, untold
from scripts.check.campaign import RIGHT, accepted
from scripts.check.wrong_tables import MODELS, WRONG
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("structures.json")
COMMAND = "python -m scripts.check.structures"
SIZES = 3
SEEDS = 3
STEPS = 3
"""Sizes and seeds of `mupax check --sizes 3 --seeds 3`, but three steps in place of ten."""

BASE_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers")
"""Axes whose sizes in the smallest model are the base of a preset."""


def right(name: str, smallest: Definition) -> Preset:
    """Return a preset whose base is the smallest model, or without a base if it takes none."""
    if presets.get(name).baseless:
        return presets.get(name, base=None)
    return presets.get(name, base={axis: smallest.sizes[axis] for axis in BASE_AXES})


def troubles(
    preset: Preset,
    ends: tuple[Definition, Definition],
    optimizer: str = "adam",
    accept: tuple[str, ...] = (),
) -> dict[str, str]:
    """Return what theory alone finds wrong with a preset's table of rules.

    Args:
        ends: Smallest and largest model of the series.
        accept: Verdicts that count as right, such as `theory.LAZY`.

    Returns:
        Verdict, such as "explodes", by "OBSERVABLE @STEP".
    """
    expected = theory.of(preset, *ends, optimizer, accept=accept)
    words = {}
    for (name, step), expectation in expected.items():
        if expectation.trouble:
            words[f"{name} @{step}"] = expectation.trouble
    return words


def measure(model: str, grow: str) -> list[dict[str, Any]]:
    """Train every right preset on one series of models and return one row of the record per preset.

    Args:
        model: Key of `MODELS`.
        grow: Key of `RIGHT`, the size that grows.
    """
    grown = check.grow(MODELS[model], grow, SIZES)
    definitions = [definition(config) for config in grown]
    adam = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    series = check.Series(definitions, adam, STEPS)
    sizes = [2.0**count for count in range(SIZES)]

    rows = []
    for name in RIGHT[grow]:
        if name == "u-mup" and "tied" in model:
            continue  # u-mup has no rule for a tied readout

        preset = right(name, definitions[0])
        accept = accepted(preset, (definitions[0], definitions[-1]))
        expected = theory.of(preset, definitions[0], definitions[-1], "adam", accept=accept)
        rate = check.peak_lr("adam", expected)
        findings = check.measure_and_judge(
            series, preset, check.batch(grown[0]), SEEDS, sizes, expected, peak_lr=rate
        )
        unjudged = groups.not_judged(definitions[0].specs, expected)

        facts = {"model": model, "grow": grow, "preset": name, "accept": list(accept)}
        row = report.to_json(findings, facts, unjudged)
        row["failed"] = [_failure(o) for o in row["observables"] if not o["ok"]]
        row["observables"] = len(row["observables"])
        rows.append(row)
        print(model, grow, name, report.plain(report.verdict_line(findings, unjudged)), flush=True)
    return rows


def _failure(observable: dict[str, Any]) -> str:
    slopes = f"({observable['slope']:+.2f}, theory {observable['predicted']:+.2f})"
    return f"{observable['observable']} @{observable['step']} {observable['verdict']} {slopes}"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models to train."""
    grow: tuple[str, ...] = tuple(RIGHT)
    """Sizes to grow."""
    again: Switch = False
    """Train series that the record holds once more."""


def main() -> None:
    """Train the series that the record does not hold, then write the page."""
    args = harness.parse(Options)
    harness.check_names(args.models, list(MODELS))
    harness.check_names(args.grow, list(RIGHT))
    rows = rows_of_file()
    for grow in args.grow:
        for model in args.models:
            remaining = [row for row in rows if (row["model"], row["grow"]) != (model, grow)]
            if len(remaining) < len(rows) and not args.again:
                continue
            rows = remaining + measure(model, grow)
            facts = {"command": COMMAND, "versions": harness.versions()}
            RECORD.write_text(harness.with_rows(facts, "rows", rows))
    write_section(PAGE, "structures", markdown(rows))


def rows_of_file() -> list[dict[str, Any]]:
    """Return the rows of the record, or an empty list if there is no record."""
    return harness.read_rows(RECORD, "rows")


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the page's sections on right presets, other vocabularies and wrong tables.

    Args:
        rows: Rows of `structures.json`, one per model, grown size and preset.
    """
    lines = [
        *_right_presets(rows),
        "",
        *campaign.lines(),
        "",
        *_wrong_tables(),
        "",
        *untold.lines(),
    ]
    return "\n".join(lines) + "\n"


def _right_presets(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section that counts the right presets that pass, and lists those that fail."""
    passed = sum(row["verdict"] == "pass" for row in rows)
    lines = [
        "## Right presets",
        "",
        f"{len(MODELS)} models take {STEPS} steps of Adam with {SEEDS} seeds at {SIZES} sizes, each",
        "twice the one before. They are `lm-proxy`, `vit-proxy` and variants with one change each:",
        "QK-norm, GQA, the other model's activation, biases added (with LayerNorm) or removed, a tied readout.",
        "",
        f"{_lazy(rows)} run with `--accept lazy`, because their papers let features move",
        f"less as the model grows. `{COMMAND}`",
        "writes this section, the next two and `structures.json`.",
        "",
        f"**{passed}** of {len(rows)} checks pass.",
        "",
        "| growing | presets | pass |",
        "|---|---|---|",
    ]
    for grow, presets_of_growth in RIGHT.items():
        total = 0
        good = 0
        for row in rows:
            if row["grow"] == grow:
                total += 1
                good += row["verdict"] == "pass"
        names = ", ".join(f"`{name}`" for name in presets_of_growth)
        lines.append(f"| {grow} | {names} | {good} of {total} |")

    failed = []
    for row in rows:
        if row["failed"]:
            reasons = "; ".join(row["failed"])
            failed.append(f"- {row['model']}, {row['grow']}, `{row['preset']}`: {reasons}")
    if failed:
        lines += ["", "Failed:", "", *failed]
    return lines


def _lazy(rows: list[dict[str, Any]]) -> str:
    """Return the names of the presets that were checked with `--accept lazy`."""
    presets_of_rows = dict.fromkeys(row["preset"] for row in rows if theory.LAZY in row["accept"])
    names = [f"`{name}`" for name in presets_of_rows] or ["no presets"]
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _wrong_tables() -> list[str]:
    """Return the section that lists every wrong table by the verdict that it must get."""
    lines = [
        "## Wrong tables",
        "",
        "A wrong table is `depth-mup` with a mistake in the rules of some parameters. For each of",
        f"{len(WRONG)} mistakes, theory alone finds a fault in a wrong parameter's initial size, first step",
        "or gradient. *Frozen* means that the step shrinks as the model grows, *lazy* that features move",
        "less, *eps dominates* (*fades*) that Adam's eps grows (shrinks) against the gradient.",
        "",
        "m is the width and G the number of key heads, relative to the smallest model. *rate/m* is a",
        "learning rate m times too small. *embed*, *mlp* and *memory* are the widths of the model, its",
        "MLPs and its encoder.",
        "",
        "| verdict | mistakes |",
        "|---|---|",
    ]
    by_verdict: dict[str, list[str]] = {}
    for name, mistake in WRONG.items():
        by_verdict.setdefault(mistake.word, []).append(name)
    for verdict, names in sorted(by_verdict.items()):
        lines.append(f"| {verdict} | {'; '.join(names)} |")
    return lines


if __name__ == "__main__":
    main()
