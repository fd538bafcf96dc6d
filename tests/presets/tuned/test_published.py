"""Published tuned presets: every number of their tables is that of the source's own rule, at every size that the source has."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mupax import presets
from mupax.presets.constants import COLUMNS
from mupax.presets.rule import names
from mupax.presets.tuned import find, published
from tests.fixtures.commands import command, output
from tests.fixtures.published_sources import SOURCES, Table

pytestmark = pytest.mark.core

SAME = 1e-9
"""Relative difference of numbers that are equal but for rounding."""


def faults(tuned: find.Tuned, preset: presets.Preset, table: Table) -> list[str]:
    """Return every number of a model that is not the source's."""
    wrong: list[str] = []
    sizes = table.config.sizes()

    def compare(name: str, own: float, theirs: float | None) -> None:
        if theirs is not None and not math.isclose(own, theirs, rel_tol=SAME, abs_tol=1e-300):
            wrong.append(f"{tuned.use}, {table.model}, {name}: {own:.8g} and not {theirs:.8g}")

    specs = {spec.group: spec for spec in table.config.parameters().values()}
    # The class token of images, which one source starts at 0, may be missing.
    assert specs.keys() - table.groups.keys() <= {"token_embedding"}, tuned.use
    for group in specs.keys() & table.groups.keys():
        own = published.values(tuned, preset, specs[group], sizes)
        for column, theirs in table.groups[group].items():
            compare(f"{group} {column}", own[column], theirs)
    compare("logits", preset.logit_scale(sizes), table.logits)
    compare("branch", preset.residual_scale(sizes, 0, "mlp")[1], table.branch)
    if table.tied_readout is not None:
        assert table.config.tied_readout is not None
        # The readout multiplies the embedding's table as the embedding's own multiplier has left it.
        readout, token = (
            preset.scales(spec, sizes, tuned.optimizer["name"]).multiplier
            for spec in (table.config.tied_readout, specs["token_embedding"])
        )
        compare("tied readout", readout * token, table.tied_readout)  # pyright: ignore
    return wrong


def test_every_published_preset_is_here_and_at_least_ten() -> None:
    uses = {path.stem.replace(".", ":", 1) for path in find.PUBLISHED.glob("*.json")}
    assert uses == set(SOURCES)
    assert len(uses) >= 10


@pytest.mark.parametrize("use", SOURCES)
def test_the_table_is_the_sources_at_each_of_its_sizes(use: str) -> None:
    tuned = find.find(use)
    preset = presets.get(use)
    assert tuned.evidence == "published"
    tables = SOURCES[use]()
    assert [table.model for table in tables] == [
        entry["model"] for entry in tuned.provenance["tables"]
    ]
    for table in tables:
        assert faults(tuned, preset, table) == []


@pytest.mark.parametrize("use", SOURCES)
def test_the_file_says_what_the_sources_rule_gives(use: str) -> None:
    for entry, table in zip(find.find(use).provenance["tables"], SOURCES[use](), strict=True):
        assert entry["sizes"] == table.config.base_sizes()
        for group, numbers in entry["groups"].items():
            assert numbers == table.groups[group]
        assert (entry["logits"], entry["branch"]) == pytest.approx(
            (table.logits, table.branch), rel=SAME
        )
        assert entry["tied_readout"] == table.tied_readout


@pytest.mark.parametrize("use", SOURCES)
def test_control_a_changed_constant_is_a_difference(use: str) -> None:
    tuned = find.find(use)
    tables = SOURCES[use]()
    read: set[str] = set()
    for table in tables:
        tied = [table.config.tied_readout] if table.config.tied_readout else []
        for spec in (*table.config.parameters().values(), *tied):
            if spec.tied or any(
                number is not None for number in table.groups.get(spec.group, {}).values()
            ):
                read |= {f"{column}.{name}" for column in COLUMNS for name in names(spec)}
    unread = {"stds.readout"} if tables[0].config.tied_readout else set()
    if use == "sp:deit":
        unread.add("stds.patch_embedding")  # which the source leaves to a library
    read = read - unread | {"c_a", "decay_width"}
    for name in tuned.constants.keys() & read:
        changed: dict[str, Any] = {name: float(tuned.constants[name]) * 1.5 or 0.25}
        preset = presets.get(use, **changed)
        assert any(faults(tuned, preset, table) for table in tables), name


@pytest.mark.parametrize("use", [use for use, tables in SOURCES.items() if len(tables()) > 1])
def test_control_without_its_powers_of_sizes_a_source_of_several_sizes_differs(use: str) -> None:
    tuned = find.find(use)
    powers: dict[str, Any] = {name: 0.0 for name in tuned.constants if "^" in name}
    preset = presets.get(use, **powers)
    differs = any(faults(tuned, preset, table) for table in SOURCES[use]())
    assert differs == bool(powers)
    other_rule = presets.get("mup" if tuned.preset == "sp" else "sp", base=tuned.base)
    assert all(faults(tuned, other_rule, table) for table in SOURCES[use]())


def test_another_model_gets_what_applies_to_it() -> None:
    """It has no positions, a gate, grouped queries and a wide MLP, and Adam's eps is the source's one number for all of it."""
    words = "presets table mup:cerebras-gpt --model lm-1b --optimizer adamw --absolute --json"
    rows = {row["group"]: row for row in json.loads(output(words))}
    assert "position" not in rows
    for group, row in rows.items():
        if group.startswith("block.") and "gain" not in group:
            assert row["lr"] == pytest.approx(256 / 2048), group
        if group != "readout":
            assert row["eps"] == pytest.approx(1), group
    assert rows["block.mlp_out"]["init_std"] == pytest.approx(0.08 * (1024 / 8192 / 32) ** 0.5)
    # The control: constants of a preset that was measured here mean something else.
    own = command("presets table mup:lm-heads-v1 --model gpt2")
    assert own.code == 2
    assert "a tied readout has only a multiplier" in own.err
    # What the command line names is not left out.
    named = command(words, "--preset.stds.position 2")
    assert named.code == 2
    assert "stds.position" in named.err


def test_the_list_groups_what_was_measured_here_and_what_others_published() -> None:
    text = output("presets tuned")
    order = ("measured here", "mup:lm-laptop-v2", "published", "mup:cerebras-gpt")
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    shown = output("presets tuned mup:cerebras-gpt")
    commit = "f1fd1e091dc67917b91ec213ecd63e48fd144477"
    for words in ("verified", "111m_mup.yaml", commit, "The Pile", "not known"):
        assert words in shown
    tuned = json.loads(output("presets tuned mup:cerebras-gpt --json"))
    assert tuned["provenance"]["evidence"] == "published"
