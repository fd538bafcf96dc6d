"""Commands that make a folder, killed at chosen operations or on a full disk, on a disk and in a bucket.

A command is killed at one operation on the files below the folder's parent (`scripts/campaigns/injection/faults.c`), or at one request
to its bucket (`object_faults.py`). Then a command that reads the folder must refuse it, unless it is complete, and the same command
must make what it makes when nobody disturbs it, and leave nothing else. Commands run in processes that are forked from a worker,
`python -m scripts.campaigns.edges.folders --worker FOLDER`, which has everything imported.
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
from typing import Any

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
"""Which operation of a kind is disturbed, as a share of all of that kind."""
FULL_KINDS = ("mkdir", "write", "fsync", "rename")
ALWAYS = 10**9
"""Operations that fail on a disk that stays full."""
MODEL = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 --data.eval-batch-size 32 "
    "--data.eval-examples 64 --optimizer.warmup-steps 2 --log.no-samples --log.no-tensorboard"
)
TOKENIZER = "data tokenizer text:{text} --size 300 --out {out}"
SWEEP = f"sweep lm-tiny --data.name text:{{text}} {MODEL} --steps 6 --lr 1e-3,2e-3 --out {{out}}"
OWN_TRACES = (".making", ".mupax-making", ".partial", "incomplete", ".part")
"""Endings and parts of names that only an unfinished command has in a folder."""


@dataclass(frozen=True)
class Maker:
    """A command that makes a folder or a file.

    Attributes:
        words: its command line; {out}, {source}, {text} and {place} stand for paths.
        reader: words of a command that reads what was made, and must refuse a half of it; empty for a file.
        makes_folder: whether it makes a new folder, in a bucket too, or in one that is there and empty.
        out: name of what it makes, in the folder that is watched.
        absent: kinds of operations that it does not do there.
    """

    words: str
    reader: str = ""
    makes_folder: bool = True
    out: str = "out"
    absent: tuple[str, ...] = ()


MAKERS = {
    "export": Maker("export {source}/run --out {out}", "import {out} --out {other}"),
    "import": Maker("import {source}/hf --preset mup --out {out}", "export {out} --out {other}"),
    "tokenizer": Maker(TOKENIZER, makes_folder=False, out="tokenizer.json", absent=("unlink", "mkdir")),
    "prepare text": Maker("data prepare text:{text} --tokenizer bpe:300", makes_folder=False, out="data"),
    "prepare digits": Maker("data prepare digits --data-dir {out}", makes_folder=False, absent=("unlink", "fsync")),
    "sweep": Maker(SWEEP, makes_folder=False),
    "convert": Maker("convert {source}/run --form mean-field --out {out}", "train --resume --workdir {out}"),
    "grow": Maker("grow {source}/run --set width=32 num_heads=4 --steps 20 --out {out}", "train --resume --workdir {out}"),
}  # fmt: skip


class Lab:
    """Worker, bucket and trained run that trials share. All are made when the first trial needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controls: dict[str, tuple[dict[str, Any], dict[str, int]]] = {}

    @functools.cached_property
    def bucket(self) -> Bucket:
        """An emulated bucket, whose every request can be disturbed."""
        bucket = Bucket()
        atexit.register(bucket.__exit__)
        return bucket.__enter__()

    @functools.cached_property
    def control(self) -> shim.Control:
        """The memory by which operations of the worker's children are disturbed."""
        library = shim.compiled(self.folder)
        if library is None:
            raise SystemExit("no C compiler (cc) is installed; the campaign needs one")
        return shim.Control(self.folder / "control", library)

    @functools.cached_property
    def worker(self) -> workers.Worker:
        """The process from which commands are forked."""
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
        """A folder with a trained run, and its export as Hugging Face has it."""
        tiny_runs.write_text(self.folder)
        train = f"train lm-tiny --data.name text:{self.text} {MODEL} --steps 16 --workdir {self.folder}/run"
        for words in (train, f"export {self.folder}/run --out {self.folder}/hf"):
            ended = self.run(words.split(), {})
            if ended.code != 0:
                raise SystemExit(f"{words} fails by itself:\n{ended.output[-2000:]}")
        return self.folder

    def watched(self, folder: Path, bucket: bool = False) -> Bucket | shim.Control:
        """Count operations on what lies in a trial's folder, or in the bucket, from now on, and return what counts them."""
        if bucket:
            self.bucket.watch("")
            return self.bucket
        self.control.watch(folder / "place")
        return self.control

    @property
    def text(self) -> Path:
        """A small text."""
        return self.folder / "text.txt"

    def run(self, words: Sequence[str], environ: dict[str, str], *, victim: bool = False) -> Ended:
        """Run one command to its end.

        Args:
            words: the command line without `mupax`.
            environ: variables in addition to the worker's.
            victim: whether the bucket kills it at the armed request.
        """
        began = time.monotonic()
        pid = self.worker.ask({"start": list(words), "environ": environ}, BOUND_S)
        if pid is None:
            return Ended(None, "the worker did not start the command", time.monotonic() - began)
        if victim:
            self.bucket.victim(pid)
        answer = self.worker.ask({"wait": pid, "seconds": 3 * BOUND_S}, 4 * BOUND_S)
        code, output = answer if answer is not None else (None, "")
        return Ended(code, output, time.monotonic() - began)

    def run_together(self, words: Sequence[str], processes: int) -> list[Ended]:
        """Run one command as several processes of one run, and return how each ended."""
        began = time.monotonic()
        joined = f"--distributed.coordinator localhost:{free_port()} --distributed.processes {processes}".split()
        pids: list[int] = []
        for index in range(processes):
            question = {
                "start": [*words, *joined, "--distributed.process", str(index)],
                "environ": {},
            }
            pids.append(self.worker.ask(question, BOUND_S))
        for pid in pids:
            self.worker.ask({"go": pid}, BOUND_S)
        answers = [
            self.worker.ask({"wait": pid, "seconds": 3 * BOUND_S}, 4 * BOUND_S) for pid in pids
        ]
        return [Ended(code, output, time.monotonic() - began) for code, output in answers]

    def digests(self, maker: Maker, out: str) -> dict[str, Any]:
        """Return what a command has made, without what may differ: digests of files or of a checkpoint's arrays."""
        return self.worker.ask({"made": out, "kind": maker.words.split()[1]}, 2 * BOUND_S)


