"""Models that no layout of `transformers` holds, as the one beside them that some layout does: the same logits from other fields.

Fixed positions are written as learned ones that have their values. Experts under a capacity are written without it, which is the
same wherever nothing is dropped. Reading such a file gives the model that was written; each change has a sentence that says so.
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
    """A model to write in place of another, and what to know of it."""

    model: TransformerConfig
    params: Mapping[str, np.ndarray]
    """Parameters that it has and the other has not."""
    notes: list[str]
    """One sentence for each change; empty where the model is the other one."""


def equivalent(model: TransformerConfig) -> Equivalent:
    """The model that a file is written of.

    Args:
        model: any; one that needs no change comes back itself.
    """
    params: dict[str, np.ndarray] = {}
    notes = []
    if isinstance(model, ViTConfig) and model.sincos:
        params["position"] = sines(model)
        model = dataclasses.replace(model, sincos=False)
        notes.append(
            "model.sincos: the fixed sines are written as learned positions, the same logits; read again, the table is trained"
        )
    if model.experts is not None and (capacity := model.routing.capacity_factor) is not None:
        model = dataclasses.replace(
            model, routing=dataclasses.replace(model.routing, capacity_factor=None)
        )
        notes.append(
            f"model.routing.capacity_factor: the code of transformers drops no token; logits differ where experts here had more than "
            f"{capacity:g} times their share of tokens (--model.routing.capacity-factor none drops none)"
        )
    return Equivalent(model, params, notes)
