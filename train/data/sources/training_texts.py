"""Training documents of any source as bytes, on which a BPE tokenizer is trained.

They are used for data.tokenizer `bpe:SIZE` and by the command `mupax data tokenizer`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mupax.disk import path_of
from mupax.train.config.data import source
from mupax.train.data import cache, mix
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import shown_to_template
from mupax.train.data.chats.records import FIELD
from mupax.train.data.interface import DataError
from mupax.train.data.records import contents, splits, user_files
from mupax.train.data.sources import text
from mupax.zoo.families import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig
    from mupax.train.data.chats.templates import Template
    from mupax.train.data.records.broken import BrokenLog
    from mupax.train.data.text.packing import Documents


class TrainingTexts(NamedTuple):
    """Training documents of a source, which can be read several times."""

    key: str
    """Key of the content, which names a tokenizer trained on it in the cache."""
    read: Callable[[], Iterator[bytes]]
    """Function that yields the documents in UTF-8. Each call begins with the first document."""
    special: tuple[str, ...] = ()
    """Special tokens that a chat template writes around messages, such as `<|im_end|>`.

    A tokenizer that is trained on the documents has each of them as one token.
    """
    broken: tuple[BrokenLog, ...] = ()
    """Logs of the entries that reading has left out so far."""


def opened(config: DataConfig, model: ModelConfig, note: cache.Note) -> TrainingTexts:
    """Return the training documents of the source that `data.name` names, without its evaluation.

    The arguments are those of `mupax.train.data.load`.

    Raises:
        DataError: The source is missing, is not text, or has conversations and no chat template.
    """
    text.language_model(config.name, model)
    kind = config.name.partition(":")[0]
    if source(config.name).task == "images":
        raise DataError(f"data {config.name!r} is images; a tokenizer is trained on text")
    if kind == mix.NAME:
        return _mixture(config, model, note)
    if kind == "python_corpus":
        key, documents, _ = text.python_documents(config, note)
        return TrainingTexts(key, lambda: _training_part(documents()))
    if kind in ("text", "records"):
        files, key = text.user_text(config, model, note)
        return TrainingTexts(
            key, lambda: _training_part(splits.sides(files)), broken=(files.broken,)
        )
    if kind == "chat":
        return _chats(config, note)
    if kind == "hf":
        return _hub(config)
    from mupax.train.data.sources import published

    key, documents = published.text_documents(published.prepared(config, note), config, note)
    return TrainingTexts(key, lambda: _training_part(documents()))


def _mixture(config: DataConfig, model: ModelConfig, note: cache.Note) -> TrainingTexts:
    """Return the training texts of data.mix as one, each with its share of the bytes.

    Raises:
        DataError: A source cannot be opened, or data.mix is wrong. The message has the text's name.
    """
    parts = mix.parts(config.mix)
    texts = {}
    for name, part in parts.items():
        try:
            texts[name] = opened(part_config(config, part.source), model, note)
        except DataError as error:
            raise DataError(f"data.mix {name}: {error}") from error
    return weighted(texts, {name: part.count for name, part in parts.items()})


def part_config(config: DataConfig, name: str) -> DataConfig:
    """Return the data settings of one text of a mixture: those of the mixture with its own name.

    `mix` and `eval_examples` are unset. In a mixture, `data.field` names the field of records that
    has the text. `field` therefore gets its default for a chat that is mixed with other kinds, and
    for text:PATH without such records.

    Args:
        name: Source of the text, as data.name takes it.
    """
    part = dataclasses.replace(config, name=name, mix=(), eval_examples=None)
    kinds = set()
    for source_part in mix.parts(config.mix).values():
        kinds.add(source_part.source.partition(":")[0])
    kind, _, path = name.partition(":")
    usual_field = type(config).field
    if kind == "chat" and kinds != {"chat"}:
        return dataclasses.replace(part, field=usual_field)
    if kind == "text" and config.field != usual_field and not has_records(path, config.field):
        return dataclasses.replace(part, field=usual_field)
    return part


def has_records(path: str, field: str) -> bool:
    """Return whether a file or folder has records (JSON lines, Parquet) with text in `field`."""
    try:
        files = user_files.files(path_of(path), "records", field, None, lambda line: None)
    except DataError:
        return False
    return bool(files.records)


def weighted(
    texts: Mapping[str, TrainingTexts], weights: Mapping[str, int] | None
) -> TrainingTexts:
    """Return several texts as one. Documents are interleaved, and special tokens joined.

    Args:
        weights: Weight of each text by name: its share of the bytes, relative to the others. A
            small text is read again until all others have been read. With None each text is read
            once.
    """
    keys = []
    for name in texts:
        keys.append(f"{name} {texts[name].key} {weights[name] if weights else ''}")
    special: dict[str, None] = {}
    broken: list[BrokenLog] = []
    for part in texts.values():
        special |= dict.fromkeys(part.special)
        broken += part.broken

    def read() -> Iterator[bytes]:
        shares = [weights[name] if weights else 1 for name in texts]
        return _interleaved([*texts.values()], shares, bool(weights))

    return TrainingTexts(f"mix-{cache.digest(*keys)}", read, tuple(special), tuple(broken))


def _interleaved(
    texts: Sequence[TrainingTexts], weights: Sequence[int], repeat: bool
) -> Iterator[bytes]:
    """Yield the documents of several texts, so that each text has its share of the bytes so far.

    Args:
        weights: Share of the bytes of each text, relative to the others.
        repeat: True reads a text again at its end, until every text has been read once.
    """
    readers = [part.read() for part in texts]
    sizes = [0] * len(texts)
    unfinished = set(range(len(texts)))
    readable = [*range(len(texts))]
    while unfinished and readable:
        # Read on in the text that is farthest behind its share.
        i = min(readable, key=lambda number: sizes[number] / weights[number])
        document = next(readers[i], None)
        if document is not None:
            sizes[i] += len(document)
            yield document
            continue

        unfinished.discard(i)
        # A text without any bytes would be read again without end.
        if repeat and sizes[i]:
            readers[i] = texts[i].read()
        else:
            readable.remove(i)


def _training_part(documents: Documents) -> Iterator[bytes]:
    """Yield the training texts of a corpus. Documents of token ids are left out.

    Args:
        documents: Documents of the corpus under the keys "train" and "eval".
    """
    parts = documents["train"]
    for i in range(len(parts)):
        for content, _ in parts[i]:
            if isinstance(content, bytes):
                yield content


def _chats(config: DataConfig, note: cache.Note) -> TrainingTexts:
    """Return the texts of conversations, rendered by a chat template and cut at special tokens.

    So the tokenizer does not learn from the special tokens of the template.

    Raises:
        DataError: There is no chat template, or the files cannot be read.
    """
    template = templates.find(config.tokenizer, config.chat_template)
    if template is None:
        raise DataError(
            f"{config.name} has no chat template; write one in jinja2, and its file as "
            "--data.chat-template FILE"
        )
    files, field = chat_files(config, note)
    content = contents.digest([path for _, path in files.every()], note)
    key = cache.digest(content, field, template.source, *map(str, template.tokens.items()))
    return TrainingTexts(
        f"chat-{key}",
        lambda: _written(template, splits.sides(files)),
        template.special_tokens,
        (files.broken,),
    )


def chat_files(config: DataConfig, note: cache.Note) -> tuple[user_files.Files, str]:
    """Find the files of a user's conversations. Return them with the field that has the messages.

    Raises:
        DataError: The files cannot be read.
    """
    field = FIELD if config.field == type(config).field else config.field
    files = user_files.files(
        path_of(config.name.partition(":")[2]),
        "chat",
        field,
        None,
        note,
        skip_broken=config.on_broken == "skip",
        limits=config.limits,
    )
    return files, field


def _written(template: Template, documents: Documents) -> Iterator[bytes]:
    """Render conversations, and yield the texts between the template's special tokens.

    Args:
        documents: Conversations by "train" and "eval", as JSON of their messages.
    """
    # "(?!)" matches nothing: a template without special tokens is not cut.
    cut = re.compile("|".join(map(re.escape, template.special_tokens)) or "(?!)")
    for messages in _training_part(documents):
        conversation = template.render(shown_to_template(json.loads(messages)), prompt=False)
        for part in cut.split(conversation):
            if part:
                yield part.encode()


def _hub(config: DataConfig) -> TrainingTexts:
    """Return the training texts of a data set of the package `datasets`."""
    from mupax.train.data.streams import hub

    data_set = hub.opened(config.name, config.limits)
    documents = hub.HubDocuments(data_set, "train", config.field)

    def read() -> Iterator[bytes]:
        for chunk, _ in documents.after(None):
            for content, _ in chunk:
                if isinstance(content, bytes):
                    yield content

    return TrainingTexts(cache.digest(data_set.key, config.field), read)
