"""The transfer studies that come with the project: writes docs/evidence/transfer/ and docs/evidence/transfer.md.

    python -m scripts.studies.transfer [NAME ...] [--minutes 20] [--render] [--list]

Each study is a `mupax transfer` in docs/evidence/transfer/NAME, whose rows are kept as they finish: a study that was stopped goes
on. `--render` judges and draws again what is there.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from mupax import command_line
from mupax.command_line import Switch
from mupax.train.config import cli
from mupax.train.config.record import words_of
from mupax.train.studies.sweep.rows import Rows
from mupax.train.studies.transfer import command as transfer_command
from mupax.train.studies.transfer import planned, report
from mupax.train.studies.transfer.drift import BOUND, TOLERANCE
from mupax.train.studies.transfer.fit import STEP
from mupax.train.studies.transfer.study import Measured
from scripts import ROOT, harness
from scripts.studies import verdicts

OUT = ROOT / "docs" / "evidence" / "transfer"
LAST_SECTIONS = "<!-- leaderboard: begin -->\n"
"""First line of what other commands and persons write at the end of the page."""
LM = (
    "lm-tiny --model.width 64 --model.num-heads 4 --model.depth 2 --model.seq-len 64 --data.batch-size 8 --steps 100 "
    "--optimizer.name adam --optimizer.warmup-steps 20 --optimizer.clip-norm None"
)
VIT = (
    "vit-digits --model.width 64 --model.num-heads 4 --model.depth 2 --data.batch-size 32 --steps 100 --optimizer.name momentum "
    "--optimizer.warmup-steps 10 --optimizer.clip-norm None --optimizer.weight-decay 0 --optimizer.peak-lr 0.0625"
)
SMALL = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 1 --model.seq-len 8 --data.batch-size 8 --optimizer.name adam "
    "--optimizer.clip-norm None --optimizer.peak-lr 0.016"
)
DEPTH = "--preset depth-mup --preset.alpha-l 1 --control mup --grow depth=2,4,8,16"
ED = (
    "ed-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 --data.batch-size 8 --steps 100 "
    "--optimizer.name adam --optimizer.warmup-steps 20 --optimizer.clip-norm None"
)
MOE = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 --model.experts 4 --model.expert-dim 32 "
    "--data.batch-size 8 --steps 100 --optimizer.warmup-steps 20 --optimizer.clip-norm None --optimizer.name adam --preset mup"
)
"""Four experts, two of them a token's."""
MOE_ALONE = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 --model.experts 16 --model.active-experts 8 "
    "--model.expert-dim 16 --data.batch-size 8 --steps 100 --optimizer.warmup-steps 20 --optimizer.clip-norm None --optimizer.name sgd "
    "--optimizer.weight-decay 0 --optimizer.peak-lr 8 --train-only block.experts.* --preset mup"
)
"""Sixteen experts, eight of them a token's; they and their router are all that is trained."""
TUNED = (
    "--optimizer.peak-lr 0.011 --preset mup --preset.constants rates.readout=8 rates.token_embedding=16 stds.readout=0.5 readout_width=-0.5 "
    "embedding_width=-0.5"
)
"""What quality's cells of 100 steps end at, at width 64, and the two widths that win there (docs/evidence/quality.md)."""
STUDIES = {
    "head_dim": f"{LM} --preset mup --compare mup-half --control sp --grow head_dim=16,32,64,128",
    "heads": f"{LM} --preset mup --compare mup-half --control sp --grow heads=4,8,16,32",
    "heads-tuned": f"{LM} {TUNED} --control none --grow heads=4,8,16,32",
    "tied-start": f"{LM} --preset mup --preset.constants key_start=query --compare mup mup-half --grow head_dim=16,32,64",
    "ed-heads": f"{ED} --preset mup --control sp --grow heads=2,4,8",
    "depth": f"{VIT} {DEPTH}",
    "depth-adam": f"{LM} {DEPTH}",
    "batch": f"{SMALL} --steps 2400 --optimizer.warmup-steps 240 --grow batch=8,16,32,64 --joint sde --control none --seeds 6",
    "tokens": f"{SMALL} --steps 600 --optimizer.warmup-steps 60 --grow tokens=38400,76800,153600,307200 --joint complete-d "
    "--control none --seeds 6",
    "moe-width": f"{MOE} --control sp --grow head_dim=16,32,64",
    "moe-experts": f"{MOE} --grow experts=4,8,16",
    "moe-experts-sgd": f"{MOE_ALONE} --control mup,experts=dense --grow experts=16,32,64",
}
"""Name to the run, presets and sizes: mostly eightfold, from width 64, four heads and two layers, or of the run's batch and length."""
ABOUT = {
    "head_dim": "A decoder under Adam. The head dimension grows with four heads.",
    "heads": "The same decoder. Heads grow at head dimension 16, where `mup` and `mup-half` are one rule, trained once.",
    "heads-tuned": "The same, with constants of readout and embedding tuned at the smallest size and both widths -1/2. It is "
    "ahead of a retuned `sp` at every size ([quality](quality.md)) and comes as `--preset mup:lm-heads-v1`.",
    "tied-start": "The decoder whose keys start as its queries' matrix, with 1/N on its logits. Its rate transfers. At the best rates of "
    "the largest size it ends 0.041 to 0.044 nats above `mup`, at the smallest 0.007; the reason is not tested.",
    "ed-heads": "An encoder-decoder (2 + 2 layers, 32 positions each) that mends bytes under Adam. Heads grow fourfold at head dimension 16, "
    "and with them the encoder's width, which cross-attention reads.",
    "depth": "A vision transformer under SGD with momentum. Layers grow at width 64.",
    "depth-adam": "The decoder under Adam. Layers grow at width 64. Eight seeds do not decide whether the control drifts: deeper is worse "
    "under plain `mup` at most rates. A likely cause, not tested: in 100 steps most is learnt by embedding and readout, whose "
    "rates no depth rule changes.",
    "batch": "The decoder at width 32 with one layer sees 153,600 tokens in batches of 64 to 512 tokens. Warm-up and decay are the same part "
    "of every run. The square-root rule (`sde`) is held against a constant rate.",
    "tokens": "The same model at the smallest batch sees 1 to 8 times 38,400 tokens. Under a constant rate, the control, the drift is the "
    "exponent of the horizon: here 0 within about a tenth. It is -0.32 in Bjorck et al., -0.5 in `complete-d` (so the best rate drifts up) "
    "and +0.31 in Step Law, whose batch grows along. [Published runs](published-runs.md) reconcile them; no rule of the horizon is a default.",
    "moe-width": "A decoder of four experts, two of them a token's, with two layers of width 32. Head dimension, width and the experts' "
    "hidden size grow fourfold.",
    "moe-experts": "The same model has four to sixteen experts, half of them a token's. Under Adam no rule has a power of their number in a "
    "rate, only in eps, so no control can drift.",
    "moe-experts-sgd": "Under SGD the dense rule lacks the E of experts' and routers' rates and drifts by one octave per doubling. Experts "
    "and routers alone are trained, because attention, embedding and readout would set the best rate. Losses are flat in the rate "
    "(0.03 nats within an octave): eight seeds show the control's drift, and do not show that `mup` transfers.",
}
HEAD = f"""# Does the learning rate transfer?

Each study grows a small model in one dimension, eightfold unless it says otherwise. Learning rates are half an octave apart, and every
point sees the same batches and seeds. The best rate of a size is the vertex of a parabola through the mean losses near the best
one. The **drift** is the slope of the best rate, in octaves per doubling of the size, with a 95 % interval over seeds.

| verdict | meaning |
|---|---|
| **transfers** | the drift is within ± {TOLERANCE:.2f} and its interval inside ± {BOUND:.2f}: keep the learning rate |
| **drifts** | the interval lies wholly outside ± {TOLERANCE:.2f}: tune again as the model grows |
| **undecided** | anything else; a study adds seeds until it is decided, or its seeds or minutes end |

The **price** of not retuning is the loss at the smallest size's best rate less that at the largest size's own best rate, in nats. A control
must drift. [Quality](quality.md) compares the losses themselves. [More presets](#more-presets) have tables without pictures, and
[a simulation](#how-far-to-trust-a-verdict) says how often a verdict is right.

`python -m scripts.studies.transfer` trains all studies and goes on where it was stopped; `--list` prints the `mupax transfer` command of
each. Every row is in `docs/evidence/transfer/*/points.jsonl.gz`.
"""


