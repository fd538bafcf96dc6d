"""Which dimensions of a transformer can be scaled, by theory and measured: writes docs/desiderata.json and .md.

    python -m scripts.studies.desiderata [--render] [--again]

Resumable: a dimension whose numbers are there is not measured again unless it is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mupax import presets
from mupax.presets import Preset
from mupax.presets.analysis import desiderata as theory
from mupax.train.studies.desiderata import command as desiderata
from mupax.zoo import configs
from scripts import ROOT

PAGE = ROOT / "docs" / "desiderata.md"
COMMAND = "python -m scripts.studies.desiderata"
PRESETS: dict[str, dict[str, Any]] = {
    "mup": {}, "mup key_start=query": {"key_start": "query"}, "mup-half": {}, "mup mlp_out=mean-field": {"mlp_out": "mean-field"},
    "depth-mup alpha_l=1": {"alpha_l": 1.0}, "depth-mup alpha_l=0.5": {"alpha_l": 0.5}, "sp": {},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Study:
    """What is measured.

    Attributes:
        model: whose structure.
        sizes: of each dimension, each twice the one before.
        seeds: initializations of each size.
        more: seeds of dimensions that need others.
        only: presets of some dimensions; all of `PRESETS` in those that it does not name.
    """

    model: str
    sizes: int
    seeds: int
    more: Mapping[str, int] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def labels(self, dimension: str) -> tuple[str, ...]:
        """The presets that a dimension is measured under."""
        return self.only.get(dimension, tuple(PRESETS))


_DEPTHS = ("depth-mup alpha_l=1", "depth-mup alpha_l=0.5")
STUDIES = {
    "decoder": Study("gpt2", sizes=4, seeds=8),
    "encoder-decoder": Study(
        "bart-large",
        sizes=3,
        seeds=4,
        more={"width": 8, "d_model": 8},
        only={
            **dict.fromkeys(theory.ENCODED, ("mup", "sp")),
            **dict.fromkeys(("depth", "encoder_depth"), _DEPTHS),
            "d_k": ("mup", "mup key_start=query", "mup-half", "sp"),
        },
    ),
}
"""An encoder-decoder is measured under presets whose rules differ in a dimension: `mup-half` is `mup` but in d_k, `depth-mup` but in depths."""

TEXT = """# Which dimensions can be scaled

Made by `{command}` ({seconds:.0f} s of CPU time). Theory is `mupax presets desiderata PRESET`, from the preset's rules alone;
measurement is `mupax check gpt2 --desiderata --preset PRESET --model.no-bias --model.no-norm-gain --seeds {seeds}`, one
dimension over four sizes, every block cut into its mappings by zeros that are added to them: one backward pass and one JVP, exact.

Four desiderata at the first step under SGD (after Chizat and Netrapalli 2023, arXiv 2311.18718; the composition over a block is
derived here):

* **signal**: entries of every mapping stay of order one.
* **speed**: they move by order one through their own weights, where every weight has an equal part of the loss's decay. No rate can
  mend what fails here.
* **balance**: under the preset's own rates these parts have one exponent; measured from the mean of those that theory has at the top.
* **loss decay**: the largest part is of order one.

A cell has theory | measured: of `yes` the measured exponent that is farthest from 0, of `no` who has the exponent and the mean
over them. *apart* lists every exponent of the row that is measured more than {band} from theory. `width` is heads with d_model and d_ff.
Desiderata are not quality: logits that vanish at the start, as `mup`'s in d_k, train well.

What it says:

* d_k: with logits d_k^-1/2 the signal stays and q, k freeze as d_k^-1/2; with 1/d_k they move and logits vanish as d_k^-1/2. Keys that
  start as the queries' matrix (`--preset.constants key_start=query`) have both.
* d_v, d_ff and heads at a fixed d_model cannot grow alone: what is inside moves as their -1/2. A mean-field MLP out (`mlp_out`) has
  the speed and loses the signal.
* d_model alone cannot either: with `mup`'s readout mappings of fixed size move as d_model^1/2, with `sp`'s the stream stands still. Both
  are speeds as *speed* has them, at equal parts of the loss's decay. Under `mup`'s own rates parts are equal too; under `sp`'s they are
  not (*balance*), and how fast its mappings move by its own rate is in no column.
* width can, under `mup` and `mup-half`.
* Positions: independent tokens average out, as positions^-1/2.
* Depth: alpha_l = 1 has the speed and loses the branches' share of the stream, alpha_l = 1/2 the other way round.
"""

ENCODED = """
## Of an encoder-decoder

The same of both stacks and of cross-attention (`mupax presets desiderata PRESET --encoder`, and `mupax check bart-large` in place of
`gpt2`; {sizes} sizes, {seeds} seeds and 8 of width and d_model, {seconds:.0f} s of CPU time). "every" is of the
decoder's attention, its cross-attention and the encoder, as far as they have it. `targets` are the decoder's positions, `depth` the
decoder's blocks alone, `encoder_depth` the encoder's. A preset has the rows in which its rules are its own: outside of d_k `mup-half` is
`mup`, outside of depths `depth-mup` is.

