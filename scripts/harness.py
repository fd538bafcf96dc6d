"""Shared parts of the commands in scripts/: options by tyro, checked names, records of rows."""

from __future__ import annotations

import contextlib
import difflib
import gzip
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mupax import MupaxError, command_line, terminal
from mupax.disk import write_whole

if TYPE_CHECKING:
    from mupax.train.parallel.processes import StopRequest

T = TypeVar("T")


def parse(options: type[T], argv: Sequence[str] | None = None) -> T:
    """Parse a command line into a dataclass of options.

    In `--help`, the docstring of the module that defines the dataclass stands above the flags.
    Wrong words end the process with code 2.

    Args:
        options: Dataclass of the flags. The docstring of a field is its help.
        argv: Words after the command's name; by default those of this process.
    """
    module = sys.modules[options.__module__]
    name = module.__spec__.name if module.__spec__ else module.__name__
    program = f"python -m {name.removesuffix('.__main__')}"
    words = command_line.with_dashed_values(sys.argv[1:] if argv is None else argv, options)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            parsed, unknown = command_line.parse_known(
                options, program, words, description=module.__doc__
            )
        command_line.refuse(unknown, command_line.flags(options), command_line.help_line(program))
    except MupaxError as error:
        refuse(str(error))
    finally:
        # The help of every `mupax` command ends with --plugin, which these commands do not have.
        plugin_help = terminal.wrapped(command_line.PLUGIN_HELP)
        print(shown.getvalue().replace(f"{plugin_help}\n\n", ""), end="")
    return parsed


def refuse_words() -> None:
    """Refuse the words of a command that has no flags, before it writes anything.

    `--help` prints the docstring of the module that runs as `__main__`, and ends the process with
    code 0. Every other word ends it with code 2.
    """
    words = sys.argv[1:]
    if not words:
        return
    module = sys.modules["__main__"]
    if "-h" in words or "--help" in words:
        print(module.__doc__)
        raise SystemExit(0)
    name = module.__spec__.name if module.__spec__ else module.__name__
    refuse(f"{words[0]!r} is not known; write `python -m {name}` alone, which has no flags")


def refuse(message: str) -> NoReturn:
    """Print an error of the command line, and end the process with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def run_study(train: Callable[[StopRequest], None]) -> int:
    """Run a study that saves every row as it finishes. Return 0, or the exit code of a signal.

    Bad input, such as a folder in which another process works, ends the process with code 2.

    Args:
        train: Function that trains the rows. It raises `Stopped` after a signal.
    """
    from mupax.train.parallel.processes import StopRequest
    from mupax.train.studies.sweep.work import Stopped

    with StopRequest() as stop:
        stop.defer()
        try:
            train(stop)
        except Stopped:
            print("stopped; what was trained is saved, and the same command goes on")
            return stop.exit_code
        except MupaxError as error:
            refuse(str(error))
    return 0


def check_names(names: Iterable[str], choices: Collection[str], kind: str = "choice") -> None:
    """End the process with code 2 if a name is not one of the choices.

    Args:
        kind: Noun for the choices in the message, such as "study".
    """
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            refuse(f"no {kind} is named {name!r}; {hint}write one of {', '.join(choices)}")


def made_by(command: str) -> dict[str, Any]:
    """Return the facts at the beginning of a record: command, Python, JAX and number of cores."""
    from importlib.metadata import version

    return {
        "command": command,
        "python": platform.python_version(),
        "jax": version("jax"),
        "cores": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and JAX."""
    from importlib.metadata import version

    return {"python": platform.python_version(), "jax": version("jax")}


def read_record(path: Path) -> Any:
    """Return the content of a record in JSON, compressed if its name ends in `.gz`."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return json.loads(content)


def write_record(path: Path, text: str) -> None:
    """Write a record as a whole, compressed if its name ends in `.gz`.

    The same text gives the same bytes.
    """
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    write_whole(path, content)


def read_rows(path: Path, name: str, again: bool = False) -> Any:
    """Return the rows under a key of a record.

    Args:
        again: Return no rows, because all are measured again.

    Returns:
        The rows, or an empty list without a record.
    """
    if again or not path.exists():
        return []
    return read_record(path)[name]


def with_rows(facts: Mapping[str, Any], name: str, rows: Any) -> str:
    """Return a record as JSON text, with the facts on the first line and one line for each row.

    Args:
        facts: Fields at the beginning of the record, at least one.
        name: key of the rows, which stand after the facts.
        rows: List of rows, or mapping of names to rows.
    """
    if isinstance(rows, Mapping):
        brackets = "{}"
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
    else:
        brackets = "[]"
        lines = [json.dumps(row) for row in rows]
    body = ",\n".join(lines)
    # The rows are a field of the same object as the facts, so its brace is closed after them.
    return f"{json.dumps(facts)[:-1]}, {json.dumps(name)}: {brackets[0]}\n{body}\n{brackets[1]}}}\n"
