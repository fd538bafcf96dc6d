"""Chat templates: conversations as text, rendered by jinja2 in its sandbox as `transformers` does.

The template is next to tokenizer.json, as chat_template.jinja or as `chat_template` in
tokenizer_config.json. It is a program of somebody else, so it runs in a sandbox.

The sandbox of jinja2 keeps a template from Python's own attributes, but not from `'x' * 10**10` or
from three nested loops. So loops, calls and the sizes of texts are counted in each rendering.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2 import ext, meta, nodes, sandbox, visitor

from mupax.disk import JsonError, path_of, read_json
from mupax.mappings import drop_none
from mupax.train.data.interface import DataError, is_system_error, unreadable

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
ASSETS = "assets.json"
"""File next to a run's copy of its tokenizer, with facts on its data (`checkpoints/assets.py`)."""
ROLES = ("system", "developer", "user", "assistant", "tool")
MARKS = "\ufdd0\ufdd1"
"""Characters that `Template.marked` writes before and after each answer, to find the answers.

Unicode reserves them for use inside programs, and messages that have them are refused.
"""
_CONTENT = "\ufdd2"
"""Content of sample messages, which are rendered to see what a template writes around a content."""
QUOTE = "\ufdd3"
"""Character put into special tokens that a message quotes, while the template is rendered.

So a quoted special token is told from one that the template writes.
"""
WEIGHTS = ("weight", "train", "training", "loss")
"""Fields of a message that say whether it is trained on.

In this order, they come from OpenAI and Mistral; from axolotl; from older versions of axolotl; and
from ms-swift and XTuner.
"""
PARTS = "train_detail"
"""Field of a message that says of parts of its content whether they are trained on, as in axolotl.

It is a list of {"begin_offset": 0, "end_offset": 9, "train": false}, in characters of the content.
`end_offset` is the last character of the part.
"""

