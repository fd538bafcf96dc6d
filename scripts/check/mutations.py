"""How many wrong rules the coordinate check catches: writes docs/mutations.json and .md, mutant by mutant, resumable.

    python -m scripts.check.mutations [--studies "decoder, Adam" ...] [--again]

Every parameter group of the smallest decoder and ViT x {init std, multiplier, rate, eps} x m^(1/4, 1/2, 1 of either sign).
What the file holds is not run again unless it is asked for. What passes with four seeds is run with sixteen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from typing import Any

import jax

from mupax.train.studies.check import check
from scripts import ROOT
from scripts.check import mutation_report
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, STUDIES, Outcome, Suite

PAGE = ROOT / "docs" / "mutations.md"
COMMAND = "python -m scripts.check.mutations"


def main() -> None:
    """Run the mutants that are not in the file yet, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=[study.name for study in STUDIES], help="which (all)")
    parser.add_argument("--again", action="store_true", help="run what the file holds once more")
    args = parser.parse_args()
    path = PAGE.with_suffix(".json")
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())["mutants"] if path.exists() else {}
    for study in (study for study in STUDIES if args.studies is None or study.name in args.studies):
        suite = Suite(study)
        names = {f"{study.name}: {mutant}": mutant for mutant in suite.mutants()}
        for seeds in (SEEDS, MORE_SEEDS):
            fewer = seeds == SEEDS
            todo = [n for n in names if (n not in rows or args.again if fewer else _passed(rows[n], seeds))]
            if todo and not check.passes(suite.right(seeds)):
                raise SystemExit(
                    f"{study.name}: the right rule itself does not pass; nothing can be said of wrong ones"
                )
            for name in todo:
                outcome = suite.run(names[name], seeds)
                rows[name] = {"study": study.name, **dataclasses.asdict(outcome), "change": round(outcome.change, 6)}
                print(name, outcome.by, outcome.by_activations, f"{outcome.change:.2g}", flush=True)
                path.write_text(_json(rows))
    PAGE.write_text(mutation_report.markdown(outcomes(), COMMAND))


def _passed(row: dict[str, Any], seeds: int) -> bool:
    """Whether a mutant that changes training passed with fewer seeds."""
    return bool(mutation_report.missed([_outcome(row)])) and row["seeds"] < seeds


def _outcome(row: dict[str, Any]) -> Outcome:
    return Outcome(**{key: value for key, value in row.items() if key != "study"})


def outcomes() -> dict[str, list[Outcome]]:
    """What the file holds, by study."""
    rows = json.loads(PAGE.with_suffix(".json").read_text())["mutants"].values()
    by_study: dict[str, list[Outcome]] = {study.name: [] for study in STUDIES}
    for row in rows:
        by_study[row["study"]].append(_outcome(row))
    return {study: own for study, own in by_study.items() if own}


def _json(rows: dict[str, dict[str, Any]]) -> str:
    """JSON with a line per mutant."""
    about = {"command": COMMAND, "versions": {"python": platform.python_version(), "jax": jax.__version__}}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    return json.dumps(about)[:-1] + f', "mutants": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    main()
