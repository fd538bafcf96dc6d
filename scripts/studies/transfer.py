"""Transfer studies of docs/evidence/transfer.md: runs them, and writes their folder and the page.

    python -m scripts.studies.transfer [NAME ...] [--minutes 20] [--render] [--list]

Each study is a `mupax transfer` whose rows go to docs/evidence/transfer/NAME as they finish. An
interrupted study resumes. `--render` judges the recorded rows again and draws the pictures.
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
PAGE = ROOT / "docs" / "evidence" / "transfer.md"
LAST_SECTIONS = "<!-- leaderboard: begin -->\n"
"""First line of the page's end, which other commands and people write."""

# The words of these commands are in the records of the studies. They do not change.
LM = (
    "lm-tiny --model.width 64 --model.num-heads 4 --model.depth 2 --model.seq-len 64 "
    "--data.batch-size 8 --steps 100 --optimizer.name adam --optimizer.warmup-steps 20 "
    "--optimizer.clip-norm None"
)
VIT = (
    "vit-digits --model.width 64 --model.num-heads 4 --model.depth 2 --data.batch-size 32 "
    "--steps 100 --optimizer.name momentum --optimizer.warmup-steps 10 --optimizer.clip-norm None "
    "--optimizer.weight-decay 0 --optimizer.peak-lr 0.0625"
)
SMALL = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 1 --model.seq-len 8 "
    "--data.batch-size 8 --optimizer.name adam --optimizer.clip-norm None --optimizer.peak-lr 0.016"
)
DEPTH = "--preset depth-mup --preset.alpha-l 1 --control mup --grow depth=2,4,8,16"
ED = (
    "ed-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 "
    "--data.batch-size 8 --steps 100 --optimizer.name adam --optimizer.warmup-steps 20 "
    "--optimizer.clip-norm None"
)
MOE = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 "
    "--model.experts 4 --model.expert-dim 32 --data.batch-size 8 --steps 100 "
    "--optimizer.warmup-steps 20 --optimizer.clip-norm None --optimizer.name adam --preset mup"
)
"""Run with four experts, two of them active."""
MOE_ALONE = (
    "lm-tiny --model.width 32 --model.num-heads 2 --model.depth 2 --model.seq-len 32 "
    "--model.experts 16 --model.active-experts 8 --model.expert-dim 16 --data.batch-size 8 "
    "--steps 100 --optimizer.warmup-steps 20 --optimizer.clip-norm None --optimizer.name sgd "
    "--optimizer.weight-decay 0 --optimizer.peak-lr 8 --train-only block.experts.* --preset mup"
)
"""Run with sixteen experts, eight of them active, that trains only the experts and their router."""
TUNED = (
    "--optimizer.peak-lr 0.011 --preset mup --preset.constants rates.readout=8 "
    "rates.token_embedding=16 stds.readout=0.5 readout_width=-0.5 embedding_width=-0.5"
)
"""Constants tuned at width 64 in 100 steps, with the width exponents that docs/evidence/quality.md
finds best."""
STUDIES = {
    "head_dim": f"{LM} --preset mup --compare mup-half --control sp --grow head_dim=16,32,64,128",
    "heads": f"{LM} --preset mup --compare mup-half --control sp --grow heads=4,8,16,32",
    "heads-tuned": f"{LM} {TUNED} --control none --grow heads=4,8,16,32",
    "tied-start": (
        f"{LM} --preset mup --preset.constants key_start=query --compare mup mup-half "
        "--grow head_dim=16,32,64"
    ),
    "ed-heads": f"{ED} --preset mup --control sp --grow heads=2,4,8",
    "depth": f"{VIT} {DEPTH}",
    "depth-adam": f"{LM} {DEPTH}",
    "batch": (
        f"{SMALL} --steps 2400 --optimizer.warmup-steps 240 --grow batch=8,16,32,64 --joint sde "
        "--control none --seeds 6"
    ),
    "tokens": (
        f"{SMALL} --steps 600 --optimizer.warmup-steps 60 --grow tokens=38400,76800,153600,307200 "
        "--joint complete-d --control none --seeds 6"
    ),
    "moe-width": f"{MOE} --control sp --grow head_dim=16,32,64",
    "moe-experts": f"{MOE} --grow experts=4,8,16",
    "moe-experts-sgd": f"{MOE_ALONE} --control mup,experts=dense --grow experts=16,32,64",
}
"""Name of a study to the words of its `mupax transfer`: run, presets and sizes."""
ABOUT = {
    "head_dim": "A decoder under Adam. The head dimension grows with four heads.",
    "heads": (
        "The same decoder. Heads grow at head dimension 16, where `mup` and `mup-half` are one "
        "rule, trained once."
    ),
    "heads-tuned": (
        "The same with tuned constants, used as `--preset mup:lm-heads-v1`. At every size the "
        "loss is lower than that of a retuned `sp` ([quality](quality.md))."
    ),
    "tied-start": (
        "The decoder with keys initialized as queries and 1/N on attention logits. At the best "
        "rates of the largest size the loss is 0.041 to 0.044 nats above `mup`, at the smallest "
        "0.007. The reason is not tested."
    ),
    "ed-heads": (
        "An encoder-decoder (2 + 2 layers, 32 positions each) that denoises bytes under Adam. "
        "Heads grow fourfold at head dimension 16, and so does the encoder's width."
    ),
    "depth": ("A vision transformer under SGD with momentum. Layers grow at width 64."),
    "depth-adam": (
        "The decoder under Adam. Layers grow at width 64. Eight seeds do not decide whether the "
        "control drifts: deeper is worse under plain `mup` at most rates."
    ),
    "batch": (
        "The decoder at width 32 with one layer sees 153,600 tokens in batches of 64 to 512 "
        "tokens. Warm-up and decay are the same share of every run. The square-root rule (`sde`) "
        "is compared with a constant rate."
    ),
    "tokens": (
        "The same model at the smallest batch sees 1 to 8 times 38,400 tokens. Under a constant "
        "rate, the control, the drift is the exponent of the rate in tokens: 0 within about a "
        "tenth. It is -0.32 in Bjorck et al., -0.5 in `complete-d` and +0.31 in Step Law, whose "
        "batch grows too. [Published runs](forecasts.md#published-runs) reconcile these "
        "exponents."
    ),
    "moe-width": (
        "A decoder of width 32 with two layers, four experts and two active experts. Head "
        "dimension, width and the experts' hidden size grow fourfold."
    ),
    "moe-experts": (
        "The same model with four to sixteen experts, half of them active. Under Adam no rule "
        "scales a rate with the number of experts, so no control can drift."
    ),
    "moe-experts-sgd": (
        "Under SGD the dense rule omits the factor E in the rates of experts and routers, and "
        "drifts by one octave per doubling. Only experts and routers are trained. Losses are flat "
        "in the rate (0.03 nats within an octave), so eight seeds show the control's drift and do "
        "not show that `mup` transfers."
    ),
}
"""Paragraph of the page about each study."""
HEAD = f"""# Does the learning rate transfer?

Each study grows a small model in one dimension, eightfold unless it says otherwise, at learning
rates half an octave apart. All points see the same batches and seeds. The best rate of a size is
the vertex of a parabola through the mean losses around the minimum. The **drift** is the slope of
the best rate, in octaves per doubling of the size, with a 95 % interval over seeds.

| verdict | meaning |
|---|---|
| **transfers** | drift within ± {TOLERANCE:.2f}, interval inside ± {BOUND:.2f}: keep the rate |
| **drifts** | interval outside ± {TOLERANCE:.2f}: tune again as the model grows |
| **undecided** | anything else, after at most eight seeds |

The **price** of not retuning is the loss at the smallest size's best rate less the loss at the
largest size's own best rate, in nats. **Loss** is the lowest loss at the largest size. A control,
such as `sp`, must drift. [A simulation](#how-far-to-trust-a-verdict) shows how often a verdict is
right.

`python -m scripts.studies.transfer` trains all studies, 3 to 28 minutes for each preset, and can be
stopped and resumed; `--list` prints the commands. All rows are in
`docs/evidence/transfer/*/points.jsonl.gz`.
"""