_SPECIAL = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|</?[A-Za-z_][\w:-]*>|\[/?[A-Z][A-Z_]*\]")
"""Pattern of special tokens: of ChatML and Llama 3, DeepSeek, Gemma and Llama 2, and Mistral."""

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Template:
    """Chat template of jinja2, which renders a conversation as text.

    The constructor compiles the source, so that a wrong template fails at once.

    Raises:
        DataError: The source is not a template of jinja2.
    """

    source: str
    """Text of the template."""
    name: str
    """Name of the template in error messages."""
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens that the template may use as variables, by variable, such as bos_token."""
    dated: bool = False
    """True if the template may ask for today's date. Otherwise texts are the same on every day."""

    def __post_init__(self) -> None:
        # Compiled here, so that a wrong template is an error before anything is rendered.
        _ = self._compiled

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Render a conversation and return its text.

        Args:
            messages: Result of `checked`: messages with `role` and `content`.
            prompt: True adds what the template writes before the next answer.

        Raises:
            DataError: The template refuses these messages, or fails.
        """
        # `str.translate` deletes a character that maps to `None`.
        without_marks = dict.fromkeys(map(ord, MARKS))
        return self.marked(messages, prompt=prompt).translate(without_marks)

    def marked(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render a conversation with `MARKS` around the answers, and return its text.

        Answers are the parts that the template has in `{% generation %}`.

        Args:
            messages: Result of `checked`: messages with `role` and `content`.
            prompt: True adds what the template writes before the next answer.

        Raises:
            DataError: The template refuses these messages, or fails.
        """
        _begin_rendering()
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=prompt, **self.tokens
            )
        # A template is a program of somebody else, which may raise anything.
        except Exception as error:
            raise DataError(
                f"the chat template {self.name} cannot render these messages: {error!s:.300}"
            ) from error

    @property
    def marks_answers(self) -> bool:
        """True if the template marks answers by `{% generation %}`."""
        return "generation" in self._tags

    @functools.cached_property
    def ending(self) -> str:
        """Text that the template writes after an answer, such as `<|im_end|>`, without white space.

        It is empty if the template writes nothing there, or refuses a question and an answer.
        """
        question = {"role": "user", "content": "?"}
        try:
            text = self.render([question, {"role": "assistant", "content": _CONTENT}], prompt=False)
        except DataError:
            return ""
        if _CONTENT not in text:
            return ""
        return text.rpartition(_CONTENT)[2].strip()

    def with_tokens(self, tokens: Mapping[str, str]) -> str:
        """Return the template's source, changed so that another program renders the same texts.

        Another program may pass other special tokens to the template. Tokens that differ are set at
        the start of the source. A token that this template does not have becomes undefined.

        Args:
            tokens: Special tokens that the other program passes, by variable, such as bos_token.
        """
        parsed = _environment(self.dated, MARKS).parse(self.source)
        variables = meta.find_undeclared_variables(parsed)
        lines = []
        for name in sorted(variables):
            token = self.tokens.get(name)
            if not name.endswith("_token") or token == tokens.get(name):
                continue
            # Setting the token to an undefined variable makes it undefined in the template, too.
            value = "a_name_of_nothing"
            if token is not None:
                value = json.dumps(token, ensure_ascii=False)
            # jinja2 removes the line end (trim_blocks).
            lines.append(f"{{% set {name} = {value} %}}\n")
        return "".join(lines) + self.source

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens that the template writes around messages, such as `<|im_end|>`.

        They are found by rendering sample conversations.
        """
        # A dict, because a set has no order.
        tokens: dict[str, None] = {}
        for roles in (
            ("user", "assistant"),
            ("system", "user", "assistant"),
            ("user", "assistant", "tool", "assistant"),
        ):
            conversation = [{"role": role, "content": _CONTENT} for role in roles]
            for prompt in (False, True):
                try:
                    text = self.render(conversation, prompt=prompt)
                except DataError:
                    # Many templates refuse conversations with the role system or tool.
                    continue
                tokens |= dict.fromkeys(_SPECIAL.findall(text))
                for token in self.tokens.values():
                    if token and token in text:
                        tokens[token] = None
        return tuple(tokens)

    @property
    def special_tokens_at_end(self) -> tuple[str, ...]:
        """Special tokens that the template writes after an answer."""
        return tuple(token for token in self.special_tokens if token in self.ending)

    @functools.cached_property
    def _tags(self) -> set[str]:
        """Names of the tags in the template's source, such as `for` and `generation`."""
        lexed = _environment(self.dated, MARKS).lex(self.source)
        after_begin = False
        tags = set()
        for _, token_type, value in lexed:
            if token_type == "name" and after_begin:
                tags.add(value)
            is_space = token_type == "whitespace"
            after_begin = token_type == "block_begin" or (after_begin and is_space)
        return tags

    @functools.cached_property
    def _compiled(self) -> Any:
        """Compiled template of jinja2. Raises `DataError` for a source that is no template."""
        try:
            return _compile_source(self.source, self.dated, MARKS)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.name} is no chat template of jinja2: {error}") from error
        except RecursionError as error:
            raise DataError(
                f"{self.name} is no chat template that can be read: nested too deep"
            ) from error


def find(tokenizer: str, file: str | None = None, *, dated: bool = False) -> Template | None:
    """Return the chat template of a tokenizer, or None if there is none.

    Args:
        tokenizer: Value of data.tokenizer. For a path of a .json file, the template is looked for
            in the same folder.
        file: File of a template to use instead. None looks next to the tokenizer.
        dated: True if the template may ask for today's date.

    Raises:
        DataError: The file is missing or damaged, or is not a template.
    """
    folder = path_of(tokenizer).parent if tokenizer.endswith(".json") else None
    fields: Mapping[str, Any] = {}
    if folder and (folder / CONFIG).is_file():
        fields = _fields(folder / CONFIG)
    tokens = special_tokens(tokenizer)

    path: Path | None = None
    if file:
        path = path_of(file)
    elif folder and (folder / FILE).is_file():
        path = folder / FILE
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            message = f"no chat template at {path}: {error}. Write the path of a file of jinja2"
            if is_system_error(error):
                raise unreadable(message, error) from error
            raise DataError(message) from error
        return Template(text, str(path), tokens, dated)

    source = fields.get("chat_template")
    if isinstance(source, list):
        # The file may have a list of named templates.
        named = [entry for entry in source if isinstance(entry, dict)]
        by_name = {}
        for entry in named:
            by_name[entry.get("name")] = entry.get("template")
        # Other names are for purposes such as tool use. Without tools, `transformers` uses
        # `default`, too.
        source = by_name.get("default")
    if folder and isinstance(source, str):
        return Template(source, str(folder / CONFIG), tokens, dated)
    return None


