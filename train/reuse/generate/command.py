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
from mupax.terminal import counted
from mupax.train.checkpoints.command import TEMPLATE_FLAG, ModelFlags

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.reuse.generate.decode import Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(ModelFlags):
    """Text from any checkpoint of a language model.

    A decoder continues the prompt. An encoder-decoder fills in a text that has `<mask>` (or `<0>`,
    `<1>`) in it.

    WORKDIR is a run, or weights alone: a folder that `mupax import` wrote, one of Hugging Face, or
    ORG/NAME of its hub.

    The text goes to stdout, its number of tokens and the time to stderr. A decoder's single text is
    printed while it is generated, other texts when all are complete.
    Without --step the newest checkpoint is used, with the moving average of the parameters if the
    run keeps one. One device generates, with a cache of keys and values. The context is at most
    model.seq_len tokens: of a longer prompt only the end is read, and a text that fills the context
    goes on with its own last half as context. The same seed gives the same text.
    """

    prompt: Annotated[str | None, conf.arg(metavar="TEXT")] = None
    """Text to continue, or to fill in. `-` reads stdin, '' begins a document."""
    chat: Switch = False
    """Hold a conversation: every line of standard input is a message. Ctrl-D ends it."""
    system: Annotated[str | None, conf.arg(metavar="TEXT")] = None
    """Begin the conversation of --chat with this system message."""
    tokens: Annotated[int, conf.arg(metavar="N")] = 200
    """Number of tokens to add. With --chat, the limit of one answer."""
    temperature: Annotated[float, conf.arg(metavar="T")] = 0.8
    """Divisor of the logits. 0 takes the likeliest token."""
    top_k: Annotated[int | None, conf.arg(metavar="K")] = None
    """Draw among the K likeliest tokens. By default among all."""
    top_p: Annotated[float | None, conf.arg(metavar="P")] = None
    """Draw among the fewest likeliest tokens with total probability P. By default among all."""
    seed: int = 0
    """Seed of the random draws."""
    samples: Annotated[int, conf.arg(metavar="N")] = 1
    """Number of texts, generated in one batch."""
    tokenizer: Annotated[str | None, conf.arg(name="data.tokenizer", metavar="bytes|FILE")] = None
    """Tokenizer of weights without a run that have no tokenizer.json beside them."""
    separator: Annotated[str | None, conf.arg(name="data.separator", metavar="TOKEN")] = None
    """Token that ends a document, for weights without a run, if it has none of the usual names."""
    chat_template: Annotated[str | None, TEMPLATE_FLAG] = None
    """Jinja2 template for --chat, in place of the one beside the tokenizer."""
    beams: Annotated[int, conf.arg(metavar="K")] = 1
    """Number of beams of an encoder-decoder, which needs temperature 0."""


_PROG = "mupax generate"


def main(argv: Sequence[str]) -> int:
    """Run `mupax generate`: print generated text, or hold a conversation. Return exit code 0.

    The text goes to standard output, the number of tokens and the time to standard error.

    Raises:
        UsageError, DecodingError: A flag is out of its range or does not fit the model.
        WorkdirError, DataError: The model or its tokenizer cannot be read.
    """
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
        from mupax.train.reuse.generate import writing

        run.check_decoder("generate --chat")
        return writing.converse(args, run, sampling)
    run.check_writes()
    if run.model.denoises:
        from mupax.train.reuse.generate import denoised

        return denoised.main(args, run, sampling)
    if args.beams != 1:
        raise DecodingError(
            f"--beams {args.beams} is for encoder-decoders, and the run is a "
            f"{run.config.model.family}; leave it out"
        )
    import jax

    from mupax.train.core.costs import fit
    from mupax.train.reuse import runs
    from mupax.zoo.layers import cache as caches
    from mupax.zoo.transformer import transformer

    tokenizer = run.tokenizer()
    assert args.prompt is not None  # `_check` requires a prompt without --chat
    text = args.prompt
    if text == "-":
        # `echo` ends its text with a newline, which would become a token of the prompt.
        text = sys.stdin.read().removesuffix("\n")
    # Python holds bytes of a command line that are not UTF-8 as surrogates.
    prompt = prompt_of(run, tokenizer, text.encode("utf-8", "surrogateescape"))
    program = runs.on_one_device(run.config)
    params = run.params(program.abstract)
    model = transformer(run.config.model, "writing text")
    # Shapes alone: a cache that does not fit is refused with advice before memory is taken.
    empty = jax.eval_shape(lambda: caches.empty(model, args.samples))
    fit.check_arrays(empty, f"keys and values of {args.samples} samples", "Write fewer --samples")
    generator = Generator(
        program, params, program.step_inputs(), sampling=sampling, samples=args.samples
    )
    cost = write(generator, tokenizer, text, prompt, args.tokens, args.seed)
    terminal.note(f"{run.described}: {cost}")
    return 0


