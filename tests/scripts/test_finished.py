"""Finished measurements: data, pages that agree with them, and commands with their commit."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import CheckpointConfig
from mupax.train.studies.sweep.rows import Rows
from scripts import ROOT
from scripts.figures.result import mean

DOCS = ROOT / "docs" / "evidence"
PAGE = (DOCS / "small_runs.md").read_text()
COMMAND = re.compile(r"python -m (scripts(?:\.\w+)+)[^`\"]*[`\"](?:\s+of\s+commit\s+`(\w+)`)?")
"""A command of scripts/ in quotes, and the commit that has it where one is named."""

pytestmark = pytest.mark.core


def record(name: str) -> dict[str, Any]:
    return json.loads((DOCS / name).read_text())


def table_row(page: str, first_cell: str) -> str:
    """Return the one row of a page's tables that begins with this cell."""
    (path,) = (ROOT / "docs").rglob(page)
    lines = path.read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {first_cell} |")]
    return row


# Commands


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def is_there(module: str) -> bool:
    package = ROOT / module.replace(".", "/")
    return (ROOT / path_of(module)).exists() or (package / "__main__.py").exists()


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of every page and of every product docstring."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        yield path.name, path.read_text()
    for folder in ("presets", "zoo", "train", "mupax"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path.name, path.read_text()


def commandless(name: str, text: str) -> list[str]:
    """Return the commands of a text that are neither in scripts/ nor of a commit."""
    return [
        f"{name}: {module}"
        for module, commit in COMMAND.findall(text)
        if not commit and not is_there(module)
    ]


def records_of_a_commit() -> dict[str, tuple[str, str]]:
    """Return the module and commit of every record that names a commit."""
    records = {}
    for path in DOCS.rglob("*.json"):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and "commit" in content and "command" in content:
            records[path.name] = (content["command"].split()[2], content["commit"])
    return records


def test_every_command_of_a_page_is_there_or_names_its_commit() -> None:
    assert [line for name, text in texts() for line in commandless(name, text)] == []


def test_control_a_command_without_a_commit_is_missed() -> None:
    text = "`python -m scripts.vision.page` and `python -m scripts.vision.page` of commit `abc`"
    assert commandless("a", text) == ["a: scripts.vision.page"]
    assert commandless("a", "`python -m scripts.bench NAME`, `python -m scripts.release`") == []


def test_every_record_of_a_removed_command_names_its_commit() -> None:
    unnamed = []
    for path in DOCS.rglob("*.json"):
        content = json.loads(path.read_text())
        command = content.get("command", "") if isinstance(content, dict) else ""
        if str(command).startswith("python -m scripts.") and "commit" not in content:
            module = command.split()[2]
            unnamed += [] if is_there(module) else [path.name]
    assert unnamed == []
    assert len(records_of_a_commit()) >= 10


def test_commits_have_the_commands() -> None:
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("the history is not here")
    places = {f"{commit}:{path_of(module)}" for module, commit in records_of_a_commit().values()}
    for _, text in texts():
        places |= {
            f"{commit}:{path_of(module)}" for module, commit in COMMAND.findall(text) if commit
        }
    objects = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        cwd=ROOT,
        input="\n".join([*sorted(places), "HEAD:no/such/file"]),
        capture_output=True,
        text=True,
        check=True,
    )
    *answers, control = objects.stdout.splitlines()
    assert [line for line in answers if " blob " not in line] == []
    assert control.endswith("missing")


# The first run


def test_the_page_of_the_first_run_has_its_losses() -> None:
    rows = record("first_run.json")["rows"]
    section = PAGE[PAGE.index("## Which changes led") : PAGE.index("first_run.json")]
    losses = {f"{row['loss']:.3f}" for name, row in rows.items() if name != "Muon"}
    assert losses == set(re.findall(r"\d\.\d{3}", section))


