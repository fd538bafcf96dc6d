"""Sampling: what the model sees, what is drawn, and when it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import generate_uncached

pytestmark = pytest.mark.core

VOCAB = 13
SEQ_LEN = 7


def successor(tokens):
    """Logits that make token + 1 certain at every position. Causal: each position looks at itself."""
    return 30.0 * np.eye(VOCAB, dtype=np.float32)[(tokens + 1) % VOCAB]


def window_sum(tokens):
    """Logits that make the sum of all tokens up to a position certain: depends on the whole context."""
    return 30.0 * np.eye(VOCAB, dtype=np.float32)[np.cumsum(tokens, axis=1) % VOCAB]


def flat(tokens):
    """Tokens 2, 3 and 5 are likely in this order, the rest far less."""
    logits = np.full((*tokens.shape, VOCAB), -1.0, np.float32)
    logits[..., [2, 3, 5]] = [1.0, 0.9, 0.8]
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_successor_counts_through_the_sliding_window(temperature):
    tokens = generate_uncached.sample(
        successor, np.array([4]), 3 * SEQ_LEN, seq_len=SEQ_LEN, temperature=temperature
    )
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, (4 + np.arange(1 + 3 * SEQ_LEN)) % VOCAB)


@pytest.mark.parametrize("prompt_size", [1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 4])
def test_context_is_the_last_seq_len_tokens(prompt_size):
    prompt = (3 * np.arange(prompt_size) + 1) % VOCAB
    tokens = generate_uncached.sample(window_sum, prompt, 9, seq_len=SEQ_LEN, temperature=0.0)
    expected = list(prompt)
    for _ in range(9):
        expected.append(sum(expected[-SEQ_LEN:]) % VOCAB)
    np.testing.assert_array_equal(tokens, expected)


def test_padding_is_on_the_right_and_every_call_has_one_shape():
    calls = []

    def spy(tokens):
        calls.append(tokens.copy())
        return successor(tokens)

    generate_uncached.sample(spy, np.array([5, 6]), SEQ_LEN, seq_len=SEQ_LEN, temperature=0.0)
    assert {(tokens.shape, tokens.dtype) for tokens in calls} == {
        ((1, SEQ_LEN), np.dtype(np.int32))
    }
    np.testing.assert_array_equal(calls[0], [[5, 6, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(calls[-1], [(5 + np.arange(1, 1 + SEQ_LEN)) % VOCAB])


def test_padding_cannot_reach_a_causal_model_but_reaches_another():
    def with_padding(tokens, fill):
        # The same model on other padding: what follows the last token of the text, which is nonzero throughout.
        padded = np.where(np.cumsum(tokens[:, ::-1], axis=1)[:, ::-1] == 0, fill, tokens)
        return padded

    def run(model, fill):
        return generate_uncached.sample(
            lambda tokens: model(with_padding(tokens, fill)),
            np.array([1, 2]),
            4,
            seq_len=SEQ_LEN,
            temperature=0.0,
        )

    def peeks(tokens):
        return 30.0 * np.eye(VOCAB, dtype=np.float32)[np.full_like(tokens, tokens.sum()) % VOCAB]

    np.testing.assert_array_equal(run(successor, 0), run(successor, 9))
    assert not np.array_equal(
        run(peeks, 0), run(peeks, 9)
    )  # Control: a model that is not causal tells them apart.


def test_top_k_restricts_to_the_likeliest():
    def drawn(top_k):
        tokens = generate_uncached.sample(
            flat, np.array([0]), 300, seq_len=SEQ_LEN, temperature=1.5, top_k=top_k
        )
        return set(tokens[1:].tolist())

    assert drawn(1) == {2}
    assert drawn(2) == {2, 3}
    assert drawn(3) == {2, 3, 5}
    assert len(drawn(None)) > 8  # Control: without it the others come up.


def test_top_k_keeps_exactly_k_of_tied_tokens():
    tokens = generate_uncached.sample(
        lambda tokens: np.zeros((*tokens.shape, VOCAB)),
        np.array([0]),
        200,
        seq_len=SEQ_LEN,
        temperature=1.0,
        top_k=4,
    )
    assert len(set(tokens[1:].tolist())) == 4


def test_frequencies_follow_the_softmax():
    draws = generate_uncached.sample(flat, np.array([0]), 4000, seq_len=1, temperature=0.5, seed=3)[
        1:
    ]
    expected = np.exp(flat(np.zeros((1, 1), int))[0, 0] / 0.5)
    expected /= expected.sum()
    counts = np.bincount(draws, minlength=VOCAB) / draws.size
    # Five standard deviations of a frequency over 4000 draws.
    np.testing.assert_array_less(np.abs(counts - expected), 5 * np.sqrt(expected / draws.size))


def test_seed_decides_the_draws():
    def run(seed):
        return generate_uncached.sample(
            flat, np.array([0]), 40, seq_len=SEQ_LEN, temperature=2.0, seed=seed
        )

    np.testing.assert_array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_a_jitted_model_compiles_once():
    traces = []

    @jax.jit
    def model(tokens):
        traces.append(tokens.shape)
        return 30.0 * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB, dtype=jnp.bfloat16)

    before = generate_uncached._row._cache_size()
    tokens = generate_uncached.sample(
        model, np.array([1]), 2 * SEQ_LEN, seq_len=SEQ_LEN, temperature=0.0
    )
    np.testing.assert_array_equal(tokens, (1 + np.arange(1 + 2 * SEQ_LEN)) % VOCAB)
    assert traces == [(1, SEQ_LEN)]
    assert generate_uncached._row._cache_size() - before == 1


def test_masked_logits_are_never_drawn():
    def masked(tokens):
        logits = np.zeros((*tokens.shape, VOCAB), np.float32)
        logits[..., 4:] = -np.inf
        return logits

    tokens = generate_uncached.sample(masked, np.array([0]), 100, seq_len=SEQ_LEN, temperature=1.0)
    assert tokens.max() < 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_is_told(value, temperature):
    def diverged(tokens):
        return np.full((*tokens.shape, VOCAB), value, np.float32)

    with pytest.raises(FloatingPointError, match="diverged"):
        generate_uncached.sample(
            diverged, np.array([0]), 1, seq_len=SEQ_LEN, temperature=temperature
        )


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        (np.array([], np.int32), {}, "P >= 1"),
        (np.array([1.0]), {}, "float64"),
        (np.array([[1]]), {}, r"\(1, 1\)"),
        (np.array([1]), {"temperature": -1.0}, "write 0 for the likeliest"),
        (np.array([1]), {"top_k": 0}, "leave it out"),
    ],
)
def test_arguments_out_of_range(prompt, options, text):
    with pytest.raises(ValueError, match=text):
        generate_uncached.sample(successor, prompt, 1, seq_len=SEQ_LEN, **options)


def test_length_zero_returns_the_prompt():
    np.testing.assert_array_equal(
        generate_uncached.sample(successor, np.array([3, 1]), 0, seq_len=SEQ_LEN), [3, 1]
    )
