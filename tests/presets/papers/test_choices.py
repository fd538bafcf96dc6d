"""Named constants where sources disagree: each value's rule, what `limits` says of it, and the data behind it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from typing import Any

import pytest

from mupax import presets
from mupax.presets import PRESETS, ParamSpec, Preset, PresetError, Role
from mupax.presets.analysis.health import Health
from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import EXPERT_LIMITS, PARTS
from mupax.presets.analysis.uneven import refuse_uneven
from mupax.presets.analysis.verdicts import verdicts
from mupax.presets.papers import choices
from mupax.presets.roles import VECTORS, with_value_dim
from mupax.presets.rule import ONE, axis
from tests.fixtures.commands import command, output
from tests.presets.papers.test_others import ALL, BASE, BIG, MATRICES, READOUT, TIED, TOKEN, D, F
from tests.presets.specs import STABLE, assert_growth, growth

pytestmark = pytest.mark.core

FAMILY = ("mup", "mup-half", "depth-mup")


def factor_pair(
    name: str, spec: ParamSpec, optimizer: str = "adam", **constants: Any
) -> tuple[Any, Any]:
    """Return factors without and with the constants."""
    preset, other = presets.get(name, base=BASE), presets.get(name, base=BASE, **constants)
    return preset.factors(spec, BIG, optimizer), other.factors(spec, BIG, optimizer)


# The data


def test_the_family_has_one_list_of_constants_and_each_preset_those_that_it_does_not_fix():
    takes = {name: inspect.signature(PRESETS[name]).parameters for name in FAMILY}
    everything = list(takes["depth-mup"])
    assert everything[:4] == ["alpha_l", "alpha_a", "gamma0", "beta0"]
    assert list(takes["mup"]) == everything[1:]
    assert list(takes["mup-half"]) == everything[2:]
    for constant, parameter in takes["depth-mup"].items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert str(parameter.annotation).startswith("str") == isinstance(parameter.default, str), (
            constant
        )
        assert all(takes[name][constant] == parameter for name in FAMILY if constant in takes[name])


def test_every_constant_that_is_listed_is_one_and_its_default_is_listed():
    for choice in choices.CHOICES:
        for name in choice.presets:
            default = inspect.signature(PRESETS[name]).parameters[choice.constant].default
            assert default in [other.value for other in choices.of(name, choice.constant)]
            preset = presets.get(name, **{choice.constant: choice.value})
            assert preset.choices.get(choice.constant, default) == choice.value
            assert choice.rule
            assert choice.source


@pytest.mark.parametrize("name", PRESETS)
def test_the_command_gives_a_source_of_every_constant(name: str):
    constants = json.loads(output("presets constants", name, "--json"))
    assert set(constants) == set(inspect.signature(PRESETS[name]).parameters)
    for constant, entry in constants.items():
        assert entry["choices"], constant
        assert all(row["source"] for row in entry["choices"]), constant


@pytest.mark.parametrize(
    ("name", "constant", "value", "choices"),
    [
        ("mup", "readout_width", -0.75, "-1 or -0.5"),
        ("depth-mup", "embedding_width", 1, "0 or -0.5"),
        ("sp", "embedding_width", -0.5, "0 or 1"),
        ("mup-half", "key_start", "copied", "own"),
        ("mup", "mlp_out", "fan-out", "fan-in or mean-field"),
        ("mup", "muon_scale", "max", "spectral, rms or measured"),
        ("mup", "muon_blocks", "head", "matrix, heads, heads-unscaled or tiles"),
        ("mup", "muon_shape", "own", "base or absolute"),
        ("spectral", "kv_norm", "none", "operator or expected"),
        ("completep", "eps_scope", "all", "blocks, everywhere or completed"),
        ("ntk", "init", "normal", "paper or fan-in"),
    ],
)
def test_another_value_is_refused(name: str, constant: str, value: Any, choices: str):
    message = f"{name}: {constant}={value} is not a choice; write {choices}$"
    with pytest.raises(PresetError, match=message):
        presets.get(name, **{constant: value})


def test_the_command_lists_values_sources_and_statuses():
    out = output("presets constants mup")
    assert "readout_width, -1 unless given" in out
    assert out.endswith(
        "rates.GROUP, stds.GROUP, multipliers.GROUP, decays.GROUP, eps.GROUP, factors of 1 unless given\n"
    )
    assert "  -0.5: Adam's rate of the token embedding D^-1/2" in out
    assert "Hayou and Liu 2506.15025 (abstract); u-mup's and ntk's row too: reported." in out
    (listing,) = json.loads(output("presets constants spectral --json")).values()
    assert listing["default"] == "operator"
    assert [row["status"] for row in listing["choices"]] == ["verified", "derived"]
    assert command("presets constants muup").code == 2


# Readout and embedding


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_a_readout_of_width_half_starts_larger_and_trains_at_the_same_rate(optimizer: str):
    power = 2 if optimizer == "sgd" else 1
    for form in ("plain", "readout-multiplier"):
        rows: list[Any] = [
            presets.get("mup", base=BASE, form=form, readout_width=width).factors(
                READOUT, BIG, optimizer
            )
            for width in (-1.0, -0.5)
        ]
        starts = [row.multiplier * row.init_std for row in rows]
        assert starts == pytest.approx([1 / D, D**-0.5]), form
        steps = [row.multiplier**power * row.lr for row in rows]
        assert steps[0] == pytest.approx(steps[1]), form
    # On the multiplier, as its form has it.
    assert factor_pair("mup", READOUT, optimizer, readout_width=-0.5)[1].init_std == 1
    for name, spec in ALL.items():
        if Role.READOUT not in (spec.role, spec.of):
            usual, louder = factor_pair("mup", spec, optimizer, readout_width=-0.5)
            slower = D**-0.5 if optimizer == "sgd" else 1
            assert louder.lr == pytest.approx(usual.lr * slower), name
            on_adam = usual.eps != 1
            assert louder.eps == pytest.approx(usual.eps * (D**0.5 if on_adam else 1)), name


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "lion"])
@pytest.mark.parametrize("limit", ["heads", "head_dim"])
def test_limits_of_a_readout_of_width_half(limit: str, optimizer: str):
    """Features move as under -1; the output starts at order one, and its first change is larger by the readout's start."""
    features = {
        "change of the stream": STABLE,
        "change of v, MLP entries": STABLE,
        "change of attention logits": STABLE,
    }
    usual = {**features, "output": (-0.5, "vanishes"), "change of the output": STABLE}
    assert_growth(presets.get("mup"), limit, usual, optimizer)
    louder = {**features, "output": STABLE, "change of the output": (0.5, "explodes")}
    if optimizer == "adam":
        for group in ("embedding", "block", "readout"):
            louder[f"gradient over eps, {group}"] = STABLE
    assert_growth(presets.get("mup", readout_width=-0.5), limit, louder, optimizer)