def words(name: str, minutes: float) -> list[str]:
    """Return the words that follow `mupax transfer` in a study, with a path from the checkout.

    Args:
        name: key of `STUDIES`.
        minutes: Longest training of each preset, in minutes.
    """
    return shlex.split(f"{STUDIES[name]} --minutes {minutes:g} --out docs/evidence/transfer/{name}")


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, with the sections after `LAST_SECTIONS` as the file has them.

    Args:
        records: name of a study to the content of its transfer.json.
    """
    lines = [HEAD]
    for name, record in records.items():
        axis = record["studies"][0]["axis"]
        picture = f"![Loss against learning rate as {axis} grows](transfer/{name}/{axis}.png)"
        lines += [f"## {name}", "", ABOUT[name], "", picture, ""]
        lines.append("| preset | verdict | price | drift | loss | seeds |")
        lines.append("|---|---|---|---|---|---|")
        lines += [_row(study) for study in record["studies"]]
        lines.append("")

    page = PAGE.read_text()
    end = page[page.index(LAST_SECTIONS) :]
    return "\n".join([*lines, verdicts.document(), end])


def _row(study: Mapping[str, Any]) -> str:
    """Return the table row of one preset's study."""
    largest = study["sizes"][-1]
    cells = [
        f"`{study['preset']}`",
        study["verdict"],
        interval_text(largest["price_of_not_tuning"], ".3f"),
        interval_text(study["drift_octaves_per_doubling"], "+.2f"),
        loss_text(largest["loss"]),
        f"{study['seeds']}",
    ]
    return f"| {' | '.join(cells)} |"


