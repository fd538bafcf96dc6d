"""Runs of 2 and 4 real processes on this machine: what one process trains, they train; and how they end together."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPS = 5
TINY = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-batch-size 64 --data.eval-examples 100 --optimizer.warmup-steps 2 --optimizer.schedule constant "
    "--checkpoint.every-steps 100000000 --log.no-tensorboard --distributed.heartbeat-seconds 4"
)

# The command line, with two windows: on every batch that goes to the devices, and on the parameters at the end. What they
# show goes to a file, a line a write: batches are made in threads, whose prints run into the lines of the loop. Where a
# process BREAKS, its batch 12 of training is bad, and at batch 25 it gets SIGTERM. ALTERNATE lays pairs of the processes' devices in turn over
# the mesh, as the torus of a TPU slice may. SHARES slows what tokenizes the text, and has those that wait for it help at once.
DRIVER = """
import hashlib, json, os, signal, sys, time
import jax
from jax.experimental import mesh_utils
from mupax.train.parallel import sharding
from mupax.train.run.report import finish

if os.environ.get("ALTERNATE"):
    in_order = mesh_utils.create_device_mesh

    def in_turn(shape, devices, **options):
        count = jax.local_device_count()
        pairs = [i for first in range(0, count, 2) for i in range(first, len(devices), count)]
        return in_order(shape, [device for i in pairs for device in devices[i : i + 2]], **options)

    mesh_utils.create_device_mesh = in_turn

from mupax.train.data import cache
from mupax.train.data.text import packing, shares, tokenizer
from mupax.train.parallel import processes

packing._STEP_BYTES, shares._PARTS = 1000, 4
if os.environ.get("SHARES"):
    encode = tokenizer.Bytes.encode
    tokenizer.Bytes.encode = lambda self, texts: time.sleep(0.2) or encode(self, texts)
    cache.PATIENCE_S, processes.LEAD_S = 0.0, 1.5

