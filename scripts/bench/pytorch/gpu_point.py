"""Measure one point of `scripts.bench.pytorch.gpu_mfu` in a process of its own.

    python -m scripts.bench.pytorch.gpu_point mupax gpt2 32 --variant '{"remat": "dots"}'
        [--steps 20] [--profile FOLDER] [--tiny]

Times a model's complete training steps on this device. `--profile` also traces some.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from mupax.command_line import Switch
from scripts import harness

TRACED_STEPS = 3
"""Number of traced steps, after the timed ones."""


def config_of(name: str, batch_size: int, variant: dict[str, Any], *, tiny: bool) -> Any:
    """Return the `Config` of a run of a named model in bfloat16.

    Args:
        variant: Fields of `ComputeConfig`.
        tiny: Shrink the model to width 32 and depth 2.
    """
    from mupax.zoo import configs
    from mupax.zoo.configs import ComputeConfig
    from scripts.bench.pytorch.step import config_of as run_of

    model = replace(configs.get(name), compute=ComputeConfig(dtype="bfloat16", **variant))
    if tiny:
        small = {"width": 32, "depth": 2, "num_heads": 2, "head_dim": None, "num_kv_heads": None}
        if model.task == "tokens":
            small |= {"vocab_size": 64, "seq_len": 16}
        else:
            small |= {"image_size": 32, "num_classes": 10}
        model = replace(model, **small)  # pyright: ignore[reportArgumentType]
    return run_of(model, batch_size)


def jax_point(config: Any) -> Callable[[], None]:
    """Return a function that starts one training step of mupax without waiting for its result.

    The function has an attribute `wait`, a function that waits until all started steps are done.
    """
    import jax

    from mupax.train.core.program import assemble
    from scripts.bench.pytorch.step import batches_of

    program = assemble(config, jax.devices()[:1])
    compiled = program.compile_train()
    state = program.initial_state()
    step_inputs = program.step_inputs()
    batch = jax.device_put(batches_of(program, 1)[0])
    metrics: Any = None

    def step() -> None:
        nonlocal state, metrics
        state, metrics = compiled(state, step_inputs, batch)

    def wait() -> None:
        jax.block_until_ready((state, metrics))

    step.wait = wait  # pyright: ignore[reportFunctionMemberAccess]
    return step


def torch_point(config: Any) -> Callable[[], None]:
    """Return a function that starts one training step in PyTorch without waiting for its result.

    The function has an attribute `wait`, a function that waits until all started steps are done.
    The weights are random, since only time is compared.
    """
    import torch
    import torch.nn.functional as F

    from mupax.zoo.configs import DecoderConfig
    from scripts.bench.pytorch import models as torch_models

    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = config.model
    size = config.data.batch_size
    net = torch_models.Transformer(model).to(device)
    opt = config.optimizer
    optimizer = torch_models.adamw(net, opt.peak_lr, opt.weight_decay, opt.b1, opt.b2, opt.eps)
    if isinstance(model, DecoderConfig):
        inputs = torch.randint(model.vocab_size, (size, model.seq_len), device=device)
        targets = torch.randint(model.vocab_size, (size, model.seq_len), device=device)
    else:
        inputs = torch.randn(
            size, model.image_size, model.image_size, model.channels, device=device
        )
        targets = torch.randint(model.num_classes, (size,), device=device)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = net(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))

    compiled: Any = torch.compile(loss_of)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(inputs, targets).backward()
        optimizer.step()

    step.wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)  # pyright: ignore
    return step


def timed(step: Any, repeats: int, steps: int) -> float:
    """Return the seconds of one step, as the median of `repeats` measurements of `steps` steps.

    Args:
        step: Function of `jax_point` or `torch_point`.
    """
    # The first two steps compile and warm up.
    for _ in range(2):
        step()
    step.wait()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        step.wait()
        seconds.append((time.perf_counter() - began) / steps)
    return statistics.median(seconds)


def traced(side: str, step: Any, folder: Path) -> None:
    """Trace `TRACED_STEPS` steps into a folder.

    A trace of JAX is for XProf or TensorBoard, one of PyTorch for a browser's tracing page.

    Args:
        side: "mupax" or "torch", which chooses the profiler.
        step: Function of `jax_point` or `torch_point`, already compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if side == "mupax":
        import jax

        with jax.profiler.trace(str(folder)):
            for _ in range(TRACED_STEPS):
                step()
            step.wait()
        return
    import torch.profiler

    with torch.profiler.profile() as profiler:
        for _ in range(TRACED_STEPS):
            step()
        step.wait()
    profiler.export_chrome_trace(str(folder / "trace.json"))


def device_of(side: str) -> str:
    """Return the name of the device, which is NVIDIA's on both sides."""
    if side == "mupax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def point(
    side: str,
    name: str,
    batch_size: int,
    variant: dict[str, Any],
    *,
    steps: int,
    profile: Path | None,
    tiny: bool,
) -> dict[str, Any]:
    """Measure the time of a training step of one framework, its MFU and its memory.

    Args:
        side: "mupax" or "torch", the framework that trains.
        name: Name of the model, as `mupax.zoo.configs.get` takes it.
        batch_size: Number of sequences or images in a step.
        variant: Fields of `ComputeConfig`, which PyTorch ignores.
        steps: Number of timed steps, three times over. The median counts.
        profile: Folder for a trace of `TRACED_STEPS` more steps.
        tiny: Use a small model in place of the named one.

    Returns:
        `step_s`, `units_per_s` (a unit is a token or image), `flops_per_s`, `mfu` (`None` if the
        device's peak is not known), `peak_bytes` (`None` for PyTorch), and what was measured.
    """
    from mupax.train.parallel.hardware import memory_peak, peak_flops
    from mupax.zoo import families

    config = config_of(name, batch_size, variant if side == "mupax" else {}, tiny=tiny)
    step = jax_point(config) if side == "mupax" else torch_point(config)
    seconds = timed(step, 3, steps)
    if profile is not None:
        traced(side, step, profile)
    units = batch_size * config.model.units
    flops_per_s = units * families.train_flops(config.model) / seconds
    device = device_of(side)
    peak = peak_flops(device)
    result = {
        "side": side,
        "model": name,
        "batch_size": batch_size,
        **variant,
        "step_s": seconds,
        "unit": config.model.unit,
        "units_per_s": units / seconds,
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak if peak else None,
        "device": device,
        "peak_bytes": None,
    }
    if side == "mupax":
        import jax

        result["peak_bytes"] = memory_peak(jax.devices()[:1])
    if profile:
        result["profile"] = str(profile)
    return result


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    side: Positional[Literal["mupax", "torch"]]
    model: Positional[str]
    batch_size: Positional[int]
    variant: str = "{}"
    """Fields of the model's compute section, as a JSON object."""
    steps: int = 20
    """Number of timed steps, three times over."""
    profile: Path | None = None
    """Also write a trace into this folder."""
    tiny: Switch = False
    """Use a small model, to see that the benchmark runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the point, print the result as one line of JSON and return the exit code 0."""
    args = harness.parse(Options, argv)
    result = point(
        args.side,
        args.model,
        args.batch_size,
        json.loads(args.variant),
        steps=args.steps,
        profile=args.profile,
        tiny=args.tiny,
    )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
