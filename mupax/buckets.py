"""Paths in a bucket (gs://) on etils.epath and gcsfs, with the methods of pathlib that are called.

`mupax.disk.path_of` makes these paths.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec.config
from etils.epath.gpath import PosixGPath

_PATIENCE_S = 60.0
"""Seconds that one request may take."""


def path_of(address: str) -> Path:
    """Return a `BucketPath` for an address `gs://bucket/folder`.

    Also change the options of gcsfs in this process: no cache of listings, and at most 60 seconds
    for a request. The logs of gcsfs and google.auth are dropped, unless this process has a handler
    of logs already.
    """
    # gcsfs logs the traceback of a request that fails for good. Without this it is printed on
    # standard error, before the message of mupax about the same failure.
    for name in ("gcsfs", "google.auth"):
        log = logging.getLogger(name)
        if not log.hasHandlers():
            log.addHandler(logging.NullHandler())
            log.propagate = False  # a package may call `logging.basicConfig` later
    # Tensorstore writes to the bucket too. A cached list of objects would lack what it wrote.
    options = {"use_listings_cache": False, "requests_timeout": _PATIENCE_S}
    fsspec.config.conf.setdefault("gcs", {}).update(options)
    return cast("Path", BucketPath(address.rstrip("/")))


class _Translated:
    """Wrapper of an epath backend that turns failures of requests into OSError.

    `open` returns the opened file in a wrapper of the same kind. ValueError and
    NotImplementedError are raised unchanged.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            address = str(args[0]) if args else ""
            with _as_os_errors(address if address.startswith("gs://") else None):
                result = method(*args, **kwargs)
            return _File(result) if name == "open" else result

        return call


class _File(_Translated):
    """Context manager around an open file in a bucket. Its methods raise OSError on failure."""

    @property
    def closed(self) -> bool:
        return self._backend.closed

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with _as_os_errors():
            self._backend.__exit__(kind, error, trace)


@contextlib.contextmanager
def _as_os_errors(address: str | None = None) -> Iterator[None]:
    """Turn exceptions of gcsfs, google.auth and aiohttp, while entered, into OSErrors with a text.

    A missing object gets errno ENOENT, any other failure EIO. ValueError, NotImplementedError and
    OSErrors that have a text already are raised unchanged, except those of a connection.

    Args:
        address: File of the error about a connection, if it is known.
    """
    try:
        yield
    except (ValueError, NotImplementedError):
        # A mistake in the call, not a failure of the bucket: a retry would not help.
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            if type(error).__module__.partition(".")[0] != "aiohttp":
                raise
            # Its own text is that of the system, without the host, such as "Name or service not
            # known".
            raise OSError(errno.EIO, f"the bucket is not reached: {error}", address) from error
        lines = str(error).splitlines() or [""]
        reason = lines[0][:200]
        if isinstance(error, FileNotFoundError):
            raise OSError(errno.ENOENT, f"no such object ({reason})") from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {reason}") from error


class BucketPath(PosixGPath):
    """Path in a bucket (`gs://`) with the methods of `pathlib.Path` that mupax calls.

    Methods raise OSError if a request fails. There are no links and no empty folders.
    """

    _listed: SimpleNamespace | None = None
    """Size and time of a file from the listing that `rglob` made. They save a request per file."""

    @property
    def _backend(self) -> Any:
        return _Translated(super()._backend)

    def absolute(self) -> BucketPath:
        return self

    def expanduser(self) -> BucketPath:
        return self

    def is_symlink(self) -> bool:
        return False

    def is_file(self) -> bool:
        return self._listed is not None or super().is_file()

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        if self._listed is not None:
            return self._listed
        status = super().stat()
        mode = stat.S_IFDIR if status.is_directory else stat.S_IFREG
        return _stat(status.length, status.mtime, mode)

    lstat = stat

    def iterdir(self) -> Iterator[BucketPath]:
        try:
            yield from super().iterdir()
        except FileNotFoundError:  # a bucket has no folders, only names with a common beginning
            return

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        assert pattern == "*"
        backend: Any = super()._backend
        file_system = _Translated(backend.fs(self))
        entries = file_system.find(str(self), detail=True)
        for name, entry in entries.items():
            path = self._new(f"gs://{name}")
            modified = entry.get("mtime")
            path._listed = _stat(entry["size"], modified.timestamp() if modified else 0)
            yield path

    def mkdir(self, *_: object, **__: object) -> None:
        """Do nothing. A folder in a bucket exists as soon as an object is in it."""


def _stat(size: int, mtime: float, mode: int = stat.S_IFREG) -> SimpleNamespace:
    """Return an object with the fields of `os.stat_result` that mupax reads.

    Args:
        size: Size of the object in bytes.
        mtime: Time of the last change, in seconds since 1970.
        mode: File type bits. The default is a regular file.
    """
    return SimpleNamespace(
        st_mode=mode, st_size=size, st_mtime=mtime, st_mtime_ns=int(mtime * 10**9)
    )
