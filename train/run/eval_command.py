"""`mupax eval WORKDIR`: loss and accuracy of a checkpoint on the run's data, or on other data."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.terminal import counted
from mupax.train.checkpoints.command import ModelFlags
from mupax.train.config import cli
from mupax.train.config.checks import check_outputs
from mupax.train.config.metrics import METRICS, shown_everywhere
from mupax.train.config.run import Config

if TYPE_CHECKING:
    from mupax.train.reuse.trained import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(ModelFlags):
    """Loss and accuracy of a checkpoint on the evaluation data of its run, or on other data.

    The numbers are those that the run itself wrote at that step. By default the newest checkpoint
    is evaluated, with its moving average of the parameters if the run keeps one. --step best is the
    best checkpoint that was kept. The run's flags --data.*, --mesh.* and --model.compute.* work
    here too: --data.name text:PATH evaluates on another text, --mesh.data 1 on a single device.
    Each further set of the run, or of --data.evaluate, has a line. WORKDIR may also be a folder
    that `mupax import` wrote, one of Hugging Face, or ORG/NAME of its hub, with --data.name for the
    data. Image models also get the top-5 accuracy, the expected calibration error (15 bins) and
    numbers for every class. --tasks runs tasks of the lm-eval harness in place of all that.
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
                    f"only --tasks reads --{name.replace('_', '-')}; add --tasks TASK"
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
    """Evaluate a checkpoint and print its metrics. Return the exit code 0.

    Raises:
        UsageError: A flag is not one that an evaluation reads, or weights have no --data.name.
        WorkdirError: There is no such run, step or average, or the checkpoint is damaged.
        WeightsError: Weights do not say on what noise they were trained.
        ConfigError, DataError, MeshError: Settings or data do not fit the model, or the file of
            `--json` cannot be written.
        MemoryLimitError: An evaluation batch needs more memory than there is.
    """
    args, run_flags = command_line.parse_known(Evaluate, "mupax eval", argv)
    check_outputs(args, "json")
    if args.tasks:
        return _run_tasks(args, run_flags)
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import hub
    from mupax.train.reuse.source import WeightsError

    trained.check_read("eval", "--step, --ema, --json", run_flags)
    saved = trained.open_model(hub.local(args.workdir, args.revision), args.step, args.average)
    if saved.run is None and saved.model.denoises:
        raise WeightsError(
            f"{saved.path} holds an {saved.model.family}, and not what noise it was trained on; "
            "start `mupax train ed-tiny` with --init-from and --data.noise, and use that run"
        )
    saved = trained.with_flags("eval", saved, run_flags)
    flags = [word.partition("=")[0] for word in run_flags]
    if "--data.eval-examples" not in flags and "--data.eval_examples" not in flags:
        saved = _on_all_images(saved)
    if saved.config.data.name in trained.NO_DATA.values():
        raise command_line.UsageError(
            f"{saved.path} holds weights, which have no data of their own; "
            f"add --data.name {saved.config.data.name}PATH"
        )
    console = terminal.console()
    # A copy of the workdir may lie on a machine that lacks the run's own sets.
    names_data = bool(cli.value_of("--data.name", run_flags))
    only_run_sets = names_data and cli.value_of("--data.evaluate", run_flags) is None
    numbers = measured(saved, console, skip_sets=only_run_sets)
    # Shown first, so that a disk that became full does not lose the numbers.
    show(console, numbers)
    _write_json(args, numbers)
    return 0


def _write_json(args: Evaluate, numbers: dict[str, Any]) -> None:
    """Write the numbers of an evaluation to the file of `--json`, if the flag is given.

    An existing file is replaced.
    """
    if args.json is None:
        return
    from mupax.train.run.report import metrics

    args.json.write_text(metrics.to_json(numbers) + "\n")


def _run_tasks(args: Evaluate, run_flags: Sequence[str]) -> int:
    """Run tasks of the lm-eval harness and print their scores. Return the exit code 0.

    With `--json` the scores are also written to a file.

    Raises:
        UsageError: A flag is not one that tasks read.
    """
    from mupax.train.reuse.harness import tasks
    from mupax.train.reuse.huggingface import hub

    tasks.check()
    for word in run_flags:
        flag = word.partition("=")[0]
        if word.startswith("--") and flag != "--data.tokenizer":
            raise command_line.UsageError(f"eval --tasks does not read {flag}; leave it out")
    numbers = tasks.measured(
        hub.local(args.workdir, args.revision),
        args.tasks,
        folder=args.tasks_from,
        limit=args.limit,
        shots=args.shots,
        step=args.step,
        average=args.average,
        tokenizer=cli.value_of("--data.tokenizer", run_flags),
    )
    print(terminal.table(tasks.rows(numbers), left=("task", "metric")))
    _write_json(args, numbers)
    return 0


