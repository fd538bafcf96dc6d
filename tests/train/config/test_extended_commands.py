"""Every command reads a run whose optimizer, preset, data, model, metric and hook are all extensions of a user's own."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mupax import train
from mupax.commands import table
from mupax.train.pods import topology
from tests.fixtures.commands import Done
from tests.fixtures.programs import shared_programs
from tests.train.config import test_plugins as plugins

__all__ = ["shared_programs"]  # fixtures

METRIC = """
import jax.numpy as jnp
from mupax.train.config.metrics import METRICS, Metric

def sure(statistics, weights):
    return jnp.sum((statistics.loss < 0.7) * weights)

METRICS["own_sure"] = Metric(label="sure", unit="%", better="higher", total=sure)
"""
RECIPE = """
import dataclasses
from mupax.train.config.recipes import RECIPES

def everything():
    "An optimizer, a preset, a data set, a model and a metric of one's own."
    config = RECIPES["own-recipe"]()
    return dataclasses.replace(
        config,
        recipe="own-everything",
        steps=2,
        model=dataclasses.replace(config.model, num_classes=2),
        preset=dataclasses.replace(config.preset, name="own-preset"),
        optimizer=dataclasses.replace(config.optimizer, name="own-sign", warmup_steps=1),
        data=dataclasses.replace(config.data, name="own-bars", batch_size=8, eval_examples=8),
        log=dataclasses.replace(config.log, tensorboard=False, progress=False, samples=False),
        checkpoint=dataclasses.replace(config.checkpoint, keep_best=1, best_metric="eval_own_sure"),
    )

RECIPES["own-everything"] = everything
"""
SHORT = "--steps 2 --optimizer.warmup-steps 1"
READS: dict[str, str] = {
    "train": "train own-everything --workdir run --resume",
    "finetune": f"finetune images --from run {SHORT} --data.batch-size 8 --workdir tuned --dry-run",
    "data prepare": "data prepare own-bars",
    "checkpoints list": "checkpoints list run",
    "checkpoints verify": "checkpoints verify run",
    "sweep": f"sweep own-everything {SHORT} --lr 2^-9,2^-8 --out sweep --dry-run",
    "tune": f"tune own-everything {SHORT} --over lr,readout.lr --out tune --dry-run",
    "plan": "plan own-everything --chips v5e:4x4 --out own-plan.json",
    "eval": "eval run --json scores.json",
    "noise": "noise run --batches 3 --data.batch-size 16",
    "predict": "predict run image.png",
    "convert": "convert run --form mean-field --out converted",
    "presets list": "presets list",
    "presets table": "presets table own-preset --model own-pixels --optimizer own-sign",
    "presets constants": "presets constants own-preset",
    "presets limits": "presets limits own-preset --optimizer own-sign",
    "presets desiderata": "presets desiderata own-preset",
    "presets compare": "presets compare own-preset mup",
    "presets joint": "presets joint",
    "presets tuned": "presets tuned",
    "presets dynamics": "presets dynamics --dry-run",
    "models list": "models list",
    "models describe": "models describe own-pixels",
    "models roles": "models roles own-everything",
}
"""Command to a line that names an extension, or a run of them."""
OF_THE_ZOO = "--optimizer.name own-sign --data.name own-bars --model.num-classes 2"
READS_OF_THE_ZOO: dict[str, str] = {
    "check": "check vit-proxy --optimizer own-sign --sizes 2 --seeds 1 --dry-run",
    "transfer": f"transfer vit-digits {plugins.TINY} {OF_THE_ZOO} {SHORT} --grow head_dim=8,16 --out transfer --dry-run",
}
"""Command that grows models of the zoo alone, to a line with the other extensions."""
REFUSES: dict[str, tuple[str, str]] = {
    "transfer": (
        f"transfer own-everything {SHORT} --grow width=8,16 --out transfer --dry-run",
        "the zoo's transformers only",
    ),
    "check": (
        "check own-everything --grow depth --sizes 2 --seeds 1 --dry-run",
        "the zoo's transformers only",
    ),
    "compile": (
        "compile own-everything --topology v5e:2x2",
        "the TPU compiler is not installed",
    ),
    "plan score": ("plan score plan.json run", "a plan without a forecast"),
    "grow": ("grow run --set depth=2 --out grown", "the zoo's transformers only"),
    "presets balance": (
        "presets balance own-everything --out balance.json",
        "cannot be taken apart into layers",
    ),
    "generate": ("generate run --prompt a", "and generate is for decoders and encoder-decoders"),
    "serve": ("serve run", "and serve is for decoders"),
    "export": ("export run --out exported", "own_all"),
    "push": ("push run --to me/mine --dry-run", "own_all"),
}
"""Command to a line that no model of a family of one's own can have, and what the error says."""
READS_NONE: dict[str, str] = {
    "data show": "shows the noise of text",
    "data tokenizer": "reads texts",
    "import": "reads what others wrote",
    "verify": "reads what others wrote",
}
"""Command that nothing of an extension reaches, with the reason."""


