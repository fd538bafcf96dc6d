"""Runs that would undo a preset are refused by name before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mupax import presets
from mupax.presets import Preset, PresetError, Role
from mupax.presets.rule import axis
from mupax.train.config.cli import parse
from mupax.train.config.recipes import RECIPES
from mupax.train.core.program import Program, assemble
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.decoder.model import Decoder
from tests.fixtures.commands import command

pytestmark = pytest.mark.core

DECAYED = "--optimizer.weight-decay 0.1 --optimizer.decay coupled"
DRIFTING = "--preset completep --preset.alpha-l 0.5 --model.depth 8"


def program_of(*words: str) -> Program:
    return assemble(parse("lm-tiny", RECIPES["lm-tiny"], " ".join(words).split()).config)


def refused(*words: str) -> str:
    """Return the one line of a run that is refused."""
    done = command("train lm-tiny --dry-run", *words)
    assert done.code == 2
    assert not done.out
    assert len(done.err.splitlines()) == 1
    return done.err


# Growth


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("mup", "mup under adamw does not allow growing embed x2, mlp x8, heads x2"),
        ("depth-mup", "change of the stream explodes as mlp^0.33"),
    ],
)
def test_widths_that_do_not_grow_together_are_refused_with_the_axes(preset: str, text: str):
    err = refused("--model.mlp-ratio 10 --preset", preset)
    assert text in err
    assert "take a base of the same proportions" in err


def test_control_growth_that_theory_allows_runs():
    for words in (
        "",
        "--model.mlp-ratio 10 --optimizer.name sgd",
        "--model.mlp-ratio 10 --preset.base None",
        "--model.mlp-ratio 10 --preset.constants mlp_out=mean-field",
        "--model.depth 9",
        "--model.width 64 --model.num-heads 2",
    ):
        assert program_of(words).inputs.factors.lr
    # 1.6 times as wide: a change by 1.26, for which there is a caution.
    program = program_of("--model.mlp-ratio 4")
    assert any(
        "mlp/embed is 1.6 times" in text
        for text in program.preset.cautions(program.definition.sizes)
    )


# Decay


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_decay_that_drifts_with_size_is_refused_by_name(decay: str):
    words = f"{DRIFTING} --optimizer.weight-decay 0.1 --optimizer.decay {decay}"
    err = refused(words)
    assert (
        "block.attention.key: lr*wd is 0.5 times its value at the base under completep alpha_l=0.5"
        in err
    )
    assert "write the constant decay=rate to keep it, or decay=table to accept it" in err
    for choice in ("rate", "table"):
        program = program_of(words, f"--preset.constants decay={choice}")
        key, factors = "block.attention.key", program.inputs.factors
        pull = factors.weight_decay[key] * (factors.lr[key] if decay == "coupled" else 1)
        np.testing.assert_allclose(pull, {"rate": 1.0, "table": 0.5}[choice], rtol=1e-6)


def test_control_decay_that_does_not_drift_runs():
    program_of(DRIFTING, "--optimizer.weight-decay 0")
    program_of("--preset completep --model.depth 8", DECAYED)
    # A choice that was named.
    program_of("--preset mup --preset.constants decay_width=-1", DECAYED)
    factors = "--preset.rates.readout 4 --preset.decays.query 2 --preset.decays.readout 0"
    program_of(factors, DECAYED)
    for name in presets.PRESETS:
        base = "--preset.base None" if presets.get(name).baseless else ""
        program_of(f"--preset {name}", base, DECAYED)


def mine(rule: Any) -> Preset:
    return dataclasses.replace(presets.get("mup"), name="mine", rule=rule)


def test_a_rule_of_ones_own_whose_decay_drifts(monkeypatch: pytest.MonkeyPatch):
    def drifting(spec: Any) -> Any:
        row = presets.get("mup").rule(spec)
        return dataclasses.replace(row, decay=axis("embed")) if spec.role is Role.MLP_OUT else row

    monkeypatch.setitem(presets.PRESETS, "mine", lambda: mine(drifting))
    err = refused("--preset mine", DECAYED)
    assert "block.mlp.down: lr*wd is 2 times its value at the base under mine" in err


# Rules and specs


def test_an_optimizer_without_a_rule_stops_a_run_with_the_reason():
    err = refused("--preset ntk --optimizer.name lion")
    assert (
        "ntk has no rule for the optimizer 'lion' (the paper has SGD and AdamW); it has one for adam"
        in err
    )
    for name in ("sgd", "momentum", "lion", "muon"):
        assert program_of(f"--optimizer.name {name}").preset.family(name)


def test_a_role_without_a_rule_stops_a_run(monkeypatch: pytest.MonkeyPatch):
    def partial(spec: Any) -> Any:
        if spec.role is Role.MLP_OUT:
            raise PresetError(f"mine has no rule for the role {spec.role.value}")
        return presets.get("mup").rule(spec)

    monkeypatch.setitem(presets.PRESETS, "mine", lambda: mine(partial))
    assert "block.mlp.down: mine has no rule for the role mlp_out" in refused("--preset mine")


def test_a_parameter_without_a_spec_stops_a_run(monkeypatch: pytest.MonkeyPatch):
    def module(config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
        model: Any = Decoder(config, rngs)
        model.extra = nnx.Param(jnp.zeros((3,)))
        return model

    monkeypatch.setattr(DecoderConfig, "module", module)
    assert "parameter extra (3,) has no spec; write nnx.Param(value, spec=ParamSpec" in refused()
