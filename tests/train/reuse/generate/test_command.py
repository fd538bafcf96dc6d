"""The sampler without a cache, against which the cache is held: context, draws and compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import generate_uncached

pytestmark = pytest.mark.core

VOCAB = 13
SEQ_LEN = 7


def successor(tokens):
    """Return logits that make token + 1 certain at every position, which looks at itself alone."""
    return 30.0 * np.eye(VOCAB, dtype=np.float32)[(tokens + 1) % VOCAB]


def window_sum(tokens):
    """Return logits that make the sum of all tokens up to a position certain."""
    return 30.0 * np.eye(VOCAB, dtype=np.float32)[np.cumsum(tokens, axis=1) % VOCAB]


def flat(tokens):
    """Return logits by which tokens 2, 3 and 5 are likely in this order, the rest far less."""
    logits = np.full((*tokens.shape, VOCAB), -1.0, np.float32)
    logits[..., [2, 3, 5]] = [1.0, 0.9, 0.8]
    return logits


def sample(logits_fn, prompt, length, **options):
    options = {"seq_len": SEQ_LEN, "temperature": 0.0, **options}
    return generate_uncached.sample(logits_fn, np.array(prompt), length, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_successor_counts_through_the_sliding_window(temperature):
    tokens = sample(successor, [4], 3 * SEQ_LEN, temperature=temperature)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, (4 + np.arange(1 + 3 * SEQ_LEN)) % VOCAB)


@pytest.mark.parametrize("prompt_size", [1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 4])
def test_context_is_the_last_seq_len_tokens(prompt_size):
    prompt = (3 * np.arange(prompt_size) + 1) % VOCAB
    tokens = sample(window_sum, prompt, 9)
    expected = list(prompt)
    for _ in range(9):
        expected.append(sum(expected[-SEQ_LEN:]) % VOCAB)
    np.testing.assert_array_equal(tokens, expected)


def test_padding_is_on_the_right_and_every_call_has_one_shape():
    calls = []

    def spy(tokens):
        calls.append(tokens.copy())
        return successor(tokens)

    sample(spy, [5, 6], SEQ_LEN)
    assert {(tokens.shape, tokens.dtype) for tokens in calls} == {
        ((1, SEQ_LEN), np.dtype(np.int32))
    }
    np.testing.assert_array_equal(calls[0], [[5, 6, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(calls[-1], [(5 + np.arange(1, 1 + SEQ_LEN)) % VOCAB])


def test_padding_cannot_reach_a_causal_model_but_reaches_another():
    def with_padding(tokens, fill):
        # The text is nonzero throughout, and the padding follows its last token.
        is_padding = np.cumsum(tokens[:, ::-1], axis=1)[:, ::-1] == 0
        return np.where(is_padding, fill, tokens)

    def run(model, fill):
        return sample(
            lambda tokens: model(with_padding(tokens, fill)),
            np.array([1, 2]),
            4,
        )

    def peeks(tokens):
        return 30.0 * np.eye(VOCAB, dtype=np.float32)[np.full_like(tokens, tokens.sum()) % VOCAB]

    np.testing.assert_array_equal(run(successor, 0), run(successor, 9))
    assert not np.array_equal(
        run(peeks, 0), run(peeks, 9)
    )  # Control: a model that is not causal tells them apart.


def test_top_k_restricts_to_the_likeliest():
    def drawn(top_k):
        tokens = sample(flat, [0], 300, temperature=1.5, top_k=top_k)
        return set(tokens[1:].tolist())

    assert drawn(1) == {2}
    assert drawn(2) == {2, 3}
    assert drawn(3) == {2, 3, 5}
    assert len(drawn(None)) > 8  # Control: without it the others come up.


def test_top_k_keeps_exactly_k_of_tied_tokens():
    tokens = sample(
        lambda tokens: np.zeros((*tokens.shape, VOCAB)),
        np.array([0]),
        200,
        temperature=1.0,
        top_k=4,
    )
    assert len(set(tokens[1:].tolist())) == 4


def test_frequencies_follow_the_softmax():
    draws = sample(flat, [0], 4000, seq_len=1, temperature=0.5, seed=3)[1:]
    expected = np.exp(flat(np.zeros((1, 1), int))[0, 0] / 0.5)
    expected /= expected.sum()
    counts = np.bincount(draws, minlength=VOCAB) / draws.size
    # Five standard deviations of a frequency over 4000 draws.
    np.testing.assert_array_less(np.abs(counts - expected), 5 * np.sqrt(expected / draws.size))


def test_seed_decides_the_draws():
    def run(seed):
        return sample(flat, [0], 40, temperature=2.0, seed=seed)

    np.testing.assert_array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_a_jitted_model_compiles_once():
    traces = []

    @jax.jit
    def model(tokens):
        traces.append(tokens.shape)
        return 30.0 * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB, dtype=jnp.bfloat16)

    row: Any = generate_uncached._row
    before = row._cache_size()
    tokens = sample(model, [1], 2 * SEQ_LEN)
    np.testing.assert_array_equal(tokens, (1 + np.arange(1 + 2 * SEQ_LEN)) % VOCAB)
    assert traces == [(1, SEQ_LEN)]
    assert row._cache_size() - before == 1


def test_masked_logits_are_never_drawn():
    def masked(tokens):
        logits = np.zeros((*tokens.shape, VOCAB), np.float32)
        logits[..., 4:] = -np.inf
        return logits

    tokens = sample(masked, [0], 100, temperature=1.0)
    assert tokens.max() < 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_is_told(value, temperature):
    def diverged(tokens):
        return np.full((*tokens.shape, VOCAB), value, np.float32)

    with pytest.raises(FloatingPointError, match="diverged"):
        sample(diverged, [0], 1, temperature=temperature)


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        (np.array([], np.int32), {}, "P >= 1"),
        (np.array([1.0]), {}, "float64"),
        (np.array([[1]]), {}, r"\(1, 1\)"),
        ([1], {"temperature": -1.0}, "write 0 for the likeliest"),
        ([1], {"top_k": 0}, "leave it out"),
    ],
)
def test_arguments_out_of_range(prompt, options, text):
    with pytest.raises(ValueError, match=text):
        sample(successor, prompt, 1, **options)


def test_length_zero_returns_the_prompt():
    np.testing.assert_array_equal(sample(successor, [3, 1], 0), [3, 1])