def commands() -> set[str]:
    """Every command that does something, as it is typed."""
    typed: set[str] = set()
    for row in table.commands().values():
        typed.update(f"{row.name} {inner.name}" for inner in row.subcommands)
        if row.run is not None and row.name != "checkpoints":  # which is `checkpoints list`
            typed.add(row.name)
    return typed


def test_every_command_has_a_line():
    assert {*READS, *REFUSES, *READS_NONE} == commands()


def source() -> str:
    """One module with an optimizer, a preset, a data set, a model family, a metric and a recipe of all of them."""
    parts = [plugins.SIGN, plugins.PRESET, plugins.BARS, plugins.PIXELS, METRIC, RECIPE]
    text = "\n".join(parts)
    for name in plugins.SOURCE_OF:
        text = text.replace(f'"{name}:', '"own_all:')
    return text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module, images, and a run of it that had a hook."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "own_all.py").write_text(source())
    for name in ("level", "upright"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 60 * number).save(folder / "images" / name / f"{number}.png")
    Image.new("L", (8, 8), 255).save(folder / "image.png")
    (folder / "plan.json").write_text(json.dumps({"forecast": None}))
    called: list[int] = []

    def hook(step: int, state: train.TrainState, run: train.HookRun) -> None:
        called.append(step)
        run.log({"own_hook": 2.0 * step})

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MUPAX_HOME", str(folder / "home"))
        patch.syspath_prepend(str(folder))
        path = [*sys.path]
        importlib.import_module("own_all")
        config = dataclasses.replace(train.RECIPES["own-everything"](), workdir="run")
        run = train.fit(config, hooks=[train.every(1, hook)])
        assert called == [1, 2]
        assert [row["own_hook"] for row in run.metrics if "own_hook" in row] == [2.0, 4.0]
        yield folder
        plugins.forget(path)
        sys.modules.pop("own_all", None)


@pytest.fixture
def place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run, as the working folder of a process that knows nothing of the module yet."""

    def absent(topology_name: str) -> None:
        raise topology.TopologyError("the TPU compiler is not installed")

    monkeypatch.setattr(topology, "ready", absent)
    monkeypatch.chdir(trained)
    monkeypatch.setenv("MUPAX_HOME", str(trained / "home"))
    return trained


def command(line: str) -> Done:
    """Run a line with the module named, as a process of its own would."""
    sys.modules.pop("own_all", None)
    return plugins.command(line, plugin="own_all")


@pytest.mark.parametrize(("typed", "line"), [*READS.items(), *READS_OF_THE_ZOO.items()])
def test_a_command_reads_what_is_of_ones_own(typed: str, line: str, place: Path):
    done = command(line)
    assert done.code == 0, done.err
    assert done.out.strip()
    if typed == "eval":
        assert "own_sure" in json.loads((place / "scores.json").read_text())


@pytest.mark.parametrize("typed", REFUSES)
def test_a_command_refuses_what_is_of_ones_own(typed: str, place: Path):
    line, message = REFUSES[typed]
    done = command(line)
    assert done.code == 2
    assert message in done.err
