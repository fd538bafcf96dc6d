"""Token ids that begin, end and pad the texts of a published model, from its JSON files.

The fields and their defaults are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mupax import MupaxError
from mupax.disk import read_json

FILE = "generation_config.json"
_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mbart": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "forced_eos_token_id": 2},
    "t5": {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
    "mt5": {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
}
"""Defaults of encoder-decoders by model_type, for fields that config.json lacks."""
_DECODERS: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "gpt_neox": {"bos_token_id": 0, "eos_token_id": 2},
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma2": {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    "gemma3_text": {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}
"""Defaults of decoders by model_type, for fields that config.json lacks."""


class TextIdsError(MupaxError):
    """Token ids that the files lack, or that are not valid. The message says which."""


class TextIds(NamedTuple):
    """Token ids with which an encoder-decoder writes a text."""

    start: int
    """Token that the decoder reads before the first token of a text."""
    end: int
    """Token that ends a text."""
    pad: int
    """Token that fills up an input."""
    first: int | None = None
    """Forced first token of every text, such as a language."""
    last: int | None = None
    """Forced last token of a text that reaches the maximum length."""


def recorded(folder: Path, fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the token ids in a published model's JSON files, by config.json's names.

    Values of generation_config.json replace those of config.json. If that file is there, forced
    tokens are read from it alone. Ids that neither file has are the defaults of `transformers` for
    an encoder-decoder of this model_type, or are left out.

    Args:
        folder: folder of the weights, with generation_config.json if there is one.
        fields: content of config.json, with or without ids.

    Raises:
        TextIdsError: a field is not a token id.
        JsonError: a file is not JSON.
    """
    values: dict[str, Any] = {**_DEFAULTS.get(str(fields.get("model_type")), {}), **fields}
    if (folder / FILE).is_file():
        values = {name: value for name, value in values.items() if not name.startswith("forced_")}
        for name, value in read_json(folder / FILE).items():
            if value is not None:
                values[name] = value

    ids = {}
    for name in _FIELDS:
        value = values.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            continue
        # bool is a subclass of int and no token id.
        if type(value) is not int or value < 0:
            raise TextIdsError(f"{folder}: {name} is {value!r:.60}; write one token's id")
        ids[name] = value
    return ids


def of_decoder(fields: Mapping[str, Any], vocab: int) -> dict[str, int | list[int]]:
    """Return the token ids of a decoder's config.json by their names there.

    Ids that config.json lacks are the defaults of `transformers` for its model_type, or are left
    out. Several tokens may end a text, as a list.

    Args:
        fields: content of config.json. Values that are no tokens of the model are left out, such as
            -1 for pad_token_id in older files.
        vocab: number of tokens of the model, which bounds the ids.
    """
    values = {**_DECODERS.get(str(fields.get("model_type")), {}), **fields}
    ids: dict[str, int | list[int]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        numbers = value if isinstance(value, list) else [value]
        if value is None or not numbers:
            continue
        if all(type(number) is int and 0 <= number < vocab for number in numbers):
            ids[name] = value
    return ids


def of(ids: Mapping[str, Any], path: Path, vocab: int) -> TextIds:
    """Return the token ids of an encoder-decoder by their purpose.

    Without `decoder_start_token_id` the decoder starts with the begin token. Without `pad_token_id`
    the end token pads inputs.

    Args:
        ids: token ids by config.json's names, from `recorded`.
        path: path of the weights in error messages.
        vocab: number of tokens of the model, which bounds the ids.

    Raises:
        TextIdsError: no id starts or ends a text, or an id is out of the vocabulary.
    """
    start = ids.get("decoder_start_token_id", ids.get("bos_token_id"))
    if start is None or "eos_token_id" not in ids:
        missing = "decoder_start_token_id" if start is None else "eos_token_id"
        raise TextIdsError(f"{path}: nothing says {missing}; add it to config.json or {FILE}")
    wrong = [f"{name} is {token}" for name, token in ids.items() if token >= vocab]
    if wrong:
        raise TextIdsError(
            f"{path}: {', '.join(wrong)}, and the model's {vocab} tokens have ids below {vocab}; "
            f"correct config.json or {FILE}"
        )
    end = ids["eos_token_id"]
    return TextIds(
        start=start,
        end=end,
        # Padding is masked out, so any token of the vocabulary can fill an input.
        pad=ids.get("pad_token_id", end),
        first=ids.get("forced_bos_token_id"),
        last=ids.get("forced_eos_token_id"),
    )
