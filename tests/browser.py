"""A real browser without a window, spoken to over its debugging pipe; tests that ask for one are skipped where there is none."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The first browser on the path; None where there is none."""
_WORDS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--no-first-run",
)
_PATIENCE_S = 60.0


class Page:
    """One page.

    Args:
        read, write: ends of the pipe.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._numbers = read, write, b"", itertools.count(1)
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def go(self, url: str) -> None:
        self.ask("Page.navigate", url="about:blank")  # else another fragment is no new page
        self.ask("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        """What the script comes to; a promise is waited for."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """The script's first value that is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (value := self.value(script)):
            assert time.monotonic() < deadline, f"{script} stays {value!r}: {self.value('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def picture(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        self.shape(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=features)
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def shape(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE_S)
            assert ready, "the browser says nothing"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [PROGRAM, *_WORDS, f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the pipe is of these numbers
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_in, ours_out)
        finally:
            os.close(ours_out)  # which ends it
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)
