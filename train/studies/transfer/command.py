"""`mupax transfer RECIPE --grow head_dim=16,32,64,128`: does the best learning rate stay as the model grows?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import command_line, terminal
from mupax.train.config import cli
from mupax.train.config.run import check_extras
from mupax.train.studies.transfer.planned import Transfer, label_of, parsed, planned, shared
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.train.config.run import Config
    from mupax.train.studies.sweep.rows import Row
    from mupax.train.studies.sweep.sweep import Sweep
    from mupax.train.studies.transfer.study import Measured, Runner, Study


def main(argv: Sequence[str]) -> int:
    """Runs a study: 0 when done, 1 without a forecast that is asked for, 128 + its number stopped by a signal; raises as `execute`."""
    args, rest = command_line.parse_known(Transfer, "mupax transfer", cli.with_file_first(argv))
    return execute(args, rest, shlex.join(["mupax", "transfer", *argv]))


def execute(args: Transfer, rest: Sequence[str], command: str, run: Runner | None = None) -> int:
    """Measure, judge, print, write; 0 when done, whatever it shows, 1 where nothing is known. Raises MupaxError for what does not fit.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
        command: that was written, for the record.
        run: trains points; the sweep engine in the folder unless given.
    """
    from mupax.train.studies.transfer import frugal, study, tuned

    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError(
            "a study has --out in place of --workdir, and goes on by itself without --resume"
        )
    recipe, relative = parsed(args, rest)
    config = recipe.config
    studies, control = planned(args, config, config.preset.base if relative else None)
    if args.predict:
        from mupax.train.studies.forecast import of_study

        of_study.check(studies[0].configs[0], args.predict)
    if args.save_tuned:
        tuned.check_before_training(args.save_tuned, config)
    if recipe.dry_run:
        _dry_run(studies, args)
        return 0
    check_extras(config)

    from mupax.train.studies.sweep import sweep

    console = terminal.console()
    folder = args.out or Path("runs") / f"transfer-{cli.name_of(args.recipe)}"
    folder.mkdir(parents=True, exist_ok=True)
    studies = shared(studies)
    if any(one.trained != one.configs for one in studies):
        console.print(
            "where presets give a model the same numbers its points are trained once", style="dim"
        )
    limits: Any = {"seeds": args.seeds, "max_seeds": args.max_seeds, "minutes": args.minutes}
    limits["kind"] = frugal.Frugal if args.search == "frugal" else study.Measured
    with sweep.engine(folder, args.how, evaluated=False) as engine:
        if run is None:
            limits["trained"] = engine.has_rows
        runner = run or _watched(engine, console)
        measured = study.measure(
            studies, runner, lambda line: console.print(line, style="dim"), **limits
        )
    return _report(args, folder, measured, control, command, label_of(config.preset))


def _dry_run(studies: Sequence[Study], args: Transfer) -> None:
    for study in studies:
        models = zip(study.sizes, study.configs, strict=True)
        widths = ", ".join(
            f"{size} (width {config.model.sizes()['embed']})" for size, config in models
        )
        terminal.say(f"{study.label}, {study.axis} {widths}, base {study.configs[0].preset.base}")
        points = f"5 rates or more a size, {args.seeds} to {args.max_seeds} seeds"
        if args.search == "frugal":
            points = f"{args.seeds} seeds at the smallest size, else 3 rates and 1 seed or more"
        terminal.say(
            f"  {points}, {study.configs[0].steps} steps, at most {args.minutes:g} minutes of training"
        )


def _watched(engine: Sweep, console: Console) -> Runner:
    """Return what trains points with a table on the console."""
    from mupax.train.studies.sweep.table import LiveTable

    def run(configs: Sequence[Config]) -> list[Row]:
        models = [(config.preset.name, config.model.sizes()) for config in configs]
        labels = [f"{name} width {size['embed']} depth {size['layers']}" for name, size in models]
        with LiveTable(console, labels, evaluated=False) as table:
            return engine.run(configs, table)

    return run


def _report(
    args: Transfer,
    folder: Path,
    measured: Sequence[Measured],
    control: str | None,
    command: str,
    label: str,
) -> int:
    from mupax.train.config.record import to_json
    from mupax.train.studies.transfer import report, tuned

    config = measured[0].study.configs[0]
    about = {
        "title": f"Does the learning rate of {args.recipe} transfer?",
        "command": command,
        "recipe": args.recipe,
        "data": config.data.name,
        "steps": config.steps,
        "batch": config.data.batch_size,
        f"{config.model.unit}s seen by a point": f"{config.steps * config.data.batch_size * config.model.units:,}",
        "optimizer": config.optimizer.name,
        "config": to_json(config),
    }
    if args.search == "frugal":
        from mupax.train.studies.transfer import frugal

        about["title"] = f"The best learning rate of {args.recipe} as it grows"
        return frugal.report(folder, measured, about, args.save_tuned, label, command)
    judged = []
    for one in measured:
        if (analysis := one.analysis()) is None:
            terminal.say(f"{one.study.label} in {one.study.axis}: {one.stopped}")
        else:
            judged.append((one, analysis))
    if not judged:
        return 1
    written = report.write(folder, judged, control, about)
    report.report_of(judged, control, command).show()
    terminal.say(f"report in {written}")
    if args.save_tuned:
        path, use = tuned.save(args.save_tuned, label, judged, command)
        terminal.say(tuned.saved_message(path, use))
    if args.predict:
        from mupax.train.studies.forecast import of_study

        return 0 if of_study.write(folder, of_study.points(measured), args.predict) else 1
    return 0
