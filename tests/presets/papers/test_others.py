"""Presets of sections 3 and 5, row by row against formulas written out, and their choices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mupax import presets
from mupax.presets import ParamSpec, Preset, PresetError, Role
from tests.presets.specs import BASE, FINITE, SPECS, block

pytestmark = pytest.mark.core

BIG = {"embed": 35, "heads": 5, "kv_heads": 5, "head_dim": 7, "mlp": 70, "layers": 11, **FINITE}
D = 35 / 6
NH = 35 / 6
F = 70 / 12
L = 11 / 2


MATRICES = {name: spec for name, spec in SPECS.items() if spec.in_block and spec.fan_in}
TOKEN, POSITION, PATCH = (SPECS[name] for name in ("token", "position", "patch"))
READOUT, READOUT_BIAS = SPECS["readout"], SPECS["readout_bias"]
GAIN, FINAL_GAIN, VALUE_BIAS = (SPECS[n] for n in ("norm_gain", "final_gain", "value_bias"))
TIED = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
FANS = {**dict.fromkeys(MATRICES, D), "attention_out": NH, "mlp_out": F}
OUTS = {"query": NH, "key": NH, "value": NH, "attention_out": D, "mlp_in": F, "mlp_out": D}
_NOT_MATRICES = (
    "token",
    "position",
    "patch",
    "final_gain",
    "value_bias",
    "readout",
    "readout_bias",
)
ALL = {
    **MATRICES,
    **{name: SPECS[name] for name in _NOT_MATRICES},
    "gain": GAIN,
    "shared_gain": block(Role.NORM_GAIN, ("head_dim",), of=Role.QUERY),
    "gain_per_head": SPECS["head_gain"],
}


def columns(preset: Preset, spec: ParamSpec, optimizer: str = "adam") -> tuple[float, ...]:
    """multiplier, std, lr, eps, coupled wd, relative to the base."""
    return dataclasses.astuple(preset.factors(spec, BIG, optimizer))


# Effective theory (section 3)


@pytest.mark.parametrize(("name", "s"), [("ntk", 0.0), ("hybrid", 0.5), ("maximal-update", 1.0)])
def test_effective_theory_rows(name: str, s: float):
    preset = presets.get(name, base=BASE)
    eps = D ** (-(1 + s) / 2)
    for key, spec in MATRICES.items():
        m_in = FANS[key]
        m_out = OUTS[key]
        adam = m_out**-0.5 * D ** (s / 2) / m_in
        assert columns(preset, spec) == pytest.approx((1, m_in**-0.5, adam, eps, 1 / adam)), key
        sgd = D**s / m_in
        assert columns(preset, spec, "sgd") == pytest.approx((1, m_in**-0.5, sgd, 1, 1 / sgd)), key
    adam = D ** (s / 2 - 0.5)
    for spec in (TOKEN, POSITION, PATCH):
        assert columns(preset, spec) == pytest.approx((1, 1, adam, eps, 1 / adam))
        assert columns(preset, spec, "momentum") == pytest.approx((1, 1, D**s, 1, D**-s))
    for spec in (GAIN, FINAL_GAIN, VALUE_BIAS):
        assert columns(preset, spec) == pytest.approx((1, 1, adam, eps, 0))
        assert columns(preset, spec, "sgd") == pytest.approx((1, 1, D**s, 1, 0))
    assert columns(preset, READOUT) == pytest.approx((1, eps, 1 / D, 1, D))
    assert columns(preset, READOUT, "sgd") == pytest.approx((1, eps, 1 / D, 1, D))
    assert columns(preset, READOUT_BIAS) == (1, 1, 1, 1, 0)
    assert preset.factors(TIED, BIG).multiplier == pytest.approx(eps)
    assert preset.logit_scale(BIG) == pytest.approx(7**-0.5)
    assert preset.residual_scale(BIG, 3, "mlp") == (1, 1)


def test_effective_theory_in_absolute_numbers():
    """The page's absolute line at s = 0, with the patch read as one matrix (multiplier * std, rates moved there)."""
    preset = presets.get("ntk")
    n = 35
    n_out = 13
    n_patch = 12
    rates = {
        "token": (n**-0.5, 1),
        "query": (1 / (n * n**0.5), 1 / n),
        "readout": (1 / (n * n_out**0.5), 1 / n),
        "readout_bias": (n_out**-0.5, 1),
    }
    for name, expected in rates.items():
        adam, sgd = (preset.scales(SPECS[name], BIG, optimizer) for optimizer in ("adam", "sgd"))
        assert (adam.lr, sgd.lr) == pytest.approx(expected), name
    for optimizer, lr, power in (("adam", 1 / (n_patch * n**0.5), 1), ("sgd", 1 / n_patch, 2)):
        patch: Any = preset.scales(PATCH, BIG, optimizer)
        assert patch.lr * patch.multiplier**power == pytest.approx(lr)
    variances = {
        "query": 0.5, "key": 0.5, "value": 0.5, "attention_out": 1 / 3, "mlp_in": 0.4, "mlp_out": 1.6
    }  # fmt: skip
    by_fan_in = presets.get("ntk", init="fan-in")
    for key, variance in variances.items():
        spec = MATRICES[key]
        fan_in = math.prod(BIG[axis] for axis in spec.fan_in)
        assert preset.scales(spec, BIG).init_std == pytest.approx((variance / fan_in) ** 0.5), key
        assert by_fan_in.scales(spec, BIG).init_std == pytest.approx(fan_in**-0.5)
    assert preset.scales(POSITION, BIG).init_std == pytest.approx(0.02)
    assert preset.scales(READOUT, BIG).init_std == pytest.approx(35**-0.5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_maximal_update_is_mup_plain_form_but_for_the_logits(optimizer: str):
    theory = presets.get("maximal-update", base=BASE)
    mup = presets.get("mup", base=BASE, form="plain")
    for key, spec in ALL.items():
        assert columns(theory, spec, optimizer) == pytest.approx(columns(mup, spec, optimizer)), key
    assert theory.logit_scale(BIG) / mup.logit_scale(BIG) == pytest.approx((7 / 2) ** 0.5)
    chosen = presets.get("maximal-update", base=BASE, alpha_a=1.0)
    assert chosen.logit_scale(BIG) == pytest.approx(mup.logit_scale(BIG))


def test_standard_is_sp():
    assert presets.get("standard", base=BASE).describe() == presets.get("sp", base=BASE).describe()
    assert "standard" not in presets.PRESETS


# CompleteP


def test_completep_is_depth_mup_with_its_own_decay_and_eps():
    ours = presets.get("depth-mup", base=BASE, alpha_l=1.0)
    for scope in ("blocks", "everywhere"):
        theirs = presets.get("completep", base=BASE, eps_scope=scope)
        for key, spec in ALL.items():
            first, second = (preset.factors(spec, BIG) for preset in (theirs, ours))
            assert first.weight_decay == pytest.approx(FANS.get(key, second.weight_decay)), key
            # Gradients of as many times the heads.
            summed = D / (7 / 2) if key == "shared_gain" else 1
            has_eps = spec.in_block or scope == "everywhere"
            assert first.eps == pytest.approx(summed / (D * L) if has_eps else 1), key
            own = {"weight_decay": second.weight_decay, "eps": second.eps}
            assert dataclasses.replace(first, **own) == second, key
        assert theirs.logit_scale(BIG) == ours.logit_scale(BIG)
        branch = (1, pytest.approx(1 / L))
        assert theirs.residual_scale(BIG, 0, "mlp") == ours.residual_scale(BIG, 0, "mlp") == branch


def test_completep_below_alpha_l_1_keeps_its_decay_or_its_lr_wd():
    table = presets.get("completep", base=BASE, alpha_l=0.5)
    rate = presets.get("completep", base=BASE, alpha_l=0.5, decay="rate")
    for key, spec in MATRICES.items():
        first: Any = table.factors(spec, BIG)
        assert first.weight_decay == pytest.approx(FANS[key]), key
        assert first.lr * first.weight_decay == pytest.approx(L**-0.5), key
        assert rate.factors(spec, BIG).weight_decay == pytest.approx(FANS[key] * L**0.5), key


@pytest.mark.parametrize("exponent", [0.0, -0.5, -1.0])
def test_independent_decay_of_block_matrices_falls_with_width_as_the_constant_says(exponent: float):
    usual, study = (
        presets.get("mup", base=BASE),
        presets.get("mup", base=BASE, decay_width=exponent),
    )
    for key, spec in ALL.items():
        expected, wd = (
            preset.factors(spec, BIG, "muon", "independent").weight_decay
            for preset in (usual, study)
        )
        if key in MATRICES and exponent:
            expected = D**exponent
        assert wd == pytest.approx(expected), key


# u-muP


def test_u_mup_rows():
    preset = presets.get("u-mup")
    for key, spec in MATRICES.items():
        fan_in = math.prod(BIG[axis] for axis in spec.fan_in)
        scales = preset.scales(spec, BIG, "adam", "independent")
        expected = (fan_in**-0.5, 1, fan_in**-0.5 * 11**-0.5, fan_in**-0.5 / 35 * 11**-0.5, 1)
        assert dataclasses.astuple(scales) == pytest.approx(expected), key
        if fan_in == 35:
            assert scales.eps == pytest.approx(35**-1.5 * 11**-0.5)
    rows: dict[ParamSpec, tuple[float, ...]] = {
        TOKEN: (1, 1, 35**-0.5, 1 / 35, 1),
        PATCH: (12**-0.5, 1, 35**-0.5, 12**-0.5 / 35, 1),
        GAIN: (1, 1, 11**-0.5, 11**-0.5 / 35, 0),
        FINAL_GAIN: (1, 1, 1, 1 / 35, 0),
        READOUT: (1 / 35, 1, 1, 1 / 35, 1),
    }
    for spec, expected in rows.items():
        assert dataclasses.astuple(
            preset.scales(spec, BIG, "adam", "independent")
        ) == pytest.approx(expected), spec.role
    assert presets.get("u-mup", embedding_exponent=0.0).scales(TOKEN, BIG).lr == 1
    assert preset.logit_scale(BIG) == pytest.approx(1 / 7)


@pytest.mark.parametrize(("alpha", "r"), [(1.0, 1.0), (0.5, 2.0)])
def test_u_mup_branches_give_every_block_its_share_of_the_last_layer(alpha: float, r: float):
    """The tau rule's purpose: with unit branches, the stream stays at unit scale and each branch keeps the a of its kind."""
    preset = presets.get("u-mup", alpha_res=alpha, alpha_ratio=r)
    depth = BIG["layers"]
    skip_product = 1.0
    shares: dict[str, list[float]] = {"attention": [], "mlp": []}
    for layer in reversed(range(depth)):
        for branch in ("mlp", "attention"):
            skip, scale = preset.residual_scale(BIG, layer, branch)
            assert skip**2 + scale**2 == pytest.approx(1)
            shares[branch].append(scale * skip_product)
            skip_product *= skip
    a_mlp = alpha * math.sqrt(2 / (1 + r**2))
    for branch, a in (("attention", r * a_mlp), ("mlp", a_mlp)):
        assert shares[branch] == pytest.approx([shares[branch][0]] * depth)
        # Beside what is kept of the embedding, a branch weighs a / sqrt(L).
        assert shares[branch][0] / skip_product == pytest.approx(a / math.sqrt(depth))


# Spectral


def test_spectral_is_mup_for_square_matrices():
    spectral = presets.get("spectral", base=BASE)
    mup = presets.get("mup", base=BASE, form="plain")
    for optimizer in ("adam", "sgd", "muon"):
        for key, spec in ALL.items():
            assert columns(spectral, spec, optimizer) == pytest.approx(
                columns(mup, spec, optimizer)
            ), (key, optimizer)
    assert spectral.logit_scale(BIG) == mup.logit_scale(BIG)


def test_spectral_rows_are_values_over_values_at_base():
    sizes = {**BIG, "mlp": 28, "embed": 56}  # MLP in now narrows: n_out < n_in
    spectral = presets.get("spectral", base=BASE)
    absolute = presets.get("spectral")
    for key, (n_in, n_out, b_in, b_out) in {
        "mlp_in": (56, 28, 6, 12),
        "mlp_out": (28, 56, 12, 6),
        "query": (56, 35, 6, 6),
    }.items():
        std = n_in**-0.5 * min(1, (n_out / n_in) ** 0.5)
        std_base = b_in**-0.5 * min(1, (b_out / b_in) ** 0.5)
        rates: dict[str, Any] = {"sgd": n_out / n_in / (b_out / b_in), "adam": b_in / n_in}
        rates["muon"] = rates["sgd"] ** 0.5
        for optimizer, lr in rates.items():
            factors = spectral.factors(MATRICES[key], sizes, optimizer)
            assert (factors.init_std, factors.lr) == pytest.approx((std / std_base, lr)), (
                key,
                optimizer,
            )
        assert absolute.scales(MATRICES[key], sizes, "muon").lr == pytest.approx(
            (n_out / n_in) ** 0.5
        )
        assert absolute.scales(MATRICES[key], sizes).init_std == pytest.approx(std)


# Everett et al.


def test_sp_layerwise_rows():
    preset = presets.get("sp-layerwise", base=BASE)
    sp = presets.get("sp", base=BASE)
    for key, spec in ALL.items():
        assert preset.scales(spec, BIG).init_std == sp.scales(spec, BIG).init_std, key
    rows = {key: (1 / FANS[key], D**-0.5, D**0.5 / FANS[key]) for key in MATRICES}
    rows |= {"token": (1, D**-0.5, D**0.5), "readout": (1 / D, 1, 1 / D)}
    for key, expected in rows.items():
        adam, sgd = (preset.factors(ALL[key], BIG, optimizer) for optimizer in ("adam", "sgd"))
        assert (adam.lr, adam.eps, sgd.lr) == pytest.approx(expected), key
    assert preset.logit_scale(BIG) == sp.logit_scale(BIG)


# What has no rule


@pytest.mark.parametrize(
    ("name", "optimizer", "why"),
    [
        ("ntk", "muon", r" \(the paper has SGD and AdamW\); it has one for adamw, adam, sgd, momentum"),
        ("hybrid", "lion", r" \(the paper has SGD and AdamW\)"),
        ("u-mup", "sgd", r" \(the paper has Adam only\); it has one for adamw, adam"),
        ("u-mup", "muon", r" \(the paper has Adam only\)"),
        ("spectral", "lion", r" \(the paper has no rule for sign updates\)"),
        ("sp-layerwise", "muon", r" \(the paper has SGD and Adam\)"),
        ("mup", "adafactor", "; it has one for"),
    ],
)  # fmt: skip
def test_an_optimizer_without_a_rule_is_refused_with_the_reason(
    name: str, optimizer: str, why: str
):
    message = f"{name} has no rule for the optimizer '{optimizer}'{why}"
    with pytest.raises(PresetError, match=message):
        presets.get(name).scales(TOKEN, BIG, optimizer)


@pytest.mark.parametrize(
    ("name", "form", "spec", "message"),
    [
        ("u-mup", None, TIED, r"u-mup: a tied readout would need two rates, D\^-0.5 as embedding and 1"),
        ("sp-layerwise", None, TIED, "sp-layerwise: a tied readout would need two rates"),
        ("u-mup", "table-9", TOKEN, "u-mup has no table-9 form: it has no SGD rates"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: str, form: Any, spec: ParamSpec, message: str):
    with pytest.raises(PresetError, match=message):
        presets.get(name, form=form).scales(spec, BIG)


@pytest.mark.parametrize(
    "name", [name for name in presets.PRESETS if name not in ("sp", "u-mup", "sp-layerwise")]
)
def test_a_tied_array_has_one_rate_and_one_eps(name: str):
    """As embedding and as readout in multiplier form; where they differ the preset must refuse, as the two left out do.

    sp is left out: it has one rate for everything, and its tied readout is a multiplier D^-1/2 on the std-1 table.
    """
    preset = presets.get(name, base=BASE)
    token = preset.rule(TOKEN)
    readout = preset.with_form("readout-multiplier").row(READOUT)
    for axis in ("embed", "head_dim", "layers"):
        growth = {axis: 1.0, "classes": 0.0, "vocab": 0.0}
        assert token.eps.growth(growth) == readout.eps.growth(growth), axis
        for family in {"adam", "sgd"} - preset.no_rule.keys():
            lr = readout.lr(family).growth(growth)
            assert token.lr(family).growth(growth) == lr, (family, axis)
    multiplier = readout.multiplier.growth({"embed": 1.0})
    assert preset.rule(TIED).multiplier.growth({"embed": 1.0}) == multiplier
