"""One device against eight simulated ones on the same cores: the same losses, and what splitting itself costs.

    python -m scripts.bench.step.devices [--rounds 10] [--json FILE.json]

Eight simulated devices share this machine's cores, so a split step can at best take the time of the whole one: the ratio is
the cost of splitting, not a speed-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

DEVICES = 8
FLAG = "--xla_force_host_platform_device_count"
MESHES: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 4, "tensor": 2},
}
"""Besides one device; the batch is 8 sequences."""


def measure(rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Losses, times and ratios of the decoder's step."""
    import jax
    import numpy as np

    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble
    from mupax.zoo.configs import ComputeConfig
    from scripts.bench.in_turns import compared, in_turns
    from scripts.bench.pytorch.step import batches_of, jax_step, lm

    config = lm(ComputeConfig(), tiny=tiny)
    if tiny:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_heads=2))
    steps = {"one": jax_step(one := assemble(config, jax.devices()[:1]), batches := batches_of(one, 2))}
    for name, sizes in MESHES.items():
        program = assemble(dataclasses.replace(config, mesh=MeshConfig(**sizes)), jax.devices()[:DEVICES])
        steps[name] = jax_step(program, batches)
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for name, curve in losses.items():
        np.testing.assert_allclose(curve, losses["one"], rtol=1e-4, err_msg=name)
    return {"losses": losses["one"], **compared(in_turns(steps, rounds), "one")}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    from scripts.bench.in_turns import add_arguments, machine, one_core, write

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, 10)
    args = parser.parse_args(argv)
    if args.one_core:
        one_core()
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:  # read once, when JAX starts
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}={DEVICES}".strip()
    result = measure(args.rounds, tiny=args.tiny)
    print(f"one device takes {', '.join(f'{r:.3f} of {name}' for name, r in result['ratio'].items())}")
    write({"benchmark": "devices", **machine(), "results": [result]}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
