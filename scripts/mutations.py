"""How many wrong rules the coordinate check catches: writes docs/mutations.json and .md, row by row, resumable.

    python -m scripts.mutations [--model lm-proxy] [--exponents 0.5 -0.5 1 -1 0.25 -0.25]

Every parameter group of the model x {init std, multiplier, rate, eps} x m^exponent, on `mup` growing head_dim under Adam:
theory is asked about the right rule, the mutant is trained. A mutant is caught when any observable is not as predicted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import presets
from train import check, check_models, expectation, mutants
from train.check_command import RATES
from train.config import OptimizerConfig
from zoo import build, configs

OUT = Path(__file__).parent.parent / "docs" / "mutations"
SEEDS = 2


def main() -> None:
    """Run the mutants that are not in the file yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lm-proxy", help="whose parameter groups to mutate (lm-proxy)")
    parser.add_argument("--exponents", nargs="+", type=float, default=[0.5, -0.5, 1.0, -1.0, 0.25, -0.25])
    args = parser.parse_args()
    path = OUT.with_suffix(".json")
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else {}

    grown = check_models.series(configs.get(args.model), "head_dim", 4)
    definitions = [build.definition(one) for one in grown]
    config = OptimizerConfig(name="adam", peak_lr=RATES["adam"], schedule="constant", eps=1e-12)
    series, batch = check.Series(definitions, config), check_models.batch(grown[0])
    right = presets.get("mup", base=grown[0].base_sizes())
    expected = expectation.of(right, definitions[0], definitions[-1], "adam")
    for mutant in mutants.all_of(definitions[0].specs.values(), exponents=args.exponents):
        name = f"{args.model}: {mutant}"
        if name in rows:
            continue
        found = check.judge(check.fit(series.measure(mutant.of(right), batch, SEEDS), [1, 2, 4, 8]), expected)
        bad = [f for f in found if not f.ok]
        worst = max(bad, key=_distance, default=None)
        rows[name] = {
            "group": mutant.group,
            "column": mutant.column,
            "exponent": mutant.exponent,
            "caught": bool(bad),
            "by": None if worst is None else f"{worst.observable} @{worst.step} {worst.slope:+.2f}",
        }
        print(name, rows[name]["by"], flush=True)
        about = {"command": f"python -m scripts.mutations --model {args.model}", "seeds": SEEDS}
        path.write_text(json.dumps({**about, "rows": rows}, indent=0) + "\n")
    OUT.with_suffix(".md").write_text(markdown(list(rows.values())))


def _distance(finding: check.Finding) -> float:
    assert finding.expected is not None
    return abs(finding.slope - finding.expected.slope) if finding.slope == finding.slope else float("inf")


def markdown(rows: list[dict[str, Any]]) -> str:
    """Share caught per column and size of error, and every mutant that was not."""
    share: dict[tuple[str, float], list[bool]] = defaultdict(list)
    for row in rows:
        share[row["column"], abs(row["exponent"])].append(row["caught"])
    sizes = sorted({size for _, size in share})
    lines = [
        "# Wrong rules that the coordinate check catches",
        "",
        "Each cell: mutants caught of those tried, an error of m to plus or minus the exponent in one column of one parameter group.",
        "Made by `python -m scripts.mutations`; the rows, with the observable that gave each away, are in `mutations.json`.",
        "",
        "| column | " + " | ".join(f"m^±{size:g}" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for column in mutants.COLUMNS:
        cells = [share[column, size] for size in sizes]
        lines.append(f"| {column} | " + " | ".join(f"{sum(cell)} of {len(cell)}" for cell in cells) + " |")
    missed = [row for row in rows if not row["caught"]]
    lines += ["", f"{sum(row['caught'] for row in rows)} of {len(rows)} caught."]
    if missed:
        lines += ["", "Not caught:", ""]
        lines += [f"- `{row['group']}` {row['column']} m^{row['exponent']:g}" for row in missed]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