def loss_text(loss: float | None) -> str:
    """Return a loss as a cell of a table."""
    return "unknown" if loss is None else f"{loss:.3f}"


def interval_text(interval: Mapping[str, float | None], form: str) -> str:
    """Return a value with its interval, or without one that is not known, as a cell of a table.

    Args:
        interval: `value`, `low` and `high` of a record.
        form: format of each number, such as ".3f".
    """
    if interval["value"] is None:
        return "unknown"
    if interval["low"] is None or interval["high"] is None:
        return f"{interval['value']:{form}}"
    return f"{interval['value']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def judge_again(folder: Path) -> None:
    """Judge a study from its recorded rows, and write its record and pictures without any training.

    Args:
        folder: Folder with the study's transfer.json and points.jsonl.
    """
    record = json.loads((folder / "transfer.json").read_text())
    rows = Rows(folder, lambda line: None)
    _, *arguments = words_of(record["command"])
    args, recipe_words = command_line.parse_known(
        planned.Transfer, planned.PROG, cli.with_file_first(arguments)
    )
    recipe, is_relative = planned.parsed(args, recipe_words)
    base = recipe.config.preset.base if is_relative else None
    studies, control = planned.planned(args, recipe.config, base)

    judged = []
    for study, entry in zip(studies, record["studies"], strict=True):
        measured = Measured(study, args.seeds)
        for index, size in enumerate(entry["sizes"]):
            first_seed = study.configs[index].seed
            for point in size["points"]:
                step = round(point["log2_lr"] / STEP)
                # A study counts seeds from that of its config.
                measured.rows[index, step, point["seed"] - first_seed] = rows[point["key"]]
            if size["rates_chosen_by_seeds"] > args.seeds:
                measured.chosen[index] = size["rates_chosen_by_seeds"]

        # Rows of an interrupted study end before its verdict is decided.
        if measured.next_points(args.max_seeds, args.minutes):
            measured.stopped = "its next seed is not trained yet"
        analysis = measured.analysis()
        if analysis:
            judged.append((measured, analysis))

    about = {}
    for name, value in record.items():
        if name not in ("format", "studies", "comparison"):
            about[name] = value
    report.write(folder, judged, control, about)


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    names: Positional[tuple[str, ...]] = ()
    """Studies to run; all by default."""
    minutes: float = 20.0
    """Longest training of each preset in a study, in minutes."""
    render: Switch = False
    """Train nothing: judge the recorded rows again, and write the page."""
    list: Switch = False
    """Print the commands and run none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the studies and write the page; return 0 or the exit code of the first failed study."""
    args = harness.parse(Options, argv)
    harness.check_names(args.names, STUDIES, "study")
    for name in args.names or STUDIES:
        command = words(name, args.minutes)
        if args.list:
            print(f"{name}: mupax transfer {shlex.join(command)}")
        elif args.render:
            if (OUT / name / "transfer.json").exists():
                judge_again(OUT / name)
        else:
            # The words of a study have paths from the checkout's root.
            with contextlib.chdir(ROOT):
                code = transfer_command.main(command)
            if code:
                return code

    if not args.list:
        PAGE.write_text(markdown(records()))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def records() -> dict[str, dict[str, Any]]:
    """Return the content of transfer.json for each study that has been run."""
    contents = {}
    for name in STUDIES:
        path = OUT / name / "transfer.json"
        if path.exists():
            contents[name] = json.loads(path.read_text())
    return contents


if __name__ == "__main__":
    raise SystemExit(main())
