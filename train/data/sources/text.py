"""Opens text data by name: `python_corpus` and a user's own files, tokenized and packed in the cache."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain

from mupax.paths import path_of
from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.records import corpus
from mupax.train.data.text import packing, tokenizer
from mupax.train.data.text.batches import TokenData
from mupax.zoo.families import ModelConfig, TokenModel

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig


def records(source: Sequence[Mapping[str, Any]], feature: str) -> Any:
    """The documents of a TFDS data source, a record each, read one by one, as `packing.Documents` has them.

    Args:
        source: gives records by index.
        feature: name of the text in a record, str or bytes.
    """

    def document(record: Mapping[str, Any]) -> tuple[bytes, bool]:
        content = record[feature]
        return content.encode() if isinstance(content, str) else bytes(content), True

    return grain.MapDataset.source(source).map(document)


def python_corpus(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> TokenData:
    """The text of the Python standard library as batches.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them.
    """
    language_model(config.name, model)
    files = corpus.python_files()
    content = corpus.content_digest(files)

    def documents() -> packing.Documents:
        from mupax.train.data.records import builders

        builder = builders.embedded(builders.PythonCorpus, config.data_dir, note, config=content)
        return {side: records(builders.Source(builder, side), "text") for side in packing.SIDES}

    facts = {"python": platform.python_version(), "files": len(files), "text_digest": content}
    return open_text(config, model, seed, note, f"python_corpus-{content}", documents, facts)


def own_text(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> TokenData:
    """A user's text file or folder of text files as batches. Nothing is copied but the tokens.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is text:PATH.
    """
    language_model(config.name, model)
    files = corpus.text_files(path_of(config.name.removeprefix("text:")), note)
    content = corpus.stat_digest(files)

    def documents() -> packing.Documents:
        sides = corpus.text_pieces(files).items()
        return {side: grain.MapDataset.source(pieces).map(corpus.Piece.read) for side, pieces in sides}

    return open_text(config, model, seed, note, f"text-{content}", documents, {"files": len(files)})


def language_model(name: str, model: ModelConfig) -> TokenModel:
    """The model, if it reads text.

    Args:
        name: what an error calls the data.
        model: of the run.

    Raises:
        DataError: it reads images.
    """
    if not isinstance(model, TokenModel):
        raise DataError(f"data {name!r} is text, and the model reads images; write a decoder such as lm-tiny")
    return model


def open_text(
    config: DataConfig,
    model: ModelConfig,
    seed: int,
    note: cache.Note,
    key: str,
    documents: Callable[[], packing.Documents],
    facts: dict[str, Any],
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

    Raises:
        DataError: the tokenizer, the text or the model does not fit.
    """
    model = language_model(config.name, model)
    encoder = _tokenizer(config.tokenizer, key, model.vocab_size, documents, note)
    if encoder.vocab_size > model.vocab_size:
        raise DataError(
            f"tokenizer {config.tokenizer} has {encoder.vocab_size} tokens and the model {model.vocab_size}; "
            f"write --model.vocab-size {encoder.vocab_size}"
        )
    sides = packing.prepared(key, documents, encoder, note)
    digest = cache.digest(encoder.key, *(sides[side].digest for side in packing.SIDES))
    return TokenData(
        config,
        sides["train"],
        sides["eval"],
        encoder,
        seq_len=model.seq_len,
        seed=seed,
        facts={"digest": digest, **facts},
    )


def _tokenizer(
    name: str, key: str, vocab_size: int, documents: Callable[[], packing.Documents], note: cache.Note
) -> tokenizer.Tokenizer:
    """bytes, bpe:SIZE (trained on the training documents, kept in the cache) or a path."""
    if name == "bytes":
        return tokenizer.Bytes()
    size = tokenizer.bpe_size(name)
    if size is None:
        return tokenizer.Subwords(path_of(name))
    if size > vocab_size:  # before minutes of training
        raise DataError(f"data.tokenizer {name} and a model of {vocab_size} tokens; write --model.vocab-size {size}")
    path = cache.root() / "tokenizers" / f"bpe{size}-{key}.json"
    if not path.exists():
        with cache.lock(path.parent, path.stem, note):
            if not path.exists():
                note(f"training a tokenizer of {size:,} tokens")
                texts, part = documents()["train"], path.with_name(f"{path.name}.{os.getpid()}.part")
                tokenizer.train_bpe((texts[i][0] for i in range(len(texts))), size).save(str(part))
                part.replace(path)
    return tokenizer.Subwords(path)
