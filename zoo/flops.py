"""Parameters and FLOPs of a config, counted from its declaration alone: no JAX, nothing built.

Counted are the matrix products, 2 FLOPs per multiply-add: norms, softmax, activations and embedding look-ups are left out, as is
whatever remat computes again. A causal position attends to half of the context on average and is counted so, whatever the
implementation computes. PaLM's MFU (Chowdhery et al. 2022, 2204.02311, appendix B) counts attention in full, 12 L H Q T a
token, causal or not: by it the same step has a higher MFU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mupax.presets.roles import ENCODER, EXPERTS, OWN, ParamSpec, Role, Stack
from mupax.zoo.families import ModelConfig

KINDS = {
    Role.PATCH_EMBEDDING: "read-in",
    Role.QUERY: "attention projections",
    Role.KEY: "attention projections",
    Role.VALUE: "attention projections",
    Role.ATTENTION_OUT: "attention projections",
    Role.MLP_IN: "mlp",
    Role.MLP_OUT: "mlp",
    Role.ROUTER: "router",
    Role.EXPERT_IN: "experts",
    Role.EXPERT_OUT: "experts",
    Role.LORA_A: "adapters",
    Role.LORA_B: "adapters",
    Role.HIDDEN: "hidden",
    Role.READOUT: "readout",
}


class Blocks(NamedTuple):
    """A residual stack at its sizes."""

    stack: Stack
    depth: int
    length: int
    """Positions of its stream."""
    memory: int
    """Positions of an encoder's output that every block reads; 0 without one."""
    specs: tuple[ParamSpec, ...]
    """Parameters of one block."""


def stacks(model: ModelConfig) -> tuple[Blocks, ...]:
    """The residual stacks of a model, its own last; of one without factors a stack of the usual branches."""
    sizes, blocks = model.sizes(), []
    for stack in dict.fromkeys([of.stack for of in model.factors().values() if of.kind == "branch"] or [OWN]):
        encodes = stack == ENCODER
        specs = [of for of in model.parameters().values() if of.in_block and (of.part == "encoder") == encodes]
        length, memory = sizes.get("source" if encodes else "position", 0), "cross" in stack.branches
        blocks.append(
            Blocks(stack, sizes.get(stack.axis, 0), length, sizes.get("source", 0) if memory else 0, tuple(specs))
        )
    return tuple(blocks)


def params(model: ModelConfig) -> int:
    """Trainable numbers of the built model."""
    sizes = model.sizes()
    return sum(math.prod(sizes[axis] for axis in spec.axes) for spec in model.parameters().values())


def forward_terms(model: ModelConfig) -> dict[str, float]:
    """FLOPs of one forward pass by kind of matrix product, per token (decoder, at full context) or per image."""
    sizes, terms = model.sizes(), dict.fromkeys(KINDS.values(), 0.0)
    for spec in [*model.parameters().values(), model.tied_readout]:
        if spec and spec.fan_in:
            share = sizes["active"] / sizes["experts"] if spec.role in EXPERTS else 1  # that a token goes through
            weights = math.prod(sizes[axis] for axis in spec.axes) * share
            terms[KINDS[spec.role]] += 2 * weights * model.applications(spec)
    return {kind: flops for kind, flops in {**terms, "attention": model.attention_flops()}.items() if flops}


def forward_flops(model: ModelConfig) -> float:
    """FLOPs of one forward pass of the network, per token (decoder, at full context) or per image."""
    return float(sum(forward_terms(model).values()))


def train_flops(model: ModelConfig) -> float:
    """FLOPs of one training step per token or image.

    The forward pass, a backward pass of twice that, and for a centred model the frozen initial network's forward pass.
    """
    return (4 if model.centered else 3) * forward_flops(model)
