"""`python -m train sweep RECIPE`: many runs that differ in learning rate, seed, constants or size, as one command.

Points that differ in numbers alone (rate, decay, warm-up, seed, constants of the preset) are trained with one compilation; a
size compiles once. Every point sees the same batches in the same order. The same command goes on where it was stopped.
What is not listed here is a flag of the recipe (`python -m train RECIPE --help`) and holds for every point.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import terminal
from mupax.train.config.grids import Planned

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.train.studies.sweep.rows import Row

MOST_POINTS = 2000


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    made = argparse.ArgumentParser(
        prog="python -m train sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("recipe", metavar="RECIPE", help="a recipe of `python -m train --help`")
    made.add_argument("--lr", metavar="GRID", help="peak rates: 2^-12:2^-4:9, or numbers with commas (the recipe's)")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="initializations per point (1)")
    made.add_argument(
        "--sizes", metavar="AXIS=N,...", help="models: width=64,128,256, head_dim=, heads=, depth= or mlp="
    )
    made.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="FLAG=GRID",
        help="any other flag of the recipe with its values, as preset.gamma0=0.5,1,2; may come several times",
    )
    made.add_argument(
        "--how",
        default="auto",
        choices=["auto", "together", "in-turn"],
        help="all points of a shape at once, one after another, or what a trial shows to be faster, on a CPU some side by side (auto)",
    )
    made.add_argument("--no-eval", action="store_true", help="do not evaluate after the last step")
    made.add_argument("--out", metavar="FOLDER", help="where rows and the summary go (runs/sweep-RECIPE)")
    made.add_argument("--json", metavar="PATH", help="write all rows and what they were made of (FOLDER/sweep.json)")
    made.add_argument(
        "--save-tuned",
        metavar="NAME",
        help="save the smallest size's best rate as the tuned preset PRESET:NAME",
    )
    made.add_argument("--dry-run", action="store_true", help="list the points and their programs; train nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Run a sweep and return its exit code.

    It is 0 when every point has its row, 1 when `--save-tuned` has no best rate to save, 2 on bad input, and 130 or 143 when
    stopped by a signal.
    """
    try:
        args, rest = parser().parse_known_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    found = points(args, rest)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned as tuned
        from mupax.zoo.configs import ConfigError

        tuned.check_name(args.save_tuned, found[0].config.preset.name)
        if len({point.varied for point in found}) > 1:
            raise ConfigError(
                f"--save-tuned {args.save_tuned}: the sweep varied more than rate, seed and size; sweep one choice"
            )
    if args.dry_run:
        return _dry_run(found)
    return _run(args, found, ["python", "-m", "train", "sweep", *argv])


def points(args: argparse.Namespace, rest: Sequence[str]) -> list[Planned]:
    """Every point.

    Raises:
        ConfigError: no such recipe, grid, axis or flag, or more points than anyone means.
    """
    from mupax.train.config import cli, grids, sizes
    from mupax.zoo.configs import ConfigError

    recipe = cli.recipe(args.recipe)
    if args.seeds < 1:
        raise ConfigError(f"--seeds is {args.seeds}; write a number of at least 1")
    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError("a sweep has --out in place of --workdir, and goes on by itself without --resume")
    own = [*parser()._option_string_actions]
    varied = [_varied(text) for text in args.vary]
    axis, grown = sizes.parse(args.sizes) if args.sizes else ("", (0,))
    found: list[Planned] = []
    for values in itertools.product(*(values for _, values in varied)):
        words = [word for (flag, _), value in zip(varied, values, strict=True) for word in (f"--{flag}", value)]
        config = cli.parse(args.recipe, recipe, [*rest, *words], own).config
        label = " ".join(f"{flag.rpartition('.')[2]} {value}" for (flag, _), value in zip(varied, values, strict=True))
        rates = grids.parse(args.lr) if args.lr else (config.optimizer.peak_lr,)
        for size, lr, seed in itertools.product(grown, rates, range(args.seeds)):
            model = sizes.grown(config.model, axis, size) if axis else config.model
            point = dataclasses.replace(
                config,
                model=model,
                workdir=None,
                seed=config.seed + seed,
                data=dataclasses.replace(config.data, seed=config.data_seed),
                optimizer=dataclasses.replace(config.optimizer, peak_lr=lr),
            )
            found.append(Planned(size, label, f"{axis} {size} {label}".strip() if axis else label, point))
        if len(found) > MOST_POINTS:
            raise ConfigError(f"these are more than {MOST_POINTS} points; write a coarser grid")
    return found


