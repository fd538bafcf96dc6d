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
    """Return the section of the page."""
    passed = sum(row["verdict"] == "pass" for row in rows)
    lines = [
        "## Right presets",
        "",
        "The check of right presets under Adam on `lm-proxy`, `vit-proxy` and each with one thing changed:",
        f"{SIZES} sizes from the smallest, each twice the one before, {SEEDS} seeds, {STEPS} steps. lm-proxy has SwiGLU, rotary positions",
        "and no biases; vit-proxy has GELU, learned positions and biases. `ntk` and `hybrid` are judged against the lazy limit that their",
        f"source wants (`--accept lazy`). `{COMMAND}`; `structures.json` has every observable.",
        "",
        f"Of {len(rows)} checks **{passed}** pass. A cell counts the presets that pass.",
        "",
        f"| model | {' | '.join(f'growing {grow}' for grow in RIGHT)} |",
        f"|---|{'---|' * len(RIGHT)}",
    ]
    for model in MODELS:
        cells = []
        for grow in RIGHT:
            own = [row for row in rows if (row["model"], row["grow"]) == (model, grow)]
            good = sum(row["verdict"] == "pass" for row in own)
            cells.append(f"{good} of {len(own)}")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    failed = [
        f"- {row['model']}, {row['grow']}, `{row['preset']}`: {'; '.join(row['failed'])}"
        for row in rows
        if row["failed"]
    ]
    if failed:
        lines += ["", "Failed:", "", *failed]
    lines += ["", *campaign.lines()]
    lines += [
        "",
        "## Wrong tables",
        "",
        "`depth-mup` with one mistake, which the program follows: the first verdict passes, the second names the role. By theory alone.",
        "ed is ed-proxy untied, with relative positions and a table for each stack; of its depth the decoder's grows.",
        "",
        f"Each of the {len(WRONG)} mistakes is named by the role that has it (by which observable: `scripts/check/wrong_tables.py`).",
        "",
        "| verdict | model | mistakes |",
        "|---|---|---|",
    ]
    by_verdict: dict[tuple[str, str], list[str]] = {}
    for name, mistake in WRONG.items():
        by_verdict.setdefault((mistake.word, mistake.model), []).append(name)
    for (verdict, model), names in sorted(by_verdict.items()):
        lines.append(f"| {verdict} | {model} | {'; '.join(names)} |")
    lines += ["", *untold.lines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
