"""Output of every command: wrapped text, tables, counts, error messages and the exit code.

In a terminal, lines are wrapped between words. In a pipe or a file, nothing is wrapped or cut.

Old spellings of commands still run when they are typed. In recorded commands, which are never
rewritten on disk (`python -m train sweep lm-tiny`), they are replaced when the command is shown.
"""

from __future__ import annotations

import contextlib
import difflib
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
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mupax import MupaxError, MupaxFailure, process
from mupax.disk import NO_ROOM, system_error
from mupax.memory import exhausted
from mupax.memory import gib as gib
from mupax.process import Interrupts, open_closed_streams
from mupax.process import leave as leave

if TYPE_CHECKING:
    from rich.console import Console

GAP = 2
"""Spaces between columns."""
PROSE = 36
"""Fewest characters per line in which a table wraps prose of its last column beside the others."""
MESSAGE_LINES = 10
"""Maximum number of lines of a message about bad input."""
UNBOUNDED = 1_000_000
"""Width of a pipe or file, in columns."""
USUAL_WIDTH = 80
"""Width of a terminal that does not know its own."""
_EXIT_S = 5.0
"""Seconds that the process may take to end after its command has returned."""
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
"""A word of a shell command, with its quotes."""
_LESS_MEMORY = "end other programs, raise the limit, or take a smaller batch or model"
"""Advice for a command that ran out of memory and has no advice of its own."""
_NO_BREAK = "\u00a0"


def columns(stream: TextIO | None = None) -> int:
    """Return the width of a stream's terminal, or `UNBOUNDED` for a pipe or file.

    The width is the variable COLUMNS, or that of the terminal, or 80.

    Args:
        stream: Stream that is written to. The default is standard output.
    """
    output: TextIO = stream or sys.stdout
    if not output.isatty():
        return UNBOUNDED
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    # `shutil.get_terminal_size` would ask standard output, which may be a file.
    try:
        width = os.get_terminal_size(output.fileno()).columns
    except OSError:
        return USUAL_WIDTH
    # A terminal that does not know its size says 0.
    return width or USUAL_WIDTH


def wrapped(line: str) -> str:
    """Return one line of prose wrapped between words, to the width of standard output.

    It is returned unchanged if standard output is a pipe or file.
    """
    return "\n".join(_wrapped(line, columns()))


def say(text: str) -> None:
    """Print text on standard output. In a terminal its lines are wrapped between words."""
    _say(text, sys.stdout)


def note(text: str) -> None:
    """Print text on standard error. In a terminal its lines are wrapped between words."""
    _say(text, sys.stderr)


def complain(text: str) -> None:
    """Print text as `note` does. Drop it if standard error is closed, full, or read by nobody."""
    with contextlib.suppress(OSError, ValueError):
        note(text)


def _say(text: str, stream: TextIO) -> None:
    width = columns(stream)
    lines: list[str] = []
    for line in text.split("\n"):
        lines += _wrapped(line, width)
    print("\n".join(lines), file=stream, flush=True)