def _varied(text: str) -> tuple[str, list[str]]:
    from mupax.zoo.configs import ConfigError

    flag, equals, values = (part.strip() for part in text.lstrip("-").partition("="))
    if not (flag and equals and values):
        raise ConfigError(f"--vary {text!r}: write FLAG=VALUE,VALUE, as preset.gamma0=0.5,1,2")
    if ":" in values:
        from mupax.train.config import grids as grids

        return flag, [f"{value:.10g}" for value in grids.parse(values)]
    return flag, [value.strip() for value in values.split(",")]


def _dry_run(found: Sequence[Planned]) -> int:
    from mupax.train.config.grids import power
    from mupax.train.studies.sweep import groups as sweep_groups

    groups = list(sweep_groups.Groups().of([point.config for point in found]).values())
    count = len(groups)
    print(f"{len(found)} points in {count} program{'s' * (count > 1)}")
    for group in groups:
        labels = dict.fromkeys(found[i].label for i, _ in group)
        configs = [found[i].config for i, _ in group]
        rates = sorted({config.optimizer.peak_lr for config in configs})
        seeds = sorted({config.seed for config in configs})
        print(
            f"  {', '.join(filter(None, labels)) or configs[0].recipe}: {len(group)} points, "
            f"rates {' '.join(map(power, rates))}, seeds {' '.join(map(str, seeds))}, "
            f"{group[0][1].definition.count():,} parameters, {configs[0].steps} steps"
        )
    return 0


def _run(args: argparse.Namespace, found: Sequence[Planned], command: Sequence[str]) -> int:

    from mupax.train.parallel.signals import StopRequest
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.sweep.table import Table

    console = terminal.console()
    folder = Path(args.out or f"runs/sweep-{args.recipe}")
    configs = [point.config for point in found]
    evaluated = not args.no_eval
    metric = "evaluation loss" if evaluated else "training loss"
    with StopRequest() as stop:
        stop.defer()
        try:
            with Table(console, [point.label for point in found], metric, _value) as table:
                rows = sweep.run(
                    configs,
                    folder,
                    how=args.how,
                    evaluated=evaluated,
                    watcher=table,
                    stop=lambda: stop.received is not None,
                )
        except sweep.Stopped:
            name = stop.received.name if stop.received else "a signal"
            console.print(f"stopped by {name}; what was in training is saved, and the same command goes on")
            return stop.exit_code
    best = min(range(len(rows)), key=lambda i: _value(rows[i]))
    console.print(f"lowest {metric}: {_value(rows[best]):.4f}, by", highlight=False)
    console.print(f"  {rows[best].command or found[best].label}", highlight=False, soft_wrap=True)
    path = Path(args.json) if args.json else folder / "sweep.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_summary(found, rows, command), indent=1) + "\n")
    console.print(f"rows in {path}", highlight=False)
    return _study(args, found, rows, folder, shlex.join(command), console)


def _study(
    args: argparse.Namespace,
    found: Sequence[Planned],
    rows: Sequence[Row],
    folder: Path,
    command: str,
    console: Console,
) -> int:
    """The picture of loss against rate, a note where there is no best rate, and the tuned preset."""
    from mupax.train.studies.sweep import study as sweep_study
    from mupax.train.studies.transfer import figure, tuned

    if len({point.config.optimizer.peak_lr for point in found}) < 2 and not args.save_tuned:
        return 0
    judged = sweep_study.judged(found, rows, args.sizes.partition("=")[0].strip() if args.sizes else "")
    config = found[0].config
    title = f"{args.recipe}, {config.optimizer.name}, {config.steps} steps: loss against learning rate"
    figure.draw(folder / "sweep.png", judged, title)
    console.print(f"picture in {folder / 'sweep.png'}", highlight=False)
    for measured, analysis in judged:
        for size, fitted in zip(analysis.sizes, analysis.fits, strict=True):
            if fitted.trouble:
                where = f"{measured.study.label} at {measured.study.axis} {size}"
                console.print(f"note: no best rate for {where}: {fitted.why}", highlight=False)
    if args.save_tuned:
        path, word = tuned.save(args.save_tuned, judged[0][0].study.label, judged, command)
        console.print(f"tuned preset in {path}; use it with --preset {word}", highlight=False)
    return 0


def _value(row: Row) -> float:
    return row.loss if row.eval_loss is None else row.eval_loss


def _summary(found: Sequence[Planned], rows: Sequence[Row], command: Sequence[str]) -> dict[str, Any]:
    points = [
        {"what": p.label, "peak_lr": p.config.optimizer.peak_lr, "seed": p.config.seed, **row.to_json()}
        for p, row in zip(found, rows, strict=True)
    ]
    return {"command": " ".join(command), "points": points}