* Widths say of every part what they say of a decoder: cross-attention and the encoder add no dimension that cannot grow.
* depth: what the encoder gets back is a sum over the decoder's L branches, independent at first: L^(1/2 - alpha_l). At alpha_l = 1
  the encoder's parts of the loss's decay fall as L^-1 at the first step, and equal parts would have it move as L^1/2; at 1/2 both stacks
  are balanced, and the decoder's mappings freeze. (Later the branches align; see [encoder-decoders](encoder_decoder.md#under-a-preset).)
* encoder_depth: as a decoder's own depth.
* More inputs have no row: what the encoder writes of independent tokens has the mean of its activations in common, a fixed share, beside
  a part that averages out as S^-1/2, so that cross-attention's o is a sum of both and no power law.
"""

ENCODED_APART = """
Where they are apart, and why:

* `d_k` under `key_start=query`, logits of cross-attention: its queries and keys have one matrix, and read two streams that overlap by
  d_model^-1/2. A logit before its scale is a sum of d_k^1/2 and of d_k d_model^-1/2, which is what theory says of large d_k: here, of
  32 to 128 at d_model 128, the first is not small yet, and it falls as d_k^-1/2.
* `targets`, logits of cross-attention: they move by keys' weights as targets^1/2 and by queries' as targets^0, a sum of both.
* `targets`, balance of query and key of the decoder's own attention: as `positions` above. Speed of what that attention writes: its mean
  over few targets is common to them in part alone.
"""

APART = """
Where they are apart, and why:

* `positions`, balance of query and key: logits of order one leave attention on fewer than all tokens (1/e of them, were there very
  many), so that these parts reach their power slowly.
* `d_model` under `mlp_out=mean-field`, which is for d_ff: MLP out grows past the embedding, the stream is a sum of two powers between
  them, and so is all that is read through its norms.
* `depth` under `key_start=query` without a depth rule: a logit is then the likeness of two positions, which grows as uniform attention
  adds up over blocks (not derived).
"""


def measure(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every dimension of every preset, of the decoder and of the encoder-decoder, where `record` has none; yields all after each dimension.

    Args:
        record: numbers that are there, and are added to.
    """
    for key, study in STUDIES.items():
        data = record.setdefault(key, {"seconds": 0.0, "sizes": study.sizes, "seeds": study.seeds, "presets": {}})
        bare: Any = dataclasses.replace(configs.get(study.model), bias=False, norm_gain=False)  # pyright: ignore[reportCallIssue]
        for dimension in theory.growths(encoder=bare.denoises):
            labels = [
                label for label in study.labels(dimension) if dimension not in data["presets"].setdefault(label, {})
            ]
            if not labels:
                continue
            started = time.process_time()
            factories = [functools.partial(_preset, label) for label in labels]
            rows = desiderata.measured(
                bare, factories, count=study.sizes, seeds=study.more.get(dimension, study.seeds), dimensions=[dimension]
            )
            for label, row in zip(labels, rows, strict=True):
                data["presets"][label] |= desiderata.to_json(row)
            data["seconds"] += time.process_time() - started
            yield record


def _preset(label: str, base: Mapping[str, int] | None = None) -> Preset:
    return presets.get(label.partition(" ")[0], base=base, **PRESETS[label])


def page(data: Mapping[str, Any]) -> str:
    """The page of the numbers."""
    own, encoded = (data[key] for key in STUDIES)
    parts = [TEXT.format(command=COMMAND, seconds=own["seconds"], seeds=own["seeds"], band=desiderata.BAND)]
    parts += [*_tables(own, "decoder"), APART]
    parts += [ENCODED.format(**encoded), *_tables(encoded, "encoder-decoder"), ENCODED_APART]
    return "".join(parts)


def rows(data: Mapping[str, Any], study: str) -> dict[str, desiderata.Row]:
    """By preset theory and measurement of a study.

    Args:
        data: its numbers.
        study: a key of `STUDIES`.
    """
    by_preset: dict[str, desiderata.Row] = {}
    for label, by_dimension in data["presets"].items():
        row = by_preset[label] = {}
        for dimension, columns in by_dimension.items():
            cells = theory.desiderata(_preset(label), dimension, encoder=study == "encoder-decoder")
            row[dimension] = {
                column: (cells[column], dataclasses.replace(cells[column], exponents={n: x[1] for n, x in of.items()}))
                for column, of in columns.items()
            }
    return by_preset


def _tables(data: Mapping[str, Any], study: str) -> Iterator[str]:
    for label, row in rows(data, study).items():
        lines = ["| " + " | ".join(word.replace("|", "\\|") for word in line) + " |" for line in desiderata.table(row)]
        lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
        yield f"\n{'##' if study == 'decoder' else '###'} {label}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measures what is not there, unless only asked to render, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="write the page from the numbers that are there")
    parser.add_argument("--again", action="store_true", help="measure even what is there")
    args, path = parser.parse_args(), PAGE.with_suffix(".json")
    if not args.render:
        for data in measure({} if args.again else json.loads(path.read_text())):
            path.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
