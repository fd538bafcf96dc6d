"""Tunes the presets that come with the project, a transfer study each: writes presets/tuned/*.json and docs/evidence/*.json.

    python -m scripts.studies.tune [PRESET:NAME ...] [--minutes 8] [--list]

Each study finds the best rate of a small base, at width 64, and holds it against a model twice as large along the axis that
its preset is for: head_dim, or depth for depth-mup. Points are kept in runs/tuned, a folder per kind of run, where the presets
share those of the base: a study that was stopped goes on, and to repeat one that is done draws its report there. Those of
`COMMITTED` are saved from rows of docs/transfer, without training; those of `SEARCHED` have several constants, and no larger size.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
from collections.abc import Sequence

from mupax.presets.tuned import find
from mupax.train.studies.transfer import command as transfer_command
from mupax.train.studies.tune import command as tune_command
from mupax.zoo.configs import ConfigError
from scripts import ROOT
from scripts.studies import transfer

BASE = "--model.width 64 --model.num-heads 4 --model.depth 2"
VIT = f"vit-endless {BASE} --data.batch-size 32 --steps 500 --optimizer.warmup-steps 50"
RECIPES = {
    "lm-python": f"lm-tiny {BASE} --steps 200 --optimizer.name adam --optimizer.warmup-steps 20",
    "vit-endless-adam": f"{VIT} --optimizer.name adam --optimizer.peak-lr 0.004",
    "vit-endless-sgd": (
        f"{VIT} --optimizer.name momentum --optimizer.clip-norm None --optimizer.weight-decay 0 --optimizer.peak-lr 0.0625"
    ),
}
"""Name to the run: Adam's rates mean the same with and without decay, and momentum is SGD's.

In 200 steps the images end on a plateau at ln 5, half of the task, at every rate of two octaves; 500 lead beyond.
"""
PRESETS = {
    "mup": ("--preset mup", "head_dim=16,32", ""),
    "mup-half": ("--preset mup-half", "head_dim=16,32", ""),
    "depth-mup": ("--preset depth-mup --preset.alpha-l 0.5", "depth=2,4", "-half"),
    "depth-mup at 1": ("--preset depth-mup --preset.alpha-l 1", "depth=2,4", "-one"),
}
"""The flags of each preset, what grows, and what it adds to the name: depth-mup has alpha_l in its."""


COMMITTED = {
    "mup:lm-short-v1": ("head_dim", transfer.LM, "--preset mup", "head_dim=16,32,64,128"),
    "mup-half:lm-short-v1": ("head_dim", transfer.LM, "--preset mup-half", "head_dim=16,32,64,128"),
    "mup:lm-heads-v1": ("heads-tuned", transfer.LM, transfer.TUNED, "heads=4,8,16,32"),
    "depth-mup:lm-short-one-v1": ("depth-adam", transfer.LM, "--preset depth-mup --preset.alpha-l 1", "depth=2,4,8,16"),
    "depth-mup:vit-digits-sgd-one-v1": (
        "depth",
        transfer.VIT,
        "--preset depth-mup --preset.alpha-l 1",
        "depth=2,4,8,16",
    ),
}
"""PRESET:NAME to a study of docs/transfer whose interval decides, and its run, preset and sizes."""
SEARCHED = {
    "mup:vit-endless-v1": (
        "vit-endless --model.width 64 --model.depth 2 --model.num-heads 4 --over "
        "lr,embedding.lr=2^0:2^6,readout.lr=2^0:2^6,readout.std=2^-1:2^4 --points 24 --confirm 3 --minutes 90 --no-eval "
        "--save-tuned docs/evidence/mup.vit-endless-v1.json"
    )
}
"""PRESET:NAME to the words of `mupax tune` that searched several constants of a base."""


def path_of(use: str) -> str:
    """Return where the file of PRESET:NAME is, relative to the checkout."""
    folder = "docs/evidence" if use in find.MOVED else "presets/tuned"
    return f"{folder}/{use.replace(':', '.', 1)}.json"


def studies(minutes: float) -> dict[str, list[str]]:
    """PRESET:NAME to the words after `mupax transfer`, their paths relative to the checkout."""
    commands = {}
    for run, recipe in RECIPES.items():
        for preset, (flags, grow, added) in PRESETS.items():
            word, name = preset.partition(" ")[0], f"{run}{added}-v1"
            commands[f"{word}:{name}"] = shlex.split(
                f"{recipe} {flags} --grow {grow} --minutes {minutes:g} --out runs/tuned/{run} "
                f"--save-tuned {path_of(f'{word}:{name}')}"
            )
    for preset, (study, recipe, flags, grow) in COMMITTED.items():
        commands[preset] = shlex.split(
            f"{recipe} {flags} --control none --grow {grow} --minutes 60 --out runs/tuned/{study} --save-tuned {path_of(preset)}"
        )
    return commands


def rows_of(study: str) -> None:
    """Put a committed study's rows where its preset's command looks for them."""
    folder = ROOT / "runs" / "tuned" / study
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(transfer.OUT / study / "points.jsonl", folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the studies that are asked for, all unless named; 0 when each has its file."""
    parser = argparse.ArgumentParser(prog="python -m scripts.studies.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PRESET:NAME", help="which (all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, of one study (8)")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    args = parser.parse_args(argv)
    commands = studies(args.minutes) | {name: shlex.split(words) for name, words in SEARCHED.items()}
    if unknown := [name for name in args.names if name not in commands]:
        parser.error(f"{unknown[0]} is not among {', '.join(commands)}")
    failed = []
    for name in args.names or commands:
        kind, run = ("tune", tune_command.main) if name in SEARCHED else ("transfer", transfer_command.main)
        print(f"{name}: mupax train {kind} {shlex.join(commands[name])}", flush=True)
        if args.list:
            continue
        if name in COMMITTED:
            rows_of(COMMITTED[name][0])
        with contextlib.chdir(ROOT):
            try:
                code = run(commands[name])
            except ConfigError as error:  # no minimum was found: the others may have one
                print(f"{name}: {error}")
                code = 1
        if code > 1:  # stopped by a signal
            return code
        failed += [name] if code else []
    if failed:
        print(f"without a file: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
