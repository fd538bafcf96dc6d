"""Compare the training step under a preset with the same model under plain `optax.adamw`.

    python -m scripts.bench.step.preset_cost [--rounds 20] [--width 256] [--depth 4]
        [--json FILE.json]
    python -m scripts.bench.step.preset_cost --topology v5e:2x2 --width 1024 --depth 2

Prints one readable line and one JSON object: ratios of FLOPs and bytes (the compiler's count) and
of times in turns. The goal is 1.00 within 0.03. With `--topology` nothing is timed, the baseline is
the run's own step without factors, and the goal is 0.005.
"""

from __future__ import annotations

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
from mupax.train.core.step import StepInputs, free_layout_format, make_train_step
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
    """Return a run of a byte-level decoder like `lm-tiny`, of any size and with unrolled layers."""
    model = configs.get("lm-tiny")
    assert isinstance(model, DecoderConfig)
    # The compiler counts the body of a loop once, so a loop over layers would hide work.
    compute = ComputeConfig(layers="unrolled", dtype=dtype)
    model = replace(
        model, width=width, depth=depth, num_heads=width // head_dim, seq_len=256, compute=compute
    )
    return Config(
        recipe="preset-cost",
        model=model,
        data=DataConfig(name="python_corpus", batch_size=batch_size),
        mesh=MeshConfig(data=1),
        preset=PresetConfig(name=preset, base="lm-proxy"),
        steps=100,
        optimizer=OptimizerConfig(peak_lr=1e-3, weight_decay=0.01, warmup_steps=10),
    )


def on_chip(
    topology_name: str, width: int, depth: int, batch_size: int, preset: str = "depth-mup"
) -> Program:
    """Return the program for one chip of a TPU topology, in bfloat16 with heads of 128."""
    config = config_of(width, depth, batch_size, preset, head_dim=128, dtype="bfloat16")
    return assemble(config, topology.devices(topology_name)[:1])


def with_preset(program: Program) -> jax.stages.Compiled:
    """Return the run's own compiled step: (state, run, batch) -> (state, metrics)."""
    return program.compile_train()


def without_factors(program: Program) -> jax.stages.Compiled:
    """Return a compiled step of the same model without a preset, under `optax.adamw`.

    Forward factors, such as the scale of attention logits, are the constants of `neutral`. There
    are no multipliers of parameters. The step maps (params, optimizer state, batch) to (params,
    optimizer state, metrics) and donates the first two.
    """
    config = program.config
    definition = program.definition
    constants = {}
    for name, factor in definition.factors.items():
        constants[name] = np.full(factor["shape"], neutral(program, name), np.float32)
    table = schedule_table(config.optimizer, config.steps)
    tx = plain_adamw(program, table)

    def loss_of(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        bound: Any = definition.bind(params, constants, layout=program.layout)  # pyright: ignore
        readout_inputs = bound.readout_inputs(batch["inputs"])
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
    # As in the run: if its compiler may choose the state's layout in memory, it may here, too.
    state: Any = Format(Layout.AUTO, place) if program.free_layout else place
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
    opt_shapes = jax.eval_shape(tx.init, shapes)
    jitted = jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(state, state, place),
        out_shardings=(state, state, place),
    )
    lowered = jitted.lower(shapes, opt_shapes, batch)
    return lowered.compile(compiler_options=program.compiler_options())


def folded(program: Program) -> jax.stages.Compiled:
    """Return the run's own step with constants in place of the preset's factors, as a baseline.

    Factors of parameters are 1, or 0 where the preset's are 0. Forward factors are those of
    `neutral`. The compiler knows the constants and leaves out products with 1. The step maps
    (state, run, batch) to (state, metrics), as the run's does, and ignores the factors in `run`.
    """
    factors = program.inputs.factors
    place = program.layout.replicated
    # A factor of 0 stays, because it is what keeps gains and biases from decaying.
    ones = jax.tree.map(lambda x: (np.asarray(x) != 0).astype(np.float32), factors)
    forward = {}
    for name, factor in factors.forward.items():
        forward[name] = np.full_like(factor, neutral(program, name))
    neutral_factors = ones._replace(forward=forward)
    step = make_train_step(
        program.definition, program.tx, program.config.accumulation_steps, program.layout
    )

    def with_ones(state: TrainState, run: StepInputs, batch: Any) -> Any:
        return step(state, run._replace(factors=neutral_factors), batch)

    state: Any = (
        jax.tree.map(free_layout_format, program.abstract) if program.free_layout else place
    )
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
    lowered = jitted.lower(shapes, program.inputs, batch)
    return lowered.compile(compiler_options=program.compiler_options())


