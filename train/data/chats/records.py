"""Readers of conversations in JSON lines and Parquet, for data.name chat:PATH.

A document is one conversation, as the JSON of its list of messages. `records/user_files.py` uses
these readers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

from mupax.train.data.chats import templates
from mupax.train.data.interface import DataError
from mupax.train.data.records.lines import Lines, content_of
from mupax.train.data.records.tables import Table

FIELD = "messages"
"""Default name of the field with messages."""


@dataclasses.dataclass
class ChatLines(Lines):
    """File of JSON lines with a conversation in each. A document is the JSON of its messages."""

    without_answer: dict[str, None] = dataclasses.field(default_factory=dict)
    """Keys are the lines, as file and number, that have no answer to train on and are left out."""

    def content(self, row: dict[str, Any], where: str) -> bytes:
        if row.get("tools"):
            raise DataError(
                f"{where} has tools, which are not read; take the field out of the record"
            )
        lists = [name for name in row if isinstance(row[name], list)]
        return _content(row.get(self.field), where, self.field, lists, self.without_answer)


@dataclasses.dataclass
class ChatTable(Table):
    """Parquet file with a conversation in each row. A document is the JSON of its messages."""

    without_answer: dict[str, None] = dataclasses.field(default_factory=dict)
    """Keys are the rows, as file and number, that have no answer to train on and are left out."""
    kind: ClassVar[str] = "messages"

    @staticmethod
    def holds(column: Any) -> bool:
        import pyarrow

        lists = pyarrow.types.is_list(column) or pyarrow.types.is_large_list(column)
        return lists and pyarrow.types.is_struct(column.value_type)

    def content(self, value: Any, where: str) -> bytes:
        return _content(value, where, self.field, [], self.without_answer)


def in_folder(path: Path) -> bool:
    """Return whether a file, or a folder by its first file of records, has conversations.

    A record is a conversation if it has the field or column `messages`. One such line among the
    first 50 is enough. The result is False for a damaged file, and for a folder without JSON lines
    or Parquet.
    """
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        # All suffixes, because records may be compressed, as in chats.jsonl.gz.
        suffixes = {suffix.lower() for suffix in file.suffixes}
        try:
            if ".parquet" in suffixes:
                ChatTable(file, FIELD)
                return True
            if suffixes & {".jsonl", ".ndjson"}:
                ChatLines(file, FIELD).first()
                return True
        except DataError:
            return False
    return False


def _content(
    value: Any, where: str, field: str, text_fields: list[str], without_answer: dict[str, None]
) -> bytes:
    """Check the messages of a record and return them as JSON in UTF-8.

    A record without an answer to train on returns no bytes, and is added to `without_answer`.

    Args:
        value: Value of the field. `None` if the record does not have the field.
        where: File and line or row of the record, for error messages.
        text_fields: Names of other fields that the user may have meant, for the error message.
        without_answer: Dict whose keys are the records without an answer to train on.

    Raises:
        DataError: The value is not a valid list of messages. The error says where the record is.
    """
    if not isinstance(value, list):
        # Raises the error of a record whose field is missing or of another type.
        content_of(None if isinstance(value, str) else value, where, field, text_fields)
    try:
        messages = templates.checked(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    answers = [message for message in messages if message["role"] == "assistant"]
    if not any(message.get("weight") != 0 for message in answers):
        without_answer[where] = None
        return b""
    return content_of(json.dumps(messages, ensure_ascii=False), where, field, text_fields)
