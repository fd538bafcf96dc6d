"""The parts of a run's config, one frozen dataclass for each owner of settings. Every one checks itself when it is made.

The part for checkpoints says when a run saves one, how many stay, and why.

A policy is a value that says which saved steps stay. A new policy takes a class and two lines in `CheckpointConfig`, its field and its
entry in `policies`. docs/howto/add_a_flag.md shows one.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from tyro import conf

from mupax.config_fields import Affects, Listed
from mupax.presets.optimizers import OPTIMIZERS, refused
from mupax.train.config.checks import at_least, check_place
from mupax.train.config.metrics import metric_of, row_name, shown_everywhere
from mupax.zoo.configs import ConfigError

Metrics = Mapping[str, float | None]
"""Values of one evaluation by metric; None where a value is not finite."""
Measured = Mapping[int, Metrics]
"""Step of a checkpoint to the evaluation that it holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule. Every rate, decay and eps is multiplied by the preset's scale per parameter."""

    name: Annotated[str, conf.arg(metavar="|".join(OPTIMIZERS)), Listed("model", "sgd")] = "adamw"
    """adam is adamw without decay; momentum and sgd are one, plain where momentum is 0; muon leaves vectors and ends to Adam."""
    peak_lr: Annotated[float, Listed("step", 0.02)] = 1e-3
    """Learning rate at the end of warm-up, at base size."""
    weight_decay: Annotated[float, Listed("step", 0.2)] = 0.0
    """Pull of weights towards zero; the presets never decay gains and biases. adam has none."""
    decay: Annotated[Literal["coupled", "independent"], Affects("step", "independent")] = "coupled"
    """coupled: w -= lr*wd*w. independent: w -= wd*(lr/peak_lr)*w."""
    b1: Annotated[float, Affects("step", 0.8)] = 0.9
    """Decay of Adam's mean of gradients."""
    b2: Annotated[float, Affects("step", 0.9)] = 0.95
    """Decay of Adam's mean of squared gradients."""
    eps: Annotated[float, Affects("step", 1e-05)] = 1e-8
    """Added to the root of Adam's second moment, at base size."""
    momentum: Annotated[float, Affects("step", 0.8, given={"optimizer.name": "muon"})] = 0.9
    """sgd, momentum and muon: decay of the heavy-ball sum (muon: mean) of gradients."""
    moment_dtype: Annotated[Literal["bfloat16"] | None, Affects("step", "bfloat16")] = None
    """How the mean or sum of gradients is stored, computed in float32 all the same; None: as parameters are."""
    layer_decay: Annotated[float, Affects("step", 0.5)] = 1.0
    """Learning rates fall by this factor a block from the readout's down to what reads the input (for fine-tuning); 1: none does."""
    clip_norm: Annotated[float | None, Listed("step", 1.0)] = None
    """Clip gradients to this global norm over all parameters; None does not clip."""
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd"], Listed("step", "linear")
    ] = "cosine"
    """Shape of the learning rate after warm-up; wsd is constant and then linear to the end."""
    warmup_steps: Annotated[int, Listed("step", 2)] = 0
    """Steps of linear warm-up; a run of fewer steps warms up over all of them."""
    warmup_from_zero: Annotated[bool, Affects("step", True)] = False
    """Warm-up has a rate of 0 at its first step and the peak at the one after its last (optax, big_vision); or a step's more at each."""
    decay_steps: Annotated[int | None, Affects("step", 3, given={"optimizer.schedule": "wsd"})] = (
        None
    )
    """wsd only: steps of the final linear decay; a fifth of the run unless given."""
    final_lr_fraction: Annotated[float, Affects("step", 0.1)] = 0.0
    """Learning rate at the last step as a fraction of the peak (cosine, linear, wsd)."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"no optimizer is named {refused(self.name)}; write {', '.join(OPTIMIZERS)}, "
                "or add --plugin MODULE for one of your own"
            )
        if self.name == "momentum" and self.momentum == 0:
            raise ConfigError(
                "optimizer.momentum is 0, which is plain SGD; write optimizer.name sgd, or a momentum above 0"
            )
        if self.moment_dtype is not None and OPTIMIZERS[self.name].first_moment is None:
            raise ConfigError(
                f"optimizer.moment_dtype is {self.moment_dtype}, and {self.name} keeps all of its moments in float32; "
                "leave it out"
            )
        at_least(
            "optimizer.",
            self,
            0,
            "peak_lr",
            "weight_decay",
            "eps",
            "warmup_steps",
            "final_lr_fraction",
        )
        at_least("optimizer.", self, 1, "decay_steps")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optimizer.{name} is {getattr(self, name)}; write a number in [0, 1)"
                )
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"optimizer.layer_decay is {self.layer_decay}; write a number in (0, 1], such as 0.75"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm is {self.clip_norm}; write a number above 0, or None not to clip"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """A moving average of the parameters, which evaluations and samples then use."""

    decay: Annotated[float | None, Listed("model", 0.9)] = None
    """Of the average a step, such as 0.999; it warms up (`train/core/state.py`). None keeps no average."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(
                f"ema.decay is {self.decay}; write a number in (0, 1), or None to keep no average"
            )


