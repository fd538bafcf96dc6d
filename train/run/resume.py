"""What a resumed run has otherwise than before: its changes by name, and those refused that would make training jump."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mupax.errors import MupaxError
from mupax.train.config.record import from_json, to_json
from mupax.train.config.run import Config
from mupax.train.core.optimizer import schedule_table
from mupax.train.run.agreement import differences

JUMP = 1.5
"""Learning rates of one step, of the schedule before and of the new one, further apart than this ratio are a jump."""
_APART = ("recipe", "init", "distributed", "checkpoint", "log", "workdir", "resume", "resume_change", "xla_flags")
"""Fields of a config that leave training as it is, and what is settled elsewhere."""


class ResumeError(MupaxError):
    """A run that cannot go on as asked. The text says what would happen and what to write."""


def changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """Every field that training may notice and that differs, as `steps 300 -> 200`.

    Args:
        before: the config that the run has recorded, as JSON; a field that it lacks was not there yet.
        config: of this part of the run.
    """
    now = json.loads(json.dumps(to_json(config)))  # which has lists where a config has tuples
    now = {name: value for name, value in now.items() if name not in _APART}
    return [f"{name} {_text(old)} -> {_text(new)}" for name, old, new in differences(_completed(before, now), now)]


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
    now = to_json(config)
    old, new = (learning_rate(from_json(fields), step) for fields in ({**_completed(before, now), "resume": True}, now))
    if max(old, new) > JUMP * min(old, new):
        shown = [line for line in changes(before, config) if line.startswith(("steps ", "optimizer."))]
        raise ResumeError(
            f"with {', '.join(shown)} the learning rate of step {step + 1} jumps from {old:.3g} to {new:.3g}; leave out what "
            "changes the schedule, or write --resume-change schedule if that is meant"
        )


def learning_rate(config: Config, step: int) -> float:
    """That of the step after so many, at base size; after the last step, that of the last."""
    table = schedule_table(config.optimizer, config.steps)
    return config.optimizer.peak_lr * float(table[min(step, len(table) - 1)])


def _completed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `now` with the values of `before`, where it has them: another version may have recorded others."""
    return {
        name: _completed(before[name], value)
        if isinstance(value, dict) and isinstance(before.get(name), dict)
        else before.get(name, value)
        for name, value in now.items()
    }


def _text(value: Any) -> str:
    return " ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)
