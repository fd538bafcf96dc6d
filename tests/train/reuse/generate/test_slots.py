"""Slots: a text is bitwise the same whatever is in the other slots, and that of the generator."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.slots import Slots, Text
from tests.train.reuse.generate.small_decoders import CENTERED, LLAMA, program_of

MODELS = {
    "rotary": LLAMA,
    "learned positions, centered": dataclasses.replace(CENTERED, depth=1),
    "windows and caps in a loop over layers": dataclasses.replace(
        LLAMA,
        window=3,
        full_every=2,
        attention_softcap=5.0,
        logit_softcap=9.0,
        depth=3,
        compute=dataclasses.replace(LLAMA.compute, layers="scan"),
    ),
    "experts in bfloat16": dataclasses.replace(
        LLAMA,
        experts=4,
        active_experts=2,
        expert_dim=16,
        depth=1,
        compute=dataclasses.replace(LLAMA.compute, dtype="bfloat16"),
    ),
}
SAMPLING = Sampling(temperature=1.5, top_p=0.9)
SAMPLINGS = (Sampling(0.0), Sampling(1.0), Sampling(0.7, None, 0.5))


@functools.cache
def generator_of(name: str) -> Generator:
    program, inputs, params = program_of(MODELS[name])
    return Generator(program, params, inputs, sampling=None)


@functools.cache
def compiled_slots(name: str) -> Slots:
    return Slots(generator_of(name), 4)


def empty_slots(name: str) -> Slots:
    """Return four slots. Those of a model share what they compile."""
    slots = compiled_slots(name)
    slots.reset()
    return slots


def text(seed: int = 7, length: int = 30, sampling: Sampling = SAMPLING) -> Text:
    return Text(np.array([3, 1, 4, 1, 5], np.int32), length, seed, seed % 2, sampling)


def written(slots: Slots, text: Text, most: int = 64) -> tuple[list[int], Any]:
    """Return the tokens of a text, and its cache when it is complete."""
    while not text.is_complete:
        slots.step(most)
    slots.put_aside(text)
    return text.written_ids, jax.tree.map(np.asarray, text.saved)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_bitwise_the_same_alone_and_among_others(name: str) -> None:
    slots = empty_slots(name)
    alone = text()
    slots.join(alone)
    tokens, cache = written(slots, alone)

    neighbours = [text(seed, 25 + seed, sampling) for seed, sampling in enumerate(SAMPLINGS)]
    for other in neighbours:
        slots.join(other)
    slots.step(3)
    slots.leave(neighbours[1])
    late = text()
    slots.join(late)  # in another slot, and while neighbours are in the middle of theirs
    slots.join(text(9))
    late_tokens, late_cache = written(slots, late, most=2)
    assert late_tokens == tokens
    for bits, late_bits in zip(jax.tree.leaves(cache), jax.tree.leaves(late_cache), strict=True):
        if bits.ndim:  # after the context lies what other texts left
            np.testing.assert_array_equal(
                bits[..., : alone.context, :].view(np.uint8),
                late_bits[..., : late.context, :].view(np.uint8),
            )
    assert neighbours[0].written_ids[:5] != tokens[:5]  # Control: neighbours differ.


def test_the_text_is_that_of_the_generator_and_the_row_counts() -> None:
    generator = generator_of("rotary")
    slots = empty_slots("rotary")
    expected = [*generator.stream(text().prompt, 30, 7, sampling=SAMPLING, samples=2)]
    rows = [Text(text().prompt, 30, 7, row, SAMPLING) for row in range(2)]
    for row in rows:
        slots.join(row)
    for row in rows:
        written(slots, row)
    np.testing.assert_array_equal(
        np.concatenate(expected, axis=1), [row.written_ids for row in rows]
    )
    assert rows[0].written_ids != rows[1].written_ids


def test_seeds_that_differ_above_32_bits_have_different_texts() -> None:
    slots = empty_slots("rotary")
    texts = [Text(text().prompt, 30, seed, 0, SAMPLING) for seed in (7, 2**32 + 7)]
    for large in texts:
        slots.join(large)
    tokens = [written(slots, large)[0] for large in texts]
    assert tokens[0] != tokens[1]
    (expected,) = np.concatenate(
        [*generator_of("rotary").stream(text().prompt, 30, 2**32 + 7, sampling=SAMPLING)], axis=1
    )
    np.testing.assert_array_equal(tokens[1], expected)


def test_a_text_that_is_put_aside_goes_on_as_if_it_had_stayed() -> None:
    slots = empty_slots("rotary")
    stays = text()
    slots.join(stays)
    tokens, _ = written(slots, stays)
    moved = text()
    slots.join(moved)
    slots.step(4)
    slots.put_aside(moved)
    other = text(1)
    slots.join(other)
    slots.step(5)
    slots.join(moved)
    assert written(slots, moved)[0] == tokens
    assert slots.texts.count(other) == 1
