"""What a parameter is: its role, its logical axes, and which of them are its fan-in. Declared once, where it is created."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from typing import Literal, NamedTuple

from mupax.errors import MupaxError


class PresetError(MupaxError):
    """A parameterization, role or size that cannot be used. The text says what to write instead."""


class Role(enum.Enum):
    """What a parameter does in the network. A preset's table has one row per role."""

    TOKEN_EMBEDDING = "token_embedding"
    """Looked up by an index, and any learned vector that joins the sequence (a CLS token)."""
    PATCH_EMBEDDING = "patch_embedding"
    """Read-in matrix from an input of fixed size."""
    POSITION = "position"
    NORM_GAIN = "norm_gain"
    BIAS = "bias"
    RELATIVE_BIAS = "relative_bias"
    """Added to attention logits by how far apart two positions are, one number per head (T5)."""
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUT = "attention_out"
    MLP_IN = "mlp_in"
    """Gate and up projections, each with fan-in embed."""
    MLP_OUT = "mlp_out"
    ROUTER = "router"
    """What scores every expert for a token. Its bias moves by how far an expert's load is from an even one."""
    EXPERT_IN = "expert_in"
    """Gate and up projections of every expert, each with fan-in embed."""
    EXPERT_OUT = "expert_out"
    READOUT = "readout"
    LORA_A = "lora_a"
    """From what a matrix reads to an adapter's rank (`mupax.presets.adapters`)."""
    LORA_B = "lora_b"
    """From an adapter's rank to what its matrix writes."""
    HIDDEN = "hidden"
    """Any other matrix between activations of growing size, for models of a user's own."""


BIASES = frozenset({Role.BIAS, Role.RELATIVE_BIAS})

ZERO = BIASES | {Role.LORA_B}
"""Roles that start at 0."""

ADAPTERS = frozenset({Role.LORA_A, Role.LORA_B})
"""Roles of a product that is added to a matrix, which says in `adapts` to which."""

VECTORS = frozenset({Role.NORM_GAIN}) | BIASES
"""Roles that never decay, and that say in `of` which matrix or norm they belong to, if any."""

EXPERTS = frozenset({Role.EXPERT_IN, Role.EXPERT_OUT})
"""Roles of which every expert has a matrix of its own."""

ROUTED = EXPERTS | {Role.ROUTER}
"""Roles of a layer of experts."""

EMBEDDINGS = frozenset({Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION})

Branch = Literal["attention", "cross", "mlp"]
Distribution = Literal["normal", "uniform", "truncated"]


class Stack(NamedTuple):
    """Residual blocks of one kind: the axis that counts them, and the branches of each, in order."""

    axis: str = "layers"
    branches: tuple[Branch, ...] = ("attention", "mlp")


OWN, ENCODER, CROSSED = (
    Stack(),
    Stack("encoder_layers"),
    Stack(branches=("attention", "cross", "mlp")),
)
"""The stack of most models; of an encoder-decoder, that of its encoder, and of its decoder."""

RANK = "rank"
"""The axis between the matrices of an adapter. It is finite whatever a preset's base names."""

AXES = {
    "layers": "stacked residual blocks",
    "embed": "residual stream",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "one head",
    "value_dim": "one head's values, where they have a size of their own",
    "mlp": "MLP hidden",
    "experts": "experts of a layer",
    "active": "experts that a token goes to",
    "expert_dim": "one expert's hidden",
    "vocab": "tokens",
    "classes": "image classes",
    "patch": "one flattened input patch",
    "taps": "pixels that a kernel of a convolution covers",
    "stem": "channels that the first convolution of a stem writes",
    "stem_next": "channels that the second of three convolutions of a stem writes",
    "pooled": "vectors of an image that its classifier reads side by side",
    "representation": "features between the residual stream and its readout",
    "position": "sequence positions",
    RANK: "between the two matrices of an adapter",
    "encoder_layers": "stacked residual blocks of an encoder that a decoder attends to",
    "memory": "residual stream of that encoder, as the decoder attends to it",
    "source": "positions of that encoder",
    "distance": "buckets of distances between positions",
    "input": "features of any other input",
    "output": "features of any other output",
}
"""Logical axis names and what each counts. Sharding rules and base sizes use the same names."""

