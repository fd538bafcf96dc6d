"""What commands of scripts/ share: options by tyro, names that must be known, and records with one row a line."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import os
import platform
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mupax import command_line, terminal
from mupax.errors import MupaxError

T = TypeVar("T")


def parse(options: type[T], argv: Sequence[str] | None = None) -> T:
    """Return the options of a command as its command line has them.

    The docstring of the module that defines the options is the text above them in `--help`. Wrong words end
    the process with 2.

    Args:
        options: dataclass of the flags; a field's docstring is its help.
        argv: words after the command's name; those of this process unless given.
    """
    module = sys.modules[options.__module__]
    name = module.__spec__.name if module.__spec__ else module.__name__
    program = f"python -m {name.removesuffix('.__main__')}"
    words = command_line.with_dashed_values(sys.argv[1:] if argv is None else argv, options)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            parsed, rest = command_line.parse_known(
                options, program, words, description=module.__doc__
            )
        command_line.refuse(rest, command_line.flags(options), program)
    except MupaxError as error:
        refuse(str(error))
    finally:
        # These commands have no --plugin, which the help of every `mupax` command ends with.
        plugin_help = terminal.wrapped(command_line.PLUGIN_HELP)
        print(shown.getvalue().replace(f"{plugin_help}\n\n", ""), end="")
    return parsed


def refuse(message: str) -> NoReturn:
    """End the process with 2, and say what is wrong with its command line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_names(names: Iterable[str], choices: Collection[str], kind: str = "choice") -> None:
    """End the process with 2 if a name of the command line is none of the choices."""
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            refuse(f"no {kind} is named {name!r}; {hint}write one of {', '.join(choices)}")


def made_by(command: str) -> dict[str, Any]:
    """Return the facts that a record begins with: its command, and what that ran on."""
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


def read_rows(path: Path, name: str, again: bool = False) -> Any:
    """Return the rows that a record has under a name; none if there is no record, or all are wanted again."""
    return json.loads(path.read_text())[name] if path.exists() and not again else []


def with_rows(facts: Mapping[str, Any], name: str, rows: Any) -> str:
    """Return a record as JSON: facts on its first line, and then a row a line.

    Args:
        name: key of the rows.
        rows: a list, or a mapping whose values are rows.
    """
    if isinstance(rows, Mapping):
        brackets = "{}"
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
    else:
        brackets = "[]"
        lines = [json.dumps(row) for row in rows]
    body = ",\n".join(lines)
    return f"{json.dumps(facts)[:-1]}, {json.dumps(name)}: {brackets[0]}\n{body}\n{brackets[1]}}}\n"
