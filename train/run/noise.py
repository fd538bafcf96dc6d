"""`mupax noise WORKDIR`: the gradient noise scale of a run at a checkpoint, below which joint rules hold.

B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, 1812.06162, equation 2.9): the batch at which noise and gradient are equally
large. |g|^2 of a batch is |G|^2 + tr(Sigma) / B, the product of two batches' gradients is |G|^2, so J batches tell both without bias.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from tyro import conf

from mupax import command_line, terminal
from mupax.train.checkpoints.command import CheckpointFlags
from mupax.train.config.checks import at_least
from mupax.train.run.eval_command import check_read, with_flags

if TYPE_CHECKING:
    from mupax.train.reuse.trained import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(CheckpointFlags):
    """The gradient noise scale at a checkpoint: the batch above which more examples change the gradient little.

    Joint rules (`mupax presets joint`) hold well below it; give it to a run as --noise-scale. It grows while the loss falls, so
    measure where most of the run is spent. Of the parameters themselves unless --ema, on batches that the run would see next;
    --data.batch-size, --mesh.* and --model.compute.* of the run work here too.
    """

    batches: Annotated[int, conf.arg(metavar="N")] = 16
    """Gradients to compare; all are in memory at once."""
    json: Path | None = None
    """Also write the numbers to a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("--", self, 3, "batches")


class Scale(NamedTuple):
    """A noise scale in examples, and the ends of its 95 % interval; inf where no gradient is seen in the noise."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} examples [{self.low:.3g}, {self.high:.3g}]"


def noise_scale(products: np.ndarray, batch: int) -> Scale:
    """The noise scale by gradients of independent batches.

    Args:
        products: of every two gradients, float64 [J, J].
        batch: examples of each.
    """
    from scipy.special import stdtrit

    many = len(products)
    masks = ~np.eye(many, dtype=bool)  # row i leaves gradient i out
    shares = np.array([_share(products), *(_share(products[np.ix_(keep, keep)]) for keep in masks)])
    # Jackknife of |G|^2 / E|g|^2, which is linear enough; the noise scale is not where it is large.
    error = math.sqrt((many - 1) / many * np.sum((shares[1:] - shares[1:].mean()) ** 2)) * float(
        stdtrit(many - 1, 0.975)
    )

    def scale(share: float) -> float:
        return batch * (1 / share - 1) if share > 0 else math.inf

    return Scale(scale(shares[0]), max(0.0, scale(shares[0] + error)), scale(shares[0] - error))


def _share(products: np.ndarray) -> float:
    """|G|^2 / E|g|^2, both without bias."""
    many, squares = len(products), np.trace(products)
    return float((products.sum() - squares) / (many - 1) / squares)


def main(argv: Sequence[str]) -> int:
    """Measures and shows; 0 when done.

    Raises:
        UsageError: a flag that this does not read.
        WorkdirError: no such run or step, or a damaged checkpoint.
        ConfigError, DataError, MeshError: settings or data that do not fit the model.
    """
    args, rest = command_line.parse_known(Noise, "mupax noise", argv)
    from mupax.train.reuse import trained

    check_read("noise", "--step, --ema, --batches, --json", rest)
    opened = trained.open_model(args.workdir, args.step, args.ema, needs_run=True)
    saved = with_flags("noise", opened, rest)
    products, groups = measured(saved, args.batches)
    batch = saved.config.data.batch_size
    whole = noise_scale(sum(products.values(), np.zeros([args.batches] * 2)), batch)
    parts = {
        group: noise_scale(sum(products[n] for n in names), batch)  # pyright: ignore[reportArgumentType]
        for group, names in groups.items()
    }
    if args.json is not None:
        numbers = {
            "step": saved.step,
            "batch": batch,
            "batches": args.batches,
            "noise_scale": whole._asdict(),
        }
        content = {**numbers, "groups": {group: scale._asdict() for group, scale in parts.items()}}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(_finite(content), indent=1) + "\n")
    terminal.say(
        f"noise scale {whole} at step {saved.step} (95 %), from {args.batches} batches of {batch}"
    )
    rows = [["group", "noise scale", "from", "to"]]
    rows += [[group, *(f"{number:.3g}" for number in scale)] for group, scale in parts.items()]
    print(terminal.table(rows))
    if math.isfinite(whole.value):
        terminal.say(
            f"joint rules hold well below it: --noise-scale {whole.value:.3g} refuses them at a larger batch"
        )
    else:
        terminal.say(
            "no gradient is seen in the noise; write more --batches, or a larger --data.batch-size"
        )
    return 0


def measured(
    saved: TrainedModel, batches: int
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """Products of gradients, float64 [batches, batches] of each trained parameter, and names of the parameters by group.

    Args:
        saved: the checkpoint whose gradients are taken.
        batches: how many of the training data, from its step on.
    """
    import jax
    import jax.numpy as jnp

    from mupax.train import data as data_sources
    from mupax.train.core.program import assemble
    from mupax.train.core.step import Batch, StepInputs, gradients
    from mupax.zoo.definition import Arrays

    config = saved.config
    program = assemble(config)
    data = data_sources.load(
        config.data, config.model, seed=config.data_seed, note=lambda text: print(text)
    )
    params, inputs, feed = (
        saved.params(program.abstract),
        program.step_inputs(),
        program.train_feed(),
    )

    @jax.jit
    def gradient(params: Arrays, run: StepInputs, batch: Batch) -> Arrays:
        steps = config.accumulation_steps
        return gradients(program.definition, params, run, batch, steps, layout=program.layout)[0]

    @jax.jit
    def products(many: list[Arrays]) -> Arrays:
        def of(*each: jax.Array) -> jax.Array:
            stacked = jnp.stack(each).astype(jnp.float32)
            summed = list(range(1, stacked.ndim))
            return jnp.tensordot(stacked, stacked, (summed, summed))

        return jax.tree.map(of, *many)

    assert saved.step is not None  # of a run, not of weights
    with contextlib.closing(data.train_batches(saved.step, *feed.rows)) as source:
        many = [
            gradient(params, inputs, feed.shard_batch(batch))
            for batch in itertools.islice(source, batches)
        ]
    groups: dict[str, list[str]] = {}
    for name in many[0]:
        groups.setdefault(program.definition.specs[name].group, []).append(name)
    return {name: np.asarray(each, np.float64) for name, each in products(many).items()}, groups


def _finite(value: Any) -> Any:
    """The value with null for what is not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
