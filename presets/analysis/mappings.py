"""Exponents of the mappings that a transformer's blocks are cut into, at initialization: forward, backward, speed by own weights.

A block is cut into q, k, logits, v, o (values as attended to), attention out, MLP in and MLP out; a decoder that reads an encoder has
them of its cross-attention too. Entries are root mean squares. Tokens are independent, fewer than d_model and more than d_k where
they grow. The backward signal is that of a loss that is a mean over the decoder's tokens. (The composition is derived here.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mupax.presets.matrices import MATRICES, of_cross, of_encoder, with_value_dim
from mupax.presets.preset import Preset
from mupax.presets.roles import OWN, ParamSpec
from mupax.presets.rule import Power

_OWN = with_value_dim(MATRICES)
SPECS = {False: _OWN, True: _OWN | {
    name.replace("attention", "cross"): of_cross(spec) for name, spec in _OWN.items() if ".attention." in name
} | {f"encoder.{name}": of_encoder(spec) for name, spec in _OWN.items() if name != "readout"}}  # fmt: skip
"""The matrices by name, without and with an encoder."""


def _label(name: str) -> str:
    encoder = "encoder " if name.startswith("encoder.") else ""
    cross = "cross " if ".cross." in name else ""
    of = {
        "attention.out": "attention out",
        "cross.out": "attention out",
        "mlp.up": "MLP in",
        "mlp.down": "MLP out",
    }
    last = name.removeprefix("encoder.").removeprefix("block.")
    return encoder + cross + of.get(last, last.rpartition(".")[2])


NAMES = {name: _label(name) for name in SPECS[True]}
"""Parameter to its mapping, or to its name."""


@dataclasses.dataclass
class Exponents:
    """By mapping or weight, what goes how.

    Attributes:
        signal: entries at initialization.
        speed: of entries by their own weights, each with an equal part of the loss's decay, 1/L of it in each of L blocks.
        parts: rate |gradient|^2 of every weight under the preset's rates of SGD, all blocks together.
        grows: stacks whose stream grows with their blocks, so that backward signals are no power law.
    """

    signal: dict[str, float] = dataclasses.field(default_factory=dict)
    speed: dict[str, float] = dataclasses.field(default_factory=dict)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    grows: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Attention:
    """One attention's forward exponents, and the tokens T that ask and S that are read."""

    q: float
    k: float
    logits: float
    v: float
    o: float
    out: float
    asking: float
    read: float