def test_an_embedding_rate_of_width_half():
    for name in FAMILY:
        for key, spec in ALL.items():
            usual, slow = factor_pair(name, spec, embedding_width=-0.5)
            slower = D**-0.5 if spec is TOKEN else 1.0
            assert slow.lr == pytest.approx(usual.lr * slower), key
            assert slow.weight_decay == pytest.approx(usual.weight_decay / slower), key
            usual, slow = factor_pair(name, spec, "sgd", embedding_width=-0.5)
            assert usual == slow
    usual, slow = presets.get("mup"), presets.get("mup", embedding_width=-0.5)
    assert growth(usual, "weight movement, embedding", "heads") == (0, "stable")
    assert growth(slow, "weight movement, embedding", "heads") == (-0.5, "frozen")
    assert slow.factors(TOKEN, BIG).lr == presets.get("u-mup").factors(TOKEN, BIG).lr


def test_sp_with_an_embedding_rate_of_width_has_of_mup_the_embedding_alone():
    for name, spec in ALL.items():
        sp, control = factor_pair("sp", spec, embedding_width=1)
        expected = D if name in ("token", "position", "patch") else sp.lr
        assert control.lr == pytest.approx(expected), name
        sp, control = factor_pair("sp", spec, "sgd", embedding_width=1)
        assert control == sp
    for name, constants, ratio in (
        ("mup", {}, D), ("sp", {"embedding_width": 1}, D), ("sp", {}, 1)
    ):  # fmt: skip
        table, key = (
            factor_pair(name, spec, **constants)[1].lr for spec in (TOKEN, MATRICES["key"])
        )
        assert table / key == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("name", "constant", "value"),
    [("mup", "readout_width", -0.5), ("mup", "embedding_width", -0.5), ("sp", "embedding_width", 1)],
)  # fmt: skip
def test_a_tied_readout_has_one_table(name: str, constant: str, value: float):
    message = f"a tied readout has one table, and {constant} wants two rules for it; untie it"
    with pytest.raises(PresetError, match=message):
        presets.get(name, **{constant: value}).row(TIED)


