"""Transfer studies of docs/evidence/transfer.md: runs them, and writes their folder and the page.

    python -m scripts.studies.transfer [NAME ...] [--minutes N] [--render] [--list]

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
from typing import Any, NamedTuple

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
from scripts.pages.markdown import table
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


class StudyCommand(NamedTuple):
    """Command of a study."""

    words: str
    """Words of `mupax transfer`: run, presets and sizes."""
    minutes: float = 20.0
    """Longest training of each preset, in minutes."""


STUDIES = {
    "head_dim": StudyCommand(
        f"{LM} --preset mup --compare mup-half --control sp --grow head_dim=16,32,64,128"
    ),
    "heads": StudyCommand(
        f"{LM} --preset mup --compare mup-half --control sp --grow heads=4,8,16,32"
    ),
    "heads-tuned": StudyCommand(f"{LM} {TUNED} --control none --grow heads=4,8,16,32"),
    "tied-start": StudyCommand(
        f"{LM} --preset mup --preset.constants key_start=query --compare mup mup-half "
        "--grow head_dim=16,32,64"
    ),
    "ed-heads": StudyCommand(f"{ED} --preset mup --control sp --grow heads=2,4,8", minutes=60.0),
    "depth": StudyCommand(f"{VIT} {DEPTH}"),
    "depth-adam": StudyCommand(f"{LM} {DEPTH}"),
    "batch": StudyCommand(
        f"{SMALL} --steps 2400 --optimizer.warmup-steps 240 --grow batch=8,16,32,64 --joint sde "
        "--control none --seeds 6",
        minutes=45.0,
    ),
    "tokens": StudyCommand(
        f"{SMALL} --steps 600 --optimizer.warmup-steps 60 --grow tokens=38400,76800,153600,307200 "
        "--joint complete-d --control none --seeds 6",
        minutes=45.0,
    ),
    "moe-width": StudyCommand(f"{MOE} --control sp --grow head_dim=16,32,64", minutes=240.0),
    "moe-experts": StudyCommand(f"{MOE} --grow experts=4,8,16", minutes=240.0),
    "moe-experts-sgd": StudyCommand(
        f"{MOE_ALONE} --control mup,experts=dense --grow experts=16,32,64", minutes=12.0
    ),
}
"""Name of a study to its command."""
ABOUT = {
    "head_dim": "A decoder with four heads under Adam grows eightfold in head dimension.",
    "heads": "A decoder under Adam grows eightfold in heads of dimension 16.",
    "heads-tuned": (
        "This repeats [heads](#heads) for `mup` with the constants of `--preset mup:lm-heads-v1`."
    ),
    "tied-start": (
        "A decoder under Adam grows fourfold in head dimension. `key_start=query` starts key "
        "matrices equal to query matrices. This raises `mup`'s loss by 0.007 nats for the "
        "smallest model and 0.044 for the largest."
    ),
    "ed-heads": (
        "An encoder-decoder with 2 + 2 layers denoises bytes under Adam. The number of heads, of "
        "dimension 16, grows fourfold in encoder and decoder."
    ),
    "depth": (
        "A vision transformer of width 64 under SGD with momentum grows eightfold in layers. The "
        "control is `mup`, which has no rule for depth."
    ),
    "depth-adam": "A decoder of width 64 under Adam grows eightfold in layers. The control is `mup`.",
    "batch": (
        "A decoder of width 32 with one layer under Adam sees 153,600 tokens in batches of 64 to "
        "512 tokens. The [joint rule](../concepts/presets.md#batch-and-tokens) `sde` scales "
        "Adam's learning rate (as batch^0.5), betas and eps."
    ),
    "tokens": (
        "The decoder of [batch](#batch) sees 38,400 to 307,200 tokens in batches of 64 tokens. "
        "The control, plain `mup`, transfers. The joint rule `complete-d`, which scales the peak "
        "learning rate as tokens^-0.5, drifts."
    ),
    "moe-width": (
        "A decoder with two layers and four experts (two active) under Adam grows fourfold in head "
        "dimension."
    ),
    "moe-experts": (
        "The smallest decoder of [moe-width](#moe-width) grows from four to sixteen experts, half of "
        "them active. Under Adam, `mup`'s learning rates do not depend on the number of "
        "experts, so there is no control."
    ),
    "moe-experts-sgd": (
        "A decoder grows from 16 to 64 experts, half of them active. SGD trains only the experts and "
        "routers. The control ignores the number of experts in their learning rates, and should drift "
        "by one octave per doubling."
    ),
}
"""Paragraph of the page about each study."""
HEAD = f"""# Does the learning rate transfer?

