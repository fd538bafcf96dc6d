"""The comparison on small folders: it starts its rivals, keeps their rows, and pairs differences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.bench.recipes import small_folders
from scripts.vision import small_folders as vision_folders


def write_images(folder: Path) -> None:
    """Write dark and light images of 8 pixels, 20 of each for training and 5 to test."""
    rng = np.random.default_rng(0)
    for label, level in (("dark", 40), ("light", 200)):
        for part, count in (("train", 20), ("test", 5)):
            place = folder / part / label
            place.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(level, level + 40, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")


def test_a_rival_is_trained_once(tmp_path: Path) -> None:
    write_images(tmp_path / "levels" / "0")

    def trained(python: str) -> dict[str, object]:
        rows = small_folders.Rows(tmp_path / "rows.json")
        return small_folders.rival(rows, tmp_path, "levels", 60, 0, "logistic", python, [])

    row = trained(sys.executable)
    assert row["accuracy"] == 1.0
    assert row["cpu_seconds"] > 0
    assert trained("no such program") == row


def test_differences_are_paired_by_seed() -> None:
    def rows(*accuracies: float) -> list[dict[str, float]]:
        return [{"accuracy": accuracy} for accuracy in accuracies]

    cell = {"ours": rows(0.5, 0.7), "logistic": rows(0.4, 0.6), "cnn": rows(0.6, 0.6)}
    cell["cnn without batch norm"] = rows(0.5, 0.5)  # has no column
    line = small_folders.table({"emoji 30": cell}).splitlines()[-1]
    # Every seed is 10 points above the logistic regression: an interval without width.
    assert line.startswith("| emoji | 30 | 60.0 | 50.0 | 60.0 | +10.0 [+10.0, +10.0] | +0.0 [-")


def test_a_program_that_was_not_run_has_a_dash() -> None:
    # The second seed of the logistic regression has no partner.
    cell = {"ours": [{"accuracy": 0.5}], "logistic": [{"accuracy": 0.4}, {"accuracy": 0.4}]}
    line = small_folders.table({"emoji 30": cell}).splitlines()[-1]
    assert line == "| emoji | 30 | 50.0 | 40.0 | - | +10.0 (one seed) | - |"


def test_a_record_keeps_the_cells_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_folders, "OUT", tmp_path / "record.json")
    small_folders.publish({"fashion 30": {"ours": 1}, "emoji 120": {"ours": 2, "cnn": 3}})
    small_folders.publish({"emoji 30": {"ours": 4}, "emoji 120": {"ours": 5}})
    cells = json.loads((tmp_path / "record.json").read_text())["cells"]
    assert list(cells) == ["emoji 30", "emoji 120", "fashion 30"]
    assert cells["emoji 120"] == {"ours": 5, "cnn": 3}
    assert (cells["emoji 30"], cells["fashion 30"]) == ({"ours": 4}, {"ours": 1})


def test_a_package_without_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_folders, "unpack", lambda package, folder: folder)
    with pytest.raises(FileNotFoundError, match="has no file train-images-idx3-ubyte"):
        list(vision_folders.fashion(tmp_path))
