"""Where a run's metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax.errors import MupaxError


class TensorBoard:
    """Events of TensorBoard.

    Args:
        logdir: their folder.
        resume_step: what an earlier session logged after this step is hidden; None begins anew.
    """

    def __init__(self, logdir: Path, resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(logdir), flush_secs=1, purge_step=purge_step)
        self.flush, self.close = self._writer.flush, self._writer.close

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        for tag, value in _scalars(row).items():
            self._writer.add_scalar(tag, value, row["step"], walltime)


class Wandb:
    """A run of Weights & Biases: that of an earlier session, unless new."""

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MupaxError(
                f"log.wandb is given, but wandb cannot be imported ({error}); "
                "run `pip install 'mupax[wandb]'`, or leave --log.wandb out"
            ) from error

        id_file = workdir / "wandb_id"
        run_id = None if new or not id_file.exists() else id_file.read_text(encoding="utf-8").strip()
        try:
            self._run = wandb.init(project=project, dir=str(workdir), name=workdir.name, id=run_id, resume="allow")
        except wandb.errors.Error as error:
            raise MupaxError(
                f"wandb did not start ({error}); run `wandb login`, set WANDB_MODE=offline, or leave --log.wandb out"
            ) from error
        # Our own step axis: wandb's would refuse the steps between the checkpoint and the end of the stopped session.
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(self._run.id, encoding="utf-8")

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        self._run.log({"step": row["step"], **_scalars(row)})

    def flush(self) -> None:
        pass  # what is lost is sent again from where the run goes on

    def close(self) -> None:
        self._run.finish()


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, by their tag."""
    scalars = {}
    for key, value in row.items():
        if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
            group, _, name = key.partition("_")
            scalars[f"{group}/{name}" if group in ("eval", "perf") else f"train/{key}"] = value
    return scalars
