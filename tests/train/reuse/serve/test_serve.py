"""Serving: texts are those of `generate`, wrong requests are refused, one program serves a shape."""

from __future__ import annotations

import concurrent.futures
import errno
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
from mupax.command_line import UsageError
from mupax.train.config.preset import PresetConfig
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.reuse.generate.decode import Scores
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.texts import Texts
from mupax.train.reuse.generate.writing import AnswerEnd, StreamingText
from mupax.train.reuse.huggingface.files import write_imported
from mupax.train.reuse.serve import worker
from mupax.train.reuse.serve.fields import request as requested
from mupax.train.reuse.serve.server import Server, is_local, listening
from mupax.train.reuse.serve.service import Probabilities
from scripts.pages import browser
from tests.fixtures.generators import shared_generators
from tests.fixtures.small_tokenizers import sentencepiece, subwords
from tests.train.reuse.commands import Result, call, refuse, succeed
from tests.train.reuse.random_weights import imported, random_params, source_of
from tests.train.reuse.serve.serving import CHAT, MODEL, request, service_of, serving

__all__ = ["shared_generators"]  # a fixture

SEQ_LEN = MODEL.seq_len
PROMPT = "to be"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] ~ m.content ~ '|' }}{% endfor %}"
    "{{ 'a' if add_generation_prompt }}"
)
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights alone of a model that writes ASCII, and a chat template."""
    out = imported(tmp_path_factory.mktemp("serve") / "tiny", MODEL)
    (out / "chat.jinja").write_text(TEMPLATE)
    return out


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, chat_template=str(folder / "chat.jinja")) as http_server:
        yield http_server


def generated(folder: Path, prompt: str, length: int, tokenizer: str | Path = "bytes") -> str:
    """Return the greedy text of `generate`, its prompt included."""
    flags = f"--temperature 0 --tokens {length} --data.tokenizer {tokenizer}"
    return succeed("generate", folder, flags, ["--prompt", prompt]).out.removesuffix("\n")


def completion(server: Server, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """Return the answer of a request that must work.

    Args:
        fields: Fields of the request. By default it is greedy and goes on through ends of documents.
    """
    answer = request(server, {"prompt": prompt, **GREEDY, **fields})
    assert answer.status == 200, answer
    return answer.body


def chat_answer(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the greedy choice of a chat."""
    answer = request(server, {"messages": messages, "temperature": 0, **fields}, CHAT)
    assert answer.status == 200, answer
    return answer.body["choices"][0]


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    assert answer["choices"][index]["index"] == index
    return answer["choices"][index]["text"]


