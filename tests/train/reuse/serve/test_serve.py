"""Serving: the texts are those of `generate`, requests that are wrong are told so, and one program serves a shape."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.config.run import PresetConfig
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.reuse.generate.decode import Scores
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.writing import AnswerEnd, StreamingText
from mupax.train.reuse.harness.texts import Texts
from mupax.train.reuse.huggingface import files
from mupax.train.reuse.serve import command, worker
from mupax.train.reuse.serve.fields import request as requested
from mupax.train.reuse.serve.server import Server, is_local
from mupax.train.reuse.serve.service import Probabilities
from mupax.train.reuse.source import WeightsSource
from mupax.zoo.configs import DecoderConfig
from mupax.zoo.definition import definition
from scripts.pages import browser
from tests.fixtures.small_tokenizers import sentencepiece, subwords

SEQ_LEN, PROMPT = 32, "to be"
MODEL = DecoderConfig(width=16, depth=1, num_heads=2, mlp_ratio=2, vocab_size=128, seq_len=SEQ_LEN)
TEMPLATE = "{% for m in messages %}{{ m.role[0] ~ m.content ~ '|' }}{% endfor %}{{ 'a' if add_generation_prompt }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights alone of a model that writes ASCII, and a chat template."""
    out, noise = tmp_path_factory.mktemp("serve") / "tiny", np.random.default_rng(3)
    shapes = {name: leaf.shape for name, leaf in definition(MODEL).abstract.items()}
    params: Any = {
        name: noise.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    source = WeightsSource(MODEL, params, dict.fromkeys(params, np.ones(())), {}, [])
    files.write_imported(source, PresetConfig(name="sp"), out, "a test")
    (out / "chat.jinja").write_text(TEMPLATE)
    return out


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "bytes") as http_server:
        yield http_server


@contextlib.contextmanager
def serving(folder: Path, tokenizer: str) -> Iterator[Server]:
    args = command.Serve(
        workdir=folder, port=0, tokenizer=tokenizer, chat_template=str(folder / "chat.jinja")
    )
    with Server(args.host, args.port) as http_server:
        http_server.service = command.opened_service(args)
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        try:
            yield http_server
        finally:
            http_server.shutdown()
            thread.join()
            http_server.service.close()


def response(
    server: Server, body: Any = None, path: str = "/v1/completions", **headers: str
) -> tuple[int, dict[str, Any] | str]:
    """Status and answer of a GET, or of a POST where there is a body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "Content-Type": "application/json",
        **{n.replace("_", "-"): v for n, v in headers.items()},
    }
    connection.request("GET" if body is None else "POST", path, content, headers)
    answer = connection.getresponse()
    text = answer.read().decode()  # strict: every answer is UTF-8
    connection.close()
    return answer.status, json.loads(
        text
    ) if answer.headers.get_content_type() == "application/json" else text


def completion(server: Server, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """The answer of a request that must work, greedy and through ends of documents unless it says otherwise."""
    fields = {"temperature": 0, "ignore_eos": True, **fields}
    status, answer = response(server, {"prompt": prompt, **fields})
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    assert answer["choices"][index]["index"] == index
    return answer["choices"][index]["text"]


def events(stream: str) -> list[Any]:
    """The chunks of a stream, which must end as streams do."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_greedy_text_is_that_of_generate(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = SEQ_LEN + 9  # past the end of the context
    words = [
        "--prompt",
        PROMPT,
        "--tokens",
        str(length),
        "--temperature",
        "0",
        "--data.tokenizer",
        "bytes",
    ]
    assert main(["generate", str(folder), *words]) == 0
    answer = completion(server, max_tokens=length)
    assert PROMPT + text_of(answer) + "\n" == capsys.readouterr().out
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": length,
        "total_tokens": length + 5,
    }
    assert text_of(completion(server, [*PROMPT.encode()], max_tokens=length)) == text_of(answer)


def test_one_program_serves_a_bucket_of_lengths_and_every_sampling(server: Server) -> None:
    assert server.service is not None
    slots = server.service.worker.slots
    completion(server, max_tokens=3)
    before = slots.compilations
    for prompt in ("abcde", "abcdef", "abcdefgh"):  # one power of two
        for sampling in (
            {"temperature": 0},
            {"temperature": 0.7},
            {"temperature": 1.3, "top_p": 0.5},
        ):
            completion(server, prompt, max_tokens=4, **sampling)
    assert slots.compilations == before
    completion(server, "abc", max_tokens=2)  # Control: another power of two.
    assert slots.compilations == before + 1


