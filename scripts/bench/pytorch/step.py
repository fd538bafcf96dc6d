"""Compare a training step with the same model in PyTorch, eager and under `torch.compile`.

    python -m scripts.bench.pytorch.step [--model lm|vit] [--rounds 20] [--json FILE.json]

Weights, shapes, loss and optimizer are the same. All run in one process, in turns, with the same
number of threads. The losses of all must agree over several steps before anything is timed. Needs
PyTorch (`pip install -e ".[torch]"`, Python 3.11) and a C++ compiler.
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
"""Largest relative difference of losses in float32, which other orders of summation cause."""


def config_of(model: ModelConfig, batch_size: int) -> Config:
    """Return a run of a model under the standard parameterization.

    Every factor is 1, except that of the patch embedding.
    """
    name = "python_corpus" if isinstance(model, DecoderConfig) else "digits"
    return Config(
        recipe="torch-step",
        model=model,
        data=DataConfig(name=name, batch_size=batch_size),
        mesh=MeshConfig(data=1),
        preset=PresetConfig(name="sp"),
        steps=1000,
        optimizer=OptimizerConfig(peak_lr=1e-3, weight_decay=0.01, schedule="constant"),
    )


def lm(compute: ComputeConfig, *, tiny: bool = False) -> Config:
    """Return a run of a decoder of width 256 and depth 4 on 8 sequences of 256 bytes.

    Args:
        tiny: Use width 32, depth 2 and sequences of 16 bytes.
    """
    model = configs.get("lm-tiny")
    assert isinstance(model, DecoderConfig)
    if tiny:
        model = replace(model, width=32, depth=2, num_heads=1, seq_len=16, compute=compute)
    else:
        model = replace(model, width=256, depth=4, num_heads=8, seq_len=256, compute=compute)
    return config_of(model, 8)


def vit(compute: ComputeConfig, *, tiny: bool = False) -> Config:
    """Return a run of ViT-S/16 on 16 images of 64x64.

    Args:
        tiny: Use width 48, depth 2 and 10 classes.
    """
    changes: dict[str, Any] = {}
    if tiny:
        changes = {"depth": 2, "width": 48, "num_heads": 3, "num_classes": 10}
    changes |= {"image_size": 64, "compute": compute}
    model = replace(configs.get("vit-s16"), **changes)
    return config_of(model, 16)


MODELS: dict[str, Callable[..., Config]] = {"lm": lm, "vit": vit}
"""Functions that make the runs, by name of the model."""


def batches_of(program: Program, count: int) -> list[dict[str, np.ndarray]]:
    """Return random batches of the model's task: `inputs`, `targets` and `weights` of one."""
    random = np.random.default_rng(0)
    model = program.config.model
    size = program.config.data.batch_size
    outputs = model.sizes()[model.output_axis]
    example = model.example()["inputs"].shape
    batches = []
    for _ in range(count):
        if model.task == "tokens":
            tokens = random.integers(0, outputs, (size, example[0] + 1), np.int32)
            batch = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        else:
            batch = {"inputs": random.standard_normal((size, *example), np.float32)}
            batch["targets"] = random.integers(0, outputs, size, np.int32)
        batches.append({**batch, "weights": np.ones(batch["targets"].shape, np.float32)})
    return batches


def jax_step(program: Program, batches: Sequence[dict[str, np.ndarray]]) -> Callable[[], float]:
    """Return a function that trains one step of the run on the next batch and returns its loss."""
    compiled = program.compile_train()
    state = program.initial_state()
    step_inputs = program.step_inputs()
    on_device = [jax.device_put(batch) for batch in batches]
    index = 0

    def step() -> float:
        nonlocal state, index
        state, metrics = compiled(state, step_inputs, on_device[index % len(on_device)])
        index += 1
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return step


def torch_step(
    program: Program, batches: Sequence[dict[str, np.ndarray]], *, compiled: bool
) -> Callable[[], float]:
    """Return a function that trains one step in PyTorch on the next batch and returns its loss.

    The weights are those that `program` starts from.

    Args:
        compiled: Use `torch.compile`.
    """
    import torch
    import torch.nn.functional as F

    from scripts.bench.pytorch import models as torch_models

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = torch_models.Transformer(program.config.model)
    torch_models.load(model, jax.device_get(program.initial_state().params))
    multipliers = program.inputs.factors.multiplier
    model.patch_scale = float(multipliers.get("patch", 1.0))
    assert all((value == 1).all() for name, value in multipliers.items() if name != "patch")
    opt = program.config.optimizer
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
    """Train some steps with every implementation, compare the losses, and return mupax's.

    Args:
        steps: Function by name, such as "mupax", that trains one step and returns its loss.
        count: Number of steps.

    Raises:
        AssertionError: Losses differ by more than `LOSS_TOLERANCE`, so the models are not the same.
    """
    losses = {}
    for name, step in steps.items():
        losses[name] = [step() for _ in range(count)]
    for name, curve in losses.items():
        np.testing.assert_allclose(curve, losses["mupax"], rtol=LOSS_TOLERANCE, err_msg=name)
    return losses["mupax"]


def measure(
    name: str, compute: ComputeConfig, rounds: int, *, tiny: bool = False
) -> dict[str, Any]:
    """Return losses, times and ratios of one model, after a check that all losses agree."""
    program = assemble(MODELS[name](compute, tiny=tiny), jax.devices()[:1])
    batches = batches_of(program, 4)
    steps = {
        "mupax": jax_step(program, batches),
        "torch_compile": torch_step(program, batches, compiled=True),
        "torch_eager": torch_step(program, batches, compiled=False),
    }
    losses = check(steps, 6)
    axis_sizes = program.definition.sizes
    return {
        "model": name,
        "width": axis_sizes["embed"],
        "depth": axis_sizes["layers"],
        "seq_len": axis_sizes["position"],
        "batch_size": program.config.data.batch_size,
        "layers": compute.layers,
        "params": program.definition.count(),
        "losses": losses,
        **in_turns.compared(in_turns.in_turns(steps, rounds), "mupax"),
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    model: str = "all"
    """Model to measure, lm, vit or all."""
    layers: Literal["auto", "scan", "unrolled"] = "auto"
    """Execution of the layers in mupax."""
    rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen models, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    harness.check_names([args.model], [*MODELS, "all"])
    import torch

    names = list(MODELS) if args.model == "all" else [args.model]
    compute = ComputeConfig(layers=args.layers)
    results = [measure(name, compute, args.rounds, tiny=args.tiny) for name in names]
    for result in results:
        ratios = ", ".join(f"{ratio:.3f} of {name}" for name, ratio in result["ratio"].items())
        print(f"{result['model']}: {result['ms']['mupax']:.1f} ms a step, {ratios}")
    in_turns.report("torch_step", results, args.json, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    in_turns.keep_freed_memory()
    sys.exit(main())
