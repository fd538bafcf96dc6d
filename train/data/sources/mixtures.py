"""Loader of data.mix: several texts as one data set, each with its share of the examples.

`data/mix.py` parses the command line, and `text/mixture.py` makes the batches.
"""

from __future__ import annotations

import dataclasses

from mupax.terminal import counted
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
    """Load the texts of `config.mix` as one data set, each with its share of the examples.

    Texts are prepared if needed. If the tokenizer is bpe:SIZE, it is trained on all texts first.
    The user is told the share of each text. The arguments are those of `mupax.train.data.load`, and
    `config.name` is mix.

    Raises:
        DataError: There are no texts, or one is missing, is not text or does not fit the model. The
            message has its name.
    """
    model = language_model(config.name, model)
    if not config.mix:
        raise DataError(
            "data.name mix has no texts; write them as "
            "--data.mix code=text:src:0.3 prose=records:books:0.7"
        )
    parts = mix.parts(config.mix)
    if named_tokenizers.bpe_size(config.tokenizer) is not None:
        # All parts must have one tokenizer, so it is trained on all of them and then named by its
        # path.
        config = dataclasses.replace(config, tokenizer=_trained_tokenizer(config, model, note))

    texts: dict[str, TextWindows | Conversations] = {}
    for name, part in parts.items():
        try:
            part_config = training_texts.part_config(config, part.source)
            text = sources.load(part_config, model, seed=seed, note=note)
        except DataError as error:
            raise DataError(f"data.mix {name}: {error}") from error
        if not isinstance(text, TextWindows | Conversations):
            raise DataError(f"data.mix {name}: {part.source} is no text; leave it out")
        texts[name] = text

    for name, part in parts.items():
        tokens = texts[name].facts.get("train_tokens")
        count = "a stream" if tokens is None else counted(tokens, "token", ",")
        note(f"{name}: {part.count / mix.BLOCK:.2%} of the examples, {count} of {part.source}")
    return Mixture(config, parts, texts, seed)


def _trained_tokenizer(config: DataConfig, model: TokenModel, note: cache.Note) -> str:
    """Return the path of a tokenizer bpe:SIZE that was trained on the texts of a mixture.

    Each text has its share of the training bytes. The tokenizer is trained only if it is not in the
    cache.

    Raises:
        DataError: A text cannot be read, or the tokenizer has more tokens than the model.
    """
    texts = training_texts.opened(config, model, note)
    encoder = opened_tokenizer(config, texts.key, model.vocab_size, texts.read, note, texts.special)
    return str(encoder.path)  # pyright: ignore[reportAttributeAccessIssue]
