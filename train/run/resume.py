"""Comparisons of a run with its earlier parts, and of its processes with each other.

`check` and `announce` are for a resumed run. `CopyCheck` is for several processes.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mupax import MupaxError, MupaxFailure
from mupax.config_fields import Affects, config_fields
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
"""Largest factor by which a resume may change the learning rate of the next step (`check`)."""


class DriftError(MupaxFailure):
    """Error about processes that hold different copies of one array. The text names the array."""


class CopyCheck:
    """Comparisons between the processes of a run. All processes call every method together.

    Args:
        processes: Processes of the run, at least two.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._comparisons = 0

    def check_start(self, state: TrainState, data: Data, step: int) -> None:
        """Refuse to train if processes start with different states or different first batches.

        The first `_ROWS` rows of the batch are compared. Streamed text is not compared.

        Args:
            step: Number of steps done. With the skipped batches of rollbacks it gives the first
                batch.

        Raises:
            AgreementError: An array of the state differs between processes.
            DataError, ReadError: The first batch differs, or cannot be read.
        """
        self._check_equal({"state": state})
        # Rollbacks skip batches, so the position in the data can be ahead of the step.
        skipped_batches = int(jax.device_get(state.health.left_out))
        with reading():
            self._check_batch(data, step + skipped_batches)

    def check_inputs(self, inputs: StepInputs) -> None:
        """Refuse to train if processes give the step different inputs besides the state.

        Such inputs are learning rates and seeds.

        Raises:
            AgreementError: An input differs between processes.
        """
        self._check_equal({"inputs": inputs})

    def _check_equal(self, arrays: dict[str, Any]) -> None:
        difference = self._first_difference(arrays)
        if difference:
            raise AgreementError(
                f"before the first step {difference}; start all processes with the same files, "
                "environment and hardware"
            )

    def check_save(self, state: TrainState, step: int, checkpoints: Checkpoints) -> None:
        """Refuse to save a state of which processes hold different copies.

        Args:
            step: Number of steps done.
            checkpoints: Checkpoints of the run, for the message.

        Raises:
            DriftError: The bits of an array differ between processes.
        """
        difference = self._first_difference(state)
        if not difference:
            return
        newest = checkpoints.latest_of_all()
        if newest is None:
            saved = "there is no checkpoint yet"
        else:
            saved = f"the newest checkpoint is {newest}"
        raise DriftError(
            f"after step {step} {difference}, so that step {step} is not saved and {saved}. Look "
            "for a host with other hardware or a faulty one, and go on with --resume without it"
        )

    def _first_difference(self, tree: Any) -> str:
        """Return a text on which array differs on which process, or "" if all copies are equal."""
        arrays = replicas.by_name(tree)
        own_part = {
            "host": socket.gethostname(),
            "sums": replicas.checksums(list(arrays.values())),
        }
        return self._compared(own_part, lambda parts: replicas.difference(arrays, parts))

    def _check_batch(self, data: Data, index: int) -> None:
        """Compare the first `_ROWS` rows of a training batch between all processes.

        Streamed text is not compared, because there each process reads its own rows alone.

        Args:
            index: Position of the batch in the training data, from 0.

        Raises:
            DataError: Processes read different examples.
        """
        if data.train_size is None:
            return

        def difference(parts: list[dict[str, str]]) -> str:
            for process, part in enumerate(parts):
                if part["digest"] != parts[0]["digest"]:
                    return (
                        f"process {process} ({part['host']}) takes other examples for batch "
                        f"{index} than process 0 ({parts[0]['host']})"
                    )
            return ""

        own_part = {"host": socket.gethostname(), "digest": _batch_digest(data, index)}
        problem = self._compared(own_part, difference)
        if problem:
            raise DataError(
                f"{problem}; install the same versions on all hosts, and copy the prepared data of "
                "one of them to all"
            )

    def _compared(
        self, own_part: dict[str, Any], compare: Callable[[list[dict[str, Any]]], str]
    ) -> str:
        """Gather a value of each process on process 0, and call `compare` with them there.

        Return the text of `compare` on every process.

        Args:
            own_part: Value of this process, which must survive JSON.
            compare: Function from the values, in the order of processes, to a text.
        """
        # Each exchange between processes needs a name of its own.
        self._comparisons += 1
        name = f"copies/{self._comparisons}"
        parts = self._processes.gather(name, own_part)
        return self._processes.broadcast(name, lambda: compare(parts or []))


def _batch_digest(data: Data, index: int) -> str:
    """Return a digest of a training batch's first `_ROWS` rows, shuffled and augmented."""
    # All processes read these rows, including processes that train on other rows of the batch.
    rows = data.train_batch(index, slice(0, min(_ROWS, data.batch_size)))
    digest = hashlib.sha256()
    for name, values in sorted(rows.items()):
        # Arrays of other shapes and dtypes can have the same bytes.
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]