# An MLP that grows alone


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_a_mean_field_mlp_moves_every_entry_where_it_grows_alone(optimizer: str):
    usual, other = presets.get("mup"), presets.get("mup", mlp_out="mean-field")
    fan_in, mean_field = (
        Limit(p, p.family(optimizer), {"mlp": 1.0}) for p in (usual, other)
    )  # fmt: skip
    assert fan_in.random("MLP out", fan_in.hidden) == 0
    assert mean_field.random("MLP out", mean_field.hidden) == -0.5
    assert (mean_field.d_hidden, mean_field.features) == (0, 0)
    # Under fan-in either no entry moves, or all move and the sum of their changes explodes.
    assert (fan_in.d_hidden, fan_in.features) == ((-0.5, 0.0) if optimizer == "sgd" else (0.0, 0.5))
    if optimizer == "adam":
        for limit in (fan_in, mean_field):
            assert limit.observables()["gradient over eps, block"] == 0
    assert verdicts(usual, optimizer) == verdicts(other, optimizer)


def test_a_mean_field_mlp_may_grow_alone_and_another_may_not():
    usual = presets.get("mup", base=BASE)
    mean_field = presets.get("mup", base=BASE, mlp_out="mean-field")
    sizes = {**BASE, "mlp": 8 * BASE["mlp"]}
    with pytest.raises(PresetError, match=r"does not allow growing .*mlp x8"):
        refuse_uneven(usual, sizes)
    for optimizer in ("adam", "sgd"):
        refuse_uneven(mean_field, sizes, optimizer)
    wide = {**BIG, "mlp": 3 * BIG["mlp"]}
    one, other = (preset.factors(MATRICES["mlp_out"], wide) for preset in (usual, mean_field))
    assert other.init_std == pytest.approx(one.init_std * 3**-0.5)  # pyright: ignore[reportOperatorIssue]
    assert other.lr == one.lr == pytest.approx(1 / (3 * F))


# Muon


def test_the_rms_scale_is_moonlights_times_the_root_of_the_width():
    usual, rms = presets.get("mup", base=BASE), presets.get("mup", base=BASE, muon_scale="rms")
    sizes = {**BASE, "embed": 24, "heads": 12, "kv_heads": 12, "mlp": 48}
    for at_size, slower in ((BASE, 1.0), (sizes, 4**-0.5)):
        for name, spec in MATRICES.items():
            fans = [math.prod(at_size[a] for a in axes) for axes in (spec.fan_in, spec.fan_out)]
            for decay in ("coupled", "independent"):
                scales: Any = rms.scales(spec, at_size, "muon", decay)
                assert scales.lr == pytest.approx(0.2 * max(fans) ** 0.5 * slower), name
                lr = scales.lr if decay == "coupled" else 1
                assert scales.weight_decay * lr == pytest.approx(1), name
    for name, spec in ALL.items():
        assert rms.scales(spec, BIG, "adam") == usual.scales(spec, BIG, "adam")
        if name not in MATRICES:
            assert rms.scales(spec, BIG, "muon") == usual.scales(spec, BIG, "muon")


def test_control_moonlights_own_scale_moves_features_too_much():
    usual, rms = presets.get("mup"), presets.get("mup", muon_scale="rms")
    assert verdicts(rms, "muon") == verdicts(usual, "muon")

    def own(spec: ParamSpec) -> Any:
        row = usual.rule(spec)
        if row.muon is None:
            return row
        return dataclasses.replace(row, muon=row.muon * axis("embed") ** 0.5)

    moonlight = dataclasses.replace(usual, rule=own)
    assert growth(rms, "change of the stream", "heads", "muon") == (0, "stable")
    assert growth(moonlight, "change of the stream", "heads", "muon")[1] == "explodes"


