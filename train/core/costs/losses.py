"""What each way to compute a readout's cross-entropy takes of a device, and which one `auto` is: for the loss, the search and the plan.

Estimates from sizes alone, of loss and gradients of one microbatch; the figures they were held against are in docs/performance.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

CHUNK_LOGITS = {"cpu": 2**21, "gpu": 2**27, "tpu": 2**27}
"""Logits of one chunk on one device: on CPU what its caches hold, elsewhere half a gigabyte of float32."""
LEAST_ROWS = 1024
"""Tokens that a chunk has at least: the readout's gradient is read and written once per chunk, which more tokens pay for."""
PART_LOGITS = 2**26
"""Logits of one part of the vocabulary on one device: a quarter of a gigabyte of float32."""
LANES = 128
Kind = Literal["plain", "chunked", "vocab"]


class Work(NamedTuple):
    """A readout on one device."""

    rows: int
    """Targets of one microbatch."""
    columns: int
    """Of the vocabulary or classes."""
    width: int
    itemsize: int
    """Bytes of a number of its products."""
    platform: str
    kind: str
    """`jax.Device.device_kind`."""
    room: int | None = None
    """Bytes that it may take while the step's peak stays as it is: what a layer's backward pass takes after it."""

    @property
    def balance(self) -> float:
        """FLOPs that a device computes in the time that it takes a byte of main memory."""
        from mupax.train.parallel import chips

        chip = chips.of_kind(self.kind) or chips.CHIPS["v5e"]
        return chip.peak_flops / chip.hbm_bandwidth

    @property
    def chunk(self) -> int:
        """Tokens of one chunk, at most rows, in chunks as even as can be."""
        target = max(CHUNK_LOGITS[self.platform] // self.columns, LEAST_ROWS)
        return math.ceil(self.rows / math.ceil(self.rows / target))

    @property
    def parts(self) -> list[slice]:
        """The columns of each part of the vocabulary, as even as whole registers allow."""
        size = math.ceil(self.columns / math.ceil(self.rows * self.columns / PART_LOGITS) / LANES) * LANES
        return [slice(start, min(start + size, self.columns)) for start in range(0, self.columns, size)]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute it."""

    kind: Kind
    memory: Mapping[str, int]
    """Bytes while it is computed, by what they hold."""
    traffic: float
    """Bytes of main memory read and written beside no product."""
    after: int = 0
    """Bytes that remain during the backward pass of the layers."""
    again: float = 0.0
    """FLOPs of logits that are computed twice."""
    parts: int = 1
    """That tokens or the vocabulary are cut into."""
    exp_parts: int = 0
    """Parts of the vocabulary whose exponentials are kept between the two passes over them."""

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.memory.values())


def way(work: Work, kind: Kind, exp_parts: int | None = None) -> Way:
    """What a kind takes.

    Logits are written and read in both passes, the readout read and its gradient added to once a chunk: 16.9 GB plain and 41 GB
    chunked of lm-8b at 1 x 4096 tokens, by the TPU compiler. By parts of the vocabulary exponentials are kept, too, and the
    features and their gradient read for every part: 8 M cycles more than plain there, at 1.5 GHz 4.4 GB.

    Args:
        work: on one device.
        kind: of loss.
        exp_parts: parts of the vocabulary whose exponentials are kept; as many as there is room for unless given.
    """
    logits, matrix, features = work.rows * work.columns, work.width * work.columns, work.rows * work.width
    if kind == "vocab":
        return _by_parts(work, exp_parts)
    chunks = math.ceil(work.rows / work.chunk) if kind == "chunked" else 1
    memory = {
        "logits": math.ceil(work.rows / chunks) * work.columns * (4 + work.itemsize),
        "gradient of the features": features * work.itemsize,
        "readout, whole": matrix * work.itemsize,
        "readout's gradient, whole": matrix * 4,
    }
    return Way(kind, memory, 20.0 * logits + 12.0 * chunks * matrix, after=matrix * 4, parts=chunks)


def _by_parts(work: Work, exp_parts: int | None) -> Way:
    cuts, part = work.parts, work.parts[0].stop
    memory = {
        "logits of a part": work.rows * part * 4,
        "exponentials": 0,
        "gradient of the features": work.rows * work.width * 4,
        "readout, a part and its gradient": work.width * part * (4 + work.itemsize),
    }
    each = work.rows * part * work.itemsize
    if exp_parts is None:
        free = len(cuts) * each if work.room is None else work.room - sum(memory.values())
        exp_parts = max(0, min(free // each, len(cuts)))
    memory["exponentials"] = exp_parts * each
    logits = work.rows * work.columns
    traffic = 26.0 * logits + 12.0 * work.width * work.columns + 10.0 * len(cuts) * work.rows * work.width
    again = 2.0 * (len(cuts) - exp_parts) * work.rows * part * work.width
    return Way("vocab", memory, traffic, again=again, parts=len(cuts), exp_parts=exp_parts)


def above(work: Work, one: Way) -> int:
    """Bytes by which a way raises the step's peak.

    Args:
        work: of the step.
        one: way to do it.
    """
    return max(0, one.bytes - (work.room or 0), one.after)


def options(work: Work) -> list[Way]:
    """What `auto` may be, the best first: on TPU what raises the step's peak the least, of those that raise it as little the fastest.

    All logits where they are no more than a chunk. On CPU and GPU chunks otherwise: on CPU they are faster
    (docs/performance.md), on GPU nothing was measured.
    """
    if work.chunk == work.rows:
        return [way(work, "plain")]
    if work.platform != "tpu":
        return [way(work, "chunked")]
    ways = [way(work, kind) for kind in get_args(Kind)]
    return sorted(ways, key=lambda one: (above(work, one), one.traffic + one.again / work.balance))
