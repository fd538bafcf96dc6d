"""Trials of signals to commands: Ctrl-C, a second one, SIGTERM and SIGHUP, at chosen moments.

A command must end with 128 and the signal's number within `END_S`, without a traceback, and leave
no child process and no temporary folder. A run that saves may take as long as its save. It must
then be resumed to the bits of a run that nobody touched.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts import ROOT
from scripts.campaigns import tiny_runs
from scripts.campaigns.edges.trial import BOUND_S, Ended, Outcome, Trial, judge
from scripts.campaigns.edges.trial import mupax as run_mupax

END_S = 5.0
"""Seconds that a command that saves nothing may take to end after a signal."""
WAIT_S = 4 * BOUND_S
"""Seconds that a trial waits for its moment."""
_LOOK_S = 0.01
_STEPS = 16
_SIZES = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --data.batch-size 16 "
    "--data.eval-batch-size 32 --data.eval-examples 128 --optimizer.warmup-steps 2 --log.no-samples"
)
_SAVING = (
    f"--steps {_STEPS} --ema.decay 0.9 --log.eval-every-steps 5 --checkpoint.every-steps 5 --resume"
)
_LM = f"lm-tiny --data.name text:TEXT --model.seq-len 16 {_SIZES}"
_LONG = f"{_LM} --steps 1000000 --checkpoint.every-steps 1000000 --resume"

COMPUTING = {
    "balance": "presets balance lm-proxy --out OUT/b.json",
    "check": "check lm-proxy",
    "noise": "noise RUN",
    "eval": "eval RUN",
    "dry-run": "train lm-laptop --dry-run",
    "roles": "models roles lm-tiny",
    "generate": "generate RUN --prompt value --tokens 40",
    "plan": f"plan {_LM} --steps 50",
    "grow": "grow RUN --set width=32 --out OUT/big",
    "convert": "convert RUN --form readout-multiplier --out OUT/form",
    "export": "export RUN --out OUT/hf",
    "import": "import HF --out OUT/weights",
    "predict": "predict VIT IMAGE",
}
"""Commands that import JAX and compile. Words in capitals stand for paths (`Shared.words`)."""
STUDIES = {
    "sweep": f"sweep {_LM} --steps 400 --lr 2^-9:2^-6:4 --how in-turn --no-eval --out OUT/study",
    "tune": f"tune {_LM} --steps 400 --over lr --points 6 --how in-turn --no-eval --out OUT/study",
    "transfer": (
        f"transfer {_LM} --steps 400 --grow width=16,32 --control none --how in-turn "
        "--out OUT/study"
    ),
}
LIGHT = {
    "zoo list": "models",
    "zoo describe": "models describe lm-8b",
    "presets table": "presets table mup --model lm-tiny",
    "presets compare": "presets compare mup sp ntk",
    "train --help": "train lm-tiny --help",
}
"""Commands that end within a second."""
_NOT_COMPILING = ("export", "import", "roles")
_NUMPY = re.compile(r"_multiarray_umath")
_JAXLIB = re.compile(r"libjax_common|xla_extension")


class Child:
    """A running `mupax` process with a process group and temporary files of its own.

    Its output is read while it runs.

    Args:
        words: Words of the command after `mupax`.
        folder: Working directory, in which `tmp` is made for temporary files.
        environ: Variables in addition to those of this process.
        ignored: Signals that the process ignores from its start.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str] | None = None,
        ignored: Sequence[int] = (),
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        variables = {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
        }
        variables |= {"TMPDIR": str(self.temporary), **(environ or {})}

        def set_signals() -> None:
            # A background job would ignore SIGINT.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        self.process = subprocess.Popen(
            # Output without a buffer, because moments are found by what is printed.
            [sys.executable, "-u", "-m", "mupax", *words],
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=set_signals,
            # In a group of its own, children that stay can be found and killed.
            process_group=0,
        )
        self._began = time.monotonic()
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Collect the output until it ends."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        piece = os.read(descriptor, 1 << 16)
        while piece:
            self._pieces.append(piece)
            piece = os.read(descriptor, 1 << 16)

    @property
    def output(self) -> str:
        """Text printed so far, on both outputs."""
        return b"".join(self._pieces).decode(errors="replace")

    def maps(self, library: re.Pattern[str]) -> bool:
        """Return true if the process has mapped a library whose path matches."""
        with suppress(OSError):
            return bool(library.search(Path(f"/proc/{self.process.pid}/maps").read_text()))
        return False

    def hears(self) -> bool:
        """Return true once the process has a handler for SIGTERM, which only mupax sets."""
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            # The lowest bit of the mask stands for signal 1.
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            return bool(caught >> (signal.SIGTERM - 1) & 1)
        return False

    def wait_until(self, reached: Callable[[Child], bool]) -> bool:
        """Wait until `reached` is true of this process.

        Return false if the process ends before, or `WAIT_S` pass.
        """
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if reached(self):
                return True
            time.sleep(_LOOK_S)
        return False

    def end(self, seconds: float) -> Ended:
        """Wait until the process has ended, and return its exit code and output.

        After `seconds`, kill its process group; the exit code is then `None`.
        """
        began = time.monotonic()
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
        waited = time.monotonic() - began
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        # A child that is left behind may hold the pipe open.
        self._reader.join(END_S)
        return Ended(code, self.output, waited)

    def left_behind(self) -> str:
        """Return what the ended process has left: a child or temporary folders; empty for nothing.

        Children are killed.
        """
        with suppress(ProcessLookupError, PermissionError):
            # Signal 0 only asks whether a process of the group is left.
            os.killpg(self.process.pid, 0)
            os.killpg(self.process.pid, signal.SIGKILL)
            return "a child process is still running"
        names = []
        for path in self.temporary.iterdir():
            if path.name.startswith("mupax"):
                names.append(path.name)
        names.sort()
        return f"left in TMPDIR: {', '.join(names[:3])}" if names else ""


