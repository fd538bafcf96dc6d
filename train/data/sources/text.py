"""Loaders of text: `python_corpus` and a user's own files, tokenized and packed in the cache.

Other loaders of text use `opened_tokenizer` and the checks of this file.
"""

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


_UNKNOWN = 0.01
"""Share of unknown tokens above which the user is warned."""
_LOOKED_AT = 1 << 20
"""Number of training tokens, from the first on, among which unknown tokens are counted."""


def records(source: Sequence[Mapping[str, Any]], feature: str) -> Any:
    """Return the texts of a TFDS data source in the form that packing reads (`packing.Documents`).

    The result is a sequence with [(text as bytes, True)] for each record. True says that the
    document ends with the text.

    Args:
        source: Records by index. A record is read when the result is indexed.
        feature: Name of the text in a record, which is a str or bytes.
    """

    def documents_of(record: Mapping[str, Any]) -> list[tuple[bytes, bool]]:
        content = record[feature]
        encoded = content.encode() if isinstance(content, str) else bytes(content)
        return [(encoded, True)]

    return grain.MapDataset.source(source).map(documents_of)


def python_corpus(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> TokenData:
    """Load the source code of the Python standard library as batches of text.

    It is prepared, tokenized and packed in the cache if needed. The arguments are those of
    `mupax.train.data.load`.
    """
    language_model(config.name, model)
    key, documents, facts = python_documents(config, note)
    return open_text(config, model, seed, note, key, documents, facts)


def python_documents(
    config: DataConfig, note: cache.Note
) -> tuple[str, Callable[[], packing.Documents], dict[str, Any]]:
    """Return what is needed to pack the Python standard library as text.

    The arguments are those of `mupax.train.data.load`.

    Returns:
        Key of the corpus in the cache; a function that returns the documents by "train" and "eval",
        and prepares the corpus on disk if needed; and the facts to record: `python` (version),
        `files` (number of files) and `text_digest`.
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
    """Load a user's text, records and token ids as batches.

    They are in a file or a folder, and are read in place. Only the tokens are copied, into the
    cache.

    The arguments are those of `mupax.train.data.load`. `config.name` is text:PATH or records:PATH.
    """
    files, key = user_text(config, model, note)
    facts = {"files": len(files.every())}
    return open_text(config, model, seed, note, key, lambda: splits.sides(files), facts, files)


def user_text(
    config: DataConfig, model: ModelConfig, note: cache.Note
) -> tuple[user_files.Files, str]:
    """Find a user's text, records and token ids. Return them with a key for the cache.

    The key is a digest of the files' contents, or of their sizes and times for a stream.

    The arguments are those of `mupax.train.data.load`. `config.name` is text:PATH or records:PATH.

    Raises:
        DataError: Files cannot be read, or do not fit the tokenizer.
    """
    language_model(config.name, model)
    kind, _, path = config.name.partition(":")
    encoder = named_tokenizers.opened(config.tokenizer, config.separator)
    vocab_size = None
    if encoder and config.tokenizer != "bytes":
        vocab_size = encoder.vocab_size
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

    texts = [*files.text, *files.records]
    if isinstance(encoder, tokenizer.Ids) and texts:
        raise DataError(
            f"{texts[0][0]} is text, and data.tokenizer {config.tokenizer} has a number of ids and "
            f"no words; take it out of {path}, or write data.tokenizer as the path of the "
            "tokenizer.json that made the ids"
        )
    if config.field != type(config).field and not files.records:
        raise DataError(
            f"data.field {config.field} names a field of records (JSON lines or Parquet), and "
            f"{path} has none; leave it out"
        )

    key = _content_key(config, kind, files, note)
    # Whether text that is not UTF-8 is broken depends on the tokenizer, so each case has its own
    # log.
    files.broken.keep_in(f"{key}-utf8" if files.is_utf8 else key)
    return files, key


def _content_key(config: DataConfig, kind: str, files: user_files.Files, note: cache.Note) -> str:
    """Return the key of a user's files in the cache.

    It is a digest of the contents of the files and of the settings under which they are read. With
    `config.stream`, the digest has paths, sizes and times instead of contents, which are not read.

    Args:
        kind: "text" or "records", the word before the path in data.name.
    """
    all_files = files.every()
    if config.stream:
        # A stream starts before all text is read, so it is identified by paths, sizes and times of
        # files.
        content = corpus.stat_digest(all_files)
    else:
        content = contents.digest([path for _, path in all_files], note)

    key = f"text-{content}"
    if files.records or files.ids:
        # Plain text does not depend on the field, so its key leaves the field out.
        key = f"records-{cache.digest(key, config.field, kind)}"
    reading = files.reading()
    if reading:
        prefix = key.partition("-")[0]
        key = f"{prefix}-{cache.digest(key, *reading)}"
    return key


def language_model(name: str, model: ModelConfig) -> TokenModel:
    """Return the model settings if the model reads text.

    Args:
        name: Name of the data for error messages.

    Raises:
        DataError: The model reads images.
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
    """Return text data made from documents. Tokenize and pack them if they are not in the cache.

    The user is told about broken entries, evaluation documents that are also in training, unknown
    and special tokens, and missing separators.

    Args:
        model: Model settings that the text must fit: vocabulary and sequence length.
        note: Function that takes one line of text about work that takes long.
        key: Name of the corpus and its content in the cache.
        documents: Function that returns the documents by "train" and "eval". It is called only if
            the tokenizer must be trained or the text must be packed.
        facts: Facts to record about the corpus, in addition to its digest.
        files: User's files from which the documents are read. None for a published corpus.

    Raises:
        DataError: The tokenizer, the text or the model does not fit.
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
        # Records that are split by the hash of their text have equal texts on one side only.
        if files.text or files.ids or files.sides:
            duplicates.report(sides, encoder.separator, note)
    _note_unknown(config, encoder, sides["train"].tokens[:_LOOKED_AT], note)
    counts = [side.quoted for side in sides.values()]
    quoted = quoting.note_counts(note, config.name, counts, config.special_tokens)
    if quoted:
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


def _note_unknown(
    config: DataConfig, encoder: tokenizer.Tokenizer, tokens: np.ndarray, note: cache.Note
) -> None:
    """Warn the user if more than 1 % of `tokens` are the tokenizer's unknown token."""
    if encoder.unknown is None or not len(tokens):
        return
    share = float(np.mean(tokens == encoder.unknown))
    if share > _UNKNOWN:
        note(
            f"caution: {share:.0%} of the tokens of {config.name} are the one for what "
            f"{config.tokenizer} does not know"
        )


def note_broken(files: user_files.Files, note: cache.Note) -> dict[str, int]:
    """Tell the user how many broken entries (files, texts and records) were left out.

    Args:
        files: User's files. What was read so far is counted.
        note: Function that takes one line of text per kind of broken entry.

    Returns:
        {"broken": number of entries}, which is recorded among the facts of the data. {} for none.
    """
    for line in files.broken.summary():
        note(line)
    return {"broken": files.broken.count} if files.broken.count else {}


def check_vocabulary(config: DataConfig, encoder: tokenizer.Tokenizer, model: TokenModel) -> None:
    """Raise an error if the tokenizer has more tokens than the model. Fewer are fine.

    Raises:
        DataError: The tokenizer has more tokens. The message says what to write.
    """
    if encoder.vocab_size > model.vocab_size:
        raise DataError(
            f"tokenizer {config.tokenizer} has {encoder.vocab_size} tokens and the model "
            f"{model.vocab_size}; write --model.vocab-size {encoder.vocab_size}"
        )


def opened_tokenizer(
    config: DataConfig,
    key: str,
    vocab_size: int,
    texts: Callable[[], Iterator[bytes]],
    note: cache.Note,
    special: Sequence[str] = (),
) -> tokenizer.Tokenizer:
    """Return the tokenizer that `data.tokenizer` names.

    A tokenizer bpe:SIZE is trained on the training documents, unless it is in the cache.

    Args:
        key: Name of the corpus and its content in the cache.
        vocab_size: Number of tokens of the model.
        texts: Function that yields the training documents. It is called only to train bpe:SIZE.
        note: Function that takes one line of text about work that takes long.
        special: Tokens of bpe:SIZE that stand for no text, in addition to the separator.

    Raises:
        DataError: There is no such tokenizer, or bpe:SIZE has more tokens than the model.
    """
    encoder = named_tokenizers.opened(config.tokenizer, config.separator, config.special_tokens)
    if encoder:
        return encoder

    size = named_tokenizers.bpe_size(config.tokenizer)
    assert size is not None
    # Refused here, and not by `check_vocabulary` after minutes of training.
    if size > vocab_size:
        raise DataError(
            f"data.tokenizer {config.tokenizer} and a model of {vocab_size} tokens; "
            f"write --model.vocab-size {size}"
        )
    path = cache.root() / "tokenizers" / f"bpe{size}-{key}.json"
    if not path.exists():
        with cache.lock(path.parent, path.stem, note):
            # Another process may have trained it meanwhile.
            if not path.exists():
                note(f"training a tokenizer of {size:,} tokens")
                library = named_tokenizers.train_bpe(texts(), size, special)
                disk.write_whole(path, library.to_str(pretty=True))
    return tokenizer.Subwords(path, config.separator, config.special_tokens)
