"""Examples of docs/howto/add_a_*.md and extend.md, as a reader saves and runs them."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optax
import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import PRESETS, PresetError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.checkpoints import saved_run
from mupax.train.config.data import SOURCES
from mupax.train.config.recipes import RECIPES
from mupax.train.reuse.transplant import powers_of
from tests.fixtures.devices import one_device
from tests.fixtures.small_runs import without_loss_plot

__all__ = ["one_device"]  # a fixture

DOCS = Path(__file__).parents[1] / "docs" / "howto"
SECTIONS = {"add_a_dataset": "Add a data set", "add_a_preset": "Add a preset"}
"""Headings of docs/howto/extend.md whose section is an example of its own."""
STEPS = 30
"""Steps of the run of every page."""
Rows = list[dict[str, Any]]
RunPage = Callable[..., Rows]


@pytest.fixture(autouse=True)
def unchanged_tables() -> Iterator[None]:
    """Remove what a page has added to the tables."""
    tables: list[Any] = [OPTIMIZERS, SOURCES, PRESETS]
    before = [(table, dict(table)) for table in tables]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


@pytest.fixture
def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPage:
    """Return a function that saves and runs a page, and returns the rows of metrics of its run."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(page: str, depth: int = 2, patch_size: int = 4, accuracy: float = 0.5) -> Rows:
        recipe = RECIPES["vit-digits"]()
        vit: Any = recipe.model
        compute = dataclasses.replace(vit.compute, layers="scan")  # compiles sooner
        sizes = {"depth": depth, "patch_size": patch_size, "bias": False}
        model = dataclasses.replace(vit, compute=compute, **sizes)
        log = dataclasses.replace(recipe.log, samples=False)
        quick = dataclasses.replace(recipe, model=model, log=log)
        monkeypatch.setitem(RECIPES, "vit-digits", lambda: quick)

        text = example_text(page)
        example, *commands = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert len([line for line in example.splitlines() if line.strip()]) <= 30
        (name,) = re.findall(r"\bas `(\w+)\.py`", text)
        Path(f"{name}.py").write_text("\n\n".join([example, *commands]))
        with without_loss_plot():
            runpy.run_path(f"{name}.py", run_name="__main__")

        workdir = tmp_path / "runs" / name.replace("_", "-")
        assert saved_run.find(workdir).step == STEPS
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        rows: Rows = [json.loads(line) for line in lines]
        assert next(row for row in rows if "eval_accuracy" in row)["eval_accuracy"] > accuracy
        return rows

    return run


def example_text(page: str) -> str:
    """Return the text of a page, or of its section of docs/howto/extend.md."""
    if page not in SECTIONS:
        return (DOCS / f"{page}.md").read_text()
    _, section = (DOCS / "extend.md").read_text().split(f"\n## {SECTIONS[page]}\n")
    return section.partition("\n## ")[0]


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message with which a run is refused."""
    assert main(["train", "lm-tiny", *words.split(), "--dry-run"]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_an_added_model_trains_and_passes_the_check(
    run_page: RunPage, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("add_a_model")
    assert saved_run.find(Path("runs/pixels")).config.model.family == "pixels:PixelsConfig"
    assert "observables within theory" in capsys.readouterr().out


def test_an_added_optimizer_trains_moves_along_and_reads_its_flags_alone(
    run_page: RunPage, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("add_an_optimizer")
    assert powers_of(optax.TraceState({}), "signum") == {"trace": 1}
    message = refused("--optimizer.name signum --optimizer.eps 1", capsys)
    assert "--optimizer.eps is not read by signum" in message


def test_an_added_dataset_is_learnt_and_refused_for_other_models(
    run_page: RunPage, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("add_a_dataset", depth=4, patch_size=2, accuracy=0.9)
    message = refused("--data.name bars --data.tokenizer bytes", capsys)
    assert "is images and the model" in message


def test_an_added_preset_gives_rates_and_refuses_an_optimizer_without_a_rule(
    run_page: RunPage, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page("add_a_preset")
    assert "0.25" in capsys.readouterr().out.splitlines()
    message = r"no rule for the optimizer 'muon' \(its updates do not grow"
    with pytest.raises(PresetError, match=message):
        presets.get("sp-global").family("muon")


def test_an_added_hook_logs(run_page: RunPage) -> None:
    rows = run_page("add_a_hook")
    distances = [row["gains/distance"] for row in rows if "gains/distance" in row]
    assert len(distances) == 3
    assert 0 < distances[0] < distances[-1] < 0.1
