"""Every command line of mupax: frozen dataclasses as flags, by tyro, and one clear message for whatever does not fit.

A command is a dataclass whose fields are its flags and their docstrings its help. Imports no JAX: `--help` and every wrong
word answer within a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
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
    get_type_hints,
)

import tyro
import tyro._strings
from tyro import conf
from tyro.constructors import PrimitiveConstructorSpec

from mupax import terminal
from mupax.disk import path_of
from mupax.errors import MupaxError

T = TypeVar("T")
Switch = Annotated[bool, conf.FlagCreatePairsOff]
"""A flag without a value."""
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
"""A path on this machine or in a bucket."""
Repeated = Annotated[tuple[str, ...], conf.UseAppendAction]
"""A flag that may come several times."""

BOX = "│╭╮╰╯─ "
"""What tyro draws around its messages."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PLUGIN_HELP = "--plugin MODULE, in any place, imports a module with presets, models, data or optimizers of your own first."
_DESCRIPTION = "(description)"
"""Stands in tyro's help where ours goes."""
FLAG_OF_BOX = re.compile(r"^[│| ] (?:-h, )?(--[a-z][\w.-]*)")
"""First line of a flag in tyro's help."""
BOX_TITLE = re.compile(r"^╭|^ (?:\S+ )?options *$")
"""First line of a box in tyro's help. Where the terminal has ASCII alone, it is a title, and an empty line ends the box."""
MISSING = re.compile(r"^[│| ] {5}(\S.*?) *[│|]?$", re.MULTILINE)
"""A flag or word that tyro lists as missing or unread; its help stands further right."""


def _choices(match: re.Match[str]) -> str:
    # tyro holds the choices in a set, whose order differs from one process to the next.
    names = sorted(set(re.findall(r"'([^']*)'", match[3])) - {"None"})
    return f"{match[2]} needs one of {', '.join(map(repr, names))}, not {match[1]}"


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
    (r"invalid choice ('.*') for argument '(\S+)'\. Expected one of \((.*)\)\.", _choices),
    (r"Missing value for argument '(\S+)'\..*", r"\1 needs a value after it"),
)
"""tyro's message, and ours that says what to write. A message not listed is shown as tyro has it."""


class Runnable(Protocol):
    """A command: a dataclass of its flags, and what to do with them."""

    def run(self) -> int:
        """The exit code."""
        ...


class UsageError(MupaxError):
    """A command line that says nothing this project understands."""


class FlagHelp(NamedTuple):
    """The part of a command's flags that its `--help` lists."""

    flags: frozenset[str]
    note: str
    """Line below the flags: how to list the others."""


WIDEST_HELP = 120
"""Columns up to which tyro sets flags in one column, which `_only_listed` reads."""


def parse(command: type[T], prog: str, argv: Sequence[str]) -> T:
    """The command with its flags as `argv` has them; raises as `parse_known`, and UsageError for a flag that it has not.

    Args:
        command: dataclass of the flags.
        prog: what was written before `argv`.
        argv: the words that follow.
    """
    parsed, rest = parse_known(command, prog, with_dashed_values(argv, command))
    refuse(rest, flags(command), prog)
    return parsed


def parse_known(
    command: type[T],
    prog: str,
    argv: Sequence[str],
    default: T | None = None,
    description: str | None = None,
    flag_help: FlagHelp | None = None,
) -> tuple[T, list[str]]:
    """The command with its flags as `argv` has them, and the words that are none of its flags.

    Args:
        command: dataclass of the flags.
        prog: what was written before `argv`.
        argv: the words that follow.
        default: what flags change; the fields' own defaults unless given.
        description: above the flags in `--help`; the docstring of `command` unless given.
        flag_help: the flags that `--help` lists; all unless given.

    Raises:
        SystemExit: code 0, after `--help` was printed.
        UsageError: a flag that is missing, or a value of the wrong kind.
        MupaxError: of the command's own, where values do not fit together.
    """
    if default is not None:
        plain = _read_plain_words(default, argv)
        if plain is not None:
            return plain, []
    message, helptext = io.StringIO(), _Held()
    start: dict[str, Any] = {} if default is None else {"default": default}

    def parsed(words: Sequence[str]) -> tuple[T, list[str]]:
        return tyro.cli(
            conf.AvoidSubcommands[command],  # pyright: ignore
            config=(
                conf.HelptextFromCommentsOff,
            ),  # docstrings alone; comments take a fifth of the time
            prog=prog,
            description=_DESCRIPTION,  # tyro breaks it by the letter
            args=words,
            return_unknown_args=True,
            **start,
        )

    try:
        with (
            contextlib.redirect_stderr(message),
            contextlib.redirect_stdout(helptext),
            _joined_docstrings(),
            _narrow(flag_help),
        ):
            result, rest = parsed(list(argv))
            if rest and _has_positional(command):
                # Beside an unknown word tyro 1.0 gives a positional that is left out the text "[]".
                result, _ = parsed(_without(argv, rest))
            return result, rest
    except SystemExit as stop:
        if stop.code == 0:
            text = _help_text(helptext.getvalue(), description or inspect.getdoc(command) or "")
            if flag_help is not None:
                text = (
                    f"{_only_listed(text, flag_help.flags)}\n{terminal.wrapped(flag_help.note)}\n"
                )
            print(text, end="")
        if stop.code != 2:  # tyro's own; another is of a signal
            raise
        raise _own_error(stop) or UsageError(
            f"{_unboxed(message.getvalue())}\n{_help(prog)}"
        ) from None


