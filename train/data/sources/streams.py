"""Loaders of text that is tokenized while it is trained on (streams).

Streams are data sets of the package `datasets`, and a user's own files with data.stream. The
training text of a stream is divided into lanes. A lane is a share of its files, and is tokenized on
its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mupax.terminal import counted
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
"""Smallest number of evaluation tokens, unless data.eval_examples is set.

They are tokenized before the first training step.
"""


class Corpus(NamedTuple):
    """Documents of a stream, opened but not yet tokenized.

    Attributes:
        facts: Facts to record about the corpus.
    """

    key: str
    """Key of the content in the cache. It may be different on other hosts."""
    identity: str
    """Digest that identifies the content and is the same on every host."""
    lanes: Sequence[Documents]
    """Training documents of each lane. A lane is a share of the files, tokenized on its own."""
    train: Documents
    """Training documents of all lanes."""
    held_out: Documents
    """Evaluation documents."""
    facts: dict[str, Any]
    has_bytes: bool = True
    """True if all of the content is text and not ids, so that tokens can be counted in bytes."""
    broken: BrokenLog | None = None
    """Log of the documents that cannot be used and are left out. It grows while text is read."""


def own_files(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Stream:
    """Load a user's text, records and token ids as a stream, tokenized while it is trained on.

    The user is told of evaluation files that are also training files. The arguments are those of
    `mupax.train.data.load`. `config.name` is text:PATH or records:PATH.
    """
    read, key = text.user_text(config, model, note)
    by_file = splits.by_file(read)
    train_side, eval_side = splits.SIDES
    train = [file for file in by_file if train_side in file.sides]
    held_out = [file for file in by_file if eval_side in file.sides]
    duplicates.report_files(train, held_out, note)

    sizes = (f"{name} {file.stat().st_size}" for name, file in read.every())
    identity = cache.digest(*sizes, config.field, *read.reading())
    shares = files.lanes(train, config.batch_size)
    # With one lane, `lanes` returns all files, in the order of a hash of their names.
    (all_train,) = files.lanes(train, 1)
    (all_held_out,) = files.lanes(held_out, 1)
    corpus = Corpus(
        key=key,
        identity=identity,
        lanes=[files.FileDocuments(share, "train") for share in shares],
        train=files.FileDocuments(all_train, "train"),
        held_out=files.FileDocuments(all_held_out, "eval"),
        facts={"files": len(by_file)},
        has_bytes=not read.ids,
        broken=read.broken,
    )
    return _opened(config, model, seed, note, corpus)


def data_set(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Stream:
    """Load a data set of the package `datasets` as a stream, tokenized while it is trained on.

    The arguments are those of `mupax.train.data.load`. `config.name` is hf:NAME[@REVISION][:SUBSET]
    or hf:FOLDER.
    """
    text.language_model(config.name, model)
    # A wrong tokenizer must be refused before the network is asked.
    named_tokenizers.opened(config.tokenizer, config.separator)
    source = hub.opened(config.name, config.limits)
    field = config.field
    note(source.line)
    key = cache.digest(source.key, field)
    broken = BrokenLog()
    broken.keep_in(key)
    # Lanes have equal parts of a batch and whole shards, so their number divides both.
    count = math.gcd(config.batch_size, source.splits["train"].num_shards, files.MOST_LANES)
    shards = []
    for i in range(count):
        shards.append(hub.HubDocuments(source, "train", field, (i, count), broken))
    corpus = Corpus(
        key=key,
        identity=cache.digest(source.revision, field),
        lanes=shards,
        train=hub.HubDocuments(source, "train", field),
        held_out=hub.HubDocuments(source, "eval", field, broken=broken),
        facts={"revision": source.revision},
        broken=broken,
    )
    return _opened(config, model, seed, note, corpus)


def _opened(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note, corpus: Corpus
) -> Stream:
    """Return the batches of a stream, after its evaluation text and first text are tokenized.

    A tokenizer bpe:SIZE is trained first. The user is told about broken documents, special tokens
    in the texts and missing separators.

    Raises:
        DataError: The tokenizer, the text or the model does not fit.
    """
    model = text.language_model(config.name, model)

    def texts() -> Iterator[bytes]:
        for chunk, _ in corpus.train.after(None):
            for content, _ in chunk:
                if isinstance(content, bytes):
                    yield content

    encoder = text.opened_tokenizer(config, corpus.key, model.vocab_size, texts, note)
    text.check_vocabulary(config, encoder, model)
    folder = cache.folder(cache.root() / "streams" / f"{corpus.key}-{encoder.key}{encoder.variant}")

    evaluation = StreamShard(folder / "eval", corpus.held_out, encoder)
    eval_tokens = EVAL_TOKENS
    if config.eval_examples is not None:
        eval_tokens = config.eval_examples * model.seq_len + 1
    held_out = evaluation.first(eval_tokens, note)

    count = len(corpus.lanes)
    lanes = []
    for i, documents in enumerate(corpus.lanes):
        lanes.append(StreamShard(folder / f"train-{i}-of-{count}", documents, encoder))
    # An error that every record has is raised here, before the run starts.
    beginning = lanes[0].first(1, note)
    if lanes[0].ended:
        check_length(config, "training", len(beginning.tokens), 2 * model.seq_len, model.seq_len)

    if corpus.broken is not None:
        for line in corpus.broken.summary():
            note(f"so far: {line}")
    counts = [held_out.quoted, beginning.quoted]
    name_so_far = f"{config.name}, as far as it is read,"
    quoted = quoting.note_counts(note, name_so_far, counts, config.special_tokens)
    separators.check(config, encoder, held_out.tokens, note, is_text=corpus.has_bytes)
    note(
        f"{config.name} is tokenized while it is trained on, in {count} "
        f"lane{'s' if count > 1 else ''}; "
        f"{counted(len(held_out.tokens), 'token', ',')} of it to evaluate on"
    )

    # The digest of the first step identifies the evaluation text, however much of it is used.
    first_step = evaluation.first(1, note)
    digest = cache.digest("stream", corpus.identity, encoder.key, first_step.digest)
    facts = {"digest": digest, "lanes": count, **corpus.facts}
    if quoted:
        facts["special_tokens_in_text"] = quoted
    return Stream(
        config,
        lanes,
        held_out,
        encoder,
        seq_len=model.seq_len,
        seed=seed,
        facts=facts,
        has_bytes=corpus.has_bytes,
        note=note,
    )
