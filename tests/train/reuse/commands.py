"""Commands of `mupax` that run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from mupax.__main__ import main


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str
    """Standard error on one line, so that a message is found wherever the terminal broke it."""

    @property
    def text(self) -> str:
        """Both outputs on one line."""
        return " ".join((self.out + " " + self.err).split())


def _run(words: tuple[object, ...]) -> Result:
    command_line: list[str] = []
    for word in words:
        if isinstance(word, list):
            command_line += map(str, word)
        else:
            command_line += str(word).split()
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command_line)
    return Result(code, out.getvalue(), err.getvalue())


def call(*words: object) -> Result:
    """Run a command.

    Args:
        words: Words of the command line. A string holds any number of words, the entries of a list
            are one word each.
    """
    result = _run(words)
    return result._replace(err=" ".join(result.err.split()))


def succeed(*words: object) -> Result:
    """Run a command that must exit with 0."""
    result = call(*words)
    assert result.code == 0, result.err
    return result


def refuse(*words: object) -> str:
    """Run a command that must exit with 2 and a short message, and return the message."""
    code, out, err = _run(words)
    assert code == 2, (words, out, err)
    assert not out
    assert "Traceback" not in err
    assert 1 <= len(err.splitlines()) <= 10
    return " ".join(err.split())


def read_json(*parts: str | Path) -> dict[str, Any]:
    """Return the fields of a JSON file."""
    return json.loads(Path(*parts).read_text())


def change_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps({**read_json(path), **fields}))


def rows_with(field: str, workdir: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that have a field."""
    lines = Path(workdir, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if field in row]
