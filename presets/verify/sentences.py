"""Sentences of a finding of `mupax verify`.

They say how a value grows, what follows as the model grows, and what to write instead.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from mupax.presets.analysis.verdicts import Entry
from mupax.presets.verify.differences import BRANCH, LOGITS, TIED, Difference
from mupax.presets.verify.fit import GrowthSeries
from mupax.presets.verify.formats.dump import Column

Severity = Literal["fault", "caution"]
ValueName = Literal["start", "rate", "eps", "pull", "multiplier"]
"""Value that a finding is about: a `Quantity`, or the forward multiplier."""
SHOWN = 3
"""Largest number of parameter names in one sentence."""
_STAYS = 0.05
"""Largest exponent that counts as no growth in a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Fault or caution about values of other code, with all parameters that have it in common.

    Attributes:
        severity: "fault" or "caution". Only a fault makes the command fail.
        names: Names of the parameters.
        role: Kind of the parameters, in words.
        what: Value that is wrong: "multiplier" if one factor would set both start and rate right.
        slope: Power of the growing size with which the value goes. `None` if it is 0 at some sizes.
        target: Power of the growing size with which the value should go.
        consequence: Clause on what happens as the model grows.
        remedy: Sentence on what to write instead.
        why: Reason why a caution is no fault.
        text: Complete sentence of a finding that is about no single value.
    """

    severity: Severity
    names: tuple[str, ...]
    role: str
    what: ValueName
    slope: float | None
    target: float
    consequence: str
    remedy: str
    why: str = ""
    text: str = ""

    @property
    def excess(self) -> float:
        """Measured exponent of the growing size minus the right one. 0 if `slope` is None."""
        return 0.0 if self.slope is None else self.slope - self.target

    def sentence(self, word: str) -> str:
        """Return the finding as text: how the value grows and should grow, consequence and remedy.

        A caution also has its reason. A finding with a `text` returns that text.

        Args:
            word: Word for what grows, such as "width".
        """
        if self.text:
            return self.text
        shown = ", ".join(self.names[:SHOWN])
        if len(self.names) > SHOWN:
            shown += f" and {len(self.names) - SHOWN} more"
        # A role that repeats the name of the parameter is noise in the sentence.
        explains_itself = self.names[0] in (LOGITS, BRANCH, TIED) or self.role in shown
        role = "" if explains_itself else f" ({self.role})"

        if self.slope is None:
            growth = "is 0 at one size and not at another"
        else:
            growth = f"{_grows(self.slope, word)} and should {_grow(self.target, word)}"
        text = (
            f"{shown}{role}: {_PHRASES[self.what]} {growth}, so {self.consequence}. {self.remedy}."
        )
        return f"{text} ({self.why}.)" if self.why else text

    @property
    def subject(self) -> str:
        """Noun phrase for the finding, such as "the learning rate of a.weight and others"."""
        names = ", ".join(self.names[:SHOWN])
        if len(self.names) > SHOWN:
            names += " and others"
        return names if self.text else f"{_PHRASES[self.what]} of {names}"


_PHRASES = {
    "start": "the initial size",
    "rate": "the learning rate",
    "eps": "Adam's eps",
    "pull": "the decay lr*wd",
    "multiplier": "the forward multiplier",
}


def _grow(exponent: float, word: str) -> str:
    """Return how a value should grow, with a verb in the infinitive, such as "fall as width^-1"."""
    if abs(exponent) < _STAYS:
        return "stay"
    verb = "grow" if exponent > 0 else "fall"
    return f"{verb} as {power(word, exponent)}"


def _grows(exponent: float, word: str) -> str:
    """Return how a value grows, with a verb in the third person, such as "falls as width^-1"."""
    verb, *clause = _grow(exponent, word).split(" ", 1)
    return " ".join([f"{verb}s", *clause])


def power(word: str, exponent: float) -> str:
    """Return a power law as text, such as "width^-0.5", with the exponent rounded to 0.01.

    Args:
        word: Word for what grows, such as "width".
        exponent: Power of the size. -0.0 is written as 0.
    """
    # Adding 0.0 turns -0.0 into 0.
    return f"{word}^{round(exponent, 2) + 0.0:g}"


def consequence(
    d: Difference, value_name: ValueName, worst: tuple[str, Entry] | None, line: GrowthSeries
) -> str:
    """Return a clause on what happens as the model grows if the value stays wrong.

    Args:
        d: Difference of the value from the preset.
        value_name: Value that the finding calls wrong, which may be the multiplier.
        worst: Observable that becomes worst, with its exponent. `None` if `limits` shows none.
    """
    if d.has_outlier:
        size = line.models[d.outlier].sizes.get(line.axis, 1)
        factor = f"{d.outlier_factor:.2g}"
        return f"at {line.word} {size} it is {factor} times what the other sizes make it"
    if worst is not None:
        return observable_consequence(*worst, line.word)
    if d.slope is None:
        return "the models are not of one parameterization"
    return _value_consequence(d.excess, value_name, line.word)


def observable_consequence(row: str, entry: Entry, word: str) -> str:
    """Return a clause on how an observable of `limits` behaves.

    An example is "the output explodes as width^0.5".

    Args:
        row: Name of the observable, such as "weight movement, readout".
        word: Word for what grows, such as "width".
    """
    observable, _, group = row.partition(", ")
    shown = row
    if observable in ("weight movement", "gradient over eps"):
        shown = f"{observable} of {group}"
    # "lr * weight decay" takes no article.
    article = "" if row.startswith("lr") else "the "
    singular, plural = _VERBS[entry.verdict]
    verb = plural if row.startswith("entries") else singular
    return f"{article}{shown} {verb} as {power(word, entry.exponent)}"


def _value_consequence(excess: float, value_name: ValueName, word: str) -> str:
    """Return a clause on a wrong value that changes no observable of `limits`.

    Args:
        excess: Exponent of the value minus the right one.
        word: Word for what grows, such as "width".
    """
    # A larger eps makes the update smaller.
    growth = -excess if value_name == "eps" else excess
    fades = (excess < 0) != (value_name == "eps")
    verb = "fade" if fades else "grow"
    if value_name in ("start", "pull"):
        verb += "s"
    ending = " and it stops training" if fades and value_name in ("rate", "multiplier") else ""
    return f"{_EFFECTS[value_name]} {verb} as {power(word, growth)} beside the rest{ending}"


_EFFECTS: dict[ValueName, str] = {
    "rate": "its steps",
    "multiplier": "its steps",
    "start": "what it writes at the start",
    "eps": "its gradients over eps",
    "pull": "its pull to zero",
}
"""Subject of the clause on a wrong value: what the value decides in training."""
_VERBS = {
    "explodes": ("explodes", "explode"),
    "vanishes": ("vanishes", "vanish"),
    "frozen": ("freezes", "freeze"),
    "lazy": ("becomes lazy", "become lazy"),
}
"""Verb for each verdict on an observable, in the singular and in the plural."""


def remedy(d: Difference, value_name: ValueName, line: GrowthSeries) -> str:
    """Return a sentence, without a period, on what to write instead at the largest size.

    Args:
        d: Difference of the value from the preset.
        value_name: Value that the finding calls wrong, which may be the multiplier.
    """
    if d.slope is None:
        return "Start it at zero, or not, at every size"
    if d.has_outlier:
        return "Scale every size from the one base"

    # The base keeps its values, and the largest model's are corrected.
    last = line.models[-1]
    place = f"at {line.word} {last.sizes.get(line.axis, 1)}"
    factor = line.t[-1] ** -d.excess
    if d.name == LOGITS:
        return _multiply("q.k", last.dump.attention, factor, place)
    if d.name == BRANCH:
        return _multiply("every branch", last.dump.branch, factor, place)
    if d.name == TIED:
        return _multiply("the logits", last.dump.readout, factor, place)

    entry = last.parameters[d.name].entry
    if value_name == "multiplier":
        return _multiply("what it writes", entry.multiplier, factor, place)
    column = _COLUMNS[value_name]
    present = getattr(entry, column)
    exponent = _column_exponent(d, column, line)
    law = "as at the base"
    if abs(exponent) >= _STAYS:
        law = f"the base's x {power(line.word, exponent)}"
    return f"Write {column} {present * factor:.3g} {place}, not {present:.3g}: {law}"


def _multiply(operand: str, present: float | None, factor: float, place: str) -> str:
    """Return a sentence, without a period, on the multiplier to write in place of the present one.

    Args:
        operand: Words for what is multiplied, such as "q.k".
        present: Multiplier in the dump. `None` counts as 1.
        factor: Right multiplier, divided by `present`.
        place: Words for the size, such as "at width 256".
    """
    right = (present or 1) * factor
    return f"Multiply {operand} by {right:.3g} {place}, not {present:.3g}"


_COLUMNS: dict[ValueName, Column] = {"start": "std", "rate": "lr", "eps": "eps", "pull": "wd"}


def _column_exponent(d: Difference, column: Column, line: GrowthSeries) -> float:
    """Return the power of t with which a column should grow if the multiplier stays as it is.

    Args:
        d: Difference of the value, whose excess is subtracted.
        column: Column of the dump that is to be changed, such as "lr".
        line: Models of the user's code. t is their size relative to the smallest.
    """
    logs = []
    for model in line.models:
        entry = model.parameters[d.name].entry
        logs.append(math.log(getattr(entry, column)))
    return line.exponent([log - logs[0] for log in logs]) - d.excess
