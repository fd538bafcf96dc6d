"""Text of an encoder-decoder: of a prompt, or of evaluation examples with noise.

The encoder runs once, then every token costs one position. Loops run on the devices. B inputs, K beams of each, S inputs and T
tokens at most, V vocabulary. What is drawn depends on the seed, the row's number and the token's number alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import terminal
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs
from mupax.train.data import Data
from mupax.train.data.show import restored, side_by_side, visible
from mupax.train.data.text.denoising import noise_of
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.data.text.vocabulary import SpecialIds, special_ids
from mupax.train.reuse.generate.sampling import DEFAULT, DecodingError, Sampling, draw
from mupax.train.reuse.generate.writing import check_known
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.definition import Arrays, multiplied
from mupax.zoo.layers import cache as caches
from mupax.zoo.transformer import transformer

GREEDY = Sampling(temperature=0)


class _Text(NamedTuple):
    """Texts on the devices, R = B x K rows, the beams of one input side by side."""

    number: Any
    """Tokens of each, int32 []."""
    caches: Any
    """One per network."""
    out: Any
    """int32 [R, T]; behind an end stands more of it."""
    done: Any
    """Whether a text has ended, bool [R]."""
    score: Any
    """ln p of each, float32 [R]."""
    count: Any
    """Tokens until its end, int32 [R]."""
    finite: Any
    """Whether all logits so far were finite, bool []."""


class Seq2SeqGenerator:
    """Generator of text by an encoder-decoder. It compiles once per shape of inputs.

    Args:
        program: of the run; its mesh is where the parameters lie.
        params: of the model.
        inputs: the program's numbers: factors, and a reference where the model's output is centred.
        start: token before the first that is written.
        end: token that ends a text.
        first: the token that every text begins with, where there is one.
        last: the last token, where there is one, of a text that has not ended before.
        sampling: how tokens are drawn; with beams the likeliest are taken.
        beams: K texts are kept for each input, the likeliest so far; 1 takes a token at a time.
        length_penalty: beams are compared by ln p / length^penalty; 1 takes the mean over tokens.

    Raises:
        DecodingError: no beams, or beams and a temperature.
    """

    def __init__(
        self,
        program: Program,
        params: Arrays,
        inputs: StepInputs,
        *,
        start: int,
        end: int,
        first: int | None = None,
        last: int | None = None,
        sampling: Sampling = DEFAULT,
        beams: int = 1,
        length_penalty: float = 1.0,
    ) -> None:
        if beams < 1:
            raise DecodingError(f"beams is {beams}; write at least 1")
        if beams > 1 and sampling.temperature:
            raise DecodingError(
                f"{beams} beams take the likeliest tokens; write temperature 0 with them, or 1 beam"
            )
        self._model, self._definition = (
            transformer(program.config.model, "writing text"),
            program.definition,
        )
        self._layout, self._forward = program.layout, inputs.factors.forward
        self._start, self._end, self._sampling = start, end, sampling
        self._first, self._last = first, last
        self._beams, self._penalty = beams, length_penalty
        networks = (params,) if inputs.reference is None else (params, inputs.reference)
        apply = jax.jit(lambda networks, by: tuple(multiplied(dict(one), by) for one in networks))
        self._weights = apply(networks, inputs.factors.multiplier)
        self._run = jax.jit(
            self._written, static_argnums=2, out_shardings=program.layout.replicated
        )

    def write(
        self, inputs: np.ndarray, input_mask: np.ndarray, length: int | None = None, seed: int = 0
    ) -> list[np.ndarray]:
        """What is written for each input, int32 [tokens], its end with it where there is one.

        Args:
            inputs: int32 [B, S].
            input_mask: int32 [B, S], 0 at padding.
            length: tokens at most; the model's targets unless given.
            seed: of the draws.

        Raises:
            DecodingError: a length that the model does not have, or the logits are not numbers: the model has diverged.
        """
        most = self._model.sizes()["position"]
        length = most if length is None else length
        if not 1 <= length <= most:
            raise DecodingError(
                f"{length} tokens cannot be written; write 1 to {most}, the model's longest text"
            )
        arrays = np.asarray(inputs, np.int32), np.asarray(input_mask, np.int32)
        out_BT, count_B, finite = self._run(self._weights, arrays, length, jax.random.key(seed))
        if not finite:
            raise DecodingError(
                "the logits hold nan or inf: the model has diverged, there is nothing to write"
            )
        return [
            row[:count] for row, count in zip(np.asarray(out_BT), np.asarray(count_B), strict=True)
        ]

    def _written(
        self, weights: Any, arrays: tuple[jax.Array, jax.Array], length: int, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The best text of every input, int32 [B, length], its tokens, int32 [B], and whether all logits were finite."""
        rows = len(arrays[0]) * self._beams
        networks: list[Any] = [
            self._definition.bind(params, self._forward, layout=self._layout) for params in weights
        ]
        memories = [net.remember(*arrays).repeated(self._beams) for net in networks]
        empty = tuple(caches.empty(self._model, rows) for _ in weights)
        first_R = (
            jnp.arange(rows) % self._beams == 0
        )  # beams begin alike: all but one would be copies of it
        text = _Text(
            jnp.int32(0), empty, jnp.full((rows, length), self._end, jnp.int32), jnp.zeros(rows, bool),
            jnp.where(first_R, 0.0, -jnp.inf), jnp.zeros(rows, jnp.int32), jnp.array(True),
        )  # fmt: skip
        step = functools.partial(self._step, networks, memories, key)
        text = jax.lax.while_loop(
            lambda text: (text.number < length) & ~jnp.all(text.done), step, text
        )
        score_BK = (text.score / jnp.maximum(text.count, 1) ** self._penalty).reshape(
            -1, self._beams
        )
        best_B = jnp.arange(len(score_BK)) * self._beams + jnp.argmax(score_BK, axis=1)
        return text.out[best_B], text.count[best_B], text.finite

    def _step(self, networks: list[Any], memories: list[Any], key: jax.Array, text: _Text) -> _Text:
        """One token more of every text that has not ended."""
        newest_R = jax.lax.dynamic_slice_in_dim(
            text.out, jnp.maximum(text.number - 1, 0), 1, axis=1
        )[:, 0]
        newest_R1 = jnp.where(text.number == 0, self._start, newest_R)[:, None]
        logits, read = [], []
        for net, memory, cache in zip(networks, memories, text.caches, strict=True):
            h_R1D, filled = net.cached(newest_R1, cache, memory)
            logits.append(net.read(h_R1D)[:, 0])
            read.append(filled)
        logits_RV = logits[0] - logits[1] if len(logits) == 2 else logits[0]
        finite = text.finite & jnp.all(jnp.isfinite(jnp.max(logits_RV, axis=-1)))
        chances_RV = jax.nn.log_softmax(logits_RV, axis=-1)
        for token, at in ((self._first, 0), (self._last, text.out.shape[1] - 1)):
            if token is not None:
                only_V = jnp.where(jnp.arange(chances_RV.shape[1]) == token, 0.0, -jnp.inf)
                chances_RV = jnp.where(text.number == at, only_V, chances_RV)
        parent_R, token_R, score_R = self._choice(
            text, chances_RV, jax.random.fold_in(key, text.number)
        )
        out, done, count = text.out[parent_R], text.done[parent_R], text.count[parent_R]
        token_R = jnp.where(done, self._end, token_R)
        out = jax.lax.dynamic_update_slice(out, token_R[:, None], (0, text.number))
        if self._beams > 1:
            read = [
                one._replace(keys=one.keys[:, parent_R], values=one.values[:, parent_R])
                for one in read
            ]
        ended = done | (token_R == self._end)
        return _Text(text.number + 1, tuple(read), out, ended, score_R, count + ~done, finite)

    def _choice(
        self, text: _Text, chances_RV: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The text that each row goes on with, the token, and the score with it, all [R]."""
        rows, vocab = chances_RV.shape
        if self._beams == 1:
            keys_R = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
            token_R = draw(chances_RV, keys_R, self._sampling)
            gained_R = jnp.take_along_axis(chances_RV, token_R[:, None], axis=1)[:, 0]
            return jnp.arange(rows), token_R, text.score + jnp.where(text.done, 0.0, gained_R)
        # A text that has ended goes on in one way, with its end again, at no cost.
        ended_V = jnp.where(jnp.arange(vocab) == self._end, 0.0, -jnp.inf)
        scores_RV = text.score[:, None] + jnp.where(text.done[:, None], ended_V, chances_RV)
        score_BK, index_BK = jax.lax.top_k(scores_RV.reshape(-1, self._beams * vocab), self._beams)
        parent_BK = index_BK // vocab + self._beams * jnp.arange(len(index_BK))[:, None]
        return parent_BK.reshape(-1), (index_BK % vocab).reshape(-1), score_BK.reshape(-1)


def main(args: Any, model: TrainedModel, sampling: Sampling) -> int:
    """Write what the model makes of the prompt. Return 0.

    Args:
        args: `Generate`, the flags of the command.

    Raises:
        MupaxError: as `texts`.
    """
    if args.prompt == "-":
        args = dataclasses.replace(args, prompt=sys.stdin.read().removesuffix("\n"))
    for number, text in enumerate(texts(args, model, model.tokenizer(), sampling), start=1):
        if args.samples > 1:
            print(f"--- sample {number}")
        print(text)
    return 0


class Request(NamedTuple):
    """A prompt in tokens, and how the model is to write."""

    prompt: np.ndarray
    """int32 [P]."""
    pad: int
    """Fills the input up."""
    ends: dict[str, Any]
    """Tokens at the ends of a text, by their names in `Seq2SeqGenerator`."""
    hidden: Collection[int]
    """Tokens that stand for no text."""
    holes: SpecialIds | None = None
    """Tokens of the holes in the prompt that the model fills in; None if it writes a whole text."""


def texts(args: Any, model: TrainedModel, tokenizer: Any, sampling: Sampling) -> list[str]:
    """Return what the model makes of a prompt, a text per sample. What it took goes to standard error.

    Args:
        args: has prompt, tokens, samples, beams and seed, as the command's flags.

    Raises:
        TextIdsError: weights whose files do not say what starts or ends a text.
        DecodingError: a prompt that is longer than the model's inputs, or has tokens it does not know; beams with a temperature.
    """
    from mupax.train.reuse import runs

    began = time.monotonic()
    sizes = model.model.sizes()
    find_request = _request_of_weights if model.run is None else _request_of_run
    request = find_request(args.prompt, model, tokenizer)
    prompt = request.prompt
    if not 0 < len(prompt) <= sizes["source"]:
        raise DecodingError(
            f"the prompt is {len(prompt)} tokens, and the model reads 1 to {sizes['source']}; write another"
        )
    inputs = np.full((args.samples, sizes["source"]), request.pad, np.int32)
    inputs[:, : len(prompt)] = prompt
    mask = np.broadcast_to(np.arange(sizes["source"]) < len(prompt), inputs.shape)
    program = runs.on_one_device(model.config)
    params = model.params(program.abstract)
    options = {**request.ends, "sampling": sampling, "beams": args.beams}
    writer = Seq2SeqGenerator(program, params, program.step_inputs(), **options)
    rows = writer.write(inputs, mask, min(args.tokens, sizes["position"]), args.seed)
    written: list[str] = []
    for row in rows:
        tokens = row.tolist() if request.holes is None else restored(prompt, row, request.holes)
        written.append(
            tokenizer.decode(
                [i for i in tokens if i not in request.hidden and i < tokenizer.vocab_size]
            )
        )
    seconds = time.monotonic() - began
    terminal.note(f"{model.described}: {sum(map(len, rows)):,} tokens in {seconds:.1f} s")
    return written


def _request_of_run(text: str, model: TrainedModel, tokenizer: Any) -> Request:
    """Return a request whose text is noised as in the run's training."""
    sizes = model.model.sizes()
    noise = noise_of(model.config.data)
    ids = special_ids(
        tokenizer, noise.sentinels(noise.lengths(sizes["source"]).tokens), sizes["vocab"]
    )
    prompt = _prompt(text, tokenizer, ids, bos=noise.name == "infilling")
    holes = ids if noise.name == "sentinels" else None
    return Request(prompt, ids.pad, _ends(model.config, ids), ids.names(), holes)


def _request_of_weights(text: str, model: TrainedModel, tokenizer: Any) -> Request:
    """Return a request of published weights, whose files say what starts and ends a text, as `transformers` makes it."""
    from mupax.train.reuse.huggingface import text_ids

    ids = text_ids.of(model.text_ids, model.workdir, model.model.sizes()["vocab"])
    end = np.array([ids.end]) if isinstance(tokenizer, Bytes) else tokenizer.end
    encoded = tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]
    prompt = np.concatenate([tokenizer.start, encoded, end]).astype(np.int32)
    check_known(prompt, model)
    ends = {"start": ids.start, "end": ids.end, "first": ids.first, "last": ids.last}
    return Request(prompt, ids.pad, ends, ids[:3])