FOLLOWS = {
    "memory": "embed",
    "representation": "embed",
    "stem": "embed",
    "stem_next": "embed",
    "encoder_layers": "layers",
}
"""Axes whose base is another's where a base names only that."""

RUN_AXES = {"batch": "examples in a step", "tokens": "tokens, of images images, seen in all"}
"""What a base may name beside sizes: joint rules (`mupax.presets.horizon`) are relative to them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter's declaration. Everything else about it (std, rates, sharding, counts) is computed from this.

    Attributes:
        role: the row of a preset's table.
        axes: logical name of every dimension, in order.
        fan_in: names of the axes that a matrix product sums over; empty for embeddings looked up, gains and biases.
        in_block: whether the parameter sits in a residual branch, where depth rules apply.
        of: for a gain or bias, the role of the matrix it belongs to (None for a norm of the residual stream).
        tied: for a readout that reuses the token embedding; such a spec has a multiplier but no array of its own.
        part: of an encoder-decoder: "encoder", or "cross", the attention of its decoder to what the encoder wrote.
        value_dim: for queries and keys, whose gradients are sums over values of a size of their own.
        start: what a gain starts at where no parameterization says otherwise: a layer scale's small number.
        adapts: for an adapter, the matrix that it is added to.
        shared: growing axes along which the parameter is broadcast: each of its numbers meets all that lies along them, so that
            its gradient is a sum over them. An MLP over patches is applied to every channel: shared=("embed",).
        distribution: what a matrix' numbers are drawn from, at whatever deviation a parameterization sets: normal ones, even ones
            (uniform), or normal ones without those beyond two deviations (truncated).

    Raises:
        PresetError: an axis that is not in `AXES`, a fan-in that is not an axis, `of` on a matrix, or `adapts` on what is no adapter.
    """

    role: Role
    axes: tuple[str, ...]
    fan_in: tuple[str, ...] = ()
    in_block: bool = False
    of: Role | None = None
    tied: bool = False
    part: Literal["", "encoder", "cross"] = ""
    value_dim: bool = False
    start: float = 1.0
    adapts: ParamSpec | None = None
    distribution: Distribution = "normal"
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.role, Role):
            near = difflib.get_close_matches(
                str(self.role), [role.value for role in Role], n=1, cutoff=0
            )
            raise PresetError(f"role {self.role!r} is no Role; write Role.{Role(near[0]).name}")
        for what, axes in (("axes", self.axes), ("fan_in", self.fan_in), ("shared", self.shared)):
            if isinstance(axes, str):
                raise PresetError(
                    f"{self.role.value}: {what} is the text {axes!r}; write {what}=({axes!r},)"
                )
        for axis in (*self.axes, *self.shared):
            if axis not in AXES:
                near = difflib.get_close_matches(axis, AXES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the axes are {', '.join(AXES)}"
                raise PresetError(f"{self.role.value}: no logical axis is named {axis!r}; {hint}")
        if len(set(self.axes)) != len(self.axes):
            raise PresetError(f"{self.role.value}: an axis is named twice in {self.axes}")
        for axis in self.fan_in:
            if axis not in self.axes:
                raise PresetError(
                    f"{self.role.value}: fan_in {axis!r} is not one of the axes {self.axes}"
                )
        for axis in self.shared:
            if axis in self.axes:
                raise PresetError(
                    f"{self.role.value}: it has the axis {axis!r}, and is not broadcast along it (shared)"
                )
        if self.of is not None and self.role not in VECTORS:
            raise PresetError(
                f"{self.role.value}: only gains and biases say which role they belong to (of={self.of})"
            )
        if self.start != 1 and self.role is not Role.NORM_GAIN:
            raise PresetError(
                f"{self.role.value}: only gains say what they start at (start={self.start:g})"
            )
        if (self.adapts is None) == (self.role in ADAPTERS):
            raise PresetError(
                f"{self.role.value}: adapters, and no others, say which matrix they are added to (adapts)"
            )
        if self.tied and self.role is not Role.READOUT:
            raise PresetError(f"{self.role.value}: only a readout can be tied")
        if self.role not in VECTORS | EMBEDDINGS and not self.fan_in:
            raise PresetError(
                f"{self.role.value}: a matrix needs fan_in, the names of the axes it sums over"
            )

    @property
    def stacked(self) -> bool:
        """Whether the first axis counts the blocks of a residual stack, each with its own numbers."""
        return self.axes[:1] in ((OWN.axis,), (ENCODER.axis,))

    @functools.cached_property
    def copies(self) -> tuple[str, ...]:
        """Axes that count matrices of their own: blocks of a stack, and experts, but for the router, which scores them all."""
        experts = {"experts"} if self.role in EXPERTS or self.of in EXPERTS else set()
        return tuple(axis for axis in self.axes if axis in {OWN.axis, ENCODER.axis} | experts)

    @property
    def moved_by_loads(self) -> bool:
        """Whether it is a router's bias, whose step is how far loads are from even ones and no gradient of the loss."""
        return self.role is Role.BIAS and self.of is Role.ROUTER

    @property
    def blocks(self) -> str:
        """The axis that counts the blocks of its stack."""
        return (ENCODER if self.part == "encoder" else OWN).axis

    @property
    def bias(self) -> ParamSpec:
        """The declaration of this matrix' bias: one number per output."""
        axes = (*self.copies, *self.fan_out)
        return dataclasses.replace(
            self, role=Role.BIAS, axes=axes, fan_in=(), of=self.role, tied=False
        )

    @property
    def gain(self) -> ParamSpec:
        """The declaration of a gain of what this matrix writes, for all its rows: one number per output."""
        return dataclasses.replace(self.bias, role=Role.NORM_GAIN)

    @property
    def fan_out(self) -> tuple[str, ...]:
        """Axes of the output: those that are neither summed over nor count matrices (`copies`)."""
        return tuple(
            axis for axis in self.axes if axis not in self.fan_in and axis not in self.copies
        )

    @functools.cached_property
    def group(self) -> str:
        """Name of the preset row, such as `block.query`, `encoder.block.query.bias`, `block.cross.query` or `readout`."""
        parts = [
            *["encoder"] * (self.part == "encoder"),
            *["block"] * self.in_block,
            *["cross"] * (self.part == "cross"),
        ]
        parts += [of.value for of in [self.of or (self.adapts and self.adapts.role)] if of]
        return ".".join([*parts, self.role.value])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorSpec:
    """A number that the forward pass multiplies by. A parameterization sets it; nothing trains or saves it.

    Attributes:
        kind: "logits" of attention, [layers]; "skip" and "branch" of a residual stack, [layers, branches]; "readout", [], of one
            that shares the embedding's table.
        shape: of the factor.
        value: until a parameterization sets it.
        spec: declaration of a readout that has no array of its own.
        stack: whose blocks have it.
    """

    kind: Literal["logits", "skip", "branch", "readout"]
    shape: tuple[int, ...]
    value: float = 1.0
    spec: ParamSpec | None = None
    stack: Stack = OWN


def block_matrix(
    role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...], shared: tuple[str, ...] = ()
) -> ParamSpec:
    """Return the declaration of a matrix of the residual stack, one of which every layer has.

    Args:
        axes: logical axes of one layer's.
        fan_in: those of them that it sums over.
        shared: growing axes along which it is broadcast (`ParamSpec.shared`).
    """
    return ParamSpec(role=role, axes=("layers", *axes), fan_in=fan_in, in_block=True, shared=shared)
