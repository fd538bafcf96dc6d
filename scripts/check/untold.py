"""Mistakes in a preset's rules that theory does not report, by preset and optimizer, with reasons.

A mistake is an entry of `WRONG`. Theory reports the mistake if it finds a fault in a parameter that
has the wrong rule. Used by `scripts.check.structures`.
"""

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
"""Optimizers that each preset has a rule for. The mistakes are made in all of these presets."""
_STARTS = (
    "key heads in the value's fan-in",
    "MLP out with the width for fan-in",
    "MLP in with its own width for fan-in",
    "cross-attention's key with the decoder's width for fan-in",
)
_EPS = ("MLP in with the eps of other matrices",)


@dataclass(frozen=True)
class Untold:
    """Mistakes that theory does not report in some presets under some optimizers.

    Attributes:
        mistakes: Keys of `WRONG`.
        reason: Clause that the page shows.
        label: Words for the mistakes on the page, by default their names.
    """

    presets: tuple[str, ...]
    optimizers: tuple[str, ...]
    mistakes: tuple[str, ...]
    reason: str
    label: str = ""


UNTOLD = (
    Untold(
        tuple(TABLES), ("sgd",), ("value rate x G under GQA",),
        "right rules explode too when only key heads grow; `check --grow kv_heads` refuses SGD",
    ),
    Untold(
        ("completep", "spectral"), ("adam",), _EPS,
        "rules assume that widths grow together (`Preset.uneven`), so eps is not checked otherwise",
    ),
    Untold(
        ("spectral",), ("adam", "sgd", "muon"), _STARTS,
        "when one width grows alone, the right std falls so fast "
        "that the mistake's larger std does not explode",
        'the four with "fan-in" in their names',
    ),
)  # fmt: skip


def untold(preset: str, optimizer: str) -> set[str]:
    """Return the mistakes that theory does not report in a preset under an optimizer.

    Returns:
        Keys of `WRONG`.
    """
    names: set[str] = set()
    for exception in UNTOLD:
        if preset in exception.presets and optimizer in exception.optimizers:
            names.update(exception.mistakes)
    return names


def reads(wrong: Wrong, table: Preset, specs: Iterable[ParamSpec], optimizer: str) -> bool:
    """Return whether a mistake changes anything that the optimizer reads.

    Args:
        table: Right table, which `wrong` is applied to.
        specs: `ParamSpec` of every parameter of the model.
    """
    wrong_table = wrong.of(table)
    family = table.family(optimizer)
    for spec in specs:
        row = table.rule(spec)
        wrong_row = wrong_table.rule(spec)
        # Only Adam reads eps. Muon leaves parameters without a Muon rule to Adam.
        reads_eps = family == "adam" or (family == "muon" and row.muon is None)
        if not reads_eps:
            wrong_row = replace(wrong_row, eps=row.eps)
        if row != wrong_row:
            return True
    return False


def names(wrong: Wrong, troubles: dict[str, str]) -> bool:
    """Return whether theory's findings report a mistake.

    A finding reports the mistake if it is at the mistake's own observable (`wrong.where`), or at
    another one of the same kind, such as "movement", with the same verdict.

    Args:
        troubles: Verdict of theory by observable and step (`scripts.check.structures.troubles`).
    """
    if wrong.where in troubles:
        return True
    kind = wrong.where.partition("/")[0]
    # Some optimizers do not read the column that makes the first observable wrong.
    return any(
        name.startswith(f"{kind}/") and verdict == wrong.word for name, verdict in troubles.items()
    )


def lines() -> list[str]:
    """Return the page's lines on mistakes that theory does not report, with a table of reasons."""
    by_optimizers: dict[tuple[str, ...], list[str]] = {}
    for preset, optimizers in TABLES.items():
        by_optimizers.setdefault(optimizers, []).append(f"`{preset}`")
    phrases = []
    for optimizers, presets in by_optimizers.items():
        phrases.append(f"{', '.join(presets)} under {', '.join(optimizers)}")
    combinations = ", and in ".join(phrases)
    text = [
        f"The {len(WRONG)} mistakes were also made in {combinations}. Left out are",
        "mistakes in values that the optimizer does not use (such as eps under SGD) and in depth rules",
        "that a preset lacks. Theory misses these:",
        "",
        "| mistakes | presets | optimizers | why |",
        "|---|---|---|---|",
    ]
    for exception in UNTOLD:
        mistakes = exception.label or "; ".join(exception.mistakes)
        presets = ", ".join(f"`{name}`" for name in exception.presets)
        if exception.presets == tuple(TABLES):
            presets = "all"
        optimizers = ", ".join(exception.optimizers)
        text.append(f"| {mistakes} | {presets} | {optimizers} | {exception.reason} |")
    return text
