"""A metric of a user's own, from docs/howto/add_a_metric.md: it reaches every place that shows, ranks or records metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from mupax.__main__ import main
from mupax.train.checkpoints import saved_run
from mupax.train.config import record as config_record
from mupax.train.config.metrics import METRICS, Metric, MetricError, check_table, metric_values
from mupax.train.config.sections import cost, metrics_of
from mupax.train.run.report import metrics
from mupax.train.run.report.metrics import Evaluations

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "add_a_metric.md").read_text()
EXAMPLES = ("top5", "per_byte")
SMALL = "--model.depth 1 --model.width 16 --model.num-heads 2 --data.batch-size 32 --data.eval-examples 64 --log.no-samples"
BEFORE = dict(METRICS)


def forget() -> None:
    """Leave the process as one that never imported the examples of the page."""
    METRICS.clear()
    METRICS.update(BEFORE)
    for name in EXAMPLES:
        sys.modules.pop(name, None)
    config_record._registered_by.clear()
    config_record._caution.cache_clear()


def command(*words: str) -> tuple[int, str]:
    """Run a command as a process of its own would. Return its exit code and what it printed."""
    forget()
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        code = main(list(words))
    return code, stream.getvalue()


class Page(NamedTuple):
    """What the commands of the page printed."""

    train: str
    eval: str


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The commands of the page, in a folder with its examples, where each runs as a process of its own would."""
    folder = tmp_path_factory.mktemp("page")
    sources = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for name, source in zip(EXAMPLES, sources, strict=True):
        (folder / f"{name}.py").write_text(source)
    train, evaluate = [
        shlex.split(line) for line in re.findall(r"^mupax (.*)$", PAGE, re.MULTILINE)
    ]
    path = [*sys.path]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MUPAX_HOME", str(folder / "home"))
        code, trained = command(*train, *SMALL.split())
        assert code == 0, trained
        code, evaluated = command(*evaluate)  # without --plugin: the run has recorded the module
        assert code == 0, evaluated
        yield Page(trained, evaluated)
    forget()
    sys.path[:] = path


def evaluated_by_step() -> dict[int, float]:
    """Return the top-5 accuracy of each evaluation of the run."""
    rows = metrics.read("runs/top5/metrics.jsonl")
    return {row["step"]: row["eval_top5_accuracy"] for row in rows if "eval_top5_accuracy" in row}


def test_rows_and_the_screen_have_it(page: Page) -> None:
    rows = metrics.read("runs/top5/metrics.jsonl")
    evaluations = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20, 30]
    for row in evaluations:
        assert row["eval_accuracy"] <= row["eval_top5_accuracy"] <= 1
        assert row["eval_top5_accuracy"] * 64 == pytest.approx(
            round(row["eval_top5_accuracy"] * 64)
        )
    assert evaluations[-1]["eval_top5_accuracy"] > 0.7 > evaluations[-1]["eval_accuracy"] / 2
    # Not on training batches, whose step stays as it was.
    assert not any("top5_accuracy" in row for row in rows)
    assert {"loss", "accuracy"} <= rows[0].keys()
    # The line that the page shows, with other numbers.
    (shown,) = re.findall(r"^eval  step .*$", PAGE, re.MULTILINE)
    last = [line for line in page.train.splitlines() if line.startswith("eval  step 30")]
    masked = [re.sub(r"[\d.]+", "0", line) for line in (*last, shown)]
    assert masked[0] == masked[1]


def test_the_summary_and_the_trackers_have_it(page: Page) -> None:
    evaluations = [row for row in metrics.read("runs/top5/metrics.jsonl") if "eval_loss" in row]
    value = evaluations[-1]["eval_top5_accuracy"]
    assert "vit-digits: 30 steps done" in page.train
    assert re.search(rf"evaluation top-5 accuracy +{100 * value:.2f} %", page.train)
    (events,) = Path("runs/top5/tensorboard").iterdir()
    assert events.read_bytes().count(b"eval/top5_accuracy") == len(evaluations)


def test_eval_finds_the_module_again_and_prints_it(page: Page) -> None:
    numbers = json.loads(Path("top5.json").read_text())
    values = evaluated_by_step()
    assert numbers["top5_accuracy"] == pytest.approx(values[numbers["step"]], abs=1e-9)
    assert page.eval.count("top-5 accuracy") == 1
    record = json.loads(Path("runs/top5/config.json").read_text())
    assert record["plugins"]["top5"]["provides"] == ["metric top5_accuracy"]


def test_the_best_checkpoint_is_of_the_highest(page: Page) -> None:
    values = evaluated_by_step()
    best = min(values, key=lambda step: (-values[step], step))
    assert json.loads(Path("top5.json").read_text())["step"] == best
    code, text = command("checkpoints", "runs/top5")
    assert code == 0
    assert f"best by eval_top5_accuracy: step {best}" in text