def neutral(program: Program, name: str) -> float:
    """Return the value of a forward factor in a model without a preset.

    Attention logits are divided by sqrt(head_dim); every other factor is 1.
    """
    kind = program.definition.factors[name]["kind"]
    return program.definition.sizes["head_dim"] ** -0.5 if kind == "logits" else 1.0


def plain_adamw(program: Program, table: np.ndarray) -> optax.GradientTransformation:
    """Return `optax.adamw` with the run's constants, schedule and mask of decayed parameters.

    Args:
        table: Learning rate of each step over the peak (`schedule_table`).
    """
    opt = program.config.optimizer
    # Gains and biases do not decay, as in the run.
    weight_decay = program.inputs.factors.weight_decay
    decays = {name: bool(np.any(factor)) for name, factor in weight_decay.items()}

    def schedule(count: Any) -> jax.Array:
        return opt.peak_lr * jnp.asarray(table)[count]

    return optax.adamw(
        schedule, opt.b1, opt.b2, opt.eps, weight_decay=opt.weight_decay, mask=decays
    )


def counted(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Return the FLOPs and bytes of one execution, as the compiler counts them."""
    cost = compiled.cost_analysis() or {}
    return {"flops": float(cost["flops"]), "bytes": float(cost["bytes accessed"])}


def ratios(program: Program) -> dict[str, float]:
    """Return the ratios of FLOPs and bytes with the preset to those without.

    The baseline is `folded` if the compiler may choose layouts (TPU), otherwise `without_factors`.
    """
    if program.free_layout:
        # The TPU's compiler always writes to stderr.
        with topology.quiet():
            ours = counted(with_preset(program))
            plain = counted(folded(program))
    else:
        ours = counted(with_preset(program))
        plain = counted(without_factors(program))
    return {name: ours[name] / plain[name] for name in ours}


def timed(program: Program, rounds: int) -> dict[str, Any]:
    """Return median times of both steps in turns and their ratio.

    The plain step also takes turns with itself; `plain_against_itself` shows what noise makes of a
    ratio of 1.
    """
    ours = with_preset(program)
    plain = without_factors(program)

    config = program.config
    model = config.model
    assert isinstance(model, DecoderConfig)
    token_shape = (config.data.batch_size, model.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, token_shape, np.int32)
    weights = np.ones_like(tokens[:, 1:], np.float32)
    batch = jax.device_put({"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})

    state = program.initial_state()
    run = program.step_inputs()
    # A copy, because both steps donate the parameters that they get.
    params = jax.tree.map(jnp.array, state.params)
    tx = plain_adamw(program, schedule_table(config.optimizer, config.steps))
    opt_state = tx.init(params)

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
    pair = {name: seconds[name] for name in ("preset", "plain")}
    control = {name: seconds[name] for name in ("plain", "plain_again")}
    noise = in_turns.compared(control, "plain_again")["ratio"]["plain"]
    return {**in_turns.compared(pair, "preset"), "plain_against_itself": noise}


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
    """Measure, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    if args.tiny:
        args = replace(args, width=32, depth=1, batch_size=2)
    sizes = (args.width, args.depth, args.batch_size)
    if args.topology:
        program = on_chip(args.topology, *sizes, args.preset)
    else:
        program = assemble(config_of(*sizes, args.preset), jax.devices()[:1])

    cost = ratios(program)
    row = {
        "width": args.width,
        "depth": args.depth,
        "batch_size": args.batch_size,
        "preset": args.preset,
        **cost,
    }
    line = f"with the preset over without: FLOPs {cost['flops']:.4f}, bytes {cost['bytes']:.4f}"
    if not args.topology:
        row |= timed(program, args.rounds)
        noise = row["plain_against_itself"]
        line += f", time {row['ratio']['plain']:.3f} (the same step against itself {noise:.3f})"
    print(line)
    facts = {"device": args.topology} if args.topology else {}
    in_turns.report("preset_cost", [row], args.json, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
