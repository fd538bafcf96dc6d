"""Sandbox of jinja2 for chat templates, with bounds on loops and on the size of texts.

A template is a program of somebody else. The sandbox of jinja2 keeps it from Python's own
attributes, but not from `'x' * 10**10` or from three nested loops. So this file counts loops, calls
and the sizes of texts in each rendering.
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
"""Most turns of all loops and calls of a rendering."""
_TURNS_PER_CALL = 20
"""Turns that a call counts for, because a call of a macro takes as much time."""
_LARGEST = 32 * 2**20
"""Most characters of a text, or items of a list, that an operation may make."""
_MOST_WRITTEN = 256 * 2**20
"""Most characters that all operations of a rendering may make together."""
_MOST_BITS = 4096
"""Most bits of a number."""
_LONGEST_SOURCE = 2**20
"""Most characters of a template. Real templates have some thousand."""
_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
"""Methods of texts whose result is as wide as their argument says."""
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
"""Filters whose result may be as wide as an argument says."""


class TemplateLimitError(jinja2.TemplateError):
    """Error for a template that is too large, or loops or writes more than the bounds allow."""


class _Spent(threading.local):
    """Counters of the rendering in this thread."""

    turns = 0
    written = 0


_SPENT = _Spent()


def begin() -> None:
    """Set the counters of this thread to zero, before a rendering or a compilation."""
    _SPENT.turns = 0
    _SPENT.written = 0


def _turn(count: int = 1) -> None:
    """Add turns of a loop to the counter. Raise `TemplateLimitError` above the bound."""
    _SPENT.turns += count
    if _SPENT.turns > _MOST_TURNS:
        raise TemplateLimitError(f"it loops more than {_MOST_TURNS:,} times")


def _written(size: int) -> None:
    """Add the size of a text or list to the counter, before it is made.

    Raises:
        TemplateLimitError: The size is above `_LARGEST`, or the sum above `_MOST_WRITTEN`.
    """
    if size > _LARGEST:
        raise TemplateLimitError(
            f"it makes a text or list of {size:,}, and {_LARGEST:,} is the most"
        )
    _SPENT.written += size
    if _SPENT.written > _MOST_WRITTEN:
        raise TemplateLimitError(f"it makes texts of more than {_MOST_WRITTEN:,} characters")


def _size(value: Any) -> int:
    """Return the length of a value, or 0 if it has none."""
    return len(value) if isinstance(value, Sized) else 0


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a text, bytes, list or tuple, which `*` repeats."""
    return isinstance(value, (str, bytes, list, tuple))


def _widest(values: Any) -> int:
    """Return the largest absolute value among whole numbers, or 0 if there are none."""
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _written_out(parts: Any) -> str:
    """Join the texts that a template writes. Raise `TemplateLimitError` above the bound."""
    texts = []
    for part in parts:
        _SPENT.written += len(part)
        if _SPENT.written > _MOST_WRITTEN:
            _written(len(part))
        texts.append(part)
    return "".join(texts)


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """Sandbox of jinja2 that counts loops, calls and sizes of texts in each rendering.

    Rendering raises `TemplateLimitError` above the bounds of this file.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_written_out)
    marks: str
    """Two characters, put before and after an answer."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # Nearly all operations of templates join two texts, so this case comes first and is kept
        # cheap.
        if operator == "+" and type(left) is str and type(right) is str:
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
        # The sandbox wraps `str.format` and `format_map`, so look at the method inside the wrapper.
        method = getattr(function, "__wrapped__", function)
        text = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(text, str):
            _check_method(text, name, args)
        # jinja2 gives templates this function as `lipsum`, with a number of paragraphs.
        elif name == "generate_lorem_ipsum":
            _written(1000 * max(_widest(args), _widest(kwargs.values())))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, (str, list)):
            _written(len(result))
        return result


