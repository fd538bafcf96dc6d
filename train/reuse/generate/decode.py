"""Text from a decoder with a cache: the prompt is read at once, then each token costs one position.

B samples, P prompt tokens, T tokens, S longest context, V vocabulary, D width, K likeliest tokens.
A drawn token depends only on the seed, the sample's number and the token's number, not on how many
samples or tokens are requested. `mupax generate`, `mupax serve` and the evaluation harness use it.
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
from mupax.train.reuse.generate.sampling import (
    DEFAULT,
    DecodingError,
    Sampling,
    TracedSampling,
    draw,
    random_key,
)
from mupax.zoo.definition import Arrays, multiplied
from mupax.zoo.layers import cache as kv_cache
from mupax.zoo.layers.cache import Cache
from mupax.zoo.transformer import transformer

MOST = 64
"""Largest number of tokens per text that one call of a program draws before the host reads them."""
_BLOCK = 64
"""Number of positions whose logits exist at once when probabilities are computed."""
_LIVELY_S = 0.1
"""Longest time, in seconds, between two outputs of a stream, unless a single token takes longer."""


class _DecoderState(NamedTuple):
    """State of B texts on the devices between two calls of a compiled program."""

    caches: Any
    """Keys and values of all tokens but the newest, one `Cache` per network."""
    token_B: Any
    """Newest token, int32. It is not in the caches yet."""
    finite: Any
    """Whether all logits so far were finite, bool []."""


class Scores(NamedTuple):
    """Natural logarithms of the probabilities of tokens, for B texts and T positions."""

    chosen_BT: Any
    """Log-probability of the text's own token at each position, float32."""
    top_BTK: Any
    """Log-probabilities of the K likeliest tokens, the likeliest first, float32."""
    ids_BTK: Any
    """Ids of these K tokens, int32."""


