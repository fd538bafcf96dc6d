"""Where chat templates run: jinja2's sandbox, with bounds on how long they loop and on how large a text they make.

A template is a stranger's program. The sandbox of jinja2 keeps it from Python's own attributes; it does not keep it from
`'x' * 10**10` or from three loops in one another. Loops, calls and what makes texts longer are counted here, per rendering.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sized
from typing import Any, ClassVar

import jinja2
from jinja2 import ext, nodes, sandbox, visitor

_MOST_TURNS = 2_000_000
"""Of all loops and calls of a rendering."""
_TURNS_PER_CALL = 20
"""A call of a macro takes as much time."""
_LARGEST = 32 * 2**20
"""Characters of a text, or items of a list, that an operation may make."""
_MOST_WRITTEN = 256 * 2**20
"""Characters that all operations of a rendering may make, large ones and small ones together."""
_MOST_BITS = 4096
"""Of a number."""
_LONGEST_SOURCE = 2**20
"""Characters of a template; real ones have some thousand."""
_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
"""Methods of texts whose result is as wide as their argument says."""
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
"""Filters whose result may be as wide as an argument says."""


class TemplateLimitError(jinja2.TemplateError):
    """A template that loops or writes beyond all need."""


class _Spent(threading.local):
    """Counters of the rendering in this thread."""

    turns = 0
    written = 0


_SPENT = _Spent()


def begin() -> None:
    """Begin a rendering, or the compilation of a template: nothing is used yet."""
    _SPENT.turns = 0
    _SPENT.written = 0


def _turn(count: int = 1) -> None:
    _SPENT.turns += count
    if _SPENT.turns > _MOST_TURNS:
        raise TemplateLimitError(f"it loops more than {_MOST_TURNS:,} times")


def _written(size: int) -> None:
    """Count a text or list before it is made."""
    if size > _LARGEST:
        raise TemplateLimitError(
            f"it makes a text or list of {size:,}, and {_LARGEST:,} is the most"
        )
    _SPENT.written += size
    if _SPENT.written > _MOST_WRITTEN:
        raise TemplateLimitError(f"it makes texts of more than {_MOST_WRITTEN:,} characters")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _widest(values: Any) -> int:
    """Return the largest number among arguments."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _written_out(parts: Any) -> str:
    """Return the texts that a template writes as one."""
    texts = []
    for part in parts:
        _SPENT.written += len(part)
        if _SPENT.written > _MOST_WRITTEN:
            _written(len(part))
        texts.append(part)
    return "".join(texts)


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_written_out)
    marks: str
    """What is put before and after an answer."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # nearly all of them
            text = left + right
            _SPENT.written += len(text)
            if len(text) > _LARGEST or _SPENT.written > _MOST_WRITTEN:
                _written(len(text))
            return text
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > 0 and left.bit_length() * right > _MOST_BITS:
                raise TemplateLimitError("it makes a number of thousands of digits")
        elif operator == "*" and (_is_sequence(left) or _is_sequence(right)):
            times = right if _is_sequence(left) else left
            if isinstance(times, int):
                _written(max(_size(left), _size(right)) * max(0, times))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MOST_BITS:
                raise TemplateLimitError("it makes a number of thousands of digits")
        elif operator == "+" and _is_sequence(left):
            _written(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        _turn(_TURNS_PER_CALL)
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(text, str):
            _check_method(text, name, args)
        elif name == "generate_lorem_ipsum":
            _written(1000 * max(_widest(args), _widest(kwargs.values())))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, (str, list)):
            _written(len(result))
        return result


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse a call of a text's method that would make a much longer text."""
    if name in _WIDTHS:
        _written(
            max(
                len(text), _widest(args) * (max(1, text.count("\t")) if name == "expandtabs" else 1)
            )
        )
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple, range)):
        _written(len(text) * len(args[0]) + sum(_size(item) for item in args[0]))
    elif name in ("format", "format_map"):
        _check_format(text, args)