def _check_method(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Count the result of a text's method before the call. Raise an error above the bounds."""
    if name in _WIDTHS:
        repeats = 1
        if name == "expandtabs":
            # Each tab becomes as wide as the argument says.
            repeats = max(1, text.count("\t"))
        _written(max(len(text), _widest(args) * repeats))
    elif name == "replace" and len(args) >= 2:
        _check_replacement(text, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple, range)):
        _written(len(text) * len(args[0]) + sum(_size(item) for item in args[0]))
    elif name in ("format", "format_map"):
        _check_format(text, args)


def _check_replacement(text: Any, before: Any, after: Any) -> None:
    """Count the result of `replace` before it is made, if all three values are texts."""
    if isinstance(text, str) and isinstance(before, str) and isinstance(after, str):
        growth = text.count(before) * max(0, len(after) - len(before))
        _written(len(text) + growth)


def _check_format(form: str, values: tuple[Any, ...]) -> None:
    """Count the result of a format, and raise an error if its width is millions.

    The width is a number of more than six digits in the string, or a value for `*`.
    """
    digits = 0
    number = ""
    for character in form:
        number = number + character if character.isdigit() else ""
        digits = max(digits, len(number))
    if digits > 6 or ("*" in form and _widest(values) > 10**6):
        raise TemplateLimitError("it formats a value to a width of millions")
    _written(len(form) + sum(_size(value) for value in values))


def _counted(items: Any) -> Any:
    """Count the items of a loop and return them.

    Items without a length are returned as an iterator that counts them one by one.
    """
    if isinstance(items, Sized):
        _turn(len(items))
        return items
    return _counting(items)


def _counting(items: Any) -> Iterator[Any]:
    """Yield the items and count each of them."""
    for item in items:
        _turn()
        yield item


def _joined(*values: Any) -> str:
    """Join values as texts, as the operator `~` does. Count the result before it is made."""
    texts = [str(value) for value in values]
    _written(sum(map(len, texts)))
    return "".join(texts)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of jinja2, so that its result is counted, where possible before it is made.

    Args:
        name: Name of the filter, which tells how to estimate the size of its result.
    """

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _turn()
        values = [*args, *kwargs.values()]
        if name in _WIDE_FILTERS:
            texts = [value for value in values if isinstance(value, str)]
            line_ends = sum(text.count("\n") for text in texts)
            # A filter such as `indent` widens every line.
            _written(_widest(values) * (1 + line_ends))
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
    """Count the separators of `join` before the text is made, if it joins a list by a text."""
    lists = [value for value in values if isinstance(value, (list, tuple, range))]
    separators = [value for value in values if isinstance(value, str)]
    if lists and separators:
        _written(len(separators[-1]) * len(lists[0]))


class _Counting(visitor.NodeTransformer):
    """Transformer that puts counting filters around the items of loops and in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        first, *arguments = node.nodes
        return nodes.Filter(first, "_joined", arguments, [], None, None, lineno=node.lineno)


class Generation(ext.Extension):
    """Extension of jinja2 for `{% generation %}`, which puts marks around an answer."""

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
    """Return the sandbox of templates, with the settings, filters and functions of `transformers`.

    Calls with equal arguments return one cached object.

    Args:
        dated: True if templates may ask for today's date.
        marks: Two characters, put before and after what is in `{% generation %}`.
    """

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # As in `transformers`: jinja2's own filter would escape < and > for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    sandboxed = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    sandboxed.marks = marks
    sandboxed.filters["tojson"] = to_json
    for name in (*_WIDE_FILTERS, "format", "join", "replace"):
        sandboxed.filters[name] = _bounded(name, sandboxed.filters[name])
    sandboxed.filters["_counted"] = _counted
    sandboxed.filters["_joined"] = _joined
    sandboxed.globals["raise_exception"] = refuse
    if dated:
        sandboxed.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandboxed


def compiled(source: str, dated: bool, marks: str) -> jinja2.Template:
    """Compile a template in the sandbox and return it.

    Args:
        dated: True if the template may ask for today's date.
        marks: Two characters, put before and after what is in `{% generation %}`.

    Raises:
        TemplateError: The source is not a template of jinja2, or is too large.
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
