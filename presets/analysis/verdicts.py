"""Words for the exponents of `mupax.presets.analysis.limits`, and tables of them.

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
"""Observables that describe a rule without judging it. All other observables judge it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Exponent of one observable in one limit, and its verdict, such as "stable".

    The exponent is a power of the size that grows in the limit.
    """

    exponent: float
    verdict: str


def verdicts(
    preset: Preset, optimizer: str = "adam", *, experts: bool = False
) -> dict[str, dict[str, Entry]]:
    """Return exponent and word of every observable in every limit.

    Args:
        preset: Preset in any form and with any base. Neither changes the result.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
        experts: Whether the model has experts in place of MLPs. The limits are then those of
            `EXPERT_LIMITS`.

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
    """Return exponent and word of every observable in one limit.

    A model without experts also gets the observables of attention to an encoder.

    Args:
        name: Key of `LIMITS` or `EXPERT_LIMITS` whose words fit the growth of `limit`.
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
    """Return the exponents of attention to an encoder that may differ from self-attention.

    They are by name of the observable.
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

    They are relative to the signal at the decoder's output, at initialization and once weights are
    aligned. The signal is a sum over the decoder's blocks, through W_V^T W_O^T of each. (Derived.)
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
"""Beginnings of observables that are frozen if they vanish."""

_FEATURES = (
    "change of v, MLP entries",
    "change of what experts write",
    "change of cross-attention's v",
    "change of the stream",
)
"""Observables that are lazy if they vanish with width, and frozen if they vanish with depth."""


def _verdict(
    observable: str, limit: str, exponent: float, exponents: Mapping[str, float], family: str
) -> str:
    """Return the word for one observable, such as "stable", "explodes" or "lazy".

    Args:
        observable: Key of `exponents`.
        limit: Key of `LIMITS` or `EXPERT_LIMITS`.
        exponents: Exponents of all observables in this limit.
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
    """Return the word for an observable that shrinks: its exponent is negative.

    It is "heads collapse", "frozen", "lazy" or "vanishes".
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
    """Return the observables that are not stable, by limit and worst verdict first.

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

    A cell has each verdict other than stable once, with the observable that shows it most.

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
    """Return a text with each verdict once and the observable that shows it most.

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
    """Return an entry as text, such as "explodes N^0.5"; the power is left out if it is 0.

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
