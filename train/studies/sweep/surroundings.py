"""The environment that a sweep's points were trained in: environment.json beside their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mupax import disk
from mupax.train.checkpoints.workdir import surroundings
from mupax.train.core.program import Program
from mupax.train.parallel import environment

FILE_NAME = "environment.json"


def note_changes(folder: Path, program: Program, note: Callable[[str], None], *, goes_on: bool) -> None:
    """Say what has changed since the last points of a folder were trained, and record the environment of the next ones.

    Rows of two environments may differ in bits. They stay comparable as far as seeds are.

    Args:
        program: of the next point.
        note: told a line for every change.
        goes_on: whether points of the folder are done or in training.
    """
    path = folder / FILE_NAME
    now = surroundings(program.compiler_options(), environment.facts(program.mesh))
    if goes_on and disk.status(path) is not None:
        try:
            changed = environment.changes(disk.read_json(path), now)
        except disk.JsonError as error:
            changed = None
            note(f"{error}; it is written again")
        if changed == []:
            return
        for change in changed or ():
            note(f"changed since the last points: {change}")
    disk.write_whole(path, json.dumps(now, indent=2) + "\n")
