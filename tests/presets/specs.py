"""Declared parameters of a decoder with every role, sizes of it, and exponents of presets."""

from __future__ import annotations

from collections.abc import Mapping

from mupax.presets import ParamSpec, Preset, Role
from mupax.presets.analysis.verdicts import verdicts

BASE = {"embed": 6, "heads": 3, "kv_heads": 3, "head_dim": 2, "mlp": 12, "layers": 2}
FINITE = {"vocab": 17, "patch": 12, "position": 5, "classes": 13}


def block(
    role: Role, axes: tuple[str, ...], fan_in: tuple[str, ...] = (), of: Role | None = None
) -> ParamSpec:
    """Return the declaration of a parameter of every block."""
    return ParamSpec(role=role, axes=("layers", *axes), fan_in=fan_in, in_block=True, of=of)


SPECS = {
    "token": ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed")),
    "position": ParamSpec(role=Role.POSITION, axes=("position", "embed")),
    "patch": ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",)),
    "query": block(Role.QUERY, ("embed", "heads", "head_dim"), ("embed",)),
    "key": block(Role.KEY, ("embed", "kv_heads", "head_dim"), ("embed",)),
    "value": block(Role.VALUE, ("embed", "kv_heads", "head_dim"), ("embed",)),
    "attention_out": block(
        Role.ATTENTION_OUT, ("heads", "head_dim", "embed"), ("heads", "head_dim")
    ),
    "mlp_in": block(Role.MLP_IN, ("embed", "mlp"), ("embed",)),
    "mlp_out": block(Role.MLP_OUT, ("mlp", "embed"), ("mlp",)),
    "query_bias": block(Role.BIAS, ("heads", "head_dim"), of=Role.QUERY),
    "key_bias": block(Role.BIAS, ("kv_heads", "head_dim"), of=Role.KEY),
    "head_gain": block(Role.NORM_GAIN, ("heads", "head_dim"), of=Role.QUERY),
    "shared_gain": block(Role.NORM_GAIN, ("head_dim",), of=Role.KEY),
    "norm_gain": block(Role.NORM_GAIN, ("embed",)),
    "value_bias": block(Role.BIAS, ("kv_heads", "head_dim"), of=Role.VALUE),
    "mlp_bias": block(Role.BIAS, ("mlp",), of=Role.MLP_IN),
    "final_gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",)),
    "patch_bias": ParamSpec(role=Role.BIAS, axes=("embed",), of=Role.PATCH_EMBEDDING),
    "readout": ParamSpec(role=Role.READOUT, axes=("embed", "classes"), fan_in=("embed",)),
    "readout_bias": ParamSpec(role=Role.BIAS, axes=("classes",), of=Role.READOUT),
}


STABLE = (0, "stable")


def growth(
    preset: Preset, observable: str, limit: str, optimizer: str = "adam"
) -> tuple[float, str]:
    """Return the exponent of an observable in a limit, and the verdict on it."""
    entry = verdicts(preset, optimizer)[observable][limit]
    return entry.exponent, entry.verdict


def assert_growth(
    preset: Preset, limit: str, expected: Mapping[str, tuple[float, str]], optimizer: str = "adam"
) -> None:
    """Assert the exponent and the verdict of some observables in a limit."""
    table = verdicts(preset, optimizer)
    entries = {row: (table[row][limit].exponent, table[row][limit].verdict) for row in expected}
    assert entries == expected
