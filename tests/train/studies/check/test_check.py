"""Coordinate check of a language model: right rules pass, wrong ones are caught and named."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import ParamSpec, Power, Preset, Role, Rule
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.rule import axis
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import init_stds, resolve
from mupax.train.studies.check import check, report, theory
from mupax.train.studies.check.check import Expected, Finding
from mupax.zoo import configs
from mupax.zoo.definition import Definition, definition, normals
from scripts.check.mutants import Mutant
from tests.fixtures.optimizers import adopt

__all__ = ["adopt"]  # fixture

DOUBLINGS = {"depth": 3}
"""Two unless said here: an explosion with depth needs one more to be seen apart from its start.

The slope over three even sizes is that of the first and the last, so only these are measured.
`test_the_command...` has a size between them.
"""
SEEDS = {"depth": 3}
"""Six unless said here: more for narrow models of one layer than deep ones need."""
STEPS = 3
"""Fewer than the ten of `mupax check`, which one test below takes.

Every rule here shows by then, and a wrong one after the first.
"""

SIZES = {"width": 32, "num_heads": 4, "vocab_size": 16, "depth": 1}
"""Half of the width and depth of `mupax check`. Six seeds know slopes as well as three of its models.

An optimizing compiler would take longer than it saves. Depth grows from two layers: from one on,
logits of tied `sp` and `ntk` change as the depth to 0.9, and theory has 0.6 at most.
"""
LM: Any = dataclasses.replace(configs.get("lm-proxy"), mlp_ratio=1.0, **SIZES)
TIED: Any = dataclasses.replace(LM, tied=True)
BATCH = check.batch(check.smallest(LM, SIZES))


def doublings(grow: str) -> int:
    return DOUBLINGS.get(grow, 2)


def seeds(grow: str) -> int:
    return SEEDS.get(grow, 6)


def grown_models(model: Any, grow: str) -> list[Any]:
    """Return the models of a growth, from the smallest on."""
    smallest = dataclasses.replace(model, depth=2) if grow == "depth" else model
    return check.grow(smallest, grow, doublings(grow) + 1, SIZES)


@functools.cache
def compiled_series(grow: str, optimizer: str, model: configs.ModelConfig) -> check.Series:
    """Return the smallest and the largest model of a growth, which compile once."""
    config = OptimizerConfig(
        name=optimizer, peak_lr=OPTIMIZERS[optimizer].check_lr, schedule="constant", eps=1e-12
    )
    grown = grown_models(model, grow)
    run_series = check.Series([definition(grown[0]), definition(grown[-1])], config, STEPS)
    if grow not in ("head_dim", "depth"):
        # All other growths start at one model.
        run_series._programs[0] = compiled_series("head_dim", optimizer, model)._programs[0]
    return run_series


def series(
    grow: str, optimizer: str = "adam", model: configs.ModelConfig = LM, steps: int = STEPS
) -> check.Series:
    """Return a compiled series that takes so many steps."""
    run_series = copy.copy(compiled_series(grow, optimizer, model))
    run_series.steps = steps
    return run_series


def findings_of(
    trained: Preset,
    grow: str,
    optimizer: str = "adam",
    meant: Preset | None = None,
    model: configs.ModelConfig = LM,
    accept: tuple[str, ...] = (),
    steps: int = STEPS,
) -> list[Finding]:
    """Train one preset, and judge it by the theory of `meant` (by default of itself)."""
    sized = series(grow, optimizer, model, steps)
    first, last = sized.definitions
    trained = with_layers(trained, first.sizes["layers"])
    meant = with_layers(meant, first.sizes["layers"]) if meant else trained
    expected = theory.of(meant, first, last, optimizer, accept=accept)
    measured = sized.measure(trained, BATCH, seeds(grow))
    return check.judge(measured, [1, 2 ** doublings(grow)], expected)


def preset(name: str, **constants: Any) -> Preset:
    return presets.get(name, base=check.smallest(LM, SIZES).base_sizes(), **constants)


def with_layers(table: Preset, layers: int) -> Preset:
    """Return a preset whose base has so many layers."""
    assert table.base is not None
    return dataclasses.replace(table, base={**table.base, "layers": layers})


def wrong(findings: Sequence[Finding]) -> dict[str, float]:
    return {f"{f.observable} @{f.step}": round(f.slope, 2) for f in findings if not f.ok}


@pytest.mark.parametrize(
    ("name", "grow", "constants"),
    [
        ("mup", "head_dim", {}),
        ("mup-half", "head_dim", {}),
        ("mup", "head_dim", {"alpha_a": 0.75}),
        ("depth-mup", "head_dim", {}),
        ("completep", "head_dim", {}),
        ("mup", "heads", {}),
        ("mup-half", "heads", {}),
        ("depth-mup", "heads", {}),
        ("completep", "heads", {}),
        ("completep", "heads", {"eps_scope": "completed"}),
        ("mup", "heads", {"embedding_width": -0.5}),
        ("depth-mup", "depth", {"alpha_l": 0.5}),
        ("depth-mup", "depth", {"alpha_l": 0.75}),
        ("depth-mup", "depth", {"alpha_l": 1.0}),
        ("completep", "depth", {}),
    ],
)
def test_right_rules_pass(name, grow, constants):
    findings = findings_of(preset(name, **constants), grow)
    assert len(findings) > 30
    assert check.passes(findings), wrong(findings)


@pytest.mark.parametrize(
    ("name", "constants", "growing", "telltales"),
    [
        (
            "mup",
            {"readout_width": -0.5},
            {"change logits", "movement/norm_gain"},
            {"weight/readout @0", "logits @0"},
        ),
        ("sp", {"embedding_width": 1}, None, {"movement/token_embedding @1"}),
    ],
)
def test_named_constants_move_as_theory_says_and_not_as_their_other_value(
    name, constants, growing, telltales
):
    findings = findings_of(preset(name, **constants), "heads")
    assert all(f.agrees for f in findings), wrong(findings)
    assert not check.passes(findings)
    if growing is not None:
        assert {f.observable for f in findings if not f.ok} == growing
    by_default_theory = findings_of(preset(name, **constants), "heads", meant=preset(name))
    assert telltales <= wrong(by_default_theory).keys()


@pytest.mark.parametrize(
    ("name", "grow"),
    [
        *((name, "head_dim") for name in ("mup", "mup-half", "depth-mup", "completep")),
        *((name, "depth") for name in ("depth-mup", "completep")),
    ],
)
def test_right_rules_pass_with_a_tied_readout(name, grow):
    findings = findings_of(preset(name), grow, model=TIED)
    assert {"logits", "contact logit"} <= {f.observable for f in findings}
    assert check.passes(findings), wrong(findings)


@pytest.mark.parametrize("name", ["sp", "ntk"])
@pytest.mark.parametrize("grow", ["head_dim", "depth"])
def test_tied_sp_and_ntk_move_as_theory_says(name, grow):
    accept = ("lazy",) if name == "ntk" else ()
    findings = findings_of(preset(name), grow, model=TIED, accept=accept)
    assert all(f.agrees for f in findings), wrong(findings)
    assert check.passes(findings) == (name == "ntk" and grow != "depth")
    contact = next(f for f in findings if f.observable == "contact logit")
    assert contact.expected.slope == (-0.5 if grow == "depth" else 0.5)


@pytest.mark.core
@pytest.mark.parametrize("name", ["mup", "mup-half", "depth-mup", "completep", "sp", "ntk"])
def test_a_tied_table_is_the_same_whether_heads_or_their_size_grow(name):
    """So that measuring it as head_dim grows is enough. The untied model is measured under both."""
    exponents = []
    values = []
    for grow in ("head_dim", "heads"):
        grown = grown_models(TIED, grow)
        last = definition(grown[-1])
        expected = theory.of(preset(name), definition(grown[0]), last, "adam", strict=True)
        slopes = {}
        for (observable, step), expectation in expected.items():
            is_logit = observable in ("logits", "contact logit")
            if is_logit or observable.endswith("/token_embedding"):
                slopes[observable, step] = expectation.slope
        exponents.append(slopes)

        factors = resolve(preset(name), last)
        (table,) = [
            parameter for parameter, spec in last.specs.items() if spec.group == "token_embedding"
        ]
        stds = init_stds(preset(name), last)
        columns = (factors.multiplier, factors.lr, factors.eps, factors.weight_decay, stds)
        own = [float(column[table]) for column in columns]
        values.append([*own, float(factors.forward["tied_readout"])])
    assert len(exponents[0]) == 5
    assert exponents[0] == exponents[1]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("mutant", "telltale"),
    [
        (Mutant("readout", "multiplier", -0.5), "logits @0"),
        (Mutant("token_embedding", "lr", 0.25), "movement/token_embedding @1"),
    ],
)
def test_a_wrong_rule_of_a_tied_table_is_caught(mutant, telltale):
    # tests/scripts/check/test_mutations.py has both signs of every column.
    right = preset("mup")
    findings = findings_of(mutant.of(right), "head_dim", meant=right, model=TIED, steps=1)
    assert telltale in wrong(findings)


def test_control_with_the_contact_logit_among_them_the_logits_at_the_start_contradict_theory():
    """The contact logit is judged apart, because E_t . E_t / D does not vanish.

    One logit in 16 of order one outweighs 15 logits of order D^-1/2.
    """
    right = preset("mup")
    sized = series("head_dim", model=TIED, steps=1)
    even = check.even_batch(check.smallest(TIED, SIZES))
    alone = sized.measure(right, even, seeds("head_dim"))
    rest = alone["logits"]
    contact = alone["contact logit"]
    vocab = SIZES["vocab_size"]
    rms = np.sqrt(((vocab - 1) * rest**2 + contact**2) / vocab)
    expected = theory.of(right, sized.definitions[0], sized.definitions[-1], "adam")
    (finding,) = check.judge({"logits": rest}, [1, 4], expected)
    assert finding.agrees
    (finding,) = check.judge({"logits": rms}, [1, 4], expected)
    assert not finding.agrees
    # Both are parts of what the model returns.
    first = sized.definitions[0]
    factors = resolve(right, first)
    initialize = jax.jit(functools.partial(first.initialize, draw=normals))
    params = initialize(0, init_stds(right, first))
    apply = jax.jit(first.apply)
    logits = np.asarray(apply(params, factors.multiplier, factors.forward, even["inputs"]))
    assert np.sqrt(np.mean(logits**2)) == pytest.approx(rms[0, 0, 0], rel=1e-3)
    own = np.take_along_axis(logits, even["inputs"][..., None], axis=-1)
    assert np.sqrt(np.mean(own**2)) == pytest.approx(contact[0, 0, 0], rel=1e-3)


@pytest.mark.parametrize("name", ["ntk", "hybrid"])
@pytest.mark.parametrize("grow", ["head_dim", "heads", "depth"])
def test_the_neural_tangent_family_moves_as_theory_says(name, grow):
    findings = findings_of(preset(name), grow, accept=("lazy",))
    assert all(f.agrees for f in findings), wrong(findings)
    # Without a rule for depth it explodes there, as foretold, and by its own table the logits of
    # hybrid grow as N^1/4.
    assert check.passes(findings) == (grow != "depth" and (name, grow) != ("hybrid", "head_dim"))


@pytest.mark.parametrize("name", ["mup", "mup-half"])
def test_right_rules_pass_under_sgd(name):
    findings = findings_of(preset(name), "head_dim", "sgd")
    assert check.passes(findings), wrong(findings)


def test_an_optimizer_whose_first_update_moves_nothing_is_judged_from_the_next_one(adopt: str):
    findings = findings_of(preset("mup"), "head_dim", adopt)
    assert check.passes(findings), wrong(findings)
    assert "frozen" not in {finding.verdict for finding in findings}


def test_control_counting_an_update_that_moves_nothing_blames_a_right_table(
    adopt: str, monkeypatch
):
    right_series = series("head_dim", adopt)
    monkeypatch.setitem(OPTIMIZERS, adopt, dataclasses.replace(OPTIMIZERS[adopt], still_steps=0))
    first, last = right_series.definitions
    counting = check.Series([first], right_series.config, steps=1)
    at_first = counting.measure(preset("mup"), BATCH, seeds=1)
    # All movements are zero at any size.
    measured = {name: np.repeat(values, 2, axis=0) for name, values in at_first.items()}
    findings = check.judge(measured, [1, 4], theory.of(preset("mup"), first, last, adopt))
    assert "frozen" in {finding.verdict for finding in findings}


def test_growing_the_mlp_alone_passes_where_it_is_allowed():
    # Under SGD. Under Adam, and for key heads alone, the command refuses it.
    findings = findings_of(preset("mup"), "mlp", "sgd")
    assert check.passes(findings), wrong(findings)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sp_in_width_is_caught(optimizer):
    findings = findings_of(preset("sp"), "head_dim", optimizer)
    caught = wrong(findings)
    assert {"change logits @1", "change residual @1"} <= caught.keys(), caught
    verdicts = {(f.observable, f.step): f.verdict for f in findings}
    assert verdicts["change residual", 1] == "explodes"
    assert all(f.agrees for f in findings), wrong([f for f in findings if not f.agrees])
    line = report.verdict_line(findings)
    assert "change residual explodes through value, attention out, MLP in, MLP out" in line


def test_mup_in_depth_is_caught():
    findings = findings_of(preset("mup"), "depth")
    caught = wrong(findings)
    assert "change residual @1" in caught, caught
    line = report.verdict_line(findings)
    assert "change residual explodes through query, key, value, attention out" in line


def test_maximal_update_explodes_in_head_dim_through_its_logits_and_mup_does_not():
    caught = wrong(findings_of(preset("maximal-update"), "head_dim"))
    assert any(name.startswith("update attention") for name in caught), caught
    caught = wrong(findings_of(preset("mup"), "head_dim"))
    assert not any(name.startswith("update attention") for name in caught), caught


class WrongRule(NamedTuple):
    """A mistake in a right rule, and the observable that shows it.

    Attributes:
        column: Column of the rule that gets the factor.
        constants: Constants of the preset.
    """

    name: str
    grow: str
    column: str
    factor: Power | float
    roles: set[Role]
    telltale: str
    constants: Mapping[str, float] = MappingProxyType({})


IN_BLOCK = {Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT}
WRONG_RULES = {
    "q/k rate of muP at alpha_A=1/2": WrongRule(
        "mup-half", "head_dim", "adam", axis("head_dim") ** 0.5, {Role.QUERY, Role.KEY},
        "movement/block.query",
    ),
    "in-block rate without its depth factor at alpha_L=1/2": WrongRule(
        "depth-mup", "depth", "adam", axis("layers") ** 0.5, IN_BLOCK, "movement/block.mlp_in",
        {"alpha_l": 0.5},
    ),
    "frozen hidden layer": WrongRule(
        "mup", "head_dim", "adam", 1e-30, {Role.MLP_IN}, "movement/block.mlp_in"
    ),
    "frozen embedding": WrongRule(
        "mup", "head_dim", "adam", 1e-30, {Role.TOKEN_EMBEDDING}, "movement/token_embedding"
    ),
    "hidden layer that freezes with width": WrongRule(
        "mup", "head_dim", "adam", axis("embed") ** -1.0, {Role.MLP_IN, Role.MLP_OUT},
        "movement/block.mlp_in",
    ),
    "embedding that freezes with width": WrongRule(
        "mup", "head_dim", "adam", axis("embed") ** -1.0, {Role.TOKEN_EMBEDDING},
        "movement/token_embedding",
    ),
    # Its multiplier is m^-1: the factor takes it away.
    "readout multiplier dropped": WrongRule(
        "mup", "head_dim", "multiplier", axis("embed"), {Role.READOUT}, "weight/readout"
    ),
}  # fmt: skip


def changed(right: Preset, roles: Collection[Role], column: str, factor: Power | float) -> Preset:
    """Return a preset whose rules of some roles have a factor in one column."""

    def rule(spec: ParamSpec) -> Rule:
        row = right.rule(spec)
        if spec.role not in roles:
            return row
        return dataclasses.replace(row, **{column: getattr(row, column) * factor})

    return dataclasses.replace(right, rule=rule)


@pytest.mark.parametrize("error", WRONG_RULES)
def test_wrong_rules_are_caught_and_named(error):
    wrong_rule = WRONG_RULES[error]
    right = preset(wrong_rule.name, **wrong_rule.constants)
    broken = changed(right, wrong_rule.roles, wrong_rule.column, wrong_rule.factor)
    findings = findings_of(broken, wrong_rule.grow, meant=right, steps=1)
    caught = wrong(findings)
    assert any(name.startswith(wrong_rule.telltale) for name in caught), caught
    kind, _, group = wrong_rule.telltale.partition("/")
    assert re.search(rf"by role: .*{group} \([^)]*{kind}", report.verdict_line(findings))
    assert ("frozen" in {f.verdict for f in findings}) == error.startswith("frozen")


def test_a_wrong_rate_is_caught_under_sgd():
    right = preset("mup")
    for group in ("block.query", "token_embedding"):
        broken = Mutant(group, "lr", 0.5).of(right)
        findings = findings_of(broken, "head_dim", "sgd", meant=right, steps=1)
        assert f"by role: {group} (movement)" in report.verdict_line(findings)


def test_the_under_trained_model_of_flat_curves_is_caught():
    """Activations stay flat, so checks that look for growth pass it.

    Its hidden rate is m^2 too small and its input rate m too small.
    """
    right = preset("mup")
    slow = changed(right, {*IN_BLOCK, Role.TOKEN_EMBEDDING}, "adam", axis("embed") ** -1.0)
    findings = findings_of(slow, "head_dim", meant=right, steps=1)
    caught = wrong(findings)
    assert any(name.startswith("change residual") for name in caught), caught
    assert all(f.slope < 0.2 for f in findings if f.observable == "change residual")


def test_slopes_of_exact_power_laws_are_found():
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    values = np.stack([sizes**0.5, sizes**0.5], axis=1)[:, :, None] * np.ones(2)
    expected = {("x", step): Expected(0.5) for step in (0, 1, 3)}
    findings = check.judge({"x": values, "y": values}, list(sizes), expected)
    assert [round(f.slope, 12) for f in findings] == [0.5, 0.5]
    assert findings[0].low == pytest.approx(0.5)
    assert findings[0].high == pytest.approx(0.5)


def test_verdicts_follow_the_band():
    finding = Finding("x", 1, 0.3, 0.2, 0.4, (1.0, 2.0), Expected(0.0))
    assert finding.agrees is False
    assert finding.verdict == "contradicts theory"
    assert dataclasses.replace(finding, low=0.1).ok
    foretold = dataclasses.replace(finding, expected=Expected(0.3, trouble="explodes"))
    assert foretold.verdict == "explodes"
    nan = float("nan")
    assert not dataclasses.replace(finding, slope=nan, low=nan, high=nan).agrees
    assert not check.passes([])


@pytest.mark.parametrize(
    ("step", "values", "verdict"),
    [
        # What a finite size adds falls fast: the slope is -0.93 at first and -0.61 then.
        (0, (2.19, 1.16, 0.759), "as predicted without the smallest size"),
        # A wrong rule is as wrong between the largest sizes.
        (0, (2.19, 1.30, 0.773), "contradicts theory"),
        # What explodes in training comes to rest, and must not pass for it.
        (10, (2.19, 1.16, 0.759), "contradicts theory"),
        # Two sizes have no others to look at.
        (0, (2.19, 1.16), "contradicts theory"),
    ],
)
def test_the_smallest_size_is_left_out_if_all_others_agree_at_initialization(
    step: int, values: tuple[float, ...], verdict: str
) -> None:
    measured = np.zeros((len(values), 2, step + 1))
    measured[:, :, step] = np.array(values)[:, None]
    sizes = [2.0**count for count in range(len(values))]
    expected = {("gradient/x", step): Expected(-0.5, 0.12, 0.12)}
    (finding,) = check.judge({"gradient/x": measured}, sizes, expected)
    assert finding.verdict == verdict


class FewSeeds(check.Series):
    """Series whose slope over doublings is `first` with three seeds and `then` with more."""

    def __init__(self, first: float, then: float) -> None:
        self.first = first
        self.then = then
        self.seed_counts: list[int] = []

    def measure(
        self,
        preset: Preset,
        batch: Mapping[str, np.ndarray],
        seeds: int = 4,
        *,
        peak_lr: float | None = None,
    ) -> dict[str, np.ndarray]:
        self.seed_counts.append(seeds)
        slope = self.first if seeds == 3 else self.then
        sizes = np.array([1.0, 2.0, 4.0])
        return {"x": np.repeat(sizes[:, None, None] ** slope, seeds, axis=1)}


@pytest.mark.parametrize(
    ("first", "then", "seed_counts", "passed"),
    [
        (0.1, 9.0, [3], True),
        (0.16, 0.1, [3, 12], True),
        (0.16, 0.14, [3, 12], False),  # the same slope from more seeds is a failure
        (0.25, 0.0, [3], False),  # a quarter of an octave is none of a few seeds' chances
    ],
)
def test_a_narrow_failure_is_decided_by_more_seeds(
    first: float, then: float, seed_counts: list[int], passed: bool
) -> None:
    series = FewSeeds(first, then)
    expected = {("x", 0): Expected(0.0, 0.12, 0.12)}
    preset = presets.get("sp")
    findings = check.measure_and_judge(series, preset, {}, 3, [1, 2, 4], expected)
    assert series.seed_counts == seed_counts
    assert check.passes(findings) == passed
    assert [finding.seeds for finding in findings] == seed_counts[-1:]


def test_a_slope_far_from_its_band_is_undecided_while_its_interval_meets_the_band() -> None:
    wide = Finding("x", 0, 0.34, -0.67, 1.34, (1.0, 1.0), Expected(-0.5, 0.12, 0.2))
    assert wide.ok
    assert wide.is_undecided
    narrow = dataclasses.replace(wide, low=0.24, high=0.44)
    assert not narrow.ok
    assert not narrow.is_undecided
    near = dataclasses.replace(wide, slope=-0.2)
    assert near.ok
    assert not near.is_undecided


class SpreadSeeds(FewSeeds):
    """Series whose slopes are 0.1 and 0.9 from two seeds, and 0.5 from every seed of more."""

    def measure(
        self,
        preset: Preset,
        batch: Mapping[str, np.ndarray],
        seeds: int = 4,
        *,
        peak_lr: float | None = None,
    ) -> dict[str, np.ndarray]:
        self.seed_counts.append(seeds)
        slopes = np.array([0.1, 0.9] if seeds == 2 else [0.5] * seeds)
        sizes = np.array([1.0, 2.0, 4.0])
        return {"x": (sizes[:, None] ** slopes)[:, :, None]}


def test_an_undecided_slope_is_decided_by_more_seeds() -> None:
    series = SpreadSeeds(0.0, 0.0)
    expected = {("x", 0): Expected(0.0, 0.12, 0.12)}
    findings = check.measure_and_judge(series, presets.get("sp"), {}, 2, [1, 2, 4], expected)
    assert series.seed_counts == [2, 8]
    assert not check.passes(findings)


@pytest.mark.parametrize(("name", "rate"), [("ntk", 2.5e-4), ("hybrid", 2.5e-4), ("mup", 2e-3)])
def test_lazy_tables_are_checked_at_an_eighth_of_the_rate(name: str, rate: float) -> None:
    grown = check.grow(configs.get("lm-proxy"), "heads", 3)
    first, *_, last = [definition(model) for model in grown]
    preset = presets.get(name, base=grown[0].base_sizes())
    assert check.peak_lr("adam", theory.of(preset, first, last, "adam")) == rate


def test_attention_logits_may_change_as_terms_that_are_not_aligned() -> None:
    # 64 head dimensions see no alignment over 512 tokens: measured -0.46 (mup-half), theory 0.
    grown = check.grow(configs.get("lm-proxy"), "head_dim", 3)
    first, *_, last = [definition(model) for model in grown]
    for name, least in (("mup-half", -0.5), ("mup", -0.5)):
        preset = presets.get(name, base=grown[0].base_sizes())
        expected = theory.of(preset, first, last, "adam", strict=True)["update attention", 10]
        assert expected.slope == 0
        assert expected.low == least
        assert expected.high == 0


def test_a_key_bias_may_fall_as_attention_gets_even() -> None:
    # Where head_dim grows, logits fall from 1 to 1/2; where heads grow they stay.
    model = dataclasses.replace(configs.get("lm-proxy"), bias=True)
    drops = {}
    for grow in ("head_dim", "heads"):
        grown = check.grow(model, grow, 3)
        first, *_, last = [definition(size) for size in grown]
        preset = presets.get("mup", base=grown[0].base_sizes())
        expected = theory.of(preset, first, last, "adam", strict=True)
        drops[grow] = expected["gradient/block.key.bias", 0].below
    assert drops["head_dim"] == pytest.approx(np.log2(np.e) / 2 * (1 - 1 / 4) / 2)
    assert drops["heads"] == 0


def test_what_never_moves_is_frozen_unless_a_zero_readout_holds_it_back():
    # A slope of zeros is no slope. Left out, a layer that is never trained would pass.
    findings = check.judge(
        {"movement/x": np.zeros((4, 2, 2))}, [1, 2, 4, 8], {("movement/x", 1): Expected(0.0)}
    )
    assert [f.verdict for f in findings] == ["frozen"]
    assert not check.passes(findings)
    held = presets.get("mup", base=preset("mup").base, zero_readout=True)
    passed = findings_of(held, "head_dim")
    assert check.passes(passed), wrong(passed)


@functools.cache
def command_series() -> check.Series:
    """Return the series of `mupax check --sizes 3`, with a model between those of `series`."""
    ends = series("head_dim")
    definitions = [definition(grown) for grown in check.grow(LM, "head_dim", 3, SIZES)]
    all_sizes = check.Series(definitions, ends.config)
    all_sizes._programs[0] = ends._programs[0]
    all_sizes._programs[-1] = ends._programs[-1]
    return all_sizes


@pytest.fixture
def command_words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a check whose commands share trainings and programs."""

    def remembered(definitions: Sequence[Definition], config: OptimizerConfig) -> check.Series:
        assert list(definitions) == command_series().definitions
        # Programs get the learning rate as data.
        remembered_series = copy.copy(command_series())
        remembered_series.config = config
        usual_rate = command_series().config.peak_lr
        assert dataclasses.replace(config, peak_lr=usual_rate) == command_series().config
        return remembered_series

    command_series()  # before `Series` is another one
    monkeypatch.setattr(check, "Series", remembered)
    words = ["check", "lm-proxy", "--grow", "head_dim", "--sizes", "3", "--seeds", "2"]
    words += ["--model.width", "32", "--model.num-heads", "4", "--model.mlp-ratio", "1"]
    words += ["--model.vocab-size", "16", "--model.depth", "1"]
    return [*words, "--model.seq-len", "16"]


