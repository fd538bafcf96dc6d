"""Model FLOPs utilization of whole training steps in bfloat16 on one GPU, against PyTorch on the same GPU in the same run.

    python -m scripts.bench.pytorch.gpu_mfu [--models gpt2 gpt2-medium lm-1b vit-s16 vit-b16] [--json FILE.json]

Every model is tried at growing batches until memory runs out; the best batch of each side counts. FLOPs are the model's own
(`mupax.zoo.flops`: matrix products, half of a causal context), whatever is computed again. PyTorch is the twin of
`scripts.bench.pytorch.models` under `torch.compile` with its flash attention, autocast to bfloat16 and fused AdamW, as its
users train. Each point runs in a process of its own, so that one framework's memory never takes from the other's.
Needs JAX and PyTorch with CUDA; no data. On another device `--tiny` shows that it runs.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BATCHES = {
    "gpt2": [16, 32, 64],
    "gpt2-medium": [8, 16, 32, 48],
    "lm-1b": [4, 8, 16],
    "vit-s16": [256, 512, 1024],
    "vit-b16": [128, 256, 512],
}
"""Sequences or images per step that are tried, growing; the first that does not fit ends the row."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mupax": [
        {"layers": "unrolled", "remat": "none"},
        {"layers": "scan", "remat": "none"},
        {"layers": "unrolled", "remat": "dots"},
    ],
    "torch": [{}],
}
"""What each side may do; its best counts."""

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by a part of the device's name (NVIDIA data sheets, SXM); an unknown device has no MFU."""


def config_of(name: str, batch_size: int, variant: dict[str, Any], *, tiny: bool) -> Any:
    """The run of a named model in bfloat16."""
    from mupax.zoo import configs
    from mupax.zoo.configs import ComputeConfig
    from scripts.bench.pytorch.step import config_of as run_of

    model = dataclasses.replace(configs.get(name), compute=ComputeConfig(dtype="bfloat16", **variant))
    if tiny:
        small = {"width": 32, "depth": 2, "num_heads": 2, "head_dim": None, "num_kv_heads": None}
        text = {"vocab_size": 64, "seq_len": 16}
        image = {"image_size": 32, "num_classes": 10}
        model = dataclasses.replace(model, **small, **(text if model.task == "tokens" else image))  # pyright: ignore
    return run_of(model, batch_size)


def jax_point(config: Any) -> Callable[[], None]:
    """One step on the device, returning when it is queued."""
    import jax

    from mupax.train.core.program import assemble
    from scripts.bench.pytorch.step import batches_of

    program = assemble(config, jax.devices()[:1])
    compiled, state, run = program.compile_train(), program.initial_state(), program.step_inputs()
    batch = jax.device_put(batches_of(program, 1)[0])
    metrics: Any = None

    def step() -> None:
        nonlocal state, metrics
        state, metrics = compiled(state, run, batch)

    step.wait = lambda: jax.block_until_ready((state, metrics))  # pyright: ignore[reportFunctionMemberAccess]
    return step


def torch_point(config: Any) -> Callable[[], None]:
    """The same in PyTorch; random weights, since only time is compared here."""
    import torch
    import torch.nn.functional as F

    from mupax.zoo.configs import DecoderConfig
    from scripts.bench.pytorch import models as torch_models

    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, opt, size = config.model, config.optimizer, config.data.batch_size
    net = torch_models.Transformer(model).to(device)
    optimizer = torch_models.adamw(net, opt.peak_lr, opt.weight_decay, opt.b1, opt.b2, opt.eps)
    if isinstance(model, DecoderConfig):
        inputs = torch.randint(model.vocab_size, (size, model.seq_len), device=device)
        targets = torch.randint(model.vocab_size, (size, model.seq_len), device=device)
    else:
        inputs = torch.randn(size, model.image_size, model.image_size, model.channels, device=device)
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
    """Seconds of one step: the median of `repeats` runs of `steps` steps each, after two that compile and warm up."""
    for _ in range(2):
        step()
    step.wait()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(steps):
            step()
        step.wait()
        found.append((time.perf_counter() - began) / steps)
    return statistics.median(found)


