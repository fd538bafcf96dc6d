"""`mupax eval WORKDIR`: loss and accuracy of any checkpoint of a run on its evaluation data, or on other data."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.train.checkpoints.command import ModelFlags
from mupax.train.config import cli
from mupax.train.config.metrics import METRICS, shown_everywhere
from mupax.train.config.run import Config

if TYPE_CHECKING:
    from mupax.train.reuse.trained import TrainedModel

READ = ("--data.", "--mesh.", "--model.compute.")
"""Flags of a run that an evaluation reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(ModelFlags):
    """Loss and accuracy of any checkpoint of a run on its evaluation data, or on other data; or of weights on data.

    The numbers are those that the run itself wrote at that step. Without --step the newest checkpoint is meant; where the run
    keeps a moving average of its parameters, that is evaluated, as in the run. The run's flags --data.*, --mesh.* and
    --model.compute.* work here too: --data.name text:PATH evaluates on another text, --mesh.data 1 on a single device. The sets that the
    run evaluates on beside its own, or those of --data.evaluate, have a line each. --step best is the best checkpoint that was kept.
    WORKDIR may be a folder that `mupax import` wrote, one of Hugging Face, or ORG/NAME of its hub, where --data.name says what to read.
    Of images there are also the top-5 accuracy, the expected calibration error (15 bins) and every class by itself.
    --tasks runs tasks of the lm-eval harness in place of all that.
    """

    json: Path | None = None
    """Also write the numbers to a file."""
    tasks: Annotated[tuple[str, ...], conf.arg(metavar="TASK ...")] = ()
    """Tasks of the lm-eval harness (extra `eval`), such as lambada_openai."""
    tasks_from: Annotated[Path | None, conf.arg(metavar="FOLDER")] = None
    """YAML files with tasks of your own, in place of the harness'."""
    limit: Annotated[int | None, conf.arg(metavar="N")] = None
    """Examples of a task, at most."""
    shots: Annotated[int | None, conf.arg(metavar="N")] = None
    """Examples of a task that are shown before each; what the task says unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tasks_from", "limit", "shots"):
            if getattr(self, name) is not None and not self.tasks:
                raise command_line.UsageError(
                    f"--{name.replace('_', '-')} is of tasks; add --tasks TASK"
                )
        if self.limit is not None and self.limit < 1:
            raise command_line.UsageError(
                f"--limit is {self.limit}; write a whole number of at least 1"
            )
        if self.shots is not None and self.shots < 0:
            raise command_line.UsageError(
                f"--shots is {self.shots}; write a whole number of at least 0"
            )


def main(argv: Sequence[str]) -> int:
    """Evaluates and shows; 0 when done.

    Raises:
        UsageError: a flag that an evaluation does not read.
        WorkdirError: no such run, step or average, or a damaged checkpoint.
        ConfigError, DataError, MeshError: settings or data that do not fit the model.
    """
    args, rest = command_line.parse_known(Evaluate, "mupax eval", argv)
    if args.tasks:
        return _on_tasks(args, rest)
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import hub
    from mupax.train.reuse.source import WeightsError
    from mupax.train.run.report import metrics

    check_read("eval", "--step, --ema, --json", rest)
    saved = trained.open_model(hub.local(args.workdir, args.revision), args.step, args.average)
    if saved.run is None and saved.model.denoises:
        raise WeightsError(
            f"{saved.path} holds an {saved.model.family}, and not what noise it was trained on; start `mupax train ed-tiny` with "
            "--init-from and --data.noise, and use that run"
        )
    saved = with_flags("eval", saved, rest)
    if not any(
        word.partition("=")[0] in ("--data.eval-examples", "--data.eval_examples") for word in rest
    ):
        saved = _on_all_images(saved)
    if saved.config.data.name in trained.NO_DATA.values():
        raise command_line.UsageError(
            f"{saved.path} holds weights, which have no data of their own; add --data.name {saved.config.data.name}PATH"
        )
    console = terminal.console()
    # A copy of the workdir may lie where the run's own sets are not.
    only_run_sets = (
        bool(cli.value_of("--data.name", rest)) and cli.value_of("--data.evaluate", rest) is None
    )
    numbers = measured(saved, console, skip_sets=only_run_sets)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(metrics.to_json(numbers) + "\n")
    show(console, numbers)
    return 0


def _on_tasks(args: Evaluate, rest: Sequence[str]) -> int:
    """Runs the tasks and shows their numbers; 0 when done."""
    from mupax.train.reuse.harness import tasks
    from mupax.train.reuse.huggingface import hub

    tasks.check()
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] != "--data.tokenizer":
            raise command_line.UsageError(
                f"eval --tasks does not read {word.partition('=')[0]}; leave it out"
            )
    words = " ".join(rest).replace("=", " ").split()
    numbers = tasks.measured(
        hub.local(args.workdir, args.revision),
        args.tasks,
        folder=args.tasks_from,
        limit=args.limit,
        shots=args.shots,
        step=args.step,
        average=args.average,
        tokenizer=words[1] if words else None,
    )
    if args.json is not None:
        from mupax.train.run.report import metrics

        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(metrics.to_json(numbers) + "\n")
    print(terminal.table(tasks.rows(numbers), left=("task", "metric")))
    return 0


def check_read(command: str, takes: str, rest: Sequence[str]) -> None:
    """Raise UsageError for a flag that a measurement does not read.

    Args:
        command: its name, for messages.
        takes: flags of its own, for messages.
        rest: words that are none of these.
    """
    for word in rest:
        if word.startswith("--") and not word.startswith(READ):
            flag = word.partition("=")[0]
            raise command_line.UsageError(
                f"{command} does not read {flag}; it takes {takes}, and a run's {', '.join(READ)}*"
            )


def with_flags(command: str, saved: TrainedModel, rest: Sequence[str]) -> TrainedModel:
    """Return the model to measure with the flags of a run that a measurement reads (`READ`) in its config.

    Args:
        command: its name, for messages.
        saved: the model as it was recorded.
        rest: words that are none of the command's own flags.
    """
    start = with_other_data(saved.config, rest)
    tokenizer = cli.value_of("--data.tokenizer", rest)
    if (
        tokenizer is not None and saved.step is None
    ):  # the separator beside weights is a token of their own tokenizer
        start = dataclasses.replace(start, data=dataclasses.replace(start.data, separator=None))
    config = cli.parse(command, lambda: start, rest, infers_sizes=False).config
    if (
        tokenizer is not None
        and saved.step is not None
        and tokenizer == recorded_tokenizer(saved.workdir)
    ):
        # Named as when the run began; bpe:SIZE would make another one of other text.
        own = dataclasses.replace(config.data, tokenizer=saved.config.data.tokenizer)
        config = dataclasses.replace(config, data=own)
    return dataclasses.replace(saved, config=config)


def _on_all_images(saved: TrainedModel) -> TrainedModel:
    """The checkpoint without the run's own limit of evaluation examples, if another folder of images is meant."""
    data = saved.config.data
    if not data.name.startswith("images:") or data.name == saved.facts.get("name"):
        return saved
    config = dataclasses.replace(saved.config, data=dataclasses.replace(data, eval_examples=None))
    return dataclasses.replace(saved, config=config)


