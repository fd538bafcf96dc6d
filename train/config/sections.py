"""The parts of a run's config, one frozen dataclass for each owner of settings. Every one checks itself when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated, Literal, get_args

from tyro import conf

from mupax.config_fields import Affects
from mupax.presets.optimizers import OPTIMIZERS, refused
from mupax.train.config.checks import at_least, check_place
from mupax.train.config.metrics import metric_of, row_name, shown_everywhere
from mupax.zoo.configs import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its schedule. Every rate, decay and eps is multiplied by the preset's scale per parameter."""

    name: Annotated[str, conf.arg(metavar="|".join(OPTIMIZERS)), Affects("model", "sgd")] = "adamw"
    """adam is adamw without decay; momentum and sgd are one, plain where momentum is 0; muon leaves vectors and ends to Adam."""
    peak_lr: Annotated[float, Affects("step", 0.02)] = 1e-3
    """Learning rate at the end of warm-up, at base size."""
    weight_decay: Annotated[float, Affects("step", 0.2)] = 0.0
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
    clip_norm: Annotated[float | None, Affects("step", 1.0)] = None
    """Clip gradients to this global norm over all parameters; None does not clip."""
    schedule: Annotated[Literal["constant", "cosine", "linear", "wsd"], Affects("step", "linear")] = "cosine"
    """Shape of the learning rate after warm-up; wsd is constant and then linear to the end."""
    warmup_steps: Annotated[int, Affects("step", 2)] = 0
    """Steps of linear warm-up; a run of fewer steps warms up over all of them."""
    warmup_from_zero: Annotated[bool, Affects("step", True)] = False
    """Warm-up has a rate of 0 at its first step and the peak at the one after its last (optax, big_vision); or a step's more at each."""
    decay_steps: Annotated[int | None, Affects("step", 3, given={"optimizer.schedule": "wsd"})] = None
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
        at_least("optimizer.", self, 0, "peak_lr", "weight_decay", "eps", "warmup_steps", "final_lr_fraction")
        at_least("optimizer.", self, 1, "decay_steps")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}; write a number in [0, 1)")
        if not 0 < self.layer_decay <= 1:
            raise ConfigError(f"optimizer.layer_decay is {self.layer_decay}; write a number in (0, 1], such as 0.75")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optimizer.clip_norm is {self.clip_norm}; write a number above 0, or None not to clip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """A moving average of the parameters, which evaluations and samples then use."""

    decay: Annotated[float | None, Affects("model", 0.9)] = None
    """Of the average a step, such as 0.999; it warms up (`train/core/state.py`). None keeps no average."""

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"ema.decay is {self.decay}; write a number in (0, 1), or None to keep no average")


