"""The files of a run whose folder is a bucket: written in a folder of this machine, uploaded while training goes on."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import TracebackType

from mupax import disk
from mupax.errors import MupaxFailure

_AGAIN = ("metrics.jsonl", "wandb_id", "trackio_name")
"""What a run goes on writing, so that it is fetched first. TensorBoard begins a new file."""
_PATIENCE_S = 60.0
"""How long the end of a run waits for the last upload."""


class UploadBuffer:
    """A folder of this machine whose files are those of a folder in a bucket; a context manager that uploads them in the end.

    Args:
        target: the folder in the bucket.

    Raises:
        DiskError: the bucket cannot be read.

    Attributes:
        folder: where to write.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="mupax-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name) / target.name
        self.folder.mkdir()
        self._sent: dict[Path, tuple[int, int]] = {}
        self._sending, self._sent_all = threading.Lock(), False
        for name in _AGAIN:
            if disk.status(target / name) is not None:
                disk.Patience()(
                    partial(disk.copy, target / name, self.folder / name), target / name
                )

    def send(self) -> None:
        """Upload every file that has changed since it was sent.

        Raises:
            OSError: the rows of metrics cannot be uploaded; any other file is tried again the next time.
        """
        with self._sending:
            for file in sorted(file for file in self.folder.rglob("*") if file.is_file()):
                state = (file.stat().st_size, file.stat().st_mtime_ns)
                if self._sent.get(file) == state:
                    continue
                with (
                    contextlib.nullcontext()
                    if file.name in _AGAIN
                    else contextlib.suppress(OSError)
                ):
                    disk.copy(file, self.target / file.relative_to(self.folder).as_posix())
                    self._sent[file] = state

    def send_later(self) -> threading.Thread:
        """`send` in a thread; what fails is sent the next time."""
        thread = threading.Thread(target=self._try, name="upload", daemon=True)
        thread.start()
        return thread

    def _try(self) -> None:
        self._sent_all = False
        with contextlib.suppress(OSError):
            self.send()
            self._sent_all = True

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
                return  # whoever stops the process at once does not wait
            self.send_later().join(_PATIENCE_S)
            if not self._sent_all:
                folder = tempfile.mkdtemp(prefix="mupax-unsent-")
                disk.copy(self.folder, Path(folder))
                raise MupaxFailure(
                    f"cannot upload all rows to {self.target}; they are in {folder}"
                ) from error
        finally:
            self._temporary.cleanup()
