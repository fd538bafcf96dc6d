"""Where a step's time goes, part by part, beside PyTorch's `torch.compile`: the attribution of `torch_step`'s ratio.

    python -m scripts.bench.pytorch.parts [--model lm|vit] [--rounds 10] [--one-core] [--json FILE.json]

Every part is compiled on its own, forward and backward, in both, and takes turns; its time is multiplied by how often a step
has it. Parts compiled alone cannot be fused with their neighbours, so their sum is not the step: it says where to look.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax.train.core import state as core_state
from mupax.train.core.loss import cross_entropy_from_logits
from mupax.train.core.program import Program, assemble
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs
from mupax.zoo.configs import ComputeConfig
from mupax.zoo.layers.kernels import attend
from mupax.zoo.transformer import transformer
from scripts import harness
from scripts.bench import in_turns
from scripts.bench.pytorch.step import MODELS, batches_of

Step = Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """One part of a step, in both frameworks, and how often a step has it."""

    name: str
    times: int
    ours: Step
    theirs: Step
    inner: bool = False
    """Whether it is part of the one before, and counted there."""


def differentiated(fn: Callable[..., jax.Array], weights: Mapping[str, Any], *inputs: Any) -> Step:
    """fn(weights, *inputs) with its gradients by all of them, compiled."""

    def output_and_gradients(cotangent: jax.Array, weights: Any, *inputs: jax.Array) -> Any:
        out, pull = jax.vjp(fn, weights, *inputs)
        return out, pull(cotangent)

    inputs = tuple(map(jnp.asarray, inputs))
    out = jax.eval_shape(fn, weights, *inputs)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape, np.float32))
    compiled = jax.jit(output_and_gradients).lower(cotangent, weights, *inputs).compile()
    return lambda: jax.block_until_ready(compiled(cotangent, weights, *inputs))


def torch_differentiated(fn: Any, *inputs: np.ndarray, of: Any) -> Step:
    """The same with `torch.compile`, for a function that uses the module `of`."""
    import torch

    compiled = torch.compile(fn)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    cotangent = torch.tensor(
        np.random.default_rng(1).standard_normal(tuple(compiled(*tensors).shape), np.float32)
    )

    def step() -> None:
        of.zero_grad(set_to_none=True)
        for one in tensors:
            one.grad = None
        compiled(*tensors).backward(cotangent)

    return step


def block_parts(program: Program, depth: int) -> list[Part]:
    """Norm, attention, its core and MLP, from a model of one block."""
    import torch.nn.functional as F

    params, model = (
        program.initial_state().params,
        transformer(program.config.model, "the comparison"),
    )
    random, causal = np.random.default_rng(0), model.causal
    shape = (program.config.data.batch_size, model.sizes()["position"])
    x = random.standard_normal((*shape, model.width), np.float32)
    theirs = torch_model(program)
    block: Any = theirs.blocks[0]
    rotary = getattr(theirs, "cos", None), getattr(theirs, "sin", None)

    def part(
        name: str, times: int, prefix: str, ours: Callable[[Any, jax.Array], jax.Array], fn: Any
    ) -> Part:
        own = {n: value for n, value in params.items() if n.startswith(prefix)}

        def applied(own: Any, x: jax.Array) -> jax.Array:
            graph, stacked = nnx.split(zoo_model(program, {**params, **own}).block)
            return ours(nnx.merge(graph, jax.tree.map(lambda a: a[0], stacked)), x)

        return Part(
            name, times, differentiated(applied, own, x), torch_differentiated(fn, x, of=block)
        )

    def core(own: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, causal=causal, implementation="auto")

    def torch_core(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    qkv = [
        random.standard_normal((*shape, model.num_heads, model.heads_dim), np.float32)
        for _ in range(3)
    ]
    return [
        part("norm", 2 * depth, "block.attention_norm", lambda b, x: b.attention_norm(x), block.attention_norm),
        part("attention", depth, "block.attention.", lambda b, x: b.attention(x), lambda x: block.attention(x, *rotary)),
        Part("softmax(q k) v of it", depth, differentiated(core, {}, *qkv), torch_differentiated(torch_core, *qkv, of=block), inner=True),
        part("MLP", depth, "block.mlp.", lambda b, x: b.mlp(x), block.mlp),
    ]  # fmt: skip


def ends(program: Program) -> Part:
    """A model without blocks: embedding, last norm, readout and loss. Ours also counts how many were right."""
    import torch
    import torch.nn.functional as F

    batch, params = batches_of(program, 1)[0], program.initial_state().params
    own = {n: value for n, value in params.items() if not n.startswith("block.")}

    def loss(own: Any, batch: Any) -> Any:
        model = zoo_model(program, {**params, **own})
        sums = cross_entropy_from_logits(
            model.read(model.embed(batch["inputs"])), batch["targets"], batch["weights"]
        )
        return sums.loss / sums.weight, sums

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(own, batch).compile()
    device, theirs = jax.device_put(batch), torch_model(program)
    theirs.blocks = torch.nn.ModuleList()
    inputs, targets = (
        torch.tensor(batch["inputs"]),
        torch.tensor(batch["targets"], dtype=torch.long),
    )

    @torch.compile
    def torch_loss() -> Any:
        logits = theirs(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def step() -> None:
        theirs.zero_grad(set_to_none=True)
        torch_loss().backward()

    return Part(
        "embedding, readout, loss", 1, lambda: jax.block_until_ready(grad(own, device)), step
    )


def update(program: Program) -> Part:
    """AdamW on all parameters; ours with the global norm of the gradients, and only where it is finite."""
    import torch

    from scripts.bench.pytorch import models as torch_models

    run, state, opt = program.step_inputs(), program.initial_state(), program.config.optimizer

    def updated(state: TrainState, grads: Any, run: StepInputs) -> Any:
        hyper, norm = (
            run.hyper.at(state.step),
            jnp.sqrt(jnp.sum(core_state.squares(grads, program.definition.specs))),
        )

        def moved(params: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = program.tx.update(
                grads, opt_state, params, factors=run.factors, hyper=hyper
            )
            return optax.apply_updates(params, updates), opt_state

        before = (state.params, state.opt_state)
        platform = program.layout.platform
        params, opt_state = core_state.apply_if(
            jnp.isfinite(norm), moved, before, platform=platform
        )
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state), norm

    grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-3), state.params)
    compiled = jax.jit(updated, donate_argnums=0).lower(state, grads, run).compile()

    def ours() -> None:
        nonlocal state
        state, norm = compiled(state, grads, run)
        jax.block_until_ready((state, norm))

    theirs = torch_model(program)
    for parameter in theirs.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch_models.adamw(theirs, opt.peak_lr, opt.weight_decay, opt.b1, opt.b2, opt.eps)
    return Part("AdamW", 1, ours, optimizer.step)


def zoo_model(program: Program, params: Any) -> Any:
    """The model with these parameters and the run's factors."""
    factors = program.inputs.factors
    return program.definition.model(params, factors.multiplier, factors.forward)


