"""Processes that answer questions one after the other, and are ended and replaced where an answer takes too long."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scripts import ROOT


class Worker:
    """A process of `python -m MODULE --worker FOLDER`, started when it is first asked.

    Args:
        module: whose `main` calls `serve`.
        folder: for its files.
        environ: variables beside those of this process.
    """

    def __init__(self, module: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", module, "--worker", str(folder)]
        self._environ = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer; None where there is none in time, or the process died: the next question goes to another."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                cwd=ROOT,
            )
        into, out = self._process.stdin, self._process.stdout
        assert into is not None
        assert out is not None
        try:
            into.write(json.dumps(question).encode() + b"\n")
            into.flush()
            if select.select([out], [], [], seconds)[0] and (line := out.readline()):
                return json.loads(line)
        except BrokenPipeError:
            pass
        self.end()
        return None

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer every line of standard input; what is printed meanwhile goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def answers(
    workers: list[Worker], questions: Iterable[Any], seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Every question with its answer, as they come; each worker has one at a time."""
    free, lock = list(workers), threading.Lock()

    def ask(question: Any) -> tuple[Any, Any]:
        with lock:
            worker = free.pop()
        try:
            return question, worker.ask(question, seconds)
        finally:
            with lock:
                free.append(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(ask, question) for question in questions]
        try:
            for future in as_completed(running):
                yield future.result()
        finally:
            for future in running:
                future.cancel()
            for worker in workers:
                worker.end()
