"""`hf:NAME` against a server that answers as the hub does: the commit is pinned, and the records are those of the files."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hub import HubAnswers

COMMIT = "1" * 40
TEXTS = [f"document {i} says {'word ' * (i % 7 + 20)}" for i in range(60)]
FILES = {
    f"{split}.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for split, texts in {"train": TEXTS[:50], "validation": TEXTS[50:]}.items()
}
READ = """
import json, sys
from mupax.train.data.interface import DataError
from mupax.train.data.streams.hub import HubDocuments, opened
data = opened("hf:me/words")
read = {split: [text.decode() for chunk, _ in HubDocuments(data, split, "text").after(None) for text, _ in chunk] for split in data.splits}
try:
    opened("hf:me/wordz")
except DataError as error:
    read["error"] = str(error)
print(json.dumps({"revision": data.revision, **read}))
"""


class Answers(HubAnswers):
    """The hub's data set me/words, as far as `datasets` asks for it."""

    def _handle(self) -> None:
        path = self.path.partition("?")[0]
        self.server.calls.append(path)  # type: ignore[attr-defined]
        about = "/api/datasets/me/words"
        tree = f"{about}/tree/{COMMIT}"
        file = path.removeprefix(f"/datasets/me/words/resolve/{COMMIT}/")
        if path in (about, f"{about}/revision/{COMMIT}"):
            fields = {"id": "me/words", "sha": COMMIT, "private": False, "tags": []}
            siblings = [{"rfilename": name} for name in FILES]
            self.send_json({**fields, "siblings": siblings, "downloads": 0, "likes": 0})
        elif path.startswith(tree):
            under = path.removeprefix(tree).strip("/")
            listed = []
            for name, content in FILES.items():
                if name.startswith(under):
                    oid = hashlib.sha1(content).hexdigest()
                    entry = {"type": "file", "path": name, "size": len(content), "oid": oid}
                    listed.append(entry)
            self.send_json(listed)
        elif file in FILES:
            content = FILES[file]
            span = self.headers.get("Range") or "bytes=0-"
            first, _, last = span.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            self.send(206, part, Content_Range=place)
        else:
            self.send(404, X_Error_Code="EntryNotFound" if "words" in path else "RepoNotFound")

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode())

    do_GET = do_HEAD = do_POST = _handle


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.calls = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed"
)
def test_a_name_is_read_from_the_hub_at_one_commit(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """In a process of its own: `huggingface_hub` takes the address as it is imported."""
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["revision"], read["train"], read["eval"]) == (COMMIT, TEXTS[:50], TEXTS[50:])
    assert read["error"].startswith("the hub has no data set of hf:me/wordz that may be read")
    calls: list[str] = hub.calls  # type: ignore[attr-defined]
    assert [call for call in calls if "/resolve/" in call and COMMIT not in call] == []
    assert {call.rpartition("/")[2] for call in calls if call.endswith(".jsonl")} == set(FILES)
