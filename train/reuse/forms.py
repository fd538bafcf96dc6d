"""`mupax convert WORKDIR --form FORM --out WORKDIR`: a training state from one form of a preset to another.

The same model, the same next step, other numbers: a multiplier theta times larger has weight / theta, first moment or
momentum * theta, second moment * theta^2 (the abc symmetry, Tensor Programs IV; moments derived from it).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from tyro import conf

from mupax import command_line, terminal
from mupax.presets import Form, Preset, PresetError

if TYPE_CHECKING:
    from mupax.train.core.factors import ParamValues
    from mupax.train.core.state import TrainState
    from mupax.zoo.definition import Definition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """A run's checkpoint in another form of its preset.

    The same training goes on from there with other numbers: weights and moments move by the abc symmetry
    (`mupax.train.reuse.forms`). Continue with the flags of the run, `--preset.form FORM --workdir OUT --resume`. The old run
    is left as it is.
    """

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
    """Folder of the run, whose newest checkpoint is meant, or WORKDIR/checkpoints/STEP."""
    form: Form
    """Where multipliers shall sit."""
    out: Annotated[command_line.Place, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Converts; 0 when done. Raises UsageError, WorkdirError or WeightsError for what does not fit."""
    args = command_line.parse(Convert, "mupax convert", argv)
    from mupax.train.checkpoints.making import finish, is_made
    from mupax.train.reuse import runs, trained

    command = ["mupax", "convert", *argv]
    if is_made(args.out, command):
        return 0
    model = trained.describe(args.workdir, needs_run=True)
    run = model.run
    assert run is not None
    files = model.asset_files()
    before = model.config
    form = dataclasses.replace(before.preset, form=args.form)
    after = dataclasses.replace(before, preset=form, workdir=str(args.out))
    one, other = (runs.on_one_device(config) for config in (before, after))
    state = runs.whole_state(run.verified(), one)
    state = convert(state, one.definition, one.preset, other.preset, before.optimizer.name)
    step = runs.write(args.out, command, after, other.preset.describe(), state, run.facts, files)
    terminal.say(
        f"step {step} of {args.workdir} ({one.preset.describe()}) is in {args.out} as {args.form}"
    )
    if before.optimizer.clip_norm is not None:
        terminal.say(
            "note: the run clips gradients by their norm, and that is another in this form; where it clips, training differs"
        )
    terminal.say("continue with")
    print(terminal.command(shlex.join(["mupax", "train", "--resume", "--workdir", str(args.out)])))
    if step >= after.steps:
        terminal.say(f"which has {after.steps} steps, all done: add --steps N, of more than {step}")
    finish(args.out)
    return 0


def convert(
    state: TrainState,
    definition: Definition,
    before: Preset,
    after: Preset,
    optimizer: str = "adam",
) -> TrainState:
    """The state of a run under `before`, as the run under `after` would have it.

    Args:
        state: parameters and optimizer state trained under `before`.
        definition: the model.
        before: the preset of the run.
        after: the same preset in another form.
        optimizer: the run's.

    Raises:
        PresetError: the two differ in more than their form; the text names a parameter and a column.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mupax.train.reuse import transplant
    from mupax.train.reuse.transplant import ParamTransfer

    thetas = theta(definition, before, after, optimizer)
    moves = {
        name: ParamTransfer(
            source=name,
            along=tuple(map(np.arange, w.shape)),
            scale=1 / np.asarray(thetas[name], float),
        )
        for name, w in state.params.items()
    }
    converted = transplant.state(moves, state, {}, state.opt_state, optimizer)
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), converted, state)


def theta(
    definition: Definition, before: Preset, after: Preset, optimizer: str = "adam"
) -> ParamValues:
    """Return how many times larger each parameter's multiplier is under `after`, by name, [] or [layers].

    Args:
        definition: the model.
        before: the preset of the run.
        after: the same preset in another form.
        optimizer: the run's.

    Raises:
        PresetError: the change is not the symmetry.
    """
    from mupax.train.core.factors import resolve

    one, other = (resolve(preset, definition, optimizer) for preset in (before, after))
    thetas = {name: other.multiplier[name] / one.multiplier[name] for name in definition.specs}
    family = before.family(optimizer)
    for name, factor in thetas.items():
        on_adam = family == "adam" or (
            family == "muon" and before.row(definition.specs[name]).muon is None
        )
        for column, power in {"lr": -2 if family == "sgd" else -1, "eps": int(on_adam)}.items():
            target = getattr(one, column)[name] * factor**power
            if abs(getattr(other, column)[name] / target - 1).max() > 1e-5:
                raise PresetError(
                    f"{name}: {column} is not what the multiplier's change asks for, so {after.describe()} is another "
                    f"parameterization than {before.describe()}; convert only between forms of one preset"
                )
    return thetas
