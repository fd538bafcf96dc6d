"""Trials of two processes on one run or one study, one of which is cut off, stopped or different.

Tiny runs in forked processes (`tiny_runs`). Something happens to one process at a chosen moment.
Either the run goes on, and its last checkpoint and rows are bitwise those of an undisturbed run, or
all processes end within `BOUND_S` with a reason on every screen. A resumed run must end with those
bits too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.campaigns import tiny_runs
from scripts.campaigns.edges import trial
from scripts.campaigns.edges.trial import BOUND_S, Ended, Outcome, Trial
from scripts.campaigns.injection import clock, links
from scripts.campaigns.injection.calls import (
    Action,
    Place,
    on_call,
    option,
    strike,
    struck,
    variable,
    with_result,
)
from scripts.campaigns.tiny_runs import Session

STEPS = 8
"""Steps of a run."""
EVERY = 4
"""Steps between checkpoints."""
SHORT_S = 8.0
"""Value of `--faults.collective-seconds` in most trials. A few have the default."""
_GIVE_UP_S = 240.0
_STEP = "mupax.train.run.runtime", "Report.add"
_SAVE = "mupax.train.checkpoints.checkpointer", "Checkpoints.save"
_EVALUATION = "mupax.train.run.loop", "evaluate"
_PUT = "mupax.train.parallel.sharding", "BatchSharding.shard_batch"
_COMPILE = "mupax.train.core.program", "Program.compile_train"
_INPUTS = "mupax.train.core.program", "Program.step_inputs"
_STALLED = "--faults.collective-seconds"


@dataclass(frozen=True)
class Case(tiny_runs.Case):
    """A decoder on two processes.

    Attributes:
        mesh: `data` if every process has all parameters, `fsdp` if each has a part.
        more: Further flags.
    """

    model: str = "decoder"
    processes: int = 2
    mesh: str = "data"
    more: tuple[str, ...] = ()

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = " ".join(super().argv(folder, workdir, steps))
        words = words.replace("every-steps 20", f"every-steps {EVERY}")
        words = words.replace("eval-every-steps 30", "eval-every-steps 4")
        mesh = []
        for axis in ("data", "fsdp"):
            size = self.processes if axis == self.mesh else 1
            mesh += [f"--mesh.{axis}", str(size)]
        return [*words.split(), "--log.no-tensorboard", *mesh, *self.more]


@dataclass(frozen=True)
class Fault:
    """Fault in a run of two processes, with the end that the run must have.

    Attributes:
        name: Name of the trial.
        group: Group of the trial.
        sick: Index of a process to the action that prepares the fault in it. The process calls the
            action before mupax starts.
        says: Text that every process must print, except `dead` ones; `None` if the run must survive
            the fault.
        code: Exit code of the processes if the run must not survive.
        short: True if `--faults.collective-seconds` is `SHORT_S`; false for its default.
        dead: Indices of processes that the fault stops for good. The trial kills them at the end.
        mesh: Mesh of the run, as in `Case`.
        unsaved: Step whose checkpoint must not be there afterwards; `None` for no check.
    """

    name: str
    group: str
    sick: Mapping[int, Action]
    says: str | None = None
    code: int = 1
    short: bool = True
    dead: tuple[int, ...] = ()
    mesh: str = "data"
    unsaved: int | None = None


def stop_for(seconds: float | None) -> Action:
    """Return an action that stops this process with all its threads, as a debugger does.

    Args:
        seconds: Seconds until the process goes on; `None` for good.
    """

    def action() -> None:
        pid = os.getpid()
        if seconds is not None:
            # A fork would hold the locks of this process, so a shell wakes it.
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)

    return action


def with_words(*words: str) -> Action:
    """Return an action that adds flags to the command line of this process."""
    return struck(lambda: sys.argv.extend(words))


def flipped(array: Any) -> Any:
    """Return a JAX array with one flipped bit: the lowest of the first byte of its first shard."""
    import jax
    import numpy as np

    part, *other_parts = [shard.data for shard in array.addressable_shards]
    changed = np.array(part)
    changed.reshape(-1).view(np.uint8)[0] ^= 1
    (device,) = part.devices()
    parts = [jax.device_put(changed, device), *other_parts]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def flipped_in(tree: Any, word: str) -> Any:
    """Return a pytree in which one bit of one array is flipped.

    Args:
        word: Part of the array's path. The first array with such a path is changed.
    """
    import jax

    leaves, structure = jax.tree.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    chosen = next(number for number, path in enumerate(paths) if word in path)
    values = [leaf for _, leaf in leaves]
    values[chosen] = flipped(values[chosen])
    return jax.tree.unflatten(structure, values)


def drifting(step: int, word: str) -> Action:
    """Return an action that lets one bit of this process's training state flip after a step.

    Args:
        step: Number of the step, counted from 1 since the process started.
        word: Part of the path of the array in the state, as in `flipped_in`.
    """

    def sick() -> None:
        from mupax.train.run import loop

        real = loop.compiled

        def compiled(*args: Any, **options: Any) -> Any:
            session = real(*args, **options)
            num_steps = 0

            def step_fn(state: Any, *arguments: Any) -> Any:
                nonlocal num_steps
                state, metrics = session.step_fn(state, *arguments)
                num_steps += 1
                if num_steps == step:
                    strike()
                    state = flipped_in(state, word)
                return state, metrics

            return replace(session, step_fn=step_fn)

        loop.compiled = compiled

    return sick


def other_order() -> None:
    """Reverse the order of the examples in every batch of this process."""
    from mupax.train.data.interface import Shuffle

    real: Callable[..., Any] = Shuffle.__call__
    strike()

    def reversed_order(self: Any, indices: Any) -> Any:
        epochs, positions = real(self, indices)
        return epochs, positions[::-1]

    Shuffle.__call__ = reversed_order


def other_digest() -> None:
    """Change the digest that this process records for its data."""
    from mupax.train.data.text.batches import TokenData

    real = TokenData.__init__
    strike()

    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.facts = {**self.facts, "digest": "another"}

    TokenData.__init__ = init


def _describe(place: tuple[Place, int]) -> str:
    """Return the name of a moment: the function and the number of its call."""
    (_, function), call = place
    return f"{function} {call}"


def _cuts() -> list[Fault]:
    """Return the faults of links that are cut for good, cut for a while, or reset."""
    moments: dict[str, tuple[Place, int]] = {
        "before the first step": (_INPUTS, 1),
        "in the first step": (_STEP, 1),
        "in step 6": (_STEP, 6),
        "in the last step": (_STEP, STEPS),
        "in an evaluation": (_EVALUATION, 1),
        "at a save": (_SAVE, 2),
        "while it reads data": (_PUT, 5),
    }
    faults = []
    for number, (moment, place) in enumerate(moments.items()):
        # Processes alternate, and meshes change after two moments.
        index = number % 2
        mesh = ("data", "fsdp")[number // 2 % 2]
        name = f"links of process {index} cut {moment} ({mesh})"
        sick = {index: on_call(*place, links.cut)}
        faults.append(Fault(name, "cut links", sick, _STALLED, mesh=mesh))
    name = "links of process 1 cut in step 6 (fsdp)"
    sick = {1: on_call(_STEP, 6, links.cut)}
    faults.append(Fault(name, "cut links", sick, _STALLED, mesh="fsdp"))
    for index in (0, 1):
        name = f"links of process {index} cut in step 6 (default limit)"
        sick = {index: on_call(_STEP, 6, links.cut)}
        faults.append(Fault(name, "cut links", sick, _STALLED, short=False))

    for index, place in ((0, (_STEP, 6)), (1, (_EVALUATION, 1)), (0, (_SAVE, 2))):
        name = f"links of process {index} cut for 4 s at {_describe(place)}"
        sick = {index: on_call(*place, partial(links.cut, 4.0))}
        faults.append(Fault(name, "links cut for a while", sick))
    for index in (0, 1):
        name = f"links of process {index} cut for 20 s (default limit)"
        sick = {index: on_call(_STEP, 6, partial(links.cut, 20.0))}
        faults.append(Fault(name, "links cut for a while", sick, short=False))

    for index, call in ((0, 3), (1, 6)):
        name = f"links of process {index} reset in step {call}"
        sick = {index: on_call(_STEP, call, links.reset)}
        faults.append(Fault(name, "links reset", sick, "error: "))
    return faults


def _stops() -> list[Fault]:
    """Return the faults of processes that are stopped or slow."""
    faults = []
    for index, place in ((0, (_STEP, 5)), (1, (_SAVE, 2)), (0, (_COMPILE, 1))):
        name = f"process {index} stopped for 2 s at {_describe(place)}"
        sick = {index: on_call(*place, stop_for(2.0))}
        faults.append(Fault(name, "stopped for a while", sick))
    for index, place in ((1, (_STEP, 5)), (1, (_SAVE, 2)), (0, (_STEP, 7))):
        name = f"process {index} stopped for good at {_describe(place)}"
        sick = {index: on_call(*place, stop_for(None))}
        faults.append(Fault(name, "stopped", sick, f"process {index} (", dead=(index,)))

    slow_places: dict[str, tuple[Place, int]] = {
        "data": (_PUT, 6),
        "compiling": (_COMPILE, 1),
        "saving": (_SAVE, 2),
        "evaluation": (_EVALUATION, 1),
    }
    # More than the limit of collectives, which must not take slow work for a stall.
    seconds = 2.5 * SHORT_S
    for title, place in slow_places.items():
        sick = {1: on_call(*place, partial(time.sleep, seconds))}
        faults.append(Fault(f"process 1 slow by {seconds:.0f} s at {title}", "slow", sick))
    slow_step = on_call(_STEP, 7, partial(time.sleep, 5.0))
    faults.append(Fault("process 1 slow by 5 s between steps", "slow", {1: slow_step}))
    return faults


def _differences() -> list[Fault]:
    """Return the faults of a process that differs from the other one."""
    return [
        *_other_options(),
        *_other_config(),
        *_other_data(),
        *_other_state(),
        *_drifts(),
    ]


def _other_options() -> list[Fault]:
    """Return the faults of a process with another option of JAX."""
    options = {
        "jax_threefry_partitionable": False,
        "jax_default_prng_impl": "rbg",
        "jax_enable_x64": True,
        "jax_default_matmul_precision": "bfloat16",
        "jax_use_direct_linearize": False,
        "jax_random_seed_offset": 1,
        "jax_numpy_rank_promotion": "raise",
        "jax_numpy_dtype_promotion": "strict",
        "jax_enable_custom_prng": True,
        "jax_disable_most_optimizations": True,
        "jax_softmax_custom_jvp": True,
    }
    harmless = {
        "jax_log_compiles": True,
        "jax_traceback_filtering": "off",
        "jax_compilation_cache_max_size": 10**9,
    }
    faults = []
    for name, value in options.items():
        sick = {1: struck(option(name, value))}
        faults.append(Fault(f"other {name}", "other options", sick, name, code=2))
    for name, value in harmless.items():
        sick = {1: struck(option(name, value))}
        faults.append(Fault(f"other {name}, which changes no number", "other options", sick))
    return faults


def _other_config() -> list[Fault]:
    """Return the faults of a process with another flag or variable."""
    flags = (
        ("--seed", "7"),
        ("--data.batch-size", "32"),
        ("--optimizer.peak-lr", "0.01"),
        ("--mesh.fsdp", "2"),
        ("--model.depth", "2"),
        ("--ema.decay", "0.5"),
        ("--faults.collective-seconds", "9"),
        ("--resume-exact",),
    )
    variables = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "NVIDIA_TF32_OVERRIDE": "0"}
    faults = []
    for words in flags:
        sick = {1: with_words(*words)}
        says = "start all processes with the same flags"
        faults.append(Fault(f"other {words[0]}", "other config", sick, says, code=2))
    for name, value in variables.items():
        sick = {1: struck(variable(name, value))}
        faults.append(Fault(f"other {name}", "other config", sick, f"has {name}=", code=2))
    return faults


def _other_data() -> list[Fault]:
    """Return the faults of a process with other data."""
    order = {1: other_order}
    digest = {1: other_digest}
    says = "other examples for batch 0"
    return [
        Fault("other order of examples", "other data", order, says, code=2),
        Fault("other digest of the data", "other data", digest, "digest", code=2),
    ]


def _other_state() -> list[Fault]:
    """Return the faults of a process whose state or learning rates differ before the first step."""
    initial = ("mupax.train.core.program", "Program.initial_state")
    faults = []
    for word in ("params", "opt_state", "ema", "step"):
        sick = {1: with_result(initial, partial(flipped_in, word=word))}
        says = "before the first step state."
        faults.append(Fault(f"other {word} at the start", "other state", sick, says, code=2))
    name = "other learning rates at the start"
    sick = {1: with_result(_INPUTS, partial(flipped_in, word="lr"))}
    faults.append(Fault(name, "other state", sick, "before the first step inputs.", code=2))
    return faults


def _drifts() -> list[Fault]:
    """Return the faults of a process whose state changes by one bit in the middle of a run."""
    faults = []
    for index, step, word, mesh in (
        (1, 6, "params", "data"),
        (0, 6, "params", "data"),
        (1, 4, "opt_state", "data"),
        (1, 3, "ema", "data"),
        (1, 7, "count", "fsdp"),
    ):
        # States are compared before each save.
        save_step = step + -step % EVERY
        name = f"a bit of {word} changes on process {index} after step {step} ({mesh})"
        sick = {index: drifting(step, word)}
        says = f"after step {save_step}"
        faults.append(Fault(name, "drift", sick, says, mesh=mesh, unsaved=save_step))
    return faults


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials. The seed is not used: every moment is a call of a function."""
    named = []
    for fault in (*_differences(), *_cuts(), *_stops()):
        named.append(Trial(fault.name, fault.group, partial(run, fault=fault, shared=shared)))
    return [*named, *_of_studies(shared), *_of_clocks(shared)]


