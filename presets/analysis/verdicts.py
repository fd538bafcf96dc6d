"""Verdicts on the exponents of `mupax.presets.analysis.limits`, and tables of them.

An observable is a quantity of a model, such as its attention logits, that goes as a power of a
growing size. Its verdict is one of these words:

* stable: The observable does not depend on the size.
* explodes: The observable grows with the size.
* vanishes: The observable shrinks with the size.
* frozen: Weights or logits stop moving.
* lazy: Features stop moving while the output learns.
* heads collapse: All heads start with logits of zero and get the same dynamics.
* converges: A random quantity becomes the same for every initialization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import EXPERT_LIMITS, LIMITS
from mupax.presets.preset import Preset

SYMBOLS = {
    "head_dim": "N",
    "heads": "H",
    "depth": "L",
    "width": "D",
    "experts": "E",
    "expert_dim": "m",
}

ORDER = ("explodes", "lazy", "frozen", "heads collapse", "vanishes", "stable")
"""Verdicts, worst first."""

DESCRIPTIVE = (
    "variance of attention over heads",
    "squared error of the kernel",
    "output",
    "one block's share of the stream",
    "all blocks' share of the stream",
    "change of q, k entries",
    "q, k backward signal, at first",
    "router's scores",
    "what an expert writes, at first",
    "signal into an encoder, at first",
    "weight movement, q, k",
)
"""Observables that are shown but are no fault of a preset if they are not stable.

All other observables judge the preset.
"""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Exponent of one observable in one limit, and the verdict on it, such as "stable".

    An observable is a quantity such as "attention logits". The exponent is a power of the size that
    grows in the limit.
    """

    exponent: float
    verdict: str


def verdicts(
    preset: Preset, optimizer: str = "adam", *, experts: bool = False
) -> dict[str, dict[str, Entry]]:
    """Return the exponent of, and the verdict on, every observable in every limit.

    Args:
        preset: Preset in any form and with any base. Neither changes the result.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
        experts: Whether the model has experts in place of MLPs. The limits are then those of
            `EXPERT_LIMITS`, otherwise those of `LIMITS`.

    Returns:
        Entries by observable and limit.

    Raises:
        PresetError: The preset has no rule for the optimizer.
    """
    family = preset.family(optimizer)
    limits = LIMITS
    part = ""
    if experts:
        limits = EXPERT_LIMITS
        part = "experts"
    table: dict[str, dict[str, Entry]] = {}
    for name, growth in limits.items():
        limit = Limit(preset, family, growth, part=part)
        for observable, entry in entries(limit, name).items():
            table.setdefault(observable, {})[name] = entry
    return table


def entries(limit: Limit, name: str) -> dict[str, Entry]:
    """Return the exponent of, and the verdict on, every observable in one limit.

    A model without experts also gets the observables of attention to an encoder.

    Args:
        name: Key of `LIMITS` or `EXPERT_LIMITS`. Verdicts depend on it: a feature that vanishes is
            "lazy" in a limit of widths and "frozen" in that of depth.
    """
    exponents = limit.observables()
    # A model with experts has one stack, and no attention to an encoder.
    if not limit.routed:
        exponents |= _cross_attention(limit.of("cross"))
        exponents |= _encoder_signal(limit)
    table = {}
    for observable, exact in exponents.items():
        # Floating-point sums of exponents are not exact. Adding 0.0 turns -0.0 into 0.0.
        exponent = round(exact, 10) + 0.0
        word = _verdict(observable, name, exponent, exponents, limit.family)
        table[observable] = Entry(exponent, word)
    return table


def _cross_attention(cross: Limit) -> dict[str, float]:
    """Return the exponents of cross-attention's observables, by observable.

    Only observables are included that may differ from those of self-attention.
    """
    exponents = {
        "cross-attention logits": cross.attention,
        "change of cross-attention logits": cross.d_attention,
        "change of cross-attention's v": cross.dv - cross.v,
    }
    weights = ("query", "key", "value", "attention out")
    on_adam = [weight for weight in weights if not cross.orthogonal(weight)]
    if on_adam and cross.family in ("adam", "muon"):
        over_eps = map(cross.gradient_over_eps, on_adam)
        exponents["gradient over eps, cross-attention"] = min(over_eps)
    return exponents


