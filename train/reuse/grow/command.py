"""`mupax grow CHECKPOINT --to MODEL --out WORKDIR`: continue a run with a larger model.

The larger model computes the same function as the smaller one at the step where it takes over.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.terminal import counted
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
"""Number of sequences or images whose logits are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grow:
    """A larger model that computes what the smaller one did, as a run to go on with.

    Writes a run of the larger model at the same step, with the optimizer's state: `--resume` goes
    on from there with the next batch and the rates that the run's preset has for the new size. The
    old run is left as it is.
    """

    checkpoint: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="CHECKPOINT")]
    """A workdir, or WORKDIR/checkpoints/STEP."""
    to: Annotated[str | None, conf.arg(metavar="MODEL")] = None
    """Larger model of `mupax models`; the checkpoint's own unless given."""
    set: Annotated[tuple[str, ...], conf.arg(metavar="FIELD=VALUE ...")] = ()
    """Fields of the larger model, such as num_heads=8 mlp_ratio=4 depth=6."""
    steps: Annotated[int | None, conf.arg(metavar="N")] = None
    """Last step of the run that goes on; the old run's unless given."""
    out: Annotated[command_line.Place, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Run `mupax grow`: write a run of the larger model to `--out`. Return the exit code, 0.

    The parameters and the difference of both models' logits are printed. The command does nothing
    if it made `--out` before and was killed only after the folder was complete.

    Raises:
        UsageError, GrowError, ConfigError, WeightsError: wrong flags, or no growth that fits.
        OutError, HalfMadeError: `--out` is not empty, or another command is writing it.
    """
    args = command_line.parse(Grow, "mupax grow", argv)
    if args.to is None and not args.set:
        raise command_line.UsageError("say what to grow: --to MODEL, --set depth=8, or both")
    from mupax.train.checkpoints.making import finish, is_made
    from mupax.train.reuse import runs, trained, transplant

    command = ["mupax", "grow", *argv]
    if is_made(args.out, command):
        return 0

    model = trained.describe(args.checkpoint, needs_run=True, needs_metrics=True)
    run = model.run
    assert run is not None
    files = model.asset_files()
    config = model.config
    larger_config = larger(config, args)
    console = terminal.console()

    program = runs.on_one_device(config)
    larger_program = runs.on_one_device(larger_config)
    state = runs.whole_state(run.verified(), program)
    if args.steps is not None and args.steps <= int(state.step):
        raise command_line.UsageError(
            f"--steps {args.steps} is the length of the whole run, and {args.checkpoint} has done "
            f"{int(state.step)} of it; write more"
        )
    larger_state, growth = grown(program, larger_program, state)

    batch, examples = compared_examples(model, console.print)
    # The user sees by the printed difference whether the function stayed.
    old_logits = logits(program, state.params, batch)
    new_logits = logits(larger_program, larger_state.params, batch)
    preset = larger_program.preset
    step = runs.write(
        args.out, command, larger_config, preset.describe(), larger_state, run.facts, files
    )

    sizes = larger_program.definition.sizes
    notes = [
        *growth.notes,
        *transplant.overshoot_notes(larger_config.scaled_optimizer),
        *preset.cautions(sizes, larger_config.optimizer.name),
    ]
    transplant.show(console, f"growing {args.checkpoint}, step {step}", growth.rows, notes)
    difference = abs(old_logits - new_logits).max()
    largest = abs(old_logits).max()
    console.print(
        f"logits of {len(old_logits)} {examples} differ by at most {difference:.2g}, "
        f"the largest being {largest:.3g}",
        highlight=False,
    )
    num_params = larger_program.definition.count()
    console.print(
        f"step {step} of {args.checkpoint} is in {args.out}, {num_params:,} parameters; go on with",
        highlight=False,
    )
    print(terminal.command(shlex.join(["mupax", "train", "--resume", "--workdir", str(args.out)])))
    if step >= larger_config.steps:
        console.print(
            f"which has {counted(larger_config.steps, 'step')}, "
            f"all done: add --steps N, of more than {step}",
            highlight=False,
        )
    finish(args.out)
    return 0


def compared_examples(
    model: TrainedModel, note: Callable[[str], None]
) -> tuple[dict[str, np.ndarray], str]:
    """Return the inputs of up to `EXAMPLES` examples, and the kind of examples in words.

    They are the first evaluation examples of the run's data, which is prepared if needed, or random
    examples if the data is missing. Targets and weights are left out.

    Args:
        note: function that prints a line, about steps that take time or about missing data.
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
        vocab_size = config.model.sizes().get("vocab", 2)
        batch = {}
        for name, spec in config.model.example().items():
            shape = (EXAMPLES, *spec.shape)
            if name.endswith("mask"):
                batch[name] = np.ones(shape, spec.dtype)
            elif spec.dtype == "int32":
                batch[name] = rng.integers(vocab_size, size=shape, dtype=np.int32)
            else:
                batch[name] = rng.standard_normal(shape, np.float32)
        kind = "random examples"
    inputs = {}
    for name, array in batch.items():
        if name not in ("targets", "weights"):
            inputs[name] = array[:EXAMPLES]
    return inputs, kind


def larger(config: Config, args: Grow) -> Config:
    """Return the config of the run that continues with the larger model.

    The config is that of the old run with four changes: the model of `--to`, the fields of `--set`,
    the new workdir and the steps. The compute settings of the model stay. The `resume` fields and
    `init` are reset to their defaults.

    Raises:
        ConfigError: unknown model or field, a field given twice, or sizes that do not fit.
    """
    model = config.model if args.to is None else configs.get(args.to)
    # A named model has default compute settings. The run keeps its own.
    values: dict[str, Any] = {
        **model_to_json(model),
        "compute": dataclasses.asdict(config.model.compute),
    }
    paths = set()
    for word in args.set:
        path, equals, value = word.removeprefix("model.").partition("=")
        if path in paths:
            raise configs.ConfigError(f"--set {word}: {path} is given twice; write it once")
        paths.add(path)
        *owners, field = path.split(".")
        holder = values
        for owner in owners:
            holder = holder.get(owner) if isinstance(holder, dict) else None
        if not equals or not isinstance(holder, dict) or field not in holder:
            raise configs.ConfigError(
                f"--set {word}: write FIELD=VALUE with a field of the model, such as num_heads=8 "
                "or routing.gate=softmax"
            )
        holder[field] = _read(value)
    return dataclasses.replace(
        config,
        resume=False,
        resume_from=None,
        resume_change=(),
        resume_exact=False,
        model=model_from_json(values),
        workdir=str(args.out),
        init=InitConfig(),
        steps=args.steps or config.steps,
    )


def grown(program: Program, larger_program: Program, old: TrainState) -> tuple[TrainState, Growth]:
    """Return the state of the larger model's run, and the plan of how its parameters are made.

    Arrays have the dtypes and shardings of `larger_program.abstract`. The step is that of `old`.

    Args:
        old: state of the run of `program`, the smaller model, with arrays on one device.

    Raises:
        GrowError, TransplantError, ConfigError: the model cannot grow so (see `grow.plan`).
    """
    import jax

    from mupax.train.core.state import fresh_params
    from mupax.train.reuse import transplant
    from mupax.train.reuse.grow import grow
    from mupax.train.reuse.transplant import ScaledModel

    growth = grow.plan(ScaledModel.of(program), ScaledModel.of(larger_program))
    config = larger_program.config
    fresh = fresh_params(
        larger_program.definition, config.seed, larger_program.stds, growth.fresh()
    )
    fresh = growth.silenced(fresh)
    abstract = larger_program.abstract
    state = transplant.state(growth.moves, old, fresh, abstract.opt_state, config.optimizer.name)
    return jax.tree.map(transplant.placed, state, abstract), growth


def logits(program: Program, params: Any, batch: Mapping[str, Any]) -> np.ndarray:
    """Return the logits of a batch, computed in float32 whatever dtype the run computes in.

    Args:
        params: parameters of the program's model, by name.
        batch: `inputs` and the model's other inputs by name.
    """
    import jax
    import numpy as np

    from mupax.zoo.definition import definition

    model = program.config.model
    # Rounding of bfloat16 would hide a small change of the function.
    compute = dataclasses.replace(model.compute, dtype="float32")
    exact = definition(dataclasses.replace(model, compute=compute))
    factors = program.inputs.factors

    @jax.jit
    def run(params: Any, inputs: Any, context: Any) -> Any:
        apply = exact.model(params, factors.multiplier, factors.forward)
        return apply(inputs, **context)

    context = {name: array for name, array in batch.items() if name != "inputs"}
    return np.asarray(run(params, batch["inputs"], context))


def _read(value: str) -> Any:
    """Return a flag's value parsed as JSON, or as Python's None, True or False.

    Any other text is returned as a string.
    """
    constants = {"None": "null", "True": "true", "False": "false"}
    try:
        return json.loads(constants.get(value, value))
    except (ValueError, RecursionError):
        # json.loads recurses for every bracket, so thousands of them exceed Python's limit.
        return value
