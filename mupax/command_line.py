"""Command-line parsing with tyro: dataclasses as flags, their help, and messages for wrong words.

The fields of a command's dataclass are its flags, and the fields' docstrings are the help. This
module imports no JAX, so that `--help` and messages take less than a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import tyro
import tyro._strings
from tyro import conf
from tyro.constructors import PrimitiveConstructorSpec

from mupax import MupaxError, terminal
from mupax.config_fields import field_types
from mupax.disk import path_of

T = TypeVar("T")
Switch = Annotated[bool, conf.FlagCreatePairsOff]
"""Type of a boolean field whose flag has no value and no `--no-` form."""
Place = Annotated[
    Path,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: path_of(words[0]),
        is_instance=lambda value: isinstance(value, PurePath),
        str_from_instance=lambda path: [str(path)],
    ),
]
"""Type of a field that holds a path, on this machine or in a bucket (gs://)."""
Repeated = Annotated[tuple[str, ...], conf.UseAppendAction]
"""Type of a field whose flag may be written several times. The field holds all values."""

BOX = "│╭╮╰╯─ "
"""Characters that tyro draws around its messages."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""Escape sequence that sets a color of the terminal."""
PLUGIN_HELP = (
    "--plugin MODULE, in any place, imports a module of your own first, which extends mupax with "
    "presets, models, data, metrics and so on."
)
_DESCRIPTION = "(description)"
"""Placeholder for the description in tyro's help."""
FLAG_OF_BOX = re.compile(r"^[│| ] (?:-h, )?(--[a-z][\w.-]*)")
"""Pattern of the line in tyro's help with which the help of a flag begins."""
BOX_TITLE = re.compile(r"^╭|^ (?:\S+ )?options *$")
"""Pattern of the line with which a box begins, a group of flags in tyro's help.

In a terminal that has only ASCII, this line is a title, and an empty line ends the box.
"""
MISSING = re.compile(r"^[│| ] {5}(\S.*?) *[│|]?$", re.MULTILINE)
"""Pattern of an entry in tyro's lists of missing flags and of words that it did not read.

Help below an entry is indented further and does not match.
"""


def _choices(match: re.Match[str]) -> str:
    """Return the error message for a value that a flag does not allow, with all allowed values.

    Args:
        match: Match of tyro's own message. Its groups are the value, the flag and the choices.
    """
    # tyro keeps the choices in a set, whose order differs from one process to the next.
    names = sorted(set(re.findall(r"'([^']*)'", match[3])) - {"None"})
    choices = ", ".join(map(repr, names))
    hint = terminal.nearest(match[1].strip("'"), names)
    return f"{match[2]} needs one of {choices}, not {match[1]}{hint}"


def _number_or_word(match: re.Match[str]) -> str:
    """Return the error message for a value of a flag that takes a whole number or a word.

    Args:
        match: Match of tyro's own message. Its groups are the flag, the words and the value.
    """
    words = match[2].split(",")
    hint = terminal.nearest(match[3].strip("'"), words)
    return f"{match[1]} needs a whole number or {' or '.join(words)}, not {match[3]}{hint}"


PLAIN = (
    (
        r"Error parsing (\S+): invalid literal for int\(\) with base 10: ('.*')",
        r"\1 needs a whole number, not \2",
    ),
    (
        r"Error parsing (\S+): could not convert string to float: ('.*')",
        r"\1 needs a number, not \2",
    ),
    (
        r"Error parsing (\S+): no type matching \{None\}\|INT .* \[(.*)\]\.",
        r"\1 needs a whole number or None, not \2",
    ),
    (
        r"Error parsing (\S+): no type matching \{None\}\|FLOAT .* \[(.*)\]\.",
        r"\1 needs a number or None, not \2",
    ),
    (
        r"Error parsing (\S+): no type matching (?:\{None\}\|)?INT\|\{(.*)\} .* \[(.*)\]\.",
        _number_or_word,
    ),
    (r"invalid choice ('.*') for argument '(\S+)'\. Expected one of \((.*)\)\.", _choices),
    (r"Missing value for argument '(\S+)'\..*", r"\1 needs a value after it"),
)
"""Patterns of tyro's messages, each with a replacement that says what to write.

A message that matches no pattern is printed unchanged.
"""


class Runnable(Protocol):
    """A command: a dataclass of its flags, with a method that runs it."""

    def run(self) -> int:
        """Run the command and return its exit code."""
        ...


class UsageError(MupaxError):
    """Error about an unknown command, flag or word, or about a value of the wrong kind."""


class FlagHelp(NamedTuple):
    """Flags that a command's `--help` lists, if it does not list all of them.

    Flags are written with their dashes, such as `--steps`.
    """

    flags: frozenset[str]
    note: str
    """Line below the flags that tells how to list the others."""


WIDEST_HELP = 120
"""Width up to which tyro prints flags in one column. `_only_listed` needs one column."""


def parse(command: type[T], prog: str, argv: Sequence[str]) -> T:
    """Parse a command line into an instance of a command's dataclass.

    Args:
        prog: Words before `argv`, such as `mupax presets list`.

    Raises:
        SystemExit: Code 0, after `--help` was printed.
        UsageError: A flag is missing or unknown, a word belongs to no flag, or a value is of the
            wrong kind.
        MupaxError: The command's own checks refused its values.
    """
    parsed, unread = parse_known(command, prog, with_dashed_values(argv, command))
    refuse(unread, flags(command), help_line(prog))
    return parsed


def parse_known(
    command: type[T],
    prog: str,
    argv: Sequence[str],
    default: T | None = None,
    description: str | None = None,
    flag_help: FlagHelp | None = None,
    help_hint: str | None = None,
) -> tuple[T, list[str]]:
    """Parse a command line. Return an instance of `command`, and the words that were not read.

    Unknown flags and words are returned, not refused.

    Args:
        prog: Words before `argv`, such as `mupax sweep`.
        default: Command whose values the flags change. By default the fields' own defaults.
        description: Text above the flags in `--help`. By default the docstring of `command`.
        flag_help: Flags that `--help` lists. By default all.
        help_hint: Last line of an error. By default `help_line(prog)`.

    Raises:
        SystemExit: Code 0, after `--help` was printed.
        UsageError: A flag is missing, a value is of the wrong kind, or a flag of several values is
            written twice.
        MupaxError: The command's own checks refused its values.
    """
    if default is not None:
        plain = _read_plain_words(default, argv)
        if plain is not None:
            return plain, []
    _refuse_repeated(command if default is None else default, argv)

    message = io.StringIO()
    helptext = _HelpBuffer()
    try:
        with (
            contextlib.redirect_stderr(message),
            contextlib.redirect_stdout(helptext),
            _joined_docstrings(),
            _narrow(flag_help),
        ):
            result, unread = _parse_with_tyro(command, prog, list(argv), default)
            if unread and _has_positional(command):
                # Parse again without the unread words. In a line with an unknown word, tyro 1.0
                # sets an absent positional to "[]". The caller still refuses the words.
                result, _ = _parse_with_tyro(command, prog, _without(argv, unread), default)
            return result, unread
    except SystemExit as stop:
        if stop.code == 0:
            doc = description or inspect.getdoc(command) or ""
            text = _help_text(helptext.getvalue(), doc)
            if flag_help is not None:
                listed = _only_listed(text, flag_help.flags)
                text = f"{listed}\n{terminal.wrapped(flag_help.note)}\n"
            print(text, end="")
        if stop.code != 2:  # tyro ends with 2 after a message; other codes come from signals
            raise
        error = _own_error(stop)
        if error is None:
            hint = help_line(prog) if help_hint is None else help_hint
            error = UsageError(f"{_unboxed(message.getvalue())}\n{hint}")
        # tyro's traceback says nothing to a user, and the message is complete.
        raise error from None


def _parse_with_tyro(
    command: type[T], prog: str, words: Sequence[str], default: T | None
) -> tuple[T, list[str]]:
    """Parse the words with tyro. Return the command, and the words that tyro did not read.

    Args:
        default: Instance whose values the flags change. `None` uses the fields' own defaults.

    Raises:
        SystemExit: Code 0 after tyro printed help, 2 after tyro printed an error.
    """
    start: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        conf.AvoidSubcommands[command],  # pyright: ignore
        # Help comes from docstrings alone. Reading comments takes a fifth of the time.
        config=(conf.HelptextFromCommentsOff,),
        prog=prog,
        # tyro would break the description inside words. `_help_text` puts it in place of this
        # marker.
        description=_DESCRIPTION,
        args=words,
        return_unknown_args=True,
        **start,
    )