class _Held(io.StringIO):
    """Text held back from standard output, of which tyro asks whether it is a terminal, and what it can draw."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stdout

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.stream.encoding or "ascii").lower()  # as tyro compares it


def _help_text(text: str, description: str) -> str:
    """tyro's help with its description wrapped between words."""
    usage, *lines = text.split("\n")
    plain = COLOUR.sub("", usage)
    box = "\n".join(
        [usage if len(plain) <= terminal.columns() else terminal.wrapped(plain), *lines]
    )
    paragraphs = [" ".join(paragraph.split()) for paragraph in description.split("\n\n")]
    paragraphs.append(PLUGIN_HELP)
    return box.replace(_DESCRIPTION, "\n\n".join(map(terminal.wrapped, paragraphs)))


@contextlib.contextmanager
def _joined_docstrings() -> Iterator[None]:
    """Let tyro join the lines of a field's docstring.

    tyro takes a line that is indented, or that begins with no letter, for a new paragraph. It has
    no option for this.
    """
    before = tyro._strings.remove_single_line_breaks
    tyro._strings.remove_single_line_breaks = _joined_lines
    try:
        yield
    finally:
        tyro._strings.remove_single_line_breaks = before


def _joined_lines(text: str) -> str:
    """Join the lines of each paragraph of a field's docstring, but for the items of a list."""
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.strip()
        begins_anew = not line or line.startswith(("- ", "* "))
        if begins_anew or not lines or not lines[-1]:
            lines.append(line)
        else:
            lines[-1] = f"{lines[-1]} {line}"
    return "\n".join(lines).rstrip()


@contextlib.contextmanager
def _narrow(flag_help: FlagHelp | None) -> Iterator[None]:
    """Let tyro set its help in one column, where a part of it is to be read."""
    before = os.environ.get("COLUMNS")
    if flag_help is not None:
        os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, WIDEST_HELP))
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        elif flag_help is not None:
            del os.environ["COLUMNS"]


def _only_listed(text: str, listed: frozenset[str]) -> str:
    """Return tyro's help with the listed flags alone, without boxes that have none of them.

    Args:
        text: help in one column.
    """
    lines: list[str] = []
    box: list[str] = []
    is_shown = True
    is_empty = True
    all_lines = text.rstrip("\n").split("\n")
    plain_lines = [COLOUR.sub("", line) for line in all_lines]
    for line, plain, after in zip(all_lines, plain_lines, [*plain_lines[1:], ""], strict=True):
        # A description may have an empty line, so one ends a box only before the next box or at the end.
        is_end = plain.startswith("╰") or (
            not plain.strip() and (not after or BOX_TITLE.match(after))
        )
        if not box and BOX_TITLE.match(plain):
            box = [line]
            is_shown = is_empty = True
        elif box and is_end:
            lines += [] if is_empty else [*box, line]
            box = []
        elif box:
            if flag := FLAG_OF_BOX.match(plain):
                is_shown = flag[1] in listed
                is_empty = is_empty and not is_shown
            box += [line] if is_shown else []
        else:
            lines.append(line)
    return "\n".join(lines)