def run(folder: Path, fault: Fault, shared: Path) -> Outcome:
    """Train a run with a fault, resume it if the fault must end it, and judge the result.

    Args:
        shared: Folder with the text and the undisturbed runs that all trials share.
    """
    prepare(shared)
    case = Case(mesh=fault.mesh)
    expected = tiny_runs.undisturbed(case, shared, STEPS, f"alone-{case.mesh}", 2 * _GIVE_UP_S)
    struck = folder / "struck"
    os.environ["STRUCK"] = str(struck)
    with_text(folder, shared)
    more = ("--faults.collective-seconds", str(SHORT_S)) if fault.short else ()
    session = Session(replace(case, more=more), folder, "run", STEPS, fault.sick)
    seconds = wait(session, fault.dead, struck)
    if not struck.exists():
        return Outcome("wrong", f"the fault never came: {session.output()[-160:]}")
    outcome = judge_processes(session, fault, seconds)
    if outcome.verdict != "ok":
        return outcome

    detail = "went on"
    if fault.says is not None:
        detail = f"all ended after {seconds:.0f} s, exit {fault.code}"
        if seconds is not None and seconds > BOUND_S:
            return Outcome("hung", detail)
    if fault.unsaved is not None and (folder / "run" / "checkpoints" / str(fault.unsaved)).exists():
        return Outcome("silent", f"the checkpoint of step {fault.unsaved} is there")
    if fault.says is not None and fault.code == 2:
        return Outcome("ok", f"{detail}, before the first step")
    if fault.says is not None:
        session = Session(case, folder, "run", STEPS)
        if any(session.wait(_GIVE_UP_S)):
            return Outcome("lost", f"does not resume: {session.output()[-200:]}")
    return same_bits(folder, expected, detail)


