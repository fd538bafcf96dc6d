"""Count the wrong joint rules that the check catches.

    python -m scripts.check.joint_mutations

Mutants are every applicable rule with every value that it scales times k^(1/4, 1/2 of either
sign), where k is the ratio of batch or tokens to the base's. `lm-tiny`'s own optimizer takes steps
by the wrong rule and is compared with theory of the right rule. Writes
docs/evidence/joint-mutations.json and its section of the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from mupax.presets import horizon
from mupax.presets.analysis.joint_limits import OBSERVABLES, troubles
from mupax.presets.horizon import COLUMNS, RULES, JointRule
from mupax.presets.rule import ONE, axis
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.studies.check import joint_run
from mupax.train.studies.check.judge import Finding, passes
from scripts import harness
from scripts.check import PAGE
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("joint-mutations.json")
COMMAND = "python -m scripts.check.joint_mutations"
SIZES = 4
EXPONENTS = (0.25, -0.25, 0.5, -0.5)
"""Powers of k by which a value is wrong."""
STUDIES = (("sde", "batch"), ("complete-d", "batch"), ("complete-d", "tokens"))
"""Joint rules with the axes, batch or tokens, along which each is checked."""
BETAS = ("--optimizer.b1", "0.97", "--optimizer.b2", "0.99")
"""Flags of the betas at the base.