put, leave, seen = sharding.BatchSharding.shard_batch, finish.leave, []
window = os.open(os.environ["WINDOW"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)

def show(word, what):
    os.write(window, f"{word} {what}\\n".encode())

def watched_put(self, batch):
    seen.append(1)
    if os.environ.get("BREAKS") and len(seen) == 12:
        batch = {**batch, "weights": batch["weights"] * float("nan")}
    if os.environ.get("BREAKS") and len(seen) == 25:
        os.kill(os.getpid(), signal.SIGTERM)
    rows = [row for part in self.rows for row in range(part.start, part.stop)]
    hashes = [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in batch["inputs"]]
    show("rows", json.dumps(dict(zip(rows, hashes, strict=True))))
    return put(self, batch)

def watched_leave(session, params):
    digest = hashlib.sha256()
    for name, value in sorted(params.items()):
        shards = {str(shard.index): shard.data for shard in value.addressable_shards}
        for index in sorted(shards):
            digest.update(name.encode() + index.encode() + bytes(memoryview(shards[index])))
    show("digest", digest.hexdigest())
    leave(session, params)

sharding.BatchSharding.shard_batch, finish.leave = watched_put, watched_leave
from mupax.train.__main__ import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""

# What gloo's threads write to standard output, in pieces that run into each other.
GLOO = r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\n)*"


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    window: str

    def shown(self, word: str) -> list[str]:
        return re.findall(rf"^{word} (.*)$", self.window, re.MULTILINE)

    def batches(self) -> list[dict[str, str]]:
        """Of every batch in turn, the rows that the process made: position in the global batch to content."""
        return [json.loads(line) for line in self.shown("rows")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, choose = tmp_path_factory.mktemp("joined"), random.Random(0)
    words = (
        "def",
        "return",
        "import",
        "class",
        "self",
        "value",
        "lambda",
        "yield",
        "while",
        "None",
    )
    (path / "texts").mkdir()
    for i in range(60):
        lines = (" ".join(choose.choice(words) for _ in range(9)) for _ in range(10))
        (path / "texts" / f"{i}.txt").write_text("\n".join(lines))
    return path


def start(
    folder: Path,
    count: int,
    words: str,
    *,
    devices: int = 1,
    alternate: bool = False,
    shares: bool = False,
    breaks: int | None = None,
    every: int = 100_000_000,
) -> list[Done]:
    """Run `count` processes to their end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = []
    for index in range(count):
        joined = f"--distributed.coordinator localhost:{port} --distributed.processes {count} --distributed.process {index}"
        tiny = TINY.replace("every-steps 100000000", f"every-steps {every}")
        argv = [
            *tiny.split(),
            "--data.name",
            "text:texts",
            *words.split(),
            *(joined.split() if count > 1 else ()),
        ]
        environ = {
            **os.environ, "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
            "MUPAX_DATA": str(folder / ("shared" if shares else "cache")), "SHARES": "yes" if shares else "",
            "BREAKS": "yes" if index == breaks else "",
            "WINDOW": str(folder / f"window{index}"), "ALTERNATE": "yes" if alternate else "",
        }  # fmt: skip
        command = [sys.executable, "-c", DRIVER, *argv]
        files = [(folder / f"{name}{index}").open("w+") for name in ("out", "err", "window")]
        running.append(
            (
                subprocess.Popen(
                    command, cwd=folder, env=environ, stdout=files[0], stderr=files[1]
                ),
                files,
            )
        )
    done = []
    for process, files in running:
        try:
            code = process.wait(timeout=240)
        finally:
            process.kill()
        for file in files:
            file.seek(0)
        done.append(Done(code, *(file.read() for file in files)))
        for file in files:
            file.close()
    return done


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def losses(path: Path) -> dict[tuple[str, int], float]:
    """Every loss and gradient norm, by name and step."""
    names = ("loss", "eval_loss", "grad_norm")
    return {
        (name, row["step"]): row[name] for row in rows_of(path) for name in names if name in row
    }


def together(processes: list[Done]) -> list[dict[str, str]]:
    """The global batches, from the rows of every process; what two processes make must be the same."""
    whole = []
    for parts in zip(*(one.batches() for one in processes), strict=True):
        batch: dict[str, str] = {}
        for part in parts:
            assert all(batch.setdefault(row, content) == content for row, content in part.items())
        whole.append(batch)
    return whole


@pytest.fixture(scope="module")
def alone(folder: Path) -> Done:
    """The run of one process, in the workdir `one`, that the others must equal."""
    (done,) = start(
        folder, 1, f"--workdir one --steps {STEPS} --log.eval-every-steps 1 --log.no-samples"
    )
    assert done.code == 0, done.err
    return done


def training(batches: list[dict[str, str]]) -> list[dict[str, str]]:
    """Batches of training are made ahead of time, so that how many were made differs; those of evaluation have 64 rows."""
    return [batch for batch in batches if len(batch) == 16]


@pytest.mark.slow
def test_two_and_four_processes_train_what_one_trains(folder: Path, alone: Done) -> None:
    # Two processes of four devices train three steps and leave, four of one go on: hosts and mesh may change. Heads are
    # split inside each of the two, which have every other rows; positions over two pairs of the four.
    words = "--workdir many --steps 3 --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"
    two = start(folder, 2, words, devices=4, alternate=True, shares=True)
    assert [one.code for one in two] == [0, 0], two[0].err + two[1].err
    words = f"--workdir many --steps {STEPS} --resume --mesh.data 2 --mesh.sequence 2"
    four = start(folder, 4, f"{words} --log.no-samples")
    assert [one.code for one in four] == [0] * 4, "".join(one.err for one in four)

    assert [row["step"] for row in rows_of(folder / "many") if "loss" in row] == list(
        range(1, STEPS + 1)
    )
    many, one = losses(folder / "many"), losses(folder / "one")
    assert [step for name, step in many if name == "eval_loss"] == [
        3,
        STEPS,
    ]  # where each of the two ended
    assert many == pytest.approx({key: one[key] for key in many}, rel=3e-6)
    assert (
        len({one.shown("digest")[0] for one in four}) == 1
    )  # each of the two has the fsdp parts that the other has not
    assert len({one.shown("digest")[0] for one in two}) == 2
    assert alone.shown("digest") != two[0].shown("digest")  # after other steps

    order, *parts = (training(together(processes)) for processes in ([alone], two, four))
    assert order[:STEPS] == [*parts[0][:3], *parts[1][: STEPS - 3]]
    rows = [[sorted(map(int, batch)) for batch in one.batches()[:3]] for one in two]
    assert rows == [[[0, 1, 2, 3, 8, 9, 10, 11]] * 3, [[4, 5, 6, 7, 12, 13, 14, 15]] * 3]
    assert len({json.dumps(batch) for batch in order[:STEPS]}) == STEPS

    # The two have packed the text side by side, to the bytes that one packed.
    assert re.search(
        r"other processes tokenized \d+ of \d+ parts of train", " ".join(two[0].out.split())
    )
    assert "other processes" not in alone.out
    packed = [sorted((folder / cache).glob("packed/*/*.*")) for cache in ("shared", "cache")]
    assert [path.name for path in packed[0]] == ["eval.bin", "manifest.json", "train.bin"]
    assert [path.read_bytes() for path in packed[0]][::2] == [
        path.read_bytes() for path in packed[1]
    ][::2]

    # One process alone speaks and writes.
    assert "compiled in" in two[0].out
    assert re.fullmatch(GLOO, two[0].out) is None  # the control
    assert re.fullmatch(GLOO, two[1].out)
    assert (folder / "many" / "sample.txt").is_file()
    assert not (folder / "many" / ".shared").exists()


@pytest.mark.slow
def test_a_bad_step_leads_all_back_and_sigterm_to_one_stops_all_at_one_step(folder: Path) -> None:
    words = "--workdir stopped --steps 100000 --faults.bad-numbers rollback --checkpoint.keep 1"
    first, second = start(folder, 2, words, breaks=1, every=5)
    assert (first.code, second.code) == (143, 143), first.err + second.err
    assert re.search(
        r"is not finite at step 12 .*; back to step 10, going on 2 batches",
        " ".join(first.out.split()),
    )
    (saved,) = [int(path.name) for path in (folder / "stopped" / "checkpoints").iterdir()]
    assert (
        f"stopped by SIGTERM at step {saved} of 100000, saved; add --resume to go on" in first.out
    )
    assert [row["step"] for row in rows_of(folder / "stopped") if "loss" in row] == list(
        range(1, saved + 1)
    )
