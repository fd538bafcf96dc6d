"""Continuous batching: texts join and leave a batch of slots while the others are written.

One compiled step continues the texts of all slots. `mupax serve` uses it. A text does not depend on
the other slots, because every program has fixed shapes: a prompt is read alone, padded to a power
of two, and the step always computes all slots.

B slots, P prompt tokens, S longest context, V vocabulary. Shapes of caches: L layers, K key heads,
N head dimension.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.reuse.generate.decode import MOST, Generator
from mupax.train.reuse.generate.sampling import (
    DecodingError,
    Sampling,
    draw_each,
    random_key,
)
from mupax.zoo.layers import cache as kv_cache
from mupax.zoo.layers.cache import Cache

PRNG = "threefry2x32"
"""JAX's PRNG implementation for all draws.

Others, such as rbg, draw other numbers for a row of a batch than for the row alone.
"""
LIVELY_S = 0.04
"""Longest duration of one call of the compiled step, in seconds, so that texts join and leave soon.

A call for a single token may take longer.
"""


# Compared by identity: `==` of arrays has no single truth value, and dicts have texts as keys.
@dataclasses.dataclass(eq=False)
class Text:
    """Text that is being written in a slot of a batch, or waits for a slot (`Slots`).

    Args:
        prompt: Token ids before the text, at least one.
        length: Number of tokens to write.
        row: Index of the text among those of one prompt. Texts with the same seed and different
            rows differ.
        sampling: How tokens are drawn, without top_k.
    """

    prompt: np.ndarray
    length: int
    seed: int
    row: int
    sampling: Sampling
    written_ids: list[int] = dataclasses.field(default_factory=list)
    """Token ids written so far."""
    slot: int | None = None
    """Index of the slot that holds the text. `None` if the text is in no slot."""
    context: int = 0
    """Number of tokens in the cache. The newest token is not among them."""
    saved: tuple[Cache, ...] | None = None
    """Cache of a text that is in no slot, for each network."""
    key: Any = None
    """Random key made from the seed, uint32 [2]."""
    done: bool = False
    """Set by a reader who needs no more tokens."""

    @property
    def is_complete(self) -> bool:
        """True if all requested tokens are written."""
        return len(self.written_ids) >= self.length

    def last(self, count: int) -> np.ndarray:
        """Return the last `count` tokens of prompt and text together, or all if there are fewer."""
        written = np.array(self.written_ids[-count:], np.int32)
        return np.concatenate([self.prompt, written])[-count:].astype(np.int32)


class Written(NamedTuple):
    """New tokens of a text, and the error, if any, because of which it cannot be continued."""

    text: Text
    tokens: list[int]
    error: DecodingError | None = None


class _Rows(NamedTuple):
    """Arrays over all B slots with the values of their texts, inputs of the compiled step.

    An empty slot has zeros, and a top_p of 1.
    """

    token_B: Any
    """Newest token, which is not in the cache yet, int32."""
    context_B: Any
    """Number of tokens in the cache, int32.

    The step writes the next position of every slot, even if its text is not active.
    """
    active_B: Any
    """Whether the text goes on, bool."""
    number_B: Any
    """Number of tokens written, int32."""
    row_B: Any
    """Index of the text among those of one prompt, int32."""
    key_B2: Any
    temperature_B: Any
    top_p_B: Any


class Slots:
    """Batch of slots, each of which holds one text in progress, with one cache for all slots.

    Texts join and leave the batch between calls of `step` (continuous batching).

    Args:
        generator: Generator of the model. It was made with `sampling=None`.
        count: Number of slots, `B`.
    """

    def __init__(self, generator: Generator, count: int) -> None:
        self._generator = generator
        self._limit = generator.model.sizes()["position"]
        self.texts: list[Text | None] = [None] * count
        """Text in each slot."""
        self.compiling = False
        """True while a program is compiled and runs for the first time."""
        self.longest_call_s = 0.0
        """Duration of the longest call of a program that was compiled before."""
        self._compiled: set[Any] = set()
        self._steps = 1
        replicated = generator.layout.replicated
        self._read = jax.jit(self._prompt_read, out_shardings=replicated)
        self._draw = jax.jit(self._drawn, out_shardings=replicated)
        # The caches are donated, or a step would need memory for them twice.
        self._step = jax.jit(self._stepped, donate_argnums=2, out_shardings=replicated)
        self._insert = jax.jit(_inserted, donate_argnums=0, out_shardings=replicated)
        self._extract = jax.jit(_extracted, out_shardings=replicated)
        empty = jax.jit(lambda: self._empty(count), out_shardings=replicated)
        self._make_empty: Callable[[], tuple[Cache, ...]] = empty
        self._caches: Any = empty()

    @property
    def num_free(self) -> int:
        """Number of empty slots."""
        return self.texts.count(None)

    @property
    def active(self) -> list[Text]:
        """Texts in slots, complete texts included."""
        return [text for text in self.texts if text is not None]

    @property
    def bytes_per_text(self) -> int:
        """Bytes of the cache of one text."""
        # Shapes alone, because a cache may take gigabytes.
        shapes = jax.eval_shape(lambda: self._empty(1))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far."""
        return len(self._compiled)

    def join(self, text: Text) -> list[int]:
        """Put a text into a free slot, which must exist.

        For a new text, this reads the prompt, draws the first token and appends it to
        `text.written_ids`. For a text that was put aside, it restores the cache.

        Returns:
            The first token of a new text. Empty for a text that was put aside before.

        Raises:
            DecodingError: The logits are not finite: the model has diverged.
        """
        slot = self.texts.index(None)
        tokens = []
        # A text that was put aside has its cache on the host, so its prompt need not be read again.
        if text.saved is None:
            tokens = self._begin(text, text.last(self._limit))
        assert text.saved is not None
        self._place(text, slot)
        return tokens

    def leave(self, text: Text) -> None:
        """Empty the text's slot without keeping its cache. Does nothing if it is in no slot."""
        if text.slot is not None:
            self.texts[text.slot] = None
            text.slot = None

    def put_aside(self, text: Text) -> None:
        """Empty the text's slot, and keep its cache in host memory so that it can join again.

        The text must be in a slot. The cache is kept in `text.saved`.
        """
        assert text.slot is not None
        saved = self._call("extract", self._extract, self._caches, np.int32(text.slot))
        # On the host, because device memory is what runs out.
        text.saved = jax.tree.map(np.asarray, saved)
        self.leave(text)

    @property
    def is_broken(self) -> bool:
        """True if the cache is lost, because a program failed after the cache was donated to it."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._caches))

    def reset(self) -> None:
        """Empty all slots. The next text that joins makes a new cache."""
        for text in self.active:
            self.leave(text)
        self._caches = None

    def step(self, most: int = MOST) -> list[Written]:
        """Write at least one more token of every incomplete text in a slot.

        Args:
            most: Largest number of tokens of each text.

        Returns:
            The new tokens of each text, which are also appended to `Text.written_ids`. A text for
            which the logits are not finite has an error. It keeps its slot.
        """
        began = time.monotonic()
        incomplete = [text for text in self.active if not text.is_complete]
        # A full cache has no position left, so the text begins again with its last tokens.
        full = [text for text in incomplete if text.context == self._limit]
        written = [self._begin_anew(text) for text in full]
        writing = [text for text in self.active if text not in full and not text.is_complete]
        if not writing:
            return written
        steps = min(most, self._steps)
        for text in writing:
            # A call writes the same number of tokens for every text, so the text that needs or has
            # room for the fewest decides.
            steps = min(steps, text.length - len(text.written_ids), self._limit - text.context)
        for text, tokens, is_finite in self._advance(writing, steps):
            # An error belongs to one text. The texts in the other slots go on.
            error = None if is_finite else DecodingError(_DIVERGED)
            written.append(Written(text, tokens, error))
        # Fast devices make more tokens per call. The number of tokens per call does not change
        # which tokens are drawn.
        if time.monotonic() - began < LIVELY_S / 2:
            self._steps = min(2 * steps, MOST)
        else:
            self._steps = max(self._steps // 2, 1)
        return written

    def _advance(self, writing: list[Text], steps: int) -> list[tuple[Text, list[int], bool]]:
        """Write `steps` tokens of each text. The caches and texts are updated.

        Args:
            writing: Texts in slots, each with `steps` tokens left to write and room for them in
                the cache.
            steps: Number of tokens, 1 to `MOST`.

        Returns:
            Each text with its new tokens and whether its logits are finite.
        """
        generator = self._generator
        arguments = (
            generator.weights,
            generator.forward,
            self._caches,
            self._rows(writing),
            np.int32(steps),
        )
        self._caches, out_BT, finite_B = self._call("step", self._step, *arguments)
        out_BT = np.asarray(out_BT)
        finite_B = np.asarray(finite_B)
        results = []
        for text in writing:
            tokens = out_BT[text.slot, :steps].tolist()
            text.written_ids += tokens
            text.context += steps
            results.append((text, tokens, bool(finite_B[text.slot])))
        return results

    def _begin_anew(self, text: Text) -> Written:
        """Replace the full context of a text by its last S/2 tokens, and draw the next token.

        S is the model's longest context.

        Returns:
            The token, or an error if the logits are not finite.
        """
        slot = text.slot
        assert slot is not None
        try:
            tokens = self._begin(text, text.last(max(self._limit // 2, 1)))
        except DecodingError as error:
            return Written(text, [], error)
        self._place(text, slot)
        return Written(text, tokens)

    def _begin(self, text: Text, context_P: np.ndarray) -> list[int]:
        """Read a context, and draw the token after it.

        The token is appended to `text.written_ids`, the cache kept in `text.saved`.

        Args:
            context_P: Last tokens of prompt and text, int32, at most S (the longest context).

        Returns:
            A list of the one token.

        Raises:
            DecodingError: The logits are not finite: the model has diverged.
        """
        generator = self._generator
        if text.key is None:
            # On the host, where the rows of all texts are assembled for every call.
            text.key = np.asarray(jax.random.key_data(random_key(text.seed, PRNG)))
        padded_1P = generator.padded(context_P[None])
        size = np.int32(context_P.size)
        arguments = (generator.weights, generator.forward, padded_1P, size)
        logits_1V, saved = self._call(("read", padded_1P.shape), self._read, *arguments)
        token_1, finite_1 = self._call("draw", self._draw, logits_1V, _rows_of([text]))
        if not np.asarray(finite_1)[0]:
            raise DecodingError(_DIVERGED)
        text.saved = saved
        text.context = int(context_P.size)
        text.written_ids.append(int(np.asarray(token_1)[0]))
        return text.written_ids[-1:]

    def _place(self, text: Text, slot: int) -> None:
        """Move the cache `text.saved` into a slot, and mark the slot as the text's."""
        if self._caches is None:
            # `reset` drops the cache, whose buffers may be gone with a failed program.
            self._caches = self._make_empty()
        self._caches = self._call("insert", self._insert, self._caches, text.saved, np.int32(slot))
        text.saved = None
        text.slot = slot
        self.texts[slot] = text

    def _call(self, name: Any, program: Callable, *arguments: Any) -> Any:
        """Call a program inside `watched`, wait for its result and return it.

        Args:
            name: Name of the program and its shapes, as for `watched`.
        """
        with self.watched(name):
            # Waits inside of `watched`, which times the call, and so that errors are raised here.
            return jax.block_until_ready(program(*arguments))

    @contextlib.contextmanager
    def watched(self, name: Any) -> Iterator[None]:
        """Context manager around a call of a program.

        For a program that has not run before, it sets `compiling`. For others, it updates
        `longest_call_s`.

        Args:
            name: Hashable name of the program, with the shapes that it is compiled for.
        """
        began = time.monotonic()
        self.compiling = name not in self._compiled
        try:
            yield
            # A first call is mostly compilation, which says nothing about how long a call may take.
            if not self.compiling:
                self.longest_call_s = max(self.longest_call_s, time.monotonic() - began)
            self._compiled.add(name)
        finally:
            self.compiling = False

    def _rows(self, writing: list[Text]) -> _Rows:
        """Return the values of all slots, in which only the texts of `writing` are active."""
        rows = _rows_of(self.texts)
        for index, text in enumerate(self.texts):
            rows.active_B[index] = text in writing
        return rows

    def _empty(self, count: int) -> tuple[Cache, ...]:
        """Return an empty cache of `count` slots for each network."""
        return (kv_cache.empty(self._generator.model, count),) * len(self._generator.weights)

    # Methods below are traced by JAX.

    def _prompt_read(
        self, weights: Any, forward: Any, text_1P: jax.Array, size: jax.Array
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Read a prompt padded on the right. Return logits after `size` tokens, and the cache."""
        return self._generator.logits_after(
            weights, forward, text_1P, self._empty(1), size - 1, fresh=True
        )

    def _drawn(self, logits_BV: jax.Array, rows: _Rows) -> tuple[jax.Array, jax.Array]:
        """Draw a token of each row. Return tokens and whether logits are finite, both [B]."""
        text_keys_B = jax.random.wrap_key_data(rows.key_B2, impl=PRNG)
        keys_B = jax.vmap(_folded)(text_keys_B, rows.number_B, rows.row_B)
        token_B = draw_each(logits_BV, keys_B, rows.temperature_B, rows.top_p_B)
        # A logit of -inf is a masked token, which is fine as long as one token is left.
        return token_B, jnp.isfinite(jnp.max(logits_BV, axis=-1))

    def _stepped(
        self, weights: Any, forward: Any, caches: tuple[Cache, ...], rows: _Rows, steps: jax.Array
    ) -> tuple[tuple[Cache, ...], jax.Array, jax.Array]:
        """Write `steps` tokens, at most `MOST`, in every slot.

        Returns:
            The caches, the tokens, int32 [B, MOST], and whether all logits of a slot were finite,
            bool [B].
        """

        def body(loop: Any) -> Any:
            index, caches, rows, out_BT, finite_B = loop
            caches = tuple(cache._replace(length=rows.context_B) for cache in caches)
            last_B1 = rows.token_B[:, None]
            logits_BV, caches = self._generator.logits_after(
                weights, forward, last_B1, caches, jnp.int32(0), fresh=False
            )
            token_B, new_finite_B = self._drawn(logits_BV, rows)
            out_BT = jax.lax.dynamic_update_slice(out_BT, token_B[:, None], (0, index))
            # Shapes are fixed, so inactive slots are computed, too. Their counts must not move.
            moved_B = rows.active_B.astype(jnp.int32)
            rows = rows._replace(
                token_B=token_B,
                context_B=rows.context_B + moved_B,
                number_B=rows.number_B + moved_B,
            )
            # `while_loop` needs the same shapes after every iteration, so the length of the caches
            # must be a scalar again. The lengths of all slots are in `rows`.
            caches = tuple(cache._replace(length=jnp.int32(0)) for cache in caches)
            return index + 1, caches, rows, out_BT, finite_B & new_finite_B

        count = len(rows.token_B)
        out_BT = jnp.zeros((count, MOST), jnp.int32)
        start = (jnp.int32(0), caches, rows, out_BT, jnp.ones(count, bool))
        end = jax.lax.while_loop(lambda loop: loop[0] < steps, body, start)
        _, caches, _, out_BT, finite_B = end
        return caches, out_BT, finite_B


_DIVERGED = "the logits hold nan or inf: the model has diverged, there is nothing to sample"


def _rows_of(texts: Sequence[Text | None]) -> _Rows:
    """Return the values of texts, one row per slot. All rows but those of `None` are active."""
    count = len(texts)
    rows = _Rows(
        token_B=np.zeros(count, np.int32),
        context_B=np.zeros(count, np.int32),
        active_B=np.zeros(count, bool),
        number_B=np.zeros(count, np.int32),
        row_B=np.zeros(count, np.int32),
        key_B2=np.zeros((count, 2), np.uint32),
        temperature_B=np.zeros(count, np.float32),
        # A top_p of 1 keeps all tokens.
        top_p_B=np.ones(count, np.float32),
    )
    for index, text in enumerate(texts):
        if text is None:
            continue
        if text.written_ids:
            rows.token_B[index] = text.written_ids[-1]
        rows.context_B[index] = text.context
        rows.active_B[index] = True
        rows.number_B[index] = len(text.written_ids)
        rows.row_B[index] = text.row
        rows.key_B2[index] = text.key
        rows.temperature_B[index] = text.sampling.temperature
        if text.sampling.top_p is not None:
            rows.top_p_B[index] = text.sampling.top_p
    return rows


def _folded(key: jax.Array, number: jax.Array, row: jax.Array) -> jax.Array:
    """Return the random key of one token, as `Generator` makes it."""
    return jax.random.fold_in(jax.random.fold_in(key, number), row)


def _inserted(
    caches: tuple[Cache, ...], saved: tuple[Cache, ...], slot: jax.Array
) -> tuple[Cache, ...]:
    """Return the caches with the keys and values of one slot replaced by saved ones."""

    def replaced(cached_LBKSN: jax.Array, saved_L1KSN: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cached_LBKSN, saved_L1KSN, (0, slot, 0, 0, 0))

    result = []
    for cache, saved_cache in zip(caches, saved, strict=True):
        keys = replaced(cache.keys, saved_cache.keys)
        values = replaced(cache.values, saved_cache.values)
        # Lengths are in `_Rows`, so that of the saved cache is not needed.
        result.append(Cache(keys, values, cache.length))
    return tuple(result)


def _extracted(caches: tuple[Cache, ...], slot: jax.Array) -> tuple[Cache, ...]:
    """Return a copy of the keys and values of one slot, for each network."""

    def row(cached_LBKSN: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(cached_LBKSN, slot, 1, axis=1)

    return tuple(Cache(row(cache.keys), row(cache.values), cache.length) for cache in caches)
