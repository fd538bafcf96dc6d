"""Worker processes that answer one question at a time, and are replaced if they take too long."""

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
    """A process of `python -m MODULE --worker FOLDER`. The first question starts it.

    Args:
        module: Name of a module whose `main` calls `serve`.
        folder: Folder for the files of the worker. It is made if it is missing.
        environ: Variables in addition to those of this process.
    """

    def __init__(self, module: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", module, "--worker", str(folder)]
        self._environ = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def ask(self, question: Any, seconds: float) -> Any:
        """Send a question to the process, and return its answer. Both are JSON.

        If the process dies or does not answer within `seconds`, end it and return `None`. The next
        question then starts a new process.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                cwd=ROOT,
            )
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None

        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            # An answer is one line, so that no earlier one waits in the buffer of `stdout`.
            ready, _, _ = select.select([stdout], [], [], seconds)
            line = stdout.readline() if ready else b""
            if line:
                return json.loads(line)
        except BrokenPipeError:
            pass
        self.end()
        return None

    def end(self) -> None:
        """Kill the process if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the questions on standard input, one JSON value a line, until it is closed."""
    stream = os.fdopen(os.dup(1), "w")
    # What `answer` prints must not be taken for an answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=stream, flush=True)


def answers(
    workers: list[Worker], questions: Iterable[Any], seconds: float
) -> Iterator[tuple[Any, Any]]:
    """Yield every question with its answer, in the order of the answers.

    Each worker has one question at a time. All workers are ended afterwards.

    Args:
        seconds: Time limit of one answer, after which the answer is `None`.
    """
    free_workers = list(workers)
    lock = threading.Lock()

    def ask(question: Any) -> tuple[Any, Any]:
        with lock:
            worker = free_workers.pop()
        try:
            return question, worker.ask(question, seconds)
        finally:
            with lock:
                free_workers.append(worker)

    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(ask, question) for question in questions]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            # A question that still waits would start its worker again.
            for future in futures:
                future.cancel()
            for worker in workers:
                worker.end()