def _encoder_signal(limit: Limit) -> dict[str, float]:
    """Return the exponents of the backward signal at an encoder's output, by observable.

    The signal is relative to the one at the decoder's output. One observable is for weights at
    initialization ("at first"), one for weights that training has aligned ("aligned"). The signal
    is a sum over the decoder's blocks, through W_V^T W_O^T of each. (Derived.)
    """
    cross = limit.of("cross")
    block = limit.branch - limit.stream
    # Blocks are independent at first and add up as L^1/2. As far as they have moved they are
    # aligned, and add up as L.
    first = block + limit.layers / 2
    moved = max(cross.movement("value"), cross.movement("attention out"))
    aligned = max(first, block + limit.layers + min(moved, 0.0))
    return {"signal into an encoder, at first": first, "signal into an encoder, aligned": aligned}


_FROZEN = (
    "weight movement",
    "change of attention",
    "change of router's scores",
    "change of cross-attention logits",
)
"""First words of observables for which the verdict is "frozen" if they vanish."""

_FEATURES = (
    "change of v, MLP entries",
    "change of what experts write",
    "change of cross-attention's v",
    "change of the stream",
)
"""Observables that get the verdict "lazy" if they vanish with width, "frozen" with depth."""


def _verdict(
    observable: str, limit: str, exponent: float, exponents: Mapping[str, float], family: str
) -> str:
    """Return the verdict on one observable, such as "stable", "explodes" or "lazy".

    Args:
        observable: Key of `exponents`.
        limit: Key of `LIMITS` or `EXPERT_LIMITS`.
        exponents: Exponents of all observables in this limit.
        family: Family of the optimizer. Some backward signals matter only under "sgd".
    """
    if observable == "one block's share of the stream":
        # One block may vanish against the stream, as long as all of them together do not grow.
        share_of_all = exponents["all blocks' share of the stream"]
        return "stable" if share_of_all <= 0 else "explodes"
    if observable == "squared error of the kernel":
        return "converges" if exponent < 0 else "stable"
    if observable.startswith("gradient over eps"):
        # If the gradient grows relative to eps, Adam ends at Adam without eps, which has a stable
        # limit, too.
        return "vanishes" if exponent < 0 else "stable"
    if observable.startswith(("q, k backward signal", "signal into an encoder")):
        # Adam divides by the signal. SGD's learning rate fits either the signal at first or the
        # aligned one, and training goes from the first to the second.
        return "explodes" if exponent > 0 and family == "sgd" else "stable"
    if exponent > 0:
        return "explodes"
    if exponent == 0:
        return "stable"
    return _word_for_decrease(observable, limit, exponents)


def _word_for_decrease(observable: str, limit: str, exponents: Mapping[str, float]) -> str:
    """Return the verdict on an observable that shrinks, that is, has a negative exponent.

    The result is "heads collapse", "frozen", "lazy" or "vanishes".
    """
    if observable in ("attention logits", "cross-attention logits") and limit == "head_dim":
        return "heads collapse"
    if observable == "weight movement, q, k" and exponents["change of attention logits"] >= 0:
        # The logits are a sum over many entries and move all the same.
        return "vanishes"
    if observable == "what an expert writes, at first":
        # In a mean-field start the initial output of an expert vanishes. What its steps write is of
        # the same order at every size.
        return "vanishes"
    if observable.startswith(_FROZEN):
        return "frozen"
    if observable in _FEATURES:
        return "frozen" if limit == "depth" else "lazy"
    return "vanishes"