_EVALUATED = (
    "eval_examples",
    "special_tokens",
    "chat_template",
    "loss_on",
    "document_mask",
    "reset_positions",
    "noise",
    "noise_rate",
    "noise_span",
)
"""Fields of `data` that a resume may change, and that change evaluation examples or targets."""


class ResumeError(MupaxError):
    """A run that cannot go on as asked. The text says what would happen and what to write."""


def changes(recorded_config: Mapping[str, Any], config: Config) -> list[str]:
    """Return every changed field that a resume announces, such as `steps 300 -> 200`.

    Args:
        recorded_config: Config that the run has recorded, as JSON. A field that is missing in it
            was added to mupax later and counts as unchanged.
        config: Config of this part of the run.
    """
    current_config = to_json(config)
    silent = {field.path for field in config_fields(config) if _is_silent(field.affects)}
    lines = []
    for name, old, new in differences(completed(recorded_config, current_config), current_config):
        if name not in silent:
            lines.append(f"{name} {text_of(old)} -> {text_of(new)}")
    return lines


def _is_silent(affects: Affects | None) -> bool:
    """Return whether a resume does not announce a change of a field."""
    return affects is not None and affects.consequence.on_resume == "silent"


def check(recorded_config: Mapping[str, Any], config: Config, step: int) -> None:
    """Refuse to resume if too many steps are done or the learning rate would jump.

    The learning rate is not checked if exactly `config.steps` steps are done, or if `resume_change`
    has `schedule`.

    Args:
        recorded_config: Config that the run has recorded, as JSON.
        config: Config of this part of the run.
        step: Number of steps done.

    Raises:
        ResumeError: More steps are done than asked for, or the learning rate of the next step would
            change by more than a factor of `JUMP`.
    """
    if config.steps < step:
        raise ResumeError(
            f"the run has done {step} steps and --steps is {config.steps}; write --steps {step} to "
            "end it there, more to go on, or another --workdir for a shorter run"
        )
    # A run that is done trains no further step, so its schedule does not matter.
    if config.steps == step or "schedule" in config.resume_change:
        return
    recorded = from_json({**completed(recorded_config, to_json(config)), "resume": True})
    old_rates = _next_learning_rates(recorded, step)
    new_rates = _next_learning_rates(config, step)
    for kind, old, new in zip(("", "Adam "), old_rates, new_rates, strict=True):
        # A product and no quotient, because a schedule may end at a learning rate of 0.
        if max(old, new) > JUMP * min(old, new):
            schedule_changes = [
                line
                for line in changes(recorded_config, config)
                if line.startswith(("steps ", "optimizer."))
            ]
            raise ResumeError(
                f"with {', '.join(schedule_changes)} the {kind}learning rate of step {step + 1} "
                f"jumps from {old:.3g} to {new:.3g}; leave out what changes the schedule, or write "
                "--resume-change schedule if that is meant"
            )


def _next_learning_rates(config: Config, step: int) -> tuple[float, float]:
    """Return both learning rates of the step after `step`, or of the last step, at base size.

    They are the rate that follows `peak_lr` and that of Muon's Adam part, which is the same number
    if the optimizer has one peak.
    """
    optimizer = config.scaled_optimizer
    table = schedule_table(optimizer, config.steps)
    share = float(table[min(step, config.steps - 1)])
    adam_peak = optimizer.peak_lr
    if optimizer.adam_peak is not None:
        adam_peak = optimizer.adam_peak
    return optimizer.peak_lr * share, adam_peak * share