def special_tokens(tokenizer: str) -> dict[str, str]:
    """Return the special tokens that a template may use as variables, by variable (bos_token).

    They are read from tokenizer_config.json next to a tokenizer.json, or from a run's assets.json.

    Args:
        tokenizer: Value of data.tokenizer. Unless it is the path of a .json file, the result is
            empty.

    Raises:
        DataError: A file next to the tokenizer is damaged.
    """
    if not tokenizer.endswith(".json"):
        return {}
    folder = path_of(tokenizer).parent
    fields: Mapping[str, Any] = {}
    if (folder / CONFIG).is_file():
        fields = _fields(folder / CONFIG)
    elif (folder / ASSETS).is_file():
        # The folder of a run, which has its tokens in assets.json.
        described = _fields(folder / ASSETS).get("chat_template")
        run_tokens = described.get("tokens") if isinstance(described, dict) else None
        if isinstance(run_tokens, dict):
            fields = run_tokens
    tokens: dict[str, str] = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def checked(messages: Any) -> list[dict[str, Any]]:
    """Check messages. Return copies of them in one form: `role`, `content` as one text, and others.

    A content of several texts is joined. Null fields and the fields of `WEIGHTS` are dropped. If
    one of the fields of `WEIGHTS` excludes the message from training, the copy has `weight` 0.

    Args:
        messages: Value of a record's field, such as a list of messages in OpenAI's format.

    Raises:
        DataError: The value is not a list of messages, or one has an unknown role, a content that
            is no text or has NUL or U+FDD0 to U+FDD3, or a wrong field. The error says which one.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError('messages are a list of at least one {"role": ..., "content": ...}')
    checked = []
    for i, message in enumerate(messages):
        checked.append(_checked(message, f"messages[{i}]"))
    return checked


def _checked(message: Any, where: str) -> dict[str, Any]:
    """Check one message and return a copy of it, as `checked` describes.

    Args:
        where: Name of the message in errors, such as "messages[2]".

    Raises:
        DataError: The role is unknown, the content is no text, or another field is wrong.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise DataError(f"{where} has the role {role!r:.40}; write one of {', '.join(ROLES)}")

    content = message.get("content")
    if isinstance(content, list):
        texts: list[Any] = []
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            texts.append(part.get("text") if is_text else None)
        if all(isinstance(text, str) for text in texts):
            content = "".join(texts)
    # In OpenAI's format, a message with tool calls may have null as its content.
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"{where} has no text in its content; write a string, or parts of type text"
        )
    if set(content) & {*MARKS, _CONTENT, QUOTE, "\0"}:
        raise DataError(
            f"{where} has a character that is of no text (NUL, U+FDD0 to U+FDD3); remove it"
        )

    fields = drop_none(message)
    fields["content"] = content
    trained = []
    for name in WEIGHTS:
        if name in fields:
            trained.append(_is_trained(fields.pop(name), name, where))
    if PARTS in fields:
        _check_parts(fields[PARTS], len(content), where)
    # One field that excludes a message is enough.
    if not all(trained):
        fields["weight"] = 0
    return fields


def _is_trained(value: Any, name: str, where: str) -> bool:
    """Return a field that is 0 or 1, or a bool, as a bool. Raise `DataError` for other values.

    Args:
        name: Name of the field, for the error.
        where: Name of the message, for the error.
    """
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise DataError(
            f"{where} has the {name} {value!r:.40}; write 0 (context, not trained on) or 1, or take it "
            "out of the record"
        )
    return bool(value)


def _check_parts(parts: Any, length: int, where: str) -> None:
    """Raise `DataError` unless a `train_detail` (`PARTS`) is a list of valid parts of a content.

    Args:
        parts: Value of the field `train_detail`.
        length: Number of characters of the content, which bounds the offsets.
        where: Name of the message, for the error.
    """
    form = '{"begin_offset": 0, "end_offset": 9, "train": false}'
    if not isinstance(parts, list):
        raise DataError(f"{where} has the {PARTS} {parts!r:.40}; write a list of {form}")
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        first = fields.get("begin_offset")
        last = fields.get("end_offset")
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < length:
            raise DataError(
                f"{where} has the {PARTS} {part!r:.80}; write {form}, with characters of its content "
                f"from 0 to {length - 1}"
            )
        _is_trained(fields.get("train"), f"{PARTS} train", where)


def _fields(path: Path) -> Mapping[str, Any]:
    """Return the fields of a JSON file. Raise `DataError` if it is missing or damaged."""
    try:
        return read_json(path)
    except JsonError as error:
        raise DataError(str(error)) from error


