"""A finding in words: what a number does, what happens as the model grows, what to write instead."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from mupax.presets.analysis.verdicts import Entry
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import GrowthSeries
from mupax.presets.verify.formats.dump import Column

Severity = Literal["fault", "caution"]
What = Literal["start", "rate", "eps", "pull", "multiplier"]
SHOWN = 3
"""Names of parameters in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, of all parameters that have it in common.

    Attributes:
        severity: fault or caution.
        names: of the parameters.
        role: what they are.
        what: which number; "multiplier" where one factor would set both start and rate right.
        slope, target: powers of what grows that the number has and should have; of slope None where it is 0 at one size.
        consequence: what happens as the model grows.
        remedy: what to write instead.
        why: of a caution, why it is none more.
        text: the sentence of a finding that is about no single number.
    """

    severity: Severity
    names: tuple[str, ...]
    role: str
    what: What
    slope: float | None
    target: float
    consequence: str
    remedy: str
    why: str = ""
    text: str = ""

    @property
    def excess(self) -> float:
        """How much faster it grows than it should."""
        return 0.0 if self.slope is None else self.slope - self.target

    def sentence(self, word: str) -> str:
        """The finding for a person.

        Args:
            word: what grows.
        """
        if self.text:
            return self.text
        shown = ", ".join(self.names[:SHOWN]) + (
            f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
        )
        of = (
            ""
            if self.names[0] in (LOGITS, BRANCH, TIED) or self.role in shown
            else f" ({self.role})"
        )
        is_ = (
            "is 0 at one size and not at another"
            if self.slope is None
            else f"{_goes(self.slope, word)} and should {_goes(self.target, word, s='')}"
        )
        text = f"{shown}{of}: {_PHRASES[self.what]} {is_}, so {self.consequence}. {self.remedy}."
        return f"{text} ({self.why}.)" if self.why else text

    @property
    def subject(self) -> str:
        """The number and its parameters, in a few words."""
        names = ", ".join(self.names[:SHOWN]) + (" and others" if len(self.names) > SHOWN else "")
        return names if self.text else f"{_PHRASES[self.what]} of {names}"


_PHRASES = {
    "start": "the initial size",
    "rate": "the learning rate",
    "eps": "Adam's eps",
    "pull": "the decay lr*wd",
    "multiplier": "the forward multiplier",
}


def _goes(exponent: float, word: str, s: str = "s") -> str:
    if abs(exponent) < 0.05:
        return f"stay{s}"
    return f"{'grow' if exponent > 0 else 'fall'}{s} as {power(word, exponent)}"


def power(word: str, exponent: float) -> str:
    """A power law in words, its exponent to two digits.

    Args:
        word: what grows.
        exponent: of it.
    """
    return f"{word}^{round(exponent, 2) + 0.0:g}"


def consequence(
    d: Difference, what: What, worst: tuple[str, Entry] | None, line: GrowthSeries
) -> str:
    """Return a sentence on what happens as the model grows.

    Args:
        d: the number that differs.
        what: as the finding has it.
        worst: the observable that suffers most, and its exponent; None where `limits` shows none.
        line: what grows.
    """
    if d.bent:
        size = line.models[d.off[1]].sizes.get(line.axis, 1)
        return f"at {line.word} {size} it is {d.off[0]:.2g} times what the other sizes make it"
    if worst is not None:
        row, entry = worst
        of, _, group = row.partition(", ")
        told = f"{of} of {group}" if of in ("weight movement", "gradient over eps") else row
        verb = _VERBS[entry.verdict][row.startswith("entries")]
        return f"{'' if row.startswith('lr') else 'the '}{told} {verb} as {power(line.word, entry.exponent)}"
    if d.slope is None:
        return "the models are not of one parameterization"
    fades = d.excess < 0
    steps = {
        "rate": "its steps",
        "multiplier": "its steps",
        "start": "what it writes at the start",
        "eps": "its gradients over eps",
        "pull": "its pull to zero",
    }
    if what == "eps":
        fades = not fades
    verb = "fade" if fades else "grow"
    s = "s" if what in ("start", "pull") else ""
    end = " and it stops training" if fades and what in ("rate", "multiplier") else ""
    return f"{steps[what]} {verb}{s} as {power(line.word, -d.excess if what == 'eps' else d.excess)} beside the rest{end}"


_VERBS = {
    "explodes": ("explodes", "explode"), "vanishes": ("vanishes", "vanish"), "frozen": ("freezes", "freeze"),
    "lazy": ("becomes lazy", "become lazy"),
}  # fmt: skip
"""Verdict to its verb, of one and of several."""


def remedy(d: Difference, what: What, line: GrowthSeries) -> str:
    """Return what to write instead, at the largest size.

    Args:
        d: the number that differs.
        what: as the finding has it.
        line: what grows.
    """
    last = line.models[-1]
    where = f"at {line.word} {last.sizes.get(line.axis, 1)}"
    factor = 1.0 if d.slope is None else line.t[-1] ** -d.excess
    if d.slope is None:
        return "Start it at zero, or not, at every size"
    if d.bent:
        return "Scale every size from the one base"
    if d.name == LOGITS:
        return f"Multiply q.k by {_number((last.dump.attention or 1) * factor)} {where}, not {_number(last.dump.attention)}"
    if d.name == BRANCH:
        return f"Multiply every branch by {_number((last.dump.branch or 1) * factor)} {where}, not {_number(last.dump.branch)}"
    if d.name == TIED:
        return f"Multiply the logits by {_number((last.dump.readout or 1) * factor)} {where}, not {_number(last.dump.readout)}"
    entry = last.parameters[d.name].entry
    column = _COLUMNS[what]
    now = getattr(entry, column)
    if what == "multiplier":
        return f"Multiply what it writes by {_number(now * factor)} {where}, not {_number(now)}"
    law = _power_of(d, column, line)
    times = "as at the base" if abs(law) < 0.05 else f"the base's x {power(line.word, law)}"
    return f"Write {column} {_number(now * factor)} {where}, not {_number(now)}: {times}"


_COLUMNS: dict[What, Column] = {
    "start": "std",
    "rate": "lr",
    "eps": "eps",
    "pull": "wd",
    "multiplier": "multiplier",
}


def _power_of(d: Difference, column: Column, line: GrowthSeries) -> float:
    """The power that the column should have, the multiplier staying as it is."""
    logs = [math.log(getattr(m.parameters[d.name].entry, column)) for m in line.models]
    return line.exponent([x - logs[0] for x in logs]) - d.excess


def _number(number: float | None) -> str:
    return f"{number:.3g}"