class _HelpBuffer(io.StringIO):
    """Buffer for tyro's help that reports `isatty` and the encoding of standard output.

    tyro asks its output stream for both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stdout

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.stream.encoding or "ascii").lower()  # tyro compares lower-case names


def _help_text(text: str, description: str) -> str:
    """Return tyro's help with the description and a paragraph about `--plugin` put in.

    A usage line that is wider than the terminal is wrapped.

    Args:
        text: Help of tyro, with `_DESCRIPTION` in place of the description.
    """
    usage, *lines = text.split("\n")
    plain = COLOUR.sub("", usage)
    if len(plain) > terminal.columns():
        usage = terminal.wrapped(plain)
    box = "\n".join([usage, *lines])

    paragraphs = [" ".join(paragraph.split()) for paragraph in description.split("\n\n")]
    paragraphs.append(PLUGIN_HELP)
    return box.replace(_DESCRIPTION, "\n\n".join(map(terminal.wrapped, paragraphs)))


@contextlib.contextmanager
def _joined_docstrings() -> Iterator[None]:
    """Patch tyro, while entered, so that it joins the lines of a docstring's paragraphs.

    Empty lines and items of a list ("- " or "* ") still begin a new line (`_joined_lines`).
    """
    # tyro starts a paragraph at a line that is indented or begins with no letter, and has no option
    # against this.
    join_lines = tyro._strings.remove_single_line_breaks
    tyro._strings.remove_single_line_breaks = _joined_lines
    try:
        yield
    finally:
        tyro._strings.remove_single_line_breaks = join_lines


def _joined_lines(text: str) -> str:
    """Join the lines of each paragraph of a docstring. List items keep lines of their own."""
    lines: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        begins_anew = not stripped or stripped.startswith(("- ", "* "))
        if begins_anew or not lines or not lines[-1]:
            lines.append(stripped)
        else:
            lines[-1] = f"{lines[-1]} {stripped}"
    return "\n".join(lines).rstrip()


@contextlib.contextmanager
def _narrow(flag_help: FlagHelp | None) -> Iterator[None]:
    """Limit the variable COLUMNS to `WIDEST_HELP`, while entered, so that help has one column.

    Args:
        flag_help: Flags that the help lists. With `None`, nothing is changed.
    """
    columns = os.environ.get("COLUMNS")
    if flag_help is not None:
        os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, WIDEST_HELP))
    try:
        yield
    finally:
        if columns is not None:
            os.environ["COLUMNS"] = columns
        elif flag_help is not None:
            del os.environ["COLUMNS"]


def _only_listed(text: str, listed: frozenset[str]) -> str:
    """Return tyro's help without the flags that are not listed, and without boxes left empty.

    Args:
        text: Help in one column, as tyro prints it up to a width of `WIDEST_HELP`.
        listed: Flags to keep, with their dashes, such as `--steps`.
    """
    lines: list[str] = []
    box: list[str] = []  # lines of the open box that are listed
    is_shown = True
    is_empty = True
    all_lines = text.rstrip("\n").split("\n")
    plain_lines = [COLOUR.sub("", line) for line in all_lines]
    for line, plain, after in zip(all_lines, plain_lines, [*plain_lines[1:], ""], strict=True):
        # A description may hold an empty line. So an empty line ends a box only at the end, or
        # before the next box.
        may_end_box = not after or BOX_TITLE.match(after)
        is_end = plain.startswith("╰") or (not plain.strip() and may_end_box)
        if not box and BOX_TITLE.match(plain):
            box = [line]
            is_shown = True
            is_empty = True
        elif box and is_end:
            if not is_empty:
                lines += [*box, line]
            box = []
        elif box:
            flag = FLAG_OF_BOX.match(plain)
            if flag is not None:
                is_shown = flag[1] in listed
                is_empty = is_empty and not is_shown
            if is_shown:
                box.append(line)
        else:
            lines.append(line)
    return "\n".join(lines)


def _without(words: Sequence[str], unread: Sequence[str]) -> list[str]:
    """Return `words` without those in `unread`. Both have the same order."""
    remaining = list(unread)
    read: list[str] = []
    for word in words:
        if remaining and word == remaining[0]:
            remaining.pop(0)
        else:
            read.append(word)
    return read


def refuse(unread: Sequence[str], flags: Sequence[str], help_hint: str) -> None:
    """Raise UsageError if parsing left words unread, and do nothing otherwise.

    The message is about the first word that begins with a dash, and names at most two similar
    flags. If no word begins with a dash, the message names the first word.

    Args:
        unread: Words of the command line that were not read.
        flags: Every flag of the command, with its dashes.
        help_hint: Last line of the message, such as `help_line` returns.

    Raises:
        UsageError: `unread` is not empty.
    """
    if not unread:
        return
    unknown_flags = [word for word in unread if word.startswith("-")]
    if not unknown_flags:
        raise UsageError(
            f"nothing takes the word {unread[0]!r}; write flags as --NAME VALUE, and switches such "
            f"as --resume without a value\n{help_hint}"
        )

    flag = unknown_flags[0].partition("=")[0].replace("_", "-")
    # Users often write a section in place of its name, such as --optimizer for --optimizer.name.
    if f"{flag}.name" in flags:
        raise UsageError(f"no flag is named {flag}; did you mean {flag}.name?\n{help_hint}")

    # --help is tyro's own flag, and no field of the command.
    likeness = {name: _likeness(flag, name) for name in (*flags, "--help")}
    best = sorted(likeness, key=lambda name: likeness[name], reverse=True)
    # A second flag is named only if it is nearly as similar as the first.
    threshold = max(0.6, likeness[best[0]] - 0.1)
    near = [name for name in best[:2] if likeness[name] > threshold]
    hint = "none is like it"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    raise UsageError(f"no flag is named {flag}; {hint}\n{help_hint}")


def flags(owner: Any) -> list[str]:
    """Return the names of every flag of a command, with their dashes.

    Positional and suppressed fields are left out.

    Args:
        owner: Dataclass of the flags, or an instance of it. An instance is needed if fields are
            dataclasses themselves.
    """
    names: list[str] = []
    for field in flag_fields(owner):
        names += field.names
    return names


def refuse_idle(command: Any, names: Sequence[str], reason: str, cure: str) -> None:
    """Raise UsageError if the user set one of these fields, all of which have no effect here.

    A field with its default counts as not set.

    Args:
        names: Names of fields of `command`, such as "noise_scale".
        reason: Condition under which they have no effect, such as "without --joint".
        cure: What to write for them to have an effect, such as "--joint NAME".
    """
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    for name in names:
        if getattr(command, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect {reason}; {cure}, or leave {flag} out")


class FlagField(NamedTuple):
    """A field of a command, and the flags that set it."""

    names: list[str]
    """Flags with their dashes: first the field's own name, then aliases, last the `--no-` form."""
    hint: Any
    """Type of the field, with all annotations."""
    path: tuple[str, ...]
    """Names of the fields that lead from the command to this field."""
    default: Any
    """Value of the field in an instance. For a class, its default, or `None` without a default."""
    is_pair: bool
    """`True` if the last of `names` sets False, as `--no-resume` does."""