@dataclass(frozen=True)
class Moment:
    """Moment at which a signal is sent: `pause` seconds after `reached` is true of the process."""

    name: str
    reached: Callable[[Child], bool]
    pause: float = 0.0


HEARING = Moment("as soon as it hears signals", lambda child: child.hears())
"""Moment at which mupax has set its signal handlers. Before it, Python's own behaviour applies."""
IMPORTING_NUMPY = Moment("while numpy is imported", lambda child: child.maps(_NUMPY))
IMPORTING_JAX = Moment("while jaxlib is imported", lambda child: child.maps(_JAXLIB), 0.05)


def compiling(count: int, pause: float = 0.0) -> Moment:
    """Return the moment at which JAX begins to compile its `count`-th program.

    Args:
        count: Number of the program, from 1.
        pause: Time from then until the signal is sent, in seconds.
    """
    return Moment(
        f"while program {count} is compiled",
        lambda child: child.output.count("Compiling ") >= count,
        pause,
    )


def printed(text: str, name: str, pause: float = 0.0) -> Moment:
    """Return the moment at which the process has printed a text."""
    return Moment(name, lambda child: text in child.output, pause)


def after(seconds: float) -> Moment:
    """Return the moment a number of seconds after the process began to handle signals."""
    return Moment(f"after {seconds:.2f} s", HEARING.reached, seconds)


def saving(folder: Path) -> Moment:
    """Return the moment at which the run of a workdir writes its first checkpoint."""
    return Moment(
        "while a checkpoint is saved", lambda child: any((folder / "checkpoints").glob("*"))
    )


def first_rows(folder: Path) -> Moment:
    """Return the moment at which the run of a workdir has written its first metrics."""
    return Moment("after the first rows", lambda child: (folder / "metrics.jsonl").exists())


