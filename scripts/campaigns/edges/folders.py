"""Trials of commands that make a folder, killed or on a full disk, on a disk and in a bucket.

A command is killed at one operation on the files below the folder's parent
(`scripts/campaigns/injection/faults.c`), or at one request to its bucket (`object_faults.py`). A
command that reads the folder must then refuse it, unless it is complete. The same command must then
make what it makes when nobody disturbs it, and leave nothing else. Commands run in forks of a
worker, `python -m scripts.campaigns.edges.folders --worker FOLDER`, which has everything imported.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mupax.train.checkpoints.making import LOCK
from scripts.campaigns import forks, tiny_runs, workers
from scripts.campaigns.edges.trial import BOUND_S, Ended, Outcome, Trial, judge, right
from scripts.campaigns.injection import shim
from scripts.campaigns.injection.emulator import free_port
from scripts.campaigns.injection.object_faults import Bucket

MODULE = "scripts.campaigns.edges.folders"
DISK_KINDS = ("mkdir", "open", "write", "fsync", "rename", "unlink")
BUCKET_KINDS = ("upload", "delete")
MOMENTS = ("killed", "killed after")
SHARES = (0.0, 0.4, 0.8)
"""Positions of the disturbed operation among all of its kind: 0.0 is the first, 1.0 the last."""
FULL_KINDS = ("mkdir", "write", "fsync", "rename")
ALWAYS = 10**9
"""Number of operations that fail on a disk that stays full."""
MODEL = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-batch-size 32 --data.eval-examples 64 "
    "--optimizer.warmup-steps 2 --log.no-samples --log.no-tensorboard"
)
TOKENIZER = "data tokenizer text:{text} --size 300 --out {out}"
SWEEP = f"sweep lm-tiny --data.name text:{{text}} {MODEL} --steps 6 --lr 1e-3,2e-3 --out {{out}}"
OWN_TRACES = (".making", ".mupax-making", ".partial", "incomplete", ".part")
"""Parts of the names of temporary files and folders, which a complete command has removed."""


@dataclass(frozen=True)
class Maker:
    """A command that makes a folder or a file.

    Attributes:
        words: Command line. {out}, {source}, {text} and {other} stand for paths.
        reader: Command line that reads the output, and must refuse an incomplete one. Default:
            none.
        makes_folder: True if the output is a new folder. It may lie in a bucket, and the folder may
            exist and be empty before.
        out: Name of the output in the watched folder.
        absent: Kinds of operations that the command does not do in the watched folder.
    """

    words: str
    reader: str = ""
    makes_folder: bool = True
    out: str = "out"
    absent: tuple[str, ...] = ()


MAKERS = {
    "export": Maker("export {source}/run --out {out}", "import {out} --out {other}"),
    "import": Maker("import {source}/hf --preset mup --out {out}", "export {out} --out {other}"),
    "tokenizer": Maker(
        TOKENIZER, makes_folder=False, out="tokenizer.json", absent=("unlink", "mkdir")
    ),
    "prepare text": Maker(
        "data prepare text:{text} --tokenizer bpe:300", makes_folder=False, out="data"
    ),
    "prepare digits": Maker(
        "data prepare digits --data-dir {out}", makes_folder=False, absent=("unlink", "fsync")
    ),
    "sweep": Maker(SWEEP, makes_folder=False),
    "convert": Maker(
        "convert {source}/run --form mean-field --out {out}", "train --resume --workdir {out}"
    ),
    "grow": Maker(
        "grow {source}/run --set width=32 num_heads=4 --steps 20 --out {out}",
        "train --resume --workdir {out}",
    ),
}


class UndisturbedCommand(NamedTuple):
    """A command that nobody disturbed.

    Attributes:
        digests: Digests of its output (`Lab.digests`).
        calls: Number of its operations of each kind.
    """

    digests: dict[str, Any]
    calls: dict[str, int]


class Lab:
    """Worker, bucket and trained run that all trials share. Each is made on its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controls: dict[str, UndisturbedCommand] = {}

    @functools.cached_property
    def bucket(self) -> Bucket:
        """An emulated bucket whose requests can be disturbed."""
        bucket = Bucket()
        atexit.register(bucket.__exit__)
        return bucket.__enter__()

    @functools.cached_property
    def control(self) -> shim.Control:
        """Shared memory by which file operations of the worker's forks are disturbed."""
        library = shim.compiled(self.folder)
        if library is None:
            raise SystemExit("no C compiler (cc) is installed; the campaign needs one")
        return shim.Control(self.folder / "control", library)

    @functools.cached_property
    def worker(self) -> workers.Worker:
        """Process from which commands are forked."""
        environ = {
            **self.control.environ,
            **self.bucket.environ,
            "TMPDIR": str(self.folder / "tmp"),
        }
        (self.folder / "tmp").mkdir()
        worker = workers.Worker(MODULE, self.folder / "worker", environ)
        atexit.register(worker.end)
        return worker

    @functools.cached_property
    def source(self) -> Path:
        """Folder with a trained run (`run`) and its export in the format of Hugging Face (`hf`)."""
        tiny_runs.write_text(self.folder)
        train = (
            f"train lm-tiny --data.name text:{self.text} {MODEL} "
            f"--steps 16 --workdir {self.folder}/run"
        )
        for words in (train, f"export {self.folder}/run --out {self.folder}/hf"):
            ended = self.run(words.split(), {})
            if ended.code != 0:
                raise SystemExit(f"{words} fails by itself:\n{ended.output[-2000:]}")
        return self.folder

    def watched(self, folder: Path, bucket: bool = False) -> Bucket | shim.Control:
        """Count operations on files below `folder/place`, or requests to the bucket, from now on.

        Returns:
            The object that counts them, and that can let a chosen one fail.
        """
        if bucket:
            self.bucket.watch("")
            return self.bucket
        self.control.watch(folder / "place")
        return self.control

    @property
    def text(self) -> Path:
        """Path of a small text, which exists once `source` was used."""
        return self.folder / "text.txt"

    def run(self, words: Sequence[str], environ: dict[str, str], *, victim: bool = False) -> Ended:
        """Run one command to its end.

        Args:
            words: Command line without `mupax`.
            victim: True if the bucket must kill the command at the armed request.
        """
        began = time.monotonic()
        pid = self.worker.ask({"start": list(words), "environ": environ}, BOUND_S)
        if pid is None:
            return Ended(None, "the worker did not start the command", time.monotonic() - began)
        if victim:
            self.bucket.victim(pid)
        answer = self.worker.ask({"wait": pid, "seconds": 3 * BOUND_S}, 4 * BOUND_S)
        code, output = answer or (None, "")
        return Ended(code, output, time.monotonic() - began)

    def run_together(self, words: Sequence[str], processes: int) -> list[Ended]:
        """Run one command as several processes of one run, and return the end of each."""
        began = time.monotonic()
        coordinator = f"localhost:{free_port()}"
        joined = ["--distributed.coordinator", coordinator, "--distributed.processes"]
        joined += [str(processes), "--distributed.process"]
        pids: list[int] = []
        for index in range(processes):
            question = {"start": [*words, *joined, str(index)], "environ": {}}
            pids.append(self.worker.ask(question, BOUND_S))
        # Each fork stops itself at its start, so that all go on at the same time.
        for pid in pids:
            self.worker.ask({"go": pid}, BOUND_S)
        ended = []
        for pid in pids:
            question = {"wait": pid, "seconds": 3 * BOUND_S}
            code, output = self.worker.ask(question, 4 * BOUND_S)
            ended.append(Ended(code, output, time.monotonic() - began))
        return ended

    def digests(self, maker: Maker, out: str) -> dict[str, Any]:
        """Return digests of the output of a command, without times and paths."""
        return self.worker.ask({"made": out, "kind": maker.words.split()[0]}, 2 * BOUND_S)