def words(name: str, minutes: float) -> list[str]:
    """What follows `mupax transfer` in a study, its path relative to the checkout."""
    return shlex.split(f"{STUDIES[name]} --minutes {minutes:g} --out docs/evidence/transfer/{name}")


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from each study's transfer.json."""
    parts = [HEAD]
    for name, record in records.items():
        axis = record["studies"][0]["axis"]
        picture = f"![Loss against learning rate as {axis} grows](transfer/{name}/{axis}.png)"
        parts += [f"## {name}", "", ABOUT[name], "", picture, ""]
        parts += [
            "| preset | verdict | price of not retuning | drift, octaves per doubling | least loss at the largest | seeds | training |"
        ]
        parts += [
            "|---|---|---|---|---|---|---|",
            *(_row(study) for study in record["studies"]),
            "",
        ]
    # The last two sections are kept: scripts.pages.leaderboard writes one, the other is about finished measurements.
    page = OUT.with_suffix(".md").read_text()
    return "\n".join([*parts, verdicts.document(), page[page.index(LAST_SECTIONS) :]])


def _row(study: Mapping[str, Any]) -> str:
    largest = study["sizes"][-1]
    cells = [
        f"`{study['preset']}`",
        study["verdict"],
        _interval(largest["price_of_not_tuning"], ".3f"),
        _interval(study["drift_octaves_per_doubling"], "+.2f"),
        _loss(largest),
        f"{study['seeds']}",
        f"{study['train_seconds'] / 60:.0f} min",
    ]
    return f"| {' | '.join(cells)} |"


