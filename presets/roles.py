"""Declarations of parameters: role, logical axes and fan-in.

Each parameter is declared once, where it is created. Presets, sharding rules and counts read the
declaration (`ParamSpec`). The zoo's models and `mupax presets limits` take the declarations of a
transformer's matrices from `MATRICES` and `EXPERT_MATRICES`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from collections.abc import Mapping
from typing import Literal, NamedTuple

from mupax import MupaxError


class PresetError(MupaxError):
    """Error about a parameterization, role or size that cannot be used.

    The message says what to write instead.
    """


class Role(enum.Enum):
    """Function of a parameter in the network. A preset's table has one row per role."""

    TOKEN_EMBEDDING = "token_embedding"
    """Table looked up by an index, or a learned vector of the sequence, such as a CLS token."""
    PATCH_EMBEDDING = "patch_embedding"
    """Read-in matrix from an input of fixed size."""
    POSITION = "position"
    NORM_GAIN = "norm_gain"
    BIAS = "bias"
    RELATIVE_BIAS = "relative_bias"
    """Table that is added to attention logits: one number per head and bucket of distances (T5)."""
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUT = "attention_out"
    MLP_IN = "mlp_in"
    """Gate and up projections, each with fan-in embed."""
    MLP_OUT = "mlp_out"
    ROUTER = "router"
    """Matrix that scores every expert for a token. Its bias is updated by the experts' loads."""
    EXPERT_IN = "expert_in"
    """Gate and up projections of every expert, each with fan-in embed."""
    EXPERT_OUT = "expert_out"
    READOUT = "readout"
    LORA_A = "lora_a"
    """Adapter matrix from its base matrix's inputs to the rank (`mupax.presets.adapters`)."""
    LORA_B = "lora_b"
    """Adapter matrix from the rank to its base matrix's outputs."""
    HIDDEN = "hidden"
    """Any other matrix between activations of growing size, for a user's own models."""


BIASES = frozenset({Role.BIAS, Role.RELATIVE_BIAS})

ZERO = BIASES | {Role.LORA_B}
"""Roles that start at 0."""

ADAPTERS = frozenset({Role.LORA_A, Role.LORA_B})
"""Roles of low-rank adapters. `ParamSpec.adapts` is the matrix to which they are added."""

VECTORS = frozenset({Role.NORM_GAIN}) | BIASES
"""Roles of gains and biases, which have no weight decay.

`ParamSpec.of` is the role of the matrix or norm that such a parameter belongs to, if any.
"""

EXPERTS = frozenset({Role.EXPERT_IN, Role.EXPERT_OUT})
"""Roles for which every expert has its own matrix."""

ROUTED = EXPERTS | {Role.ROUTER}
"""Roles of the matrices in a mixture-of-experts layer."""

EMBEDDINGS = frozenset({Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION})

Branch = Literal["attention", "cross", "mlp"]
Distribution = Literal["normal", "uniform", "truncated"]


class Stack(NamedTuple):
    """Stack of residual blocks that all have the same branches.

    Attributes:
        axis: Logical axis that counts the blocks.
        branches: Branches of each block, in order.
    """

    axis: str = "layers"
    branches: tuple[Branch, ...] = ("attention", "mlp")


OWN = Stack()
"""Stack of a model that has only one, such as a decoder or a vision transformer."""

ENCODER = Stack("encoder_layers")
"""Encoder stack of an encoder-decoder."""

CROSSED = Stack(branches=("attention", "cross", "mlp"))
"""Decoder stack of an encoder-decoder."""

_STACK_AXES = (OWN.axis, ENCODER.axis)

RANK = "rank"
"""Logical axis between the two matrices of an adapter. It never counts as growing."""

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
"""Meaning of each logical axis, by name.

A logical axis names one dimension of a parameter. Sharding rules and base sizes use these names.
"""

