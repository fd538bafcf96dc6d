"""Every benchmark runs, checks that what it compares agrees, and writes its page."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mupax.zoo.configs import CONFIGS
from scripts.bench import __main__ as bench
from scripts.bench import in_turns
from scripts.bench.step import devices

TINY = ["--tiny", "--rounds", "1"]
SMALL = dataclasses.replace(
    CONFIGS["lm-tiny"], activation="relu", positions="learned", norm_gain=False
)
"""Decoder that compiles in less time than `lm-tiny`."""
NEEDS_TORCH = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch (extra torch) is not installed"
    ),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # its compiler's own
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers", [*TINY, "--model", "lm"]),
        ("attention", TINY),
        ("cross_entropy", TINY),
        ("devices", TINY),
        ("preset_cost", TINY),
        ("start", TINY),
        pytest.param("torch_step", [*TINY, "--model", "lm"], marks=NEEDS_TORCH),
        pytest.param("torch_parts", [*TINY, "--model", "lm"], marks=NEEDS_TORCH),
        pytest.param("torch_muon", TINY, marks=NEEDS_TORCH),
    ],
)
def test_benchmark_runs_and_its_page_is_made(
    name: str,
    words: list[str],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CONFIGS, "lm-tiny", SMALL)
    # tests/train/parallel/test_mesh.py compares all axes.
    monkeypatch.setattr(devices, "MESHES", {"tensor": devices.MESHES["tensor"]})
    out = tmp_path / f"{name}.json"
    assert (
        importlib.import_module(f"scripts.bench.{bench.MODULES[name]}").main(
            [*words, "--json", str(out)]
        )
        == 0
    )
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert printed["benchmark"] == name
    assert all(ratio > 0 for result in printed["results"] for ratio in result["ratio"].values())
    text = bench.page(bench.PAGE.read_text(), tmp_path)
    if name in bench.PYTORCH_BENCHMARKS:
        assert f"python -m scripts.bench.{bench.MODULES[name]}" in text
        assert bench.table(bench.rows_of(printed["results"])) in text
    else:
        rows = bench.rows_inside(name, printed)
        assert rows
        assert all(f"| {' | '.join(row)} |" in text for row in rows)


def test_turns_alternate_and_the_first_step_of_a_turn_does_not_count() -> None:
    order: list[str] = []
    seconds = in_turns.in_turns(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, steps_per_turn=1
    )
    assert "".join(order) == "ab" + "aabb" + "bbaa"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert in_turns.compared({"a": [1.0, 3.0, 2.0], "b": [2.0, 2.0, 2.0]}, "a")["ratio"] == {
        "b": 1.0
    }


def test_the_committed_page_is_what_its_files_give() -> None:
    text = bench.PAGE.read_text()
    assert bench.page(text, bench.FOLDER) == text
