"""A server that answers as the Hugging Face hub does where a model is pushed."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.hub import TOKEN, HubAnswers


class PushHub(ThreadingHTTPServer):
    """Repositories by name with their visibility, the files of the last commits, and all calls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.cuts_off = False
        """Whether connections end in the middle of a commit."""
        self.address = f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Answers(HubAnswers):
    server: PushHub  # pyright: ignore

    def _answer(self, code: int, fields: Any) -> None:
        self.send(code, json.dumps(fields).encode(), Content_Type="application/json")

    def _handle(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.calls.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            # As the hub says of small files. The client's own way of sending large ones (xet) is
            # not ours to test.
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **mode} for file in json.loads(body)["files"]]
            self._answer(200, {"files": files})
        elif path.endswith("/commit/main"):
            self._commit(body)
        elif self.command == "GET" and path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").removesuffix("/revision/main")
            if name in hub.private:
                fields = {"id": name, "private": hub.private[name], "siblings": [], "tags": []}
                self._answer(200, fields)
            else:
                self._answer(404, {"error": "Repository not found"})
        else:
            self._answer(200, {})

    def _create(self, fields: dict[str, Any]) -> None:
        hub = self.server
        name = f"{fields.get('organization') or 'me'}/{fields['name']}"
        if name.startswith("other/"):
            self._answer(403, {"error": "You don't have the rights to create a model there"})
            return
        code = 409 if name in hub.private else 200
        private = fields.get("private", fields.get("visibility") == "private")
        hub.private.setdefault(name, private)
        self._answer(code, {"url": f"{hub.address}/{name}", "name": name})

    def _commit(self, body: bytes) -> None:
        hub = self.server
        if hub.cuts_off:
            self.close_connection = True
            return
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{hub.address}/me/model/commit/1"
        self._answer(200, {"commitUrl": url, "commitOid": "1", "success": True})

    do_GET = do_POST = do_PUT = do_HEAD = _handle


@contextlib.contextmanager
def push_hub(home: Path) -> Iterator[PushHub]:
    """A hub that this process pushes to, with a token that may write."""
    hub = PushHub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("HF_HOME", str(home))
        yield hub
    hub.stop()
    thread.join()
