"""What several processes of a run must hold alike, compared before the first step and at every save."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from typing import Any

import jax

from mupax.errors import MupaxFailure
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.core.state import StepInputs, TrainState
from mupax.train.data import Data, DataError, reading
from mupax.train.parallel import replicas
from mupax.train.parallel.agreement import AgreementError
from mupax.train.parallel.processes import Processes

_ROWS = 8
"""Rows of the first batch that every process reads to compare them."""


class DriftError(MupaxFailure):
    """Processes whose copies of one array have come apart. The text names the array and the process."""


class CopyCheck:
    """Comparisons between the processes of a run. Every method is called by all of them alike.

    Args:
        processes: of the run, at least two.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._comparisons = 0

    def check_start(self, state: TrainState, data: Data, step: int) -> None:
        """Refuse to train where processes start from another state, or with another batch, than process 0.

        Args:
            state: that the run starts from.

        Raises:
            AgreementError: what differs on which process.
            DataError, ReadError: the first batch differs, or cannot be read.
        """
        self._check_equal({"state": state})
        passed_over = int(jax.device_get(state.health.left_out))
        with reading():
            self._check_batch(data, step + passed_over)

    def check_inputs(self, inputs: StepInputs) -> None:
        """Refuse to train where processes give the step other inputs besides the state, such as learning rates or seeds.

        Raises:
            AgreementError: what differs on which process.
        """
        self._check_equal({"inputs": inputs})

    def _check_equal(self, arrays: dict[str, Any]) -> None:
        if difference := self._first_difference(arrays):
            raise AgreementError(
                f"before the first step {difference}; start all processes with the same files, environment and hardware"
            )

    def check_save(self, state: TrainState, step: int, checkpoints: Checkpoints) -> None:
        """Refuse to save a state of which processes hold different copies.

        Args:
            state: whose arrays lie on the devices.
            checkpoints: of the run; the newest stays the last one.

        Raises:
            DriftError: a process has other bits.
        """
        if difference := self._first_difference(state):
            newest = checkpoints.latest_of_all()
            saved = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is {newest}"
            raise DriftError(
                f"after step {step} {difference}, so that step {step} is not saved and {saved}. Look for a host with other "
                "hardware or a faulty one, and go on with --resume without it"
            )

    def _first_difference(self, tree: Any) -> str:
        """Return which array differs on which process, in words; "" if all copies are equal."""
        arrays = replicas.by_name(tree)
        mine = {"host": socket.gethostname(), "sums": replicas.checksums(list(arrays.values()))}
        return self._compared(mine, lambda parts: replicas.difference(arrays, parts))

    def _check_batch(self, data: Data, k: int) -> None:
        """Compare the first batch. Of text that is tokenized while it is trained on a process reads its own rows alone."""
        if data.train_size is None:
            return

        def differing(parts: list[dict[str, str]]) -> str:
            for index, part in enumerate(parts):
                if part["digest"] != parts[0]["digest"]:
                    first = f"process 0 ({parts[0]['host']})"
                    return f"process {index} ({part['host']}) takes other examples for batch {k} than {first}"
            return ""

        mine = {"host": socket.gethostname(), "digest": _batch_digest(data, k)}
        if problem := self._compared(mine, differing):
            raise DataError(
                f"{problem}; install the same versions on all hosts, and copy the prepared data of one of them to all"
            )

    def _compared(self, mine: dict[str, Any], compare: Callable[[list[dict[str, Any]]], str]) -> str:
        """Return what process 0 finds in the parts of all processes."""
        self._comparisons += 1
        name = f"copies/{self._comparisons}"
        parts = self._processes.gather(name, mine)
        return self._processes.broadcast(name, lambda: compare(parts or []))


def _batch_digest(data: Data, k: int) -> str:
    """Return a digest of the first rows of a training batch, as they come out of order and augmentation."""
    rows = data.train_batch(k, slice(0, min(_ROWS, data.batch_size)))
    digest = hashlib.sha256()
    for name, values in sorted(rows.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:16]
