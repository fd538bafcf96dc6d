"""Declarations of the zoo are what its losses say, and a wrong one differs by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mupax.presets.roles import ParamSpec, Role
from mupax.train.studies.roles import models
from mupax.zoo import configs
from scripts.pages.markdown import parts
from tests.train.studies.roles import traced_roles

DECODER, ROUTED = (
    "decoder, rotary, gated, unrolled",
    "decoder, experts without dropping, a shared one, bias balance, biases",
)
CROSS, VIT = (
    "encoder-decoder, relative positions, tied (t5-small), unrolled",
    "ViT, CLS token, biases, unrolled",
)


@pytest.mark.parametrize("name", traced_roles.CASES)
def test_every_declaration_is_what_the_loss_says(name: str) -> None:
    config, roles = traced_roles.CASES[name], traced_roles.traced(name)
    assert roles.refused == {}
    assert models.differences(config, roles) == {}
    assert roles.specs.keys() == config.parameters().keys() == roles.evidence.keys()


WITH_CONVOLUTIONS = [
    name for name, config in configs.CONFIGS.items() if getattr(config, "stem", None) is not None
]


@pytest.mark.parametrize(
    "name", [name for name in configs.CONFIGS if name not in WITH_CONVOLUTIONS]
)
def test_so_is_every_named_model(name: str) -> None:
    config = dataclasses.replace(configs.get(name), depth=2)
    roles = models.roles_of_config(config)
    assert (roles.refused, models.differences(config, roles)) == ({}, {})


@pytest.mark.parametrize("name", WITH_CONVOLUTIONS)
def test_kernels_of_convolutions_are_asked_for(name: str) -> None:
    roles = models.roles_of_config(configs.get(name))
    kernels = {"stem.first", "stem.second", "stem.third"}
    assert kernels <= roles.refused.keys()
    assert all("declare its role" in roles.refused[kernel] for kernel in kernels)


def test_the_page_has_this_table() -> None:
    text = traced_roles.PAGE.read_text()
    assert parts(text, "traced")[1].strip() == traced_roles.table()


@pytest.mark.parametrize(
    ("case", "name", "wrong", "words"),
    [
        (DECODER, "block.attention.out", {"fan_in": ("embed",)}, "fan_in is declared (embed) and traced (heads, head_dim)"),
        (DECODER, "readout", {"role": Role.HIDDEN}, "role is declared hidden and traced readout"),
        (DECODER, "block.attention.query", {"role": Role.MLP_IN}, "role is declared mlp_in and traced query"),
        (DECODER, "block.attention.query", {"role": Role.KEY}, "role is declared key and traced query"),
        (DECODER, "block.attention.value", {"role": Role.KEY}, "role is declared key and traced value"),
        (DECODER, "block.mlp.up", {"role": Role.MLP_OUT}, "role is declared mlp_out and traced mlp_in"),
        (DECODER, "block.mlp.down", {"in_block": False}, "in_block is declared False and traced True"),
        (DECODER, "token", {"axes": ("embed", "vocab")}, "axes is declared (embed, vocab) and traced (vocab, embed)"),
        (DECODER, "norm.gain", {"in_block": True}, "in_block is declared True and traced False"),
        (VIT, "block.mlp.up_bias", {"of": Role.MLP_OUT}, "of is declared mlp_out and traced mlp_in"),
        (VIT, "cls", {"role": Role.POSITION}, "role is declared position and traced token_embedding"),
        (ROUTED, "block.experts.up", {"role": Role.MLP_IN}, "role is declared mlp_in and traced expert_in"),
        (ROUTED, "block.experts.router", {"role": Role.HIDDEN}, "role is declared hidden and traced router"),
        (CROSS, "block.cross.key", {"part": ""}, "part is declared  and traced cross"),
        (CROSS, "encoder.relative_bias", {"role": Role.BIAS}, "role is declared bias and traced relative_bias"),
    ],
)  # fmt: skip
def test_control_a_wrong_declaration_differs(
    case: str, name: str, wrong: dict[str, Any], words: str
) -> None:
    config = traced_roles.CASES[case]
    declared: dict[str, ParamSpec] = dict(config.parameters())
    declared[name] = dataclasses.replace(declared[name], **wrong)
    differing = models.differences(config, traced_roles.traced(case), declared)
    assert list(differing) == [name]
    assert differing[name].startswith(words)
    assert differing[name].endswith(f": {traced_roles.traced(case).evidence[name]}")


def test_control_a_parameter_that_is_not_declared_differs() -> None:
    config = traced_roles.CASES[DECODER]
    declared = {name: spec for name, spec in config.parameters().items() if name != "readout"}
    assert list(models.differences(config, traced_roles.traced(DECODER), declared)) == ["readout"]
