"""The processes of one run, as one of them sees them; and whether this process has others to join.

JAX finds the coordinator where the environment names it; what is decided here is whether there is anything to join: TPU pods,
SLURM, MPI, Kubernetes, or by hand. A plain process stays alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mupax.errors import MupaxError
from mupax.train.config.run import DistributedConfig

_BY_HAND = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
"""Field of the config to the variable that stands for it."""
_OPEN_MPI_5 = re.compile(r"prterun-(.+)-(\d+)@\d+$")
"""What Open MPI 5 calls a job: the host of mpirun, and its process."""
_FIRST_PORT = 61440
"""Ports from here on are those that JAX takes for jobs of SLURM and Open MPI 4."""
LEAD_S = 5.0
"""Seconds that process 0 has to say alone what is wrong with a run's data."""


class DistributedError(MupaxError):
    """Processes that cannot find each other. The text says what to write instead."""


class Processes:
    """A process alone, which waits for nobody and talks to nobody. Several are a `distributed.Cluster`."""

    index = 0
    """Number of this process."""
    count = 1
    """How many there are."""

    @property
    def closed(self) -> bool:
        """Whether there is nobody to talk to any more."""
        return True

    @property
    def name(self) -> str:
        """Its number and host, for messages; nothing where there is only one."""
        return f"process {self.index} ({socket.gethostname()}): " if self.count > 1 else ""

    @property
    def leader(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.index == 0

    def broadcast(self, name: str, value: Callable[[], Any], seconds: float | None = None) -> Any:
        """What `value` returns on process 0, on every process; the others wait for it.

        Args:
            name: used once in a run.
            value: called by process 0 alone; its result must survive JSON.
            seconds: how long to wait for it; a week unless given, since a process that fails ends all.

        Raises:
            DistributedError: that was too long.
        """
        return value()

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any] | None:
        """On process 0, the values of all processes, in their order; None on the others, which do not wait.

        Args:
            name: used once in a run.
            value: of this process; it must survive JSON.
            seconds: how long to wait for each of the others; as in `broadcast`.

        Raises:
            DistributedError: that was too long.
        """
        return [value]

    def barrier(self, name: str) -> None:
        """Wait until every process is here."""

    @contextlib.contextmanager
    def leader_first(self, name: str) -> Iterator[None]:
        """Process 0 does what is inside; then the others do, or after `LEAD_S` to help it, and find what it has left for them."""
        if not self.leader:
            with contextlib.suppress(DistributedError):
                self.broadcast(name, lambda: None, LEAD_S)
        yield
        if self.leader:
            self.broadcast(name, lambda: None)

    def post(self, key: str, value: str) -> None:
        """Leave a value for all processes; the first one under a key stays.

        Args:
            key: folders and a name, joined by `/`, so that `posts` of the folder has it.
            value: what others read.
        """

    def posts(self, folder: str) -> dict[str, str]:
        """The values under a key, by what follows it."""
        return {}

    def post_failure(self, reason: str) -> None:
        """Tell the others that this process ends, and why; they then end too, with exit code 1."""

    def end_stalled(self, beyond: Callable[[], float], seconds: float | None) -> None:
        """From now on end all processes once every one of them waits for another and none goes on.

        Args:
            beyond: returns for how many seconds this process has waited for a program on all devices, beyond the longest such wait.
            seconds: most seconds beyond; None never ends them.
        """

    def end_all(self, reason: str) -> None:
        """End every process within seconds, this one too, with exit code 1 and the reason on its screen."""


def place(
    config: DistributedConfig, environ: Mapping[str, str] = os.environ, tpu: bool | None = None
) -> dict[str, Any] | None:
    """What to tell `jax.distributed.initialize`, or None where this process is alone.

    Args:
        config: of the run; what it leaves out is looked for in the environment.
        environ: variables of this process.
        tpu: whether this is a host of Cloud TPUs, which knows its pod; found out unless given.

    Raises:
        DistributedError: only a part of coordinator, number of processes and number of this one is given.
    """
    values: dict[str, Any] = {}
    for field, variable in _BY_HAND.items():
        value = environ.get(variable) if getattr(config, field) is None else getattr(config, field)
        if field != "coordinator" and value is not None:
            if not str(value).isdecimal():
                raise DistributedError(f"{variable} is {value!r}; write a whole number")
            value = int(value)
        values[field] = value
    if values["processes"] == 1:
        return None
    missing = [field for field, value in values.items() if value is None]
    if not missing:
        coordinator, processes, process = values.values()
        host, _, port = coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            raise DistributedError(f"distributed.coordinator is {coordinator!r}; write HOST:PORT of process 0")
        if not 0 <= process < processes:
            raise DistributedError(
                f"distributed.process is {process} of {processes}; write a number from 0 to {processes - 1}"
            )
        return {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
    if tpu is None:
        from jax._src import cloud_tpu_init  # what jax.distributed.initialize itself asks

        tpu = cloud_tpu_init.running_in_cloud_tpu_vm
    if tpu:
        return {}
    if "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        # All GPUs of the node where SLURM starts one task on each; JAX alone would take the first and leave the others idle.
        gpus = environ.get("SLURM_GPUS_ON_NODE", "")
        alone = environ.get("SLURM_NTASKS") == environ.get("SLURM_STEP_NUM_NODES")
        return {"local_device_ids": list(range(int(gpus))) if alone and gpus.isdecimal() else None}
    if (count := int(environ.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        launcher = _OPEN_MPI_5.match(environ.get("PMIX_NAMESPACE", ""))
        if "OMPI_MCA_orte_hnp_uri" in environ or launcher is None:
            return {}
        # JAX knows Open MPI 4 alone; as there, the coordinator is on the host where mpirun was called.
        address = values["coordinator"] or f"{launcher[1]}:{_FIRST_PORT + int(launcher[2]) % (2**16 - _FIRST_PORT)}"
        return {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": int(environ["OMPI_COMM_WORLD_RANK"]),
            "local_device_ids": [int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])],
        }
    if len(missing) < len(values):
        flags = " ".join(f"--distributed.{field} ({_BY_HAND[field]})" for field in missing)
        raise DistributedError(f"to join other processes by hand, {flags} must be given too, or none of them")
    return None