@dataclass(frozen=True)
class Attempt:
    """One command in a folder of its own.

    Attributes:
        lab: Worker and inputs that trials share.
        maker: The command.
        folder: Folder of the trial.
        out: Path of the output, which may be in the bucket.
        environ: Variables of the command.
    """

    lab: Lab
    maker: Maker
    folder: Path
    out: str
    environ: dict[str, str]

    def words(self, text: str, out: str | None = None) -> list[str]:
        """Return the words of a command line, with paths in place of words in braces.

        Args:
            out: Path for {out}. Default: the output of this command.
        """
        places = {
            "out": out or self.out,
            "source": self.lab.source,
            "text": self.lab.text,
            "other": self.folder / "other",
        }
        return [word.format(**places) for word in text.split()]

    def run(self, *, victim: bool = False) -> Ended:
        """Run the command."""
        return self.lab.run(self.words(self.maker.words), self.environ, victim=victim)


def attempt(
    lab: Lab, maker: Maker, folder: Path, *, bucket: bool = False, empty: bool = False
) -> Attempt:
    """Return a command that is ready to run, with its output in `folder/place` or in the bucket.

    Args:
        bucket: Write the output into the bucket. Default: on the disk.
        empty: Make the output's folder, empty, before the command runs.
    """
    place = folder / "place"
    place.mkdir()
    out = f"gs://bucket/{folder.name}/{maker.out}" if bucket else str(place / maker.out)
    if empty:
        (place / maker.out).mkdir()
    data = place / "data" if maker.out == "data" else lab.folder / "data"
    return Attempt(lab, maker, folder, out, {"MUPAX_DATA": str(data)})