@pytest.mark.parametrize("name", ["shampoo", "soap", "SOAP"])
def test_an_optimizer_whose_table_nobody_could_read_is_refused_by_name(name: str):
    with pytest.raises(
        PresetError,
        match=rf"no rule for the optimizer '{name}' \(no source's table of its rates could be verified",
    ):
        presets.get("mup").family(name)


# Values of their own size


@pytest.mark.parametrize(("name", "alpha_a"), [("mup", 1.0), ("mup-half", 0.5)])
def test_eps_of_queries_and_keys_follows_their_gradient_through_values_of_another_size(
    name: str, alpha_a: float
):
    """Aligned, it is the slope N^-alpha_a of logits times N_v values times entries (N_v H)^-1/2 of attention out."""
    specs = with_value_dim(MATRICES)
    width, n, values, heads = (axis(x) for x in ("embed", "head_dim", "value_dim", "heads"))
    # D^-1/2 is the backward signal at the branch, D^-1, times the root of the width.
    gradient = width**-0.5 * n**-alpha_a * values * (values * heads) ** -0.5
    assert presets.get(name).row(specs["query"]).eps == gradient
    # As many values as query dimensions: the rule without a size of their own.
    with_values = presets.get(name, base={**BASE, "value_dim": BASE["head_dim"]})
    plain = presets.get(name, base=BASE)
    for role in ("query", "key", "value", "attention_out"):
        sizes = {**BIG, "value_dim": BIG["head_dim"]}
        factors = dataclasses.asdict(with_values.factors(specs[role], sizes))
        assert factors == pytest.approx(dataclasses.asdict(plain.factors(MATRICES[role], BIG)))


# Grouped heads, and CompleteP's eps


def test_the_expected_norm_of_shared_keys_is_mups_rule():
    """GQA-muP's norm, in `spectral`: init and rates of key and value are those of `mup`; with the operator norm std falls."""
    sizes = {**BASE, "kv_heads": 1}
    mup, operator, expected = (
        presets.get(n, base=BASE, **c)
        for n, c in (("mup", {}), ("spectral", {}), ("spectral", {"kv_norm": "expected"}))
    )
    for name, spec in MATRICES.items():
        for optimizer in ("adam", "sgd"):
            row, one, other = (p.factors(spec, sizes, optimizer) for p in (mup, expected, operator))
            assert one.lr == other.lr
            if name in ("key", "value"):
                assert (one.init_std, one.lr) == pytest.approx((row.init_std, row.lr))
                assert other.init_std == pytest.approx(3**-0.5)
            else:
                assert one == other


def test_completep_divides_the_gradient_of_a_shared_gain_by_the_heads_it_sums():
    """Without it the gradient over eps goes as heads^0.95 after three steps, with it as heads^-0.05 (measured, 4 to 32 heads)."""
    heads = {**BASE, "heads": 12, "kv_heads": 12, "embed": 24, "mlp": 48}
    ours = presets.get("depth-mup", base=BASE, alpha_l=1.0)
    for scope in ("blocks", "everywhere", "completed"):
        theirs = presets.get("completep", base=BASE, eps_scope=scope)
        assert theirs.factors(ALL["shared_gain"], heads).eps == 1, scope
        assert theirs.factors(ALL["gain_per_head"], heads).eps == pytest.approx(1 / 4), scope
    for scope, wider in (("blocks", 1 / 4), ("everywhere", 1 / 4), ("completed", 1.0)):
        sizes = {**BASE, "head_dim": 8, "embed": 24, "mlp": 48}
        theirs = presets.get("completep", base=BASE, eps_scope=scope)
        assert theirs.factors(ALL["shared_gain"], sizes).eps == wider
        assert ours.factors(ALL["shared_gain"], sizes).eps == 1 / 4


def test_completed_has_the_eps_of_embeddings():
    theirs = presets.get("completep", base=BASE, eps_scope="completed")
    ours = presets.get("depth-mup", base=BASE, alpha_l=1.0)
    for name in ("token", "position", "patch", "readout", *MATRICES, "gain", "value_bias"):
        eps = ours.factors(ALL[name], BIG).eps
        assert theirs.factors(ALL[name], BIG).eps == pytest.approx(eps), name
    assert theirs.factors(ALL["final_gain"], BIG).eps == 1
    for group in ("embedding", "readout"):
        row = f"gradient over eps, {group}"
        assert growth(presets.get("completep"), row, "heads") == (-1, "vanishes")
        assert growth(theirs, row, "heads") == (0, "stable")


