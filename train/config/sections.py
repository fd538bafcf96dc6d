"""Sections of a run's config: optimizer, average, start, stop, faults, log and checkpoints.

Each section is a frozen dataclass for one owner of settings, and checks itself when it is made.

The section for checkpoints says when a run saves one and which of them it keeps. A policy is a
value that says which saved steps stay. A new policy takes a class and two lines in
`CheckpointConfig`, its field and its entry in `policies`. docs/howto/add_a_flag.md shows one.
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
"""Values of one evaluation by metric. `None` stands for a value that is not finite."""
Measured = Mapping[int, Metrics]
"""Step of a checkpoint to the metrics of the evaluation that the checkpoint holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its schedule.

    The preset multiplies every rate, decay and eps by a factor of its own for each parameter.
    """

    name: Annotated[str, conf.arg(metavar="|".join(OPTIMIZERS)), Listed("model", "sgd")] = "adamw"
    """adam is adamw without weight decay. sgd and momentum are the same optimizer, plain if
    optimizer.momentum is 0. muon trains hidden matrices and leaves all other parameters to Adam."""
    peak_lr: Annotated[float, Listed("step", 0.02)] = 1e-3
    """Learning rate at the end of warm-up, at base size."""
    weight_decay: Annotated[float, Listed("step", 0.2)] = 0.0
    """Weight decay, at base size. The presets never decay gains and biases. adam has none."""
    decay: Annotated[Literal["coupled", "independent"], Affects("step", "independent")] = "coupled"
    """coupled: w -= lr*wd*w. independent: w -= wd*(lr/peak_lr)*w."""
    b1: Annotated[float, Affects("step", 0.8)] = 0.9
    """Decay of Adam's mean of gradients. For lion, share of the momentum in the update."""
    b2: Annotated[float, Affects("step", 0.9)] = 0.95
    """Decay of Adam's mean of squared gradients. For lion, decay of the momentum."""
    eps: Annotated[float, Affects("step", 1e-05)] = 1e-8
    """Added to the root of Adam's second moment, at base size."""
    momentum: Annotated[float, Affects("step", 0.8, given={"optimizer.name": "muon"})] = 0.9
    """Decay of the sum of gradients (sgd, momentum) or of their mean (muon)."""
    # Losses in nats at the best of two to five Muon rates, if Adam's rate is 1/2, 1, 2 and 4 times
    # Muon's (decoders of width 32 and 128 with one layer, constants of 1, batch 8, two seeds):
    #   2 heads, 100 steps  2.483 2.457 2.430 2.451     8 heads, 100 steps  2.343 2.324 2.336 2.346
    #   2 heads, 800 steps  1.901 1.882 1.879 1.897     8 heads, 800 steps  1.668 1.647 1.647 1.669
    # With tuned rates of embedding and readout 0.3 was best over 800 to 1,250 steps.
    adam_lr: Annotated[float | None, Affects("step", 0.002, given={"optimizer.name": "muon"})] = (
        None
    )
    """Peak learning rate of the parameters that muon leaves to Adam, at base size. Their coupled
    weight decay follows it. None: optimizer.peak_lr."""
    orthogonalizer: Annotated[
        Literal["newton_schulz", "polar_express"],
        Affects("step", "polar_express", given={"optimizer.name": "muon"}),
    ] = "newton_schulz"
    """Coefficients of muon's five iterations. newton_schulz: one set for all (Jordan et al. 2024).
    polar_express: one set for each, best in the worst case (2505.16932)."""
    moment_dtype: Annotated[Literal["bfloat16"] | None, Affects("step", "bfloat16")] = None
    """Type in which the mean or sum of gradients is stored. It is computed in float32 all the same.
    None: the parameters' type."""
    layer_decay: Annotated[float, Affects("step", 0.5)] = 1.0
    """Factor on the learning rate from each block to the block below it, from the readout down to
    the input (for fine-tuning). 1 changes nothing."""
    clip_norm: Annotated[float | None, Listed("step", 1.0)] = None
    """Clip gradients to this global norm over all parameters; None does not clip."""
    schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd"], Listed("step", "linear")
    ] = "cosine"
    """Shape of the learning rate after warm-up. wsd is constant and then linear to the end."""
    warmup_steps: Annotated[int, Listed("step", 2)] = 0
    """Steps of linear warm-up. A run of fewer steps warms up over all of them."""
    warmup_from_zero: Annotated[bool, Affects("step", True)] = False
    """Start warm-up at a rate of 0, so that the step after warm-up is the first at the peak (optax,
    big_vision). By default the first step of N has 1/N of the peak and the last has the peak."""
    decay_steps: Annotated[int | None, Affects("step", 3, given={"optimizer.schedule": "wsd"})] = (
        None
    )
    """wsd only: steps of the final linear decay. None: a fifth of the run."""
    final_lr_fraction: Annotated[float, Affects("step", 0.1)] = 0.0
    """Learning rate at the last step as a fraction of the peak (cosine, linear, wsd)."""
    qk_clip: Annotated[float | None, Affects("step", 1e-6)] = None
    """Largest attention logit, such as 100. After each update the query and key matrices of a head
    whose logits exceeded it are shrunk (QK-clip of MuonClip, 2507.20534). None: no limit."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"no optimizer is named {refused(self.name)}; write {', '.join(OPTIMIZERS)}, "
                "or add --plugin MODULE for one of your own"
            )
        if self.name == "momentum" and self.momentum == 0:
            raise ConfigError(
                "optimizer.momentum is 0, which is plain SGD; "
                "write optimizer.name sgd, or a momentum above 0"
            )
        if self.moment_dtype is not None and OPTIMIZERS[self.name].first_moment is None:
            raise ConfigError(
                f"optimizer.moment_dtype is {self.moment_dtype}, and {self.name} keeps all of its "
                "moments in float32; leave it out"
            )
        # The learning rate of the Adam part is applied as the factor adam_lr / peak_lr, so peak_lr
        # must not be 0.
        if self.adam_peak is not None and self.peak_lr == 0:
            raise ConfigError(
                f"optimizer.adam_lr is {self.adam_lr} and optimizer.peak_lr is 0; "
                "write a peak_lr above 0, and leave adam_lr out to train nothing"
            )
        at_least(
            "optimizer.",
            self,
            0,
            "peak_lr",
            "adam_lr",
            "weight_decay",
            "eps",
            "warmup_steps",
            "final_lr_fraction",
        )
        at_least("optimizer.", self, 1, "decay_steps")
        for name in ("b1", "b2", "momentum"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name} is {value}; write a number in [0, 1)")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(
                f"optimizer.layer_decay is {self.layer_decay}; "
                "write a number in (0, 1], such as 0.75"
            )
        # Comparing NaN by order gives False, so this form refuses NaN. `<= 0` would accept it.
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"optimizer.clip_norm is {self.clip_norm}; "
                "write a number above 0, or None not to clip"
            )
        if self.qk_clip is not None and not 0 < self.qk_clip < math.inf:
            raise ConfigError(
                f"optimizer.qk_clip is {self.qk_clip}; "
                "write the largest attention logit, a number above 0 such as 100"
            )

    @property
    def adam_peak(self) -> float | None:
        """Peak learning rate of the Adam part, `None` if it is that of all other parameters.

        A recipe's `adam_lr` is not read by an optimizer without an Adam part.
        """
        if "adam_lr" in OPTIMIZERS[self.name].reads:
            return self.adam_lr
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Moving average of the parameters. Evaluations and samples use it if it is kept."""

    decay: Annotated[float | None, Listed("model", 0.9)] = None
    """Decay of the average per step, such as 0.999. It warms up (`train/core/state.py`). None keeps
    no average."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(
                f"ema.decay is {self.decay}; write a number in (0, 1), or None to keep no average"
            )


_INIT = "train/reuse/start/test_init_from_run.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Checkpoint that a run starts from instead of fresh parameters.

    A parameter or a field of the model that does not fit must be named in one of the lists.
    """

    init_from: Annotated[str | None, conf.arg(metavar="PATH"), Listed("origin", test=_INIT)] = None
    """Checkpoint to start from: a workdir, one of its steps (WORKDIR/checkpoints/STEP), or a folder
    of safetensors (Hugging Face, `mupax import`)."""
    init_optimizer: Annotated[bool, Affects("origin", test=_INIT)] = False
    """Also take over the optimizer's moments. The run still starts at step 0."""
    init_ema: Annotated[bool, Affects("origin", test=_INIT)] = False
    """Start from the moving average of the source's parameters. `mupax finetune` does so for a run
    that keeps one."""
    init_new: Annotated[
        tuple[str, ...],
        conf.arg(metavar="ROLE|NAME ..."),
        Affects("origin", test=_INIT),
    ] = ()
    """Parameters to initialize anew, such as readout or block.mlp.*."""
    init_resize: Annotated[
        tuple[str, ...],
        conf.arg(metavar="ROLE|NAME ..."),
        Affects("origin", test=_INIT),
    ] = ()
    """Parameters to resize. Positions are interpolated (images) or extended (text); vocabularies
    and classes keep their first entries."""
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
    """Fields of the model that may differ, although the same weights then compute another function:
    activation, rope_theta."""

    def __post_init__(self) -> None:
        check_place("--init-from", self.init_from)
        if self.init_from is not None:
            return
        names = (
            "init_optimizer",
            "init_ema",
            "init_new",
            "init_resize",
            "init_drop",
            "init_change",
        )
        for name in names:
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--{flag} says how to start from a checkpoint; add --init-from PATH"
                )