def undisturbed(
    lab: Lab, name: str, *, bucket: bool = False, empty: bool = False
) -> UndisturbedCommand:
    """Return output and operations of a command that nobody disturbs.

    The first call with these arguments runs the command, and later ones return the same result.

    Args:
        name: Key of `MAKERS`.
        bucket: Write the output into the bucket. Default: on the disk.
        empty: Make the output's folder, empty, before the command runs.

    Raises:
        SystemExit: The command fails by itself.
    """
    key = f"{name} {bucket} {empty}"
    if key not in lab.controls:
        folder = lab.folder / f"control-{len(lab.controls)}"
        folder.mkdir()
        tried = attempt(lab, MAKERS[name], folder, bucket=bucket, empty=empty)
        # This makes the source, whose operations must not be counted.
        tried.words(tried.maker.words)
        counter = lab.watched(folder, bucket)
        ended = tried.run()
        calls = counter.calls()
        lab.control.watch(None)
        if ended.code != 0:
            raise SystemExit(f"{name} fails by itself: {ended.output[-2000:]}")
        digests = lab.digests(tried.maker, tried.out)
        lab.controls[key] = UndisturbedCommand(digests, calls)
    return lab.controls[key]


def killed(
    lab: Lab,
    name: str,
    kind: str,
    moment: str,
    share: float,
    folder: Path,
    *,
    bucket: bool = False,
    empty: bool = False,
) -> Outcome:
    """Kill a command at an operation, read its output, and run the command again.

    Args:
        name: Key of `MAKERS`.
        kind: Kind of the operation, one of `DISK_KINDS` or `BUCKET_KINDS`.
        moment: `killed` before the operation, or `killed after` it.
        share: Position of the operation among those of its kind, from 0 to 1.
        bucket: Write the output into the bucket. Default: on the disk.
        empty: Make the output's folder, empty, before the command runs.
    """
    expected, calls = undisturbed(lab, name, bucket=bucket, empty=empty)
    if not calls[kind]:
        return Outcome("ok", f"the command has no {kind} there")
    tried = attempt(lab, MAKERS[name], folder, bucket=bucket, empty=empty)
    number = min(int(share * calls[kind]), calls[kind] - 1)
    lab.watched(folder, bucket).arm(kind, moment, number)
    first = tried.run(victim=bucket)
    if bucket:
        lab.bucket.watch("")
    else:
        lab.control.watch(None)
    if first.code != -signal.SIGKILL:
        # The number of operations varies a little: this command had fewer, and is done.
        return judge(first, [0])
    read = reading(tried, expected)
    if read.verdict != "ok":
        return read
    return again(tried, expected, f"{kind} {number} of {calls[kind]}; {read.detail}")


