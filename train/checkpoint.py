"""Checkpoints through orbax: asynchronous, the newest `keep` kept, restored into the shardings of this run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any

from orbax.checkpoint import v1 as ocp

from train.state import TrainState
from train.workdir import CHECKPOINTS, WorkdirError


class Checkpoints:
    """The checkpoints of one run, as a context manager that ends with every save on disk.

    Args:
        workdir: folder of the run.
        keep: how many of the newest to keep.
    """

    def __init__(self, workdir: Path, keep: int) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax narrates every save
        policy = ocp.training.preservation_policies.LatestN(keep)
        self.folder = workdir / CHECKPOINTS
        options: dict[str, Any] = {"preservation_policy": policy, "cleanup_tmp_directories": True}
        self._orbax = ocp.training.Checkpointer(str(self.folder), **options)
        self._saved: int | None = None

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Start saving; the arrays are copied before this returns, so that the next step may reuse their memory.

        Args:
            step: optimizer steps done; also the data position.
            state: what to save.
            facts: the data's facts, which `restore` compares.
        """
        if step != self._saved and step != self.latest:
            self._orbax.save_async(step, state.arrays(), force=True, custom_metadata={"data": facts})
            self._saved = step

    def restore(self, abstract: TrainState, facts: dict[str, Any]) -> TrainState:
        """The newest state, each array restored straight into its sharding.

        Raises:
            WorkdirError: the checkpoint was trained on other data.
        """
        metadata: Any = self._orbax.metadata().custom_metadata or {}
        before = metadata.get("data", {})
        if before.get("digest") != facts.get("digest"):
            raise WorkdirError(
                f"the run was trained on {before.get('name')} with digest {before.get('digest')}, this machine has "
                f"{facts.get('name')} with digest {facts.get('digest')}; restore that data, or start again with another --workdir"
            )
        return TrainState(**self._orbax.load(abstract_state=abstract.arrays()))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A failure of the run is the news, not one of the save it interrupted.
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self._orbax.close()
