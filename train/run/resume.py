"""Comparisons of a run with its earlier parts and among its processes.

A resume announces its changes by name, and refuses those that would make training jump. Several processes compare what they
must hold alike before the first step and at every save.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mupax.config_fields import Affects, config_fields
from mupax.errors import MupaxError, MupaxFailure
from mupax.train.checkpoints import workdir
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import CheckpointFolder
from mupax.train.config.record import completed, differences, from_json, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.core.factors import schedule_table
from mupax.train.core.state import StepInputs, TrainState
from mupax.train.data import Data, DataError, reading
from mupax.train.parallel import environment, replicas
from mupax.train.parallel.agreement import AgreementError
from mupax.train.parallel.processes import Processes
from mupax.train.run.runtime import RunContext

_ROWS = 8
"""Rows of the first batch that every process reads to compare them."""

JUMP = 1.5
"""Learning rates of one step, of the schedule before and of the new one, further apart than this ratio are a jump."""


class DriftError(MupaxFailure):
    """Processes whose copies of one array have come apart. The text names the array and the process."""


class CopyCheck:
    """Comparisons between the processes of a run. Every method is called by all of them alike.

    Args:
        processes: of the run, at least two.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._comparisons = 0

    def check_start(self, state: TrainState, data: Data, step: int) -> None:
        """Refuse to train where processes start from another state, or with another batch, than process 0.

        Args:
            state: that the run starts from.

        Raises:
            AgreementError: what differs on which process.
            DataError, ReadError: the first batch differs, or cannot be read.
        """
        self._check_equal({"state": state})
        passed_over = int(jax.device_get(state.health.left_out))
        with reading():
            self._check_batch(data, step + passed_over)

    def check_inputs(self, inputs: StepInputs) -> None:
        """Refuse to train where processes give the step other inputs besides the state, such as learning rates or seeds.

        Raises:
            AgreementError: what differs on which process.
        """
        self._check_equal({"inputs": inputs})

    def _check_equal(self, arrays: dict[str, Any]) -> None:
        if difference := self._first_difference(arrays):
            raise AgreementError(
                f"before the first step {difference}; start all processes with the same files, environment and hardware"
            )

    def check_save(self, state: TrainState, step: int, checkpoints: Checkpoints) -> None:
        """Refuse to save a state of which processes hold different copies.

        Args:
            state: whose arrays lie on the devices.
            checkpoints: of the run; the newest stays the last one.

        Raises:
            DriftError: a process has other bits.
        """
        if difference := self._first_difference(state):
            newest = checkpoints.latest_of_all()
            saved = (
                "there is no checkpoint yet"
                if newest is None
                else f"the newest checkpoint is {newest}"
            )
            raise DriftError(
                f"after step {step} {difference}, so that step {step} is not saved and {saved}. Look for a host with other "
                "hardware or a faulty one, and go on with --resume without it"
            )

    def _first_difference(self, tree: Any) -> str:
        """Return which array differs on which process, in words; "" if all copies are equal."""
        arrays = replicas.by_name(tree)
        mine = {"host": socket.gethostname(), "sums": replicas.checksums(list(arrays.values()))}
        return self._compared(mine, lambda parts: replicas.difference(arrays, parts))

    def _check_batch(self, data: Data, k: int) -> None:
        """Compare the first batch. Of text that is tokenized while it is trained on a process reads its own rows alone."""
        if data.train_size is None:
            return

        def differing(parts: list[dict[str, str]]) -> str:
            for index, part in enumerate(parts):
                if part["digest"] != parts[0]["digest"]:
                    first = f"process 0 ({parts[0]['host']})"
                    return f"process {index} ({part['host']}) takes other examples for batch {k} than {first}"
            return ""

        mine = {"host": socket.gethostname(), "digest": _batch_digest(data, k)}
        if problem := self._compared(mine, differing):
            raise DataError(
                f"{problem}; install the same versions on all hosts, and copy the prepared data of one of them to all"
            )

    def _compared(
        self, mine: dict[str, Any], compare: Callable[[list[dict[str, Any]]], str]
    ) -> str:
        """Return what process 0 finds in the parts of all processes."""
        self._comparisons += 1
        name = f"copies/{self._comparisons}"
        parts = self._processes.gather(name, mine)
        return self._processes.broadcast(name, lambda: compare(parts or []))


