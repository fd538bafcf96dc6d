"""What the loop sees of data: `Data`, its batches and their order. Any source that can fetch example i fits behind it.

Batch k is a function of (seed, k, batch_size): the only state of the input pipeline is the integer k, so a run resumes
anywhere and on any number of processes, each of which takes its own rows of the global batch.

The order of training examples is a new random permutation every epoch, computed index by index.

Nothing is stored and nothing is skipped through: example i of the run is found in constant time for any i, so batch
10^6 of a resumed run costs what batch 0 costs. The permutation is grain's index shuffle (a block cipher on indices).

Batches are made ahead of the step that reads them, by threads, and `Prefetch` puts them on the devices meanwhile.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from mupax.errors import MupaxError, MupaxFailure

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.config.data import DataConfig

ORDER, WINDOWS, AUGMENTATION, EVALUATION, NOISE, MIXTURE, RANDAUG, MIXING, POOLS = range(9)
"""Purposes of random numbers; each draws from a stream of its own."""

Batch = dict[str, "np.ndarray"]
ALL_ROWS = slice(None)
_BATCHES_AHEAD = 4
_FOREVER = 2**40

S = TypeVar("S")
T = TypeVar("T")

DEPTH = 2
"""Batches kept on the devices beside the one in use."""
_PATIENCE_S = 5.0
"""How long `close` waits for a source that is stuck, in a file system that hangs say."""


def rng(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """Random numbers that depend on the run's seed, what they are for, and an index.

    Args:
        seed: of the data, at least 0.
        purpose: which stream, such as `AUGMENTATION`.
        *index: of the batch, the epoch or the like; each has a stream of its own.
    """
    import numpy as np

    return np.random.default_rng([seed, purpose, *index])


class Shuffle:
    """Epochs 0, 1, 2, … over `size` examples, each in its own random order.

    Args:
        size: examples per epoch.
        seed: seed of the run; two runs of neighbouring seeds share no epoch's order.
        purpose: which stream of random numbers to use.
    """

    def __init__(self, size: int, seed: int, purpose: int = ORDER) -> None:
        import grain
        import numpy as np

        self.size = size
        # grain takes seed + epoch for each epoch: hash first, or run 1 would repeat run 0 from its second epoch.
        mixed = int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0])
        self._shuffled = grain.MapDataset.range(size).shuffle(seed=mixed)

    def __call__(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, position) of the run's examples `indices`: both int64, positions in [0, size)."""
        import numpy as np

        i = np.fromiter(indices, np.int64)
        return i // self.size, np.fromiter((self._shuffled[int(j)] for j in i), np.int64, len(i))


def batch_indices(k: int, batch_size: int, rows: slice) -> range:
    """Indices, counted from the start of the run, of the given rows of batch k.

    Args:
        k: from 0.
        batch_size: rows of the global batch.
        rows: of the global batch.
    """
    return range(k * batch_size, (k + 1) * batch_size)[rows]


class DataError(MupaxError):
    """Data that is missing, damaged or does not fit the model. The text says which file or command is needed."""


class ReadError(MupaxFailure):
    """Data that the machine does not give, for the time being or for good. The text says what it answers."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turns what the machine refuses while data are read into an error of the data.

    Raises:
        ReadError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ReadError(f"cannot read the data: {error}") from error


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a simple model reaches on the same evaluation examples, to print beside a trained one."""

    name: str
    value: float
    unit: Literal["nats/byte", "nats/target", "accuracy"]