_INIT = "train/reuse/start/test_init_from_run.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """The checkpoint a run starts from instead of fresh parameters. Everything that does not fit must be named here."""

    init_from: Annotated[str | None, conf.arg(metavar="PATH"), Listed("origin", test=_INIT)] = None
    """A workdir, one of its steps (WORKDIR/checkpoints/STEP), or a folder of safetensors (Hugging Face, `mupax import`)."""
    init_optimizer: Annotated[bool, Affects("origin", test=_INIT)] = False
    """Take over the optimizer's moments too; the run still starts at step 0."""
    init_ema: Annotated[bool, Affects("origin", test=_INIT)] = False
    """Start from the moving average of the source's parameters."""
    init_new: Annotated[
        tuple[str, ...],
        conf.arg(metavar="ROLE|NAME ..."),
        Affects("origin", test=_INIT),
    ] = ()
    """Parameters to initialize anew: readout, or block.mlp.*."""
    init_resize: Annotated[
        tuple[str, ...],
        conf.arg(metavar="ROLE|NAME ..."),
        Affects("origin", test=_INIT),
    ] = ()
    """Positions to interpolate (images) or extend (text), vocabularies and classes whose first entries to keep."""
    init_drop: Annotated[
        tuple[str, ...],
        conf.arg(metavar="ROLE|NAME ..."),
        Affects("origin", test=_INIT),
    ] = ()
    """Parameters of the source to leave out."""
    init_change: Annotated[
        tuple[str, ...],
        conf.arg(metavar="FIELD ..."),
        Affects("origin", test="train/reuse/start/test_init_from.py"),
    ] = ()
    """Fields of the model that may differ and make another function of the same weights: activation, rope_theta."""

    def __post_init__(self) -> None:
        lists = ("init_new", "init_resize", "init_drop", "init_change")
        check_place("--init-from", self.init_from)
        flags = [
            name.replace("_", "-")
            for name in ("init_optimizer", "init_ema", *lists)
            if getattr(self, name)
        ]
        if flags and self.init_from is None:
            raise ConfigError(
                f"--{flags[0]} says how to start from a checkpoint; add --init-from PATH"
            )


Step = int | Literal["best"]
"""Of a checkpoint, or the best by an evaluation."""
METRIC = "eval_loss"
"""Of an evaluation, by which the best checkpoint and an improvement are told unless another is named."""


def metrics_of(sets: Iterable[str]) -> list[str]:
    """Names of the numbers of an evaluation, as metrics.jsonl has them, of a run with these further evaluation sets."""
    names = [row_name(name) for name in shown_everywhere()]
    for data_set in sets:
        names += [row_name(name, data_set) for name in shown_everywhere()]
    return names