Step = int | Literal["best"]
"""Step of a checkpoint, or the best one by an evaluation."""
METRIC = "eval_loss"
"""Metric of evaluations that, by default, ranks checkpoints and decides on early stopping."""


def metrics_of(sets: Iterable[str]) -> list[str]:
    """Return the names of metrics that may rank checkpoints or stop a run, as in metrics.jsonl.

    They are all metrics that are shown everywhere, of the run's own data and of each further set.

    Args:
        sets: Names of the run's further evaluation sets.
    """
    names = [row_name(name) for name in shown_everywhere()]
    for data_set in sets:
        names += [row_name(name, data_set) for name in shown_everywhere()]
    return names


def cost(metric: str, value: float | None) -> float:
    """Return a metric as a number that is better the smaller it is.

    A metric of which higher values are better is negated. A value that is not finite becomes inf.

    Args:
        metric: Name in a row of metrics.jsonl. `METRICS` says which direction is better.
        value: `None` stands for a value that is not finite.

    Raises:
        MetricError: This process has no such metric.
    """
    better = metric_of(metric).better
    if value is None or not math.isfinite(value):
        return math.inf
    return -value if better == "higher" else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopConfig:
    """End of a run before its last step, when its evaluations have stopped improving."""

    patience: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Listed("course", test="train/run/report/test_early_stop.py"),
    ] = None
    """End the run at the Nth evaluation in a row that is no better than the best one before them.
    None never ends it."""
    min_delta: Annotated[float, Affects("course", test="train/run/report/test_early_stop.py")] = 0.0
    """An evaluation counts as an improvement only if it is better by more than this."""
    metric: Annotated[
        str,
        conf.arg(metavar="METRIC"),
        Affects("course", test="train/run/report/test_early_stop.py"),
    ] = METRIC
    """Metric that must improve, named as in checkpoint.best_metric."""

    def __post_init__(self) -> None:
        at_least("stop.", self, 1, "patience")
        at_least("stop.", self, 0, "min_delta")
        if self.patience is None and (self.min_delta or self.metric != METRIC):
            name = "min_delta" if self.min_delta else "metric"
            raise ConfigError(f"stop.{name} says what an improvement is; add --stop.patience 3")


