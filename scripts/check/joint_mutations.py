"""How many wrong joint rules the check catches: writes docs/evidence/joint-mutations.json and .md.

    python -m scripts.check.joint_mutations

Every rule that can be applied x every number that it scales x k^(1/4, 1/2 of either sign), k the ratio of batch or tokens to the base's.
Theory is asked about the right rule and `lm-tiny`'s own optimizer, as its run would have it under the wrong one, is what steps.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax

from mupax.presets import horizon
from mupax.presets.analysis.joint_limits import OBSERVABLES, troubles
from mupax.presets.horizon import COLUMNS, RULES, JointRule
from mupax.presets.rule import ONE, axis
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.studies.check import joint_run
from mupax.train.studies.check.judge import Finding, passes
from scripts.check import PAGE
from scripts.pages.markdown import write_section

RECORD = PAGE.with_name("joint-mutations.json")
COMMAND = "python -m scripts.check.joint_mutations"
SIZES = 4
EXPONENTS = (0.25, -0.25, 0.5, -0.5)
STUDIES = (("sde", "batch"), ("complete-d", "batch"), ("complete-d", "tokens"))
"""Rule and what grows, of the axes that the rule speaks of."""
BETAS = ("--optimizer.b1", "0.97", "--optimizer.b2", "0.99")
"""At the base: eight times the batch and a mistake of k^1/2 leave them in (0, 1), where they would be refused before the check."""


@dataclass(frozen=True)
class Mutant:
    """`column` of a rule is k^exponent too large."""

    rule: str
    grows: str
    column: str
    exponent: float

    def __str__(self) -> str:
        return f"{self.rule}, {self.grows}: {self.column} x k^{self.exponent:g}"

    def of(self) -> JointRule:
        """The rule with this error in it."""
        right = RULES[self.rule]
        power = (getattr(right, self.column) or ONE) * axis(self.grows) ** self.exponent
        return replace(right, **{self.column: power})


def mutants(rule: str, grows: str) -> Iterator[Mutant]:
    """Every mutant of one study."""
    return (Mutant(rule, grows, column, exponent) for column in COLUMNS for exponent in EXPONENTS)


class Suite:
    """One study's runs, whose programs its mutants share.

    Args:
        rule: the right one.
        grows: batch or tokens.
        sizes: how many runs, each of twice the one before.
        words: flags of the run.
    """

    def __init__(
        self, rule: str, grows: str, sizes: int = SIZES, words: tuple[str, ...] = BETAS
    ) -> None:
        self.grows, self._programs = grows, dict[Any, Callable]()
        config = cli.parse("lm-tiny", RECIPES["lm-tiny"], ["--joint", rule, *words]).config
        self.runs = joint_run.runs(config, grows, sizes)
        self.expected = joint_run.expectation(self.runs, grows)
        self.observations = [self._observe(k) for k in range(sizes)]

    def _observe(self, k: int) -> dict[str, float]:
        return joint_run.observe(
            self.runs[k], 2.0**k if self.grows == "batch" else 1.0, self._programs
        )

    def right(self) -> list[Finding]:
        """The right rule itself, judged: the control, which must pass."""
        return joint_run.judged(self.observations, self.expected)

    def run(self, mutant: Mutant) -> list[Finding]:
        """What the check says of a wrong rule's runs; at the base it is the right one."""
        with mock.patch.dict(horizon.RULES, {mutant.rule: mutant.of()}):
            grown = [self.observations[0], *(self._observe(k) for k in range(1, len(self.runs)))]
        return joint_run.judged(grown, self.expected)


def row(mutant: Mutant, findings: list[Finding]) -> dict[str, Any]:
    """What the file holds of a mutant: the observables outside their bands, and what theory alone says of its formulas."""
    wrong = {f.observable: round(f.slope - f.expected.slope, 3) for f in findings if not f.agrees}
    return {
        **dataclasses.asdict(mutant),
        "wrong": wrong,
        "table": sorted(troubles(mutant.of(), mutant.grows)),
    }


