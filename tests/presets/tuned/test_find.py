"""Tuned presets: the files' schema, finding one by its name, and the list of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mupax import presets
from mupax.presets import PresetError
from mupax.presets.tuned import find as tuned
from tests.fixtures.commands import command, output

pytestmark = pytest.mark.core

MINE = "depth-mup:mine-v1"
FILE = "depth-mup.mine-v1.json"
EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence" / "tuned"
BASE = {"embed": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "mlp": 160, "layers": 4}


def tuned_preset(**changes: Any) -> tuned.Tuned:
    """Return a tuned preset with constants of both kinds, studied from width 64 to 256."""
    interval = {"value": -7.0, "low": -7.1, "high": -6.9}
    fields: dict[str, Any] = {
        "name": "mine-v1",
        "preset": "depth-mup",
        "constants": {"alpha_l": 1.0, "c_a": 0.5},
        "form": None,
        "base": BASE,
        "optimizer": {
            "name": "adam", "peak_lr": 0.0078, "b1": 0.8, "b2": 0.99, "eps": 1e-12, "weight_decay": 0.0, "decay": "coupled",
            "momentum": 0.9, "clip_norm": None, "schedule": "linear", "warmup_fraction": 0.1, "final_lr_fraction": 0.05,
        },
        "provenance": {
            "recipe": "lm-tiny", "data": "python_corpus", "unit": "token", "seen": 409600, "steps": 200, "batch": 16,
            "sizes": [BASE, {**BASE, "embed": 256, "head_dim": 64, "mlp": 640}], "seeds": 3,
            "log2_lr": [-8.0, -7.0, -6.0], "loss": [2.1, 2.0, None], "log2_optimum": interval,
            "transfer": [{"axis": "head_dim", "sizes": [16, 64], "verdict": "transfers", "drift": {"value": 0.01, "low": -0.1, "high": 0.12}}],
            "versions": {"jax": "0.10.2"}, "command": "mupax transfer lm-tiny", "date": "2026-11-21",
        },
        **changes,
    }  # fmt: skip
    return tuned.Tuned(**fields)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuned.Tuned:
    """Saved where a user's own are."""
    monkeypatch.chdir(tmp_path)
    tuned.save(tuned_preset(), tuned.OWN_FOLDER / FILE)
    return tuned_preset()


def test_every_file_of_the_project_fits_the_schema():
    for path in (*tuned.FOLDER.glob("*.json"), *EVIDENCE.glob("*.json")):
        entry = tuned.load(path)
        assert path.name == f"{entry.preset}.{entry.name}.json"
        assert presets.get(f"{entry.preset}:{path}").base == entry.base
        optimum = entry.provenance["log2_optimum"]
        if search := entry.provenance.get("search"):  # over several constants, no rate by itself
            assert search["winner_less_start"]["high"] < 0, path.name
        else:
            assert optimum["low"] is not None, path.name
        assert entry.optimizer["peak_lr"] == pytest.approx(2 ** optimum["value"], rel=1e-3)


def test_what_drifts_or_rests_on_one_size_is_evidence_and_not_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """But for the preset of the first run."""
    shipped = {
        preset.use: preset.evidence for preset in map(tuned.load, tuned.FOLDER.glob("*.json"))
    }
    assert {use for use, evidence in shipped.items() if evidence in ("drifts", "one size")} == {
        "mup:lm-laptop-v2"
    }
    assert {preset.use for preset in map(tuned.load, EVIDENCE.glob("*.json"))} == set(tuned.MOVED)

    monkeypatch.chdir(tmp_path)
    for use in tuned.MOVED:
        file = f"{use.replace(':', '.')}.json"
        with pytest.raises(PresetError, match=rf"docs/evidence/tuned/{re.escape(file)}"):
            presets.get(use)
        (tmp_path / "tuned").mkdir(exist_ok=True)
        (tmp_path / "tuned" / file).write_bytes((EVIDENCE / file).read_bytes())
        assert tuned.find(use) == tuned.load(EVIDENCE / file)


def test_a_file_comes_back_as_it_was(mine: tuned.Tuned):
    assert tuned.find(MINE) == tuned.find(f"depth-mup:tuned/{FILE}") == mine
    assert tuned.files()[MINE].exists()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("name", "Mine", "name is 'Mine'; it must be small letters"),
        ("preset", "nup", "preset is 'nup'; it must be one of sp, mup"),
        ("constants", {"alpha_l": 2.0, "s": 1}, "depth-mup takes alpha_l"),
        ("form", "plane", "form is 'plane'; it must be one of plain"),
        ("base", {"width": 4}, "base is {'width': 4}; it must be logical axes (layers, embed"),
        ("optimizer.peak_lr", 0, "optimizer.peak_lr is 0; it must be a number above 0"),
        ("optimizer.peak_lr", True, "it must be a number above 0"),
        ("optimizer.peak_lr", float("nan"), "NaN is no number"),
        ("optimizer.peak_lr", 1e308, "it must be a number above 0"),
        ("provenance.steps", 10**20, "a whole number from 1 to"),
        ("optimizer.name", "rmsprop", "optimizer.name is 'rmsprop'; it must be one of adam"),
        ("optimizer.warmup_fraction", 50, "it must be a number from 0 to 1"),
        ("optimizer.lr", 1, "unknown ['lr']"),
        ("provenance.sizes", [], "provenance.sizes is []"),
        ("provenance.loss", [1.0], "as many as log2_lr, which has 3"),
        ("provenance.log2_optimum", {"value": 1}, "missing ['high', 'low']"),
        ("provenance.transfer", [{}], "missing ['axis'"),
        ("provenance.date", "today", "YYYY-MM-DD"),
        ("provenance", None, "missing ['provenance']"),
    ],
)
def test_a_file_that_is_none_says_where_and_what(
    mine: tuned.Tuned, at: str, value: Any, message: str
):
    path = tuned.OWN_FOLDER / FILE
    fields = json.loads(path.read_text())
    *owners, name = at.split(".")
    owner = fields[owners[0]] if owners else fields
    owner[name] = value
    if value is None:
        del owner[name]
    path.write_text(json.dumps(fields))
    with pytest.raises(PresetError, match=re.escape(message)) as error:
        tuned.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("depth-mup:yours", r"no tuned constants named 'yours'; write depth-mup, .*depth-mup:mine-v1"),
        (f"mup:tuned/{FILE}", "is tuned for depth-mup"),
        ("mup:broken.json", r"broken\.json: no tuned preset"),
    ],
)  # fmt: skip
def test_a_name_that_is_none(mine: tuned.Tuned, tmp_path: Path, word: str, message: str):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PresetError, match=message):
        tuned.find(word)


