"""Whole runs in PyTorch on the batches of a recipe's data: nanoGPT's recipe for characters, and AdamW on models of our size.

B batch, T positions, H height, W width, C channels.
"""

# Torch is optional and in no lock file.
# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mupax.train.data import Data
from mupax.zoo import configs
from mupax.zoo.configs import DecoderConfig, ViTConfig
from scripts.bench.pytorch import models as torch_models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW with linear warm-up and a cosine, as nanoGPT's `train.py` has them.

    Attributes:
        model: in our terms; PyTorch's own starts, matrices of N(0, 0.02), those that end a branch over (2 depth)^1/2.
        b2: of AdamW.
        weight_decay: of matrices, as PyTorch counts it.
        warmup: steps.
        final: last rate over the peak.
        compiled: whether by `torch.compile`.
    """

    model: DecoderConfig | ViTConfig
    b2: float
    weight_decay: float = 0.1
    warmup: int = 100
    final: float = 0.1
    compiled: bool = False

    def rate(self, step: int, steps: int) -> float:
        """Of a step, over the peak."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        along = (step - self.warmup) / max(1, steps - self.warmup)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * along))


def start(recipe: Recipe, seed: int) -> torch_models.Transformer:
    """The model before its first step."""
    torch.manual_seed(seed)
    model = torch_models.Transformer(recipe.model)
    for name, w in model.named_parameters():
        if w.ndim > 1:
            ends = name.endswith(("out.weight", "down.weight"))
            torch.nn.init.normal_(w, std=0.02 / (2 * recipe.model.depth) ** 0.5 if ends else 0.02)
    return model


RECIPES = {
    "nanogpt": Recipe(
        model=DecoderConfig(
            width=128, depth=4, num_heads=4, vocab_size=256, seq_len=128, bias=False, activation="gelu_exact", tied=True
        ),
        b2=0.99,
    ),
    "control": Recipe(
        model=dataclasses.replace(configs.get("lm-proxy"), depth=4),  # pyright: ignore[reportArgumentType]
        b2=0.95,
        final=0.0,
        compiled=True,
    ),
    "images": Recipe(model=configs.get("vit-tiny"), b2=0.95, warmup=50, final=0.0, compiled=True),  # pyright: ignore[reportArgumentType]
}
"""nanoGPT's config/train_shakespeare_char.py at the sizes of its README's run on a CPU, with our context and bytes; and AdamW."""


class Run:
    """A recipe on some data, on one thread.

    Args:
        recipe: what trains.
        data: whose batches, in their order.
    """

    def __init__(self, recipe: Recipe, data: Data) -> None:
        torch.set_num_threads(1)
        self.recipe, self.data = recipe, data
        self.count = sum(w.numel() for w in start(recipe, 0).parameters())

    def seconds(self, steps: int = 12) -> float:
        """Of CPU, of one step."""
        times = [time.process_time() for _ in self._steps(1e-4, steps, 0)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times[2:]))

    def train(self, lr: float, steps: int, seed: int = 0) -> dict[str, Any]:
        """Validation loss after so many steps (nats a target), and what they took."""
        began = time.process_time()
        *_, model = self._steps(lr, steps, seed)
        seconds = time.process_time() - began
        return {"rate": lr, "steps": steps, "cpu_seconds": round(seconds, 1), "loss": round(self.loss(model), 4)}

    def _steps(self, lr: float, steps: int, seed: int) -> Iterator[torch_models.Transformer]:
        recipe, model = self.recipe, start(self.recipe, seed)
        optimizer = torch_models.adamw(model, lr, recipe.weight_decay, 0.9, recipe.b2, 1e-8)
        forward: Any = torch.compile(loss_of) if recipe.compiled else loss_of
        with contextlib.closing(self.data.train_batches(0)) as batches:
            for step, batch in zip(range(steps), batches, strict=False):
                for group in optimizer.param_groups:
                    group["lr"] = lr * recipe.rate(step, steps)
                optimizer.zero_grad(set_to_none=True)
                forward(model, *arrays(batch)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                yield model

    @torch.no_grad()
    def loss(self, model: torch_models.Transformer) -> float:
        """Over the evaluation examples, nats a target."""
        total = weight = 0.0
        for batch in self.data.eval_batches():
            inputs, targets = arrays(batch)
            logits = model(inputs)
            nll = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), reduction="none")
            counts = torch.tensor(np.ascontiguousarray(batch["weights"])).view(-1)
            total, weight = total + float((nll * counts).sum()), weight + float(counts.sum())
        return total / weight


def loss_of(model: torch_models.Transformer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean nats a target, of tokens and targets [B, T] or of images [B, H, W, C] and targets [B]."""
    logits = model(inputs)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def arrays(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a batch (`loss_of`), as PyTorch takes them."""
    inputs, targets = (np.ascontiguousarray(batch[name]) for name in ("inputs", "targets"))
    return torch.tensor(inputs), torch.tensor(targets, dtype=torch.long)
