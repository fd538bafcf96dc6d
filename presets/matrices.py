"""The matrices of a transformer, declared: of its blocks, of layers of experts, of an encoder and of attention to one."""

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
"""The matrices of a transformer, by name: what limits are worked out for and the zoo's models are made of."""

EXPERT_MATRICES = {
    "block.experts.router": block_matrix(Role.ROUTER, ("embed", "experts"), ("embed",)),
    "block.experts.up": block_matrix(
        Role.EXPERT_IN, ("experts", "embed", "expert_dim"), ("embed",)
    ),
    "block.experts.down": block_matrix(
        Role.EXPERT_OUT, ("experts", "expert_dim", "embed"), ("expert_dim",)
    ),
}
"""The same of a layer of experts, in place of its MLP."""


def with_value_dim(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """The matrices of attention whose values have a size of their own, `value_dim`; the others as they are.

    Args:
        specs: the matrices, by any names.
    """

    def one(spec: ParamSpec) -> ParamSpec:
        if spec.role in (Role.QUERY, Role.KEY):
            return dataclasses.replace(spec, value_dim=True)
        if spec.role not in (Role.VALUE, Role.ATTENTION_OUT):
            return spec
        axes, fan_in = (
            tuple("value_dim" if axis == "head_dim" else axis for axis in of)
            for of in (spec.axes, spec.fan_in)
        )
        return dataclasses.replace(spec, axes=axes, fan_in=fan_in)

    return {name: one(spec) for name, spec in specs.items()}


def of_encoder(spec: ParamSpec) -> ParamSpec:
    """The declaration as one of an encoder's stack and positions."""
    moved = {OWN.axis: ENCODER.axis, "position": "source"}
    return dataclasses.replace(
        spec, part="encoder", axes=tuple(moved.get(axis, axis) for axis in spec.axes)
    )


def of_cross(spec: ParamSpec) -> ParamSpec:
    """The declaration as one of attention to an encoder's output, which keys and values read."""
    if spec.role not in (Role.KEY, Role.VALUE):
        return dataclasses.replace(spec, part="cross")
    axes = tuple("memory" if axis == "embed" else axis for axis in spec.axes)
    return dataclasses.replace(spec, part="cross", axes=axes, fan_in=("memory",))