def _batch_digest(data: Data, k: int) -> str:
    """Return a digest of the first rows of a training batch, as they come out of order and augmentation."""
    rows = data.train_batch(k, slice(0, min(_ROWS, data.batch_size)))
    digest = hashlib.sha256()
    for name, values in sorted(rows.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


class ResumeError(MupaxError):
    """A run that cannot go on as asked. The text says what would happen and what to write."""


def changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """Return every changed field that a resume announces, as `steps 300 -> 200`.

    Args:
        before: the config that the run has recorded, as JSON; a field that it lacks was not there yet.
        config: of this part of the run.
    """
    now = to_json(config)
    silent = {field.path for field in config_fields(config) if _is_silent(field.affects)}
    return [
        f"{name} {text_of(old)} -> {text_of(new)}"
        for name, old, new in differences(completed(before, now), now)
        if name not in silent
    ]


def _is_silent(affects: Affects | None) -> bool:
    return affects is not None and affects.consequence.on_resume == "silent"


def check(before: Mapping[str, Any], config: Config, step: int) -> None:
    """Refuse what the run cannot go on with from a step.

    Args:
        before: the config that the run has recorded, as JSON.
        config: of this part of the run.
        step: steps done.

    Raises:
        ResumeError: more steps are done than asked for, or the learning rate would jump and `resume_change` has no schedule.
    """
    if config.steps < step:
        raise ResumeError(
            f"the run has done {step} steps and --steps is {config.steps}; write --steps {step} to end it there, more to go "
            "on, or another --workdir for a shorter run"
        )
    if config.steps == step or "schedule" in config.resume_change:
        return
    recorded = from_json({**completed(before, to_json(config)), "resume": True})
    old, new = (  # of the step after `step`, or of the last; at base size
        opt.peak_lr * float(schedule_table(opt, steps)[min(step, steps - 1)])
        for opt, steps in ((part.scaled_optimizer, part.steps) for part in (recorded, config))
    )
    if max(old, new) > JUMP * min(old, new):
        shown = [
            line for line in changes(before, config) if line.startswith(("steps ", "optimizer."))
        ]
        raise ResumeError(
            f"with {', '.join(shown)} the learning rate of step {step + 1} jumps from {old:.3g} to {new:.3g}; leave out what "
            "changes the schedule, or write --resume-change schedule if that is meant"
        )


def check_exact(
    before: Mapping[str, Any],
    config: Config,
    environment_changes: Sequence[environment.Change] | None,
) -> None:
    """Refuse a run that is to go on exactly, where its environment is another or was not recorded.

    What is to be trained may change on purpose, such as the number of steps, but not how it is computed.

    Args:
        before: the config that the run has recorded, as JSON.
        config: of this part of the run.
        environment_changes: changes of the environment; `None` if the run has not recorded it.

    Raises:
        ResumeError: bits can differ, and `resume_exact` is set.
    """
    if not config.resume_exact:
        return
    if environment_changes is None:
        raise ResumeError(
            "the run has no record of its environment, so that --resume-exact cannot tell whether the bits stay the same; "
            "leave --resume-exact out"
        )
    changed = [str(change) for change in environment_changes if change.bits]
    rounding = {field.path for field in config_fields(config) if _rounds(field.affects)}
    changed += [line for line in changes(before, config) if line.partition(" ")[0] in rounding]
    if changed:
        raise ResumeError(
            f"--resume-exact: {'; '.join(changed)}. Go on in the environment that the run was trained in, or leave --resume-exact out"
        )


def _rounds(affects: Affects | None) -> bool:
    """Return whether a field leaves what is trained as it is and may change its bits."""
    return affects is not None and affects.effect in ("rounding", "layout")


def announce(
    config: Config,
    runtime: RunContext,
    step: int,
    sets: Mapping[str, Mapping[str, Any]],
    checkpoints: CheckpointFolder,
    now: Mapping[str, Any],
) -> None:
    """Say where a resumed run goes on and what has changed since it was recorded.

    Args:
        config: of this part of the run.
        runtime: its surroundings, with its folder.
        sets: facts of each further evaluation set, by name.
        checkpoints: those of the run, with the settings of this part.
        now: machine, packages and compiler of this part of the run (`workdir.surroundings`).

    Raises:
        ResumeError: as `check` and `check_exact`, where steps are done.
    """
    console = runtime.console
    now = runtime.processes.broadcast("surroundings", lambda: now)
    recorded = runtime.processes.broadcast("recorded", lambda: workdir.read_record(runtime.folder))
    before, recorded_sets = recorded["config"], (recorded.get("data") or {}).get("sets") or {}

    def warn(line: str) -> None:
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    for name in sorted(sets.keys() & recorded_sets):
        if recorded_sets[name].get("digest") != sets[name].get("digest"):
            warn(
                f"caution: the evaluation set {name} holds other data than before: its numbers do not compare"
            )
    environment_changes = None
    if step:
        check(before, config, step)
        environment_changes = environment.changes(recorded, now)
        check_exact(before, config, environment_changes)
        console.print(f"resuming {config.recipe} at step {step} of {config.steps}")
    changed = changes(before, config)
    for change in changed:
        warn(f"changed since: {change}")
    if any(change.startswith("checkpoint.") for change in changed) and step < config.steps:
        upcoming = workdir.with_earlier_parts({"config": to_json(config)}, recorded, step)
        leaving = runtime.processes.broadcast("leaving", lambda: checkpoints.leaving(upcoming))
        leaving = [saved for saved in leaving if saved <= step]  # later ones move to a branch
        if leaving:
            listed = ", ".join(map(str, leaving))
            keep = config.checkpoint.keep + len(leaving)
            warn(
                f"caution: with --checkpoint.keep {config.checkpoint.keep} the checkpoints {listed} are deleted, at the next "
                f"save at the latest; --checkpoint.keep {keep} keeps them"
            )
    for change in environment_changes or ():
        warn(f"changed since: {change}")
    if step and environment_changes is None:
        warn(
            "the run has no record of its environment (options of JAX, devices, processor): whether bits differ is not known"
        )
