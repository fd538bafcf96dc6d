"""Command `mupax data show NAME`: examples of span corruption, side by side with the original text.

`mupax.train.reuse.generate.denoised` prints a denoising model's outputs with the same functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import terminal
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.data.text.denoising import Denoising
    from mupax.train.data.text.vocabulary import SpecialIds

_SIGNS = {" ": "·", "\n": "↵", "\t": "→", "\x7f": "␡"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Print evaluation examples of span denoising: input, target and text."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="NAME")]
    """python_corpus, text:PATH, c4 or any other text."""
    noise: Literal["infilling", "sentinels"] = "infilling"
    """BART's text infilling, or T5's sentinels."""
    rate: float | None = None
    """Share of tokens cut; 0.3 (infilling) or 0.15 (sentinels) unless given."""
    mean_span: float | None = None
    """Mean tokens of a span; 3 unless given."""
    inputs: int = 64
    """Encoder positions; windows of text are as long as fit."""
    examples: int = 2
    """How many to print."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE, or the path of a tokenizer.json."""
    data_dir: str | None = None
    """Folder of prepared data sets (the user's cache unless given)."""
    field: str = "text"
    """Field or column of records:PATH that has the text."""
    on_broken: Literal["stop", "skip"] = "stop"
    """Treatment of a broken file or record: stop, or skip and count it."""
    limits: LimitsConfig = DEFAULT_LIMITS
    """Limits of files and records, as data.limits."""
    baselines: bool = False
    """Measure what count models and copying reach on 512 examples."""

    def run(self) -> int:
        """Print the lengths, the examples and, with --baselines, reference losses. Return 0.

        Raises:
            ConfigError: --examples or a limit is less than 1.
            DataError: The text is missing, is images or conversations, --rate, --mean-span or
                --inputs is out of range, or the data do not read one of the flags.
        """
        from mupax.train.data.interface import with_flags_of

        with with_flags_of(self):
            return self._run()

    def _run(self) -> int:
        from mupax.train.config.checks import at_least
        from mupax.train.config.data import DataConfig
        from mupax.train.data.interface import refuse_unread_flags
        from mupax.train.data.text.denoising import denoising
        from mupax.train.data.text.noise import NOISES

        at_least("--", self, 1, "examples")
        refuse_unread_flags(self, [self.name])
        noise_fields: dict[str, float] = {}
        if self.rate is not None:
            noise_fields["rate"] = self.rate
        if self.mean_span is not None:
            noise_fields["mean_span"] = self.mean_span
        noise = NOISES[self.noise](**noise_fields)
        config = DataConfig(
            name=self.name,
            batch_size=max(self.examples, 64),
            eval_examples=512,
            tokenizer=self.tokenizer,
            data_dir=self.data_dir,
            field=self.field,
            on_broken=self.on_broken,
            limits=self.limits,
        )
        data = denoising(config, noise, inputs=self.inputs, seed=0)
        tokens, inputs, targets = data.lengths
        terminal.say(
            f"windows of {tokens} tokens; {inputs} inputs, {targets} targets; {data.vocab_size} ids\n"
        )
        print(examples_text(data, self.examples))
        if self.baselines:
            for reference in data.references():
                terminal.say(f"{reference.name:8} {reference.value:.4f} {reference.unit}")
        return 0


def examples_text(data: Denoising, count: int, width: int = 80) -> str:
    """Return the first evaluation examples in columns: corrupted input, target and original text.

    Args:
        count: Number of examples. At most one evaluation batch is returned.
        width: Characters per line. The default is 80.
    """
    pieces = data.tokenizer.pieces()
    names = data.ids.names()
    batch = data.eval_batch(0)
    blocks = []
    for i in range(min(count, len(batch["inputs"]))):
        inputs = batch["inputs"][i][batch["input_mask"][i] > 0]
        targets = batch["targets"][i][batch["weights"][i] > 0]
        if data.noise.name == "sentinels":
            text = restored(inputs, targets, data.ids)
        else:
            # Infilling has the complete text as target, between its begin and its end token.
            text = targets[1:-1].tolist()
        columns = {
            "input": visible(inputs, pieces, names),
            "target": visible(targets, pieces, names),
            "text": visible(text, pieces, names),
        }
        blocks.append(side_by_side(columns, width))
    return "\n".join(blocks)


def restored(inputs: np.ndarray, targets: np.ndarray, ids: SpecialIds) -> list[int]:
    """Return the tokens of an example before span corruption by sentinels.

    Each sentinel in the inputs is replaced by the span that follows the same sentinel in the
    targets. A sentinel without a span in the targets is removed. Tokens after eos are left out, and
    so are targets before the first sentinel.

    Args:
        inputs: int [tokens], inputs of the example.
        targets: int [tokens], targets of the example or of a model.
        ids: Ids of eos and of the sentinels.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in _before(targets, ids.eos):
        if token in ids.sentinels:
            span = spans.setdefault(token, [])
        else:
            span.append(token)

    text: list[int] = []
    for token in _before(inputs, ids.eos):
        if token in ids.sentinels:
            text += spans.get(token, [])
        else:
            text.append(token)
    return text


def _before(tokens: np.ndarray, end: int) -> list[int]:
    """Return the tokens before the first token with the id `end`, or all if there is none."""
    listed = tokens.tolist()
    return listed[: listed.index(end)] if end in listed else listed


def visible(ids: Iterable[int], pieces: list[str], names: Mapping[int, str]) -> list[str]:
    """Return a printable word for each token.

    Signs stand for spaces, line ends and control characters, such as "·" for a space. Bytes 0x80 to
    0xA0 are hexadecimal.

    Args:
        ids: Ids of the tokens, each below `len(pieces)` or in `names`.
        pieces: Text of each id of the tokenizer, such as " the" (`Bytes.pieces`).
        names: Word for each id that stands for no text, such as a sentinel.
    """
    words = []
    for token in map(int, ids):
        if token in names:
            words.append(names[token])
        else:
            words.append("".join(map(_sign, pieces[token])))
    return words


def _sign(character: str) -> str:
    """Return a printable form of one character of a token's text.

    Spaces, line ends and control characters become signs, such as "↵" for a line end. Bytes 0x80 to
    0xA0 become hexadecimal, such as "<9f>". All other characters are unchanged.
    """
    if character < " ":
        # U+2400 and up are pictures of the control characters.
        return _SIGNS.get(character, chr(0x2400 + ord(character)))
    if "\x7f" < character < "\xa1":
        return f"<{ord(character):02x}>"
    return _SIGNS.get(character, character)


def side_by_side(columns: Mapping[str, list[str]], width: int = 80) -> str:
    """Return a text with columns next to each other, each with its title above it.

    All columns have the same width. A word is only broken if it is wider than its column.

    Args:
        columns: Words of each column by its title. The words are joined without spaces.
        width: Largest number of characters per line of the text. The default is 80.
    """
    gaps = 2 * (len(columns) - 1)
    column_width = (width - gaps) // len(columns)
    filled = []
    for title, words in columns.items():
        filled.append([title, "-" * column_width, *_lines(words, column_width)])

    lines = []
    for row in itertools.zip_longest(*filled, fillvalue=""):
        line = "  ".join(f"{cell:{column_width}}" for cell in row)
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _lines(words: list[str], width: int) -> list[str]:
    """Join words without spaces, and return them as lines of at most `width` characters."""
    lines = [""]
    for word in words:
        for part in textwrap.wrap(word, width) or [""]:
            if len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return lines
