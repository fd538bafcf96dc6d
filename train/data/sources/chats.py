"""Opens a user's conversations: rendered by a chat template, tokenized and packed in the cache."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from mupax.disk import path_of
from mupax.train.data import cache
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.chats.conversations import Conversations
from mupax.train.data.chats.records import FIELD
from mupax.train.data.interface import DataError
from mupax.train.data.records import contents, duplicates, splits, user_files
from mupax.train.data.sources import training_texts
from mupax.train.data.sources.text import (
    check_vocabulary,
    language_model,
    note_broken,
    opened_tokenizer,
)
from mupax.train.data.text import named_tokenizers, packing, quoting, tokenizer
from mupax.zoo.families import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig

_NAMED = 5


def own_chats(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Conversations:
    """A user's conversations, a file or a folder of JSON lines and Parquet, as batches.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is chat:PATH.

    Raises:
        DataError: there is no template, it cannot tell answers, or what is there does not fit.
    """
    model = language_model(config.name, model)
    template = templates.find(config.tokenizer, config.chat_template)
    ending = template.special_tokens_at_end if template else ()
    encoder = named_tokenizers.opened(
        config.tokenizer, config.separator, config.special_tokens, ending
    )
    if isinstance(encoder, tokenizer.Ids):
        raise DataError(
            f"data.tokenizer is {config.tokenizer}, a number of ids and no words; write bytes, bpe:SIZE, or the path of a "
            "tokenizer.json"
        )
    if template is None:
        raise DataError(
            f"there is no chat template beside data.tokenizer {config.tokenizer}; write one in jinja2, and its file as "
            "--data.chat-template FILE"
        )
    if encoder is None:
        texts = training_texts.opened(config, model, note)
        encoder = opened_tokenizer(
            config, texts.key, model.vocab_size, texts.read, note, texts.special
        )
    check_vocabulary(config, encoder, model)
    field = FIELD if config.field == type(config).field else config.field
    path = path_of(config.name.partition(":")[2])
    skip_broken = config.on_broken == "skip"
    files = user_files.files(
        path, "chat", field, None, note, skip_broken=skip_broken, limits=config.limits
    )
    tokens = ChatTokens(encoder, template, config.loss_on)
    # The version of the reading: caches made before messages had weights hold other targets.
    every = contents.digest([path for _, path in files.every()], note)
    content = cache.digest(every, field, "weights", *files.reading())
    key = f"chat-{content}"
    files.broken.keep_in(key)
    sides = packing.prepared(key, lambda: splits.sides(files), tokens, note)
    broken = note_broken(files, note)
    if files.sides:
        duplicates.report(sides, tokens.separator, note)
    without = [where for _, file in files.records for where in file.without_answer]  # pyright: ignore
    if without:
        more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
        note(
            f"left out {len(without)} records, in which no assistant speaks that is trained on: "
            f"{', '.join(without[:_NAMED])}{more}"
        )
    counts = [side.quoted for side in sides.values()]
    quoted = quoting.note_counts(note, config.name, counts, config.special_tokens)
    digest = cache.digest(tokens.key, *(sides[side].digest for side in packing.SIDES))
    conversations = Conversations(
        config,
        sides["train"],
        sides["eval"],
        tokens,
        seq_len=model.seq_len,
        seed=seed,
        facts={
            "digest": digest,
            "files": len(files.every()),
            **broken,
            **({"special_tokens_in_text": quoted} if quoted else {}),
            "chat_template": hashlib.sha256(template.source.encode()).hexdigest(),
        },
    )
    for name, side in (
        ("training", conversations.train_windows),
        ("evaluation", conversations.eval_windows),
    ):
        lost = f"; {side.cut} longer than {model.seq_len + 1} tokens were cut" if side.cut else ""
        lost += (
            f"; {side.without_target} left out, without a token of an answer in it"
            if side.without_target
            else ""
        )
        note(f"{name}: {len(side.spans):,} conversations in {side.count:,} windows{lost}")
    return conversations