def reading(tried: Attempt, expected: dict[str, Any]) -> Outcome:
    """Read the output of a killed command with `Maker.reader`, which must refuse an incomplete one.

    Args:
        expected: Digests of the complete output (`Lab.digests`).

    Returns:
        `silent` if an incomplete output was read without an error. If `ok`, the detail is
        `complete`, `refused` or `no reader`.
    """
    if not tried.maker.reader:
        return Outcome("ok", "no reader")
    local = Path(tried.out)
    copied = None
    if "://" not in tried.out:
        if (local / "model.safetensors").exists():
            problem = weights_problem(local)
            if problem:
                return Outcome("wrong", problem)
        # A reader may change the folder, and the command must find it as the kill left it.
        shutil.copytree(tried.folder / "place", tried.folder / "seen")
        copied = str(tried.folder / "seen" / tried.maker.out)
    is_run = tried.maker.reader.startswith("train")
    if copied is None and is_run:
        # A resumed run would change the only copy.
        words = tried.words("checkpoints {out}")
    else:
        words = tried.words(tried.maker.reader, copied)
    ended = tried.lab.run(words, tried.environ)
    shutil.rmtree(tried.folder / "other", ignore_errors=True)
    if ended.code == 0 and is_run and copied is not None and "resuming" not in ended.output:
        return Outcome("silent", f"trained from nothing: {ended.output[-200:]}")
    if ended.code == 0:
        digests = tried.lab.digests(tried.maker, tried.out)
        # The lock stays if the kill came after all was done.
        digests.pop(f"/{LOCK}", None)
        if digests != expected:
            return Outcome("silent", "a half was read as if it were complete")
    outcome = judge(ended, [0, 2])
    errors = [line for line in ended.output.splitlines() if line.startswith("error")]
    if ended.code == 2 and len(errors) != 1:
        return Outcome("wrong", f"refused without one line: {ended.output[-200:]}")
    return replace(outcome, detail="complete" if ended.code == 0 else "refused")