def torch_model(program: Program) -> Any:
    """The same in PyTorch, from the same weights."""
    from scripts.bench.pytorch import models as torch_models

    theirs = torch_models.Transformer(program.config.model)
    torch_models.load(theirs, jax.device_get(program.initial_state().params))
    return theirs


def measure(name: str, rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds a step of every part, and what of the difference it makes."""
    config = MODELS[name](ComputeConfig(), tiny=tiny)
    one_block = assemble(replace(config, model=replace(config.model, depth=1)), jax.devices()[:1])  # pyright: ignore
    whole = assemble(config, jax.devices()[:1])
    rows = []
    for part in [
        *block_parts(one_block, whole.definition.sizes["layers"]),
        ends(one_block),
        update(whole),
    ]:
        seconds = in_turns.in_turns({"mupax": part.ours, "torch_compile": part.theirs}, rounds)
        ms = {
            who: round(1e3 * statistics.median(times) * part.times, 3)
            for who, times in seconds.items()
        }
        rows.append(
            {
                **in_turns.compared(seconds, "mupax"),
                "model": f"{name}: {part.name}",
                "times": part.times,
                "inner": part.inner,
                "ms": ms,
            }
        )
    total = {
        who: round(sum(row["ms"][who] for row in rows if not row["inner"]), 3)
        for who in rows[0]["ms"]
    }
    ratio = round(total["mupax"] / total["torch_compile"], 4)
    rows.append(
        {"model": f"{name}: sum", "ms": total, "ratio": {"torch_compile": ratio}, "rounds": rounds}
    )
    return {"rows": rows}


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    model: str = "all"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code 0."""
    args = in_turns.parse(Options, argv)
    harness.check_names([args.model], [*MODELS, "all"])
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    names = list(MODELS) if args.model == "all" else [args.model]
    rows = [row for name in names for row in measure(name, args.rounds, tiny=args.tiny)["rows"]]
    for row in rows:
        print(
            f"{row['model']}: {row['ms']['mupax']:.2f} ms of a step, torch.compile {row['ms']['torch_compile']:.2f}"
        )
    in_turns.report("torch_parts", rows, args.json, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    in_turns.keep_freed_memory()
    sys.exit(main())
