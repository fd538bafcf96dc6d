"""Batches of a text that is tokenized while it is trained on: windows of seq_len + 1 tokens, in an order that no timing changes.

Rows of a batch are divided among the lanes, so that a process reads, and tokenizes, those of its own rows alone. A lane's windows
come in pools of so many in its order, each pool in a random order of its own: a window is known as soon as its pool is there.
After its last window a lane begins again, cut at another offset.

`TokenizerThread` tokenizes windows before they are waited for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.errors import MupaxError
from mupax.train.data import cache, interface
from mupax.train.data.streams.lanes import POLL_S, StreamShard
from mupax.train.data.text.batches import TextWindows, check_length
from mupax.train.data.text.packing import PackedCorpus
from mupax.train.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

_PATIENCE_S = 5.0
"""How long the end waits for a source that is stuck."""

_POOL = 4096
"""Windows of all lanes' pools together."""
_POOLS_AHEAD = 4


class TokenizerThread:
    """Thread that tokenizes ahead of the batches, the shard that is farthest behind first.

    What it cannot do is left to who waits for it, and raised there.

    Args:
        lanes: that may be asked for.
    """

    def __init__(self, lanes: Sequence[StreamShard]) -> None:
        self._lanes, self._targets = lanes, dict[int, int]()
        self._changed, self._stopped = threading.Event(), threading.Event()

    def want(self, lane: int, tokens: int) -> None:
        """Asks for so many tokens of a lane.

        Args:
            lane: its number.
            tokens: from its first.
        """
        if tokens > self._targets.get(lane, 0):
            self._targets[lane] = tokens
            self._changed.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The thread, until the block ends."""
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
                self._changed.clear()
                lacks = [
                    (self._lanes[i].tokens / target, i) for i, target in [*self._targets.items()]
                ]
                behind = [
                    (share, i) for share, i in lacks if share < 1 and not self._lanes[i].ended
                ]
                if not behind:
                    self._changed.wait()
                elif not self._lanes[min(behind)[1]].grow():
                    self._stopped.wait(POLL_S)


class Stream(TextWindows):
    """Windows of lanes that grow.

    Args:
        config: sizes of batches; the lanes divide data.batch_size.
        lanes: of the training text.
        eval_: packed evaluation text.
        tokenizer: made the tokens.
        seq_len: T, tokens predicted per window.
        seed: seed of the order and of the offsets.
        facts: more to record about the corpus.
        has_bytes: whether all of it was text, and not ids, whose bytes are not known.
        note: told what takes long.

    Raises:
        DataError: the evaluation text is too short.
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
        self._lanes, self._seed, self._note = lanes, seed, note
        self._pool = max(1, _POOL // len(lanes))
        self._ahead_of = TokenizerThread(lanes)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        with self._ahead_of.running():
            yield

    def train_windows(self, indices: Iterable[int]) -> np.ndarray:
        tokens = [self._window(int(i)) for i in indices]
        return np.array(tokens, np.int32).reshape(-1, self._seq_len + 1)

    def _window(self, i: int) -> np.ndarray:
        rows = self.batch_size // len(self._lanes)
        k, row = divmod(i, self.batch_size)
        number, place = row // rows, k * rows + row % rows
        lane, length = self._lanes[number], self._seq_len
        needed = self._tokens(place // self._pool)
        if not lane.ended:
            self._ahead_of.want(number, needed + self._tokens(_POOLS_AHEAD))
            lane.until(needed, self._note)
        epoch, pool_size = 0, self._pool
        if lane.tokens < needed:
            check_length(self.config, "training", lane.tokens, 2 * length, length)
        if lane.ended:
            windows = (lane.tokens - length) // length
            epoch, place = divmod(place, windows)
            pool_size = min(self._pool, windows - place // self._pool * self._pool)
        pool, place = divmod(place, self._pool)
        window = pool * self._pool + self._order(number, epoch, pool, pool_size)[place]
        start = window * length + (self._offset(number, epoch) if epoch else 0)
        return lane.read(start, start + length + 1)

    def _tokens(self, pool: int) -> int:
        """How many tokens a lane must have before a pool is whole; then it has its windows in every epoch."""
        return ((pool + 1) * self._pool + 1) * self._seq_len

    @functools.lru_cache(maxsize=256)  # noqa: B019  the data lives as long as the run
    def _order(self, lane: int, epoch: int, pool: int, size: int) -> np.ndarray:
        return interface.rng(self._seed, interface.POOLS, lane, epoch, pool).permutation(size)

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def _offset(self, lane: int, epoch: int) -> int:
        return int(
            interface.rng(self._seed, interface.WINDOWS, lane, epoch).integers(self._seq_len)
        )
