"""Batches of a text that is tokenized while it is trained on, in an order that no timing changes.

Examples are windows of seq_len + 1 tokens. Rows of a batch are divided among the lanes, so that a
process reads and tokenizes only the lanes of its own rows. A pool is a fixed number of successive
windows of a lane, and each pool has a random order of its own. A window can therefore be read as
soon as its pool is tokenized. After its last window a lane begins again, cut at another offset.

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
"""Number of windows in one pool of every lane together."""
_POOLS_AHEAD = 4
"""Number of pools that are tokenized before training waits for them."""


class TokenizerThread:
    """Thread that tokenizes ahead of the batches, the lane that is farthest behind first.

    An error ends the thread. The training loop meets the same error when it waits for the tokens.

    Args:
        lanes: Lanes that `want` names by index.
    """

    def __init__(self, lanes: Sequence[StreamShard]) -> None:
        self._lanes = lanes
        self._targets: dict[int, int] = {}
        self._changed = threading.Event()
        self._stopped = threading.Event()

    def want(self, lane: int, tokens: int) -> None:
        """Ask for tokens of a lane. The thread makes them later.

        Args:
            lane: Index of the lane in the `lanes` of the constructor.
            tokens: Number of tokens, counted from the start of the lane.
        """
        if tokens > self._targets.get(lane, 0):
            self._targets[lane] = tokens
            self._changed.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that runs the thread in the block.

        Its end stops the thread, and waits at most `_PATIENCE_S` seconds for it.
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
        """Return the lane with the smallest share of its target, or None if no lane is behind."""
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
    """Batches of windows of a text whose lanes grow while they are read.

    Args:
        config: Data settings. The number of lanes divides data.batch_size.
        lanes: Lanes of the training text, of which each has equally many rows of a batch.
        eval_: Packed evaluation text, which does not grow.
        tokenizer: Tokenizer that made the tokens.
        seq_len: T, number of predicted tokens per window.
        seed: Seed of the order and of the offsets.
        has_bytes: True if the corpus is text and not ids, whose bytes are unknown.
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
        """Return the tokens [T + 1] of training example i. Wait until they are tokenized if needed.

        This thread tokenizes if no other one does. After the first epoch the window begins at the
        epoch's offset.

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
        """Return the number of tokens that a lane must have for all windows of a pool.

        One window more is counted, so that the pool has its windows at any offset of an epoch.
        """
        return ((pool + 1) * self._pool + 1) * self._seq_len

    @functools.lru_cache(maxsize=256)  # noqa: B019  the data lives as long as the run
    def _order(self, lane: int, epoch: int, pool: int, size: int) -> np.ndarray:
        """Return the order of a pool's windows, a permutation of `size` numbers."""
        return interface.rng(self._seed, interface.POOLS, lane, epoch, pool).permutation(size)

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def _offset(self, lane: int, epoch: int) -> int:
        """Return a random number of tokens in [0, T) that moves an epoch's windows in a lane.

        It is for epochs after the first, which has no offset, so that each cuts the lane's text at
        other places.
        """
        rng = interface.rng(self._seed, interface.WINDOWS, lane, epoch)
        return int(rng.integers(self._seq_len))
