"""Matrices of the transformer whose infinite limits are computed, and the limits themselves.

Matrices are keyed by the names that reports use. `limits` reads the matrices, `verdicts` goes
through the limits.
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
"""Axes that grow in each limit of a dense model, with their powers of the growing size.

The limits are a larger head dimension N, more heads H and more blocks L. In the first two the width
D and the MLP size F grow as well. F/D and query heads per key head stay fixed.
"""

EXPERT_LIMITS = {
    "width": {"head_dim": 1.0, "embed": 1.0, "expert_dim": 1.0},
    "experts": {"experts": 1.0, "active": 1.0},
    "expert_dim": {"expert_dim": 1.0},
}
"""Axes that grow in each limit of a model with experts, with their powers of the growing size.

"width" grows the head dimension and the width with the experts' hidden size. "experts" grows the
number of experts at a fixed share of active ones. "expert_dim" grows the experts' hidden size
alone.
"""


def _label(role: Role) -> str:
    """Return the name that reports use for the matrix of a role, such as "MLP in"."""
    return role.value.replace("token_", "").replace("mlp_", "MLP ").replace("_", " ")


SPECS = {_label(spec.role): spec for spec in MATRICES.values()}
"""Declarations of the decoder's matrices, by the names that reports use."""

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
"""Declarations of the matrices of each kind of stack, by the names that reports use.

"" is a decoder. "cross" is a decoder with attention to an encoder's output in place of
self-attention. "encoder" is an encoder. "experts" has experts in place of the MLP. "shared experts"
has experts and an MLP that every token goes through.
"""

TIED = dataclasses.replace(SPECS["embedding"], role=Role.READOUT, fan_in=("embed",), tied=True)
"""Declaration of a readout that shares the embedding's array."""
