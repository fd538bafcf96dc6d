"""Tables that are wrong, whoever wrote them: theory names the role, and the right ones it was made from pass. Compiles nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest

from mupax import presets
from mupax.presets import ParamSpec, Preset, PresetError, Role, Rule
from mupax.presets.power import ONE, axis
from mupax.train.studies.check import check, groups, theory
from mupax.train.studies.check.theory import Expected
from mupax.zoo import configs
from mupax.zoo.definition import Definition, definition
from mupax.zoo.transformer import TransformerConfig, transformer

pytestmark = pytest.mark.core

D, F, N, H, K = (axis(name) for name in ("embed", "mlp", "head_dim", "heads", "kv_heads"))
HIDDEN = {Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT}
LM, VIT = (transformer(configs.get(name), "a test") for name in ("lm-proxy", "vit-proxy"))
MODELS: dict[str, TransformerConfig] = {
    "lm": LM,
    "lm, QK-norm": dataclasses.replace(LM, qk_norm=True),
    "lm, GQA": dataclasses.replace(LM, num_kv_heads=1),
    "lm, biases": dataclasses.replace(LM, bias=True, norm="layernorm"),
    "lm, tied": dataclasses.replace(LM, tied=True),  # pyright: ignore
    "vit": VIT,
    "vit, QK-norm": dataclasses.replace(VIT, qk_norm=True),
    "vit, GQA": dataclasses.replace(VIT, num_kv_heads=1),
    "vit, SwiGLU": dataclasses.replace(VIT, activation="swiglu"),
    "vit, no biases": dataclasses.replace(VIT, bias=False),
}
RIGHT = {
    "head_dim": ("mup", "mup-half", "depth-mup", "completep", "spectral", "u-mup"),
    "heads": ("mup", "mup-half", "depth-mup", "completep", "spectral", "u-mup", "ntk", "hybrid", "maximal-update"),
    "depth": ("depth-mup", "completep", "u-mup"),
}
"""What grows, and the presets whose tables keep everything as it is then, or as their source wants it."""


@functools.cache
def ends(model: str, grow: str) -> tuple[Definition, Definition]:
    grown = check.grow(MODELS[model], grow, 2)
    return definition(grown[0]), definition(grown[1])


def preset(name: str, model: str, grow: str, **constants: float) -> Preset:
    baseless = presets.get(name, **constants).baseless
    sizes = ends(model, grow)[0].sizes
    base = {name: sizes[name] for name in ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers")}
    return presets.get(name, base=None if baseless else base, **constants)


def expected(
    table: Preset, model: str, grow: str, optimizer: str = "adam", accept=()
) -> dict[tuple[str, int], Expected]:
    return theory.of(table, *ends(model, grow), optimizer, accept=accept)


def troubles(table: Preset, model: str, grow: str, optimizer: str = "adam", accept=()) -> dict[str, str]:
    found = expected(table, model, grow, optimizer, accept)
    return {f"{name} @{step}": one.trouble for (name, step), one in found.items() if one.trouble}


@pytest.mark.parametrize("grow", RIGHT)
@pytest.mark.parametrize("model", MODELS)
def test_right_tables_are_good_in_every_model(model: str, grow: str):
    for name in RIGHT[grow]:
        if name == "u-mup" and "tied" in model:
            continue  # it has no rule for one
        accept = ("lazy",) if name in ("ntk", "hybrid") else ()
        found = troubles(preset(name, model, grow), model, grow, accept=accept)
        assert not found, (name, found)


def with_rows(table: Preset, roles: set, mistake: Callable[[Rule, ParamSpec], Rule]) -> Preset:
    """The table with one mistake in the rows of some roles or groups."""

    def rule(spec: ParamSpec) -> Rule:
        row = table.rule(spec)
        return mistake(row, spec) if {spec.role, spec.group} & roles else row

    return dataclasses.replace(table, rule=rule)


def rate(power) -> Callable[[Rule, ParamSpec], Rule]:
    return lambda row, spec: dataclasses.replace(row, adam=row.adam * power)


def std(power) -> Callable[[Rule, ParamSpec], Rule]:
    return lambda row, spec: dataclasses.replace(row, init_std=row.init_std * power)


def eps(row: Rule, spec: ParamSpec) -> Rule:
    return dataclasses.replace(row, eps=ONE)


WRONG = {
    "hidden rate/m": ("lm", "head_dim", HIDDEN, rate(D**-1), "movement/block.mlp_out @1", "frozen"),
    "hidden rate/m in one role": ("lm", "heads", {Role.MLP_IN}, rate(D**-1), "movement/block.mlp_in/gate @1", "frozen"),
    "embedding frozen": ("lm", "head_dim", {Role.TOKEN_EMBEDDING}, rate(D**-3), "movement/token_embedding @1", "frozen"),
    "input rate/m": ("lm", "heads", {Role.TOKEN_EMBEDDING}, rate(D**-1), "movement/token_embedding @1", "frozen"),
    "input rate/m of patches": ("vit", "heads", {Role.PATCH_EMBEDDING}, rate(D**-1), "movement/patch_embedding @1", "frozen"),
    "positions rate/m": ("vit", "head_dim", {Role.POSITION}, rate(D**-1), "movement/position @1", "frozen"),
    "tied table rate/m": ("lm, tied", "heads", {Role.TOKEN_EMBEDDING}, rate(D**-1), "movement/token_embedding @1", "frozen"),
    "all rates/m": ("lm", "heads", {*HIDDEN, Role.TOKEN_EMBEDDING}, rate(D**-1), "movement/block.value @1", "lazy"),
    "readout rate/m": ("lm", "heads", {Role.READOUT}, rate(D**-1), "movement/readout @1", "frozen"),
    "gain rate/m": ("lm", "heads", {"block.norm_gain"}, rate(D**-1), "movement/block.norm_gain/mlp_norm @1", "frozen"),
    "QK-norm gain rate/m": ("lm, QK-norm", "heads", {"block.key.norm_gain"}, rate(D**-1), "movement/block.key.norm_gain @1", "frozen"),
    "bias rate/m": ("vit", "heads", {"block.mlp_in.bias"}, rate(D**-1), "movement/block.mlp_in.bias @1", "frozen"),
    "bias rate x m": ("vit", "heads", {"block.mlp_out.bias"}, rate(D), "movement/block.mlp_out.bias @1", "explodes"),
    "depth rule dropped from rates": ("lm", "depth", {Role.MLP_OUT}, rate(axis("layers") ** 0.5), "movement/block.mlp_out @1", "explodes"),
    "eps unscaled": ("lm", "heads", {*HIDDEN, Role.READOUT}, eps, "gradient/block.value @0", "eps dominates"),
    "eps unscaled in one role": ("lm", "head_dim", {Role.ATTENTION_OUT}, eps, "gradient/block.attention_out @0", "eps dominates"),
    "value std": ("lm", "heads", {Role.VALUE}, std(D**0.25), "weight/block.value @0", "explodes"),
    "MLP out std": ("lm", "heads", {Role.MLP_OUT}, std(D**-0.25), "weight/block.mlp_out @0", "vanishes"),
    "readout std": ("lm", "heads", {Role.READOUT}, std(D), "weight/readout @0", "explodes"),
    "embedding std": ("lm", "heads", {Role.TOKEN_EMBEDDING}, std(D**-0.5), "weight/token_embedding @0", "vanishes"),
    "key rate under GQA": ("lm, GQA", "kv_heads", {Role.KEY, Role.VALUE}, rate(K**-1), "movement/block.key @1", "frozen"),
    "value rate x G under GQA": ("lm, GQA", "kv_heads", {Role.VALUE}, rate(K), "movement/block.value @1", "explodes"),
    "value std under GQA": ("lm, GQA", "kv_heads", {Role.KEY, Role.VALUE}, std(K**-0.5), "weight/block.value @0", "vanishes"),
    "key heads in the value's fan-in": (
        "lm, GQA", "heads", {Role.VALUE}, std((D / (K * N)) ** 0.5), "weight/block.value @0", "explodes where embed grows alone",
    ),
    "MLP out with the width for fan-in": (
        "lm", "head_dim", {Role.MLP_OUT}, std((F / D) ** 0.5), "weight/block.mlp_out @0", "explodes where mlp grows alone",
    ),
    "MLP out's rate by the width": (
        "lm", "head_dim", {Role.MLP_OUT}, rate(F / D), "movement/block.mlp_out @1", "explodes where mlp grows alone",
    ),
    "MLP in with its own width for fan-in": (
        "lm", "head_dim", {Role.MLP_IN}, std((D / F) ** 0.5), "weight/block.mlp_in/up @0", "explodes where embed grows alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("error", WRONG)
def test_wrong_tables_are_named(error: str):
    model, grow, roles, mistake, where, word = WRONG[error]
    right = preset("depth-mup", model, grow)
    assert not {name for name in troubles(right, model, grow) if "/" in name}
    assert troubles(with_rows(right, roles, mistake), model, grow)[where] == word


def test_a_role_of_its_own_with_the_row_of_any_hidden_matrix():
    right = preset("mup", "lm", "head_dim")
    wrong = with_rows(right, {Role.MLP_IN}, lambda row, spec: right.rule(dataclasses.replace(spec, role=Role.HIDDEN)))
    assert troubles(wrong, "lm", "head_dim") == {
        f"gradient/block.mlp_in/{part} @0": "eps fades where embed grows alone" for part in ("gate", "up")
    }


def test_a_gain_that_heads_share_needs_their_number_in_its_eps():
    right = preset("mup", "lm, QK-norm", "heads")
    wrong = with_rows(right, {"block.query.norm_gain"}, lambda row, spec: dataclasses.replace(row, eps=D**-1))
    assert troubles(wrong, "lm, QK-norm", "heads") == {"gradient/block.query.norm_gain @0": "eps fades"}
    assert not troubles(wrong, "lm, QK-norm", "head_dim")


def test_logits_that_vanish_faster_than_the_source_says_collapse():
    right = preset("mup", "lm", "head_dim")
    assert "attention @0" not in troubles(right, "lm", "head_dim")
    for exponent in (-1.5, -0.25):
        found = troubles(dataclasses.replace(right, logits=N**exponent), "lm", "head_dim")
        assert found["attention @0"] == ("heads collapse" if exponent < -1 else "explodes")


@pytest.mark.parametrize("where", ["embed", "mlp", "head_dim", "layers"])
def test_a_wrong_base_of_one_axis_is_seen_at_the_base(where: str):
    grow = "depth" if where == "layers" else "head_dim"
    right = preset("depth-mup", "lm", grow)
    assert right.base is not None
    wrong = dataclasses.replace(right, base={**right.base, where: 2 * right.base[where]})
    assert not troubles(right, "lm", grow)
    role = {"mlp": "movement/block.mlp_out @1", "head_dim": "gradient/block.query @0"}.get(
        where, "movement/block.value @1"
    )
    assert troubles(wrong, "lm", grow)[role].startswith("wrong base (")
    slopes = ({key: one.slope for key, one in expected(table, "lm", grow).items()} for table in (right, wrong))
    assert next(slopes) == next(slopes)  # which is why slopes cannot see it


@pytest.mark.parametrize("name", ["ntk", "hybrid"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_lazy_is_trouble_unless_it_is_asked_for_and_no_worse_than_the_source_says(name: str, optimizer: str):
    table = preset(name, "lm", "heads")
    assert set(troubles(table, "lm", "heads", optimizer).values()) == {"lazy"}
    assert not troubles(table, "lm", "heads", optimizer, accept=("lazy",))
    slower = with_rows(table, {Role.MLP_OUT}, lambda row, spec: row.times(adam=D**-0.25, sgd=D**-0.25))
    assert troubles(slower, "lm", "heads", optimizer, accept=("lazy",)) == {"movement/block.mlp_out @1": "frozen"}


def test_a_table_whose_source_wants_no_lazy_limit_cannot_be_excused():
    with pytest.raises(PresetError, match="mup wants no lazy limit"):
        troubles(preset("mup", "lm", "heads"), "lm", "heads", accept=("lazy",))


def test_every_parameter_has_an_expectation_or_is_named():
    """Of a tied table whose contact logit is no constant, gains' gradients have no exponent: named, and nothing else."""
    for model in MODELS:
        for optimizer in ("adam", "sgd"):
            for name in ("mup", "sp"):
                specs = ends(model, "heads")[0].specs
                unsaid = groups.not_judged(specs, expected(preset(name, model, "heads"), model, "heads", optimizer))
                if name == "sp" and "tied" in model:
                    assert {"gradient/norm_gain", "gradient/block.norm_gain/mlp_norm"} <= set(unsaid)
                    assert all("norm_gain" in one for one in unsaid)
                else:
                    assert unsaid == (), (model, optimizer, name)


def test_labels_tell_apart_what_a_group_has_several_of():
    labels = groups.labels(ends("lm, biases", "heads")[0].specs)
    assert labels["block.mlp.gate"] == "block.mlp_in/gate"
    assert labels["block.mlp.up_bias"] == "block.mlp_in.bias/up_bias"
    assert labels["block.mlp_norm.gain"] == "block.norm_gain/mlp_norm"
    assert labels["block.mlp.down"] == "block.mlp_out"
    assert len(set(labels.values())) == len(labels)