def judge_processes(session: Session, fault: Fault, seconds: float | None) -> Outcome:
    """Judge exit codes and outputs of all processes except those of `fault.dead`.

    Args:
        seconds: Time from the fault to the end; `None` if the processes had to be killed.
    """
    for index, code in enumerate(session.wait(0)):
        if index in fault.dead:
            continue
        output = session.output(index)
        if seconds is None:
            ended = Ended(None, output, _GIVE_UP_S)
        else:
            ended = Ended(code, output, seconds or _GIVE_UP_S)
        outcome = trial.judge(ended, [0 if fault.says is None else fault.code])
        if outcome.verdict != "ok":
            return Outcome(outcome.verdict, f"process {index}: {outcome.detail}")
        if fault.says is not None and fault.says not in output:
            detail = f"process {index} does not say {fault.says!r}: {output[-160:]}"
            return Outcome("silent", detail)
    return Outcome("ok")


def same_bits(folder: Path, expected: dict[str, Any], detail: str) -> Outcome:
    """Return `ok` if the result of the run in `folder/run` is bitwise as expected, else `silent`.

    Args:
        expected: Result of an undisturbed run (`tiny_runs.run_result`).
    """
    differences = tiny_runs.differences(tiny_runs.run_result(folder / "run", STEPS), expected)
    if differences:
        return Outcome("silent", f"other bits: {differences[:3]}")
    return Outcome("ok", f"{detail}, the right bits")


