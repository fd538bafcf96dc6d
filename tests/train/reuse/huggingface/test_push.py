"""`push` against a server that answers as the hub does: what is sent, as whom, and what is refused before it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from tests.train.reuse.test_source import published

TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """Repositories by name, their files, and the calls."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, code: int, fields: Any) -> None:
        body = json.dumps(fields).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.calls.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields.get('organization') or 'me'}/{fields['name']}"
            if name.startswith("other/"):
                return self._answer(
                    403,
                    {
                        "error": "You don't have the rights to create a model under the namespace other"
                    },
                )
            exists = name in hub.private
            private = fields.get("private", fields.get("visibility") == "private")
            hub.private.setdefault(name, private)
            return self._answer(
                409 if exists else 200, {"url": f"{hub.address}/{name}", "name": name}
            )
        if path.endswith("/preupload/main"):
            # As the hub says of small files; of large ones the client's own way of sending (xet) is not ours to test.
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer(
                200,
                {
                    "commitUrl": f"{hub.address}/me/model/commit/1",
                    "commitOid": "1",
                    "success": True,
                },
            )
        if self.command == "GET" and path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/").removesuffix("/revision/main")
            if name not in hub.private:
                return self._answer(404, {"error": "Repository not found"})
            return self._answer(
                200, {"id": name, "private": hub.private[name], "siblings": [], "tags": []}
            )
        return self._answer(200, {})

    do_GET = do_POST = do_PUT = do_HEAD = _handle


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HF_ENDPOINT": server.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    published(tmp_path / "weights")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def push(words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["push", *words.split()])
    return code, out.getvalue(), " ".join(err.getvalue().split())


def test_a_folder_of_weights_is_sent_as_it_is_and_private(hub: Hub) -> None:
    code, out, err = push("weights --to me/model")
    assert code == 0, err
    assert f"2 files are at {hub.address}/me/model" in out
    assert hub.private == {"me/model": True}
    assert hub.files == {path.name: path.read_bytes() for path in Path("weights").iterdir()}
    code, out, err = push("weights --to me/model")  # again, into the same
    assert (code, err) == (0, "")
    code, out, err = push("weights --to me/model --public")
    assert (code, "me/model was there and private, and stays so" in err) == (0, True), err


def test_half_of_a_folder_is_not_sent(hub: Hub) -> None:
    file = Path("weights/model.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    code, _, err = push("weights --to me/model")
    assert (code, "model.safetensors" in err) == (2, True)
    file.rename("weights/model-00001-of-00002.safetensors")
    file.with_name("model-00001-of-00002.safetensors").write_bytes(whole)
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    Path("weights/model.safetensors.index.json").write_text(json.dumps(index))
    code, _, err = push("weights --to me/model")
    assert (code, "model-00002-of-00002.safetensors" in err) == (2, True)
    assert hub.calls == []


def test_an_upload_that_was_cut_off_is_written_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Answers._handle

    def cut_off(self: Answers) -> None:
        if self.path.endswith("/commit/main"):
            self.close_connection = True
            return
        handle(self)

    with monkeypatch.context() as patch:
        patch.setattr(Answers, "do_POST", cut_off)
        code, _, err = push("weights --to me/model")
    assert (code, "does not answer" in err, hub.files) == (1, True, {})
    assert push("weights --to me/model")[0] == 0
    assert hub.files == {path.name: path.read_bytes() for path in Path("weights").iterdir()}


@pytest.mark.parametrize("name", ["README.md", "vocab.txt", "model.safetensors.json"])
def test_what_links_lead_to_outside_of_the_folder_is_not_sent(hub: Hub, name: str) -> None:
    Path("secret").write_text("of the user's")
    Path("weights", name).symlink_to("../secret")
    code, out, err = push("weights --to me/model --dry-run")
    assert code == 2
    assert name in err
    assert name not in out
    Path("weights", name).unlink()
    Path("weights", "card").write_text("# A model\n")
    Path("weights", "README.md").symlink_to("card")  # Control: a link that stays inside.
    code, out, err = push("weights --to me/model --dry-run")
    assert code == 0, err
    assert "README.md" in out


def test_what_links_lead_to_is_not_taken_along_with_imported_weights(hub: Hub) -> None:
    Path("secret").write_text("of the user's")
    Path("weights", "vocab.txt").symlink_to("../secret")
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        assert main(["import", "weights", "--out", "in"]) == 2
    assert "vocab.txt" in err.getvalue()


def test_what_has_multipliers_is_exported_first_with_its_card(hub: Hub) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert (
            main(["import", "weights", "--out", "mup", "--preset", "mup", "--base", "lm-proxy"])
            == 0
        )
    code, out, err = push("mup --to me/model --public")
    assert code == 0, err
    assert (hub.private, err) == ({"me/model": False}, "")
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["README.md"].decode().startswith("---\nlibrary_name: transformers")
    assert "# `model`" in hub.files["README.md"].decode()
    assert json.loads(hub.files["config.json"])["model_type"] == "llama"
    assert "README.md" in out
    assert "None is stated" in hub.files["README.md"].decode()
    assert "the model card states no licence; --licence ID" in out
    code, out, err = push("mup --to me/model --public --license MIT")
    assert code == 0, err
    card = hub.files["README.md"].decode()
    assert card.startswith(
        "---\nlibrary_name: transformers\nlicense: mit\npipeline_tag: text-generation\ntags:\n- mupax\n---\n"
    )
    assert "states no licence" not in out
    sent = len(hub.calls)
    code, _, err = push("mup --to me/model --public --licence apache2")
    assert (
        code,
        "--licence apache2: no licence has this identifier at Hugging Face; did you mean apache-2.0"
        in err,
    ) == (2, True), err
    assert not any("commit" in call for call in hub.calls[sent:])


def test_a_dry_run_lists_files_without_a_token_or_a_call(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    Path("weights/.secret.json").write_text("{}")
    code, out, _ = push("weights --to me/model --dry-run")
    assert code == 0
    assert out.endswith("2 files for me/model, private; nothing was sent\n")
    assert "config.json" in out
    assert ".secret" not in out
    assert not hub.calls


def test_what_cannot_be_sent_is_said_in_a_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private["me/seen"] = False
    for words, message in {
        "weights --to model": "--to model is no USER/NAME; write your name at Hugging Face before it, as in --to you/model",
        "weights --to me/a--b": "--to me/a--b: ",
        "weights --to me/seen": "me/seen is there and public; add --public",
        "weights --to other/model": "Hugging Face refused it (403: ",
        "weights --to me/model --step 3": "leave --step, --dtype, --tokenizer, --separator and --licence out",
        "weights --to me/model --licence mit": "leave --step, --dtype, --tokenizer, --separator and --licence out",
        "nothing --to me/model": "no run and no weights there",
    }.items():
        code, _, err = push(words)
        assert (code, message in err) == (2, True), err
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refused it (401: " in push("weights --to me/model")[2]
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = push("weights --to me/model")
    assert code == 2
    assert err.startswith(
        "error: no token of Hugging Face is here; write one that may write into HF_TOKEN"
    )
    assert not hub.files
    assert set(hub.private) == {"me/seen"}  # none was made
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.shutdown()
    hub.server_close()
    code, _, err = push("weights --to me/model")
    assert (code, "does not answer" in err) == (1, True), err
