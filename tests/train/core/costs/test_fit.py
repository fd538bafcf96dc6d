"""What `--dry-run` says of a step that does not fit: flags that were compiled, and that hold when they are typed."""

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

FLAGS = "--model.depth 2 --mesh.data 2 --mesh.fsdp 4 --data.batch-size 32"
Advice = Callable[[float], str | None]


def needs(flags: str) -> fit.MemoryEstimate:
    memory = fit.needs(assemble(cli.parse("lm-tiny", RECIPES["lm-tiny"], flags.split()).config))
    assert memory
    return memory


@pytest.fixture(scope="module")
def memory() -> fit.MemoryEstimate:
    return needs(FLAGS)


@pytest.fixture
def advice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Advice:
    """The row of a dry run on devices of so many bytes, where the step does not fit; None where it says that it does."""

    def run(limit: float, flags: str = FLAGS) -> str | None:
        monkeypatch.setattr(fit, "room", lambda device: int(limit))
        assert main(["train", "lm-tiny", *flags.split(), "--dry-run"]) == 0
        row = re.search(r"^ (does not fit|fits) +(.*)$", capsys.readouterr().out, re.M)
        assert row
        return row[2] if row[1] == "does not fit" else None

    return run


def advised(text: str | None) -> str:
    """The flags of a row."""
    flags = re.search(r"[Ww]ith (--.*?),? it takes", text or "")
    assert flags, text
    return flags[1]


def test_the_flags_that_it_names_make_it_fit(memory: fit.MemoryEstimate, advice: Advice) -> None:
    assert advice(memory.peak) is None
    limit = memory.state + memory.temporary // 2
    flags = advised(advice(limit))
    assert needs(f"{FLAGS} {flags}").peak <= limit


def test_a_state_that_is_too_large_alone_is_split_over_the_devices_there_are(
    advice: Advice,
) -> None:
    flags = "--model.depth 2 --data.batch-size 24"
    whole = needs(flags)
    limit = whole.state * 0.9 + whole.temporary / 2
    text = advice(limit, flags)  # the control: without the flags it does not fit
    assert "as compiled" in (text or "")
    assert re.match(r"--mesh\.fsdp [248]\b", advised(text)), text
    assert advice(limit, f"{flags} {advised(text)}") is None


def test_more_devices_than_there_are_divide_batch_and_sizes(advice: Advice) -> None:
    flags = "--model.depth 2 --data.batch-size 40 --mesh.fsdp 2"
    limit = needs(f"{flags} --model.compute.remat block --accumulation-steps 5").peak * 0.85
    text = advice(limit, flags)  # the control: without the flags it does not fit
    assert "still too much" not in (text or "")
    again = f"{flags} {advised(text)}"
    data, fsdp = (int(re.findall(rf"--mesh\.{axis} (\d+)", again)[-1]) for axis in ("data", "fsdp"))
    assert (40 % (data * fsdp), 128 % fsdp) == (0, 0), text
    assert data * fsdp > 8
    assert f"On {data * fsdp} such devices" in (text or "")
    assert advice(limit, again) is None


def test_a_dry_run_for_devices_that_are_not_here_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["lm-tiny", "--model.depth", "2", "--data.batch-size", "16", "--mesh.fsdp", "16"]
    assert main(["train", *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "fsdp 16 (cpu); 8 of them are not here, where a run would be refused" in printed
    assert "for activations and gradients, estimated from the step of one" in printed
    assert main(["train", *words]) == 2
    assert (
        "the mesh needs a multiple of 16 devices (fsdp 16); there are 8" in capsys.readouterr().err
    )


def test_what_no_flag_makes_fit_is_said(memory: fit.MemoryEstimate, advice: Advice) -> None:
    text = advice(memory.temporary / 4) or ""
    assert re.search(
        r"No flags make it fit these devices\. On \d+ such devices, with .* by estimate, still too much",
        text,
    )
    text = advice(1000) or ""
    assert (
        "No flags make it fit these devices. On 32 of them the activations of one example alone are more."
        in text
    )
    assert text.endswith("Write a smaller model, or a smaller --model.seq-len")
    assert "No larger mesh divides the batch and" in (
        advice(1000, "--model.depth 2 --data.batch-size 8") or ""
    )


def test_a_cpu_has_its_part_of_the_host() -> None:

    assert 2**27 < (fit.room(jax.devices()[0]) or 0) < 2**40
