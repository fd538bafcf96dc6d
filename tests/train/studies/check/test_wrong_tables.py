"""Wrong tables, by theory alone: it names their role, and right ones pass on every structure."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from mupax.presets import PresetError, Role
from mupax.presets.rule import axis
from mupax.train.studies.check import check, groups, theory
from mupax.train.studies.check.theory import Expected
from mupax.zoo.definition import Definition, definition
from scripts.check import structures, untold
from scripts.check.structures import RIGHT, accepted, right, troubles
from scripts.check.wrong_tables import MENDING, MODELS, WRONG, Wrong, rate

D, N = axis("embed"), axis("head_dim")


one = functools.cache(definition)


def ends(model: str, grow: str) -> tuple[Definition, Definition]:
    """The smallest model, and the same with the sizes of the next: theory asks no more of it."""
    if grow == "depth":  # of an encoder-decoder its decoder's alone
        first = check.smallest((MODELS | MENDING)[model])
        last = dataclasses.replace(
            first,
            depth=2 * first.depth,
            **({"encoder_depth": first.depth} if first.denoises else {}),
        )
    else:
        first, last = check.grow((MODELS | MENDING)[model], grow, 2)
    return one(first), dataclasses.replace(one(first), sizes=last.sizes())


@pytest.mark.parametrize("grow", RIGHT)
@pytest.mark.parametrize("model", [*MODELS, *MENDING])
def test_right_tables_are_good_on_every_structure(model: str, grow: str):
    smallest = ends(model, grow)[0]
    for name in RIGHT[grow]:
        if name == "u-mup" and "tied" in model:
            continue  # it has no rule for one
        table = right(name, smallest)
        sizes = ends(model, grow)
        trouble = troubles(table, sizes, accept=accepted(table, sizes))
        assert not trouble, (name, trouble)


def test_lazy_is_accepted_only_where_the_source_lets_features_vanish():
    lazy = set()
    for name in RIGHT["heads"]:
        sizes = ends("lm", "heads")
        if accepted(right(name, sizes[0]), sizes):
            lazy.add(name)
    # The features of `maximal-update` do not vanish, although its `vanishing` names them.
    assert lazy == {"ntk", "hybrid"}


@pytest.mark.core
@pytest.mark.parametrize("error", WRONG)
def test_wrong_tables_are_named(error: str):
    wrong = WRONG[error]
    table, sizes = (
        right("depth-mup", ends(wrong.model, wrong.grow)[0]),
        ends(wrong.model, wrong.grow),
    )
    assert not troubles(table, sizes)
    assert troubles(wrong.of(table), sizes)[wrong.where] == wrong.word


@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, one) for name, of in untold.TABLES.items() for one in of]
)
def test_mistakes_are_named_in_every_preset_under_every_optimizer_but_those_that_the_page_lists(
    name: str, optimizer: str
):
    missed = set()
    for error, wrong in WRONG.items():
        first, last = ends(wrong.model, wrong.grow)
        table = right(name, first)
        if wrong.grow == "depth" and name not in RIGHT["depth"]:
            continue
        if not untold.reads(wrong, table, first.specs.values(), optimizer):
            continue
        before = troubles(table, (first, last), optimizer) if wrong.grow == "kv_heads" else {}
        after = troubles(wrong.of(table), (first, last), optimizer)
        if not untold.names(wrong, dict(after.items() - before.items())):
            missed.add(error)
    assert missed == untold.untold(name, optimizer)


def test_control_a_mistake_that_the_optimizer_does_not_read_is_none():
    wrong, (first, last) = WRONG["eps unscaled in one role"], ends("lm", "head_dim")
    table = right("mup", first)
    read = [
        one for one in untold.TABLES["mup"] if untold.reads(wrong, table, first.specs.values(), one)
    ]
    assert read == ["adam"]
    assert {
        one for one in untold.TABLES["mup"] if troubles(wrong.of(table), (first, last), one)
    } == {"adam"}


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "lion"])
@pytest.mark.parametrize("grow", RIGHT)
@pytest.mark.parametrize("model", ["lm, QK-norm", "lm, GQA", "vit", "ed", "ed, tied"])
def test_right_tables_are_good_under_other_optimizers(model: str, grow: str, optimizer: str):
    sizes = ends(model, grow)
    for name in RIGHT[grow]:
        if optimizer in untold.TABLES.get(name, ()):
            assert not troubles(right(name, sizes[0]), sizes, optimizer), name


@pytest.mark.parametrize("name", ["mup", "mup-half", "depth-mup", "spectral"])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_key_heads_alone_change_the_output_by_no_power(name: str, optimizer: str):
    # They are at most as many as the heads: `check --grow kv_heads` measures +0.02. Under a wrong
    # rate the change does grow.
    sizes = ends("lm, GQA", "kv_heads")
    table = right(name, sizes[0])
    assert not troubles(table, sizes, optimizer)
    assert theory.of(table, *sizes, optimizer)["change logits", 1].slope == pytest.approx(0)
    wrong = Wrong(
        "", "", frozenset({Role.VALUE}), lambda row, spec: row.times(adam=axis("kv_heads")), "", ""
    )
    if optimizer == "adam":
        assert troubles(wrong.of(table), sizes)["change logits @1"] == "explodes"


@pytest.mark.parametrize(
    "error", ["gain rate/m", "readout rate/m", "QK-norm gains' eps without the heads they sum over"]
)
def test_a_mistake_in_one_row_is_named_there_alone(error: str):
    sizes = ends("lm, QK-norm", "heads")
    trouble = troubles(WRONG[error].of(right("mup", sizes[0])), sizes)
    rows = {getattr(row, "value", row) for row in WRONG[error].rows}
    assert {name.split("/")[1].split(" ")[0] for name in trouble} == rows


def test_logits_that_vanish_faster_than_the_source_says_collapse():
    sizes = ends("lm", "head_dim")
    table = right("mup", sizes[0])
    assert "attention @0" not in troubles(table, sizes)
    for exponent in (-1.5, -0.25):
        trouble = troubles(dataclasses.replace(table, logits=N**exponent), sizes)
        assert trouble["attention @0"] == ("heads collapse" if exponent < -1 else "explodes")


@pytest.mark.parametrize("where", ["embed", "mlp", "head_dim", "layers"])
def test_a_wrong_base_of_one_axis_is_seen_at_the_base(where: str):
    sizes = ends("lm", "depth" if where == "layers" else "head_dim")
    table = right("depth-mup", sizes[0])
    assert table.base is not None
    wrong = dataclasses.replace(table, base={**table.base, where: 2 * table.base[where]})
    assert not troubles(table, sizes)
    roles = {"mlp": "movement/block.mlp_out @1", "head_dim": "gradient/block.query @0"}
    assert troubles(wrong, sizes)[roles.get(where, "movement/block.value @1")].startswith(
        "wrong base ("
    )

    def slopes(preset) -> dict[tuple[str, int], float]:
        expected: dict[tuple[str, int], Expected] = theory.of(preset, *sizes, "adam")
        return {key: one.slope for key, one in expected.items()}

    assert slopes(table) == slopes(wrong)  # which is why slopes cannot see it


@pytest.mark.parametrize("name", ["ntk", "hybrid"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_lazy_is_trouble_unless_it_is_asked_for_and_no_worse_than_the_source_says(
    name: str, optimizer: str
):
    sizes = ends("lm", "heads")
    table = right(name, sizes[0])
    assert set(troubles(table, sizes, optimizer).values()) == {"lazy"}
    assert not troubles(table, sizes, optimizer, ("lazy",))
    slower = Wrong(
        "lm",
        "heads",
        frozenset({Role.MLP_OUT}),
        lambda row, spec: row.times(adam=D**-0.25, sgd=D**-0.25),
        "",
        "",
    )
    assert troubles(slower.of(table), sizes, optimizer, ("lazy",)) == {
        "movement/block.mlp_out @1": "frozen"
    }


def test_a_table_whose_source_wants_no_lazy_limit_cannot_be_excused():
    sizes = ends("lm", "heads")
    lazy = WRONG["all rates/m"].of(right("mup", sizes[0]))
    assert set(troubles(lazy, sizes).values()) == {"lazy"}
    with pytest.raises(PresetError, match="mup wants no lazy limit"):
        troubles(lazy, sizes, accept=("lazy",))


def test_every_parameter_has_an_expectation_or_is_named():
    # A key's bias before a norm has a gradient by differences alone. Gains of a tied table whose
    # contact logit is no constant follow no power law. These are named, and nothing else.
    for model in MODELS:
        sizes = ends(model, "heads")
        for optimizer, name in (("adam", "mup"), ("sgd", "mup"), ("adam", "sp")):
            expected = theory.of(right(name, sizes[0]), *sizes, optimizer)
            unsaid = groups.not_judged(sizes[0].specs, expected)
            if name == "sp" and "tied" in model:
                assert {"gradient/norm_gain", "gradient/block.norm_gain/mlp_norm"} <= set(unsaid)
                assert all("norm_gain" in one for one in unsaid)
            else:
                differ = ("gradient/block.key.bias",) if model == "vit, QK-norm" else ()
                assert (
                    unsaid
                    == ("movement/block.key.bias",) * (optimizer == "sgd" and bool(differ)) + differ
                )


def test_control_a_parameter_of_a_role_without_a_theory_is_named():
    first, last = ends("lm", "heads")
    strange = {
        **first.specs,
        "block.mlp.up": dataclasses.replace(first.specs["block.mlp.up"], role=Role.HIDDEN),
    }
    first = dataclasses.replace(first, specs=strange)
    expected = theory.of(right("mup", first), first, last, "sgd")
    assert groups.not_judged(strange, expected) == (
        "movement/block.hidden",
        "gradient/block.hidden",
    )


def test_labels_tell_apart_what_a_group_has_several_of():
    labels = groups.labels(ends("lm, biases", "heads")[0].specs)
    assert labels["block.mlp.gate"] == "block.mlp_in/gate"
    assert labels["block.mlp.up_bias"] == "block.mlp_in.bias/up_bias"
    assert labels["block.mlp_norm.gain"] == "block.norm_gain/mlp_norm"
    assert labels["block.mlp.down"] == "block.mlp_out"
    assert len(set(labels.values())) == len(labels)


def test_the_committed_page_is_complete_and_every_right_preset_passes():
    rows = structures.rows_of_file()
    assert structures.markdown(rows) in structures.PAGE.read_text()
    expected = {
        (model, grow, name)
        for model in MODELS
        for grow, names in RIGHT.items()
        for name in names
        if not (name == "u-mup" and "tied" in model)
    }
    assert {(row["model"], row["grow"], row["preset"]) for row in rows} == expected
    assert [row["failed"] for row in rows if row["verdict"] != "pass"] == []
    assert json.loads(structures.RECORD.read_text())["command"] == structures.COMMAND


def test_a_rate_that_is_right_in_one_growth_and_wrong_in_another_passes_where_it_is_right():
    wrong = Wrong("lm", "heads", frozenset({Role.QUERY}), rate(N**-0.5), "", "")
    assert not troubles(wrong.of(right("mup", ends("lm", "heads")[0])), ends("lm", "heads"))
    trouble = troubles(wrong.of(right("mup", ends("lm", "head_dim")[0])), ends("lm", "head_dim"))
    assert trouble["movement/block.query @1"] == "frozen"
