"""Text with noise, what is to be made of it, and the text itself, beside one another: `mupax data show NAME`."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import terminal

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
    baselines: bool = False
    """Measure what count models and copying reach on 512 examples."""

    def run(self) -> int:
        """0."""
        from mupax.train.config.checks import at_least
        from mupax.train.config.data import DataConfig
        from mupax.train.data.text.denoising import denoising
        from mupax.train.data.text.noise import NOISES

        at_least("--", self, 1, "examples")
        fields = {"rate": self.rate, "mean_span": self.mean_span}
        noise = NOISES[self.noise](
            **{name: value for name, value in fields.items() if value is not None}
        )
        config = DataConfig(
            name=self.name,
            batch_size=max(self.examples, 64),
            eval_examples=512,
            tokenizer=self.tokenizer,
            data_dir=self.data_dir,
        )
        data = denoising(config, noise, inputs=self.inputs, seed=0)
        tokens, inputs, targets = data.lengths
        terminal.say(
            f"windows of {tokens} tokens; {inputs} inputs, {targets} targets; {data.vocab_size} ids\n"
        )
        print(examples_text(data, self.examples))
        for reference in data.references() if self.baselines else ():
            terminal.say(f"{reference.name:8} {reference.value:.4f} {reference.unit}")
        return 0


def examples_text(data: Denoising, count: int, width: int = 80) -> str:
    """The first evaluation examples, in columns: the input with noise, the target, and the text.

    Args:
        data: whose they are.
        count: how many, at most a batch.
        width: characters of a line.
    """
    pieces, names = data.tokenizer.pieces(), data.ids.names()
    batch = data.eval_batch(0)
    blocks = []
    for i in range(min(count, len(batch["inputs"]))):
        inputs = batch["inputs"][i][batch["input_mask"][i] > 0]
        targets = batch["targets"][i][batch["weights"][i] > 0]
        text = (
            restored(inputs, targets, data.ids)
            if data.noise.name == "sentinels"
            else targets[1:-1].tolist()
        )
        columns = {"input": inputs, "target": targets, "text": text}
        blocks.append(
            side_by_side(
                {name: visible(ids, pieces, names) for name, ids in columns.items()}, width
            )
        )
    return "\n".join(blocks)


def restored(inputs: np.ndarray, targets: np.ndarray, ids: SpecialIds) -> list[int]:
    """A window of text as one example under sentinels has it: each sentinel of the inputs replaced by its span of the targets.

    Args:
        inputs, targets: of one example, or a model's targets; what stands behind eos or is of no sentinel is left out.
        ids: of eos and sentinels.
    """
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for token in _before(targets, ids.eos):
        if token in ids.sentinels:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    return [
        token
        for i in _before(inputs, ids.eos)
        for token in (spans.get(i, []) if i in ids.sentinels else [i])
    ]


def _before(tokens: np.ndarray, end: int) -> list[int]:
    listed = tokens.tolist()
    return listed[: listed.index(end)] if end in listed else listed


def visible(ids: Iterable[int], pieces: list[str], names: Mapping[int, str]) -> list[str]:
    """What to print for each token: spaces, line ends and control bytes as signs, bytes of other scripts in hexadecimal.

    Args:
        ids: the tokens.
        pieces: what each id of the tokenizer stands for.
        names: what to print for ids that stand for no text.
    """
    return [names[i] if i in names else "".join(map(_sign, pieces[i])) for i in map(int, ids)]


def _sign(character: str) -> str:
    if character < " ":
        return _SIGNS.get(character, chr(0x2400 + ord(character)))
    return (
        f"<{ord(character):02x}>"
        if "\x7f" < character < "\xa1"
        else _SIGNS.get(character, character)
    )


def side_by_side(columns: Mapping[str, list[str]], width: int = 80) -> str:
    """Columns of the same width under their titles, each a stream of words, none of them broken if it fits in a line.

    Args:
        columns: title to what stands in it.
        width: characters of a line at most.
    """
    each = (width - 2 * (len(columns) - 1)) // len(columns)
    filled = [[title, "-" * each, *_lines(words, each)] for title, words in columns.items()]
    rows = itertools.zip_longest(*filled, fillvalue="")
    return "\n".join("  ".join(f"{cell:{each}}" for cell in row).rstrip() for row in rows) + "\n"


def _lines(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        for part in textwrap.wrap(word, width) or [""]:
            if len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return lines
