"""Opens text that is tokenized while it is trained on: data sets of `datasets`, and a user's own files under data.stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mupax.train.data import cache
from mupax.train.data.records import duplicates, splits
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.sources import text
from mupax.train.data.streams import files, hub
from mupax.train.data.streams.batches import Stream
from mupax.train.data.streams.lanes import Documents, StreamShard
from mupax.train.data.text import named_tokenizers, quoting, separators
from mupax.train.data.text.batches import check_length
from mupax.zoo.families import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig

EVAL_TOKENS = 1 << 20
"""Of evaluation text, which is tokenized before the first step, unless data.eval_examples says how much is wanted."""


class Corpus(NamedTuple):
    """What a stream is made of."""

    key: str
    """Names the content in the cache of this host."""
    identity: str
    """Names it on every host."""
    lanes: Sequence[Documents]
    train: Documents
    """All of the lanes' documents."""
    held_out: Documents
    facts: dict[str, Any]
    has_bytes: bool = True
    """Whether all of it is text, so that tokens can be counted in bytes."""
    broken: BrokenLog | None = None
    """What is left out as broken, as far as it was read."""


def own_files(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Stream:
    """A user's text, records and token ids as they are tokenized.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is text:PATH or records:PATH.
    """
    read, key = text.user_text(config, model, note)
    by_file = splits.by_file(read)
    train, held_out = ([file for file in by_file if side in file.sides] for side in splits.SIDES)
    duplicates.report_files(train, held_out, note)
    corpus = Corpus(
        key=key,
        identity=cache.digest(
            *(f"{name} {file.stat().st_size}" for name, file in read.every()),
            config.field,
            *read.reading(),
        ),
        lanes=[
            files.FileDocuments(share, "train") for share in files.lanes(train, config.batch_size)
        ],
        train=files.FileDocuments(files.lanes(train, 1)[0], "train"),
        held_out=files.FileDocuments(files.lanes(held_out, 1)[0], "eval"),
        facts={"files": len(by_file)},
        has_bytes=not read.ids,
        broken=read.broken,
    )
    return _opened(config, model, seed, note, corpus)


def data_set(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Stream:
    """A data set that `datasets` reads, streamed.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is hf:NAME[@REVISION][:SUBSET] or hf:FOLDER.
    """
    text.language_model(config.name, model)
    named_tokenizers.opened(config.tokenizer, config.separator)  # before the network is asked
    source, field = hub.opened(config.name, config.limits), config.field
    note(source.line)
    key = cache.digest(source.key, field)
    broken = BrokenLog()
    broken.keep_in(key)
    count = math.gcd(config.batch_size, source.splits["train"].num_shards, files.MOST_LANES)
    corpus = Corpus(
        key=key,
        identity=cache.digest(source.revision, field),
        lanes=[hub.HubDocuments(source, "train", field, (i, count), broken) for i in range(count)],
        train=hub.HubDocuments(source, "train", field),
        held_out=hub.HubDocuments(source, "eval", field, broken=broken),
        facts={"revision": source.revision},
        broken=broken,
    )
    return _opened(config, model, seed, note, corpus)


def _opened(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note, corpus: Corpus
) -> Stream:
    """The stream of a corpus, its evaluation text tokenized.

    Raises:
        DataError: the tokenizer, the text or the model does not fit.
    """
    model = text.language_model(config.name, model)

    def texts() -> Iterator[bytes]:
        chunks = corpus.train.after(None)
        return (
            content for chunk, _ in chunks for content, _ in chunk if isinstance(content, bytes)
        )

    encoder = text.opened_tokenizer(config, corpus.key, model.vocab_size, texts, note)
    text.check_vocabulary(config, encoder, model)
    folder = cache.folder(cache.root() / "streams" / f"{corpus.key}-{encoder.key}{encoder.variant}")
    evaluation = StreamShard(folder / "eval", corpus.held_out, encoder)
    eval_tokens = (
        EVAL_TOKENS if config.eval_examples is None else config.eval_examples * model.seq_len + 1
    )
    held_out = evaluation.first(eval_tokens, note)
    count = len(corpus.lanes)
    lanes = [
        StreamShard(folder / f"train-{i}-of-{count}", each, encoder)
        for i, each in enumerate(corpus.lanes)
    ]
    beginning = lanes[0].first(1, note)  # what is wrong with every record is wrong with the first
    if lanes[0].ended:
        check_length(config, "training", len(beginning.tokens), 2 * model.seq_len, model.seq_len)
    for line in corpus.broken.summary() if corpus.broken is not None else ():
        note(f"so far: {line}")
    some = [held_out.quoted, beginning.quoted]
    quoted = quoting.note_counts(
        note, f"{config.name}, as far as it is read,", some, config.special_tokens
    )
    separators.check(config, encoder, held_out.tokens, note, is_text=corpus.has_bytes)
    note(
        f"{config.name} is tokenized while it is trained on, in {count} lane{'s' if count > 1 else ''}; "
        f"{len(held_out.tokens):,} tokens of it to evaluate on"
    )
    digest = cache.digest("stream", corpus.identity, encoder.key, evaluation.first(1, note).digest)
    return Stream(
        config,
        lanes,
        held_out,
        encoder,
        seq_len=model.seq_len,
        seed=seed,
        facts={
            "digest": digest,
            "lanes": count,
            **corpus.facts,
            **({"special_tokens_in_text": quoted} if quoted else {}),
        },
        has_bytes=corpus.has_bytes,
        note=note,
    )
