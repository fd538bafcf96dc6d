#!/usr/bin/env python
"""Train on a Ray cluster: one process per worker of a JaxTrainer, which drives all its devices.

    python scripts/launch/ray_train.py --workers 4 --gpus 8 [--failures 5]
        -- RECIPE [--FLAG VALUE ...]
    python scripts/launch/ray_train.py --workers 4 --tpu TPU-V6E --topology 4x4 --chips 4
        -- RECIPE ...

Needs `pip install "ray[train]"`, the package on all nodes, and a --workdir that all nodes see. If a
worker or its node is lost, Ray starts all workers again. They continue from the newest checkpoint
(--resume is added).
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from typing import Any

from ray import train, util  # pyright: ignore[reportMissingImports]
from ray.train import TrainingFailedError  # pyright: ignore[reportMissingImports]
from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]
from ray.train.v2.jax import JaxConfig, JaxTrainer  # pyright: ignore[reportMissingImports]

_TRAIN = ("-u", "-m", "mupax.train")
"""Words of Python that start a run."""


def worker(settings: dict[str, Any]) -> None:
    """Run one process of the run to its end. Ray calls this on every worker.

    Args:
        settings: Mapping with `words`, the recipe and its flags.

    Raises:
        RuntimeError: The process ended with another exit code than 0. Ray then starts all processes
            again.
    """
    context = train.get_context()
    address = None
    if context.get_world_rank() == 0:
        # Port 0: the system chooses a free port.
        with socket.socket() as unused:
            unused.bind(("", 0))
            address = f"{util.get_node_ip_address()}:{unused.getsockname()[1]}"
    distributed = {
        "coordinator": broadcast_from_rank_zero(address),
        "processes": context.get_world_size(),
        "process": context.get_world_rank(),
    }
    flags = []
    for name, value in distributed.items():
        flags += [f"--distributed.{name}", str(value)]

    # In a process of its own, because a run needs the main thread for signals and joins the other
    # processes by itself.
    with subprocess.Popen([sys.executable, *_TRAIN, *settings["words"], *flags]) as run:
        try:
            code = run.wait()
        finally:
            run.terminate()
    if code:
        raise RuntimeError(
            f"process {distributed['process']} ended with exit code {code}; its output is above"
        )


def main(argv: list[str]) -> int:
    """Train and return the exit code: 0 done, 1 failed as often as allowed, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, required=True, help="processes, one for each node or TPU host"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker (default 0)")
    parser.add_argument("--tpu", help="accelerator type, such as TPU-V6E")
    parser.add_argument("--topology", help="topology of the TPU slice, such as 4x4")
    parser.add_argument("--chips", type=int, default=4, help="TPU chips of each worker (default 4)")
    parser.add_argument(
        "--failures", type=int, default=5, help="restarts after a failure (default 5)"
    )
    parser.add_argument("words", nargs="+", metavar="RECIPE", help="recipe and its flags, after --")
    args = parser.parse_args(argv)

    scaling: dict[str, Any] = {"num_workers": args.workers, "resources_per_worker": {"CPU": 1}}
    if args.gpus:
        scaling |= {"use_gpu": True, "resources_per_worker": {"GPU": args.gpus}}
    if args.tpu:
        tpu = {"use_tpu": True, "topology": args.topology, "accelerator_type": args.tpu}
        scaling |= {**tpu, "resources_per_worker": {"TPU": args.chips}}

    # A wrong flag ends the command here, before Ray starts anything.
    print_config = [sys.executable, *_TRAIN, *args.words, "--print-config"]
    checked = subprocess.run(print_config, stdout=subprocess.DEVNULL)
    if checked.returncode:
        return checked.returncode

    words = args.words if "--resume" in args.words else [*args.words, "--resume"]
    trainer = JaxTrainer(
        worker,
        train_loop_config={"words": words},
        # Ray reserves the devices; it must not take them into a process of its own.
        jax_config=JaxConfig(use_tpu=False, use_gpu=False),
        scaling_config=train.ScalingConfig(**scaling),
        run_config=train.RunConfig(failure_config=train.FailureConfig(max_failures=args.failures)),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
