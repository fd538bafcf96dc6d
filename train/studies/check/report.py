"""A coordinate check as a person reads it: the conclusion first, then one line per observable; and as JSON. `picture` draws it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from mupax.train.studies.check.judge import Finding, passes

if TYPE_CHECKING:
    from rich.console import Console

_BY_ROLE = ("weight", "movement", "gradient")
_WIDE = 112
"""Columns of a terminal from which on intervals and bands fit in beside the verdict."""
PASSING = "a slope passes where its 95 % interval over seeds meets the band that theory leaves to finite sizes"


class CheckFailure(AssertionError):
    """A coordinate check that did not pass. Its text has a line per observable that failed."""


def show(
    console: Console,
    findings: Sequence[Finding],
    title: str,
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
    *,
    subject: str = "",
    following: Sequence[str] = (),
) -> None:
    """Print the conclusion, what to type next, and one line per observable and step, failures first.

    A console narrower than `_WIDE` has no intervals and bands: a slope cut off in the middle would be nothing.

    Args:
        console: to print on.
        findings: of the check.
        title: above the table.
        not_judged: observables that theory says nothing about.
        blamed: what comes behind the stroke of an observable: a parameter's role, or a number of the optimizer over a whole run.
        subject: as `verdict_line` takes it.
        following: sentences on what to type next.
    """
    from rich.table import Table

    console.print(verdict_line(findings, not_judged, blamed, subject))
    for sentence in following:
        console.print(sentence, highlight=False, markup=False)
    wide = console.width >= _WIDE
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("observable", no_wrap=True)
    for column in ("after", "slope", "95 %", "theory") if wide else ("after", "slope", "theory"):
        table.add_column(column, justify="left" if column == "95 %" else "right", no_wrap=True)
    table.add_column("verdict")
    for f in sorted(findings, key=lambda f: (f.ok, f.observable, f.step)):
        theory, colour = f"{f.expected.slope:+.2f}", "green" if f.ok else "bold red"
        after = str(f.step) if blamed == "role" else "run"
        cells = [f"{f.slope:+.2f}", theory]
        if wide:
            band = f"{theory} (-{f.expected.below:.2f} +{f.expected.above:.2f})"
            cells = [f"{f.slope:+.2f}", f"[{f.low:+.2f}, {f.high:+.2f}]", band]
        table.add_row(f.observable, after, *cells, f"[{colour}]{verdict_words(f)}[/{colour}]")
    console.print(table)
    if not wide:
        console.print(f"{PASSING}; both are here from {_WIDE} columns on")


def text(findings: Sequence[Finding], not_judged: Sequence[str] = ()) -> str:
    """Return the conclusion, and a line for each observable that failed: what, of which parameter, by how much.

    Args:
        not_judged: observables that theory says nothing about.
    """
    failed = [finding for finding in findings if not finding.ok]
    lines = [_plain(verdict_line(findings, not_judged)), *(f"  {_sentence(finding)}" for finding in failed)]
    return "\n".join(lines)


def require(findings: Sequence[Finding]) -> None:
    """Raise `CheckFailure`, whose message is `text(findings)`, unless every finding is as theory says."""
    if not passes(findings):
        raise CheckFailure(text(findings))


def _plain(line: str) -> str:
    """Return the line without colours."""
    from rich.text import Text

    return Text.from_markup(line).plain


def readable(observable: str) -> str:
    """Return an observable's name as it is read: "movement of token_embedding" for movement/token_embedding."""
    column, *parameter = observable.split("/")
    return f"{column} of {', '.join(parameter)}" if parameter else column


def _sentence(finding: Finding) -> str:
    """Return what failed, after how many steps, what was measured and what theory allows."""
    low = finding.expected.slope - finding.expected.below
    high = finding.expected.slope + finding.expected.above
    steps = "at the start" if finding.step == 0 else f"after {finding.step} step{'s' * (finding.step > 1)}"
    measured = f"size^{finding.slope:+.2f} [{finding.low:+.2f}, {finding.high:+.2f}]"
    allowed = f"theory {finding.expected.slope:+.2f}, allowed {low:+.2f} to {high:+.2f}"
    return f"{readable(finding.observable)} {steps}: {measured}, {allowed}: {verdict_words(finding)}"


