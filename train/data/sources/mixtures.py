"""Opens several texts as one: `data.mix`."""

from __future__ import annotations

import dataclasses

from mupax.train import data as sources
from mupax.train.config.data import DataConfig
from mupax.train.data import cache, mix
from mupax.train.data.chats.conversations import Conversations
from mupax.train.data.interface import DataError
from mupax.train.data.sources import training_texts
from mupax.train.data.sources.text import language_model, opened_tokenizer
from mupax.train.data.text import named_tokenizers
from mupax.train.data.text.batches import TextWindows
from mupax.train.data.text.mixture import Mixture
from mupax.zoo.families import ModelConfig, TokenModel


def mixture(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> Mixture:
    """The texts of `config.mix` in their shares, each prepared if it is not.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them; `config.name` is mix.

    Raises:
        DataError: there are none, one is no text, does not fit, or has another tokenizer; its name stands before the reason.
    """
    model = language_model(config.name, model)
    if not config.mix:
        raise DataError(
            "data.name mix has no texts; write them as --data.mix code=text:src:0.3 prose=records:books:0.7"
        )
    parts, texts = mix.parts(config.mix), {}
    if named_tokenizers.bpe_size(config.tokenizer) is not None:
        config = dataclasses.replace(config, tokenizer=_trained_tokenizer(config, model, note))
    for name, part in parts.items():
        try:
            text = sources.load(
                training_texts.part_config(config, part.source), model, seed=seed, note=note
            )
        except DataError as error:
            raise DataError(f"data.mix {name}: {error}") from error
        if not isinstance(text, TextWindows | Conversations):
            raise DataError(f"data.mix {name}: {part.source} is no text; leave it out")
        texts[name] = text
    for name, part in parts.items():
        tokens = texts[name].facts.get("train_tokens")
        count = "a stream" if tokens is None else f"{tokens:,} tokens"
        note(f"{name}: {part.count / mix.BLOCK:.2%} of the examples, {count} of {part.source}")
    return Mixture(config, parts, texts, seed)


def _trained_tokenizer(config: DataConfig, model: TokenModel, note: cache.Note) -> str:
    """Return the path of a tokenizer that is trained on the parts of a mixture, each by its weight.

    Raises:
        DataError: a part cannot be read, or the model has no room for the tokens.
    """
    texts = training_texts.opened(config, model, note)
    encoder = opened_tokenizer(config, texts.key, model.vocab_size, texts.read, note, texts.special)
    return str(encoder.path)  # pyright: ignore[reportAttributeAccessIssue]
