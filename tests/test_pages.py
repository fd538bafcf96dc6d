"""The pages docs/howto/add_a_*.md and sections of extend.md: each example is what a reader saves and runs, at most 30 lines, and trains."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mupax import presets
from mupax.__main__ import main
from mupax.presets import PRESETS, PresetError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.checkpoints import saved_run
from mupax.train.config.data import SOURCES
from mupax.train.config.recipes import RECIPES
from mupax.train.reuse.transplant import powers_of

DOCS = Path(__file__).parents[1] / "docs" / "howto"
SECTIONS = {"add_a_dataset": "Add a data set", "add_a_preset": "Add a preset"}
"""Headings of docs/howto/extend.md whose section is an example of its own."""


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """The tables without what a page has added to them."""
    named: list[dict[str, Any]] = [OPTIMIZERS, SOURCES, PRESETS]
    before = [(table, dict(table)) for table in named]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


@pytest.fixture(autouse=True)
def shallow(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe that pages begin with has two of its four blocks, but where a page needs them for its accuracy."""
    recipe = RECIPES["vit-digits"]()
    model = dataclasses.replace(recipe.model, depth=4 if page == "add_a_dataset" else 2)  # pyright: ignore
    monkeypatch.setitem(RECIPES, "vit-digits", lambda: dataclasses.replace(recipe, model=model))


@pytest.mark.parametrize(
    ("page", "accuracy"),
    [
        ("add_a_model", 0.5),
        ("add_an_optimizer", 0.5),
        ("add_a_dataset", 0.9),
        ("add_a_preset", 0.5),
        ("add_a_hook", 0.5),
    ],
)
def test_a_page_works(
    page: str,
    accuracy: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = example_text(page)
    example, *commands = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 30
    (name,) = re.findall(r"Save this as `(\w+)\.py`", text)
    (tmp_path / f"{name}.py").write_text("\n\n".join([example, *commands]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(f"{name}.py", run_name="__main__")
    recipe = name.replace("_", "-")
    workdir = tmp_path / "runs" / recipe
    assert saved_run.find(workdir).step == 30
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert next(row["eval_accuracy"] for row in rows if "eval_accuracy" in row) > accuracy

    if page == "add_a_model":
        assert saved_run.find(workdir).config.model.family == "pixels:PixelsConfig"
        assert "observables within theory" in capsys.readouterr().out
    elif page == "add_a_preset":
        assert "0.25" in capsys.readouterr().out.splitlines()
        with pytest.raises(
            PresetError, match=r"no rule for the optimizer 'muon' \(its updates do not grow"
        ):
            presets.get(recipe).family("muon")
    elif page == "add_a_hook":
        distances = [row["gains/distance"] for row in rows if "gains/distance" in row]
        assert len(distances) == 3
        assert 0 < distances[0] < distances[-1] < 0.1
    elif page == "add_an_optimizer":
        import optax

        assert powers_of(optax.TraceState({}), recipe) == {"trace": 1}
        refused(
            ["--optimizer.name", recipe, "--optimizer.eps", "1"],
            "--optimizer.eps is not read by signum",
            capsys,
        )
    else:
        refused(
            ["--data.name", recipe, "--data.tokenizer", "bytes"], "is images and the model", capsys
        )


def example_text(page: str) -> str:
    """Return the text of a page, or of its section of docs/howto/extend.md."""
    if page not in SECTIONS:
        return (DOCS / f"{page}.md").read_text()
    text = (DOCS / "extend.md").read_text()
    _, section = text.split(f"\n## {SECTIONS[page]}\n")
    return section.partition("\n## ")[0]


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lm-tiny", *words, "--dry-run"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