def _check_replacement(text: Any, before: Any, after: Any) -> None:
    if isinstance(text, str) and isinstance(before, str) and isinstance(after, str):
        _written(len(text) + text.count(before) * max(0, len(after) - len(before)))


def _check_format(form: str, values: tuple[Any, ...]) -> None:
    """Refuse a form with a width of millions: its digits are looked at, and so are numbers that stand for `*`."""
    digits = 0
    number = ""
    for character in form:
        number = number + character if character.isdigit() else ""
        digits = max(digits, len(number))
    if digits > 6 or ("*" in form and _widest(values) > 10**6):
        raise TemplateLimitError("it formats a value to a width of millions")
    _written(len(form) + sum(_size(value) for value in values))


def _counted(items: Any) -> Any:
    """Return what a loop goes through, counted; what has no length is counted as it comes."""
    if isinstance(items, Sized):
        _turn(len(items))
        return items
    return _counting(items)


def _counting(items: Any) -> Iterator[Any]:
    for item in items:
        _turn()
        yield item


def _joined(*values: Any) -> str:
    """Return values as one text; what `~` does."""
    texts = [str(value) for value in values]
    _written(sum(map(len, texts)))
    return "".join(texts)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses to make a much longer text."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _turn()
        values = [*args, *kwargs.values()]
        if name in _WIDE_FILTERS:
            _written(
                _widest(values)
                * (1 + sum(value.count("\n") for value in values if isinstance(value, str)))
            )
        elif name == "replace":
            texts = [value for value in values if isinstance(value, str)]
            if len(texts) >= 3:
                _check_replacement(*texts[-3:])
        elif name == "format":
            form = next((value for value in values if isinstance(value, str)), "")
            _check_format(form, tuple(values))
        elif name == "join":
            _check_join(values)
        result = function(*args, **kwargs)
        if isinstance(result, (str, list)):
            _written(len(result))
        return result

    return filtered


def _check_join(values: list[Any]) -> None:
    lists = [value for value in values if isinstance(value, (list, tuple, range))]
    separators = [value for value in values if isinstance(value, str)]
    if lists and separators:
        _written(len(separators[-1]) * len(lists[0]))


class _Counting(visitor.NodeTransformer):
    """Puts a filter that counts around what every loop goes through, and in the place of every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        first, *arguments = node.nodes
        return nodes.Filter(first, "_joined", arguments, [], None, None, lineno=node.lineno)


class Generation(ext.Extension):
    """`{% generation %}`: what is in it is an answer."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        marks = self.environment.marks  # pyright: ignore[reportAttributeAccessIssue]
        return f"{marks[0]}{caller()}{marks[1]}"


@functools.cache
def environment(dated: bool, marks: str) -> Environment:
    """Return where templates run, with the settings, filters and functions that `transformers` gives them.

    Args:
        dated: whether they may ask for today's date.
        marks: two characters, put before and after what a template says is an answer.
    """

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **how: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **how})

    place = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    place.marks = marks
    place.filters["tojson"] = to_json
    for name in (*_WIDE_FILTERS, "format", "join", "replace"):
        place.filters[name] = _bounded(name, place.filters[name])
    place.filters["_counted"] = _counted
    place.filters["_joined"] = _joined
    place.globals["raise_exception"] = refuse
    if dated:
        place.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return place


def compiled(source: str, dated: bool, marks: str) -> jinja2.Template:
    """Return a template, compiled.

    Args:
        dated, marks: as `environment` takes them.

    Raises:
        TemplateError: it is no jinja2, or too large.
    """
    if len(source) > _LONGEST_SOURCE:
        raise TemplateLimitError(
            f"it has {len(source):,} characters, and {_LONGEST_SOURCE:,} is the most"
        )
    begin()
    try:
        return environment(dated, marks).from_string(source)
    except (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError) as error:
        raise TemplateLimitError(f"it cannot be compiled: {error!s:.200}") from error