def test_two_requests_at_once_get_what_each_gets_alone(server: Server) -> None:
    requests = [
        {"prompt": p, "seed": s, "temperature": 1, "max_tokens": 40}
        for p, s in (("ab", 1), ("ba", 2))
    ]
    alone = [text_of(completion(server, **request)) for request in requests]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = [
            text_of(a) for a in pool.map(lambda request: completion(server, **request), requests)
        ]
    assert together == alone
    assert alone[0] != text_of(
        completion(server, **{**requests[0], "seed": 9})
    )  # Control: the seed counts.


def test_a_seed_says_every_text_however_many_are_asked_for(server: Server) -> None:
    fields = {"temperature": 1, "seed": 5, "max_tokens": 12}
    three = completion(server, n=3, **fields)
    assert len({text_of(three, i) for i in range(3)}) == 3
    assert text_of(completion(server, **fields)) == text_of(three)
    completions = completion(server, [PROMPT, "or"], **fields)
    assert text_of(completions) == text_of(three)
    assert text_of(completions, 1) == text_of(completion(server, "or", **{**fields, "seed": 6}))


def test_a_stop_of_several_tokens_ends_the_text_before_it(server: Server) -> None:
    whole = text_of(completion(server, max_tokens=30))
    stop = whole[7:10]
    fields = {"max_tokens": 30, "stop": ["no such text", stop]}
    answer = completion(server, **fields)
    assert text_of(answer) == whole[: whole.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == whole.find(stop) + len(stop)
    chunks = events(
        response(
            server,
            {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **fields},
        )[1]
    )  # pyright: ignore
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(answer)


def test_a_stream_is_the_same_text_in_pieces(server: Server) -> None:
    fields = {
        "prompt": PROMPT,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 20,
        "n": 2,
        "echo": True,
        "ignore_eos": True,
    }
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events(response(server, {**fields, **more})[1])  # pyright: ignore
    pieces, ends = ["", ""], {}
    for (choice,) in (chunk["choices"] for chunk in chunks):
        pieces[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    whole = completion(server, **fields)
    assert pieces == [text_of(whole, 0), text_of(whole, 1)]
    assert ends == {0: "length", 1: "length"}
    assert usage["usage"] == whole["usage"]
    assert len(chunks) > 6


def test_logprobs_are_those_of_the_text_and_echo_scores_a_prompt(server: Server) -> None:
    answer = completion(server, max_tokens=6, logprobs=2, echo=True)["choices"][0]
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert logprobs["text_offset"] == list(range(len(answer["text"])))
    assert logprobs["token_logprobs"][0] is None
    for place in range(
        len(PROMPT), len(answer["text"])
    ):  # greedy: each is the likeliest, of which two are named
        best = logprobs["top_logprobs"][place]
        assert max(best.values()) == logprobs["token_logprobs"][place] < 0
        assert len(best) == 2
    scored = completion(server, answer["text"], max_tokens=0, logprobs=0, echo=True)["choices"][0]
    np.testing.assert_allclose(
        scored["logprobs"]["token_logprobs"][1:], logprobs["token_logprobs"][1:], atol=1e-5
    )
    assert scored["text"] == answer["text"]


def test_parts_of_characters_have_bytes_of_their_own() -> None:
    ids = [*"aé日".encode(), 0]
    scores = Scores(
        np.zeros(7), np.zeros((7, 2)), np.array([[b, 0xC3] for b in (*"é日".encode(), 1, 0)])[:7]
    )
    fields: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 2,
        "messages": [{"role": "user", "content": "?"}],
    }
    request = requested(json.dumps(fields).encode(), is_chat=True)
    content = Probabilities(Bytes()).of_text(request, ids, 1, scores)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "é日"
    assert [entry["token"] for entry in content] == [
        "\\xc3",
        "\\xa9",
        "\\xe6",
        "\\x97",
        "\\xa5",
        "\0",
    ]
    assert [entry["bytes"] for entry in content[0]["top_logprobs"]] == [[0xC3], [0xC3]]
    request = requested(
        json.dumps({"prompt": "a", "logprobs": 2, "echo": True}).encode(), is_chat=False
    )
    logprobs = Probabilities(Bytes()).of_text(request, ids[:-1], 1, scores)
    assert logprobs["tokens"] == [
        "a",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "bytes:\\xe6",
        "bytes:\\x97",
        "bytes:\\xa5",
    ]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2]
    assert logprobs["top_logprobs"][1:3] == [
        {"bytes:\\xc3": 0.0},
        {"bytes:\\xa9": 0.0, "bytes:\\xc3": 0.0},
    ]


