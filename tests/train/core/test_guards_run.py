"""Runs that would undo a preset are refused by name before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mupax import presets
from mupax.__main__ import main
from mupax.presets import Preset, PresetError, Role
from mupax.presets.rule import axis
from mupax.train.config.cli import parse
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import guards, optimizer
from mupax.train.core.factors import check_run, hyperparams, resolve
from mupax.train.core.program import Program, assemble
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.decoder.model import Decoder
from mupax.zoo.definition import definition

pytestmark = pytest.mark.core

DECAYED = ["--optimizer.weight-decay", "0.1", "--optimizer.decay", "coupled"]
DRIFTING = ["--preset", "completep", "--preset.alpha-l", "0.5", "--model.depth", "8"]


def program_of(*words: str) -> Program:
    return assemble(parse("lm-tiny", RECIPES["lm-tiny"], [*words]).config)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a run that is refused with exit code 2."""
    assert main(["train", "lm-tiny", *words, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    return err


# Growth


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--model.mlp-ratio", "10"],
            "mup under adamw does not allow growing embed x2, mlp x8, heads x2",
        ),
        (
            ["--model.mlp-ratio", "10", "--preset", "depth-mup"],
            "change of the stream explodes as mlp^0.33",
        ),
    ],
)
def test_widths_that_do_not_grow_together_are_refused_with_the_axes(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
):
    err = refused(capsys, *words)
    assert text in err
    assert "take a base of the same proportions" in err


def test_control_growth_that_theory_allows_runs():
    for words in (
        [],
        [
            "--model.mlp-ratio",
            "4",
        ],  # 1.6 times as wide: a change by 1.26, for which there is a caution
        ["--model.mlp-ratio", "10", "--optimizer.name", "sgd"],
        ["--model.mlp-ratio", "10", "--preset.base", "None"],
        ["--model.mlp-ratio", "10", "--preset.constants", "mlp_out=mean-field"],
        ["--model.depth", "9"],
        ["--model.width", "64", "--model.num-heads", "2"],
    ):
        assert program_of(*words).inputs.factors.lr
    program = program_of("--model.mlp-ratio", "4")
    assert any(
        "mlp/embed is 1.6 times" in text
        for text in program.preset.cautions(program.definition.sizes)
    )


def test_key_heads_alone_are_refused_in_a_run_too_where_they_move_faster():
    """Under Adam nothing was measured to: the change of the output goes as K^0.01 over 8 times."""
    base = DecoderConfig(width=24, num_heads=12, num_kv_heads=1, depth=2, vocab_size=11, seq_len=5)
    model = definition(dataclasses.replace(base, num_kv_heads=12))
    preset = presets.get("mup", base=base.base_sizes())
    with pytest.raises(
        PresetError,
        match=r"mup under sgd does not allow growing .*kv_heads x12.* as kv_heads\^0\.5",
    ):
        check_run(preset, model, resolve(preset, model, "sgd"), OptimizerConfig(name="sgd"))
    check_run(preset, model, resolve(preset, model, "adam"), OptimizerConfig(name="adam"))


# Decay


@pytest.mark.parametrize("decay", ["coupled", "independent"])
def test_decay_that_drifts_with_size_is_refused_by_name(
    decay: str, capsys: pytest.CaptureFixture[str]
):
    words = [*DECAYED[:3], decay]
    err = refused(capsys, *DRIFTING, *words)
    assert (
        "block.attention.key: lr*wd is 0.5 times its value at the base under completep alpha_l=0.5"
        in err
    )
    assert "write the constant decay=rate to keep it, or decay=table to accept it" in err
    for choice in ("rate", "table"):
        program = program_of(*DRIFTING, *words, "--preset.constants", f"decay={choice}")
        key, factors = "block.attention.key", program.inputs.factors
        pull = factors.weight_decay[key] * (factors.lr[key] if decay == "coupled" else 1)
        np.testing.assert_allclose(pull, {"rate": 1.0, "table": 0.5}[choice], rtol=1e-6)


def test_control_decay_that_does_not_drift_runs():
    program_of(*DRIFTING, "--optimizer.weight-decay", "0")
    program_of("--preset", "completep", "--model.depth", "8", *DECAYED)
    program_of(
        "--preset", "mup", "--preset.constants", "decay_width=-1", *DECAYED
    )  # a choice that was named
    program_of(
        "--preset.rates.readout",
        "4",
        "--preset.decays.query",
        "2",
        "--preset.decays.readout",
        "0",
        *DECAYED,
    )
    for name in presets.PRESETS:
        base = [] if not presets.get(name).baseless else ["--preset.base", "None"]
        program_of("--preset", name, *base, *DECAYED)