class Stack:
    """The exponents of one stack of blocks.

    Args:
        preset: whose rules.
        growth: axis to its exponent.
        encoder: the stack is an encoder's.
        crossed: its blocks read an encoder's output.
    """

    def __init__(
        self,
        preset: Preset,
        growth: Mapping[str, float],
        *,
        encoder: bool = False,
        crossed: bool = False,
    ) -> None:
        self.preset, self.growth, self.label = preset, growth, "encoder " if encoder else ""
        self.specs = {
            name: spec
            for name, spec in SPECS[True].items()
            if name.startswith("encoder.") == encoder
        }
        blocks = self.specs["encoder.block.mlp.up" if encoder else "block.mlp.up"].blocks
        self.width, self.heads, self.hidden = (self.x(axis) for axis in ("embed", "heads", "mlp"))
        self.n, self.values, self.layers = (
            self.x(axis) for axis in ("head_dim", "value_dim", blocks)
        )
        self.tokens, source = self.x("source" if encoder else "position"), self.x("source")
        self.scale, self.branch = (
            _x(preset.logits, growth),
            _x(preset.branch.renamed(OWN.axis, blocks), growth),
        )
        self.attentions = {self.label: self._attention(self.label, self.tokens)}
        if crossed:
            self.attentions["cross "] = self._attention("cross ", source)
        self.up = self._random("MLP in", self.width)
        self.down = self._random("MLP out", self.hidden) + self.up
        self.token = self._weight("token")
        self.share = (
            self.branch
            + max(self.down, *(one.out for one in self.attentions.values()))
            + self.layers / 2
        )
        self.stream = max(self.token, self.share)

    def x(self, axis: str) -> float:
        return self.growth.get(axis, 0.0)

    def _row(self, name: str) -> tuple[str, ParamSpec]:
        return next((full, spec) for full, spec in self.specs.items() if NAMES[full] == name)

    def _weight(self, name: str) -> float:
        """Entries of a weight."""
        row = self.preset.row(
            self._row(name if name.startswith("cross ") else self.label + name)[1]
        )
        return _x(row.multiplier * row.init_std, self.growth)

    def _random(self, name: str, fan_in: float) -> float:
        return self._weight(name) + fan_in / 2

    def _attention(self, label: str, read: float) -> Attention:
        cross = "cross " if label == "cross " else ""
        wide = self.x("memory") if cross else self.width
        q, k, v = (
            self._random(f"{cross}query", self.width),
            *(self._random(cross + x, wide) for x in ("key", "value")),
        )
        # A key that starts as its query: |q|^2 of a token and itself, the overlap of two streams where they are others'.
        alike = (
            (self.n - self.width / 2 if cross else self.n)
            if self.preset.key_as_query
            else self.n / 2
        )
        o = v - read / 2
        out = self._random(f"{cross}attention out", self.heads + self.values) + o
        return Attention(
            q, k, self.scale + q + k + max(alike, self.n / 2), v, o, out, self.tokens, read
        )

    def into(self, powers: Exponents, at_stream: float) -> float:
        """Adds the stack's exponents, and returns the backward signal's of what its cross-attention reads.

        Args:
            powers: to which they are added.
            at_stream: exponent of the backward signal at the stream.
        """
        label, at_branch, memory = self.label, at_stream + self.branch, at_stream
        for name, one in self.attentions.items():
            memory = self._attended(powers, name, one, at_branch)
        at_up = at_branch + self._weight("MLP out") + self.width / 2
        powers.signal |= {f"{label}MLP in": self.up, f"{label}MLP out": self.down}
        powers.signal |= {
            f"{label}stream": self.stream,
            f"{label}branches": self.share - self.stream,
        }
        # What tokens share, as their activations' mean: their signals add up as noise does.
        # Cross-attention writes nearly the same for all of a decoder's tokens, which MLPs read.
        shared = self.tokens / 2 if "cross " in self.attentions else 0.0
        powers.speed[f"{label}MLP in"] = -self.layers - at_up - self.hidden - self.tokens + shared
        powers.speed[f"{label}MLP out"] = -self.layers - at_branch - self.width - self.tokens / 2
        powers.speed[f"{label}embedding"] = -at_stream - self.width - self.tokens
        self._part(powers, f"{label}MLP in", at_up, 0.0, self.tokens)
        self._part(powers, f"{label}MLP out", at_branch, self.up, self.tokens)
        self._part(powers, f"{label}token", at_stream, 0.0, self.tokens)
        if self.stream > self.token + 0.01 and self.layers:
            powers.grows.append(f"{label}stream")
        return memory

    def _attended(self, powers: Exponents, label: str, one: Attention, at_out: float) -> float:
        """Adds an attention's exponents, and returns the backward signal's of what its keys and values read, all blocks together."""
        cross = "cross " if label == "cross " else ""
        t, s = one.asking, one.read
        at_o = at_out + self._weight(f"{cross}attention out") + self.width / 2
        at_v = at_o + t / 2 - s
        at_logits = at_o + one.v + self.values / 2 - s
        at_q, at_k = at_logits + self.scale + one.k + s / 2, at_logits + self.scale + one.q + t / 2
        names = {
            "q": one.q,
            "k": one.k,
            "logits": one.logits,
            "v": one.v,
            "o": one.o,
            "attention out": one.out,
        }
        powers.signal |= {label + name: x for name, x in names.items()}
        # Uniform attention gives all tokens one output, and keys of few dimensions overlap: signals add up as noise does.
        entries = {
            "q": at_q + self.heads + self.n + t,
            "k": at_k + self.heads + self.n + s,
            "logits": at_logits + self.heads + t + s - max(t, s) / 2,
            "v": at_v + self.heads + self.values + s,
            "attention out": at_out + self.width + t / 2,
        }
        powers.speed |= {label + name: -self.layers - x for name, x in entries.items()}
        powers.speed[f"{label}o"] = powers.speed[f"{label}v"]
        for name, at, inputs, tokens in (
            ("query", at_q, 0.0, t),
            ("key", at_k, 0.0, s),
            ("value", at_v, 0.0, s),
            ("attention out", at_out, one.o, t),
        ):
            self._part(powers, label + name, at, inputs, tokens)
        by_values = at_v + self._weight(f"{cross}value") + (self.heads + self.values) / 2
        by_keys = at_k + self._weight(f"{cross}key") + (self.heads + self.n) / 2
        return max(by_values, by_keys) + self.layers / 2

    def _part(self, powers: Exponents, name: str, at: float, inputs: float, tokens: float) -> None:
        full, spec = self._row(name)
        row, blocks = self.preset.row(spec), self.layers if spec.stacked else 0.0
        count = sum(self.x(axis) for axis in (*spec.fan_in, *spec.fan_out))
        rate = _x(row.multiplier**2 * row.sgd, self.growth)
        powers.parts[NAMES[full]] = rate + 2 * (at + inputs + blocks / 2) + count + tokens


def exponents(preset: Preset, growth: Mapping[str, float], *, encoder: bool = False) -> Exponents:
    """Of all mappings and weights of a decoder, or of an encoder-decoder.

    Args:
        preset: whose rules.
        growth: axis to its exponent.
        encoder: the decoder reads an encoder.
    """
    powers = Exponents()
    decoder = Stack(preset, growth, crossed=encoder)
    readout = preset.row(MATRICES["readout"])
    at_stream = _x(readout.multiplier * readout.init_std, growth) - decoder.stream - decoder.tokens
    at_memory = decoder.into(powers, at_stream)
    row = _x(readout.multiplier**2 * readout.sgd, growth)
    powers.parts["readout"] = row - 2 * decoder.tokens + decoder.width + decoder.tokens
    if encoder:
        stack = Stack(preset, growth, encoder=True)
        stack.into(powers, at_memory - stack.stream)
    powers.parts = {name: powers.parts[name] for name in NAMES.values() if name in powers.parts}
    return powers


def _x(power: Power, growth: Mapping[str, float]) -> float:
    return power.growth(growth)
