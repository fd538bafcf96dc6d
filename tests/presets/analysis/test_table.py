"""Section 2's table, row by row, against formulas and arithmetic of this file."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from mupax import presets
from mupax.presets import Role, Scales
from tests.presets.specs import BASE, FINITE, SPECS

pytestmark = pytest.mark.core

WIDER = {"embed": 70, "heads": 7, "kv_heads": 7, "head_dim": 10, "mlp": 140, "layers": 2}
DEEPER = {"embed": 15, "heads": 3, "kv_heads": 3, "head_dim": 5, "mlp": 30, "layers": 11}


FAN_IN = {
    "query": "D",
    "key": "D",
    "value": "D",
    "attention_out": "NH",
    "mlp_in": "D",
    "mlp_out": "F",
}
MATRICES = tuple(FAN_IN)
ATTENTION = ("query", "key")
NO_DECAY = tuple(name for name in SPECS if name.endswith(("bias", "gain")))


def page(name: str, m: dict, aa: float, al: float | None, form: str) -> dict[str, Any]:
    """One row of the page as numbers. m: D, N, H, F, L ratios and Din; al None is no depth rule."""
    D = m["D"]
    N = m["N"]
    sgd_L, adam_L, eps_L = (
        (1, 1, 1) if al is None else (m["L"] ** (2 * al - 1), m["L"] ** (al - 1), m["L"] ** (-al))
    )
    if name in FAN_IN:
        m_in = {"D": D, "NH": N * m["H"], "F": m["F"]}[FAN_IN[name]]
        if name in ATTENTION:
            sgd = N ** (2 * aa - 2) * sgd_L
            adam = N ** (aa - 1) / m_in * adam_L
            eps = N ** (1 - aa) / D * eps_L
            wd = m_in * N ** (1 - aa) * (1 if al is None else m["L"] ** (1 - al))
        else:
            sgd = D / m_in * sgd_L
            adam = adam_L / m_in
            eps = eps_L / D
            wd = m_in * (1 if al is None else m["L"] ** (1 - al))
        return {"multiplier": 1, "std": m_in**-0.5, "sgd": sgd, "adam": adam, "eps": eps, "wd": wd}
    in_block = (D * sgd_L, adam_L, eps_L / D, 0)
    of_logits = (
        D * N ** (2 * aa - 2) * sgd_L,
        N ** (aa - 1) * adam_L,
        N ** (1 - aa) / D * eps_L,
        0,
    )
    shared_gain = (N ** (2 * aa - 1) * sgd_L, N ** (aa - 1) * adam_L, N**-aa * eps_L, 0)
    outside = (D, 1, 1 / D)
    readout = (1, 1 / D, 1 / D, 1 / D, 1, D)
    if form == "readout-multiplier":
        readout = (1 / D, 1, D, 1, 1 / D, 1)
    patch = m["Din"] ** -0.5
    rows = {
        "token": (1, 1, *outside, 1),
        "position": (1, 1, *outside, 1),
        "patch": (patch, 1, D, 1, patch / D, 1),
        "patch_bias": (1, 0, *outside, 0),
        "query_bias": (1, 0, *of_logits),
        "key_bias": (1, 0, *of_logits),
        "head_gain": (1, 1, *of_logits),
        "shared_gain": (1, 1, *shared_gain),
        "norm_gain": (1, 1, *in_block),
        "value_bias": (1, 0, *in_block),
        "mlp_bias": (1, 0, *in_block),
        "final_gain": (1, 1, *outside, 0),
        "readout": readout,
        "readout_bias": (1, 0, 1, 1, 1, 0),
    }
    return dict(zip(("multiplier", "std", "sgd", "adam", "eps", "wd"), rows[name], strict=True))


def ratios(sizes: dict, base: dict | None) -> dict[str, Any]:
    letters = {"D": "embed", "N": "head_dim", "H": "heads", "F": "mlp", "L": "layers"}
    m = {letter: sizes[axis] / (base[axis] if base else 1) for letter, axis in letters.items()}
    return m | {"Din": 1 if base else FINITE["patch"]}


PAIRS = [*itertools.product((0.5, 0.75, 1.0), (0.5, 0.75, 1.0)), (1.0, None), (0.5, None)]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "momentum"])
@pytest.mark.parametrize(("aa", "al"), PAIRS)
def test_every_row_of_the_page(aa: float, al: float | None, optimizer: str):
    column = "adam" if optimizer.startswith("adam") else "sgd"
    constants: dict[str, Any] = {"alpha_a": aa} if al is None else {"alpha_a": aa, "alpha_l": al}
    for sizes, base, form in itertools.product(
        (WIDER, DEEPER), (BASE, None), ("readout-multiplier", "plain")
    ):
        preset = presets.get(
            "mup" if al is None else "depth-mup", base=base, form=form, **constants
        )
        m = ratios(sizes, base)
        all_sizes = {**sizes, **FINITE}
        for name, spec in SPECS.items():
            row = page(name, m, aa, al, form)
            factors = preset.factors(spec, all_sizes, optimizer)
            # A fixed ratio of the base (F/D = 2 in the absolute form) is a constant of eps, not an exponent.
            eps = row["eps"] * (2**-0.5 if base is None and name in ("mlp_in", "mlp_bias") else 1)
            expected = (
                row["multiplier"],
                row["std"] or 1,
                row[column],
                eps if column == "adam" else 1,
            )
            assert (factors.multiplier, factors.init_std, factors.lr, factors.eps) == pytest.approx(
                expected, rel=1e-12
            ), (name, sizes, form)
            coupled = 0 if name in NO_DECAY else 1 / row[column]
            assert factors.weight_decay == pytest.approx(coupled, rel=1e-12), name
            if column == "adam":
                assert factors.weight_decay == pytest.approx(row["wd"], rel=1e-12), name
            independent = preset.factors(spec, all_sizes, optimizer, "independent").weight_decay
            assert independent == (0 if name in NO_DECAY else 1), name
        assert preset.logit_scale(all_sizes) == pytest.approx(
            (base["head_dim"] ** -0.5 if base else 1) * m["N"] ** -aa
        )
        assert preset.residual_scale(all_sizes, 0, "mlp") == (
            1,
            pytest.approx(1 if al is None else m["L"] ** -al),
        )


def test_control_the_page_tells_exponents_apart():
    """The comparison above would see one exponent moved by a quarter, for every pair of the sizes."""
    m = ratios(WIDER, BASE)
    for name in ("query", "key", "query_bias", "shared_gain"):
        rows = [page(name, m, aa, 1.0, "plain") for aa in (0.5, 0.75, 1.0)]
        assert len({round(row["adam"], 9) for row in rows}) == 3, name
    deep = ratios(DEEPER, BASE)
    assert (
        len({round(page("value", deep, 1.0, al, "plain")["eps"], 9) for al in (0.5, 0.75, 1.0)})
        == 3
    )


WITH_BASE = [
    (name, optimizer)
    for name, make in presets.PRESETS.items()
    for optimizer in ("adam", "sgd", "muon", "lion")
    if not make().baseless and optimizer in make().optimizers
]


@pytest.mark.parametrize(("name", "optimizer"), WITH_BASE)
def test_at_base_size_every_factor_is_exactly_one(name: str, optimizer: str):
    for form in ("plain", "readout-multiplier", "mean-field", "table-9"):
        preset = presets.get(name, base=BASE, form=form)
        for key, spec in SPECS.items():
            factors = preset.factors(spec, {**BASE, **FINITE}, optimizer)
            assert factors == Scales(weight_decay=0.0 if key in NO_DECAY else 1.0), key
        assert preset.residual_scale({**BASE, **FINITE}, 1, "attention") == (1, 1)
        assert preset.logit_scale({**BASE, **FINITE}) == 2**-0.5


def test_mup_has_no_depth_anywhere_and_is_not_alpha_l_zero():
    deep = {**BASE, **FINITE, "layers": 64}
    mup = presets.get("mup", base=BASE)
    depth = {"layers": 1.0}
    for spec in SPECS.values():
        row = mup.row(spec)
        assert {row.lr(family).growth(depth) for family in ("adam", "sgd", "muon")} == {0}
        assert row.eps.growth(depth) == 0
    assert mup.residual_scale(deep, 0, "mlp") == (1, 1)
    # alpha_l = 0 would have the SGD rate 1/L and the Adam rate 1/L in blocks.
    for optimizer in ("sgd", "adam"):
        assert mup.factors(SPECS["value"], deep, optimizer).lr == 1


def test_gamma0_multiplies_sgd_rates_by_its_square_divides_eps_and_sits_in_the_readout():
    first = presets.get("depth-mup", base=BASE)
    lazy = presets.get("depth-mup", base=BASE, gamma0=0.25)
    sizes = {**WIDER, **FINITE}
    for name, spec in SPECS.items():
        before, after = (preset.factors(spec, sizes, "sgd") for preset in (first, lazy))
        assert after.lr / before.lr == 1 / 16, name
        readout = name in ("readout", "readout_bias")
        assert after.multiplier / before.multiplier == (4 if readout else 1), name
        before, after = (preset.factors(spec, sizes, "adam") for preset in (first, lazy))
        assert after.lr / before.lr == 1, name
        assert after.eps / before.eps == pytest.approx(4), name


def test_muon_rows():
    """Derived on the page: sqrt(m_out/m_in) * L^(al-1), query and key also N^(aa-1); the rest stays on Adam."""
    preset = presets.get("depth-mup", base=BASE, alpha_a=0.5, alpha_l=0.5)
    sizes = {**DEEPER, **FINITE}
    m = ratios(DEEPER, BASE)
    fans = {
        **dict.fromkeys(("query", "key", "value"), ("D", "NH")), "attention_out": ("NH", "D"),
        "mlp_in": ("D", "F"), "mlp_out": ("F", "D"),
    }  # fmt: skip
    size = {"D": m["D"], "NH": m["N"] * m["H"], "F": m["F"]}
    for name, spec in SPECS.items():
        factors = preset.factors(spec, sizes, "muon")
        if name in fans:
            fan_in, fan_out = (size[key] for key in fans[name])
            slow = m["N"] ** -0.5 if name in ATTENTION else 1
            assert factors.lr == pytest.approx(math.sqrt(fan_out / fan_in) * m["L"] ** -0.5 * slow)
            assert factors.eps == 1
        else:
            assert factors == preset.factors(spec, sizes, "adam"), name


def test_sp_is_fan_in_initialization_and_one_rate():
    preset = presets.get("sp", base=BASE)
    sizes = {**WIDER, **FINITE}
    for name, spec in SPECS.items():
        scales = preset.scales(spec, sizes, "adam")
        fan_in = math.prod(sizes[axis] for axis in spec.fan_in)
        std = 0 if spec.role is Role.BIAS else 1 if name == "patch" else fan_in**-0.5
        assert scales.init_std == pytest.approx(std), name
        assert (scales.lr, scales.eps, scales.weight_decay) == (1, 1, 0 if name in NO_DECAY else 1)
        assert scales.multiplier == pytest.approx(12**-0.5 if name == "patch" else 1)
    assert preset.logit_scale(sizes) == pytest.approx(10**-0.5)


# Other growth


def test_growing_the_mlp_alone_corrects_eps_of_mlp_in_and_warns():
    preset = presets.get("mup", base=BASE)
    sizes = {**BASE, **FINITE, "mlp": 48}
    factors = {name: preset.factors(spec, sizes) for name, spec in SPECS.items()}
    assert factors["mlp_in"].eps == factors["mlp_bias"].eps == 0.5
    assert (factors["mlp_out"].lr, factors["mlp_out"].eps) == (0.25, 1)
    for name in ("query", "value", "readout", "token", "norm_gain"):
        assert factors[name].eps == 1, name
    (caution,) = preset.cautions(sizes)
    assert caution.startswith("mlp/embed is 4 times the base's")


def test_growing_heads_but_not_kv_heads_corrects_keys_and_values_and_warns():
    sizes = {**BASE, **FINITE, "heads": 12, "embed": 24, "mlp": 48}
    preset = presets.get("mup", base=BASE)
    # m_G = 4: SGD * 1/4 and eps * 2 on top of eps 1/m_D.
    for name, sgd_lr, eps in (("key", 0.25, 2 / 4), ("value", 0.25, 2 / 4), ("query", 1, 0.25)):
        sgd, adam = (preset.factors(SPECS[name], sizes, family) for family in ("sgd", "adam"))
        assert (sgd.lr, adam.lr, adam.eps) == pytest.approx((sgd_lr, 0.25, eps)), name
    (caution,) = preset.cautions(sizes)
    assert caution.startswith("heads/kv_heads is 4 times the base's")
    assert not preset.cautions({**WIDER, **FINITE})


def test_heads_wider_than_the_stream_correct_eps():
    sizes = {**BASE, **FINITE, "head_dim": 8}
    preset = presets.get("mup", base=BASE)
    for name, eps in {"query": 0.5, "key": 0.5, "value": 0.5, "mlp_in": 1}.items():
        assert preset.factors(SPECS[name], sizes).eps == eps, name


def test_sgd_is_cautioned_where_its_limit_in_head_dim_is_unstable():
    half = presets.get("mup-half", base=BASE)
    assert any("no stable limit" in text for text in half.cautions({**WIDER, **FINITE}, "sgd"))
    assert not half.cautions({**WIDER, **FINITE}, "adam")
    assert not presets.get("mup", base=BASE).cautions({**WIDER, **FINITE}, "sgd")
