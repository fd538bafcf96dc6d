"""Compare the parts of a training step with the same parts under `torch.compile`.

    python -m scripts.bench.pytorch.parts [--model lm|vit] [--rounds 10] [--one-core]
        [--json FILE.json]

Shows which parts cause the ratio of `scripts.bench.pytorch.step`. Every part is compiled alone,
forward and backward, in both frameworks, and takes turns. Its time is multiplied by how often a
step has the part. Parts that are compiled alone cannot be fused with their neighbours, so their sum
is not the time of the step.
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
"""Function that computes a part of a step once and returns when the part is complete."""


@dataclass(frozen=True)
class Part:
    """One part of a step in both frameworks.

    Attributes:
        times: Number of times that a step has the part.
        inner: The part is contained in the part before, so that the sum of parts leaves it out.
    """

    name: str
    times: int
    ours: Step
    theirs: Step
    inner: bool = False


def differentiated(fn: Callable[..., jax.Array], weights: Mapping[str, Any], *inputs: Any) -> Step:
    """Compile `fn(weights, *inputs)` with its gradients by all arguments; return it as a step."""

    def output_and_gradients(cotangent: jax.Array, weights: Any, *inputs: jax.Array) -> Any:
        out, pull = jax.vjp(fn, weights, *inputs)
        return out, pull(cotangent)

    inputs = tuple(map(jnp.asarray, inputs))
    out = jax.eval_shape(fn, weights, *inputs)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape, np.float32))
    compiled = jax.jit(output_and_gradients).lower(cotangent, weights, *inputs).compile()
    return lambda: jax.block_until_ready(compiled(cotangent, weights, *inputs))


def torch_differentiated(fn: Any, *inputs: np.ndarray, module: Any) -> Step:
    """Compile `fn(*inputs)` with its gradients by `torch.compile`; return it as a step.

    Args:
        module: Module whose weights `fn` uses.
    """
    import torch

    compiled = torch.compile(fn)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    out_shape = tuple(compiled(*tensors).shape)
    cotangent = torch.tensor(np.random.default_rng(1).standard_normal(out_shape, np.float32))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        for tensor in tensors:
            tensor.grad = None
        compiled(*tensors).backward(cotangent)

    return step


def block_parts(program: Program, depth: int) -> list[Part]:
    """Return the parts of a block: norm, attention, softmax(q k) v alone, and MLP.

    Args:
        program: Program of a model with one block.
        depth: Number of blocks in the model whose step is compared.
    """
    import torch.nn.functional as F

    params = program.initial_state().params
    model = transformer(program.config.model, "the comparison")
    causal = model.causal
    random = np.random.default_rng(0)
    shape = (program.config.data.batch_size, model.sizes()["position"])
    x = random.standard_normal((*shape, model.width), np.float32)
    whole_model = torch_model(program)
    block: Any = whole_model.blocks[0]
    cos = getattr(whole_model, "cos", None)
    sin = getattr(whole_model, "sin", None)

    def part(
        name: str, times: int, prefix: str, ours: Callable[[Any, jax.Array], jax.Array], fn: Any
    ) -> Part:
        part_params = {n: value for n, value in params.items() if n.startswith(prefix)}

        def applied(part_params: Any, x: jax.Array) -> jax.Array:
            graph, stacked = nnx.split(zoo_model(program, {**params, **part_params}).block)
            first_block = nnx.merge(graph, jax.tree.map(lambda a: a[0], stacked))
            return ours(first_block, x)

        return Part(
            name,
            times,
            differentiated(applied, part_params, x),
            torch_differentiated(fn, x, module=block),
        )

    def core(params: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, causal=causal, implementation="auto")

    def torch_core(q: Any, k: Any, v: Any) -> Any:
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    head_shape = (*shape, model.num_heads, model.heads_dim)
    qkv = [random.standard_normal(head_shape, np.float32) for _ in range(3)]
    return [
        part(
            "norm",
            2 * depth,
            "block.attention_norm",
            lambda b, x: b.attention_norm(x),
            block.attention_norm,
        ),
        part(
            "attention",
            depth,
            "block.attention.",
            lambda b, x: b.attention(x),
            lambda x: block.attention(x, cos, sin),
        ),
        Part(
            "softmax(q k) v of it",
            depth,
            differentiated(core, {}, *qkv),
            torch_differentiated(torch_core, *qkv, module=block),
            inner=True,
        ),
        part("MLP", depth, "block.mlp.", lambda b, x: b.mlp(x), block.mlp),
    ]


def ends(program: Program) -> Part:
    """Return the model without blocks: embedding, last norm, readout and loss.

    mupax's part also counts the correct predictions.
    """
    import torch
    import torch.nn.functional as F

    batch = batches_of(program, 1)[0]
    params = program.initial_state().params
    part_params = {n: value for n, value in params.items() if not n.startswith("block.")}

    def loss(part_params: Any, batch: Any) -> Any:
        model = zoo_model(program, {**params, **part_params})
        sums = cross_entropy_from_logits(
            model.read(model.embed(batch["inputs"])), batch["targets"], batch["weights"]
        )
        return sums.loss / sums.weight, sums

    loss_and_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))
    compiled = loss_and_grads.lower(part_params, batch).compile()
    on_device = jax.device_put(batch)

    theirs = torch_model(program)
    theirs.blocks = torch.nn.ModuleList()
    inputs = torch.tensor(batch["inputs"])
    targets = torch.tensor(batch["targets"], dtype=torch.long)

    @torch.compile
    def torch_loss() -> Any:
        logits = theirs(inputs)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def our_step() -> None:
        jax.block_until_ready(compiled(part_params, on_device))

    def torch_step() -> None:
        theirs.zero_grad(set_to_none=True)
        torch_loss().backward()

    return Part("embedding, readout, loss", 1, our_step, torch_step)


def update(program: Program) -> Part:
    """Return the part of the optimizer: the update of all parameters by AdamW."""
    import torch

    from scripts.bench.pytorch import models as torch_models

    opt = program.config.optimizer
    theirs = torch_model(program)
    for parameter in theirs.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch_models.adamw(theirs, opt.peak_lr, opt.weight_decay, opt.b1, opt.b2, opt.eps)
    return Part("AdamW", 1, our_update(program), optimizer.step)


def our_update(program: Program) -> Step:
    """Compile the run's optimizer on all parameters and return it as a step.

    As in training, it also computes the global norm of the gradients and updates only if the norm
    is finite.
    """
    step_inputs = program.step_inputs()
    state = program.initial_state()

    def updated(state: TrainState, grads: Any, step_inputs: StepInputs) -> Any:
        hyper = step_inputs.hyper.at(state.step)
        norm = jnp.sqrt(jnp.sum(core_state.squares(grads, program.definition.specs)))

        def apply_updates(params: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = program.tx.update(
                grads, opt_state, params, factors=step_inputs.factors, hyper=hyper
            )
            return optax.apply_updates(params, updates), opt_state

        before = (state.params, state.opt_state)
        platform = program.layout.platform
        params, opt_state = core_state.apply_if(
            jnp.isfinite(norm), apply_updates, before, platform=platform
        )
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state), norm

    random = np.random.default_rng(2)
    grads = {}
    for name, leaf in state.params.items():
        grads[name] = jnp.asarray(random.standard_normal(leaf.shape, np.float32))
    compiled = jax.jit(updated, donate_argnums=0).lower(state, grads, step_inputs).compile()

    def ours() -> None:
        nonlocal state
        state, norm = compiled(state, grads, step_inputs)
        jax.block_until_ready((state, norm))

    return ours


def zoo_model(program: Program, params: Any) -> Any:
    """Return mupax's model with given parameters and the multipliers of the run's preset."""
    factors = program.inputs.factors
    return program.definition.model(params, factors.multiplier, factors.forward)


def torch_model(program: Program) -> Any:
    """Return the PyTorch model with the weights that the run starts from."""
    from scripts.bench.pytorch import models as torch_models

    theirs = torch_models.Transformer(program.config.model)
    torch_models.load(theirs, jax.device_get(program.initial_state().params))
    return theirs


def measure(name: str, rounds: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Measure every part of a model's step, and return a row for each and a row for their sum.

    The `ms` of a row are milliseconds of a whole step: the part's median time, times the number of
    such parts in a step.
    """
    config = MODELS[name](ComputeConfig(), tiny=tiny)
    one_layer = replace(config, model=replace(config.model, depth=1))  # pyright: ignore
    one_block = assemble(one_layer, jax.devices()[:1])
    program = assemble(config, jax.devices()[:1])
    depth = program.definition.sizes["layers"]

    rows = []
    for part in [*block_parts(one_block, depth), ends(one_block), update(program)]:
        seconds = in_turns.in_turns({"mupax": part.ours, "torch_compile": part.theirs}, rounds)
        milliseconds = {}
        for side, times in seconds.items():
            milliseconds[side] = round(1e3 * statistics.median(times) * part.times, 3)
        rows.append(
            {
                **in_turns.compared(seconds, "mupax"),
                "model": f"{name}: {part.name}",
                "times": part.times,
                "inner": part.inner,
                "ms": milliseconds,
            }
        )

    total = {}
    for side in rows[0]["ms"]:
        total[side] = round(sum(row["ms"][side] for row in rows if not row["inner"]), 3)
    ratio = round(total["mupax"] / total["torch_compile"], 4)
    rows.append(
        {"model": f"{name}: sum", "ms": total, "ratio": {"torch_compile": ratio}, "rounds": rounds}
    )
    return rows


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    model: str = "all"
    """Model to measure, lm, vit or all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen models, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    harness.check_names([args.model], [*MODELS, "all"])
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    names = list(MODELS) if args.model == "all" else [args.model]
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += measure(name, args.rounds, tiny=args.tiny)
    for row in rows:
        ms = row["ms"]
        print(
            f"{row['model']}: {ms['mupax']:.2f} ms of a step, "
            f"torch.compile {ms['torch_compile']:.2f}"
        )
    in_turns.report("torch_parts", rows, args.json, torch=torch.__version__)
    return 0


if __name__ == "__main__":
    in_turns.keep_freed_memory()
    sys.exit(main())
