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

from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs
from mupax.train.reuse.generate.sampling import DEFAULT, AnySampling, DecodingError, Sampling, draw
from mupax.zoo.definition import Arrays, multiplied
from mupax.zoo.layers import cache as caches
from mupax.zoo.transformer import transformer

MOST = 64
"""Tokens that the devices make before the host looks at them, at most."""
_BLOCK = 64
"""Positions whose logits exist at once where probabilities of a text are asked for."""
_LIVELY_S = 0.1
"""How long a reader may wait for the next tokens, where one does not take longer."""


class _Text(NamedTuple):
    """A text on the devices: one cache per network, and the newest token, which none has read yet."""

    caches: Any
    token_B: Any
    finite: Any
    """Whether all logits so far were finite, bool []."""


class Scores(NamedTuple):
    """Natural logarithms of probabilities of the tokens of texts."""

    chosen_BT: Any
    """Of the token that stands there."""
    top_BTK: Any
    """Of the K likeliest there, the likeliest first."""
    ids_BTK: Any
    """Which these are."""


class Generator:
    """Continues texts with one model. Compiles once per power of two of prompt lengths, and once for all further tokens.

    Args:
        program: of the run; its mesh is where the parameters lie.
        params: of the model.
        inputs: the program's numbers: factors, and a reference where the model's output is centred.
        sampling: how tokens are drawn; None where every text says it anew, and one program draws for all.
        samples: B, texts continued side by side from one prompt, unless a text says another number.

    Raises:
        ConfigError, DecodingError: the model is no transformer of the zoo, or there are no samples.
    """

    def __init__(
        self,
        program: Program,
        params: Arrays,
        inputs: StepInputs,
        *,
        sampling: Sampling | None = DEFAULT,
        samples: int = 1,
    ) -> None:
        self.model = transformer(program.config.model, "writing text")
        self._definition = program.definition
        self.layout = program.layout
        self.forward = inputs.factors.forward
        if samples < 1:
            raise DecodingError(f"samples is {samples}; write at least 1")
        self._sampling, self.samples = sampling, samples
        self.compilations = 0
        """Programs compiled so far."""
        networks = (params,) if inputs.reference is None else (params, inputs.reference)
        # Multiplied once, not for every token.
        apply = jax.jit(lambda networks, by: tuple(multiplied(dict(one), by) for one in networks))
        self.weights = apply(networks, inputs.factors.multiplier)
        whole = program.layout.replicated
        text = _Text(None, whole, whole)
        self._fill = jax.jit(self._filled, out_shardings=text)
        self._extend = jax.jit(self._extended, donate_argnums=2, out_shardings=(text, whole))
        self._score = jax.jit(self._scored, static_argnums=3, out_shardings=whole)

    def complete(self, prompt: np.ndarray, length: int, seed: int = 0) -> np.ndarray:
        """`length` new tokens after the prompt, int32 [B, length]; raises as `stream`.

        Args:
            prompt: tokens to continue, integers [P], P >= 1.
            length: tokens to add.
            seed: of the draws.
        """
        parts = list(self.stream(prompt, length, seed))
        return np.concatenate(parts, axis=1) if parts else np.zeros((self.samples, 0), np.int32)

    def stream(
        self,
        prompt: np.ndarray,
        length: int,
        seed: int = 0,
        *,
        sampling: Sampling | None = None,
        samples: int | None = None,
    ) -> Iterator[np.ndarray]:
        """New tokens as they are made, int32 [B, n] with n from 1 to `MOST`.

        The context is at most S tokens: of a longer prompt the last S are read. Where it is full, it begins anew with the
        last S/2 tokens of the text, so that a token is drawn with S/2 to S tokens before it.

        Args:
            prompt: tokens to continue, integers [P], P >= 1.
            length: tokens to add.
            seed: of the draws.
            sampling: how tokens are drawn, where the generator was made without one.
            samples: B of this text; the generator's unless given.

        Raises:
            DecodingError: the prompt is empty, or the logits are not numbers: the model has diverged.
        """
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
            raise DecodingError(
                f"a prompt is at least one token; this one is {prompt.dtype} of shape {prompt.shape}"
            )
        limit, key = self.model.sizes()["position"], jax.random.key(seed)
        drawn = None if sampling is None else AnySampling.of(sampling)
        text_BT = np.broadcast_to(prompt.astype(np.int32), (samples or self.samples, prompt.size))[
            :, -limit:
        ]
        text, number, context, count = None, 0, limit, 1
        while number < length:
            began = time.monotonic()
            if text is None or context == limit:
                context_BT = text_BT if text is None else text_BT[:, -max(limit // 2, 1) :]
                context = context_BT.shape[1]
                padded_BT, counts = (
                    self.padded(context_BT),
                    (np.int32(context), key, np.int32(number)),
                )
                text = self._fill(self.weights, self.forward, padded_BT, *counts, drawn)
                new_BT = np.asarray(text.token_B)[:, None]
            else:
                steps = min(count, length - number, limit - context)
                counts = np.int32(steps), key, np.int32(number)
                text, out_BT = self._extend(self.weights, self.forward, text, *counts, drawn)
                context, new_BT = context + steps, np.asarray(out_BT)[:, :steps]
                # More where they come fast; what is drawn does not depend on it.
                count = (
                    min(2 * count, MOST)
                    if time.monotonic() - began < _LIVELY_S / 2
                    else max(count // 2, 1)
                )
            if not text.finite:
                raise DecodingError(
                    "the logits hold nan or inf: the model has diverged, there is nothing to sample"
                )
            number += new_BT.shape[1]
            text_BT = np.concatenate([text_BT, new_BT], axis=1)[:, -limit:]
            yield new_BT

    def logprobs(self, tokens_BT: np.ndarray, top: int) -> Scores:
        """How likely the model, read whole, finds every token after the first.

        Args:
            tokens_BT: at most S + 1 of each text, integers [B, T].
            top: likeliest tokens that are named at each place.

        Raises:
            DecodingError: the texts are longer.
        """
        limit, count = self.model.sizes()["position"], tokens_BT.shape[1] - 1
        if count > limit:
            raise DecodingError(
                f"{count + 1} tokens are more than the {limit + 1} whose probabilities one reading gives"
            )
        inputs_BT, next_BT = self.padded(tokens_BT[:, :-1]), self.padded(tokens_BT[:, 1:])
        scores = self._score(self.weights, self.forward, (inputs_BT, next_BT), top)
        return Scores(*(np.asarray(x)[:, :count] for x in scores))

    def padded(self, tokens_BT: np.ndarray) -> np.ndarray:
        """To a power of two of positions, or to the longest context: few shapes, so few compilations."""
        count = tokens_BT.shape[1]
        size = min(1 << max(count - 1, 0).bit_length(), self.model.sizes()["position"])
        return np.pad(tokens_BT, ((0, 0), (0, size - count)))

    def _filled(
        self,
        weights: Any,
        forward: Arrays,
        text_BT: jax.Array,
        length: jax.Array,
        key: jax.Array,
        number: jax.Array,
        drawn: AnySampling | None,
    ) -> _Text:
        """Read a text that is padded on the right, and draw a token after its `length` tokens."""
        empty = (caches.empty(self.model, text_BT.shape[0]),) * len(weights)
        logits_BV, read = self.logits_after(
            weights, forward, text_BT, empty, length - 1, fresh=True
        )
        token_B = self._drawn(logits_BV, key, number, drawn)
        return _Text(
            tuple(one._replace(length=length) for one in read), token_B, _finite(logits_BV)
        )

    def _extended(
        self,
        weights: Any,
        forward: Arrays,
        text: _Text,
        steps: jax.Array,
        key: jax.Array,
        number: jax.Array,
        drawn: AnySampling | None,
    ) -> tuple[_Text, jax.Array]:
        """Draw `steps` more tokens, at most `MOST`: the text after them, and they, int32 [B, MOST]."""

        def body(loop: tuple[jax.Array, _Text, jax.Array]) -> tuple[jax.Array, _Text, jax.Array]:
            index, text, out_BT = loop
            last_B1 = text.token_B[:, None]
            logits_BV, read = self.logits_after(
                weights, forward, last_B1, text.caches, jnp.int32(0), fresh=False
            )
            token_B = self._drawn(logits_BV, key, number + index, drawn)
            out_BT = jax.lax.dynamic_update_slice(out_BT, token_B[:, None], (jnp.int32(0), index))
            return index + 1, _Text(read, token_B, text.finite & _finite(logits_BV)), out_BT

        start = jnp.int32(0), text, jnp.zeros((len(text.token_B), MOST), jnp.int32)
        return jax.lax.while_loop(lambda loop: loop[0] < steps, body, start)[1:]

    def logits_after(
        self,
        weights: Any,
        forward: Arrays,
        text_BT: jax.Array,
        read: Any,
        at: jax.Array,
        *,
        fresh: bool,
    ) -> tuple[jax.Array, tuple[caches.Cache, ...]]:
        """Logits [B, V] after the token at a position of the text, and the caches with all of it."""
        self.compilations += 1  # runs when a program is traced, and never again
        logits, after = [], []
        for params, cache in zip(weights, read, strict=True):
            net: Any = self._definition.bind(params, forward, layout=self.layout)
            h_BTD, filled = net.cached(text_BT, cache, fresh=fresh)
            logits.append(net.read(jax.lax.dynamic_slice_in_dim(h_BTD, at, 1, axis=1))[:, 0])
            after.append(filled)
        return logits[0] - logits[1] if len(logits) == 2 else logits[0], tuple(after)

    def _drawn(
        self, logits_BV: jax.Array, key: jax.Array, number: jax.Array, drawn: AnySampling | None
    ) -> jax.Array:
        numbers_B = jnp.arange(logits_BV.shape[0])
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), numbers_B)
        sampling = self._sampling if drawn is None else drawn
        assert sampling is not None, "a generator without a sampling is told one with every text"
        return draw(logits_BV, keys_B, sampling)

    def _scored(
        self, weights: Any, forward: Arrays, tokens: tuple[jax.Array, jax.Array], top: int
    ) -> Scores:
        """Scores of texts that are padded on the right; logits of `_BLOCK` positions exist at once."""
        self.compilations += 1
        inputs_BT, next_BT = tokens
        nets: list[Any] = [
            self._definition.bind(params, forward, layout=self.layout) for params in weights
        ]
        empty = caches.empty(self.model, inputs_BT.shape[0])
        h = [net.cached(inputs_BT, empty, fresh=True)[0].swapaxes(0, 1) for net in nets]

        def place(one: tuple[Any, jax.Array]) -> Scores:
            h, next_B = one
            logits = [net.read(h_BD[:, None])[:, 0] for net, h_BD in zip(nets, h, strict=True)]
            logp_BV = jax.nn.log_softmax(logits[0] - logits[1] if len(logits) == 2 else logits[0])
            values_BK, ids_BK = jax.lax.top_k(logp_BV, top)
            return Scores(
                jnp.take_along_axis(logp_BV, next_B[:, None], axis=1)[:, 0], values_BK, ids_BK
            )

        scores = jax.lax.map(place, (h, next_BT.T), batch_size=_BLOCK)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), scores)


def _finite(logits_BV: jax.Array) -> jax.Array:
    # Logits of -inf are masked tokens, as long as one is not.
    return jnp.all(jnp.isfinite(jnp.max(logits_BV, axis=-1)))