def wait(session: Session, dead: Sequence[int], struck: Path) -> float | None:
    """Wait until all processes have ended except `dead` ones, then kill what is left.

    Args:
        dead: Indices of processes that the fault has stopped for good.
        struck: File that is touched when the fault comes.

    Returns:
        Seconds from the fault to the end; `None` if the processes did not end, or no fault came.
    """
    deadline = time.monotonic() + _GIVE_UP_S
    while time.monotonic() <= deadline:
        codes = [code for index, code in enumerate(session.poll()) if index not in dead]
        if None not in codes:
            break
        time.sleep(0.05)
    # Wall time, because it is compared with the time of a file.
    ended = time.time() if time.monotonic() < deadline else None
    session.send(signal.SIGKILL, range(len(session.pids)))
    session.wait(10)
    if ended is None or not struck.exists():
        return None
    return ended - struck.stat().st_mtime


def prepare(shared: Path) -> None:
    """Import what a run imports, on the first call. Every run is a fork of this process."""
    if not (shared / "text.txt").exists():
        tiny_runs.prepare_forks(shared)


def with_text(folder: Path, shared: Path) -> None:
    """Link the text of all runs into a folder."""
    text = folder / "text.txt"
    if not text.exists():
        text.symlink_to(shared / "text.txt")