BadNumbers = Literal["raise", "skip", "rollback"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Reaction to a loss or gradient that is not finite, to loss spikes and to a hanging run."""

    bad_numbers: Annotated[
        BadNumbers,
        conf.arg(aliases=("--bad-numbers",)),
        Affects("guards", test="train/core/test_nonfinite.py"),
    ] = "raise"
    """What to do at a step whose loss or gradient is not finite. raise: stop; skip: leave the step
    out; rollback: go back to the newest checkpoint and skip the batches since."""
    most_in_a_row: Annotated[int, Affects("guards", test="train/core/test_nonfinite.py")] = 20
    """Stop under any policy after this many steps left out in a row, or rollbacks to one
    checkpoint."""
    spike_deviations: Annotated[float | None, Affects("step", 4.0)] = 6.0
    """A loss this many running standard deviations above the running mean is a spike. None counts
    no spikes."""
    skip_spikes: Annotated[bool, Affects("step", True)] = False
    """Leave out the steps of loss spikes."""
    watchdog_seconds: Annotated[
        float | None, Affects("guards", test="train/run/test_config_fields.py")
    ] = 600.0
    """Print what every thread is doing if nothing was finished for this many seconds. Compiling
    does not count. None never prints."""
    collective_seconds: Annotated[
        float | None, Affects("guards", test="train/parallel/test_distributed.py")
    ] = 45.0
    """With several processes: end all of them if a step waits this many seconds longer than the
    longest step before. The longest is 0 until a step is done, so a slow first step needs a larger
    value. None never ends them."""
    memory_check: Annotated[bool, Affects("guards", test="train/run/test_memory.py")] = True
    """Before the first step, refuse a run that needs more memory than the devices have left."""

    def __post_init__(self) -> None:
        if self.bad_numbers not in get_args(BadNumbers):
            choices = ", ".join(get_args(BadNumbers))
            raise ConfigError(f"faults.bad_numbers is {self.bad_numbers!r}; write {choices}")
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
    """Reports of a run: evaluations, TensorBoard, trackers, progress, samples and profiles."""

    eval_every_steps: Annotated[int | None, Listed("reports", 2)] = None
    """Steps between evaluations. The run also evaluates at its end, and only there if this is
    None."""
    tensorboard: Annotated[bool, Listed("reports", False)] = True
    """Write TensorBoard events in addition to metrics.jsonl."""
    wandb: Annotated[
        str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")
    ] = None
    """Weights & Biases project to log to (extra `wandb`)."""
    trackio: Annotated[
        str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")
    ] = None
    """trackio project to log to (extra `trackio`). It is on this machine unless trackio's
    environment variables say otherwise."""
    images: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Affects("reports", test="train/run/report/mirrors/test_media.py"),
    ] = None
    """At every evaluation, write the first N evaluation images to TensorBoard, with label and
    prediction."""
    histograms: Annotated[
        bool, Affects("reports", test="train/run/report/mirrors/test_media.py")
    ] = False
    """At every evaluation, write histograms to TensorBoard of each parameter and its change since
    the last evaluation. Keeps a copy of all parameters."""
    attention_logits: Annotated[
        bool, Affects("reports", test="train/core/test_attention_logits.py")
    ] = False
    """Measure the largest attention logit of every step. It costs the products of queries and keys
    once more. optimizer.qk_clip always measures it."""
    progress: Annotated[bool, Listed("reports", False)] = True
    """Show a live progress bar, or plain lines if the terminal cannot draw one."""
    samples: Annotated[bool, Listed("reports", False, given={"log.samples": True})] = True
    """At the end, write generated text (language models) or a picture of predictions (ViT)."""
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
        """Name of every tracker that is asked for, to its project."""
        projects = {"wandb": self.wandb, "trackio": self.trackio}
        return {name: project for name, project in projects.items() if project is not None}

    @property
    def profile_steps(self) -> range | None:
        """Steps to trace. `None` traces nothing. A text that is no range gives an empty range."""
        if self.profile is None:
            return None
        first, _, last = self.profile.partition(":")
        start = _whole_number(first)
        stop = _whole_number(last)
        # Steps count from 1. `start` is 0 if the text says 0 or is no number, and neither is a
        # step.
        return range(start, stop) if start else range(0)


def _whole_number(text: str) -> int:
    """Return the number that the digits mean, or 0 for any other text."""
    return int(text) if text.isascii() and text.isdigit() else 0


class SaveNeed(enum.Enum):
    """Urgency of a checkpoint after a step."""

    NONE = "none"
    OPTIONAL = "optional"
    """The checkpoint is left out if the disk still writes the one before."""
    REQUIRED = "required"
    """The run waits until the checkpoint before is written."""


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """Rule for which checkpoints stay."""

    lasts: ClassVar[bool] = False
    """True if the checkpoints that the policy kept stay when the run continues without the
    policy."""
    ranks: ClassVar[bool] = False
    """True if the policy reads evaluations, which checkpoints then hold."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Name of the policy in the list of checkpoints."""

    @abc.abstractmethod
    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        """Return the steps of the saved checkpoints that the policy keeps.

        Args:
            saved: Steps of the checkpoints on disk, oldest first.
            measured: Evaluations of the checkpoints that have one.
        """

    def requires_save(self, step: int, *, evaluates: bool) -> bool:
        """Return whether the policy needs a checkpoint after a step. By default it needs none.

        Args:
            step: Number of optimizer steps done.
            evaluates: True if the run evaluates after this step.
        """
        return False


@dataclasses.dataclass(frozen=True)
class Newest(Policy):
    """Policy that keeps the newest `count` checkpoints."""

    count: int

    @property
    def reason(self) -> str:
        return "newest"

    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        return saved[-self.count :]


@dataclasses.dataclass(frozen=True)
class Best(Policy):
    """Policy that keeps the best `count` checkpoints by an evaluation. Ties go to the earliest.

    `metric` is a name in the rows of metrics.jsonl, such as `eval_loss`.
    """

    count: int
    metric: str
    ranks: ClassVar[bool] = True

    @property
    def reason(self) -> str:
        return "best"

    def staying(self, saved: Sequence[int], measured: Measured) -> Collection[int]:
        evaluated = {}
        for step in saved:
            if step in measured:
                evaluated[step] = measured[step]
        return ranked(evaluated, self.metric)[: self.count]

    def requires_save(self, step: int, *, evaluates: bool) -> bool:
        return evaluates


@dataclasses.dataclass(frozen=True)
class EveryN(Policy):
    """Policy that keeps the checkpoints at multiples of `interval` steps for good."""

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
    """Schedule of checkpoints, and which of them are kept. The last step is always saved."""

    every_steps: Annotated[int, Listed("course", 3)] = 500
    """Optimizer steps between checkpoints."""
    keep: Annotated[int, Listed("course", 1)] = 2
    """Keep the N newest checkpoints."""
    keep_best: Annotated[
        int | None,
        conf.arg(metavar="N"),
        Listed("course", test="train/run/saves/test_best_checkpoint.py"),
    ] = None
    """Also keep the N best checkpoints by best_metric. Saves at every evaluation."""
    keep_every: Annotated[int | None, conf.arg(metavar="N"), Affects("course", 1)] = None
    """Also keep the checkpoints at multiples of N steps, for good. Saves at each of them."""
    best_metric: Annotated[
        str,
        conf.arg(metavar="METRIC"),
        Affects("course", test="train/run/saves/test_best_checkpoint.py"),
    ] = METRIC
    """Metric that ranks checkpoints, named as in metrics.jsonl, such as eval/NAME/loss."""

    def __post_init__(self) -> None:
        at_least("checkpoint.", self, 1, "every_steps", "keep", "keep_best", "keep_every")
        # Without `keep_best`, no checkpoint is ranked and `best_metric` would be ignored silently.
        if self.best_metric != METRIC and self.keep_best is None:
            raise ConfigError(
                "checkpoint.best_metric says which checkpoints are the best; "
                "add --checkpoint.keep-best 1"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Policies that decide which checkpoints stay."""
        policies: list[Policy] = [Newest(self.keep)]
        if self.keep_best is not None:
            policies.append(Best(self.keep_best, self.best_metric))
        if self.keep_every is not None:
            policies.append(EveryN(self.keep_every))
        return tuple(policies)

    @property
    def ranks(self) -> bool:
        """True if checkpoints hold evaluations."""
        return any(policy.ranks for policy in self.policies)

    def save_need(self, step: int, *, evaluates: bool) -> SaveNeed:
        """Return whether a checkpoint is due after a step that is not the last one.

        It is required if a policy needs it, and optional at other multiples of `every_steps`.

        Args:
            step: Number of optimizer steps done.
            evaluates: True if the run evaluates after this step.
        """
        # A checkpoint that a policy needs must not depend on how fast the disk is.
        if any(policy.requires_save(step, evaluates=evaluates) for policy in self.policies):
            return SaveNeed.REQUIRED
        if step % self.every_steps == 0:
            return SaveNeed.OPTIONAL
        return SaveNeed.NONE


class RunPart(NamedTuple):
    """Stretch of a run that trained with the same checkpoint settings."""

    start: int
    """Number of steps done when the stretch began."""
    policies: tuple[Policy, ...]


def run_parts(record: Mapping[str, Any], current: CheckpointConfig | None = None) -> list[RunPart]:
    """Return the stretches of a run that trained with different checkpoint settings, oldest first.

    A run that resumes with other settings begins a new stretch.

    Args:
        record: Content of the run's config.json, perhaps of another version. Its `segments` have
            the settings of earlier stretches. Damaged ones are left out.
        current: Settings of the last stretch. Default: the recorded ones.
    """
    parts: list[RunPart] = []
    start = 0
    for segment in record.get("segments", ()):
        # A record is read even if some of its segments are damaged. Those are skipped.
        end = segment.get("until_step") if isinstance(segment, Mapping) else None
        if type(end) is int:
            parts.append(RunPart(start, _recorded_config(segment).policies))
            start = end
    last = _recorded_config(record) if current is None else current
    return [*parts, RunPart(start, last.policies)]


def staying(saved: Sequence[int], measured: Measured, parts: Sequence[RunPart]) -> dict[int, str]:
    """Return the checkpoints that stay, each with its reasons. All others may be deleted.

    The policies of the last part decide over all checkpoints. A policy of an earlier part decides
    only if its `lasts` is true, and only over the checkpoints that this part saved.

    Args:
        saved: Steps of the checkpoints on disk, oldest first.
        measured: Evaluations of the checkpoints that have one.
        parts: Parts of the run, oldest first (`run_parts`).
    """
    reasons: dict[int, list[str]] = {step: [] for step in saved}
    # From the last part to the first, so that reasons of the current settings come first.
    for index in reversed(range(len(parts))):
        is_last = index == len(parts) - 1
        candidates = saved
        if not is_last:
            candidates = [step for step in saved if _saving_part(step, parts) == index]
        for policy in parts[index].policies:
            if not (is_last or policy.lasts):
                continue
            for step in policy.staying(candidates, measured):
                if policy.reason not in reasons[step]:
                    reasons[step].append(policy.reason)
    texts = {}
    for step, words in reasons.items():
        if words:
            texts[step] = ", ".join(words)
    return texts


def _saving_part(step: int, parts: Sequence[RunPart]) -> int:
    """Return the index of the part that saved a checkpoint.

    It is the last part that began before the checkpoint's step: a run that goes back to an earlier
    step trains the steps after it again, so their last checkpoint counts.
    """
    return max((index for index, part in enumerate(parts) if part.start < step), default=0)


def ranked(measured: Measured, metric: str) -> list[int]:
    """Return the steps with a finite value of a metric, best first. Ties go to the earliest.

    Raises:
        MetricError: This process has no such metric.
    """
    costs = {}
    for step, metrics in measured.items():
        costs[step] = cost(metric, metrics.get(metric))
    # NaN is neither below nor above any number, so it would make the sorted order arbitrary.
    finite = [step for step, value in costs.items() if math.isfinite(value)]
    return sorted(finite, key=lambda step: (costs[step], step))


def _recorded_config(record: Mapping[str, Any]) -> CheckpointConfig:
    """Return the checkpoint settings of a record.

    A field that the record lacks takes its default. If a value does not fit, all fields do.
    """
    config = record.get("config")
    section = config.get("checkpoint") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return CheckpointConfig()
    # A newer version may have recorded fields that this one does not know.
    names = [field.name for field in dataclasses.fields(CheckpointConfig)]
    try:
        return CheckpointConfig(**{name: section[name] for name in names if name in section})
    except (ConfigError, TypeError):
        return CheckpointConfig()
