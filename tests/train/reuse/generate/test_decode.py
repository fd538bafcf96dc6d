"""Generation: draws from logits, and texts as by the uncached model, past the end of the context."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.run import DataConfig, MeshConfig
from mupax.train.core.program import assemble
from mupax.train.core.step import logits_of
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.reuse.generate import decode
from mupax.train.reuse.generate.command import pieces
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling, draw
from mupax.zoo.configs import DecoderConfig
from tests.fixtures import generate_uncached
from tests.train.reuse.generate.small_decoders import CENTERED, LLAMA, SEQ_LEN, VOCAB, program_of

PROMPT = np.array([3, 1, 4, 1, 5])
LOGITS = jnp.asarray(np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32)))
"""Tokens 1, 3, 4, 2, 0 in order of probability have together 0.4, 0.7, 0.85, 0.95, 1."""
GREEDY = Sampling(temperature=0)


# What is drawn


def drawn(sampling: Sampling, logits: Any = LOGITS, count: int = 4000) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), count)
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    return np.asarray(jax.jit(lambda rows, keys: draw(rows, keys, sampling))(rows, keys))


def distribution(probabilities: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Return probabilities after the filters, which are written out token by token."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[:top_k]
    total = sum(probabilities[i] for i in order)
    left = []
    mass = 0.0
    for i in order:
        left.append(i)
        mass += probabilities[i] / total
        if top_p is not None and mass >= top_p - 1e-6:
            break
    weights = np.zeros_like(probabilities)
    weights[left] = probabilities[left]
    return weights / weights.sum()


@pytest.mark.core
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=2.0, top_k=50),
        Sampling(temperature=1.0, top_p=0.3),
        Sampling(temperature=1.0, top_p=0.41),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, top_p=1.0),
        Sampling(temperature=1.0, top_k=3, top_p=0.5),
        Sampling(temperature=0.3, top_p=0.9),
        Sampling(temperature=3.0, top_k=4, top_p=0.9),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_filters_written_out(sampling: Sampling) -> None:
    p = np.exp(np.asarray(LOGITS, np.float64) / sampling.temperature)
    expected = distribution(p / p.sum(), sampling.top_k, sampling.top_p)
    tokens = drawn(sampling)
    frequencies = np.bincount(tokens, minlength=len(p)) / tokens.size
    # Five standard deviations of a frequency; a token that is filtered out never comes.
    np.testing.assert_array_less(
        np.abs(frequencies - expected), 5 * np.sqrt(expected / tokens.size) + 1e-12
    )
    assert set(tokens) <= set(np.flatnonzero(expected))


@pytest.mark.core
def test_exactly_k_of_tied_tokens_and_none_that_is_masked() -> None:
    assert set(drawn(Sampling(1.0, top_k=2), jnp.zeros(5))) == {0, 1}
    assert set(drawn(Sampling(1.0, top_p=0.5), jnp.zeros(4))) == {0, 1}
    masked = jnp.where(jnp.arange(5) < 2, 0.0, -jnp.inf)
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=4), Sampling(1.0, top_p=1.0)):
        assert set(drawn(sampling, masked)) == {0, 1}
    assert set(drawn(GREEDY)) == {1}


@pytest.mark.parametrize("temperature", [1e-46, 1e-38, 1e-30])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature: float) -> None:
    for sampling in (Sampling(temperature), Sampling(temperature, top_p=0.5)):
        assert set(drawn(sampling, 100 * jnp.asarray(LOGITS))) == {1}


@pytest.mark.core
@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "temperature is -1; write 0 for the likeliest token"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top-k is 0; write at least 1"),
        ({"top_p": 0.0}, "top-p is 0.0; write a probability above 0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        Sampling(**sampling)


# Texts


def new_generator(
    model: DecoderConfig = LLAMA, sampling: Sampling = GREEDY, samples: int = 1
) -> Generator:
    program, inputs, params = program_of(model)
    return Generator(program, params, inputs, sampling=sampling, samples=samples)


generator = functools.cache(new_generator)


@functools.cache
def logits_program(model: DecoderConfig) -> Any:
    """Compile the logits of a complete context."""
    program, inputs, params = program_of(model)
    return jax.jit(lambda window: logits_of(program.definition, params, inputs, window))


def uncached(prompt: np.ndarray, length: int, model: DecoderConfig = LLAMA) -> np.ndarray:
    """Return the likeliest tokens, with the rule of the context's end written out."""
    text = list(prompt)
    context = text[-SEQ_LEN:]
    for _ in range(length):
        if len(context) > SEQ_LEN:
            context = text[-(SEQ_LEN // 2) :]
        window = np.zeros((1, SEQ_LEN), np.int32)
        window[0, : len(context)] = context
        token = int(np.asarray(logits_program(model)(window))[0, len(context) - 1].argmax())
        text.append(token)
        context.append(token)
    return np.array(text[len(prompt) :])


@pytest.mark.parametrize("model", [LLAMA, CENTERED], ids=["llama", "centered"])
def test_greedy_text_is_that_of_the_uncached_model_past_the_contexts_end(
    model: DecoderConfig,
) -> None:
    length = 3 * SEQ_LEN
    tokens = generator(model).complete(PROMPT, length)
    np.testing.assert_array_equal(tokens, [uncached(PROMPT, length, model)])
    assert len(set(tokens[0])) > 3  # Control: not one token over and over.


def test_within_the_context_it_is_the_text_of_the_plain_sampler() -> None:
    logits = logits_program(LLAMA)
    plain = generate_uncached.sample(logits, PROMPT, SEQ_LEN - 5, seq_len=SEQ_LEN, temperature=0)
    np.testing.assert_array_equal(generator().complete(PROMPT, SEQ_LEN - 5)[0], plain[5:])


def test_prompts_of_any_length_are_read() -> None:
    random = np.random.default_rng(0)
    for size in (1, 2, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3 * SEQ_LEN):
        prompt = random.integers(0, VOCAB, size)
        np.testing.assert_array_equal(generator().complete(prompt, 3)[0], uncached(prompt, 3))


def test_a_sample_depends_on_the_seed_and_its_number_alone() -> None:
    warm = Sampling(temperature=1.5, top_k=9, top_p=0.95)
    three = generator(sampling=warm, samples=3)
    alone = generator(sampling=warm)
    texts = three.complete(PROMPT, 20, seed=1)
    assert texts.shape == (3, 20)
    assert len({tuple(row) for row in texts}) == 3
    np.testing.assert_array_equal(alone.complete(PROMPT, 20, seed=1)[0], texts[0])
    np.testing.assert_array_equal(three.complete(PROMPT, 7, seed=1), texts[:, :7])
    for other in (2, 2**32 + 1, 2**64 + 1):
        assert not np.array_equal(alone.complete(PROMPT, 20, seed=other)[0], texts[0])


def test_a_stream_of_a_slow_device_comes_in_shorter_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = generator().stream(np.array([3]), 40)
    monkeypatch.setattr(decode, "_LIVELY_S", 1e9)
    assert [next(stream).shape[1] for _ in range(4)] == [1, 1, 2, 4]
    monkeypatch.setattr(decode, "_LIVELY_S", 0.0)
    sizes = [part.shape[1] for part in stream]
    assert max(sizes) <= 8
    assert sizes[-8:] == [1] * 8


def test_a_stream_gives_the_same_tokens_in_parts_and_compiles_once() -> None:
    sampler = new_generator()
    parts = list(sampler.stream(PROMPT, 20))
    assert len(parts) > 3
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), sampler.complete(PROMPT, 20))
    before = sampler.compilations
    sampler.complete(np.array([2, 2, 2, 2, 2, 2]), 30)
    assert sampler.compilations == before
    assert sampler.complete(PROMPT, 0).shape == (1, 0)


