"""The model card of `export`: licence, evaluation at the step, and study of a tuned preset."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from huggingface_hub import ModelCard

from mupax.train.reuse import trained
from mupax.train.reuse.huggingface import licences
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.train.reuse.commands import call, rows_with, succeed

__all__ = ["one_device", "shared_programs"]  # fixtures

STUDY = "mup:lm-python-v1"
TRAIN = (
    "train lm-tiny --data.name text:secret/text.txt --model.width 32 --model.depth 1 "
    "--model.num-heads 2 --model.seq-len 16 --data.batch-size 16 --data.eval-examples 16 "
    "--data.eval-batch-size 16 --checkpoint.every-steps 2 --log.eval-every-steps 2 "
    f"--log.no-samples --log.no-tensorboard --steps 3 --preset {STUDY} --workdir"
)


@pytest.fixture(scope="module", autouse=True)
def folder(
    tmp_path_factory: pytest.TempPathFactory, one_device: None, shared_programs: None
) -> Iterator[Path]:
    """Return the current folder, with a run `tuned` under a tuned preset, and a run `other`.

    `other` has another learning rate and a moving average.
    """
    path = tmp_path_factory.mktemp("card")
    (path / "secret").mkdir()
    text = "def value(self): return self._value  # as it was\n" * 200
    (path / "secret" / "text.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        succeed(TRAIN, "tuned")
        succeed(TRAIN, "other --optimizer.peak-lr 0.001 --ema.decay 0.9")
        yield path


def card(run: str, words: str = "") -> str:
    """Export a run and return its model card."""
    out = f"out{len(os.listdir())}"
    printed = succeed("export", run, "--out", out, words).out
    assert ("the model card states no licence" in printed) == ("--licence" not in words)
    return Path(out, "README.md").read_text()


@functools.cache
def card_of_tuned() -> str:
    return card("tuned")


def test_the_evaluation_is_of_the_step_that_is_exported() -> None:
    rows = {row["step"]: row for row in rows_with("eval_loss", "tuned")}
    assert rows[2]["eval_loss"] != rows[3]["eval_loss"]
    for text, step in (
        (card("tuned", "--step 2"), 2),
        (card("tuned", "--step 3"), 3),
        (card("tuned/checkpoints/2"), 2),
        (card("tuned/checkpoints"), 3),
        (card_of_tuned(), 3),
    ):
        loss = f"Evaluation loss {rows[step]['eval_loss']:.4f} nats a token"
        accuracy = f"accuracy {100 * rows[step]['eval_accuracy']:.2f} % of next tokens"
        assert f"{loss}, {accuracy}" in text
        assert "moving average" not in text


def test_of_a_moving_average_it_is_said_and_without_a_row_that_there_is_none() -> None:
    caveat = "Measured on the moving average of the weights, which these are not."
    assert caveat in card("other", "--no-ema")
    assert caveat not in card("other")
    path = Path("other", "metrics.jsonl")
    rows = path.read_text()
    for left in (rows.replace('"eval_loss"', '"lost"'), ""):
        path.write_text(left)
        assert "The run recorded no evaluation at this step." in card("other")
    path.unlink()
    text = card("other")
    assert "The run recorded no evaluation at this step." in text
    assert "## Tuned preset" not in text, "the control: its rate is not the study's"


@pytest.mark.parametrize(("flags", "part"), [("", "ema"), ("--no-ema", "params")])
@pytest.mark.parametrize("command", ["export", "import"])
def test_the_moving_average_is_written_as_evaluations_read_it(
    command: str, flags: str, part: Literal["ema", "params"]
) -> None:
    """And the parameters themselves by a flag."""
    out = f"{command}-averaged{flags}"
    printed = " ".join(succeed(command, "other", "--out", out, flags).out.split())
    assert ("--no-ema writes the parameters themselves" in printed) == (part == "ema")
    exported = trained.describe(Path(out)).plain_weights().params
    run = trained.describe(Path("other"))
    for name, values in run.plain_weights(part).params.items():
        np.testing.assert_allclose(exported[name], values, atol=1e-6, err_msg=name)
    other_part = run.plain_weights("params" if part == "ema" else "ema").params
    assert any(not np.allclose(exported[name], other_part[name], atol=1e-6) for name in exported)


def test_a_tuned_preset_has_its_study_in_the_card(folder: Path) -> None:
    text = card_of_tuned()
    section = text.partition("## Tuned preset")[2].partition("##")[0]
    out = " ".join(succeed("presets tuned", STUDY).out.split())
    assert f"`{STUDY}`" in section
    assert "- evidence: undecided" in section
    for line in section.splitlines():
        if line.startswith("- grown in "):
            assert "octaves per doubling" in line
            assert line.removeprefix("- grown in ") in out
        if line.startswith("- best rate"):
            assert line.partition("base: ")[2] in out
    study = "lm-tiny on python_corpus, 200 steps of 16, 409,600 tokens a run, 2026-11-21"
    assert f"- study: {study}" in section
    assert "doublings beyond the sizes studied" in section
    assert str(folder) not in text
    assert "secret" not in text


def test_a_licence_is_in_header_and_text_or_it_is_said_that_there_is_none() -> None:
    without = card_of_tuned()
    assert "license:" not in without
    none = "whoever wrote this card gave none, and it grants no right to use these weights."
    assert f"None is stated: {none}" in without
    for typed, identifier in {
        "Apache-2.0": "apache-2.0",
        "GPL-3.0-or-later": "gpl-3.0",
        "LLAMA3.1": "llama3.1",
    }.items():
        text = card("tuned", f"--licence {typed}")
        header: Any = ModelCard(text).data
        assert header.license == identifier
        assert header.library_name == "transformers"
        assert header.tags == ["mupax"]
        assert f"`{identifier}`, as whoever wrote this card says." in text
        assert "None is stated" not in text


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("apache", "did you mean apache-2.0"),
        (
            "Apache-2.O",
            "--licence Apache-2.O: no licence has this identifier at Hugging Face; "
            "did you mean apache-2.0",
        ),
        ("cc-by-4", "did you mean cc-by-4.0"),
        ("other", "no licence has this identifier at Hugging Face"),
        ("😀", "write such as apache-2.0, mit or cc-by-4.0"),
    ],
)
def test_an_unknown_licence_is_refused_with_the_nearest_before_anything_is_written(
    typed: str, message: str
) -> None:
    code, _, err = call("export tuned --out refused --licence", typed)
    assert code == 2
    assert message in err
    assert not Path("refused").exists()


def test_identifiers_are_sorted_and_small() -> None:
    names = licences.IDENTIFIERS
    assert list(names) == sorted(set(names))
    assert all(name == licences.identifier(name.upper()) for name in names)
