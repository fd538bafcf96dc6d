"""Advice of `--dry-run` on a step that does not fit: the flags it names do make the step fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from mupax.__main__ import main
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.core.costs import fit
from mupax.train.core.program import assemble
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture: each step is compiled once for all tests of this file

SMALL = "--model.activation relu --model.positions learned --model.no-norm-gain --model.no-bias"
"""Flags of a model that compiles in less time."""
MODEL = f"--model.depth 1 {SMALL}"
FLAGS = f"{MODEL} --mesh.data 2 --mesh.fsdp 4 --data.batch-size 32"
Advice = Callable[..., str | None]


def estimate(flags: str) -> fit.MemoryEstimate:
    """Return the compiled memory of a training step."""
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], flags.split()).config
    memory = fit.needs(assemble(config))
    assert memory
    return memory


@pytest.fixture
def advice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Advice:
    """Return a dry run on devices of `limit` bytes: its row of advice, or None if the step fits."""

    def run(limit: float, flags: str = FLAGS) -> str | None:
        monkeypatch.setattr(fit, "room", lambda device: int(limit))
        assert main(["train", "lm-tiny", *flags.split(), "--dry-run"]) == 0
        row = re.search(r"^ (does not fit|fits) +(.*)$", capsys.readouterr().out, re.M)
        assert row
        return row[2] if row[1] == "does not fit" else None

    return run


def advised(text: str | None) -> str:
    """Return the flags in a row of advice."""
    flags = re.search(r"[Ww]ith (--.*?),? it takes", text or "")
    assert flags, text
    return flags[1]


def test_the_advised_flags_make_the_step_fit(advice: Advice) -> None:
    memory = estimate(FLAGS)
    assert advice(memory.peak) is None
    limit = memory.state + memory.temporary // 2
    flags = advised(advice(limit))
    assert estimate(f"{FLAGS} {flags}").peak <= limit


def test_a_state_that_is_too_large_alone_is_split_over_the_present_devices(
    advice: Advice,
) -> None:
    flags = f"{MODEL} --data.batch-size 24"
    memory = estimate(flags)
    limit = memory.state * 0.9 + memory.temporary / 2
    text = advice(limit, flags)  # the control: without the flags it does not fit
    assert "as compiled" in (text or "")
    assert re.match(r"--mesh\.fsdp [248]\b", advised(text)), text
    assert advice(limit, f"{flags} {advised(text)}") is None


def test_more_devices_than_this_machine_has_divide_batch_and_sizes(
    advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Proposals for the present devices are refused, which one of them shows.
    monkeypatch.setattr(fit, "_TRIES", 1)
    # Of one block, activations are too small a part for a larger mesh to help.
    flags = f"{SMALL} --model.depth 2 --data.batch-size 40 --mesh.fsdp 2"
    smallest = estimate(f"{flags} --model.compute.remat block --accumulation-steps 5")
    limit = smallest.peak * 0.85
    text = advice(limit, flags)  # the control: without the flags it does not fit
    assert "still too much" not in (text or "")
    more_flags = f"{flags} {advised(text)}"
    data = int(re.findall(r"--mesh\.data (\d+)", more_flags)[-1])
    fsdp = int(re.findall(r"--mesh\.fsdp (\d+)", more_flags)[-1])
    assert 40 % (data * fsdp) == 0, text
    assert 128 % fsdp == 0, text
    assert data * fsdp > 8
    assert f"On {data * fsdp} such devices" in (text or "")
    assert advice(limit, more_flags) is None


def test_a_dry_run_names_the_devices_that_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "lm-tiny", *MODEL.split(), "--data.batch-size", "16", "--mesh.fsdp", "16"]
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "fsdp 16 (cpu); 8 of them are not here, where a run would be refused" in printed
    assert "for activations and gradients, estimated from the step of one" in printed
    assert main(command) == 2
    message = "the mesh needs a multiple of 16 devices (fsdp 16); there are 8"
    assert message in capsys.readouterr().err


def test_advice_says_that_no_flags_make_it_fit(
    advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_TRIES", 1)
    text = advice(estimate(FLAGS).temporary / 4) or ""
    problem = "No flags make it fit these devices. On "
    assert re.search(
        rf"{re.escape(problem)}\d+ such devices, with .* by estimate, still too much", text
    )
    text = advice(1000) or ""
    assert f"{problem}32 of them the activations of one example alone are more." in text
    assert text.endswith("Write a smaller model, or a smaller --model.seq-len")
    text = advice(1000, f"{MODEL} --data.batch-size 8") or ""
    assert "No larger mesh divides the batch and" in text


def test_a_cpu_device_has_a_share_of_the_host() -> None:
    assert 2**27 < (fit.room(jax.devices()[0]) or 0) < 2**40
