"""Exponents at initialization of the mappings into which a transformer's blocks are cut.

A mapping takes one activation of a block to the next. A block is cut into q, k, logits, v, o (the
attended values), attention out, MLP in and MLP out. A decoder that reads an encoder has the
mappings of its cross-attention, too. `desiderata` judges the exponents.

Entries are root mean squares. Tokens are independent. If their number grows, it is smaller than
d_model and larger than d_k. Backward signals are gradients of a loss that is a mean over the
decoder's tokens. (The composition is derived here.)

Names: "grad_x" is the exponent of the backward signal at x. T query tokens attend to S key tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mupax.presets.preset import Preset
from mupax.presets.roles import MATRICES, OWN, ParamSpec, of_cross, of_encoder, with_value_dim
from mupax.presets.rule import Power


def _matrices() -> dict[str, ParamSpec]:
    """Return the declarations of an encoder-decoder's matrices by parameter name.

    The order is: decoder, its cross-attention, encoder. Values have their own size, `value_dim`.
    """
    decoder = with_value_dim(MATRICES)
    cross = {}
    for name, spec in decoder.items():
        if ".attention." in name:
            cross[name.replace("attention", "cross")] = of_cross(spec)
    encoder = {}
    for name, spec in decoder.items():
        if name != "readout":
            encoder[f"encoder.{name}"] = of_encoder(spec)
    return decoder | cross | encoder


def _label(name: str) -> str:
    """Return the name that reports use for a parameter, such as "encoder MLP in"."""
    prefix = ""
    if name.startswith("encoder."):
        prefix += "encoder "
    if ".cross." in name:
        prefix += "cross "
    labels = {
        "attention.out": "attention out",
        "cross.out": "attention out",
        "mlp.up": "MLP in",
        "mlp.down": "MLP out",
    }
    last = name.removeprefix("encoder.").removeprefix("block.")
    return prefix + labels.get(last, last.rpartition(".")[2])


SPECS = _matrices()
"""Declarations of an encoder-decoder's matrices by parameter name. A decoder alone has fewer."""

NAMES = {name: _label(name) for name in SPECS}
"""Names that reports use, by parameter name, such as "encoder MLP in".

A matrix whose output is a mapping has the name of that mapping.
"""


@dataclasses.dataclass
class Exponents:
    """Growth exponents of a transformer's mappings and weights, by the names that reports use.

    A quantity with the growth exponent x goes as the growing dimension to the power x. A mapping is
    a step from one activation of a block to the next, such as "q", "logits" or "MLP in".

    Attributes:
        signal: Root mean square entries of every mapping's output at initialization.
        speed: Change of these entries by a mapping's own weights in one step. It assumes learning
            rates at which every weight causes an equal part of the loss's decrease, 1/L of it in
            each of L blocks.
        parts: Part of the loss's decrease that each weight causes under the preset's SGD learning
            rates: rate * |gradient|^2, summed over blocks.
        grows: Stacks whose residual stream grows with depth. Their backward signals are no power
            law.
    """

    signal: dict[str, float] = dataclasses.field(default_factory=dict)
    speed: dict[str, float] = dataclasses.field(default_factory=dict)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    grows: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Attention:
    """Exponents of the forward pass of one attention: T query tokens attend to S key tokens.

    Attributes:
        q, k, v: Entries of queries, keys and values at initialization.
        logits: Attention logits at initialization, including their scale factor.
        o: Attended values, the inputs of the output matrix.
        out: Output of the attention branch, before the branch's factor.
        asking, read: Numbers of query tokens T and key tokens S.
    """

    q: float
    k: float
    logits: float
    v: float
    o: float
    out: float
    asking: float
    read: float