def mine(rule: Any) -> Preset:
    return dataclasses.replace(presets.get("mup"), name="mine", rule=rule)


def test_a_rule_of_ones_own_whose_decay_drifts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def drifting(spec: Any) -> Any:
        row = presets.get("mup").rule(spec)
        return dataclasses.replace(row, decay=axis("embed")) if spec.role is Role.MLP_OUT else row

    monkeypatch.setitem(presets.PRESETS, "mine", lambda: mine(drifting))
    err = refused(capsys, "--preset", "mine", *DECAYED)
    assert "block.mlp.down: lr*wd is 2 times its value at the base under mine" in err


# Rules and specs


def test_an_optimizer_without_a_rule_stops_a_run_with_the_reason(
    capsys: pytest.CaptureFixture[str],
):
    err = refused(capsys, "--preset", "ntk", "--optimizer.name", "lion")
    assert (
        "ntk has no rule for the optimizer 'lion' (the paper has SGD and AdamW); it has one for adam"
        in err
    )
    for name in ("sgd", "momentum", "lion", "muon"):
        assert program_of("--optimizer.name", name).preset.family(name)


def test_sgd_and_momentum_are_two_chains():
    plain, heavy = (
        optimizer.build(OptimizerConfig(name="sgd", momentum=momentum), {})
        for momentum in (0.0, 0.5)
    )
    ball = optimizer.build(OptimizerConfig(name="momentum", momentum=0.5), {})
    ones: Any = {"w": jnp.ones(3)}
    model = resolve(
        presets.get("sp"),
        definition(DecoderConfig(width=4, num_heads=1, depth=1, vocab_size=3, seq_len=2)),
    )
    number = {"w": np.float32(1)}
    factors, hyper = (
        model._replace(lr=number, weight_decay=number),
        hyperparams(OptimizerConfig(peak_lr=1.0), 9),
    )
    moved = {}
    for name, tx in (("plain", plain), ("heavy", heavy), ("ball", ball)):
        state = tx.init(ones)
        for _ in range(2):
            updates, state = tx.update(
                ones, state, ones, factors=factors, hyper=hyper.at(jnp.int32(0))
            )
        moved[name] = float(updates["w"][0])  # pyright: ignore
    assert moved == {"plain": -1.0, "heavy": -1.5, "ball": -1.5}


def test_a_role_without_a_rule_stops_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def partial(spec: Any) -> Any:
        if spec.role is Role.MLP_OUT:
            raise PresetError(f"mine has no rule for the role {spec.role.value}")
        return presets.get("mup").rule(spec)

    monkeypatch.setitem(presets.PRESETS, "mine", lambda: mine(partial))
    assert "block.mlp.down: mine has no rule for the role mlp_out" in refused(
        capsys, "--preset", "mine"
    )


def test_a_parameter_without_a_spec_stops_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def module(config: DecoderConfig, rngs: nnx.Rngs) -> Decoder:
        model: Any = Decoder(config, rngs)
        model.extra = nnx.Param(jnp.zeros((3,)))
        return model

    monkeypatch.setattr(DecoderConfig, "module", module)
    assert "parameter extra (3,) has no spec; write nnx.Param(value, spec=ParamSpec" in refused(
        capsys
    )


# The run's own chains


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_chain_of_a_run_applies_the_rates_once(name: str):
    """A chain of a run passes as any user's; with the preset over it once more it is refused."""
    model = definition(DecoderConfig(width=12, num_heads=3, depth=2, vocab_size=11, seq_len=5))
    base = {"embed": 4, "heads": 1, "kv_heads": 1, "head_dim": 4, "mlp": 8, "layers": 2}
    preset = presets.get("mup", base=base)
    config = OptimizerConfig(name=name, weight_decay=0.1, schedule="constant")  # pyright: ignore[reportArgumentType]
    tx, factors = optimizer.build(config, model.specs), resolve(preset, model, name)
    hyper = hyperparams(config, 1).at(jnp.int32(0))

    def bound(powers: int) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            steps, state = tx.update(updates, state, params, factors=factors, hyper=hyper)
            rates = {n: factors.lr[n].flat[0] ** (powers - 1) for n in steps}  # pyright: ignore[reportGeneralTypeIssues]
            return {n: rates[n] * u for n, u in steps.items()}, state  # pyright: ignore[reportAttributeAccessIssue]

        return optax.GradientTransformation(tx.init, update)

    guards.check_chain(bound(1), model, preset, name)
    with pytest.raises(
        PresetError, match=r"mup asks, relative to the others: its rates are applied twice"
    ):
        guards.check_chain(bound(2), model, preset, name)
