"""What a run starts with: its data, its compiled steps, and a state from its newest checkpoint, another run's parameters, or fresh."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from mupax.train import data as data_sources
from mupax.train.checkpoints import assets, selection, workdir
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import steps
from mupax.train.config.data import DataConfig
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs
from mupax.train.data import Data, DataError
from mupax.train.data import assets as data_assets
from mupax.train.parallel.processes import Processes
from mupax.train.run.report import metrics
from mupax.train.run.report.early_stop import Evaluations, rows_until
from mupax.train.run.report.progress import announce
from mupax.train.run.runtime import Runtime

if TYPE_CHECKING:
    from mupax.train.run.report.mirrors.snapshots import Snapshots


@dataclasses.dataclass(frozen=True)
class Position:
    """A state to train from.

    Attributes:
        state: whose arrays the first step takes over.
        step: optimizer steps done.
        keeps_rows: whether metrics up to that step are there already, and kept.
        evaluated: whether nothing is left to evaluate at that step.
    """

    state: TrainState
    step: int
    keeps_rows: bool
    evaluated: bool = True


@dataclasses.dataclass(frozen=True)
class Session:
    """One run on its devices (`compiled` makes it)."""

    program: Program
    data: Data
    checkpoints: Checkpoints
    rt: Runtime
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
    speed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Lines of the summary about how fast it went, by their label; those of the last attempt."""


def compiled(
    program: Program, data: Data, sets: dict[str, Data], checkpoints: Checkpoints, rt: Runtime, position: Position
) -> Session:
    """The session of a run, its two programs compiled: the only compilations that the run does, but for images and histograms.

    Args:
        program: of the run.
        data: of the run.
        sets: what is evaluated beside it.
        checkpoints: of its folder.
        rt: its surroundings; all processes wait for the slowest compiler.
        position: where it starts.
    """
    began, step_fn = time.monotonic(), program.compile_train()
    eval_fn = program.compile_eval(step_fn)
    seconds = time.monotonic() - began
    # Patient; the first collective operation waits half a minute for a slower compiler.
    rt.processes.barrier("compiled")
    keeps = position.keeps_rows
    rows = rt.processes.broadcast("evaluations", lambda: rows_until(rt.files, position.step) if keeps else [])
    evaluations = Evaluations(rt.config, rows)
    if rt.processes.leader:  # a kill may have come before it was kept there
        saved = steps(checkpoints.folder)
        checkpoints.evaluated({step: evaluations.metrics[step] for step in saved if step in evaluations.metrics})
    inputs, snapshots = program.step_inputs(), None
    if rt.config.log.images or rt.config.log.histograms:
        from mupax.train.run.report.mirrors.snapshots import Snapshots

        snapshots = Snapshots(program, data, inputs)
    return Session(
        program, data, checkpoints, rt, step_fn, eval_fn, inputs, began, seconds, sets, evaluations, snapshots
    )


def load_data(program: Program, runtime: Runtime) -> Data:
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
        data = data_sources.load(settings, config.model, seed=config.data_seed, note=runtime.console.print)
    check_data(data, runtime.processes)
    if runtime.resumed:
        check_tokenizer(data, runtime, problem)
    runtime.processes.barrier("data")
    return data


def own_settings(config: Config, runtime: Runtime) -> tuple[DataConfig, str]:
    """Return settings of data that name the tokenizer and the chat template which the run keeps, and a problem with these.

    `bpe:SIZE` makes another tokenizer where the data has grown. A new run that starts from another one with the same
    data.tokenizer takes that run's.

    Args:
        config: of this part of the run.
        runtime: its surroundings.
    """
    if not runtime.resumed:
        if config.init.init_from is None or config.data.task != "tokens":
            return config.data, ""
        from mupax.train.reuse.start import init_from

        return init_from.own_settings(config), ""
    before = workdir.recorded(runtime.folder)
    before_data = before["config"].get("data") or {}
    named = {name: before_data.get(name, getattr(config.data, name)) for name in ("tokenizer", "chat_template")}
    recorded = dataclasses.replace(config.data, **named)
    facts = before.get("data") or {}
    choice, metric = config.resume_from, config.checkpoint.best_metric
    step = None if choice is None else selection.step_of(runtime.folder, choice, metric)
    from mupax.train.reuse import own_files

    own = assets.find(runtime.folder, step)
    problem = ""
    if own is not None and (problems := assets.problems(runtime.folder, own.entries)):
        # The data may make the same files again.
        own = None
        problem = f"{runtime.folder}/{problems[0]}"
    return own_files.settings(recorded, facts, own, config.data), problem