def test_rows_had_equal_seconds_and_the_recipe_that_ships_is_the_best() -> None:
    rows = record("first_run.json")["rows"]
    first, *later = rows.values()
    assert all(0.8 < row["cpu_seconds"] / first["cpu_seconds"] < 1.15 for row in later)
    assert min(rows, key=lambda name: rows[name]["loss"]).endswith("lm-laptop")
    recipe = re.search(r"^RECIPE \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] == "lm-laptop"


def test_the_best_rates_of_the_first_run_have_a_rate_on_both_sides() -> None:
    rows = [row for row in record("first_run.json")["rows"].values() if "rates" in row]
    assert len(rows) == 3
    for row in rows:
        first, *_, last = row["rates"].values()
        assert row["loss"] == min(row["rates"].values()) < min(first, last)


def interval(values: Sequence[float], sign: str = "") -> str:
    value, low, high = mean(values)
    return f"{value:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"


def test_the_page_says_of_images_what_their_record_says_and_no_optimizer_wins() -> None:
    """Were it otherwise on fresh seeds, the recipe would have to change."""
    images = record("first_images.json")
    for name, arm in images["arms"].items():
        row = table_row("small_runs.md", name)
        best = min(arm["rates"], key=lambda rate: np.mean(arm["rates"][rate]))
        assert row == f"| {name} | {best} of {len(arm['rates'])} | {interval(arm['losses'])} |"
    fresh = images["fresh"]
    gap = np.subtract(fresh["muon"], fresh["vit-digits"])
    assert f": {interval(gap, '+')}." in PAGE
    _, low, high = mean(gap)
    assert len(gap) == 8
    assert low < 0 < high
    assert RECIPES["vit-digits"]().steps == 2000


# Vision


def by_arm(
    rows: Sequence[dict[str, Any]], *keys: str
) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def average(rows: Sequence[dict[str, Any]], value: str) -> float:
    return float(np.mean([row[value] for row in rows]))


def seeds_text(group: Sequence[dict[str, Any]]) -> str:
    """Seeds behind a cell, which the page leaves out where they are three."""
    return "" if len(group) == 3 else f" ({len(group)} seeds)"


def accuracy_and_loss(group: Sequence[dict[str, Any]]) -> str:
    accuracy = 100 * average(group, "accuracy")
    return f"{accuracy:.1f} | {average(group, 'loss'):.3f}{seeds_text(group)}"


def test_the_page_of_vision_has_the_means_of_its_rows() -> None:
    transforms = by_arm(record("vision/transforms.json")["rows"], "arm", "task")
    plain = [group for (arm, _), group in transforms.items() if arm == "none"]
    for group in plain:
        accuracy = 100 * average(group, "accuracy")
        assert f"| {accuracy:.1f}{seeds_text(group)} |" in table_row("small_runs.md", "none")
    assert len(plain) == 3
    for (arm, model), group in by_arm(record("vision/larger.json")["rows"], "arm", "model").items():
        # The page leaves out what has one seed.
        if len(group) == 1:
            continue
        cells = accuracy_and_loss(group)
        sizes = re.fullmatch(r"width (\d+), depth (\d+)", model)
        assert sizes is not None
        assert f"| {arm} | {sizes[1]} | {sizes[2]} | {cells} |" in PAGE


TASKS = {
    "other clothes": "other clothes",
    "the same in negative, upside down": "changed clothes",
    "the same digits of other hands, 20 degrees askew": "digits",
}
"""Tasks of fine-tuning in the record, each with its name on the page."""


def test_the_page_of_vision_has_the_best_rate_of_every_arm() -> None:
    for (task, arm), rows in by_arm(record("vision/finetune.json")["rows"], "task", "arm").items():
        of_rate = by_arm(rows, "rate")
        shared = set.intersection(*({row["seed"] for row in group} for group in of_rate.values()))
        means = {
            rate: average([row for row in group if row["seed"] in shared], "loss")
            for (rate,), group in of_rate.items()
        }
        rate = min(means, key=lambda rate: means[rate])
        best = of_rate[(rate,)]
        rate_text = "as shipped" if rate is None else f"{float(rate):g}, best of {len(means)}"
        cells = accuracy_and_loss(best)
        assert f"| {TASKS[task]} | {arm} | {rate_text} | {cells} |" in PAGE


# Growth, experts, fine-tuning


def test_the_page_of_growth_has_the_losses_of_its_runs() -> None:
    growing = record("growing.json")
    last_step = str(growing["steps"])
    for name in growing["flops_per_token"]:
        losses = [run[name][last_step] for run in growing["runs"]]
        cells = " | ".join(f"{loss:.4f}" for loss in [*losses, np.mean(losses)])
        assert f" | {cells} | " in (ROOT / "docs" / "howto" / "init_from.md").read_text()


def test_the_page_of_experts_has_the_best_rate_of_both_models() -> None:
    losses: dict[tuple[str, float], list[float]] = {}
    for row in Rows(DOCS / "moe").values():
        words = row.command.split()
        arm = "8 experts" if "--model.experts" in words else "dense"
        rate = float(words[words.index("--optimizer.peak-lr") + 1])
        losses.setdefault((arm, rate), []).append(row.eval_loss)
    for arm in ("dense", "8 experts"):
        best = min((key for key in losses if key[0] == arm), key=lambda key: np.mean(losses[key]))
        cells = f"2^{np.log2(best[1]):.0f} | {', '.join(f'{loss:.4f}' for loss in losses[best])} |"
        assert cells in table_row("moe.md", arm)


def test_the_page_of_fine_tuning_has_what_the_shipped_rate_costs() -> None:
    costs: dict[tuple[str, str], list[float]] = {}
    for (preset, _, arm), rows in by_arm(
        record("finetuning.json")["rows"], "preset", "width", "arm"
    ).items():
        of_rate = by_arm(rows, "octaves")
        means = {octaves: average(same_rate, "loss") for (octaves,), same_rate in of_rate.items()}
        # Rows without octaves have the source's loss, before both kinds of fine-tuning.
        means.pop(None, None)
        costs.setdefault((preset, arm), []).append(means[0] - min(means.values()))
    page = " ".join(PAGE.split())
    full = costs["mup", "full"]
    assert f"which costs {min(full):.2f} to {max(full):.2f} nats" in page
    adapters = [*costs["mup", "adapters"], *costs["sp", "adapters"]]
    assert f"the shipped rate costs at most {max(adapters):.3f} nats" in page


# Searches, and what saving costs


def test_both_searches_find_what_the_grids_find_for_less() -> None:
    searches = record("search_cost.json")
    frugal = searches["frugal"]
    assert all(abs(row["frugal"] - row["grid"]) <= 0.25 for row in frugal["rates"])
    assert frugal["ratio"] <= 0.4
    tuned = searches["tune"]
    assert tuned["ratio"] == pytest.approx(tuned["runs"] / tuned["grid_runs"], abs=1e-4)
    assert tuned["ratio"] <= 0.4
    gap, half = tuned["less_grid"]
    assert gap + half < 0.005


def test_saving_and_a_bucket_cost_what_was_promised() -> None:
    save = record("performance/save_cost.json")
    assert 0.99e8 < save["state_bytes"] < 1.1e8
    assert save["interval_steps"] == CheckpointConfig().every_steps
    assert save["ratio"]["save_call / host_copy"] <= 1.5
    assert save["ratio"]["digests / write"] < 0.1
    assert save["ratio"]["lost / interval"] <= 0.01
    bucket = record("performance/object_store.json")
    assert (bucket["steps"], bucket["step"]["rounds"]) == (20, 7)
    assert bucket["step"]["ratio"]["disk"] <= 1.1
