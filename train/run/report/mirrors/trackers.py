"""Experiment trackers that a run's rows go to: Weights & Biases and trackio, each an extra."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax.errors import MupaxError
from mupax.train.config.sections import LogConfig
from mupax.train.run.report.mirrors.tags import scalars


def check(log: LogConfig) -> None:
    """Refuse a tracker whose package is not here, before a run prepares or compiles anything.

    Args:
        log: of the run.

    Raises:
        MupaxError: it is not installed.
    """
    for name in log.trackers:
        if not _installed(name):
            raise _missing(name, "it is not installed")


def _installed(name: str) -> bool:
    return sys.modules[name] is not None if name in sys.modules else importlib.util.find_spec(name) is not None


def _missing(name: str, reason: object) -> MupaxError:
    return MupaxError(
        f"log.{name} is given, but {name} cannot be imported ({reason}); run `pip install 'mupax[{name}]'`, or leave --log.{name} out"
    )


class Wandb:
    """A run of Weights & Biases: that of an earlier session, unless new."""

    name = "Weights & Biases"

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("wandb", error) from error

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
        """Log the numbers of a row.

        Args:
            row: with its `step`.
            walltime: not used; wandb has its own.
        """
        self._run.log({"step": row["step"], **scalars(row)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, on this machine or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says: that of an earlier session, unless new.

    trackio knows runs by name, so each has one of its own, which the file trackio_name in the workdir keeps.
    """

    name = "trackio"

    def __init__(self, project: str, workdir: Path, *, new: bool) -> None:
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("trackio", error) from error

        file = workdir / "trackio_name"
        resumed = not new and file.exists()
        name = file.read_text(encoding="utf-8").strip() if resumed else f"{workdir.name}-{secrets.token_hex(3)}"
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._run = trackio.init(project, name=name, resume="allow" if resumed else "never", embed=False)
        except Exception as error:  # of its hub, its server or its files, which have no kind in common
            raise MupaxError(
                f"trackio did not start ({error}); mend that, run `hf auth login` where it logs to a Space, or leave --log.trackio out"
            ) from error
        file.write_text(name, encoding="utf-8")

    def write(self, row: Mapping[str, Any], walltime: float) -> None:
        """Log the numbers of a row.

        Args:
            row: with its `step`.
            walltime: not used; trackio has its own.
        """
        if numbers := scalars(row):
            self._run.log(numbers, step=row["step"])

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
