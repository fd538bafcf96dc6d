"""Dimensions of a transformer that can be scaled, computed from a preset's rules alone.

The desiderata of the feature speed formula are checked as one dimension, such as d_model, grows
alone. They are about the mappings into which `mappings` cuts a block (q, logits, MLP in and so on),
at initialization. Entries are root mean squares.

| desideratum | condition                                                                         |
|-------------|-----------------------------------------------------------------------------------|
| signal      | Entries of every mapping stay of order one.                                       |
| speed       | Entries move by order one by their own weights, at learning rates at which every  |
|             | weight causes an equal part of the loss's decrease: 1/L of it in each of L layers.|
| balance     | Under the preset's own SGD rates all parts of the decrease have one exponent.     |
| loss decay  | The largest of these parts is of order one.                                       |

By the formula (Chizat and Netrapalli 2023, 2311.18718) the speed has no learning rate in it:
|df| = part / (cos theta |b|), with the backward signal b of the mapping and |.| over all entries.
If the stream grows with depth, backward signals grow by powers that depend on the activation, and
the last three desiderata are left open.

The composition is derived here. The desiderata are about the first step. A mapping that fails one
of them may still train well. Logits that vanish at initialization are an example.
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
"""Axes that grow with each dimension of a decoder, with their powers of that dimension.

Only "width" grows several dimensions together.
"""

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
"""Axes that grow with each dimension of an encoder-decoder, with their powers of that dimension.

