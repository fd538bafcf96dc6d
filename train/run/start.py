"""What a run starts with: its data, its compiled steps, and a state from its newest checkpoint, another run's parameters, or fresh."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from mupax import memory
from mupax.terminal import rich_console
from mupax.train import data as data_sources
from mupax.train.checkpoints import assets, checkpointer, workdir
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import CHECKPOINTS, steps
from mupax.train.config.data import DataConfig
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs
from mupax.train.data import Data, DataError
from mupax.train.data import assets as data_assets
from mupax.train.parallel import environment
from mupax.train.parallel.processes import Processes
from mupax.train.run.report import metrics
from mupax.train.run.report.metrics import Evaluations, rows_until
from mupax.train.run.report.progress import announce
from mupax.train.run.runtime import RunContext, StartState

if TYPE_CHECKING:
    from mupax.train.run.hooks import Hooks
    from mupax.train.run.report.mirrors.snapshots import Snapshots
    from mupax.train.run.resume import CopyCheck

IN_FLIGHT = 2
"""Steps queued on the device before the host waits for the oldest: enough to hide the host's work."""


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """A run with its compiled programs and devices (`compiled` makes it)."""

    program: Program
    data: Data
    checkpoints: Checkpoints
    rt: RunContext
    step_fn: jax.stages.Compiled
    eval_fn: jax.stages.Compiled
    inputs: StepInputs
    """Numbers of the step, on the devices."""
    began: float
    """On the monotonic clock, before compiling."""
    compile_seconds: float
    sets: dict[str, Data]
    """What is evaluated beside `data`, by name."""
    evaluations: Evaluations
    snapshots: Snapshots | None = None
    """Takes images and histograms at evaluations, where they are asked for."""
    in_flight: int = IN_FLIGHT
    """Steps that are queued on the devices before the host waits for the oldest."""
    copies: CopyCheck | None = None
    """Compares what several processes must hold alike; None where there is only one."""
    hooks: Hooks | None = None
    """Functions of the user that are called after steps."""
    speed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Lines of the summary about how fast it went, by their label; those of the last attempt."""


def memory_limit(program: Program, rt: RunContext, when: str) -> int | None:
    """Return the bytes that a device of this run has left, the least over all processes; None where they are not to be checked.

    Args:
        program: program of the run.
        rt: surroundings of the run.
        when: name of the moment, used once in a run.
    """
    if not (program.config.faults.memory_check and memory.checks()):
        return None
    on_cpu = program.layout.platform == "cpu"
    place = (
        socket.gethostname(),
        memory.device_room(jax.local_devices()[0], jax.local_device_count()),
    )
    gathered = rt.processes.gather(f"memory/{when}", place)

    def least() -> int | None:
        hosts = [host for host, _ in gathered or ()]
        # Processes of one host share its memory, which each of them sees whole.
        shares = [
            room // (hosts.count(host) if on_cpu else 1)
            for host, room in gathered or ()
            if room is not None
        ]
        return min(shares, default=None)

    return rt.processes.broadcast(f"memory/{when}/least", least)


def check_state(program: Program, limit: int | None) -> None:
    """Refuse a run whose parameters, optimizer state and gradients alone do not fit, before anything is compiled.

    Args:
        program: program of the run.
        limit: bytes that a device has left; None checks nothing.

    Raises:
        MemoryLimitError: they do not fit.
    """
    # Four times the state is more than the state, its gradients and a checkpoint's copy.
    if limit is not None and 4 * program.state_bytes > limit:
        from mupax.train.core.costs import fit

        fit.check_state(program, limit)


def _check_steps(
    program: Program, step: jax.stages.Compiled, evaluation: jax.stages.Compiled, limit: int
) -> None:
    """Refuse a run whose compiled programs do not fit."""
    analyses = [
        analysis for one in (step, evaluation) if (analysis := one.memory_analysis()) is not None
    ]
    most = max((one.argument_size_in_bytes + one.temp_size_in_bytes for one in analyses), default=0)
    # What else may lie there is less than the state and a checkpoint's copy of it.
    if most + 2 * program.state_bytes > limit:
        from mupax.train.core.costs import fit

        fit.check_step(program, step, limit)
        fit.check_evaluation(program, evaluation, limit, held=fit.optimizer_bytes(program))


def _steps_in_flight(program: Program, step: jax.stages.Compiled, limit: int | None) -> int:
    """Return how many steps may be queued. On a CPU each has its temporaries from the moment that it is queued."""
    analysis = step.memory_analysis()
    if program.layout.platform != "cpu" or limit is None or analysis is None:
        return IN_FLIGHT
    temporary = analysis.temp_size_in_bytes
    spare = limit // 2 - analysis.argument_size_in_bytes - program.state_bytes - temporary
    return max(0, min(IN_FLIGHT, spare // max(1, temporary)))


def compiled(
    program: Program,
    data: Data,
    sets: dict[str, Data],
    checkpoints: Checkpoints,
    rt: RunContext,
    position: StartState,
    limit: int | None = None,
) -> CompiledRun:
    """The session of a run, its two programs compiled: the only compilations that the run does, but for images and histograms.

    Args:
        program: of the run.
        data: of the run.
        sets: what is evaluated beside it.
        checkpoints: of its folder.
        rt: its surroundings; all processes wait for the slowest compiler.
        position: where it starts.
        limit: bytes that a device had left before the state lay there; None checks nothing.

    Raises:
        MemoryLimitError: the step or the evaluation needs more.
        AgreementError, DataError: processes start from other states, inputs or batches.
    """
    copies = None
    if rt.processes.count > 1:
        from mupax.train.run.resume import CopyCheck

        copies = CopyCheck(rt.processes)
        copies.check_start(position.state, data, position.step)
    began = time.monotonic()
    step_fn = program.compile_train()
    eval_fn = program.compile_eval(step_fn)
    if limit is not None:
        _check_steps(program, step_fn, eval_fn, limit)
    in_flight = _steps_in_flight(program, step_fn, limit)
    seconds = time.monotonic() - began
    # Patient; the first collective operation waits half a minute for a slower compiler.
    rt.processes.barrier("compiled")
    keeps = position.keep_metrics
    rows = rt.processes.broadcast(
        "evaluations", lambda: rows_until(rt.files, position.step) if keeps else []
    )
    evaluations = Evaluations(rt.config, rows)
    if rt.processes.leader:  # a kill may have come before it was kept there
        saved = steps(checkpoints.folder)
        checkpoints.evaluated(
            {step: evaluations.metrics[step] for step in saved if step in evaluations.metrics}
        )
    # JAX compares what several processes put on all devices, by a program of its own.
    with rt.patience.program("inputs"):
        inputs = program.step_inputs()
    if copies is not None:
        copies.check_inputs(inputs)
    snapshots = None
    if rt.config.log.images or rt.config.log.histograms:
        from mupax.train.run.report.mirrors.snapshots import Snapshots

        snapshots = Snapshots(program, data, inputs)
    return CompiledRun(
        program,
        data,
        checkpoints,
        rt,
        step_fn,
        eval_fn,
        inputs,
        began,
        seconds,
        sets,
        evaluations,
        snapshots,
        in_flight,
        copies,
    )


@contextlib.contextmanager
def out_of_memory(program: Program) -> Iterator[None]:
    """Turn an error that says that memory ran out into one message with the flags that take less.

    Raises:
        OutOfMemory: in place of such an error.
    """
    try:
        yield
    except Exception as error:
        described = memory.exhausted(error)
        if described is None:
            raise
        from mupax.train.core.costs import fit

        raise memory.OutOfMemory(f"{described}. {fit.advice(program)}") from error


def load_data(program: Program, runtime: RunContext) -> Data:
    """The run's data; process 0 prepares what the others then read.

    Args:
        program: of the run, whose config names the data and whose model it must fit.
        runtime: its surroundings; gets lines about what takes time.

    Raises:
        DataError: the data is missing, damaged, does not fit the model, or is not what process 0 has.
    """
    config = program.config
    settings, problem = own_settings(config, runtime)
    with runtime.processes.leader_first("data"):
        data = data_sources.load(
            settings, config.model, seed=config.data_seed, note=runtime.console.print
        )
    check_data(data, runtime.processes)
    if runtime.resumed:
        check_tokenizer(data, runtime, problem)
    runtime.processes.barrier("data")
    return data


def own_settings(config: Config, runtime: RunContext) -> tuple[DataConfig, str]:
    """Return settings of data that name the tokenizer and the chat template which the run keeps, and a problem with these.

    `bpe:SIZE` makes another tokenizer where the data has grown. A new run that starts from another one with the same
    data.tokenizer takes that run's.

    Args:
        config: of this part of the run.
        runtime: its surroundings.
    """
    folder = runtime.folder
    goes_on = runtime.resumed and (steps(folder / CHECKPOINTS) or assets.find(folder) is not None)
    if not goes_on:
        if config.init.init_from is None or config.data.task != "tokens":
            return config.data, ""
        from mupax.train.reuse.start import init_from

        return init_from.own_settings(config), ""
    before = workdir.recorded(folder)
    before_data = before["config"].get("data") or {}
    named = {
        name: before_data.get(name, getattr(config.data, name))
        for name in ("tokenizer", "chat_template")
    }
    recorded = dataclasses.replace(config.data, **named)
    facts = before.get("data") or {}
    choice = config.resume_from
    metric = config.checkpoint.best_metric
    step = None if choice is None else checkpointer.step_of(folder, choice, metric)
    from mupax.train.reuse import own_files

    own = assets.find(folder, step)
    problem = ""
    if own is not None and (problems := assets.problems(folder, own.entries)):
        # The data may make the same files again.
        own = None
        problem = f"{folder}/{problems[0]}"
    return own_files.settings(recorded, facts, own, config.data), problem


def check_tokenizer(data: Data, runtime: RunContext, problem: str) -> None:
    """Refuse to resume with another tokenizer than the one that made the run's tokens.

    Args:
        data: the run's data, opened.
        runtime: the run's surroundings.
        problem: what is wrong with the tokenizer that the run keeps; empty if nothing is.

    Raises:
        WorkdirError: the tokenizer is another.
    """
    if not steps(runtime.folder / CHECKPOINTS):  # it starts anew
        return
    recorded = (workdir.recorded(runtime.folder).get("data") or {}).get("tokenizer")
    tokenizer = data.facts.get("tokenizer")
    if recorded not in (None, tokenizer):
        lost = problem or f"the run's tokens are those of {recorded}, and its tokenizer is not here"
        raise workdir.WorkdirError(
            f"{lost}. From this data, data.tokenizer {data.config.tokenizer} makes {tokenizer}, whose ids mean other text"
        )


def load_sets(program: Program, data: Data, runtime: RunContext) -> dict[str, Data]:
    """What a run evaluates on beside its own data, by name; process 0 prepares it as it does that.

    Args:
        program: of the run, whose config names the sets.
        data: of the run, whose tokens and classes they must have.
        runtime: its surroundings.

    Raises:
        DataError: as `load_data`, or tokens or classes that are not the run's.
    """
    config, sets = program.config, {}
    for name in config.data.evaluation_sets:
        from mupax.train.data import named_sets

        with runtime.processes.leader_first(f"data/{name}"):
            sets[name] = named_sets.load(name, config, data, note=runtime.console.print)
        check_data(sets[name], runtime.processes, name)
        runtime.processes.barrier(f"data/{name}")
    return sets


def check_data(data: Data, processes: Processes, name: str = "") -> None:
    """Refuse to start with other data than process 0 has, on a host that prepared its own.

    Args:
        data: as this process has it.
        processes: of the run.
        name: of a further evaluation set.

    Raises:
        DataError: the digests differ.
    """
    digest = data.facts.get("digest")
    first = processes.broadcast(f"data digest/{name}", lambda: digest)
    if first != digest:
        raise DataError(
            f"process {processes.index} has {data.facts['name']} with digest {digest}, process 0 with {first}; "
            "copy the prepared data of one host to all, or set MUPAX_DATA to a folder that they share"
        )


def start_state(
    program: Program,
    data: Data,
    sets: dict[str, Data],
    checkpoints: Checkpoints,
    runtime: RunContext,
) -> StartState:
    """Return the state from which the run starts, after writing config.json.

    In the work folder       The state                                     Its metrics
    a whole checkpoint       the newest that is whole, or `resume_from`    kept up to its step
    a run without one        `--init-from` as recorded, else fresh         begun anew
    nothing                  `--init-from`, else fresh                     begun anew

    Args:
        program: of the run.
        data: of the run.
        sets: what is evaluated beside it.
        checkpoints: of its folder.
        runtime: its surroundings.

    Raises:
        InitError, ResumeError, WorkdirError: what does not fit; nothing was written, and checkpoints are as they were.
    """
    config, console = program.config, runtime.console
    choice, metric = config.resume_from, config.checkpoint.best_metric
    at: int | None = runtime.processes.broadcast(
        "resume from",
        lambda: None if choice is None else checkpointer.step_of(runtime.folder, choice, metric),
    )
    if checkpoints.latest_of_all() is None:
        make_state = _prepared(
            program, data
        )  # what does not fit is refused before anything is written
        announce(program, data, console)
        if runtime.resumed or config.resume:
            yet = "no checkpoint yet, " if runtime.resumed else ""
            console.print(f"nothing to resume in {runtime.folder.name}: {yet}starting at step 0")
        position = StartState(make_state(console), step=0, keep_metrics=runtime.resumed)
    else:
        state = restore_latest(program, data, checkpoints, at)
        step = int(state.step)  # an earlier one, where the newest was damaged
        evaluated = not config.evaluates_after(step) or runtime.processes.broadcast(
            "evaluated", lambda: metrics.has_evaluation(runtime.files, step)
        )
        position = StartState(state, step, keep_metrics=True, evaluated=evaluated)
    around = environment.facts(program.mesh)
    if runtime.resumed:
        from mupax.train.run import resume

        set_facts = {name: loaded.facts for name, loaded in sets.items()}
        now = workdir.surroundings(program.compiler_options(), around)
        resume.announce(config, runtime, position.step, set_facts, checkpoints, now)
    if at is not None:
        files = [runtime.files / metrics.FILE_NAME, runtime.folder / workdir.RECORD]
        if line := runtime.processes.broadcast(
            "branch", lambda: checkpointer.branch_off(checkpoints, at, files)
        ):
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if runtime.processes.leader:
        preset, flags = program.preset.describe(), program.compiler_options()
        facts = data.facts | (
            {"sets": {name: each.facts for name, each in sets.items()}} if sets else {}
        )
        checkpoints.record = workdir.record(
            runtime.folder, config, facts, preset, flags, position.step, around
        )
        asset_files = data_assets.files_of(data, config.data, console.print)
        checkpoints.assets = assets.write(runtime.folder, asset_files, position.step)
    return position


def restore_latest(
    program: Program, data: Data, checkpoints: Checkpoints, at: int | None = None
) -> TrainState:
    """Return the state of the newest checkpoint, or the one that the run began with where there is none yet.

    Args:
        program: of the run.
        data: what the checkpoint was trained on, unless `resume_change` has `data`.
        checkpoints: of its folder.
        at: step of a checkpoint that is meant instead, and no other.

    Raises:
        WorkdirError, ForeignError, DiskError: as `Checkpoints.restore`.
    """
    if checkpoints.latest_of_all() is None:
        return _prepared(program, data)(rich_console(quiet=True))
    facts = None if "data" in program.config.resume_change else data.facts
    return checkpoints.restore(program.abstract, facts, at)


def _prepared(program: Program, data: Data) -> Callable[[Console], TrainState]:
    """Return a function that makes the state of step 0 and says where it is from. Its source is read before."""
    if program.config.init.init_from is None:
        return lambda console: program.initial_state()
    from mupax.train.reuse.start import init_from

    start = init_from.prepare(program, data.facts.get("tokenizer"))

    def make_state(console: Console) -> TrainState:
        from mupax.train.reuse import transplant

        transplant.show(
            console, f"starting from {program.config.init.init_from}", start.rows, start.notes
        )
        return init_from.initial_state(program, start)

    return make_state