def recorded_tokenizer(workdir: Path) -> str | None:
    """Return data.tokenizer as a run was given it."""
    from mupax.train.checkpoints.workdir import read_record

    return read_record(workdir)["config"].get("data", {}).get("tokenizer")


def with_other_data(config: Config, words: Sequence[str]) -> Config:
    """Return the config without settings that only the run's data has, where flags name other data.

    Args:
        config: of the run.
        words: flags of the command.
    """
    data = config.data
    name = cli.value_of("--data.name", words)
    if name is None or name == data.name:
        return config
    kind = name.partition(":")[0]
    before = data.name.partition(":")[0]
    field = data.field
    if kind != before and (
        kind == "text" or before == "chat"
    ):  # plain text has none, messages have another
        field = type(data).field
    return dataclasses.replace(config, data=dataclasses.replace(data, mix=(), field=field))


def measured(saved: Any, console: Any, *, skip_sets: bool = False) -> dict[str, Any]:
    """The scores of a checkpoint, and on what they were measured.

    Args:
        saved: the model, whose config names the data.
        console: told what takes time.
        skip_sets: leave out the further evaluation sets that cannot be opened, instead of an error.

    Raises:
        DataError: the data is cut into other tokens than those the model knows.
        MemoryLimitError: an evaluation batch needs more memory than there is.
    """
    from mupax.train import data as data_sources
    from mupax.train.core.costs import fit
    from mupax.train.core.program import assemble
    from mupax.train.data import DataError, named_sets
    from mupax.train.data.text.batches import TextWindows
    from mupax.train.run.loop import evaluate

    config = saved.config
    program = assemble(config)
    named = saved.facts.get("class_names")
    if config.data.name.startswith("images:"):
        data = _images(saved, console)
    else:
        data = data_sources.load(
            config.data, config.model, seed=config.data_seed, note=console.print
        )
    tokenizer, here = saved.facts.get("tokenizer"), data.facts.get("tokenizer")
    if tokenizer is not None and tokenizer != here:
        raise DataError(
            f"the model was trained on tokens of {tokenizer}, and {config.data.name} is cut into those of {here}; "
            "give --data.tokenizer the run's own, as bytes or the path of its tokenizer.json"
        )
    if named:
        check_classes(named, data.class_names, saved, config.data.name)
    sets: dict[str, Any] = {}
    for name in config.data.evaluation_sets:
        try:
            sets[name] = named_sets.load(name, config, data, note=console.print)
        except DataError as error:
            if not skip_sets:
                raise
            terminal.note(f"note: {error}; left out")
    if saved.step is None:  # a run's documents begin as in its training
        for texts in (data, *sets.values()):
            if isinstance(texts, TextWindows):
                texts.begin_documents()
    limit = fit.limit_of(program)
    params = saved.params(program.abstract)  # damage is seen before time goes into compiling
    eval_fn = program.compile_eval()
    fit.check_evaluation(program, eval_fn, limit)
    inputs = program.step_inputs()
    outcomes, began = None, time.monotonic()
    if data.kind == "images":
        from mupax.train.reuse.predict.scores import Outcomes

        outcomes = Outcomes(functools.partial(program.compile_logits(), params, inputs))
    measure = functools.partial(evaluate, eval_fn, params, inputs, feed=program.eval_feed())
    numbers = _numbers(data, measure(data, observer=outcomes))
    further = {
        name: {
            "data": each.facts["name"],
            "digest": each.facts.get("digest"),
            **_numbers(each, measure(each)),
        }
        for name, each in sets.items()
    }
    return {
        "workdir": str(saved.workdir),
        "step": saved.step,
        "weights": saved.weights,
        "data": data.facts["name"],
        "digest": data.facts.get("digest"),
        "data_of_the_run": data.facts.get("digest") == saved.facts.get("digest"),
        **numbers,
        **(outcomes.scores(data.class_names) if outcomes else {}),
        **({"sets": further} if further else {}),
        "seconds": time.monotonic() - began,
    }