class Stack:
    """Exponents of one stack of blocks, the decoder or the encoder, under a preset.

    Args:
        growth: Power of the dimension that grows, by axis.
        encoder: Whether this is the stack of an encoder. Its depth is the axis "encoder_layers".
        crossed: Whether the blocks have cross-attention to an encoder's output.
    """

    def __init__(
        self,
        preset: Preset,
        growth: Mapping[str, float],
        *,
        encoder: bool = False,
        crossed: bool = False,
    ) -> None:
        self.preset = preset
        self.growth = growth
        self.label = "encoder " if encoder else ""
        self.specs = {}
        for name, spec in SPECS.items():
            if name.startswith("encoder.") == encoder:
                self.specs[NAMES[name]] = spec
        blocks = self.specs[f"{self.label}MLP in"].blocks
        # Exponents of sizes and scales.
        self.width = self.x("embed")
        self.heads = self.x("heads")
        self.hidden = self.x("mlp")
        self.n = self.x("head_dim")
        self.values = self.x("value_dim")
        self.layers = self.x(blocks)
        self.tokens = self.x("source" if encoder else "position")
        self.scale = _growth(preset.logits, growth)
        self.branch = _growth(preset.branch.renamed(OWN.axis, blocks), growth)

        # Exponents of activations at initialization.
        self.attentions = {self.label: self._attention(self.label, self.tokens)}
        if crossed:
            self.attentions["cross "] = self._attention("cross ", self.x("source"))
        self.up = self._random("MLP in", self.width)
        self.down = self._random("MLP out", self.hidden) + self.up
        self.token = self._weight("token")
        outputs = [attention.out for attention in self.attentions.values()]
        # Blocks write independent vectors at first, so L of them add up as L^1/2.
        self.share = self.branch + max(self.down, *outputs) + self.layers / 2
        self.stream = max(self.token, self.share)

    def x(self, axis: str) -> float:
        """Return the power with which an axis grows, 0 for an axis that stays fixed."""
        return self.growth.get(axis, 0.0)

    def _weight(self, name: str) -> float:
        """Return the growth exponent of the entries of a weight, multiplier * std.

        Args:
            name: Name in reports without "encoder ", which the stack adds.
        """
        label = name
        if not name.startswith("cross "):
            label = self.label + name
        row = self.preset.row(self.specs[label])
        return _growth(row.multiplier * row.init_std, self.growth)

    def _random(self, name: str, fan_in: float) -> float:
        """Return the growth exponent of W x, for an x of order one that is independent of W.

        Args:
            name: Name of W, as for `_weight`.
            fan_in: Exponent of the number of inputs of W.
        """
        return self._weight(name) + fan_in / 2

    def _attention(self, label: str, read: float) -> Attention:
        """Return the growth exponents of one attention's forward pass.

        Args:
            label: Kind of the attention: "" and "encoder " are self-attention, "cross " is
                cross-attention.
            read: Exponent of the number of key tokens S.
        """
        is_cross = label == "cross "
        cross = ""
        memory = self.width
        if is_cross:
            cross = "cross "
            memory = self.x("memory")
        q = self._random(f"{cross}query", self.width)
        k = self._random(f"{cross}key", memory)
        v = self._random(f"{cross}value", memory)
        overlap = self.n / 2
        if self.preset.key_as_query:
            # If keys start equal to queries, the logit of a token with itself in self-attention is
            # |q|^2. In cross-attention a logit is the overlap of two independent streams.
            overlap = self.n
            if is_cross:
                overlap = self.n - self.width / 2
        logits = self.scale + q + k + max(overlap, self.n / 2)
        # Attention is uniform at initialization: the mean of S independent values is S^-1/2 times
        # one of them.
        o = v - read / 2
        out = self._random(f"{cross}attention out", self.heads + self.values) + o
        return Attention(q=q, k=k, logits=logits, v=v, o=o, out=out, asking=self.tokens, read=read)

    def into(self, powers: Exponents, grad_stream: float) -> float:
        """Add the stack's exponents to `powers` in place, and return its outgoing backward signal.

        Args:
            grad_stream: Exponent of the backward signal at the residual stream.

        Returns:
            The exponent of the backward signal at the input of keys and values of the last
            attention in `attentions`, summed over blocks. For a decoder with cross-attention this
            is the encoder's output.
        """
        label = self.label
        grad_branch = grad_stream + self.branch
        grad_memory = grad_stream
        for name, attention in self.attentions.items():
            grad_memory = self._add_attention(powers, name, attention, grad_branch)
        # A transpose sums over outputs, which are independent at first: width^1/2.
        grad_up = grad_branch + self._weight("MLP out") + self.width / 2
        powers.signal[f"{label}MLP in"] = self.up
        powers.signal[f"{label}MLP out"] = self.down
        powers.signal[f"{label}stream"] = self.stream
        powers.signal[f"{label}branches"] = self.share - self.stream

        # All tokens share a part of their activations, the mean. Backward signals at this part add
        # up as noise does, as T^1/2. Cross-attention writes nearly the same vector for all tokens
        # of a decoder, and the MLP reads this vector.
        shared = 0.0
        if "cross " in self.attentions:
            shared = self.tokens / 2
        powers.speed[f"{label}MLP in"] = -self.layers - grad_up - self.hidden - self.tokens + shared
        powers.speed[f"{label}MLP out"] = -self.layers - grad_branch - self.width - self.tokens / 2
        powers.speed[f"{label}embedding"] = -grad_stream - self.width - self.tokens
        self._add_part(powers, f"{label}MLP in", grad_up, 0.0, self.tokens)
        self._add_part(powers, f"{label}MLP out", grad_branch, self.up, self.tokens)
        self._add_part(powers, f"{label}token", grad_stream, 0.0, self.tokens)
        # A difference of at most 0.01 is a rounding error.
        if self.stream > self.token + 0.01 and self.layers:
            powers.grows.append(f"{label}stream")
        return grad_memory

    def _add_attention(
        self, powers: Exponents, label: str, attention: Attention, grad_out: float
    ) -> float:
        """Add the exponents of one attention to `powers` in place.

        Args:
            label: Kind of the attention: "", "encoder " or "cross ".
            grad_out: Exponent of the backward signal at the output of the attention.

        Returns:
            The exponent of the backward signal at the inputs of keys and values, summed over
            blocks.
        """
        cross = "cross " if label == "cross " else ""
        t = attention.asking
        s = attention.read
        grad_o = grad_out + self._weight(f"{cross}attention out") + self.width / 2
        # T tokens read each value with weights 1/S. Their backward signals are independent.
        grad_v = grad_o + t / 2 - s
        # Every attention weight is 1/S, and so is the slope of softmax.
        grad_logits = grad_o + attention.v + self.values / 2 - s
        grad_q = grad_logits + self.scale + attention.k + s / 2
        grad_k = grad_logits + self.scale + attention.q + t / 2
        powers.signal[f"{label}q"] = attention.q
        powers.signal[f"{label}k"] = attention.k
        powers.signal[f"{label}logits"] = attention.logits
        powers.signal[f"{label}v"] = attention.v
        powers.signal[f"{label}o"] = attention.o
        powers.signal[f"{label}attention out"] = attention.out

        # Under uniform attention all tokens get the same output, and keys of few dimensions
        # overlap. The backward signals of such tokens add up as noise does.
        signal_sums = {
            "q": grad_q + self.heads + self.n + t,
            "k": grad_k + self.heads + self.n + s,
            "logits": grad_logits + self.heads + t + s - max(t, s) / 2,
            "v": grad_v + self.heads + self.values + s,
            "attention out": grad_out + self.width + t / 2,
        }
        for name, signal_sum in signal_sums.items():
            powers.speed[f"{label}{name}"] = -self.layers - signal_sum
        # The output of attention is a mean of values: it moves as they do.
        powers.speed[f"{label}o"] = powers.speed[f"{label}v"]
        self._add_part(powers, f"{label}query", grad_q, 0.0, t)
        self._add_part(powers, f"{label}key", grad_k, 0.0, s)
        self._add_part(powers, f"{label}value", grad_v, 0.0, s)
        self._add_part(powers, f"{label}attention out", grad_out, attention.o, t)

        by_values = grad_v + self._weight(f"{cross}value") + (self.heads + self.values) / 2
        by_keys = grad_k + self._weight(f"{cross}key") + (self.heads + self.n) / 2
        # Signals of different blocks are independent at first, hence L^1/2.
        return max(by_values, by_keys) + self.layers / 2

    def _add_part(
        self, powers: Exponents, name: str, grad_output: float, inputs: float, tokens: float
    ) -> None:
        """Add to `powers.parts` the decrease of the loss that one weight causes under SGD.

        It is rate * |gradient|^2, summed over blocks, as an exponent.

        Args:
            name: Name of the weight in reports, the key of the new entry.
            grad_output: Exponent of the backward signal at the weight's output.
            inputs: Exponent of the entries of the weight's inputs.
            tokens: Exponent of the number of tokens that the gradient sums over.
        """
        spec = self.specs[name]
        row = self.preset.row(spec)
        blocks = 0.0
        if spec.stacked:
            blocks = self.layers
        count = sum(self.x(axis) for axis in (*spec.fan_in, *spec.fan_out))
        # The multiplier acts twice: on the gradient of the stored weight, and in the forward pass.
        rate = _growth(row.multiplier**2 * row.sgd, self.growth)
        powers.parts[name] = rate + 2 * (grad_output + inputs + blocks / 2) + count + tokens


