"""JSON that a stranger may have written is refused by name where it is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mupax.zoo.checked_json import JsonError, read_json

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 200_000, "too deep"),
        (b'{"a":' * 200_000, "too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"", "not JSON"),
    ],
)
def test_json_that_is_none_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(JsonError, match=said):
        read_json(tmp_path / "x.json")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # reading it would wait for ever
    with pytest.raises(JsonError, match="no such file"):
        read_json(tmp_path / "config.json")
