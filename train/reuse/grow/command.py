"""`python -m train grow CHECKPOINT --to MODEL --out WORKDIR`: go on with a larger model that computes what the smaller one did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.train.config.record import model_from_json, model_to_json
from mupax.zoo import configs
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.config.run import Config
    from mupax.train.core.program import Program
    from mupax.train.core.state import TrainState

EXAMPLES = 4
"""Sequences or images that logits are compared on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grow:
    """A larger model that computes what the smaller one did, as a run to go on with.

    Writes a run of the larger model at the same step, with the optimizer's state: `--resume` goes on from there with the
    next batch and the rates that the run's preset has for the new size. The old run is left as it is.
    """

    checkpoint: Annotated[conf.Positional[Path], conf.arg(metavar="CHECKPOINT")]
    """A workdir, or WORKDIR/checkpoints/STEP."""
    to: Annotated[str | None, conf.arg(metavar="MODEL")] = None
    """Larger model of `python -m zoo`; the checkpoint's own unless given."""
    set: Annotated[tuple[str, ...], conf.arg(metavar="FIELD=VALUE ...")] = ()
    """Of the larger model: num_heads=8 mlp_ratio=4 depth=6."""
    steps: Annotated[int | None, conf.arg(metavar="N")] = None
    """Last step of the run that goes on; the old run's unless given."""
    out: Annotated[Path, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Grows; 0 when done.

    Raises:
        UsageError, GrowError, ConfigError, WeightsError: wrong flags, or a model that does not fit.
    """
    args = command_line.parse(Grow, "python -m train grow", argv)
    from mupax.train.reuse.grow.axes import GrowError

    if args.to is None and not args.set:
        raise GrowError("say what to grow: --to MODEL, --set depth=8, or both")

    from mupax.train import data as data_sources
    from mupax.train.checkpoints import workdir
    from mupax.train.checkpoints.checkpointer import Checkpoints
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse import transplant
    from mupax.train.reuse.huggingface.files import check_free
    from mupax.train.reuse.start import init_from

    check_free(args.out)
    path = pretrained.located(args.checkpoint)
    source = pretrained.read(path)
    if source.run is None:
        raise GrowError(
            f"{args.checkpoint} holds weights and no run; start one from them with --init-from, save it, and grow that"
        )
    before, facts = source.run
    after = larger(before, args.to, args.set, args.out, args.steps)
    console = terminal.console()
    program, state, grown, change = grow(
        path,
        before,
        after,
        lambda: data_sources.load(before.data, before.model, seed=before.data_seed, note=console.print),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    workdir.record(args.out, after, facts, program.preset.describe(), {})
    step = int(state.step)
    with Checkpoints(args.out.absolute(), after.checkpoint.keep) as checkpoints:
        checkpoints.save(step, state, facts, last=True)
        if failure := checkpoints.wait():
            raise GrowError(failure)
    init_from.show(
        console,
        f"growing {path}",
        grown.rows,
        [
            *grown.notes,
            *transplant.overshoot_notes(after.optimizer),
            *program.preset.cautions(program.definition.sizes, after.optimizer.name),
        ],
    )
    console.print(change.told(), highlight=False)
    console.print(
        f"step {step} of {args.checkpoint} is in {args.out}, {program.definition.count():,} parameters; go on with",
        highlight=False,
    )
    print(f"  {command(after)}")
    if step >= after.steps:
        console.print(f"which has {after.steps} steps, all done: add --steps N, of more than {step}", highlight=False)
    return 0


@dataclasses.dataclass(frozen=True)
class Change:
    """Logits before and after, of the same batch in float32."""

    largest: float
    of: float
    """Largest logit."""

    def told(self) -> str:
        """One line."""
        return f"logits of {EXAMPLES} evaluation examples differ by at most {self.largest:.2g}, the largest being {self.of:.3g}"


def larger(before: Config, name: str | None, fields: Sequence[str], out: Path, steps: int | None) -> Config:
    """The run on the model that was asked for.

    Raises:
        ConfigError: no such model or field, or sizes that do not fit together.
    """
    from mupax.train.config.run import InitConfig

    model: ModelConfig = before.model if name is None else configs.get(name)
    values: dict[str, Any] = {**model_to_json(model), "compute": dataclasses.asdict(before.model.compute)}
    for word in fields:
        field, equals, value = word.removeprefix("model.").partition("=")
        if not equals or field not in values:
            raise configs.ConfigError(
                f"--set {word}: write FIELD=VALUE with a field of the model, such as num_heads=8 or depth=6"
            )
        values[field] = _read(value)
    return dataclasses.replace(
        before,
        model=model_from_json(values),
        workdir=str(out),
        init=InitConfig(),
        steps=steps or before.steps,
        resume=False,
    )


def grow(path: Path, before: Config, after: Config, load: Any) -> tuple[Program, TrainState, Any, Change]:
    """The state of a step as one of a larger model, on one device; the program it is of, the plan, and what changed.

    Args:
        path: workdir/checkpoints/STEP.
        before: the run's config.
        after: the larger one.
        load: makes the run's data, for a batch to compare logits on.

    Raises:
        GrowError, WeightsError, DataError: what does not fit.
    """
    import jax

    from mupax.train.config.run import MeshConfig
    from mupax.train.core import state as states
    from mupax.train.core.program import assemble
    from mupax.train.reuse import source as pretrained
    from mupax.train.reuse import transplant as transplant
    from mupax.train.reuse.grow import grow as growing
    from mupax.train.reuse.start import init_from
    from mupax.train.reuse.start.plan import Side

    # One device serves any run: restoring places the arrays anew, and so does the run that goes on.
    one, other = (
        assemble(dataclasses.replace(config, mesh=MeshConfig(data=1)), jax.local_devices()[:1])
        for config in (before, after)
    )
    there, here = (Side.of(p.config.model, p.definition, p.run.factors) for p in (one, other))
    made = growing.plan(there, here)
    old = pretrained.whole_state(path, before)
    fresh = made.silenced(states.fresh_params(other.definition, after.seed, other.stds, made.fresh()))
    names = list(other.definition.specs)
    params = transplant.parameters(made.moves, old.params, fresh, names)
    average = None if old.ema is None else transplant.parameters(made.moves, old.ema, fresh, names)
    moments = transplant.optimizer_state(made.moves, old.opt_state, other.abstract.opt_state, after.optimizer.name)
    grown = states.TrainState(old.step, params, moments, average, old.health)
    grown = jax.tree.map(init_from.placed, grown, other.abstract)
    batch = load().eval_batch(0)["inputs"][:EXAMPLES]
    return other, grown, made, _compared(logits(one, old.params, batch), logits(other, grown.params, batch))


def logits(program: Program, params: Any, inputs: Any) -> np.ndarray:
    """Logits of a batch, in float32 whatever the run computes in."""
    import jax
    import numpy as np

    from mupax.zoo.definition import definition

    model = program.config.model
    plain = definition(dataclasses.replace(model, compute=dataclasses.replace(model.compute, dtype="float32")))
    factors = program.run.factors
    return np.asarray(jax.jit(plain.apply)(params, factors.multiplier, factors.forward, inputs))


def command(config: Config) -> str:
    """The command that goes on with a run from its config, as short as it can be said."""
    from mupax.train.config.record import words

    found = words(config)
    if found is None:
        return f"python -m train {config.recipe} (and the run's flags) --workdir {config.workdir} --resume"
    return " ".join(["python -m train", config.recipe, *found, "--workdir", str(config.workdir), "--resume"])


def _compared(one: np.ndarray, other: np.ndarray) -> Change:
    return Change(largest=float(abs(one - other).max()), of=float(abs(one).max()))


def _read(value: str) -> Any:
    """A value as JSON has it; a bare word is a text."""
    try:
        return json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
    except json.JSONDecodeError:
        return value
