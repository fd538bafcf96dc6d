"""Texts that join and leave while others are written: one compiled step continues all of them, each in a slot of its own.

B slots, P prompt tokens, S longest context, V vocabulary. A text is the same whatever is in the other slots, because every
program has fixed shapes: a prompt is read alone, padded to a power of two, and the step always computes all slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.reuse.generate.decode import MOST, Generator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling, draw_each
from mupax.zoo.layers import cache as caches
from mupax.zoo.layers.cache import Cache

PRNG = "threefry2x32"
"""Generator of random numbers. Others, such as rbg, draw other numbers for a row of a batch than for the row alone."""
LIVELY_S = 0.04
"""How long one call of the step may take, so that texts join and leave soon. One token is made however long it takes."""


@dataclasses.dataclass(eq=False)
class Text:
    """One text that is being written.

    Args:
        prompt: token ids that it follows, at least one.
        length: tokens to write.
        seed: seed of the draws.
        row: number among the texts of one prompt. Texts with the same seed and other numbers differ.
        sampling: how tokens are drawn; without top_k.
    """

    prompt: np.ndarray
    length: int
    seed: int
    row: int
    sampling: Sampling
    written_ids: list[int] = dataclasses.field(default_factory=list)
    """Token ids written so far."""
    slot: int | None = None
    context: int = 0
    """Tokens in the cache. The newest token is not among them."""
    saved: tuple[Cache, ...] | None = None
    """Cache of a text that was put aside, for each network."""
    key: Any = None
    """uint32 [2]."""
    done: bool = False
    """Set by a reader who needs no more tokens."""

    @property
    def is_complete(self) -> bool:
        """True if all tokens that were asked for are written."""
        return len(self.written_ids) >= self.length

    def last(self, count: int) -> np.ndarray:
        """Return the last `count` tokens of the prompt and the text together, or all if there are fewer."""
        written = np.array(self.written_ids[-count:], np.int32)
        return np.concatenate([self.prompt, written])[-count:].astype(np.int32)


class Written(NamedTuple):
    """New tokens of a text, or why it cannot go on."""

    text: Text
    tokens: list[int]
    error: DecodingError | None = None


class _Rows(NamedTuple):
    """Numbers of the texts in all slots, as the step takes them. An empty slot has zeros."""

    token_B: Any
    """Newest token, which is not in the cache yet."""
    context_B: Any
    """Tokens in the cache. The step writes the next place of every slot, also of one whose text stands still."""
    active_B: Any
    """Whether the text goes on."""
    number_B: Any
    """Number of tokens written."""
    row_B: Any
    key_B2: Any
    temperature_B: Any
    top_p_B: Any


class Slots:
    """Slots for texts of one model, with a cache for all of them.

    Args:
        generator: whose model writes. It was made without a sampling.
        count: B, number of slots.
    """

    def __init__(self, generator: Generator, count: int) -> None:
        self._generator = generator
        self._limit = generator.model.sizes()["position"]
        self.texts: list[Text | None] = [None] * count
        """Text in each slot."""
        self.compiling = False
        """True while a program is compiled and runs for the first time."""
        self.longest_call_s = 0.0
        """Longest call of a program that was compiled before."""
        self._compiled: set[Any] = set()
        self._steps = 1
        replicated = generator.layout.replicated
        self._read = jax.jit(self._prompt_read, out_shardings=replicated)
        self._draw = jax.jit(self._drawn, out_shardings=replicated)
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
        """Texts in slots."""
        return [text for text in self.texts if text is not None]

    @property
    def bytes_per_text(self) -> int:
        """Bytes of the cache of one text."""
        shapes = jax.eval_shape(lambda: self._empty(1))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far."""
        return len(self._compiled)

    def join(self, text: Text) -> list[int]:
        """Put a text into a free slot. Return the token that reading its prompt gives, or nothing for a text put aside.

        Raises:
            DecodingError: the logits are not numbers: the model has diverged.
        """
        slot = self.texts.index(None)
        if text.saved is None:
            tokens = self._begin(text, text.last(self._limit))
        else:
            tokens = []
        assert text.saved is not None
        self._place(text, slot)
        return tokens

    def leave(self, text: Text) -> None:
        """Empty the text's slot."""
        if text.slot is not None:
            self.texts[text.slot] = None
            text.slot = None

    def put_aside(self, text: Text) -> None:
        """Empty the text's slot, and keep its cache in the host's memory so that it can join again later."""
        assert text.slot is not None
        saved = self._call("extract", self._extract, self._caches, np.int32(text.slot))
        text.saved = jax.tree.map(np.asarray, saved)
        self.leave(text)

    @property
    def is_broken(self) -> bool:
        """True if a program failed after it had taken the cache: its buffers are gone."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self._caches))

    def reset(self) -> None:
        """Empty all slots. The next text that joins makes a new cache."""
        for text in self.active:
            self.leave(text)
        self._caches = None

    def step(self, most: int = MOST) -> list[Written]:
        """Write at least one token more of every text in a slot that is not complete.

        Args:
            most: tokens of each text at most.
        """
        began = time.monotonic()
        full = [
            text for text in self.active if text.context == self._limit and not text.is_complete
        ]
        written = [self._begin_anew(text) for text in full]
        writing = [text for text in self.active if text not in full and not text.is_complete]
        if not writing:
            return written
        steps = min(most, self._steps)
        for text in writing:
            steps = min(steps, text.length - len(text.written_ids), self._limit - text.context)
        for text, tokens, is_finite in self._advance(writing, steps):
            error = None if is_finite else DecodingError(_DIVERGED)
            written.append(Written(text, tokens, error))
        # More tokens of one call where they come fast. What is drawn does not depend on it.
        is_fast = time.monotonic() - began < LIVELY_S / 2
        self._steps = min(2 * steps, MOST) if is_fast else max(self._steps // 2, 1)
        return written

    def _advance(self, writing: list[Text], steps: int) -> list[tuple[Text, list[int], bool]]:
        """Call the step. Return the new tokens of each text, and if its logits are numbers."""
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
        """Give a text whose context is full a new one: the last half of what is written."""
        slot = text.slot
        assert slot is not None
        try:
            tokens = self._begin(text, text.last(max(self._limit // 2, 1)))
        except DecodingError as error:
            return Written(text, [], error)
        self._place(text, slot)
        return Written(text, tokens)

    def _begin(self, text: Text, context_P: np.ndarray) -> list[int]:
        """Read a context from its start, draw the token after it, and keep the cache in `text.saved`."""
        generator = self._generator
        if text.key is None:
            text.key = np.asarray(jax.random.key_data(jax.random.key(text.seed, impl=PRNG)))
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
        """Copy the cache of a text into a slot."""
        if self._caches is None:
            self._caches = self._make_empty()
        self._caches = self._call("insert", self._insert, self._caches, text.saved, np.int32(slot))
        text.saved = None
        text.slot = slot
        self.texts[slot] = text

    def _call(self, name: Any, program: Callable, *arguments: Any) -> Any:
        """Call a program and wait for it."""
        with self.watched(name):
            return jax.block_until_ready(program(*arguments))

    @contextlib.contextmanager
    def watched(self, name: Any) -> Iterator[None]:
        """Set `compiling` while entered if no program of this name has run before; note how long it takes if one has."""
        began = time.monotonic()
        self.compiling = name not in self._compiled
        try:
            yield
            if not self.compiling:
                self.longest_call_s = max(self.longest_call_s, time.monotonic() - began)
            self._compiled.add(name)
        finally:
            self.compiling = False

    def _rows(self, writing: list[Text]) -> _Rows:
        """Return the numbers of all slots, of which only those of some texts go on."""
        rows = _rows_of(self.texts)
        for index, text in enumerate(self.texts):
            rows.active_B[index] = text in writing
        return rows

    def _empty(self, count: int) -> tuple[Cache, ...]:
        return (caches.empty(self._generator.model, count),) * len(self._generator.weights)

    # The programs

    def _prompt_read(
        self, weights: Any, forward: Any, text_1P: jax.Array, size: jax.Array
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Read a prompt that is padded on the right. Return the logits after its `size` tokens, and its cache."""
        return self._generator.logits_after(
            weights, forward, text_1P, self._empty(1), size - 1, fresh=True
        )

    def _drawn(self, logits_BV: jax.Array, rows: _Rows) -> tuple[jax.Array, jax.Array]:
        """Draw a token of each row. Return the tokens, and if the logits are numbers."""
        keys_B = jax.vmap(_folded)(
            jax.random.wrap_key_data(rows.key_B2, impl=PRNG), rows.number_B, rows.row_B
        )
        token_B = draw_each(logits_BV, keys_B, rows.temperature_B, rows.top_p_B)
        # Logits of -inf are masked tokens, as long as one is not.
        return token_B, jnp.isfinite(jnp.max(logits_BV, axis=-1))

    def _stepped(
        self, weights: Any, forward: Any, read: tuple[Cache, ...], rows: _Rows, steps: jax.Array
    ) -> tuple[tuple[Cache, ...], jax.Array, jax.Array]:
        """Write `steps` tokens, at most `MOST`, in every slot. Return the caches, the tokens [B, MOST] and if all were finite."""

        def body(loop: Any) -> Any:
            index, read, rows, out_BT, finite_B = loop
            read = tuple(cache._replace(length=rows.context_B) for cache in read)
            last_B1 = rows.token_B[:, None]
            logits_BV, read = self._generator.logits_after(
                weights, forward, last_B1, read, jnp.int32(0), fresh=False
            )
            token_B, new_finite_B = self._drawn(logits_BV, rows)
            out_BT = jax.lax.dynamic_update_slice(out_BT, token_B[:, None], (0, index))
            moved_B = rows.active_B.astype(jnp.int32)
            rows = rows._replace(
                token_B=token_B,
                context_B=rows.context_B + moved_B,
                number_B=rows.number_B + moved_B,
            )
            read = tuple(cache._replace(length=jnp.int32(0)) for cache in read)
            return index + 1, read, rows, out_BT, finite_B & new_finite_B

        count = len(rows.token_B)
        out_BT = jnp.zeros((count, MOST), jnp.int32)
        start = jnp.int32(0), read, rows, out_BT, jnp.ones(count, bool)
        _, read, _, out_BT, finite_B = jax.lax.while_loop(lambda loop: loop[0] < steps, body, start)
        return read, out_BT, finite_B


