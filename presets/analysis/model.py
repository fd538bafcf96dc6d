"""The transformer whose limits are computed: its matrices by the names of reports, and the limits.

`limits` reads the matrices, `verdicts` goes through the limits.
"""

from __future__ import annotations

import dataclasses

from mupax.presets.roles import EXPERT_MATRICES, MATRICES, Role, of_cross, of_encoder

LIMITS: dict[str, dict[str, float]] = {
    "head_dim": {"head_dim": 1.0, "embed": 1.0, "memory": 1.0, "representation": 1.0, "mlp": 1.0},
    "heads": {
        "heads": 1.0,
        "kv_heads": 1.0,
        "embed": 1.0,
        "memory": 1.0,
        "representation": 1.0,
        "mlp": 1.0,
    },
    "depth": {"layers": 1.0, "encoder_layers": 1.0},
}
"""Powers of the size that grows, by limit and axis: N, H and L grow with F/D and H/H_kv fixed."""

EXPERT_LIMITS = {
    "width": {"head_dim": 1.0, "embed": 1.0, "expert_dim": 1.0},
    "experts": {"experts": 1.0, "active": 1.0},
    "expert_dim": {"expert_dim": 1.0},
}
"""Limits of a model with experts: N with m, E at a fixed share of active experts, and m alone."""


def _label(role: Role) -> str:
    """Return the name of a matrix in reports, such as "MLP in"."""
    return role.value.replace("token_", "").replace("mlp_", "MLP ").replace("_", " ")


SPECS = {_label(spec.role): spec for spec in MATRICES.values()}
"""Matrices of the decoder by their name in reports."""

_CROSS = {name: of_cross(SPECS[name]) for name in ("query", "key", "value", "attention out")}
_ENCODER = {name: of_encoder(spec) if spec.in_block else spec for name, spec in SPECS.items()}
_EXPERTS = dict(zip(("router", "MLP in", "MLP out"), EXPERT_MATRICES.values(), strict=True))

PARTS = {
    "": SPECS,
    "cross": SPECS | _CROSS,
    "encoder": _ENCODER,
    "experts": SPECS | _EXPERTS,
    "shared experts": SPECS
    | _EXPERTS
    | {"shared in": SPECS["MLP in"], "shared out": SPECS["MLP out"]},
}
"""Matrices of each part of a model, by their name in reports.

"cross" is a decoder with attention to an encoder's output in place of self-attention. "encoder" is
an encoder. "experts" has experts in place of the MLP, "shared experts" has an MLP in addition,
which every token goes through.
"""

TIED = dataclasses.replace(SPECS["embedding"], role=Role.READOUT, fan_in=("embed",), tied=True)
"""Readout that shares the embedding's table."""