def weights_problem(folder: Path) -> str:
    """Return what is wrong with model.safetensors, which other programs read; empty if nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(folder / "model.safetensors", framework="np")
    except SafetensorError as error:
        return f"model.safetensors is half written: {error}"
    return ""


def again(tried: Attempt, expected: dict[str, Any], detail: str) -> Outcome:
    """Run a disturbed command again without a fault, and judge its output.

    Args:
        expected: Digests of the output of an undisturbed command, which must be equal.
        detail: Description of the fault, for the outcome.
    """
    second = tried.run()
    # A command that was killed when all was done refuses to run again.
    messages = ("is complete: this command has made it", "is there already, and runs may use it")
    complete = second.code == 2 and any(text in second.output for text in messages)
    outcome = judge(second, [2] if complete else [0])
    if outcome.verdict != "ok":
        return outcome
    digests = tried.lab.digests(tried.maker, tried.out)
    if digests != expected:
        names = []
        for name in sorted(digests.keys() | expected.keys()):
            if digests.get(name) != expected.get(name):
                names.append(name)
        return Outcome("lost", f"{detail}: differs in {names[:6]}")
    traces = left_over(tried)
    if traces:
        return Outcome("wrong", f"{detail}: left {traces[:4]}")
    return Outcome("ok", detail)


def left_over(tried: Attempt) -> list[str]:
    """Return the names of temporary files and folders that a command has left (`OWN_TRACES`)."""
    names = []
    for path in (tried.folder / "place").rglob("*"):
        if any(trace in path.name for trace in OWN_TRACES):
            names.append(path.name)
    return sorted(names)


def full(
    lab: Lab, name: str, kind: str, share: float, folder: Path, *, empty: bool = False
) -> Outcome:
    """Run a command on a disk that becomes full (ENOSPC), then again with free space.

    Args:
        name: Key of `MAKERS`.
        kind: Kind of the operations that fail, one of `FULL_KINDS`.
        share: Position of the first that fails among those of its kind, from 0 to 1. All later ones
            fail too.
        empty: Make the output's folder, empty, before the command runs.
    """
    expected, calls = undisturbed(lab, name, empty=empty)
    if not calls[kind]:
        return Outcome("ok", f"the command has no {kind} there")
    tried = attempt(lab, MAKERS[name], folder, empty=empty)
    number = min(int(share * calls[kind]), calls[kind] - 1)
    lab.watched(folder)
    lab.control.arm(kind, "ENOSPC", number, ALWAYS)
    first = tried.run()
    lab.control.watch(None)
    if first.code == 0 and lab.digests(tried.maker, tried.out) == expected:
        return Outcome("ok", f"{kind} from {number} of {calls[kind]} is not needed")
    outcome = judge(first, [1])
    if outcome.verdict != "ok":
        return outcome
    if "space" not in first.output.lower():
        return Outcome("wrong", f"no line about the full disk: {outcome.detail}")
    if tried.maker.reader and left_by_failed(tried):
        return Outcome("wrong", f"a command that failed left {left_by_failed(tried)[:4]}")
    return again(tried, expected, f"{kind} from {number} of {calls[kind]}")


def left_by_failed(tried: Attempt) -> list[str]:
    """Return the names of all files and folders that a failed command has left in `folder/place`.

    The output folder itself is not among them.
    """
    names = []
    for path in (tried.folder / "place").rglob("*"):
        if str(path) != tried.out:
            names.append(path.name)
    return names


def really_full(lab: Lab, name: str, share: float, folder: Path) -> Outcome:
    """Run a command on a file system of its own that is too small, then again on a larger one.

    Args:
        name: Key of `MAKERS`.
        share: Size of the file system, as a share of the estimated size of an output: a quarter of
            all bytes in the folders `out` of undisturbed commands so far.
    """
    if os.getuid() != 0:
        return Outcome("ok", "not tried: only root can mount a file system")
    expected, _ = undisturbed(lab, name)
    total = 0
    for file in lab.folder.glob("control-*/place/out/**/*"):
        if file.is_file():
            total += file.stat().st_size
    # Several commands have left their outputs there.
    size = total // 4
    place = folder / "place"
    place.mkdir()
    bytes_free = max(16384, int(share * size))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={bytes_free}", "tmpfs", str(place)]
    subprocess.run(mount, check=True)
    try:
        environ = {"MUPAX_DATA": str(lab.folder / "data")}
        tried = Attempt(lab, MAKERS[name], folder, str(place / "out"), environ)
        first = tried.run()
        if first.code == 0:
            return Outcome("ok", f"{bytes_free} bytes are enough")
        outcome = judge(first, [1])
        if outcome.verdict != "ok":
            return outcome
        if left_by_failed(tried):
            return Outcome("wrong", f"a command that failed left {left_by_failed(tried)[:4]}")
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        return again(tried, expected, f"full at {bytes_free} bytes")
    finally:
        subprocess.run(["umount", str(place)], check=False)


def foreign_file(lab: Lab, name: str, folder: Path) -> Outcome:
    """Kill a command, put a file into its output folder, and run the command again.

    The command must refuse to go on, and keep the file.
    """
    _, calls = undisturbed(lab, name, empty=True)
    tried = attempt(lab, MAKERS[name], folder, empty=True)
    lab.watched(folder)
    lab.control.arm("fsync", "killed", calls["fsync"] // 2)
    tried.run()
    lab.control.watch(None)
    notes = Path(tried.out) / "my-notes.txt"
    notes.write_text("keep me")
    second = tried.run()
    if not notes.exists() or notes.read_text() != "keep me":
        return Outcome("lost", "a file that the command did not make is gone")
    return judge(second, [2])


def while_another_makes(lab: Lab, name: str, folder: Path) -> Outcome:
    """Start a command while the same one is at work with the same output.

    The second one must be refused, and the first one must make the right output.
    """
    expected, calls = undisturbed(lab, name)
    tried = attempt(lab, MAKERS[name], folder)
    lab.watched(folder)
    # Nearly all is made at the last fsync, and 15 s are enough to start the second command.
    lab.control.arm("fsync", "slow", calls["fsync"] - 1, milliseconds=15000)
    words = tried.words(tried.maker.words)
    pid = lab.worker.ask({"start": words, "environ": tried.environ}, BOUND_S)
    lab.worker.ask({"go": pid}, BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while not lab.control.fired and time.monotonic() < deadline:
        time.sleep(0.05)
    second = tried.run()
    code, output = lab.worker.ask({"wait": pid, "seconds": 2 * BOUND_S}, 3 * BOUND_S)
    lab.control.watch(None)
    if code != 0:
        return Outcome("wrong", f"the first command was disturbed: exit {code}: {output[-200:]}")
    if lab.digests(tried.maker, tried.out) != expected:
        return Outcome("lost", "the first command made something else")
    return judge(second, [2])


def undeletable(lab: Lab, processes: int, folder: Path) -> Outcome:
    """Train a run that cannot delete its old checkpoints, because `unlink` fails with EACCES.

    The run must end well with the right last checkpoint, and print one line on the problem.
    """
    place = folder / "place"
    place.mkdir()
    words = (
        f"train lm-tiny --data.name text:{lab.text} {MODEL} --steps 16 "
        f"--checkpoint.every-steps 2 --workdir {place}/out"
    )
    lab.source  # noqa: B018  makes the text
    # A checkpoint gets this name before its files are deleted.
    lab.control.watch(place / "out" / "checkpoints" / "2.deleting")
    lab.control.arm("unlink", "EACCES", 0, ALWAYS)
    if processes == 1:
        ended = [lab.run(words.split(), {})]
    else:
        ended = lab.run_together(words.split(), processes)
    fired = lab.control.fired
    lab.control.watch(None)
    for process in ended:
        outcome = judge(process, [0])
        if outcome.verdict != "ok":
            return outcome
    if not fired:
        return Outcome("wrong", "nothing was to be deleted")
    output = ended[0].output
    num_lines = output.count("cannot be deleted")
    if num_lines != 1 or "could not be saved" in output:
        detail = f"said {num_lines} times that something cannot be deleted: {output[-200:]}"
        return Outcome("wrong", detail)
    digests = lab.worker.ask({"made": f"{place}/out", "kind": "grow"}, BOUND_S)
    expected = lab.worker.ask({"made": f"{lab.folder}/run", "kind": "grow"}, BOUND_S)
    if digests["arrays"].get("16") != expected["arrays"]["16"]:
        return Outcome("lost", "the last checkpoint is not that of an undisturbed run")
    return Outcome("ok", f"{fired} deletions failed, the last checkpoint is whole")


def listed_while_saved(lab: Lab, folder: Path) -> Outcome:
    """List the checkpoints of a run in a bucket while it saves. None may look damaged."""
    lab.source  # noqa: B018  makes the text
    lab.bucket.watch("")
    out = f"gs://bucket/{folder.name}/out"
    words = (
        f"train lm-tiny --data.name text:{lab.text} {MODEL} --steps 12 "
        f"--checkpoint.every-steps 1 --workdir {out}"
    )
    pid = lab.worker.ask({"start": words.split(), "environ": {}}, BOUND_S)
    lab.worker.ask({"go": pid}, BOUND_S)
    listed = 0
    saving = 0
    while lab.worker.ask({"alive": pid}, BOUND_S):
        listing = lab.run(["checkpoints", out], {})
        if listing.code == 2 and "holds no run" in listing.output:
            continue
        outcome = judge(listing, [0])
        if outcome.verdict != "ok" or "damaged" in listing.output:
            return Outcome("wrong", outcome.detail)
        listed += 1
        saving += "being saved" in listing.output
    return Outcome("ok", f"listed {listed} times, {saving} times while one was being saved")


def smaller_keep(lab: Lab, folder: Path) -> Outcome:
    """Resume a run that kept four checkpoints with `--checkpoint.keep 1`.

    Older checkpoints must be deleted, and a line must name them.
    """
    place = folder / "place"
    lab.source  # noqa: B018  makes the text
    words = (
        f"train lm-tiny --data.name text:{lab.text} {MODEL} "
        f"--checkpoint.every-steps 2 --workdir {place}/out"
    )
    resumed = f"{words} --steps 10 --resume --resume-change schedule --checkpoint.keep 1"
    first = lab.run([*words.split(), "--steps", "8", "--checkpoint.keep", "4"], {})
    second = lab.run(resumed.split(), {})
    for ended in (first, second):
        outcome = judge(ended, [0])
        if outcome.verdict != "ok":
            return outcome
    if "2, 4, 6 are deleted" not in second.output or "checkpoint.keep 4 -> 1" not in second.output:
        return Outcome("silent", f"not said what is deleted: {second.output[:200]}")
    left = sorted(path.name for path in (place / "out" / "checkpoints").iterdir())
    return right(left == ["10"], f"left {left}")


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials of all commands in `MAKERS`, and of checkpoints.

    Args:
        shared: Folder for the inputs that all trials share.
        seed: Number that rotates which of `SHARES` each kind of operation is killed at.
    """
    lab = Lab(shared)
    planned: list[Trial] = []
    for name, maker in MAKERS.items():
        planned += _disk_trials(lab, name, maker, seed)
        if maker.makes_folder:
            planned += _folder_trials(lab, name)
    for processes in (1, 2):
        title = f"one cannot be deleted, processes {processes}"
        planned.append(_trial(lab, title, "checkpoints", undeletable, processes))
    title = "listed while a run saves in a bucket"
    planned.append(_trial(lab, title, "checkpoints", listed_while_saved))
    planned.append(_trial(lab, "a resume keeps fewer", "checkpoints", smaller_keep))
    return planned