FOLLOWS = {
    "memory": "embed",
    "representation": "embed",
    "stem": "embed",
    "stem_next": "embed",
    "encoder_layers": "layers",
}
"""Axes whose base size is that of another axis, unless the base has their own size."""

RUN_AXES = {"batch": "examples in a step", "tokens": "tokens, of images images, seen in all"}
"""Quantities of a run that a base may have in addition to sizes, with their meaning.

Joint rules (`mupax.presets.horizon`) scale settings by the ratio of the run's value to the base's.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Declaration of one parameter: what it is, not its values.

    Initial std, learning rates, sharding and counts are computed from the declaration.

    Attributes:
        role: Role of the parameter in the network. A preset has one rule for each role.
        axes: Logical name of every dimension, in order.
        fan_in: Axes that a matrix product sums over. Empty for gains, biases and embeddings that
            are looked up.
        in_block: Whether the parameter is in a residual branch, where depth rules apply.
        of: Role of the matrix that a gain or bias belongs to. `None` for a norm of the residual
            stream.
        tied: Whether a readout reuses the token embedding. Such a readout has a multiplier and no
            array.
        part: Part of an encoder-decoder: "encoder", or "cross" for the decoder's attention to the
            encoder's output.
        value_dim: Whether attention has values of their own size. Set on queries and keys, because
            their gradients are sums over the values.
        start: Initial value of a gain, such as the small number of a layer scale. A
            parameterization may set another one.
        adapts: Matrix that an adapter is added to.
        distribution: Distribution of a matrix's initial entries. The parameterization sets their
            standard deviation. "truncated" is a normal distribution cut at two deviations.
        shared: Growing axes along which the parameter is broadcast. The gradient is a sum over
            them. An MLP over patches is applied to every channel: shared=("embed",).

    Raises:
        PresetError: The fields contradict each other, or an axis is not in `AXES`.
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
            roles = [role.value for role in Role]
            # A cutoff of 0 always gives a name.
            near = difflib.get_close_matches(str(self.role), roles, n=1, cutoff=0)
            raise PresetError(f"role {self.role!r} is no Role; write Role.{Role(near[0]).name}")
        self._check_axes()
        self._check_fields_of_role()

    def _check_axes(self) -> None:
        """Raise `PresetError` if the axes of a field are wrong.

        Axes must be known and not repeated. Those in `fan_in` must be in `axes`, those in `shared`
        must not.
        """
        role = self.role.value
        for field in ("axes", "fan_in", "shared"):
            axes = getattr(self, field)
            # A text is a sequence of letters, so the checks below would name a letter.
            if isinstance(axes, str):
                raise PresetError(
                    f"{role}: {field} is the text {axes!r}; write {field}=({axes!r},)"
                )

        for axis in (*self.axes, *self.shared):
            if axis not in AXES:
                near = difflib.get_close_matches(axis, AXES, n=1)
                hint = f"the axes are {', '.join(AXES)}"
                if near:
                    hint = f"did you mean {near[0]!r}?"
                raise PresetError(f"{role}: no logical axis is named {axis!r}; {hint}")
        # Sizes are looked up by axis, so that a square matrix needs two names.
        if len(set(self.axes)) != len(self.axes):
            raise PresetError(f"{role}: an axis is named twice in {self.axes}")
        for axis in self.fan_in:
            if axis not in self.axes:
                raise PresetError(f"{role}: fan_in {axis!r} is not one of the axes {self.axes}")
        for axis in self.shared:
            if axis in self.axes:
                raise PresetError(
                    f"{role}: it has the axis {axis!r}, and is not broadcast along it (shared)"
                )

    def _check_fields_of_role(self) -> None:
        """Raise `PresetError` if the role forbids a field that is set, or needs one that is not."""
        role = self.role.value
        if self.of is not None and self.role not in VECTORS:
            raise PresetError(
                f"{role}: only gains and biases say which role they belong to (of={self.of})"
            )
        if self.start != 1 and self.role is not Role.NORM_GAIN:
            raise PresetError(f"{role}: only gains say what they start at (start={self.start:g})")
        if (self.adapts is None) == (self.role in ADAPTERS):
            raise PresetError(
                f"{role}: adapters, and no others, say which matrix they are added to (adapts)"
            )
        if self.tied and self.role is not Role.READOUT:
            raise PresetError(f"{role}: only a readout can be tied")
        # Without a fan-in every scale of a matrix would silently be that of a lookup.
        is_matrix = self.role not in VECTORS | EMBEDDINGS
        if is_matrix and not self.fan_in:
            raise PresetError(f"{role}: a matrix needs fan_in, the names of the axes it sums over")

    @property
    def stacked(self) -> bool:
        """True if the first axis counts the blocks of a residual stack."""
        return bool(self.axes) and self.axes[0] in _STACK_AXES

    @functools.cached_property
    def copies(self) -> tuple[str, ...]:
        """Axes that count separate matrices: blocks of a stack and experts.

        A router's experts are its outputs, not copies: one matrix scores all of them.
        """
        counting = {*_STACK_AXES}
        if self.role in EXPERTS or self.of in EXPERTS:
            counting.add("experts")
        return tuple(axis for axis in self.axes if axis in counting)

    @property
    def moved_by_loads(self) -> bool:
        """True for a router's bias, which is updated by expert loads and not by gradients."""
        return self.role is Role.BIAS and self.of is Role.ROUTER

    @property
    def blocks(self) -> str:
        """Axis that counts the blocks of the parameter's stack: "encoder_layers" or "layers"."""
        # Cross-attention is in the decoder's blocks and counts with them.
        if self.part == "encoder":
            return ENCODER.axis
        return OWN.axis

    @property
    def bias(self) -> ParamSpec:
        """Declaration of this matrix's bias: one entry per output of each matrix in `copies`."""
        axes = (*self.copies, *self.fan_out)
        return dataclasses.replace(
            self, role=Role.BIAS, axes=axes, fan_in=(), of=self.role, tied=False
        )

    @property
    def gain(self) -> ParamSpec:
        """Declaration of a gain that multiplies this matrix's outputs, with a bias's axes."""
        return dataclasses.replace(self.bias, role=Role.NORM_GAIN)

    @property
    def fan_out(self) -> tuple[str, ...]:
        """Axes of the output: all axes outside `fan_in` and `copies`."""
        not_outputs = {*self.fan_in, *self.copies}
        return tuple(axis for axis in self.axes if axis not in not_outputs)

    @functools.cached_property
    def group(self) -> str:
        """Name of the parameter group, such as `block.query` or `encoder.block.query.bias`.

        A preset's table has one row per group.
        """
        parts = []
        if self.part == "encoder":
            parts.append("encoder")
        if self.in_block:
            parts.append("block")
        if self.part == "cross":
            parts.append("cross")

        owner = self.of
        if owner is None and self.adapts is not None:
            owner = self.adapts.role
        if owner is not None:
            parts.append(owner.value)
        parts.append(self.role.value)
        return ".".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorSpec:
    """Declaration of a factor in the forward pass that a parameterization sets.

    The factor is a constant: it is neither trained nor saved.

    Attributes:
        kind: "logits" for the factor on attention logits, of shape [layers]. "skip" and "branch"
            for the factors in residual additions, [layers, branches]. "readout" for the multiplier
            of a readout that shares the embedding's array, [].
        shape: Shape of the factor's array, as `kind` says.
        value: Value until a parameterization sets another one.
        spec: Declaration of a readout that has no array of its own.
        stack: Stack whose blocks have the factor.
    """

    kind: Literal["logits", "skip", "branch", "readout"]
    shape: tuple[int, ...]
    value: float = 1.0
    spec: ParamSpec | None = None
    stack: Stack = OWN


