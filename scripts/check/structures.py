"""Every right preset on every structure, and every wrong table, by the coordinate check: writes docs/evidence/structures.json and .md.

    python -m scripts.check.structures [--models "lm" ...] [--grow heads ...] [--again]

Right ones are trained, a series of models at a time, and the file is written after each; what it holds is not run again unless
asked for. Presets that give a series the same numbers are trained once. Wrong tables are judged by theory: nothing is trained.
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
from scripts.check.campaign import RIGHT
from scripts.check.wrong_tables import MODELS, WRONG
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("structures.json")
COMMAND = "python -m scripts.check.structures"
SIZES, SEEDS, STEPS = 3, 3, 3
"""As `mupax check --sizes 3 --seeds 3`, but three steps of its ten: the others cost the most."""


def right(name: str, smallest: Definition) -> Preset:
    """A preset relative to the smallest model; absolute where it has no base."""
    base = {
        axis: smallest.sizes[axis]
        for axis in ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers")
    }
    return presets.get(name, base=None if presets.get(name).baseless else base)


def accepted(preset: Preset) -> tuple[str, ...]:
    """What its source wants and has to be asked for."""
    return (theory.LAZY,) if "features" in preset.vanishing else ()


def troubles(
    preset: Preset,
    ends: tuple[Definition, Definition],
    optimizer: str = "adam",
    accept: tuple[str, ...] = (),
) -> dict[str, str]:
    """Observable and step to what is wrong with a table, by theory."""
    expected = theory.of(preset, *ends, optimizer, accept=accept)
    return {f"{name} @{step}": one.trouble for (name, step), one in expected.items() if one.trouble}


def measure(model: str, grow: str) -> list[dict[str, Any]]:
    """A row per right preset: the verdicts, how many observables, and what failed."""
    grown = check.grow(MODELS[model], grow, SIZES)
    definitions = [definition(one) for one in grown]
    adam = OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )
    series, rows = check.Series(definitions, adam, STEPS), []
    for name in RIGHT[grow]:
        if name == "u-mup" and "tied" in model:
            continue  # it has no rule for one
        preset = right(name, definitions[0])
        expected = theory.of(
            preset, definitions[0], definitions[-1], "adam", accept=accepted(preset)
        )
        measured = series.measure(preset, check.batch(grown[0]), SEEDS)
        findings = check.judge(measured, [2.0**i for i in range(SIZES)], expected)
        unsaid = groups.not_judged(definitions[0].specs, expected)
        row = report.to_json(
            findings,
            {"model": model, "grow": grow, "preset": name, "accept": list(accepted(preset))},
            unsaid,
        )
        row["failed"] = [
            f"{o['observable']} @{o['step']} {o['verdict']} ({o['slope']:+.2f}, theory {o['predicted']:+.2f})"
            for o in row["observables"] if not o["ok"]
        ]  # fmt: skip
        row["observables"] = len(row["observables"])
        rows.append(row)
        print(model, grow, name, report.verdict_line(findings, unsaid), flush=True)
    return rows


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    models: tuple[str, ...] = tuple(MODELS)
    grow: tuple[str, ...] = tuple(RIGHT)
    again: Switch = False
    """Measure what the file holds once more."""


def main() -> None:
    """Measure what the file does not hold, then write the page."""
    args = harness.parse(Options)
    harness.check_names(args.models, list(MODELS))
    harness.check_names(args.grow, list(RIGHT))
    rows = rows_of_file()
    for grow in args.grow:
        for model in args.models:
            if args.again or not any((row["model"], row["grow"]) == (model, grow) for row in rows):
                rows = [
                    row for row in rows if (row["model"], row["grow"]) != (model, grow)
                ] + measure(model, grow)
                RECORD.write_text(
                    harness.with_rows(
                        {"command": COMMAND, "versions": harness.versions()}, "rows", rows
                    )
                )
    write_section(PAGE, "structures", markdown(rows))


def rows_of_file() -> list[dict[str, Any]]:
    """What was measured."""
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
        f"Right presets under Adam: {SIZES} sizes, each twice the one before, {SEEDS} seeds, {STEPS} steps.",
        f"The {len(MODELS)} models are `lm-proxy` (SwiGLU, rotary positions, no biases), `vit-proxy` (GELU, learned",
        "positions, biases) and each with one change: QK-norm, GQA, another activation, biases or none, a",
        "tied readout (for which `u-mup` has no rule). `ntk` and `hybrid` are compared with the lazy limit",
        f"of their papers (`--accept lazy`). `{COMMAND}` makes these",
        "sections; `structures.json` has a row for each check.",
        "",
        f"Of {len(rows)} checks **{passed}** pass.",
        "",
        "| growing | presets | pass |",
        "|---|---|---|",
    ]
    for grow, presets_of_growth in RIGHT.items():
        checks = [row for row in rows if row["grow"] == grow]
        good = sum(row["verdict"] == "pass" for row in checks)
        names = ", ".join(f"`{name}`" for name in presets_of_growth)
        lines.append(f"| {grow} | {names} | {good} of {len(checks)} |")

    failed = []
    for row in rows:
        if row["failed"]:
            reasons = "; ".join(row["failed"])
            failed.append(f"- {row['model']}, {row['grow']}, `{row['preset']}`: {reasons}")
    if failed:
        lines += ["", "Failed:", "", *failed]
    return lines


def _wrong_tables() -> list[str]:
    """Return the section that lists every wrong table by the verdict that it must get."""
    lines = [
        "## Wrong tables",
        "",
        "Each table is `depth-mup` with one mistake. Theory is derived from the wrong table itself, nothing",
        "is trained, and the check's second verdict must name the role that has the mistake. All",
        f"{len(WRONG)} are named. `scripts/check/wrong_tables.py` has the model and the observable of each.",
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
