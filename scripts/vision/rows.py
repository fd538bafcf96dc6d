"""The rows of a study of images: a file that is whole after every run, so that a study that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write(path: Path, command: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the file anew, a line per row, and print the last one.

    Args:
        path: of the file.
        command: that makes it.
        rows: all.
    """
    print(json.dumps(rows[-1]), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{{"command": {json.dumps(command)}, "rows": [\n{text}\n]}}\n')
