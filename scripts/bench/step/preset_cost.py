"""What a preset costs: the training step against the same model without a factor under plain `optax.adamw`.

    python -m scripts.bench.step.preset_cost [--rounds 20] [--width 256] [--depth 4] [--json FILE.json]
    python -m scripts.bench.step.preset_cost --topology v5e:2x2 --width 1024 --depth 2

Prints one readable line and one JSON object: ratios of FLOPs and bytes (the compiler's count) and of the times of steps
taken in turns. Goal: 1.00 within 0.03. On a TPU topology the count alone, against the same step without factors: 0.005.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Format, Layout

from mupax.train.config.metrics import on_devices
from mupax.train.config.run import Config, DataConfig, MeshConfig, OptimizerConfig, PresetConfig
from mupax.train.core.factors import schedule_table
from mupax.train.core.loss import cross_entropy
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, free_format, make_train_step
from mupax.train.parallel.sharding import abstract_batch
from mupax.train.pods import topology
from mupax.zoo import configs
from mupax.zoo.configs import ComputeConfig, DecoderConfig
from scripts.bench import in_turns


def config_of(
    width: int,
    depth: int,
    batch_size: int,
    preset: str = "depth-mup",
    *,
    head_dim: int = 32,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Config:
    """A byte-level decoder as `lm-tiny`, of another size, unrolled: nothing hides in a loop whose body counts once."""
    model = configs.get("lm-tiny")
    assert isinstance(model, DecoderConfig)
    compute = ComputeConfig(layers="unrolled", dtype=dtype)
    model = replace(
        model, width=width, depth=depth, num_heads=width // head_dim, seq_len=256, compute=compute
    )
    return Config(
        recipe="preset-cost", model=model, data=DataConfig(name="python_corpus", batch_size=batch_size), mesh=MeshConfig(data=1),
        preset=PresetConfig(name=preset, base="lm-proxy"), steps=100,
        optimizer=OptimizerConfig(peak_lr=1e-3, weight_decay=0.01, warmup_steps=10),
    )  # fmt: skip


def on_chip(
    topology_name: str, width: int, depth: int, batch_size: int, preset: str = "depth-mup"
) -> Program:
    """Return the program for one chip of a TPU topology, in bfloat16 with heads of 128."""
    config = config_of(width, depth, batch_size, preset, head_dim=128, dtype="bfloat16")
    return assemble(config, topology.devices(topology_name)[:1])


def with_preset(program: Program) -> jax.stages.Compiled:
    """The step of a run: (state, run, batch) -> (state, metrics)."""
    return program.compile_train()


def without_factors(program: Program) -> jax.stages.Compiled:
    """The same model and metrics with constants in place of factors and no multipliers, under `optax.adamw`.

    (params, optimizer state, batch) -> (params, optimizer state, metrics), the first two donated.
    """
    config, definition = program.config, program.definition
    constants = {
        n: np.full(f["shape"], neutral(program, n), np.float32)
        for n, f in definition.factors.items()
    }
    table = schedule_table(config.optimizer, config.steps)
    tx = plain_adamw(program, table)

    def loss_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        model: Any = definition.bind(params, constants, layout=program.layout)  # pyright: ignore[reportArgumentType]
        readout_inputs = model.readout_inputs(batch["inputs"])
        measured = on_devices(training=True)
        sums = cross_entropy(
            readout_inputs,
            batch["targets"],
            batch["weights"],
            metrics=measured,
            layout=program.layout,
        )
        return sums.loss / sums.weight, sums.metrics["accuracy"] / sums.weight

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        lr = config.optimizer.peak_lr * jnp.asarray(table)[opt_state[-1].count]
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {
            "loss": loss,
            "accuracy": accuracy,
            "grad_norm": optax.tree.norm(grads),
            "lr": lr,
        }
        return optax.apply_updates(params, updates), opt_state, metrics

    abstract = definition.abstract
    batch = abstract_batch(config.model, config.data.batch_size)
    place = program.layout.replicated
    # As the run does: where the compiler may choose how the state lies in memory, it may here too.
    state: Any = Format(Layout.AUTO, place) if program.free else place
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(state, state, place),
        out_shardings=(state, state, place),
    )
    return jitted.lower(shapes, jax.eval_shape(tx.init, shapes), batch).compile(
        compiler_options=program.compiler_options()
    )


def folded(program: Program) -> jax.stages.Compiled:
    """The run's own step with 1 for every factor, known to the compiler, which leaves the products out: what factors cost.

    (state, run, batch) -> (state, metrics), as the run's; the factors in `run` are not looked at.
    """
    factors, place = program.inputs.factors, program.layout.replicated
    ones = jax.tree.map(lambda x: (np.asarray(x) != 0).astype(np.float32), factors)
    neutral_factors = ones._replace(
        forward={n: np.full_like(x, neutral(program, n)) for n, x in factors.forward.items()}
    )
    step = make_train_step(
        program.definition, program.tx, program.config.accumulation_steps, program.layout
    )

    def with_ones(state: TrainState, run: StepInputs, batch: Any) -> Any:
        return step(state, run._replace(factors=neutral_factors), batch)

    state: Any = jax.tree.map(free_format, program.abstract) if program.free else place
    jitted = jax.jit(
        with_ones,
        donate_argnums=0,
        in_shardings=(state, place, place),
        out_shardings=(state, place),
    )
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), program.abstract
    )
    batch = abstract_batch(program.config.model, program.config.data.batch_size)
    return jitted.lower(shapes, program.inputs, batch).compile(
        compiler_options=program.compiler_options()
    )


def neutral(program: Program, name: str) -> float:
    """What a model without presets has in place of a forward factor: logits over sqrt(head_dim), branches as they are."""
    kind = program.definition.factors[name]["kind"]
    return program.definition.sizes["head_dim"] ** -0.5 if kind == "logits" else 1.0


def plain_adamw(program: Program, table: np.ndarray) -> optax.GradientTransformation:
    """`optax.adamw` with the run's constants and schedule; gains and biases do not decay there either."""
    opt = program.config.optimizer
    decays = {
        name: bool(np.any(factor)) for name, factor in program.inputs.factors.weight_decay.items()
    }
    schedule = lambda count: opt.peak_lr * jnp.asarray(table)[count]  # noqa: E731
    return optax.adamw(
        schedule, opt.b1, opt.b2, opt.eps, weight_decay=opt.weight_decay, mask=decays
    )


