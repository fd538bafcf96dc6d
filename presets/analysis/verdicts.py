"""What the exponents of `mupax.presets.analysis.limits` mean to who trains: a word for each, tables of them, presets side by side.

stable: does not depend on the size. explodes, vanishes: does. frozen: weights or logits stop moving. lazy: features stop
moving while the output learns. heads collapse: all heads start with the same (no) logits and get the same dynamics.
converges: a random quantity becomes the same for every initialization.
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
"""Observables that describe a rule without speaking for or against it; the others judge it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One observable in one limit: size^exponent, and the word for it."""

    exponent: float
    verdict: str


def verdicts(
    preset: Preset, optimizer: str = "adam", *, experts: bool = False
) -> dict[str, dict[str, Entry]]:
    """Observable to limit to exponent and verdict.

    Args:
        preset: any; form and base do not matter.
        optimizer: whose updates.
        experts: of a model that has experts for MLPs, in the limits of `EXPERT_LIMITS`.

    Raises:
        PresetError: the preset has no rule for the optimizer.
    """
    family = preset.family(optimizer)
    table: dict[str, dict[str, Entry]] = {}
    for name, growth in (EXPERT_LIMITS if experts else LIMITS).items():
        limit = Limit(preset, family, growth, part="experts" if experts else "")
        for row, entry in entries(limit, name).items():
            table.setdefault(row, {})[name] = entry
    return table


def entries(limit: Limit, name: str) -> dict[str, Entry]:
    """Observable to exponent and verdict in one limit.

    Args:
        limit: of any growth.
        name: the limit of `LIMITS` or `EXPERT_LIMITS` whose words fit that growth.
    """
    column = limit.observables()
    column |= {} if limit.routed else _of_cross(limit.of("cross")) | _into_encoder(limit)
    rounded = {row: round(exponent, 10) + 0.0 for row, exponent in column.items()}
    return {
        row: Entry(x, _verdict(row, name, x, column, limit.family)) for row, x in rounded.items()
    }


def _of_cross(limit: Limit) -> dict[str, float]:
    """Of a decoder's attention to an encoder's output: what may differ from its attention to itself."""
    rows = {
        "cross-attention logits": limit.attention,
        "change of cross-attention logits": limit.d_attention,
        "change of cross-attention's v": limit.dv - limit.v,
    }
    on_adam = [
        name for name in ("query", "key", "value", "attention out") if not limit.orthogonal(name)
    ]
    if on_adam and limit.family in ("adam", "muon"):
        over = (
            limit.gradient[name] - limit.x(limit.rows[name].eps_of(limit.family))
            for name in on_adam
        )
        rows["gradient over eps, cross-attention"] = min(over)
    return rows


def _into_encoder(limit: Limit) -> dict[str, float]:
    """Backward signal at an encoder's output over that at its decoder's: a sum over the decoder's blocks, through W_V^T W_O^T of each.

    At first they are independent, which makes it L^1/2 of them, later in concert, L, as far as they have moved. (Derived.)
    """
    cross, each = limit.of("cross"), limit.branch - limit.stream
    first, moved = (
        each + limit.layers / 2,
        max(cross.movement("value"), cross.movement("attention out")),
    )
    later = max(first, each + limit.layers + min(moved, 0.0))
    return {"signal into an encoder, at first": first, "signal into an encoder, aligned": later}


def _verdict(
    row: str, limit: str, exponent: float, column: Mapping[str, float], family: str
) -> str:
    if row == "one block's share of the stream":
        return "stable" if column["all blocks' share of the stream"] <= 0 else "explodes"
    if row == "squared error of the kernel":
        return "converges" if exponent < 0 else "stable"
    if row.startswith("gradient over eps"):
        return "vanishes" if exponent < 0 else "stable"
    if row.startswith(("q, k backward signal", "signal into an encoder")):
        # Adam divides by it; SGD's rate is set for one of the two and training goes from the first to the second.
        return "explodes" if exponent > 0 and family == "sgd" else "stable"
    if exponent > 0:
        return "explodes"
    if exponent == 0:
        return "stable"
    if row in ("attention logits", "cross-attention logits") and limit == "head_dim":
        return "heads collapse"
    if row == "weight movement, q, k" and column["change of attention logits"] >= 0:
        return "vanishes"  # and the logits, a sum over many entries, move all the same
    if row == "what an expert writes, at first":
        return "vanishes"  # a mean-field start: its steps write as much at every size
    if row.startswith(
        (
            "weight movement",
            "change of attention",
            "change of router's scores",
            "change of cross-attention logits",
        )
    ):
        return "frozen"
    if row in (
        "change of v, MLP entries",
        "change of what experts write",
        "change of cross-attention's v",
        "change of the stream",
    ):
        return "frozen" if limit == "depth" else "lazy"
    return "vanishes"


def wrong(preset: Preset, optimizer: str = "adam") -> dict[str, list[tuple[str, Entry]]]:
    """Limit to the judging observables that are not stable in it, worst first.

    Args:
        preset: whose verdicts.
        optimizer: whose steps change the model.
    """
    unstable: dict[str, list[tuple[str, Entry]]] = {limit: [] for limit in LIMITS}
    for row, at in verdicts(preset, optimizer).items():
        for limit, entry in at.items():
            if entry.verdict != "stable" and row not in DESCRIPTIVE:
                unstable[limit].append((row, entry))
    return {
        limit: sorted(rows, key=lambda row: ORDER.index(row[1].verdict))
        for limit, rows in unstable.items()
    }


def limits_rows(
    preset: Preset, optimizer: str = "adam", *, experts: bool = False
) -> list[list[str]]:
    """Every observable and its cell per limit, with a header row.

    Args:
        preset: whose observables.
        optimizer: whose steps change the model.
        experts: as `verdicts`.
    """
    table = verdicts(preset, optimizer, experts=experts)
    rows = [
        ["observable", *(f"{limit} ({SYMBOLS[limit]})" for limit in next(iter(table.values())))]
    ]
    return [
        *rows,
        *(
            [row, *(cell(entry, SYMBOLS[limit]) for limit, entry in at.items())]
            for row, at in table.items()
        ),
    ]


def compare_rows(presets: Sequence[Preset], optimizer: str = "adam") -> list[list[str]]:
    """Presets side by side: a row per limit and judging observable that some preset does not keep stable, with a header row.

    Args:
        presets: a column each.
        optimizer: whose steps change the models.
    """
    tables = [verdicts(preset, optimizer) for preset in presets]
    rows = [["growing", "observable", *(preset.name for preset in presets)]]
    for limit in LIMITS:
        for row in tables[0]:
            entries = [table[row][limit] for table in tables]
            if row not in DESCRIPTIVE and any(entry.verdict != "stable" for entry in entries):
                rows.append([limit, row, *(cell(entry, SYMBOLS[limit]) for entry in entries)])
    return rows


def summary_rows(presets: Sequence[Preset], optimizer: str = "adam") -> list[list[str]]:
    """A row per preset, a column per limit: each verdict but stable once, with the observable that shows it most.

    Args:
        presets: a row each.
        optimizer: whose steps change the models.
    """
    rows = [["preset", *(f"{limit} ({SYMBOLS[limit]}) grows" for limit in LIMITS)]]
    for preset in presets:
        cells = []
        for limit, entries in wrong(preset, optimizer).items():
            worst: dict[str, tuple[str, float]] = {}
            for row, entry in entries:
                if abs(entry.exponent) > abs(worst.get(entry.verdict, ("", 0.0))[1]):
                    worst[entry.verdict] = (row, entry.exponent)
            words = [
                f"{word} ({row} {SYMBOLS[limit]}^{exponent:g})"
                for word, (row, exponent) in worst.items()
            ]
            cells.append("; ".join(words) or "stable")
        rows.append([preset.name, *cells])
    return rows


def cell(entry: Entry, symbol: str) -> str:
    """Word and power of a letter, which a power of 0 leaves out.

    Args:
        entry: of an observable.
        symbol: of what grows.
    """
    return entry.verdict if entry.exponent == 0 else f"{entry.verdict} {symbol}^{entry.exponent:g}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
