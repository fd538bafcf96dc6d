"""Tied readouts, messages of wrong input, and the speed of presets.

That absolute and relative form are one parameterization follows from `test_table`: both are the
page's powers, of sizes and of sizes over the base's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mupax import presets
from mupax.presets import ParamSpec, PresetError, Role
from mupax.zoo.configs import CONFIGS, DecoderConfig, ViTConfig
from tests.fixtures.calls import calls, calls_of_process

pytestmark = pytest.mark.core

BASE = ViTConfig(
    width=6,
    num_heads=3,
    depth=2,
    image_size=4,
    patch_size=2,
    channels=1,
    num_classes=5,
    qk_norm=True,
)
GROWN = dataclasses.replace(BASE, width=20, num_heads=5, depth=7)
TOKENS = DecoderConfig(width=6, num_heads=3, depth=2, vocab_size=11, seq_len=5, bias=False)


def test_tied_readouts():
    """Multiplier form only; the rows of embedding and readout must agree, or the shared array would have two rates."""
    embedding = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"))
    tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
    sizes = {**GROWN.sizes(), "vocab": 11}
    mup, sp = (presets.get(name, base=BASE.base_sizes()) for name in ("mup", "sp"))
    for preset, exponent in ((mup, -1), (sp, -0.5)):
        multiplier = preset.scales(tied, sizes).multiplier
        assert multiplier == pytest.approx(6**-0.5 * (20 / 6) ** exponent)
    for optimizer in ("adam", "sgd"):
        readout, table = (mup.factors(spec, sizes, optimizer) for spec in (tied, embedding))
        assert (readout.lr, readout.eps) == (table.lr, table.eps)
    with pytest.raises(
        PresetError,
        match=r"mup: a tied readout has no plain form, its table is the token embedding's; write form",
    ):
        mup.with_form("plain").scales(tied, sizes)
    # The readout acts on the table as it acts in the embedding, multiplier included.
    products = []
    for form in ("readout-multiplier", "mean-field", "table-9"):
        readout, table = (mup.with_form(form).scales(spec, sizes) for spec in (tied, embedding))
        products.append(readout.multiplier * table.multiplier * table.init_std)  # pyright: ignore[reportOperatorIssue]
    assert products == pytest.approx(products[:1] * 3)


def test_a_base_is_a_mapping_a_text_or_a_config():
    class Config:
        def base_sizes(self) -> dict[str, int]:
            return {"embed": 8, "layers": 2}

    for base in ({"embed": 8, "layers": 2}, "embed=8, layers=2", Config()):
        assert presets.get("mup", base=base).base == {"embed": 8, "layers": 2}


@pytest.mark.parametrize(
    ("name", "constants", "message"),
    [
        ("muup", {}, r"no preset is named 'muup'; did you mean 'mup'\? the presets are sp, mup"),
        (3, {}, "a preset is named by a text, not 3; the presets are sp, mup"),
        ("depth-mup", {"alpha_l": 0.3}, r"depth-mup: alpha_l=0.3 is outside \[0.5, 1\], where the limit exists; write a value from 0.5 to 1"),
        ("mup", {"alpha_a": 1.5}, r"mup: alpha_a=1.5 is outside \[0.5, 1\]"),
        ("mup", {"gamma0": 0.0}, "mup: gamma0=0 must be positive; write a number above 0"),
        ("mup", {"gamma0": 1e308}, "mup: gamma0=.*; write a number"),
        ("mup", {"gamma0": 1e-320}, "mup: gamma0=.*; write a number"),
        ("mup", {"width": 3}, "mup takes alpha_a, .*, not width"),
        ("mup", {"alpha_l": 0.0}, "mup takes .* not alpha_l; alpha_l is a constant of depth-mup"),
        ("sp", {"alpha_a": 1.0}, "sp takes embedding_width, not alpha_a; alpha_a is a constant of mup"),
        ("ntk", {"s": 2.0}, r"ntk: s=2 is outside \[0, 1\]; write 0 \(neural tangent\) to 1"),
        ("u-mup", {"alpha_res": 0.0}, "u-mup: alpha_res=0 must be positive"),
        ("u-mup", {"base": {"embed": 8}}, "u-mup has no base: its numbers are absolute; leave the base out"),
        ("mup", {"base": {"width": 8}}, r"base width=8: write a logical axis \(layers, embed"),
        ("mup", {"base": {"embed": 0}}, "base embed=0: .* and a size of at least 1"),
        ("mup", {"base": "embd=8"}, r"base embd=8: .* and a size of at least 1; did you mean 'embed'\?"),
        ("mup", {"base": {"embed": "8"}}, "base embed=8: .* and a size of at least 1"),
        ("mup", {"base": "gpt2"}, r"base 'gpt2' is no sizes, .*; write base='embed=64,layers=2', or base=mupax.zoo.get\('gpt2'\)"),
        ("mup", {"base": 64}, r"base is a int; write its sizes, such as base=\{'embed': 64"),
        ("mup", {"form": "flat"}, "no form is named 'flat'; write 'plain', 'readout-multiplier', 'mean-field', 'table-9'"),
    ],
)  # fmt: skip
def test_errors_of_a_preset_say_what_to_write_instead(name: Any, constants: Any, message: str):
    with pytest.raises(PresetError, match=message):
        presets.get(name, **constants)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "quary", "axes": ()}, "role 'quary' is no Role; write Role.QUERY"),
        ({"role": Role.NORM_GAIN, "axes": "embed"}, r"norm_gain: axes is the text 'embed'; write axes=\('embed',\)"),
        (
            {"role": Role.QUERY, "axes": ("embeds",), "fan_in": ("embeds",)},
            "query: no logical axis is named 'embeds'; did you mean 'embed'",
        ),
        ({"role": Role.QUERY, "axes": ("embed",), "fan_in": ("mlp",)}, "query: fan_in 'mlp' is not one of the axes"),
        ({"role": Role.HIDDEN, "axes": ("embed", "mlp")}, "hidden: a matrix needs fan_in"),
    ],
)  # fmt: skip
def test_errors_of_a_declaration_say_what_to_write_instead(fields: Any, message: str):
    with pytest.raises(PresetError, match=message):
        ParamSpec(**fields)


def test_errors_of_values_say_what_to_write_instead():
    mup: Any = presets.get("mup")
    with pytest.raises(PresetError, match=r"'query' is no declaration; write ParamSpec\("):
        mup.scales("query", {})
    with pytest.raises(
        PresetError, match=r"axis 'embed' has no size|needs the size of axis 'embed'"
    ):
        mup.scales(GROWN.parameters()["readout"], {"classes": 3})
    message = (
        "mup has no rule for the optimizer 'adagrad'; it has one for adamw, adam, sgd, momentum"
    )
    with pytest.raises(PresetError, match=message):
        mup.family("adagrad")


def test_zero_readout_starts_at_zero_and_changes_nothing_else():
    sizes = GROWN.sizes()
    readout = BASE.parameters()["readout"]
    plain = presets.get("mup").scales(readout, sizes)
    zero = presets.get("mup", zero_readout=True).scales(readout, sizes)
    assert zero == dataclasses.replace(plain, init_std=0)


# Speed


def test_presets_import_quickly_and_without_jax_numpy_or_tyro():
    """7,900 calls, which take some 20 ms."""
    count, modules = calls_of_process("import mupax.presets")
    assert not modules & {"jax", "numpy", "tyro", "flax", "optax"}
    assert 1_000 < count < 15_000


def test_a_7b_decoder_resolves_in_some_hundred_calls_a_parameter():
    """Every parameter of 32 blocks as its own spec, as a model that stacks nothing has them."""
    model = dataclasses.replace(
        CONFIGS["gpt2"],
        width=4096,
        num_heads=32,
        depth=32,
        mlp_ratio=2.6875,
        activation="swiglu",
        tied=False,
    )
    one_stack = list(model.parameters().values())
    sizes = model.sizes()
    specs = [spec for spec in one_stack for _ in range(32 if spec.in_block else 1)]
    assert len(specs) > 300
    preset = presets.get("depth-mup", base=CONFIGS["gpt2"].base_sizes())
    assert calls(lambda: [preset.scales(spec, sizes, "adamw") for spec in specs]) < 250 * len(specs)


@pytest.mark.parametrize("size", [0, -64, float("nan"), float("inf"), "128", None])
def test_a_size_that_is_no_number_above_0_is_refused(size: Any) -> None:
    mup = presets.get("mup", base={"embed": 64, "mlp": 256})
    weight = ParamSpec(role=Role.MLP_IN, axes=("embed", "mlp"), fan_in=("embed",))
    with pytest.raises(PresetError, match=r"the size embed is .*; write a number above 0"):
        mup.scales(weight, {"embed": size, "mlp": 2048})
    wrong: Any = "half"
    with pytest.raises(PresetError, match="decay is 'half'; write coupled or independent"):
        mup.scales(weight, {"embed": 128, "mlp": 512}, decay=wrong)
