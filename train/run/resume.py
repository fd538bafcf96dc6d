"""What a resumed run has otherwise than before: its changes by name, and those refused that would make training jump."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mupax.config_fields import Affects, config_fields
from mupax.errors import MupaxError
from mupax.train.checkpoints import workdir
from mupax.train.checkpoints.folder import CheckpointFolder
from mupax.train.config.record import completed, differences, from_json, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.core.optimizer import schedule_table
from mupax.train.parallel import environment
from mupax.train.run.runtime import Runtime

JUMP = 1.5
"""Learning rates of one step, of the schedule before and of the new one, further apart than this ratio are a jump."""


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
        shown = [line for line in changes(before, config) if line.startswith(("steps ", "optimizer."))]
        raise ResumeError(
            f"with {', '.join(shown)} the learning rate of step {step + 1} jumps from {old:.3g} to {new:.3g}; leave out what "
            "changes the schedule, or write --resume-change schedule if that is meant"
        )


def check_exact(
    before: Mapping[str, Any], config: Config, environment_changes: Sequence[environment.Change] | None
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
    runtime: Runtime,
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
            warn(f"caution: the evaluation set {name} holds other data than before: its numbers do not compare")
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
