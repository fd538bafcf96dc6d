"""Training texts of any source, for a tokenizer that is trained on them (`bpe:SIZE`, `mupax data tokenizer`)."""

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
    from mupax.train.data.text.packing import Documents


class TrainingTexts(NamedTuple):
    """Documents of the training part of a source."""

    key: str
    """Names the content in the cache."""
    read: Callable[[], Iterator[bytes]]
    """Yields the documents in UTF-8; every call begins with the first."""
    special: tuple[str, ...] = ()
    """What a chat template writes around messages: tokens that are no text, each of which is a single token."""


def opened(config: DataConfig, model: ModelConfig, note: cache.Note) -> TrainingTexts:
    """Return the training texts of the source that a config names.

    Args:
        config, model, note: as `mupax.train.data.load` takes them.

    Raises:
        DataError: the source is missing, holds no text, or is a chat without a template.
    """
    text.language_model(config.name, model)
    kind = config.name.partition(":")[0]
    if source(config.name).task == "images":
        raise DataError(f"data {config.name!r} is images; a tokenizer is trained on text")
    if kind == mix.NAME:
        parts = mix.parts(config.mix)
        texts = {}
        for name, part in parts.items():
            try:
                texts[name] = opened(part_config(config, part.source), model, note)
            except DataError as error:
                raise DataError(f"data.mix {name}: {error}") from error
        return weighted(texts, {name: part.count for name, part in parts.items()})
    if kind == "python_corpus":
        key, documents, _ = text.python_documents(config, note)
        return TrainingTexts(key, lambda: _training_part(documents()))
    if kind in ("text", "records"):
        files, key = text.user_text(config, model, note)
        return TrainingTexts(key, lambda: _training_part(splits.sides(files)))
    if kind == "chat":
        return _chats(config, note)
    if kind == "hf":
        return _hub(config)
    from mupax.train.data.sources import published

    key, documents = published.text_documents(published.prepared(config, note), config, note)
    return TrainingTexts(key, lambda: _training_part(documents()))


def part_config(config: DataConfig, name: str) -> DataConfig:
    """Return the config of one part of a mixture.

    `data.field` names the text of records. Beside them, a chat has its messages where they usually are, and plain text
    has no field.

    Args:
        config: of the mixture.
        name: source of the part.
    """
    part = dataclasses.replace(config, name=name, mix=(), eval_examples=None)
    kinds = {other.source.partition(":")[0] for other in mix.parts(config.mix).values()}
    kind, _, path = name.partition(":")
    usual = type(config).field
    if kind == "chat" and kinds != {"chat"}:
        return dataclasses.replace(part, field=usual)
    if kind == "text" and config.field != usual and not _has_records(path, config.field):
        return dataclasses.replace(part, field=usual)
    return part


def _has_records(path: str, field: str) -> bool:
    try:
        return bool(
            user_files.files(path_of(path), "records", field, None, lambda line: None).records
        )
    except DataError:
        return False


def weighted(
    texts: Mapping[str, TrainingTexts], weights: Mapping[str, int] | None
) -> TrainingTexts:
    """Return several texts as one.

    Args:
        texts: by name.
        weights: share of the bytes that each text has. A small text is read again until the others are through. Without
            weights each text is read once.
    """
    shares = [f"{name} {texts[name].key} {weights[name] if weights else ''}" for name in texts]
    special = dict.fromkeys(token for name in texts for token in texts[name].special)

    def read() -> Iterator[bytes]:
        return _interleaved(
            [texts[name] for name in texts],
            [weights[name] if weights else 1 for name in texts],
            bool(weights),
        )

    return TrainingTexts(f"mix-{cache.digest(*shares)}", read, tuple(special))


def _interleaved(
    texts: Sequence[TrainingTexts], weights: Sequence[int], repeat: bool
) -> Iterator[bytes]:
    """Yield the documents of several texts so that each text has its share of the bytes at any time."""
    readers = [part.read() for part in texts]
    sizes = [0] * len(texts)
    unfinished = set(range(len(texts)))
    left = [*range(len(texts))]
    while unfinished and left:
        i = min(left, key=lambda number: sizes[number] / weights[number])
        document = next(readers[i], None)
        if document is not None:
            sizes[i] += len(document)
            yield document
            continue
        unfinished.discard(i)
        if repeat and sizes[i]:
            readers[i] = texts[i].read()
        else:
            left.remove(i)


def _training_part(documents: Documents) -> Iterator[bytes]:
    parts = documents["train"]
    for i in range(len(parts)):
        for content, _ in parts[i]:
            if isinstance(content, bytes):
                yield content


def _chats(config: DataConfig, note: cache.Note) -> TrainingTexts:
    """Return conversations as a chat template writes them, cut at its special tokens."""
    template = templates.find(config.tokenizer, config.chat_template)
    if template is None:
        raise DataError(
            f"{config.name} has no chat template; write one in jinja2, and its file as --data.chat-template FILE"
        )
    field = FIELD if config.field == type(config).field else config.field
    path = path_of(config.name.partition(":")[2])
    skip_broken = config.on_broken == "skip"
    files = user_files.files(
        path, "chat", field, None, note, skip_broken=skip_broken, limits=config.limits
    )
    every = contents.digest([path for _, path in files.every()], note)
    key = cache.digest(every, field, template.source, *map(str, template.tokens.items()))
    return TrainingTexts(
        f"chat-{key}", lambda: _written(template, splits.sides(files)), template.special_tokens
    )


def _written(template: Template, documents: Documents) -> Iterator[bytes]:
    cut = re.compile("|".join(map(re.escape, template.special_tokens)) or "(?!)")
    for messages in _training_part(documents):
        conversation = template.render(shown_to_template(json.loads(messages)), prompt=False)
        for part in cut.split(conversation):
            if part:
                yield part.encode()


def _hub(config: DataConfig) -> TrainingTexts:
    from mupax.train.data.streams import hub

    data_set = hub.opened(config.name, config.limits)
    documents = hub.HubDocuments(data_set, "train", config.field)

    def read() -> Iterator[bytes]:
        for chunk, _ in documents.after(None):
            for content, _ in chunk:
                if isinstance(content, bytes):
                    yield content

    return TrainingTexts(cache.digest(data_set.key, config.field), read)
