"""The abc symmetry on rules, Tensor Programs V's tables, and the mean-field form."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mupax import presets
from mupax.presets import ParamSpec, Power, Role, Rule
from mupax.presets.rule import axis
from mupax.zoo.configs import DecoderConfig

pytestmark = pytest.mark.core


def test_moved_is_the_table_of_section_1():
    rule = Rule(
        multiplier=axis("embed"),
        init_std=axis("mlp"),
        sgd=axis("heads"),
        adam=axis("layers"),
        eps=axis("patch"),
    )
    rule = dataclasses.replace(rule, muon=axis("head_dim"))
    theta_ = Power(3.0, (("vocab", 1.0),))
    moved = rule.moved(theta_)
    powers = {"multiplier": 1, "init_std": -1, "sgd": -2, "adam": -1, "muon": -1, "eps": 1}
    for column, power in powers.items():
        change = getattr(moved, column) / getattr(rule, column)
        assert change.exponents == (("vocab", float(power)),), column
        assert change.coefficient == pytest.approx(3.0**power), column
    axes = ("vocab", "embed", "mlp", "heads", "layers", "patch", "head_dim")
    ratios = dict(zip(axes, (2.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0), strict=True))
    for family in ("adam", "sgd", "muon", "lion"):
        first, second = (row.factors(ratios, {}, family, "coupled") for row in (rule, moved))
        pulls = [row.lr * row.weight_decay for row in (first, second)]  # pyright: ignore[reportOperatorIssue]
        assert pulls[0] == pytest.approx(pulls[1])
        for row in (rule, moved):
            assert row.factors(ratios, {}, family, "independent").weight_decay == 1


def test_tables_3_8_and_9_of_tensor_programs_5():
    """(multiplier, std, SGD, Adam) as exponents of width; Table 9 has multiplier sqrt(fan_out) on input and biases."""
    token = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"))
    hidden = ParamSpec(role=Role.HIDDEN, axes=("embed", "mlp"), fan_in=("embed",))
    readout = ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",))
    bias = ParamSpec(role=Role.BIAS, axes=("mlp",), of=Role.HIDDEN)
    native = {token: (0, 0, 1, 0), bias: (0, 0, 1, 0), hidden: (0, -0.5, 0, -1)}
    moved = (0.5, -0.5, 0, -0.5)
    tables: dict[presets.Form, dict[ParamSpec, tuple]] = {
        "plain": {**native, readout: (0, -1, -1, -1)},
        "readout-multiplier": {**native, readout: (-1, 0, 1, 0)},
        "table-9": {**native, token: moved, bias: moved, readout: (-0.5, -0.5, 0, -0.5)},
    }
    ones = dict.fromkeys(("embed", "mlp", "heads", "kv_heads", "head_dim"), 1)
    for (form, rows), width in itertools.product(tables.items(), (3, 7)):
        preset = presets.get("mup", base=ones, form=form)
        sizes = {**ones, "embed": width, "mlp": width, "head_dim": width, "vocab": 5}
        for spec, exponents in rows.items():
            sgd, adam = (preset.factors(spec, sizes, name) for name in ("sgd", "adam"))
            factors = (sgd.multiplier, sgd.init_std, sgd.lr, adam.lr)
            assert factors == pytest.approx(tuple(width**e for e in exponents)), (form, spec.role)


def test_mean_field_form_is_the_papers_model_block():
    """Section 2: v (NH)^-1/2, k and q N^-(3/2-aa) H^-1/2 with std N^(1-aa), f 1/(gamma0 N H), one rate for the blocks."""
    model = DecoderConfig(width=15, num_heads=3, depth=7, mlp_ratio=1.0, vocab_size=11, seq_len=5)
    n = 5
    h = 3
    depth = 7
    sizes = model.sizes()
    specs = {k: spec for k, spec in model.parameters().items() if spec.role is not Role.BIAS}
    for aa, al, gamma0 in itertools.product((0.5, 0.75, 1.0), (0.5, 1.0), (1.0, 0.25)):
        preset = presets.get("depth-mup", alpha_a=aa, alpha_l=al, gamma0=gamma0, form="mean-field")
        adam, sgd = (
            {name: preset.scales(spec, sizes, optimizer) for name, spec in specs.items()}
            for optimizer in ("adam", "sgd")
        )
        plain = ((n * h) ** -0.5, 1)
        slow = (n ** (aa - 1.5) * h**-0.5, n ** (1 - aa))
        for name, expected in {"value": plain, "out": plain, "query": slow, "key": slow}.items():
            scales = adam[f"block.attention.{name}"]
            assert (scales.multiplier, scales.init_std) == pytest.approx(expected)
        assert adam["readout"].multiplier == pytest.approx(1 / (gamma0 * n * h))
        adam_lr = (n * h) ** -0.5 * depth ** (al - 1)
        sgd_lr = gamma0**2 * n * h * depth ** (2 * al - 1)
        for name, spec in specs.items():
            if spec.in_block and spec.fan_in:
                assert (adam[name].lr, sgd[name].lr) == pytest.approx((adam_lr, sgd_lr)), name
