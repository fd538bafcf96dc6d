"""Two processes of one run, one of which is cut off, stopped, slow, or computes otherwise; and two on one study.

Tiny runs in forked processes (`tiny_runs`). Something happens to one process at a chosen moment. Either the run goes on and its
last checkpoint and rows are bitwise those of a run that nobody disturbs, or all processes end within `BOUND_S` with a reason on
every screen. What is resumed afterwards must end with those bits too.
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
    option,
    strike,
    struck,
    variable,
    when,
    with_result,
)
from scripts.campaigns.tiny_runs import Session

STEPS, EVERY = 8, 4
"""Steps of a run, and steps between its checkpoints."""
SHORT_S = 8.0
"""`--faults.collective-seconds` of most trials; a few have the default."""
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
    """A decoder on two processes, whose parameters are copies (`data`) or parts (`fsdp`)."""

    model: str = "decoder"
    processes: int = 2
    mesh: str = "data"
    more: tuple[str, ...] = ()

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = " ".join(super().argv(folder, workdir, steps))
        words = words.replace("every-steps 20", f"every-steps {EVERY}").replace(
            "eval-every-steps 30", "eval-every-steps 4"
        )
        axes = {"data": 1, "fsdp": 1, self.mesh: self.processes}
        mesh = [word for axis, size in axes.items() for word in (f"--mesh.{axis}", str(size))]
        return [*words.split(), "--log.no-tensorboard", *mesh, *self.more]


@dataclass(frozen=True)
class Fault:
    """Something that happens to processes of a run.

    Attributes:
        name: of the trial.
        group: row of the table.
        sick: called in a process before it starts, by its number.
        says: what every process that is left must print; `None` if the run must go on to its end.
        code: exit code of processes that end.
        short: whether the run has `SHORT_S` as its limit of collective operations.
        dead: numbers of processes that cannot say anything, and that the trial ends.
        mesh: as `Case` has it.
        unsaved: a step whose checkpoint must not be there afterwards.
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
    """Return what stops this process with all its threads, as a debugger does; for good if `seconds` is `None`."""

    def action() -> None:
        me = os.getpid()
        if seconds is not None:
            # Not a fork: that would hold the locks of this process.
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {me}"])
        os.kill(me, signal.SIGSTOP)

    return action


def with_words(*words: str) -> Action:
    """Return what adds flags to the command line of a process."""
    return struck(lambda: sys.argv.extend(words))