def counted(compiled: jax.stages.Compiled) -> dict[str, float]:
    """FLOPs and bytes of one execution, as the compiler counts them."""
    cost = compiled.cost_analysis() or {}
    return {"flops": float(cost["flops"]), "bytes": float(cost["bytes accessed"])}


def ratios(program: Program) -> dict[str, float]:
    """FLOPs and bytes with the preset over those without: on TPU the same step without factors, else `without_factors`."""
    # The TPU's compiler writes to stderr whatever it is asked.
    with topology.quiet() if program.free else contextlib.nullcontext():
        ours, plain = (
            counted(with_preset(program)),
            counted((folded if program.free else without_factors)(program)),
        )
    return {name: ours[name] / plain[name] for name in ours}


def timed(program: Program, rounds: int) -> dict[str, Any]:
    """Median times of both steps taken in turns, and the ratio; the one without once more, for what noise makes of 1."""
    ours, plain = with_preset(program), without_factors(program)
    random, model = np.random.default_rng(0), program.config.model
    assert isinstance(model, DecoderConfig)
    tokens = random.integers(
        0, model.vocab_size, (program.config.data.batch_size, model.seq_len + 1), np.int32
    )
    weights = np.ones_like(tokens[:, 1:], np.float32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})
    state, run = program.initial_state(), program.step_inputs()
    params = jax.tree.map(jnp.array, state.params)
    opt_state = plain_adamw(
        program, schedule_table(program.config.optimizer, program.config.steps)
    ).init(params)

    def ours_once() -> None:
        nonlocal state
        state, metrics = ours(state, run, batch)
        jax.block_until_ready((state, metrics))

    def plain_once() -> None:
        nonlocal params, opt_state
        params, opt_state, metrics = plain(params, opt_state, batch)
        jax.block_until_ready((params, metrics))

    steps = {"preset": ours_once, "plain": plain_once, "plain_again": plain_once}
    seconds = in_turns.in_turns(steps, rounds)
    itself = in_turns.compared(
        {name: seconds[name] for name in ("plain", "plain_again")}, "plain_again"
    )["ratio"]["plain"]
    return {
        **in_turns.compared({name: seconds[name] for name in ("preset", "plain")}, "preset"),
        "plain_against_itself": itself,
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    width: int = 256
    depth: int = 4
    batch_size: int = 8
    """Sequences of 256 tokens."""
    preset: str = "depth-mup"
    topology: str | None = None
    """Count for one chip of this TPU topology, such as v5e:2x2, and time nothing."""
    rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    args = in_turns.parse(Options, argv)
    sizes = (32, 1, 2) if args.tiny else (args.width, args.depth, args.batch_size)
    if args.topology:
        program = on_chip(args.topology, *sizes, args.preset)
    else:
        program = assemble(config_of(*sizes, args.preset), jax.devices()[:1])
    cost = ratios(program)
    row = {
        "width": sizes[0],
        "depth": sizes[1],
        "batch_size": sizes[2],
        "preset": args.preset,
        **cost,
    }
    line = f"with the preset over without: FLOPs {cost['flops']:.4f}, bytes {cost['bytes']:.4f}"
    if not args.topology:
        row |= timed(program, args.rounds)
        line += f", time {row['ratio']['plain']:.3f} (the same step against itself {row['plain_against_itself']:.3f})"
    print(line)
    where = {"device": args.topology} if args.topology else {}
    in_turns.report("preset_cost", [row], args.json, **where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
