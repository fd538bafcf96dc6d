"""Table of docs/concepts/roles.md: roles found by tracing every family and three other models.

python -m tests.train.studies.roles.traced_roles
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

from examples import foreign_roles, mlp_mixer
from mupax.train.studies.roles import models
from mupax.train.studies.roles.deduce import Roles
from mupax.zoo import configs
from mupax.zoo.families import ModelConfig
from mupax.zoo.transformer import RoutingConfig
from scripts.pages.markdown import replaced

PAGE = Path(__file__).parents[4] / "docs" / "concepts" / "roles.md"


def _of(name: str, compute: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    """A named model, two blocks deep, with other fields."""
    model = configs.get(name)
    deep = {"depth": 2, **({"encoder_depth": 2} if name.startswith(("t5", "bart", "ed")) else {})}
    return dataclasses.replace(
        model, **deep | fields, compute=dataclasses.replace(model.compute, **compute or {})
    )


SCAN, UNROLLED, FUSED = (
    {"layers": "scan"},
    {"layers": "unrolled"},
    {"layers": "scan", "projections": "fused"},
)
_PLAIN = {"norm": "layernorm", "bias": True}

CASES: dict[str, ModelConfig] = {
    "ViT, CLS token, biases, unrolled": _of("vit-tiny", UNROLLED, pool="cls"),
    "ViT, mean of patches, scanned": _of("vit-tiny", SCAN),
    "ViT, fixed positions, layer scale": _of("vit-tiny", SCAN, sincos=True, layer_scale=0.1),
    "ViT, CLS and mean, registers, layer scale, experts with a shared one": _of(
        "vit-tiny", SCAN, pool="cls-mean", registers=2, layer_scale=1e-5, experts=4, shared_experts=1
    ),
    "decoder, rotary, gated, unrolled": _of("lm-tiny", UNROLLED),
    "decoder, grouped queries, QK-norm, biases, fused products, scanned": _of(
        "lm-tiny", FUSED, num_kv_heads=2, qk_norm=True, **_PLAIN
    ),
    "decoder, learned positions, tied, readout bias, GELU, blocks recomputed": _of(
        "lm-tiny", {"remat": "dots", **SCAN}, positions="learned", tied=True, readout_bias=True, activation="gelu", **_PLAIN
    ),
    "decoder, value_dim, layer-normed queries, no gains, bfloat16": _of(
        "lm-tiny", {"dtype": "bfloat16", **SCAN}, value_dim=8, qk_norm=True, qk_norm_kind="layernorm", norm_gain=False, **_PLAIN
    ),
    "decoder, post-norms, soft caps, every other layer a window, GEGLU": _of(
        "lm-tiny", SCAN, post_norm=True, attention_softcap=50.0, logit_softcap=30.0, window=16, full_every=2, activation="geglu"
    ),
    "decoder, parallel branches, part rotary, QKV biases, ReLU": _of(
        "lm-tiny", SCAN, parallel=True, rotary_fraction=0.5, qkv_bias=True, activation="relu"
    ),
    "decoder, GELU before branches (bordelon-lm)": _of("bordelon-lm", SCAN),
    "decoder, experts without dropping, a shared one, bias balance, biases": _of(
        "lm-tiny", SCAN, experts=4, shared_experts=1, routing=RoutingConfig(balance="bias"), bias=True
    ),
    "decoder, experts with capacity, softmax gates, post-norms": _of(
        "lm-tiny", UNROLLED, experts=4, routing=RoutingConfig(capacity_factor=1.5, gate="softmax"), post_norm=True
    ),
    "encoder-decoder, relative positions, tied (t5-small), unrolled": _of("t5-small", UNROLLED),
    "encoder-decoder, learned positions, biases, own tables, QK-norm, scanned": _of(
        "ed-tiny", SCAN, shared=False, tied=False, qk_norm=True, positions="learned", **_PLAIN
    ),
    "encoder-decoder, rotary, embedding norms, scanned": _of("ed-tiny", SCAN),
    "MLP-Mixer (examples/mlp_mixer.py)": mlp_mixer.MIXER,
}  # fmt: skip
"""Traced models: every option that makes, moves or changes a parameter, at least once."""

FOREIGN: dict[str, tuple[models.Build, dict[str, int]]] = {
    "dicts of arrays by hand": (foreign_roles.by_hand, foreign_roles.SIZES),
    "flax.linen": (foreign_roles.linen, foreign_roles.SIZES),
    "NNX: nnx.Linear, nnx.MultiHeadAttention": (foreign_roles.classifier, foreign_roles.PATCHES),
}


@functools.cache
def traced(name: str) -> Roles:
    """Return the roles of a model of either table."""
    return models.roles_of_config(CASES[name]) if name in CASES else models.roles_of(*FOREIGN[name])


def table() -> str:
    """The rows of the page."""
    rows = ["| model | parameters | found | as declared |", "|---|---|---|---|"]
    total = [0, 0, 0]
    for name, config in CASES.items():
        roles, declared = traced(name), len(config.parameters()) + (config.tied_readout is not None)
        count = len(roles.specs) + (roles.tied is not None)
        same = count - len(models.differences(config, roles))
        total = [sum(pair) for pair in zip(total, (declared, count, same), strict=True)]
        rows.append(f"| {name} | {declared} | {count} | {same} |")
    rows.append(f"| **all of these** | **{total[0]}** | **{total[1]}** | **{total[2]}** |")
    for name in FOREIGN:
        roles = traced(name)
        count, tied = len(roles.specs), roles.tied is not None
        rows.append(f"| {name} | {count + len(roles.refused) + tied} | {count + tied} | |")
    return "\n".join(rows)


def main() -> int:
    """Write the table into the page."""
    PAGE.write_text(replaced(PAGE.read_text(), "traced", f"\n{table()}\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
