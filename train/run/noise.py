"""`mupax noise WORKDIR`: the gradient noise scale of a run at a checkpoint.

The noise scale is the batch size at which noise and gradient are equally large (McCandlish et al.
2018, 1812.06162, equation 2.9):

    B_simple = tr(Sigma) / |G|^2

The mean of |g|^2 over gradients g of batches of B examples is |G|^2 + tr(Sigma) / B, and the mean
product of two batches' gradients is |G|^2. So J batches give both without bias. Joint rules hold
well below the noise scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from tyro import conf

from mupax import command_line, disk, terminal
from mupax.train.checkpoints.command import CheckpointFlags
from mupax.train.config.checks import at_least, check_outputs

if TYPE_CHECKING:
    from mupax.train.reuse.trained import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(CheckpointFlags):
    """Gradient noise scale at a checkpoint: batches larger than this change the gradient little.

    Joint rules (`mupax presets joint`) hold well below it; give it to a run as --noise-scale. It
    grows while the loss falls, so measure where most of the run is spent. Gradients are those at
    the parameters themselves unless --ema, on batches that the run would see next, all of one epoch
    where it has as many. --mesh.*,
    --model.compute.* and --data.batch-size of the run work here too.
    """

    batches: Annotated[int, conf.arg(metavar="N")] = 16
    """Gradients to compare; all are in memory at once."""
    json: Path | None = None
    """Also write the numbers to a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("--", self, 3, "batches")


