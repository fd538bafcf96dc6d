"""Which dimensions of a transformer can be scaled, from a preset's rules alone: the desiderata of the feature speed formula by mapping.

At initialization, as one dimension grows alone, of all mappings that a block is cut into (`mappings`; entries are root mean squares):

* signal: entries of every mapping stay Theta(1).
* speed: they move at Theta(1) by their own weights, where rates are such that every weight has an equal part of the loss's decay,
  1/L of it in each of L layers. The formula (Chizat and Netrapalli 2023, 2311.18718) then has no rate in it:
  |df| = part / (cos theta |b|), b the backward signal there, |.| over all entries.
* balance: under the preset's own rates of SGD all those parts have one exponent.
* loss decay: the largest of them is Theta(1).

Where depth lets the stream grow, backward signals grow by powers that depend on the activation, and the last three are left open.

The composition is derived here. These are desiderata of the first step: a mapping that fails one may train well, as logits that
vanish at the start do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mupax.presets.analysis.mappings import exponents
from mupax.presets.preset import Preset

GROWTHS: dict[str, dict[str, float]] = {
    "d_k": {"head_dim": 1.0},
    "d_v": {"value_dim": 1.0},
    "d_ff": {"mlp": 1.0},
    "d_model": {"embed": 1.0},
    "heads": {"heads": 1.0, "kv_heads": 1.0},
    "width": {"heads": 1.0, "kv_heads": 1.0, "embed": 1.0, "mlp": 1.0},
    "positions": {"position": 1.0},
    "depth": {"layers": 1.0},
}
"""Dimension to the axes that grow with it: each alone, but for width, which is heads with d_model and d_ff."""

ENCODED: dict[str, dict[str, float]] = {
    "d_k": GROWTHS["d_k"],
    "d_v": GROWTHS["d_v"],
    "d_ff": GROWTHS["d_ff"],
    "d_model": {**GROWTHS["d_model"], "memory": 1.0},
    "heads": GROWTHS["heads"],
    "width": {**GROWTHS["width"], "memory": 1.0},
    "targets": GROWTHS["positions"],
    "depth": GROWTHS["depth"],
    "encoder_depth": {"encoder_layers": 1.0},
}
"""The same of an encoder-decoder: widths of both stacks, targets and depth of the decoder alone, the encoder's depth alone."""

COLUMNS = ("signal", "speed", "balance", "loss decay")
_TOLERANCE = 0.01
_PARTS = ("", "cross ", "encoder ")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One desideratum where one dimension grows.

    Attributes:
        exponent: the farthest from 0 of `exponents`; None where there is none.
        of: names of those that have it; empty where it is 0.
        exponents: name to exponent, all that the desideratum is about.
        why: there is none.
    """

    exponent: float | None
    of: tuple[str, ...] = ()
    exponents: Mapping[str, float] = dataclasses.field(default_factory=dict)
    why: str = ""

    @property
    def holds(self) -> bool:
        return self.exponent is not None and not self.of

    @property
    def names(self) -> str:
        """Those of `of`; with an encoder by part, where "every" is of the decoder, its cross-attention and the encoder, if they have it."""
        parts = {
            name: {part for part in _PARTS if part + name in self.exponents}
            for name in map(_bare, self.exponents)
        }
        if all(own == {""} for own in parts.values()):
            return ", ".join(self.of)
        every = [
            name
            for name, own in parts.items()
            if all(part + name in self.of for part in own) and len(own) > 1
        ]
        texts = [f"every {', '.join(every)}"] if every else []
        for part in _PARTS:
            own = [name for name in parts if part + name in self.of and name not in every]
            texts += [f"{part or 'decoder '}{', '.join(own)}"] if own else []
        return "; ".join(texts)

    def text(self, dimension: str) -> str:
        """yes, or what goes how, as `no: q, k go as d_k^-0.5`."""
        if self.exponent is None:
            return self.why
        return "yes" if self.holds else f"no: {self.names} {dimension}^{self.exponent:+.3g}"


def _bare(name: str) -> str:
    return name.removeprefix("cross ").removeprefix("encoder ")


def cell(exponents: Mapping[str, float], tolerance: float = _TOLERANCE) -> Cell:
    """What is farthest from 0, the growing ones of two.

    Args:
        exponents: name to exponent.
        tolerance: that is 0.
    """
    worst = max(exponents.values(), key=lambda x: (round(abs(x), 6), x))
    if abs(worst) <= tolerance:
        return Cell(0.0 if tolerance == _TOLERANCE else worst, (), exponents)
    return Cell(
        worst,
        tuple(name for name, x in exponents.items() if abs(x - worst) <= tolerance),
        exponents,
    )


def growths(*, encoder: bool = False) -> dict[str, dict[str, float]]:
    """Dimension to the axes that grow with it, and how fast.

    Args:
        encoder: of a model whose decoder reads an encoder.
    """
    return ENCODED if encoder else GROWTHS


def desiderata(preset: Preset, dimension: str, *, encoder: bool = False) -> dict[str, Cell]:
    """The four desiderata where a dimension of `growths` grows.

    Args:
        preset: in any form; balance and loss decay read its rates of SGD.
        dimension: that grows.
        encoder: of a decoder that reads an encoder, both stacks.
    """
    powers = exponents(preset, growths(encoder=encoder)[dimension], encoder=encoder)
    if powers.grows:
        why = Cell(None, why=f"no power law: the {powers.grows[0]} grows")
        return {"signal": cell(powers.signal), **dict.fromkeys(COLUMNS[1:], why)}
    rule, none = "sgd" not in preset.no_rule, Cell(None, why="no rule for SGD")
    most = max(powers.parts.values())
    return {
        "signal": cell(powers.signal),
        "speed": cell(powers.speed),
        "balance": cell({name: x - most for name, x in powers.parts.items()}) if rule else none,
        "loss decay": cell({name: x for name, x in powers.parts.items() if x > most - _TOLERANCE})
        if rule
        else none,
    }


def rows(preset: Preset, *, encoder: bool = False) -> list[list[str]]:
    """A table for a person: every dimension, whether it can be scaled, and what says so.

    Args:
        preset: the table that is asked.
        encoder: of a decoder that reads an encoder.
    """
    table = [["dimension", "scales", *COLUMNS]]
    for dimension in growths(encoder=encoder):
        cells = desiderata(preset, dimension, encoder=encoder)
        can = all(cells[column].holds for column in COLUMNS)
        table.append(
            [
                dimension,
                "can" if can else "cannot",
                *(cells[column].text(dimension) for column in COLUMNS),
            ]
        )
    return table
