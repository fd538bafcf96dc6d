#!/usr/bin/env python
"""Train on a Ray cluster: one process per worker of a JaxTrainer, which drives all devices of its worker.

    python scripts/launch/ray_train.py --workers 4 --gpus 8 [--failures 5] -- RECIPE [--FLAG VALUE ...]
    python scripts/launch/ray_train.py --workers 4 --tpu TPU-V6E --topology 4x4 --chips 4 -- RECIPE ...

Needs `pip install "ray[train]"`; the package is installed on all nodes, which see --workdir. Where a worker or its node is lost Ray
starts all of them again, and they go on from the newest checkpoint (--resume is added).
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


def worker(settings: dict[str, Any]) -> None:
    """Run one process of the run to its end.

    Args:
        settings: `words` of the command line.

    Raises:
        RuntimeError: it ended with another exit code than 0; Ray then starts all processes again.
    """
    context = train.get_context()
    address = None
    if context.get_world_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = f"{util.get_node_ip_address()}:{free.getsockname()[1]}"
    place = {
        "coordinator": broadcast_from_rank_zero(address),
        "processes": context.get_world_size(),
        "process": context.get_world_rank(),
    }
    flags = [
        word for name, value in place.items() for word in (f"--distributed.{name}", str(value))
    ]
    # Not in this process: the run wants the main thread, for signals, and to join the others by itself.
    with subprocess.Popen([sys.executable, *_TRAIN, *settings["words"], *flags]) as run:
        try:
            code = run.wait()
        finally:
            run.terminate()
    if code:
        raise RuntimeError(
            f"process {place['process']} ended with exit code {code}; what it said stands above"
        )


def main(argv: list[str]) -> int:
    """The exit code: 0 done, 1 failed as often as allowed, 2 bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, required=True, help="processes, one for each node or TPU host"
    )
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--tpu", help="accelerator type, such as TPU-V6E")
    parser.add_argument("--topology", help="of the TPU slice, such as 4x4")
    parser.add_argument("--chips", type=int, default=4, help="TPU chips of each worker (default 4)")
    parser.add_argument(
        "--failures", type=int, default=5, help="starts after the first (default 5)"
    )
    parser.add_argument("words", nargs="+", metavar="RECIPE", help="and its flags, after --")
    args = parser.parse_args(argv)
    scaling: dict[str, Any] = {"num_workers": args.workers, "resources_per_worker": {"CPU": 1}}
    if args.gpus:
        scaling |= {"use_gpu": True, "resources_per_worker": {"GPU": args.gpus}}
    if args.tpu:
        tpu = {"use_tpu": True, "topology": args.topology, "accelerator_type": args.tpu}
        scaling |= {**tpu, "resources_per_worker": {"TPU": args.chips}}
    # What no start would change is said here, at once.
    if code := subprocess.run(
        [sys.executable, *_TRAIN, *args.words, "--print-config"], stdout=subprocess.DEVNULL
    ).returncode:
        return code
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
