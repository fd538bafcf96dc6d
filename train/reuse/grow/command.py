"""`mupax grow CHECKPOINT --to MODEL --out WORKDIR`: go on with a larger model that computes what the smaller one did."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.train.config.record import model_from_json, model_to_json
from mupax.train.config.run import Config, InitConfig
from mupax.zoo import configs

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.core.program import Program
    from mupax.train.core.state import TrainState
    from mupax.train.reuse.grow.grow import Growth
    from mupax.train.reuse.trained import TrainedModel

EXAMPLES = 4
"""Sequences or images that logits are compared on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grow:
    """A larger model that computes what the smaller one did, as a run to go on with.

    Writes a run of the larger model at the same step, with the optimizer's state: `--resume` goes on from there with the
    next batch and the rates that the run's preset has for the new size. The old run is left as it is.
    """

    checkpoint: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="CHECKPOINT")]
    """A workdir, or WORKDIR/checkpoints/STEP."""
    to: Annotated[str | None, conf.arg(metavar="MODEL")] = None
    """Larger model of `mupax models`; the checkpoint's own unless given."""
    set: Annotated[tuple[str, ...], conf.arg(metavar="FIELD=VALUE ...")] = ()
    """Of the larger model: num_heads=8 mlp_ratio=4 depth=6."""
    steps: Annotated[int | None, conf.arg(metavar="N")] = None
    """Last step of the run that goes on; the old run's unless given."""
    out: Annotated[command_line.Place, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Grows; 0 when done. Raises UsageError, GrowError, ConfigError or WeightsError for what does not fit."""
    args = command_line.parse(Grow, "mupax grow", argv)
    if args.to is None and not args.set:
        raise command_line.UsageError("say what to grow: --to MODEL, --set depth=8, or both")
    from mupax.train.checkpoints.making import finish, is_made
    from mupax.train.reuse import runs, trained, transplant

    command = ["mupax", "grow", *argv]
    if is_made(args.out, command):
        return 0
    model = trained.describe(args.checkpoint, needs_run=True)
    run = model.run
    assert run is not None
    files = model.asset_files()
    before = model.config
    after = larger(before, args)
    console = terminal.console()
    one, other = runs.on_one_device(before), runs.on_one_device(after)
    old = runs.whole_state(run.verified(), one)
    state, growth = grown(one, other, old)
    batch, examples = compared_examples(model, console.print)
    was, now = logits(one, old.params, batch), logits(other, state.params, batch)
    step = runs.write(args.out, command, after, other.preset.describe(), state, run.facts, files)
    cautions = other.preset.cautions(other.definition.sizes, after.optimizer.name)
    notes = [*growth.notes, *transplant.overshoot_notes(after.scaled_optimizer), *cautions]
    transplant.show(console, f"growing {args.checkpoint}, step {step}", growth.rows, notes)
    difference = (
        f"differ by at most {abs(was - now).max():.2g}, the largest being {abs(was).max():.3g}"
    )
    for line in (
        f"logits of {EXAMPLES} {examples} {difference}",
        f"step {step} of {args.checkpoint} is in {args.out}, {other.definition.count():,} parameters; go on with",
    ):
        console.print(line, highlight=False)
    print(terminal.command(shlex.join(["mupax", "train", "--resume", "--workdir", str(args.out)])))
    if step >= after.steps:
        console.print(
            f"which has {after.steps} steps, all done: add --steps N, of more than {step}",
            highlight=False,
        )
    finish(args.out)
    return 0


def compared_examples(
    model: TrainedModel, note: Callable[[str], None]
) -> tuple[dict[str, np.ndarray], str]:
    """Return what the model reads of a few examples, and what kind of examples they are: random ones without the run's data.

    Args:
        model: the smaller one.
        note: told what takes time, or why the run's data is not read.
    """
    import numpy as np

    from mupax.train import data as data_sources
    from mupax.train.reuse import own_files

    config = model.config
    settings = own_files.settings(config.data, model.facts, model.assets)
    try:
        data = data_sources.load(settings, config.model, seed=config.data_seed, note=note)
        batch = data.eval_batch(0)
        kind = "evaluation examples"
    except data_sources.DataError as error:
        note(f"note: the run's data is not here ({error})")
        rng = np.random.default_rng(0)
        tokens = config.model.sizes().get("vocab", 2)
        batch = {}
        for name, spec in config.model.example().items():
            shape = (EXAMPLES, *spec.shape)
            if name.endswith("mask"):
                batch[name] = np.ones(shape, spec.dtype)
            elif spec.dtype == "int32":
                batch[name] = rng.integers(tokens, size=shape, dtype=np.int32)
            else:
                batch[name] = rng.standard_normal(shape, np.float32)
        kind = "random examples"
    read = {
        name: array[:EXAMPLES]
        for name, array in batch.items()
        if name not in ("targets", "weights")
    }
    return read, kind


def larger(before: Config, args: Grow) -> Config:
    """The run on the model that was asked for.

    Args:
        before: the run of the checkpoint.
        args: the command's flags.

    Raises:
        ConfigError: no such model or field, or sizes that do not fit.
    """
    model = before.model if args.to is None else configs.get(args.to)
    values: dict[str, Any] = {
        **model_to_json(model),
        "compute": dataclasses.asdict(before.model.compute),
    }
    for word in args.set:
        field, equals, value = word.removeprefix("model.").partition("=")
        *owners, field = field.split(".")
        holder = values
        for owner in owners:
            holder = holder.get(owner) if isinstance(holder, dict) else None
        if not equals or not isinstance(holder, dict) or field not in holder:
            raise configs.ConfigError(
                f"--set {word}: write FIELD=VALUE with a field of the model, such as num_heads=8 or routing.gate=softmax"
            )
        holder[field] = _read(value)
    steps = args.steps or before.steps
    model, out = model_from_json(values), str(args.out)
    config = dataclasses.replace(
        before, resume=False, resume_from=None, resume_change=(), resume_exact=False
    )
    return dataclasses.replace(config, model=model, workdir=out, init=InitConfig(), steps=steps)


def grown(one: Program, other: Program, old: TrainState) -> tuple[TrainState, Growth]:
    """A state of one program as that of the other, a larger model's, and how its parameters came to be.

    Args:
        one: program of the smaller model's run.
        other: program of the larger one's.
        old: state of the first.
    """
    import jax

    from mupax.train.core.state import fresh_params
    from mupax.train.reuse import transplant
    from mupax.train.reuse.grow import grow
    from mupax.train.reuse.transplant import ScaledModel

    growth, config = grow.plan(ScaledModel.of(one), ScaledModel.of(other)), other.config
    fresh = growth.silenced(fresh_params(other.definition, config.seed, other.stds, growth.fresh()))
    state = transplant.state(
        growth.moves, old, fresh, other.abstract.opt_state, config.optimizer.name
    )
    return jax.tree.map(transplant.placed, state, other.abstract), growth


def logits(program: Program, params: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Logits of a batch, float32 whatever the run computes in.

    Args:
        program: of the run.
        params: the model's, by name.
        batch: what the model reads: `inputs`, and all else by name.
    """
    import jax
    import numpy as np

    from mupax.zoo.definition import definition

    model = program.config.model
    exact = definition(
        dataclasses.replace(model, compute=dataclasses.replace(model.compute, dtype="float32"))
    )
    factors = program.inputs.factors

    @jax.jit
    def run(params: Any, inputs: Any, context: Any) -> Any:
        return exact.model(params, factors.multiplier, factors.forward)(inputs, **context)

    context = {name: array for name, array in batch.items() if name != "inputs"}
    return np.asarray(run(params, batch["inputs"], context))


def _read(value: str) -> Any:
    """A value as JSON has it; a bare word is a text."""
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
    except (ValueError, RecursionError):
        return value
