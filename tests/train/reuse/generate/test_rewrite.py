"""What an encoder-decoder writes, against its logits computed whole and against all texts there are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import MeshConfig
from mupax.train.core.program import assemble
from mupax.train.core.step import logits_of
from mupax.train.reuse.generate.denoised import Seq2SeqGenerator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig

V, S, T, START, END = 5, 6, 4, 3, 4
MODEL = EncoderDecoderConfig(
    width=8, depth=2, encoder_depth=1, num_heads=2, vocab_size=V, seq_len=S, target_len=T, positions="relative",
    distance_buckets=8, longest_distance=6, tied=False,
)  # fmt: skip
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def run() -> tuple[Any, ...]:
    recipe = RECIPES["ed-tiny"]()
    data = dataclasses.replace(recipe.data, batch_size=3, eval_batch_size=3)
    config = dataclasses.replace(recipe, model=MODEL, data=data, mesh=MeshConfig(data=1)).resolved()
    program = assemble(config, jax.devices()[:1])
    random = np.random.default_rng(11)  # where the likeliest text begins with an unlikely token
    params = {
        name: jax.numpy.asarray(
            random.normal(size=leaf.shape) * (0.06 if name == "readout" else 1), np.float32
        )
        for name, leaf in program.abstract.params.items()
    }
    inputs = random.integers(V, size=(3, S)).astype(np.int32)
    mask = (np.arange(S) < np.array([[S], [4], [1]])).astype(np.int32)
    numbers = program.inputs

    @jax.jit
    def chances(texts: Any) -> Any:
        """ln p of every next token, [3, N, T, V], of N texts for each input."""

        def one(text: Any) -> Any:
            decoder = np.full((3, 1), START, np.int32)
            decoder = jax.numpy.concatenate(
                [decoder, jax.numpy.broadcast_to(text[:-1], (3, T - 1))], axis=1
            )
            batch = {"input_mask": mask, "decoder_inputs": decoder}
            return jax.nn.log_softmax(
                logits_of(program.definition, params, numbers, inputs, **batch)
            )

        return jax.vmap(one, out_axes=1)(texts)

    return program, params, numbers, inputs, mask, chances


def test_texts_are_the_likeliest(run: tuple[Any, ...]) -> None:
    program, params, numbers, inputs, mask, chances = run
    every = np.array(list(itertools.product(range(V), repeat=T)), np.int32)
    chance = np.take_along_axis(np.asarray(chances(every)), every[None, :, :, None], axis=-1)[
        ..., 0
    ]
    ended = np.cumsum(every == END, axis=1) - (every == END) > 0  # behind an end nothing counts
    count = (~ended).sum(axis=1)
    score = np.where(ended, 0, chance).sum(axis=-1)

    def best(of: np.ndarray) -> list[list[int]]:
        return [every[i][: count[i]].tolist() for i in of.argmax(axis=1)]

    def written(**options: Any) -> list[list[int]]:
        rewriter = Seq2SeqGenerator(
            program, params, numbers, start=START, end=END, sampling=GREEDY, **options
        )
        return [row.tolist() for row in rewriter.write(inputs, mask)]

    # So many beams that none is ever dropped; by the sum and by the mean of ln p.
    assert written(beams=V**T, length_penalty=0.0) == best(score)
    assert written(beams=V**T) == best(score / count)
    # Token by token: the likeliest after the likeliest.
    greedy = np.ones((3, len(every)), bool)
    for t in range(T):
        step = np.where(greedy, np.where(ended[:, t], 0, chance[:, :, t]), -np.inf)
        greedy &= np.isclose(step, step.max(axis=1, keepdims=True))
    assert written() == best(np.where(greedy, 0.0, -1.0)) == written(beams=1)
    assert best(score) != written()  # else nothing was searched


def test_draws_depend_on_the_seed_and_lengths_are_checked(run: tuple[Any, ...]) -> None:
    program, params, numbers, inputs, mask, _ = run
    rewriter = Seq2SeqGenerator(
        program, params, numbers, start=START, end=END, sampling=Sampling(temperature=3.0)
    )
    one, two, other = (rewriter.write(inputs, mask, seed=seed) for seed in (1, 1, 2))
    assert [row.tolist() for row in one] == [row.tolist() for row in two]
    assert [row.tolist() for row in one] != [row.tolist() for row in other]
    with pytest.raises(DecodingError, match="write 1 to 4"):
        rewriter.write(inputs, mask, 5)
    with pytest.raises(DecodingError, match="write temperature 0"):
        Seq2SeqGenerator(program, params, numbers, start=START, end=END, beams=2)
