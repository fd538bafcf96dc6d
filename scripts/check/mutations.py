"""Count the wrong rules that the coordinate check catches.

    python -m scripts.check.mutations [--studies "decoder, Adam" ...] [--again]

A mutant has one column (init std, multiplier, lr, eps) of one parameter group wrong by a power of
m, the ratio of a size to its base. Writes docs/evidence/mutations.json.gz after each mutant and then
the section of the page. A mutant that the record holds is not run again without `--again`. A
mutant that passes with four seeds is run with sixteen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mupax.command_line import Switch
from mupax.train.studies.check import check
from scripts import harness
from scripts.check import PAGE, mutation_report
from scripts.check.mutation_suite import MORE_SEEDS, SEEDS, STUDIES, Outcome, Study, Suite
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("mutations.json.gz")
COMMAND = "python -m scripts.check.mutations"


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    studies: tuple[str, ...] = ()
    """Studies to run; all by default."""
    again: Switch = False
    """Run mutants that the record holds once more."""


def main() -> None:
    """Run the mutants that the record does not hold, then write the page."""
    args = harness.parse(Options)
    harness.check_names(args.studies, [study.name for study in STUDIES])
    rows: dict[str, dict[str, Any]] = dict(harness.read_rows(RECORD, "mutants"))
    for study in STUDIES:
        if not args.studies or study.name in args.studies:
            _run_study(study, rows, again=args.again)
    write_section(PAGE, "mutations", mutation_report.markdown(outcomes(), COMMAND))


def _run_study(study: Study, rows: dict[str, dict[str, Any]], *, again: bool) -> None:
    """Run the mutants of a study, add their rows to `rows`, and write the record after each.

    Args:
        again: Also run mutants that `rows` holds.
    """
    suite = Suite(study)
    mutants = {f"{study.name}: {mutant}": mutant for mutant in suite.mutants()}
    for seeds in (SEEDS, MORE_SEEDS):
        if seeds == SEEDS:
            todo = [name for name in mutants if name not in rows or again]
        else:
            todo = [name for name in mutants if _passed(rows[name], seeds)]

        if todo and not check.passes(suite.right(seeds)):
            raise SystemExit(
                f"{study.name}: the right rule itself does not pass; "
                "nothing can be said of wrong ones"
            )
        for name in todo:
            outcome = suite.run(mutants[name], seeds)
            values = dataclasses.asdict(outcome)
            rows[name] = {"study": study.name, **values, "change": round(outcome.change, 6)}
            print(name, outcome.by, outcome.by_activations, f"{outcome.change:.2g}", flush=True)
            facts = {"command": COMMAND, "versions": harness.versions()}
            harness.write_record(RECORD, harness.with_rows(facts, "mutants", rows))


def _passed(row: dict[str, Any], seeds: int) -> bool:
    """Return whether a mutant changes training and passed with fewer seeds than `seeds`."""
    return bool(mutation_report.missed([_outcome(row)])) and row["seeds"] < seeds


def _outcome(row: dict[str, Any]) -> Outcome:
    fields = dict(row)
    del fields["study"]
    return Outcome(**fields)


def outcomes() -> dict[str, list[Outcome]]:
    """Return the outcomes of the record by the name of the study, for studies that have some."""
    by_study: dict[str, list[Outcome]] = {study.name: [] for study in STUDIES}
    for row in harness.read_record(RECORD)["mutants"].values():
        by_study[row["study"]].append(_outcome(row))
    return {study: results for study, results in by_study.items() if results}


if __name__ == "__main__":
    main()
