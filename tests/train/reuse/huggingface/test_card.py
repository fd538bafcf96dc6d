"""The model card of `export`: its licence, what the run's evaluation measured at the step, and the study of a tuned preset."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mupax.__main__ import main
from mupax.train.reuse.huggingface import licences

TINY = (
    "lm-tiny --data.name text:secret/text.txt --model.width 32 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-examples 16 --data.eval-batch-size 16 --checkpoint.every-steps 2 --log.eval-every-steps 2 --log.no-samples --steps 3"
)
STUDY = "mup:lm-python-v1"


def called(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), " ".join(err.getvalue().split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run under a tuned preset, one whose rate is another, and one with a moving average."""
    path = tmp_path_factory.mktemp("card")
    (path / "secret").mkdir()
    (path / "secret" / "text.txt").write_text(
        "def value(self): return self._value  # as it was\n" * 200
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        for name, words in {
            "tuned": ["--preset", STUDY],
            "other": ["--preset", STUDY, "--optimizer.peak-lr", "0.001", "--ema.decay", "0.9"],
        }.items():
            code, _, err = called("train", *TINY.split(), *words, "--workdir", name)
            assert code == 0, err
        yield path


def card(run: str, *words: str) -> str:
    out = f"out{len(os.listdir())}"
    code, output, err = called("export", run, "--out", out, *words)
    assert code == 0, err
    assert ("the model card states no licence" in output) == ("--licence" not in words)
    return Path(out, "README.md").read_text()


def row(run: str, step: int) -> dict[str, float]:
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return next(row for row in rows if "eval_loss" in row and row["step"] == step)


def test_the_evaluation_is_of_the_step_that_is_exported(folder: Path) -> None:
    texts = {step: card("tuned", "--step", str(step)) for step in (2, 3)}
    for step, text in texts.items():
        loss, accuracy = row("tuned", step)["eval_loss"], row("tuned", step)["eval_accuracy"]
        assert (
            f"Evaluation loss {loss:.4f} nats a token, accuracy {100 * accuracy:.2f} % of next tokens"
            in text
        )
        assert "moving average" not in text
    assert row("tuned", 2)["eval_loss"] != row("tuned", 3)["eval_loss"]
    loss = f"Evaluation loss {row('tuned', 2)['eval_loss']:.4f}"
    assert [
        loss in card(path) for path in ("tuned/checkpoints/2", "tuned/checkpoints", "tuned")
    ] == [
        True,
        False,
        False,
    ]


def test_of_a_moving_average_it_is_said_and_without_a_row_that_there_is_none(folder: Path) -> None:
    assert "Measured on the moving average of the weights, which these are not." in card("other")
    path = Path("other", "metrics.jsonl")
    rows = path.read_text()
    for left in (rows.replace('"eval_loss"', '"lost"'), ""):
        path.write_text(left)
        assert "The run recorded no evaluation at this step." in card("other")
    path.unlink()
    assert "The run recorded no evaluation at this step." in card("other")
    path.write_text(rows)


def test_a_tuned_preset_has_its_study_in_the_card(folder: Path) -> None:
    text = card("tuned")
    section = text.partition("## Tuned preset")[2].partition("##")[0]
    code, out, _ = called("presets", "tuned", STUDY)
    assert code == 0
    out = " ".join(out.split())
    assert f"`{STUDY}`" in section
    assert "- evidence: undecided" in section
    for line in section.splitlines():
        if line.startswith("- grown in "):
            assert "octaves per doubling" in line
            assert line.removeprefix("- grown in ") in out
        if line.startswith("- best rate"):
            assert line.partition("base: ")[2] in out
    assert (
        "- study: lm-tiny on python_corpus, 200 steps of 16, 409,600 tokens a run, 2026-11-21"
        in section
    )
    assert "doublings beyond the sizes studied" in section
    assert str(folder) not in text
    assert "secret" not in text
    assert "## Tuned preset" not in card("other"), "the control: its rate is not the study's"


def test_a_licence_is_in_header_and_text_or_it_is_said_that_there_is_none(folder: Path) -> None:
    without = card("tuned")
    assert "license:" not in without
    assert (
        "None is stated: whoever wrote this card gave none, and it grants no right to use these weights."
        in without
    )
    for typed, identifier in {
        "Apache-2.0": "apache-2.0",
        "GPL-3.0-or-later": "gpl-3.0",
        "LLAMA3.1": "llama3.1",
    }.items():
        text = card("tuned", "--licence", typed)
        header = ModelCard(text).data
        assert (header.license, header.library_name, header.tags) == (
            identifier,
            "transformers",
            ["mupax"],
        )
        assert f"`{identifier}`, as whoever wrote this card says." in text
        assert "None is stated" not in text


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("apache", "did you mean apache-2.0"),
        (
            "Apache-2.O",
            "--licence Apache-2.O: no licence has this identifier at Hugging Face; did you mean apache-2.0",
        ),
        ("cc-by-4", "did you mean cc-by-4.0"),
        ("other", "no licence has this identifier at Hugging Face"),
        ("😀", "write such as apache-2.0, mit or cc-by-4.0"),
    ],
)
def test_an_unknown_licence_is_refused_with_the_nearest_before_anything_is_written(
    folder: Path, typed: str, message: str
) -> None:
    code, _, err = called("export", "tuned", "--out", "refused", "--licence", typed)
    assert (code, message in err, Path("refused").exists()) == (2, True, False), err


def test_identifiers_are_sorted_and_small() -> None:
    names = licences.IDENTIFIERS
    assert list(names) == sorted(set(names))
    assert all(name == licences.identifier(name.upper()) for name in names)
