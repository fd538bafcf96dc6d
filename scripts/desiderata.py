"""Which dimensions of a transformer can be scaled, by theory and measured: writes docs/desiderata.json and .md.

python -m scripts.desiderata [--render]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mupax import presets
from mupax.presets import Preset
from mupax.presets.analysis import desiderata as theory
from mupax.train.studies.desiderata import command as desiderata
from mupax.zoo import configs

PAGE = Path(__file__).parent.parent / "docs" / "desiderata.md"
COMMAND = "python -m scripts.desiderata"
PRESETS: dict[str, dict[str, Any]] = {
    "mup": {}, "mup key_start=query": {"key_start": "query"}, "mup-half": {}, "mup mlp_out=mean-field": {"mlp_out": "mean-field"},
    "depth-mup alpha_l=1": {"alpha_l": 1.0}, "depth-mup alpha_l=0.5": {"alpha_l": 0.5}, "sp": {},
}  # fmt: skip
SIZES, SEEDS = 4, 8

TEXT = """# Which dimensions can be scaled

Made by `{command}` ({seconds:.0f} s of CPU time). Theory is `python -m presets desiderata PRESET`, from the preset's rules alone;
measurement is `python -m train check gpt2 --desiderata --preset PRESET --model.no-bias --model.no-norm-gain --seeds {seeds}`, one
dimension over four sizes, every block cut into its mappings by zeros that are added to them: one backward pass and one JVP, exact.

Four desiderata at the first step under SGD (after Chizat and Netrapalli 2023, arXiv 2311.18718; the composition over a block is
derived here):

* **signal**: entries of every mapping stay of order one.
* **speed**: they move by order one through their own weights, where every weight has an equal part of the loss's decay. No rate can
  mend what fails here.
* **balance**: under the preset's own rates these parts have one exponent.
* **loss decay**: the largest part is of order one.

A cell has theory | measured: of `yes` the measured exponent that is farthest from 0, of `no` who has the exponent and the mean
over them. *apart* lists every exponent of the row that is measured more than {band} from theory. `width` is heads with d_model and d_ff.
Desiderata are not quality: logits that vanish at the start, as `mup`'s in d_k, train well.

What it says:

* d_k: with logits d_k^-1/2 the signal stays and q, k freeze as d_k^-1/2; with 1/d_k they move and logits vanish as d_k^-1/2. Keys that
  start as the queries' matrix (`--preset.constants key_start=query`) have both.
* d_v, d_ff and heads at a fixed d_model cannot grow alone: what is inside moves as their -1/2. A mean-field MLP out (`mlp_out`) has
  the speed and loses the signal.
* d_model alone cannot either: with `mup`'s readout mappings of fixed size move as d_model^1/2, with `sp`'s the stream stands still.
* width can, under `mup` and `mup-half`.
* Positions: independent tokens average out, as positions^-1/2.
* Depth: alpha_l = 1 has the speed and loses the branches' share of the stream, alpha_l = 1/2 the other way round.
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


def measure() -> dict[str, Any]:
    """Every dimension of every preset."""

    def make(label: str) -> Any:
        return lambda base: _preset(label, base)

    model: Any = dataclasses.replace(configs.get("gpt2"), bias=False, norm_gain=False)  # pyright: ignore[reportCallIssue]
    started = time.process_time()
    rows = desiderata.measured(model, [make(label) for label in PRESETS], count=SIZES, seeds=SEEDS)
    found = {label: desiderata.to_json(row) for label, row in zip(PRESETS, rows, strict=True)}
    return {"seconds": time.process_time() - started, "sizes": SIZES, "seeds": SEEDS, "presets": found}


def _preset(label: str, base: Mapping[str, int] | None = None) -> Preset:
    return presets.get(label.partition(" ")[0], base=base, **PRESETS[label])


def page(data: Mapping[str, Any]) -> str:
    """The page of the numbers."""
    parts = [TEXT.format(command=COMMAND, seconds=data["seconds"], seeds=data["seeds"], band=desiderata.BAND)]
    for label, by_dimension in data["presets"].items():
        row: desiderata.Row = {}
        for dimension, columns in by_dimension.items():
            cells = theory.desiderata(_preset(label), dimension)
            row[dimension] = {
                column: (cells[column], dataclasses.replace(cells[column], exponents={n: x[1] for n, x in of.items()}))
                for column, of in columns.items()
            }
        lines = ["| " + " | ".join(word.replace("|", "\\|") for word in line) + " |" for line in desiderata.table(row)]
        lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
        parts.append(f"\n## {label}\n\n" + "\n".join(lines) + "\n")
    return "".join(parts) + APART


def main() -> None:
    """Measures, unless only asked to render, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="write the page from the numbers that are there")
    if not parser.parse_args().render:
        PAGE.with_suffix(".json").write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(PAGE.with_suffix(".json").read_text())))


if __name__ == "__main__":
    main()
