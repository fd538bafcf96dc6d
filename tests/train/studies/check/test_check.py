"""The coordinate check: right rules pass, wrong ones are caught and named. One compiled series per way to grow."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import Preset, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.rule import axis
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import init_stds, resolve
from mupax.train.studies.check import check, observables, report, theory
from mupax.train.studies.check.check import Expected, Finding
from mupax.zoo import configs
from mupax.zoo.definition import Definition, definition, normals
from scripts.check.mutants import Mutant
from tests.fixtures.optimizers import adopt
from tests.train.studies.check.optimized import optimized

__all__ = ["adopt"]  # fixture

DOUBLINGS, SEEDS = {"depth": 3}, 3
"""Two unless said here: what explodes with depth needs one more to be seen apart from its start. The slope over three even sizes is
that of the first and the last, which are all that is measured; `test_the_command...` has one between them."""
STEPS = 3
"""Of the ten that `mupax check` takes, as one test below does: every rule here shows by then, a wrong one after the first."""

LM = configs.get("lm-proxy")
TIED = dataclasses.replace(LM, tied=True)
BATCH = check.batch(check.smallest(LM))


def doublings(grow: str) -> int:
    return DOUBLINGS.get(grow, 2)


@functools.cache
def series(
    grow: str, optimizer: str = "adam", model: configs.ModelConfig = LM, steps: int = STEPS
) -> check.Series:
    if steps != STEPS:
        fewer = copy.copy(series(grow, optimizer, model))  # of the same programs
        fewer.steps = steps
        return fewer
    config = OptimizerConfig(
        name=optimizer, peak_lr=OPTIMIZERS[optimizer].check_lr, schedule="constant", eps=1e-12
    )
    grown = check.grow(model, grow, doublings(grow) + 1)
    run_series = check.Series([definition(one) for one in (grown[0], grown[-1])], config, STEPS)
    return optimized(run_series) if optimizer == "adam" or grow == "head_dim" else run_series


def findings_of(
    trained: Preset,
    grow: str,
    optimizer: str = "adam",
    meant: Preset | None = None,
    model: configs.ModelConfig = LM,
    accept: tuple[str, ...] = (),
    steps: int = STEPS,
) -> list[Finding]:
    """Train one preset, ask theory about another (the same unless given)."""
    sized = series(grow, optimizer, model, steps)
    expected = theory.of(
        meant or trained, sized.definitions[0], sized.definitions[-1], optimizer, accept=accept
    )
    return check.judge(sized.measure(trained, BATCH, SEEDS), [1, 2 ** doublings(grow)], expected)


def preset(name: str, **constants: float) -> Preset:
    base = check.smallest(configs.get("lm-proxy")).base_sizes()
    return presets.get(name, base=base, **constants)


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
    assert (
        telltales
        <= wrong(findings_of(preset(name, **constants), "heads", meant=preset(name))).keys()
    )


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
    findings = findings_of(
        preset(name), grow, model=TIED, accept=("lazy",) if name == "ntk" else ()
    )
    assert all(f.agrees for f in findings), wrong(findings)
    assert check.passes(findings) == (name == "ntk" and grow != "depth")
    contact = next(f for f in findings if f.observable == "contact logit")
    assert contact.expected.slope == (-0.5 if grow == "depth" else 0.5)


@pytest.mark.core
@pytest.mark.parametrize("name", ["mup", "mup-half", "depth-mup", "completep", "sp", "ntk"])
def test_a_tied_table_is_the_same_whether_heads_or_their_size_grow(name):
    """So that what is measured of it growing head_dim stands for heads; the untied model is measured growing both."""
    exponents, numbers = [], []
    for grow in ("head_dim", "heads"):
        grown = check.grow(TIED, grow, doublings(grow) + 1)
        first, last = definition(grown[0]), definition(grown[-1])
        expected = theory.of(preset(name), first, last, "adam", strict=True)
        touched = {
            key
            for key in expected
            if key[0] in ("logits", "contact logit") or key[0].endswith("/token_embedding")
        }
        exponents.append({key: expected[key].slope for key in touched})
        factors, table = (
            resolve(preset(name), last),
            next(n for n, s in last.specs.items() if s.group == "token_embedding"),
        )
        columns = (
            factors.multiplier,
            factors.lr,
            factors.eps,
            factors.weight_decay,
            init_stds(preset(name), last),
        )
        numbers.append(
            [*(float(column[table]) for column in columns), float(factors.forward["tied_readout"])]
        )
    assert len(exponents[0]) == 5
    assert exponents[0] == exponents[1]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("mutant", "telltale"),
    [
        (Mutant("readout", "multiplier", -0.5), "logits @0"),
        (Mutant("token_embedding", "lr", 0.25), "movement/token_embedding @1"),
    ],
)
def test_a_wrong_rule_of_a_tied_table_is_caught(mutant, telltale):
    """Both signs of every column: `tests/scripts/check/test_mutations.py`."""
    right = preset("mup")
    assert telltale in wrong(
        findings_of(mutant.of(right), "head_dim", meant=right, model=TIED, steps=1)
    )


def test_control_with_the_contact_logit_among_them_the_logits_at_the_start_contradict_theory():
    """Why it is judged apart: E_t . E_t / D does not vanish, and one logit in 64 of order one outweighs 63 of D^-1/2."""
    right, sized = preset("mup"), series("head_dim", model=TIED)
    even = check.even_batch(check.smallest(TIED))
    alone = sized.measure(right, even, SEEDS)
    rest, contact, vocab = alone["logits"], alone["contact logit"], 64
    rms = np.sqrt(((vocab - 1) * rest**2 + contact**2) / vocab)
    expected = theory.of(right, sized.definitions[0], sized.definitions[-1], "adam")
    for values, agrees in ((rest, True), (rms, False)):
        findings = check.judge({"logits": values}, [1, 4], expected)
        assert [f.agrees for f in findings] == [agrees], findings
    # Both are parts of what the model returns.
    first = sized.definitions[0]
    factors = resolve(right, first)
    params = jax.jit(functools.partial(first.initialize, draw=normals))(0, init_stds(right, first))
    logits = np.asarray(
        jax.jit(first.apply)(params, factors.multiplier, factors.forward, even["inputs"])
    )
    assert np.sqrt(np.mean(logits**2)) == pytest.approx(rms[0, 0, 0], rel=1e-3)
    own = np.take_along_axis(logits, even["inputs"][..., None], axis=-1)
    assert np.sqrt(np.mean(own**2)) == pytest.approx(contact[0, 0, 0], rel=1e-3)


@pytest.mark.parametrize("name", ["ntk", "hybrid"])
@pytest.mark.parametrize("grow", ["head_dim", "heads", "depth"])
def test_the_neural_tangent_family_moves_as_theory_says(name, grow):
    findings = findings_of(preset(name), grow, accept=("lazy",))
    assert all(f.agrees for f in findings), wrong(findings)
    # Without a rule for depth it explodes there, as foretold, and hybrid's logits by its own table as N^1/4.
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
    monkeypatch.setitem(OPTIMIZERS, adopt, dataclasses.replace(OPTIMIZERS[adopt], still_steps=0))
    series.cache_clear()
    findings = findings_of(preset("mup"), "head_dim", adopt)
    series.cache_clear()
    assert "frozen" in {finding.verdict for finding in findings}


def test_growing_the_mlp_alone_passes_where_it_is_allowed():
    """Under SGD; under Adam, and for key heads alone, the command refuses (below)."""
    findings = findings_of(preset("mup"), "mlp", "sgd")
    assert check.passes(findings), wrong(findings)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sp_in_width_is_caught(optimizer):
    findings = findings_of(preset("sp"), "head_dim", optimizer)
    caught = wrong(findings)
    assert {"change logits @1", "change residual @1"} <= caught.keys(), caught
    assert {f.verdict for f in findings if f.observable == "change residual" and f.step == 1} == {
        "explodes"
    }
    assert all(f.agrees for f in findings), wrong([f for f in findings if not f.agrees])
    assert (
        "change residual explodes through value, attention out, MLP in, MLP out"
        in report.verdict_line(findings)
    )


def test_mup_in_depth_is_caught():
    findings = findings_of(preset("mup"), "depth")
    caught = wrong(findings)
    assert "change residual @1" in caught, caught
    assert (
        "change residual explodes through query, key, value, attention out"
        in report.verdict_line(findings)
    )


def test_maximal_update_explodes_in_head_dim_through_its_logits_and_mup_does_not():
    caught = wrong(findings_of(preset("maximal-update"), "head_dim"))
    assert any(name.startswith("update attention") for name in caught), caught
    assert not any(
        name.startswith("update attention")
        for name in wrong(findings_of(preset("mup"), "head_dim"))
    )


WRONG_RULES = {
    "readout multiplier dropped": (
        "mup", {}, "head_dim", lambda row, spec: dataclasses.replace(row, multiplier=axis("embed") ** 0.0), {Role.READOUT}, "weight/readout",
    ),
    "q/k rate of muP at alpha_A=1/2": (
        "mup-half", {}, "head_dim", lambda row, spec: dataclasses.replace(row, adam=row.adam * axis("head_dim") ** 0.5),
        {Role.QUERY, Role.KEY}, "movement/block.query",
    ),
    "in-block rate without its depth factor at alpha_L=1/2": (
        "depth-mup", {"alpha_l": 0.5}, "depth", lambda row, spec: dataclasses.replace(row, adam=row.adam * axis("layers") ** 0.5),
        {Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT}, "movement/block.mlp_in",
    ),
    "frozen hidden layer": (
        "mup", {}, "head_dim", lambda row, spec: dataclasses.replace(row, adam=row.adam * 1e-30), {Role.MLP_IN}, "movement/block.mlp_in",
    ),
    "frozen embedding": (
        "mup", {}, "head_dim", lambda row, spec: dataclasses.replace(row, adam=row.adam * 1e-30), {Role.TOKEN_EMBEDDING},
        "movement/token_embedding",
    ),
    "hidden layer that freezes with width": (
        "mup", {}, "head_dim", lambda row, spec: dataclasses.replace(row, adam=row.adam * axis("embed") ** -1.0),
        {Role.MLP_IN, Role.MLP_OUT}, "movement/block.mlp_in",
    ),
    "embedding that freezes with width": (
        "mup", {}, "head_dim", lambda row, spec: dataclasses.replace(row, adam=row.adam * axis("embed") ** -1.0),
        {Role.TOKEN_EMBEDDING}, "movement/token_embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("error", WRONG_RULES)
def test_wrong_rules_are_caught_and_named(error):
    name, constants, grow, mistake, roles, telltale = WRONG_RULES[error]
    right = preset(name, **constants)
    broken = dataclasses.replace(
        right,
        rule=lambda spec: (
            mistake(right.rule(spec), spec) if spec.role in roles else right.rule(spec)
        ),
    )
    findings = findings_of(broken, grow, meant=right, steps=1)
    caught = wrong(findings)
    assert any(name.startswith(telltale) for name in caught), caught
    kind, _, group = telltale.partition("/")
    assert re.search(rf"by role: .*{group} \([^)]*{kind}", report.verdict_line(findings))
    assert ("frozen" in {f.verdict for f in findings}) == error.startswith("frozen")


def test_a_wrong_rate_is_caught_under_sgd():
    right = preset("mup")
    for group in ("block.query", "token_embedding"):
        findings = findings_of(
            Mutant(group, "lr", 0.5).of(right), "head_dim", "sgd", meant=right, steps=1
        )
        assert f"by role: {group} (movement)" in report.verdict_line(findings)


def test_the_under_trained_model_of_flat_curves_is_caught():
    """Hidden rate / m^2 and input rate / m: activations stay flat, so checks that look for growth pass it."""
    right = preset("mup")

    def rule(spec):
        row = right.rule(spec)
        if spec.role is Role.TOKEN_EMBEDDING:
            return dataclasses.replace(row, adam=row.adam / axis("embed"))
        return (
            dataclasses.replace(row, adam=row.adam / axis("embed"))
            if spec.in_block and spec.fan_in
            else row
        )

    findings = findings_of(dataclasses.replace(right, rule=rule), "head_dim", meant=right, steps=1)
    caught = wrong(findings)
    assert any(name.startswith("change residual") for name in caught), caught
    assert all(f.slope < 0.2 for f in findings if f.observable == "change residual")


def test_slopes_of_exact_power_laws_are_found():
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    values = np.stack([sizes**0.5, sizes**0.5], axis=1)[:, :, None] * np.ones(2)
    findings = check.judge(
        {"x": values, "y": values}, sizes, {("x", step): Expected(0.5) for step in (0, 1, 3)}
    )
    assert [round(f.slope, 12) for f in findings] == [0.5, 0.5]
    assert findings[0].low == pytest.approx(0.5)
    assert findings[0].high == pytest.approx(0.5)


def test_verdicts_follow_the_band():
    finding = Finding("x", 1, 0.3, 0.2, 0.4, (1.0, 2.0), Expected(0.0))
    assert finding.agrees is False
    assert finding.verdict == "contradicts theory"
    assert dataclasses.replace(finding, low=0.1).ok
    assert (
        dataclasses.replace(finding, expected=Expected(0.3, trouble="explodes")).verdict
        == "explodes"
    )
    assert not dataclasses.replace(
        finding, slope=float("nan"), low=float("nan"), high=float("nan")
    ).agrees
    assert not check.passes([])


def test_what_never_moves_is_frozen_unless_a_zero_readout_holds_it_back():
    """A slope of zeros is no slope: left out, a layer that is never trained would pass."""
    findings = check.judge(
        {"movement/x": np.zeros((4, 2, 2))}, [1, 2, 4, 8], {("movement/x", 1): Expected(0.0)}
    )
    assert [f.verdict for f in findings] == ["frozen"]
    assert not check.passes(findings)
    held = presets.get("mup", base=preset("mup").base, zero_readout=True)
    passed = findings_of(held, "head_dim")
    assert check.passes(passed), wrong(passed)


def test_the_command_takes_ten_steps_and_writes_json_and_a_figure_and_says_what_failed(
    tmp_path, capsys, monkeypatch
):
    reference, program = series("head_dim"), observables.program

    def compiled(model: Definition, tx, **options):
        """The smallest and the largest are those of the tests above."""
        same = [
            own
            for own, of in zip(reference._programs, reference.definitions, strict=True)
            if of == model
        ]
        return same[0] if same else program(model, tx, **options)

    monkeypatch.setattr(observables, "program", compiled)
    out, figure = tmp_path / "check.json", tmp_path / "check.png"
    inputs = ["--model.vocab-size", "64", "--model.seq-len", "16"]  # of the programs above
    words = [
        "check",
        "lm-proxy",
        "--grow",
        "head_dim",
        "--sizes",
        "3",
        "--seeds",
        "2",
        "--json",
        str(out),
        *inputs,
    ]
    for name, code in (("mup", 0), ("sp", 1)):  # both are measured by the same programs
        assert main([*words, "--preset", name, "--figure", str(figure)]) == code
        record = json.loads(out.read_text())
        assert record["verdict"] == ("fail" if code else "pass")
        assert {"slope", "low", "high", "predicted", "ok"} <= record["observables"][0].keys()
        assert {row["step"] for row in record["observables"]} == {0, 1, 3, 10}
        assert any(
            row["observable"] == "change residual" and not row["ok"]
            for row in record["observables"]
        ) == bool(code)
    assert figure.stat().st_size > 10_000
    assert "change residual explodes" in capsys.readouterr().out
