"""`python -m train convert WORKDIR --form FORM --out WORKDIR`: a run's newest checkpoint in another form of its preset."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro import conf

from mupax import command_line
from mupax.presets import Form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """A run's newest checkpoint in another form of its preset.

    The same training goes on from there with other numbers: weights and moments move by the abc symmetry
    (`mupax.train.reuse.forms`). Continue with the flags of the run, `--preset.form FORM --workdir OUT --resume`. The old run
    is left as it is.
    """

    workdir: Annotated[conf.Positional[Path], conf.arg(metavar="WORKDIR")]
    """Folder of the run."""
    form: Form
    """Where multipliers shall sit."""
    out: Annotated[Path, conf.arg(metavar="WORKDIR")]
    """Folder of the run to come, new or empty."""


def main(argv: Sequence[str]) -> int:
    """Converts; 0 when done.

    Raises:
        UsageError, WorkdirError: wrong flags, no run there, or a folder that is not empty.
    """
    args = command_line.parse(Convert, "python -m train convert", argv)
    from mupax.train.checkpoints import workdir

    config_file = args.workdir / workdir.RECORD
    if not config_file.is_file():
        raise workdir.WorkdirError(
            f"{args.workdir} holds no run ({workdir.RECORD} is missing); write the workdir of one"
        )
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise workdir.WorkdirError(f"{args.out} is there already; give --out a new folder")
    import jax

    from mupax.train.checkpoints.checkpointer import Checkpoints
    from mupax.train.config.record import from_json
    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble
    from mupax.train.reuse.forms import convert

    recorded = json.loads(config_file.read_text())
    before = from_json(recorded["config"])
    preset = dataclasses.replace(before.preset, form=args.form)
    after = dataclasses.replace(before, preset=preset, workdir=str(args.out))
    # One device serves any run: restoring places the arrays anew, and so does the run that goes on.
    one, other = (
        assemble(dataclasses.replace(config, mesh=MeshConfig(data=1)), jax.devices()[:1]) for config in (before, after)
    )
    with Checkpoints(args.workdir.absolute(), before.checkpoint.keep) as checkpoints:
        step = checkpoints.latest
        if step is None:
            raise workdir.WorkdirError(f"{args.workdir} has no checkpoint yet; let the run write one first")
        state = checkpoints.restore(one.abstract, recorded["data"])
    moved = convert(state, one.definition, one.preset, other.preset, before.optimizer.name)
    args.out.mkdir(parents=True, exist_ok=True)
    flags = recorded.get("xla", {}).get("options", {})
    workdir.record(args.out, after, recorded["data"], other.preset.describe(), flags)
    with Checkpoints(args.out.absolute(), before.checkpoint.keep) as checkpoints:
        checkpoints.save(step, moved, recorded["data"])
    print(f"step {step} of {args.workdir} ({one.preset.describe()}) is in {args.out} as {args.form}")
    if before.optimizer.clip_norm is not None:
        print(
            "note: the run clips gradients by their norm, and that is another in this form; where it clips, training differs"
        )
    print(f"continue with the run's flags and --preset.form {args.form} --workdir {args.out} --resume")
    return 0
