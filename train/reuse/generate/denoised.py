"""What a trained encoder-decoder makes of text with noise: of evaluation examples beside the text itself, or of a prompt."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax import terminal
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs
from mupax.train.data import Data
from mupax.train.data.show import restored, side_by_side, visible
from mupax.train.data.text.denoising import noise_of
from mupax.train.data.text.vocabulary import SpecialIds, special_ids
from mupax.train.reuse.generate.rewrite import Seq2SeqGenerator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.zoo.definition import Arrays

if TYPE_CHECKING:
    from mupax.train.checkpoints.saved_run import LoadedRun

GREEDY = Sampling(temperature=0)


def rewriter(program: Program, ids: SpecialIds, params: Arrays, inputs: StepInputs, **options: Any) -> Seq2SeqGenerator:
    """A writer that starts and ends texts as the targets of the run's data do.

    Args:
        program: of the run.
        ids: of its data.
        params: of the model.
        inputs: the program's numbers.
        **options: further ones of `Seq2SeqGenerator`.
    """
    start = ids.eos if program.config.data.noise == "infilling" else ids.pad
    return Seq2SeqGenerator(program, params, inputs, start=start, end=ids.eos, **options)


def main(args: Any, run: LoadedRun, tokenizer: Any, sampling: Sampling) -> int:
    """Write what the model makes of the prompt. Return 0.

    Args:
        args: `Generate`, the flags of the command.

    Raises:
        DecodingError: as `texts`.
    """
    if args.prompt == "-":
        args = dataclasses.replace(args, prompt=sys.stdin.read().removesuffix("\n"))
    for number, text in enumerate(texts(args, run, tokenizer, sampling), start=1):
        if args.samples > 1:
            print(f"--- sample {number}")
        print(text)
    return 0


def texts(args: Any, run: LoadedRun, tokenizer: Any, sampling: Sampling) -> list[str]:
    """Return what the model makes of a prompt, a text per sample. What it took goes to standard error.

    Args:
        args: has prompt, tokens, samples, beams, seed and workdir, as the command's flags.

    Raises:
        DecodingError: the prompt is longer than the model's inputs, or beams with a temperature.
    """
    from mupax.train.reuse import pretrained, runs

    began, config = time.monotonic(), run.config
    sizes, noise = config.model.sizes(), noise_of(config.data)
    ids = special_ids(tokenizer, noise.sentinels(noise.lengths(sizes["source"]).tokens), sizes["vocab"])
    prompt = _prompt(args.prompt, tokenizer, ids, bos=noise.name == "infilling")
    if len(prompt) > sizes["source"]:
        raise DecodingError(
            f"the prompt is {len(prompt)} tokens, and the model reads {sizes['source']}; write a shorter one"
        )
    inputs = np.full((args.samples, sizes["source"]), ids.pad, np.int32)
    inputs[:, : len(prompt)] = prompt
    mask = np.broadcast_to(np.arange(sizes["source"]) < len(prompt), inputs.shape)
    program = runs.on_one_device(config)
    params = run.params(program.abstract)
    writer = rewriter(program, ids, params, program.step_inputs(), sampling=sampling, beams=args.beams)
    rows = writer.write(inputs, mask, min(args.tokens, sizes["position"]), args.seed)
    written: list[str] = []
    for row in rows:
        tokens = restored(prompt, row, ids) if noise.name == "sentinels" else row.tolist()
        written.append(tokenizer.decode([i for i in tokens if i not in ids.names() and i < tokenizer.vocab_size]))
    count, seconds = sum(map(len, rows)), time.monotonic() - began
    terminal.note(f"{pretrained.described(run, args.workdir)}: {count:,} tokens in {seconds:.1f} s")
    return written


def _prompt(text: str, tokenizer: Any, ids: SpecialIds, *, bos: bool) -> np.ndarray:
    """A text in which words such as <mask> stand for ids, as an input of the model."""
    words = {word: token for token, word in ids.names().items()}
    parts = re.split(f"({'|'.join(map(re.escape, words))})", text)
    tokens = [
        np.array([words[part]]) if part in words else tokenizer.encode([part.encode("utf-8", "surrogateescape")])[0]
        for part in parts
        if part
    ]
    return np.concatenate([np.array([ids.bos] * bos, np.int32), *tokens, np.array([ids.eos])]).astype(np.int32)


def examples_text(program: Program, data: Data, params: Arrays, inputs: StepInputs, count: int = 2) -> str:
    """The first evaluation examples, in columns: the input with noise, what the model writes (greedily), and the text.

    Args:
        program, params, inputs: as of `rewriter`.
        data: of the run.
        count: how many, at most a batch.
    """
    of: Any = data
    pieces, names = of.tokenizer.pieces(), of.ids.names()
    pieces += [
        f"<{i}>" for i in range(len(pieces), program.config.model.sizes()["vocab"])
    ]  # ids that stand for nothing
    batch = of.eval_batch(0, slice(0, min(count, of.eval_size)))
    written = rewriter(program, of.ids, params, inputs, sampling=GREEDY).write(batch["inputs"], batch["input_mask"])
    blocks = []
    for i, row in enumerate(written):
        noised = batch["inputs"][i][batch["input_mask"][i] > 0]
        texts = {"written": row, "text": batch["targets"][i][batch["weights"][i] > 0]}
        if of.noise.name == "sentinels":
            texts = {name: restored(noised, tokens, of.ids) for name, tokens in texts.items()}
        columns = {"input": noised, **texts}
        blocks.append(side_by_side({name: visible(ids, pieces, names) for name, ids in columns.items()}))
    return "\n".join(blocks)