def check_classes(recorded: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse to resume on data whose classes have other names or another order than before.

    The readout's columns keep the old order, so that the labels of all images would be wrong.

    Args:
        recorded: Facts of the data that the run has recorded.
        facts: Facts of the data of this part of the run.

    Raises:
        ResumeError: Both have names of classes, and they differ.
    """
    old_names = recorded.get("class_names")
    new_names = facts.get("class_names")
    if old_names and new_names and list(old_names) != list(new_names):
        raise ResumeError(
            f"the run was trained on the classes {_listed(old_names)}, and the data now has "
            f"{_listed(new_names)}, in this order: its outputs would name the wrong classes; give "
            "the classes their old names, or train a new readout with `mupax finetune`"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first five names, with commas between, and how many more there are."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text


def check_exact(
    recorded_config: Mapping[str, Any],
    config: Config,
    environment_changes: Sequence[environment.Change] | None,
) -> None:
    """Refuse to resume with `resume_exact` if the bits of the results can differ from before.

    A change of what is trained, such as the number of steps, is allowed. A change of how it is
    computed is not.

    Args:
        recorded_config: Config that the run has recorded, as JSON.
        config: Config of this part of the run.
        environment_changes: Changes of the environment, or `None` if the run has not recorded it.

    Raises:
        ResumeError: Bits can differ, or the environment was not recorded, and `resume_exact` is
            set.
    """
    if not config.resume_exact:
        return
    if environment_changes is None:
        raise ResumeError(
            "the run has no record of its environment, so that --resume-exact cannot tell whether "
            "the bits stay the same; leave --resume-exact out"
        )
    changed = [str(change) for change in environment_changes if change.bits]
    rounding = {field.path for field in config_fields(config) if _rounds(field.affects)}
    for line in changes(recorded_config, config):
        field_path = line.partition(" ")[0]
        if field_path in rounding:
            changed.append(line)
    if changed:
        raise ResumeError(
            f"--resume-exact: {'; '.join(changed)}. Go on in the environment that the run was "
            "trained in, or leave --resume-exact out"
        )


def _rounds(affects: Affects | None) -> bool:
    """Return whether a field may change the last bits of a run, and nothing else.

    Such fields say how a run is computed, as kernels and the mesh do. `resume_exact` refuses
    a change of them.

    Args:
        affects: Declaration of the field. `None`, as for plugins' models, is no such field.
    """
    return affects is not None and affects.effect in ("rounding", "layout")


def announce(
    config: Config,
    context: RunContext,
    step: int,
    facts: Mapping[str, Any],
    sets: Mapping[str, Mapping[str, Any]],
    checkpoints: CheckpointFolder,
    surroundings: Mapping[str, Any],
) -> bool:
    """Print where a resumed run goes on and what has changed since it was recorded.

    Cautions name data with other evaluation examples, and checkpoints that new settings will
    delete.
    If at least one step is done, first refuse a run that cannot go on. At step 0 nothing is
    refused, and neither the step nor changes of the environment are printed.

    Args:
        config: Config of this part of the run.
        context: Context of the run, whose processes all call this.
        step: Number of steps done.
        facts: Facts of this part's training data, as config.json records them under "data".
        sets: Facts of each further evaluation set, by name.
        checkpoints: Checkpoints of the run, with the settings of this part.
        surroundings: Machine, packages and compiler of this part of the run
            (`workdir.surroundings`).

    Returns:
        `True` if the run's next evaluation has other examples or further sets than the last one.

    Raises:
        ResumeError: The run cannot go on from `step` (`check`, `check_classes`, `check_exact`).
    """
    console = context.console
    processes = context.processes
    # All processes use what process 0 has, so that all print or refuse the same.
    surroundings = processes.broadcast("surroundings", lambda: surroundings)
    recorded = processes.broadcast("recorded", lambda: workdir.read_record(context.folder))
    recorded_config = recorded["config"]

    def warn(line: str) -> None:
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)

    recorded_facts = recorded.get("data") or {}
    recorded_sets = recorded_facts.get("sets") or {}
    other_examples = _other_examples(recorded_config, config)
    if other_examples:
        warn("caution: evaluations have other examples than before: their numbers do not compare")
    elif _digests_differ(recorded_facts, facts):
        # Perhaps only the training part has changed.
        warn(
            "caution: evaluations may have other examples than before: do not compare their numbers"
        )
        other_examples = True
    for name in sorted(sets.keys() & recorded_sets):
        if _digests_differ(recorded_sets[name], sets[name]):
            warn(
                f"caution: the evaluation set {name} holds other data than before: its numbers do "
                "not compare"
            )
            other_examples = True
    if sets.keys() - recorded_sets:
        other_examples = True
    environment_changes = None
    if step:
        check(recorded_config, config, step)
        check_classes(recorded.get("data") or {}, facts)
        environment_changes = environment.changes(recorded, surroundings)
        check_exact(recorded_config, config, environment_changes)
        console.print(f"resuming {config.recipe} at step {step} of {config.steps}")

    changed = changes(recorded_config, config)
    for change in changed:
        warn(f"changed since: {change}")
    if any(change.startswith("checkpoint.") for change in changed) and step < config.steps:
        upcoming = workdir.with_earlier_parts({"config": to_json(config)}, recorded, step)
        leaving = processes.broadcast("leaving", lambda: checkpoints.leaving(upcoming))
        # Checkpoints after `step` are moved to a branch, not deleted.
        leaving = [saved_step for saved_step in leaving if saved_step <= step]
        if leaving:
            keep = config.checkpoint.keep
            warn(
                f"caution: with --checkpoint.keep {keep} the checkpoints "
                f"{', '.join(map(str, leaving))} are deleted, at the next save at the latest; "
                f"--checkpoint.keep {keep + len(leaving)} keeps them"
            )
    for change in environment_changes or ():
        warn(f"changed since: {change}")
    if step and environment_changes is None:
        warn(
            "the run has no record of its environment (options of JAX, devices, processor): "
            "whether bits differ is not known"
        )
    return other_examples


def _other_examples(recorded_config: Mapping[str, Any], config: Config) -> bool:
    """Return whether a changed setting gives evaluations other examples or targets."""
    fields = {f"data.{name}" for name in _EVALUATED}
    changed_fields = {line.partition(" ")[0] for line in changes(recorded_config, config)}
    return not fields.isdisjoint(changed_fields)


def _digests_differ(recorded: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether the facts of one data set name other contents than the recorded ones."""
    return recorded.get("digest") not in (None, facts.get("digest"))