def command(line: str) -> str:
    """Return a command as an indented text that a user can copy and run in this folder.

    In a narrow terminal the command is continued on further lines, each after a backslash. An old
    spelling is replaced by the present one, and `mupax` by a path if the shell does not find it.

    Args:
        line: Command that begins with `mupax`, or an older spelling that a file recorded.
    """
    words = _SHELL_WORD.findall(_reachable(current_spelling(line)))

    # A part is a flag with its values. Lines are broken only between parts.
    parts: list[str] = []
    for word in words:
        if not parts or word.startswith("--"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"

    lines = parts[:1]
    for flag in parts[1:]:
        # A line also has both indents, a space before the flag, and a space and a backslash.
        if len(lines[-1]) + len(flag) + 2 * GAP + 3 > columns():
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return textwrap.indent(" \\\n  ".join(lines), " " * GAP)


def console() -> Console:
    """Return a rich console for standard output. In a pipe its width is `UNBOUNDED`.

    It raises BrokenPipeError if nobody reads the pipe. Emoji codes are printed unchanged.
    """
    from rich.console import Console

    class Piped(Console):
        # rich would end the process itself. `exit_code` turns the exception into code 141.
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else UNBOUNDED
    return Piped(width=width, highlight=False, emoji=False)


def rich_console(**options: Any) -> Console:
    """Return a rich console that prints names such as `images:fire:` unchanged, not as emoji.

    Args:
        **options: Arguments of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(emoji=False, **options)


def typed(*words: str) -> str:
    """Return a command that starts this installation of mupax from this folder, quoted for a shell.

    Args:
        *words: Words of the command line. The first is `mupax`. It is replaced by a path if the
            shell finds no mupax on PATH, or another one.
    """
    return _reachable(shlex.join(words))


def _reachable(line: str) -> str:
    """Return a command with a leading `mupax` replaced by the words that start this installation.

    Any other command is returned unchanged.
    """
    program, space, arguments = line.partition(" ")
    if program != "mupax":
        return line
    return f"{_program()}{space}{arguments}"


def _program() -> str:
    """Return the words that start this installation of mupax.

    These are `mupax` if the shell finds this installation, otherwise the path of its script, or
    `PYTHON -m mupax` if there is no script.
    """
    scripts = Path(sys.executable).parent
    # pipx and uv link ~/.local/bin/mupax to an environment elsewhere.
    started = Path(sys.argv[0])
    on_path = shutil.which("mupax")
    for script in (started, scripts / "mupax"):
        if script.name == "mupax" and on_path and _is_same_path(on_path, script):
            return "mupax"

    if (scripts / "mupax").is_file():
        return _shell_path(str(scripts / "mupax"))

    python = shutil.which("python")
    if python is not None and _is_same_path(python, sys.executable):
        return "python -m mupax"
    return f"{_shell_path(sys.executable)} -m mupax"


def _is_same_path(path: str | Path, reference: str | Path) -> bool:
    """Return True if two paths are equal once they are absolute. Links are not resolved."""
    return os.path.abspath(path) == os.path.abspath(reference)


def _shell_path(path: str) -> str:
    """Return a path quoted for a shell, relative to this folder if the file lies below it."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return shlex.quote(path)
    return shlex.quote(relative)


def show(text: str) -> None:
    """Write text to standard output and flush it. For a terminal, replace control characters."""
    if sys.stdout.isatty():
        text = "".join(map(_printable, text))
    sys.stdout.write(text)
    sys.stdout.flush()


def _printable(character: str) -> str:
    """Replace a control character by U+FFFD. Newlines and tabs stay."""
    is_control = ord(character) < 32 or 127 <= ord(character) < 160
    if is_control and character not in "\n\t":
        return "\ufffd"
    return character


class EntryPoint:
    """Callable that runs a command line and turns exceptions into a message and an exit code.

    Exit code 1 is a failure, 2 is bad input (one message on stderr), 130 is Ctrl-C, and 141 is a
    closed pipe, such as `| head`.

    Args:
        command: Function of the words of a command line. It returns an exit code and may raise.
    """

    def __init__(self, command: Callable[[list[str]], int]) -> None:
        self.command = command
        functools.update_wrapper(self, command)

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command and return its exit code.

        Args:
            argv: Words of the command line. `None` reads `sys.argv`, installs signal handlers and
                limits the time that the process may take to end (`whole_process`).
        """
        if argv is not None:
            return exit_code(self.command, argv)
        return whole_process(self.command)


def entry_point(main: Callable[[list[str]], int]) -> EntryPoint:
    """Wrap a function of command-line words as an `EntryPoint`. Usable as a decorator."""
    return EntryPoint(main)


def whole_process(main: Callable[[list[str]], int], interrupts: Interrupts | None = None) -> int:
    """Run the command line of this process and return its exit code.

    A timer ends the process 5 seconds after the return, if the caller has not ended it before.
    After a signal or a closed pipe, this function ends the process itself and does not return.

    Args:
        main: Function of the words of the command line.
        interrupts: Signal handlers that are installed already. By default they are installed here,
            in the main thread only.
    """
    open_closed_streams()
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        if interrupts is None:
            interrupts = Interrupts()
            if in_main_thread:
                interrupts.listen()
        code = exit_code(main, sys.argv[1:], interrupts)
    except KeyboardInterrupt:  # Ctrl-C came while an error was printed
        code = 128 + signal.SIGINT

    if interrupts is not None:
        interrupts.finish()
        code = interrupts.exit_code or code
    if code >= 128:
        # The interpreter's own end would free what threads of XLA still use.
        leave(code)

    # Threads of a library may wait for a disk or a network and keep the process alive.
    timer = threading.Timer(_EXIT_S, leave, (code,))
    timer.daemon = True
    timer.start()
    return code


def _escape_unencodable() -> None:
    """Make standard output print characters that its encoding lacks as backslash escapes.

    Without this, printing them would raise UnicodeEncodeError.
    """
    # A file's name may hold any bytes, and printing one must not raise.
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def exit_code(
    main: Callable[[list[str]], int], argv: Sequence[str], interrupts: Interrupts | None = None
) -> int:
    """Run a command line and return its exit code. Exceptions are printed as messages.

    Ctrl-C (130) and a closed pipe (141) print nothing. The code of `SystemExit` is returned; if it
    holds a text, as `sys.exit("text")` of a plugin does, the text is printed and the code is 1.
    Output is flushed, and if that fails, an exit code of 0 becomes 1 or 141.

    Args:
        main: Function of the words of the command line.
        interrupts: Signal handlers of the process. After a signal, no exception is printed.
    """
    _escape_unencodable()
    try:
        code = main(list(argv))
    except SystemExit as stop:
        # As in Python itself, a code that is a text is printed and means 1.
        if stop.code is None or isinstance(stop.code, int):
            code = stop.code or 0
        else:
            complain(str(stop.code))
            code = 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except Exception as error:
        if interrupts is not None and interrupts.received is not None:
            return 128 + interrupts.received
        code = _print_error(error)
    return _flushed(code)


def _print_error(error: Exception) -> int:
    """Print the message of an exception that ended a command, and return the exit code.

    The code is 2 for bad input, including values of JAX's variables, and 1 for a failure. An
    exception of an unexpected kind is a fault of mupax: it is printed with its traceback.
    """
    if isinstance(error, MupaxError):
        lines = f"error: {error}".splitlines()
        complain("\n".join(lines[:MESSAGE_LINES]))
        return 2
    if isinstance(error, MupaxFailure):
        complain(f"error: {_with_advice(str(error), error.__cause__)}")
        return 1
    if isinstance(error, RecursionError):
        complain(
            "error: a file or a word of the command line is nested too deep; write it with fewer "
            "levels"
        )
        return 2

    out_of_memory = exhausted(error)
    if out_of_memory:
        complain(f"error: {out_of_memory}; {_LESS_MEMORY}")
        return 1

    wrong_variable = process.explained(error)
    if wrong_variable:
        complain(f"error: {wrong_variable}")
        return 2

    cause = system_error(error)
    if cause is None:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
        return 1
    # An error of the system, such as a full disk, needs no traceback: the message names the file.
    file = cause.filename
    if not file and cause.errno in NO_ROOM:
        file = _written_file(error)
    place = f"{file}: " if file else ""
    complain(f"error: {_with_advice(f'{place}{cause.strerror}', cause)}")
    return 1


def _with_advice(message: str, cause: BaseException | None) -> str:
    """Return a message, with what to do if it ends with the system's text about a full disk."""
    if not isinstance(cause, OSError) or cause.errno not in NO_ROOM:
        return message
    if not message.endswith(str(cause.strerror)):
        return message
    return f"{message}; make room, then write the same command again"


def _written_file(error: Exception) -> str | None:
    """Return the name of the file that was being written when an exception was raised, or `None`.

    The system's errors name a file that cannot be opened, but not one that cannot be written or
    closed, as on a full disk. Its name is that of the open file in the innermost function that has
    one.
    """
    written = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            # Attributes of other objects may be code that fails.
            if isinstance(value, io.IOBase):
                written = _name_if_written(value) or written
    return written


def _name_if_written(file: Any) -> str | None:
    """Return the name of an open file, or `None` if it has no name or is only read."""
    # The attributes of a text file whose buffer was detached raise ValueError.
    with contextlib.suppress(ValueError):
        name = getattr(file, "name", None)
        mode = getattr(file, "mode", None)
        # The standard streams are named <stdout> and <stderr>. The mode of gzip is a number.
        is_named = isinstance(name, str) and not name.startswith("<")
        if is_named and isinstance(mode, str) and not mode.startswith("r"):
            return name
    return None


def _flushed(code: int) -> int:
    """Flush standard output and standard error, and return the final exit code.

    Args:
        code: Exit code of the command. 0 becomes 141 if nobody reads standard output, and 1 if
            standard output cannot be written.
    """
    # Flushed here, because the interpreter's own flush at exit cannot set the exit code.
    error = _flush(sys.stdout)
    if isinstance(error, BrokenPipeError):
        code = code or 128 + signal.SIGPIPE
    elif error is not None:
        reason = getattr(error, "strerror", None) or error
        complain(f"error: standard output cannot be written: {reason}")
        code = code or 1
    _flush(sys.stderr)
    return code


def _flush(stream: TextIO | None) -> Exception | None:
    """Flush a stream. Return the error if that fails, otherwise `None`.

    After an error the stream is redirected to /dev/null.
    """
    if stream is None:
        return None
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        # The text still in the buffer must not fail again when the interpreter ends.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
        return error
    return None


def table(
    rows: Sequence[Sequence[str]],
    left: Collection[str] | None = None,
    keys: int = 1,
    indent: int = 0,
) -> str:
    """Return rows as a text of aligned columns, no wider than the terminal.

    Columns that do not fit are printed as further blocks below, each with the key columns again. A
    cell that is too wide for a line of its own is wrapped between words. So is prose in the last
    column.

    Args:
        rows: Cells of each row. The first row is the head. All rows have the same length.
        left: Heads of the columns that align left. The others align right. By default all align
            left.
        keys: Number of leading columns that name a row and are repeated in every block.
        indent: Number of spaces before every line. The width of the terminal includes them.
    """
    left = rows[0] if left is None else left
    line_width = columns() - indent
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    lines: list[str] = []
    for block in _column_blocks(rows, left, widths, keys, line_width):
        if lines:
            lines.append("")
        lines += _block_lines(rows, block, widths, left, line_width)
    return textwrap.indent("\n".join(lines), " " * indent)


def _column_blocks(
    rows: Sequence[Sequence[str]],
    left: Collection[str],
    widths: Sequence[int],
    keys: int,
    line_width: int,
) -> list[list[int]]:
    """Return the column indices of each block that fits on a line. A block begins with the keys.

    Args:
        left: Heads of the columns that align left. Only such a column can be prose.
        widths: Number of characters in the widest cell of every column.
        keys: Number of leading columns, which every block repeats.
    """
    head = rows[0]
    last = len(widths) - 1
    blocks: list[list[int]] = []
    for index in range(keys, len(widths)):
        is_prose = index == last and head[index] in left and any(" " in row[index] for row in rows)
        # Prose can be wrapped, so it needs no more than PROSE columns.
        needed = min(widths[index], PROSE if is_prose else UNBOUNDED)
        if not blocks or _start_of_next(blocks[-1], widths) + needed > line_width:
            blocks.append(list(range(keys)))
        blocks[-1].append(index)
    return blocks


def _start_of_next(block: Sequence[int], widths: Sequence[int]) -> int:
    """Return the number of characters before a column that follows the columns of a block."""
    return sum(widths[index] + GAP for index in block)


def filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows of a table without the columns that are empty below their head.

    The result is `[]` if all columns are empty.

    Args:
        rows: Cells of each row. The first row is the head.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def _block_lines(
    rows: Sequence[Sequence[str]],
    block: Sequence[int],
    widths: Sequence[int],
    left: Collection[str],
    line_width: int,
) -> list[str]:
    """Return the lines of one block of columns. A last column that is too wide is wrapped.

    Args:
        block: Indices of the columns, from `_column_blocks`.
        widths: Width of every column of `rows`, in characters.
        left: Heads of the columns that align left.
    """
    head = rows[0]
    last = block[-1]
    start = _start_of_next(block[:-1], widths)
    lines: list[str] = []
    for row in rows:
        cells: list[str] = []
        for index in block:
            is_left = head[index] in left
            cell = row[index]
            cells.append(cell.ljust(widths[index]) if is_left else cell.rjust(widths[index]))

        continued: list[str] = []
        if start + widths[last] > line_width:
            cells[-1], *continued = _wrapped(row[last], line_width - start)

        lines.append((" " * GAP).join(cells).rstrip())
        lines += [" " * start + line for line in continued]
    return lines


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line between words. Further lines have its indent, and short `code` is not broken."""
    if len(line) <= width:
        return [line]

    def without_breaks(code: re.Match[str]) -> str:
        return code[0].replace(" ", _NO_BREAK) if len(code[0]) < width else code[0]

    text = re.sub(r"`[^`]+`", without_breaks, line)
    indent = " " * (len(line) - len(line.lstrip()))
    lines = textwrap.wrap(
        text,
        max(width, 1),
        break_long_words=False,
        break_on_hyphens=False,
        subsequent_indent=indent,
    )
    return [part.replace(_NO_BREAK, " ") for part in lines] or [""]


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the end of a message that proposes the name most like `word`, or "" if none is."""
    matches = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def counted(number: int, noun: str, spec: str = "", plural: str = "") -> str:
    """Return a number with its noun, such as "1 seed" or "2,000 points".

    Args:
        noun: Word or words for one, such as `seed` or `file is`.
        spec: Format of the number, such as `,`.
        plural: Words for any other number. By default the noun with "s", or "es" behind an "s".
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:{spec}} {plural or noun + ending}"


def si(number: float) -> str:
    """Return a count with three digits and a letter for its power of 1000, such as `124 M`.

    A count below 1000 is rounded to a whole number and has no letter.
    """
    for letter in ("", "k", "M", "G", "T"):
        # 999.5 would be rounded to 1000.
        if abs(number) < 999.5 or letter == "T":
            break
        number /= 1000
    if not letter:
        return f"{number:.0f}"
    digits = max(0, 3 - len(f"{abs(number):.0f}"))
    return f"{number:.{digits}f} {letter}"


OLD_SPELLINGS: dict[str, str] = {
    "train check": "check",
    "train sweep": "sweep",
    "train tune": "tune",
    "train transfer": "transfer",
    "train plan": "plan",
    "train compile": "compile",
    "train roles": "models roles",
    "train balance": "presets balance",
    "train checkpoints": "checkpoints",
    "train grow": "grow",
    "train eval": "eval",
    "train finetune": "finetune",
    "train predict": "predict",
    "train noise": "noise",
    "train generate": "generate",
    "train serve": "serve",
    "train push": "push",
    "train convert": "convert",
    "presets verify": "verify",
    "zoo import": "import",
    "zoo export": "export",
    "zoo": "models",
}
"""Present first words of a command after `mupax`, by the old ones.

The old ones are from four earlier programs: `python -m train`, `presets`, `zoo` and `train.data`.
"""
_OLD_MODULE = re.compile(
    r"\bpython -m (?:mupax\.)?(?:train\.(?=data\b))?(?=(?:train|presets|zoo|data)\b)"
)
"""Beginning of an old command that starts a package as a module. `mupax ` replaces it."""
_COMMAND = re.compile(r"\bmupax (\w[\w-]*)(?: (\w[\w-]*))?")
"""A command in a text: `mupax` and the next one or two words."""


def old_spelling(words: Sequence[str]) -> str | None:
    """Return the key of `OLD_SPELLINGS` with which the words after `mupax` begin, or `None`."""
    # The longer spelling comes first: `zoo import` before `zoo`.
    for count in (2, 1):
        typed = " ".join(words[:count])
        if typed in OLD_SPELLINGS:
            return typed
    return None


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words after `mupax` with an old spelling replaced by the present one."""
    typed = old_spelling(words)
    if typed is None:
        return list(words)
    arguments = words[len(typed.split()) :]
    return [*OLD_SPELLINGS[typed].split(), *arguments]


def current_spelling(text: str) -> str:
    """Return a text, such as a recorded command, with every old spelling replaced."""
    return _COMMAND.sub(_current_command, _OLD_MODULE.sub("mupax ", text))


def _current_command(match: re.Match[str]) -> str:
    """Return the present spelling of a command that `_COMMAND` matched."""
    words = [word for word in match.groups() if word is not None]
    return " ".join(["mupax", *current_words(words)])
