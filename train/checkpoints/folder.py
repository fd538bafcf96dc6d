"""The folder of a run's checkpoints: which there are, how one comes to count, is deleted, or is set aside."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

from mupax.train.checkpoints import manifest
from mupax.train.checkpoints.manifest import Manifest
from mupax.train.checkpoints.workdir import CHECKPOINTS, SET_ASIDE, WorkdirError

SAVING, DELETING = ".saving", ".deleting"


class CheckpointFolder:
    """Checkpoints on disk by their steps. Process 0 alone changes what is in it.

    Args:
        workdir: folder of the run.
        keep: how many of the newest to keep.
        note: told what was found damaged and what was done about it.
    """

    def __init__(self, workdir: Path, keep: int, note: Callable[[str], None]) -> None:
        self.path, self._keep, self._note = workdir / CHECKPOINTS, keep, note

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, oldest first."""
        return manifest.steps(self.path)

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return max(self.steps, default=None)

    def publish(self, written: Path, whole: Manifest) -> None:
        """Give a checkpoint its manifest and its name, and only then delete those beyond `keep`.

        Args:
            written: the folder of its arrays.
            whole: its manifest.
        """
        manifest.write(written, whole)
        if (self.path / str(whole.step)).exists():  # one without a manifest, copied here by somebody
            self.set_aside(whole.step, ["another was saved"])
        written.replace(self.path / str(whole.step))
        manifest.sync_folder(self.path)
        for step in self.steps[: -self._keep]:
            doomed = self.path / f"{step}{DELETING}"  # half deleted, it must not look like a checkpoint
            (self.path / str(step)).replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def set_aside(self, step: int, problems: list[str]) -> None:
        """Move a damaged checkpoint out of the way, and say so.

        Args:
            step: of the checkpoint.
            problems: what is wrong with it.

        Raises:
            WorkdirError: it cannot be moved.
        """
        folder = self.path / SET_ASIDE
        names = (str(step) if number == 0 else f"{step}.{number}" for number in itertools.count())
        target = next(folder / name for name in names if not (folder / name).exists())
        try:
            folder.mkdir(exist_ok=True)
            (self.path / str(step)).replace(target)
        except OSError as error:
            raise WorkdirError(
                f"checkpoint {step} is damaged ({manifest.some(problems)}) and cannot be moved: {error.strerror}"
            ) from error
        before = self.latest
        then = "no other is left" if before is None else f"going back to checkpoint {before}"
        self._note(
            f"checkpoint {step} is damaged: {manifest.some(problems)}; set aside as {target.relative_to(self.path.parent)}, {then}"
        )

    def tidy(self) -> None:
        """Remove what interrupted saves left, set aside what has no manifest."""
        if not self.path.is_dir():
            return
        for path in self.path.iterdir():
            name, dot, _ = path.name.partition(".")
            if name.isdigit() and dot:
                shutil.rmtree(path, ignore_errors=True)
            elif name.isdigit() and not (path / manifest.NAME).is_file():
                self.set_aside(int(name), [f"{manifest.NAME} is missing"])
        if self.latest is None and any((self.path / SET_ASIDE).glob("*")):
            raise WorkdirError(self.none_good())

    def none_good(self) -> str:
        """The text for a run whose checkpoints are all damaged."""
        held = ", ".join(sorted(path.name for path in (self.path / SET_ASIDE).glob("*")))
        return (
            f"no good checkpoint is left in {self.path}; those set aside in {SET_ASIDE}/ ({held}) are damaged. Nothing was "
            "overwritten: put a copy of a good one there, or start again with another --workdir"
        )