class Shared:
    """Inputs of the trials, each made on its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environ = {"MUPAX_DATA": str(folder / "data")}

    def environ(self, cache: bool) -> dict[str, str]:
        """Return the environment variables of a command.

        Args:
            cache: Use JAX's compilation cache on disk. Otherwise the command compiles all programs,
                and prints a line for each.
        """
        if cache:
            return self._environ
        # JAX logs each program that it compiles, by which `compiling` finds its moment.
        return {**self._environ, "MUPAX_COMPILATION_CACHE": "none", "JAX_LOG_COMPILES": "1"}

    def words(self, command: str, folder: Path) -> list[str]:
        """Return the words of a command, with paths in place of names in capitals.

        Args:
            folder: Folder that `OUT` stands for.
        """
        makers = {
            "TEXT": self._text,
            "RUN": self._run,
            "HF": self._weights,
            "VIT": self._vit,
            "IMAGE": self._image,
        }
        words = []
        for word in shlex.split(command):
            word = word.replace("OUT", str(folder))
            for name, make in makers.items():
                if word == name or word == f"text:{name}":
                    word = word.replace(name, str(make()))
            words.append(word)
        return words

    def control(self) -> dict[str, object]:
        """Return the result of the tiny run that gets no signal."""
        return tiny_runs.run_result(self._run(), _STEPS)

    def _output_of(self, name: str, command: str) -> Path:
        """Run a command, unless its output is there, and return the path of the output."""
        path = self.folder / name
        if not path.exists():
            ended = run_mupax(self.words(command, self.folder), self._environ)
            if ended.code != 0:
                raise RuntimeError(f"{command}: {ended.output[-300:]}")
        return path

    def _text(self) -> Path:
        path = self.folder / "text.txt"
        if not path.exists():
            tiny_runs.write_text(self.folder)
        return path

    def _run(self) -> Path:
        return self._output_of("run", f"train {_LM} {_SAVING} --workdir OUT/run")

    def _vit(self) -> Path:
        return self._output_of("vit", f"train vit-digits {_SIZES} --steps 4 --workdir OUT/vit")

    def _weights(self) -> Path:
        return self._output_of("hf", "export RUN --out OUT/hf")

    def _image(self) -> Path:
        path = self.folder / "image.png"
        if not path.exists():
            from PIL import Image

            Image.new("L", (8, 8), 100).save(path)
        return path


def interrupted(
    shared: Shared,
    command: str,
    moment: Moment,
    numbers: Sequence[int],
    cache: bool,
    seconds: float = END_S,
) -> Callable[[Path], Outcome]:
    """Return a function for `Trial.run` that sends signals to a command, half a second apart.

    The command must end with 128 and the number of the first signal.

    Args:
        command: Command line, with names of inputs in place of their paths (see `Shared.words`).
        moment: Moment at which the first signal is sent to the command.
        cache: Use JAX's compilation cache on disk, as in `Shared.environ`.
        seconds: Seconds that the command may take to end after the last signal. Default: `END_S`.
    """

    def run(folder: Path) -> Outcome:
        child = Child(shared.words(command, folder), folder, shared.environ(cache))
        if not child.wait_until(moment.reached):
            return Outcome("wrong", f"the moment did not come: {judge(child.end(0.1), ()).detail}")
        time.sleep(moment.pause)
        if child.process.poll() is not None:
            detail = judge(child.end(0.1), ()).detail
            return Outcome("wrong", f"it ended before the signal: {detail}")
        send_signals(child, numbers)
        return judge_end(child, child.end(BOUND_S), 128 + numbers[0], seconds)

    return run


def send_signals(child: Child, numbers: Sequence[int]) -> None:
    """Send signals to a process, half a second apart."""
    for index, number in enumerate(numbers):
        time.sleep(0.5 if index else 0)
        child.process.send_signal(number)


def judge_end(child: Child, ended: Ended, code: int, seconds: float) -> Outcome:
    """Judge the end of a process that got a signal.

    Args:
        code: Exit code that is right, 128 and the number of the signal.
        seconds: Seconds that the process may take to end after the signal.
    """
    outcome = judge(ended, (code,))
    if outcome.verdict != "ok":
        return outcome
    if ended.seconds > seconds:
        return Outcome("wrong", f"ended {ended.seconds:.1f} s after the signal")
    leftovers = child.left_behind()
    if leftovers:
        return Outcome("wrong", leftovers)
    return Outcome("ok", f"{outcome.detail} ({ended.seconds:.1f} s)")


def saved_and_resumed(
    shared: Shared, moment: Callable[[Path], Moment], numbers: Sequence[int], restart: bool = False
) -> Callable[[Path], Outcome]:
    """Return a function for `Trial.run` that ends a run by signals and resumes it.

    The resumed run must be bitwise equal to one that got no signal.

    Args:
        moment: Function from the workdir to the moment of the first signal.
        numbers: Numbers of the signals, in order, half a second apart.
        restart: Start the run with `--restart 2`.
    """

    def run(folder: Path) -> Outcome:
        control = shared.control()
        words = shared.words(f"train {_LM} {_SAVING} --workdir OUT/run", folder)
        words += ["--restart", "2"] if restart else []
        child = Child(words, folder, shared.environ(cache=True))
        if not child.wait_until(moment(folder / "run").reached):
            return Outcome("wrong", f"the moment did not come: {judge(child.end(0.1), ()).detail}")
        send_signals(child, numbers)
        # The last save of a run of 16 steps takes a second.
        outcome = judge_end(child, child.end(BOUND_S), 128 + numbers[0], 2 * END_S)
        if outcome.verdict != "ok":
            return outcome
        again = run_mupax(words, shared.environ(cache=True), cwd=folder)
        if again.code != 0:
            return Outcome("lost", f"does not go on: {judge(again, (0,)).detail}")
        result = tiny_runs.run_result(folder / "run", _STEPS)
        differences = tiny_runs.differences(result, control)
        if differences:
            return Outcome("silent", f"other bits: {', '.join(differences)[:200]}")
        return outcome

    return run


def goes_on(
    shared: Shared, command: str, moment: Moment, numbers: Sequence[int], cache: bool
) -> Callable[[Path], Outcome]:
    """Return a function for `Trial.run` that ends a study by signals and starts it again.

    The second command must keep the rows in points.jsonl and add to them. The arguments are as in
    `interrupted`.
    """

    def run(folder: Path) -> Outcome:
        outcome = interrupted(shared, command, moment, numbers, cache)(folder)
        if outcome.verdict != "ok":
            return outcome
        rows = folder / "study" / "points.jsonl"
        old_rows = rows.read_text() if rows.exists() else ""
        again = Child(shared.words(command, folder), folder, shared.environ(cache=True))
        # One new row is enough; the study need not be done.
        if again.wait_until(lambda child: rows.exists() and len(rows.read_text()) > len(old_rows)):
            again.process.send_signal(signal.SIGINT)
        ended = again.end(BOUND_S)
        if ended.code not in (0, 128 + signal.SIGINT):
            return Outcome("lost", f"does not go on: {judge(ended, (0,)).detail}")
        if not rows.read_text().startswith(old_rows):
            return Outcome("lost", "rows were replaced")
        return outcome

    return run


def ignoring(shared: Shared, ignored: int, ending: int, restart: bool) -> Callable[[Path], Outcome]:
    """Return a function for `Trial.run` with a run that is started with one signal ignored.

    The run must go on after that signal, and end by another one.

    Args:
        ignored: Signal that the process ignores from its start.
        ending: Signal that ends the run afterwards, `SIGTERM`.
        restart: Start the run with `--restart 1`.
    """

    def run(folder: Path) -> Outcome:
        words = shared.words(f"train {_LONG} --workdir OUT/run", folder)
        words += ["--restart", "1"] if restart else []
        child = Child(words, folder, shared.environ(cache=True), [ignored])
        metrics = folder / "run" / "metrics.jsonl"
        if not child.wait_until(lambda child: metrics.exists() and metrics.stat().st_size > 0):
            return Outcome("wrong", f"no step was done: {judge(child.end(0.1), ()).detail}")
        os.killpg(child.process.pid, ignored)
        time.sleep(3.0)
        if child.process.poll() is not None:
            detail = judge(child.end(1), ()).detail
            return Outcome("wrong", f"the ignored signal ended it: {detail}")
        child.process.send_signal(ending)
        return judge_end(child, child.end(BOUND_S), 128 + ending, 2 * END_S)

    return run


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return every trial.

    Args:
        shared: Folder for the inputs that all trials share.
        seed: Chooses random moments: the delay after start, and the number of the compiled program.
    """
    inputs = Shared(shared)
    choose = random.Random(seed)
    planned = []
    for name, command in COMPUTING.items():
        planned += _computing_trials(inputs, name, command, choose)
    for name, command in STUDIES.items():
        planned += _study_trials(inputs, name, command)
    for name, command in LIGHT.items():
        for number in (signal.SIGINT, signal.SIGHUP):
            planned.append(_planned(name, interrupted, inputs, command, [number], HEARING))
    planned += _data_trials(inputs)
    planned += _service_trials(inputs)
    planned += _run_trials(inputs)
    return planned