def test_a_bias_inside_the_readouts_multiplier_learns_one_over_the_width():
    bias = READOUT.bias
    for optimizer in ("adam", "sgd"):
        plain, inside = factor_pair("depth-mup", bias, optimizer, readout_bias_width=-1)
        assert inside == dataclasses.replace(plain, lr=plain.lr * BASE["embed"] / BIG["embed"])
    plain, inside = factor_pair("depth-mup", READOUT, readout_bias_width=-1)
    assert plain == inside


# Adam's eps of experts

ROUTER = ParamSpec(role=Role.ROUTER, axes=("embed", "experts"), fan_in=("embed",), in_block=True)
EXPERT_IN = ParamSpec(
    role=Role.EXPERT_IN, axes=("experts", "embed", "expert_dim"), fan_in=("embed",), in_block=True
)
EXPERT_OUT = ParamSpec(
    role=Role.EXPERT_OUT,
    axes=("experts", "expert_dim", "embed"),
    fan_in=("expert_dim",),
    in_block=True,
)
W, L, M, E = axis("embed"), axis("layers"), axis("expert_dim"), axis("experts")
GAIN = ParamSpec(role=Role.NORM_GAIN, axes=("embed",), in_block=True)
EPS = {
    "router": (ROUTER, W**-1 * L**-1, E**-1 * L**-1),
    "expert in": (EXPERT_IN, M**-1 * L**-1, E**-1 * M**-1 * L**-1),
    "expert out": (EXPERT_OUT, W * M**-2 * L**-1, E**-1 * W**-1 * L**-1),
    "norm in a block": (GAIN, ONE, W**-1 * L**-1),
    "last norm": (dataclasses.replace(GAIN, in_block=False), ONE, W**-1),
    "bias of experts": (EXPERT_OUT.bias, L**-1, E**-1 * W**-1 * L**-1),
}
"""Parameter to its declaration, and Adam's eps by Table 2 of 2601.20205 and by its gradient, at alpha_l 1."""


@pytest.mark.parametrize("parameter", EPS)
def test_eps_of_experts_is_the_papers_table_or_the_gradients(parameter: str):
    spec, table, gradients = EPS[parameter]
    ours = presets.get("depth-mup", alpha_l=1.0)
    theirs = presets.get("depth-mup", alpha_l=1.0, experts_eps="table")
    assert ours.row(spec).eps == gradients
    assert theirs.row(spec).eps == table
    # And nothing else differs.
    assert dataclasses.replace(theirs.row(spec), eps=gradients) == ours.row(spec)


@pytest.mark.parametrize("parameter", ["router", "MLP in", "MLP out"])
def test_the_default_follows_the_gradients_of_experts_and_the_papers_table_does_not(parameter: str):
    def over_eps(**constants: Any) -> list[float]:
        preset = presets.get("mup", **constants)
        limits = [
            Limit(preset, "adam", growth, part="experts") for growth in EXPERT_LIMITS.values()
        ]
        return [limit.gradient[parameter] - limit.x(limit.rows[parameter].eps) for limit in limits]

    assert over_eps() == pytest.approx([0.0] * len(EXPERT_LIMITS))
    assert any(abs(exponent) > 0.4 for exponent in over_eps(experts_eps="table"))


def test_what_the_papers_table_lets_change_is_no_trouble_of_its_own_and_is_one_of_another_table():
    def troubles(preset: Preset) -> set[str]:
        specs = [spec for spec, *_ in EPS.values() if spec.role not in VECTORS]
        of_experts = {spec.role: name for name, spec in PARTS["experts"].items()}

        def gradient(spec: ParamSpec, limit: Limit) -> float:
            return limit.of("experts").gradient[of_experts[spec.role]]

        words: set[str] = set()
        for axes in EXPERT_LIMITS.values():
            health = Health(preset, Limit(preset, "adam", axes, part="experts"), gradient)
            words |= {group for group, column in health.troubles(specs) if column == "eps"}
        return words

    table = presets.get("mup", experts_eps="table")
    assert troubles(presets.get("mup")) == set()
    assert troubles(table) == set()
    assert troubles(dataclasses.replace(table, vanishing={})) == {
        "block.router", "block.expert_in", "block.expert_out"
    }  # fmt: skip
