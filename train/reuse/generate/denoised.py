"""Text from an encoder-decoder, for a prompt or for noised evaluation examples.

The encoder runs once, then each token costs one position. B inputs, S input tokens, T written
tokens, K beams per input, R = B x K rows with the beams of one input side by side, V vocabulary,
D width. A drawn token depends only on the seed, the row's number and the token's number.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import terminal
from mupax.terminal import counted
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs
from mupax.train.data import Data
from mupax.train.data.show import restored, side_by_side, visible
from mupax.train.data.text.denoising import noise_of
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.data.text.vocabulary import SpecialIds, special_ids
from mupax.train.reuse.generate.decode import centered, multiply_all
from mupax.train.reuse.generate.sampling import (
    DEFAULT,
    DecodingError,
    Sampling,
    draw,
    random_key,
)
from mupax.train.reuse.generate.writing import check_known
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.definition import Arrays
from mupax.zoo.layers import cache as kv_cache
from mupax.zoo.layers.cache import Cache
from mupax.zoo.transformer import transformer

GREEDY = Sampling(temperature=0)


class _DecoderState(NamedTuple):
    """State of the loop that writes one token of every row at a time.

    The R rows are K beams of each input; T is the largest number of tokens of a text.
    """

    number: Any
    """Number of tokens of every row, int32 []."""
    caches: Any
    """Keys and values of all tokens but the newest, one `Cache` per network."""
    out_RT: Any
    """Tokens, int32. Positions that are not written yet hold the end token."""
    done_R: Any
    """Whether a text has ended, bool."""
    score_R: Any
    """ln p of each text, float32."""
    count_R: Any
    """Number of tokens of each text with its end, int32."""
    finite: Any
    """Whether all logits so far were finite, bool []."""


class _NextToken(NamedTuple):
    """Next token of each of R rows, the row whose text it continues, and the resulting score."""

    parent_R: jax.Array
    """Row whose text this row continues, int32."""
    token_R: jax.Array
    """Next token, int32."""
    score_R: jax.Array
    """ln p of the text with that token, float32."""


class Seq2SeqGenerator:
    """Generator of text by an encoder-decoder. It compiles once per shape of inputs and length.

    Args:
        program: Program of the run. The parameters lie on its mesh, all of whose processes must
            make the generator and write with it.
        params: Parameters of the model as they are stored, without their multipliers.
        inputs: Factors, and reference parameters if the model's output is centered.
        start: Token that the decoder reads first. It is not part of the text.
        end: Token that ends a text and is its last token.
        first: Token that every text is forced to begin with, if any.
        last: Token that is forced at the last possible position, if any.
        sampling: How tokens are drawn. Temperature 0 if there are several beams.
        beams: K, number of texts that are kept for each input, the likeliest so far.
        length_penalty: Beams are compared by ln p / length^penalty. 1 is the mean over tokens.

    Raises:
        ConfigError: The model is no transformer of the zoo.
        DecodingError: `beams` is less than 1, or several beams have a temperature.
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
        self._model = transformer(program.config.model, "writing text")
        self._definition = program.definition
        self._layout = program.layout
        self._forward = inputs.factors.forward
        self._start = start
        self._end = end
        self._sampling = sampling
        self._first = first
        self._last = last
        self._beams = beams
        self._penalty = length_penalty

        networks = (params,) if inputs.reference is None else (params, inputs.reference)
        # The multipliers are applied once here, not at every token.
        self._weights = jax.jit(multiply_all)(networks, inputs.factors.multiplier)
        self._run = jax.jit(
            self._write_texts, static_argnums=2, out_shardings=program.layout.replicated
        )

    def write(
        self, inputs: np.ndarray, input_mask: np.ndarray, length: int | None = None, seed: int = 0
    ) -> list[np.ndarray]:
        """Return the text for each input, int32 [tokens], including its end token if it has ended.

        Args:
            inputs: int32 [B, S].
            input_mask: int32 [B, S], 0 at padding.
            length: Largest number of tokens. By default the model's longest text.
            seed: Seed of the random draws. Temperature 0 does not use it.

        Raises:
            DecodingError: The model cannot write texts of this length, or the logits are not
                finite: the model has diverged.
        """
        longest = self._model.sizes()["position"]
        if length is None:
            length = longest
        if not 1 <= length <= longest:
            raise DecodingError(
                f"{length} tokens cannot be written; write 1 to {longest}, the model's longest text"
            )
        arrays = (np.asarray(inputs, np.int32), np.asarray(input_mask, np.int32))
        out_BT, count_B, finite = self._run(self._weights, arrays, length, random_key(seed))
        if not finite:
            raise DecodingError(
                "the logits hold nan or inf: the model has diverged, there is nothing to write"
            )
        rows = zip(np.asarray(out_BT), np.asarray(count_B), strict=True)
        return [out_T[:count] for out_T, count in rows]

    # Methods below are traced by JAX.

    def _write_texts(
        self, weights: Any, arrays: tuple[jax.Array, jax.Array], length: int, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Write the best text of every input.

        Args:
            weights: Parameters of each network, times their multipliers.
            arrays: Inputs and their mask, both int32 [B, S].
            length: T, the largest number of tokens.

        Returns:
            The tokens, int32 [B, T], how many of them belong to each text, int32 [B], and whether
            all logits were finite, bool [].
        """
        num_rows = len(arrays[0]) * self._beams
        networks: list[Any] = [
            self._definition.bind(params, self._forward, layout=self._layout) for params in weights
        ]
        # The encoder runs once per input and not once per beam.
        memories = [net.remember(*arrays).repeated(self._beams) for net in networks]
        empty = tuple(kv_cache.empty(self._model, num_rows) for _ in weights)
        # All beams of an input begin alike. Only the first may go on, or all would be copies of it.
        is_first_R = jnp.arange(num_rows) % self._beams == 0
        start = _DecoderState(
            number=jnp.int32(0),
            caches=empty,
            out_RT=jnp.full((num_rows, length), self._end, jnp.int32),
            done_R=jnp.zeros(num_rows, bool),
            score_R=jnp.where(is_first_R, 0.0, -jnp.inf),
            count_R=jnp.zeros(num_rows, jnp.int32),
            finite=jnp.array(True),
        )

        def has_open_text(state: _DecoderState) -> jax.Array:
            return (state.number < length) & ~jnp.all(state.done_R)

        def step(state: _DecoderState) -> _DecoderState:
            return self._step(networks, memories, key, state)

        end = jax.lax.while_loop(has_open_text, step, start)
        # Every further token lowers ln p, so without the division short texts would usually win.
        mean_score_R = end.score_R / jnp.maximum(end.count_R, 1) ** self._penalty
        score_BK = mean_score_R.reshape(-1, self._beams)
        best_B = jnp.arange(len(score_BK)) * self._beams + jnp.argmax(score_BK, axis=1)
        return end.out_RT[best_B], end.count_R[best_B], end.finite

    def _step(
        self,
        networks: list[Any],
        memories: list[Any],
        key: jax.Array,
        state: _DecoderState,
    ) -> _DecoderState:
        """Return the state with one more token in every row, an end token for ended texts.

        With several beams, a row may go on with the text of another beam of its input.

        Args:
            networks: The model and, if its output is centred, the reference network, whose logits
                are subtracted.
            memories: Encoder's result for each network, one row per text.
            key: Key of all draws. The token's number is folded into it.
        """
        last_index = jnp.maximum(state.number - 1, 0)
        newest_R = jax.lax.dynamic_slice_in_dim(state.out_RT, last_index, 1, axis=1)[:, 0]
        newest_R1 = jnp.where(state.number == 0, self._start, newest_R)[:, None]

        logits = []
        caches = []
        for net, memory, cache in zip(networks, memories, state.caches, strict=True):
            h_R1D, filled = net.cached(newest_R1, cache, memory)
            logits.append(net.read(h_R1D)[:, 0])
            caches.append(filled)
        logits_RV = centered(logits)
        # The maximum is NaN if any logit is, and forbidden tokens may be -inf.
        finite = state.finite & jnp.all(jnp.isfinite(jnp.max(logits_RV, axis=-1)))

        logp_RV = jax.nn.log_softmax(logits_RV, axis=-1)
        last_position = state.out_RT.shape[1] - 1
        # As in `transformers`: mBART forces a language token at the start, and BART forces its end
        # token at the last position.
        for token, position in ((self._first, 0), (self._last, last_position)):
            if token is not None:
                forced_V = jnp.where(jnp.arange(logp_RV.shape[1]) == token, 0.0, -jnp.inf)
                logp_RV = jnp.where(state.number == position, forced_V, logp_RV)
        chosen = self._next_token(state, logp_RV, jax.random.fold_in(key, state.number))

        # Several of the best continuations may come from one beam. Every row copies the text that
        # it continues.
        parent_R = chosen.parent_R
        out_RT = state.out_RT[parent_R]
        done_R = state.done_R[parent_R]
        count_R = state.count_R[parent_R]
        # Other texts go on, so a text that has ended is filled up with end tokens.
        token_R = jnp.where(done_R, self._end, chosen.token_R)
        out_RT = jax.lax.dynamic_update_slice(out_RT, token_R[:, None], (0, state.number))
        if self._beams > 1:
            # The cache of a row must hold the keys and values of the text that the row now has.
            caches = [_reordered(cache, parent_R) for cache in caches]
        ended_R = done_R | (token_R == self._end)
        return _DecoderState(
            number=state.number + 1,
            caches=tuple(caches),
            out_RT=out_RT,
            done_R=ended_R,
            score_R=chosen.score_R,
            count_R=count_R + ~done_R,
            finite=finite,
        )

    def _next_token(self, state: _DecoderState, logp_RV: jax.Array, key: jax.Array) -> _NextToken:
        """Choose the text and the next token of each row.

        With one beam, each row keeps its text and draws a token. With several, the rows of an input
        get the K continuations of its beams with the highest ln p.
        """
        num_rows, vocab_size = logp_RV.shape
        if self._beams == 1:
            keys_R = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows))
            token_R = draw(logp_RV, keys_R, self._sampling)
            logp_R = jnp.take_along_axis(logp_RV, token_R[:, None], axis=1)[:, 0]
            own_row_R = jnp.arange(num_rows)
            score_R = state.score_R + jnp.where(state.done_R, 0.0, logp_R)
            return _NextToken(own_row_R, token_R, score_R)

        # A text that has ended can only repeat its end token, at no cost.
        ended_V = jnp.where(jnp.arange(vocab_size) == self._end, 0.0, -jnp.inf)
        scores_RV = state.score_R[:, None] + jnp.where(state.done_R[:, None], ended_V, logp_RV)
        scores_BN = scores_RV.reshape(-1, self._beams * vocab_size)
        # The beams of one input compete: one beam may have several of the best continuations.
        score_BK, index_BK = jax.lax.top_k(scores_BN, self._beams)
        beam_BK = index_BK // vocab_size
        first_row_B1 = self._beams * jnp.arange(len(index_BK))[:, None]
        parent_R = (beam_BK + first_row_B1).reshape(-1)
        token_R = (index_BK % vocab_size).reshape(-1)
        return _NextToken(parent_R, token_R, score_BK.reshape(-1))


def _reordered(cache: Cache, parent_R: jax.Array) -> Cache:
    """Return a cache whose row r holds the keys and values of row `parent_R[r]`."""
    return cache._replace(keys=cache.keys[:, parent_R], values=cache.values[:, parent_R])


def main(args: Any, model: TrainedModel, sampling: Sampling) -> int:
    """Print the texts that an encoder-decoder writes for the prompt. Return exit code 0.

    The prompt `-` is read from standard input.

    Args:
        args: Flags of the command, a `Generate`.

    Raises:
        TextIdsError, DecodingError: See `texts`.
    """
    if args.prompt == "-":
        args = dataclasses.replace(args, prompt=sys.stdin.read().removesuffix("\n"))
    for number, text in enumerate(texts(args, model, model.tokenizer(), sampling), start=1):
        if args.samples > 1:
            print(f"--- sample {number}")
        print(text)
    return 0


class Request(NamedTuple):
    """Prompt in tokens, and the tokens that begin and end the text that the model writes."""

    prompt: np.ndarray
    """int32 [P]."""
    pad: int
    """Token that pads the input."""
    ends: dict[str, Any]
    """Tokens that begin and end a text, as keyword arguments of `Seq2SeqGenerator`."""
    hidden: Collection[int]
    """Ids of special tokens, which are left out of the decoded text."""
    holes: SpecialIds | None = None
    """Special tokens if the model fills in holes of the prompt, else `None`."""


def texts(args: Any, model: TrainedModel, tokenizer: Any, sampling: Sampling) -> list[str]:
    """Load the model and return the texts that it writes for a prompt, one per sample.

    For a run trained by span corruption (sentinels), a text is the prompt with its holes filled in.
    Special tokens are left out. The number of tokens and the time go to standard error.

    Args:
        args: Object with the fields prompt, tokens, samples, beams and seed of `Generate`.

    Raises:
        TextIdsError: The files of published weights do not say which tokens start or end a text.
        DecodingError: The prompt is longer than the model's inputs, or has tokens that the model
            does not know. Or several beams have a temperature, `tokens` is 0, or the model has
            diverged.
    """
    from mupax.train.reuse import runs

    began = time.monotonic()
    sizes = model.model.sizes()
    if model.run is None:
        request = _request_of_weights(args.prompt, model, tokenizer)
    else:
        request = _request_of_run(args.prompt, model, tokenizer)
    prompt = request.prompt
    if not 0 < len(prompt) <= sizes["source"]:
        raise DecodingError(
            f"the prompt is {len(prompt)} tokens, and the model reads 1 to {sizes['source']}; "
            "write another"
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
        tokens = row.tolist()
        if request.holes is not None:
            tokens = restored(prompt, row, request.holes)
        # The model's vocabulary can be padded, so an id may be too large for the tokenizer.
        visible_ids = [
            token
            for token in tokens
            if token not in request.hidden and token < tokenizer.vocab_size
        ]
        written.append(tokenizer.decode(visible_ids))
    seconds = time.monotonic() - began
    terminal.note(
        f"{model.described}: {counted(sum(map(len, rows)), 'token', ',')} in {seconds:.1f} s"
    )
    return written


def _request_of_run(text: str, model: TrainedModel, tokenizer: Any) -> Request:
    """Return the request for a run, with the special tokens of its denoising task."""
    sizes = model.model.sizes()
    noise = noise_of(model.config.data)
    num_sentinels = noise.sentinels(noise.lengths(sizes["source"]).tokens)
    ids = special_ids(tokenizer, num_sentinels, sizes["vocab"])
    prompt = _prompt(text, tokenizer, ids, bos=noise.name == "infilling")
    holes = ids if noise.name == "sentinels" else None
    return Request(prompt, ids.pad, _ends(model.config, ids), ids.names(), holes)


def _request_of_weights(text: str, model: TrainedModel, tokenizer: Any) -> Request:
    """Return the request for published weights, with the special tokens that their files name.

    The library `transformers` uses the same tokens.
    """
    from mupax.train.reuse.huggingface import text_ids

    ids = text_ids.of(model.text_ids, model.workdir, model.model.sizes()["vocab"])
    end = np.array([ids.end]) if isinstance(tokenizer, Bytes) else tokenizer.end
    encoded = tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]
    prompt = np.concatenate([tokenizer.start, encoded, end]).astype(np.int32)
    check_known(prompt, model)
    ends = {"start": ids.start, "end": ids.end, "first": ids.first, "last": ids.last}
    return Request(prompt, ids.pad, ends, ids[:3])


def _ends(config: Config, ids: SpecialIds) -> dict[str, Any]:
    """Return tokens that begin and end a run's targets, as arguments of `Seq2SeqGenerator`."""
    # BART's decoder first reads the end token, T5's the padding token.
    start = ids.eos if config.data.noise == "infilling" else ids.pad
    return {"start": start, "end": ids.eos}


def _prompt(text: str, tokenizer: Any, ids: SpecialIds, *, bos: bool) -> np.ndarray:
    """Return a text as input of the model, int32 [P], with the token eos at its end.

    Words such as `<mask>` become the ids of the special tokens.

    Args:
        bos: Whether the input begins with the token bos, as in infilling.
    """
    words = {word: token for token, word in ids.names().items()}
    any_word = "|".join(map(re.escape, words))
    tokens = []
    for part in re.split(f"({any_word})", text):
        if part in words:
            tokens.append(np.array([words[part]]))
        elif part:
            tokens.append(tokenizer.encode([part.encode("utf-8", "surrogateescape")])[0])
    # BART's inputs have a token at both ends, those of T5 only at the end.
    start = np.array([ids.bos] * bos, np.int32)
    end = np.array([ids.eos])
    return np.concatenate([start, *tokens, end]).astype(np.int32)


def examples_text(
    program: Program, data: Data, params: Arrays, inputs: StepInputs, count: int = 2
) -> str:
    """Return the first evaluation examples as text in columns.

    The columns are the noised input, the text that the model writes greedily, and the target. With
    sentinels, the last two are shown as the input with its holes filled in. Every process of the
    run must call it.

    Args:
        data: Data of denoising, with noise, special ids and a tokenizer.
        params: Parameters as they are stored, without their multipliers.
        count: Number of examples, at most those of one batch.
    """
    noised_data: Any = data
    ids = noised_data.ids
    names = ids.names()
    pieces = noised_data.tokenizer.pieces()
    # The model's vocabulary can be larger than the tokenizer's. Ids without a piece show as <id>.
    vocab_size = program.config.model.sizes()["vocab"]
    pieces += [f"<{token}>" for token in range(len(pieces), vocab_size)]

    batch = noised_data.eval_batch(0, slice(0, min(count, noised_data.eval_size)))
    ends = _ends(program.config, ids)
    writer = Seq2SeqGenerator(program, params, inputs, **ends, sampling=GREEDY)
    written = writer.write(batch["inputs"], batch["input_mask"])

    blocks = []
    for index, row in enumerate(written):
        noised = batch["inputs"][index][batch["input_mask"][index] > 0]
        target = batch["targets"][index][batch["weights"][index] > 0]
        if noised_data.noise.name == "sentinels":
            row = restored(noised, row, ids)
            target = restored(noised, target, ids)
        columns = {
            "input": visible(noised, pieces, names),
            "written": visible(row, pieces, names),
            "text": visible(target, pieces, names),
        }
        blocks.append(side_by_side(columns))
    return "\n".join(blocks)
