"""Table of metrics: how each is computed and shown, and which direction is better.

A metric is one function and one line of `METRICS`. Rows of metrics.jsonl, the screen, the summary,
loss.png, TensorBoard and trackers, `mupax eval`, `--checkpoint.best-metric` and `--stop.metric`
read that table. docs/howto/add_a_metric.md adds one. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from mupax import MupaxError

if TYPE_CHECKING:
    import jax


class MetricError(MupaxError):
    """Error about a metric that cannot be used as it is declared. The text says what to write."""


class TokenStatistics(NamedTuple):
    """Statistics of the targets of a batch. A target is a token of a text or the class of an image.

    All arrays have the shape of the targets: [B], [B, T], or [N] if a loss works on N of them.
    """

    loss: jax.Array
    """Cross-entropy in nats, float32."""
    log_partition: jax.Array
    """Logarithm of the sum of exp(logit) over all classes, float32."""
    correct: jax.Array
    """True if the rank of the target is 0, bool. Its logit is then the largest, and the first of
    equal ones, as argmax has it."""
    counted_rank: jax.Array | None = None
    """Values that `rank` returns, int32. `None` if no metric needed them."""

    @property
    def rank(self) -> jax.Array:
        """Number of classes before the target, int32.

        Classes with a larger logit come before it, and classes with an equal logit and a smaller
        index. NaN counts as the largest logit, as argmax has it. The rank takes another pass over
        all logits, so it is counted only for a metric that has `needs_rank`.

        Raises:
            MetricError: The rank was not counted.
        """
        if self.counted_rank is None:
            raise MetricError(
                "a metric reads statistics.rank, which is not counted; "
                "declare it with needs_rank=True"
            )
        return self.counted_rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """Quantity that is measured on targets, computed by either `total` or `from_loss`.

    Attributes:
        label: Name on the screen, in the summary and in pictures, such as "top-5 accuracy".
        unit: Unit of the values, such as "nats". "%" shows a share of 0.25 as 25.00 %. "" if the
            label already says it.
        better: Direction in which the model is better, for the best checkpoint and early stopping.
        total: (statistics, weights) -> sum over the targets, float32 []. The weights have the
            targets' shape and are 0 for a target that does not count. The metric is the sum over
            all batches divided by the sum of the weights. Runs inside the compiled step.
        from_loss: (mean loss in nats per target, mean bytes of text per target) -> value, in
            Python. The bytes are `None` if targets are not text. A value of `None` leaves the
            metric out.
        needs_rank: True if `total` reads `statistics.rank`.
        in_training: True to measure every training batch too, at the cost of what `total` reads.
        shown: everywhere: rows, screen, summary, pictures, `eval`, best checkpoint; rows:
            metrics.jsonl, trackers and `eval`; eval: `eval` only.
        pictures: Kinds of data whose loss.png has a panel of the metric.
        form: Format of a value that is not a share.
    """

    label: str
    unit: str
    better: Literal["lower", "higher"]
    total: Callable[[TokenStatistics, jax.Array], jax.Array] | None = None
    from_loss: Callable[[float, float | None], float | None] | None = None
    needs_rank: bool = False
    in_training: bool = False
    shown: Literal["everywhere", "rows", "eval"] = "everywhere"
    pictures: tuple[Literal["tokens", "images"], ...] = ("tokens", "images")
    form: str = ".4f"

    def __post_init__(self) -> None:
        if (self.total is None) == (self.from_loss is None):
            raise MetricError(f"the metric {self.label!r} needs one of total and from_loss")

    @property
    def module(self) -> str:
        """Name of the module that has the function."""
        return getattr(self.total or self.from_loss, "__module__", None) or "__main__"

    @property
    def share(self) -> bool:
        """True if values are shares of 1, which are shown in percent."""
        return self.unit == "%"

    def text(self, value: float) -> str:
        """Return a value as text without its unit. A share of 0.25 is 25.00 %."""
        if self.share:
            return f"{100 * value:.2f} %"
        return f"{value:{self.form}}"

    def text_with_unit(self, value: float) -> str:
        """Return a value as text with its unit, such as "1.2345 nats" or "25.00 %"."""
        if self.share or not self.unit:
            return self.text(value)
        return f"{self.text(value)} {self.unit}"


def _loss(loss: float, bytes_per_target: float | None) -> float:
    """Return the loss unchanged. `bytes_per_target` is not used."""
    del bytes_per_target
    return loss


def _perplexity(loss: float, bytes_per_target: float | None) -> float:
    del bytes_per_target
    # `math.exp` raises OverflowError if the result exceeds the largest float64, about exp(709.8).
    return math.exp(loss) if loss < 700 else math.inf


def _loss_per_byte(loss: float, bytes_per_target: float | None) -> float | None:
    return loss / bytes_per_target if bytes_per_target else None


def _bits_per_byte(loss: float, bytes_per_target: float | None) -> float | None:
    return loss / math.log(2) / bytes_per_target if bytes_per_target else None


def _accuracy(statistics: TokenStatistics, weights: jax.Array) -> jax.Array:
    return (statistics.correct * weights).sum()


METRICS: dict[str, Metric] = {
    "loss": Metric(label="loss", unit="nats", better="lower", from_loss=_loss, in_training=True),
    "accuracy": Metric(
        label="accuracy",
        unit="%",
        better="higher",
        total=_accuracy,
        in_training=True,
        pictures=("images",),
    ),
    "perplexity": Metric(
        label="perplexity",
        unit="",
        better="lower",
        # Perplexity is exp(mean loss). The mean of exp(loss) over batches is larger if losses
        # differ.
        from_loss=_perplexity,
        shown="eval",
        pictures=(),
        form=".4g",
    ),
    "loss_per_byte": Metric(
        label="loss per byte",
        unit="nats/byte",
        better="lower",
        from_loss=_loss_per_byte,
        in_training=True,
        shown="rows",
        pictures=(),
    ),
    "bits_per_byte": Metric(
        label="bits per byte",
        unit="",
        better="lower",
        from_loss=_bits_per_byte,
        shown="eval",
        pictures=(),
    ),
}
"""Metrics by name, in their order in the rows of metrics.jsonl. Plug-ins add metrics here."""
NO_METRICS: Mapping[str, Metric] = MappingProxyType({})
"""Empty table of metrics, the default of functions that sum metrics in addition to the loss."""
_RESERVED = frozenset(
    [
        "step",
        "lr",
        "grad_norm",
        "weight",
        "weights",
        "verdict",
        "squares",
        "seconds",
        "tokens",
        "images",
        "batch",
        "spike",
        "skipped",
        "nonfinite",
        "stopped",
        "balance_loss",
        "z_loss",
        "dropped_tokens",
        "logit_z_loss",
        "attention_logit_max",
        "targets",
        "examples",
        "sets",
    ]
)
"""Names that a metric may not have, because rows of metrics.jsonl or `eval` use them already."""


def check_table() -> None:
    """Refuse a line of `METRICS` that is no `Metric` or has a name that rows cannot have.

    A name has lower-case letters, digits and _ only, is no other key of a row, and does not begin
    with eval_ or perf_.

    Raises:
        MetricError: The text names the line.
    """
    for name, metric in METRICS.items():
        # A plugin may have written a bare function.
        if not isinstance(metric, Metric):
            raise MetricError(
                f"METRICS[{name!r}] is no Metric; write mupax.train.config.metrics.Metric(...)"
            )
        is_valid = re.fullmatch("[a-z][a-z0-9_]*", name) is not None
        # Rows of metrics.jsonl name evaluation and speed values with these prefixes. A metric must
        # not be mistaken for one.
        has_prefix = name.startswith(("eval_", "perf_"))
        if not is_valid or name in _RESERVED or has_prefix:
            raise MetricError(
                f"a metric cannot be named {name!r}; write lower-case letters, digits and _, "
                "and no name that a row of metrics.jsonl has already"
            )


def on_devices(*, training: bool) -> dict[str, Metric]:
    """Return the metrics that the compiled step sums, which have `total`, by name.

    Args:
        training: True for the metrics of training batches, False for those of evaluations.
    """
    metrics = {}
    for name, metric in METRICS.items():
        if metric.total is not None and (metric.in_training or not training):
            metrics[name] = metric
    return metrics


def metric_values(
    loss: float,
    means: Mapping[str, float],
    bytes_per_target: float | None,
    *,
    training: bool = False,
) -> dict[str, float]:
    """Return the value of every metric that can be computed, by name.

    A metric with `total` that is not in `means` is left out, and so is one whose `from_loss`
    returns `None`.

    Args:
        loss: Mean over the targets, in nats.
        means: Mean over the targets of each metric that has `total`, by name.
        bytes_per_target: Mean bytes of text per target. `None` for images, and for targets that are
            not the text.
        training: True leaves out metrics with `from_loss` that are not `in_training`. By default
            all are in.
    """
    result: dict[str, float] = {}
    for name, metric in METRICS.items():
        value = means.get(name)
        if metric.from_loss is not None and (metric.in_training or not training):
            value = metric.from_loss(loss, bytes_per_target)
        # A metric without a meaning for these data, such as bits per byte for images, has the value
        # None.
        if value is not None:
            result[name] = value
    return result


def row_name(name: str, data_set: str | None = None) -> str:
    """Return the name under which a row of an evaluation has a metric.

    Args:
        name: Name of the metric, such as "loss".
        data_set: Name of a further evaluation set. `None` for the run's own data.
    """
    if data_set is None:
        return f"eval_{name}"
    return f"eval/{data_set}/{name}"


def evaluation_row(scores: Mapping[str, float], data_set: str | None = None) -> dict[str, float]:
    """Return an evaluation's values of one data set by their names in a row of metrics.jsonl.

    Metrics that only `mupax eval` shows are left out.

    Args:
        scores: Values by name of a metric in `METRICS`, such as `{"loss": 1.2}`.
        data_set: Name of a further evaluation set. `None` for the run's own data.
    """
    row = {}
    for name, value in scores.items():
        if METRICS[name].shown != "eval":
            row[row_name(name, data_set)] = value
    return row


def shown_everywhere() -> dict[str, Metric]:
    """Return the metrics of the screen, the summary and the best checkpoint, by name."""
    shown = {}
    for name, metric in METRICS.items():
        if metric.shown == "everywhere":
            shown[name] = metric
    return shown


def metric_name(row_name: str) -> str:
    """Return the name of a metric from its name in a row, such as `eval_loss`.

    Both `eval_loss` and `eval/code/loss` give `loss`.
    """
    if row_name.startswith("eval/"):
        return row_name.rpartition("/")[2]
    return row_name.removeprefix("eval_")


def metric_of(row_name: str) -> Metric:
    """Return the metric that a row of an evaluation names, such as `eval_loss`.

    Raises:
        MetricError: This process has no such metric.
    """
    name = metric_name(row_name)
    if name not in METRICS:
        raise MetricError(
            f"no metric here is named {name!r}; add --plugin MODULE with the module that has it"
        )
    return METRICS[name]
