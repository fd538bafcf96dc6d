"""Compare one device with eight simulated ones on the same cores.

    python -m scripts.bench.step.devices [--rounds 10] [--json FILE.json]

The losses must agree. Eight simulated devices share this machine's cores, so a split step can at
best take the time of the unsplit one. The ratio is the cost of splitting, not a speed-up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scripts.bench import in_turns

DEVICES = 8
FLAG = "--xla_force_host_platform_device_count"
MESHES: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 4, "tensor": 2},
}
"""Meshes that are compared with one device. The batch is 8 sequences."""


def measure(rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Return losses, times and ratios of the decoder's step, after a check that losses agree."""
    import jax
    import numpy as np

    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble
    from mupax.zoo.configs import ComputeConfig
    from scripts.bench.pytorch.step import batches_of, jax_step, lm

    config = lm(ComputeConfig(), tiny=tiny)
    if tiny:
        config = replace(config, model=replace(config.model, num_heads=2))

    program = assemble(config, jax.devices()[:1])
    batches = batches_of(program, 2)
    steps = {"one": jax_step(program, batches)}
    for name, sizes in MESHES.items():
        program = assemble(replace(config, mesh=MeshConfig(**sizes)), jax.devices()[:DEVICES])
        steps[name] = jax_step(program, batches)

    losses = {}
    for name, step in steps.items():
        losses[name] = [step() for _ in range(3)]
    for name, curve in losses.items():
        # Sums over devices have another order.
        np.testing.assert_allclose(curve, losses["one"], rtol=1e-4, err_msg=name)
    return {"losses": losses["one"], **in_turns.compared(in_turns.in_turns(steps, rounds), "one")}


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every mesh, report the result and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:
        # JAX reads the flags once, when it starts.
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}={DEVICES}".strip()
    result = measure(args.rounds, tiny=args.tiny)
    ratios = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in result["ratio"].items())
    print(f"one device takes {ratios}")
    in_turns.report("devices", [result], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