def _loss(size: Mapping[str, Any]) -> str:
    return "unknown" if size["loss"] is None else f"{size['loss']:.3f}"


def _interval(interval: Mapping[str, float | None], form: str) -> str:
    if interval["value"] is None:
        return "unknown"
    if interval["low"] is None or interval["high"] is None:
        return f"{interval['value']:{form}}"
    return f"{interval['value']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def judge_again(folder: Path) -> None:
    """Judge a study from its recorded rows, and write its record and pictures; nothing is trained.

    Args:
        folder: with transfer.json and points.jsonl.
    """
    record = json.loads((folder / "transfer.json").read_text())
    rows = Rows(folder, lambda line: None)
    _, *arguments = words_of(record["command"])
    args, rest = command_line.parse_known(
        planned.Transfer, planned.PROG, cli.with_file_first(arguments)
    )
    recipe, is_relative = planned.parsed(args, rest)
    base = recipe.config.preset.base if is_relative else None
    studies, control = planned.planned(args, recipe.config, base)
    judged = []
    for study, entry in zip(studies, record["studies"], strict=True):
        measured = Measured(study, args.seeds)
        for index, size in enumerate(entry["sizes"]):
            first = study.configs[index].seed
            for point in size["points"]:
                place = (index, round(point["log2_lr"] / STEP), point["seed"] - first)
                measured.rows[place] = rows[point["key"]]
            if size["rates_chosen_by_seeds"] > args.seeds:
                measured.chosen[index] = size["rates_chosen_by_seeds"]
        if measured.next_points(args.max_seeds, args.minutes):
            measured.stopped = "its next seed is not trained yet"
        if analysis := measured.analysis():
            judged.append((measured, analysis))
    about = {
        name: value
        for name, value in record.items()
        if name not in ("format", "studies", "comparison")
    }
    report.write(folder, judged, control, about)


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    names: Positional[tuple[str, ...]] = ()
    minutes: float = 20.0
    """Minutes of training, of each preset in a study."""
    render: Switch = False
    """Train nothing: judge the rows that are there, and write the page."""
    list: Switch = False
    """Print the commands and run none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the studies that are asked for, all unless named, and write the page; 0 when all are done."""
    args = harness.parse(Options, argv)
    harness.check_names(args.names, STUDIES, "study")
    for name in args.names or STUDIES:
        command = words(name, args.minutes)
        if args.list:
            print(f"{name}: mupax transfer {shlex.join(command)}")
        elif args.render and (OUT / name / "transfer.json").exists():
            judge_again(OUT / name)
        elif not args.render:
            with contextlib.chdir(ROOT):
                if code := transfer_command.main(command):
                    return code
    if not args.list:
        page = ROOT / "docs" / "evidence" / "transfer.md"
        page.write_text(markdown(records()))
        print(f"wrote {page.relative_to(ROOT)}")
    return 0


def records() -> dict[str, dict[str, Any]]:
    """transfer.json of each study that is there."""
    paths = {name: OUT / name / "transfer.json" for name in STUDIES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


if __name__ == "__main__":
    raise SystemExit(main())
