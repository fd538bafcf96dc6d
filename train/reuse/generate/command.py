"""`python -m train generate WORKDIR --prompt TEXT`: text from any checkpoint of a language model."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from tyro import conf

from mupax import command_line
from mupax.train.config.cli import CheckpointFlags

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.checkpoints.saved_run import Trained
    from mupax.train.reuse.generate.decode import Generator

UNFINISHED = "\ufffd"
"""What bytes that are no character yet come out as."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(CheckpointFlags):
    """Text from any checkpoint of a language model.

    The text goes to stdout as it is made, what it took to stderr. Without --step the newest checkpoint writes; where the run
    keeps a moving average of its parameters, that does. One device makes it, with a cache of keys and values, so that a token
    costs one position. A model has a longest context (model.seq_len): of a longer prompt its end is read, and a text that
    reaches it goes on with its own last half as context. The same seed gives the same text.
    """

    prompt: Annotated[str, conf.arg(metavar="TEXT")]
    """What to continue; - reads stdin, '' begins a document."""
    tokens: Annotated[int, conf.arg(metavar="N")] = 200
    """How many to add."""
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


def main(argv: Sequence[str]) -> int:
    """Writes the text; 0 when done.

    Raises:
        UsageError: wrong flags.
        WorkdirError: no such run, step or average, a damaged checkpoint, or no language model.
        DecodingError: a number out of its range, or a model that has diverged.
        DataError: the run's tokenizer is not here.
    """
    args = command_line.parse(Generate, "python -m train generate", argv)
    from mupax.train.checkpoints import saved_run
    from mupax.train.checkpoints.workdir import WorkdirError
    from mupax.train.reuse.generate.decode import DecodingError, Sampling

    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    sampling.check()
    for name, least in (("tokens", 0), ("samples", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise DecodingError(f"--{name} is {getattr(args, name)}; write a whole number of at least {least}")
    found = saved_run.find(args.workdir, args.step, args.average)
    if not found.config.model.generates:
        raise WorkdirError(f"the run in {args.workdir} trained a {found.config.model.family}; only decoders write text")
    import numpy as np

    tokenizer = _tokenizer(found)
    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    prompt = tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]
    if not prompt.size:
        prompt = np.array([tokenizer.separator], np.int32)
    written = write(generator(found, sampling, args.samples), tokenizer, text, prompt, args.tokens, args.seed)
    weights = "its moving average" if found.weights == "ema" else "its parameters"
    print(f"step {found.step} of {args.workdir}, {weights}: {written}", file=sys.stderr)
    return 0


def generator(found: Trained, sampling: Any, samples: int) -> Generator:
    """The checkpoint's model on one device, ready to write."""
    import jax

    from mupax.train.config.run import MeshConfig
    from mupax.train.core.program import assemble
    from mupax.train.reuse.generate.decode import Generator

    alone = dataclasses.replace(found.config, mesh=MeshConfig(data=1))
    program = assemble(alone, jax.local_devices()[:1])
    params, numbers = found.params(program.abstract), program.numbers()
    given: Any = {"sampling": sampling, "samples": samples, "layout": program.layout}
    return Generator(program.definition, alone.model, params, numbers, **given)  # pyright: ignore[reportArgumentType]


def write(made: Generator, tokenizer: Any, text: str, prompt: np.ndarray, length: int, seed: int) -> str:
    """Print the prompt and its continuations, one as it is made, several when they are done; returns what it took."""
    import numpy as np

    out, alone = sys.stdout, made.samples == 1
    parts: list[np.ndarray] = []
    began, fast_s, fast_tokens = time.monotonic(), 0.0, 0
    if alone:
        out.write(_safe(text, out))

    def rows() -> Iterator[list[int]]:
        nonlocal fast_s, fast_tokens
        since, compiled = time.monotonic(), made.compilations
        for part in made.stream(prompt, length, seed):
            if made.compilations == compiled:  # else the time is mostly the compiler's
                fast_s, fast_tokens = fast_s + time.monotonic() - since, fast_tokens + part.size
            parts.append(part)
            yield [int(token) for token in part[0]]
            since, compiled = time.monotonic(), made.compilations

    for piece in pieces(rows(), tokenizer):
        if alone:
            out.write(_safe(piece, out))
            out.flush()
    if not alone:
        for number, row in enumerate(np.concatenate(parts, axis=1) if parts else [[]] * made.samples, start=1):
            out.write(f"--- sample {number}\n{_safe(text + tokenizer.decode(row), out)}\n")
    else:
        out.write("\n")
    count, rate = length * made.samples, f", {fast_tokens / fast_s:,.0f} tokens/s once compiled" if fast_tokens else ""
    return f"{count:,} tokens in {time.monotonic() - began:.1f} s{rate}"


def pieces(parts: Iterator[list[int]], tokenizer: Any) -> Iterator[str]:
    """Text of tokens as they come. A character whose bytes are not all there yet waits for them."""
    ids: list[int] = []
    said = ""
    for part in parts:
        ids += part
        text = tokenizer.decode(ids)
        whole = text.rstrip(UNFINISHED)
        if len(whole) > len(said) and whole.startswith(said):
            yield whole[len(said) :]
            said = whole
    yield tokenizer.decode(ids)[len(said) :]


def _tokenizer(found: Trained) -> Any:
    """The run's tokenizer; its data only where that has made it.

    Raises:
        DataError: it is not here, or is another than the run's.
    """
    from mupax.train import data as data_sources
    from mupax.train.data import DataError
    from mupax.train.data.text.tokenizer import Bytes, Subwords, bpe_size

    config, name = found.config, found.config.data.tokenizer
    if name == "bytes":
        made: Any = Bytes()
    elif bpe_size(name) is None:
        made = Subwords(Path(name).expanduser())
    else:

        def note(line: str) -> None:
            print(line, file=sys.stderr)

        made = data_sources.load(config.data, config.model, seed=config.data_seed, note=note).tokenizer
    known = found.facts.get("tokenizer")
    if known not in (None, made.key):
        raise DataError(
            f"the run's tokens are those of {known}, and data.tokenizer {name} is {made.key} here; bring the run's tokenizer.json back"
        )
    return made


def _safe(text: str, out: TextIO) -> str:
    """Without characters that a terminal would obey; a file gets the text as it is."""
    if not out.isatty():
        return text
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else UNFINISHED for c in text)
