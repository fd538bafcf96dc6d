"""Files of a run whose workdir is in a bucket.

They are written to a folder on this machine and uploaded while training goes on.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import TracebackType

from mupax import MupaxFailure, disk

_CONTINUED = ("metrics.jsonl", "wandb_id", "trackio_name")
"""Files that a resumed run goes on writing, so that they are fetched first."""
_PATIENCE_S = 60.0
"""Longest wait for the last upload at the end of a run, in seconds."""


class UploadBuffer:
    """Context manager of a local folder whose files are uploaded to a folder in a bucket.

    The constructor fetches metrics.jsonl and the ids of trackers from the bucket. Leaving the
    context uploads changed files for up to 60 seconds and deletes the local folder. If metrics
    cannot be uploaded, all files are kept in another local folder, which a `MupaxFailure` names.
    Nothing is uploaded at the end after KeyboardInterrupt or SystemExit.

    Args:
        target: Folder in the bucket that gets the files.

    Attributes:
        folder: Folder on this machine, to write to.

    Raises:
        DiskError: The bucket cannot be read.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="mupax-", ignore_cleanup_errors=True)
        # The name of the workdir, because trackers name a run by its folder.
        self.folder = Path(self._temporary.name) / target.name
        self.folder.mkdir()
        self._sent: dict[Path, tuple[int, int]] = {}
        """Size and time of change of every file when it was uploaded."""
        self._sending = threading.Lock()
        # TensorBoard begins a new file in each session, so its files are not fetched.
        for name in _CONTINUED:
            source = target / name
            if disk.status(source) is not None:
                disk.Patience()(partial(disk.copy, source, self.folder / name), source)

    def send(self) -> None:
        """Upload every file that has changed since its last upload.

        Raises:
            OSError: A file of `_CONTINUED`, such as metrics.jsonl, cannot be uploaded. Any other
                file is tried again the next time.
        """
        with self._sending:
            for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                # Read before the upload: what is written meanwhile is sent the next time.
                status = file.stat()
                version = (status.st_size, status.st_mtime_ns)
                if self._sent.get(file) == version:
                    continue
                is_continued = file.name in _CONTINUED
                with contextlib.nullcontext() if is_continued else contextlib.suppress(OSError):
                    disk.copy(file, self.target / file.relative_to(self.folder).as_posix())
                    self._sent[file] = version

    def send_later(self) -> threading.Thread:
        """Start `send` in a thread and return it. Files that fail are sent the next time."""
        return self._start(threading.Event())

    def _start(self, sent: threading.Event) -> threading.Thread:
        """Start `send` in a thread that sets `sent` if no upload failed, and return the thread."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.send()
                sent.set()

        thread = threading.Thread(target=send, name="upload", daemon=True)
        thread.start()
        return thread

    def __enter__(self) -> UploadBuffer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and not isinstance(error, Exception):
                # After SystemExit or Ctrl-C the process must end without waiting for an upload.
                return
            # An event of this upload alone: an earlier one may still be under way.
            sent = threading.Event()
            self._start(sent).join(_PATIENCE_S)
            if not sent.is_set():
                # The local folder is removed below, so its files are copied to one that stays.
                folder = tempfile.mkdtemp(prefix="mupax-unsent-")
                disk.copy(self.folder, Path(folder))
                raise MupaxFailure(
                    f"cannot upload all rows to {self.target}; they are in {folder}"
                ) from error
        finally:
            self._temporary.cleanup()
