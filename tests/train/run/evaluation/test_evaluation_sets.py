"""A run that is evaluated on further sets by name: their numbers, and sets that do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.train import data as sources
from mupax.train.config import metrics
from mupax.train.config.recipes import RECIPES
from mupax.train.core.program import Program
from mupax.train.data import DataError, named_sets
from mupax.train.run.report.mirrors.trackers import scalars
from tests.fixtures.commands import Done, refusal, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    completed,
    evaluations,
    folder,
    record_of,
    refused,
    train,
    untrained,
    write_text,
)

__all__ = ["folder", "one_device", "shared_programs", "untrained"]  # fixtures

WORDS = "--log.eval-every-steps 2 --steps 3 --ema.decay 0.5 --log.no-tensorboard"
SETS = "--data.evaluate own=text:text.txt my_other=text:other.txt"


@pytest.fixture(scope="module")
def sets(folder: Path) -> Done:
    """A run on a text, evaluated on two others as well, of which one is its own."""
    write_text(Path("other.txt"), seed=1)
    compiled: list[Any] = []
    compile_eval = Program.compile_eval

    def counted(self: Program, *arguments: Any) -> Any:
        compiled.append(self.config)
        return compile_eval(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "compile_eval", counted)
        done = completed("--workdir sets", WORDS, SETS)
    assert len(compiled) == 1, (
        "one program evaluates all sets, and a compiled one takes no other shapes"
    )
    return done


def test_every_set_has_its_numbers_in_the_row_of_an_evaluation(sets: Done) -> None:
    records = evaluations("sets")
    assert [row["step"] for row in records] == [2, 3]
    for row in records:
        assert row["eval/own/loss"] == row["eval_loss"]
        assert row["eval/own/accuracy"] == row["eval_accuracy"]
        # Control: another text has other numbers.
        assert row["eval/my_other/loss"] != row["eval_loss"]
    tags = scalars(records[0])
    assert {"eval/loss", "eval/own/loss", "eval/my_other/accuracy"} <= tags.keys()
    assert "  on my_other" in sets.out
    assert "nats/byte, accuracy" in sets.out
    recorded = record_of("sets")["data"]["sets"]
    assert recorded["my_other"]["digest"] != recorded["own"]["digest"]


def test_eval_has_the_same_numbers_of_the_run_s_sets_and_of_others(sets: Done) -> None:
    done = succeeded("eval sets --json found.json")
    assert not done.err
    row = evaluations("sets")[-1]
    record = json.loads(Path("found.json").read_text())
    for name in ("own", "my_other"):
        for metric in ("loss", "accuracy"):
            assert record["sets"][name][metric] == row[f"eval/{name}/{metric}"]
    assert "text:other.txt" in done.out
    words = "eval sets --data.name text:other.txt --data.evaluate --json other.json"
    succeeded(words)
    other = json.loads(Path("other.json").read_text())
    assert other["loss"] == row["eval/my_other/loss"]
    assert "sets" not in other


def test_a_set_with_other_contents_than_before_is_said(sets: Done, untrained: list) -> None:
    content = Path("other.txt").read_text()
    Path("other.txt").write_text(content + "\nmore of it")
    done = train("--workdir sets --resume", SETS, WORDS)
    Path("other.txt").write_text(content)
    assert done.code == 0, done.err
    assert "caution: the evaluation set my_other holds other data than before" in done.out
    assert "evaluation set own" not in done.out


def test_a_finished_run_is_evaluated_on_other_examples_than_before(
    sets: Done, tmp_path: Path
) -> None:
    shutil.copytree("sets", tmp_path / "more")
    words = f"--workdir {tmp_path}/more --resume {WORDS}"
    more = f"{SETS} third=text:other.txt"
    for flags in (more, f"{more} --data.eval-examples 8"):
        done = completed(words, flags)
    caution = "caution: evaluations have other examples than before: their numbers do not compare"
    assert caution in done.out
    first, second, third = evaluations(tmp_path / "more")[-3:]
    assert second["eval/third/loss"] == first["eval/my_other/loss"]
    assert third["eval_loss"] != first["eval_loss"]
    shown = metrics.METRICS["loss"].text(third["eval_loss"])
    assert shown in done.out
    again = train(words, f"{more} --data.eval-examples 8")
    assert len(evaluations(tmp_path / "more")) == 4, again.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("code", "data.evaluate code is not NAME=SOURCE; write it as code=text:src"),
        ("=text:x", "data.evaluate =text:x is not NAME=SOURCE"),
        ("a=text:x a=text:y", "data.evaluate has two sets named a"),
        ("a=digits", "data.evaluate a=digits is images and the model, a decoder, reads tokens"),
        ("a=text:nowhere", "data.evaluate a: no file or folder nowhere"),
        ("a=mix", "data.evaluate a=mix is a mixture"),
        ("a=s3://x", "data.evaluate a is s3://x"),
        ("a=text:ids.npy", "data.evaluate a: "),
    ],
)
def test_sets_that_do_not_fit_are_refused_before_anything_is_compiled(
    words: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    np.save("ids.npy", np.arange(2000, dtype=np.uint16))
    monkeypatch.setattr(Program, "compile_train", lambda *_: pytest.fail("compiled"))
    assert message in refused(f"--workdir {tmp_path}/run", WORDS, "--data.evaluate", words)


def test_classes_that_are_not_the_run_s_are_refused(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("L", (8, 8), 9 * number).save(tmp_path / name / f"{number}.png")
    recipe = RECIPES["vit-digits"]()
    data = dataclasses.replace(recipe.data, evaluate=(f"pets=images:{tmp_path}",))
    digits: Any = SimpleNamespace(class_names=[*"0123456789"], facts={}, tokenizer=None)
    with pytest.raises(
        DataError,
        match=r"data\.evaluate pets: its classes are cat, dog, and those of the run 0, 1, 2",
    ):
        named_sets.load("pets", dataclasses.replace(recipe, data=data), digits)


def test_field_of_the_run_s_records_is_kept_where_a_set_has_it(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("run", "other"):
        rows = [json.dumps({"body": f"{name} {i} " * 9, "text": "x" * 90}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    recipe = RECIPES["lm-tiny"]()
    fields: dict[str, Any] = {"name": f"text:{tmp_path}/run.jsonl", "field": "body"}
    sets = (f"records=text:{tmp_path}/other.jsonl", "plain=text:text.txt")
    config = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, **fields, evaluate=sets),
        model=dataclasses.replace(recipe.model, seq_len=16),
    )
    data = sources.load(config.data, config.model, seed=0)
    for name, word in {"records": b"other", "plain": Path("text.txt").read_bytes()[-9:]}.items():
        batch = named_sets.load(name, config, data).eval_batch(0)
        assert word in np.asarray(batch["inputs"], np.uint8).tobytes()


def test_points_of_a_sweep_have_no_further_sets(folder: Path, tmp_path: Path) -> None:
    words = f"sweep lm-tiny --lr 0.01 --data.name text:text.txt --out {tmp_path}/out"
    single = {
        "data.evaluate": "--data.evaluate own=text:text.txt",
        "stop.patience": "--log.eval-every-steps 2 --stop.patience 2",
    }
    for field, flags in single.items():
        assert f"{field} is for single runs" in refusal(words, flags)
