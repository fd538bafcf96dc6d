"""Five models of a user's kind: written by hand, given to `check.study` with batches of evenly drawn random inputs.

Nothing in them has a name that the check knows: no `embed`, no `block`, no `internals`. Two have biases.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mupax import presets
from mupax.presets import ParamSpec, Preset, Role
from mupax.zoo.definition import Definition, define
from scripts import ROOT

VOCAB = 1024
CONTEXT = 32
HEADS = 4
_MIXER = runpy.run_path(str(ROOT / "docs" / "howto" / "mixer.py"))
WIDTHS = (64, 128, 256)


def _matrix(
    role: Role, sizes: dict[str, int], *axes: str, fan_in: tuple[str, ...] = ()
) -> nnx.Param:
    spec = ParamSpec(
        role=role,
        axes=axes,
        fan_in=fan_in,
        in_block=role not in (Role.TOKEN_EMBEDDING, Role.POSITION, Role.READOUT),
    )
    return nnx.Param(jnp.zeros([sizes[axis] for axis in axes]), spec=spec)


def _bias(of: nnx.Param, sizes: dict[str, int]) -> nnx.Param:
    spec = of.get_metadata()["spec"].bias
    return nnx.Param(jnp.zeros([sizes[axis] for axis in spec.axes]), spec=spec)


def _rms(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


class Decoder(nnx.Module):
    """A language model of one causal block, with learned positions; heads grow with the width."""

    def __init__(self, width: int, bias: bool = False, tokens: int = VOCAB) -> None:
        heads = HEADS * width // WIDTHS[0]
        sizes = {
            "embed": width,
            "heads": heads,
            "kv_heads": heads,
            "head_dim": width // heads,
            "mlp": 2 * width,
        }
        sizes |= {"vocab": tokens, "position": CONTEXT}
        self.words = _matrix(Role.TOKEN_EMBEDDING, sizes, "vocab", "embed")
        self.places = _matrix(Role.POSITION, sizes, "position", "embed")
        self.q = _matrix(Role.QUERY, sizes, "embed", "heads", "head_dim", fan_in=("embed",))
        self.k = _matrix(Role.KEY, sizes, "embed", "kv_heads", "head_dim", fan_in=("embed",))
        self.v = _matrix(Role.VALUE, sizes, "embed", "kv_heads", "head_dim", fan_in=("embed",))
        self.o = _matrix(
            Role.ATTENTION_OUT, sizes, "heads", "head_dim", "embed", fan_in=("heads", "head_dim")
        )
        self.up = _matrix(Role.MLP_IN, sizes, "embed", "mlp", fan_in=("embed",))
        self.down = _matrix(Role.MLP_OUT, sizes, "mlp", "embed", fan_in=("mlp",))
        self.out = _matrix(Role.READOUT, sizes, "embed", "vocab", fan_in=("embed",))
        self.up_bias = _bias(self.up, sizes) if bias else None
        self.down_bias = _bias(self.down, sizes) if bias else None

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h_BTD = self.words[...][tokens] + self.places[...][: tokens.shape[1]]
        x_BTD = _rms(h_BTD)
        q, k, v = (jnp.einsum("btd,dhn->bthn", x_BTD, w[...]) for w in (self.q, self.k, self.v))
        logits_BHTS = jnp.einsum("bthn,bshn->bhts", q, k) / q.shape[-1]
        causal_TS = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(causal_TS, logits_BHTS, -1e9))
        h_BTD = h_BTD + jnp.einsum("bhts,bshn,hnd->btd", weights, v, self.o[...])
        hidden = _rms(h_BTD) @ self.up[...]
        hidden = hidden if self.up_bias is None else hidden + self.up_bias[...]
        written = jax.nn.gelu(hidden) @ self.down[...]
        written = written if self.down_bias is None else written + self.down_bias[...]
        return _rms(h_BTD + written) @ self.out[...]


class Bag(nnx.Module):
    """A classifier of texts: the mean of its words' vectors, an MLP, five classes."""

    def __init__(self, width: int) -> None:
        sizes = {"embed": width, "mlp": 2 * width, "vocab": VOCAB, "classes": 5}
        self.words = _matrix(Role.TOKEN_EMBEDDING, sizes, "vocab", "embed")
        self.up = _matrix(Role.MLP_IN, sizes, "embed", "mlp", fan_in=("embed",))
        self.down = _matrix(Role.MLP_OUT, sizes, "mlp", "embed", fan_in=("mlp",))
        self.out = _matrix(Role.READOUT, sizes, "embed", "classes", fan_in=("embed",))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h_BD = _rms(self.words[...][tokens].mean(1))
        return _rms(h_BD + jax.nn.relu(h_BD @ self.up[...]) @ self.down[...]) @ self.out[...]


def _random_tokens(
    count: int, outputs: int = VOCAB, *, pooled: bool = False
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, VOCAB, (count, CONTEXT)).astype(np.int32)
    targets = rng.integers(0, outputs, (count,) if pooled else (count, CONTEXT)).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def _random_patches() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, _MIXER["POSITIONS"], _MIXER["PATCH"])).astype(np.float32)
    labels = rng.integers(0, _MIXER["CLASSES"], 32).astype(np.int32)
    return {"inputs": images, "targets": labels, "weights": np.ones(32, np.float32)}


@dataclass(frozen=True)
class OwnModel:
    """A model of a user's kind and what it is checked on."""

    make: Callable[[int], nnx.Module]
    batch: Callable[[], dict[str, np.ndarray]]

    def definitions(self) -> list[Definition]:
        """Return the model at the widths of `WIDTHS`."""
        return [_defined(self, width) for width in WIDTHS]


def _defined(model: OwnModel, width: int) -> Definition:
    return define(lambda: model.make(width))


def right(definitions: list[Definition]) -> Preset:
    """Return mup, relative to the smallest model."""
    names = ("embed", "heads", "kv_heads", "head_dim", "mlp")
    first: dict[str, Any] = definitions[0].sizes
    return presets.get("mup", base={name: first[name] for name in names if name in first})


OWN_MODELS = {
    "decoder": OwnModel(Decoder, lambda: _random_tokens(8)),
    "decoder, biases": OwnModel(lambda width: Decoder(width, bias=True), lambda: _random_tokens(8)),
    "decoder, long batch": OwnModel(Decoder, lambda: _random_tokens(64)),
    "bag of words": OwnModel(Bag, lambda: _random_tokens(32, 5, pooled=True)),
    "mixer": OwnModel(_MIXER["Mixer"], _random_patches),
}
"""An MLP-Mixer with biases as published joins them when roles know that a bias along positions is shared by all channels."""