# Clocks. These runs are new interpreters, because the library of the clock must be loaded first.

_JUMPS = {
    "an hour ahead": 3600,
    "an hour back": -3600,
    "ten years ahead": 315_360_000,
    "back to 2001": -789_000_000,
}


def _of_clocks(shared: Path) -> list[Trial]:
    """Return the trials of clocks that jump."""
    planned = []
    for index, jump in (
        (0, "an hour ahead"),
        (1, "an hour back"),
        (1, "ten years ahead"),
        (0, "back to 2001"),
    ):
        run_clock = partial(clock_run, shared=shared, index=index, jump=jump)
        planned.append(
            Trial(f"the clock of process {index} jumps {jump}", "clock jumps", run_clock)
        )
    return planned


def clock_run(folder: Path, shared: Path, index: int, jump: str) -> Outcome:
    """Train a run of two processes, and move the clock of one when the first metrics are written.

    The run must go on, or all processes must end with a message and go on when they are started
    again.

    Args:
        index: Number of the process whose clock jumps.
        jump: Key of `_JUMPS`.
    """
    prepare(shared)
    expected = tiny_runs.undisturbed(Case(), shared, STEPS, "alone-data", 2 * _GIVE_UP_S)
    with_text(folder, shared)
    codes, outputs = _clock_session(folder, shared, index, _JUMPS[jump])
    if None in codes:
        return Outcome("hung", f"running {_GIVE_UP_S:.0f} s after its start")
    detail = "went on"
    if any(codes):
        # JAX's coordinator takes a jump of decades for the death of all. Lines of C++ before the
        # message are no crash.
        if set(codes) != {1} or not all("error: " in output for output in outputs):
            return trial.judge(Ended(codes[index], outputs[index], 0.0), [0])
        detail = "ended with a message, and went on when started again"
        codes, outputs = _clock_session(folder, shared, index, 0)
        if any(codes):
            return Outcome("lost", f"started again: {codes} {outputs[0][-120:]}")
    return same_bits(folder, expected, detail)


