"""A training step against the same model in PyTorch, eager and `torch.compile`: same weights, shapes, loss and optimizer.

    python -m scripts.bench.pytorch.step [--model lm|vit] [--rounds 20] [--json FILE.json]

All run in one process, in turns, with as many threads. Before anything is timed the losses of both must agree over
several steps. Needs PyTorch (`pip install -e ".[torch]"`, Python 3.11) and a C++ compiler.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig, DecoderConfig, ModelConfig
from scripts import harness
from scripts.bench import in_turns

LOSS_TOLERANCE = 1e-4
"""Relative difference of losses over the first steps, float32 and other orders of summation."""


def config_of(model: ModelConfig, batch_size: int) -> Config:
    """A run of this model under the standard parameterization: every factor but the patches' is 1."""
    data = DataConfig(
        name="python_corpus" if isinstance(model, DecoderConfig) else "digits",
        batch_size=batch_size,
    )
    return Config(
        recipe="torch-step", model=model, data=data, mesh=MeshConfig(data=1), preset=PresetConfig(name="sp"), steps=1000,
        optimizer=OptimizerConfig(peak_lr=1e-3, weight_decay=0.01, schedule="constant"),
    )  # fmt: skip


def lm(compute: ComputeConfig, *, tiny: bool = False) -> Config:
    """Width 256, depth 4, 8 sequences of 256 bytes."""
    model = configs.get("lm-tiny")
    assert isinstance(model, DecoderConfig)
    width, length = (32, 16) if tiny else (256, 256)
    depth = 2 if tiny else 4
    return config_of(
        replace(
            model, width=width, depth=depth, num_heads=width // 32, seq_len=length, compute=compute
        ),
        8,
    )


def vit(compute: ComputeConfig, *, tiny: bool = False) -> Config:
    """ViT-S/16 on 16 images of 64x64."""
    changes: dict[str, Any] = (
        {"depth": 2, "width": 48, "num_heads": 3, "num_classes": 10} if tiny else {}
    )
    model = replace(configs.get("vit-s16"), image_size=64, compute=compute, **changes)  # pyright: ignore
    return config_of(model, 16)


MODELS: dict[str, Callable[..., Config]] = {"lm": lm, "vit": vit}


def batches_of(program: Program, count: int) -> list[dict[str, np.ndarray]]:
    """Random batches of the model's task."""
    random, model, size = (
        np.random.default_rng(0),
        program.config.model,
        program.config.data.batch_size,
    )
    batches = []
    for _ in range(count):
        outputs, example = model.sizes()[model.output_axis], model.example()["inputs"].shape
        if model.task == "tokens":
            tokens = random.integers(0, outputs, (size, example[0] + 1), np.int32)
            batch = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        else:
            batch = {"inputs": random.standard_normal((size, *example), np.float32)}
            batch["targets"] = random.integers(0, outputs, size, np.int32)
        batches.append({**batch, "weights": np.ones(batch["targets"].shape, np.float32)})
    return batches


def jax_step(program: Program, batches: Sequence[dict[str, np.ndarray]]) -> Callable[[], float]:
    """One step of the run on the next batch; returns its loss."""
    compiled, state, run = program.compile_train(), program.initial_state(), program.step_inputs()
    device, index = [jax.device_put(batch) for batch in batches], 0

    def step() -> float:
        nonlocal state, index
        state, metrics = compiled(state, run, device[index % len(device)])
        index += 1
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return step


def torch_step(
    program: Program, batches: Sequence[dict[str, np.ndarray]], *, compiled: bool
) -> Callable[[], float]:
    """Return a training step in PyTorch that starts from the weights of `program`."""
    import torch
    import torch.nn.functional as F

    from scripts.bench.pytorch import models as torch_models

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, opt = torch_models.Transformer(program.config.model), program.config.optimizer
    torch_models.load(model, jax.device_get(program.initial_state().params))
    multipliers = program.inputs.factors.multiplier
    model.patch_scale = float(multipliers.get("patch", 1.0))
    assert all((value == 1).all() for name, value in multipliers.items() if name != "patch")
    optimizer = torch_models.adamw(model, opt.peak_lr, opt.weight_decay, opt.b1, opt.b2, opt.eps)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    loss_fn: Any = torch.compile(loss_of) if compiled else loss_of
    inputs = [torch.tensor(b["inputs"]) for b in batches]
    targets = [torch.tensor(b["targets"], dtype=torch.long) for b in batches]
    index = 0

    def step() -> float:
        nonlocal index
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(inputs[index % len(inputs)], targets[index % len(inputs)])
        loss.backward()
        optimizer.step()
        index += 1
        return float(loss.detach())

    return step


def check(steps: dict[str, Callable[[], float]], count: int) -> list[float]:
    """Losses of the first steps.

    Raises:
        AssertionError: the contenders do not train the same model.
    """
    losses = {name: [step() for _ in range(count)] for name, step in steps.items()}
    for name, curve in losses.items():
        np.testing.assert_allclose(curve, losses["mupax"], rtol=LOSS_TOLERANCE, err_msg=name)
    return losses["mupax"]


def measure(
    name: str, compute: ComputeConfig, rounds: int, *, tiny: bool = False
) -> dict[str, Any]:
    """Losses, times and ratios of one model."""
    program = assemble(MODELS[name](compute, tiny=tiny), jax.devices()[:1])
    batches = batches_of(program, 4)
    steps = {
        "mupax": jax_step(program, batches),
        "torch_compile": torch_step(program, batches, compiled=True),
        "torch_eager": torch_step(program, batches, compiled=False),
    }
    losses = check(steps, 6)
    axis_sizes = program.definition.sizes
    sizes = {
        "width": axis_sizes["embed"], "depth": axis_sizes["layers"], "seq_len": axis_sizes["position"],
        "batch_size": program.config.data.batch_size, "layers": compute.layers, "params": program.definition.count(),
    }  # fmt: skip
    return {
        "model": name,
        **sizes,
        "losses": losses,
        **in_turns.compared(in_turns.in_turns(steps, rounds), "mupax"),
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    model: str = "all"
    layers: Literal["auto", "scan", "unrolled"] = "auto"
    """Way in which the stack runs."""
    rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    args = in_turns.parse(Options, argv)
    harness.check_names([args.model], [*MODELS, "all"])
    import torch

    names = list(MODELS) if args.model == "all" else [args.model]
    compute = ComputeConfig(layers=args.layers)
    results = [measure(name, compute, args.rounds, tiny=args.tiny) for name in names]
    for result in results:
        ratios = ", ".join(f"{result['ratio'][other]:.3f} of {other}" for other in result["ratio"])
        print(f"{result['model']}: {result['ms']['mupax']:.1f} ms a step, {ratios}")
    in_turns.report("torch_step", results, args.json, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    in_turns.keep_freed_memory()
    sys.exit(main())
