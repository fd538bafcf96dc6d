"""Exponents of a model's activations, gradients and changes as its sizes go to infinity.

`Limit` computes them from a preset's rules alone. `verdicts` says what they mean for training.

The model is a pre-norm transformer with finitely many positions, inputs and outputs. Everything
else is read from the preset's table. Exponents are those of root-mean-square entries, by these
rules:

* At initialization weights are independent of what they multiply: a sum of n terms is n^1/2.
* An update is aligned with the input that made it: a sum of n terms is n.
* A weight acts on a change that is aligned with it by its operator norm at most.

Heads, logits and depth follow Bordelon et al. 2024 (2405.15712) and Tensor Programs V and VI. The
composition is derived here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from mupax.presets.analysis.model import PARTS, TIED
from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import EXPERTS, OWN, ParamSpec, Role
from mupax.presets.rule import Power


class Limit:
    """Growth exponents of a transformer's quantities as some of its sizes go to infinity together.

    The sizes in `growth` are powers of one size t. A quantity with the growth exponent x goes as
    t^x. Exponents are those of root mean square entries, computed from a preset's rules in the
    order of a training step: forward, backward, update.

    Args:
        family: Optimizer family, which chooses the columns of the rules.
        growth: Power of t by axis. Axes that are left out are fixed.
        tied: Whether the readout shares the embedding's array and has only a multiplier of its own.
        part: Key of `PARTS`. "encoder" and "cross" are parts of an encoder-decoder. For the encoder
            the readout stands for the decoder, whose blocks add up in concert. "experts" is a model
            with E experts in place of its MLP, of which a are active per token at a fixed a/E.
            "shared experts" has an MLP in addition.

    Attributes:
        n, layers, active, experts: Head dimension, depth, active experts per token and experts.
        logits, branch: Factors on attention logits and on residual branches.
        q, k, v: Entries of queries, keys and values at initialization.
        attention: Attention logits at initialization.
        spread: Part of the attention logits at initialization that differs between heads.
        hidden: Hidden entries of the MLP or of one expert.
        written: Output of the MLP or of one expert.
        block: Output of a residual branch before the factor `branch`.
        contribution: Output of a residual branch after the factor `branch`.
        embedded: Output of the embedding.
        stream: Residual stream at initialization.
        contact: Logit of the input token itself if the readout is tied to the embedding.
        gradient: Gradients of the stored weights by name, for a gradient of order 1 at the output.
        aligned: Sum over a head's values times the backward signal, once training has aligned them.
        unaligned: Gradient of the router at initialization over the gradient once it is aligned.
        dq, dk, d_attention, dv, d_hidden, d_block: Changes of queries, keys, attention logits,
            values, hidden entries and branch outputs in one step.
        features: Change of the residual stream in one step, relative to the stream.
        d_output: Change of the output in one step.
        parts: Changes of "attention logits", "stream" and "output" in one step. Each is a mapping
            from a weight to the change that this weight's step causes.
    """

    def __init__(
        self,
        preset: Preset,
        family: Family,
        growth: Mapping[str, float],
        *,
        tied: bool = False,
        part: str = "",
    ) -> None:
        self.preset = preset
        self.family: Family = family
        self.growth = growth
        self.tied = tied
        self.part = part
        self.specs = PARTS[part]
        self.names = {spec.role: name for name, spec in self.specs.items()}
        self.routed = "router" in self.specs
        self.shared = "shared in" in self.specs
        self._parts: dict[str, Limit] = {part: self}
        if self.routed:
            # A model with experts has one stack, whose specs name no part.
            self._parts[""] = self

        self.rows = {}
        for name, spec in self.specs.items():
            if name != "readout" or not tied:
                self.rows[name] = preset.row(spec)
        if tied:
            table = self.rows["embedding"]
            # A tied readout is the table times its own multiplier, so its steps are the table's.
            multiplier = table.multiplier * preset.row(TIED).multiplier
            self.rows["readout"] = dataclasses.replace(table, multiplier=multiplier)

        self.fan_in = {name: self._product(spec.fan_in) for name, spec in self.specs.items()}
        self.fan_out = {name: self._product(spec.fan_out) for name, spec in self.specs.items()}
        self.active = 0.0
        self.experts = 0.0
        if self.routed:
            self.active = growth.get("active", 0.0)
            self.experts = growth.get("experts", 0.0)
        # An encoder's blocks are counted by another axis than a decoder's.
        blocks = self.specs["query"].blocks
        self.n = growth.get("head_dim", 0.0)
        self.layers = growth.get(blocks, 0.0)
        self.logits = self.x(preset.logits)
        self.branch = self.x(preset.branch.renamed(OWN.axis, blocks))

        self._initialize(preset)
        self._differentiate()
        self._update()

    def of(self, part: str) -> Limit:
        """Return the limit of another part of this encoder-decoder, for the same preset and growth.

        The limit is computed once and cached.

        Args:
            part: "", "cross" or "encoder", as in `PARTS`.
        """
        if part not in self._parts:
            self._parts[part] = Limit(
                self.preset, self.family, self.growth, tied=self.tied, part=part
            )
        return self._parts[part]

    def x(self, power: Power) -> float:
        """Return the growth exponent of a power law of the preset's rules in this limit."""
        return power.growth(self.growth)

    def weight(self, name: str) -> float:
        """Return the growth exponent of the effective entries of a weight, multiplier * std."""
        row = self.rows[name]
        return self.x(row.multiplier * row.init_std)

    def random(self, name: str, entries: float = 0.0) -> float:
        """Return the growth exponent of W x at initialization, for an x that is independent of W.

        Args:
            name: Name of W in `SPECS`.
            entries: Exponent of the entries of x; 0 (the default) is order one.
        """
        # Independent terms add up as the root of their number.
        return self.weight(name) + self.fan_in[name] / 2 + entries

    def carried(self, name: str, change: float) -> float:
        """Return the growth exponent of W dx for a change dx that is aligned with W.

        W then acts by its operator norm, converted to root mean squares of inputs and outputs. No
        other change of this size has a larger W dx.

        Args:
            name: Name of W in `SPECS`.
            change: Exponent of the entries of dx; 0 is order one.
        """
        fan_in = self.fan_in[name]
        fan_out = self.fan_out[name]
        # The spectral norm of a random matrix is of order std * max(in, out)^1/2. The factor
        # (in/out)^1/2 converts it from norms of vectors to root mean squares.
        return self.weight(name) + max(fan_in, fan_out) / 2 + (fan_in - fan_out) / 2 + change

    @functools.cached_property
    def effective_gradient(self) -> dict[str, float]:
        """Growth exponents of the gradients of effective weights, by name of the weight.

        An effective weight is multiplier * stored weight. The gradient at the model's output is of
        order one.
        """
        effective = {}
        for name, exponent in self.gradient.items():
            effective[name] = exponent - self.x(self.rows[name].multiplier)
        return effective

    def gradient_over_eps(self, name: str) -> float:
        """Return the growth exponent of the ratio of a stored weight's gradient to Adam's eps.

        The ratio should not change with size, so the exponent should be 0.
        """
        return self.gradient[name] - self.x(self.rows[name].eps_of(self.family))

    def _product(self, axes: tuple[str, ...]) -> float:
        """Return the growth exponent of a product of axes, the sum of the axes' powers."""
        return sum(self.growth.get(axis, 0.0) for axis in axes)

    def _initialize(self, preset: Preset) -> None:
        """Compute the exponents of the forward pass at initialization and set them on `self`.

        Sets the attributes from `q` to `contact`, in the order of the class docstring.
        """
        self.q = self.random("query")
        self.k = self.random("key")
        self.v = self.random("value")
        # q.k is a sum of N independent products at first, hence N^1/2.
        self.spread = self.logits + self.q + self.k + self.n / 2
        self.attention = self.spread
        if preset.key_as_query:
            # If keys start equal to queries, a logit is |q|^2, a sum of N squares that is alike in
            # all heads.
            self.attention = self.spread + self.n / 2
        self.hidden = self.random("MLP in")
        self.written = self.random("MLP out", self.hidden)

        # Active experts are independent at first, so the mean over a of them is a^-1/2 times one of
        # them.
        self.block = max(self.random("attention out", self.v), self.written - self.active / 2)
        if self.shared:
            self.block = max(self.block, self.random("shared out", self.random("shared in")))
        # Branches are independent at first, so that L of them add up as L^1/2.
        self.contribution = self.branch + self.block
        self.embedded = self.weight("embedding")
        self.stream = max(self.embedded, self.contribution + self.layers / 2)

        # Under a tied readout the input token's own logit is a E_t . h / rms(h), where h is E_t
        # plus terms independent of E_t. E_t . E_t is a sum of D squares: D, not D^1/2. This is
        # 1 + (1 - 1) under `mup` and (1 - s) / 2 in the effective theory (Dinan, Yaida and Zhang
        # 2023, 2304.02034, footnote 19).
        self.contact = self.weight("readout") + self.fan_in["readout"] + self.embedded - self.stream

    def _differentiate(self) -> None:
        """Compute the exponents of the stored weights' gradients and set them on `self`.

        The gradient at the model's output is of order one. Sets `gradient`, `aligned` and, in a
        model with experts, `unaligned`.
        """
        # By the chain rule a stored weight's gradient has the weight's own multiplier.
        multipliers = {}
        for name, row in self.rows.items():
            multipliers[name] = self.x(row.multiplier)
        # The norm before the readout divides the backward signal by the size of the stream.
        at_branch = self.branch + self.weight("readout") - self.stream
        # A transpose sums over outputs, which are independent at first: fan_out^1/2.
        at_heads = at_branch + self.weight("attention out") + self.fan_out["attention out"] / 2
        at_hidden = at_branch + self.weight("MLP out") + self.fan_out["MLP out"] / 2
        # A key or value head sums the gradients of H / H_kv query heads, independent at first.
        grouped = (self.growth.get("heads", 0.0) - self.growth.get("kv_heads", 0.0)) / 2
        self.gradient = {
            # The gradient of a tied table as a readout has this exponent too: the std is the same.
            "embedding": multipliers["embedding"] + self.weight("readout") - self.embedded,
            "value": multipliers["value"] + at_heads + grouped,
            "attention out": multipliers["attention out"] + at_branch + self.v,
            # An expert gets a/E of the tokens, each with a gate of 1/a: 1/E of the gradient.
            "MLP in": multipliers["MLP in"] + at_hidden - self.experts,
            "MLP out": multipliers["MLP out"] + at_branch + self.hidden - self.experts,
            "readout": multipliers["readout"],
        }

        # The gradient of an attention weight is v . (backward signal), a sum of N terms. They are
        # independent at first, and aligned as far as v has moved. Alignment is never more than
        # complete, even if v moves by more than its own size.
        moved = min(0.0, self.acts("value") - self.v)
        self.aligned = max(self.n / 2, self.n + moved)
        at_logits = at_heads + self.v + self.aligned
        self.gradient["query"] = multipliers["query"] + self.logits + self.k + at_logits
        self.gradient["key"] = multipliers["key"] + self.logits + self.q + at_logits + grouped

        if self.shared:
            at_shared = at_branch + self.weight("shared out") + self.fan_out["shared out"] / 2
            self.gradient["shared in"] = multipliers["shared in"] + at_shared
            self.gradient["shared out"] = (
                multipliers["shared out"] + at_branch + self.random("shared in")
            )
        if self.routed:
            # The gradient of a score is the expert's output . (backward signal), a sum of D terms.
            # They are independent at first, and aligned once the output moves.
            width = self.fan_out["MLP out"]
            independent = self.written + width / 2
            moving = self.acts("MLP out", self.hidden) + width
            largest = max(independent, moving)
            self.gradient["router"] = multipliers["router"] + at_branch + largest - self.experts
            self.unaligned = independent - largest

    def direction(self, name: str) -> float:
        """Return the growth exponent of the entries of the optimizer's direction for one weight.

        The direction is the update before the learning rate. Under SGD it is the gradient. Other
        optimizers divide by the gradient's size, so the exponent is 0. Adam's eps is ignored.
        """
        if self.family == "sgd":
            return self.gradient[name]
        return 0.0

    def rate(self, name: str) -> float:
        """Return the growth exponent of an effective weight's learning rate.

        The effective weight is multiplier * stored weight, so this is the sum of the exponents of
        multiplier and learning rate.
        """
        row = self.rows[name]
        return self.x(row.multiplier) + self.x(row.lr(self.family))

    def coherence(self, spec: ParamSpec) -> float:
        """Return the growth exponent of the spectral norm of a step of Muon at learning rate 1.

        It is 0 for a matrix that is orthogonalized as a whole. Blocks that are orthogonalized
        separately add up coherently, because each takes the same input and output directions as the
        others.

        Args:
            spec: Declaration of a matrix whose steps are orthogonalized.
        """
        return self.x(self.preset.muon.coherence(spec))

    def step(self, name: str) -> float:
        """Return the growth exponent of the entries of one step of an effective weight.

        The effective weight is multiplier * stored weight.
        """
        if not self.orthogonal(name):
            return self.rate(name) + self.direction(name)
        spec = self.specs[name]
        blocked: tuple[str, ...] = ()
        # A measured norm is that of the whole matrix, whatever the blocks.
        if self.preset.muon.scale != "measured":
            blocked = self.preset.muon.block_axes(spec)
        fan_in = self._product(tuple(axis for axis in spec.fan_in if axis not in blocked))
        fan_out = self._product(tuple(axis for axis in spec.fan_out if axis not in blocked))
        # Entries of an orthogonal block have root mean square max(fan_in, fan_out)^-1/2.
        return self.rate(name) - max(fan_in, fan_out) / 2

    def acts(self, name: str, entries: float = 0.0) -> float:
        """Return the growth exponent of dW x, for one step dW and the input x that caused the step.

        Args:
            name: Name of W in `SPECS`.
            entries: Exponent of the entries of x; 0 (the default) is order one.
        """
        if self.orthogonal(name):
            # At spectral norm 1, rms of outputs = rms of inputs * (fan_in / fan_out)^1/2.
            norm = self.rate(name) + self.coherence(self.specs[name])
            return norm + (self.fan_in[name] - self.fan_out[name]) / 2 + entries
        # The step has the direction of this input, so that all terms of the sum have one sign.
        return self.step(name) + self.fan_in[name] + entries

    def orthogonal(self, name: str) -> bool:
        """Return whether a weight's steps are orthogonalized, as Muon does in blocks.

        Steps of routers, embeddings and readouts are not.
        """
        spec = self.specs[name]
        return self.family == "muon" and spec.in_block and spec.role is not Role.ROUTER

    def _update(self) -> None:
        """Compute the changes of activations and of the output in one step.

        Sets `dq`, `dk`, `dv`, `d_attention`, `d_hidden`, `d_block`, `features`, `d_output` and
        `parts`.
        """
        self.dq = self.acts("query")
        self.dk = self.acts("key")
        attention = {
            # The change of q is aligned with k, and that of k with q. The N products therefore add
            # up as N and not as N^1/2.
            "query": self.logits + self.n + (self.dq + self.k),
            "key": self.logits + self.n + (self.q + self.dk),
        }
        self.d_attention = max(attention.values())
        self.dv = self.acts("value")
        self.d_hidden = self.acts("MLP in")
        block = {
            "value": self.carried("attention out", self.dv),
            "attention out": self.acts("attention out", self.v),
            "MLP in": self.carried("MLP out", self.d_hidden),
            "MLP out": self.acts("MLP out", self.hidden),
        }
        for name, change in attention.items():
            # Attention weights lie between 0 and 1, so they change by order one at most. The
            # changed weights are applied to the values at initialization.
            block[name] = min(0.0, change) + self.random("attention out", self.v)
        if self.shared:
            block["shared in"] = self.carried("shared out", self.acts("shared in"))
            block["shared out"] = self.acts("shared out", self.random("shared in"))
        if self.routed:
            # Gates change by order one at most, too. What experts learn to write is aligned, so the
            # mean over experts is as large as one of them.
            learned = min(0.0, max(block["MLP in"], block["MLP out"]))
            written = max(self.written - self.active / 2, learned)
            block["router"] = min(0.0, self.acts("router")) + written
        self.d_block = max(block.values())

        # Blocks move in concert: their changes add up as L, not as L^1/2.
        stream = {}
        for name, change in block.items():
            stream[name] = self.branch + change + self.layers
        # An embedding is looked up: its step enters the stream as it is, without a fan-in or depth.
        stream["embedding"] = self.step("embedding")
        self.features = max(stream.values()) - self.stream
        output = {name: self.first_order(name) for name in self.specs}
        self.d_output = max(output.values())
        self.parts = {"attention logits": attention, "stream": stream, "output": output}

    def moved_by(self, what: str) -> tuple[str, ...]:
        """Return the weights whose steps change a quantity the fastest.

        Args:
            what: Key of `parts`: "attention logits", "stream" or "output".
        """
        changes = self.parts[what]
        fastest = max(changes.values())
        # Exponents that are equal in exact arithmetic differ by rounding.
        movers = []
        for name in self.specs:
            if changes.get(name, -math.inf) > fastest - 1e-9:
                movers.append(name)
        return tuple(movers)

    def first_order(self, name: str) -> float:
        """Return the growth exponent of the output's change by one step of one kind of weight.

        This is the sum of gradient times step over all entries of the weight and all blocks, with
        terms of one sign.

        Args:
            name: Name of the weight in `SPECS`.
        """
        spec = self.specs[name]
        rate = self.x(self.rows[name].lr(self.family))
        entries = self.fan_in[name] + self.fan_out[name]
        blocks = 0.0
        if spec.in_block:
            blocks += self.layers
        if spec.role in EXPERTS:
            blocks += self.experts
        if "kv_heads" in spec.fan_out and self.family != "sgd":
            # There are at most as many key heads G as heads H. As G grows alone, the part (G/H)^1/2
            # of the change approaches its final value from below, next to a part that does not
            # grow. Measured: the output's change goes as G^0.02.
            blocks -= max(0.0, self.growth.get("kv_heads", 0.0) - self.growth.get("heads", 0.0)) / 2
        if self.orthogonal(name):
            # The learning rate times the nuclear norm of a gradient of low rank, summed over
            # blocks.
            nuclear_norm = self.gradient[name] + entries / 2 + self.coherence(spec)
            return rate + nuclear_norm + blocks
        return rate + self.direction(name) + self.gradient[name] + entries + blocks

    def movement(self, name: str) -> float:
        """Return the growth exponent of a step's relative size.

        It is the spectral norm of the step over that of the weight.
        """
        fan_in = self.fan_in[name]
        fan_out = self.fan_out[name]
        if self.orthogonal(name):
            norm = self.rate(name) + self.coherence(self.specs[name])
        else:
            # The step of one example is a rank-one matrix, whose spectral norm is its Frobenius
            # norm.
            norm = self.step(name) + (fan_in + fan_out) / 2
        return norm - (self.weight(name) + max(fan_in, fan_out) / 2)

    def observables(self) -> dict[str, float]:
        """Return the growth exponents of all observables, by their names in reports.

        An observable is a quantity that `mupax presets limits` shows, such as "attention logits" or
        "weight movement, readout". Observables of experts need a model with experts. "gradient over
        eps" is there under Adam, and under Muon for weights that stay on Adam.
        """
        exponents = self._dense_observables()
        if self.routed:
            exponents |= self._expert_observables()
        block = ("value", "attention out", "MLP in", "MLP out")
        if self.routed:
            block += ("router",)
        groups = {
            "embedding": ("embedding",),
            "q, k": ("query", "key"),
            "block": block,
            "readout": ("readout",),
        }
        for name, members in groups.items():
            movements = [self.movement(weight) for weight in members]
            exponents[f"weight movement, {name}"] = _farthest(*movements)
        if self.family in ("adam", "muon"):
            for name, members in groups.items():
                on_adam = [weight for weight in members if not self.orthogonal(weight)]
                if on_adam:
                    # Eps does harm where gradients are small, so the smallest of them counts.
                    over_eps = map(self.gradient_over_eps, on_adam)
                    exponents[f"gradient over eps, {name}"] = min(over_eps)
        decays = [self.x(row.decay) for row in self.rows.values()]
        exponents["lr * weight decay"] = _farthest(*decays)
        return exponents

    def _dense_observables(self) -> dict[str, float]:
        """Return the growth exponents of the observables that every model has, by name.

        `observables` adds those of groups of weights, such as "weight movement, readout".
        """
        # The residual kernel h.h'/D is a mean over D entries, and over heads, whose random
        # attention is added once per block.
        heads = 2 * min(0.0, self.spread) - self.growth.get("heads", 0.0)
        blocks = self.layers + 4 * (self.contribution - self.stream)
        return {
            "residual stream": self.stream,
            "one block's share of the stream": self.contribution,
            "all blocks' share of the stream": self.contribution + self.layers / 2,
            "entries of q, k, v, MLP": _farthest(self.q, self.k, self.v, self.hidden),
            "attention logits": self.attention,
            "variance of attention over heads": 2 * self.spread,
            "squared error of the kernel": max(-self.growth.get("embed", 0.0), heads + blocks),
            "output": self.random("readout"),
            "change of q, k entries": _farthest(self.dq, self.dk),
            "change of attention logits": self.d_attention,
            "change of v, MLP entries": _farthest(self.dv - self.v, self.d_hidden - self.hidden),
            "change of the stream": self.features,
            "change of the output": self.d_output,
            "q, k backward signal, at first": self.logits + self.k + self.n / 2,
            "q, k backward signal, aligned": self.logits + self.k + self.aligned,
        }

    def _expert_observables(self) -> dict[str, float]:
        """Return the growth exponents of the observables of experts and their router, by name."""
        own_step = self.acts("MLP out", self.hidden)
        through_hidden = self.carried("MLP out", self.d_hidden)
        return {
            "router's scores": self.random("router"),
            "change of router's scores": self.acts("router"),
            "what an expert writes, at first": self.written,
            "change of what experts write": max(own_step, through_hidden),
        }


def _farthest(*exponents: float) -> float:
    """Return the exponent farthest from 0. Of two equally far ones, return the positive one.

    One observable then stands for several quantities. It shows one that moves too much and one that
    does not move.
    """
    return max(exponents, key=lambda exponent: (abs(exponent), exponent))