def _metadata(hint: Any) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` type, or `()` for any other type."""
    return getattr(hint, "__metadata__", ())


def flag_fields(owner: Any, prefix: str = "", path: tuple[str, ...] = ()) -> Iterator[FlagField]:
    """Yield the fields of a command that are flags, also those of dataclasses in the command.

    Positional and suppressed fields are left out.

    Args:
        owner: Dataclass, or an instance of it. Inner dataclasses are read from an instance only.
        prefix: Beginning of the flags' names, such as `model.`.
        path: Field names that lead from the command to `owner`.
    """
    hints = field_types(owner if isinstance(owner, type) else type(owner), include_extras=True)
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        metadata = _metadata(hint)
        marks = {str(mark) for mark in metadata}
        value = getattr(owner, field.name, None)
        word = field.name.replace("_", "-")
        field_path = (*path, field.name)
        if marks & {"Suppress", "Positional"}:
            continue

        if dataclasses.is_dataclass(value):
            has_empty_name = any(getattr(mark, "name", None) == "" for mark in metadata)
            omits_prefix = "OmitArgPrefixes" in marks or has_empty_name
            inner_prefix = prefix if omits_prefix else f"{prefix}{word}."
            yield from flag_fields(value, inner_prefix, field_path)
            continue

        names = [f"--{prefix}{word}"]
        for mark in metadata:
            name = getattr(mark, "name", None)
            if name:
                names[0] = f"--{prefix}{name}"
            names += getattr(mark, "aliases", None) or ()
        is_pair = isinstance(value, bool) and "FlagCreatePairsOff" not in marks
        if is_pair:
            names.append(f"--{prefix}no-{word}")
        yield FlagField(names, hint, field_path, value, is_pair)


NEGATIVE = re.compile(r"-(\d+|\d*\.\d+)")
"""A negative number, which is a flag's value although it begins with a dash."""
_READ_BY_TYRO = frozenset(("UseAppendAction", "UseCounterAction", "Fixed"))
"""tyro's marks of flags that are repeated or fixed. Only tyro reads them."""


def _read_plain_words(command: T, argv: Sequence[str]) -> T | None:
    """Return a copy of the command with the flags' values, parsed without tyro, which is slow.

    The result is `None` if any word is not a known flag, written once, with a value of its plain
    type, or if the command's own checks refuse the values. The caller then uses tyro.
    """
    # For every line tyro builds a parser of all fields, which takes 0.4 s for a recipe. A line of
    # known flags with values of their types needs no parser. Help and errors are left to tyro.
    by_name: dict[str, FlagField] = {}
    for field in flag_fields(command):
        by_name.update((name, field) for name in field.names)

    values: dict[tuple[str, ...], Any] = {}
    words = list(argv)
    try:
        while words:
            flag, equals, text = words.pop(0).partition("=")
            field = by_name[flag]
            if field.path in values:  # tyro decides about a repeated flag
                return None
            if isinstance(field.default, bool):
                values[field.path] = _plain_switch(field, flag, equals)
                continue
            texts = [text] if equals else _take_values(field, words)
            values[field.path] = _plain_value(field.hint, texts)
        return _with_values(command, values)
    except (KeyError, ValueError, MupaxError):  # tyro reads the line again and prints the message
        return None


def _refuse_repeated(command: Any, argv: Sequence[str]) -> None:
    """Raise UsageError if a flag of several values is written twice.

    Flags that collect the values of all their uses (`Repeated`) are allowed twice.

    Args:
        command: Dataclass of the flags, or an instance of it.
    """
    written = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    for field in flag_fields(command):
        marks = {str(mark) for mark in _metadata(field.hint)}
        if _takes_many(field.hint) and "UseAppendAction" not in marks:
            uses = [word for word in written if word in field.names]
            if len(uses) > 1:
                raise repeated(uses[1])


def repeated(flag: str) -> UsageError:
    """Return the error for a flag of several values that is written twice.

    tyro would silently take the values of the last use only.
    """
    return UsageError(f"{flag} is written twice; write all of its values behind one {flag}")


def _takes_many(hint: Any) -> bool:
    """Return whether a type is a tuple of any length, or a union with such a tuple."""
    bare = _bare(hint)
    if get_origin(bare) in (Union, UnionType):
        return any(_takes_many(option) for option in get_args(bare))
    return get_origin(bare) is tuple and Ellipsis in get_args(bare)


def _plain_switch(field: FlagField, flag: str, equals: str) -> bool:
    """Return True for a switch such as `--resume`, and False for its form `--no-resume`.

    Args:
        equals: `=` if the flag has a value, as in `--resume=True`, otherwise empty.

    Raises:
        ValueError: Only tyro can read the flag.
    """
    if equals or not (field.is_pair or field.default is False):
        raise ValueError(flag)
    return not (field.is_pair and flag == field.names[-1])


def _take_values(field: FlagField, words: list[str]) -> list[str]:
    """Remove a flag's values from the front of the words and return them.

    A tuple field gets all words before the next flag, any other field at most one word.

    Args:
        words: Words after the flag. The list is changed.
    """
    values: list[str] = []
    takes_many = get_origin(_bare(field.hint)) is tuple
    while words and (takes_many or not values):
        # The next flag ends the values. A negative number is a value.
        if words[0].startswith("-") and not NEGATIVE.fullmatch(words[0]):
            break
        values.append(words.pop(0))
    return values


def _bare(hint: Any) -> Any:
    """Return the type inside `Annotated[type, ...]`. Any other type is returned unchanged."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    return hint


def _plain_value(hint: Any, texts: Sequence[str]) -> Any:
    """Convert the values of a flag to the type of its field: a plain type, or a tuple of one.

    Args:
        hint: Type of the field, with all annotations.

    Raises:
        ValueError: Only tyro can read the values, because the type is not plain or does not fit.
    """
    for mark in _metadata(hint):
        is_constructor = isinstance(mark, PrimitiveConstructorSpec)
        if is_constructor or getattr(mark, "constructor_factory", None):
            raise ValueError(hint)
        if str(mark) in _READ_BY_TYRO:
            raise ValueError(hint)

    bare = _bare(hint)
    if not all(texts) or not texts:
        raise ValueError(texts)
    if get_origin(bare) is tuple:
        element, *length = get_args(bare)
        if length != [...]:  # a tuple of fixed length
            raise ValueError(hint)
        return tuple(_plain_word(element, text) for text in texts)
    # For several words the unpacking raises ValueError. tyro then reads the line and refuses it.
    (text,) = texts
    return _plain_word(bare, text)


def _plain_word(hint: Any, text: str) -> Any:
    """Convert one word to a number, a text, a choice or `None`.

    Args:
        hint: Type of the word, or a union with `None`.

    Raises:
        ValueError: Only tyro can read the word, because the type is not plain or does not fit.
    """
    is_union = get_origin(hint) in (Union, UnionType)
    options = get_args(hint) if is_union else (hint,)
    # For a union of several types the unpacking raises ValueError. tyro then decides which type
    # reads the word.
    (word_type,) = (option for option in options if option is not type(None))
    if text == "None" and (word_type is str or len(options) > 1):
        if word_type is str:
            raise ValueError(text)  # either the text "None" or no text: tyro decides
        return None
    if word_type in (int, float, str):
        return word_type(text)
    if get_origin(word_type) is Literal and text in get_args(word_type):
        return text
    raise ValueError(hint)


def _with_values(owner: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """Return a copy of a dataclass with some fields replaced, also fields of inner dataclasses.

    Args:
        owner: Instance of the dataclass, which is not changed.
        values: Path of field names to the new value.
    """
    changes: dict[str, Any] = {}
    inner_values: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *inner_path), value in values.items():
        if inner_path:
            inner_values.setdefault(name, {})[tuple(inner_path)] = value
        else:
            changes[name] = value

    for name, inner in inner_values.items():
        changes[name] = _with_values(getattr(owner, name), inner)
    # `replace` calls `__post_init__`, which checks the values.
    return dataclasses.replace(owner, **changes)


def _has_positional(command: type) -> bool:
    """Return True if the command has a positional field, which is set by a word without a flag."""
    return any(_is_positional(hint) for hint in field_types(command, include_extras=True).values())


def _is_positional(hint: Any) -> bool:
    return "Positional" in map(str, _metadata(hint))


def words_of(prog: str, command: Any) -> list[str]:
    """Return the words of a command line, from `prog` on, that would be parsed to this command.

    Args:
        prog: Words before the flags, such as `mupax import`.
        command: Instance of a dataclass of flags. Flags at their defaults are left out. A field
            that is a dataclass itself must be at its default.
    """
    hints = field_types(type(command), include_extras=True)
    positional: list[str] = []
    flag_words: list[str] = []
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if _is_positional(hints[field.name]):
            positional.append(str(value))
            continue
        if value == field.default or value == ():
            continue

        metadata = _metadata(hints[field.name])
        names = [mark.name for mark in metadata if getattr(mark, "name", None)]
        name = field.name.replace("_", "-")
        if names:
            name = names[0]
        flag_words.append(f"--{name}")
        if isinstance(value, tuple):
            flag_words += map(str, value)
        elif value is not True:
            flag_words.append(str(value))
    return [*prog.split(), *positional, *flag_words]


def with_dashed_values(argv: Sequence[str], owner: Any) -> list[str]:
    """Return the words with `--flag -value` written as `--flag=-value` for flags of text.

    tyro would read such a value as a flag.

    A word that is a flag of the same command is no value, as in `--prompt --tokens 5`.

    Args:
        owner: Command with all flags of the line: a dataclass, or an instance of it.
    """
    text_flags: set[str] = set()
    all_flags = {"-h", "--help"}
    for field in flag_fields(owner):
        all_flags.update(field.names)
        if _is_text(field.hint):
            text_flags.update(field.names)

    words: list[str] = []
    needs_value = False  # True if the word before is a text flag
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-")
        if needs_value and word.startswith("-") and word != "-" and flag not in all_flags:
            words[-1] = f"{words[-1]}={word}"
            needs_value = False
            continue
        words.append(word)
        needs_value = not needs_value and word.replace("_", "-") in text_flags
    return words


def _is_text(hint: Any) -> bool:
    """Return True for `str` and `str | None`, with or without annotations."""
    bare = _bare(hint)
    return bare is str or set(get_args(bare)) == {str, type(None)}


def first_word(
    prog: str, kind: str, names: Mapping[str, Any], argv: Sequence[str], default: str | None = None
) -> tuple[str, list[str]]:
    """Return the name that the first word gives, such as a recipe's, and the words after it.

    Args:
        prog: Words before `argv`, such as `mupax train`.
        kind: Singular noun for the names, such as `recipe`.
        names: Name to its summary: a line of text, or an object whose docstring has the line.
        default: Name to return, with all words, if there is no word or the first one is a flag.

    Raises:
        SystemExit: Code 0, after an overview was printed. It is printed for `--help`, and for no
            words if there is no default.
        UsageError: The first word is none of the names.
    """
    asks_for_help = argv[:1] in (["-h"], ["--help"])
    if asks_for_help or not (argv or default):
        rows = [(name, summary(described)) for name, described in names.items()]
        print(f"usage: {prog} {kind.upper()} [--FLAG VALUE ...]\n")
        print(f"{kind}s:\n{terminal.table(rows, indent=2)}\n")
        print(terminal.wrapped(f"`{prog} {kind.upper()} --help` lists the flags of one."))
        raise SystemExit(0)
    if default and (not argv or argv[0].startswith("-")):
        return default, [*argv]

    word, *words = argv
    if word in names:
        return word, words
    if word.startswith("-"):
        problem = f"the first word is a {kind}, not a flag"
    else:
        problem = f"no {kind} is named {word!r}"
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"{problem}; {hint}the {kind}s are {', '.join(names)}")


def summary(described: Any) -> str:
    """Return the first line of an object's docstring. A text is returned unchanged."""
    if isinstance(described, str):
        return described
    doc = inspect.getdoc(described) or ""
    return doc.partition("\n")[0]


def help_line(prog: str, all_flags: str = "--help") -> str:
    """Return the line of a message that tells how to list all flags.

    Args:
        prog: Words before the flags, such as `mupax sweep`.
        all_flags: `--help all` for a command whose `--help` leaves flags out.
    """
    return f"`{prog} {all_flags}` lists all flags"


def _own_error(stop: BaseException) -> MupaxError | None:
    """Return the `MupaxError` of a command's checks that made tyro end, or `None`.

    Args:
        stop: Exception by which tyro ended, with its chain of causes.
    """
    # The error's text is a complete message. In tyro's box it would be broken into lines.
    error = stop.__cause__ or stop.__context__
    while error is not None and not isinstance(error, MupaxError):
        error = error.__cause__ or error.__context__
    return error


def _unboxed(text: str) -> str:
    """Return tyro's error message in one line, without its box.

    Messages that `PLAIN` lists, and the message about missing flags, are reworded.
    """
    uncolored = COLOUR.sub("", text)
    message = _first_paragraph(uncolored)
    if message.startswith("Missing from"):
        return _missing_flags(uncolored)
    for pattern, plain in PLAIN:
        message = re.sub(pattern, plain, message)
    return message


def _first_paragraph(uncolored: str) -> str:
    """Return the text in tyro's box above the first horizontal line, joined into one line.

    If there is no such text, return the whole message.

    Args:
        uncolored: Message of tyro without the escape sequences of colors.
    """
    paragraph: list[str] = []
    for line in uncolored.splitlines()[1:]:
        words = line.strip(BOX)
        is_rule = not words.strip("-+|")  # a terminal that has only ASCII gets rules of dashes
        if not is_rule:
            paragraph.append(words)
        elif paragraph:
            break
    return " ".join(paragraph) or uncolored.strip()


def _missing_flags(uncolored: str) -> str:
    """Return a message with the flags that tyro lists as missing, and the first unread word.

    Args:
        uncolored: Message of tyro without the escape sequences of colors.
    """
    lists = uncolored.partition("For full helptext")[0]
    missing, _, unread = lists.partition("Unrecognized options")
    # tyro writes aliases before the name of a flag.
    flags = [names.rpartition(", ")[2] for names in MISSING.findall(missing)]
    message = f"this needs {' and '.join(flags)}"
    unread_words = MISSING.findall(unread)
    if unread_words:
        message += f"; nothing takes the word {unread_words[0]!r}"
    return message


def _likeness(flag: str, candidate: str) -> float:
    """Return how similar two flags are, from 0 to 1. The name after the last dot counts most."""
    # People leave out or mistake the section before the dot more often than the name.
    section, _, name = flag.lstrip("-").rpartition(".")
    candidate_section, _, candidate_name = candidate.lstrip("-").rpartition(".")
    alike = difflib.SequenceMatcher(None, name, candidate_name).ratio()
    # --lr is meant as --peak-lr, although most of the letters differ.
    if set(name.split("-")) <= set(candidate_name.split("-")):
        alike = max(alike, 0.9)
    sections_alike = difflib.SequenceMatcher(None, section, candidate_section).ratio()
    return 0.8 * alike + 0.2 * sections_alike