def _trial(group: str, signals: str, moment: str, run: Callable[[Path], Outcome]) -> Trial:
    """Return a trial whose name does not have the numbers in `moment`, which depend on the seed.

    Args:
        signals: Names of the signals, for the name of the trial.
    """
    moment = re.sub(r"after [\d.]+ s", "by the clock", moment)
    moment = re.sub(r"program [2-9]", "a later program", moment)
    return Trial(f"{group}: {signals} {moment}", group, run)


def _planned(
    group: str,
    make_run: Callable[..., Callable[[Path], Outcome]],
    inputs: Shared,
    command: str,
    numbers: Sequence[signal.Signals],
    moment: Moment,
    cache: bool = True,
) -> Trial:
    """Return a trial of a command that gets signals at a moment.

    Args:
        make_run: Function that makes `Trial.run`: `interrupted` or `goes_on`.
        cache: Use JAX's compilation cache on disk. Default: true.
    """
    signals = " and ".join(number.name for number in numbers)
    run = make_run(inputs, command, moment, numbers, cache)
    return _trial(group, signals, moment.name, run)


def _computing_trials(
    inputs: Shared, name: str, command: str, choose: random.Random
) -> list[Trial]:
    """Return trials that interrupt a command of `COMPUTING`: as it imports, compiles or traces."""
    later = compiling(choose.randint(2, 4), choose.uniform(0, 0.3))
    by_clock = after(choose.uniform(0.15, 1.5))
    first = compiling(1)
    if name in _NOT_COMPILING:
        first = Moment("while it traces", IMPORTING_JAX.reached, choose.uniform(0.8, 1.2))
        later = Moment("while it traces more", IMPORTING_JAX.reached, choose.uniform(1.2, 1.6))
    plan = [
        ([signal.SIGINT], IMPORTING_NUMPY, True),
        ([signal.SIGINT], IMPORTING_JAX, True),
        ([signal.SIGINT], first, False),
        ([signal.SIGINT], later, False),
        ([signal.SIGINT], by_clock, True),
        ([signal.SIGINT, signal.SIGINT], first, False),
        ([signal.SIGHUP], later, False),
        ([signal.SIGTERM], first, False),
    ]
    return [_planned(name, interrupted, inputs, command, *moment) for moment in plan]


