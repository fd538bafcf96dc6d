"""`mupax convert WORKDIR --form FORM --out WORKDIR`: move a training state to another form.

The model and its next step stay the same, the stored values change: a multiplier theta times larger
has weight / theta, first moment or momentum * theta, second moment * theta^2 (the abc symmetry,
Tensor Programs IV; moments derived from it).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from tyro import conf

from mupax import command_line, terminal
from mupax.presets import Form, Preset, PresetError
from mupax.terminal import counted

if TYPE_CHECKING:
    from mupax.train.core.factors import ParamValues
    from mupax.train.core.state import TrainState
    from mupax.zoo.definition import Definition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """A run's checkpoint in another form of its preset.

    The same training goes on from there with other numbers: weights and moments move by the abc
    symmetry (`mupax.train.reuse.forms`). Continue with the flags of the run, `--preset.form FORM
    --workdir OUT --resume`. The old run is left as it is.
    """

    workdir: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="WORKDIR")]
    """Folder of the run, whose newest checkpoint is meant, or WORKDIR/checkpoints/STEP."""
    form: Form
    """Form of the new run: where its multipliers sit."""
    out: Annotated[command_line.Place, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Run `mupax convert`: write a run in another form to `--out`. Return the exit code, 0.

    The command does nothing if it made `--out` before and was killed only after the folder was
    complete.

    Raises:
        UsageError, WorkdirError, WeightsError: wrong flags, or no run that can be converted.
        OutError, HalfMadeError: `--out` is not empty, or another command is writing it.
    """
    args = command_line.parse(Convert, "mupax convert", argv)
    from mupax.train.checkpoints.making import finish, is_made
    from mupax.train.reuse import runs, trained

    command = ["mupax", "convert", *argv]
    if is_made(args.out, command):
        return 0

    model = trained.describe(args.workdir, needs_run=True, needs_metrics=True)
    run = model.run
    assert run is not None
    # Read first, because a damaged asset ends the command and arrays may be large.
    files = model.asset_files()

    config = model.config
    new_preset = dataclasses.replace(config.preset, form=args.form)
    new_config = dataclasses.replace(config, preset=new_preset, workdir=str(args.out))
    program = runs.on_one_device(config)
    new_program = runs.on_one_device(new_config)

    state = runs.whole_state(run.verified(), program)
    state = convert(
        state, program.definition, program.preset, new_program.preset, config.optimizer.name
    )
    description = new_program.preset.describe()
    step = runs.write(args.out, command, new_config, description, state, run.facts, files)

    terminal.say(
        f"step {step} of {args.workdir} ({program.preset.describe()}) is in {args.out} "
        f"as {args.form}"
    )
    # Gradients change with their multipliers, so their norm exceeds clip_norm at other steps.
    if config.optimizer.clip_norm is not None:
        terminal.say(
            "note: the run clips gradients by their norm, and that is another in this form; "
            "where it clips, training differs"
        )
    terminal.say("continue with")
    print(terminal.command(shlex.join(["mupax", "train", "--resume", "--workdir", str(args.out)])))
    if step >= new_config.steps:
        terminal.say(
            f"which has {counted(new_config.steps, 'step')}, "
            f"all done: add --steps N, of more than {step}"
        )
    finish(args.out)
    return 0


def convert(
    state: TrainState,
    definition: Definition,
    preset: Preset,
    new_preset: Preset,
    optimizer: str = "adam",
) -> TrainState:
    """Return the state of a run under `preset` as the state of the same run under `new_preset`.

    The two presets are forms of one parameterization, so the function and the training stay the
    same. Weights and their moving average are divided by theta, the ratio of the multipliers. First
    moments are multiplied by theta, second moments by theta^2. Dtypes and the step stay.

    Args:
        state: parameters and optimizer state trained under `preset`.
        optimizer: optimizer of the run, a key of `OPTIMIZERS`, `adam` by default.

    Raises:
        PresetError: the presets differ in more than their form. The message names a parameter and
            a column.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mupax.train.reuse import transplant
    from mupax.train.reuse.transplant import ParamTransfer

    thetas = theta(definition, preset, new_preset, optimizer)
    transfers: dict[str, ParamTransfer] = {}
    for name, weight in state.params.items():
        # `scale` multiplies weights. `transplant.state` then multiplies first moments by theta and
        # second moments by theta^2.
        transfers[name] = ParamTransfer(
            source=name,
            along=tuple(np.arange(size) for size in weight.shape),
            scale=1 / np.asarray(thetas[name], float),
        )
    converted = transplant.state(transfers, state, {}, state.opt_state, optimizer)
    # Transfers return float32, and optimizer.moment_dtype may keep a moment in bfloat16.
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), converted, state)


def theta(
    definition: Definition, preset: Preset, new_preset: Preset, optimizer: str = "adam"
) -> ParamValues:
    """Return the ratio of each parameter's multipliers under the two presets, [] or [layers].

    The multiplier under `new_preset` is divided by the one under `preset`.

    Args:
        optimizer: optimizer of the run, whose learning rates and epsilons are checked.

    Raises:
        PresetError: a learning rate or epsilon does not change with the multiplier as the abc
            symmetry requires.
    """
    from mupax.train.core.factors import resolve

    old = resolve(preset, definition, optimizer)
    new = resolve(new_preset, definition, optimizer)
    thetas = {name: new.multiplier[name] / old.multiplier[name] for name in definition.specs}

    family = preset.family(optimizer)
    for name, factor in thetas.items():
        # Under Muon, Adam trains the parameters for which the preset has no Muon rule.
        uses_adam = family == "adam" or (
            family == "muon" and preset.row(definition.specs[name]).muon is None
        )
        # Weights become theta times smaller, gradients theta times larger. Updates of Adam and Muon
        # do not scale with the gradient, so lr becomes lr / theta. Updates of SGD do, so lr becomes
        # lr / theta^2. Adam compares eps with gradients, so eps becomes theta times larger.
        powers = {"lr": -2 if family == "sgd" else -1, "eps": int(uses_adam)}
        for column, power in powers.items():
            expected = getattr(old, column)[name] * factor**power
            actual = getattr(new, column)[name]
            # Factors are float32, so equal parameterizations differ by rounding, about 1e-7.
            if abs(actual / expected - 1).max() > 1e-5:
                raise PresetError(
                    f"{name}: {column} is not what the multiplier's change asks for, so "
                    f"{new_preset.describe()} is another parameterization than "
                    f"{preset.describe()}; convert only between forms of one preset"
                )
    return thetas
