"""Text from a decoder with a cache: the prompt is read whole, then every token costs one position. Loops run on the devices.

B samples, P prompt tokens, S longest context, V vocabulary. What is drawn depends on the seed, the sample's number and the
token's number alone: not on how many samples or tokens are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.core.step import StepInputs
from mupax.train.parallel.sharding import MeshLayout
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.zoo import partition
from mupax.zoo.definition import Arrays, Definition
from mupax.zoo.layers import cache as caches
from mupax.zoo.param import multiplied
from mupax.zoo.transformer import TransformerConfig

MOST = 64
"""Tokens that the devices make before the host looks at them, at most."""
_LIVELY_S = 0.1
"""How long a reader may wait for the next tokens, where one does not take longer."""


DEFAULT = Sampling()


def draw(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """A token per row, int32 [B]; each row with a key of its own."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    scaled_BV, categorical = logits_BV / sampling.temperature, jax.vmap(jax.random.categorical)
    if sampling.top_k is None and sampling.top_p is None:
        return categorical(keys_B, scaled_BV).astype(jnp.int32)
    vocab = logits_BV.shape[-1]
    best_BK, ids_BK = jax.lax.top_k(scaled_BV, min(sampling.top_k or vocab, vocab))
    if sampling.top_p is not None:
        share_BK = jax.nn.softmax(best_BK, axis=-1)
        likelier_BK = jnp.cumsum(share_BK, axis=-1) - share_BK
        best_BK = jnp.where(likelier_BK < sampling.top_p, best_BK, -jnp.inf)
    picked_B = categorical(keys_B, best_BK)
    return jnp.take_along_axis(ids_BK, picked_B[:, None], axis=-1)[:, 0]


class _Said(NamedTuple):
    """Where a text stands on the devices: one cache per network, and the newest token, which none has read yet."""

    caches: tuple[caches.Cache, ...]
    token_B: jax.Array
    sound: jax.Array
    """Whether all logits so far were numbers, bool []."""


