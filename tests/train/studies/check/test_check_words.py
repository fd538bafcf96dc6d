"""Words of the coordinate check, its dry run, models of other kinds, and the committed table."""

from __future__ import annotations

import dataclasses
import re
import runpy

import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check
from mupax.train.studies.check.judge import Finding
from mupax.train.studies.check.theory import Expected
from mupax.train.studies.desiderata import command as desiderata
from mupax.train.studies.sweep import sweep
from mupax.zoo import configs
from mupax.zoo.definition import definition
from scripts import ROOT, harness
from scripts.check import theory_and_measurement


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "lm-prxy"], "lm-proxy"),
        (["check", "--preset", "mupp"], "mup"),
        (["check", "--grow", "deepness"], "depth"),
        (["check", "--sizes", "1"], "--sizes"),
        (["check", "--sizes", "2"], "--sizes 3"),
        (["check", "--grow", "mlp"], "mlp x8"),
        (["check", "lm-proxy", "--model.experts", "4", "--grow", "mlp"], "write expert_dim"),
        (["check", "lm-proxy", "--grow", "expert_dim"], "no experts, so no expert_dim"),
        (["check", "--grow", "kv_heads", "--optimizer", "sgd"], "kv_heads x8"),
    ],
)
def test_bad_words_get_one_message(words, message, capsys):
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 10


