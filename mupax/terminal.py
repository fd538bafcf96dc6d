"""Output for a terminal or a pipe: tables that break no word, counts for people, errors as one message, and an exit code."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mupax import process, spellings
from mupax.disk import system_error
from mupax.errors import MupaxError, MupaxFailure
from mupax.memory import exhausted
from mupax.memory import gib as gib
from mupax.process import Interrupts, open_closed_streams
from mupax.process import leave as leave

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2
"""Spaces between columns."""
PROSE = 36
"""Narrowest column of prose in a table."""
MESSAGE_LINES = 10
"""Longest message for bad input."""
UNBOUNDED = 1_000_000
"""Width of a pipe or file: nothing there is wrapped or cut."""
_EXIT_S = 5.0
"""How long a process whose command is done may take to end: threads of a library may wait for a disk or a network."""
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
"""A word of a command with its quotes."""
_LESS_MEMORY = "end other programs, raise the limit, or take a smaller batch or model"
"""What helps where a command itself does not say what would."""
_NO_BREAK = "\u00a0"


def columns(stream: TextIO | None = None) -> int:
    """Width of the terminal that a stream is (standard output unless given), or `UNBOUNDED` where it is none."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else UNBOUNDED


def wrapped(line: str) -> str:
    """A line of prose, wrapped between words to `columns()`."""
    return "\n".join(_wrapped(line, columns()))


def say(text: str) -> None:
    """Print lines on standard output, wrapped between words where that is a terminal."""
    _say(text, sys.stdout)


def note(text: str) -> None:
    """Print lines on standard error as `say` does on standard output."""
    _say(text, sys.stderr)


def _say(text: str, stream: TextIO) -> None:
    width = columns(stream)
    lines = [part for line in text.split("\n") for part in _wrapped(line, width)]
    print("\n".join(lines), file=stream, flush=True)