class Scale(NamedTuple):
    """Noise scale in examples, with the ends of its 95 % interval.

    A value is infinite if no gradient can be told from the noise.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} examples [{self.low:.3g}, {self.high:.3g}]"


def noise_scale(products: np.ndarray, batch: int) -> Scale:
    """Estimate the noise scale and its 95 % interval from gradients of independent batches.

    Args:
        products: Inner products of every two gradients, float64 [J, J], J >= 3.
        batch: Batch size in examples, by which the result is scaled.
    """
    from scipy.special import stdtrit

    count = len(products)
    share = _signal_share(products)
    # Row i of this table leaves gradient i out.
    leave_one_out = ~np.eye(count, dtype=bool)
    partial_shares = np.array(
        [_signal_share(products[np.ix_(mask, mask)]) for mask in leave_one_out]
    )
    # The jackknife is of |G|^2 / E|g|^2, because it needs a nearly linear statistic. The noise
    # scale itself goes to infinity as |G|^2 goes to 0.
    deviations = partial_shares - partial_shares.mean()
    deviation = math.sqrt((count - 1) / count * np.sum(deviations**2))
    error = deviation * float(stdtrit(count - 1, 0.975))

    def scale(signal_share: float) -> float:
        # E|g|^2 / |G|^2 is 1 + tr(Sigma) / (B |G|^2), by the equations at the top of this file.
        return batch * (1 / signal_share - 1) if signal_share > 0 else math.inf

    # The noise scale falls with the share of the signal, so the ends change places.
    return Scale(scale(share), max(0.0, scale(share + error)), scale(share - error))


def _signal_share(products: np.ndarray) -> float:
    """Return |G|^2 / E|g|^2, both estimated without bias, from products [J, J], J >= 2.

    The estimate can be negative.
    """
    count = len(products)
    squares = np.trace(products)
    # |G|^2 is the mean of J (J - 1) products off the diagonal, E|g|^2 that of J squares.
    return float((products.sum() - squares) / (count - 1) / squares)


def main(argv: Sequence[str]) -> int:
    """Measure the noise scale of a checkpoint and print it. Return the exit code 0.

    Raises:
        UsageError: A flag is not one that this command reads.
        WorkdirError: There is no such run or step, or the checkpoint is damaged.
        ConfigError, DataError, MeshError: Settings or data do not fit the model, or the file of
            `--json` cannot be written.
    """
    args, run_flags = command_line.parse_known(Noise, "mupax noise", argv)
    check_outputs(args, "json")
    from mupax.train.reuse import trained

    trained.check_read("noise", "--step, --ema, --batches, --json", run_flags)
    opened = trained.open_model(args.workdir, args.step, args.ema, needs_run=True)
    saved = trained.with_flags("noise", opened, run_flags)
    products, groups = measured(saved, args.batches)
    batch = saved.config.data.batch_size
    no_products = np.zeros([args.batches] * 2)
    total = noise_scale(sum(products.values(), no_products), batch)
    group_scales: dict[str, Scale] = {}
    for group, names in groups.items():
        group_products: Any = sum(products[name] for name in names)
        group_scales[group] = noise_scale(group_products, batch)
    # Shown first, so that a disk that became full does not lose the numbers.
    _show(total, group_scales, saved, args.batches)
    if args.json is not None:
        content = {
            "step": saved.step,
            "batch": batch,
            "batches": args.batches,
            "noise_scale": total._asdict(),
            "groups": {group: scale._asdict() for group, scale in group_scales.items()},
        }
        args.json.write_text(disk.json_text(content, indent=1) + "\n")
    return 0


class Stretch(NamedTuple):
    """Successive training batches: the number of the first, and whether some share an example."""

    first: int
    shares: bool


def stretch(trained: int, batches: int, batch: int, epoch: int | None) -> Stretch:
    """Return which training batches to compare: the next ones that share no example.

    Batches of two epochs have examples in common, which would count as signal and not as noise. So
    batches that would reach into another epoch are taken from its beginning on.

    Args:
        trained: Number of distinct examples that the run has trained on.
        batches: Number of batches to compare with each other.
        batch: Number of distinct examples in a batch.
        epoch: Number of examples per epoch. `None` for a stream, whose end is not known.
    """
    first = math.ceil(trained / batch)
    if epoch is None:
        return Stretch(first, shares=False)
    this_epoch = first * batch // epoch
    if ((first + batches) * batch - 1) // epoch == this_epoch:
        return Stretch(first, shares=False)
    first = math.ceil((this_epoch + 1) * epoch / batch)
    last_epoch = ((first + batches) * batch - 1) // epoch
    return Stretch(first, shares=last_epoch != first * batch // epoch)


def _show(
    total: Scale, group_scales: Mapping[str, Scale], saved: TrainedModel, batches: int
) -> None:
    """Print the noise scale, a table of it by parameter group, and what to do with it."""
    batch = saved.config.data.batch_size
    terminal.say(
        f"noise scale {total} at step {saved.step} (95 %), from {batches} batches of {batch}"
    )
    rows = [["group", "noise scale", "from", "to"]]
    for group, scale in group_scales.items():
        rows.append([group, *(f"{number:.3g}" for number in scale)])
    print(terminal.table(rows))
    if math.isfinite(total.value):
        terminal.say(
            f"joint rules hold well below it: --noise-scale {total.value:.3g} refuses them at a "
            "larger batch"
        )
    else:
        terminal.say(
            "no gradient is seen in the noise; write more --batches, or a larger --data.batch-size"
        )


def measured(
    saved: TrainedModel, batches: int
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Compute the inner product of every two gradients of consecutive training batches.

    All gradients are taken at the parameters of the checkpoint and stay on the devices together. If
    batches share examples, a caution is printed.

    Args:
        saved: Model of a run at a step. Weights without a run fail.
        batches: Number of training batches, from the step of the checkpoint or a later epoch on.

    Returns:
        For each trained parameter by name its products, float64 [batches, batches], and the names
        of the parameters by group.

    Raises:
        DataError: The data cannot be read, or has other tokens or classes than the model.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train import data as data_sources
    from mupax.train.core.program import assemble
    from mupax.train.core.step import Batch, StepInputs, gradients
    from mupax.train.reuse import trained
    from mupax.zoo.definition import Arrays

    config = saved.config
    program = assemble(config)
    data = data_sources.load(
        config.data, config.model, seed=config.data_seed, note=lambda text: print(text)
    )
    trained.check_fits(saved, data)
    params = saved.params(program.abstract)
    inputs = program.step_inputs()
    batch_sharding = program.train_feed()

    @jax.jit
    def gradient(params: Arrays, step_inputs: StepInputs, batch: Batch) -> Arrays:
        steps = config.accumulation_steps
        result = gradients(
            program.definition, params, step_inputs, batch, steps, layout=program.layout
        )
        return result[0]

    @jax.jit
    def products(batch_gradients: list[Arrays]) -> Arrays:
        def of_parameter(*arrays: jax.Array) -> jax.Array:
            # In float32, because bfloat16 would round the sums of products to 3 digits or fewer.
            stacked = jnp.stack(arrays).astype(jnp.float32)
            summed_axes = list(range(1, stacked.ndim))
            return jnp.tensordot(stacked, stacked, (summed_axes, summed_axes))

        return jax.tree.map(of_parameter, *batch_gradients)

    assert saved.step is not None  # it is `None` only for weights without a run
    assert saved.run is not None
    trained_on = saved.run.config.data
    compared = stretch(
        saved.step * trained_on.batch_size // trained_on.transforms.repeats,
        batches,
        config.data.batch_size // config.data.transforms.repeats,
        data.train_size,
    )
    if compared.shares:
        terminal.note(
            f"caution: {batches} batches of {config.data.batch_size} reach into another epoch of "
            f"{data.train_size:,} training examples, and batches that share examples make the "
            "noise scale too small; write fewer --batches, or a smaller --data.batch-size"
        )
    batch_gradients = []
    with contextlib.closing(data.train_batches(compared.first, *batch_sharding.rows)) as source:
        for batch in itertools.islice(source, batches):
            # Kept on the devices: all of them are needed for the products.
            batch_gradients.append(gradient(params, inputs, batch_sharding.shard_batch(batch)))
    groups: dict[str, list[str]] = {}
    for name in batch_gradients[0]:
        groups.setdefault(program.definition.specs[name].group, []).append(name)
    by_name = {
        name: np.asarray(array, np.float64) for name, array in products(batch_gradients).items()
    }
    return by_name, groups
