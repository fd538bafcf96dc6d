"""`mupax plan` of a model without a study: the best evidence that applies, and its command."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from mupax.__main__ import main
from mupax.presets.tuned import find
from mupax.train.config.cli import parse, recipe
from mupax.train.studies.tables import evidence
from mupax.train.studies.tables import evidence as stored
from mupax.zoo.configs import CONFIGS
from scripts.pages import which_settings


def test_the_page_is_made_of_the_evidence() -> None:
    assert which_settings.PAGE.read_text() == which_settings.page(), (
        "write it again: python -m scripts.pages.which_settings"
    )


@pytest.mark.parametrize(
    ("name", "tokens", "kind"),
    [
        ("lm-proxy", 4e5, "measured here"),
        ("gpt2-medium", 1e10, "published law"),
        ("lm-1b", 2e10, "published law"),
        ("vit-s16", 1e8, "published constants"),
        ("lm-8b", 1e12, "published constants"),
    ],
)
def test_the_best_evidence_that_applies_comes_first(name: str, tokens: float, kind: str) -> None:
    every = evidence.candidates_for(CONFIGS[name], tokens)
    assert every[0].kind == kind
    assert every[0].applies
    assert all(other.doublings > find.FAR for other in every if not other.applies)


@pytest.mark.parametrize("name", ["t5-base", "lm-30b-a3b"])
def test_no_evidence_is_taken_from_another_kind_of_model(name: str) -> None:
    assert evidence.candidates_for(CONFIGS[name], 1e10) == []


def test_constants_that_a_tied_readout_cannot_have_are_not_recommended() -> None:
    """Those of nanochat are in the plain form, in which a run with GPT-2's tied table is refused."""
    tied, untied = CONFIGS["gpt2"], dataclasses.replace(CONFIGS["gpt2"], tied=False)
    presets_of = {
        model.tied: {other.preset for other in evidence.candidates_for(model, 1e8)}
        for model in (tied, untied)
    }
    assert "mup:nanochat" not in presets_of[True]
    assert "mup:nanochat" in presets_of[False]


def test_the_law_is_the_one_that_was_stored() -> None:
    model = CONFIGS["gpt2-medium"]
    law = next(
        other for other in evidence.candidates_for(model, 1e10) if other.kind == "published law"
    )
    best = stored.load().best({"parameters": evidence.body_parameters(model), "tokens": 1e10})
    assert best.peak_lr is not None
    assert best.batch_sequences is not None
    assert law.peak_lr == best.peak_lr.value
    assert law.batch == pytest.approx(best.batch_sequences.value * 2048 / model.units)
    assert law.loss == best.loss


@pytest.mark.parametrize("name", ["lm-proxy", "gpt2-medium", "vit-s16"])
def test_the_command_trains_what_is_printed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", name, "--tokens", "100m", "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    content = json.loads(out.read_text())
    best = content["evidence"][0]
    interval = "no interval is known"
    if best["rate_interval"] is not None:
        # Quantiles of the published law, and two-sided intervals of a study.
        level = {"measured here": 95, "published law": 90}[best["kind"]]
        interval = f"{level} %: "
    assert f"a peak rate of {best['peak_lr']:.3g} ({interval}" in output
    _, _, name_of_recipe, *flags = shlex.split(content["command"])
    config = parse(name_of_recipe, recipe(name_of_recipe), flags).config
    assert config.optimizer.peak_lr == pytest.approx(best["peak_lr"], rel=0.01)
    assert config.steps * config.data.batch_size * config.model.units == pytest.approx(1e8, rel=0.1)


def test_every_rate_has_the_optimizer_that_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "lm-proxy", "--tokens", "2m"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "a peak rate of 0.0552 (no interval is known) for muon" in first
    rates = {}
    for evidence_kind in ("measured here", "published constants", "published law"):
        (row,) = [line for line in lines if line.strip().startswith(evidence_kind)]
        rates[evidence_kind] = re.split(r"\s{2,}", row.strip())[2:4]
    assert rates["measured here"] == ["muon", "0.0552"]
    assert {optimizer for optimizer, _ in rates.values()} == {"muon", "adamw"}


def test_the_evidence_is_readable_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--model", "lm-tiny", "--tokens", "100m"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # Three tables with the kinds of evidence, and remarks of several words a line.
    assert sum(line.startswith(" evidence  ") for line in lines) == 3
    assert len(lines) < 40


def test_a_recipe_and_a_model_of_one_name_are_told_apart_on_the_first_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    firsts = {}
    for words in ("lm-8b", "--model lm-8b", "gpt2"):
        assert main(["plan", *words.split(), "--tokens", "160b"]) == 0
        firsts[words] = capsys.readouterr().out.splitlines()[0]
    assert firsts["lm-8b"].startswith("recipe lm-8b (`--model lm-8b --tokens N` alone plans the")
    assert firsts["--model lm-8b"].startswith("model lm-8b, 1.6e+11 tokens: a peak rate of 0.001")
    assert "`mupax plan lm-8b` plans the recipe lm-8b" in firsts["--model lm-8b"]
    assert "recipe" not in firsts["gpt2"]  # the control: only a model has this name
