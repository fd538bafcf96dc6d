"""What a preset costs: the training step against the same model without a factor under plain `optax.adamw`.

    python -m scripts.bench.preset_cost [--rounds 20] [--width 256] [--depth 4] [--out FILE.json]

Prints one readable line and one JSON object: ratios of FLOPs and bytes (the compiler's count) and of the median times
of steps taken in turns, A B B A, so that whatever else the machine does falls on both. Goal: 1.00 within 0.03.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.config import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from train.optimizer import schedule_table
from train.program import Program, abstract_batch, assemble
from zoo import configs
from zoo.configs import ComputeConfig, DecoderConfig


def config_of(width: int, depth: int, batch_size: int, preset: str = "depth-mup") -> Config:
    """A byte-level decoder as `lm-tiny`, of another size, unrolled: nothing hides in a loop whose body counts once."""
    model = configs.get("lm-tiny")
    assert isinstance(model, DecoderConfig)
    model = dataclasses.replace(
        model, width=width, depth=depth, num_heads=width // 32, seq_len=256, compute=ComputeConfig(layers="unrolled")
    )
    return Config(
        recipe="preset-cost", model=model, data=DataConfig(name="python_corpus", batch_size=batch_size), mesh=MeshConfig(data=1),
        preset=PresetConfig(name=preset, base="lm-proxy"), steps=100,
        optimizer=OptimizerConfig(peak_lr=1e-3, weight_decay=0.01, warmup_steps=10),
    )  # fmt: skip


def with_preset(program: Program) -> jax.stages.Compiled:
    """The step of a run: (state, run, batch) -> (state, metrics)."""
    return program.compile_train()


def without_factors(program: Program) -> jax.stages.Compiled:
    """The same model and metrics with constants in place of factors and no multipliers, under `optax.adamw`.

    (params, optimizer state, batch) -> (params, optimizer state, metrics), the first two donated.
    """
    config, found = program.config, program.definition
    # What a model without presets has: attention logits over sqrt(head_dim), branches added as they are.
    plain = {"logits": config.model.heads_dim**-0.5, "skip": 1.0, "branch": 1.0}
    constants = {name: np.full(f["shape"], plain[f["kind"]], np.float32) for name, f in found.factors.items()}
    table = schedule_table(config.optimizer, config.steps)
    tx = plain_adamw(program, table)

    def loss_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        model: Any = found.bind(params, constants)  # pyright: ignore[reportArgumentType]
        logits = model(batch["inputs"])
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        hits = jnp.argmax(logits, axis=-1) == batch["targets"]
        weight = jnp.sum(batch["weights"])
        return jnp.sum(nll * batch["weights"]) / weight, jnp.sum(hits * batch["weights"]) / weight

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        lr = config.optimizer.peak_lr * jnp.asarray(table)[opt_state[-1].count]
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.tree.norm(grads), "lr": lr}
        return optax.apply_updates(params, updates), opt_state, metrics

    abstract = found.abstract
    batch = abstract_batch(config.model, config.data.batch_size)
    place = program.layout.whole
    jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=place, out_shardings=place)
    return jitted.lower(abstract, jax.eval_shape(tx.init, abstract), batch).compile(
        compiler_options=program.compiler_options()
    )


def plain_adamw(program: Program, table: np.ndarray) -> optax.GradientTransformation:
    """`optax.adamw` with the run's constants and schedule; gains and biases do not decay there either."""
    opt = program.config.optimizer
    decays = {name: bool(np.any(factor)) for name, factor in program.run.factors.weight_decay.items()}
    schedule = lambda count: opt.peak_lr * jnp.asarray(table)[count]  # noqa: E731
    return optax.adamw(schedule, opt.b1, opt.b2, opt.eps, weight_decay=opt.weight_decay, mask=decays)


def counted(compiled: jax.stages.Compiled) -> dict[str, float]:
    """FLOPs and bytes of one execution, as the compiler counts them."""
    cost = compiled.cost_analysis() or {}
    return {"flops": float(cost["flops"]), "bytes": float(cost["bytes accessed"])}


def ratios(program: Program) -> dict[str, float]:
    """FLOPs and bytes with the preset over those without."""
    ours, plain = counted(with_preset(program)), counted(without_factors(program))
    return {name: ours[name] / plain[name] for name in ours}


def timed(program: Program, rounds: int) -> dict[str, float]:
    """The median over rounds of the ratio of both steps, taken in turns, and their median seconds."""
    ours, plain = with_preset(program), without_factors(program)
    random, model = np.random.default_rng(0), program.config.model
    assert isinstance(model, DecoderConfig)
    tokens = random.integers(0, model.vocab_size, (program.config.data.batch_size, model.seq_len + 1), np.int32)
    weights = np.ones_like(tokens[:, 1:], np.float32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})
    state, run = program.initial_state(), program.numbers()
    params = jax.tree.map(jnp.array, state.params)
    opt_state = plain_adamw(program, schedule_table(program.config.optimizer, program.config.steps)).init(params)

    def ours_once() -> float:
        nonlocal state
        began = time.perf_counter()
        state, metrics = ours(state, run, batch)
        jax.block_until_ready(metrics)
        jax.block_until_ready(state.params)
        return time.perf_counter() - began

    def plain_once() -> float:
        nonlocal params, opt_state
        began = time.perf_counter()
        params, opt_state, metrics = plain(params, opt_state, batch)
        jax.block_until_ready(metrics)
        jax.block_until_ready(params)
        return time.perf_counter() - began

    for once in (ours_once, plain_once):
        once()
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        for name, once in (("with", ours_once), ("without", plain_once), ("without", plain_once), ("with", ours_once)):
            seconds[name].append(once())
    with_s, without_s = (statistics.median(seconds[name]) for name in ("with", "without"))
    per_round = [
        (a + b) / (c + d) for (a, b), (c, d) in zip(_pairs(seconds["with"]), _pairs(seconds["without"]), strict=True)
    ]
    # The same step against itself: what this machine's noise makes of a ratio of 1.
    itself = statistics.median(a / b for a, b in _pairs(seconds["without"]))
    return {
        "time": statistics.median(per_round), "same_step_twice": itself,
        "with_preset_s": with_s, "without_s": without_s,
    }  # fmt: skip


def _pairs(seconds: list[float]) -> list[tuple[float, float]]:
    return list(zip(seconds[::2], seconds[1::2], strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of two steps each (default 20)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of 256 tokens")
    parser.add_argument("--preset", default="depth-mup")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args(argv)
    program = assemble(config_of(args.width, args.depth, args.batch_size, args.preset), jax.devices()[:1])
    result = {
        "width": args.width, "depth": args.depth, "batch_size": args.batch_size, "preset": args.preset,
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "ratio": ratios(program), **({"timed": timed(program, args.rounds)} if args.rounds else {}),
    }  # fmt: skip
    line = f"with the preset over without: FLOPs {result['ratio']['flops']:.4f}, bytes {result['ratio']['bytes']:.4f}"
    if args.rounds:
        found = result["timed"]
        line += f", time {found['time']:.3f} (median of {args.rounds} rounds of two steps each, {found['without_s']:.3f} s a step; "
        line += f"the same step against itself {found['same_step_twice']:.3f})"
    print(line)
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