def wrong(preset: Preset, optimizer: str = "adam") -> dict[str, list[tuple[str, Entry]]]:
    """Return the observables that a preset does not keep stable, by limit, worst verdict first.

    Observables in `DESCRIPTIVE` are left out. A limit without faults has an empty list.

    Args:
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
    """
    unstable: dict[str, list[tuple[str, Entry]]] = {limit: [] for limit in LIMITS}
    for observable, by_limit in verdicts(preset, optimizer).items():
        for limit, entry in by_limit.items():
            if entry.verdict != "stable" and observable not in DESCRIPTIVE:
                unstable[limit].append((observable, entry))
    for pairs in unstable.values():
        pairs.sort(key=lambda pair: ORDER.index(pair[1].verdict))
    return unstable


def limits_rows(
    preset: Preset, optimizer: str = "adam", *, experts: bool = False
) -> list[list[str]]:
    """Return a table of text: a header, then a row per observable with a cell per limit.

    Args:
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
        experts: Whether the model has experts in place of MLPs.
    """
    table = verdicts(preset, optimizer, experts=experts)
    limits = next(iter(table.values()))
    rows = [["observable", *(f"{limit} ({SYMBOLS[limit]})" for limit in limits)]]
    for observable, by_limit in table.items():
        cells = []
        for limit, entry in by_limit.items():
            cells.append(cell(entry, SYMBOLS[limit]))
        rows.append([observable, *cells])
    return rows


def compare_rows(presets: Sequence[Preset], optimizer: str = "adam") -> list[list[str]]:
    """Return a table of text that compares presets: a header, then a row per finding.

    A finding is a limit and an observable that some preset does not keep stable. Observables in
    `DESCRIPTIVE` are left out.

    Args:
        presets: Presets to compare, at least one, such as `[get("mup"), get("sp")]`.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
    """
    tables = [verdicts(preset, optimizer) for preset in presets]
    rows = [["growing", "observable", *(preset.name for preset in presets)]]
    for limit in LIMITS:
        for observable in tables[0]:
            row_entries = [table[observable][limit] for table in tables]
            unstable = any(entry.verdict != "stable" for entry in row_entries)
            if unstable and observable not in DESCRIPTIVE:
                cells = [cell(entry, SYMBOLS[limit]) for entry in row_entries]
                rows.append([limit, observable, *cells])
    return rows


def summary_rows(presets: Sequence[Preset], optimizer: str = "adam") -> list[list[str]]:
    """Return a table of text: a header, then a row per preset with a cell per limit.

    A cell names each verdict other than "stable" once, with the observable of the largest exponent.

    Args:
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
    """
    rows = [["preset", *(f"{limit} ({SYMBOLS[limit]}) grows" for limit in LIMITS)]]
    for preset in presets:
        cells = []
        for limit, unstable in wrong(preset, optimizer).items():
            cells.append(_summary(unstable, SYMBOLS[limit]))
        rows.append([preset.name, *cells])
    return rows


def _summary(unstable: Sequence[tuple[str, Entry]], symbol: str) -> str:
    """Return text with each verdict once and its observable of the largest exponent.

    The text is "stable" if the list is empty.

    Args:
        unstable: Pairs of an observable and its entry, from `wrong`.
        symbol: Letter of the size that grows, such as "N".
    """
    worst: dict[str, tuple[str, float]] = {}
    for observable, entry in unstable:
        _, largest = worst.get(entry.verdict, ("", 0.0))
        if abs(entry.exponent) > abs(largest):
            worst[entry.verdict] = (observable, entry.exponent)
    texts = []
    for word, (observable, exponent) in worst.items():
        texts.append(f"{word} ({observable} {symbol}^{exponent:g})")
    return "; ".join(texts) or "stable"


def cell(entry: Entry, symbol: str) -> str:
    """Return verdict and power law as text, such as "explodes N^0.5". A power of 0 is left out.

    Args:
        symbol: Letter of the size that grows, such as "N".
    """
    if entry.exponent == 0:
        return entry.verdict
    return f"{entry.verdict} {symbol}^{entry.exponent:g}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table, the first row as its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
