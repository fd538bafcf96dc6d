"""Checkpoints: when a run saves one, how many stay, and why.

A policy is a value that says which saved steps stay. A new policy takes a class and two lines in `CheckpointConfig`, its field and its
entry in `policies`. docs/add_a_flag.md shows one.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from tyro import conf

from mupax.config_fields import Affects
from mupax.train.config.checks import at_least
from mupax.train.config.sections import METRIC, cost
from mupax.zoo.configs import ConfigError

Metrics = Mapping[str, float | None]
"""Values of one evaluation by metric; None where a value is not finite."""
Measured = Mapping[int, Metrics]
"""Step of a checkpoint to the evaluation that it holds."""


class SaveNeed(enum.Enum):
    """Urgency of a checkpoint after a step."""

    NONE = "none"
    OPTIONAL = "optional"
    """Left out if the disk still writes the checkpoint before."""
    REQUIRED = "required"
    """Waits for the checkpoint before."""


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """A reason for which checkpoints stay."""

    lasts: ClassVar[bool] = False
    """Whether checkpoints that stayed for this reason still stay when the run goes on without the policy."""
    ranks: ClassVar[bool] = False
    """Whether the policy reads evaluations, which checkpoints then hold."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Words that the list of checkpoints shows."""

    @abc.abstractmethod
    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        """Return the steps that stay.

        Args:
            saved: steps of the checkpoints, oldest first.
            measured: evaluations of those that have one.
        """

    def requires_save(self, step: int, *, evaluates: bool) -> bool:
        """Return whether the policy needs a checkpoint after a step.

        Args:
            step: optimizer steps done.
            evaluates: whether the run evaluates after this step.
        """
        return False


@dataclasses.dataclass(frozen=True)
class Newest(Policy):
    """The newest `count` checkpoints stay."""

    count: int

    @property
    def reason(self) -> str:
        return "newest"

    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        return saved[-self.count :]


@dataclasses.dataclass(frozen=True)
class Best(Policy):
    """The best `count` checkpoints by an evaluation stay; of equal ones the earliest."""

    count: int
    metric: str
    ranks: ClassVar[bool] = True

    @property
    def reason(self) -> str:
        return "best"

    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        evaluated = {step: measured[step] for step in saved if step in measured}
        return ranked(evaluated, self.metric)[: self.count]

    def requires_save(self, step: int, *, evaluates: bool) -> bool:
        return evaluates


@dataclasses.dataclass(frozen=True)
class EveryN(Policy):
    """Checkpoints at multiples of `interval` steps stay for good."""

    interval: int
    lasts: ClassVar[bool] = True

    @property
    def reason(self) -> str:
        return f"every {self.interval}"

    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        return [step for step in saved if step % self.interval == 0]

    def requires_save(self, step: int, *, evaluates: bool) -> bool:
        return step % self.interval == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often to save checkpoints and which of them to keep. The last step is always saved."""

    every_steps: Annotated[int, Affects("course", 3)] = 500
    """Optimizer steps between checkpoints."""
    keep: Annotated[int, Affects("course", 1)] = 2
    """Keep the N newest checkpoints."""
    keep_best: Annotated[
        int | None, conf.arg(metavar="N"), Affects("course", test="train/run/saves/test_best_checkpoint.py")
    ] = None
    """Also keep the N best checkpoints, ranked by best_metric. Saves at every evaluation. Off by default."""
    keep_every: Annotated[int | None, conf.arg(metavar="N"), Affects("course", 1)] = None
    """Also keep the checkpoints at multiples of N steps, for good. Saves at each of them. Off by default."""
    best_metric: Annotated[
        str, conf.arg(metavar="METRIC"), Affects("course", test="train/run/saves/test_best_checkpoint.py")
    ] = METRIC
    """Metric of an evaluation, as metrics.jsonl names it: eval_loss, eval_accuracy, or eval/NAME/loss of data.evaluate."""

    def __post_init__(self) -> None:
        at_least("checkpoint.", self, 1, "every_steps", "keep", "keep_best", "keep_every")
        if self.best_metric != METRIC and self.keep_best is None:
            raise ConfigError(
                "checkpoint.best_metric says which checkpoints are the best; add --checkpoint.keep-best 1"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that decide which checkpoints stay."""
        policies: list[Policy] = [Newest(self.keep)]
        if self.keep_best is not None:
            policies.append(Best(self.keep_best, self.best_metric))
        if self.keep_every is not None:
            policies.append(EveryN(self.keep_every))
        return tuple(policies)

    @property
    def ranks(self) -> bool:
        """Whether checkpoints hold evaluations."""
        return any(policy.ranks for policy in self.policies)

    def save_need(self, step: int, *, evaluates: bool) -> SaveNeed:
        """Return whether a checkpoint is due after a step that is not the last one.

        Args:
            step: optimizer steps done.
            evaluates: whether the run evaluates after this step.
        """
        # A checkpoint that a policy needs must not depend on how fast the disk is.
        if any(policy.requires_save(step, evaluates=evaluates) for policy in self.policies):
            return SaveNeed.REQUIRED
        return SaveNeed.OPTIONAL if step % self.every_steps == 0 else SaveNeed.NONE