@dataclasses.dataclass(eq=False, repr=False)
class Data(abc.ABC):
    """Training and evaluation batches of one data set, in an order fixed by the seed.

    A batch is a dict of arrays for B examples:

    * tokens: `inputs` int32 [B, T], `targets` int32 [B, T] (the next token), `weights` float32 [B, T].
    * images: `inputs` float32 [B, H, W, C], in [-1, 1] unless data.pixels says otherwise, `targets` int32 [B], `weights` float32 [B].
    * tokens under data.document_mask: also `segments`, with data.reset_positions `positions`, int32 [B, T] (`text.batches.batch_of`).
    * text with noise, for encoder and decoder: `mupax.train.data.text.denoising.Denoising`.
    """

    kind: ClassVar[Literal["tokens", "images"]]
    config: DataConfig
    """Sizes of batches, over all processes, and how many evaluation examples to use."""
    _: dataclasses.KW_ONLY
    facts: dict[str, Any]
    """`digest` and sizes, ready for JSON; the name and the classes' are added. A run resumes only on data of the same digest."""
    train_size: int | None
    """Training examples per epoch (sequences or images); None where only reading all of them would tell."""
    eval_size: int
    """Evaluation examples: all there are when it is made, then those in use."""
    threads: int = 2
    """How many make batches ahead of time, each a batch."""
    class_names: list[str] | None = None
    """A name per label; None for tokens."""
    tokenizer: Any = None
    """What made the tokens (`data.text.tokenizer`); None for images."""
    bytes_per_token: float | None = 1.0
    """Bytes of text per evaluation target that counts; nats per byte = nats per target / this. None where targets are no text."""

    @property
    def bytes_per_target(self) -> float | None:
        """Mean bytes of text per evaluation target; None for images, and where targets are no text."""
        return self.bytes_per_token if self.kind == "tokens" else None

    def __post_init__(self) -> None:
        names = {} if self.class_names is None else {"class_names": list(self.class_names)}
        self.facts = {"name": self.config.name, **self.facts, **names}
        self.eval_size = min(self.eval_size, self.config.eval_examples or self.eval_size)
        self.batch_size = self.config.batch_size
        self.eval_batch_size = self.config.eval_batch_size or self.batch_size

    @abc.abstractmethod
    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        """Training batch k, or the given rows of it: a pure function of (seed, k, batch_size).

        Args:
            k: from 0, counted from the start of the run and on through all epochs.
            rows: of the global batch; all of them unless given.
        """

    @abc.abstractmethod
    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        """Evaluation batch j, or the given rows of it. Rows past the last example have weight 0.

        Args:
            j: from 0, in the one order that every evaluation has.
            rows: of the global batch; all of them unless given.
        """

    def train_batches(self, start: int, *rows: slice) -> Generator[Batch, None, None]:
        """Batches start, start + 1, … without end, made ahead of time by threads; `close()` stops those.

        Args:
            start: number of the first.
            *rows: parts of each batch, joined in this order; the whole unless given.
        """
        with self.preparing():
            yield from self._ahead(self.train_batch, rows, start, _FOREVER)

    def preparing(self) -> contextlib.AbstractContextManager[object]:
        """What goes on while training batches are taken: nothing, unless they are prepared meanwhile."""
        return contextlib.nullcontext()

    def eval_batches(self, *rows: slice) -> Generator[Batch, None, None]:
        """Every evaluation example once, in whole batches or these parts of them; what the last one lacks has weight 0."""
        count = -(-self.eval_size // self.eval_batch_size)
        return self._ahead(self.eval_batch, rows, 0, count)

    def references(self) -> list[Reference]:
        """Simple models trained on this training data, measured on these evaluation examples; cached on disk."""
        return []

    def _ahead(
        self, batch: Callable[[int, slice], Batch], rows: tuple[slice, ...], start: int, stop: int
    ) -> Generator[Batch, None, None]:
        """Batches start, …, stop - 1 in order, prefetched by grain threads; the threads end with the iterator."""
        import grain
        import numpy as np

        def joined(k: int) -> Batch:
            parts = [batch(k, part) for part in rows or (ALL_ROWS,)]
            return (
                parts[0]
                if len(parts) == 1
                else {x: np.concatenate([part[x] for part in parts]) for x in parts[0]}
            )

        options = grain.ReadOptions(
            num_threads=self.threads, prefetch_buffer_size=max(self.threads, _BATCHES_AHEAD)
        )
        with contextlib.closing(
            iter(grain.MapDataset.range(start, stop).map(joined).to_iter_dataset(options))
        ) as batches:
            yield from batches


class Prefetch(Generic[S, T]):
    """The batches of a source in its order, each put on the devices by a thread before it is asked for.

    What goes wrong in the thread is raised by `next`, after the batches before it, as it was raised there. Close it, or
    use it as a context manager: then the source is closed too, by the thread.

    Args:
        source: batches on the host.
        put: sends one to the devices.
        depth: batches that may wait there, at least 1. The thread has one more in its hands.
    """

    def __init__(
        self, source: Generator[S, None, None], put: Callable[[S], T], depth: int = DEPTH
    ) -> None:
        self._source, self._put = source, put
        self._queue: queue.Queue[tuple[T] | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether `next` answers at once, after waiting at most so long for it."""
        with self._queue.not_empty:
            return self._queue.not_empty.wait_for(lambda: bool(self._queue.queue), seconds)

    def __iter__(self) -> Prefetch[S, T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # Nothing comes after it: the next call ends in the same way.
            raise item
        return item[0]

    def close(self) -> None:
        """End the thread and the source. Closing twice does nothing more."""
        self._stop.set()
        until = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):  # The thread may wait for room.
                self._queue.get_nowait()
            self._thread.join(0.01)

    def __enter__(self) -> Prefetch[S, T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        last: Exception = StopIteration()
        try:
            with contextlib.closing(self._source):
                for batch in self._source:
                    if self._stop.is_set():
                        return
                    self._queue.put((self._put(batch),))
        except Exception as error:
            last = error
        self._queue.put(last)
