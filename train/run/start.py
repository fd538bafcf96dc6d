"""Start of a run: its data, its compiled steps and the state that training begins with.

`loop.run` calls these functions in order: `load_data`, `load_sets`, `start_state`, `compiled`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
from mupax.train.parallel import environment
from mupax.train.parallel.processes import Processes
from mupax.train.run.report import metrics
from mupax.train.run.report.metrics import Evaluations, rows_until
from mupax.train.run.report.progress import announce
from mupax.train.run.runtime import RunContext, StartState

if TYPE_CHECKING:
    from mupax.train.reuse.start.init_from import Start
    from mupax.train.run.hooks import Hooks
    from mupax.train.run.report.mirrors.snapshots import Snapshots
    from mupax.train.run.resume import CopyCheck

IN_FLIGHT = 2
"""Steps queued on the devices before the host waits for the oldest. Two hide the host's work."""


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """Run with its compiled programs, its data and its checkpoints (`compiled` makes it).

    Attributes:
        step_fn: Compiled training step (`Program.compile_train`).
        eval_fn: Compiled evaluation step (`Program.compile_eval`).
        inputs: Inputs of the step besides state and batch, on the devices.
        began: Monotonic clock before compiling, in seconds.
        sets: Further evaluation sets by name.
        evaluations: Results of the evaluations by step, which may stop the run early.
        snapshots: Takes images and histograms at evaluations, if the config asks for any.
        in_flight: Steps queued on the devices before the host waits for the oldest.
        copies: Compares the copies of several processes; `None` with one process.
        hooks: Functions of the user that are called after steps.
        speed: Lines of the summary about the speed of the last attempt, by their label.
    """

    program: Program
    data: Data
    checkpoints: Checkpoints
    context: RunContext
    step_fn: jax.stages.Compiled
    eval_fn: jax.stages.Compiled
    inputs: StepInputs
    began: float
    compile_seconds: float
    sets: dict[str, Data]
    evaluations: Evaluations
    snapshots: Snapshots | None = None
    in_flight: int = IN_FLIGHT
    copies: CopyCheck | None = None
    hooks: Hooks | None = None
    speed: dict[str, str] = dataclasses.field(default_factory=dict)


