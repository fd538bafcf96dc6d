"""Small models for the coordinate check: a named model's structure at sizes that grow by doubling, and one batch for all."""

from __future__ import annotations

import dataclasses

import numpy as np

from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.transformer import TransformerConfig, transformer

_WIDTH, _HEADS, _DEPTH, _POSITIONS, _VOCAB, _EXAMPLES = 64, 4, 2, 16, 64, 8


def smallest(model: ModelConfig) -> TransformerConfig:
    """The model's structure at the check's smallest size: width 64, 4 heads, depth 2, 16 positions."""
    model = transformer(model, "growing one size")
    kv = None if model.num_kv_heads is None else max(1, _HEADS * model.kv_heads // model.num_heads)
    mlp_ratio = round(model.mlp_ratio * _WIDTH) / _WIDTH
    shared = {
        "width": _WIDTH,
        "num_heads": _HEADS,
        "head_dim": None,
        "num_kv_heads": kv,
        "depth": _DEPTH,
        "mlp_ratio": mlp_ratio,
        # A few steps of small models: what takes time is compiling them.
        "compute": dataclasses.replace(model.compute, layers="scan"),
    }
    inputs = {"tokens": {"vocab_size": _VOCAB, "seq_len": _POSITIONS}, "images": {"image_size": 8, "patch_size": 2}}
    return dataclasses.replace(model, **shared, **inputs[model.task], centered=False)


def series(model: ModelConfig, axis: str, count: int) -> list[TransformerConfig]:
    """`count` models from the smallest on, one size doubling.

    Args:
        model: whose structure.
        axis: head_dim, heads, depth, width (heads and head_dim in turn), mlp alone, or kv_heads alone (of 8 query heads).
        count: how many.
    """
    return [_grown(smallest(model), axis, doublings) for doublings in range(count)]


def _grown(model: TransformerConfig, axis: str, doublings: int) -> TransformerConfig:
    by = 2**doublings
    match axis:
        case "depth":
            return dataclasses.replace(model, depth=model.depth * by)
        case "mlp":
            return dataclasses.replace(model, mlp_ratio=model.mlp_ratio * by)
        case "kv_heads":
            if by > 2 * _HEADS:
                raise ConfigError(
                    f"key heads grow from 1 to {2 * _HEADS}; write --sizes {(2 * _HEADS).bit_length()} or fewer"
                )
            return dataclasses.replace(model, num_heads=2 * _HEADS, num_kv_heads=by)
    heads = {"head_dim": 1, "heads": by, "width": 2 ** (doublings // 2)}
    if axis not in heads:
        raise ConfigError(f"no size is named {axis!r}; write {', '.join(heads)}, depth, mlp or kv_heads")
    kv = None if model.num_kv_heads is None else model.kv_heads * heads[axis]
    return dataclasses.replace(model, width=model.width * by, num_heads=model.num_heads * heads[axis], num_kv_heads=kv)


def batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Random inputs with random labels, from a fixed seed: what every size trains on."""
    rng = np.random.default_rng(0)
    outputs, example = model.sizes()[model.output_axis], model.example()["inputs"].shape
    if model.task == "images":
        shape = (2 * _EXAMPLES, *example)
        targets = rng.integers(0, outputs, shape[0]).astype(np.int32)
        inputs = rng.standard_normal(shape).astype(np.float32)
    else:
        tokens = rng.integers(0, outputs, (_EXAMPLES, example[0] + 1)).astype(np.int32)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}