def block_matrix(
    role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...], shared: tuple[str, ...] = ()
) -> ParamSpec:
    """Return the declaration of a matrix that every block of the residual stack has.

    Args:
        axes: Logical axes of one block's matrix, without "layers".
        fan_in: Members of `axes` that the matrix product sums over.
        shared: Growing axes along which the matrix is broadcast (`ParamSpec.shared`).
    """
    return ParamSpec(role=role, axes=("layers", *axes), fan_in=fan_in, in_block=True, shared=shared)


MATRICES = {
    "token": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed")),
    "block.attention.query": block_matrix(Role.QUERY, ("embed", "heads", "head_dim"), ("embed",)),
    "block.attention.key": block_matrix(Role.KEY, ("embed", "kv_heads", "head_dim"), ("embed",)),
    "block.attention.value": block_matrix(
        Role.VALUE, ("embed", "kv_heads", "head_dim"), ("embed",)
    ),
    "block.attention.out": block_matrix(
        Role.ATTENTION_OUT, ("heads", "head_dim", "embed"), ("heads", "head_dim")
    ),
    "block.mlp.up": block_matrix(Role.MLP_IN, ("embed", "mlp"), ("embed",)),
    "block.mlp.down": block_matrix(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
    "readout": ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",)),
}
"""Declarations of a transformer's matrices by parameter name."""

EXPERT_MATRICES = {
    "block.experts.router": block_matrix(Role.ROUTER, ("embed", "experts"), ("embed",)),
    "block.experts.up": block_matrix(
        Role.EXPERT_IN, ("experts", "embed", "expert_dim"), ("embed",)
    ),
    "block.experts.down": block_matrix(
        Role.EXPERT_OUT, ("experts", "expert_dim", "embed"), ("expert_dim",)
    ),
}
"""Declarations of the matrices in a mixture-of-experts layer, by parameter name.

They replace a block's MLP matrices.
"""


def with_value_dim(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return declarations of an attention whose values have a size of their own.

    The new size is the axis `value_dim`. In values and attention outputs it replaces `head_dim`.
    Queries and keys get the field `value_dim=True`. Declarations of other parameters are unchanged.

    Args:
        specs: Declarations by any names, which are kept.
    """
    declarations = {}
    for name, spec in specs.items():
        if spec.role in (Role.QUERY, Role.KEY):
            declarations[name] = dataclasses.replace(spec, value_dim=True)
        elif spec.role in (Role.VALUE, Role.ATTENTION_OUT):
            axes = _renamed(spec.axes, {"head_dim": "value_dim"})
            fan_in = _renamed(spec.fan_in, {"head_dim": "value_dim"})
            declarations[name] = dataclasses.replace(spec, axes=axes, fan_in=fan_in)
        else:
            declarations[name] = spec
    return declarations


def of_encoder(spec: ParamSpec) -> ParamSpec:
    """Convert the declaration of a parameter to that of the same one in an encoder.

    The encoder is part of an encoder-decoder. The axes "encoder_layers" and "source" replace
    "layers" and "position".
    """
    axes = _renamed(spec.axes, {OWN.axis: ENCODER.axis, "position": "source"})
    return dataclasses.replace(spec, part="encoder", axes=axes)


def of_cross(spec: ParamSpec) -> ParamSpec:
    """Convert the declaration of a self-attention parameter to that of cross-attention.

    The part becomes "cross". In keys and values the axis "memory", the encoder's residual stream,
    replaces "embed".
    """
    # Queries and outputs are of the decoder's own stream.
    if spec.role not in (Role.KEY, Role.VALUE):
        return dataclasses.replace(spec, part="cross")
    axes = _renamed(spec.axes, {"embed": "memory"})
    return dataclasses.replace(spec, part="cross", axes=axes, fan_in=("memory",))


def _renamed(axes: tuple[str, ...], new_names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the axes with those in `new_names` renamed."""
    return tuple(new_names.get(axis, axis) for axis in axes)
