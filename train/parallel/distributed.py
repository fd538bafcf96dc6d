"""Brings the processes of a run together: TPU pods, SLURM, MPI, Kubernetes, or by hand. A plain process stays alone.

JAX finds the coordinator where the environment names it; what is decided here is whether there is anything to join.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mupax.errors import MupaxError
from mupax.train.config.run import DistributedConfig
from mupax.train.parallel.processes import Processes

_BY_HAND = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
"""Field of the config to the variable that stands for it."""


class DistributedError(MupaxError):
    """Processes that cannot find each other. The text says what to write instead."""


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[Processes]:
    """Join the other processes for as long as this is entered. Enter it before anything asks JAX for its devices.

    An exception that leaves it is told to the others, which then end too, within seconds, with exit code 1 and its text.

    Raises:
        DistributedError: only a part of what it takes to find the others is given.
    """
    others = place(config)
    if others is None:
        yield Processes()
        return
    import jax

    _connect(others, config)
    from jax._src.distributed import global_state  # the store has no public name

    processes = Processes(jax.process_index(), jax.process_count(), global_state.client, config.heartbeat_seconds)
    try:
        yield processes
    except BaseException as error:
        processes.fail(error)
        raise
    processes.close()
    jax.distributed.shutdown()


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
    if _on_tpu_vm() if tpu is None else tpu:
        return {}
    if "SLURM_STEP_NODELIST" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return {"local_device_ids": _slurm_devices(environ)}
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return {}
    if len(missing) < len(values):
        wanted = " ".join(f"--distributed.{field} ({_BY_HAND[field]})" for field in missing)
        raise DistributedError(f"to join other processes by hand, {wanted} must be given too, or none of them")
    return None


def _slurm_devices(environ: Mapping[str, str]) -> list[int] | None:
    """All GPUs of the node where SLURM starts one task on each; JAX alone would take the first and leave the others idle."""
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    alone = environ.get("SLURM_NTASKS") == environ.get("SLURM_STEP_NUM_NODES")
    return list(range(int(gpus))) if alone and gpus.isdecimal() else None


def _on_tpu_vm() -> bool:
    from jax._src import cloud_tpu_init  # what jax.distributed.initialize itself asks

    return cloud_tpu_init.running_in_cloud_tpu_vm


def _connect(others: dict[str, Any], config: DistributedConfig) -> None:
    import jax

    # It would take SIGTERM away from `train/parallel/signals.py`, which agrees on a step by itself and hears SIGINT too.
    jax.config.update("jax_enable_preemption_service", False)
    late = threading.Timer(config.timeout_seconds, _too_late, (others, config.timeout_seconds))
    late.daemon = True
    late.start()
    try:
        # The service ends a process without a word for a person, on purpose later than `_too_late` and `Processes` do.
        jax.distributed.initialize(
            **others,
            initialization_timeout=config.timeout_seconds + 60,
            heartbeat_timeout_seconds=config.heartbeat_seconds + 60,
        )
    finally:
        late.cancel()


def _too_late(others: dict[str, Any], seconds: int) -> None:
    who, where = "this process", ""
    if others.get("coordinator_address"):
        who = f"process {others['process_id']} of {others['num_processes']}"
        where = f" at {others['coordinator_address']}"
    print(
        f"error: {who} waited {seconds} s for process 0{where} and the others; start all of them at about the same time, "
        "check that every one reaches that host and port, or give --distributed.timeout-seconds more",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)  # the main thread waits inside the library, which listens to nothing