def _ends(config: Config, ids: SpecialIds) -> dict[str, Any]:
    """Return the tokens at the ends of a run's targets."""
    return {"start": ids.eos if config.data.noise == "infilling" else ids.pad, "end": ids.eos}


def _prompt(text: str, tokenizer: Any, ids: SpecialIds, *, bos: bool) -> np.ndarray:
    """A text in which words such as <mask> stand for ids, as an input of the model."""
    words = {word: token for token, word in ids.names().items()}
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text)
    tokens = [
        np.array([words[part]])
        if part in words
        else tokenizer.encode([part.encode("utf-8", "surrogateescape")])[0]
        for part in parts
        if part
    ]
    return np.concatenate(
        [np.array([ids.bos] * bos, np.int32), *tokens, np.array([ids.eos])]
    ).astype(np.int32)


def examples_text(
    program: Program, data: Data, params: Arrays, inputs: StepInputs, count: int = 2
) -> str:
    """The first evaluation examples, in columns: the input with noise, what the model writes (greedily), and the text.

    Args:
        program: of the run.
        params: of the model.
        inputs: the program's values.
        data: of the run.
        count: how many, at most a batch.
    """
    of: Any = data
    pieces, names = of.tokenizer.pieces(), of.ids.names()
    pieces += [
        f"<{i}>" for i in range(len(pieces), program.config.model.sizes()["vocab"])
    ]  # ids that stand for nothing
    batch = of.eval_batch(0, slice(0, min(count, of.eval_size)))
    ends = _ends(program.config, of.ids)
    writer = Seq2SeqGenerator(program, params, inputs, **ends, sampling=GREEDY)
    written = writer.write(batch["inputs"], batch["input_mask"])
    blocks = []
    for i, row in enumerate(written):
        noised = batch["inputs"][i][batch["input_mask"][i] > 0]
        texts = {"written": row, "text": batch["targets"][i][batch["weights"][i] > 0]}
        if of.noise.name == "sentinels":
            texts = {name: restored(noised, tokens, of.ids) for name, tokens in texts.items()}
        columns = {"input": noised, **texts}
        blocks.append(
            side_by_side({name: visible(ids, pieces, names) for name, ids in columns.items()})
        )
    return "\n".join(blocks)