def test_the_command_takes_ten_steps_and_writes_json_and_a_figure_and_says_what_failed(
    command_words, tmp_path, capsys
):
    record_path = tmp_path / "check.json"
    figure = tmp_path / "check.png"
    for name, code in (("mup", 0), ("sp", 1)):
        files = ["--json", str(record_path)]
        if code:
            files += ["--figure", str(figure)]
        assert main([*command_words, "--preset", name, *files]) == code
        record = json.loads(record_path.read_text())
        rows = record["observables"]
        assert record["verdict"] == ("fail" if code else "pass")
        assert {"slope", "low", "high", "predicted", "ok"} <= rows[0].keys()
        assert {row["step"] for row in rows} == {0, 1, 3, 10}
        failed = {row["observable"] for row in rows if not row["ok"]}
        assert ("change residual" in failed) == bool(code)
    assert figure.stat().st_size > 10_000
    assert "change residual explodes" in capsys.readouterr().out


def test_a_rate_at_which_every_size_diverges_is_blamed_in_place_of_rules(command_words, capsys):
    assert main([*command_words, "--preset", "mup", "--peak-lr", "1"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "the learning rate is too high: at every size the loss rises above its start" in shown
    assert "next: type the same command with --peak-lr 0.125, an eighth of this rate" in shown
    # The control: a wrong table, whose loss rises at no size at the usual rate.
    assert main([*command_words, "--preset", "sp"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "learning rate is too high" not in shown
    assert "next: mupax presets limits sp" in shown


def test_lazy_fails_and_is_accepted_by_a_flag(command_words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command_series(), "steps", 1)
    words = [*command_words, "--preset", "ntk"]
    record_path = tmp_path / "check.json"
    assert main([*words, "--json", str(record_path)]) == 1
    shown = capsys.readouterr().out
    assert "the table itself is wrong: by role:" in shown.replace("\n", " ")
    record = json.loads(record_path.read_text())
    assert [record[key] for key in ("verdict", "program", "table")] == ["fail", "pass", "fail"]
    verdicts = {row["verdict"] for row in record["observables"] if not row["ok"]}
    assert verdicts == {"lazy"}
    assert main([*words, "--accept", "lazy"]) == 0
    shown = capsys.readouterr().out
    assert "passes: ntk follows its table as head_dim grows" in shown
    assert "by its source the preset lets features go as -0.50" in shown
