"""Checkpoint of a run opened for use: its config, and its parameters or their average on a mesh.

Used by the commands that read a run: `mupax eval`, `generate`, `predict`, `export` and others.
"""

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
from mupax.train.config.sections import METRIC, Step

if TYPE_CHECKING:
    from mupax.zoo.definition import Arrays


class LoadedRun(NamedTuple):
    """One checkpoint of a run, opened for use. Only the method `params` loads arrays.

    `weights` is "ema" if `params` loads the moving average, and "params" for the plain parameters.
    """

    workdir: Path
    config: Config
    """Recorded config of the run. If `weights` is "params", its `ema` is reset to no average."""
    facts: dict[str, Any]
    """Facts of the training data in config.json, such as `name` and `digest`. May be empty."""
    step: int
    weights: Literal["params", "ema"]
    run: str | None
    """Name of the run, or `None` for a run of an older version."""

    def assets(self) -> Assets | None:
        """Return the assets of the checkpoint: tokenizer, chat template, class names.

        Their files are not read yet. `None` if there are none, as in a run of an older version.
        """
        return assets.find(self.workdir, self.step)

    def verified(self) -> Path:
        """Compare all files of the step with their digests. Return the folder of the checkpoint.

        Raises:
            WorkdirError: A file is not as it was written.
            ForeignError: The checkpoint is of another run or of a newer version.
            DiskError: The disk cannot be read.
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
        """Load the parameters, or their moving average if `weights` is "ema", by name.

        The files are verified first. Each array is loaded straight into its sharding.

        Args:
            abstract: State of a program of `config` without values: shapes, dtypes and shardings.

        Raises:
            WorkdirError: The checkpoint is damaged, or is of another model.
            ForeignError: The checkpoint is of another run or of a newer version.
            DiskError: The disk cannot be read.
            MemoryLimitError: The arrays do not fit into memory.
        """
        import jax
        from orbax.checkpoint import v1 as ocp

        from mupax.train.core.costs import fit

        # Before anything is read: a clear error in place of a process that the system kills.
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
        # Orbax loads nothing for a placeholder: optimizer state stays on the disk.
        request: dict[str, Any] = {}
        for part, tree in stored.items():
            if part == self.weights:
                request[part] = target
            else:
                request[part] = jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
        loaded = patience(lambda: checkpoints_folder.loaded(checkpoint, request), checkpoint)
        return dict(loaded[self.weights])


def best_metric(config: Any) -> str:
    """Return checkpoint.best_metric of a recorded config, which may be of another version.

    The default metric stands in for a config that does not have the field.
    """
    section = config.get("checkpoint") if isinstance(config, dict) else None
    metric = section.get("best_metric") if isinstance(section, dict) else None
    return metric if isinstance(metric, str) else METRIC


def find(
    path: Path,
    step: Step | None = None,
    ema: bool | None = None,
    *,
    needs_metrics: bool = False,
) -> LoadedRun:
    """Find a step of a run, and read its config. No array is read.

    Args:
        path: Workdir of a run, or one of its steps: `WORKDIR/checkpoints/STEP` or
            `WORKDIR/checkpoints/best`.
        step: Step of a workdir, or "best"; by default the newest.
        ema: True for the moving average of the parameters, False for the parameters themselves. By
            default the average, if the run keeps one.
        needs_metrics: Whether to refuse a run whose own metric is of a module that is gone. By
            default a caution is printed (`run_config`).

    Raises:
        WorkdirError: The folder holds no run, the run has no such step or no average, or `path` and
            `step` name different steps.
        HalfMadeError: The command that makes the run has not finished it.
        ConfigError, JsonError: The record of the run is damaged.
    """
    workdir, named = named_step(path)
    if named is None:  # such as the path 500, given inside of the folder of checkpoints
        workdir, named = named_step(path.absolute())
    if named is not None and step not in (None, named):
        raise WorkdirError(f"{path} is step {named}, and --step says {step}; leave one of them out")

    fields = read_record(workdir)
    config = run_config(fields, needs_metrics=needs_metrics)
    facts = fields.get("data")
    # The recorded one, because the config does not name a metric whose module is gone.
    metric = best_metric(fields.get("config"))
    if named is None:
        chosen = step_of(path, step, metric)
    else:
        chosen = step_of(workdir, named, metric)

    has_average = config.ema.decay is not None
    if ema and not has_average:
        raise WorkdirError(
            f"the run in {path} kept no moving average (ema.decay is None); leave --ema out"
        )
    reads_average = has_average if ema is None else ema
    if not reads_average:
        config = dataclasses.replace(config, ema=EmaConfig())
    return LoadedRun(
        workdir=workdir.absolute(),
        config=config,
        facts=facts if isinstance(facts, dict) else {},
        step=chosen,
        weights="ema" if reads_average else "params",
        run=fields.get("run"),
    )
