"""Texts of an encoder-decoder, against the logits of all texts of their length."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import Program, assemble
from mupax.train.core.step import logits_of
from mupax.train.reuse.generate.denoised import Seq2SeqGenerator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig

V = 5
S = 6
T = 4
START = 3
END = 4
MODEL = EncoderDecoderConfig(
    width=8,
    depth=2,
    encoder_depth=1,
    num_heads=2,
    vocab_size=V,
    seq_len=S,
    target_len=T,
    positions="relative",
    distance_buckets=8,
    longest_distance=6,
    tied=False,
)
GREEDY = Sampling(temperature=0)


class Translator(NamedTuple):
    """A program with random parameters, and inputs of three lengths."""

    program: Program
    params: Any
    inputs: np.ndarray
    mask: np.ndarray

    def generator(self, sampling: Sampling = GREEDY, **options: Any) -> Seq2SeqGenerator:
        return Seq2SeqGenerator(
            self.program,
            self.params,
            self.program.inputs,
            start=START,
            end=END,
            sampling=sampling,
            **options,
        )

    def log_probabilities(self, texts: np.ndarray) -> np.ndarray:
        """Return those of every next token of N texts [N, T] for each input, [3, N, T, V]."""

        def of_text(text: jax.Array) -> jax.Array:
            start = jnp.full((3, 1), START, jnp.int32)
            decoder = jnp.concatenate([start, jnp.broadcast_to(text[:-1], (3, T - 1))], axis=1)
            batch = {"input_mask": self.mask, "decoder_inputs": decoder}
            logits = logits_of(
                self.program.definition,
                self.params,
                self.program.inputs,
                jnp.asarray(self.inputs),
                **batch,
            )
            return jax.nn.log_softmax(logits)

        return np.asarray(jax.jit(jax.vmap(of_text, out_axes=1))(texts))


@pytest.fixture(scope="module")
def translator() -> Translator:
    recipe = RECIPES["ed-tiny"]()
    data = dataclasses.replace(recipe.data, batch_size=3, eval_batch_size=3)
    config = dataclasses.replace(recipe, model=MODEL, data=data, mesh=MeshConfig(data=1)).resolved()
    program = assemble(config, jax.devices()[:1])
    random = np.random.default_rng(11)  # where the likeliest text begins with an unlikely token
    params = {}
    for name, leaf in program.abstract.params.items():
        std = 0.06 if name == "readout" else 1
        params[name] = jnp.asarray(random.normal(size=leaf.shape) * std, jnp.float32)
    inputs = random.integers(V, size=(3, S)).astype(np.int32)
    mask = (np.arange(S) < np.array([[S], [4], [1]])).astype(np.int32)
    return Translator(program, params, inputs, mask)


def test_texts_are_the_likeliest(translator: Translator) -> None:
    texts = np.array(list(itertools.product(range(V), repeat=T)), np.int32)
    log_probabilities = translator.log_probabilities(texts)
    chosen = np.take_along_axis(log_probabilities, texts[None, :, :, None], axis=-1)[..., 0]
    is_end = texts == END
    is_over = np.cumsum(is_end, axis=1) > is_end  # behind an end nothing counts
    count = (~is_over).sum(axis=1)
    score = np.where(is_over, 0, chosen).sum(axis=-1)

    def best(scores: np.ndarray) -> list[list[int]]:
        return [texts[i][: count[i]].tolist() for i in scores.argmax(axis=1)]

    def written(**options: Any) -> list[list[int]]:
        generator = translator.generator(**options)
        return [row.tolist() for row in generator.write(translator.inputs, translator.mask)]

    # So many beams that none is ever dropped; by the sum and by the mean of ln p.
    assert written(beams=V**T, length_penalty=0.0) == best(score)
    assert written(beams=V**T) == best(score / count)
    # Token by token: the likeliest after the likeliest.
    is_greedy = np.ones((3, len(texts)), bool)
    for t in range(T):
        step = np.where(is_greedy, np.where(is_over[:, t], 0, chosen[:, :, t]), -np.inf)
        is_greedy &= np.isclose(step, step.max(axis=1, keepdims=True))
    greedy = written()
    assert greedy == best(np.where(is_greedy, 0.0, -1.0)) == written(beams=1)
    assert best(score) != greedy  # else nothing was searched


def test_draws_depend_on_the_seed_and_lengths_are_checked(translator: Translator) -> None:
    generator = translator.generator(Sampling(temperature=3.0))

    def drawn(seed: int) -> list[list[int]]:
        rows = generator.write(translator.inputs, translator.mask, seed=seed)
        return [row.tolist() for row in rows]

    assert drawn(1) == drawn(1) != drawn(2)
    with pytest.raises(DecodingError, match="write 1 to 4"):
        generator.write(translator.inputs, translator.mask, 5)
    with pytest.raises(DecodingError, match="write temperature 0"):
        translator.generator(Sampling(), beams=2)
