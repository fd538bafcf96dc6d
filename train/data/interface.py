"""Interface between data and the training loop: `Data`, the order of its examples, and `Prefetch`.

Batch k is a function of (seed, k, batch_size). The integer k is the only state of the input
pipeline, so a run resumes at any batch, on any number of processes. Each process takes its own rows
of the global batch.

The order of training examples is a new random permutation in every epoch. It is grain's index
shuffle (a block cipher on indices), which finds example i of a run in constant time. Nothing is
stored and nothing is skipped, so batch 10^6 of a resumed run costs as much as batch 0.

Threads make batches ahead of the step that reads them, and `Prefetch` puts them on the devices.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeGuard, TypeVar

from mupax import MupaxError, MupaxFailure, disk
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.config.data import DataConfig

ORDER, WINDOWS, AUGMENTATION, EVALUATION, NOISE, MIXTURE, RANDAUG, MIXING, POOLS = range(9)
"""Purposes of random numbers, as arguments of `rng`. Each purpose has its own random stream."""

Batch = dict[str, "np.ndarray"]
ALL_ROWS = slice(None)
_BATCHES_AHEAD = 4
_LASTING_ERRORS = (*disk.ABSENT, PermissionError, IsADirectoryError)
"""System errors that last until a person changes the files or their permissions."""
_NAME_ERRORS = (errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers of a name that no file can have."""
_FOREVER = 2**40

S = TypeVar("S")
T = TypeVar("T")

DEPTH = 2
"""Number of batches that wait on the devices, in addition to the batch in use."""
_PATIENCE_S = 5.0
"""Seconds that `close` waits for a source that is stuck, for example in a file system that
hangs."""


