"""Chat templates: conversations as text, rendered by jinja2 in its sandbox as `transformers` does.

The template is next to tokenizer.json, as chat_template.jinja or as `chat_template` in
tokenizer_config.json. It is a program of somebody else. So it runs where it can change nothing and
read no attribute of Python's own (`sandbox.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mupax.disk import JsonError, path_of, read_json
from mupax.mappings import drop_none
from mupax.train.data.interface import DataError

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
ASSETS = "assets.json"
"""File next to the tokenizer of a run (`mupax.train.data.assets`)."""
ROLES = ("system", "developer", "user", "assistant", "tool")
MARKS = "\ufdd0\ufdd1"
"""Characters that begin and end an answer in a marked text.

By Unicode's rule they are no characters of a text, and messages that have them are refused.
"""
_CONTENT = "\ufdd2"
"""Content of messages that show what a template writes around a content."""
QUOTE = "\ufdd3"
"""Character put into special tokens that a message quotes, until the template is rendered."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Fields of a message that say whether it is trained on.

They are those of OpenAI and Mistral, of axolotl, of older versions of axolotl, and of ms-swift and
XTuner.
"""
PARTS = "train_detail"
"""Field of a message with the parts of its content that are trained on, as in axolotl."""

_SPECIAL = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|</?[A-Za-z_][\w:-]*>|\[/?[A-Z][A-Z_]*\]")
"""Special tokens as in ChatML and Llama 3, DeepSeek, Gemma and Llama 2, and Mistral."""

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Template:
    """Chat template, compiled when it is made.

    Raises:
        DataError: The source is not a template of jinja2.
    """

    source: str
    """Text of the template."""
    name: str
    """Name of the template in error messages."""
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Special tokens that the template may name, by names such as bos_token."""
    dated: bool = False
    """True if the template may ask for today's date. Otherwise texts are the same on every day."""

    def __post_init__(self) -> None:
        # Compiled here, so that a wrong template is an error before anything is rendered.
        _ = self._compiled

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Return the text of a conversation.

        Args:
            messages: Result of `checked`: messages with `role` and `content`.
            prompt: True adds the beginning of the next answer.

        Raises:
            DataError: The template refuses these messages, or fails.
        """
        # `str.translate` deletes a character that maps to `None`.
        without_marks = dict.fromkeys(map(ord, MARKS))
        return self.marked(messages, prompt=prompt).translate(without_marks)

    def marked(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the text of a conversation with `MARKS` around the parts in `{% generation %}`.

        Args:
            messages: Result of `checked`: messages with `role` and `content`.
            prompt: True adds the beginning of the next answer.

        Raises:
            DataError: The template refuses these messages, or fails.
        """
        from mupax.train.data.chats import sandbox

        sandbox.begin()
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=prompt, **self.tokens
            )
        # A template is a program of somebody else, which may raise anything.
        except Exception as error:
            raise DataError(
                f"the chat template {self.name} takes no such messages: {error!s:.300}"
            ) from error

    @property
    def marks_answers(self) -> bool:
        """True if the template marks answers by `{% generation %}`."""
        return "generation" in self._tags

    @functools.cached_property
    def ending(self) -> str:
        """Text that the template writes after an answer's content, stripped. It may be empty."""
        question = {"role": "user", "content": "?"}
        try:
            text = self.render([question, {"role": "assistant", "content": _CONTENT}], prompt=False)
        except DataError:
            return ""
        if _CONTENT not in text:
            return ""
        return text.rpartition(_CONTENT)[2].strip()

    def with_tokens(self, tokens: Mapping[str, str]) -> str:
        """Return a source that renders the template's text in a program that passes other tokens.

        Tokens that differ are set at the start of the source. A token that this template does not
        have stays undefined.

        Args:
            tokens: Tokens that the other program passes, by names such as bos_token.
        """
        from jinja2 import meta

        parsed = _environment(self.dated).parse(self.source)
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
        """Special tokens that the template writes around messages, such as `<|im_end|>`."""
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
        """Special tokens that end an answer."""
        return tuple(token for token in self.special_tokens if token in self.ending)

    @functools.cached_property
    def _tags(self) -> set[str]:
        """Names of the template's tags, such as `for` and `generation`."""
        lexed = _environment(self.dated).lex(self.source)
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
        import jinja2

        from mupax.train.data.chats import sandbox

        try:
            return sandbox.compiled(self.source, self.dated, MARKS)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.name} is no chat template of jinja2: {error}") from error
        except RecursionError as error:
            raise DataError(
                f"{self.name} is no chat template that can be read: nested too deep"
            ) from error


def find(tokenizer: str, file: str | None = None, *, dated: bool = False) -> Template | None:
    """Return the chat template of a tokenizer, or None if there is none.

    Args:
        tokenizer: Value of data.tokenizer. Templates next to it count if it is a path.
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
            raise DataError(
                f"no chat template at {path}: {error}. Write the path of a file of jinja2"
            ) from error
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
    """Return the special tokens that a template may name, by names such as bos_token.

    They are in files next to a tokenizer.json.

    Args:
        tokenizer: Value of data.tokenizer. If it is not a path, there are no tokens.

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
    """Check messages and return copies of them with a role and a text each.

    A content of several texts is joined, and null fields are dropped. The fields of `WEIGHTS` are
    dropped, too. If one of them excludes the message from training, the copy has `weight` 0.

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
    """Return a 0 or 1 of a record as a bool. Raise `DataError` for any other value."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise DataError(
            f"{where} has the {name} {value!r:.40}; write 0 (context, not trained on) or 1, or take it "
            "out of the record"
        )
    return bool(value)


def _check_parts(parts: Any, length: int, where: str) -> None:
    """Raise an error if a `train_detail` does not name parts of a content of this length."""
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


def _environment(dated: bool) -> Any:
    """Return the sandbox of jinja2 in which templates run.

    Args:
        dated: True if templates may ask for today's date (`strftime_now`).
    """
    from mupax.train.data.chats import sandbox

    return sandbox.environment(dated, MARKS)