def _on_all_images(saved: TrainedModel) -> TrainedModel:
    """Return the model with `data.eval_examples` set to `None` if its data is another image folder.

    If the data is not an image folder, or the folder of the run, return the model unchanged.
    """
    data = saved.config.data
    if not data.name.startswith("images:") or data.name == saved.facts.get("name"):
        return saved
    config = dataclasses.replace(saved.config, data=dataclasses.replace(data, eval_examples=None))
    return dataclasses.replace(saved, config=config)


def measured(saved: Any, console: Any, *, skip_sets: bool = False) -> dict[str, Any]:
    """Evaluate a checkpoint, and return its scores and the names of model and data.

    For weights without a run, the tokens that their tokenizer puts before a text are inserted
    before every evaluation document.

    Args:
        saved: `TrainedModel` whose config names the data.
        console: Console for lines about work that takes time.
        skip_sets: Whether to leave out further evaluation sets that cannot be opened, with a note.
            By default they are an error.

    Returns:
        Scores by metric, together with `workdir`, `step` (`None` for weights alone), `data` and
        other facts of the evaluation. `sets` has the scores of the further sets by their names. It
        is missing if there are none.

    Raises:
        DataError: The data has other tokens or classes than the model.
        MemoryLimitError: An evaluation batch needs more memory than there is.
    """
    from mupax.train.core.costs import fit
    from mupax.train.core.program import assemble
    from mupax.train.data.text.batches import TextWindows
    from mupax.train.run.loop import evaluate

    config = saved.config
    program = assemble(config)
    data = _load_data(saved, console)
    sets = _load_sets(config, data, console, skip_sets)
    if saved.step is None:
        # The tokenizer of weights without a run may put tokens before every text. The data of a run
        # already begins documents as in training.
        for loaded in (data, *sets.values()):
            if isinstance(loaded, TextWindows):
                loaded.begin_documents()

    limit = fit.limit_of(program)
    # Read first, so that damage is found before time goes into compiling.
    params = saved.params(program.abstract)
    eval_fn = program.compile_eval()
    fit.check_evaluation(program, eval_fn, limit)
    inputs = program.step_inputs()
    outcomes = None
    began = time.monotonic()
    if data.kind == "images":
        from mupax.train.reuse.predict.scores import Outcomes

        outcomes = Outcomes(functools.partial(program.compile_logits(), params, inputs))
    batch_sharding = program.eval_feed()
    scores = evaluate(eval_fn, params, inputs, data, batch_sharding, observer=outcomes)
    numbers = {
        "workdir": str(saved.workdir),
        "step": saved.step,
        "weights": saved.weights,
        "data": data.facts["name"],
        "digest": data.facts.get("digest"),
        "data_of_the_run": data.facts.get("digest") == saved.facts.get("digest"),
        **_numbers(data, scores),
    }
    set_numbers: dict[str, Any] = {}
    for name, loaded in sets.items():
        set_numbers[name] = {
            "data": loaded.facts["name"],
            "digest": loaded.facts.get("digest"),
            **_numbers(loaded, evaluate(eval_fn, params, inputs, loaded, batch_sharding)),
        }
    if outcomes:
        numbers |= outcomes.scores(data.class_names)
    if set_numbers:
        numbers["sets"] = set_numbers
    numbers["seconds"] = time.monotonic() - began
    return numbers


def _load_data(saved: Any, console: Any) -> Any:
    """Load the data that a checkpoint's config names, and check that it fits the model.

    Args:
        saved: `TrainedModel` whose config names the data.
        console: Console for lines about work that takes time.

    Raises:
        DataError: The data has other tokens or classes than the model.
    """
    from mupax.train import data as data_sources
    from mupax.train.reuse import trained

    config = saved.config
    if config.data.name.startswith("images:"):
        data = _images(saved, console)
    else:
        data = data_sources.load(
            config.data, config.model, seed=config.data_seed, note=console.print
        )
    trained.check_fits(saved, data)
    return data


def _load_sets(config: Config, data: Any, console: Any, skip: bool) -> dict[str, Any]:
    """Load the further evaluation sets of a config, by name.

    With `skip`, a set that cannot be opened is left out and a note is printed.

    Raises:
        DataError: A set cannot be opened, and `skip` is off.
    """
    from mupax.train.data import DataError, named_sets

    sets: dict[str, Any] = {}
    for name in config.data.evaluation_sets:
        try:
            sets[name] = named_sets.load(name, config, data, note=console.print)
        except DataError as error:
            if not skip:
                raise
            terminal.note(f"note: {error}; left out")
    return sets