def memory_limit(program: Program, context: RunContext, moment: str) -> int | None:
    """Return the bytes that a device of this run has left, the least over all processes.

    On CPU, processes of one host share its memory equally.

    Args:
        program: Program of the run. Its config can turn the check off.
        context: Context of the run, whose processes all call this.
        moment: Name of this call, such as "start", by which the processes find each other's values.
            Each name may be used once in a run.

    Returns:
        Bytes, or `None` if memory is not to be checked or no device says how much it has.
    """
    if not (program.config.faults.memory_check and memory.checks()):
        return None
    on_cpu = program.layout.platform == "cpu"
    # The devices of a process are alike, so the first stands for all of them.
    own_bytes = memory.device_room(jax.local_devices()[0], jax.local_device_count())
    gathered = context.processes.gather(f"memory/{moment}", (socket.gethostname(), own_bytes))

    def least() -> int | None:
        parts = gathered or ()
        hosts = [host for host, _ in parts]
        shares = []
        for host, free_bytes in parts:
            if free_bytes is None:
                continue
            # Processes of one host share its memory, and each of them sees all of it.
            sharers = hosts.count(host) if on_cpu else 1
            shares.append(free_bytes // sharers)
        return min(shares, default=None)

    # All processes must decide alike, or one would refuse while the others wait for it.
    return context.processes.broadcast(f"memory/{moment}/least", least)


def check_state(program: Program, limit: int | None) -> None:
    """Refuse a run whose parameters, optimizer state and gradients alone do not fit into memory.

    This is checked before anything is compiled.

    Args:
        limit: Bytes that a device has left, or `None` to check nothing.

    Raises:
        MemoryLimitError: They do not fit.
    """
    # Four times the state is more than the state, its gradients and a checkpoint's copy.
    if limit is not None and 4 * program.state_bytes > limit:
        from mupax.train.core.costs import fit

        fit.check_state(program, limit)


def _check_steps(
    program: Program, step: jax.stages.Compiled, evaluation: jax.stages.Compiled, limit: int
) -> None:
    """Refuse a run whose compiled programs do not fit into `limit` bytes of a device.

    Raises:
        MemoryLimitError: The training step or the evaluation step needs more.
    """
    largest = 0
    for compiled_step in (step, evaluation):
        analysis = compiled_step.memory_analysis()
        # Not every backend can say how much memory a program needs.
        if analysis is not None:
            # Outputs need little: the state is donated, so the new one takes the old one's memory.
            needed = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
            largest = max(largest, needed)
    # Anything else on the device takes less than the state and a checkpoint's copy of the state.
    if largest + 2 * program.state_bytes > limit:
        from mupax.train.core.costs import fit

        fit.check_step(program, step, limit)
        fit.check_evaluation(program, evaluation, limit, held=fit.optimizer_bytes(program))


def _steps_in_flight(program: Program, step: jax.stages.Compiled, limit: int | None) -> int:
    """Return how many steps may be queued on the devices: at most `IN_FLIGHT`.

    A CPU allocates the temporaries of a step when the step is queued. There only as many steps may
    be queued as have their temporaries in half of `limit` bytes. Without a limit, `IN_FLIGHT` may.
    """
    analysis = step.memory_analysis()
    if program.layout.platform != "cpu" or limit is None or analysis is None:
        return IN_FLIGHT
    temporary = analysis.temp_size_in_bytes
    # The temporaries of one step are always needed. `spare` is what is left for further steps that
    # are queued.
    spare = limit // 2 - analysis.argument_size_in_bytes - program.state_bytes - temporary
    return max(0, min(IN_FLIGHT, spare // max(1, temporary)))


def compiled(
    program: Program,
    data: Data,
    sets: dict[str, Data],
    checkpoints: Checkpoints,
    context: RunContext,
    start: StartState,
    limit: int | None = None,
) -> CompiledRun:
    """Compile the training step and the evaluation step, and return the run with both.

    A run compiles nothing else later, except the programs for images and histograms. With several
    processes, compare their states, inputs and first batches. A resumed run gets its earlier
    evaluations from metrics.jsonl.

    Args:
        sets: Further evaluation sets by name (`load_sets`).
        context: Context of the run. All its processes wait for the slowest compiler.
        limit: Bytes that a device had left before it held the state, or `None` to check nothing.

    Raises:
        MemoryLimitError: The training step or the evaluation step needs more memory.
        AgreementError, DataError: Processes start with different states, inputs or batches.
    """
    processes = context.processes
    copies = None
    if processes.count > 1:
        from mupax.train.run.resume import CopyCheck

        copies = CopyCheck(processes)
        # Before compiling, which takes minutes that a wrong start would waste.
        copies.check_start(start.state, data, start.step)

    began = time.monotonic()
    step_fn = program.compile_train()
    # In the training step's memory layouts, so that no parameter is copied for an evaluation.
    eval_fn = program.compile_eval(step_fn)
    if limit is not None:
        _check_steps(program, step_fn, eval_fn, limit)
    in_flight = _steps_in_flight(program, step_fn, limit)
    compile_seconds = time.monotonic() - began
    # This barrier waits for as long as it takes. The first collective operation on the devices
    # would wait only half a minute for a slower compiler.
    processes.barrier("compiled")

    evaluations = _earlier_evaluations(context, start, checkpoints)
    # If several processes put values on all devices, JAX first compares the values by a program on
    # all devices. That program can hang like a step, so its wait is measured.
    with context.patience.program("inputs"):
        inputs = program.step_inputs()
    if copies is not None:
        copies.check_inputs(inputs)
    snapshots = None
    if context.config.log.images or context.config.log.histograms:
        from mupax.train.run.report.mirrors.snapshots import Snapshots

        snapshots = Snapshots(program, data, inputs)
    return CompiledRun(
        program=program,
        data=data,
        checkpoints=checkpoints,
        context=context,
        step_fn=step_fn,
        eval_fn=eval_fn,
        inputs=inputs,
        began=began,
        compile_seconds=compile_seconds,
        sets=sets,
        evaluations=evaluations,
        snapshots=snapshots,
        in_flight=in_flight,
        copies=copies,
    )


def _earlier_evaluations(
    context: RunContext, start: StartState, checkpoints: Checkpoints
) -> Evaluations:
    """Return the evaluations in metrics.jsonl up to the start step, empty for a new run.

    Process 0 reads them for all processes, which all call this. If the run keeps its best
    checkpoints (`keep_best`), process 0 also writes the metrics into those checkpoints that lack
    them, and deletes checkpoints that are no longer kept.
    """

    def earlier_rows() -> list[dict[str, Any]]:
        if not start.keep_metrics:
            return []
        return rows_until(context.files, start.step)

    # All processes take the rows of process 0, or they would stop early at different steps.
    rows = context.processes.broadcast("evaluations", earlier_rows)
    evaluations = Evaluations(context.config, rows)
    if context.processes.leader:
        # A kill may have come between an evaluation and the write of its metrics to the checkpoint.
        # Checkpoints that are no longer among those to keep are deleted, too.
        saved_steps = steps(checkpoints.folder)
        measured = evaluations.metrics
        checkpoints.write_metrics_and_prune(
            {step: measured[step] for step in saved_steps if step in measured}
        )
    return evaluations


@contextlib.contextmanager
def out_of_memory(program: Program) -> Iterator[None]:
    """Context manager that turns an error about lacking memory into one message with advice.

    The advice names the flags that lower the memory of `program`.

    Raises:
        OutOfMemory: Memory ran out inside.
    """
    try:
        yield
    except Exception as error:
        description = memory.exhausted(error)
        if description is None:
            raise
        from mupax.train.core.costs import fit

        raise memory.OutOfMemory(f"{description}. {fit.advice(program)}") from error


def load_data(program: Program, context: RunContext) -> Data:
    """Load the run's data. Process 0 prepares files that the others then read.

    A resumed run is loaded with the tokenizer and the chat template that it keeps (`own_settings`).

    Args:
        program: Program of the run. Its config names the data, which must fit its model.
        context: Context of the run, whose processes all call this. Its console gets lines about
            work that takes time.

    Raises:
        DataError: The data is missing or damaged, does not fit the model, or differs from the data
            of process 0.
        WorkdirError: A resumed run would get another tokenizer.
    """
    config = program.config
    settings, problem = own_settings(config, context)
    # Process 0 prepares the files first, or all processes would download and write the same files.
    with context.processes.leader_first("data"):
        data = data_sources.load(
            settings, config.model, seed=config.data_seed, note=context.console.print
        )
    check_data(data, context.processes)
    if context.resumed:
        check_tokenizer(data, context, problem)
    # This barrier waits for a slow loader without a limit. A collective would wait half a minute.
    context.processes.barrier("data")
    return data


def own_settings(config: Config, context: RunContext) -> tuple[DataConfig, str]:
    """Return the data settings with the tokenizer and the chat template that the run keeps.

    A resumed run that has a checkpoint or saved files keeps its own: `bpe:SIZE` would make another
    tokenizer if the text has grown. A new run on tokens that starts from another run with the same
    `data.tokenizer` or `data.chat_template` uses the file of that run, unless the setting is the
    path of a file here. All other settings are unchanged.

    Returns:
        Settings, and a problem with the files of the resumed run, or "". Files with a problem are
        not used.
    """
    folder = context.folder
    continues = context.resumed and (steps(folder / CHECKPOINTS) or assets.find(folder) is not None)
    if not continues:
        if config.init.init_from is None or config.data.task != "tokens":
            return config.data, ""
        from mupax.train.reuse.start import init_from

        return init_from.own_settings(config), ""

    record = workdir.recorded(folder)
    data_record = record["config"].get("data") or {}
    recorded = dataclasses.replace(
        config.data,
        tokenizer=data_record.get("tokenizer", config.data.tokenizer),
        chat_template=data_record.get("chat_template", config.data.chat_template),
    )
    step = None
    if config.resume_from is not None:
        metric = config.checkpoint.best_metric
        step = checkpointer.step_of(folder, config.resume_from, metric)
    from mupax.train.reuse import own_files

    # A checkpoint names the files that its own part of the run had.
    own_assets = assets.find(folder, step)
    problem = ""
    if own_assets is not None:
        problems = assets.problems(folder, own_assets.entries)
        if problems:
            # The data may make the same files again.
            own_assets = None
            problem = f"{folder}/{problems[0]}"
    facts = record.get("data") or {}
    return own_files.settings(recorded, facts, own_assets, config.data), problem


def check_tokenizer(data: Data, context: RunContext, problem: str) -> None:
    """Refuse to resume with another tokenizer than the one that made the run's tokens.

    Args:
        context: Context of the resumed run. Nothing is checked without a checkpoint, or if
            config.json records no tokenizer.
        problem: Problem with the tokenizer that the run keeps, or "".

    Raises:
        WorkdirError: The tokenizer is another one.
    """
    if not steps(context.folder / CHECKPOINTS):
        return
    data_record = workdir.recorded(context.folder).get("data") or {}
    recorded = data_record.get("tokenizer")
    tokenizer = data.facts.get("tokenizer")
    if recorded not in (None, tokenizer):
        lost = problem or f"the run's tokens are those of {recorded}, and its tokenizer is not here"
        raise workdir.WorkdirError(
            f"{lost}. From this data, data.tokenizer {data.config.tokenizer} makes {tokenizer}, "
            "whose ids mean other text"
        )


def load_sets(program: Program, data: Data, context: RunContext) -> dict[str, Data]:
    """Load the further evaluation sets, by name. Process 0 prepares files that the others read.

    Args:
        program: Program of the run. Its config names the sets.
        data: Data of the run. The sets must have its tokens or classes.
        context: Context of the run, whose processes all call this. Its console gets lines about
            work that takes time.

    Raises:
        DataError: A set is missing, damaged or another than that of process 0, or it has other
            tokens or classes than the run's data.
    """
    config = program.config
    sets = {}
    for name in config.data.evaluation_sets:
        from mupax.train.data import named_sets

        with context.processes.leader_first(f"data/{name}"):
            sets[name] = named_sets.load(name, config, data, note=context.console.print)
        check_data(sets[name], context.processes, name)
        context.processes.barrier(f"data/{name}")
    return sets


def check_data(data: Data, processes: Processes, name: str = "") -> None:
    """Refuse to start if the data of this process has another digest than that of process 0.

    Args:
        processes: Processes of the run, which all call this.
        name: Name of a further evaluation set, or "" for the run's own data.

    Raises:
        DataError: The digests differ.
    """
    digest = data.facts.get("digest")
    leader_digest = processes.broadcast(f"data digest/{name}", lambda: digest)
    # Batch k is computed from (seed, k) on every host, so other data would be other batches.
    if leader_digest != digest:
        raise DataError(
            f"process {processes.index} has {data.facts['name']} with digest {digest}, process 0 "
            f"with {leader_digest}; copy the prepared data of one host to all, or set MUPAX_DATA "
            "to a folder that they share"
        )


def start_state(
    program: Program,
    data: Data,
    sets: dict[str, Data],
    checkpoints: Checkpoints,
    context: RunContext,
) -> StartState:
    """Return the state from which the run starts, after announcing it and writing config.json.

    With `resume_from`, checkpoints of later steps are moved to a workdir in WORKDIR/branches.

    In the workdir           State                                         Metrics
    a whole checkpoint       the newest that is whole, or `resume_from`    kept up to its step
    a run without one        `--init-from` as recorded, else fresh         begun anew
    nothing                  `--init-from`, else fresh                     begun anew

    Args:
        sets: Further evaluation sets by name (`load_sets`).
        context: Context of the run, whose processes all call this.

    Raises:
        InitError, ResumeError, WorkdirError: Something does not fit. Nothing was written, and the
            checkpoints are as they were.
    """
    config = program.config

    def chosen_step() -> int | None:
        if config.resume_from is None:
            return None
        metric = config.checkpoint.best_metric
        return checkpointer.step_of(context.folder, config.resume_from, metric)

    resume_step: int | None = context.processes.broadcast("resume from", chosen_step)
    if checkpoints.latest_of_all() is None:
        start = _new_start(program, data, context)
    else:
        start = _resumed_start(program, data, checkpoints, context, resume_step)

    # A resume is refused or announced before later checkpoints are moved to a branch and before
    # config.json is written.
    environment_facts = environment.facts(program.mesh)
    if context.resumed:
        from mupax.train.run import resume

        set_facts = {name: loaded.facts for name, loaded in sets.items()}
        surroundings = workdir.surroundings(program.compiler_options(), environment_facts)
        other_examples = resume.announce(
            config, context, start.step, data.facts, set_facts, checkpoints, surroundings
        )
        if other_examples and config.evaluates_after(start.step):
            # Or the summary would show the old numbers as those of the new examples.
            start = dataclasses.replace(start, evaluated=False)
    if resume_step is not None:
        _branch_off(checkpoints, context, resume_step)
    if context.processes.leader:
        _write_record(program, data, sets, checkpoints, context, start.step, environment_facts)
    return start


def _new_start(program: Program, data: Data, context: RunContext) -> StartState:
    """Return the state of step 0, after printing what is trained and from which parameters."""
    # A source that does not fit is refused here, before anything is written or announced.
    source = _read_source(program, data)
    console = context.console
    announce(program, data, console)
    if context.resumed or program.config.resume:
        reason = ""
        if context.resumed:
            reason = "no checkpoint yet, "
        console.print(f"nothing to resume in {context.folder.name}: {reason}starting at step 0")
    state = _initial_state(program, source, console)
    return StartState(state, step=0, keep_metrics=context.resumed)


def _resumed_start(
    program: Program,
    data: Data,
    checkpoints: Checkpoints,
    context: RunContext,
    resume_step: int | None,
) -> StartState:
    """Return the state of the checkpoint of `resume_step`, or of the newest undamaged one.

    The newest is taken if `resume_step` is `None`, and damaged ones are quarantined. `evaluated` of
    the result is False if the evaluation of that step is due and not yet written.
    """
    state = restore_latest(program, data, checkpoints, resume_step)
    step = int(state.step)  # an earlier one if the newest checkpoint is damaged
    evaluated = True
    if program.config.evaluates_after(step):
        # A kill may have come between the checkpoint of a step and its evaluation.
        evaluated = context.processes.broadcast(
            "evaluated", lambda: metrics.has_evaluation(context.files, step)
        )
    return StartState(state, step, keep_metrics=True, evaluated=evaluated)


def _branch_off(checkpoints: Checkpoints, context: RunContext, step: int) -> None:
    """Move the checkpoints after `step` into a new workdir in WORKDIR/branches, and print a line.

    Process 0 moves them, and the others wait. Nothing happens without such checkpoints.
    """
    files = [context.files / metrics.FILE_NAME, context.folder / workdir.RECORD]
    # Only process 0 moves files. The others wait here until they are in place.
    line = context.processes.broadcast(
        "branch", lambda: checkpointer.branch_off(checkpoints, step, files)
    )
    if line:
        context.console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _write_record(
    program: Program,
    data: Data,
    sets: Mapping[str, Data],
    checkpoints: Checkpoints,
    context: RunContext,
    step: int,
    environment_facts: Mapping[str, Any],
) -> None:
    """Write config.json and the assets of the data, such as a tokenizer, into the workdir.

    Both are also set on `checkpoints`, whose manifests list them. Process 0 alone calls this.

    Args:
        step: Number of steps done when this part of the run begins.
        environment_facts: Facts of this process (`environment.facts`).
    """
    facts = dict(data.facts)
    if sets:
        facts["sets"] = {name: loaded.facts for name, loaded in sets.items()}
    checkpoints.record = workdir.record(
        context.folder,
        program.config,
        facts,
        program.preset.describe(),
        program.compiler_options(),
        step,
        environment_facts,
    )
    asset_files = assets.files_of(data, program.config.data, context.console.print)
    checkpoints.assets = assets.write(context.folder, asset_files, step)


def restore_latest(
    program: Program, data: Data, checkpoints: Checkpoints, only_step: int | None = None
) -> TrainState:
    """Return the state of the newest undamaged checkpoint, or of step 0 if there is none yet.

    A damaged checkpoint is quarantined with a printed line, and the one before it is tried. With
    `only_step` an error is raised instead. If a run has several processes, all of them must call
    this together.

    Args:
        data: Data that the checkpoint must have been trained on, unless `resume_change` has `data`.
        only_step: Step of the only checkpoint to try. By default the newest is tried first.

    Raises:
        WorkdirError, ForeignError, DiskError: No checkpoint can be restored (`restore`).
    """
    if checkpoints.latest_of_all() is None:
        return _initial_state(program, _read_source(program, data), rich_console(quiet=True))
    # `restore` refuses a checkpoint of data with another digest. `None` accepts any data.
    facts = data.facts
    if "data" in program.config.resume_change:
        facts = None
    return checkpoints.restore(program.abstract, facts, only_step)


def _read_source(program: Program, data: Data) -> Start | None:
    """Return the run's initial parameters from the model that `--init-from` names.

    Return `None` without that flag.

    Raises:
        InitError: The model there does not fit the run.
    """
    if program.config.init.init_from is None:
        return None
    from mupax.train.reuse.start import init_from

    return init_from.prepare(program, data.facts.get("tokenizer"))


def _initial_state(program: Program, source: Start | None, console: Console) -> TrainState:
    """Return the state of step 0, with random parameters or with those of `source`.

    If there is a source, print where each parameter comes from.
    """
    if source is None:
        return program.initial_state()
    from mupax.train.reuse import transplant
    from mupax.train.reuse.start import init_from

    title = f"starting from {program.config.init.init_from}"
    transplant.show(console, title, source.rows, source.notes)
    return init_from.initial_state(program, source)
