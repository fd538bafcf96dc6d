"""What each size does on its way to infinity, computed from a preset's rules alone: exponents (`verdicts` says what they mean).

The model is a pre-norm transformer with finitely many positions, inputs and outputs, everything else read from the table.
Exponents are of root-mean-square entries. At initialization weights are independent of what they multiply (a sum of n terms
is n^1/2), an update is aligned with it (n), and a weight acts on an aligned change at most by its operator norm.
Heads, logits and depth after Bordelon et al. 2024 (2405.15712) and Tensor Programs V and VI; the composition is derived here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from mupax.presets.analysis.model import PARTS, TIED
from mupax.presets.optimizers import Family
from mupax.presets.preset import Preset
from mupax.presets.roles import EXPERTS, OWN, Role
from mupax.presets.rule import Power


class Limit:
    """Exponents of everything in one limit, worked out in the order of a training step: forward, backward, update.

    Entries are root mean squares. After initialization: `q`, `k`, `v`, `attention` (logits), `hidden` (MLP), `block` (a branch
    before its scale), `contribution` (after it), `embedded`, `stream`. After the backward pass: `gradient` by weight. After one
    step: `dq`, `dk`, `d_attention`, `dv`, `d_hidden`, `d_block`, `features` (of the stream, relative), `d_output`.

    Args:
        preset: whose rules.
        family: column of the rules, an optimizer's family.
        growth: axis to the power of the size that goes to infinity.
        tied: the readout is the embedding's table: only its multiplier is its own. One logit is then unlike others at first: `contact`.
        part: of an encoder-decoder, a key of `PARTS`; for its encoder the readout stands for the decoder, whose blocks add up in concert.
            experts: of a model whose MLPs are experts, E of them, a/E of which are active; shared experts: with an MLP beside.
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
        self.preset, self.growth, self.tied, self.part = preset, growth, tied, part
        specs = self.specs = PARTS[part]
        self.names = {spec.role: name for name, spec in specs.items()}
        self.routed, self.shared = "router" in specs, "shared in" in specs
        self._parts: dict[str, Limit] = {part: self, **({"": self} if self.routed else {})}
        self.family: Family = family
        self.rows = {
            name: preset.row(spec)
            for name, spec in specs.items()
            if not (tied and name == "readout")
        }
        if tied:
            table, of_readout = self.rows["embedding"], preset.row(TIED).multiplier
            self.rows["readout"] = dataclasses.replace(
                table, multiplier=table.multiplier * of_readout
            )
        self.fan_in = {
            name: sum(growth.get(axis, 0.0) for axis in spec.fan_in) for name, spec in specs.items()
        }
        self.fan_out = {
            name: sum(growth.get(axis, 0.0) for axis in spec.fan_out)
            for name, spec in specs.items()
        }
        blocks = specs["query"].blocks
        of_experts = growth if self.routed else {}
        self.active, self.experts = of_experts.get("active", 0.0), of_experts.get("experts", 0.0)
        self.n, self.layers = growth.get("head_dim", 0.0), growth.get(blocks, 0.0)
        self.logits, self.branch = (
            self.x(preset.logits),
            self.x(preset.branch.renamed(OWN.axis, blocks)),
        )
        self._initialize(preset)
        self._differentiate()
        self._update()

    def of(self, part: str) -> Limit:
        """The same of another part of an encoder-decoder."""
        if part not in self._parts:
            self._parts[part] = Limit(
                self.preset, self.family, self.growth, tied=self.tied, part=part
            )
        return self._parts[part]

    def x(self, power: Power) -> float:
        return power.growth(self.growth)

    def weight(self, name: str) -> float:
        """Effective entries multiplier * std."""
        return self.x(self.rows[name].multiplier * self.rows[name].init_std)

    def random(self, name: str, entries: float = 0.0) -> float:
        """W x for an x independent of W.

        Args:
            name: of a matrix in `SPECS`.
            entries: exponent of x's entries.
        """
        return self.weight(name) + self.fan_in[name] / 2 + entries

    def carried(self, name: str, change: float) -> float:
        """W dx for a change aligned with W: the operator norm, as rms over outputs.

        Args:
            name: of a matrix in `SPECS`.
            change: exponent of dx's entries.
        """
        fan_in, fan_out = self.fan_in[name], self.fan_out[name]
        return self.weight(name) + max(fan_in, fan_out) / 2 + (fan_in - fan_out) / 2 + change

    @functools.cached_property
    def effective_gradient(self) -> dict[str, float]:
        """Gradients of the effective weights (multiplier times stored weight), at unit gradient of the output."""
        multipliers = {name: self.x(self.rows[name].multiplier) for name in self.gradient}
        return {name: x - multipliers[name] for name, x in self.gradient.items()}

    def _initialize(self, preset: Preset) -> None:
        self.q, self.k, self.v = (self.random(name) for name in ("query", "key", "value"))
        of_head = self.logits + self.q + self.k + self.n / 2
        # A key that starts as its query: |q|^2 is a sum of squares, alike in all heads.
        self.attention, self.spread = (
            of_head + (self.n / 2 if preset.key_as_query else 0.0),
            of_head,
        )
        self.hidden = self.random("MLP in")
        self.written = self.random("MLP out", self.hidden)
        # The mean over active experts, which are independent at first.
        self.block = max(self.random("attention out", self.v), self.written - self.active / 2)
        if self.shared:
            self.block = max(self.block, self.random("shared out", self.random("shared in")))
        self.contribution = self.branch + self.block
        self.embedded = self.weight("embedding")
        self.stream = max(self.embedded, self.contribution + self.layers / 2)
        # The input token's own logit under a tied readout: a E_t . h / rms(h), where h = E_t + other terms independent of E_t.
        # E_t . E_t is a sum of D squares, D and not D^1/2: 1 + (1 - 1) under `mup`, (1 - s) / 2 in the effective theory
        # (Dinan, Yaida and Zhang 2023, 2304.02034, footnote 19).
        self.contact = self.weight("readout") + self.fan_in["readout"] + self.embedded - self.stream

    def _differentiate(self) -> None:
        """Gradients of the weights as stored, at unit gradient of the output."""
        a = {name: self.x(row.multiplier) for name, row in self.rows.items()}
        at_branch = self.branch + self.weight("readout") - self.stream
        at_heads = at_branch + self.weight("attention out") + self.fan_out["attention out"] / 2
        at_hidden = at_branch + self.weight("MLP out") + self.fan_out["MLP out"] / 2
        grouped = (self.growth.get("heads", 0.0) - self.growth.get("kv_heads", 0.0)) / 2
        self.gradient = {
            # A tied table's gradient as a readout, a["readout"], has this exponent too: the std is the same.
            "embedding": a["embedding"] + self.weight("readout") - self.embedded,
            "value": a["value"] + at_heads + grouped,
            "attention out": a["attention out"] + at_branch + self.v,
            "MLP in": a["MLP in"] + at_hidden - self.experts,
            "MLP out": a["MLP out"] + at_branch + self.hidden - self.experts,
            "readout": a["readout"],
        }
        # Attention weights see v . (backward signal): N terms, independent at first, aligned as far as v has moved.
        self.aligned = max(self.n / 2, self.n + min(0.0, self.acts("value") - self.v))
        at_logits = at_heads + self.v + self.aligned
        self.gradient["query"] = a["query"] + self.logits + self.k + at_logits
        self.gradient["key"] = a["key"] + self.logits + self.q + at_logits + grouped
        if self.shared:
            at_shared = at_branch + self.weight("shared out") + self.fan_out["shared out"] / 2
            self.gradient["shared in"] = a["shared in"] + at_shared
            self.gradient["shared out"] = a["shared out"] + at_branch + self.random("shared in")
        if self.routed:
            # A score sees what its expert writes . (backward signal): D terms, independent at first, aligned once that moves.
            width = self.fan_out["MLP out"]
            first, moved = self.written + width / 2, self.acts("MLP out", self.hidden) + width
            self.gradient["router"] = a["router"] + at_branch + max(first, moved) - self.experts
            self.unaligned = first - max(first, moved)

    def direction(self, name: str) -> float:
        """Entries of the optimizer's direction: Adam and Lion divide the gradient's size out; eps has rows of its own."""
        return self.gradient[name] if self.family == "sgd" else 0.0

    def rate(self, name: str) -> float:
        """Learning rate of the effective weight."""
        return self.x(self.rows[name].multiplier) + self.x(self.rows[name].lr(self.family))

    def step(self, name: str) -> float:
        """Entries of the effective weight's change in one step."""
        if self.orthogonal(name):
            return self.rate(name) - max(self.fan_in[name], self.fan_out[name]) / 2
        return self.rate(name) + self.direction(name)

    def acts(self, name: str, entries: float = 0.0) -> float:
        """dW x for the x that made the update.

        Args:
            name: of a matrix in `SPECS`.
            entries: exponent of x's entries.
        """
        if self.orthogonal(name):  # spectral norm 1: rms out = rms in * (fan_in / fan_out)^1/2
            return self.rate(name) + (self.fan_in[name] - self.fan_out[name]) / 2 + entries
        return self.step(name) + self.fan_in[name] + entries

    def orthogonal(self, name: str) -> bool:
        return (
            self.family == "muon"
            and self.specs[name].in_block
            and self.specs[name].role is not Role.ROUTER
        )

    def _update(self) -> None:
        self.dq, self.dk = self.acts("query"), self.acts("key")
        changes = {"query": self.dq + self.k, "key": self.q + self.dk}
        attention = {name: self.logits + self.n + change for name, change in changes.items()}
        self.d_attention = max(attention.values())
        self.dv, self.d_hidden = self.acts("value"), self.acts("MLP in")
        block = {
            "value": self.carried("attention out", self.dv),
            "attention out": self.acts("attention out", self.v),
            "MLP in": self.carried("MLP out", self.d_hidden),
            "MLP out": self.acts("MLP out", self.hidden),
            # A softmax cannot move by more than its whole.
            **{
                name: min(0.0, x) + self.random("attention out", self.v)
                for name, x in attention.items()
            },
        }
        if self.shared:
            block["shared in"] = self.carried("shared out", self.acts("shared in"))
            block["shared out"] = self.acts("shared out", self.random("shared in"))
        if self.routed:  # a gate cannot move by more than its whole either; what experts learn to write is aligned
            written = max(
                self.written - self.active / 2, min(0.0, max(block["MLP in"], block["MLP out"]))
            )
            block["router"] = min(0.0, self.acts("router")) + written
        self.d_block = max(block.values())
        # Blocks move in concert: their changes add up as L, not as L^1/2.
        stream = {name: self.branch + x + self.layers for name, x in block.items()}
        stream["embedding"] = self.step("embedding")
        self.features = max(stream.values()) - self.stream
        output = {name: self.first_order(name) for name in self.specs}
        self.d_output = max(output.values())
        self.parts = {"attention logits": attention, "stream": stream, "output": output}

    def moved_by(self, what: str) -> tuple[str, ...]:
        """The weights, by their names in `SPECS`, whose steps change "attention logits", "stream" or "output" the fastest."""
        parts = self.parts[what]
        return tuple(
            name for name in self.specs if parts.get(name, -math.inf) > max(parts.values()) - 1e-9
        )

    def first_order(self, name: str) -> float:
        """The output's change through one kind of weight: gradient times step, all of one sign, over entries and blocks."""
        rate, entries = (
            self.x(self.rows[name].lr(self.family)),
            self.fan_in[name] + self.fan_out[name],
        )
        blocks = self.layers if self.specs[name].in_block else 0.0
        blocks += self.experts if self.specs[name].role in EXPERTS else 0.0
        if "kv_heads" in self.specs[name].fan_out and self.family != "sgd":
            # G key heads are at most as many as the heads H: growing alone, their share (G/H)^1/2 comes from below to what it is
            # with a key head for each head, beside what does not grow (measured: the output's change goes as G^0.02).
            blocks -= max(0.0, self.growth.get("kv_heads", 0.0) - self.growth.get("heads", 0.0)) / 2
        if self.orthogonal(name):  # rate times the nuclear norm of a gradient of low rank
            return rate + self.gradient[name] + entries / 2 + blocks
        return rate + self.direction(name) + self.gradient[name] + entries + blocks

    def movement(self, name: str) -> float:
        """Spectral norm of the change over that of the weight."""
        fans = self.fan_in[name], self.fan_out[name]
        change = max(fans) if self.orthogonal(name) else sum(fans)
        return self.step(name) + change / 2 - (self.weight(name) + max(fans) / 2)

    def observables(self) -> dict[str, float]:
        # The residual kernel h.h'/D averages over D entries, and over the heads, whose random attention each block adds once.
        heads = 2 * min(0.0, self.spread) - self.growth.get("heads", 0.0)
        blocks = self.layers + 4 * (self.contribution - self.stream)
        exponents = {
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
        block = ("value", "attention out", "MLP in", "MLP out")
        if self.routed:
            exponents |= {
                "router's scores": self.random("router"),
                "change of router's scores": self.acts("router"),
                "what an expert writes, at first": self.written,
                "change of what experts write": max(
                    self.acts("MLP out", self.hidden), self.carried("MLP out", self.d_hidden)
                ),
            }
            block += ("router",)
        groups = {
            "embedding": ("embedding",),
            "q, k": ("query", "key"),
            "block": block,
            "readout": ("readout",),
        }
        for name, members in groups.items():
            exponents[f"weight movement, {name}"] = _farthest(*map(self.movement, members))
        for name, members in groups.items() if self.family in ("adam", "muon") else ():
            if on_adam := [weight for weight in members if not self.orthogonal(weight)]:
                over = (
                    self.gradient[weight] - self.x(self.rows[weight].eps_of(self.family))
                    for weight in on_adam
                )
                exponents[f"gradient over eps, {name}"] = min(over)
        exponents["lr * weight decay"] = _farthest(
            *(self.x(row.decay) for row in self.rows.values())
        )
        return exponents


def _farthest(*exponents: float) -> float:
    """The exponent farthest from 0, the growing one of two: what moves too much and what does not move are both seen."""
    return max(exponents, key=lambda x: (abs(x), x))
