"""The files of a run whose folder is a bucket: written in a folder of this machine, uploaded while training goes on."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from mupax import paths
from mupax.errors import MupaxFailure

_AGAIN = ("metrics.jsonl", "wandb_id")
"""What a run goes on writing, so that it is fetched first. TensorBoard begins a new file."""


class Spool:
    """A folder of this machine whose files are those of a folder in a bucket; a context manager that uploads them in the end.

    Args:
        target: the folder in the bucket.

    Attributes:
        folder: where to write.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="mupax-")
        self.folder = Path(self._temporary.name) / target.name
        self.folder.mkdir()
        self._sent: dict[Path, tuple[int, int]] = {}
        self._sending = threading.Lock()
        for name in _AGAIN:
            if (target / name).is_file():
                paths.copy(target / name, self.folder / name)

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
                with contextlib.nullcontext() if file.name in _AGAIN else contextlib.suppress(OSError):
                    paths.copy(file, self.target / file.relative_to(self.folder).as_posix())
                    self._sent[file] = state

    def send_later(self) -> None:
        """`send` in a thread; what fails is sent the next time."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.send()

        if not self._sending.locked():
            threading.Thread(target=send, name="upload", daemon=True).start()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.send()
        except OSError as failure:
            kept = tempfile.mkdtemp(prefix="mupax-unsent-")
            paths.copy(self.folder, Path(kept))
            raise MupaxFailure(
                f"cannot upload the rows to {self.target}: {failure.strerror}; they are in {kept}"
            ) from error
        finally:
            self._temporary.cleanup()