_INIT = "train/reuse/start/test_init_from_run.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """The checkpoint a run starts from instead of fresh parameters. Everything that does not fit must be named here."""

    init_from: Annotated[str | None, conf.arg(metavar="PATH"), Affects("origin", test=_INIT)] = None
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
        tuple[str, ...], conf.arg(metavar="FIELD ..."), Affects("origin", test="train/reuse/start/test_init_from.py")
    ] = ()
    """Fields of the model that may differ and make another function of the same weights: activation, rope_theta."""

    def __post_init__(self) -> None:
        lists = ("init_new", "init_resize", "init_drop", "init_change")
        check_place("--init-from", self.init_from)
        flags = [name.replace("_", "-") for name in ("init_optimizer", "init_ema", *lists) if getattr(self, name)]
        if flags and self.init_from is None:
            raise ConfigError(f"--{flags[0]} says how to start from a checkpoint; add --init-from PATH")


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
        int | None, conf.arg(metavar="N"), Affects("course", test="train/run/report/test_early_stop.py")
    ] = None
    """Evaluations one after another that are no better than the best before them, at which the run ends; None never ends it."""
    min_delta: Annotated[float, Affects("course", test="train/run/report/test_early_stop.py")] = 0.0
    """By more than so much an evaluation must be better to count as an improvement."""
    metric: Annotated[
        str, conf.arg(metavar="METRIC"), Affects("course", test="train/run/report/test_early_stop.py")
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
        BadNumbers, conf.arg(aliases=("--bad-numbers",)), Affects("guards", test="train/core/test_nonfinite.py")
    ] = "raise"
    """raise: stop; skip: leave the step out; rollback: go back to the newest checkpoint and past the batches since."""
    most_in_a_row: Annotated[int, Affects("guards", test="train/core/test_nonfinite.py")] = 20
    """Steps left out one after another, or rollbacks to one checkpoint, at which the run stops under any policy."""
    spike_deviations: Annotated[float | None, Affects("step", 4.0)] = 6.0
    """A loss is a spike from so many running standard deviations above the running mean on; None counts none."""
    skip_spikes: Annotated[bool, Affects("step", True)] = False
    """Leave the steps of loss spikes out."""
    watchdog_seconds: Annotated[float | None, Affects("guards", test="train/run/test_config_fields.py")] = 600.0
    """Print what every thread is at when nothing was finished for so long; compiling does not count. None never does."""
    collective_seconds: Annotated[float | None, Affects("guards", test="train/parallel/test_distributed.py")] = 45.0
    """With several processes, end all of them when a step waits so much longer than the longest one before.
    Before the first step that is 0: a first step of more seconds needs a larger value. None never ends them."""
    memory_check: Annotated[bool, Affects("guards", test="train/run/test_memory.py")] = True
    """Refuse a run that needs more memory than the devices have left, before its first step."""

    def __post_init__(self) -> None:
        if self.bad_numbers not in get_args(BadNumbers):
            raise ConfigError(f"faults.bad_numbers is {self.bad_numbers!r}; write {', '.join(get_args(BadNumbers))}")
        at_least("faults.", self, 1, "most_in_a_row", "spike_deviations", "watchdog_seconds", "collective_seconds")
        if self.skip_spikes and self.spike_deviations is None:
            raise ConfigError("faults.skip_spikes needs faults.spike_deviations; write a number such as 6")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run reports, and where."""

    eval_every_steps: Annotated[int | None, Affects("reports", 2)] = None
    """Evaluate every so many steps and at the end; only at the end when None."""
    tensorboard: Annotated[bool, Affects("reports", False)] = True
    """Write TensorBoard events beside metrics.jsonl."""
    wandb: Annotated[str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")] = None
    """Weights & Biases project to log to (extra `wandb`)."""
    trackio: Annotated[str | None, Affects("reports", test="train/run/report/mirrors/test_trackers.py")] = None
    """trackio project to log to, on this machine unless its variables say otherwise (extra `trackio`)."""
    images: Annotated[
        int | None, conf.arg(metavar="N"), Affects("reports", test="train/run/report/mirrors/test_media.py")
    ] = None
    """At every evaluation, the first N evaluation images with label and prediction, in TensorBoard."""
    histograms: Annotated[bool, Affects("reports", test="train/run/report/mirrors/test_media.py")] = False
    """At every evaluation, histograms in TensorBoard of each parameter and its change since the evaluation before; a copy of all is kept."""
    progress: Annotated[bool, Affects("reports", False)] = True
    """The live progress bar; plain lines when the terminal cannot draw one."""
    samples: Annotated[bool, Affects("reports", False, given={"log.samples": True})] = True
    """Generated text (language models) or a picture of predictions (ViT) at the end."""
    profile: Annotated[
        str | None, conf.arg(aliases=("--profile",), metavar="START:STOP"), Affects("reports", "3:5")
    ] = None
    """Write an XProf trace of steps START to STOP - 1, counted from 1, into workdir/profile."""

    def __post_init__(self) -> None:
        at_least("log.", self, 1, "eval_every_steps", "images")
        if (self.images or self.histograms) and not self.tensorboard:
            name = "images" if self.images else "histograms"
            raise ConfigError(f"log.{name} is written to TensorBoard; leave --log.no-tensorboard out")
        if self.profile is not None and not self.profile_steps:
            raise ConfigError(
                f"log.profile is {self.profile!r}; write START:STOP with 1 <= START < STOP, "
                "as 10:13 for the steps 10, 11 and 12"
            )

    @property
    def trackers(self) -> dict[str, str]:
        """Project of every tracker that is asked for, by its name."""
        return {name: each for name, each in (("wandb", self.wandb), ("trackio", self.trackio)) if each is not None}

    @property
    def profile_steps(self) -> range | None:
        """Steps to trace; None traces nothing, and what is no range is empty."""
        if self.profile is None:
            return None
        start, stop = (
            int(part) if part.isascii() and part.isdigit() else 0 for part in self.profile.partition(":")[::2]
        )
        return range(start, stop) if start else range(0)
