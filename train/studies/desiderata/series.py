"""Models in which one dimension alone doubles, and the slopes of what their mappings do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.presets import Preset
from mupax.train.core import factors
from mupax.train.studies.check import check
from mupax.train.studies.desiderata import mappings
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.transformer import TransformerConfig

OF_TOKENS = ("positions", "targets")
"""Dimensions that count tokens; in these every position sees all."""
_HEADS, _DIM, _WIDTH, _HIDDEN, _TOKENS = 4, 32, 128, 512, 8


def grown(model: ModelConfig, dimension: str, count: int) -> list[TransformerConfig]:
    """Models of a structure where one dimension alone doubles, from sizes at which exponents of large ones show.

    Args:
        model: whose structure; it gets as many key heads as query heads, no tie, and tables of its own for an encoder.
        dimension: of `growths`; positions are of text only.
        count: how many.
    """
    tokens = {"vocab_size": 512, "seq_len": _TOKENS, "tied": False} if model.task == "tokens" else {"num_classes": 512}
    if model.denoises:
        tokens |= {"shared": False, "encoder_depth": 2}
    start: Any = check.smallest(dataclasses.replace(model, value_dim=None))  # pyright: ignore[reportCallIssue]

    def sized(m: int) -> TransformerConfig:
        part = 1 if model.denoises else 2  # with an encoder powers show from twice the width on
        heads, head_dim, value_dim, width, hidden, depth = _HEADS, _DIM, _DIM, _WIDTH, _HIDDEN, 2
        sizes = dict(tokens)
        match dimension:
            case "d_k":
                head_dim *= m
            case "d_v":
                value_dim *= m
            case "d_ff":
                hidden *= m
            case "d_model":
                width = width // part * m
            case "heads":
                heads *= m
            case "width":
                heads, width, hidden = heads // part * m, width // part * m, hidden // part * m
            case "positions":
                # Fewer tokens than d_model, more than d_k; one layer: attention has tokens share what they were independent in.
                width, head_dim, value_dim, depth = 1024, 16, 16, 1
                sizes = {**tokens, "seq_len": 64 * m, "vocab_size": 4096}
            case "targets":
                width, head_dim, value_dim, depth = 1024, 16, 16, 1
                sizes = {**tokens, "target_len": 64 * m, "vocab_size": 4096, "encoder_depth": 1}
            case "depth":
                depth *= 4 * m
            case "encoder_depth":
                sizes["encoder_depth"] = 8 * m
        return dataclasses.replace(
            start, width=width, num_heads=heads, head_dim=head_dim, value_dim=value_dim, num_kv_heads=None,
            mlp_ratio=hidden / width, depth=depth, **sizes,
        )  # fmt: skip

    return [sized(2**k) for k in range(count)]


def batch(model: ModelConfig, dimension: str) -> dict[str, np.ndarray]:
    """Few random tokens, so that those of no size are more than the width; no padding.

    Args:
        model: of `grown`.
        dimension: that grows.
    """
    few = {name: array[: 1 if dimension in OF_TOKENS else 2] for name, array in check.even_batch(model).items()}
    return few | ({"input_mask": np.ones_like(few["inputs"])} if model.denoises else {})


def base(smallest: TransformerConfig, dimension: str) -> dict[str, int]:
    """What presets are relative to: the smallest model, but one layer, so that branches are small at every depth.

    With an encoder d_k is 8 times the base's from the start: logits taken by 1/d_k are small throughout, as is what the encoder gets
    back through keys, whose power is another than that through values.

    Args:
        smallest: of `grown`.
        dimension: that grows.
    """
    sizes = smallest.base_sizes()
    if dimension == "d_k" and smallest.denoises:
        return {**sizes, "head_dim": _DIM // 8}
    blocks = {"layers", "encoder_layers"} & sizes.keys() if dimension.endswith("depth") else ()
    return {**sizes, **dict.fromkeys(blocks, 1)}


class Series:
    """A structure at growing sizes, each compiled once for all presets.

    Args:
        definitions: at growing sizes.
        batches: one for each.
        seeds: initializations of each.
        masked: a causal model sees no later positions.
    """

    def __init__(
        self,
        definitions: Sequence[Definition],
        batches: Sequence[Mapping[str, Any]],
        seeds: int,
        *,
        masked: bool = True,
    ) -> None:
        self.definitions, self._batches, self._seeds = definitions, batches, np.arange(seeds, dtype=np.uint32)

        def program(definition: Definition) -> Any:
            def one(seed: Any, stds: Any, numbers: Any, batch: Any) -> mappings.Mappings:
                return mappings.measure(definition, definition.initialize(seed, stds), numbers, batch, masked=masked)

            return jax.jit(lambda seeds, *arrays: jax.lax.map(lambda seed: one(seed, *arrays), seeds))

        self._programs = [program(definition) for definition in definitions]

    def slopes(self, preset: Preset) -> dict[str, dict[str, float]]:
        """Log-log slopes over sizes, means over seeds, by field of `Mappings` and name.

        Args:
            preset: relative to the smallest size, or absolute.
        """
        records = []
        rule = "sgd" not in preset.no_rule
        for program, definition, batch in zip(self._programs, self.definitions, self._batches, strict=True):
            numbers = factors.resolve(preset, definition, "sgd" if rule else preset.optimizers[0], "independent")
            stds = factors.init_stds(preset, definition)
            records.append(jax.device_get(program(self._seeds, stds, numbers, batch))._asdict())
        x = np.arange(len(records)) - (len(records) - 1) / 2

        def slope(what: str, name: str) -> float:
            y = np.log2([np.exp(np.mean(np.log(at[what][name]))) for at in records])
            return float(x @ y / (x @ x))

        return {what: {name: slope(what, name) for name in records[0][what]} for what in records[0]}