def verdict_words(finding: Finding) -> str:
    """Return the verdict on a finding and the roles that theory blames."""
    return finding.verdict + (f" through {', '.join(finding.roles)}" if finding.roles else "")


def verdict_line(
    findings: Sequence[Finding],
    not_judged: Sequence[str] = (),
    blamed: Literal["role", "number"] = "role",
    subject: str = "",
) -> str:
    """Return both verdicts in a line: what gave a wrong program or table away, and the roles whose own lines are wrong.

    Args:
        findings: of the check.
        not_judged: observables that theory says nothing about.
        blamed: as in `show`.
        subject: what was checked, as the beginning of a sentence: "mup follows its table as heads grow".
    """
    if not findings:
        return "[bold red]fails[/bold red]: nothing was measured that theory speaks of"
    wrong, bad = [f for f in findings if not f.agrees], [f for f in findings if f.agrees and f.trouble]
    table = "table" if blamed == "role" else "joint rule"
    parts = [f"the program does not do what its {table} says: {_evidence(wrong, blamed)}"] if wrong else []
    parts += [f"the {table} itself is wrong: {_evidence(bad, blamed)}"] if bad else []
    unsaid = f"; not judged: {', '.join(not_judged)}" if not_judged else ""
    if not parts:
        about = f"{subject}: " if subject else ""
        return f"[bold green]passes[/bold green]: {about}all {len(findings)} observables within theory{unsaid}"
    return f"[bold red]fails[/bold red]: {'; '.join(parts)}{unsaid}"


def _evidence(bad: Sequence[Finding], blamed: str) -> str:
    activations = dict.fromkeys(f"{f.observable} {verdict_words(f)}" for f in bad if "/" not in f.observable)
    groups: dict[str, list[tuple[str, str]]] = {}
    for f in bad:
        what, *group = f.observable.split("/")
        if group:
            part = "".join(f" of {name}" for name in group[1:]) + (f" in {f.layer}" if f.layer else "")
            groups.setdefault(group[0], []).append(
                (what, what + part if not f.agrees else f"{what}{part}: {f.trouble}")
            )
    # A wrong weight or movement is its role's own; a wrong gradient may come from elsewhere.
    rank = {what: index for index, what in enumerate(_BY_ROLE)}
    order = sorted(groups, key=lambda group: min(rank.get(what, 0) for what, _ in groups[group]))
    rows = [f"{group} ({', '.join(dict.fromkeys(words for _, words in groups[group]))})" for group in order]
    parts = ["; ".join(_first(list(activations)))] if activations else []
    parts += [f"by {blamed}: {', '.join(_first(rows))}"] if rows else []
    return "; ".join(parts)


def _first(names: list[str], count: int = 6) -> list[str]:
    return names[:count] + ([f"and {len(names) - count} more"] if len(names) > count else [])


def to_json(findings: Sequence[Finding], about: dict[str, Any], not_judged: Sequence[str] = ()) -> dict[str, Any]:
    """`verdict` (pass or fail), that of the `program` and of the `table`, what was run, and what was seen of every observable.

    Args:
        findings: of a check.
        about: what was run.
        not_judged: observables of parameters that theory says nothing about.
    """
    rows = [
        {"observable": f.observable, "step": f.step, "slope": _finite(f.slope), "low": _finite(f.low),
         "high": _finite(f.high), "predicted": f.expected.slope, "ok": f.ok,
         "verdict": f.verdict, "roles": list(f.roles), "values": [_finite(v) for v in f.values]}
        for f in findings
    ]  # fmt: skip
    verdicts = {
        "verdict": passes(findings),
        "program": bool(findings) and all(f.agrees for f in findings),
        "table": not any(f.trouble for f in findings),
    }
    words = {name: "pass" if passed else "fail" for name, passed in verdicts.items()}
    return {**words, **about, "not_judged": list(not_judged), "observables": rows}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