def _trial(
    lab: Lab, title: str, group: str, run: Callable[..., Outcome], *words: Any, **options: Any
) -> Trial:
    """Return a trial that calls `run` with the lab, these arguments and the trial's folder."""
    counted_group = group.partition(" into ")[0]
    return Trial(f"{group}: {title}", counted_group, partial(run, lab, *words, **options))


def _disk_trials(lab: Lab, name: str, maker: Maker, seed: int) -> list[Trial]:
    """Return the trials of a command that is killed while it writes to a disk, or fills it."""
    planned = []
    for index, kind in enumerate(DISK_KINDS):
        if kind in maker.absent:
            continue
        for moment_index, moment in enumerate(MOMENTS):
            share = SHARES[(index + moment_index + seed) % len(SHARES)]
            title = f"{moment} {kind} at {share:.0%}"
            kill = (name, kind, moment, share)
            planned.append(_trial(lab, title, name, killed, *kill))
            if maker.makes_folder and kind in ("write", "rename", "fsync"):
                group = f"{name} into an empty folder"
                planned.append(_trial(lab, title, group, killed, *kill, empty=True))

    title = "killed after the last rename"
    last_rename = (name, "rename", "killed after", 0.999)
    planned.append(_trial(lab, title, name, killed, *last_rename))
    for index, kind in enumerate(FULL_KINDS):
        share = SHARES[(index + 1) % len(SHARES)]
        if kind not in maker.absent:
            title = f"full disk from {kind} at {share:.0%}"
            planned.append(_trial(lab, title, name, full, name, kind, share))
    return planned