@dataclass(frozen=True)
class Attempt:
    """One command in a folder of its own.

    Attributes:
        lab: what trials share.
        maker: the command.
        folder: of the trial.
        out: where the command writes.
        environ: variables of the command.
    """

    lab: Lab
    maker: Maker
    folder: Path
    out: str
    environ: dict[str, str]

    def words(self, text: str, out: str | None = None) -> list[str]:
        """Return the words of a command line."""
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
    """Return a command whose files lie in `folder/place`, or in the bucket."""
    place = folder / "place"
    place.mkdir()
    out = f"gs://bucket/{folder.name}/{maker.out}" if bucket else str(place / maker.out)
    if empty:
        (place / maker.out).mkdir()
    environ = {"MUPAX_DATA": str(place / "data" if maker.out == "data" else lab.folder / "data")}
    return Attempt(lab, maker, folder, out, environ)


def undisturbed(
    lab: Lab, name: str, *, bucket: bool = False, empty: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what a command makes when nobody disturbs it, and its operations by kind."""
    key = f"{name} {bucket} {empty}"
    if key not in lab.controls:
        folder = lab.folder / f"control-{len(lab.controls)}"
        folder.mkdir()
        tried = attempt(lab, MAKERS[name], folder, bucket=bucket, empty=empty)
        tried.words(tried.maker.words)  # the source is made before operations are counted
        counter = lab.watched(folder, bucket)
        ended = tried.run()
        calls = counter.calls()
        lab.control.watch(None)
        if ended.code != 0:
            raise SystemExit(f"{name} fails by itself: {ended.output[-2000:]}")
        lab.controls[key] = lab.digests(tried.maker, tried.out), calls
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
    """Kill a command at an operation, read what is left, and write the command again."""
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
        return judge(
            first, [0]
        )  # operations differ by a few: the command had done all of them before
    read = reading(tried, expected)
    if read.verdict != "ok":
        return read
    return again(tried, expected, f"{kind} {number} of {calls[kind]}; {read.detail}")


def reading(tried: Attempt, expected: dict[str, Any]) -> Outcome:
    """Judge what a reader makes of the folder of a killed command: it refuses a half, and accepts only what is complete."""
    if not tried.maker.reader:
        return Outcome("ok", "no reader")
    local = Path(tried.out)
    copied = None
    if "://" not in tried.out:
        if (local / "model.safetensors").exists():
            half = lonely_weights(local)
            if half:
                return Outcome("wrong", half)
        shutil.copytree(tried.folder / "place", tried.folder / "seen")
        copied = str(tried.folder / "seen" / tried.maker.out)
    is_run = tried.maker.reader.startswith("train")
    if copied is None and is_run:
        # A run that goes on would change the only copy.
        words = [*tried.words("checkpoints {out}")]
    else:
        words = tried.words(tried.maker.reader, copied)
    ended = tried.lab.run(words, tried.environ)
    shutil.rmtree(tried.folder / "other", ignore_errors=True)
    if ended.code == 0 and is_run and copied is not None and "resuming" not in ended.output:
        return Outcome("silent", f"trained from nothing: {ended.output[-200:]}")
    digests = tried.lab.digests(tried.maker, tried.out) if ended.code == 0 else expected
    digests.pop(f"/{LOCK}", None)  # the folder was complete, and the kill came in the last moment
    if digests != expected:
        return Outcome("silent", "a half was read as if it were complete")
    outcome = judge(ended, [0, 2])
    if (
        ended.code == 2
        and len([line for line in ended.output.splitlines() if line.startswith("error")]) != 1
    ):
        return Outcome("wrong", f"refused without one line: {ended.output[-200:]}")
    return replace(outcome, detail="complete" if ended.code == 0 else "refused")


def lonely_weights(folder: Path) -> str:
    """Return what is wrong with weights that other programs would read, which have their final name."""
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(folder / "model.safetensors", framework="np")
    except SafetensorError as error:
        return f"model.safetensors is half written: {error}"
    return ""


def again(tried: Attempt, expected: dict[str, Any], detail: str) -> Outcome:
    """Write the same command again, and compare what it makes with the control."""
    second = tried.run()
    # The command may have been killed when all was done.
    messages = ("is complete: this command has made it", "is there already, and runs may use it")
    complete = second.code == 2 and any(text in second.output for text in messages)
    outcome = judge(second, [2] if complete else [0])
    if outcome.verdict != "ok":
        return outcome
    digests = tried.lab.digests(tried.maker, tried.out)
    if digests != expected:
        names = sorted(
            name
            for name in digests.keys() | expected.keys()
            if digests.get(name) != expected.get(name)
        )
        return Outcome("lost", f"{detail}: differs in {names[:6]}")
    traces = left_over(tried)
    if traces:
        return Outcome("wrong", f"{detail}: left {traces[:4]}")
    return Outcome("ok", detail)


def left_over(tried: Attempt) -> list[str]:
    """Return names that only an unfinished command has, below the watched folder."""
    names = [path.name for path in (tried.folder / "place").rglob("*")]
    return sorted(name for name in names if any(trace in name for trace in OWN_TRACES))


def full(
    lab: Lab, name: str, kind: str, share: float, folder: Path, *, empty: bool = False
) -> Outcome:
    """Let the disk be full from an operation on, then write the command again on a disk with room."""
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
    if tried.maker.reader and left_of_failed(tried):
        return Outcome("wrong", f"a command that failed left {left_of_failed(tried)[:4]}")
    return again(tried, expected, f"{kind} from {number} of {calls[kind]}")


def left_of_failed(tried: Attempt) -> list[str]:
    """Return what a command has left that has said why it failed; the folder that was there before is none of it."""
    return [path.name for path in (tried.folder / "place").rglob("*") if str(path) != tried.out]


def really_full(lab: Lab, name: str, share: float, folder: Path) -> Outcome:
    """Run a command on a small file system of its own, which is full before the command is done."""
    if os.getuid() != 0:
        return Outcome("ok", "not tried: only root can mount a file system")
    expected, _ = undisturbed(lab, name)
    size = (
        sum(
            file.stat().st_size
            for file in lab.folder.glob("control-*/place/out/**/*")
            if file.is_file()
        )
        // 4
    )
    place = folder / "place"
    place.mkdir()
    bytes_free = max(16384, int(share * size))
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={bytes_free}", "tmpfs", str(place)], check=True
    )
    try:
        tried = Attempt(
            lab, MAKERS[name], folder, str(place / "out"), {"MUPAX_DATA": str(lab.folder / "data")}
        )
        first = tried.run()
        if first.code == 0:
            return Outcome("ok", f"{bytes_free} bytes are enough")
        outcome = judge(first, [1])
        if outcome.verdict == "ok" and left_of_failed(tried):
            return Outcome("wrong", f"a command that failed left {left_of_failed(tried)[:4]}")
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        return (
            again(tried, expected, f"full at {bytes_free} bytes")
            if outcome.verdict == "ok"
            else outcome
        )
    finally:
        subprocess.run(["umount", str(place)], check=False)


def someone_elses(lab: Lab, name: str, folder: Path) -> Outcome:
    """Put a file into the folder of a killed command: the command must refuse to delete it."""
    _, calls = undisturbed(lab, name, empty=True)
    tried = attempt(lab, MAKERS[name], folder, empty=True)
    lab.watched(folder)
    lab.control.arm("fsync", "killed", calls["fsync"] // 2)
    tried.run()
    lab.control.watch(None)
    own = Path(tried.out) / "my-notes.txt"
    own.write_text("keep me")
    second = tried.run()
    if not own.exists() or own.read_text() != "keep me":
        return Outcome("lost", "a file that the command did not make is gone")
    return judge(second, [2])


def while_another_makes(lab: Lab, name: str, folder: Path) -> Outcome:
    """Start the command while the same command is stopped in the middle: the second is refused, the first one goes on."""
    expected, calls = undisturbed(lab, name)
    tried = attempt(lab, MAKERS[name], folder)
    lab.watched(folder)
    lab.control.arm("fsync", "slow", calls["fsync"] - 1, milliseconds=15000)
    words = tried.words(tried.maker.words)
    pid = lab.worker.ask({"start": words, "environ": tried.environ}, BOUND_S)
    lab.worker.ask({"go": pid}, BOUND_S)
    until = time.monotonic() + BOUND_S
    while not lab.control.fired and time.monotonic() < until:
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
    """Train on a disk that deletes nothing: every checkpoint is saved, and one line says what cannot be deleted."""
    place = folder / "place"
    place.mkdir()
    words = f"train lm-tiny --data.name text:{lab.text} {MODEL} --steps 16 --checkpoint.every-steps 2 --workdir {place}/out"
    lab.source  # noqa: B018  the text is there from here on
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
    told = ended[0].output.count("cannot be deleted")
    if told != 1 or "could not be saved" in ended[0].output:
        return Outcome(
            "wrong", f"said {told} times that something cannot be deleted: {ended[0].output[-200:]}"
        )
    digests = lab.worker.ask({"made": f"{place}/out", "kind": "grow"}, BOUND_S)
    if (
        digests["arrays"].get("16")
        != lab.worker.ask({"made": f"{lab.folder}/run", "kind": "grow"}, BOUND_S)["arrays"]["16"]
    ):
        return Outcome("lost", "the last checkpoint is not that of an undisturbed run")
    return Outcome("ok", f"{fired} deletions failed, the last checkpoint is whole")


def listed_while_saved(lab: Lab, folder: Path) -> Outcome:
    """List the checkpoints of a run in a bucket again and again while it saves: none is damaged."""
    lab.source  # noqa: B018  the text is there from here on
    lab.bucket.watch("")
    out = f"gs://bucket/{folder.name}/out"
    words = f"train lm-tiny --data.name text:{lab.text} {MODEL} --steps 12 --checkpoint.every-steps 1 --workdir {out}"
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
    """Resume with a smaller --checkpoint.keep: what it deletes is said before it is gone."""
    place = folder / "place"
    lab.source  # noqa: B018  the text is there from here on
    words = f"train lm-tiny --data.name text:{lab.text} {MODEL} --checkpoint.every-steps 2 --workdir {place}/out"
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
    """Return all trials: kills on a disk and in a bucket, full disks, somebody else's files, two commands at once."""
    lab = Lab(shared)
    planned: list[Trial] = []

    def add(
        title: str, group: str, run: Callable[..., Outcome], *words: Any, **options: Any
    ) -> None:
        planned.append(
            Trial(
                f"{group}: {title}",
                group.partition(" into ")[0],
                partial(run, lab, *words, **options),
            )
        )

    for name, maker in MAKERS.items():
        for index, kind in enumerate(DISK_KINDS):
            if kind in maker.absent:
                continue
            for after, moment in enumerate(MOMENTS):
                share = SHARES[(index + after + seed) % len(SHARES)]
                title = f"{moment} {kind} at {share:.0%}"
                add(title, name, killed, name, kind, moment, share)
                if maker.makes_folder and kind in ("write", "rename", "fsync"):
                    add(
                        title,
                        f"{name} into an empty folder",
                        killed,
                        name,
                        kind,
                        moment,
                        share,
                        empty=True,
                    )
        add("killed after the last rename", name, killed, name, "rename", "killed after", 0.999)
        for index, kind in enumerate(FULL_KINDS):
            share = SHARES[(index + 1) % len(SHARES)]
            if kind not in maker.absent:
                add(f"full disk from {kind} at {share:.0%}", name, full, name, kind, share)
        if not maker.makes_folder:
            continue
        for kind, moment, share in itertools.product(BUCKET_KINDS, MOMENTS, (0.0, 0.5, 0.999)):
            title = f"{moment} {kind} at {share:.0%}"
            add(title, f"{name} in a bucket", killed, name, kind, moment, share, bucket=True)
        for share in (0.3, 0.8):
            add(f"a file system of {share:.0%} of its size", name, really_full, name, share)
        add("a file of somebody else in the way", name, someone_elses, name)
        add("twice at once", name, while_another_makes, name)
    for processes in (1, 2):
        add(f"one cannot be deleted, processes {processes}", "checkpoints", undeletable, processes)
    add("listed while a run saves in a bucket", "checkpoints", listed_while_saved)
    add("a resume keeps fewer", "checkpoints", smaller_keep)
    return planned


class Commands:
    """The worker's side: commands as children that are forked and stopped until somebody lets them go.

    Args:
        folder: for what they print.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0
        self._logs: dict[int, Path] = {}

    def answer(self, question: dict[str, Any]) -> Any:
        """Do what the campaign asks: start, go, wait, or say what was made."""
        if "start" in question:
            return self._start(question["start"], question["environ"])
        if "go" in question:
            os.kill(question["go"], signal.SIGCONT)
            return True
        if "alive" in question:
            return os.waitpid(question["alive"], os.WNOHANG)[0] == 0
        if "made" in question:
            return forks.apart(lambda: _digests(question["made"], question["kind"]))
        return self._wait(question["wait"], question["seconds"])

    def _start(self, words: list[str], environ: dict[str, str]) -> int:
        def stop() -> None:
            os.environ.update(environ)
            os.kill(os.getpid(), signal.SIGSTOP)

        self._started += 1
        log = self._folder / f"{self._started}.out"
        pid = forks.start(words, log, stop)
        self._logs[pid] = log
        os.waitpid(pid, os.WUNTRACED)
        return pid

    def _wait(self, pid: int, seconds: float) -> tuple[int | None, str]:
        os.kill(pid, signal.SIGCONT)
        code = forks.wait(pid, seconds)
        log = self._logs.pop(pid)
        output = log.read_text(errors="replace")
        log.unlink()
        return code, output


def _digests(out: str, kind: str) -> dict[str, Any]:
    """Return digests of what a command has made, without times, names of runs and paths."""
    from mupax.disk import path_of
    from mupax.train.checkpoints.folder import steps, verified
    from mupax.train.checkpoints.workdir import MARK

    path = path_of(out)
    if kind in ("grow", "convert"):
        saved = steps(path / "checkpoints")
        record = json.loads((path / "config.json").read_bytes())
        config = {name: value for name, value in record["config"].items() if name != "workdir"}
        arrays = {str(step): verified(path / "checkpoints" / str(step)).arrays for step in saved}
        return json.loads(json.dumps({"config": config, "arrays": arrays}))
    if kind == "sweep":
        points = json.loads((path / "sweep.json").read_bytes())["points"]
        return {
            point["key"]: [point["loss"], point["eval_loss"], point["curve"]] for point in points
        }
    if path.is_file():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    files = [
        file
        for file in path.rglob("*")
        if file.is_file() and file.name != MARK and not file.name.endswith(".lock")
    ]
    names = {str(file).removeprefix(str(path)): file for file in files}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in names.items()}


def serve(folder: Path) -> None:
    """Answer the campaign's questions, with everything imported that commands import."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax")
    os.environ["MUPAX_HOME"] = str(folder / "home")
    with tiny_runs.prepared(folder):
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
