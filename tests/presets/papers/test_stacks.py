"""Encoder-decoders under every preset: depths of their own, and the fan-in of the memory."""

from __future__ import annotations

import dataclasses

import pytest

from mupax import presets
from mupax.presets import ParamSpec, PresetError, Role
from mupax.presets.papers import PRESETS
from mupax.presets.roles import CROSSED, ENCODER, OWN
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig

pytestmark = pytest.mark.core

TEXT = {"vocab_size": 17, "seq_len": 9, "target_len": 7, "positions": "relative", "tied": False}
BASE = EncoderDecoderConfig(width=6, num_heads=3, depth=2, encoder_depth=4, qk_norm=True, **TEXT)
MODEL = dataclasses.replace(BASE, width=15, depth=10, encoder_depth=12, num_heads=5)
SIZES = MODEL.sizes()
SPECS = MODEL.parameters()
CASES = [(name, form) for name in PRESETS for form in (None, "mean-field", "table-9")]
TIED = dataclasses.replace(MODEL, tied=True).tied_readout


def preset_of(name: str, form: str | None, **constants: float) -> presets.Preset:
    base = None if name == "u-mup" else BASE.base_sizes()
    return presets.get(name, base=base, form=form, **constants)  # pyright: ignore[reportArgumentType]


def alone(spec: ParamSpec) -> ParamSpec:
    """Return the parameter of a model that has one stack and no memory."""
    plain = {"encoder_layers": "layers", "memory": "embed", "source": "position"}
    axes, fan_in = (tuple(plain.get(axis, axis) for axis in of) for of in (spec.axes, spec.fan_in))
    return dataclasses.replace(spec, part="", axes=axes, fan_in=fan_in)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_parameter_has_the_row_of_a_model_with_its_stack_alone(
    name: str, form: str | None
) -> None:
    preset = preset_of(name, form)
    if form == "table-9" and "sgd" in preset.no_rule:
        with pytest.raises(PresetError, match="no table-9 form"):
            preset.row(SPECS["token"])
        return
    depths = {"layers": (SIZES["layers"], 2), "encoder_layers": (SIZES["encoder_layers"], 4)}
    for parameter, spec in SPECS.items():
        if parameter.startswith("block.cross_norm"):
            continue  # below
        depth, base_depth = depths[spec.blocks]
        base = None if preset.base is None else {**BASE.base_sizes(), "layers": base_depth}
        second = dataclasses.replace(preset, base=base)
        for optimizer in {"adamw", "sgd", "muon"} & set(preset.optimizers):
            expected = vars(second.scales(alone(spec), {**SIZES, "layers": depth}, optimizer))
            assert vars(preset.scales(spec, SIZES, optimizer)) == pytest.approx(expected), (
                parameter,
                optimizer,
            )


def test_the_depth_of_the_other_stack_is_told_apart() -> None:
    # Control: exchanged depths change rates wherever there is a depth rule.
    preset = preset_of("depth-mup", None, alpha_l=0.75)
    exchanged = {**SIZES, "layers": 12, "encoder_layers": 10}
    for name in ("block.mlp.up", "encoder.block.mlp.up", "relative_bias", "encoder.relative_bias"):
        assert preset.scales(SPECS[name], SIZES).lr != pytest.approx(
            preset.scales(SPECS[name], exchanged).lr
        )


def test_keys_and_values_of_the_memory_have_its_width_as_fan_in() -> None:
    wider = {**SIZES, "memory": 4 * SIZES["memory"]}
    for name in ("query", "key", "value", "out"):
        spec = SPECS[f"block.cross.{name}"]
        preset = preset_of("mup", None)
        before, after = (preset.factors(spec, sizes).init_std for sizes in (SIZES, wider))
        assert after / before == pytest.approx(0.5 if name in ("key", "value") else 1)


def test_the_norm_that_queries_alone_read_has_the_row_of_their_bias() -> None:
    # derived: both change logits and nothing else, by a step that is aligned with them.
    preset = preset_of("depth-mup", None, alpha_a=0.5)
    bias = SPECS["block.cross.query_bias"]
    for optimizer in ("adam", "sgd"):
        expected = preset.scales(bias, SIZES, optimizer)
        for name in ("block.cross_norm.gain", "block.cross_norm.bias"):
            scales = preset.scales(SPECS[name], SIZES, optimizer)
            assert (scales.lr, scales.eps) == pytest.approx((expected.lr, expected.eps))
        other = preset.scales(SPECS["block.attention_norm.gain"], SIZES, optimizer)
        assert other.lr != pytest.approx(expected.lr)


