"""Texts scored and continued by a model, against its logits and against the evaluation of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.reuse import runs, trained
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.texts import TextError, Texts
from mupax.train.reuse.harness import tasks
from tests.train.reuse.commands import refuse
from tests.train.reuse.random_weights import LLAMA, published

CONTEXT = 8
DECODER = dataclasses.replace(LLAMA, vocab_size=256, seq_len=CONTEXT, depth=1)
Logprobs = Callable[[bytes], np.ndarray]
"""Log-probabilities [T, V] after the tokens of a text of at most `CONTEXT` bytes."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("texts") / "weights", DECODER)


@pytest.fixture(scope="module")
def texts(weights: Path) -> Texts:
    return Texts(weights, tokenizer="bytes")


@pytest.fixture(scope="module")
def logprobs(weights: Path) -> Logprobs:
    run = trained.open_model(weights, tokenizer="bytes")
    program = runs.on_one_device(run.config)
    params = run.params(program.abstract)
    factors = program.inputs.factors
    apply = jax.jit(program.definition.apply)

    def read(text: bytes) -> np.ndarray:
        tokens = np.zeros((1, CONTEXT), np.int32)
        tokens[0, : len(text)] = list(text)
        logits = apply(params, factors.multiplier, factors.forward, tokens)
        return np.asarray(jax.nn.log_softmax(logits))[0]

    return read


def summed(logp_TV: np.ndarray, text: bytes, count: int) -> float:
    """Return the log-probability of the last tokens of a text, each after the token before it."""
    positions = range(len(text) - count, len(text))
    return float(sum(logp_TV[i - 1, text[i]] for i in positions))


def test_a_continuation_has_the_probability_of_its_tokens(texts: Texts, logprobs: Logprobs) -> None:
    pairs = [("abc", "de"), ("", "xyz"), ("ab ", "c"), ("0123456789", "ab")]
    # The last is too long. Its end is read, with one token more than the context to predict.
    read = [(b"abcde", 2), (b"\0xyz", 3), (b"ab c", 2), (b"3456789ab", 2)]
    scores = texts.likelihoods(pairs)
    for score, (text, count) in zip(scores, read, strict=True):
        assert score.logprob == pytest.approx(summed(logprobs(text[:-1]), text, count), abs=2e-5)
    assert scores[0].logprob != pytest.approx(scores[1].logprob, abs=1e-2)  # the control


def test_greedy_is_what_would_be_written(texts: Texts, logprobs: Logprobs) -> None:
    text = b"abc"
    while len(text) < 6:
        text += bytes([int(np.argmax(logprobs(text)[len(text) - 1][1:128])) + 1])
    wrong = text[:-1] + bytes([text[-1] ^ 1])
    written = texts.continued("abc", [], max_tokens=3)
    tail = text[3:].decode()
    likely, other = texts.likelihoods([("abc", tail), ("abc", wrong[3:].decode())])
    assert likely.greedy == (written == tail)
    assert not other.greedy
    before = written[: written.index(written[1])]
    assert texts.continued("abc", [written[1]], max_tokens=3) == before


def test_a_continuation_is_drawn_as_a_task_says(texts: Texts) -> None:
    """`top_k` is fixed in a program, where temperature and `top_p` are inputs."""
    likeliest = texts.continued("abc", [], max_tokens=5)
    assert texts.continued("abc", [], max_tokens=5, sampling=Sampling(1.0, top_k=1)) == likeliest
    drawn = set()
    for seed in range(8):
        sampling = Sampling(50.0, top_k=2, top_p=0.9)
        drawn.add(texts.continued("abc", [], max_tokens=1, sampling=sampling, seed=seed))
    assert len(drawn) == 2
    hot = {
        texts.continued("abc", [], max_tokens=1, sampling=Sampling(50.0), seed=i) for i in range(8)
    }
    assert len(hot) > 2


def test_a_rolling_text_has_every_token_once(texts: Texts, logprobs: Logprobs) -> None:
    text = bytes(range(65, 65 + CONTEXT + 3))
    begun = b"\0" + text
    first = summed(logprobs(begun[:CONTEXT]), begun[: CONTEXT + 1], CONTEXT)
    last = summed(logprobs(begun[3:-1]), begun[3:], 3)
    short = summed(logprobs(begun[:5]), begun[:6], 5)
    scores = texts.rolling([text.decode(), text[:5].decode(), ""])
    assert scores == pytest.approx([first + last, short, 0], abs=2e-5)


def test_our_evaluation_says_the_same(texts: Texts, weights: Path) -> None:
    """The loss of `eval` over a run's windows is that of rolling texts of one window each."""
    run = trained.open_model(weights, tokenizer="bytes")
    data = dataclasses.replace(run.config.data, batch_size=2)
    program = runs.on_one_device(dataclasses.replace(run.config, data=data))
    words = ["eightlet", "other te"]
    rows = np.array([[0, *word.encode()] for word in words], np.int32)
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "weights": np.ones((2, CONTEXT), np.float32),
    }
    evaluate = program.compile_eval()
    sharded = program.eval_feed().shard_batch(batch)
    sums = evaluate(run.params(program.abstract), program.step_inputs(), sharded)
    assert sum(texts.rolling(words)) == pytest.approx(-float(sums.loss), rel=1e-6)


def test_what_cannot_be_scored_is_refused(texts: Texts) -> None:
    with pytest.raises(TextError, match="has 9 tokens, and from 1 to 8 can be scored"):
        texts.likelihoods([("a", "x" * 9)])
    with pytest.raises(TextError, match="has 0 tokens"):
        texts.likelihoods([("a", "")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--limit 3", "only --tasks reads --limit; add --tasks TASK"),
        ("--tasks a --limit 0", "--limit is 0; write a whole number of at least 1"),
    ],
)
def test_limits_of_tasks_are_checked(weights: Path, words: str, message: str) -> None:
    assert message in refuse("eval", weights, words)


@pytest.mark.parametrize("words", ["--data.tokenizer", "--data.tokenizer="])
def test_a_tokenizers_path_may_have_spaces(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "my files/a=b/tokenizer.json"
    read: list[str | None] = []

    def measured(*_: object, tokenizer: str | None, **__: object) -> dict[str, object]:
        read.append(tokenizer)
        return {"tasks": {}}

    monkeypatch.setattr(tasks, "check", lambda: None)
    monkeypatch.setattr(tasks, "measured", measured)
    monkeypatch.setattr(tasks, "rows", lambda _: [["task", "metric"]])
    flag = [words + path] if words.endswith("=") else [words, path]
    assert main(["eval", "folder", "--tasks", "some", *flag]) == 0
    assert read == [path]