def _study_trials(inputs: Shared, name: str, command: str) -> list[Trial]:
    """Return trials that interrupt a command of `STUDIES` while it imports, compiles or trains."""
    training = Moment(
        "while points train", lambda child: "it/s" in child.output or _is_training(child)
    )
    plan = [
        ([signal.SIGINT], IMPORTING_JAX, True),
        ([signal.SIGINT], compiling(3), False),
        ([signal.SIGINT], training, True),
        ([signal.SIGHUP], training, True),
        ([signal.SIGINT, signal.SIGINT], training, True),
    ]
    return [_planned(name, goes_on, inputs, command, *moment) for moment in plan]


def _is_training(child: Child) -> bool:
    """Return true if a study has its first row."""
    rows = child.temporary.parent / "study" / "points.jsonl"
    return rows.exists() and rows.stat().st_size > 0


def _data_trials(inputs: Shared) -> list[Trial]:
    """Return the trials of commands on data."""
    planned = []
    commands = {
        "data prepare": "data prepare text:TEXT --data-dir OUT",
        "data tokenizer": "data tokenizer text:TEXT --size 300 --out OUT/t.json",
        "data show": "data show text:TEXT",
    }
    for name, command in commands.items():
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            planned.append(_planned(name, interrupted, inputs, command, [number], IMPORTING_NUMPY))
        planned.append(_planned(name, interrupted, inputs, command, [signal.SIGINT], HEARING))
    return planned


def _service_trials(inputs: Shared) -> list[Trial]:
    """Return the trials of `serve` and `push`."""
    serving = printed("serving ", "while it serves")
    command = "serve RUN --port 0"
    plan = [
        ([signal.SIGINT], IMPORTING_JAX),
        ([signal.SIGINT], serving),
        ([signal.SIGHUP], serving),
        ([signal.SIGTERM], serving),
        ([signal.SIGINT, signal.SIGINT], serving),
    ]
    planned = []
    for numbers, moment in plan:
        planned.append(_planned("serve", interrupted, inputs, command, numbers, moment))
    push = "push RUN --to owner/name --dry-run"
    for number in (signal.SIGINT, signal.SIGHUP):
        planned.append(_planned("push", interrupted, inputs, push, [number], IMPORTING_JAX))
    return planned


def _run_trials(inputs: Shared) -> list[Trial]:
    """Return the trials of `train`: before the first step, while it trains, and while it saves."""
    planned = []
    words = f"train {_LM} {_SAVING} --workdir OUT/run"
    for moment in (IMPORTING_NUMPY, IMPORTING_JAX, compiling(1), compiling(4)):
        # Programs of the disk would not be compiled.
        cache = moment.name.endswith("imported")
        for number in (signal.SIGINT, signal.SIGHUP):
            planned.append(_planned("train", interrupted, inputs, words, [number], moment, cache))

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        run = saved_and_resumed(inputs, saving, [number])
        planned.append(_trial("train", number.name, "while it saves", run))
        run = saved_and_resumed(inputs, first_rows, [number])
        planned.append(_trial("train", number.name, "after the first rows", run))
    for number in (signal.SIGINT, signal.SIGHUP):
        run = saved_and_resumed(inputs, saving, [number], restart=True)
        planned.append(_trial("train --restart", number.name, "while it saves", run))

    for restart in (False, True):
        group = "train --restart" if restart else "train"
        nohup = ignoring(inputs, signal.SIGHUP, signal.SIGTERM, restart)
        background = ignoring(inputs, signal.SIGINT, signal.SIGTERM, restart)
        planned.append(_trial(group, "SIGHUP", "under nohup", nohup))
        planned.append(_trial(group, "SIGINT", "in a background job", background))
    return planned