def test_a_base_that_names_one_stack_means_both() -> None:
    base = BASE.base_sizes()
    short = {name: base[name] for name in base.keys() - {"memory", "encoder_layers"}}
    complete = {**short, "memory": 6, "encoder_layers": 2}
    for spec in SPECS.values():
        one, other = (
            presets.get("completep", base=b).scales(spec, SIZES) for b in (short, complete)
        )
        assert one == other


@pytest.mark.parametrize("alpha_l", [0.5, 0.75, 1.0])
def test_relative_biases(alpha_l: float) -> None:
    # science: a bias' gradient is a sum over the head's values, and over the blocks that share a table.
    preset = preset_of("depth-mup", None, alpha_l=alpha_l)
    heads = 5 / 3
    for name, depth in (("relative_bias", 10 / 2), ("encoder.relative_bias", 12 / 4)):
        adam, sgd = (preset.scales(SPECS[name], SIZES, optimizer) for optimizer in ("adam", "sgd"))
        assert adam.init_std == adam.weight_decay == 0
        assert adam.lr == pytest.approx(depth ** (alpha_l - 1))
        assert sgd.lr == pytest.approx(heads * depth ** (2 * alpha_l - 2))
        assert adam.eps == pytest.approx(depth ** (1 - alpha_l) / heads)
        # A table per block.
        each = dataclasses.replace(SPECS[name], axes=(SPECS[name].blocks, "distance", "heads"))
        sgd, adam = (preset.scales(each, SIZES, optimizer) for optimizer in ("sgd", "adam"))
        assert sgd.lr == pytest.approx(heads * depth ** (2 * alpha_l - 1))
        assert adam.eps == pytest.approx(depth**-alpha_l / heads)


def test_branches_of_both_stacks() -> None:
    preset = preset_of("depth-mup", None, alpha_l=1.0, beta0=3.0)
    for stack, expected in ((CROSSED, 3 * 2 / 10), (ENCODER, 3 * 4 / 12)):
        for branch in stack.branches:
            assert preset.residual_scale(SIZES, 0, branch, stack) == pytest.approx((1, expected))
    unit = preset_of("u-mup", None)
    for stack, layers in ((OWN, 10), (CROSSED, 10), (ENCODER, 12)):
        scales = [
            unit.residual_scale(SIZES, i, b, stack) for i in range(layers) for b in stack.branches
        ]
        # The stream's variance stays 1, and every branch of every block has the same share of its end.
        shares = []
        stream = 1.0
        for skip, branch in scales:
            stream = skip**2 * stream + branch**2
            shares = [*(skip**2 * share for share in shares), branch**2]
        assert stream == pytest.approx(1)
        assert shares == pytest.approx([shares[0]] * len(shares))


def test_groups_have_constants_of_their_own() -> None:
    for name, group in {
        "block.attention.query": "block.query",
        "block.cross.query": "block.cross.query",
        "encoder.block.attention.query": "encoder.block.query",
    }.items():
        assert SPECS[name].group == group
    base = BASE.base_sizes()
    own = {"block.cross.query": 2.0, "encoder.norm_gain": 3.0}
    first = presets.get("mup", base=base, rates=own)
    all_three = presets.get("mup", base=base, rates={"query": 2.0})
    plain = presets.get("mup", base=base)
    for spec in SPECS.values():
        one, other, lr = (p.scales(spec, SIZES).lr for p in (first, all_three, plain))
        assert one == pytest.approx(own.get(spec.group, 1) * lr)
        assert other == pytest.approx((2 if spec.role is Role.QUERY else 1) * lr)


def test_a_tied_table_has_three_uses_and_one_row() -> None:
    assert TIED is not None
    assert "encoder.token" not in SPECS
    factors = presets.get("ntk", base=BASE.base_sizes()).factors(TIED, SIZES)
    assert factors.multiplier == pytest.approx((15 / 6) ** -0.5)
    separate = dataclasses.replace(MODEL, shared=False).parameters()
    assert separate["encoder.token"].axes == ("vocab", "embed")
