"""Limits of a layer of experts in each of its sizes, from the rules alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mupax import presets
from mupax.presets import ParamSpec, Preset, Role
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import EXPERT_LIMITS
from mupax.presets.analysis.verdicts import DESCRIPTIVE, verdicts
from mupax.presets.rule import Rule, axis
from tests.fixtures.commands import output

pytestmark = pytest.mark.core


def _wrong(preset: Preset, optimizer: str) -> set[tuple[str, str]]:
    """(observable, limit) of what is not stable; of heads, and of what starts at nothing, other tests speak."""
    table = verdicts(preset, optimizer, experts=True)
    differing = {
        *DESCRIPTIVE,
        "attention logits",
        "variance of attention over heads",
        "output",
        "squared error of the kernel",
    }
    return {
        (row, limit)
        for row, entries in table.items()
        if row not in differing
        for limit, e in entries.items()
        if e.verdict != "stable"
    }


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "lion"])
@pytest.mark.parametrize("name", ["mup", "depth-mup", "completed"])
def test_the_rules_of_experts_hold_in_width_number_and_size(name: str, optimizer: str) -> None:
    preset = presets.get("completep", eps_scope=name) if name == "completed" else presets.get(name)
    assert _wrong(preset, optimizer) == set()


@pytest.mark.parametrize(
    ("rival", "optimizer", "wrong"),
    [
        (
            "dense",
            "adam",
            {("change of the stream", "expert_dim"), ("gradient over eps, block", "experts")},
        ),
        (
            "dense",
            "sgd",
            {("change of what experts write", "experts"), ("change of router's scores", "width")},
        ),
        # Its larger start is for E that grows with n at a fixed m: alone, E makes what an expert writes larger.
        ("mssp", "adam", {("change of the stream", "experts")}),
    ],
)
def test_control_rules_that_are_not_theirs_fail(
    rival: str, optimizer: str, wrong: set[tuple[str, str]]
) -> None:
    assert wrong <= _wrong(presets.get("mup", experts=rival), optimizer)


def _broken(role: Role, change: Callable[[Rule], Rule]) -> Preset:
    preset = presets.get("mup")

    def rule(spec: ParamSpec) -> Rule:
        return change(preset.rule(spec)) if spec.role is role else preset.rule(spec)

    return dataclasses.replace(preset, rule=rule)


@pytest.mark.parametrize(
    ("role", "change", "wrong"),
    [
        (
            Role.ROUTER,
            lambda row: row.times(adam=axis("embed")),
            ("change of router's scores", "width"),
        ),
        (
            Role.EXPERT_IN,
            lambda row: row.times(adam=axis("embed") ** -1),
            ("gradient over eps, block", "width"),
        ),
        (
            Role.EXPERT_OUT,
            lambda row: row.times(adam=axis("expert_dim")),
            ("change of the stream", "expert_dim"),
        ),
        # As if the sum over active experts were not their mean.
        (
            Role.EXPERT_OUT,
            lambda row: row.times(eps=axis("experts")),
            ("gradient over eps, block", "experts"),
        ),
    ],
    ids=["router", "expert in", "expert out", "mean over active"],
)
def test_control_a_wrong_power_of_each_role_is_seen(
    role: Role, change: Callable[[Rule], Rule], wrong: tuple[str, str]
) -> None:
    if (
        role is Role.EXPERT_IN
    ):  # too slow a rate stops what it moves, which others still move: its own weight shows it
        slow = _broken(role, change)
        right, broken = (
            Limit(p, "adam", EXPERT_LIMITS["width"], part="experts")
            for p in (presets.get("mup"), slow)
        )
        assert (right.d_hidden, broken.d_hidden) == (0.0, -1.0)
    else:
        assert wrong in _wrong(_broken(role, change), "adam")


def test_the_command_shows_them() -> None:
    printed = output("presets limits mup --experts")
    assert "expert_dim (m)" in printed
    assert "change of router's scores" in printed