def flipped(array: Any) -> Any:
    """Return an array whose copy on this process has another last bit in its first number."""
    import jax
    import numpy as np

    (part, *more) = [shard.data for shard in array.addressable_shards]
    changed = np.array(part)
    changed.reshape(-1).view(np.uint8)[0] ^= 1
    (device,) = part.devices()
    parts = [jax.device_put(changed, device), *more]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def flipped_in(tree: Any, word: str) -> Any:
    """Return a tree with one bit of the first array changed whose path has a word."""
    import jax

    leaves, structure = jax.tree.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    chosen = next(number for number, path in enumerate(paths) if word in path)
    values = [
        flipped(leaf) if number == chosen else leaf for number, (_, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, values)


def drifting(step: int, word: str) -> Action:
    """Return what has one bit of the state changed on this process after a step."""

    def sick() -> None:
        from mupax.train.run import loop

        real = loop.compiled

        def compiled(*args: Any, **options: Any) -> Any:
            session = real(*args, **options)
            calls = [0]

            def step_fn(state: Any, *arguments: Any) -> Any:
                state, metrics = session.step_fn(state, *arguments)
                calls[0] += 1
                if calls[0] == step:
                    strike()
                    state = flipped_in(state, word)
                return state, metrics

            return replace(session, step_fn=step_fn)

        loop.compiled = compiled

    return sick


def other_order() -> None:
    """Take the examples of a batch in another order."""
    from mupax.train.data.interface import Shuffle

    real: Callable[..., Any] = Shuffle.__call__
    strike()

    def reversed_order(self: Any, indices: Any) -> Any:
        epochs, positions = real(self, indices)
        return epochs, positions[::-1]

    Shuffle.__call__ = reversed_order


def other_digest() -> None:
    """Have data of another digest."""
    from mupax.train.data.text.batches import TokenData

    real = TokenData.__init__
    strike()

    def init(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.facts = {**self.facts, "digest": "another"}

    TokenData.__init__ = init


def slow_step(call: int, seconds: float) -> Action:
    """Return what keeps a process from the next step for some seconds, so that the other one waits for it in its own."""
    return when(_STEP, call, partial(time.sleep, seconds))


def _cuts() -> list[Fault]:
    moments: dict[str, tuple[tuple[str, str], int]] = {
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
        index = number % 2
        mesh = ("data", "fsdp")[number // 2 % 2]
        sick = {index: when(*place, links.cut)}
        faults.append(
            Fault(
                f"links of process {index} cut {moment} ({mesh})",
                "cut links",
                sick,
                _STALLED,
                mesh=mesh,
            )
        )
    sick = {1: when(_STEP, 6, links.cut)}
    faults.append(
        Fault("links of process 1 cut in step 6 (fsdp)", "cut links", sick, _STALLED, mesh="fsdp")
    )
    for index in (0, 1):
        sick = {index: when(_STEP, 6, links.cut)}
        faults.append(
            Fault(
                f"links of process {index} cut in step 6 (default limit)",
                "cut links",
                sick,
                _STALLED,
                short=False,
            )
        )
    for index, place in ((0, (_STEP, 6)), (1, (_EVALUATION, 1)), (0, (_SAVE, 2))):
        sick = {index: when(*place, partial(links.cut, 4.0))}
        faults.append(
            Fault(
                f"links of process {index} cut for 4 s at {place[0][1]} {place[1]}",
                "links cut for a while",
                sick,
            )
        )
    for index in (0, 1):
        sick = {index: when(_STEP, 6, partial(links.cut, 20.0))}
        faults.append(
            Fault(
                f"links of process {index} cut for 20 s (default limit)",
                "links cut for a while",
                sick,
                short=False,
            )
        )
    for index, call in ((0, 3), (1, 6)):
        sick = {index: when(_STEP, call, links.reset)}
        faults.append(
            Fault(f"links of process {index} reset in step {call}", "links reset", sick, "error: ")
        )
    return faults


def _stops() -> list[Fault]:
    faults = []
    for index, place in ((0, (_STEP, 5)), (1, (_SAVE, 2)), (0, (_COMPILE, 1))):
        sick = {index: when(*place, stop_for(2.0))}
        faults.append(
            Fault(
                f"process {index} stopped for 2 s at {place[0][1]} {place[1]}",
                "stopped for a while",
                sick,
            )
        )
    for index, place in ((1, (_STEP, 5)), (1, (_SAVE, 2)), (0, (_STEP, 7))):
        sick = {index: when(*place, stop_for(None))}
        name = f"process {index} stopped for good at {place[0][1]} {place[1]}"
        faults.append(Fault(name, "stopped", sick, f"process {index} (", dead=(index,)))
    for index, place, name in (
        (1, (_PUT, 6), "data"),
        (1, (_COMPILE, 1), "compiling"),
        (1, (_SAVE, 2), "saving"),
        (1, (_EVALUATION, 1), "evaluation"),
    ):
        sick = {index: when(*place, partial(time.sleep, 2.5 * SHORT_S))}
        faults.append(
            Fault(f"process {index} slow by {2.5 * SHORT_S:.0f} s at {name}", "slow", sick)
        )
    for index in (1,):
        faults.append(
            Fault(f"process {index} slow by 5 s between steps", "slow", {index: slow_step(7, 5.0)})
        )
    return faults


def _differences() -> list[Fault]:
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
    faults = [
        Fault(f"other {name}", "other options", {1: struck(option(name, value))}, name, code=2)
        for name, value in options.items()
    ]
    harmless = {
        "jax_log_compiles": True,
        "jax_traceback_filtering": "off",
        "jax_compilation_cache_max_size": 10**9,
    }
    faults += [
        Fault(f"other {n}, which changes no number", "other options", {1: struck(option(n, v))})
        for n, v in harmless.items()
    ]
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
    faults += [
        Fault(
            f"other {words[0]}",
            "other config",
            {1: with_words(*words)},
            "start all processes with the same flags",
            code=2,
        )
        for words in flags
    ]
    variables = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "NVIDIA_TF32_OVERRIDE": "0"}
    faults += [
        Fault(
            f"other {name}",
            "other config",
            {1: struck(variable(name, value))},
            f"has {name}=",
            code=2,
        )
        for name, value in variables.items()
    ]
    faults.append(
        Fault(
            "other order of examples",
            "other data",
            {1: other_order},
            "other examples for batch 0",
            code=2,
        )
    )
    faults.append(
        Fault("other digest of the data", "other data", {1: other_digest}, "digest", code=2)
    )
    initial = "mupax.train.core.program", "Program.initial_state"
    for word in ("params", "opt_state", "ema", "step"):
        sick = {1: with_result(initial, partial(flipped_in, word=word))}
        faults.append(
            Fault(
                f"other {word} at the start",
                "other state",
                sick,
                "before the first step state.",
                code=2,
            )
        )
    sick = {1: with_result(_INPUTS, partial(flipped_in, word="lr"))}
    faults.append(
        Fault(
            "other learning rates at the start",
            "other state",
            sick,
            "before the first step inputs.",
            code=2,
        )
    )
    for index, step, word, mesh in (
        (1, 6, "params", "data"),
        (0, 6, "params", "data"),
        (1, 4, "opt_state", "data"),
        (1, 3, "ema", "data"),
        (1, 7, "count", "fsdp"),
    ):
        after = step + -step % EVERY
        name = f"a bit of {word} changes on process {index} after step {step} ({mesh})"
        sick = {index: drifting(step, word)}
        faults.append(Fault(name, "drift", sick, f"after step {after}", mesh=mesh, unsaved=after))
    return faults


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials. What they choose depends on no seed: every moment is a call of a function."""
    named = [
        Trial(fault.name, fault.group, partial(run, fault=fault, shared=shared))
        for fault in (*_differences(), *_cuts(), *_stops())
    ]
    return [*named, *_of_studies(shared), *_of_clocks(shared)]


def run(folder: Path, fault: Fault, shared: Path) -> Outcome:
    """Disturb a run, and compare what is left of it, after a resume where it ended, with a run that nobody disturbs."""
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
    for index, code in enumerate(session.wait(0)):
        if index in fault.dead:
            continue
        ended = Ended(
            None if seconds is None else code, session.output(index), seconds or _GIVE_UP_S
        )
        outcome = trial.judge(ended, [0 if fault.says is None else fault.code])
        if outcome.verdict != "ok":
            return Outcome(outcome.verdict, f"process {index}: {outcome.detail}")
        if fault.says is not None and fault.says not in session.output(index):
            return Outcome(
                "silent",
                f"process {index} does not say {fault.says!r}: {session.output(index)[-160:]}",
            )
    detail = (
        "went on" if fault.says is None else f"all ended after {seconds:.0f} s, exit {fault.code}"
    )
    if seconds is not None and fault.says is not None and seconds > BOUND_S:
        return Outcome("hung", detail)
    if fault.unsaved is not None and (folder / "run" / "checkpoints" / str(fault.unsaved)).exists():
        return Outcome("silent", f"the checkpoint of step {fault.unsaved} is there")
    if fault.says is not None and fault.code == 2:
        return Outcome("ok", f"{detail}, before the first step")
    if fault.says is not None:
        session = Session(case, folder, "run", STEPS)
        if any(session.wait(_GIVE_UP_S)):
            return Outcome("lost", f"does not resume: {session.output()[-200:]}")
    other = tiny_runs.differences(tiny_runs.left(folder / "run", STEPS), expected)
    return (
        Outcome("silent", f"other bits: {other[:3]}")
        if other
        else Outcome("ok", f"{detail}, the right bits")
    )


def wait(session: Session, dead: Sequence[int], struck: Path) -> float | None:
    """Return the seconds from the fault until all processes had ended but the dead; `None` if they had not. All are ended."""
    until = time.monotonic() + _GIVE_UP_S
    while None in [code for index, code in enumerate(session.poll()) if index not in dead]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    ended = time.time() if time.monotonic() < until else None
    session.send(signal.SIGKILL, range(len(session.pids)))
    session.wait(10)
    return None if ended is None or not struck.exists() else ended - struck.stat().st_mtime


def prepare(shared: Path) -> None:
    """Import what a run imports, once; every run is forked from this process."""
    if not (shared / "text.txt").exists():
        tiny_runs.prepared(shared).__enter__()


def with_text(folder: Path, shared: Path) -> None:
    """Give a folder the text that all runs train on."""
    text = folder / "text.txt"
    if not text.exists():
        text.symlink_to(shared / "text.txt")


# Clocks, in new interpreters: a library that is loaded first answers for the clock.

_JUMPS = {
    "an hour ahead": 3600,
    "an hour back": -3600,
    "ten years ahead": 315_360_000,
    "back to 2001": -789_000_000,
}


def _of_clocks(shared: Path) -> list[Trial]:
    return [
        Trial(
            f"the clock of process {index} jumps {jump}",
            "clock jumps",
            partial(clock_run, shared=shared, index=index, jump=jump),
        )
        for index, jump in (
            (0, "an hour ahead"),
            (1, "an hour back"),
            (1, "ten years ahead"),
            (0, "back to 2001"),
        )
    ]


def clock_run(folder: Path, shared: Path, index: int, jump: str) -> Outcome:
    """Move the clock of one process once the first rows are there.

    The run goes on, or all processes end with a message and go on when they are started again: JAX's coordinator takes a jump
    of decades for the death of all. C++ prints its own lines before that message, which is no crash: the exit code is 1.
    """
    prepare(shared)
    expected = tiny_runs.undisturbed(Case(), shared, STEPS, "alone-data", 2 * _GIVE_UP_S)
    with_text(folder, shared)
    codes, outputs = _clock_session(folder, shared, index, _JUMPS[jump])
    if None in codes:
        return Outcome("hung", f"running {_GIVE_UP_S:.0f} s after its start")
    went_on = "went on"
    if any(codes):
        if set(codes) != {1} or not all("error: " in output for output in outputs):
            return trial.judge(Ended(codes[index], outputs[index], 0.0), [0])
        went_on = "ended with a message, and went on when started again"
        codes, outputs = _clock_session(folder, shared, index, 0)
        if any(codes):
            return Outcome("lost", f"started again: {codes} {outputs[0][-120:]}")
    other = tiny_runs.differences(tiny_runs.left(folder / "run", STEPS), expected)
    return (
        Outcome("silent", f"other bits: {other[:3]}")
        if other
        else Outcome("ok", f"{went_on}, the right bits")
    )


def _clock_session(
    folder: Path, shared: Path, index: int, seconds: int
) -> tuple[list[int | None], list[str]]:
    """Start both processes, and move the clock of one. Return the exit codes, None for one that hangs, and the outputs."""
    library = clock.compiled(shared)
    port = tiny_runs.free_port()
    argv = Case().argv(folder, "run", STEPS)
    running = []
    for number in (0, 1):
        joined = f"--distributed.coordinator localhost:{port} --distributed.processes 2 --distributed.process {number}"
        environ = clock.environ(library, folder / f"clock{number}")
        running.append(trial.start(["train", *argv, *joined.split()], environ))
    until = time.monotonic() + _GIVE_UP_S
    rows = folder / "run" / "metrics.jsonl"
    while time.monotonic() < until and not (rows.exists() and rows.stat().st_size):
        time.sleep(0.01)
    clock.shift(folder / f"clock{index}", seconds)
    codes: list[int | None] = []
    outputs = []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
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
    "transfer": "transfer lm-tiny --grow head_dim=8,16 --seeds 1 --max-seeds 1 --control none --how in-turn",
    "tune": "tune lm-tiny --over lr --points 4 --batch 2 --seeds 1 --confirm 0 --how in-turn",
}
_SIZES = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 --data.eval-batch-size 32 "
    "--data.eval-examples 64 --optimizer.warmup-steps 2 --steps 10"
)
_POINT = "mupax.train.studies.sweep.rows", "Rows.add"
_POINT_STEP = "mupax.train.studies.sweep.work", "Work.train"


@dataclass(frozen=True)
class Study(tiny_runs.Case):
    """A study of one process."""

    model: str
    processes: int = 1

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = f"{_STUDIES[self.model]} --data.name text:{folder / 'text.txt'} {_SIZES} --out {folder / workdir}"
        return words.split()


def _of_studies(shared: Path) -> list[Trial]:
    named = []
    for study in _STUDIES:
        for name, run_study in {
            "a second process in its folder": second_process,
            "killed between points, another process goes on": partial(
                taken_over, sick=when(_POINT, 2, _kill)
            ),
            "killed in a point, another process goes on": partial(
                taken_over, sick=when(_POINT_STEP, 2, _kill)
            ),
            "stopped for good, a second process is refused": beside_stopped,
            "stopped for 3 s": partial(passes, sick=when(_POINT, 2, stop_for(3.0))),
            "slow by 5 s": partial(passes, sick=when(_POINT_STEP, 2, partial(time.sleep, 5.0))),
            "other random numbers when it goes on": partial(
                other_environment,
                sick=struck(option("jax_default_prng_impl", "rbg")),
                name="jax_default_prng_impl",
            ),
            "the variables of a launcher of two processes": partial(passes, sick=_launched),
        }.items():
            named.append(
                Trial(f"{study}: {name}", study, partial(run_study, shared=shared, study=study))
            )
    return named


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _launched() -> None:
    strike()
    os.environ.update(
        JAX_COORDINATOR_ADDRESS="localhost:1", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="1"
    )


def points_of(folder: Path) -> list[str]:
    """Return the points of a study in a fixed order, without times and without the names that the path of the text goes into."""
    named = ("key", "seconds", "digest", "command")
    rows = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    return sorted(
        json.dumps({name: value for name, value in row.items() if name not in named})
        for row in rows
    )


def control_of(study: str, shared: Path) -> list[str]:
    """Return the points of a study that nobody disturbs."""
    name = f"alone-{study}"
    if not (shared / name).exists():
        session = Session(Study(study), shared, name, 0)
        if any(session.wait(2 * _GIVE_UP_S)):
            raise RuntimeError(f"the undisturbed study itself fails: {session.output()[-400:]}")
    return points_of(shared / name)


def begin(folder: Path, shared: Path, study: str, log: str, sick: Action | None = None) -> Session:
    """Start a study in a folder, beside what else runs there."""
    prepare(shared)
    os.environ["STRUCK"] = str(folder / "struck")
    with_text(folder, shared)
    return Session(Study(study), folder, "study", 0, {0: sick} if sick else None, log)


def ended_well(session: Session, codes: Sequence[int] = (0,)) -> Outcome:
    """Return the verdict on a study that is waited for."""
    began = time.monotonic()
    (code,) = session.wait(_GIVE_UP_S)
    seconds = time.monotonic() - began
    return trial.judge(
        Ended(None if seconds >= _GIVE_UP_S else code, session.output(), seconds), codes
    )


def same_points(folder: Path, shared: Path, study: str, detail: str) -> Outcome:
    """Return `ok` if a study's points are bitwise those of the control."""
    if points_of(folder / "study") != control_of(study, shared):
        return Outcome("silent", "other points than those of the study that nobody disturbs")
    return Outcome("ok", f"{detail}, the right points")


def until_struck(folder: Path) -> None:
    """Wait for the fault."""
    until = time.monotonic() + _GIVE_UP_S
    while not (folder / "struck").exists() and time.monotonic() < until:
        time.sleep(0.02)


def passes(folder: Path, shared: Path, study: str, sick: Action) -> Outcome:
    """Disturb a study that must end well."""
    session = begin(folder, shared, study, "first", sick)
    outcome = ended_well(session)
    if outcome.verdict != "ok":
        return outcome
    return same_points(folder, shared, study, "went on")


def second_process(folder: Path, shared: Path, study: str) -> Outcome:
    """Start the same study twice at once: one of them is refused and says where it is at work."""
    first = begin(folder, shared, study, "first", when(_POINT, 1, partial(time.sleep, 8.0)))
    until_struck(folder)
    second = ended_well(begin(folder, shared, study, "second"), [2])
    if second.verdict != "ok" or "in use by another" not in second.detail:
        return Outcome("wrong", f"the second: {second.detail}")
    outcome = ended_well(first)
    return (
        outcome
        if outcome.verdict != "ok"
        else same_points(folder, shared, study, second.detail[-80:])
    )


def taken_over(folder: Path, shared: Path, study: str, sick: Action) -> Outcome:
    """Kill a study; another process goes on with it."""
    killed = begin(folder, shared, study, "first", sick)
    killed.wait(_GIVE_UP_S)
    outcome = ended_well(begin(folder, shared, study, "second"))
    return outcome if outcome.verdict != "ok" else same_points(folder, shared, study, "taken over")


def beside_stopped(folder: Path, shared: Path, study: str) -> Outcome:
    """Start a study beside one that is stopped: it is refused; after a kill of that one it goes on."""
    stopped = begin(folder, shared, study, "first", when(_POINT, 2, stop_for(None)))
    until_struck(folder)
    second = ended_well(begin(folder, shared, study, "second"), [2])
    stopped.send(signal.SIGKILL, [0])
    stopped.wait(10)
    if second.verdict != "ok":
        return Outcome(second.verdict, f"the second: {second.detail}")
    outcome = ended_well(begin(folder, shared, study, "third"))
    return (
        outcome
        if outcome.verdict != "ok"
        else same_points(folder, shared, study, "refused, then taken over")
    )


def other_environment(folder: Path, shared: Path, study: str, sick: Action, name: str) -> Outcome:
    """Go on with a killed study under another environment: a line must say so."""
    begin(folder, shared, study, "first", when(_POINT, 2, _kill)).wait(_GIVE_UP_S)
    session = begin(folder, shared, study, "second", sick)
    outcome = ended_well(session)
    if outcome.verdict != "ok":
        return outcome
    if name not in session.output():
        return Outcome("silent", f"goes on without a line about {name}")
    return Outcome("ok", "goes on, and says what differs")
