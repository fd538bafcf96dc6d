"""`mupax train` that records its batches and its last parameters, for tests of several processes.

`python -m tests.train.parallel.watched_run SETTINGS WORDS...` takes the fields of `Settings` as
JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import mesh_utils

from mupax.train.data import cache
from mupax.train.data.text import packing, shares, tokenizer
from mupax.train.parallel import processes, sharding
from mupax.train.run.report import finish
from tests.fixtures.small_runs import leave_empty_plot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Record of a run, and the faults that it meets.

    Attributes:
        record: File that gets a line for each batch that goes to the devices, and for the last
            parameters. It is written at once: batches are made in threads, whose prints would run
            into lines of the loop.
        bad_batch: Number of the training batch whose weights become NaN, from 1.
        sigterm_batch: Number of the training batch at which the process gets SIGTERM.
        alternate: Lay pairs of the processes' devices in turn over the mesh, as the torus of a TPU
            slice may.
        shares_text: Slow the tokenizer, and let processes that wait for it help at once.
    """

    record: str
    bad_batch: int | None = None
    sigterm_batch: int | None = None
    alternate: bool = False
    shares_text: bool = False


def watch(settings: Settings, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace the functions that a run calls for its batches and at its end."""
    file = os.open(settings.record, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    put = sharding.BatchSharding.shard_batch
    leave = finish.leave
    training_batches = []

    def record(kind: str, value: str) -> None:
        os.write(file, f"{kind} {value}\n".encode())

    def watched_put(self: Any, batch: Any) -> Any:
        rows = [row for part in self.rows for row in range(part.start, part.stop)]
        if len(rows) <= 16:  # evaluations have at least 32 on every process
            training_batches.append(rows)
            number = len(training_batches)
            if number == settings.bad_batch:
                batch = {**batch, "weights": batch["weights"] * float("nan")}
            if number == settings.sigterm_batch:
                os.kill(os.getpid(), signal.SIGTERM)
            hashes = [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in batch["inputs"]]
            record("rows", json.dumps(dict(zip(rows, hashes, strict=True))))
        return put(self, batch)

    def watched_leave(session: Any, params: Any) -> None:
        digest = hashlib.sha256()
        for name, value in sorted(params.items()):
            shards = {str(shard.index): shard.data for shard in value.addressable_shards}
            for index in sorted(shards):
                digest.update(name.encode() + index.encode() + bytes(memoryview(shards[index])))
        record("digest", digest.hexdigest())
        leave(session, params)

    replace(sharding.BatchSharding, "shard_batch", watched_put)
    replace(finish, "leave", watched_leave)
    replace(finish, "loss_plot", leave_empty_plot)
    replace(packing, "_STEP_BYTES", 1000)
    replace(shares, "_PARTS", 4)


def share_text() -> None:
    encode = tokenizer.Bytes.encode

    def slow_encode(self: Any, texts: Any) -> Any:
        time.sleep(0.2)
        return encode(self, texts)

    tokenizer.Bytes.encode = slow_encode
    cache.PATIENCE_S = 0.0
    processes.LEAD_S = 1.5


def alternate_devices() -> None:
    create_device_mesh = mesh_utils.create_device_mesh

    def in_turn(shape: Any, devices: Any, **options: Any) -> Any:
        count = jax.local_device_count()
        ordered = []
        for first in range(0, count, 2):
            for index in range(first, len(devices), count):
                ordered.extend(devices[index : index + 2])
        return create_device_mesh(shape, ordered, **options)

    mesh_utils.create_device_mesh = in_turn


def main() -> int:
    from mupax.train.__main__ import main as train

    settings = Settings(**json.loads(sys.argv[1]))
    watch(settings)
    if settings.alternate:
        alternate_devices()
    if settings.shares_text:
        share_text()
    return train(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