def _check(args: Generate) -> None:
    """Raise UsageError for flags that do not go with --chat, and for flags that need --chat.

    UsageError is also raised if there is neither --prompt nor --chat, and for --chat with
    --tokens 0.
    """
    if args.prompt is None and not args.chat:
        raise command_line.UsageError(
            "this needs --prompt TEXT, or --chat for a conversation\n"
            f"`{_PROG} --help` lists all flags"
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
    """Print the prompt and its continuations. Return the number of tokens and the time, in words.

    A single text is printed while it is generated, several when all are complete.

    Args:
        text: Prompt, which is printed before each continuation.
        prompt: The same prompt in tokens, int32 [P].
        length: Number of tokens to add.
    """
    import numpy as np

    is_single = generator.samples == 1
    parts = []
    began = time.monotonic()
    compiled_s = 0.0
    compiled_tokens = 0
    terminal.show(text if is_single else "")

    def first_rows() -> Iterator[list[int]]:
        nonlocal compiled_s, compiled_tokens
        part_began = time.monotonic()
        compilations = generator.compilations
        for part in generator.stream(prompt, length, seed):
            # A part for which a program was compiled does not count: it is mostly compilation.
            if generator.compilations == compilations:
                compiled_s += time.monotonic() - part_began
                compiled_tokens += part.size
            parts.append(part)
            yield part[0].tolist()
            part_began = time.monotonic()
            compilations = generator.compilations

    for piece in pieces(first_rows(), tokenizer, prompt.tolist()):
        terminal.show(piece if is_single else "")
    # With --tokens 0 there are no parts, and `np.concatenate` refuses an empty list.
    samples = np.concatenate(parts, axis=1) if parts else [[]] * generator.samples
    if is_single:
        terminal.show("\n")
    else:
        for number, row in enumerate(samples, start=1):
            continuation = "".join(pieces(iter([list(row)]), tokenizer, prompt.tolist()))
            terminal.show(f"--- sample {number}\n{text}{continuation}\n")

    count = length * generator.samples
    cost = f"{counted(count, 'token', ',')} in {time.monotonic() - began:.1f} s"
    if compiled_tokens:
        cost += f", {compiled_tokens / compiled_s:,.0f} tokens/s once compiled"
    return cost


def pieces(parts: Iterator[list[int]], tokenizer: Any, prompt: Sequence[int] = ()) -> Iterator[str]:
    """Decode tokens as they come, and yield their text piece by piece.

    The bytes of an incomplete character are held back until its other bytes have come.

    Args:
        parts: Tokens of one text, a few at a time.
        prompt: Tokens before the text, on which its first character can depend.
    """
    from mupax.train.data.text.detokenizer import Detokenizer

    decoder = Detokenizer(tokenizer, prompt)
    for part in parts:
        piece = decoder.add(map(int, part))
        if piece:
            yield piece
    piece = decoder.finish()
    if piece:
        yield piece
