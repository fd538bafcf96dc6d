"""Thread that owns the device: the texts of all requests share its slots.

Texts join and leave between tokens. The queue is fair. A free slot goes to the client address with
the fewest texts in slots, then to the request with the fewest, then to the request that has waited
longest. If another request waits, a text gives up its slot after `TURN_S` and goes on later.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mupax import memory, terminal
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import DecodingError
from mupax.train.reuse.generate.slots import Slots, Text, Written
from mupax.train.reuse.serve.logs import one_line

TURN_S = 2.0
"""Time in seconds for which a text keeps its slot while another request waits."""
ASIDE_BYTES = 1 << 30
"""Memory for caches of texts that gave up their slot, in bytes.

If it is too small for as many texts as there are slots, that many are kept all the same.
"""
STALL_S = 10.0
"""Time in seconds without progress after which the worker counts as stuck.

Three times the duration of the worker's longest call is added.
"""
_STOP_S = 1.0
"""Time in seconds for which `Worker.stop` waits for the thread."""
_STOPPING = "the server is stopping"
# No status 503, which would let clients ask again: a dead thread is never started again.
_DIED = "the model's thread died; the server's log says why. Restart the server"


class BusyError(Exception):
    """Error for a request when too many others wait."""


class WorkerError(Exception):
    """Error for a request that the worker could not finish.

    Args:
        status: HTTP status, 500 or 503.
    """

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Progress:
    """New tokens of one text of a job: the text at `index` in `Job.texts`."""

    index: int
    tokens: list[int]
    is_last: bool
    """Whether no more tokens come, because all are written or the time is over."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scores of one text of a `ScoreJob`: the text at `index` in its `rows`.

    `scores` is a `Scores` whose arrays have no axis of texts.
    """

    index: int
    scores: Any


Event = Progress | Scored | Exception


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
    """Texts of one request, which a `Worker` writes.

    Args:
        client: Address of the client. The queue shares slots fairly between addresses.
        deadline: `time.monotonic()` at which the job ends.
        deliver: Function that takes every event, in the worker's thread. It must return at once.

    Attributes:
        has_begun: True once a text of the job has had a slot.
        waiting: Texts of the job that wait for a slot, the next one first.
    """

    texts: Sequence[Text]
    client: str
    deadline: float
    deliver: Callable[[Event], None]
    is_cancelled: bool = False
    """Set by a reader who needs nothing more."""
    has_begun: bool = False
    order: int = 0
    """Place in the queue. The lowest has waited longest."""
    waiting: collections.deque[Text] = dataclasses.field(default_factory=collections.deque)

    def cancel(self) -> None:
        """Mark the job as cancelled. The worker drops it at its next turn, without an event."""
        self.is_cancelled = True


@dataclasses.dataclass(eq=False, kw_only=True)
class ScoreJob:
    """Texts of one request whose probabilities are computed.

    They are read one by one, so that memory does not grow with their number.

    Args:
        rows: Token ids of each text with its prompt, int32 [T].
        top: Number of likeliest tokens at each position.
        deadline: `time.monotonic()` at which the job ends.
        deliver: Function that takes every event, in the worker's thread. It must return at once.

    Attributes:
        next_row: Index of the text in `rows` that is scored next.
    """

    rows: list[np.ndarray]
    top: int
    deadline: float
    deliver: Callable[[Event], None]
    is_cancelled: bool = False
    next_row: int = 0

    def cancel(self) -> None:
        """Mark the job as cancelled. The worker drops it at its next turn, without an event."""
        self.is_cancelled = True


class Worker:
    """Thread that writes and scores the texts of all requests. It starts when it is made.

    Args:
        generator: Generator of the model. No other thread may use it.
        max_waiting: Largest number of requests that wait for a slot.
    """

    def __init__(self, generator: Generator, num_slots: int, max_waiting: int) -> None:
        self.slots = Slots(generator, num_slots)
        self.generator = generator
        self._max_waiting = max_waiting
        self._max_aside = max(num_slots, ASIDE_BYTES // self.slots.bytes_per_text)
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._score_jobs: collections.deque[ScoreJob] = collections.deque()
        self._owners: dict[Text, tuple[Job, int]] = {}
        """Job of each text that waits or is in a slot, and the text's index in the job."""
        self._slot_began: dict[Text, float] = {}
        self._order = itertools.count()
        self._stopped = False
        self._has_died = False
        self._is_idle = True
        self._last_progress = time.monotonic()
        # A daemon, so that a call that hangs in JAX cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="mupax-serve", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if the thread is alive. It is never started again."""
        return self._thread.is_alive()

    @property
    def is_well(self) -> bool:
        """True if the thread is alive and is idle, compiles, or made progress recently."""
        if not self.is_alive:
            return False
        if self._is_idle or self.slots.compiling:
            return True
        # A slow device may take long for every call, and is well all the same.
        allowed_s = STALL_S + 3 * self.slots.longest_call_s
        return time.monotonic() - self._last_progress < allowed_s

    def submit(self, job: Job | ScoreJob) -> None:
        """Queue a job.

        Raises:
            BusyError: `max_waiting` requests wait already. A `ScoreJob` is always queued.
            WorkerError: The thread is dead, or `stop` was called.
        """
        with self._changed:
            if self._has_died:
                raise WorkerError(_DIED)
            if self._stopped:
                raise WorkerError(_STOPPING, 503)
            if isinstance(job, ScoreJob):
                self._score_jobs.append(job)
            else:
                # A request whose texts gave up their slots waits again, but does not count.
                num_waiting = sum(not queued.has_begun for queued in self._jobs)
                if num_waiting >= self._max_waiting:
                    raise BusyError
                job.order = next(self._order)
                job.waiting.extend(job.texts)
                self._owners |= {text: (job, index) for index, text in enumerate(job.texts)}
                self._jobs.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Let the thread end after its present call, and wait for it for at most `_STOP_S`.

        A call that compiles can take longer. If it still runs when the process exits, the process
        ends at once with exit code 130.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            atexit.register(self._leave)

    def _leave(self) -> None:
        """Exit the process at once, with exit code 130, if the thread still runs."""
        # Python's finalization while JAX runs in the thread can make C++ abort the process.
        if self._thread.is_alive():
            terminal.leave(128 + signal.SIGINT)

    def _run(self) -> None:
        """Write and score texts until `stop`. Then answer all open requests with an error."""
        error: BaseException | None = None
        try:
            while self._wait():
                try:
                    self._turn()
                except Exception as failure:
                    # The open requests fail, and the worker goes on.
                    self._fail_everything(failure)
        except BaseException as raised:
            error = raised
            terminal.note(f"error: the worker died: {one_line(repr(raised))}")
        finally:
            with self._changed:
                self._stopped = True
                self._has_died = error is not None
                # Under the lock of `submit`, which then adds no job that nobody would answer.
                outstanding: list[Job | ScoreJob] = [*self._jobs, *self._score_jobs]
            failure = WorkerError(_DIED) if error else WorkerError(_STOPPING, 503)
            for job in outstanding:
                job.deliver(failure)

    def _wait(self) -> bool:
        """Wait until a job is queued or `stop` is called. Return False after `stop`."""
        with self._changed:
            self._is_idle = True
            while not (self._stopped or self._jobs or self._score_jobs):
                self._changed.wait()
            self._last_progress = time.monotonic()
            self._is_idle = False
            return not self._stopped

    def _turn(self) -> None:
        """Do a round: let texts leave and join slots, score one text, write tokens in all slots."""
        self._drop_unneeded()
        self._fill_slots()
        self._score_one()
        if not self.slots.active:
            return
        try:
            written = self.slots.step()
        except Exception as error:
            self._fail_all_in_slots(error)
            return
        self._made_progress()
        for part in written:
            self._hand_over(part)

    def _made_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _drop_unneeded(self) -> None:
        """Drop texts whose job is cancelled, that are done, or whose time is over.

        When the time of a job is over, texts that were begun end with a last event and without an
        error. A job of which no text has had a slot fails with 503.
        """
        now = time.monotonic()
        for job in [*self._jobs]:
            texts = [text for text in job.texts if text in self._owners]
            if job.is_cancelled:
                self._drop(texts)
            elif now > job.deadline and not job.has_begun:
                self._fail(job, WorkerError("no slot came free in time; ask again later", 503))
            elif now > job.deadline:
                for text in texts:
                    # The client has the tokens so far, so the text ends early and without an error.
                    job.deliver(Progress(self._owners[text][1], [], is_last=True))
                self._drop(texts)
            else:
                self._drop([text for text in texts if text.done])

    def _drop(self, texts: Sequence[Text]) -> None:
        """Remove texts from their slots and the queue, and jobs that have no texts left."""
        for text in texts:
            self.slots.leave(text)
            self._slot_began.pop(text, None)
            job, _ = self._owners.pop(text)
            # Frees the cache at once. A reader may keep the job, and so the text, for longer.
            text.saved = None
            with contextlib.suppress(ValueError):
                job.waiting.remove(text)
        with self._changed:
            self._jobs = [
                job for job in self._jobs if any(text in self._owners for text in job.texts)
            ]

    def _fail(self, job: Job, error: Exception) -> None:
        """Answer a request with an error, and drop its texts."""
        job.deliver(_for_client(error))
        self._drop([text for text in job.texts if text in self._owners])

    def _fail_all_in_slots(self, error: Exception) -> None:
        """Answer all requests that have a text in a slot with an error, and empty the slots."""
        # Read before the reset, which takes all texts out of the slots.
        jobs = {self._owners[text][0] for text in self.slots.active}
        self.slots.reset()
        for job in jobs:
            self._fail(job, error)

    def _fail_everything(self, error: Exception) -> None:
        """Answer all jobs that write texts with an error, and empty the slots. Score jobs stay."""
        self.slots.reset()
        for job in [*self._jobs]:
            self._fail(job, error)

    def _hand_over(self, part: Written) -> None:
        """Deliver new tokens of a text, and drop the text if it is complete.

        If `part` has an error, the whole job fails with it.
        """
        if part.text not in self._owners:  # another text of the request has failed
            return
        job, index = self._owners[part.text]
        if part.error is not None:
            self._fail(job, part.error)
            return
        is_last = part.text.is_complete
        job.deliver(Progress(index, part.tokens, is_last))
        if is_last:
            self._drop([part.text])

    def _fill_slots(self) -> None:
        """Put waiting texts into slots, the job with the highest priority first.

        If no slot is free, a text of another job whose turn (`TURN_S`) is over is put aside.
        """
        while (job := self._next_job()) is not None:
            if not self.slots.num_free and not self._make_room(job):
                return
            text = job.waiting.popleft()
            job.has_begun = True
            self._join(job, text)

    def _next_job(self) -> Job | None:
        """Return the job whose next waiting text should get a slot, or `None` if no job should.

        Jobs are ordered by the number of their client's texts in slots, then by the number of their
        own texts in slots, then by their time in the queue. The fewest texts and the longest wait
        come first. If all slots are taken and there is no memory to put another text aside, only
        jobs count whose next text was put aside before.
        """
        with self._changed:
            jobs = [job for job in self._jobs if job.waiting and not job.is_cancelled]
        if not self.slots.num_free and self._num_aside() >= self._max_aside:
            # There is no memory for another cache that is put aside, so only texts that bring back
            # such a cache may take a slot.
            jobs = [job for job in jobs if job.waiting[0].saved is not None]
        return min(jobs, key=self._priority, default=None)

    def _num_aside(self) -> int:
        """Return the number of texts whose caches were put aside."""
        count = 0
        for job in [*self._jobs]:
            count += sum(text.saved is not None for text in job.waiting)
        return count

    def _priority(self, job: Job) -> tuple[int, int, int]:
        """Return a key to sort jobs by: texts of the client and of the job in slots, and order."""
        owners = [self._owners[text][0] for text in self.slots.active]
        num_of_client = sum(owner.client == job.client for owner in owners)
        num_of_job = owners.count(job)
        return num_of_client, num_of_job, job.order

    def _make_room(self, job: Job) -> bool:
        """Put aside a text of another job whose turn is over, to free its slot.

        The text joins the queue behind all others. Return False if there is no such text, or if
        there is no memory for its cache. In the second case, the number of texts put aside at a
        time is limited to the present number from then on.
        """
        now = time.monotonic()
        candidates = []
        for text in self.slots.active:
            owner, _ = self._owners[text]
            # A text keeps its slot for a while, because moving its cache costs time.
            if owner is not job and now - self._slot_began[text] > TURN_S:
                candidates.append(text)
        if not candidates:
            return False

        def claim(text: Text) -> tuple[int, int, float]:
            """Return a sort key: texts in slots of its client, of its job, and seconds in its slot.

            The text with the largest key gives up its slot.
            """
            owner, _ = self._owners[text]
            num_of_client, num_of_job, _ = self._priority(owner)
            return num_of_client, num_of_job, now - self._slot_began[text]

        text = max(candidates, key=claim)
        try:
            self.slots.put_aside(text)
        except Exception as error:
            if not memory.exhausted(error):
                raise
            self._max_aside = self._num_aside()  # memory does not suffice for more
            return False
        owner, _ = self._owners[text]
        del self._slot_began[text]
        owner.waiting.append(text)
        # Behind all others, so that texts take turns.
        owner.order = next(self._order)
        return True

    def _join(self, job: Job, text: Text) -> None:
        """Put a text into a free slot, and deliver its first token if it is new.

        An error fails the job of the text. If the cache is lost, all jobs in slots fail.
        """
        try:
            tokens = self.slots.join(text)
        except Exception as error:
            if self.slots.is_broken:
                self._fail_all_in_slots(error)
            if text in self._owners:
                self._fail(job, error)
            return
        self._slot_began[text] = time.monotonic()
        self._made_progress()
        # A text that comes back to a slot has its tokens already, and joining adds none.
        if tokens:
            self._hand_over(Written(text, tokens))

    def _score_one(self) -> None:
        """Score the next text of the first `ScoreJob` in the queue, and put this job at the end.

        A job leaves the queue after its last text, after an error, or when it is cancelled.
        """
        with self._changed:
            job = self._score_jobs.popleft() if self._score_jobs else None
        if job is None or job.is_cancelled:
            return
        row = job.rows[job.next_row]
        try:
            if time.monotonic() > job.deadline:
                raise WorkerError(
                    "the time of the request is over before its logprobs are made; ask for less",
                    503,
                )
            with self.slots.watched(("score", self.generator.padded(row[None, :-1]).shape)):
                scores = self.generator.logprobs(row[None], job.top)
        except Exception as error:
            job.deliver(_for_client(error))
            return
        self._made_progress()
        # Drop the axis of texts, which has size 1.
        text_scores = type(scores)(*(values[0] for values in scores))
        job.deliver(Scored(job.next_row, text_scores))
        job.next_row += 1
        if job.next_row < len(job.rows):
            with self._changed:
                self._score_jobs.append(job)


def _for_client(error: Exception) -> Exception:
    """Return the error that a client sees. Log errors whose details it does not see."""
    if isinstance(error, DecodingError | WorkerError):
        return error
    if memory.exhausted(error):
        terminal.note(f"error: a request ran out of memory: {one_line(str(error))[:300]}")
        return WorkerError("the server ran out of memory; ask for less, or later", 503)
    terminal.note(f"error: a request failed: {one_line(repr(error))[:300]}")
    return WorkerError("the server failed; its log says how", 500)
