"""What a published encoder-decoder writes for a text: weights alone, whose files say what starts and ends it."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax import terminal
from mupax.train.data.text.tokenizer import Bytes
from mupax.train.reuse import pretrained, runs
from mupax.train.reuse.generate.opened import check_known
from mupax.train.reuse.generate.rewrite import Seq2SeqGenerator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.train.reuse.huggingface import text_ids
from mupax.train.reuse.outline import MODEL, opened

if TYPE_CHECKING:
    from mupax.train.reuse.pretrained import LoadedWeights


def main(args: Any, run: LoadedWeights, tokenizer: Any, sampling: Sampling) -> int:
    """Write what the model makes of the prompt, as `transformers` does with the same tokens forced. Return 0.

    Args:
        args: `Generate`, the flags of the command.

    Raises:
        TextIdsError, DecodingError: as `texts`.
    """
    if args.prompt == "-":
        args = dataclasses.replace(args, prompt=sys.stdin.read().removesuffix("\n"))
    for number, text in enumerate(texts(args, run, tokenizer, sampling), start=1):
        if args.samples > 1:
            print(f"--- sample {number}")
        print(text)
    return 0


def texts(args: Any, run: LoadedWeights, tokenizer: Any, sampling: Sampling) -> list[str]:
    """Return what the model makes of a prompt, a text per sample. What it took goes to standard error.

    Args:
        args: has prompt, tokens, samples, beams, seed and workdir, as the command's flags.

    Raises:
        TextIdsError: the files do not say what starts or ends a text.
        DecodingError: a prompt that is longer than the model's inputs, or has tokens it does not know; beams with a temperature.
    """
    began, sizes = time.monotonic(), run.config.model.sizes()
    folder, fields, _ = opened(args.workdir)
    imported = (folder / MODEL).is_file()
    ids = text_ids.of(
        fields.get("text_ids", {}) if imported else text_ids.recorded(folder, fields), folder, sizes["vocab"]
    )
    end = np.array([ids.end]) if isinstance(tokenizer, Bytes) else tokenizer.end
    encoded = tokenizer.encode([args.prompt.encode("utf-8", "surrogateescape")])[0]
    prompt = np.concatenate([tokenizer.start, encoded, end]).astype(np.int32)
    check_known(prompt, run)
    if not 0 < len(prompt) <= sizes["source"]:
        raise DecodingError(
            f"the prompt is {len(prompt)} tokens, and the model reads 1 to {sizes['source']}; write another"
        )
    inputs = np.full((args.samples, sizes["source"]), ids.pad, np.int32)
    inputs[:, : len(prompt)] = prompt
    mask = np.broadcast_to(np.arange(sizes["source"]) < len(prompt), inputs.shape)
    program = runs.on_one_device(run.config)
    params = run.params(program.abstract)
    writer = Seq2SeqGenerator(
        program, params, program.step_inputs(), start=ids.start, end=ids.end, first=ids.first, last=ids.last,
        sampling=sampling, beams=args.beams,
    )  # fmt: skip
    rows = writer.write(inputs, mask, min(args.tokens, sizes["position"]), args.seed)
    written: list[str] = []
    for row in rows:
        tokens = [i for i in row.tolist() if i not in ids[:3] and i < tokenizer.vocab_size]
        written.append(tokenizer.decode(tokens))
    count, seconds = sum(map(len, rows)), time.monotonic() - began
    terminal.note(f"{pretrained.described(run, args.workdir)}: {count:,} tokens in {seconds:.1f} s")
    return written