def _folder_trials(lab: Lab, name: str) -> list[Trial]:
    """Return further trials of a command that makes a folder.

    The command is killed while it writes to a bucket, writes to a small file system, meets a
    foreign file in its folder, and is started twice at once.
    """
    planned = []
    for kind, moment, share in itertools.product(BUCKET_KINDS, MOMENTS, (0.0, 0.5, 0.999)):
        title = f"{moment} {kind} at {share:.0%}"
        group = f"{name} in a bucket"
        kill = (name, kind, moment, share)
        planned.append(_trial(lab, title, group, killed, *kill, bucket=True))
    for share in (0.3, 0.8):
        title = f"a file system of {share:.0%} of its size"
        planned.append(_trial(lab, title, name, really_full, name, share))
    planned.append(_trial(lab, "a file of somebody else in the way", name, foreign_file, name))
    planned.append(_trial(lab, "twice at once", name, while_another_makes, name))
    return planned


class Commands:
    """Commands of the worker. Each is a fork that is stopped at its start until it is let go.

    Args:
        folder: Folder for the output of the commands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._logs: dict[int, Path] = {}

    def answer(self, question: dict[str, Any]) -> Any:
        """Carry out a request of the campaign, whose first key says what to do.

        | key | value | answer |
        |---|---|---|
        | start | words of a command, with its variables in `environ` | process ID |
        | go | process ID of a stopped command | true |
        | alive | process ID | true while the command runs |
        | made | path of an output, with the command in `kind` | digests |
        | wait | process ID, with a limit in `seconds` | exit code and output |
        """
        if "start" in question:
            return self._start(question["start"], question["environ"])
        if "go" in question:
            os.kill(question["go"], signal.SIGCONT)
            return True
        if "alive" in question:
            return os.waitpid(question["alive"], os.WNOHANG)[0] == 0
        if "made" in question:
            return forks.call_in_fork(lambda: _digests(question["made"], question["kind"]))
        return self._wait(question["wait"], question["seconds"])

    def _start(self, words: list[str], environ: dict[str, str]) -> int:
        """Fork a command that stops itself before it begins, and return its process ID."""

        def stop() -> None:
            os.environ.update(environ)
            # The campaign needs the process ID of a victim before its command begins.
            os.kill(os.getpid(), signal.SIGSTOP)

        self._started += 1
        log = self._folder / f"{self._started}.out"
        pid = forks.start(words, log, stop)
        self._logs[pid] = log
        # A SIGCONT that came before the fork stops itself would be lost.
        os.waitpid(pid, os.WUNTRACED)
        return pid

    def _wait(self, pid: int, seconds: float) -> tuple[int | None, str]:
        """Let a command go on, wait for its end, and return the exit code and the output."""
        os.kill(pid, signal.SIGCONT)
        code = forks.wait(pid, seconds)
        log = self._logs.pop(pid)
        output = log.read_text(errors="replace")
        log.unlink()
        return code, output


def _digests(out: str, kind: str) -> dict[str, Any]:
    """Return digests of the output of a command, without times and paths.

    Returns:
        For `grow` and `convert`: the config and the digests of all arrays. For `sweep`: the losses
        of all points. Otherwise: the SHA-256 of every file.
    """
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import steps, verified
    from mupax.train.checkpoints.workdir import MARK

    path = path_of(out)
    if kind in ("grow", "convert"):
        saved = steps(path / "checkpoints")
        record = json.loads((path / "config.json").read_bytes())
        config = dict(record["config"])
        config.pop("workdir", None)
        arrays = {str(step): verified(path / "checkpoints" / str(step)).arrays for step in saved}
        return json.loads(json.dumps({"config": config, "arrays": arrays}))
    if kind == "sweep":
        points = json.loads((path / "sweep.json").read_bytes())["points"]
        losses = {}
        for point in points:
            losses[point["key"]] = [point["loss"], point["eval_loss"], point["curve"]]
        return losses
    if path.is_file():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    digests = {}
    for file in path.rglob("*"):
        if file.is_file() and file.name != MARK and not file.name.endswith(".lock"):
            name = str(file).removeprefix(str(path))
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def serve(folder: Path) -> None:
    """Run a worker: import everything that commands import, and answer the campaign's questions."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax")
    os.environ["MUPAX_HOME"] = str(folder / "home")
    tiny_runs.prepare_forks(folder)
    import gcsfs  # noqa: F401
    import tensorflow_datasets  # noqa: F401

    import mupax.buckets
    import mupax.train.reuse.forms
    import mupax.train.reuse.grow.grow
    import mupax.train.reuse.huggingface.command
    import mupax.train.studies.sweep.sweep  # noqa: F401

    workers.serve(Commands(folder).answer)


if __name__ == "__main__":
    serve(Path(sys.argv[sys.argv.index("--worker") + 1]))