def _without(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The words but for those of the rest, which has them in the same order."""
    unread, read = list(rest), []
    for word in words:
        if unread and word == unread[0]:
            unread.pop(0)
        else:
            read.append(word)
    return read


def refuse(rest: Sequence[str], flags: Sequence[str], prog: str, all_flags: str = "--help") -> None:
    """Raises UsageError for the first of the words that nothing took, with the flags that are most like it.

    Args:
        rest: the words.
        flags: every flag that is read.
        prog: what was written before the flags.
        all_flags: what lists all flags.
    """
    if not rest:
        return
    word = next((word for word in rest if word.startswith("-")), rest[0])
    if not word.startswith("-"):
        text = f"nothing takes the word {word!r}; write flags as --NAME VALUE, and switches such as --resume without a value"
        raise UsageError(f"{text}\n{_help(prog, all_flags)}")
    flag = word.partition("=")[0].replace("_", "-")
    if f"{flag}.name" in flags:
        raise UsageError(
            f"no flag is named {flag}; did you mean {flag}.name?\n{_help(prog, all_flags)}"
        )
    best = sorted(
        dict.fromkeys((*flags, "--help")), key=lambda other: _likeness(flag, other), reverse=True
    )
    near = [
        other
        for other in best[:2]
        if _likeness(flag, other) > max(0.6, _likeness(flag, best[0]) - 0.1)
    ]
    hint = f"did you mean {' or '.join(near)}?" if near else "none is like it"
    raise UsageError(f"no flag is named {flag}; {hint}\n{_help(prog, all_flags)}")


def flags(owner: Any) -> list[str]:
    """Every flag of a command, as it is written.

    Args:
        owner: the dataclass, or an instance of it where fields are dataclasses too.
    """
    return [name for flag in flag_fields(owner) for name in flag.names]


class FlagField(NamedTuple):
    """A field of a command: its flags as they are written, its type with all annotations, and where the command has it."""

    names: list[str]
    """Its flags as they are written, its own name before aliases."""
    hint: Any
    path: tuple[str, ...]
    default: Any
    """Value of an instance's field; None for a class."""
    is_pair: bool
    """The last of the names sets False."""


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with all annotations."""
    return get_type_hints(owner, include_extras=True)


def flag_fields(owner: Any, prefix: str = "", path: tuple[str, ...] = ()) -> Iterator[FlagField]:
    """Yield the fields of a command that are flags, as `flags` takes the command."""
    hints = _type_hints(owner if isinstance(owner, type) else type(owner))
    for field in dataclasses.fields(owner):
        hint = hints[field.name]
        metadata = getattr(hint, "__metadata__", ())
        marks = {str(mark) for mark in metadata}
        value = getattr(owner, field.name, None)
        word = field.name.replace("_", "-")
        if marks & {"Suppress", "Positional"}:
            continue
        if dataclasses.is_dataclass(value):
            bare = "OmitArgPrefixes" in marks or any(
                getattr(each, "name", None) == "" for each in metadata
            )
            yield from flag_fields(
                value, prefix if bare else f"{prefix}{word}.", (*path, field.name)
            )
            continue
        names = [f"--{prefix}{word}"]
        for mark in metadata:
            if name := getattr(mark, "name", None):
                names[0] = f"--{prefix}{name}"
            names += getattr(mark, "aliases", None) or ()
        is_pair = isinstance(value, bool) and "FlagCreatePairsOff" not in marks
        if is_pair:
            names.append(f"--{prefix}no-{word}")
        yield FlagField(names, hint, (*path, field.name), value, is_pair)


NEGATIVE = re.compile(r"-(\d+|\d*\.\d+)")
"""A number that may follow a flag though it begins with a dash."""
_READ_BY_TYRO = frozenset(("UseAppendAction", "UseCounterAction", "Fixed"))
"""Marks of flags whose values are more than one word's."""


def _read_plain_words(command: T, argv: Sequence[str]) -> T | None:
    """Return the command with its flags as `argv` has them; None where tyro has to read the words.

    tyro builds a parser for every field, which takes 0.4 s for a recipe, and forgets it. A line of known flags, each with
    a value of its type, needs none of that. tyro reads every other line, so that help and messages are its own.

    Args:
        command: the values that flags change.
        argv: words of the command line.
    """
    by_name = {name: field for field in flag_fields(command) for name in field.names}
    values: dict[tuple[str, ...], Any] = {}
    words = list(argv)
    try:
        while words:
            flag, equals, text = words.pop(0).partition("=")
            field = by_name[flag]
            if field.path in values:
                return None
            if isinstance(field.default, bool):
                values[field.path] = _plain_switch(field, flag, equals)
                continue
            texts = [text] if equals else _values_of_flag(field, words)
            values[field.path] = _plain_value(field.hint, texts)
        return _with_values(command, values)
    except (KeyError, ValueError, MupaxError):  # tyro says what is wrong
        return None


def _plain_switch(field: FlagField, flag: str, equals: str) -> bool:
    """Return the value that a switch's flag sets.

    Raises:
        ValueError: tyro has to read the flag.
    """
    if equals or not (field.is_pair or field.default is False):
        raise ValueError(flag)
    return not (field.is_pair and flag == field.names[-1])


def _values_of_flag(field: FlagField, words: list[str]) -> list[str]:
    """Take a flag's values off the front of the words that follow the flag."""
    values: list[str] = []
    several = get_origin(_bare(field.hint)) is tuple
    while words and (several or not values):
        if words[0].startswith("-") and not NEGATIVE.fullmatch(words[0]):
            break
        values.append(words.pop(0))
    return values


def _bare(hint: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _plain_value(hint: Any, texts: Sequence[str]) -> Any:
    """Return the value of a field of a plain type.

    Args:
        hint: type of the field.
        texts: the words behind the flag.

    Raises:
        ValueError: tyro has to read the words: the type is not plain, or they are not of the type.
    """
    for mark in getattr(hint, "__metadata__", ()):
        own_constructor = isinstance(mark, PrimitiveConstructorSpec) or getattr(
            mark, "constructor_factory", None
        )
        if own_constructor or str(mark) in _READ_BY_TYRO:
            raise ValueError(hint)
    bare = _bare(hint)
    if not all(texts) or not texts:
        raise ValueError(texts)
    if get_origin(bare) is tuple:
        element, *rest = get_args(bare)
        if rest != [...]:
            raise ValueError(hint)
        return tuple(_plain_word(element, text) for text in texts)
    (text,) = texts
    return _plain_word(bare, text)


def _plain_word(hint: Any, text: str) -> Any:
    """Return one word as a number, a text or a choice; raises as `_plain_value`."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = (option for option in options if option is not type(None))
    if text == "None" and (kind is str or len(options) > 1):
        if kind is str:
            raise ValueError(text)  # a text, or none
        return None
    if kind in (int, float, str):
        return kind(text)
    if get_origin(kind) is Literal and text in get_args(kind):
        return text
    raise ValueError(hint)


def _with_values(owner: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """Return a dataclass with other values of its fields and of those of the dataclasses in it, which are checked as always."""
    changed: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    inner: dict[str, dict[tuple[str, ...], Any]] = {}
    for (name, *rest), value in values.items():
        if rest:
            inner.setdefault(name, {})[tuple(rest)] = value
    for name, own in inner.items():
        changed[name] = _with_values(getattr(owner, name), own)
    return dataclasses.replace(owner, **changed)


def _has_positional(command: type) -> bool:
    """Return whether a word without a flag before it can be a value of a command."""
    hints = _type_hints(command)
    return any(
        "Positional" in map(str, getattr(hint, "__metadata__", ())) for hint in hints.values()
    )


def words_of(prog: str, command: Any) -> list[str]:
    """Return the words of a command line that gives a command the values it has.

    Args:
        prog: what stands before the flags.
        command: instance of a dataclass of flags; flags at their defaults are left out.
    """
    hints = _type_hints(type(command))
    positional: list[str] = []
    flag_words: list[str] = []
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        metadata = getattr(hints[field.name], "__metadata__", ())
        if "Positional" in {str(mark) for mark in metadata}:
            positional.append(str(value))
            continue
        if value == field.default or value == ():
            continue
        name = next(
            (mark.name for mark in metadata if getattr(mark, "name", None)),
            field.name.replace("_", "-"),
        )
        flag_words.append(f"--{name}")
        if isinstance(value, tuple):
            flag_words += map(str, value)
        elif value is not True:
            flag_words.append(str(value))
    return [*prog.split(), *positional, *flag_words]


def with_dashed_values(argv: Sequence[str], owner: Any) -> list[str]:
    """Join a flag for text and a value that begins with a dash by `=`, as tyro reads such a value.

    A flag of the same command is no value: `--prompt --tokens 5` has left out the text.

    Args:
        argv: words of the command line.
        owner: command that has all flags of the line, as `flags` takes it.
    """
    fields = list(flag_fields(owner))
    text_flags = {name for field in fields if _is_text(field.hint) for name in field.names}
    all_flags = {"-h", "--help", *(name for field in fields for name in field.names)}
    words: list[str] = []
    waits = False
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-")
        if waits and word.startswith("-") and word != "-" and flag not in all_flags:
            words[-1] = f"{words[-1]}={word}"
            waits = False
            continue
        words.append(word)
        waits = not waits and word.replace("_", "-") in text_flags
    return words


def _is_text(hint: Any) -> bool:
    """Return True for `str` and `str | None`, with or without annotations."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint is str or set(get_args(hint)) == {str, type(None)}


def first_word(
    prog: str, kind: str, names: Mapping[str, Any], argv: Sequence[str], default: str | None = None
) -> tuple[str, list[str]]:
    """Return the first word, which names a command or a recipe, and the words after it.

    Args:
        prog: what was written before `argv`.
        kind: what a first word names, such as recipe.
        names: what a first word may be, to what it does: a line, or what has a docstring.
        argv: all words.
        default: the command of a line that begins with a flag, or has no word.

    Raises:
        SystemExit: code 0, after an overview was printed for `--help`, or for no word where there is no default.
        UsageError: no command has that name.
    """
    if argv[:1] in (["-h"], ["--help"]) or not (argv or default):
        rows = [(name, summary(what)) for name, what in names.items()]
        print(
            f"usage: {prog} {kind.upper()} [--FLAG VALUE ...]\n\n{kind}s:\n{terminal.table(rows, indent=2)}\n"
        )
        print(terminal.wrapped(f"`{prog} {kind.upper()} --help` lists the flags of one."))
        raise SystemExit(0)
    if default and (not argv or argv[0].startswith("-")):
        return default, [*argv]
    word, *rest = argv
    if word not in names:
        near = difflib.get_close_matches(word, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        wrong = (
            f"the first word is a {kind}, not a flag"
            if word.startswith("-")
            else f"no {kind} is named {word!r}"
        )
        raise UsageError(f"{wrong}; {hint}the {kind}s are {', '.join(names)}")
    return word, rest


def summary(what: Any) -> str:
    """The first line of a docstring; a text as it is."""
    return what if isinstance(what, str) else (inspect.getdoc(what) or "").partition("\n")[0]


def _help(prog: str, all_flags: str = "--help") -> str:
    return f"`{prog} {all_flags}` lists all flags"


def _own_error(stop: BaseException) -> MupaxError | None:
    """The error of a config that tyro caught and turned into `stop`: its text is complete, tyro's box cuts it up."""
    error = stop.__cause__ or stop.__context__
    while error is not None and not isinstance(error, MupaxError):
        error = error.__cause__ or error.__context__
    return error


def _unboxed(text: str) -> str:
    """What tyro says above its first rule, as one line of plain words."""
    paragraph = []
    for line in COLOUR.sub("", text).splitlines()[1:]:
        words = line.strip(BOX)
        if not words.strip("-+|"):  # a rule; of ASCII where the terminal cannot draw
            if paragraph:
                break
            continue
        paragraph.append(words)
    if paragraph and paragraph[0].startswith("Missing from"):
        missing, _, unread = (
            COLOUR.sub("", text).partition("For full helptext")[0].partition("Unrecognized options")
        )
        rest = "".join(f"; nothing takes the word {word!r}" for word in MISSING.findall(unread)[:1])
        flags = [
            names.rpartition(", ")[2] for names in MISSING.findall(missing)
        ]  # aliases stand before
        return f"this needs {' and '.join(flags)}{rest}"
    message = " ".join(paragraph) or COLOUR.sub("", text).strip()
    for theirs, plain in PLAIN:
        message = re.sub(theirs, plain, message)
    return message


def _likeness(flag: str, other: str) -> float:
    """How near two flags are, mostly by what follows the last dot: people leave out or mistake the owner."""
    owner, _, name = flag.lstrip("-").rpartition(".")
    other_owner, _, other_name = other.lstrip("-").rpartition(".")
    alike = difflib.SequenceMatcher(None, name, other_name).ratio()
    if set(name.split("-")) <= set(other_name.split("-")):
        alike = max(alike, 0.9)
    return 0.8 * alike + 0.2 * difflib.SequenceMatcher(None, owner, other_owner).ratio()
