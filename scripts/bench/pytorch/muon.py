"""Compare Muon's update of a model with the same update by PyTorch.

    python -m scripts.bench.pytorch.muon [--rounds 10] [--one-core] [--json FILE.json]

Both sides update ViT-S/16 (22 million parameters): Muon with five iterations in float32 on the
matrices of blocks, Adam on all other parameters. PyTorch's Muon has its own iteration, without its
cast to bfloat16, which CPUs compute slowly.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np

from mupax.train.core.muon import newton_schulz
from mupax.train.core.program import Program, assemble
from mupax.zoo.configs import ComputeConfig
from scripts.bench import in_turns
from scripts.bench.pytorch.parts import Step, our_update, torch_model
from scripts.bench.pytorch.step import vit


def torch_update(program: Program) -> Step:
    """Return a function that updates all parameters by PyTorch: Muon on blocks, AdamW elsewhere."""
    import torch

    opt = program.config.optimizer
    matrices = []
    adam_params = []
    for name, parameter in torch_model(program).named_parameters():
        random = np.random.default_rng(2).standard_normal(tuple(parameter.shape), np.float32)
        parameter.grad = torch.tensor(random)
        if name.startswith("blocks.") and parameter.ndim == 2:
            matrices.append(parameter)
        else:
            adam_params.append(parameter)
    muon = torch.optim.Muon(matrices, lr=opt.peak_lr, weight_decay=opt.weight_decay)
    adam = torch.optim.AdamW(adam_params, lr=opt.peak_lr, weight_decay=opt.weight_decay, fused=True)

    def step() -> None:
        # The iteration begins with a cast, in place of which it gets a copy in float32.
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            muon.step()
        adam.step()

    return step


def difference() -> float:
    """Return the largest difference of Newton-Schulz on one matrix, mupax's against PyTorch's."""
    import torch

    matrix = np.random.default_rng(3).standard_normal((384, 1536), np.float32)
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        theirs = torch.optim._muon._zeropower_via_newtonschulz(
            torch.tensor(matrix), (3.4445, -4.7750, 2.0315), 5, 1e-7
        )
    ours = jax.jit(lambda x: newton_schulz(x, use_gram=True))(matrix)
    return float(np.abs(np.asarray(ours) - theirs.numpy()).max())


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report the result and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = vit(ComputeConfig(), tiny=args.tiny)
    config = replace(config, optimizer=replace(config.optimizer, name="muon"))
    program = assemble(config, jax.devices()[:1])
    steps: dict[str, Any] = {"mupax": our_update(program), "torch": torch_update(program)}
    row = {
        "model": "vit: Muon",
        "params": program.definition.count(),
        "largest_difference": difference(),
        **in_turns.compared(in_turns.in_turns(steps, args.rounds), "mupax"),
    }
    in_turns.report("torch_muon", [row], args.json, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    in_turns.keep_freed_memory()
    sys.exit(main())