def test_a_preset_has_its_base_and_constants(mine: tuned.Tuned):
    preset = presets.get(MINE)
    assert (preset.name, preset.base) == ("depth-mup", BASE)
    assert preset.choices.items() >= {"alpha_l": 1.0, "c_a": 0.5}.items()
    other = presets.get(MINE, base={"embed": 8}, alpha_l=0.5)
    assert other.base == {"embed": 8}
    assert other.choices.items() >= {"alpha_l": 0.5, "c_a": 0.5}.items()


@pytest.mark.parametrize(
    ("written", "value", "low", "high", "evidence"),
    [
        ("transfers", 0.0, -0.31, 0.15, "undecided"),
        ("transfers", 0.0, -0.16, 0.15, "transfers"),
        ("transfers", 0.28, 0.14, 0.41, "undecided"),
        ("transfers", 0.28, 0.16, 0.41, "drifts"),
        ("undecided", 0.1, -0.01, 0.2, "undecided"),  # an end may have no optimum
        ("undecided", None, None, None, "undecided"),
        ("drifts", 0.5, 0.17, 0.77, "drifts"),
        ("drifts", 0.5, 0.11, 1.48, "undecided"),
        ("undecided", -0.5, -0.77, -0.17, "drifts"),
    ],
)
def test_the_evidence_follows_from_the_drift_and_not_from_an_older_verdict(
    written: str, value: float | None, low: float | None, high: float | None, evidence: str
):
    drift = {"value": value, "low": low, "high": high}
    grown = {"axis": "heads", "sizes": [2, 4], "verdict": written, "drift": drift}
    study = tuned_preset().provenance
    transfer = [*study["transfer"], grown]
    assert tuned_preset(provenance={**study, "transfer": transfer}).evidence == evidence
    assert tuned_preset(provenance={**study, "transfer": []}).evidence == "one size"


def listed(use: str = MINE) -> str:
    """Return the line of a tuned preset in the list of all of them."""
    lines = output("presets tuned").splitlines()
    (line,) = (line for line in lines if line.startswith(use))
    return " ".join(line.split())


def test_the_list(mine: tuned.Tuned):
    assert listed().startswith(
        f"{MINE} project, tuned/{FILE} adam 0.0078 on python_corpus, 409,600 tokens; head_dim transfers"
    )
    shown = output("presets tuned", MINE)
    assert shown.startswith(f"{MINE}, transfers: adam 0.0078")
    assert "2^-6 diverged" in shown
    assert "mupax transfer lm-tiny" in shown
    assert json.loads(output("presets tuned", MINE, "--json"))["base"] == BASE
    assert command("presets tuned mup:none").code == 2


def test_one_in_the_users_own_folder_is_found_from_any_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MUPAX_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "mupax" / "tuned"
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    with pytest.raises(PresetError) as error:
        tuned.find(MINE)
    for place in (str(folder), str(project / "tuned"), FILE):
        assert place in str(error.value)

    tuned.save(tuned_preset(), folder / FILE)
    assert tuned.find(MINE) == tuned_preset()
    assert f"{MINE} user, {folder / FILE}" in listed()

    # The project's own goes before it, and what is no tuned preset hides nothing.
    faster = {**tuned_preset().optimizer, "peak_lr": 0.5}
    tuned.save(tuned_preset(optimizer=faster), Path("tuned", FILE))
    assert tuned.find(MINE).optimizer["peak_lr"] == 0.5
    for name in ("tune.json", ".mup.hidden.json"):
        Path("tuned", name).write_text("{}")
    assert "project" in listed()
    Path("tuned", "mup.broken.json").write_text("{}")
    done = command("presets tuned --json")
    assert done.code == 2
    assert "mup.broken.json" in done.err
    paths = {f"{entry['preset']}:{entry['name']}": entry["path"] for entry in json.loads(done.out)}
    assert paths[MINE] == f"tuned/{FILE}"
    shipped = [*tuned.FOLDER.glob("*.json"), *tuned.PUBLISHED.glob("*.json")]
    assert len(paths) == 1 + len(shipped)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.user_folder() == tmp_path / ".config" / "mupax" / "tuned"
