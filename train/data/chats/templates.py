"""A conversation as text: a source's chat template, rendered by jinja2 in its sandbox as `transformers` does.

The template lies beside tokenizer.json: chat_template.jinja, or `chat_template` of tokenizer_config.json. It is a stranger's
program, so it runs where it can change nothing and reach no attribute of Python's own.
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
from mupax.train.data.interface import DataError

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
ASSETS = "assets.json"
"""Beside the tokenizer of a run (`mupax.train.data.assets`)."""
ROLES = ("system", "developer", "user", "assistant", "tool")
MARKS = "\ufdd0\ufdd1"
"""What begins and ends an answer in a marked text: of no text, by Unicode's rule, and refused in messages."""
_CONTENT = "\ufdd2"
QUOTE = "\ufdd3"
"""Stands within a special token that a message quotes, until the template has been rendered."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Fields of a message that say whether it is trained on: OpenAI and Mistral; axolotl; axolotl's older name; ms-swift and XTuner."""
PARTS = "train_detail"
"""Field of a message with the parts of its content that are trained on, as axolotl has it."""

_SPECIAL = re.compile(r"<\|[^\s<>|]+\|>|<｜[^\s<>｜]+｜>|</?[A-Za-z_][\w:-]*>|\[/?[A-Z][A-Z_]*\]")
"""Tokens as ChatML and Llama 3 write them, DeepSeek, Gemma and Llama 2, and Mistral."""

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template.

    Raises:
        DataError: when it is made: it is no jinja2.
    """

    source: str
    """The template itself."""
    name: str
    """What an error calls it."""
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What it may name, such as bos_token."""
    dated: bool = False
    """Whether it may ask for today's date; without, texts are the same on every day."""

    def __post_init__(self) -> None:
        _ = self._compiled

    def render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """The text of a conversation.

        Args:
            messages: with `role` and `content`, as `checked` gives them.
            prompt: whether what begins an answer follows.

        Raises:
            DataError: the template refuses these messages, or fails.
        """
        return self.marked(messages, prompt=prompt).translate(dict.fromkeys(map(ord, MARKS)))

    def marked(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The same with the first of `MARKS` before and the second after what the template has in `{% generation %}`.

        Args:
            messages, prompt: as `render` takes them.

        Raises:
            DataError: as `render`.
        """
        from mupax.train.data.chats import sandbox

        sandbox.begin()
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=prompt, **self.tokens
            )
        except Exception as error:  # of a program that is not ours
            raise DataError(
                f"the chat template {self.name} takes no such messages: {error!s:.300}"
            ) from error

    @property
    def marks_answers(self) -> bool:
        """Whether it says by itself what an answer is."""
        return "generation" in self._tags

    @functools.cached_property
    def ending(self) -> str:
        """What follows an answer's content, without white space around it; empty where nothing but space does."""
        question = {"role": "user", "content": "?"}
        try:
            text = self.render([question, {"role": "assistant", "content": _CONTENT}], prompt=False)
        except DataError:
            return ""
        return text.rpartition(_CONTENT)[2].strip() if _CONTENT in text else ""

    def with_tokens(self, tokens: Mapping[str, str]) -> str:
        """Return the template's source for a reader who gives it other tokens. It renders the same text.

        Tokens that differ are set at the start. A token that this template has not stays undefined.

        Args:
            tokens: what the reader gives, by name, such as bos_token.
        """
        from jinja2 import meta

        named = meta.find_undeclared_variables(_environment(self.dated).parse(self.source))
        lines = []
        for name in sorted(name for name in named if name.endswith("_token")):
            ours = self.tokens.get(name)
            if ours != tokens.get(name):
                value = (
                    "a_name_of_nothing" if ours is None else json.dumps(ours, ensure_ascii=False)
                )
                lines.append(
                    f"{{% set {name} = {value} %}}\n"
                )  # jinja2 takes the line end away (trim_blocks)
        return "".join(lines) + self.source

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens such as `<|im_end|>` that the template writes around messages, in their order."""
        tokens = {}
        for roles in (
            ("user", "assistant"),
            ("system", "user", "assistant"),
            ("user", "assistant", "tool", "assistant"),
        ):
            conversation = [{"role": role, "content": _CONTENT} for role in roles]
            for prompt in (False, True):
                try:
                    text = self.render(conversation, prompt=prompt)
                except DataError:  # a template without a role for system or tool
                    continue
                tokens |= dict.fromkeys(_SPECIAL.findall(text))
                tokens |= {token: None for token in self.tokens.values() if token and token in text}
        return tuple(tokens)

    @property
    def special_tokens_at_end(self) -> tuple[str, ...]:
        """Special tokens that end an answer."""
        return tuple(token for token in self.special_tokens if token in self.ending)

    @functools.cached_property
    def _tags(self) -> set[str]:
        lexed = _environment(self.dated).lex(self.source)
        after_begin = False
        tags = set()
        for _, kind, value in lexed:
            if kind == "name" and after_begin:
                tags.add(value)
            after_begin = kind == "block_begin" or (after_begin and kind == "whitespace")
        return tags

    @functools.cached_property
    def _compiled(self) -> Any:
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
    """The chat template of a tokenizer, None where there is none.

    Args:
        tokenizer: data.tokenizer; of a path, what lies beside the file counts.
        file: of a template, in place of that one.
        dated: whether it may ask for today's date.

    Raises:
        DataError: the file is not there, is damaged, or holds no template.
    """
    folder = path_of(tokenizer).parent if tokenizer.endswith(".json") else None
    fields = _fields(folder / CONFIG) if folder and (folder / CONFIG).is_file() else {}
    tokens = special_tokens(tokenizer)
    path = (
        path_of(file) if file else folder / FILE if folder and (folder / FILE).is_file() else None
    )
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"no chat template at {path}: {error}. Write the path of a file of jinja2"
            ) from error
        return Template(text, str(path), tokens, dated)
    text = fields.get("chat_template")
    if isinstance(text, list):  # several by name
        by_name = {
            each.get("name"): each.get("template") for each in text if isinstance(each, dict)
        }
        text = by_name.get("default")
    return (
        Template(text, str(folder / CONFIG), tokens, dated)
        if folder and isinstance(text, str)
        else None
    )


def special_tokens(tokenizer: str) -> dict[str, str]:
    """Return the special tokens that a template may name, such as bos_token, from files beside a tokenizer.json.

    Args:
        tokenizer: data.tokenizer. Without a path there are none.

    Raises:
        DataError: such a file is damaged.
    """
    if not tokenizer.endswith(".json"):
        return {}
    folder = path_of(tokenizer).parent
    fields: Mapping[str, Any] = {}
    if (folder / CONFIG).is_file():
        fields = _fields(folder / CONFIG)
    elif (folder / ASSETS).is_file():  # a run's own folder
        described = _fields(folder / ASSETS).get("chat_template")
        own = described.get("tokens") if isinstance(described, dict) else None
        fields = own if isinstance(own, dict) else {}
    tokens: dict[str, str] = {}
    for name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def checked(messages: Any) -> list[dict[str, Any]]:
    """Messages with a role and text, in order; a content in parts of text is joined.

    Args:
        messages: as JSON has them.

    Raises:
        DataError: they are no such list; the text says which message is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError('messages are a list of at least one {"role": ..., "content": ...}')
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise DataError(f"{where} has the role {role!r:.40}; write one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else content  # pyright: ignore
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
    fields = {name: value for name, value in message.items() if value is not None} | {
        "content": content
    }
    trained = [_is_trained(fields.pop(name), name, where) for name in WEIGHTS if name in fields]
    if PARTS in fields:
        _check_parts(fields[PARTS], len(content), where)
    return fields if all(trained) else {**fields, "weight": 0}


def _is_trained(value: Any, name: str, where: str) -> bool:
    """Return a 0 or 1 of a record as a bool."""
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise DataError(
            f"{where} has the {name} {value!r:.40}; write 0 (context, not trained on) or 1, or take it out of the record"
        )
    return bool(value)


def _check_parts(parts: Any, length: int, where: str) -> None:
    """Refuse a `train_detail` that does not name parts of a content of `length` characters."""
    form = '{"begin_offset": 0, "end_offset": 9, "train": false}'
    if not isinstance(parts, list):
        raise DataError(f"{where} has the {PARTS} {parts!r:.40}; write a list of {form}")
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        first = fields.get("begin_offset")
        last = fields.get("end_offset")
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < length:
            raise DataError(
                f"{where} has the {PARTS} {part!r:.80}; write {form}, with characters of its content from 0 to {length - 1}"
            )
        _is_trained(fields.get("train"), f"{PARTS} train", where)


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except JsonError as error:
        raise DataError(str(error)) from error


def _environment(dated: bool) -> Any:
    """Return where templates run."""
    from mupax.train.data.chats import sandbox

    return sandbox.environment(dated, MARKS)