def events(stream: str) -> list[Any]:
    """Return the chunks of a stream, which must end as streams do."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(server: Server, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """Return the chunks of the answer to a request."""
    return events(request(server, {**GREEDY, **fields, "stream": True}, path).body)


def test_greedy_text_is_that_of_generate(server: Server, folder: Path) -> None:
    length = SEQ_LEN + 9  # past the end of the context
    answer = completion(server, max_tokens=length)
    assert PROMPT + text_of(answer) == generated(folder, PROMPT, length)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": length,
        "total_tokens": length + 5,
    }
    assert text_of(completion(server, [*PROMPT.encode()], max_tokens=length)) == text_of(answer)


def test_a_chat_without_a_length_fills_the_context(server: Server) -> None:
    def usage(content: str) -> dict[str, int]:
        fields = {"messages": [{"role": "user", "content": content}], **GREEDY}
        return request(server, fields, CHAT).body["usage"]

    assert usage("hi")["total_tokens"] == SEQ_LEN
    # A prompt that fills the context by itself leaves one token; the template adds three.
    assert usage("a" * (SEQ_LEN - 3))["completion_tokens"] == 1


def test_one_program_serves_a_bucket_of_lengths_and_every_sampling(server: Server) -> None:
    slots = service_of(server).worker.slots
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
    def text(fields: dict[str, Any]) -> str:
        return text_of(completion(server, **fields))

    first = {"prompt": "ab", "seed": 1, "temperature": 1, "max_tokens": 40}
    requests = [first, {**first, "prompt": "ba", "seed": 2}]
    alone = [text(fields) for fields in requests]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(text, requests)) == alone
    assert alone[0] != text({**first, "seed": 9})  # Control: the seed counts.


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
    chunks = streamed(server, prompt=PROMPT, **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(answer)


def test_a_stream_is_the_same_text_in_pieces(server: Server) -> None:
    fields: Any = {
        "prompt": PROMPT,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 20,
        "n": 2,
        "echo": True,
    }
    *chunks, usage = streamed(server, **fields, stream_options={"include_usage": True})
    pieces = ["", ""]
    ends = {}
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
    # Greedy: each is the likeliest, of which two are named.
    for position in range(len(PROMPT), len(answer["text"])):
        best = logprobs["top_logprobs"][position]
        assert max(best.values()) == logprobs["token_logprobs"][position] < 0
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
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    choice = chat_answer(server, messages, max_tokens=20, ignore_eos=True, logprobs=True)
    expected = text_of(completion(server, "uhi|a", max_tokens=20))
    assert choice["message"] == {"role": "assistant", "content": expected}
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == expected
    chunks = streamed(server, CHAT, messages=messages, max_tokens=20)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    assert service_of(server)._answer_end == AnswerEnd(frozenset(), ("|",))


def test_a_completion_of_a_run_of_chats_ends_where_an_answer_does(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUPAX_DATA", str(tmp_path / "cache"))
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    with open(tmp_path / "talks.jsonl", "w") as file:
        for number in range(200):
            answer = {"role": "assistant", "content": f"to be {number}"}
            file.write(json.dumps({"messages": [*HI, answer]}) + "\n")
    run = tmp_path / "run"
    succeed(
        f"train lm-tiny --data.name chat:{tmp_path / 'talks.jsonl'} --data.chat-template {template}",
        "--model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 32",
        "--data.batch-size 8 --data.eval-batch-size 8 --data.eval-examples 8",
        f"--log.no-tensorboard --log.no-samples --optimizer.warmup-steps 0 --steps 20 "
        f"--workdir {run}",
    )
    with serving(run, None) as http_server:
        endless = text_of(completion(http_server, max_tokens=20))
    # The template of the second server puts a character of this text after an answer.
    ending = next(letter for letter in endless if letter.isalnum())
    template.write_text(TEMPLATE.replace("|", ending))
    with serving(run, None, chat_template=str(template)) as http_server:
        ended = completion(http_server, max_tokens=20, ignore_eos=False)["choices"][0]
        assert ended["text"] == endless.partition(ending)[0]
        assert ended["finish_reason"] == "stop"
        assert text_of(completion(http_server, max_tokens=20)) == endless, "the control"

    # The control: weights with a template may be of a model of plain text.
    weights_text = text_of(completion(server, max_tokens=20))
    answer_end = AnswerEnd(frozenset(), (weights_text[3],))
    monkeypatch.setattr(service_of(server), "_answer_end", answer_end)
    assert text_of(completion(server, max_tokens=20, ignore_eos=False)) == weights_text


def test_text_is_decoded_after_its_prompt_and_bytes_are_the_tokens_own(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer = subwords(file, sentencepiece("日é".encode(), more_words=100))
    assert MODEL.vocab_size <= tokenizer.vocab_size  # every id of the model is some text
    prompt = "hello the"
    length = 18
    with serving(folder, str(file), chat_template=str(folder / "chat.jinja")) as server:
        generator = service_of(server).worker.generator
        prompt_ids = tokenizer.encode([prompt.encode()])[0]
        parts = list(generator.stream(prompt_ids, length, sampling=Sampling(0.0)))
        new_ids = np.concatenate(parts, axis=1)[0].tolist()
        text = tokenizer.decode([*prompt_ids.tolist(), *new_ids])[len(prompt) :]
        begins = text[:4]
        assert begins.startswith(" ")
        assert tokenizer.decode(new_ids) != text  # Control: alone it has no space.

        answer = completion(server, prompt, max_tokens=length, logprobs=2, echo=True)["choices"][0]
        assert answer["text"] == prompt + text
        tokens = answer["logprobs"]["tokens"]
        assert "".join(tokens) == answer["text"]
        for offset, token in zip(answer["logprobs"]["text_offset"], tokens, strict=True):
            assert answer["text"][offset:].startswith(token)
        chunks = streamed(server, prompt=prompt, max_tokens=length)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        stopped = completion(server, prompt, max_tokens=length, stop=begins)["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")

        fields: Any = {"max_tokens": length, "ignore_eos": True}
        choice = chat_answer(server, HI, **fields, logprobs=True, top_logprobs=3)
        content = choice["logprobs"]["content"]
        joined = b"".join(bytes(entry["bytes"]) for entry in content)
        assert joined.decode() == choice["message"]["content"]
        assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in content)
    assert generated(folder, prompt, length, file) == prompt + text
    assert generated(folder, prompt, length, f"{file} --samples 2").count(prompt + text) == 2
    harness = Texts(folder, tokenizer=str(file))
    assert harness.continued(prompt, [], max_tokens=length) == text
    assert harness.continued(prompt, [begins], max_tokens=length) == ""


# The conversation in a terminal


class Interrupted(io.StringIO):
    """Standard input whose reader presses Ctrl-C."""

    def readline(self, size: int = -1) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise KeyboardInterrupt


def test_a_conversation_in_the_terminal_is_that_of_the_server(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mupax.train.reuse.generate.writing.end_ids", lambda name, tokenizer: frozenset()
    )

    def chat(text: str | io.StringIO, words: str = "--tokens 6") -> Result:
        """Hold a greedy conversation with what is piped in."""
        monkeypatch.setattr("sys.stdin", io.StringIO(text) if isinstance(text, str) else text)
        flags = f"--chat --temperature 0 --chat-template {folder / 'chat.jinja'}"
        return call("generate", folder, flags, "--data.tokenizer bytes", words)

    code, out, err = chat("hi\n\nyo", "--tokens 6 --system be")
    assert code == 0
    messages = [{"role": "system", "content": "be"}]
    answers = []
    for message in ("hi", "yo"):
        messages.append({"role": "user", "content": message})
        choice = chat_answer(server, messages, max_tokens=6, ignore_eos=True)
        answers.append(choice["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert "--tokens 6" in err
    # A conversation longer than the context loses its oldest messages and goes on.
    code, out, err = chat("one two\nthree four\nfive six\n")
    assert code == 0
    assert "the context is full" in err
    code, alone, _ = chat("five six\n")
    assert code == 0
    assert out.endswith(f"\n{alone}")
    code, _, err = chat("a" * 40 + "\n", "")  # one message longer than the context
    assert code == 2
    assert "write a shorter one" in err
    assert chat("", "").code == 0
    assert chat(Interrupted(), "").code == 130


class Terminal(io.StringIO):
    """Standard input that a person types."""

    def isatty(self) -> bool:
        return True


def test_a_message_whose_answer_diverges_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mean of this row overflows, so no text with an "x" has finite logits.
    params = random_params(MODEL)
    params["token"][ord("x")] = 3e38
    out = tmp_path / "diverging"
    write_imported(source_of(MODEL, params), PresetConfig(name="sp"), out, "a test")
    (out / "chat.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(
        "mupax.train.reuse.generate.writing.end_ids", lambda name, tokenizer: frozenset()
    )

    def chat(text: str) -> Result:
        monkeypatch.setattr("sys.stdin", Terminal(text))
        flags = f"--chat --temperature 0 --tokens 6 --chat-template {out / 'chat.jinja'}"
        return succeed("generate", out, flags, "--data.tokenizer bytes")

    diverged = chat("x\nhi\n")
    assert diverged.err.count("the model has diverged") == 1
    assert diverged.out == chat("hi\n").out


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("", "--prompt"),
        ("--chat --prompt a", "--prompt"),
        ("--chat --samples 2", "--samples"),
        ("--chat --tokens 0", "--tokens"),
        ("--prompt a --system b", "--system"),
        ("--chat --data.tokenizer bytes", "--chat-template"),
    ],
)
def test_flags_of_a_conversation(folder: Path, words: str, flag: str) -> None:
    assert flag in refuse("generate", folder, words)


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
    answer = request(server, body)
    assert answer.status == status, answer
    error = answer.body["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    is_too_long = "33 tokens, and the model" in text
    assert (error["code"] == "context_length_exceeded") == is_too_long


def test_what_comes_elsewhere_or_from_elsewhere_is_refused(server: Server) -> None:
    assert request(server, path="/v1/nothing").status == 404
    assert request(server, path="/v1/completions").status == 405
    assert request(server, {"prompt": "a"}, Content_Type="text/plain").status == 415
    assert request(server, path="/health", Host="evil.example").status == 403
    health = request(server, path="/health", Host=f"localhost:{server.server_port}")
    assert (health.status, health.body) == (200, {"status": "ok"})
    (model,) = request(server, path="/v1/models").body["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == ("tiny", SEQ_LEN, True)
    for name in ("tiny?x=1", "%74iny"):
        assert request(server, path=f"/v1/models/{name}").body == model
    for name in ("other", "org/tiny", "org%2Ftiny", "tiny%2F", "%FF"):
        answer = request(server, path=f"/v1/models/{name}")
        assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")
    assert request(server, path="/v1/models/").status == 404
    assert request(server, {}, path="/v1/models/tiny").status == 405
    answer = request(server, {"messages": [{"role": "nobody", "content": "a"}]}, CHAT)
    assert answer.status == 400
    assert "messages[0] has the role 'nobody'" in answer.body["error"]["message"]


def test_without_a_template_a_chat_is_refused_and_a_full_queue_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_of(server), "template", None)
    answer = request(server, {"messages": HI}, CHAT)
    assert answer.status == 400
    assert "has no chat template" in answer.body["error"]["message"]

    def submit(self: worker.Worker, job: worker.Job) -> None:
        raise worker.BusyError

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "submit", submit)
        assert request(server, {"prompt": "a"}).status == 503
    assert request(server, {"prompt": "a", "max_tokens": 1}).status == 200


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
        turns = page.value("[...document.querySelectorAll('.turn')].map(turn => turn.textContent)")
        assert turns == ["hi", chat_answer(server, HI, max_tokens=20)["message"]["content"]]
        page.go(f"{server.url}#mode=text&prompt={'a' * 33}&run")
        page.until(DONE)
        wrong = page.value("document.querySelector('#status.wrong').textContent")
        assert wrong == "the prompt has 33 tokens, and the model reads 32; shorten it"


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    page = request(server, path="/")
    assert page.status == 200
    outside = r"""(?:src|href)=["'](?!data:)|https?:|@import|url\(|innerHTML"""
    assert re.findall(outside, page.body) == []


# Texts as they come


def written(text: str, *stops: str, ends: tuple[int, ...] = ()) -> tuple[list[str], StreamingText]:
    """Return the pieces of a text whose bytes come in turn, and its writer."""
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
        ("--port 70000", "write a number from 0 to 65535"),
        ("--host 192.0.2.1 --port 0", "cannot listen at 192.0.2.1"),
        ("--port 0", "no tokenizer at"),
        (
            "--port 0 --data.tokenizer bytes --data.chat-template none.jinja",
            "no chat template at none",
        ),
    ],
)
def test_a_wrong_command_is_refused(folder: Path, words: str, text: str) -> None:
    code, _, err = call("serve", folder, words)
    assert code == 2
    assert text in err


def test_a_machine_without_ipv6_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = os.strerror(errno.EAFNOSUPPORT)

    def no_family(family: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, reason)

    monkeypatch.setattr(socket, "socket", no_family)
    with pytest.raises(UsageError, match=f"cannot listen at ::1 port 0: {reason}; write another"):
        listening("::1", 0, 1)


def test_local_addresses() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "evil.example")] == [
        True, True, True, False, False,
    ]  # fmt: skip