def command(line: str) -> str:
    """Return a command to copy, as it can be started here, indented. In a narrow terminal it goes on after a backslash.

    Args:
        line: command as it is typed now, or as an earlier version recorded it.
    """
    words = _SHELL_WORD.findall(_reachable(spellings.current(line)))
    parts: list[str] = []
    for word in words:
        if not parts or word.startswith("--"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines = parts[:1]
    for flag in parts[1:]:
        if len(lines[-1]) + len(flag) + 2 * GAP + 3 > columns():
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return textwrap.indent(" \\\n  ".join(lines), " " * GAP)


def console() -> Console:
    """Rich's console for standard output, `UNBOUNDED` in a pipe; it leaves a broken one to `entry_point`."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Piped(width=None if sys.stdout.isatty() else UNBOUNDED, highlight=False, emoji=False)


def rich_console(**options: Any) -> Console:
    """Return a console of rich that prints names such as `images:fire:` as they are, not as emoji.

    Args:
        **options: arguments of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(emoji=False, **options)


def typed(*words: str) -> str:
    """Return a command to type in this folder: quoted for a shell, with the path of mupax where the shell finds none or another.

    Args:
        *words: mupax and more.
    """
    return _reachable(shlex.join(words))


def _reachable(line: str) -> str:
    """Return a command with its first word, mupax, as it can be started from this folder."""
    program, space, rest = line.partition(" ")
    return f"{_program()}{space}{rest}" if program == "mupax" else line


def _program() -> str:
    """Return how this installation's mupax is started: by its name, by its path, or as a module of this Python."""
    scripts = Path(sys.executable).parent
    started = Path(sys.argv[0])  # pipx and uv link ~/.local/bin/mupax to an environment elsewhere
    found = shutil.which("mupax")
    for script in (started, scripts / "mupax"):
        if script.name == "mupax" and found and os.path.abspath(found) == os.path.abspath(script):
            return "mupax"
    if (scripts / "mupax").is_file():
        return _near(str(scripts / "mupax"))
    python = shutil.which("python")
    is_ours = python is not None and os.path.abspath(python) == os.path.abspath(sys.executable)
    return f"{'python' if is_ours else _near(sys.executable)} -m mupax"


def _near(path: str) -> str:
    """Return a path relative to this folder where it lies below, quoted for a shell."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def show(text: str) -> None:
    """Write to standard output at once, a terminal without the characters that it would obey."""
    if sys.stdout.isatty():
        text = "".join(map(_printable, text))
    sys.stdout.write(text)
    sys.stdout.flush()


def _printable(character: str) -> str:
    obeyed = ord(character) < 32 or 127 <= ord(character) < 160
    return "\ufffd" if obeyed and character not in "\n\t" else character


class EntryPoint:
    """A command line of the process, or of a test, that always returns an exit code.

    1 it failed, 2 bad input (one message on stderr), 130 Ctrl-C, 141 the reader of its pipe
    (`| head`) has read enough.

    Args:
        command: takes the words of a command line. It may raise.
    """

    def __init__(self, command: Callable[[list[str]], int]) -> None:
        self.command = command
        functools.update_wrapper(self, command)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Return the exit code of these words, or of those of the process, which then ends."""
        return exit_code(self.command, argv) if argv is not None else whole_process(self.command)


def entry_point(main: Callable[[list[str]], int]) -> EntryPoint:
    """Make a command line of a function that takes its words."""
    return EntryPoint(main)


def whole_process(main: Callable[[list[str]], int], interrupts: Interrupts | None = None) -> int:
    """Run the command line of this process. Return its exit code, with which the process ends soon.

    After a signal this does not return: the interpreter would take apart what XLA's threads use.

    Args:
        main: takes the words of the command line.
        interrupts: of this process; they are made here unless the caller listens already.
    """
    open_closed_streams()
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        if interrupts is None:
            interrupts = Interrupts()
            if in_main_thread:
                interrupts.listen()
        code = exit_code(main, sys.argv[1:], interrupts)
    except KeyboardInterrupt:  # it came while an error was printed
        code = 128 + signal.SIGINT
    if interrupts is not None:
        interrupts.finish()
        code = interrupts.exit_code or code
    if code >= 128:
        leave(code)
    late = threading.Timer(_EXIT_S, leave, (code,))
    late.daemon = True
    late.start()
    return code


def _print_any_name() -> None:
    """Let standard output escape what its encoding lacks, as standard error does.

    Names of files may be any bytes.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def exit_code(
    main: Callable[[list[str]], int], argv: Sequence[str], interrupts: Interrupts | None = None
) -> int:
    """Run a command line and return its exit code, whatever becomes of it.

    Args:
        main: takes the words of the command line.
        interrupts: signals of the process. After one of them no error is printed.
    """
    _print_any_name()
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except Exception as error:
        if interrupts is not None and interrupts.received is not None:
            return 128 + interrupts.received
        code = _explained(error)
    return _flushed(code)


def _explained(error: Exception) -> int:
    """Print what became of a command, and return its exit code."""
    if isinstance(error, MupaxError):
        _complain("\n".join(f"error: {error}".splitlines()[:MESSAGE_LINES]))
        return 2
    if isinstance(error, MupaxFailure):
        _complain(f"error: {error}")
        return 1
    if isinstance(error, RecursionError):
        _complain(
            "error: a file or a word of the command line is nested too deep; write it with fewer levels"
        )
        return 2
    if described := exhausted(error):
        _complain(f"error: {described}; {_LESS_MEMORY}")
        return 1
    if described := process.explained(error):
        _complain(f"error: {described}")
        return 2
    cause = system_error(error)
    if cause is None:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        return 1
    # Of a disk, say: where it happened is in its words.
    _complain(f"error: {cause.filename + ': ' if cause.filename else ''}{cause.strerror}")
    return 1


def _complain(text: str) -> None:
    """Print an error. Where standard error is closed or full, the exit code alone tells."""
    with contextlib.suppress(OSError, ValueError):
        note(text)


def _flushed(code: int) -> int:
    """Write what the two outputs still hold. The interpreter's flush at exit could only complain.

    Returns:
        The exit code. Of a command that went well it is 141 if nobody reads standard output, and 1
        if standard output cannot be written.
    """
    if (error := _flush(sys.stdout)) is not None:
        if not isinstance(error, BrokenPipeError):
            reason = getattr(error, "strerror", None) or error
            _complain(f"error: standard output cannot be written: {reason}")
        code = code or (128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1)
    _flush(sys.stderr)
    return code


def _flush(stream: TextIO | None) -> Exception | None:
    """Flush a stream. If that fails, let the stream lead to nowhere and return the error."""
    if stream is None:
        return None
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):  # what it holds must not fail again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    return None


def table(
    rows: Sequence[Sequence[str]],
    left: Collection[str] | None = None,
    keys: int = 1,
    indent: int = 0,
) -> str:
    """Rows as aligned columns no wider than `columns()`.

    Columns that do not fit follow below, beside the key columns again. A cell wraps at words where it is too wide for a line of
    its own, or is prose of the last column, which needs `PROSE` beside the others.

    Args:
        rows: cells, the head first.
        left: heads of the columns that align left, the others align right; all unless given.
        keys: leading columns that say what a row is.
        indent: spaces before each line.
    """
    left, room = rows[0] if left is None else left, columns() - indent
    cells = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in cells]
    blocks: list[list[int]] = []
    for i in range(keys, len(widths)):
        prose = (
            i == len(widths) - 1 and rows[0][i] in left and any(" " in cell for cell in cells[i])
        )
        if (
            not blocks
            or sum(widths[j] + GAP for j in blocks[-1])
            + min(widths[i], PROSE if prose else UNBOUNDED)
            > room
        ):
            blocks.append([*range(keys)])
        blocks[-1].append(i)
    lines = [line for block in blocks for line in ["", *_block(rows, block, widths, left, room)]][
        1:
    ]
    return textwrap.indent("\n".join(lines), " " * indent)


def filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows, the head first, without the columns that have nothing under their head."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [*map(list, zip(*columns, strict=True))]


def _block(
    rows: Sequence[Sequence[str]],
    block: Sequence[int],
    widths: Sequence[int],
    left: Collection[str],
    room: int,
) -> list[str]:
    lines = []
    *_, last = block
    start = sum(widths[i] + GAP for i in block[:-1])
    for row in rows:
        cells = [
            row[i].ljust(widths[i]) if rows[0][i] in left else row[i].rjust(widths[i])
            for i in block
        ]
        more: list[str] = []
        if start + widths[last] > room:
            cells[-1], *more = _wrapped(row[last], room - start)
        lines += [(" " * GAP).join(cells).rstrip(), *(" " * start + line for line in more)]
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    text = re.sub(
        r"`[^`]+`",
        lambda code: code[0].replace(" ", _NO_BREAK) if len(code[0]) < width else code[0],
        line,
    )
    indent = " " * (len(line) - len(line.lstrip()))
    lines = textwrap.wrap(
        text,
        max(width, 1),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent=indent,
    )
    return [part.replace(_NO_BREAK, " ") for part in lines] or [""]


def si(number: float) -> str:
    """A count with three digits and its thousand's letter: 124 M."""
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or letter == "T":
            break
        number /= 1000
    digits = max(0, 3 - len(f"{abs(number):.0f}")) if letter else 0
    return f"{number:.{digits}f}{' ' if letter else ''}{letter}"
