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
        "in key heads alone right tables explode too, and `check --grow kv_heads` refuses SGD",
    ),
    Untold(
        ("completep", "spectral"), ("adam",), _EPS,
        "`Preset.uneven`: their rows are of widths that grow together, and eps is not judged where one grows alone",
    ),
    Untold(
        ("spectral",), ("adam", "sgd", "muon"), _STARTS,
        "a start is bounded by both fans, and where one grows alone the right one is smaller by what the mistake adds",
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
    """Of the page: what is told under every preset and optimizer, and what is not."""
    where = "; ".join(
        f"`{preset}` under {', '.join(optimizers)}" for preset, optimizers in TABLES.items()
    )
    text = [
        f"The same mistakes are made in {where}, rates in the optimizer's column. An eps is a mistake only where Adam reads it, and one of",
        f"depth only in presets with a rule for it. Of the {len(WRONG)} these cannot be told:",
        "",
        "| mistakes | presets | optimizers | why |",
        "|---|---|---|---|",
    ]
    return text + [
        f"| {'; '.join(one.mistakes)} | {', '.join(f'`{name}`' for name in one.presets)} | {', '.join(one.optimizers)} | {one.reason} |"
        for one in UNTOLD
    ]