@pytest.mark.core
def test_a_dry_run_has_the_size_that_grows(capsys):
    words = "--model.experts 4 --model.active-experts 1 --model.expert-dim 64 --grow experts"
    assert main(["check", "lm-proxy", "--dry-run", *words.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("width ")]
    sizes = ["experts 4, active 1", "experts 8, active 2", "experts 16, active 4"]
    for line, text in zip(lines, sizes, strict=False):
        assert line.endswith(text)
    assert len(lines) == 4


def test_a_dry_run_of_key_heads_foretells_what_the_check_measures(capsys):
    # The measured change of logits goes as the key heads to +0.02.
    assert main(["check", "lm-proxy", "--preset", "mup", "--grow", "kv_heads", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "change logits after 1: theory says +0.00\n" in out
    assert "explodes" not in out
    # The control: a size of which an output does grow by theory.
    assert main(["check", "lm-proxy", "--preset", "sp", "--grow", "heads", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"change logits after 1: theory says \+[\d.]+, explodes", out)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("lm-tiny", "lm-tiny: vocabulary 256, context 128, width 64 to 256, depth 2"),
        (
            "lm-tiny --model.vocab-size 65536",
            "lm-tiny: vocabulary 65,536, context 16, width 64 to 256, depth 2; "
            "context 16 in place of 128 (--model.seq-len 128 keeps it)",
        ),
        (
            "gpt2",
            "vocabulary 32768 in place of 50257 (--model.vocab-size 50257 keeps it); "
            "context 64 in place of 1024 (--model.seq-len 1024 keeps it)",
        ),
        ("vit-s16", "image size 8 in place of 224 (--model.image-size 224 keeps it)"),
    ],
)
def test_the_first_line_says_what_was_made_smaller(words, line, capsys):
    assert main(["check", *words.split(), "--preset", "mup", "--sizes", "3", "--dry-run"]) == 0
    assert line in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("lm-tiny", "mupax sweep lm-tiny --lr 0.001:0.064:7"),
        (
            "lm-proxy --constant c_a=2 --optimizer sgd --model.qk-norm",
            "mupax sweep lm-tiny --model lm-proxy --preset mup --model.qk-norm "
            "--preset.constants c_a=2 --optimizer.name sgd --lr 0.1:6.4:7",
        ),
        (
            "vit-proxy",
            "mupax sweep vit-digits --model vit-proxy --preset mup --lr 0.000375:0.024:7",
        ),
        ("vit-s16", None),  # no small recipe has images of this size
        ("lm-laptop --preset depth-mup", None),  # the check left the recipe's constants out
    ],
)
def test_the_command_after_a_check_that_passes_runs_as_printed(words, command, monkeypatch, capsys):
    passing = Finding("update query", 1, 0.0, 0.0, 0.0, (1.0, 1.0), Expected(0.0, 0.1, 0.1))
    monkeypatch.setattr(check, "study", lambda *args: [passing])
    assert main(["check", *words.split(), "--sizes", "3"]) == 0
    printed = re.findall("^next: (.*) finds the learning rate", capsys.readouterr().out, re.M)
    assert printed == [command] * (command is not None)
    for line in printed:
        assert main([*line.split()[1:], "--dry-run"]) == 0
        assert "7 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "limits", "compare"),
    [
        ("lm-proxy --preset sp", "sp", "sp mup depth-mup completep"),
        (
            "lm-proxy --preset sp --optimizer sgd",
            "sp --optimizer sgd",
            "sp mup depth-mup completep --optimizer sgd",
        ),
        (
            "lm-proxy --constant embedding_width=-0.5 --alpha-a 0.5",
            "mup --preset.constants alpha_a=0.5 embedding_width=-0.5",
            "mup depth-mup completep",
        ),
        (
            "lm-laptop",
            "mup --optimizer muon --preset.constants c_a=0.25",
            "mup depth-mup completep --optimizer muon",
        ),
        (
            "lm-proxy --model.experts 4 --grow experts --preset sp",
            "sp --experts",
            "sp mup depth-mup completep",
        ),
    ],
)
def test_the_commands_after_a_check_of_a_bad_table_are_about_this_table_and_run_as_printed(
    words, limits, compare, monkeypatch, capsys
):
    explodes = Expected(1.0, 0.1, 0.1, "explodes", ("query",))
    finding = Finding("update query", 1, 1.0, 1.0, 1.0, (1.0, 2.0), explodes)
    monkeypatch.setattr(check, "study", lambda *args: [finding])
    assert main(["check", *words.split(), "--sizes", "3"]) == 1
    commands = re.findall(r"mupax (presets .*?) (?:says|which)", capsys.readouterr().out)
    assert commands == [f"presets limits {limits}", f"presets compare {compare}"]
    for line in commands:
        assert main(line.split()) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check lm-proxy --json .", "cannot write --json .: it is a folder; write the path of"),
        ("check lm-proxy --desiderata --json .", "cannot write --json .: it is a folder"),
        ("check lm-proxy --figure a.xyz", "--figure a.xyz ends in .xyz, and no picture does"),
        (
            "check lm-proxy --figure-panels file/a.png",
            "--figure-panels file/a.png: its folder cannot be made",
        ),
        ("sweep lm-tiny --lr 2^-7 --json .", "cannot write --json .: it is a folder"),
        ("tune lm-tiny --over lr --json .", "cannot write --json .: it is a folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    words, message, tmp_path, monkeypatch, capsys
):
    """The exit code of the check would say that the preset is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for module, function in (
        (check, "study"),
        (desiderata, "measured"),
        (sweep, "engine"),
    ):
        monkeypatch.setattr(module, function, lambda *_, **__: pytest.fail("it began"))
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_check_makes_the_folders_of_its_files(monkeypatch, tmp_path):
    passing = Finding("update query", 1, 0.0, 0.0, 0.0, (1.0, 1.0), Expected(0.0, 0.1, 0.1))
    monkeypatch.setattr(check, "study", lambda *args: [passing])
    path = tmp_path / "new" / "a.json"
    assert main(["check", "lm-proxy", "--sizes", "3", "--json", str(path)]) == 0
    assert path.exists()


def test_python_refuses_what_two_sizes_cannot_decide():
    models = [definition(config) for config in check.grow(configs.get("lm-proxy"), "heads", 2)]
    adam = OptimizerConfig(name="adam", peak_lr=1e-3, schedule="constant")
    mup = presets.get("mup", base=models[0].sizes)
    for few in (models[:1], models):
        with pytest.raises(presets.PresetError, match="give study"):
            check.study(few, mup, adam, {})


def test_a_model_from_outside_the_zoo_passes():
    example = runpy.run_path(str(ROOT / "docs" / "howto" / "mixer.py"))
    assert example["main"]()


@pytest.mark.core
def test_the_committed_table_has_every_preset_and_nothing_against_theory():
    record = ROOT / "docs" / "evidence" / "theory-and-measurement.json.gz"
    rows = harness.read_record(record)["studies"]
    page = (ROOT / "docs" / "evidence" / "checks.md").read_text()
    assert {row["preset"] for row in rows} == set(presets.PRESETS)
    observables = [observable for row in rows for observable in row["observables"]]
    assert not any(o["verdict"].startswith(("contradicts", "zero")) for o in observables)
    shown = 0
    for o in observables:
        interval = f"[{o['low']:+.2f}, {o['high']:+.2f}]"
        shown += f"| {o['predicted']:+.2f}: {o['slope']:+.2f} {interval} |" in page
    assert shown > 100, "cells of the page's tables"
    assert theory_and_measurement.markdown(rows) in page, "write the section again"


def test_a_verdict_without_a_meaning_is_counted_on_the_page():
    frozen = {"observable": "attention", "step": 0, "predicted": -0.5, "ok": False}
    frozen |= {"slope": None, "low": None, "high": None, "verdict": "frozen"}
    rows = [{"preset": "mup", "grow": "heads", "observables": [frozen]}]
    page = theory_and_measurement.markdown(rows)
    assert "faults of a preset that theory predicts: 0 explode, 1 frozen." in page
    assert "| `mup` | -0.50: frozen |" in page


def test_an_encoder_decoder_grows() -> None:
    # `check ed-tiny --preset mup --grow heads --sizes 3 --seeds 2` has all 104 observables as
    # predicted.
    model = dataclasses.replace(configs.get("ed-tiny"), encoder_depth=5)  # pyright: ignore
    small, large = check.grow(model, "heads", 2)
    assert small.sizes()["encoder_layers"] == 2
    assert large.sizes()["memory"] == 2 * small.sizes()["memory"]
    batch = check.batch(small)
    shapes = {name: field.shape for name, field in small.example().items()}
    assert {name: array.shape[1:] for name, array in batch.items()} == shapes
    assert batch["input_mask"].any(axis=1).all()