def check_tokenizer(data: Data, runtime: Runtime, problem: str) -> None:
    """Refuse to resume with another tokenizer than the one that made the run's tokens.

    Args:
        data: the run's data, opened.
        runtime: the run's surroundings.
        problem: what is wrong with the tokenizer that the run keeps; empty if nothing is.

    Raises:
        WorkdirError: the tokenizer is another.
    """
    recorded = (workdir.recorded(runtime.folder).get("data") or {}).get("tokenizer")
    tokenizer = data.facts.get("tokenizer")
    if recorded not in (None, tokenizer):
        lost = problem or f"the run's tokens are those of {recorded}, and its tokenizer is not here"
        raise workdir.WorkdirError(
            f"{lost}. From this data, data.tokenizer {data.config.tokenizer} makes {tokenizer}, whose ids mean other text"
        )


def load_sets(program: Program, data: Data, runtime: Runtime) -> dict[str, Data]:
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


def starting_position(
    program: Program, data: Data, sets: dict[str, Data], checkpoints: Checkpoints, runtime: Runtime
) -> Position:
    """Where the run starts, after writing config.json.

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
        "resume from", lambda: None if choice is None else selection.step_of(runtime.folder, choice, metric)
    )
    if checkpoints.latest_of_all() is None:
        make_state = _prepared(program, data)  # what does not fit is refused before anything is written
        announce(program, data, console)
        if runtime.resumed or config.resume:
            yet = "no checkpoint yet, " if runtime.resumed else ""
            console.print(f"nothing to resume in {runtime.folder.name}: {yet}starting at step 0")
        position = Position(make_state(console), step=0, keeps_rows=runtime.resumed)
    else:
        state = rewound(program, data, checkpoints, at)
        step = int(state.step)  # an earlier one, where the newest was damaged
        evaluated = not config.evaluates_after(step) or runtime.processes.broadcast(
            "evaluated", lambda: metrics.has_evaluation(runtime.files, step)
        )
        position = Position(state, step, keeps_rows=True, evaluated=evaluated)
    if runtime.resumed:
        from mupax.train.run import resume

        resume.announce(config, runtime, position.step, {name: each.facts for name, each in sets.items()})
    if at is not None:
        files = [runtime.files / metrics.FILE_NAME, runtime.folder / workdir.RECORD]
        if line := runtime.processes.broadcast("branch", lambda: selection.branch_off(checkpoints, at, files)):
            console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if runtime.processes.leader:
        preset, flags = program.preset.describe(), program.compiler_options()
        facts = data.facts | ({"sets": {name: each.facts for name, each in sets.items()}} if sets else {})
        checkpoints.record = workdir.record(runtime.folder, config, facts, preset, flags, position.step)
        asset_files = data_assets.files_of(data, config.data, console.print)
        checkpoints.assets = assets.write(runtime.folder, asset_files, position.step)
    return position


def rewound(program: Program, data: Data, checkpoints: Checkpoints, at: int | None = None) -> TrainState:
    """The state of the newest checkpoint, or the one that the run began with where there is none yet.

    Args:
        program: of the run.
        data: what the checkpoint was trained on, unless `resume_change` has `data`.
        checkpoints: of its folder.
        at: step of a checkpoint that is meant instead, and no other.

    Raises:
        WorkdirError, ForeignError, DiskError: as `Checkpoints.restore`.
    """
    if checkpoints.latest_of_all() is None:
        return _prepared(program, data)(Console(quiet=True))
    facts = None if "data" in program.config.resume_change else data.facts
    return checkpoints.restore(program.abstract, facts, at)


def _prepared(program: Program, data: Data) -> Callable[[Console], TrainState]:
    """What makes the state of step 0, and says where it is from; its source is read already."""
    if program.config.init.init_from is None:
        return lambda console: program.initial_state()
    from mupax.train.reuse.start import init_from

    start = init_from.prepare(program, data.facts.get("tokenizer"))

    def make_state(console: Console) -> TrainState:
        init_from.show(console, f"starting from {program.config.init.init_from}", start.rows, start.notes)
        return init_from.initial_state(program, start)

    return make_state
