"""Texts scored and continued by a model: against its logits read whole, and against the evaluation of runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.train.reuse import runs, trained
from mupax.train.reuse.harness.texts import TextError, Texts
from tests.train.reuse.test_source import MODEL, published

CONTEXT = 8
DECODER = dataclasses.replace(MODEL, vocab_size=256, seq_len=CONTEXT, depth=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("texts") / "weights", DECODER)


@pytest.fixture(scope="module")
def texts(weights: Path) -> Texts:
    return Texts(weights, tokenizer="bytes")


@pytest.fixture(scope="module")
def logprobs(weights: Path) -> Any:
    """Logarithms of probabilities after the tokens of a text of `CONTEXT`, [T, V]."""
    run = trained.open_model(weights, tokenizer="bytes")
    program = runs.on_one_device(run.config)
    params, factors = run.params(program.abstract), program.inputs.factors
    apply = jax.jit(
        lambda x: jax.nn.log_softmax(
            program.definition.apply(params, factors.multiplier, factors.forward, x)
        )
    )

    def read(text: bytes) -> np.ndarray:
        return np.asarray(
            apply(
                np.pad(np.frombuffer(text, np.uint8), (0, CONTEXT - len(text)))[None].astype(
                    np.int32
                )
            )
        )[0]

    return read


def summed(logp_TV: np.ndarray, text: bytes, count: int) -> float:
    """Of the last tokens of a text that was read from its first, after the token before it."""
    return float(sum(logp_TV[i - 1, text[i]] for i in range(len(text) - count, len(text))))


def test_a_continuation_has_the_probability_of_its_tokens(texts: Texts, logprobs: Any) -> None:
    pairs = [("abc", "de"), ("", "xyz"), ("ab ", "c"), ("0123456789", "ab")]
    # The last is too long: what is read is its end, with one token more than the context to predict.
    read = [(b"abcde", 2), (b"\0xyz", 3), (b"ab c", 2), (b"3456789ab", 2)]
    scores = texts.likelihoods(pairs)
    for score, (text, count) in zip(scores, read, strict=True):
        assert score.logprob == pytest.approx(summed(logprobs(text[:-1]), text, count), abs=2e-5)
    assert scores[0].logprob != pytest.approx(scores[1].logprob, abs=1e-2)  # the control


def test_greedy_is_what_would_be_written(texts: Texts, logprobs: Any) -> None:
    text = b"abc"
    while len(text) < 6:
        text += bytes([int(np.argmax(logprobs(text)[len(text) - 1][1:128])) + 1])
    wrong = text[:-1] + bytes([text[-1] ^ 1])
    written, tail = texts.continued("abc", [], max_tokens=3), text[3:].decode()
    likely, other = texts.likelihoods([("abc", tail), ("abc", wrong[3:].decode())])
    assert likely.greedy == (written == tail)
    assert not other.greedy
    assert (
        texts.continued("abc", [written[1]], max_tokens=3) == written[: written.index(written[1])]
    )


def test_a_rolling_text_has_every_token_once(texts: Texts, logprobs: Any) -> None:
    text = bytes(range(65, 65 + CONTEXT + 3))
    begun = b"\0" + text
    first = summed(logprobs(begun[:CONTEXT]), begun[: CONTEXT + 1], CONTEXT)
    last = summed(logprobs(begun[3:-1]), begun[3:], 3)
    assert texts.rolling([text.decode(), text[:5].decode(), ""]) == [
        pytest.approx(first + last, abs=2e-5), pytest.approx(summed(logprobs(begun[:5]), begun[:6], 5), abs=2e-5), 0
    ]  # fmt: skip


def test_our_evaluation_says_the_same(texts: Texts, weights: Path) -> None:
    """The loss of `eval` over windows of a run's evaluation is that of rolling texts of one window each."""
    run = trained.open_model(weights, tokenizer="bytes")
    program = runs.on_one_device(
        dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, batch_size=2))
    )
    words = ["eightlet", "other te"]
    rows = np.array([[0, *word.encode()] for word in words], np.int32)
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "weights": np.ones((2, CONTEXT), np.float32),
    }
    sums = program.compile_eval()(
        run.params(program.abstract), program.step_inputs(), program.eval_feed().shard_batch(batch)
    )
    assert sum(texts.rolling(words)) == pytest.approx(-float(sums.loss), rel=1e-6)


def test_what_cannot_be_scored_is_said(texts: Texts, weights: Path) -> None:
    with pytest.raises(TextError, match="has 9 tokens, and from 1 to 8 can be scored"):
        texts.likelihoods([("a", "x" * 9)])
    with pytest.raises(TextError, match="has 0 tokens"):
        texts.likelihoods([("a", "")])
    for words, message in {
        f"eval {weights} --limit 3": "--limit is of tasks; add --tasks TASK",
        f"eval {weights} --tasks a --limit 0": "--limit is 0; write a whole number of at least 1",
    }.items():
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            assert main(words.split()) == 2
        assert message in " ".join(err.getvalue().split())
