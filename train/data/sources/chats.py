"""Loader of a user's conversations: rendered by a chat template, tokenized and packed in the cache.

The folder data/chats/ has the template, the encoder that marks answers, and the batches.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from mupax.terminal import counted
from mupax.train.data import cache
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import ChatTokens
from mupax.train.data.chats.conversations import Conversations, Windows
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
"""Number of left-out records that a message lists."""


def own_chats(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Conversations:
    """Load a user's conversations as batches, from a file or folder of JSON lines and Parquet.

    Conversations that are not in the cache are tokenized and packed first. The arguments are those
    of `mupax.train.data.load`. `config.name` is chat:PATH.

    Raises:
        DataError: There is no chat template, the template does not tell which part of its text is
            an answer, or the files cannot be read or do not fit the model.
    """
    model = language_model(config.name, model)
    template = templates.find(config.tokenizer, config.chat_template)
    encoder = _given_tokenizer(config, template)
    if template is None:
        raise DataError(
            f"there is no chat template beside data.tokenizer {config.tokenizer}; write one in "
            "jinja2, and its file as --data.chat-template FILE"
        )
    if encoder is None:
        texts = training_texts.opened(config, model, note)
        encoder = opened_tokenizer(
            config, texts.key, model.vocab_size, texts.read, note, texts.special
        )
    check_vocabulary(config, encoder, model)

    files, field = training_texts.chat_files(config, note)
    tokens = ChatTokens(encoder, template, config.loss_on)
    # "weights" names the version of this reader. Caches from before messages had weights hold other
    # targets.
    all_content = contents.digest([path for _, path in files.every()], note)
    content = cache.digest(all_content, field, "weights", *files.reading())
    key = f"chat-{content}"
    files.broken.keep_in(key)
    sides = packing.prepared(key, lambda: splits.sides(files), tokens, note)

    facts: dict[str, Any] = {"files": len(files.every()), **note_broken(files, note)}
    if files.sides:
        duplicates.report(sides, tokens.separator, note)
    _note_without_answer(files, note)
    counts = [side.quoted for side in sides.values()]
    quoted = quoting.note_counts(note, config.name, counts, config.special_tokens)
    if quoted:
        facts["special_tokens_in_text"] = quoted
    digest = cache.digest(tokens.key, *(sides[side].digest for side in packing.SIDES))
    template_digest = hashlib.sha256(template.source.encode()).hexdigest()
    conversations = Conversations(
        config,
        sides["train"],
        sides["eval"],
        tokens,
        seq_len=model.seq_len,
        seed=seed,
        facts={"digest": digest, **facts, "chat_template": template_digest},
    )
    _note_windows("training", conversations.train_windows, model.seq_len, note)
    _note_windows("evaluation", conversations.eval_windows, model.seq_len, note)
    return conversations


def _given_tokenizer(
    config: DataConfig, template: templates.Template | None
) -> tokenizer.Tokenizer | None:
    """Return the tokenizer that `data.tokenizer` names, or None for bpe:SIZE.

    A tokenizer bpe:SIZE does not exist before it is trained on the data.

    Args:
        template: Chat template, whose tokens at the end of an answer count as special tokens.

    Raises:
        DataError: The tokenizer is ids:SIZE, which cannot encode text, or cannot be opened.
    """
    ending = template.special_tokens_at_end if template else ()
    encoder = named_tokenizers.opened(
        config.tokenizer, config.separator, config.special_tokens, ending
    )
    if isinstance(encoder, tokenizer.Ids):
        raise DataError(
            f"data.tokenizer is {config.tokenizer}, a number of ids and no words; write bytes, "
            "bpe:SIZE, or the path of a tokenizer.json"
        )
    return encoder


def _note_without_answer(files: user_files.Files, note: cache.Note) -> None:
    """Tell the user which records were left out because they have no answer to train on."""
    unanswered: list[str] = []
    for _, file in files.records:
        unanswered += file.without_answer  # pyright: ignore
    if not unanswered:
        return
    more = f" and {len(unanswered) - _NAMED} more" if len(unanswered) > _NAMED else ""
    note(
        f"left out {counted(len(unanswered), 'record')}, in "
        "which no assistant speaks that is trained on: "
        f"{', '.join(unanswered[:_NAMED])}{more}"
    )


def _note_windows(name: str, side: Windows, seq_len: int, note: cache.Note) -> None:
    """Tell the user how many conversations a part has, and how many were cut or left out.

    Args:
        name: Name of the part, "training" or "evaluation".
        side: Windows of the conversations of this part.
    """
    lost = ""
    if side.cut:
        lost += f"; {side.cut} longer than {seq_len + 1} tokens were cut"
    if side.without_target:
        lost += f"; {side.without_target} left out, without a token of an answer in it"
    note(
        f"{name}: {counted(len(side.spans), 'conversation', ',')} "
        f"in {counted(side.count, 'window', ',')}{lost}"
    )
