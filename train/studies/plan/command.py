"""`mupax plan RECIPE --tokens 10b --from FOLDER`: a run's whole config, its cost and its loss, before it is run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mupax import command_line, disk, terminal
from mupax.train.config import cli
from mupax.train.studies.plan import ranges
from mupax.train.studies.plan.flags import Plan

if TYPE_CHECKING:
    from mupax.train.config.run import Config
    from mupax.train.studies.plan.numbers import Line

PROG = "mupax plan"


def main(argv: Sequence[str]) -> int:
    """Plans and prints: 0, or 1 where the run does not fit the chips; raises as `mupax.train.studies.plan.run.run_of`.

    Args:
        argv: the words after `plan`; `score` as the first hands the others to `mupax.train.studies.plan.score`.
    """
    if argv[:1] == ["score"]:
        from mupax.train.studies.plan import score

        return score.main(argv[1:])
    from mupax.train.studies.plan import run

    args, rest = command_line.parse_known(Plan, PROG, run.with_name(cli.with_file_first(argv)))
    if args.chips:
        from mupax.train.pods import topology

        topology.chip_of(args.chips)  # refused before anything is read
    from mupax.train.studies.forecast import points
    from mupax.train.studies.plan import cost, numbers

    studies = points.load([Path(folder) for folder in args.studies]) if args.studies else []
    request = run.run_of(args, rest, studies)
    keep_rate = any(word.partition("=")[0].replace("_", "-") == "--optimizer.peak-lr" for word in rest)
    learnt = numbers.of_law(request.config, studies, keep_rate=keep_rate)
    config, costs = cost.of(learnt.config, args, studies)
    rows, cautions = [*numbers.rows(config, learnt, request.source), *costs.rows], [*learnt.cautions, *costs.cautions]
    command = numbers.command(config)
    terminal.say(_conclusion(args.recipe, config, rows, fits=costs.fits))
    print("run it with", terminal.command(command), sep="\n")
    table = terminal.filled([("", "value", "interval", "from"), *rows])
    print(terminal.table(table, indent=1))
    for caution in cautions:
        terminal.say(f"caution: {caution}")
    forecast = learnt.forecast(config, shlex.join([*argv]))
    if args.out is not None:
        keys = ("what", "value", "interval", "from")
        content = {
            "format": "plan 1",
            "asked": f"{PROG} {shlex.join(argv)}",
            "command": command,
            "numbers": [dict(zip(keys, row, strict=True)) for row in rows],
            "cautions": cautions,
            "forecast": forecast,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        disk.write_whole(args.out, json.dumps(content, indent=1) + "\n")
        again = f"; `{PROG} score {shlex.quote(str(args.out))} WORKDIR` holds it against what came" if forecast else ""
        terminal.say(f"plan in {args.out}{again}")
    return 0 if costs.fits else 1


def _conclusion(recipe: str, config: Config, rows: Sequence[Line], *, fits: bool) -> str:
    """Return what the plan comes to, in a sentence: rate, loss and time, or that the run does not fit."""
    value = {row[0]: row[1] for row in rows}
    interval = {row[0]: row[2] for row in rows}
    run = f"{recipe}: {config.steps:,} steps at a peak rate of {value['peak rate']}"
    if not fits:
        return f"{run} do not fit the chips; the last caution says by how much"
    time = f", in {value['time'].partition(',')[0]}" if "time" in value else ""
    if value["loss"] == ranges.NOT_PREDICTED:
        return f"{run}{time}; no loss is predicted (see the cautions)"
    return f"{run} should end at a loss of {value['loss']} [{interval['loss']}]{time}"