class Generator:
    """Continues texts with one model. Compiles once per power of two of prompt lengths, and once for all further tokens.

    Args:
        definition: of the model.
        model: its config.
        params: of the model.
        numbers: given to it beside them; with a reference where its output is centred.
        sampling: how tokens are drawn.
        samples: B, texts made side by side from one prompt.
        layout: the mesh that the parameters lie on; None for one device.

    Raises:
        DecodingError: a number out of its range.
    """

    def __init__(
        self,
        definition: Definition,
        model: TransformerConfig,
        params: Arrays,
        numbers: StepInputs,
        *,
        sampling: Sampling = DEFAULT,
        samples: int = 1,
        layout: MeshLayout | None = None,
    ) -> None:
        sampling.check()
        if samples < 1:
            raise DecodingError(f"samples is {samples}; write at least 1")
        self._definition, self._model, self._sampling, self.samples = definition, model, sampling, samples
        self._layout, self._forward = layout, numbers.factors.forward
        self._traces = 0
        networks = (params,) if numbers.reference is None else (params, numbers.reference)
        # Multiplied once, not for every token.
        apart = jax.jit(lambda networks, by: tuple(multiplied(dict(one), by) for one in networks))
        self._weights = apart(networks, numbers.factors.multiplier)
        whole = None if layout is None else layout.whole
        self._fill = jax.jit(self._filled, out_shardings=None if whole is None else _Said(None, whole, whole))  # pyright: ignore
        told = None if whole is None else (_Said(None, whole, whole), whole)  # pyright: ignore[reportArgumentType]
        self._extend = jax.jit(self._extended, donate_argnums=2, out_shardings=told)

    def complete(self, prompt: np.ndarray, length: int, seed: int = 0) -> np.ndarray:
        """`length` new tokens after the prompt, int32 [B, length]; arguments and errors as for `stream`."""
        parts = list(self.stream(prompt, length, seed))
        return np.concatenate(parts, axis=1) if parts else np.zeros((self.samples, 0), np.int32)

    def stream(self, prompt: np.ndarray, length: int, seed: int = 0) -> Iterator[np.ndarray]:
        """New tokens as they are made, int32 [B, n] with n from 1 to `MOST`.

        The context is at most S tokens: of a longer prompt the last S are read. Where it is full, it begins anew with the
        last S/2 tokens of the text, so that a token is drawn with S/2 to S tokens before it.

        Args:
            prompt: tokens to continue, integers [P], P >= 1.
            length: tokens to add.
            seed: of the draws.

        Raises:
            DecodingError: the prompt is empty, or the logits are not numbers: the model has diverged.
        """
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
            raise DecodingError(f"a prompt is at least one token; this one is {prompt.dtype} of shape {prompt.shape}")
        limit, key = self._model.sizes()["position"], jax.random.key(seed)
        text_BT = np.broadcast_to(prompt.astype(np.int32), (self.samples, prompt.size))[:, -limit:]
        said, made, held, count = None, 0, limit, 1
        while made < length:
            began = time.monotonic()
            if said is None or held == limit:
                context_BT = text_BT if said is None else text_BT[:, -max(limit // 2, 1) :]
                held = context_BT.shape[1]
                said = self._fill(
                    self._weights, self._forward, _padded(context_BT, limit), np.int32(held), key, np.int32(made)
                )
                new_BT = np.asarray(said.token_B)[:, None]
            else:
                steps = min(count, length - made, limit - held)
                said, out_BT = self._extend(self._weights, self._forward, said, np.int32(steps), key, np.int32(made))
                held, new_BT = held + steps, np.asarray(out_BT)[:, :steps]
                # More where they come fast; what is drawn does not depend on it.
                count = min(2 * count, MOST) if time.monotonic() - began < _LIVELY_S / 2 else max(count // 2, 1)
            if not said.sound:
                raise DecodingError("the logits hold nan or inf: the model has diverged, there is nothing to sample")
            made += new_BT.shape[1]
            text_BT = np.concatenate([text_BT, new_BT], axis=1)[:, -limit:]
            yield new_BT

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self._traces

    def _filled(
        self,
        weights: tuple[Arrays, ...],
        forward: Arrays,
        text_BT: jax.Array,
        length: jax.Array,
        key: jax.Array,
        made: jax.Array,
    ) -> _Said:
        """Read a text that is padded on the right, and draw a token after its `length` tokens."""
        empty = caches.empty(self._model, self.samples)
        logits, read = self._read(weights, forward, text_BT, (empty,) * len(weights), length - 1, fresh=True)
        token = self._drawn(logits, key, made)
        return _Said(tuple(one._replace(length=length) for one in read), token, _sound(logits))

    def _extended(
        self,
        weights: tuple[Arrays, ...],
        forward: Arrays,
        said: _Said,
        steps: jax.Array,
        key: jax.Array,
        made: jax.Array,
    ) -> tuple[_Said, jax.Array]:
        """Draw `steps` more tokens, at most `MOST`: where the text stands then, and they, int32 [B, MOST]."""

        def body(carry: tuple[jax.Array, _Said, jax.Array]) -> tuple[jax.Array, _Said, jax.Array]:
            index, said, out_BT = carry
            logits, read = self._read(weights, forward, said.token_B[:, None], said.caches, jnp.int32(0), fresh=False)
            token = self._drawn(logits, key, made + index)
            out_BT = jax.lax.dynamic_update_slice(out_BT, token[:, None], (0, index))
            return index + 1, _Said(read, token, said.sound & _sound(logits)), out_BT

        start = jnp.int32(0), said, jnp.zeros((self.samples, MOST), jnp.int32)
        _, said, out_BT = jax.lax.while_loop(lambda carry: carry[0] < steps, body, start)
        return said, out_BT

    def _read(
        self,
        weights: tuple[Arrays, ...],
        forward: Arrays,
        text_BT: jax.Array,
        held: tuple[caches.Cache, ...],
        at: jax.Array,
        *,
        fresh: bool,
    ) -> tuple[jax.Array, tuple[caches.Cache, ...]]:
        """Logits [B, V] after the token at a position of the text, and the caches with all of it."""
        self._traces += 1  # runs when a program is traced, and never again
        logits, read = [], []
        with partition.using(self._layout):
            for params, one in zip(weights, held, strict=True):
                net: Any = self._definition.bind(params, forward)
                h_BTD, after = net.cached(text_BT, one, fresh=fresh)
                logits.append(net.read(jax.lax.dynamic_slice_in_dim(h_BTD, at, 1, axis=1))[:, 0])
                read.append(after)
        return logits[0] - logits[1] if len(logits) == 2 else logits[0], tuple(read)

    def _drawn(self, logits_BV: jax.Array, key: jax.Array, number: jax.Array) -> jax.Array:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), jnp.arange(self.samples))
        return draw(logits_BV, keys_B, self._sampling)


def _padded(text_BT: np.ndarray, limit: int) -> np.ndarray:
    """To a power of two of positions, or to the longest context: few shapes, so few compilations."""
    size = min(1 << (text_BT.shape[1] - 1).bit_length(), limit)
    return np.pad(text_BT, ((0, 0), (0, size - text_BT.shape[1])))


def _sound(logits_BV: jax.Array) -> jax.Array:
    # Logits of -inf are masked tokens, as long as one is not.
    return jnp.all(jnp.isfinite(jnp.max(logits_BV, axis=-1)))
