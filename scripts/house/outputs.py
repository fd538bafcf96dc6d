"""Outputs of `mupax` commands on three tiny runs, recorded to compare them after a change."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from scripts import goldens
from scripts.house import commands
from scripts.house.digests import digest

_MODEL = "--model.width 48 --model.num-heads 6 --model.depth 2 --model.seq-len 56"
_TINY = f"{_MODEL} --data.batch-size 5"
_RUN = (
    f"{_TINY} --steps 120 --data.eval-batch-size 8 --data.eval-examples 16 "
    "--log.eval-every-steps 20"
)
_IMAGES = "--steps 40 --data.batch-size 27 --data.eval-batch-size 30 --log.eval-every-steps 20"
_T5 = "--model.positions relative --model.norm rmsnorm --model.no-embedding-norm"
"""Flags of an encoder-decoder that can be exported."""
_SPANS = f"{_TINY} {_T5} --steps 120 --data.eval-batch-size 8 --data.eval-examples 16"
VOLATILE = ("seconds", "workdir", "time", "digest", "host", "versions", "how")
"""Keys of JSON whose values differ from run to run."""


def record() -> dict[str, Any]:
    """Train three runs, run commands on them, and return all outputs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {
            "lm-tiny": trained(folder / "lm", f"lm-tiny {_RUN}"),
            "vit-digits": trained(folder / "vit", f"vit-digits {_IMAGES}"),
            "ed-tiny": trained(folder / "ed", f"ed-tiny {_SPANS}"),
        }
        return {
            "runs": runs,
            "text": {
                "lm-tiny, greedy": generated(folder / "lm", "def ", temperature=0),
                "lm-tiny, drawn": generated(folder / "lm", "def ", temperature=0.8),
                "ed-tiny, greedy": generated(
                    folder / "ed", "def f(x):\n    return x", temperature=0
                ),
            },
            "exported": {
                run: exported(folder / run, folder / f"{run}-exported")
                for run in ("lm", "vit", "ed")
            },
            "evaluated": {run: evaluated(folder / run) for run in ("lm", "vit", "ed")},
            "sweep": swept(folder / "sweep"),
            "check": checked(folder / "check.json"),
            "goldens": {name: digest(text) for name, text in goldens.goldens()},
        }


def trained(workdir: Path, words: str) -> dict[str, list[str]]:
    """Train a run, and return the names of its files and of its metrics."""
    commands.done(["train", *words.split(), "--workdir", str(workdir)])
    files: set[str] = set()
    for path in workdir.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(workdir))
            # Orbax names arrays by random digits, and TensorBoard its files by time and host.
            files.add(re.sub(r"(?<=/d/)[0-9a-f]{32}$|(?<=tfevents).*", "*", name))
    metrics: set[str] = set()
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        metrics |= json.loads(line).keys()
    return {"files": sorted(files), "metrics": sorted(metrics)}


def generated(workdir: Path, prompt: str, temperature: float) -> str:
    """Generate 40 tokens with a run, and return the printed text."""
    words = ["generate", str(workdir), "--prompt", prompt, "--tokens", "40"]
    return commands.done([*words, "--temperature", str(temperature)])


def exported(workdir: Path, out: Path) -> dict[str, str]:
    """Export a run as a Hugging Face folder, and return dtype, shape and digest of each tensor."""
    commands.done(["export", str(workdir), "--out", str(out)])
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors |= load_file(file)
    digests = {}
    for name, value in tensors.items():
        digests[name] = f"{value.dtype}{list(value.shape)} {digest(value.tobytes())}"
    return digests


def evaluated(workdir: Path) -> dict[str, Any]:
    """Evaluate a run, and return the JSON of `eval --json`."""
    path = workdir.with_suffix(".json")
    commands.done(["eval", str(workdir), "--json", str(path)])
    return without_volatile(json.loads(path.read_text()))


def swept(out: Path) -> dict[str, Any]:
    """Run a small sweep, and return its rows by their keys."""
    words = f"sweep lm-tiny {_TINY} --steps 20 --lr 2^-8:2^-6:3 --seeds 2 --out {out}"
    commands.done(words.split())
    rows = {}
    for line in (out / "points.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["key"]] = without_volatile(row)
    return rows


def checked(path: Path) -> dict[str, Any]:
    """Run a small coordinate check, and return its exit code and JSON.

    Raises:
        RuntimeError: The check wrote no JSON.
    """
    words = f"check lm-tiny {_MODEL} --grow heads --sizes 3 --seeds 2 --json {path}"
    # A check with findings exits with 1, which is no failure here.
    code, _, err = commands.run(words.split())
    if not path.is_file():
        raise RuntimeError(f"mupax {words} exited with {code}: {err}")
    return {"exit code": code, "findings": without_volatile(json.loads(path.read_text()))}


def without_volatile(value: Any) -> Any:
    """Return a JSON value without the keys of `VOLATILE`."""
    if isinstance(value, dict):
        fields = {}
        for key, item in value.items():
            if key not in VOLATILE:
                fields[key] = without_volatile(item)
        return fields
    if isinstance(value, list):
        return [without_volatile(item) for item in value]
    return value