Widths are those of both stacks. "targets" (decoder positions) and "depth" belong to the decoder
alone, "encoder_depth" to the encoder alone.
"""

COLUMNS = ("signal", "speed", "balance", "loss decay")
_TOLERANCE = 0.01
_PARTS = ("", "cross ", "encoder ")


@dataclasses.dataclass(frozen=True)
class Cell:
    """Result for one desideratum as one dimension grows: how far its exponents are from 0.

    Exponents are powers of the dimension that grows. A desideratum holds if all of them are 0.

    Attributes:
        exponent: Exponent farthest from 0. `None` if there is no power law.
        of: Names of mappings or weights that have this exponent. Empty if the desideratum holds.
        exponents: Exponents of all mappings or weights that the desideratum is about, by name.
        why: Reason why there is no exponent.
    """

    exponent: float | None
    of: tuple[str, ...] = ()
    exponents: Mapping[str, float] = dataclasses.field(default_factory=dict)
    why: str = ""

    @property
    def holds(self) -> bool:
        """True if there is an exponent and it counts as 0, so that `of` is empty."""
        return self.exponent is not None and not self.of

    @property
    def names(self) -> str:
        """Names in `of` as text, separated by commas.

        Names of an encoder-decoder are grouped by part: decoder, cross-attention and encoder.
        "every" precedes a name that `of` has for all of the parts that know the name.
        """
        parts: dict[str, set[str]] = {}
        for name in self.exponents:
            bare = _without_part(name)
            parts[bare] = {part for part in _PARTS if part + bare in self.exponents}
        if all(own == {""} for own in parts.values()):
            return ", ".join(self.of)
        every = []
        for bare, own in parts.items():
            if len(own) > 1 and all(part + bare in self.of for part in own):
                every.append(bare)
        texts = []
        if every:
            texts.append(f"every {', '.join(every)}")
        for part in _PARTS:
            shown = []
            for bare in parts:
                if part + bare in self.of and bare not in every:
                    shown.append(bare)
            if shown:
                texts.append(f"{part or 'decoder '}{', '.join(shown)}")
        return "; ".join(texts)

    def text(self, dimension: str) -> str:
        """Return "yes", or the names and their exponent, such as "no: q, k d_k^-0.5".

        Without a power law the text is the reason, `why`.

        Args:
            dimension: Word for the dimension that grows, such as "d_k".
        """
        if self.exponent is None:
            return self.why
        if self.holds:
            return "yes"
        return f"no: {self.names} {dimension}^{self.exponent:+.3g}"


def _without_part(name: str) -> str:
    """Return the name of a mapping without a leading "cross " or "encoder "."""
    return name.removeprefix("cross ").removeprefix("encoder ")


def cell(exponents: Mapping[str, float], tolerance: float = _TOLERANCE) -> Cell:
    """Return a cell with the exponent farthest from 0, and the names that have it.

    Of two exponents that are equally far from 0, the positive one counts. If the exponent counts as
    0, the desideratum holds and the cell has no names.

    Args:
        exponents: Exponents by name of a mapping or weight, at least one.
        tolerance: Largest absolute value that counts as 0. At the default, which is for computed
            exponents, such a value becomes exactly 0. At any other tolerance it is kept, because
            exponents are then measured.
    """
    worst = max(exponents.values(), key=lambda exponent: (round(abs(exponent), 6), exponent))
    if abs(worst) <= tolerance:
        is_theory = tolerance == _TOLERANCE
        return Cell(0.0 if is_theory else worst, (), exponents)
    names = []
    for name, exponent in exponents.items():
        if abs(exponent - worst) <= tolerance:
            names.append(name)
    return Cell(worst, tuple(names), exponents)


def growths(*, encoder: bool = False) -> dict[str, dict[str, float]]:
    """Return the axes that grow with each dimension, and their powers of the dimension.

    The result is `ENCODED` for an encoder-decoder and `GROWTHS` for a decoder.

    Args:
        encoder: `True` for an encoder-decoder, `False` for a decoder.
    """
    return ENCODED if encoder else GROWTHS


def desiderata(preset: Preset, dimension: str, *, encoder: bool = False) -> dict[str, Cell]:
    """Return the result for each of the four desiderata in `COLUMNS` as one dimension grows.

    A cell has the exponent `None` if there is none: all but "signal" if the stream grows with
    depth, "balance" and "loss decay" if the preset has no rule for SGD.

    Args:
        preset: Preset in any form. Balance and loss decay need its SGD learning rates.
        dimension: Key of `growths`.
        encoder: `True` for an encoder-decoder, `False` for a decoder.
    """
    powers = exponents(preset, growths(encoder=encoder)[dimension], encoder=encoder)
    signal = cell(powers.signal)
    if powers.grows:
        unknown = Cell(None, why=f"no power law: the {powers.grows[0]} grows")
        return {"signal": signal, "speed": unknown, "balance": unknown, "loss decay": unknown}
    speed = cell(powers.speed)
    if "sgd" in preset.no_rule:
        unknown = Cell(None, why="no rule for SGD")
        return {"signal": signal, "speed": speed, "balance": unknown, "loss decay": unknown}
    largest = max(powers.parts.values())
    relative = {}
    leading = {}
    for name, part in powers.parts.items():
        relative[name] = part - largest
        # Parts of a smaller power vanish as the dimension grows, so they do not determine the loss
        # decay.
        if part > largest - _TOLERANCE:
            leading[name] = part
    return {
        "signal": signal,
        "speed": speed,
        "balance": cell(relative),
        "loss decay": cell(leading),
    }


def rows(preset: Preset, *, encoder: bool = False) -> list[list[str]]:
    """Return a table of text: a header, then a row per dimension with a cell per desideratum.

    The column "scales" is "can" if all four desiderata hold, otherwise "cannot".

    Args:
        preset: Preset in any form. Balance and loss decay need its SGD learning rates.
        encoder: `True` for an encoder-decoder, `False` for a decoder.
    """
    table = [["dimension", "scales", *COLUMNS]]
    for dimension in growths(encoder=encoder):
        cells = desiderata(preset, dimension, encoder=encoder)
        can = all(cells[column].holds for column in COLUMNS)
        texts = [cells[column].text(dimension) for column in COLUMNS]
        table.append([dimension, "can" if can else "cannot", *texts])
    return table
