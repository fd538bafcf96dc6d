"""Models of ours that no layout of `transformers` holds, written as others with the same logits.

Fixed positions are written as learned ones with the same values. Experts with a capacity are
written without it, which is the same wherever no token is dropped. Reading such a file gives the
model that was written, and not the original one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mupax.zoo.configs import ViTConfig
from mupax.zoo.transformer import TransformerConfig
from mupax.zoo.vit.sines import sines


class Equivalent(NamedTuple):
    """Model to write in place of another, and what a user should know about it."""

    model: TransformerConfig
    params: Mapping[str, np.ndarray]
    """Parameters that the written model has in addition to those of the original."""
    notes: list[str]
    """One sentence per change. Empty if the model is the original."""


def equivalent(model: TransformerConfig) -> Equivalent:
    """Return a model to write to a file of `transformers`, which has no place for some features.

    The fixed positions of a ViT become learned ones of the same values, and experts lose their
    capacity, so that no token is dropped. Any other model is returned unchanged, without notes.
    """
    params: dict[str, np.ndarray] = {}
    notes = []
    if isinstance(model, ViTConfig) and model.sincos:
        params["position"] = sines(model)
        model = dataclasses.replace(model, sincos=False)
        notes.append(
            "model.sincos: the fixed sines are written as learned positions, the same logits; "
            "read again, the table is trained"
        )
    capacity = model.routing.capacity_factor
    if model.experts is not None and capacity is not None:
        routing = dataclasses.replace(model.routing, capacity_factor=None)
        model = dataclasses.replace(model, routing=routing)
        notes.append(
            "model.routing.capacity_factor: the code of transformers drops no token; "
            f"logits differ where experts here had more than {capacity:g} times their share of "
            "tokens (--model.routing.capacity-factor none drops none)"
        )
    return Equivalent(model, params, notes)
