"""Paths in a bucket (gs://), by etils.epath and gcsfs, with the methods of pathlib that are called here."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec.config
from etils.epath.gpath import PosixGPath

_PATIENCE_S = 60.0
"""How long one request may take."""


def path_of(address: str) -> Path:
    """The path of an address, gs://bucket/folder."""
    # Others write there too, tensorstore for one: a list that is remembered would lack what they wrote.
    options = {"use_listings_cache": False, "requests_timeout": _PATIENCE_S}
    fsspec.config.conf.setdefault("gcs", {}).update(options)
    return cast("Path", BucketPath(address.rstrip("/")))


class _Translated:
    """A backend of epath, or a file of one, whose errors are OSErrors as those of a disk are."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with _as_os_errors():
                result = method(*args, **kwargs)
            return _File(result) if name == "open" else result

        return call


class _File(_Translated):
    """A file whose errors are OSErrors."""

    @property
    def closed(self) -> bool:
        return self._backend.closed

    def __enter__(self) -> _File:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with _as_os_errors():
            self._backend.__exit__(kind, error, trace)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turns what gcsfs, google.auth and aiohttp raise into what a disk raises, with a text that says something."""
    try:
        yield
    except (ValueError, NotImplementedError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        lines = str(error).splitlines() or [""]
        if isinstance(error, FileNotFoundError):
            raise OSError(errno.ENOENT, f"no such object ({lines[0][:200]})") from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {lines[0][:200]}") from error


class BucketPath(PosixGPath):
    """A path in a bucket. What `rglob` found remembers the size and time it had then."""

    _listed: SimpleNamespace | None = None

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
        return _stat(
            status.length, status.mtime, stat.S_IFDIR if status.is_directory else stat.S_IFREG
        )

    lstat = stat

    def iterdir(self) -> Iterator[BucketPath]:
        try:
            yield from super().iterdir()
        except FileNotFoundError:  # a folder there is no more than names that begin with it
            return

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        assert pattern == "*"
        backend: Any = super()._backend
        for name, entry in _Translated(backend.fs(self)).find(str(self), detail=True).items():
            path, changed = self._new(f"gs://{name}"), entry.get("mtime")
            path._listed = _stat(entry["size"], changed.timestamp() if changed else 0)
            yield path

    def mkdir(self, *_: object, **__: object) -> None:
        """Nothing: a folder is there when something is in it."""


def _stat(size: int, mtime: float, mode: int = stat.S_IFREG) -> SimpleNamespace:
    return SimpleNamespace(
        st_mode=mode, st_size=size, st_mtime=mtime, st_mtime_ns=int(mtime * 10**9)
    )
