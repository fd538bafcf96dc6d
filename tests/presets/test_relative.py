"""Absolute and relative form are one parameterization under the right base constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from mupax import presets
from mupax.presets import ParamSpec, Preset, PresetError, Role, Scales
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative(Preset):
    """A preset whose base values are, per group, times constants."""

    at_base: Mapping[str, Scales] = dataclasses.field(default_factory=dict)

    def base_values(self, spec: ParamSpec, sizes: Mapping[str, int]) -> Scales:
        return super().base_values(spec, sizes).times(self.at_base.get(spec.group, Scales()))


def relative_to(
    absolute: Preset, base: Mapping[str, int], specs: Iterable[ParamSpec], optimizer: str
) -> Preset:
    """An absolute preset as a relative one, its constants the absolute factors at the base."""
    ratios = absolute.ratios(base)
    fields = {f.name: getattr(absolute, f.name) for f in dataclasses.fields(absolute)}
    logits = absolute.logits(ratios) * base["head_dim"] ** 0.5
    branch = absolute.branch(ratios)
    fields |= {"base": base, "logits": dataclasses.replace(absolute.logits, coefficient=logits)}
    relative = Relative(
        **{**fields, "branch": dataclasses.replace(absolute.branch, coefficient=branch)}
    )
    constants: dict[str, Scales] = {}
    for spec in specs:
        first, second = (
            dataclasses.asdict(p.scales(spec, base, optimizer)) for p in (absolute, relative)
        )
        # Where both are 0 (a bias' std, a decay that is off) the ratio is 1.
        values = Scales(
            **{
                name: 1.0 if first[name] == second[name] == 0 else first[name] / second[name]
                for name in first
            }
        )
        of_group = dataclasses.asdict(constants.setdefault(spec.group, values))
        assert dataclasses.asdict(values) == pytest.approx(of_group, rel=1e-9), (
            f"parameters of {spec.group} differ"
        )
    return dataclasses.replace(relative, at_base=constants)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize(
    "constants", [{}, {"alpha_a": 0.5, "alpha_l": 0.75, "gamma0": 0.25, "beta0": 4.0}]
)
def test_relative_equals_absolute_at_every_size(constants: dict, optimizer: str):
    absolute = presets.get("depth-mup", **constants)
    specs = BASE.parameters()
    base = BASE.sizes()
    relative = relative_to(absolute, base, specs.values(), optimizer)
    for model in (BASE, GROWN, dataclasses.replace(GROWN, depth=31, mlp_ratio=3.0)):
        sizes = model.sizes()
        for name, spec in specs.items():
            expected = dataclasses.asdict(absolute.scales(spec, sizes, optimizer))
            assert dataclasses.asdict(relative.scales(spec, sizes, optimizer)) == pytest.approx(
                expected, rel=1e-12
            ), name
        assert relative.logit_scale(sizes) == pytest.approx(absolute.logit_scale(sizes), rel=1e-12)
        assert relative.residual_scale(sizes, 0, "mlp") == pytest.approx(
            absolute.residual_scale(sizes, 0, "mlp"), rel=1e-12
        )


def test_control_without_the_constants_relative_is_another_rule():
    absolute = presets.get("depth-mup")
    sizes = GROWN.sizes()
    spec = BASE.parameters()["block.attention.query"]
    bare = presets.get("depth-mup", base=BASE.base_sizes())
    assert bare.scales(spec, sizes).lr != pytest.approx(absolute.scales(spec, sizes).lr)


def test_tied_readouts():
    """Multiplier form only; the rows of embedding and readout must agree, or the shared array would have two rates."""
    embedding = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("vocab", "embed"))
    tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
    sizes = {**GROWN.sizes(), "vocab": 11}
    for name, exponent in (("mup", -1), ("sp", -0.5)):
        preset = presets.get(name, base=BASE.base_sizes())
        assert preset.scales(tied, sizes).multiplier == pytest.approx(
            6**-0.5 * (20 / 6) ** exponent
        )
    mup = presets.get("mup", base=BASE.base_sizes())
    for optimizer in ("adam", "sgd"):
        first = mup.factors(tied, sizes, optimizer)
        second = mup.factors(embedding, sizes, optimizer)
        assert (first.lr, first.eps) == (second.lr, second.eps)
    with pytest.raises(
        PresetError,
        match=r"mup: a tied readout has no plain form, its table is the token embedding's; write form",
    ):
        mup.with_form("plain").scales(tied, sizes)
    # The readout acts on the table as it acts in the embedding, multiplier included.
    product = {}
    for form in ("readout-multiplier", "mean-field", "table-9"):
        moved = mup.with_form(form)
        table: Any = moved.scales(embedding, sizes)
        readout: Any = moved.scales(tied, sizes)
        product[form] = readout.multiplier * table.multiplier * table.init_std
    assert product["mean-field"] == pytest.approx(product["readout-multiplier"])
    assert product["table-9"] == pytest.approx(product["readout-multiplier"])


def test_a_base_is_a_mapping_a_text_or_a_config():
    class Config:
        def base_sizes(self) -> dict[str, int]:
            return {"embed": 8, "layers": 2}

    for base in ({"embed": 8, "layers": 2}, "embed=8, layers=2", Config()):
        assert presets.get("mup", base=base).base == {"embed": 8, "layers": 2}


def test_errors_say_what_to_write_instead():
    cases = {
        r"no preset is named 'muup'; did you mean 'mup'\? the presets are sp, mup": lambda: (
            presets.get("muup")
        ),
        r"depth-mup: alpha_l=0.3 is outside \[0.5, 1\], where the limit exists; write a value from 0.5 to 1": (
            lambda: presets.get("depth-mup", alpha_l=0.3)
        ),
        r"mup: alpha_a=1.5 is outside \[0.5, 1\]": lambda: presets.get("mup", alpha_a=1.5),
        r"mup: gamma0=0 must be positive; write a number above 0": lambda: presets.get(
            "mup", gamma0=0.0
        ),
        r"mup takes alpha_a, .*, not width": lambda: presets.get("mup", width=3),
        r"sp takes embedding_width, not alpha_a; alpha_a is a constant of mup": lambda: presets.get(
            "sp", alpha_a=1.0
        ),
        r"base width=8: write a logical axis \(layers, embed": lambda: presets.get(
            "mup", base={"width": 8}
        ),
        r"base embed=0: .* and a size of at least 1": lambda: presets.get("mup", base={"embed": 0}),
        r"base embd=8: .* and a size of at least 1; did you mean 'embed'\?": lambda: presets.get(
            "mup", base="embd=8"
        ),
        r"base embed=8: .* and a size of at least 1": lambda: presets.get(
            "mup", base={"embed": "8"}
        ),  # pyright: ignore
        r"base 'gpt2' is no sizes, .*; write base='embed=64,layers=2', or base=mupax.zoo.get\('gpt2'\)": (
            lambda: presets.get("mup", base="gpt2")
        ),
        r"base is a int; write its sizes, such as base=\{'embed': 64": lambda: presets.get(
            "mup", base=64
        ),  # pyright: ignore
        r"a preset is named by a text, not 3; the presets are sp, mup": lambda: presets.get(3),  # pyright: ignore
        r"role 'quary' is no Role; write Role.QUERY": lambda: ParamSpec(role="quary", axes=()),  # pyright: ignore
        r"norm_gain: axes is the text 'embed'; write axes=\('embed',\)": (
            lambda: ParamSpec(role=Role.NORM_GAIN, axes="embed")  # pyright: ignore
        ),
        r"'query' is no declaration; write ParamSpec\(": lambda: presets.get("mup").scales(
            "query", {}
        ),  # pyright: ignore
        r"no form is named 'flat'; write 'plain', 'readout-multiplier', 'mean-field', 'table-9'": (
            lambda: presets.get("mup", form="flat")  # pyright: ignore[reportArgumentType]
        ),
        r"mup has no rule for the optimizer 'adagrad'; it has one for adamw, adam, sgd, momentum": (
            lambda: presets.get("mup").family("adagrad")
        ),
        r"axis 'embed' has no size|needs the size of axis 'embed'": (
            lambda: presets.get("mup").scales(
                ParamSpec(role=Role.READOUT, axes=("embed", "vocab"), fan_in=("embed",)),
                {"vocab": 3},
            )
        ),
        r"query: no logical axis is named 'embeds'; did you mean 'embed'": (
            lambda: ParamSpec(role=Role.QUERY, axes=("embeds",), fan_in=("embeds",))
        ),
        r"query: fan_in 'mlp' is not one of the axes": lambda: ParamSpec(
            role=Role.QUERY, axes=("embed",), fan_in=("mlp",)
        ),
        r"hidden: a matrix needs fan_in": lambda: ParamSpec(
            role=Role.HIDDEN, axes=("embed", "mlp")
        ),
    }
    for text, wrong in cases.items():
        with pytest.raises(PresetError, match=text):
            wrong()


def test_zero_readout_starts_at_zero_and_changes_nothing_else():
    sizes = GROWN.sizes()
    readout = BASE.parameters()["readout"]
    plain = presets.get("mup")
    zero = presets.get("mup", zero_readout=True)
    assert zero.scales(readout, sizes).init_std == 0
    assert dataclasses.replace(
        zero.scales(readout, sizes), init_std=plain.scales(readout, sizes).init_std
    ) == plain.scales(readout, sizes)


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


@pytest.mark.parametrize("gamma0", [1e308, 1e-320, 0.0])
def test_a_factor_whose_square_or_inverse_is_not_finite_is_refused(gamma0: float) -> None:
    with pytest.raises(PresetError, match=r"mup: gamma0=.*; write a number"):
        presets.get("mup", gamma0=gamma0)