def main() -> None:
    """Run every mutant, then write the page."""
    rows = []
    for rule, grows in STUDIES:
        suite = Suite(rule, grows)
        if not passes(suite.right()):
            raise SystemExit(
                f"{rule}, {grows}: the right rule itself does not pass; nothing can be said of wrong ones"
            )
        for mutant in mutants(rule, grows):
            rows.append(row(mutant, suite.run(mutant)))
            print(mutant, rows[-1]["wrong"], rows[-1]["table"], flush=True)
    about = {
        "command": COMMAND,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    lines = ",\n".join(json.dumps(each) for each in rows)
    RECORD.write_text(f'{json.dumps(about)[:-1]}, "mutants": [\n{lines}\n]}}\n')
    write_section(PAGE, "joint-mutations", markdown(rows))


def rows_of_file() -> list[dict[str, Any]]:
    """What the committed file holds."""
    return json.loads(RECORD.read_text())["mutants"]


def named(each: dict[str, Any]) -> bool:
    """Whether the check saw the mutant, and blames its number alone."""
    right = {
        joint_run.LABELS[name] for name, column in OBSERVABLES.items() if column == each["column"]
    }
    return bool(each["wrong"]) and set(each["wrong"]) <= right


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the section of the page."""
    caught, blamed = (
        [each for each in rows if each["wrong"]],
        [each for each in rows if named(each)],
    )
    formulas = [each for each in rows if each["table"]]
    lines = [
        "## Wrong joint rules",
        "",
        "A mutant is a joint rule with one value wrong by a power of k, the ratio of batch or tokens to the",
        f"base's: each of {', '.join(COLUMNS)}. `lm-tiny`'s",
        f"optimizer (b1 0.97, b2 0.99) takes steps by the wrong rule at {SIZES} sizes, each twice the one before,",
        "and the check compares them with theory of the right rule.",
        f"`{COMMAND}` makes this section; `joint-mutations.json` has what",
        "caught each mutant.",
        "",
        f"Of {len(rows)} mutants the check of the program catches **{len(caught)}**, and blames the wrong value",
        f"alone in {len(blamed)}. The check of the formulas alone catches {len(formulas)}.",
        "",
        "| rule | grows | caught | by the formulas |",
        "|---|---|---|---|",
    ]
    for rule, grows in STUDIES:
        mine = [each for each in rows if (each["rule"], each["grows"]) == (rule, grows)]
        caught_here = sum(bool(each["wrong"]) for each in mine)
        by_formulas = sum(bool(each["table"]) for each in mine)
        cells = [rule, grows, f"{caught_here} of {len(mine)}"]
        lines.append(f"| {' | '.join(cells)} | {by_formulas} of {len(mine)} |")
    numbers = sorted(
        {OBSERVABLES[name] for name in troubles(RULES["none"], "batch")}, key=COLUMNS.index
    )
    lines += [
        "",
        f"The control, constant values (`none`) at a growing batch, is wrong in {_all_or_list(numbers)}.",
    ]
    unseen: dict[tuple[str, str], list[str]] = {}
    for each in rows:
        if not each["table"]:
            place = f"{each['rule']}, {each['grows']}: {each['column']}"
            unseen.setdefault((place, _why(each)), []).append(f"k^{each['exponent']:g}")
    lines += ["", "By the formulas alone these are no error:", ""]
    lines += [
        f"- {place} x {', '.join(powers)}: {reason}" for (place, reason), powers in unseen.items()
    ]
    return "\n".join(lines) + "\n"


def _all_or_list(columns: list[str]) -> str:
    return "all of them" if columns == list(COLUMNS) else ", ".join(columns)


def _why(each: dict[str, Any]) -> str:
    if each["column"] == "eps":
        return "the source lets eps over noise grow as T^0.5, so a smaller eps is no worse"
    return "nothing that theory judges changes"


if __name__ == "__main__":
    main()