def exponents(preset: Preset, growth: Mapping[str, float], *, encoder: bool = False) -> Exponents:
    """Return the growth exponents of all mappings and weights of a decoder or an encoder-decoder.

    Args:
        growth: Power of the dimension that grows, by axis. Axes that are left out are fixed.
        encoder: `True` for an encoder-decoder, `False` for a decoder.
    """
    powers = Exponents()
    decoder = Stack(preset, growth, crossed=encoder)
    readout = preset.row(MATRICES["readout"])
    weight = _growth(readout.multiplier * readout.init_std, growth)
    # The last norm divides by the stream, and the loss is a mean over tokens.
    grad_stream = weight - decoder.stream - decoder.tokens
    grad_memory = decoder.into(powers, grad_stream)
    rate = _growth(readout.multiplier**2 * readout.sgd, growth)
    powers.parts["readout"] = rate - 2 * decoder.tokens + decoder.width + decoder.tokens
    if encoder:
        stack = Stack(preset, growth, encoder=True)
        # The norm at the end of the encoder divides the signal by the size of its stream.
        stack.into(powers, grad_memory - stack.stream)
    # Reports list weights in the order of `NAMES`.
    ordered_parts = {}
    for name in NAMES.values():
        if name in powers.parts:
            ordered_parts[name] = powers.parts[name]
    powers.parts = ordered_parts
    return powers


def _growth(power: Power, growth: Mapping[str, float]) -> float:
    """Return the growth exponent of a power law, if its axes grow as `growth` says.

    Args:
        growth: Power of the dimension that grows, by axis.
    """
    return power.growth(growth)
