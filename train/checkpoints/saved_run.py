"""A run's checkpoint opened for use: its config, its step, and its parameters or their average on a mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mupax.train.checkpoints.workdir import CHECKPOINTS, RECORD, WorkdirError
from mupax.train.config.record import from_json
from mupax.train.config.run import Config, EmaConfig

if TYPE_CHECKING:
    from mupax.zoo.definition import Arrays


class Trained(NamedTuple):
    """One step of a run."""

    workdir: Path
    config: Config
    """As the run recorded it; without an average where the plain parameters are meant."""
    facts: dict[str, Any]
    """What the run recorded of its data."""
    step: int
    weights: Literal["params", "ema"]

    def verified(self) -> Path:
        """The folder of the step; raises WorkdirError where a file in it is not as it was written."""
        from mupax.train.checkpoints import manifest

        folder = self.workdir / CHECKPOINTS / str(self.step)
        try:
            manifest.verified(folder)
        except manifest.DamagedError as error:
            raise WorkdirError(
                f"checkpoint {self.step} of {self.workdir} is damaged: {error}; give another with --step or as {folder.parent}/STEP"
            ) from error
        return folder

    def params(self, abstract: Any) -> Arrays:
        """The weights, each array restored straight into its sharding.

        Args:
            abstract: the state of a program of `config`.

        Raises:
            WorkdirError: the checkpoint is damaged, or is of another model.
        """
        import jax
        from orbax.checkpoint import v1 as ocp

        folder = self.verified()
        stored: Any = ocp.metadata(str(folder)).metadata
        wanted = getattr(abstract, self.weights)
        shapes = {name: leaf.shape for name, leaf in stored[self.weights].items()}
        if shapes != {name: leaf.shape for name, leaf in wanted.items()}:
            raise WorkdirError(f"checkpoint {self.step} of {self.workdir} holds another model than {RECORD} says")
        asked = {
            part: wanted if part == self.weights else jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
            for part, tree in stored.items()
        }
        return dict(ocp.load(str(folder), asked)[self.weights])


def find(path: Path, step: int | None = None, ema: bool | None = None) -> Trained:
    """A step of a run, without its arrays.

    Args:
        path: a run's workdir, or one of its steps (workdir/checkpoints/STEP).
        step: of a workdir; the newest unless given.
        ema: whether the moving average is meant; where there is one, unless given.

    Raises:
        WorkdirError: no run there, no such step, or no average.
        ConfigError, JsonError: a record that is none.
    """
    folder = path.absolute()
    if folder.name.isdigit() and folder.parent.name == CHECKPOINTS:
        if step not in (None, int(folder.name)):
            raise WorkdirError(f"{path} is step {folder.name}, and --step says {step}; leave one of them out")
        folder, step = folder.parent.parent, int(folder.name)
    if not (folder / RECORD).is_file():
        raise WorkdirError(f"{path} holds no run ({RECORD} is missing); write the workdir of one")
    from mupax.train.checkpoints import manifest  # late: it brings JAX along
    from mupax.zoo.checked_json import read_json

    fields = read_json(folder / RECORD)
    if "config" not in fields:
        raise WorkdirError(f"{path} holds no run ({RECORD} is not one of a run); write the workdir of one")
    config, facts = from_json(fields["config"]), fields.get("data")
    steps = manifest.steps(folder / CHECKPOINTS)
    if not steps:
        raise WorkdirError(f"{path} has no checkpoint yet; let the run write one first")
    if step is not None and step not in steps:
        raise WorkdirError(f"{path} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    if ema and config.ema.decay is None:
        raise WorkdirError(f"the run in {path} kept no moving average (ema.decay is None); leave --ema out")
    averaged = config.ema.decay is not None if ema is None else ema
    config = config if averaged else dataclasses.replace(config, ema=EmaConfig())
    return Trained(
        folder,
        config,
        facts if isinstance(facts, dict) else {},
        max(steps) if step is None else step,
        "ema" if averaged else "params",
    )