def _clock_session(
    folder: Path, shared: Path, index: int, seconds: int
) -> tuple[list[int | None], list[str]]:
    """Start both processes, and move the clock of one when the first metrics are written.

    Args:
        index: Number of the process whose clock jumps, 0 or 1.
        seconds: Length of the jump, negative for back.

    Returns:
        The exit code of each process, `None` if it hangs, and the output of each process.
    """
    library = clock.compiled(shared)
    port = tiny_runs.free_port()
    argv = Case().argv(folder, "run", STEPS)
    running = []
    for number in (0, 1):
        joined = (
            f"--distributed.coordinator localhost:{port} --distributed.processes 2 "
            f"--distributed.process {number}"
        )
        environ = clock.environ(library, folder / f"clock{number}")
        running.append(trial.start(["train", *argv, *joined.split()], environ))
    deadline = time.monotonic() + _GIVE_UP_S
    rows = folder / "run" / "metrics.jsonl"
    while time.monotonic() < deadline and not (rows.exists() and rows.stat().st_size):
        time.sleep(0.01)
    clock.shift(folder / f"clock{index}", seconds)
    codes: list[int | None] = []
    outputs = []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            codes.append(None)
        else:
            codes.append(process.returncode)
        outputs.append(output.decode(errors="replace"))
    return codes, outputs


# Two processes on one study

_STUDIES = {
    "transfer": (
        "transfer lm-tiny --grow head_dim=8,16 --seeds 1 --max-seeds 1 --control none --how in-turn"
    ),
    "tune": "tune lm-tiny --over lr --points 4 --batch 2 --seeds 1 --confirm 0 --how in-turn",
}
_SIZES = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-batch-size 32 --data.eval-examples 64 "
    "--optimizer.warmup-steps 2 --steps 10"
)
_POINT = "mupax.train.studies.sweep.rows", "Rows.add"
_POINT_STEP = "mupax.train.studies.sweep.work", "Work.train"


@dataclass(frozen=True)
class Study(tiny_runs.Case):
    """A study of one process. Its model is a key of `_STUDIES`."""

    model: str
    processes: int = 1

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        text = folder / "text.txt"
        words = f"{_STUDIES[self.model]} --data.name text:{text} {_SIZES} --out {folder / workdir}"
        return words.split()


def _of_studies(shared: Path) -> list[Trial]:
    """Return the trials of two processes on one study."""
    runs = {
        "a second process in its folder": second_process,
        "killed between points, another process goes on": partial(
            taken_over, sick=on_call(_POINT, 2, _kill)
        ),
        "killed in a point, another process goes on": partial(
            taken_over, sick=on_call(_POINT_STEP, 2, _kill)
        ),
        "stopped for good, a second process is refused": beside_stopped,
        "stopped for 3 s": partial(passes, sick=on_call(_POINT, 2, stop_for(3.0))),
        "slow by 5 s": partial(passes, sick=on_call(_POINT_STEP, 2, partial(time.sleep, 5.0))),
        "other random numbers when it goes on": partial(
            other_environment,
            sick=struck(option("jax_default_prng_impl", "rbg")),
            name="jax_default_prng_impl",
        ),
        "the variables of a launcher of two processes": partial(passes, sick=_launched),
    }
    named = []
    for study in _STUDIES:
        for name, run_study in runs.items():
            run_trial = partial(run_study, shared=shared, study=study)
            named.append(Trial(f"{study}: {name}", study, run_trial))
    return named


def _kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _launched() -> None:
    """Set JAX's variables for a run of two processes, as a launcher such as SLURM's would."""
    strike()
    os.environ.update(
        JAX_COORDINATOR_ADDRESS="localhost:1", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="1"
    )


