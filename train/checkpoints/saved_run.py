"""A run's checkpoint opened for use: its config, its step, and its parameters or their average on a mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mupax import disk
from mupax.train.checkpoints import assets
from mupax.train.checkpoints import folder as checkpoints_folder
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.checkpointer import named_step, step_of
from mupax.train.checkpoints.folder import verified
from mupax.train.checkpoints.layout import DamagedError
from mupax.train.checkpoints.workdir import CHECKPOINTS, RECORD, WorkdirError, read_record
from mupax.train.config.record import run_config
from mupax.train.config.run import Config, EmaConfig
from mupax.train.config.sections import Step

if TYPE_CHECKING:
    from mupax.zoo.definition import Arrays


class LoadedRun(NamedTuple):
    """A run of which one step is restored."""

    workdir: Path
    config: Config
    """As the run recorded it; without an average where the plain parameters are meant."""
    facts: dict[str, Any]
    """What the run recorded of its data."""
    step: int
    weights: Literal["params", "ema"]
    run: str | None
    """Name of the run."""

    def assets(self) -> Assets | None:
        """Return the run's own tokenizer, chat template and class names; None of a run that an older version wrote."""
        return assets.find(self.workdir, self.step)

    def verified(self) -> Path:
        """The folder of the step, every file as it was written.

        Raises:
            WorkdirError: one is not.
            ForeignError: the checkpoint is of another run or a newer version.
            DiskError: the disk cannot read it.
        """
        checkpoint = self.workdir / CHECKPOINTS / str(self.step)
        try:
            verified(checkpoint, self.run)
        except DamagedError as error:
            raise WorkdirError(
                f"checkpoint {self.step} of {self.workdir} is damaged: {error}; "
                f"give another with --step or as {checkpoint.parent}/STEP"
            ) from error
        return checkpoint

    def params(self, abstract: Any) -> Arrays:
        """The weights, each array restored straight into its sharding.

        Args:
            abstract: the state of a program of `config`.

        Raises:
            WorkdirError: the checkpoint is damaged, or is of another model.
            ForeignError, DiskError: as `verified`.
            MemoryLimitError: there is not enough memory for them.
        """
        import jax
        from orbax.checkpoint import v1 as ocp

        from mupax.train.core.costs import fit

        target = getattr(abstract, self.weights)
        fit.check_arrays(
            target, f"the parameters of {self.workdir}", "Take a machine with more memory"
        )
        checkpoint = self.verified()
        patience = disk.Patience()
        stored: Any = patience(lambda: checkpoints_folder.metadata(checkpoint), checkpoint)
        shapes = {name: leaf.shape for name, leaf in stored[self.weights].items()}
        if shapes != {name: leaf.shape for name, leaf in target.items()}:
            raise WorkdirError(
                f"checkpoint {self.step} of {self.workdir} holds another model than {RECORD} says"
            )
        request = {
            part: target if part == self.weights else jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
            for part, tree in stored.items()
        }
        return dict(
            patience(lambda: checkpoints_folder.loaded(checkpoint, request), checkpoint)[
                self.weights
            ]
        )


def find(path: Path, step: Step | None = None, ema: bool | None = None) -> LoadedRun:
    """A step of a run, without its arrays.

    Args:
        path: a run's workdir, or one of its steps (workdir/checkpoints/STEP, workdir/checkpoints/best).
        step: of a workdir, or best; the newest unless given.
        ema: whether the moving average is meant; where there is one, unless given.

    Raises:
        WorkdirError: no run there, no such step, or no average.
        ConfigError, JsonError: a record that is none.
    """
    folder, named = named_step(path)
    if named is None:  # a name alone, typed inside of the folder of checkpoints
        folder, named = named_step(path.absolute())
    if named is not None and step not in (None, named):
        raise WorkdirError(f"{path} is step {named}, and --step says {step}; leave one of them out")
    fields = read_record(folder)
    config = run_config(fields)
    facts = fields.get("data")
    meant = step_of(
        path if named is None else folder,
        step if named is None else named,
        config.checkpoint.best_metric,
    )
    if ema and config.ema.decay is None:
        raise WorkdirError(
            f"the run in {path} kept no moving average (ema.decay is None); leave --ema out"
        )
    averaged = config.ema.decay is not None if ema is None else ema
    config = config if averaged else dataclasses.replace(config, ema=EmaConfig())
    weights = "ema" if averaged else "params"
    return LoadedRun(
        folder.absolute(),
        config,
        facts if isinstance(facts, dict) else {},
        meant,
        weights,
        fields.get("run"),
    )
