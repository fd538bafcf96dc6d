"""Saves of several processes, one of which cannot: the others learn why, and do not wait for it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mupax.train.checkpoints import checkpointer
from mupax.train.parallel.processes import Processes
from tests.train.parallel.test_distributed import on_two_processes

pytestmark = pytest.mark.core


class Response:
    """Save of orbax in one of two processes: process 1 fails, process 0 waits for it."""

    def __init__(self, fails: bool, released: threading.Event) -> None:
        self.fails, self.released = fails, released

    def result(self) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        assert self.released.wait(60)


def test_a_process_that_cannot_save_is_not_waited_for_and_its_reason_is_what_all_say() -> None:
    released, began = threading.Event(), time.monotonic()

    def save(processes: Processes) -> Any:
        try:
            checkpointer.wait(Response(processes.index == 1, released), processes, "7")
        except Exception as error:
            return checkpointer.tell(error, Path(), processes, "7")
        return None

    reason = f"process 1 ({socket.gethostname()}): No space left on device"
    assert on_two_processes(save) == [reason, reason]
    assert time.monotonic() - began < 20
    released.set()


def test_control_a_save_that_only_takes_long_is_waited_for() -> None:
    released = threading.Event()
    threading.Timer(1.2, released.set).start()
    assert on_two_processes(
        lambda processes: checkpointer.wait(Response(False, released), processes, "8")
    ) == [
        None,
        None,
    ]
    assert released.is_set()