class RunPart(NamedTuple):
    """Stretch of a run between two starts of its process with other settings."""

    start: int
    """Steps done when it began."""
    policies: tuple[Policy, ...]


def run_parts(record: Mapping[str, Any], current: CheckpointConfig | None = None) -> list[RunPart]:
    """Return the parts of a run, oldest first.

    Args:
        record: content of config.json, which may be of another version; it lists earlier settings as `segments`.
        current: settings of the last part; the recorded ones unless given.
    """
    parts: list[RunPart] = []
    start = 0
    for segment in record.get("segments", ()):
        until = segment.get("until_step") if isinstance(segment, Mapping) else None
        if type(until) is int:
            parts.append(RunPart(start, _recorded_config(segment).policies))
            start = until
    last = _recorded_config(record) if current is None else current
    return [*parts, RunPart(start, last.policies)]


def staying(saved: Sequence[int], measured: Measured, parts: Sequence[RunPart]) -> dict[int, str]:
    """Return the checkpoints that stay, each with its reasons. All others may be deleted.

    The policies of the last part decide over all checkpoints. A policy of an earlier part decides, if it lasts, over the
    checkpoints that this part saved.

    Args:
        saved: steps of the checkpoints, oldest first.
        measured: evaluations of those that have one.
        parts: parts of the run, oldest first (`run_parts`).
    """
    reasons: dict[int, list[str]] = {step: [] for step in saved}
    for index in reversed(range(len(parts))):
        is_last = index == len(parts) - 1
        own = saved if is_last else [step for step in saved if _saving_part(step, parts) == index]
        for policy in parts[index].policies:
            if not (is_last or policy.lasts):
                continue
            for step in policy.staying(own, measured):
                if policy.reason not in reasons[step]:
                    reasons[step].append(policy.reason)
    return {step: ", ".join(words) for step, words in reasons.items() if words}


def _saving_part(step: int, parts: Sequence[RunPart]) -> int:
    """Return the index of the part that saved a checkpoint: the last one that began before it.

    A run that goes back to an earlier step trains the steps after it again, so the last part is right.
    """
    return max((index for index, part in enumerate(parts) if part.start < step), default=0)


def ranked(measured: Measured, metric: str) -> list[int]:
    """Return the steps with a finite value of a metric, the best first, of equal ones the earliest."""
    costs = {step: cost(metric, metrics.get(metric)) for step, metrics in measured.items()}
    finite = [step for step, value in costs.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (costs[step], step))


def _recorded_config(record: Mapping[str, Any]) -> CheckpointConfig:
    """Return the checkpoint settings of a record; the defaults for fields that it lacks or that do not fit."""
    config = record.get("config")
    section = config.get("checkpoint") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return CheckpointConfig()
    names = [field.name for field in dataclasses.fields(CheckpointConfig)]
    try:
        return CheckpointConfig(**{name: section[name] for name in names if name in section})
    except (ConfigError, TypeError):
        return CheckpointConfig()