def test_early_stopping_goes_by_it(page: Page) -> None:
    forget()
    config_record.load(["top5"])
    config = saved_run.find(Path("runs/top5")).config
    stop = dataclasses.replace(config.stop, patience=1, metric="eval_top5_accuracy")
    evaluations = Evaluations(dataclasses.replace(config, stop=stop))
    evaluations.add({"step": 10, "eval_loss": 2.0, "eval_top5_accuracy": 0.5})
    evaluations.add({"step": 20, "eval_loss": 3.0, "eval_top5_accuracy": 0.6})
    assert evaluations.stopped == ""
    evaluations.add({"step": 25, "eval_loss": 1.0, "eval_top5_accuracy": 0.55})
    assert "eval_top5_accuracy has not improved" in evaluations.stopped


def test_a_run_whose_module_is_gone_is_used_and_not_trained_further(page: Page) -> None:
    module = Path("top5.py")
    code_of_module = module.read_text()
    module.unlink()
    caution = "caution: metric top5_accuracy is not measured: --plugin top5: no module of this name"
    try:
        for words in ("eval runs/top5", "convert runs/top5 --form mean-field --out runs/other"):
            code, text = command(*words.split())
            text = " ".join(text.split())
            assert code == (0 if words.startswith("eval") else 2), text
            assert text.count("--plugin top5: no module of this name") == 1
            assert (caution in text) == (code == 0)
        image = "image.png"
        Image.new("L", (8, 8)).save(image)
        code, text = command("predict", "runs/top5", image)
        assert code == 0, text
        # The steps that the user names need no metric, and the best one does.
        code, text = command("eval", "runs/top5", "--step", "30")
        assert code == 0, text
        code, text = command("eval", "runs/top5", "--step", "best")
        assert code == 2
        assert "no metric here is named 'top5_accuracy'" in text
        # A start from a run reads its record several times.
        start = "--init-from runs/top5 --steps 1 --workdir runs/started --log.no-tensorboard"
        code, text = command("train", "vit-digits", *SMALL.split(), *start.split())
        assert code == 0, text
        assert " ".join(text.split()).count(caution) == 1
        code, text = command("train", "--resume", "--workdir", "runs/top5", "--steps", "40")
        assert code == 2
        assert "--plugin top5: no module of this name" in " ".join(text.split())
    finally:
        module.write_text(code_of_module)


def test_a_run_of_somebody_else_is_read_without_the_metric(page: Page) -> None:
    shutil.copytree("runs/top5", "given")
    shutil.rmtree("home")
    code, text = command("train", "--resume", "--workdir", "given", "--steps", "40")
    assert code == 2, "its best checkpoint goes by the metric"
    assert "add --plugin top5" in text
    code, text = command("eval", "given")
    assert code == 0, text
    assert "metric top5_accuracy of the module 'top5' is not measured" in text
    record = json.loads(Path("given/config.json").read_text())
    record["config"]["checkpoint"] |= {"best_metric": "eval_loss"}
    record["config"]["stop"] |= {"metric": "eval_loss"}
    Path("given/config.json").write_text(json.dumps(record))
    code, text = command("eval", "given")
    assert code == 0, text
    assert "metric top5_accuracy of the module 'top5' is not measured; add --plugin top5" in text
    assert "top5" not in sys.modules


def test_without_the_plugin_nobody_knows_the_name(page: Page) -> None:
    flags = "--steps 30 --checkpoint.keep-best 1 --checkpoint.best-metric eval_top5_accuracy --log.eval-every-steps 10"
    code, text = command("train", "vit-digits", *flags.split(), "--dry-run")
    assert code == 2
    assert "eval_top5_accuracy" in text


def test_a_metric_of_the_mean_loss_needs_no_device(page: Page) -> None:
    forget()
    config_record.load(["per_byte"])
    values = metric_values(2.0, {"accuracy": 0.5}, 4.0)
    assert values["perplexity_per_byte"] == pytest.approx(math.exp(0.5))
    assert "perplexity_per_byte" not in metric_values(2.0, {"accuracy": 0.5}, None)
    assert "perplexity_per_byte" not in metric_values(2.0, {"accuracy": 0.5}, 4.0, training=True)
    assert "eval/code/perplexity_per_byte" in metrics_of(["code"])
    assert cost("eval/code/perplexity_per_byte", 3.0) == 3.0
    assert cost("eval_accuracy", 0.75) == -0.75
    assert cost("eval_loss", None) == np.inf


@pytest.mark.parametrize("name", ["grad_norm", "eval_top5", "Top5", "top-5"])
def test_a_name_that_a_row_has_already_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = Metric(
        label="x", unit="", better="lower", from_loss=lambda loss, bytes_per_target: loss
    )
    monkeypatch.setitem(METRICS, "x", metric)
    check_table()  # the control
    monkeypatch.setitem(METRICS, name, metric)
    with pytest.raises(MetricError, match=name):
        check_table()


def test_a_metric_has_one_function() -> None:
    with pytest.raises(MetricError, match="one of total and from_loss"):
        Metric(label="x", unit="", better="lower")
