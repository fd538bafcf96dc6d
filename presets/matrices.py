"""Declarations of a transformer's matrices, also of experts, encoders and cross-attention.

The zoo's models and `mupax presets limits` are built from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mupax.presets.roles import ENCODER, OWN, ParamSpec, Role, block_matrix

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
"""Matrices of a transformer by name."""

EXPERT_MATRICES = {
    "block.experts.router": block_matrix(Role.ROUTER, ("embed", "experts"), ("embed",)),
    "block.experts.up": block_matrix(
        Role.EXPERT_IN, ("experts", "embed", "expert_dim"), ("embed",)
    ),
    "block.experts.down": block_matrix(
        Role.EXPERT_OUT, ("experts", "expert_dim", "embed"), ("expert_dim",)
    ),
}
"""Matrices of a layer of experts by name. They replace a block's MLP matrices."""


def with_value_dim(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return the declarations for attention whose values have their own size, `value_dim`.

    Declarations of matrices outside attention are unchanged.

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
    """Return the declaration for a parameter of an encoder-decoder's encoder.

    The layers and positions of the encoder have axes of their own.
    """
    axes = _renamed(spec.axes, {OWN.axis: ENCODER.axis, "position": "source"})
    return dataclasses.replace(spec, part="encoder", axes=axes)


def of_cross(spec: ParamSpec) -> ParamSpec:
    """Return the declaration for a parameter of a decoder's attention to the encoder's output.

    Keys and values read the encoder's residual stream, whose axis is "memory".
    """
    # Queries and outputs are of the decoder's own stream.
    if spec.role not in (Role.KEY, Role.VALUE):
        return dataclasses.replace(spec, part="cross")
    axes = _renamed(spec.axes, {"embed": "memory"})
    return dataclasses.replace(spec, part="cross", axes=axes, fan_in=("memory",))


def _renamed(axes: tuple[str, ...], new_names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the axes with those in `new_names` renamed."""
    return tuple(new_names.get(axis, axis) for axis in axes)