def test_a_mesh_gives_the_same_text() -> None:
    program, _, params = program_of(LLAMA)
    split = assemble(
        dataclasses.replace(
            program.config,
            mesh=MeshConfig(data=2, fsdp=2, tensor=2),
            data=DataConfig(name="text:x", batch_size=8),
        )
    )
    placed = {}
    for name, w in params.items():
        placed[name] = jax.device_put(np.asarray(w), split.abstract.params[name].sharding)
    on_mesh = Generator(split, placed, split.step_inputs(), sampling=GREEDY)
    np.testing.assert_array_equal(on_mesh.complete(PROMPT, 15), generator().complete(PROMPT, 15))


@pytest.mark.parametrize("prompt", [np.array([], np.int32), np.array([1.0]), np.array([[1]])])
def test_a_prompt_that_is_none_is_refused(prompt: np.ndarray) -> None:
    with pytest.raises(DecodingError, match="a prompt is at least one token"):
        generator().complete(prompt, 1)


def test_a_model_that_has_diverged_is_told() -> None:
    program, inputs, params = program_of(LLAMA)
    params = {**params, "readout": params["readout"].at[0, 0].set(jnp.nan)}
    with pytest.raises(DecodingError, match="the model has diverged"):
        Generator(program, params, inputs).complete(PROMPT, 1)


@pytest.mark.core
def test_a_character_waits_for_its_bytes() -> None:
    parts = [[111], [107, 0xC3], [0xA9], [0xE2, 0x82], [0xAC, 0xFF], [33], [0xC3]]
    assert list(pieces(iter(parts), Bytes())) == ["o", "k", "é", "€\ufffd", "!", "\ufffd"]
