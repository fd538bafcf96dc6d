"""The computed theory says what sections 2 and 3 of the page say."""

from __future__ import annotations

import dataclasses

import pytest

from mupax import presets
from mupax.presets import Role
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import LIMITS, SPECS
from mupax.presets.analysis.verdicts import Entry, compare_rows, verdicts, wrong
from mupax.presets.rule import ONE, axis
from tests.presets.specs import STABLE, assert_growth, growth

pytestmark = pytest.mark.core

N = "head_dim"
H = "heads"
L = "depth"
OPTIMIZERS = ("adam", "sgd", "muon", "lion")
EXPLODES = (0.5, "explodes")
VANISHES = (-0.5, "vanishes")
FROZEN = (-0.5, "frozen")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_alpha_a_1_starts_without_logits_moves_q_and_k_and_collapses_heads(optimizer: str):
    expected = {
        "attention logits": (-0.5, "heads collapse"),
        "change of q, k entries": STABLE,
        "change of attention logits": STABLE,
    }
    assert_growth(presets.get("mup"), N, expected, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_alpha_a_half_starts_with_logits_and_moves_them_by_small_q_and_k(optimizer: str):
    expected = {
        "attention logits": STABLE,
        "change of q, k entries": VANISHES,
        "change of attention logits": STABLE,
    }
    assert_growth(presets.get("mup-half"), N, expected, optimizer)


@pytest.mark.parametrize("alpha_a", [0.5, 0.75, 1.0])
def test_initial_variance_of_logits_over_heads(alpha_a: float):
    """N^(1-2aa): slopes 0, -1/2, -1."""
    preset = presets.get("mup", alpha_a=alpha_a)
    assert growth(preset, "variance of attention over heads", N)[0] == 1 - 2 * alpha_a


@pytest.mark.parametrize(
    ("alpha_a", "first", "aligned"), [(1.0, -1, 0), (0.5, 0, 1), (0.75, -0.5, 0.5)]
)
def test_squared_backward_signal_of_q_and_k_before_and_after_aligning(
    alpha_a: float, first: float, aligned: float
):
    """-1 to 0 at aa = 1, 0 to +1 at 1/2, m_N^(1-aa) for any: SGD has a stable limit at aa = 1 alone."""
    preset = presets.get("mup", alpha_a=alpha_a)
    assert 2 * growth(preset, "q, k backward signal, at first", N)[0] == first
    exponent, verdict = growth(preset, "q, k backward signal, aligned", N, "sgd")
    assert (2 * exponent, verdict) == (aligned, "stable" if alpha_a == 1 else "explodes")
    assert growth(preset, "q, k backward signal, aligned", N, "adam")[1] == "stable"


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("alpha_a", [0.5, 1.0])
def test_heads_to_infinity_is_stable_and_heads_stay_different(alpha_a: float, optimizer: str):
    preset = presets.get("mup", alpha_a=alpha_a)
    assert wrong(preset, optimizer)[H] == []
    expected = {"attention logits": STABLE, "change of the output": STABLE}
    assert_growth(preset, H, expected, optimizer)


@pytest.mark.parametrize("alpha_l", [0.5, 1.0])
@pytest.mark.parametrize(
    ("alpha_a", "in_head_dim"), [(1.0, (-1, "converges")), (0.5, (0, "stable"))]
)
def test_the_residual_kernel_converges_with_squared_error_1_over_heads(
    alpha_a, in_head_dim, alpha_l: float
):
    """In N it does so at aa = 1 alone: at 1/2 each of finitely many heads keeps its own random attention."""
    preset = presets.get("depth-mup", alpha_a=alpha_a, alpha_l=alpha_l)
    assert growth(preset, "squared error of the kernel", H) == (-1, "converges")
    assert growth(preset, "squared error of the kernel", N) == in_head_dim
    assert growth(preset, "squared error of the kernel", L) == (0, "stable")


@pytest.mark.parametrize("name", presets.PRESETS)
def test_activations_start_at_one_scale_in_every_size(name: str):
    preset = presets.get(name)
    for limit in LIMITS:
        expected = {"entries of q, k, v, MLP": STABLE}
        assert_growth(preset, limit, expected, preset.optimizers[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_alpha_l_half_keeps_a_brownian_term_and_freezes_inner_layers(optimizer: str):
    preset = presets.get("depth-mup", alpha_l=0.5)
    expected = {
        "all blocks' share of the stream": STABLE,
        "one block's share of the stream": (-0.5, "stable"),
        "change of q, k entries": VANISHES,
        "weight movement, block": FROZEN,
        "change of v, MLP entries": FROZEN,
        "change of attention logits": FROZEN,
        # All blocks together still learn.
        "change of the stream": STABLE,
        "change of the output": STABLE,
    }
    assert_growth(preset, L, expected, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_alpha_l_1_has_no_brownian_term_and_every_weight_moves(optimizer: str):
    expected = {"all blocks' share of the stream": VANISHES, "weight movement, q, k": STABLE}
    for preset in (presets.get("depth-mup", alpha_l=1.0), presets.get("completep")):
        assert_growth(preset, L, expected, optimizer)
        assert wrong(preset, optimizer)[L] == []


@pytest.mark.parametrize("alpha_l", [0.5, 0.75, 1.0])
def test_squared_distance_through_the_stack(alpha_l: float):
    """|h^L - h^1|^2 goes as L^(1-2al): slopes 0, -1/2, -1."""
    preset = presets.get("depth-mup", alpha_l=alpha_l)
    assert 2 * growth(preset, "all blocks' share of the stream", L)[0] == 1 - 2 * alpha_l


@pytest.mark.parametrize("alpha_a", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("alpha_l", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_transfer_in_every_size_for_every_exponent(alpha_a: float, alpha_l: float, optimizer: str):
    """The best rate stays: output and logits move by Theta(1), eps and decay keep their meaning, in N, H and L."""
    table = verdicts(presets.get("depth-mup", alpha_a=alpha_a, alpha_l=alpha_l), optimizer)
    over_eps = [row for row in table if row.startswith("gradient over eps")]
    for row in (
        "residual stream", "change of the stream", "change of the output", "lr * weight decay", *over_eps
    ):  # fmt: skip
        assert {entry.exponent for entry in table[row].values()} == {0}, row
    for limit in (N, H):
        assert table["change of attention logits"][limit].exponent == 0


@pytest.mark.parametrize("name", ["mup", "mup-half", "sp", "spectral"])
def test_no_depth_rule_explodes_with_depth(name: str):
    preset = presets.get(name)
    expected = {"residual stream": EXPLODES, "change of the stream": EXPLODES}
    assert_growth(preset, L, expected)
    assert growth(preset, "change of the output", L)[1] == "explodes"


@pytest.mark.parametrize("limit", [N, H])
def test_standard_parameterization_explodes_in_width(limit: str):
    for row, verdict in {
        "change of attention logits": "explodes",
        "change of v, MLP entries": "explodes",
        "change of the output": "explodes",
        "weight movement, block": "explodes",
        "gradient over eps, block": "vanishes",
    }.items():
        assert growth(presets.get("sp"), row, limit)[1] == verdict, row


# Encoder-decoders


@pytest.mark.parametrize("alpha_l", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_what_comes_back_to_an_encoder_is_a_sum_over_independent_blocks_and_later_one_in_concert(
    optimizer, alpha_l
):
    preset = presets.get("depth-mup", alpha_l=alpha_l)
    first, aligned = "signal into an encoder, at first", "signal into an encoder, aligned"
    assert_growth(preset, L, {first: (0.5 - alpha_l, "stable"), aligned: STABLE}, optimizer)
    for limit in (N, H):
        assert_growth(preset, limit, {first: STABLE}, optimizer)


def test_without_a_depth_rule_what_comes_back_to_an_encoder_explodes_once_aligned():
    first, aligned = "signal into an encoder, at first", "signal into an encoder, aligned"
    mup = presets.get("mup")
    # The stream grows as the sum does.
    assert growth(mup, first, L)[0] == 0
    assert growth(mup, aligned, L)[0] == 0.5
    unscaled = dataclasses.replace(presets.get("depth-mup", alpha_l=1.0), branch=ONE)
    assert growth(unscaled, first, L)[0] == 0


def test_control_a_memory_of_another_fan_in_is_seen_in_cross_attention_alone():
    preset = presets.get("mup")

    def rule(spec):
        row = preset.rule(spec)
        if spec.part != "cross":
            return row
        return dataclasses.replace(row, init_std=row.init_std * axis("memory") ** 0.5)

    wide = dataclasses.replace(preset, rule=rule)
    assert growth(wide, "cross-attention logits", H)[1] == "explodes"
    assert growth(wide, "attention logits", H) == STABLE


def test_an_encoder_has_its_own_depth():
    preset = presets.get("depth-mup", alpha_l=1.0)
    deep, decoder = (Limit(preset, "adam", {axis: 1.0}) for axis in ("encoder_layers", "layers"))
    assert (deep.contribution, deep.of("encoder").contribution) == (0, -1)
    assert (decoder.contribution, decoder.of("encoder").contribution) == (-1, 0)


# Section 3


@pytest.mark.parametrize(("name", "s"), [("ntk", 0.0), ("hybrid", 0.5), ("maximal-update", 1.0)])
def test_effective_theory_goes_from_lazy_to_feature_learning(name: str, s: float):
    preset = presets.get(name)
    verdict = "lazy" if s < 1 else "stable"
    for optimizer in ("adam", "sgd"):
        for limit in (N, H):
            expected = {"change of v, MLP entries": (s / 2 - 0.5, verdict)}
            assert_growth(preset, limit, expected, optimizer)
        assert growth(preset, "change of the output", H, optimizer) == STABLE
        assert growth(preset, "change of the stream", H, optimizer)[1] == verdict


@pytest.mark.parametrize(("optimizer", "power"), [("adam", 0.5), ("sgd", 1.0)])
def test_maximal_update_explodes_in_n_through_its_logits_and_mup_does_not(
    optimizer: str, power: float
):
    """Its logit updates grow as m_N^1/2 under Adam and m_N under SGD; nothing else tells it from mup."""
    theory = presets.get("maximal-update")
    mup = presets.get("mup")
    assert growth(theory, "change of attention logits", N, optimizer) == (power, "explodes")
    assert growth(mup, "change of attention logits", N, optimizer) == STABLE
    assert wrong(theory, optimizer)[H] == wrong(mup, optimizer)[H] == []
    repaired = presets.get("maximal-update", alpha_a=1.0)
    assert verdicts(repaired, optimizer) == verdicts(mup, optimizer)


# Others


@pytest.mark.parametrize(
    ("name", "constants", "row", "limit", "expected"),
    [
        ("completep", {"alpha_l": 0.5}, "lr * weight decay", L, VANISHES),
        ("completep", {"alpha_l": 0.5, "decay": "rate"}, "lr * weight decay", L, STABLE),
        ("completep", {}, "gradient over eps, readout", H, (-1, "vanishes")),
        ("u-mup", {}, "weight movement, embedding", H, FROZEN),
        ("u-mup", {"embedding_exponent": 0.0}, "weight movement, embedding", H, STABLE),
        ("sp-layerwise", {}, "change of the output", H, EXPLODES),
        ("mup", {"decay_width": 0.0}, "lr * weight decay", H, STABLE),
        ("mup", {"decay_width": -0.5}, "lr * weight decay", H, VANISHES),
        ("mup", {"decay_width": -1.0}, "lr * weight decay", H, (-1, "vanishes")),
    ],
)
def test_what_the_disagreements_cost(name, constants, row, limit, expected):
    preset = presets.get(name, **constants)
    assert_growth(preset, limit, {row: expected}, "muon" if name == "mup" else "adam")


@pytest.mark.parametrize("name", presets.PRESETS)
def test_forms_have_one_theory(name: str):
    preset = presets.get(name)
    for optimizer in preset.optimizers:
        expected = verdicts(preset, optimizer)
        for form in presets.FORMS:
            if form != "table-9" or "sgd" in preset.optimizers:
                by_observable = verdicts(preset.with_form(form), optimizer)
                assert by_observable == expected, (form, optimizer)


@pytest.mark.parametrize(
    ("weight", "power"),
    [("query", 0.5), ("value", 0.5), ("MLP out", -0.5), ("readout", 1.0), ("embedding", 0.5)],
)
def test_control_a_wrong_exponent_changes_a_verdict(weight: str, power: float):
    """Computed from the rules: no verdict is written down for a preset by its name."""
    preset = presets.get("depth-mup", alpha_l=1.0)
    role = SPECS[weight].role

    def rule(spec):
        row = preset.rule(spec)
        return row.times(adam=axis("embed") ** power) if spec.role is role else row

    broken = dataclasses.replace(preset, rule=rule)
    assert verdicts(broken) != verdicts(preset)
    assert wrong(broken)[H] != []


def test_control_dropped_readout_multiplier_and_dropped_depth_factor():
    preset = presets.get("depth-mup", alpha_l=0.5)

    def loud(spec):
        row = preset.rule(spec)
        if spec.role is not Role.READOUT:
            return row
        return dataclasses.replace(row, multiplier=row.multiplier * axis("embed"))

    def fast(spec):
        return preset.rule(spec).times(adam=axis("layers") ** 0.5 if spec.in_block else 1.0)

    louder, faster = (dataclasses.replace(preset, rule=rule) for rule in (loud, fast))
    assert growth(louder, "change of the output", H)[1] == "explodes"
    assert growth(faster, "change of the stream", L) == EXPLODES


# Growing one axis alone (what section 2 allows with an eps correction)


def test_growing_the_mlp_alone_and_queries_alone():
    preset = presets.get("mup")
    mlp = Limit(preset, "adam", {"mlp": 1.0}).observables()
    assert all(mlp[row] == 0 for row in mlp if row.startswith("gradient over eps"))
    assert mlp["change of v, MLP entries"] == 0
    # W_out acts on an aligned change of F entries: growth the eps correction does not touch, hence the caution.
    assert mlp["change of the stream"] == 0.5
    queries = Limit(preset, "adam", {"heads": 1.0, "embed": 1.0, "mlp": 1.0}).observables()
    assert {row: x for row, x in queries.items() if row.startswith("gradient over eps") and x} == {}


def test_comparison_has_a_row_for_every_difference():
    rows = compare_rows([presets.get(name) for name in ("mup", "depth-mup")])
    assert rows[0] == ["growing", "observable", "mup", "depth-mup"]
    cells = {(row[0], row[1]): row[2:] for row in rows[1:]}
    assert cells["depth", "residual stream"] == ["explodes L^0.5", "stable"]
    assert cells["head_dim", "attention logits"] == ["heads collapse N^-0.5"] * 2
    assert all(set(row[2:]) != {"stable"} for row in rows[1:])
    assert Entry(0.0, "stable") in verdicts(presets.get("mup"))["residual stream"].values()
    assert set(LIMITS) == {"head_dim", "heads", "depth"}
