"""Batches of a text that is tokenized while it is trained on, in an order that no timing changes.

Examples are windows of seq_len + 1 tokens. The text has lanes, each a share of its files. Rows of a
batch are divided among the lanes, so that a process reads and tokenizes only the lanes of its own
rows. A pool is a fixed number of successive windows of a lane, and each pool has a random order of
its own. A window can therefore be read as soon as its pool is tokenized. After its last window a
lane begins again, cut at another offset.

`TokenizerThread` tokenizes windows before training waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax import MupaxError
from mupax.train.data import cache, interface
from mupax.train.data.streams.lanes import POLL_S, StreamShard
from mupax.train.data.text.batches import TextWindows, check_length
from mupax.train.data.text.packing import PackedCorpus
from mupax.train.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_PATIENCE_S = 5.0
"""Seconds that the end of a run waits for a source that is stuck."""

_POOL = 4096
"""Number of windows in the pools of all lanes together, where each lane has one pool.

A pool is a range of successive windows of a lane that is shuffled as a whole.
"""
_POOLS_AHEAD = 4
"""Smallest number of pools of a lane that the thread tokenizes ahead of the pool in use."""


class TokenizerThread:
    """Thread that tokenizes the text of lanes before the batches need it.

    It works on the lane that has the smallest share of the tokens wanted of it.

    An error ends the thread. The training loop meets the same error when it waits for the tokens.

    Args:
        lanes: Lanes of the training text, each a share of its files.
    """

    def __init__(self, lanes: Sequence[StreamShard]) -> None:
        self._lanes = lanes
        self._targets: dict[int, int] = {}
        self._changed = threading.Event()
        self._stopped = threading.Event()

    def want(self, lane: int, tokens: int) -> None:
        """Ask the thread to tokenize a lane up to a number of tokens. Return at once.

        Args:
            lane: Index of the lane in the `lanes` of the constructor.
            tokens: Number of tokens, counted from the start of the lane.
        """
        if tokens > self._targets.get(lane, 0):
            self._targets[lane] = tokens
            self._changed.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that starts the thread, and stops it at the end of the `with` block.

        The end waits at most `_PATIENCE_S` seconds for the thread.
        """
        self._stopped.clear()
        thread = threading.Thread(target=self._run, name="tokenizing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._changed.set()
            thread.join(_PATIENCE_S)

    def _run(self) -> None:
        with contextlib.suppress(MupaxError, OSError):
            while not self._stopped.is_set():
                # Cleared before the targets are read, so that a later target is not missed.
                self._changed.clear()
                lane = self._farthest_behind()
                if lane is None:
                    self._changed.wait()
                elif not lane.grow():
                    # Another process tokenizes this lane, so wait before asking again.
                    self._stopped.wait(POLL_S)

    def _farthest_behind(self) -> StreamShard | None:
        """Return the lane that has the smallest share of the tokens wanted of it (`want`).

        Return None if every lane has its tokens or has ended.
        """
        behind: list[tuple[float, int]] = []
        # A copy, because `want` may add a lane meanwhile.
        for i, target in [*self._targets.items()]:
            share = self._lanes[i].tokens / target
            if share < 1 and not self._lanes[i].ended:
                behind.append((share, i))
        if not behind:
            return None
        _, number = min(behind)
        return self._lanes[number]


class Stream(TextWindows):
    """Batches of a text that is tokenized while it is trained on.

    An example is a window of T + 1 tokens.

    Args:
        config: Data settings. The number of lanes must divide data.batch_size.
        lanes: Lanes of the training text, each a share of its files. Each lane fills equally many
            rows of a batch.
        eval_: Packed evaluation text, which does not grow.
        tokenizer: Tokenizer that made the tokens.
        seq_len: T, number of predicted tokens per window.
        seed: Seed of the order of windows, and of the offsets at which epochs cut the text.
        facts: Further facts to record about the corpus.
        has_bytes: True if the corpus was made from text. False if any of the corpus was made from
            ids, whose bytes are unknown.
        note: Function that takes one line of text about work that takes long.

    Raises:
        DataError: The evaluation text is too short.
    """

    def __init__(
        self,
        config: DataConfig,
        lanes: Sequence[StreamShard],
        eval_: PackedCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
        facts: dict[str, Any],
        has_bytes: bool = True,
        note: cache.Note = print,
    ) -> None:
        super().__init__(
            config,
            eval_,
            tokenizer,
            seq_len=seq_len,
            facts=facts,
            train_size=None,
            has_bytes=has_bytes,
        )
        self._lanes = lanes
        self._seed = seed
        self._note = note
        self._pool = max(1, _POOL // len(lanes))
        self._tokenizer_thread = TokenizerThread(lanes)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        with self._tokenizer_thread.running():
            yield

    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        tokens = [self._window(int(i)) for i in indices]
        return np.array(tokens, np.int32).reshape(-1, self._seq_len + 1)

    def _window(self, i: int) -> np.ndarray:
        """Return the tokens [T + 1] of training example i.

        If they are not tokenized yet, wait for them, or tokenize them here if nobody else does. In
        epochs after the first, all windows are moved by the epoch's offset (`_offset`).

        Raises:
            DataError: The lane has ended and is too short for two windows.
        """
        # Each lane has the same number of successive rows of every batch.
        rows_per_lane = self.batch_size // len(self._lanes)
        k, row = divmod(i, self.batch_size)
        number, lane_row = divmod(row, rows_per_lane)
        place = k * rows_per_lane + lane_row
        lane = self._lanes[number]
        length = self._seq_len

        needed = self._tokens(place // self._pool)
        if not lane.ended:
            self._tokenizer_thread.want(number, needed + self._tokens(_POOLS_AHEAD))
            lane.until(needed, self._note)
        if lane.tokens < needed:
            check_length(self.config, "training", lane.tokens, 2 * length, length)

        epoch = 0
        pool_size = self._pool
        if lane.ended:
            windows = (lane.tokens - length) // length
            epoch, place = divmod(place, windows)
            # The last pool of an epoch has the windows that are left.
            pool_size = min(self._pool, windows - place // self._pool * self._pool)
        pool, place_in_pool = divmod(place, self._pool)
        order = self._order(number, epoch, pool, pool_size)
        window = pool * self._pool + order[place_in_pool]
        offset = self._offset(number, epoch) if epoch else 0
        start = window * length + offset
        return lane.read(start, start + length + 1)

    def _tokens(self, pool: int) -> int:
        """Return the number of tokens that a lane must have before a pool can be read.

        One window more is counted, so that the pool is complete at any offset of an epoch.

        Args:
            pool: Number of the pool in its lane, from 0.
        """
        return ((pool + 1) * self._pool + 1) * self._seq_len

    @functools.lru_cache(maxsize=256)  # noqa: B019  the data lives as long as the run
    def _order(self, lane: int, epoch: int, pool: int, size: int) -> np.ndarray:
        """Return the random order of the windows of a pool, a permutation of range(size).

        Args:
            epoch: Number of the lane's epoch, from 0.
            pool: Number of the pool in its lane, from 0.
            size: Number of windows of the pool. The last pool of a lane may be smaller.
        """
        return interface.rng(self._seed, interface.POOLS, lane, epoch, pool).permutation(size)

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def _offset(self, lane: int, epoch: int) -> int:
        """Return a random number of tokens, in [0, T), by which the windows of a lane are moved.

        So every epoch cuts the text at other places. The first epoch has no offset, and does not
        call this.
        """
        rng = interface.rng(self._seed, interface.WINDOWS, lane, epoch)
        return int(rng.integers(self._seq_len))
