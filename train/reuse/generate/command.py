"""`mupax generate WORKDIR --prompt TEXT`: text from any checkpoint of a language model."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.train.checkpoints.command import TEMPLATE_FLAG, ModelFlags

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.reuse.generate.decode import Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags):
    """Text from any checkpoint of a language model; of an encoder-decoder, what it makes of a text with `<mask>` (or `<0>`, `<1>`) in it.

    WORKDIR may be weights alone, too: a folder that `mupax import` wrote, one of Hugging Face, or ORG/NAME of its hub.

    The text goes to stdout as it is made, what it took to stderr. Without --step the newest checkpoint writes; where the run
    keeps a moving average of its parameters, that does. One device makes it, with a cache of keys and values, so that a token
    costs one position. A model has a longest context (model.seq_len): of a longer prompt its end is read, and a text that
    reaches it goes on with its own last half as context. The same seed gives the same text.
    """

    prompt: Annotated[str | None, conf.arg(metavar="TEXT")] = None
    """What to continue, or to fill in; - reads stdin, '' begins a document."""
    chat: Switch = False
    """Hold a conversation in place of a prompt: every line of standard input is a message. Ctrl-D ends it."""
    system: Annotated[str | None, conf.arg(metavar="TEXT")] = None
    """Begin the conversation of --chat with this system message."""
    tokens: Annotated[int, conf.arg(metavar="N")] = 200
    """How many to add; of --chat, the most of one answer."""
    temperature: Annotated[float, conf.arg(metavar="T")] = 0.8
    """0 takes the likeliest."""
    top_k: Annotated[int | None, conf.arg(metavar="K")] = None
    """Draw among the K likeliest tokens; all unless given."""
    top_p: Annotated[float | None, conf.arg(metavar="P")] = None
    """Draw among the likeliest that have P together; all unless given."""
    seed: int = 0
    """Of the draws."""
    samples: Annotated[int, conf.arg(metavar="N")] = 1
    """Texts, made side by side."""
    tokenizer: Annotated[str | None, conf.arg(name="data.tokenizer", metavar="bytes|FILE")] = None
    """Of weights without a run, where no tokenizer.json lies beside them."""
    separator: Annotated[str | None, conf.arg(name="data.separator", metavar="TOKEN")] = None
    """Of weights without a run: the token that ends a document, where it has none of the usual names."""
    chat_template: Annotated[str | None, TEMPLATE_FLAG] = None
    """A template of jinja2 for --chat, in place of the one beside the tokenizer."""
    beams: Annotated[int, conf.arg(metavar="K")] = 1
    """Encoder-decoders, at temperature 0: keep the K likeliest texts so far."""


_PROG = "mupax generate"


def main(argv: Sequence[str]) -> int:
    """Writes the text; 0 when done. Raises UsageError, WorkdirError, DecodingError or DataError for what does not fit."""
    args = command_line.parse(Generate, _PROG, argv)
    _check(args)
    from mupax.train.reuse import trained
    from mupax.train.reuse.generate.decode import Generator
    from mupax.train.reuse.generate.sampling import DecodingError, Sampling
    from mupax.train.reuse.generate.writing import prompt_of
    from mupax.train.reuse.huggingface import hub

    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    for name, least in (("tokens", 0), ("samples", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise DecodingError(
                f"--{name} is {getattr(args, name)}; write a whole number of at least {least}"
            )
    path = hub.local(args.workdir, args.revision)
    run = trained.open_model(
        path, args.step, args.average, tokenizer=args.tokenizer, separator=args.separator
    )
    if args.chat:
        from mupax.train.reuse.generate import chat

        run.check_decoder("generate --chat")
        return chat.main(args, run, sampling)
    run.check_writes("generate")
    if run.model.denoises:
        from mupax.train.reuse.generate import denoised

        return denoised.main(args, run, sampling)
    if args.beams != 1:
        raise DecodingError(
            f"--beams {args.beams} is for encoder-decoders, and the run is a {run.config.model.family}; leave it out"
        )
    import jax

    from mupax.train.core.costs import fit
    from mupax.train.reuse import runs
    from mupax.zoo.layers import cache as caches
    from mupax.zoo.transformer import transformer

    tokenizer = run.tokenizer()
    assert args.prompt is not None  # see _check
    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    prompt = prompt_of(run, tokenizer, text.encode("utf-8", "surrogateescape"))
    program = runs.on_one_device(run.config)
    params = run.params(program.abstract)
    model = transformer(run.config.model, "writing text")
    empty = jax.eval_shape(lambda: caches.empty(model, args.samples))
    fit.check_arrays(empty, f"keys and values of {args.samples} samples", "Write fewer --samples")
    generator = Generator(
        program, params, program.step_inputs(), sampling=sampling, samples=args.samples
    )
    cost = write(generator, tokenizer, text, prompt, args.tokens, args.seed)
    terminal.note(f"{run.described}: {cost}")
    return 0


def _check(args: Generate) -> None:
    """Raise UsageError for flags that exclude each other, or a prompt that is missing."""
    if args.prompt is None and not args.chat:
        raise command_line.UsageError(
            f"this needs --prompt TEXT, or --chat for a conversation\n`{_PROG} --help` lists all flags"
        )
    if not args.chat:
        for flag, value in (("--system", args.system), ("--chat-template", args.chat_template)):
            if value is not None:
                raise command_line.UsageError(f"{flag} is for --chat; add --chat, or leave it out")
        return
    if args.prompt is not None:
        raise command_line.UsageError(
            "--prompt and --chat exclude each other; write messages of --chat on standard input"
        )
    for flag, value in (("--samples", args.samples), ("--beams", args.beams)):
        if value != 1:
            raise command_line.UsageError(f"{flag} is not for --chat; leave it out")
    if args.tokens == 0:
        raise command_line.UsageError("--tokens is 0; write at least 1 for --chat")


def write(
    generator: Generator, tokenizer: Any, text: str, prompt: np.ndarray, length: int, seed: int
) -> str:
    """Print the prompt and its continuations, one as it is made, several when they are done; returns what it took, in words.

    Args:
        generator: of the model.
        tokenizer: of the run's data.
        text: the prompt as it was given.
        prompt: the same in tokens, int32 [P].
        length: tokens to add to it.
        seed: of the draws.
    """
    import numpy as np

    alone, parts = generator.samples == 1, []
    began, fast_s, fast_tokens = time.monotonic(), 0.0, 0
    terminal.show(text if alone else "")

    def rows() -> Iterator[list[int]]:
        nonlocal fast_s, fast_tokens
        since, compiled = time.monotonic(), generator.compilations
        for part in generator.stream(prompt, length, seed):
            if generator.compilations == compiled:  # else the time is mostly the compiler's
                fast_s, fast_tokens = fast_s + time.monotonic() - since, fast_tokens + part.size
            parts.append(part)
            yield part[0].tolist()
            since, compiled = time.monotonic(), generator.compilations

    for piece in pieces(rows(), tokenizer, prompt.tolist()):
        terminal.show(piece if alone else "")
    samples = np.concatenate(parts, axis=1) if parts else [[]] * generator.samples
    for number, row in enumerate(samples, start=1):
        if alone:
            terminal.show("\n")
            continue
        continued = "".join(pieces(iter([list(row)]), tokenizer, prompt.tolist()))
        terminal.show(f"--- sample {number}\n{text}{continued}\n")
    count = length * generator.samples
    rate = f", {fast_tokens / fast_s:,.0f} tokens/s once compiled" if fast_tokens else ""
    return f"{count:,} tokens in {time.monotonic() - began:.1f} s{rate}"


def pieces(parts: Iterator[list[int]], tokenizer: Any, prompt: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens as they come. A character that has only begun waits for its bytes.

    Args:
        parts: tokens of one text, a few at a time.
        tokenizer: tokenizer of the model.
        prompt: token ids before the text.
    """
    from mupax.train.data.text.detokenizer import Detokenizer

    decoder = Detokenizer(tokenizer, prompt)
    for part in parts:
        if piece := decoder.add(map(int, part)):
            yield piece
    if piece := decoder.finish():
        yield piece