def test_a_chat_is_its_template_rendered_and_ends_where_that_ends_an_answer(server: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    status, answer = response(
        server, {"messages": messages, **fields, "logprobs": True}, "/v1/chat/completions"
    )
    assert status == 200, answer
    assert isinstance(answer, dict)
    message = answer["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": text_of(completion(server, "uhi|a", max_tokens=20)),
    }
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == message["content"]
    _, stream = response(
        server, {"messages": messages, **fields, "stream": True}, "/v1/chat/completions"
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in events(stream)]  # pyright: ignore
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert server.service is not None
    assert server.service._answer_end == AnswerEnd(frozenset(), ("|",))


def test_text_is_decoded_after_its_prompt_and_bytes_are_the_tokens_own(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokenizer.json"
    library = sentencepiece("日é".encode(), more_words=100)
    tokenizer = subwords(file, library)
    assert MODEL.vocab_size <= tokenizer.vocab_size  # every id of the model is some text
    prompt, length = "hello the", 18
    with serving(folder, str(file)) as server:
        assert server.service is not None
        generator = server.service.worker.generator
        prompt_ids = tokenizer.encode([prompt.encode()])[0]
        (parts,) = zip(*generator.stream(prompt_ids, length, sampling=Sampling(0.0)), strict=True)
        ids = [*prompt_ids.tolist(), *np.concatenate(parts).tolist()]
        text = tokenizer.decode(ids)[len(prompt) :]
        begins = text[:4]
        assert begins.startswith(" ")
        assert tokenizer.decode(ids[len(prompt_ids) :]) != text  # Control: alone it has no space.

        answer = completion(server, prompt, max_tokens=length, logprobs=2, echo=True)["choices"][0]
        assert answer["text"] == prompt + text
        assert "".join(answer["logprobs"]["tokens"]) == answer["text"]
        offsets = answer["logprobs"]["text_offset"]
        assert [
            answer["text"][i:].startswith(t)
            for i, t in zip(offsets, answer["logprobs"]["tokens"], strict=True)
        ]
        fields = {"temperature": 0, "ignore_eos": True, "max_tokens": length}
        chunks = events(response(server, {"prompt": prompt, "stream": True, **fields})[1])  # pyright: ignore
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        stopped = completion(server, prompt, max_tokens=length, stop=begins)["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")

        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            **fields,
            "logprobs": True,
            "top_logprobs": 3,
        }
        choice: Any = response(server, chat, "/v1/chat/completions")[1]["choices"][0]  # pyright: ignore
        content = choice["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined.decode() == choice["message"]["content"]
        assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in content)
    words = [
        "--prompt",
        prompt,
        "--tokens",
        str(length),
        "--temperature",
        "0",
        "--data.tokenizer",
        str(file),
    ]
    assert main(["generate", str(folder), *words]) == 0
    assert capsys.readouterr().out == prompt + text + "\n"
    assert main(["generate", str(folder), *words, "--samples", "2"]) == 0
    assert capsys.readouterr().out.count(prompt + text) == 2
    harness = Texts(folder, tokenizer=str(file))
    assert harness.continued(prompt, [], max_tokens=length) == text
    assert harness.continued(prompt, [begins], max_tokens=length) == ""


# The conversation in a terminal


def chat(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, *words: str) -> int:
    """The exit code of a greedy conversation with what is piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    template = ["--chat-template", str(folder / "chat.jinja")]
    flags = ["--chat", "--temperature", "0", "--data.tokenizer", "bytes", *template, *words]
    return main(["generate", str(folder), *flags])


def test_a_conversation_in_the_terminal_is_that_of_the_server(
    server: Server,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mupax.train.reuse.generate.chat.end_ids", lambda name, tokenizer: frozenset()
    )
    assert chat(folder, monkeypatch, "hi\n\nyo", "--tokens", "6", "--system", "be") == 0
    out, err = capsys.readouterr()
    messages, answers = [{"role": "system", "content": "be"}], []
    for message in ("hi", "yo"):
        messages.append({"role": "user", "content": message})
        fields = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        answer: Any = response(server, fields, "/v1/chat/completions")[1]
        answers.append(answer["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert "--tokens 6" in err
    # A conversation longer than the context loses its oldest messages and goes on.
    assert chat(folder, monkeypatch, "one two\nthree four\nfive six\n", "--tokens", "6") == 0
    out, err = capsys.readouterr()
    assert "the context is full" in err
    assert chat(folder, monkeypatch, "five six\n", "--tokens", "6") == 0
    alone = capsys.readouterr().out
    assert out.endswith(f"\n{alone}")
    assert chat(folder, monkeypatch, "a" * 40 + "\n") == 2  # one message longer than the context
    assert "write a shorter one" in capsys.readouterr().err
    assert chat(folder, monkeypatch, "") == 0

    class Interrupted(io.StringIO):
        def readline(self, size: int = -1) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    words = ["--chat", "--data.tokenizer", "bytes"]
    assert (
        main(["generate", str(folder), *words, "--chat-template", str(folder / "chat.jinja")])
        == 130
    )
    capsys.readouterr()
    assert main(["generate", str(folder), *words]) == 2
    assert "--chat-template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ([], "--prompt"),
        (["--chat", "--prompt", "a"], "--prompt"),
        (["--chat", "--samples", "2"], "--samples"),
        (["--chat", "--tokens", "0"], "--tokens"),
        (["--prompt", "a", "--system", "b"], "--system"),
    ],
)
def test_flags_of_a_conversation(
    folder: Path, words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *words]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "status", "param", "text"),
    [
        (b"{", 400, None, "no JSON"),
        (b"[]", 400, None, "no JSON object"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "model", "this server has 'tiny'"),
        ({"prompt": "a" * 33}, 400, "prompt", "the prompt has 33 tokens, and the model reads 32"),
        ({"prompt": [200]}, 400, "prompt", "the model knows those below 128"),
        ({"prompt": [-1]}, 400, "prompt", "token ids from 0"),
        ({"prompt": []}, 400, "prompt", "at least one"),
        ({"prompt": {"a": 1}}, 400, "prompt", "a string, a list of token ids"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "a whole number from 1"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens", "is True"),
        ({"prompt": "a", "temperature": "warm"}, 400, "temperature", "a number from 0"),
        ({"prompt": "a", "top_p": 1.5}, 400, "top_p", "a number from 0 to 1"),
        ({"prompt": "a", "n": 33}, 400, "n", "from 1 to 32"),
        ({"prompt": ["a"] * 9, "n": 4}, 400, "n", "more than 32 texts"),
        ({"prompt": "a", "stop": [""]}, 400, "stop", "none of them empty"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream", "true or false"),
        ({"prompt": "a", "stream": True, "logprobs": 1}, 400, "logprobs", "not streamed"),
        ({"prompt": "a", "max_tokens": 33, "logprobs": 1}, 400, "logprobs", "at most 33 tokens"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream"),
        ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
        ({"prompt": "a", "frequencypenalty": 0}, 400, "frequencypenalty", "unrecognized field"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(
    server: Server, body: Any, status: int, param: str | None, text: str
) -> None:
    code, answer = response(server, body)
    assert code == status, answer
    assert isinstance(answer, dict)
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert text in answer["error"]["message"]
    assert (answer["error"]["code"] == "context_length_exceeded") == (
        "33 tokens, and the model" in text
    )


def test_what_comes_elsewhere_or_from_elsewhere_is_refused(server: Server) -> None:
    assert response(server, path="/v1/nothing")[0] == 404
    assert response(server, path="/v1/completions")[0] == 405
    assert response(server, {"prompt": "a"}, Content_Type="text/plain")[0] == 415
    assert response(server, path="/health", Host="evil.example")[0] == 403
    assert response(server, path="/health", Host=f"localhost:{server.server_port}") == (
        200,
        {"status": "ok"},
    )
    answer: Any = response(server, path="/v1/models")[1]
    (model,) = answer["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == ("tiny", SEQ_LEN, True)
    assert response(server, path="/v1/models/tiny?x=1")[1] == model
    assert response(server, path="/v1/models/%74iny")[1] == model
    for name in ("other", "org/tiny", "org%2Ftiny", "tiny%2F", "%FF"):
        status, answer = response(server, path=f"/v1/models/{name}")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert response(server, path="/v1/models/")[0] == 404
    assert response(server, {}, path="/v1/models/tiny")[0] == 405
    messages = [{"role": "nobody", "content": "a"}]
    status, answer = response(server, {"messages": messages}, "/v1/chat/completions")
    assert status == 400
    assert "messages[0] has the role 'nobody'" in answer["error"]["message"]


def test_without_a_template_a_chat_is_refused_and_a_full_queue_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.service is not None
    monkeypatch.setattr(server.service, "template", None)
    status, answer = response(
        server, {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions"
    )
    assert status == 400
    assert "has no chat template" in answer["error"]["message"]
    full = worker.Worker.submit

    def submit(self: worker.Worker, job: worker.Job) -> None:
        raise worker.BusyError

    monkeypatch.setattr(worker.Worker, "submit", submit)
    assert response(server, {"prompt": "a"})[0] == 503
    monkeypatch.setattr(worker.Worker, "submit", full)
    assert response(server, {"prompt": "a", "max_tokens": 1})[0] == 200


# The page

DONE = "/ s|reads/.test(document.getElementById('status')?.textContent) && document.getElementById('stop').disabled"
TEXT = "document.getElementById('output').textContent"


@pytest.mark.skipif(
    browser.PROGRAM is None, reason="no browser: neither chromium nor google-chrome is on the path"
)
def test_the_page_writes_in_a_browser(server: Server) -> None:
    whole = text_of(completion(server, max_tokens=20, ignore_eos=False))
    with browser.page() as page:
        page.shape(400, 800)
        page.go(
            f"{server.url}#mode=text&prompt={PROMPT.replace(' ', '+')}&temperature=0&length=20&run"
        )
        page.until(DONE)
        assert page.value(TEXT) == PROMPT + whole
        status = page.value("document.getElementById('status').textContent")
        assert "20 tokens, " in status
        assert "tokens/s, first after" in status
        assert page.value("document.title") == "tiny"
        for width in (400, 1280):  # nothing reaches out of the window
            page.shape(width, 800)
            assert page.value("document.documentElement.scrollWidth") == width
        page.value("document.getElementById('as-chat').click()")
        page.value(
            "document.getElementById('prompt').value = 'hi'; document.getElementById('run').click()"
        )
        page.until(DONE)
        fields = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20,
            "temperature": 0,
        }
        answer: Any = response(server, fields, "/v1/chat/completions")[1]
        turns = page.value("[...document.querySelectorAll('.turn')].map(turn => turn.textContent)")
        assert turns == ["hi", answer["choices"][0]["message"]["content"]]
        page.go(f"{server.url}#mode=text&prompt={'a' * 33}&run")
        page.until(DONE)
        wrong = page.value("document.querySelector('#status.wrong').textContent")
        assert wrong == "the prompt has 33 tokens, and the model reads 32; shorten it"


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    status, page = response(server, path="/")
    assert status == 200
    assert (
        re.findall(r"""(?:src|href)=["'](?!data:)|https?:|@import|url\(|innerHTML""", str(page))
        == []
    )