def points_of(folder: Path) -> list[str]:
    """Return the sorted points of a study as JSON, without fields that depend on time or paths."""
    named = ("key", "seconds", "digest", "command")
    points = []
    for line in (folder / "points.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key in named:
            row.pop(key, None)
        points.append(json.dumps(row))
    return sorted(points)


def control_of(study: str, shared: Path) -> list[str]:
    """Return the points of the undisturbed study, which the first call runs."""
    name = f"alone-{study}"
    if not (shared / name).exists():
        session = Session(Study(study), shared, name, 0)
        if any(session.wait(2 * _GIVE_UP_S)):
            raise RuntimeError(f"the undisturbed study itself fails: {session.output()[-400:]}")
    return points_of(shared / name)


def begin(folder: Path, shared: Path, study: str, log: str, sick: Action | None = None) -> Session:
    """Start a study in a folder.

    Args:
        study: Key of `_STUDIES`.
        log: Name of the file of its output.
        sick: Action that injects a fault into its process.
    """
    prepare(shared)
    os.environ["STRUCK"] = str(folder / "struck")
    with_text(folder, shared)
    return Session(Study(study), folder, "study", 0, {0: sick} if sick else None, log)


def ended_well(session: Session, codes: Sequence[int] = (0,)) -> Outcome:
    """Wait for a study, and judge its end.

    Args:
        codes: Exit codes that are right. Default: 0 only.
    """
    began = time.monotonic()
    (code,) = session.wait(_GIVE_UP_S)
    seconds = time.monotonic() - began
    # A study that had to be killed hangs.
    exit_code = None if seconds >= _GIVE_UP_S else code
    return trial.judge(Ended(exit_code, session.output(), seconds), codes)


def same_points(folder: Path, shared: Path, study: str, detail: str) -> Outcome:
    """Return `ok` if the points of a study are bitwise those of the undisturbed one."""
    if points_of(folder / "study") != control_of(study, shared):
        return Outcome("silent", "other points than those of the study that nobody disturbs")
    return Outcome("ok", f"{detail}, the right points")


def until_struck(folder: Path) -> None:
    """Wait until the fault has come."""
    deadline = time.monotonic() + _GIVE_UP_S
    while not (folder / "struck").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def passes(folder: Path, shared: Path, study: str, sick: Action) -> Outcome:
    """Run a study that meets a fault. It must end well with the right points.

    Args:
        sick: Action that prepares the fault in the study's process.
    """
    session = begin(folder, shared, study, "first", sick)
    outcome = ended_well(session)
    if outcome.verdict != "ok":
        return outcome
    return same_points(folder, shared, study, "went on")


def second_process(folder: Path, shared: Path, study: str) -> Outcome:
    """Start the same study twice at once. The second must be refused."""
    first = begin(folder, shared, study, "first", on_call(_POINT, 1, partial(time.sleep, 8.0)))
    until_struck(folder)
    second = ended_well(begin(folder, shared, study, "second"), [2])
    if second.verdict != "ok" or "in use by another" not in second.detail:
        return Outcome("wrong", f"the second: {second.detail}")
    outcome = ended_well(first)
    if outcome.verdict != "ok":
        return outcome
    return same_points(folder, shared, study, second.detail[-80:])


def taken_over(folder: Path, shared: Path, study: str, sick: Action) -> Outcome:
    """Run a study that is killed, then run it again. It must end well with the right points.

    Args:
        sick: Action that prepares the kill in the study's process.
    """
    killed = begin(folder, shared, study, "first", sick)
    killed.wait(_GIVE_UP_S)
    outcome = ended_well(begin(folder, shared, study, "second"))
    if outcome.verdict != "ok":
        return outcome
    return same_points(folder, shared, study, "taken over")


def beside_stopped(folder: Path, shared: Path, study: str) -> Outcome:
    """Start a study while another process, which is stopped by SIGSTOP, holds the same study.

    The new process must be refused. Once the stopped one is killed, a third must end the study.
    """
    stopped = begin(folder, shared, study, "first", on_call(_POINT, 2, stop_for(None)))
    until_struck(folder)
    second = ended_well(begin(folder, shared, study, "second"), [2])
    stopped.send(signal.SIGKILL, [0])
    stopped.wait(10)
    if second.verdict != "ok":
        return Outcome(second.verdict, f"the second: {second.detail}")
    outcome = ended_well(begin(folder, shared, study, "third"))
    if outcome.verdict != "ok":
        return outcome
    return same_points(folder, shared, study, "refused, then taken over")


def other_environment(folder: Path, shared: Path, study: str, sick: Action, name: str) -> Outcome:
    """Kill a study, and run it again under another environment, which a line must report.

    Args:
        sick: Action that changes the environment of the second process.
        name: Name of the changed option, which the line must have.
    """
    begin(folder, shared, study, "first", on_call(_POINT, 2, _kill)).wait(_GIVE_UP_S)
    session = begin(folder, shared, study, "second", sick)
    outcome = ended_well(session)
    if outcome.verdict != "ok":
        return outcome
    if name not in session.output():
        return Outcome("silent", f"goes on without a line about {name}")
    return Outcome("ok", "goes on, and says what differs")
