"""Compare every preset's exponents in theory with measured ones.

    python -m scripts.check.theory_and_measurement

Trains every preset that has a rule for Adam on the smallest decoder, growing head_dim, heads and
depth. Writes docs/evidence/theory-and-measurement.json.gz, which has all observables that theory
predicts, and its section of docs/evidence/checks.md.
"""

from __future__ import annotations

import collections
import json
from typing import Any

from mupax import presets
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, report, theory
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts import ROOT, harness
from scripts.check import PAGE
from scripts.pages.markdown import table, write_section

OUT = ROOT / "docs" / "evidence" / "theory-and-measurement.json.gz"
NAMES = (
    "sp",
    "mup",
    "mup-half",
    "depth-mup",
    "completep",
    "ntk",
    "hybrid",
    "maximal-update",
    "u-mup",
    "spectral",
    "sp-layerwise",
)
GROWN = {"head_dim": "N", "heads": "H", "depth": "L"}
"""Sizes that grow, with their symbols."""
SHOWN = (
    ("attention", 0),
    ("update attention", 1),
    ("change residual", 1),
    ("change logits", 1),
)
"""Observables and steps that the tables of the page show."""

MEANINGS = {
    "lazy": "features move less",
    "eps dominates": "eps grows",
    "eps fades": "Adam's eps shrinks against the gradient",
}
"""Verdict other than "explodes" to its meaning on the page."""


def main() -> None:
    """Train every preset, then write the record and the page."""
    rows: list[dict[str, Any]] = []
    for axis in GROWN:
        grown = check.grow(configs.get("lm-proxy"), axis, 4)
        definitions = [definition(model) for model in grown]
        config = OptimizerConfig(
            name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
        )
        series = check.Series(definitions, config)
        for name in NAMES:
            # u-mup has absolute rules, without a base.
            base = None if name == "u-mup" else grown[0].base_sizes()
            preset = presets.get(name, base=base)
            expected = theory.of(preset, definitions[0], definitions[-1], "adam")
            rate = check.peak_lr("adam", expected)
            measured = series.measure(preset, check.batch(grown[0]), peak_lr=rate)
            findings = check.judge(measured, [1, 2, 4, 8], expected)
            rows.append(report.to_json(findings, {"preset": name, "grow": axis}))
            print(axis, name, report.plain(report.verdict_line(findings)), flush=True)
    about = {
        "command": "python -m scripts.check.theory_and_measurement",
        "versions": harness.versions(),
        "optimizer": "adam",
        "model": "lm-proxy",
    }
    record = {**about, "studies": rows}
    text = json.dumps(record, indent=None, separators=(",", ":"))
    harness.write_record(OUT, f"{text}\n")
    write_section(PAGE, "theory-and-measurement", markdown(rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the section of the page, with one table of the observables `SHOWN` per grown size."""
    lines = [
        "## Every preset: theory and measurement",
        "",
        "A decoder of width 64 with 4 heads and 2 layers is trained with Adam while one size grows",
        "eightfold. Middle cells read *exponent in theory: measured [95 % interval over four seeds]*.",
        "The last column names the faults, and the number of failed exponents.",
        "",
        "*attention* means attention logits, *update attention* their change through query and key weights.",
        "",
        "The check allows for deviations of small models from theory (`allowances.json`).",
        "`python -m scripts.check.theory_and_measurement` writes this section and",
        "`theory-and-measurement.json.gz`.",
        "",
        _agreement(rows),
    ]
    for axis, symbol in GROWN.items():
        lines += ["", f"### Growing {axis} ({symbol})", ""]
        head = ["preset", *(f"{name}, step {step}" for name, step in SHOWN), "check"]
        # Presets whose rules agree under this axis share a row.
        names: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            if row["grow"] != axis:
                continue
            observables = {(o["observable"], o["step"]): o for o in row["observables"]}
            shown = [_cell(observables.get(key)) for key in SHOWN]
            names.setdefault((*shown, _verdict(row)), []).append(f"`{row['preset']}`")
        body = [[", ".join(presets_of_row), *cells] for cells, presets_of_row in names.items()]
        lines.append(table([head, *body]))
    return "\n".join(lines) + "\n"


def _agreement(rows: list[dict[str, Any]]) -> str:
    """Return a sentence that counts the slopes by verdict."""
    verdicts = collections.Counter()
    for row in rows:
        verdicts.update(observable["verdict"] for observable in row["observables"])
    total = verdicts.total()
    healthy = 0
    for verdict in [verdict for verdict in verdicts if verdict.startswith("as predicted")]:
        healthy += verdicts.pop(verdict)
    explode = verdicts.pop("explodes", 0)
    contradict = 0
    remainder = []
    for verdict, count in verdicts.items():
        if verdict.startswith("contradicts"):
            contradict += count
        elif verdict in MEANINGS:
            remainder.append(f"{count} {verdict} ({MEANINGS[verdict]})")
        else:
            remainder.append(f"{count} {verdict}")
    bad = ", ".join([f"{explode} explode", *sorted(remainder)])
    return (
        f"Of {total} measured exponents {contradict} contradict theory. {healthy} are healthy. The "
        f"others are faults of a preset that theory predicts: {bad}. Exponents contradict theory if "
        "their intervals lie outside the check's bands, which are wide where a preset fails."
    )


def _cell(observable: dict[str, Any] | None) -> str:
    """Return a table cell: exponent in theory, measured slope and interval."""
    if observable is None:
        return ""
    if observable["slope"] is None:
        return f"{observable['predicted']:+.2f}: {observable['verdict']}"
    slope = f"{observable['slope']:+.2f} [{observable['low']:+.2f}, {observable['high']:+.2f}]"
    return f"{observable['predicted']:+.2f}: {slope}"


def _verdict(row: dict[str, Any]) -> str:
    """Return the verdicts of a preset's failed observables with their number, or "passes"."""
    bad = [observable for observable in row["observables"] if not observable["ok"]]
    if not bad:
        return "passes"
    words = sorted({observable["verdict"] for observable in bad})
    return f"{', '.join(words)} ({len(bad)} of {len(row['observables'])})"


if __name__ == "__main__":
    harness.refuse_words()
    main()