def point(side: str, name: str, batch_size: int, variant: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Seconds, units per second, FLOP/s and MFU of one side, model and batch, in this process."""
    config = config_of(name, batch_size, variant if side == "mupax" else {}, tiny=tiny)
    seconds = timed((jax_point if side == "mupax" else torch_point)(config), 3, 2 if tiny else 10)
    from mupax.zoo import flops

    units = batch_size * config.model.units
    rate = units * flops.train_flops(config.model) / seconds
    if side == "mupax":
        import jax

        device = jax.devices()[0].device_kind
    else:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = next((value for part, value in PEAKS.items() if part in device), None)
    return {
        "side": side, "model": name, "batch_size": batch_size, **variant, "step_s": seconds, "unit": config.model.unit,
        "units_per_s": units / seconds, "flops_per_s": rate, "mfu": rate / peak if peak else None, "device": device,
    }  # fmt: skip


def best(side: str, name: str, batches: Sequence[int], *, tiny: bool, timeout_s: float) -> list[dict[str, Any]]:
    """Every point of one side and model, each in its own process, with what went wrong where something did."""
    found = []
    for variant in VARIANTS[side][: 1 if tiny else None]:
        for batch_size in batches:
            words = [
                sys.executable, "-m", "scripts.bench.pytorch.gpu_mfu", "--point", side, "--models", name, "--batch", str(batch_size),
                "--variant", json.dumps(variant), *(["--tiny"] if tiny else []),
            ]  # fmt: skip
            environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94"}
            try:
                ran = subprocess.run(
                    words, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
                )
                lines, failure = ran.stdout.splitlines(), ran.stderr[-300:]
            except subprocess.TimeoutExpired:
                lines, failure = [], f"no answer in {timeout_s:.0f} s"
            result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
            missed = {"side": side, "model": name, "batch_size": batch_size, **variant, "failed": failure}
            found.append(result or missed)
            print(_line(found[-1]), flush=True)
            if result is None:
                break
    return found


def _line(found: dict[str, Any]) -> str:
    what = " ".join(str(found[key]) for key in ("side", "model", "batch_size", "layers", "remat") if key in found)
    if "failed" in found:
        return f"{what}: does not run ({found['failed'].strip().splitlines()[-1:] or ''})"
    mfu = f", MFU {100 * found['mfu']:.1f} %" if found["mfu"] else ""
    return f"{what}: {1e3 * found['step_s']:.1f} ms, {found['units_per_s']:.0f} {found['unit']}s/s{mfu}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--batches", type=int, nargs="+", help="instead of the batches of each model")
    parser.add_argument("--sides", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--timeout", type=float, default=240, help="seconds that one point may take (default 240)")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the result here, after every model")
    for word in ("--point", "--batch", "--variant"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.point:
        print(json.dumps(point(args.point, args.models[0], int(args.batch), json.loads(args.variant), tiny=args.tiny)))
        return 0
    points: list[dict[str, Any]] = []
    for name in args.models:
        for side in args.sides:
            batches = args.batches or ([2] if args.tiny else BATCHES[name])
            points += best(side, name, batches, tiny=args.tiny, timeout_s=args.timeout)
        if args.json is not None:
            args.json.write_text(json.dumps(summary(points), indent=1) + "\n")
    print(json.dumps(summary(points)["best"]))
    return 0


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every model the fastest point of both sides, and their ratio."""
    rows = {}
    for point_ in points:
        if "failed" not in point_:
            row = rows.setdefault(point_["model"], {})
            if point_["flops_per_s"] > row.get(point_["side"], {"flops_per_s": 0})["flops_per_s"]:
                row[point_["side"]] = point_
    for row in rows.values():
        if len(row) == 2:
            row["ratio"] = row["mupax"]["flops_per_s"] / row["torch"]["flops_per_s"]
    return {"benchmark": "gpu_mfu", "best": rows, "points": points}


if __name__ == "__main__":
    sys.exit(main())
