"""A missing extra: the command that needs it names it, before anything is compiled or written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tomllib
import types
from pathlib import Path

import jax
import pytest

from mupax import MupaxError, extras
from mupax.__main__ import main
from mupax.train.config.recipes import RECIPES
from mupax.train.config.sections import LogConfig
from mupax.train.run import loop

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
COMMANDS = {
    "cuda": ["train lm-tiny --workdir run"],
    "eval": ["eval nothing --tasks lambada_openai"],
    "gcs": ["train lm-tiny --workdir gs://b/r", "eval gs://b/r"],
    "hf": [
        "train lm-tiny --data.name hf:allenai/c4:en --workdir run",
        "train lm-tiny --data.evaluate web=hf:allenai/c4:en --workdir run",
        "train lm-tiny --data.name mix --data.mix a=python_corpus:1 b=hf:allenai/c4:en:1 --workdir run",
        "sweep lm-tiny --data.name hf:allenai/c4:en --lr 2^-9:2^-8:2 --out sweep",
        "transfer lm-tiny --grow heads=2,4 --preset mup --data.name hf:allenai/c4:en --out study",
        "data show hf:allenai/c4:en",
    ],
    "quantized": [
        "train lm-tiny --model.compute.product-dtype int8 --workdir run",
        "sweep lm-tiny --model.compute.product-dtype int8 --lr 2^-9:2^-8:2 --out sweep",
    ],
    "serve": ["serve nothing"],
    "tpu": ["compile lm-tiny --topology v5e:2x2", "train lm-tiny --workdir run"],
    "trackio": [
        "train lm-tiny --log.trackio project --workdir run",
        "train lm-tiny --log.trackio project --dry-run",
    ],
    "tune": ["tune lm-tiny --over lr --out tune", "tune lm-tiny --over lr --dry-run"],
    "wandb": ["train vit-digits --log.wandb project --workdir run"],
}
"""What needs an extra, by the extra."""
NO_COMMAND = {
    "dev": "tools of this checkout",
    "hub": "part of a plain install",
    "ray": "scripts/launch/ray_train.py",
    "site": "tools of this checkout",
    "torch": "scripts.bench and examples",
}
CASES = [(extra, words) for extra, commands in COMMANDS.items() for words in commands]

pytestmark = pytest.mark.core


def test_every_extra_has_a_case() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["optional-dependencies"].keys() == {*COMMANDS, *NO_COMMAND}
    assert extras.MODULES.keys() == COMMANDS.keys()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is compiled in an empty folder."""
    programs: list[object] = []
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda program, *a, **k: programs.append(program)
    )
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return programs


@pytest.mark.parametrize(("extra", "words"), CASES)
def test_a_missing_extra_is_named_first(
    extra: str,
    words: str,
    compiled: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in extras.MODULES[extra]:
        monkeypatch.setitem(sys.modules, module, None)
    if extra in ("cuda", "tpu") and words.startswith("train"):
        monkeypatch.setenv("JAX_PLATFORMS", extra)
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert f"run `pip install 'mupax[{extra}]'`" in " ".join(err.split()), err
    assert compiled == []
    assert os.listdir() == []


def test_control_with_the_extra_the_run_begins(
    compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(
        loop, "runtime", lambda config: begun.append(config) or contextlib.nullcontext()
    )
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    log = LogConfig(wandb="project")
    with pytest.raises(AttributeError):  # of the stand-in
        loop.run(dataclasses.replace(RECIPES["lm-tiny"](), log=log))
    assert len(begun) == 1


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.MODULES, "wandb", ("json", "no_such_package"))
    with pytest.raises(
        MupaxError, match=r"--x needs no_such_package; run `pip install 'mupax\[wandb\]'`"
    ):
        extras.require("wandb", "--x")
    monkeypatch.setitem(extras.MODULES, "wandb", ("json",))
    extras.require("wandb", "--x")
