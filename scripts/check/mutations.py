"""How many wrong rules the coordinate check catches: writes docs/evidence/mutations.json and .md, mutant by mutant, resumable.

    python -m scripts.check.mutations [--studies "decoder, Adam" ...] [--again]

Every parameter group of the smallest decoder and ViT x {init std, multiplier, rate, eps} x m^(1/4, 1/2, 1 of either sign).
What the file holds is not run again unless it is asked for. What passes with four seeds is run with sixteen.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from mupax.command_line import Switch
from mupax.train.studies.check import check
from scripts import harness
from scripts.check import PAGE, mutation_report
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, STUDIES, Outcome, Suite
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("mutations.json")
COMMAND = "python -m scripts.check.mutations"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    studies: tuple[str, ...] = ()
    """Studies to run; all by default."""
    again: Switch = False
    """Run what the file holds once more."""


def main() -> None:
    """Run the mutants that are not in the file yet, then write the page."""
    args = harness.parse(Options)
    harness.check_names(args.studies, [study.name for study in STUDIES])
    path = RECORD
    rows: dict[str, dict[str, Any]] = dict(harness.read_rows(path, "mutants"))
    for study in (study for study in STUDIES if not args.studies or study.name in args.studies):
        suite = Suite(study)
        names = {f"{study.name}: {mutant}": mutant for mutant in suite.mutants()}
        for seeds in (SEEDS, MORE_SEEDS):
            fewer = seeds == SEEDS
            todo = [
                n
                for n in names
                if (n not in rows or args.again if fewer else _passed(rows[n], seeds))
            ]
            if todo and not check.passes(suite.right(seeds)):
                raise SystemExit(
                    f"{study.name}: the right rule itself does not pass; nothing can be said of wrong ones"
                )
            for name in todo:
                outcome = suite.run(names[name], seeds)
                rows[name] = {
                    "study": study.name,
                    **dataclasses.asdict(outcome),
                    "change": round(outcome.change, 6),
                }
                print(name, outcome.by, outcome.by_activations, f"{outcome.change:.2g}", flush=True)
                path.write_text(
                    harness.with_rows(
                        {"command": COMMAND, "versions": harness.versions()}, "mutants", rows
                    )
                )
    write_section(PAGE, "mutations", mutation_report.markdown(outcomes(), COMMAND))


def _passed(row: dict[str, Any], seeds: int) -> bool:
    """Whether a mutant that changes training passed with fewer seeds."""
    return bool(mutation_report.missed([_outcome(row)])) and row["seeds"] < seeds


def _outcome(row: dict[str, Any]) -> Outcome:
    return Outcome(**{key: value for key, value in row.items() if key != "study"})


def outcomes() -> dict[str, list[Outcome]]:
    """What the file holds, by study."""
    rows = json.loads(RECORD.read_text())["mutants"].values()
    by_study: dict[str, list[Outcome]] = {study.name: [] for study in STUDIES}
    for row in rows:
        by_study[row["study"]].append(_outcome(row))
    return {study: own for study, own in by_study.items() if own}


if __name__ == "__main__":
    main()
