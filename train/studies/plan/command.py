"""`python -m train plan RECIPE --tokens 10b --from FOLDER`: a run's whole config, its cost and its loss, before it is run."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mupax import command_line, disk, terminal
from mupax.train.config import cli, sizes
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.studies.plan.flags import Plan
from mupax.zoo.configs import CONFIGS, ConfigError

PROG = "python -m train plan"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def main(argv: Sequence[str]) -> int:
    """Plans and prints: 0, or 1 where the run does not fit the chips; raises as `mupax.train.config.cli.parse`.

    Args:
        argv: the words after `plan`; `score` as the first hands the others to `mupax.train.studies.plan.score`.
    """
    if argv[:1] == ["score"]:
        from mupax.train.studies.plan import score

        return score.main(argv[1:])
    args, rest = command_line.parse_known(Plan, PROG, argv)
    if args.chips:
        from mupax.train.pods import topology

        topology.chip_of(args.chips)  # refused before anything is read
    from mupax.train.studies.forecast import points
    from mupax.train.studies.plan import cost, numbers

    found = points.load([Path(folder) for folder in args.studies]) if args.studies else []
    config = run_of(args, rest, found[0].settings[0].config.recipe if found else None)
    asked = any(word.partition("=")[0].replace("_", "-") == "--optimizer.peak-lr" for word in rest)
    learnt = numbers.of_law(config, found, keep_rate=asked)
    config, costs = cost.of(learnt.config, args, found)
    rows, cautions = [*numbers.rows(config, learnt), *costs.rows], [*learnt.cautions, *costs.cautions]
    terminal.say(f"{args.recipe}: {config.steps:,} steps")
    table = terminal.filled([("", "value", "90 % interval", "from"), *rows])
    print(terminal.table(table, indent=1))
    for caution in cautions:
        terminal.say(f"caution: {caution}")
    forecast = learnt.forecast(config, shlex.join([*argv]))
    command = numbers.command(config)
    print("run it with", terminal.command(command), sep="\n")
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
        again = f"; {PROG} score {args.out} WORKDIR holds it against what came" if forecast else ""
        terminal.say(f"plan in {args.out}{again}")
    return 0 if costs.fits else 1


def run_of(args: Plan, rest: Sequence[str], recipe: str | None) -> Config:
    """The run that is asked for, before a study has said anything of it.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
        recipe: of the study, for a command that names a model.

    Raises:
        ConfigError, UsageError, PresetError: what does not fit, or a word that is neither recipe nor model.
    """
    name, words = args.recipe, [*rest]
    if name not in RECIPES and name in CONFIGS:
        if recipe is None:
            raise ConfigError(
                f"{name} is a model; write a recipe and --model {name}, or the study to plan from behind --from"
            )
        name, words = recipe, ["--model", name, *words]
    if args.tokens and any(word.partition("=")[0] == "--steps" for word in rest):
        raise ConfigError("--tokens and --steps both say how long the run is; write one of them")
    config = dataclasses.replace(
        cli.parse(name, cli.recipe(name), words, command_line.flags(Plan)).config, workdir=None
    )
    if not args.tokens:
        return config
    each = config.data.batch_size * config.model.units
    steps = max(1, round(tokens_of(args.tokens) / each))
    longer = sizes.grown_run(config, "tokens", steps * each)
    own = config.preset.joint != "none" or any(word.startswith("--optimizer.warmup") for word in rest)
    return dataclasses.replace(longer, optimizer=config.optimizer) if own else longer


def tokens_of(text: str) -> float:
    """How many tokens a text such as 10b, 1.5m or 2e9 means; raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--tokens is {text}; write a number such as 10b, 300m or 2e9")
    return float(match[1]) * _UNITS[match[2]]