class Generator:
    """Generator of text by one model.

    It compiles one program per power of two of prompt lengths, and one for all further tokens.

    Args:
        program: Program of the run. The parameters lie on its mesh.
        params: Parameters of the model as they are stored, without their multipliers.
        inputs: Factors, and reference parameters if the model's output is centered.
        sampling: How tokens are drawn. With `None`, every text names its own sampling, and one
            compiled program draws for all of them.
        samples: B, number of texts that continue one prompt, unless `stream` gets another number.

    Attributes:
        weights: Parameters of the model and, if its output is centred, of the reference network,
            times their multipliers.
        forward: Forward factors of the preset by name, such as the scale of attention logits. They
            are inputs of every compiled program.

    Raises:
        ConfigError: The model is no transformer of the zoo.
        DecodingError: `samples` is less than 1.
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
        self._sampling = sampling
        self.samples = samples
        self.compilations = 0
        """Number of programs compiled so far."""

        networks = (params,) if inputs.reference is None else (params, inputs.reference)
        # The multipliers are applied once here, not at every token.
        self.weights = jax.jit(multiply_all)(networks, inputs.factors.multiplier)

        # Tokens are fetched by the host of every process, which needs the complete array.
        replicated = program.layout.replicated
        # None leaves the caches in the sharding that the compiler chooses.
        state = _DecoderState(None, replicated, replicated)
        self._fill = jax.jit(self._read_prompt, out_shardings=state)
        # The state is donated, or every call would copy the caches.
        self._extend = jax.jit(
            self._write_tokens, donate_argnums=2, out_shardings=(state, replicated)
        )
        self._score = jax.jit(self._score_tokens, static_argnums=3, out_shardings=replicated)

    def complete(self, prompt: np.ndarray, length: int, seed: int = 0) -> np.ndarray:
        """Return `length` new tokens after the prompt, int32 [B, length].

        The generator must have been made with a sampling.

        Args:
            prompt: Tokens to continue, integers [P], P >= 1.
            length: Number of tokens to add.

        Raises:
            DecodingError: The prompt is empty, or the logits are not finite.
        """
        parts = list(self.stream(prompt, length, seed))
        if not parts:
            return np.zeros((self.samples, 0), np.int32)
        return np.concatenate(parts, axis=1)

    def stream(
        self,
        prompt: np.ndarray,
        length: int,
        seed: int = 0,
        *,
        sampling: Sampling | None = None,
        samples: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield new tokens as they are made, int32 [B, n] with n from 1 to `MOST`.

        The context is at most S tokens, a size of the model. Of a longer prompt only the last S
        tokens are read. When the context is full, a new one begins with the last S/2 tokens of the
        text. In a long text a token is therefore drawn with S/2 to S tokens before it.

        Args:
            prompt: Tokens to continue, integers [P], P >= 1.
            length: Number of tokens to add.
            sampling: How tokens are drawn, without top_k. Needed if the generator was made without
                a sampling.
            samples: B for this text. The generator's by default.

        Raises:
            DecodingError: The prompt is empty, or the logits are not finite: the model has
                diverged.
        """
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or prompt.size == 0 or not np.issubdtype(prompt.dtype, np.integer):
            raise DecodingError(
                f"a prompt is at least one token; this one is {prompt.dtype} of shape "
                f"{prompt.shape}"
            )
        limit = self.model.sizes()["position"]
        key = random_key(seed)
        traced_sampling = None if sampling is None else TracedSampling.of(sampling)
        num_rows = samples or self.samples
        # Tokens before the last S are never read again, because no context is longer.
        text_BT = np.broadcast_to(prompt.astype(np.int32), (num_rows, prompt.size))[:, -limit:]

        state = None
        number = 0  # tokens written so far
        context = limit  # tokens in the caches
        # A single token first, because the speed of the device is not known yet.
        max_steps = 1
        while number < length:
            began = time.monotonic()
            if state is None or context == limit:
                context_BT = text_BT
                if state is not None:
                    # Half, so that a full context is read again only once in S/2 tokens.
                    context_BT = text_BT[:, -max(limit // 2, 1) :]
                context = context_BT.shape[1]
                state = self._fill(
                    self.weights,
                    self.forward,
                    self.padded(context_BT),
                    np.int32(context),
                    key,
                    np.int32(number),
                    traced_sampling,
                )
                new_BT = np.asarray(state.token_B)[:, None]
            else:
                steps = min(max_steps, length - number, limit - context)
                state, out_BT = self._extend(
                    self.weights,
                    self.forward,
                    state,
                    np.int32(steps),
                    key,
                    np.int32(number),
                    traced_sampling,
                )
                context += steps
                new_BT = np.asarray(out_BT)[:, :steps]
                # Fast devices make more tokens per call. The number of tokens per call does not
                # change which tokens are drawn.
                if time.monotonic() - began < _LIVELY_S / 2:
                    max_steps = min(2 * max_steps, MOST)
                else:
                    max_steps = max(max_steps // 2, 1)

            if not state.finite:
                raise DecodingError(
                    "the logits hold nan or inf: the model has diverged, there is nothing to sample"
                )
            number += new_BT.shape[1]
            text_BT = np.concatenate([text_BT, new_BT], axis=1)[:, -limit:]
            yield new_BT

    def logprobs(self, tokens_BT: np.ndarray, top: int) -> Scores:
        """Return the log-probability of every token after the first, and the likeliest tokens.

        The arrays are on the host, [B, T - 1] and [B, T - 1, K].

        Args:
            tokens_BT: Integers, at most S + 1 tokens per text, for the model's longest context S.
            top: K, number of likeliest tokens to return at each position, at most the vocabulary.

        Raises:
            DecodingError: The texts are longer than S + 1 tokens.
        """
        limit = self.model.sizes()["position"]
        count = tokens_BT.shape[1] - 1
        # The last token is only predicted, so a text may have one token more than the context.
        if count > limit:
            raise DecodingError(
                f"{count + 1} tokens are more than the {limit + 1} whose probabilities one reading "
                "gives"
            )
        inputs_BT = self.padded(tokens_BT[:, :-1])
        next_BT = self.padded(tokens_BT[:, 1:])
        scores = self._score(self.weights, self.forward, (inputs_BT, next_BT), top)
        return Scores(*(np.asarray(values)[:, :count] for values in scores))

    def padded(self, tokens_BT: np.ndarray) -> np.ndarray:
        """Pad tokens with zeros on the right to a power of two of positions, at most S.

        S is the model's longest context. Few shapes mean few compilations. More than S tokens
        raise ValueError.
        """
        count = tokens_BT.shape[1]
        power_of_two = 1 << max(count - 1, 0).bit_length()
        size = min(power_of_two, self.model.sizes()["position"])
        return np.pad(tokens_BT, ((0, 0), (0, size - count)))

    # Methods below are traced by JAX.

    def _read_prompt(
        self,
        weights: Any,
        forward: Arrays,
        text_BT: jax.Array,
        length: jax.Array,
        key: jax.Array,
        number: jax.Array,
        sampling: TracedSampling | None,
    ) -> _DecoderState:
        """Read a text that is padded on the right, and draw the token after its `length` tokens.

        Args:
            text_BT: Padded text, int32.
            key: Key of all draws, made from the seed.
            number: Number of tokens that were written before, int32 [].
            sampling: How the token is drawn, by default as the generator was made to.
        """
        empty = (kv_cache.empty(self.model, text_BT.shape[0]),) * len(weights)
        logits_BV, caches = self.logits_after(
            weights, forward, text_BT, empty, length - 1, fresh=True
        )
        token_B = self._draw(logits_BV, key, number, sampling)
        # The padding was written into the caches, too; the next tokens overwrite it.
        caches = tuple(cache._replace(length=length) for cache in caches)
        return _DecoderState(caches, token_B, _all_finite(logits_BV))

    def _write_tokens(
        self,
        weights: Any,
        forward: Arrays,
        state: _DecoderState,
        steps: jax.Array,
        key: jax.Array,
        number: jax.Array,
        sampling: TracedSampling | None,
    ) -> tuple[_DecoderState, jax.Array]:
        """Draw `steps` more tokens, at most `MOST`.

        Args:
            steps: Number of tokens, int32 [], for which the caches must have room.
            key: Key of all draws, made from the seed.
            number: Number of tokens that were written before, int32 [].
            sampling: How tokens are drawn, by default as the generator was made to.

        Returns:
            The state after them, and the tokens, int32 [B, MOST] with zeros behind the first
            `steps` of each row.
        """

        def body(
            loop: tuple[jax.Array, _DecoderState, jax.Array],
        ) -> tuple[jax.Array, _DecoderState, jax.Array]:
            index, state, out_BT = loop
            last_B1 = state.token_B[:, None]
            logits_BV, caches = self.logits_after(
                weights, forward, last_B1, state.caches, jnp.int32(0), fresh=False
            )
            token_B = self._draw(logits_BV, key, number + index, sampling)
            out_BT = jax.lax.dynamic_update_slice(out_BT, token_B[:, None], (jnp.int32(0), index))
            next_index = index + 1
            finite = state.finite & _all_finite(logits_BV)
            return next_index, _DecoderState(caches, token_B, finite), out_BT

        out_BT = jnp.zeros((len(state.token_B), MOST), jnp.int32)
        start = (jnp.int32(0), state, out_BT)
        # The number of steps is a traced input, so one compiled program serves every number.
        _, state, out_BT = jax.lax.while_loop(lambda loop: loop[0] < steps, body, start)
        return state, out_BT

    def logits_after(
        self,
        weights: Any,
        forward: Arrays,
        text_BT: jax.Array,
        caches: Any,
        position: jax.Array,
        *,
        fresh: bool,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Read tokens and return the logits [B, V] after one of them, and the filled caches.

        Args:
            weights: Parameters times their multipliers, of the model and, if its output is centred,
                of the reference network, whose logits are subtracted.
            text_BT: Tokens that follow those in the caches, int32.
            caches: One `Cache` per network.
            position: Index into `text_BT` of the token whose logits are returned, int32 [].
            fresh: Whether the caches are empty, so that attention needs only the new tokens.
        """
        self.compilations += 1  # runs only while a program is traced
        logits = []
        filled_caches = []
        for params, cache in zip(weights, caches, strict=True):
            net: Any = self._definition.bind(params, forward, layout=self.layout)
            h_BTD, filled = net.cached(text_BT, cache, fresh=fresh)
            # The readout is applied to one position: logits of a whole prompt would be [B, P, V].
            h_B1D = jax.lax.dynamic_slice_in_dim(h_BTD, position, 1, axis=1)
            logits.append(net.read(h_B1D)[:, 0])
            filled_caches.append(filled)
        return centered(logits), tuple(filled_caches)

    def _draw(
        self,
        logits_BV: jax.Array,
        key: jax.Array,
        number: jax.Array,
        traced_sampling: TracedSampling | None,
    ) -> jax.Array:
        """Draw the next token of each row, int32 [B].

        Args:
            key: Key of all draws, made from the seed. `number` and the row are folded into it.
            number: Number of tokens that were written before, int32 [].
            traced_sampling: How tokens are drawn, by default as the generator was made to.
        """
        rows_B = jnp.arange(logits_BV.shape[0])
        # Keys depend on the token's number and row alone, not on how many tokens a call makes.
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), rows_B)
        sampling = self._sampling if traced_sampling is None else traced_sampling
        assert sampling is not None, "a generator without a sampling is told one with every text"
        return draw(logits_BV, keys_B, sampling)

    def _score_tokens(
        self, weights: Any, forward: Arrays, tokens: tuple[jax.Array, jax.Array], top: int
    ) -> Scores:
        """Return the log-probabilities of next tokens, and the likeliest tokens, at all positions.

        Args:
            tokens: Inputs and next tokens, both int32 [B, T].
        """
        self.compilations += 1
        inputs_BT, next_BT = tokens
        nets: list[Any] = [
            self._definition.bind(params, forward, layout=self.layout) for params in weights
        ]
        empty = kv_cache.empty(self.model, inputs_BT.shape[0])
        hidden_TBD = []
        for net in nets:
            h_BTD, _ = net.cached(inputs_BT, empty, fresh=True)
            hidden_TBD.append(h_BTD.swapaxes(0, 1))

        def score_position(inputs: tuple[Any, jax.Array]) -> Scores:
            hidden_BD, next_B = inputs
            logits = []
            for net, h_BD in zip(nets, hidden_BD, strict=True):
                logits.append(net.read(h_BD[:, None])[:, 0])
            logp_BV = jax.nn.log_softmax(centered(logits))
            values_BK, ids_BK = jax.lax.top_k(logp_BV, top)
            chosen_B = jnp.take_along_axis(logp_BV, next_B[:, None], axis=1)[:, 0]
            return Scores(chosen_B, values_BK, ids_BK)

        # Logits of all positions at once, [B, T, V], could take more memory than the model.
        scores = jax.lax.map(score_position, (hidden_TBD, next_BT.T), batch_size=_BLOCK)
        return jax.tree.map(lambda values: values.swapaxes(0, 1), scores)


def multiply_all(networks: tuple[Arrays, ...], multipliers: Arrays) -> tuple[Arrays, ...]:
    """Return the parameters of each network times their multipliers."""
    return tuple(multiplied(dict(params), multipliers) for params in networks)


def centered(logits: list[jax.Array]) -> jax.Array:
    """Return the logits of a model, minus those of the reference network if there is one."""
    if len(logits) == 2:
        return logits[0] - logits[1]
    return logits[0]


def _all_finite(logits_BV: jax.Array) -> jax.Array:
    """Return whether every row has a finite largest logit, bool []."""
    # A logit of -inf is a masked token, which is fine as long as one token is left.
    return jnp.all(jnp.isfinite(jnp.max(logits_BV, axis=-1)))