# Texts as they come


def written(text: str, *stops: str, ends: tuple[int, ...] = ()) -> tuple[list[str], StreamingText]:
    """What comes out of a text whose bytes come one by one."""
    ids = [*text.encode()]
    writing = StreamingText(Bytes(), (), len(ids), stops, ends)
    return [piece for token in ids if (piece := writing.add([token]))], writing


def test_characters_and_stops_wait_until_they_are_whole() -> None:
    pieces, writing = written("a€é!")
    assert pieces == ["a", "€", "é", "!"]
    assert (writing.finish, writing.count) == ("length", 7)
    pieces, writing = written("to be or", "€", "be o")
    assert pieces == ["t", "o", " "]
    assert (writing.finish, writing.count, writing.text) == ("stop", 7, "to ")
    pieces, writing = written("to be", "be or")  # what only began as a stop comes out at the end
    assert ("".join(pieces), writing.finish) == ("to be", "length")
    pieces, writing = written("ab.cd", ends=(ord("."),))
    assert ("".join(pieces), writing.finish, writing.count) == ("ab", "stop", 3)
    assert writing.add([65]) == ""


# The command


def test_ctrl_c_ends_the_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        words = ["serve", str(folder), "--data.tokenizer", "bytes", "--port"]
        listener.listen()
        assert main([*words, str(port)]) == 2
    assert "write another --port" in capfd.readouterr().err

    answers: list[bytes] = []

    def interrupt() -> None:
        try:
            deadline = time.monotonic() + 30
            while not answers and time.monotonic() < deadline:
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        answers.append(client.recv(12))
                time.sleep(0.01)
        finally:  # or the command would never end
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert main([*words, str(port)]) == 130
    thread.join()
    assert answers == [b"HTTP/1.1 200"]
    out, err = capfd.readouterr()
    assert f"serving tiny (completions, no chat template) at http://127.0.0.1:{port}/" in out
    assert "caution" not in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "70000"], "write a number from 0 to 65535"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen at 192.0.2.1"),
        (["--port", "0"], "no tokenizer at"),
        (
            ["--port", "0", "--data.tokenizer", "bytes", "--data.chat-template", "none.jinja"],
            "no chat template at none",
        ),
    ],
)
def test_a_wrong_command_is_told(
    folder: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), *words]) == 2
    assert text in capsys.readouterr().err


def test_local_addresses() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "evil.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