Eight times the batch and an error of k^1/2 leave these betas in (0, 1). Outside, they would be
refused before the check.
"""


@dataclass(frozen=True)
class Mutant:
    """Error in a rule for growing batch or tokens: `column` is k^`exponent` too large.

    Attributes:
        rule: Name of the right rule, a key of `RULES`.
        grows: "batch" or "tokens", whose ratio to the base is k.
        column: Value of the rule that is wrong, one of `COLUMNS`.
    """

    rule: str
    grows: str
    column: str
    exponent: float

    def __str__(self) -> str:
        return f"{self.rule}, {self.grows}: {self.column} x k^{self.exponent:g}"

    def of(self) -> JointRule:
        """Return the rule with this error in it."""
        right = RULES[self.rule]
        power = (getattr(right, self.column) or ONE) * axis(self.grows) ** self.exponent
        return replace(right, **{self.column: power})


def mutants(rule: str, grows: str) -> Iterator[Mutant]:
    """Yield every mutant of a rule: each of `COLUMNS` with each of `EXPONENTS`."""
    for column in COLUMNS:
        for exponent in EXPONENTS:
            yield Mutant(rule, grows, column, exponent)


class Suite:
    """Runs of one study, whose compiled programs all mutants share.

    Args:
        rule: Name of the right rule, a key of `RULES`.
        grows: "batch" or "tokens".
        sizes: Number of runs, each with twice the batch or tokens of the one before.
        words: Flags of the `lm-tiny` run at the base, `BETAS` by default.
    """

    def __init__(
        self, rule: str, grows: str, sizes: int = SIZES, words: tuple[str, ...] = BETAS
    ) -> None:
        self.grows = grows
        self._programs: dict[Any, Callable] = {}
        config = cli.parse("lm-tiny", RECIPES["lm-tiny"], ["--joint", rule, *words]).config
        self.runs = joint_run.runs(config, grows, sizes)
        self.expected = joint_run.expectation(self.runs, grows)
        self.observations = [self._observe(index) for index in range(sizes)]

    def _observe(self, index: int) -> dict[str, float]:
        """Return the observables of one run."""
        batch_ratio = 2.0**index if self.grows == "batch" else 1.0
        return joint_run.observe(self.runs[index], batch_ratio, self._programs)

    def right(self) -> list[Finding]:
        """Return the findings on the right rule itself: the control, which must pass."""
        return joint_run.judged(self.observations, self.expected)

    def run(self, mutant: Mutant) -> list[Finding]:
        """Return the findings on a wrong rule's runs, whose base equals the right rule's."""
        observations = [self.observations[0]]
        # Runs look their rule up by its name.
        with mock.patch.dict(horizon.RULES, {mutant.rule: mutant.of()}):
            for index in range(1, len(self.runs)):
                observations.append(self._observe(index))
        return joint_run.judged(observations, self.expected)


def row(mutant: Mutant, findings: list[Finding]) -> dict[str, Any]:
    """Return the row of a mutant in the record.

    Returns:
        Fields of the mutant; `wrong`, the distance from theory of each observable outside its
        band; `table`, the errors that theory sees in the formulas alone.
    """
    wrong = {}
    for finding in findings:
        if not finding.agrees:
            wrong[finding.observable] = round(finding.slope - finding.expected.slope, 3)
    table = sorted(troubles(mutant.of(), mutant.grows))
    return {**dataclasses.asdict(mutant), "wrong": wrong, "table": table}


def main() -> None:
    """Run every mutant, then write the record and the page."""
    rows = []
    for rule, grows in STUDIES:
        suite = Suite(rule, grows)
        if not passes(suite.right()):
            raise SystemExit(
                f"{rule}, {grows}: the right rule itself does not pass; "
                "nothing can be said of wrong ones"
            )
        for mutant in mutants(rule, grows):
            rows.append(row(mutant, suite.run(mutant)))
            print(mutant, rows[-1]["wrong"], rows[-1]["table"], flush=True)
    about = {"command": COMMAND, "versions": harness.versions()}
    RECORD.write_text(harness.with_rows(about, "mutants", rows))
    write_section(PAGE, "joint-mutations", markdown(rows))


def rows_of_file() -> list[dict[str, Any]]:
    """Return the rows of the committed record."""
    return harness.read_rows(RECORD, "mutants")


def named(row: dict[str, Any]) -> bool:
    """Return whether the check caught a mutant and blames only the value that is wrong."""
    blamable = set()
    for name, column in OBSERVABLES.items():
        if column == row["column"]:
            blamable.add(joint_run.LABELS[name])
    return bool(row["wrong"]) and set(row["wrong"]) <= blamable


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the section of the page."""
    num_caught = 0
    num_blamed = 0
    num_by_formulas = 0
    for row in rows:
        num_caught += bool(row["wrong"])
        num_blamed += named(row)
        num_by_formulas += bool(row["table"])
    lines = [
        "## Wrong joint rules",
        "",
        "A joint rule scales an optimizer's settings as batch or tokens grow. A mutant is a joint",
        "rule with one setting wrong by a power of k, the batch or tokens relative to the smallest:",
        f"{', '.join(COLUMNS)} (of warm-up and final decay).",
        "",
        "The optimizer of `lm-tiny` takes a run's steps on synthetic",
        f"gradients under the wrong rule. Batch or tokens have {SIZES} sizes, each twice the one",
        f"before. The check compares the steps with theory of the right rule. `{COMMAND}`",
        "writes this section and `joint-mutations.json`.",
        "",
        f"The check catches **{num_caught}** of {len(rows)} mutants and blames only the wrong setting "
        f"in {num_blamed}.",
        f"Theory of the formulas alone catches {num_by_formulas}.",
        "",
        "| rule | grows | caught | by the formulas |",
        "|---|---|---|---|",
    ]
    for rule, grows in STUDIES:
        total = 0
        caught = 0
        by_formulas = 0
        for row in rows:
            if (row["rule"], row["grows"]) == (rule, grows):
                total += 1
                caught += bool(row["wrong"])
                by_formulas += bool(row["table"])
        lines.append(f"| {rule} | {grows} | {caught} of {total} | {by_formulas} of {total} |")

    wrong_columns = {OBSERVABLES[name] for name in troubles(RULES["none"], "batch")}
    in_order = sorted(wrong_columns, key=COLUMNS.index)
    listed = f"all {len(COLUMNS)}" if in_order == list(COLUMNS) else f"the {', '.join(in_order)}"
    lines += [
        "",
        f"Control: the rule `none` changes no setting. Theory calls {listed} settings wrong as the batch grows.",
        "",
        "Theory misses these errors in formulas:",
        "",
    ]
    unseen: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if not row["table"]:
            place = f"`{row['rule']}` as {row['grows']} grow: {row['column']}"
            unseen.setdefault((place, _why(row)), []).append(f"k^{row['exponent']:g}")
    for (place, reason), powers in unseen.items():
        lines.append(f"- {place} times {' or '.join(powers)}. {reason}")
    return "\n".join(lines) + "\n"


def _why(row: dict[str, Any]) -> str:
    """Return why theory sees no error in the formulas of a mutant."""
    if row["column"] == "eps":
        return (
            "The right rule's eps grows as tokens^0.5 relative to the gradient noise. Theory accepts "
            "any slower growth, down to none."
        )
    return "Nothing that theory judges changes."


if __name__ == "__main__":
    harness.refuse_words()
    main()
