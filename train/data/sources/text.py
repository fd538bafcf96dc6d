"""Opens text data by name: `python_corpus` and a user's own files, tokenized and packed in the cache."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from mupax import disk
from mupax.disk import path_of
from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.records import contents, corpus, duplicates, splits, user_files
from mupax.train.data.text import named_tokenizers, packing, quoting, separators, tokenizer
from mupax.train.data.text.batches import TokenData
from mupax.zoo.families import ModelConfig, TokenModel

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig


_UNKNOWN, _LOOKED_AT = 0.01, 1 << 20
"""Share of unknown tokens above which it is said, and among how many."""


def records(source: Sequence[Mapping[str, Any]], feature: str) -> Any:
    """The documents of a TFDS data source, a record each, read one by one, as `packing.Documents` has them.

    Args:
        source: gives records by index.
        feature: name of the text in a record, str or bytes.
    """

    def part(record: Mapping[str, Any]) -> list[tuple[bytes, bool]]:
        content = record[feature]
        return [(content.encode() if isinstance(content, str) else bytes(content), True)]

    return grain.MapDataset.source(source).map(part)


def python_corpus(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> TokenData:
    """The text of the Python standard library as batches.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them.
    """
    language_model(config.name, model)
    return open_text(config, model, seed, note, *python_documents(config, note))


def python_documents(
    config: DataConfig, note: cache.Note
) -> tuple[str, Callable[[], packing.Documents], dict[str, Any]]:
    """Return the key, the documents and the facts of the Python standard library.

    Args:
        config, note: as `mupax.train.data.load` takes them.
    """
    files = corpus.python_files()
    content = corpus.content_digest(files)

    def documents() -> packing.Documents:
        from mupax.train.data.records import builders

        builder = builders.embedded(builders.PythonCorpus, config.data_dir, note, config=content)
        return {side: records(builders.Source(builder, side), "text") for side in packing.SIDES}

    facts = {"python": platform.python_version(), "files": len(files), "text_digest": content}
    return f"python_corpus-{content}", documents, facts


def own_files(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> TokenData:
    """A user's text, records and token ids, a file or a folder, as batches. Nothing is copied but the tokens.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is text:PATH or records:PATH.
    """
    files, key = user_text(config, model, note)
    facts = {"files": len(files.every())}
    return open_text(config, model, seed, note, key, lambda: splits.sides(files), facts, files)


def user_text(
    config: DataConfig, model: ModelConfig, note: cache.Note
) -> tuple[user_files.Files, str]:
    """A user's text, records and token ids, and a name of their content in the cache.

    Args:
        config, model, note: as `own_files` has them.

    Raises:
        DataError: what is there cannot be read, or does not fit the tokenizer.
    """
    language_model(config.name, model)
    kind, _, path = config.name.partition(":")
    encoder = named_tokenizers.opened(config.tokenizer, config.separator)
    vocab_size = encoder.vocab_size if encoder and config.tokenizer != "bytes" else None
    files = user_files.files(
        path_of(path),
        kind,
        config.field,
        vocab_size,
        note,
        skip_broken=config.on_broken == "skip",
        is_utf8=config.tokenizer != "bytes",
        limits=config.limits,
    )
    if isinstance(encoder, tokenizer.Ids) and (entries := [*files.text, *files.records]):
        raise DataError(
            f"{entries[0][0]} is text, and data.tokenizer {config.tokenizer} has a number of ids and no words; take it out of "
            f"{path}, or write data.tokenizer as the path of the tokenizer.json that made the ids"
        )
    if config.field != type(config).field and not files.records:
        raise DataError(
            f"data.field {config.field} is of records, and {path} has none; leave it out"
        )
    every = files.every()
    # A stream begins before all of its text is read.
    named = (
        corpus.stat_digest(every)
        if config.stream
        else contents.digest([path for _, path in every], note)
    )
    key = f"text-{named}"
    if files.records or files.ids:  # plain text has no field
        key = f"records-{cache.digest(key, config.field, kind)}"
    if reading := files.reading():
        key = f"{key.partition('-')[0]}-{cache.digest(key, *reading)}"
    files.broken.keep_in(f"{key}-utf8" if files.is_utf8 else key)
    return files, key


def language_model(name: str, model: ModelConfig) -> TokenModel:
    """The model, if it reads text.

    Args:
        name: what an error calls the data.
        model: of the run.

    Raises:
        DataError: it reads images.
    """
    if not isinstance(model, TokenModel):
        raise DataError(
            f"data {name!r} is text, and the model reads images; write a decoder such as lm-tiny"
        )
    return model


def open_text(
    config: DataConfig,
    model: ModelConfig,
    seed: int,
    note: cache.Note,
    key: str,
    documents: Callable[[], packing.Documents],
    facts: dict[str, Any],
    files: user_files.Files | None = None,
) -> TokenData:
    """Text data from documents by side of the split, prepared if it is not in the cache.

    Args:
        config: tokenizer and batches.
        model: whose vocabulary and sequence length the text must fit.
        seed: seed of the order.
        note: told what takes time.
        key: names the corpus and its content.
        documents: called only if something must be prepared from them.
        facts: more to record about the corpus.
        files: that the documents are from, if they are a user's.

    Raises:
        DataError: the tokenizer, the text or the model does not fit.
    """
    model = language_model(config.name, model)

    def texts() -> Iterator[bytes]:
        parts = documents()["train"]
        return (content for i in range(len(parts)) for content, _ in parts[i])

    encoder = opened_tokenizer(config, key, model.vocab_size, texts, note)
    check_vocabulary(config, encoder, model)
    sides = packing.prepared(key, documents, encoder, note)
    if files is not None:
        facts = facts | note_broken(files, note)
        if (
            files.text or files.ids or files.sides
        ):  # records that are split by content have a text on one side only
            duplicates.report(sides, encoder.separator, note)
    some = sides["train"].tokens[:_LOOKED_AT]
    if (
        encoder.unknown is not None
        and (share := float(np.mean(some == encoder.unknown)) if len(some) else 0.0) > _UNKNOWN
    ):
        note(
            f"caution: {share:.0%} of the tokens of {config.name} are the one for what {config.tokenizer} does not know"
        )
    if quoted := quoting.note_counts(
        note, config.name, [side.quoted for side in sides.values()], config.special_tokens
    ):
        facts = {**facts, "special_tokens_in_text": quoted}
    has_bytes = files is None or not files.ids
    separators.check(config, encoder, sides["train"].tokens, note, is_text=has_bytes)
    digest = cache.digest(encoder.key, *(sides[side].digest for side in packing.SIDES))
    return TokenData(
        config,
        sides["train"],
        sides["eval"],
        encoder,
        seq_len=model.seq_len,
        seed=seed,
        facts={"digest": digest, **facts},
        has_bytes=has_bytes,
    )


def note_broken(files: user_files.Files, note: cache.Note) -> dict[str, int]:
    """Tell the user what was left out as broken, and return its number as facts of the data.

    Args:
        files: as far as they are read.
        note: told a line per kind of entry.
    """
    for line in files.broken.summary():
        note(line)
    return {"broken": files.broken.count} if files.broken.count else {}


def check_vocabulary(config: DataConfig, encoder: tokenizer.Tokenizer, model: TokenModel) -> None:
    """Refuse a tokenizer that has more tokens than the model.

    Args:
        config: names it.
        encoder: it, opened.
        model: of the run.

    Raises:
        DataError: it has.
    """
    if encoder.vocab_size > model.vocab_size:
        raise DataError(
            f"tokenizer {config.tokenizer} has {encoder.vocab_size} tokens and the model {model.vocab_size}; "
            f"write --model.vocab-size {encoder.vocab_size}"
        )


def opened_tokenizer(
    config: DataConfig,
    key: str,
    vocab_size: int,
    texts: Callable[[], Iterator[bytes]],
    note: cache.Note,
    special: Sequence[str] = (),
) -> tokenizer.Tokenizer:
    """The tokenizer of a config; bpe:SIZE is trained on the first training documents and kept in the cache.

    Args:
        config: names it.
        key: names the corpus and its content.
        vocab_size: of the model.
        texts: gives the training documents.
        note: told what takes time.
        special: tokens of bpe:SIZE that are no text, beside the separator.

    Raises:
        DataError: there is no such tokenizer, or the model has no room for it.
    """
    if encoder := named_tokenizers.opened(
        config.tokenizer, config.separator, config.special_tokens
    ):
        return encoder
    size = named_tokenizers.bpe_size(config.tokenizer)
    assert size is not None
    if size > vocab_size:  # before minutes of training
        raise DataError(
            f"data.tokenizer {config.tokenizer} and a model of {vocab_size} tokens; write --model.vocab-size {size}"
        )
    path = cache.root() / "tokenizers" / f"bpe{size}-{key}.json"
    if not path.exists():
        with cache.lock(path.parent, path.stem, note):
            if not path.exists():
                note(f"training a tokenizer of {size:,} tokens")
                disk.write_whole(
                    path, named_tokenizers.train_bpe(texts(), size, special).to_str(pretty=True)
                )
    return tokenizer.Subwords(path, config.separator, config.special_tokens)