def cost(metric: str, value: float | None) -> float:
    """A number of an evaluation as one of which less is better; inf for one that is not finite.

    Args:
        metric: its name in a row; `METRICS` says which direction is better.
        value: None stands for what is not finite.

    Raises:
        MetricError: This process has no such metric.
    """
    better = metric_of(metric).better
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if better == "higher" else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When a run ends before its last step, because its evaluations have stopped improving."""

    patience: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Listed("course", test="train/run/report/test_early_stop.py"),
    ] = None
    """Evaluations one after another that are no better than the best before them, at which the run ends; None never ends it."""
    min_delta: Annotated[float, Affects("course", test="train/run/report/test_early_stop.py")] = 0.0
    """By more than so much an evaluation must be better to count as an improvement."""
    metric: Annotated[
        str,
        conf.arg(metavar="METRIC"),
        Affects("course", test="train/run/report/test_early_stop.py"),
    ] = METRIC
    """By which number of an evaluation, as checkpoint.best_metric."""

    def __post_init__(self) -> None:
        at_least("stop.", self, 1, "patience")
        at_least("stop.", self, 0, "min_delta")
        if self.patience is None and (self.min_delta or self.metric != METRIC):
            name = "min_delta" if self.min_delta else "metric"
            raise ConfigError(f"stop.{name} says what an improvement is; add --stop.patience 3")


BadNumbers = Literal["raise", "skip", "rollback"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """What becomes of steps whose loss or gradient is not finite, of loss spikes, and of a run that hangs."""

    bad_numbers: Annotated[
        BadNumbers,
        conf.arg(aliases=("--bad-numbers",)),
        Affects("guards", test="train/core/test_nonfinite.py"),
    ] = "raise"
    """raise: stop; skip: leave the step out; rollback: go back to the newest checkpoint and past the batches since."""
    most_in_a_row: Annotated[int, Affects("guards", test="train/core/test_nonfinite.py")] = 20
    """Steps left out one after another, or rollbacks to one checkpoint, at which the run stops under any policy."""
    spike_deviations: Annotated[float | None, Affects("step", 4.0)] = 6.0
    """A loss is a spike from so many running standard deviations above the running mean on; None counts none."""
    skip_spikes: Annotated[bool, Affects("step", True)] = False
    """Leave the steps of loss spikes out."""
    watchdog_seconds: Annotated[
        float | None, Affects("guards", test="train/run/test_config_fields.py")
    ] = 600.0
    """Print what every thread is at when nothing was finished for so long; compiling does not count. None never does."""
    collective_seconds: Annotated[
        float | None, Affects("guards", test="train/parallel/test_distributed.py")
    ] = 45.0
    """With several processes, end all of them when a step waits so much longer than the longest one before.
    Before the first step that is 0: a first step of more seconds needs a larger value. None never ends them."""
    memory_check: Annotated[bool, Affects("guards", test="train/run/test_memory.py")] = True
    """Refuse a run that needs more memory than the devices have left, before its first step."""

    def __post_init__(self) -> None:
        if self.bad_numbers not in get_args(BadNumbers):
            raise ConfigError(
                f"faults.bad_numbers is {self.bad_numbers!r}; write {', '.join(get_args(BadNumbers))}"
            )
        at_least(
            "faults.",
            self,
            1,
            "most_in_a_row",
            "spike_deviations",
            "watchdog_seconds",
            "collective_seconds",
        )
        if self.skip_spikes and self.spike_deviations is None:
            raise ConfigError(
                "faults.skip_spikes needs faults.spike_deviations; write a number such as 6"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run reports, and where."""

    eval_every_steps: Annotated[int | None, Listed("reports", 2)] = None
    """Evaluate every so many steps and at the end; only at the end when None."""
    tensorboard: Annotated[bool, Listed("reports", False)] = True
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: Annotated[
        str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")
    ] = None
    """Weights & Biases project to log to (extra `wandb`)."""
    trackio: Annotated[
        str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")
    ] = None
    """trackio project to log to, on this machine unless its variables say otherwise (extra `trackio`)."""
    images: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Affects("reports", test="train/run/report/mirrors/test_media.py"),
    ] = None
    """At every evaluation, the first N evaluation images with label and prediction, in TensorBoard."""
    histograms: Annotated[
        bool, Affects("reports", test="train/run/report/mirrors/test_media.py")
    ] = False
    """At every evaluation, histograms in TensorBoard of each parameter and its change since the evaluation before; a copy of all is kept."""
    progress: Annotated[bool, Listed("reports", False)] = True
    """The live progress bar; plain lines when the terminal cannot draw one."""
    samples: Annotated[bool, Listed("reports", False, given={"log.samples": True})] = True
    """Generated text (language models) or a picture of predictions (ViT) at the end."""
    profile: Annotated[
        str | None,
        conf.arg(aliases=("--profile",), metavar="START:STOP"),
        Affects("reports", "3:5"),
    ] = None
    """Write an XProf trace of steps START to STOP - 1, counted from 1, into workdir/profile."""

    def __post_init__(self) -> None:
        at_least("log.", self, 1, "eval_every_steps", "images")
        if (self.images or self.histograms) and not self.tensorboard:
            name = "images" if self.images else "histograms"
            raise ConfigError(
                f"log.{name} is written to TensorBoard; leave --log.no-tensorboard out"
            )
        if self.profile is not None and not self.profile_steps:
            raise ConfigError(
                f"log.profile is {self.profile!r}; write START:STOP with 1 <= START < STOP, "
                "as 10:13 for the steps 10, 11 and 12"
            )

    @property
    def trackers(self) -> dict[str, str]:
        """Project of every tracker that is asked for, by its name."""
        return {
            name: each
            for name, each in (("wandb", self.wandb), ("trackio", self.trackio))
            if each is not None
        }

    @property
    def profile_steps(self) -> range | None:
        """Steps to trace; None traces nothing, and what is no range is empty."""
        if self.profile is None:
            return None
        start, stop = (
            int(part) if part.isascii() and part.isdigit() else 0
            for part in self.profile.partition(":")[::2]
        )
        return range(start, stop) if start else range(0)


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

    every_steps: Annotated[int, Listed("course", 3)] = 500
    """Optimizer steps between checkpoints."""
    keep: Annotated[int, Listed("course", 1)] = 2
    """Keep the N newest checkpoints."""
    keep_best: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Listed("course", test="train/run/saves/test_best_checkpoint.py"),
    ] = None
    """Also keep the N best checkpoints, ranked by best_metric. Saves at every evaluation. Off by default."""
    keep_every: Annotated[int | None, conf.arg(metavar="N"), Affects("course", 1)] = None
    """Also keep the checkpoints at multiples of N steps, for good. Saves at each of them. Off by default."""
    best_metric: Annotated[
        str,
        conf.arg(metavar="METRIC"),
        Affects("course", test="train/run/saves/test_best_checkpoint.py"),
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
