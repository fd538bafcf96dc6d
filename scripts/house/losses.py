"""Losses of fifty training steps, fresh and resumed, for recipes and for models with rare parts."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scripts.house import commands

STEPS = 50
_ODD_TEXT = (
    "--data.batch-size 5 --model.seq-len 56 --data.eval-batch-size 8 --data.eval-examples 16"
)
"""Flags for 280 targets in a step. This is no power of two, so that a mean over targets rounds."""
_ODD_IMAGES = "--data.batch-size 27 --data.eval-batch-size 30"
_ON_EIGHT = (
    "--data.batch-size 24 --model.seq-len 60 --model.width 48 --model.num-heads 6 --model.depth 2 "
    "--data.eval-batch-size 24 --data.eval-examples 24"
)
"""Flags for sizes that all meshes of `ON_EIGHT_DEVICES` divide, with 1,440 targets in a step."""
ON_ONE_DEVICE = {
    "lm-laptop": f"lm-laptop {_ODD_TEXT}",
    "lm-tiny": f"lm-tiny {_ODD_TEXT}",
    "vit-digits": f"vit-digits {_ODD_IMAGES}",
    "ed-tiny": f"ed-tiny {_ODD_TEXT}",
    "experts": f"lm-tiny {_ODD_TEXT} --model.depth 2 --model.experts 4",
    "centred output": f"lm-tiny {_ODD_TEXT} --model.depth 2 --model.centered",
    "muon": f"lm-tiny {_ODD_TEXT} --model.depth 2 --optimizer.name muon --optimizer.peak-lr 0.02",
    "accumulated, averaged": (
        f"lm-tiny {_ODD_TEXT} --model.depth 2 --accumulation-steps 5 --ema.decay 0.9"
    ),
}
"""Name of a run to the words of its command, for one device."""
ON_EIGHT_DEVICES = {
    "fsdp 8": f"lm-tiny {_ON_EIGHT} --mesh.data 1 --mesh.fsdp 8",
    "data 2 fsdp 4": f"lm-tiny {_ON_EIGHT} --mesh.data 2 --mesh.fsdp 4",
    "tensor 2": f"lm-tiny {_ON_EIGHT} --mesh.data 4 --mesh.tensor 2",
    "sequence 2": f"lm-tiny {_ON_EIGHT} --mesh.data 4 --mesh.sequence 2",
}


def record() -> dict[str, Any]:
    """Train the runs for this process's number of devices, and return their losses.

    Each run is trained afresh and resumed from half of its steps.
    """
    on_one = jax.device_count() == 1
    cases = ON_ONE_DEVICE if on_one else ON_EIGHT_DEVICES
    with tempfile.TemporaryDirectory() as folder:
        values: dict[str, Any] = {}
        for name, words in cases.items():
            values[name] = trained(words.split(), Path(folder) / "run")
        if on_one:
            values["lora"] = adapters(Path(folder))
    return values


def trained(words: Sequence[str], workdir: Path) -> dict[str, list[float]]:
    """Train a run, resume it from half of its steps, and return both lists of losses.

    Args:
        words: Words of the command after `mupax train`, or of another command that trains.
        workdir: Folder of the run, which is removed before and after.

    Returns:
        `fresh` and `resumed`: the loss of each of the `STEPS` steps.
    """
    shutil.rmtree(workdir, ignore_errors=True)
    flags = ["--workdir", str(workdir), "--steps", str(STEPS)]
    flags += ["--log.eval-every-steps", "None", "--log.no-samples"]
    flags += ["--checkpoint.every-steps", str(STEPS // 2), "--checkpoint.keep", "2"]
    commands.done(["train", *words, *flags])
    fresh = rows(workdir)

    # Without its last checkpoint, the run resumes from the one before.
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    commands.done(["train", "--resume", "--workdir", str(workdir)])
    resumed = rows(workdir)
    shutil.rmtree(workdir)
    return {"fresh": fresh, "resumed": resumed}


def adapters(folder: Path) -> dict[str, list[float]]:
    """Train a small decoder, then low-rank adapters on it, and return the adapters' losses.

    The text is the source of Python's `json` package.
    """
    text = folder / "text"
    text.mkdir()
    for source in sorted(Path(json.__file__).parent.glob("*.py")):
        shutil.copy(source, text / f"{source.stem}.txt")
    start = folder / "start"
    words = f"train lm-tiny {_ODD_TEXT} --model.depth 2 --steps 5 --workdir {start}"
    commands.done(words.split())
    finetune = f"finetune lm {text} --from {start} --lora.rank 4 --data.batch-size 5"
    return trained(finetune.split(), folder / "adapters")


def rows(workdir: Path) -> list[float]:
    """Return the training loss of every step; a step that was trained twice has its last loss.

    Raises:
        RuntimeError: A step has no loss.
    """
    losses: dict[int, float] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "loss" in row:
            losses[row["step"]] = row["loss"]
    if sorted(losses) != list(range(1, STEPS + 1)):
        raise RuntimeError(f"{workdir} has losses of {len(losses)} steps; {STEPS} were trained")
    return [losses[step] for step in sorted(losses)]
