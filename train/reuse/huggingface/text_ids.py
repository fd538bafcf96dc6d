"""Tokens that begin, end and pad what a published model writes, as `transformers` takes them from its JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mupax.disk import read_json
from mupax.errors import MupaxError

FILE = "generation_config.json"
_NAMES = ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "mbart": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "forced_eos_token_id": 2},
    "t5": {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
    "mt5": {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0},
}
"""What their code takes for a field that config.json does not have."""
_DECODERS: Mapping[str, Mapping[str, int]] = {
    "gpt2": {"bos_token_id": 50256, "eos_token_id": 50256},
    "gpt_neox": {"bos_token_id": 0, "eos_token_id": 2},
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma2": {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    "gemma3_text": {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}
"""What the code of decoders takes for a field that config.json does not have."""


class TextIdsError(MupaxError):
    """Tokens of generation that the files lack, or that are no tokens. The text says which."""


class TextIds(NamedTuple):
    """How an encoder-decoder writes."""

    start: int
    """Stands before the first token."""
    end: int
    """Ends a text."""
    pad: int
    """Fills an input up."""
    first: int | None = None
    """What every text begins with: a language, say."""
    last: int | None = None
    """What the last token is of a text that has not ended before."""


def recorded(folder: Path, fields: Mapping[str, Any]) -> dict[str, int]:
    """Ids by config.json's names of them, those that are there.

    generation_config.json decides where it lies beside, and alone says what is forced.

    Args:
        folder: of the weights.
        fields: of config.json.

    Raises:
        TextIdsError: a field that is no token.
        JsonError: a file that is no JSON.
    """
    values: dict[str, Any] = {**_DEFAULTS.get(str(fields.get("model_type")), {}), **fields}
    if (folder / FILE).is_file():
        here = read_json(folder / FILE)
        plain = {name: value for name, value in values.items() if not name.startswith("forced_")}
        values = {**plain, **{name: value for name, value in here.items() if value is not None}}
    ids = {}
    for name in (f"{name}_token_id" for name in _NAMES):
        value = values.get(name)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value is not None and (type(value) is not int or value < 0):
            raise TextIdsError(f"{folder}: {name} is {value!r:.60}; write one token's id")
        ids |= {} if value is None else {name: value}
    return ids


def of_decoder(fields: Mapping[str, Any], vocab: int) -> dict[str, int | list[int]]:
    """Return the ids that a decoder's config.json has, by its names of them; several may end a text.

    Args:
        fields: config.json. What is no token of the model is left out, as -1 for pad_token_id in older files.
        vocab: number of the model's tokens.
    """
    values = {**_DECODERS.get(str(fields.get("model_type")), {}), **fields}
    ids: dict[str, int | list[int]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(name)
        numbers = value if isinstance(value, list) else [value]
        if (
            value is not None
            and numbers
            and all(type(number) is int and 0 <= number < vocab for number in numbers)
        ):
            ids[name] = value
    return ids


def of(ids: Mapping[str, Any], where: Path, vocab: int) -> TextIds:
    """The ids by what they do.

    Args:
        ids: of `recorded`.
        where: what an error names.
        vocab: of the model.

    Raises:
        TextIdsError: nothing says what starts or ends a text, or an id is none of the model's.
    """
    start = ids.get("decoder_start_token_id", ids.get("bos_token_id"))
    if start is None or "eos_token_id" not in ids:
        missing = "decoder_start_token_id" if start is None else "eos_token_id"
        raise TextIdsError(f"{where}: nothing says {missing}; add it to config.json or {FILE}")
    if wrong := {name: token for name, token in ids.items() if token >= vocab}:
        raise TextIdsError(
            f"{where}: the model has {vocab} tokens, and no {wrong}; write ids of its own"
        )
    end = ids["eos_token_id"]
    return TextIds(
        start,
        end,
        ids.get("pad_token_id", end),
        ids.get("forced_bos_token_id"),
        ids.get("forced_eos_token_id"),
    )
