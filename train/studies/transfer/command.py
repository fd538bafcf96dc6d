"""Command `mupax transfer`: measure whether the best learning rate stays as the model grows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import command_line, terminal
from mupax.terminal import counted
from mupax.train.config import cli, joint
from mupax.train.config.preset import preset_of
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
    """Run `mupax transfer` for the words of its command line, and return the exit code.

    Args:
        argv: Words of the command line after `mupax transfer`.

    Returns:
        Code of `execute`: 0 when done, 1 if a result that was asked for is missing.
    """
    args, rest = command_line.parse_known(Transfer, "mupax transfer", cli.with_file_first(argv))
    return execute(args, rest, shlex.join(["mupax", "transfer", *argv]))


def execute(args: Transfer, rest: Sequence[str], command: str, run: Runner | None = None) -> int:
    """Train the transfer studies of a command, and print and write the report on them.

    A study trains one preset at growing model sizes. Its verdict says whether the best learning
    rate stays. With `--dry-run` the studies are only listed.

    Args:
        args: Flags of `mupax transfer`.
        rest: All other words of the command line, which are flags of the recipe.
        command: Command as it was typed, for the record.
        run: Function that trains configs and returns a `Row` for each. `None` (the default) stands
            for the sweep engine, which keeps the rows in the folder of `--out`.

    Returns:
        0 when done, whatever the verdict. 1 if no study could be judged, a size has no best
        learning rate under `--search frugal`, or a forecast of `--predict` cannot be made.

    Raises:
        MupaxError: Flags or values do not fit together.
        NoMinimum: The report is written, but `--save-tuned` has no best learning rate to save.
        SystemExit: A signal stopped the training. The code is 128 plus its number.
    """
    # Imported here, because these modules import SciPy, and `--help` should not wait for it.
    from mupax.train.studies.transfer import frugal, report, study, tuned

    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError(
            "a study has --out in place of --workdir, and goes on by itself without --resume"
        )
    recipe, relative = parsed(args, rest)
    config = recipe.config
    studies, control = planned(args, config, config.preset.base if relative else None)
    if not relative:
        _note_other_base(config, studies)
    # Checked now, or a mistake would show only after the training.
    if args.predict:
        from mupax.train.studies.forecast import of_study

        of_study.check(studies[0].configs[0], args.predict)
    if args.save_tuned:
        tuned.check_before_training(args.save_tuned, config)
    runs = []
    for plan in studies:
        runs += plan.configs
    note = joint.rates_note(runs)
    if note:
        terminal.say(note)
    if recipe.dry_run:
        _dry_run(studies, args)
        return 0
    check_extras(config)

    from mupax.train.studies.sweep import sweep

    console = terminal.console()
    folder = args.out or Path("runs") / f"transfer-{cli.name_of(args.recipe)}"
    folder.mkdir(parents=True, exist_ok=True)
    # After a dry run, because `shared` builds every model to compare the numbers of its presets.
    studies = shared(studies)
    if any(plan.trained != plan.configs for plan in studies):
        console.print(
            "where presets give a model the same numbers its points are trained once", style="dim"
        )

    def tell(line: str) -> None:
        console.print(line, style="dim")

    limits: Any = {"seeds": args.seeds, "max_seeds": args.max_seeds, "minutes": args.minutes}
    is_frugal = args.search == "frugal"
    limits["kind"] = frugal.Frugal if is_frugal else study.Measured
    report_name = "frugal.json" if is_frugal else "transfer.json"
    replaced = report.replacement_note(folder / report_name, command)
    if replaced:
        terminal.note(replaced)
    if not is_frugal:
        report.begin(folder, command)
    # A study judges training losses, so its points need no evaluation.
    with sweep.engine(folder, args.how, evaluated=False) as engine:
        if run is None:
            limits["trained"] = engine.has_rows
            run = _watched(engine, console)
        measured = study.measure(studies, run, tell, **limits)
    return _report(args, folder, measured, control, command, label_of(config.preset))


def _note_other_base(config: Config, studies: Sequence[Study]) -> None:
    """Print a note if a preset's constants may have been tuned at another base than a study's.

    The base is the model size that a preset's scaling is relative to. Constants, such as factors on
    the learning rate of a parameter group, hold at the base. `mupax tune` finds them at the base of
    the recipe, but a study takes its smallest size as the base. The note proposes `--preset.base`.
    It names the first such study only.

    Args:
        config: Run of the recipe, whose preset has the base of the recipe.
    """
    recipe_base = preset_of(config).base
    for study in studies:
        preset = preset_of(study.configs[0])
        if preset.constants and preset.base != recipe_base:
            base = config.preset.base
            terminal.note(
                f"the constants of {study.label} are factors at the study's smallest size, and the "
                f"recipe's base is {base}; if they were tuned at {base}, add --preset.base {base}"
            )
            return


def _dry_run(studies: Sequence[Study], args: Transfer) -> None:
    """Print the sizes, number of learning rates and seeds, steps and time limit of every study."""
    points = f"5 rates or more a size, {args.seeds} to {args.max_seeds} seeds"
    if args.search == "frugal":
        points = f"{args.seeds} seeds at the smallest size, else 3 rates and 1 seed or more"

    for study in studies:
        sizes = []
        for size, config in zip(study.sizes, study.configs, strict=True):
            sizes.append(f"{size} (width {config.model.sizes()['embed']})")
        config = study.configs[0]
        terminal.say(f"{study.label}, {study.axis} {', '.join(sizes)}, base {config.preset.base}")
        time_limit = f"at most {args.minutes:g} minutes of training"
        terminal.say(f"  {points}, {counted(config.steps, 'step')}, {time_limit}")


def _watched(engine: Sweep, console: Console) -> Runner:
    """Return a function that trains configs with the sweep engine under a live table of losses."""
    from mupax.train.studies.sweep.table import LiveTable

    def run(configs: Sequence[Config]) -> list[Row]:
        labels = []
        for config in configs:
            size = config.model.sizes()
            labels.append(f"{config.preset.name} width {size['embed']} depth {size['layers']}")
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
    """Judge the studies, print and write the report, and do what --save-tuned and --predict ask.

    Args:
        measured: Finished studies, one for each preset and growing axis.
        control: Label of the preset whose best learning rate should drift, for comparison. `None`
            without one.
        command: Command as it was typed, for the record.
        label: Label of the recipe's preset, whose learning rate `--save-tuned` saves.

    Returns:
        Exit code: 0, or 1 if no study could be judged, a size has no best learning rate under
        `--search frugal`, or a forecast of `--predict` cannot be made.

    Raises:
        NoMinimum: The report is written, but `--save-tuned` has no best learning rate to save.
    """
    from mupax.train.studies.transfer import report, tuned

    about = _about(args, measured[0].study.configs[0], command)
    if args.search == "frugal":
        from mupax.train.studies.transfer import frugal

        about["title"] = f"The best learning rate of {args.recipe} as it grows"
        return frugal.report(folder, measured, about, args.save_tuned, label, command)

    judged = []
    for study in measured:
        analysis = study.analysis()
        if analysis is None:
            name = f"{study.study.label} in {study.study.axis}"
            advice = "the same command with more --minutes goes on"
            terminal.say(f"{name}: {study.stopped}; {advice}")
        else:
            judged.append((study, analysis))
    if not judged:
        return 1

    page = report.write(folder, judged, control, about)
    report.report_of(judged, control, command).show()
    terminal.say(f"report in {page}")
    if args.save_tuned:
        path, use = tuned.save(args.save_tuned, label, judged, command, takes_rates=False)
        terminal.say(tuned.saved_message(path, use))
    if args.predict:
        from mupax.train.studies.forecast import of_study

        is_written = of_study.write(folder, of_study.points(measured), args.predict)
        return 0 if is_written else 1
    return 0


def _about(args: Transfer, config: Config, command: str) -> dict[str, Any]:
    """Return title, command, recipe, data, steps and other facts of a study, by name.

    They go into the study's JSON record and into the table at the end of its HTML page.

    Args:
        config: Run of the smallest size of the first study.
    """
    from mupax.train.config.record import to_json

    examples = config.steps * config.data.batch_size
    return {
        "title": f"Does the learning rate of {args.recipe} transfer?",
        "command": command,
        "recipe": args.recipe,
        "data": config.data.name,
        "steps": config.steps,
        "batch": config.data.batch_size,
        f"{config.model.unit}s seen by a point": f"{examples * config.model.units:,}",
        "optimizer": config.optimizer.name,
        "config": to_json(config),
    }
