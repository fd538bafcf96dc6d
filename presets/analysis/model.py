"""The model that theory is worked out for, by the names of its report, and the limits in which its sizes grow."""

from __future__ import annotations

import dataclasses

from mupax.presets.matrices import EXPERT_MATRICES, MATRICES, of_cross, of_encoder
from mupax.presets.roles import Role

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
"""Limit to the axes that grow, and how fast: N, H and L with F/D and H/H_kv fixed."""

SPECS = {
    spec.role.value.replace("token_", "").replace("mlp_", "MLP ").replace("_", " "): spec
    for spec in MATRICES.values()
}
"""The matrices of the model, by the names of the report."""
PARTS = {
    "": SPECS,
    "cross": SPECS
    | {name: of_cross(SPECS[name]) for name in ("query", "key", "value", "attention out")},
    "encoder": {name: of_encoder(spec) if spec.in_block else spec for name, spec in SPECS.items()},
    "experts": SPECS
    | dict(zip(("router", "MLP in", "MLP out"), EXPERT_MATRICES.values(), strict=True)),
}
PARTS["shared experts"] = PARTS["experts"] | {
    f"shared {way}": SPECS[f"MLP {way}"] for way in ("in", "out")
}
"""The same by `ParamSpec.part` of an encoder-decoder: with attention to the encoder's output for its own, and of the encoder; and with
experts for the MLP, alone or beside one that every token goes to."""
EXPERT_LIMITS = {
    "width": {"head_dim": 1.0, "embed": 1.0, "expert_dim": 1.0},
    "experts": {"experts": 1.0, "active": 1.0},
    "expert_dim": {"expert_dim": 1.0},
}
"""Limits of a layer of experts: n with m, E at a fixed share of active ones, and m alone."""

TIED = dataclasses.replace(SPECS["embedding"], role=Role.READOUT, fan_in=("embed",), tied=True)
"""The readout that is the embedding's table."""