def _images(saved: Any, console: Any) -> Any:
    """The images of a folder to evaluate a checkpoint on, with the labels of its classes.

    Raises:
        DataError: the folder has classes that are not the checkpoint's, or images that cannot be read.
    """
    from mupax.train.data.sources import folders

    config = saved.config
    named = saved.facts.get("class_names")
    folder = folders.to_evaluate(config.data.name, saved.facts)
    lines = []
    if named:
        ours = set(map(folders.nfc, named))
        if not ours.issuperset(folder.classes):
            check_classes(named, folder.classes, saved, config.data.name)
        lines = folders.without_images(folder, named)
        folder = folder.labelled_as(named)
    folder = folder._replace(notes=[*folder.notes, *lines])

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return folders.opened(folder, config.data, config.model, config.data_seed, say)


def _numbers(data: Any, scores: Any) -> dict[str, Any]:
    """Return the `Scores` of one data set, with its size."""
    return {**scores, "examples": data.eval_size, "targets": scores.targets}


def _metric_lines(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the text of every metric by its label: the loss, what follows from it, and the others."""
    lines = {}
    for name in sorted(METRICS, key=lambda name: METRICS[name].from_loss is None):
        if name not in numbers or name == "loss_per_byte":
            continue
        text = METRICS[name].text_with_unit(numbers[name])
        if name == "loss" and "loss_per_byte" in numbers:
            text += f" per token, {METRICS['loss_per_byte'].text(numbers['loss_per_byte'])} nats per byte"
        lines[METRICS[name].label] = text
    return lines


def check_classes(
    classes: Sequence[str], here: Sequence[str] | None, saved: Any, name: str
) -> None:
    """Refuse data whose classes are not those of the run: label 3 would mean something else.

    Args:
        classes: the run's, in order.
        here: the data's.
        saved: the run.
        name: of the data.

    Raises:
        DataError: they differ.
    """
    from mupax.train.data import DataError
    from mupax.train.reuse.image_input import printable

    if list(classes) == list(here or ()):
        return
    there, other = (
        printable(", ".join(each[:8]) + (" …" if len(each) > 8 else ""))
        for each in (classes, here or ())
    )
    command = shlex.join(
        ["mupax", "finetune", name.removeprefix("images:"), "--from", str(saved.workdir)]
    )
    raise DataError(
        f"the classes of the run in {saved.workdir} are {there}, and those of {name} {other}; give it folders of the same names, or "
        f"fine-tune on them: `{command}`"
    )


def show(console: Any, numbers: dict[str, Any]) -> None:
    """Print the numbers as a table.

    Args:
        console: for the title; the table goes to stdout.
        numbers: of `measured`.
    """
    name, step = Path(numbers["workdir"]).name, numbers["step"]
    other = "" if numbers["data_of_the_run"] or step is None else ", other data than the run's"
    rows = {
        "weights": "moving average" if numbers["weights"] == "ema" else "parameters",
        **_metric_lines(numbers),
        **(
            {"top-5 accuracy": f"{100 * numbers['top5_accuracy']:.2f} %"}
            if "top5_accuracy" in numbers
            else {}
        ),
        **(
            {"calibration": f"{100 * numbers['ece']:.2f} % expected error of the confidence"}
            if numbers.get("ece") is not None
            else {}
        ),
        **(
            {"not finite": f"{numbers['not_finite']:,} images whose logits are NaN or infinite"}
            if "not_finite" in numbers
            else {}
        ),
        "examples": f"{numbers['examples']:,}, {numbers['targets']:,} targets",
        "time": f"{numbers['seconds']:.1f} s",
    }
    title = f"{name if step is None else f'step {step} of {name}'} on {numbers['data']}{other}"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    print(terminal.table([*rows.items()]))
    if "sets" in numbers:
        columns = [*shown_everywhere(), "bits_per_byte"]
        head = ["set", *(METRICS[column].label for column in columns), "examples", "data"]
        lines = []
        for name, values in numbers["sets"].items():
            texts = [
                METRICS[column].text(values[column]) if column in values else ""
                for column in columns
            ]
            lines.append([name, *texts, f"{values['examples']:,}", values["data"]])
        terminal.say(f"\n{terminal.table([head, *lines], left=('set', 'data'))}")
    if "classes" in numbers:
        from mupax.train.reuse.predict import scores

        terminal.say(
            f"\n{terminal.table(scores.table(numbers['classes']), left=('class', 'taken for'))}"
        )
        terminal.say(scores.listed(numbers["classes"]))