Each study grows one size of a small model, or the batch or tokens of its run. Every size trains at learning rates half an octave apart.
The best rate of a size is the vertex of a parabola fitted to the mean losses around the lowest one.
The **drift** is the slope of the best rate, in octaves per doubling of the size, with a 95 % interval over seeds.

| verdict | meaning |
|---|---|
| **transfers** | drift within ± {TOLERANCE:.2f}, interval inside ± {BOUND:.2f}, best rates found at both end sizes: keep the rate |
| **drifts** | interval wholly above {TOLERANCE:.2f} or below -{TOLERANCE:.2f}: tune again as the size grows |
| **undecided** | anything else, or noise hides most curves |

**Loss** is the largest size's training loss at its own best rate, in nats. The **price** of not
retuning is the largest size's loss at the smallest size's best rate, less **loss**. A control, such
as `sp`, should drift.

`python -m scripts.studies.transfer` runs the studies up to [moe-experts-sgd](#moe-experts-sgd).
The losses are in `docs/evidence/transfer/*/points.jsonl.gz`.
"""


def words(name: str, minutes: float | None = None) -> list[str]:
    """Return the words that follow `mupax transfer` in a study, with a path from the checkout.

    Args:
        minutes: Longest training of each preset, in minutes. Default: that of the study.
    """
    study = STUDIES[name]
    if minutes is None:
        minutes = study.minutes
    return shlex.split(f"{study.words} --minutes {minutes:g} --out docs/evidence/transfer/{name}")


def markdown(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, with the sections after `LAST_SECTIONS` as the file has them.

    Args:
        records: name of a study to the content of its transfer.json.
    """
    lines = [HEAD]
    for name, record in records.items():
        axis = record["studies"][0]["axis"]
        picture = f"![Loss against learning rate](transfer/{name}/{axis}.png)"
        lines += [f"## {name}", "", ABOUT[name], "", picture, ""]
        head = ["preset", "verdict", "price", "drift", "loss", "seeds"]
        lines += [table([head, *map(_row, record["studies"])]), ""]

    page = PAGE.read_text()
    end = page[page.index(LAST_SECTIONS) :]
    return "\n".join([*lines, verdicts.document(), end])


def _row(study: Mapping[str, Any]) -> list[str]:
    """Return the table cells of one preset's study."""
    largest = study["sizes"][-1]
    return [
        f"`{study['preset']}`",
        study["verdict"],
        interval_text(largest["price_of_not_tuning"], ".3f"),
        interval_text(study["drift_octaves_per_doubling"], "+.2f"),
        loss_text(largest["loss"]),
        f"{study['seeds']}",
    ]


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


def compact(folder: Path) -> None:
    """Rewrite the transfer.json of every study in a folder without line breaks and spaces.

    They are a third of the file.
    """
    for path in folder.glob("*/transfer.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record, separators=(",", ":")) + "\n")


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

    planned_studies = {(study.label, study.axis): study for study in studies}
    judged = []
    # A study that was interrupted has a record of its first presets only.
    for entry in record["studies"]:
        study = planned_studies[entry["preset"], entry["axis"]]
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
    minutes: float | None = None
    """Longest training of each preset in a study, in minutes. Default: that of the study."""
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
        compact(OUT)
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
