"""Files of the data that a model needs after training.

These are the tokenizer, the chat template, class names and preprocessing.
`mupax.train.checkpoints.assets` writes them into the workdir and describes the fields of
assets.json.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mupax import disk
from mupax.disk import path_of
from mupax.train.config.data import DataConfig
from mupax.train.data import cache
from mupax.train.data.interface import Data, DataError

FORMAT = "mupax-assets-1"
RECORD = "assets.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
_NEAR = ("generation_config.json", "config.json", "tokenizer_config.json")
"""Files next to a tokenizer that name the tokens which end a text."""


def files_of(data: Data, config: DataConfig, note: cache.Note = print) -> dict[str, bytes]:
    """Return the content of every asset by its file name. assets.json is always among them.

    Nothing is written.

    Args:
        config: Data settings of the run. Their tokenizer may have another name than the file that
            `data` was opened with.
        note: Function that takes one line of text if the chat template cannot be used.

    Raises:
        DataError: The tokenizer's file has changed since the data was opened, or the data is
            chat:PATH and its chat template cannot be used.
    """
    record: dict[str, Any] = {"format": FORMAT}
    files: dict[str, bytes] = {}
    if data.tokenizer is not None:
        record["tokenizer"] = _described(data, config)
        content = _tokenizer_content(data.tokenizer)
        if content:
            files[TOKENIZER] = content
        files |= _chat_files(data, record, note)
    if data.class_names is not None:
        record["class_names"] = list(data.class_names)
    pixels = data.facts.get("pixels")
    if pixels is None and data.kind == "images":
        pixels = dataclasses.asdict(data.pixels)  # pyright: ignore[reportAttributeAccessIssue]
    if pixels is not None:
        record["pixels"] = pixels
    files[RECORD] = (json.dumps(record, indent=2) + "\n").encode()
    return files


def end_ids(name: str, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: the tokenizer's separator, and end ids of files next to it.

    The files are generation_config.json, config.json, tokenizer_config.json and assets.json.

    Args:
        name: Value of data.tokenizer. Files next to it count if it is the path of a tokenizer.json.

    Raises:
        JsonError: Such a file is damaged.
    """
    ends = {int(tokenizer.separator)}
    if not name.endswith(".json"):
        return frozenset(ends)

    folder = path_of(name).parent
    for file in (*_NEAR, RECORD):
        if not (folder / file).is_file():
            continue
        fields = disk.read_json(folder / file)
        if file == RECORD:
            described = fields.get("tokenizer")
            ids = described.get("ends") if isinstance(described, dict) else None
            ends.update(_whole_numbers(ids if isinstance(ids, list) else []))
            continue

        ids = fields.get("eos_token_id")
        ends.update(_whole_numbers(ids if isinstance(ids, list) else [ids]))
        token = fields.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        number = tokenizer.find(token) if isinstance(token, str) else None
        if number is not None:
            ends.add(number)
    return frozenset(ends)


def _whole_numbers(values: list[Any]) -> list[int]:
    """Return the integers among values of JSON. Booleans are left out."""
    return [value for value in values if type(value) is int]


def _described(data: Data, config: DataConfig) -> dict[str, Any]:
    """Return the tokenizer's entry in assets.json: name, key, vocabulary size and special tokens.

    The ids that end a text include those of files next to the tokenizer, unless one is damaged.
    """
    tokenizer = data.tokenizer
    try:
        ends = end_ids(data.config.tokenizer, tokenizer)
    except disk.JsonError:
        # Training does not read the files next to the tokenizer, so a damaged one must not stop it.
        ends = {int(tokenizer.separator)}

    def token(number: int) -> dict[str, Any]:
        return {"text": tokenizer.token(number), "id": number}

    return {
        "name": config.tokenizer,
        "key": tokenizer.key,
        "vocab_size": tokenizer.vocab_size,
        "separator": token(int(tokenizer.separator)),
        "begin": [token(number) for number in tokenizer.start.tolist()],
        "end": [token(number) for number in tokenizer.end.tolist()],
        "ends": sorted(ends),
    }


def _tokenizer_content(tokenizer: Any) -> bytes | None:
    """Return the content of a tokenizer's file, or None for a tokenizer without one (bytes, ids).

    Raises:
        DataError: The file is gone or has changed since the tokenizer was opened.
    """
    path = getattr(tokenizer, "path", None)
    if path is None:
        return None
    try:
        content = disk.read_bytes(path)
    except disk.ABSENT:
        content = b""
    if not tokenizer.is_of(content):
        raise DataError(
            f"the tokenizer {path} has changed while the run started; write the same command again"
        )
    return content


def _chat_files(data: Data, record: dict[str, Any], note: cache.Note) -> dict[str, bytes]:
    """Return the chat template's file by its name, or no file. Add template tokens to `record`.

    If the template cannot be used, `note` gets a caution and there is no file. For the data
    chat:PATH this is an error.

    Raises:
        DataError: The data is chat:PATH and its template cannot be used.
    """
    config = data.config
    if not config.tokenizer.endswith(".json") and config.chat_template is None:
        return {}
    from mupax.train.data.chats import templates

    try:
        tokens = templates.special_tokens(config.tokenizer)
        template = templates.find(config.tokenizer, config.chat_template)
    except DataError as error:
        # Only a run on conversations needs the template for its training.
        if config.name.startswith("chat:"):
            raise
        note(f"caution: this run keeps no chat template: {error}")
        return {}
    if tokens:
        record["chat_template"] = {"tokens": tokens}
    if template is None:
        return {}
    return {CHAT_TEMPLATE: template.source.encode()}
