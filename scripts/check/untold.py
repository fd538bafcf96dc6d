"""Wrong tables under every optimizer and preset: which mistakes an optimizer reads, and which cannot be told, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mupax.presets import ParamSpec, Preset
from scripts.check.wrong_tables import WRONG, Wrong

TABLES = {
    "mup": ("adam", "sgd", "muon", "lion"),
    "mup-half": ("adam", "sgd", "muon", "lion"),
    "depth-mup": ("adam", "sgd", "muon", "lion"),
    "completep": ("adam", "sgd", "muon", "lion"),
    "spectral": ("adam", "sgd", "muon"),
}
"""Presets that the mistakes are made in, and the optimizers that these have a rule for."""
_STARTS = (
    "key heads in the value's fan-in",
    "MLP out with the width for fan-in",
    "MLP in with its own width for fan-in",
    "cross-attention's key with the decoder's width for fan-in",
)
_EPS = ("MLP in with the row of any hidden matrix",)


@dataclass(frozen=True)
class Untold:
    """Mistakes that theory does not name.

    Attributes:
        presets: in which.
        optimizers: under which.
        mistakes: keys of `WRONG`.
        reason: a clause.
    """

    presets: tuple[str, ...]
    optimizers: tuple[str, ...]
    mistakes: tuple[str, ...]
    reason: str


UNTOLD = (
    Untold(
        tuple(TABLES), ("sgd",), ("value rate x G under GQA",),
        "right tables explode too when only key heads grow; `check --grow kv_heads` refuses SGD",
    ),
    Untold(
        ("completep", "spectral"), ("adam",), _EPS,
        "`Preset.uneven`: their rules assume that widths grow together, so eps is not checked when one grows alone",
    ),
    Untold(
        ("spectral",), ("adam", "sgd", "muon"), _STARTS,
        "both fans bound the initial std; when one grows alone, the right std is smaller by the factor of the mistake",
    ),
)  # fmt: skip


def untold(preset: str, optimizer: str) -> set[str]:
    """Mistakes in a preset that cannot be told under an optimizer."""
    return {
        name
        for one in UNTOLD
        if preset in one.presets and optimizer in one.optimizers
        for name in one.mistakes
    }


def reads(wrong: Wrong, table: Preset, specs: Iterable[ParamSpec], optimizer: str) -> bool:
    """Whether a mistake changes anything that the optimizer reads: eps is Adam's alone, and of Muon's what it leaves to Adam.

    Args:
        wrong: the mistake.
        table: the right one.
        specs: of the model's parameters.
        optimizer: that trains.
    """
    changed, family = wrong.of(table), table.family(optimizer)
    for spec in specs:
        row, other = table.rule(spec), changed.rule(spec)
        if not (family == "adam" or (family == "muon" and row.muon is None)):
            other = replace(other, eps=row.eps)
        if row != other:
            return True
    return False


def names(wrong: Wrong, troubles: dict[str, str]) -> bool:
    """Whether what has to name a mistake does: its observable, or one of the same kind and word where others are not read."""
    kind = wrong.where.partition("/")[0]
    return wrong.where in troubles or any(
        name.startswith(f"{kind}/") and word == wrong.word for name, word in troubles.items()
    )


def lines() -> list[str]:
    """Return the page's text on the mistakes that no preset and optimizer can name, with a table of reasons."""
    by_optimizers: dict[tuple[str, ...], list[str]] = {}
    for preset, optimizers in TABLES.items():
        by_optimizers.setdefault(optimizers, []).append(f"`{preset}`")
    combinations = "; ".join(
        f"{', '.join(presets)} under {', '.join(optimizers)}"
        for optimizers, presets in by_optimizers.items()
    )
    text = [
        f"The same mistakes are made in {combinations}.",
        "A wrong eps counts only where Adam reads it, and a wrong depth exponent only in presets with a rule for depth.",
        f"Of the {len(WRONG)} these are not named:",
        "",
        "| mistakes | presets | optimizers | why |",
        "|---|---|---|---|",
    ]
    for exception in UNTOLD:
        mistakes = "; ".join(exception.mistakes)
        presets = ", ".join(f"`{name}`" for name in exception.presets)
        if exception.presets == tuple(TABLES):
            presets = "all"
        optimizers = ", ".join(exception.optimizers)
        text.append(f"| {mistakes} | {presets} | {optimizers} | {exception.reason} |")
    return text