def _images(saved: Any, console: Any) -> Any:
    """Load the images of a folder, labelled with the classes of the checkpoint.

    If the checkpoint records no class names, the folder's own classes are used.

    Args:
        saved: `TrainedModel` whose config names the folder.

    Raises:
        DataError: The folder has classes that the checkpoint lacks, or images that cannot be read.
    """
    from mupax.train.data.sources import folders
    from mupax.train.reuse import trained

    config = saved.config
    model_classes = saved.facts.get("class_names")
    folder = folders.to_evaluate(config.data.name, saved.facts)
    missing_notes: list[str] = []
    if model_classes:
        # macOS may store an accent as a separate character, so equal names can differ in bytes.
        known_classes = set(map(folders.nfc, model_classes))
        if not known_classes.issuperset(folder.classes):
            trained.check_classes(model_classes, folder.classes, saved, config.data.name)
        missing_notes = folders.without_images(folder, model_classes)
        folder = folder.labelled_as(model_classes)
    folder = folder._replace(notes=[*folder.notes, *missing_notes])

    def log(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return folders.opened(folder, config.data, config.model, config.data_seed, log)


def _numbers(data: Any, scores: Any) -> dict[str, Any]:
    """Return the `Scores` of one data set, with its numbers of examples and targets."""
    return {**scores, "examples": data.eval_size, "targets": scores.targets}


def _metric_lines(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the text of every metric by its label, in the order in which they are printed.

    The loss comes first, then metrics that follow from the loss, then the others. The loss per byte
    is part of the text of the loss.

    Args:
        numbers: Result of `measured`. Keys that are no metrics are passed over.
    """
    lines = {}
    for name in sorted(METRICS, key=lambda name: METRICS[name].from_loss is None):
        if name not in numbers or name == "loss_per_byte":
            continue
        text = METRICS[name].text_with_unit(numbers[name])
        if name == "loss" and "loss_per_byte" in numbers:
            per_byte = METRICS["loss_per_byte"].text(numbers["loss_per_byte"])
            text += f" per token, {per_byte} nats per byte"
        lines[METRICS[name].label] = text
    return lines


def show(console: Any, numbers: dict[str, Any]) -> None:
    """Print the numbers of an evaluation as tables.

    Args:
        console: Console for the title. The tables go to standard output.
        numbers: Result of `measured`.
    """
    step = numbers["step"]
    title = Path(numbers["workdir"]).name
    if step is not None:
        title = f"step {step} of {title}"
    title += f" on {numbers['data']}"
    if step is not None and not numbers["data_of_the_run"]:
        title += ", other data than the run's"
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)

    rows = {"weights": "moving average" if numbers["weights"] == "ema" else "parameters"}
    rows |= _metric_lines(numbers)
    if "top5_accuracy" in numbers:
        rows["top-5 accuracy"] = f"{100 * numbers['top5_accuracy']:.2f} %"
    if numbers.get("ece") is not None:
        rows["calibration"] = f"{100 * numbers['ece']:.2f} % expected error of the confidence"
    if "not_finite" in numbers:
        rows["not finite"] = (
            f"{counted(numbers['not_finite'], 'image', ',')} whose logits are NaN or infinite"
        )
    rows["examples"] = f"{numbers['examples']:,}, {counted(numbers['targets'], 'target', ',')}"
    rows["time"] = f"{numbers['seconds']:.1f} s"
    print(terminal.table([*rows.items()]))
    if "sets" in numbers:
        _show_sets(numbers["sets"])
    if "classes" in numbers:
        from mupax.train.reuse.predict import scores

        table = terminal.table(scores.table(numbers["classes"]), left=("class", "taken for"))
        terminal.say(f"\n{table}")
        terminal.say(scores.listed(numbers["classes"]))


def _show_sets(sets: dict[str, dict[str, Any]]) -> None:
    """Print a table of the further evaluation sets, with a row for each."""
    metric_names = [*shown_everywhere(), "bits_per_byte"]
    rows = [["set", *(METRICS[name].label for name in metric_names), "examples", "data"]]
    for set_name, values in sets.items():
        row = [set_name]
        for name in metric_names:
            # Images have no bits per byte, for instance.
            row.append(METRICS[name].text(values[name]) if name in values else "")
        rows.append([*row, f"{values['examples']:,}", values["data"]])
    terminal.say(f"\n{terminal.table(rows, left=('set', 'data'))}")