def rng(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """Return a random generator that depends on the seed, the purpose and an index alone.

    Args:
        seed: Seed of the data, at least 0.
        purpose: Use of the random numbers, one of this file's constants, such as `AUGMENTATION`.
        *index: Whole numbers such as the number of the batch or of the epoch. Each index has its
            own stream.
    """
    import numpy as np

    return np.random.default_rng([seed, purpose, *index])


class Shuffle:
    """Random order of `size` examples, with a new permutation in every epoch.

    Args:
        size: Number of examples per epoch.
        seed: Seed of the run. Seeds are hashed, so that epoch 1 of one seed does not have the order
            of epoch 0 of the next seed.
        purpose: Random stream, such as `EVALUATION`. The default is `ORDER`.
    """

    def __init__(self, size: int, seed: int, purpose: int = ORDER) -> None:
        import grain
        import numpy as np

        self.size = size
        # grain adds the epoch to its seed. Without the hash, the run with seed 1 would start with
        # the second epoch of the run with seed 0.
        seed_sequence = np.random.SeedSequence([seed, purpose])
        hashed_seed = int(seed_sequence.generate_state(1)[0])
        self._shuffled = grain.MapDataset.range(size).shuffle(seed=hashed_seed)

    def __call__(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch and the position in the data set of some examples of the run.

        Args:
            indices: Indices of examples, counted from the start of the run and on through all
                epochs.

        Returns:
            Epochs and positions, both int64 of the length of `indices`. Positions are in [0, size).
        """
        import numpy as np

        index_array = np.fromiter(indices, np.int64)
        epochs = index_array // self.size
        shuffled = (self._shuffled[int(index)] for index in index_array)
        positions = np.fromiter(shuffled, np.int64, len(index_array))
        return epochs, positions


def batch_indices(k: int, batch_size: int, rows: slice) -> range:
    """Return the indices of the examples in the given rows of batch k.

    Indices count from the start of the run, so batch 0 has the indices 0 to batch_size - 1.

    Args:
        k: Number of the batch, from 0.
        batch_size: Number of rows of the global batch.
    """
    first = k * batch_size
    return range(first, first + batch_size)[rows]


class DataError(MupaxError):
    """Error for data that is missing, damaged or does not fit the model.

    The message says which file or command is needed.
    """


_DATA_FLAG = re.compile(r"(--)?\bdata\.([a-z_-]+)((?:\.[a-z_-]+)?)")
"""Flag or field of a run's data in a message, such as `--data.on-broken`, `data.tokenizer` or
`data.limits.record_mib`."""
_DATA_NAME = re.compile(r"(--)?\bdata\.name (?!is )(as )?")
"""The field `data.name` before its value, in a message."""
_DATA_NAME_SUBJECT = re.compile(r"(--)?\bdata\.name(?= is )")
"""The field `data.name` as the subject of a sentence."""


@contextlib.contextmanager
def with_flags_of(command: Any) -> Iterator[None]:
    """Context manager in which errors name the flags of a command of `mupax data`, not of a run.

    `--data.field` becomes `--field`, and `write data.name as text:PATH` becomes `write text:PATH`,
    because these commands take the name without a flag.

    Args:
        command: Dataclass of the command's flags. A flag that it lacks keeps its name, and the
            message ends with the command that has it.

    Raises:
        DataError: The block raised a `DataError`, whose message is rewritten.
        ConfigError: The block raised a `ConfigError`, whose message is rewritten.
    """
    names = {field.name for field in dataclasses.fields(command)}

    def own_flag(match: re.Match[str]) -> str:
        if match[2].replace("-", "_") not in names:
            return match[0]
        return f"--{match[2]}{match[3]}".replace("_", "-")

    try:
        yield
    except (DataError, ConfigError) as error:
        text = _DATA_NAME_SUBJECT.sub("NAME", str(error))
        text = _DATA_NAME.sub("", text)
        text = _DATA_FLAG.sub(own_flag, text)
        if "--data." in text:
            text += " (--data. begins flags of `mupax train`)"
        error_type = ConfigError if isinstance(error, ConfigError) else DataError
        raise error_type(text) from error


def refuse_unread_flags(command: Any, sources: Iterable[str]) -> None:
    """Raise an error for a flag of a command of `mupax data` that none of its sources reads.

    Without this, such a flag would be ignored, and the command that is printed for a run would
    have a flag that `mupax train` refuses.

    Args:
        command: Flags as a dataclass. A flag with its default value is no error.
        sources: Data that the command reads, as `data.name` takes them.

    Raises:
        DataError: The message names the flag and the sources.
    """
    from mupax.train.config.data import CACHE_HINT, unread_fields

    names = list(sources)
    for flag in changed_flags(command, unread_fields(names)):
        hint = CACHE_HINT if flag == "--data-dir" else ""
        raise DataError(f"{flag} is not read with the data {', '.join(names)}; leave it out{hint}")


def changed_flags(command: Any, names: Collection[str]) -> list[str]:
    """Return the flags of a command among `names` whose values are not their defaults.

    Args:
        command: Flags of a command as a dataclass, whose field names are the flags' names.
        names: Names of fields. A name that the command lacks is skipped.
    """
    changed = []
    for field in dataclasses.fields(command):
        if field.name not in names:
            continue
        value = getattr(command, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if not dataclasses.is_dataclass(value):
            if value != field.default:
                changed.append(flag)
            continue
        # A group of flags, such as --limits.ratio. Its default is a dataclass of the same type.
        for inner in dataclasses.fields(value):
            if getattr(value, inner.name) != getattr(field.default, inner.name):
                changed.append(f"{flag}.{inner.name.replace('_', '-')}")
    return changed


class ReadError(MupaxFailure):
    """Error for data files that cannot be read because of an `OSError`, for now or for good.

    The message has the cause.
    """


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn an `OSError` inside the `with` block into a `ReadError`.

    Raises:
        ReadError: The block raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise ReadError(f"cannot read the data: {error}") from error


def is_system_error(error: Exception) -> TypeGuard[OSError]:
    """Return whether an error is the operating system's.

    PIL, pyarrow and the decompressors raise `OSError` for damaged content too. Only the errors of
    the system have an error number.
    """
    return isinstance(error, OSError) and error.errno is not None


def may_pass(error: OSError) -> bool:
    """Return whether a system error may be gone at the next try.

    A missing file or permission stays until a person mends it. A failing disk or a server that does
    not answer may work again.
    """
    return not isinstance(error, _LASTING_ERRORS) and error.errno not in _NAME_ERRORS


def unreadable(message: str, error: OSError) -> DataError | ReadError:
    """Return the error for a file or folder that the operating system does not read or write.

    A supervisor takes a `DataError` as final and starts the run again after a `ReadError`. So an
    error that may pass (`may_pass`) is a `ReadError`. Its text is `message`.
    """
    return ReadError(message) if may_pass(error) else DataError(message)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Result of a simple model on the evaluation examples, to compare the trained model with.

    Attributes:
        name: Name of the simple model, such as "byte trigram".
        value: Mean loss or accuracy of the simple model, in `unit`.
    """

    name: str
    value: float
    unit: Literal["nats/byte", "nats/target", "accuracy"]


@dataclasses.dataclass(eq=False, repr=False)
class Data(abc.ABC):
    """Training and evaluation batches of one data set, in an order fixed by the seed.

    `batch_size` and `eval_batch_size` are rows of a batch over all processes. A batch is a dict of
    NumPy arrays for B examples:

    * tokens: `inputs` int32 [B, T], `targets` int32 [B, T] (the next token), `weights` float32 [B,
      T].
    * tokens under data.document_mask: also `segments` int32 [B, T], and `positions` int32 [B, T]
      under data.reset_positions (`text.batches.batch_of`).
    * images: `inputs` float32 [B, H, W, C] (in [-1, 1] unless data.pixels says otherwise),
      `targets` int32 [B], `weights` float32 [B].
    * span corruption for an encoder-decoder: `mupax.train.data.text.denoising.Denoising`.
    """

    kind: ClassVar[Literal["tokens", "images"]]
    config: DataConfig
    """Data settings. Batch sizes count rows over all processes."""
    _: dataclasses.KW_ONLY
    facts: dict[str, Any]
    """JSON record of the data: `digest`, sizes, and (added here) the name and the class names.

    A run resumes only on data with the same digest.
    """
    train_size: int | None
    """Number of training examples per epoch (sequences or images).

    None if the number is not known before all of the data is read, as for a stream.
    """
    eval_size: int
    """Number of evaluation examples.

    The constructor takes the number that exists and lowers it to data.eval_examples.
    """
    threads: int = 2
    """Number of threads that make batches ahead of time, one batch each."""
    class_names: list[str] | None = None
    """Name of each label. None for tokens."""
    tokenizer: Any = None
    """Tokenizer that made the tokens (`data.text.tokenizer`). None for images."""
    bytes_per_token: float | None = 1.0
    """Mean bytes of text per evaluation target with a weight. None if the targets are not text.

    Nats per byte are nats per target divided by this number.
    """

    @property
    def bytes_per_target(self) -> float | None:
        """Mean bytes of text per evaluation target. None for images and if targets are not text."""
        return self.bytes_per_token if self.kind == "tokens" else None

    def __post_init__(self) -> None:
        # The run's record keeps the order of these keys, so `name` comes first.
        facts = {"name": self.config.name, **self.facts}
        if self.class_names is not None:
            facts["class_names"] = list(self.class_names)
        self.facts = facts

        self.eval_size = min(self.eval_size, self.config.eval_examples or self.eval_size)
        self.batch_size = self.config.batch_size
        self.eval_batch_size = self.config.eval_batch_size or self.batch_size

    @abc.abstractmethod
    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        """Return rows of training batch k, a pure function of (seed, k, batch_size).

        Args:
            k: Number of the batch, from 0 at the start of the run and on through all epochs.
            rows: Rows of the global batch. The default is all rows.
        """

    @abc.abstractmethod
    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        """Return rows of evaluation batch j. Rows past the last example have weight 0.

        Args:
            j: Number of the batch, from 0. The order is the same in every evaluation.
            rows: Rows of the global batch. The default is all rows.
        """

    def train_batches(self, start: int, *rows: slice) -> Generator[Batch, None, None]:
        """Yield training batches from batch `start` on, without end.

        Threads make the batches ahead of time. Closing the generator ends the threads.

        Args:
            *rows: Rows of the global batch to yield. Several slices are concatenated in this order.
                The default is all rows.
        """
        with self.preparing():
            yield from self._ahead(self.train_batch, rows, start, _FOREVER)

    def preparing(self) -> contextlib.AbstractContextManager[object]:
        """Return the context manager that is held open while training batches are read.

        It does nothing by default. Streaming sources run their tokenizer thread in it.
        """
        return contextlib.nullcontext()

    def eval_batches(self, *rows: slice) -> Generator[Batch, None, None]:
        """Yield batches that have every evaluation example once. Threads make them ahead of time.

        The last batch has as many rows as the others. Rows past the last example have weight 0.

        Args:
            *rows: Rows of the global batch to yield. Several slices are concatenated in this order.
                The default is all rows.
        """
        count = -(-self.eval_size // self.eval_batch_size)
        return self._ahead(self.eval_batch, rows, 0, count)

    def references(self) -> list[Reference]:
        """Return results of simple models on the evaluation examples. The default is an empty list.

        Sources that have such models train them on the training data, and cache the results on
        disk.
        """
        return []

    def _ahead(
        self,
        make_batch: Callable[[int, slice], Batch],
        rows: tuple[slice, ...],
        start: int,
        stop: int,
    ) -> Generator[Batch, None, None]:
        """Yield batches start to stop - 1 in order. grain threads make them ahead of time.

        The threads end with the generator.

        Args:
            make_batch: Function that returns the given rows of batch k. The threads call it.
            rows: Rows of the global batch to yield. Several slices are concatenated in this order.
                An empty tuple yields all rows.
        """
        import grain
        import numpy as np

        def join_parts(k: int) -> Batch:
            parts = [make_batch(k, part_rows) for part_rows in rows or (ALL_ROWS,)]
            if len(parts) == 1:
                return parts[0]
            joined = {}
            for name in parts[0]:
                joined[name] = np.concatenate([part[name] for part in parts])
            return joined

        # A buffer smaller than the number of threads would leave some of them idle.
        buffer_size = max(self.threads, _BATCHES_AHEAD)
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=buffer_size)
        dataset = grain.MapDataset.range(start, stop).map(join_parts).to_iter_dataset(options)
        with contextlib.closing(iter(dataset)) as batches:
            yield from batches


class Prefetch(Generic[S, T]):
    """Iterator over the batches of a source that a thread has already put on the devices.

    An error in the thread is raised by `next` unchanged, after the batches before it. Close the
    iterator, or use it as a context manager. Then the thread closes the source, too.

    Args:
        put: Function that puts a batch on the devices. The thread calls it.
        depth: Number of batches that may wait on the devices, at least 1. The thread holds one
            more.
    """

    def __init__(
        self, source: Generator[S, None, None], put: Callable[[S], T], depth: int = DEPTH
    ) -> None:
        self._source = source
        self._put = put
        # A batch is in a tuple, so that an exception can be told from a batch.
        self._queue: queue.Queue[tuple[T] | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        # A daemon, because a source that is stuck must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def ready(self, seconds: float = 0.0) -> bool:
        """Return whether a batch or an error is there, so that `next` would not wait.

        Args:
            seconds: Longest time to wait for a batch or an error before returning False. The
                default is 0.
        """
        with self._queue.not_empty:
            return self._queue.not_empty.wait_for(lambda: bool(self._queue.queue), seconds)

    def __iter__(self) -> Prefetch[S, T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if isinstance(item, Exception):
            # Nothing comes after an error, so the next call must raise the same error again.
            self._queue.put(item)
            raise item
        return item[0]

    def close(self) -> None:
        """Stop the thread, which then closes the source. Drop the batches that are not taken yet.

        Waits at most `_PATIENCE_S` seconds for the thread. A second call does nothing.
        """
        self._stop.set()
        deadline = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            # The thread may be waiting for a free place in the queue, so this makes one.
            with contextlib.suppress(queue.Empty):
                self._queue.get_nowait()
            self._thread.join(0.01)

    def __enter__(self) -> Prefetch[S, T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        """Put batches on the devices and into the queue until the source ends or `close` is called.

        The source is closed then. The error or `StopIteration` that ended it is the last entry of
        the queue, except after `close`.
        """
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