_DIVERGED = "the logits hold nan or inf: the model has diverged, there is nothing to sample"


def _rows_of(texts: list[Text | None]) -> _Rows:
    count = len(texts)
    rows = _Rows(
        token_B=np.zeros(count, np.int32),
        context_B=np.zeros(count, np.int32),
        active_B=np.zeros(count, bool),
        number_B=np.zeros(count, np.int32),
        row_B=np.zeros(count, np.int32),
        key_B2=np.zeros((count, 2), np.uint32),
        temperature_B=np.zeros(count, np.float32),
        top_p_B=np.ones(count, np.float32),
    )
    for index, text in enumerate(texts):
        if text is None:
            continue
        rows.token_B[index] = text.written_ids[-1] if text.written_ids else 0
        rows.context_B[index] = text.context
        rows.active_B[index] = True
        rows.number_B[index] = len(text.written_ids)
        rows.row_B[index] = text.row
        rows.key_B2[index] = text.key
        rows.temperature_B[index] = text.sampling.temperature
        rows.top_p_B[index] = 1 if text.sampling.top_p is None else text.sampling.top_p
    return rows


def _folded(key: jax.Array, number: jax.Array, row: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, number), row)


def _inserted(
    read: tuple[Cache, ...], saved: tuple[Cache, ...], slot: jax.Array
) -> tuple[Cache, ...]:
    """Replace the cache of one slot."""

    def replaced(all_LBKSN: jax.Array, one_L1KSN: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(all_LBKSN, one_L1KSN, (0, slot, 0, 0, 0))

    return tuple(
        Cache(replaced(into.keys, new.keys), replaced(into.values, new.values), into.length)
        for into, new in zip(read, saved, strict=True)
    )


def _extracted(read: tuple[Cache, ...], slot: jax.Array) -> tuple[Cache, ...]:
    """Copy the cache of one slot."""

    def row(all_LBKSN: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(all_LBKSN, slot, 1, axis=1)

    return tuple(Cache(row(cache.keys), row(cache.values), cache.length) for cache in read)
