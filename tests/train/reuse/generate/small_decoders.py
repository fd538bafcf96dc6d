"""Small decoders with noise in their parameters, on one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from mupax.train.config.run import Config, DataConfig, MeshConfig, PresetConfig
from mupax.train.core.program import Program, assemble
from mupax.zoo.configs import DecoderConfig

SEQ_LEN = 12
VOCAB = 17
LLAMA = DecoderConfig(
    width=24,
    depth=2,
    num_heads=6,
    num_kv_heads=2,
    mlp_ratio=1.25,
    vocab_size=VOCAB,
    seq_len=SEQ_LEN,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
CENTERED = DecoderConfig(
    width=20, depth=2, num_heads=5, mlp_ratio=1.5, vocab_size=VOCAB, seq_len=SEQ_LEN, centered=True
)


@functools.cache
def program_of(model: DecoderConfig) -> tuple[Program, Any, Any]:
    """Return a program, its inputs, and parameters that differ from those of its reference."""
    config = Config(
        recipe="tiny",
        model=model,
        data=DataConfig(name="text:x", batch_size=1),
        mesh=MeshConfig(data=1),
        steps=1,
        preset=PresetConfig(name="mup"),
    )
    program = assemble(config, jax.devices()[:1])
    noise = np.random.default_rng(2)
    params = {}
    for name, w in program.initial_state().params.items():
        params[name] = w + 0.3 * noise.standard_normal(w.shape).astype(np.float32)
    return program, program.step_inputs(), params
