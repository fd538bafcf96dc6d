"""Which dimensions of a transformer can be scaled, from a preset's rules alone: the desiderata of the feature speed formula by mapping.

A block is cut into q, k, logits, v, o (values as attended to), attention out, MLP in and MLP out. At initialization, as one
dimension grows alone (entries are root mean squares; tokens are independent, fewer than d_model and more than d_k where they grow):

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

from mupax.presets.preset import Preset
from mupax.presets.roles import MATRICES, with_value_dim

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

COLUMNS = ("signal", "speed", "balance", "loss decay")
SPECS = with_value_dim(MATRICES)
NAMES = {
    name: name.removeprefix("block.").replace("attention.out", "attention out").rpartition(".")[2] for name in SPECS
}
NAMES |= {"block.mlp.up": "MLP in", "block.mlp.down": "MLP out"}
"""Parameter to its mapping, or to its name."""
_TOLERANCE = 0.01


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

    def text(self, dimension: str) -> str:
        """yes, or what goes how, as `no: q, k go as d_k^-0.5`."""
        if self.exponent is None:
            return self.why
        return "yes" if self.holds else f"no: {', '.join(self.of)} {dimension}^{self.exponent:+.3g}"


def cell(exponents: Mapping[str, float], tolerance: float = _TOLERANCE) -> Cell:
    """What is farthest from 0, the growing ones of two.

    Args:
        exponents: name to exponent.
        tolerance: that is 0.
    """
    worst = max(exponents.values(), key=lambda x: (round(abs(x), 6), x))
    if abs(worst) <= tolerance:
        return Cell(0.0 if tolerance == _TOLERANCE else worst, (), exponents)
    return Cell(worst, tuple(name for name, x in exponents.items() if abs(x - worst) <= tolerance), exponents)


def desiderata(preset: Preset, dimension: str) -> dict[str, Cell]:
    """The four desiderata where a dimension of `GROWTHS` grows.

    Args:
        preset: in any form; balance and loss decay read its rates of SGD.
        dimension: that grows.
    """
    growth = GROWTHS[dimension]
    rows = {name: preset.row(spec) for name, spec in SPECS.items()}
    w = {NAMES[name]: (row.multiplier * row.init_std).growth(growth) for name, row in rows.items()}
    width, heads, hidden, layers, tokens = (
        growth.get(axis, 0.0) for axis in ("embed", "heads", "mlp", "layers", "position")
    )
    keys, values = growth.get("head_dim", 0.0), growth.get("value_dim", 0.0)
    scale, branch = preset.logits.growth(growth), preset.branch.growth(growth)

    q, k, v = (w[name] + width / 2 for name in ("query", "key", "value"))
    logits = scale + q + k + (keys if preset.key_as_query else keys / 2)
    o = v - tokens / 2
    out, up = w["attention out"] + (heads + values) / 2 + o, w["MLP in"] + width / 2
    down = w["MLP out"] + hidden / 2 + up
    share = branch + max(out, down) + layers / 2
    stream = max(w["token"], share)
    signal = {
        "q": q, "k": k, "logits": logits, "v": v, "o": o, "attention out": out, "MLP in": up, "MLP out": down,
        "stream": stream, "branches": share - stream,
    }  # fmt: skip

    # Backward signal by entry, at a loss that is a mean over tokens.
    at = {"stream": w["readout"] - stream - tokens}
    at["attention out"] = at["MLP out"] = at["stream"] + branch
    at["o"] = at["attention out"] + w["attention out"] + width / 2
    at["v"] = at["o"] - tokens / 2
    at["logits"] = at["o"] + v + values / 2 - tokens
    at["q"], at["k"] = (at["logits"] + scale + other + tokens / 2 for other in (k, q))
    at["MLP in"] = at["MLP out"] + w["MLP out"] + width / 2
    entries = {"q": heads + keys, "k": heads + keys, "logits": heads + tokens, "v": heads + values, "attention out": width,
               "MLP in": hidden, "MLP out": width}  # fmt: skip
    speed = {name: -layers - at[name] - n - tokens for name, n in entries.items()}
    speed["embedding"] = -at["stream"] - width - tokens
    # What tokens share (uniform attention, keys of few dimensions, activations' mean): their signals add up as noise does.
    for name in ("logits", "attention out", "MLP out"):
        speed[name] += tokens / 2
    speed["o"] = speed["v"]

    inputs = {"attention out": o, "MLP out": up}
    signals = {"query": "q", "key": "k", "value": "v"}
    parts: dict[str, float] = {}
    for name, spec in SPECS.items():
        rate = (rows[name].multiplier ** 2 * rows[name].sgd).growth(growth)
        count = sum(growth.get(axis, 0.0) for axis in (*spec.fan_in, *spec.fan_out))
        each = -tokens if name == "readout" else at["stream"] if name == "token" else None
        each = each if each is not None else at[signals.get(NAMES[name], NAMES[name])] + layers / 2
        parts[NAMES[name]] = rate + 2 * (each + inputs.get(NAMES[name], 0.0)) + count + tokens
    most = max(parts.values())
    if stream > w["token"] + _TOLERANCE and layers:
        return {"signal": cell(signal), **dict.fromkeys(COLUMNS[1:], Cell(None, why="no power law: the stream grows"))}
    rule, none = "sgd" not in preset.no_rule, Cell(None, why="no rule for SGD")
    return {
        "signal": cell(signal),
        "speed": cell(speed),
        "balance": cell({name: x - most for name, x in parts.items()}) if rule else none,
        "loss decay": cell({name: x for name, x in parts.items() if x > most - _TOLERANCE}) if rule else none,
    }


def rows(preset: Preset) -> list[list[str]]:
    """A table for a person: every dimension, whether it can be scaled, and what says so.

    Args:
        preset: the table that is asked.
    """
    table = [["dimension", "scales", *COLUMNS]]
    for dimension in GROWTHS:
        cells = desiderata(preset, dimension)
        can = all(cells[column].holds for column in COLUMNS)
        table.append([dimension, "can" if can else "cannot", *(cells[column].text(dimension) for column in COLUMNS)])
    return table
