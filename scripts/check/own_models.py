"""Five models as a user would write them, for `check.study`, with batches of uniform random inputs.

Nothing in them has a name that the check knows: no `embed`, no `block`, no `internals`. Two have
biases. Used by `campaign`.
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

# Shapes: B batch, T and S positions, D width, H heads, N head dimension, F hidden units.
VOCAB = 1024
CONTEXT = 32
HEADS = 4
"""Number of heads at the smallest width."""
# The example of the docs is a file of a user's kind, not a module.
_MIXER = runpy.run_path(str(ROOT / "docs" / "howto" / "mixer.py"))
WIDTHS = (64, 128, 256)


def _matrix(
    role: Role, sizes: dict[str, int], *axes: str, fan_in: tuple[str, ...] = ()
) -> nnx.Param:
    """Return a parameter of zeros with the given logical axes and its `ParamSpec`."""
    spec = ParamSpec(
        role=role,
        axes=axes,
        fan_in=fan_in,
        in_block=role not in (Role.TOKEN_EMBEDDING, Role.POSITION, Role.READOUT),
    )
    # The values do not count: a preset draws the initial ones.
    return nnx.Param(jnp.zeros([sizes[axis] for axis in axes]), spec=spec)


def _bias(matrix: nnx.Param, sizes: dict[str, int]) -> nnx.Param:
    """Return a bias of zeros for the outputs of a matrix."""
    spec = matrix.get_metadata()["spec"].bias
    return nnx.Param(jnp.zeros([sizes[axis] for axis in spec.axes]), spec=spec)


def _rms(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


class Decoder(nnx.Module):
    """Language model of one causal block with learned positions. Heads grow with the width."""

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
        q_BTHN = jnp.einsum("btd,dhn->bthn", x_BTD, self.q[...])
        k_BSHN = jnp.einsum("btd,dhn->bthn", x_BTD, self.k[...])
        v_BSHN = jnp.einsum("btd,dhn->bthn", x_BTD, self.v[...])
        # mup divides by the head dimension, where standard attention divides by its root.
        logits_BHTS = jnp.einsum("bthn,bshn->bhts", q_BTHN, k_BSHN) / q_BTHN.shape[-1]
        causal_TS = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        weights = jax.nn.softmax(jnp.where(causal_TS, logits_BHTS, -1e9))
        h_BTD = h_BTD + jnp.einsum("bhts,bshn,hnd->btd", weights, v_BSHN, self.o[...])

        hidden_BTF = _rms(h_BTD) @ self.up[...]
        if self.up_bias is not None:
            hidden_BTF = hidden_BTF + self.up_bias[...]
        update_BTD = jax.nn.gelu(hidden_BTF) @ self.down[...]
        if self.down_bias is not None:
            update_BTD = update_BTD + self.down_bias[...]
        return _rms(h_BTD + update_BTD) @ self.out[...]


class Bag(nnx.Module):
    """Text classifier with five classes: the mean of the word vectors and an MLP."""

    def __init__(self, width: int) -> None:
        sizes = {"embed": width, "mlp": 2 * width, "vocab": VOCAB, "classes": 5}
        self.words = _matrix(Role.TOKEN_EMBEDDING, sizes, "vocab", "embed")
        self.up = _matrix(Role.MLP_IN, sizes, "embed", "mlp", fan_in=("embed",))
        self.down = _matrix(Role.MLP_OUT, sizes, "mlp", "embed", fan_in=("mlp",))
        self.out = _matrix(Role.READOUT, sizes, "embed", "classes", fan_in=("embed",))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        h_BD = _rms(self.words[...][tokens].mean(1))
        update_BD = jax.nn.relu(h_BD @ self.up[...]) @ self.down[...]
        return _rms(h_BD + update_BD) @ self.out[...]


def _random_tokens(
    count: int, outputs: int = VOCAB, *, pooled: bool = False
) -> dict[str, np.ndarray]:
    """Return a batch of random tokens.

    Args:
        count: Number of sequences of `CONTEXT` tokens.
        outputs: Number of classes, `VOCAB` by default.
        pooled: One target per sequence in place of one per token.
    """
    rng = np.random.default_rng(1)
    inputs = rng.integers(0, VOCAB, (count, CONTEXT)).astype(np.int32)
    target_shape = (count,) if pooled else (count, CONTEXT)
    targets = rng.integers(0, outputs, target_shape).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def _random_patches() -> dict[str, np.ndarray]:
    """Return a batch of 32 random images, cut into patches, for the mixer."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, _MIXER["POSITIONS"], _MIXER["PATCH"])).astype(np.float32)
    labels = rng.integers(0, _MIXER["CLASSES"], 32).astype(np.int32)
    return {"inputs": images, "targets": labels, "weights": np.ones(32, np.float32)}


@dataclass(frozen=True)
class OwnModel:
    """Model class with the function that makes its batch.

    Attributes:
        make: Function from a width to the model.
    """

    make: Callable[[int], nnx.Module]
    batch: Callable[[], dict[str, np.ndarray]]

    def definitions(self) -> list[Definition]:
        """Return the model at the widths of `WIDTHS`."""
        return [_defined(self, width) for width in WIDTHS]


def _defined(model: OwnModel, width: int) -> Definition:
    return define(lambda: model.make(width))


def right(definitions: list[Definition]) -> Preset:
    """Return mup with the smallest model as its base."""
    names = ("embed", "heads", "kv_heads", "head_dim", "mlp")
    smallest: dict[str, Any] = definitions[0].sizes
    # Not every model has heads.
    base = {}
    for name in names:
        if name in smallest:
            base[name] = smallest[name]
    return presets.get("mup", base=base)


OWN_MODELS = {
    "decoder": OwnModel(Decoder, lambda: _random_tokens(8)),
    "decoder, biases": OwnModel(lambda width: Decoder(width, bias=True), lambda: _random_tokens(8)),
    "decoder, long batch": OwnModel(Decoder, lambda: _random_tokens(64)),
    "bag of words": OwnModel(Bag, lambda: _random_tokens(32, 5, pooled=True)),
    "mixer": OwnModel(_MIXER["Mixer"], _random_patches),
}
"""Models by name.

The mixer of the docs has no biases. The published one has, but roles do not know yet that all
channels share a bias along positions.
"""