_MOST_TURNS = 2_000_000
"""Largest number of loop iterations in one rendering, where a call counts `_TURNS_PER_CALL`."""
_TURNS_PER_CALL = 20
"""Loop iterations that a call counts for, because a call of a macro takes as much time."""
_LARGEST = 32 * 2**20
"""Largest number of characters of a text, or of items of a list, that one operation may make."""
_MOST_WRITTEN = 256 * 2**20
"""Largest number of characters that all operations of a rendering may make together."""
_MOST_BITS = 4096
"""Largest number of bits of a whole number in a template."""
_LONGEST_SOURCE = 2**20
"""Largest number of characters of a template. Real templates have a few thousand."""
_WIDTHS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
"""Methods of texts whose result is as wide as their argument says."""
_WIDE_FILTERS = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})
"""Filters whose result may be as wide as an argument says."""


class TemplateLimitError(jinja2.TemplateError):
    """Error for a template that is too large, or loops or writes more than the bounds allow."""


class _Spent(threading.local):
    """Counters of the current rendering in this thread.

    Attributes:
        turns: Number of loop iterations so far, at most `_MOST_TURNS`.
        written: Number of characters and list items made so far, at most `_MOST_WRITTEN`.
    """

    turns = 0
    written = 0


_SPENT = _Spent()


def _begin_rendering() -> None:
    """Set the counters of this thread to zero, before a rendering or a compilation."""
    _SPENT.turns = 0
    _SPENT.written = 0


def _turn(count: int = 1) -> None:
    """Count loop iterations. Raise `TemplateLimitError` above `_MOST_TURNS`."""
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
    """Return the largest absolute value among the whole numbers in `values`, or 0 without any.

    It bounds the width of a text that a method or filter makes from these arguments.
    """
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _written_out(parts: Any) -> str:
    """Join the texts that a template writes, and count their characters.

    Raises:
        TemplateLimitError: The sum of this rendering is above `_MOST_WRITTEN`.
    """
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
    """Two characters, written before and after what is in `{% generation %}`."""

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
    """Count the size of the result of a string method before the method is called.

    Args:
        name: Name of the method, such as "center".

    Raises:
        TemplateLimitError: The result is too large.
    """
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
    """Count the size of the result of text.replace(before, after) before it is made.

    Nothing is counted unless all three values are strings.
    """
    if isinstance(text, str) and isinstance(before, str) and isinstance(after, str):
        growth = text.count(before) * max(0, len(after) - len(before))
        _written(len(text) + growth)


def _check_format(form: str, values: tuple[Any, ...]) -> None:
    """Count the size of a formatted string before it is made, such as "%5d" % 3.

    Args:
        form: Format string, such as "%5d" or "{:5}".
        values: Values that are formatted, which may be widths for `*`.

    Raises:
        TemplateLimitError: The format string has a number of more than six digits, or has "*" and
            a value above a million, so that a field would be millions of characters wide.
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
    """Count the items of a `for` loop of a template, and return the items for the loop.

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
    """Return a filter of jinja2 that does the same as `function` and counts the size of its result.

    Where possible, the size is counted before the result is made.

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
    """Count the characters of the separators that the filter `join` will write.

    Args:
        values: Arguments of the filter. Nothing is counted without a list and a string among them.
    """
    lists = [value for value in values if isinstance(value, (list, tuple, range))]
    separators = [value for value in values if isinstance(value, str)]
    if lists and separators:
        _written(len(separators[-1]) * len(lists[0]))


class _Counting(visitor.NodeTransformer):
    """Transformer of a parsed template that makes its loops and its operators `~` count.

    Items of a loop go through the filter `_counted`, and `~` becomes the filter `_joined`.
    """

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
def _environment(dated: bool, marks: str) -> Environment:
    """Return the jinja2 sandbox in which templates run, set up as in `transformers`.

    Calls with equal arguments return one cached object.

    Args:
        dated: True if templates may ask for today's date (`strftime_now`).
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


def _compile_source(source: str, dated: bool, marks: str) -> jinja2.Template:
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
    _begin_rendering()
    try:
        return _environment(dated, marks).from_string(source)
    except (RecursionError, MemoryError, SyntaxError, OverflowError, ValueError) as error:
        raise TemplateLimitError(f"it cannot be compiled: {error!s:.200}") from error
