"""Check right presets, and wrong rules, at the vocabularies and contexts of real models.

    python -m scripts.check.campaign [--tasks N] [--only structures mutants own]

Writes docs/evidence/check-campaign.json.gz after each series of models; `python -m
scripts.check.structures` then writes the page. Repeat the command to continue: a series that the
record holds is not run again. The order of the series is shuffled by a fixed seed, so that one
command that is stopped has measured a random sample.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mupax import presets
from mupax.presets import Preset
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.rule import ONE
from mupax.train.config.run import OptimizerConfig
from mupax.train.studies.check import check, theory
from mupax.train.studies.check.judge import Finding
from mupax.zoo.definition import Definition, definition
from mupax.zoo.transformer import TransformerConfig
from scripts import ROOT, harness
from scripts.check import own_models
from scripts.check.mutants import COLUMNS, Mutant
from scripts.check.mutation_suite import MORE_SEEDS, STUDIES, Suite
from scripts.check.wrong_tables import LM, MENDING, MODELS
from scripts.pages.markdown import table

RECORD = ROOT / "docs" / "evidence" / "check-campaign.json.gz"
COMMAND = "python -m scripts.check.campaign"
SIZES = 3
SEEDS = 3
"""Sizes and seeds of `mupax check --sizes 3 --seeds 3`, of which all ten steps are taken."""
INPUTS = ((2048, 64), (256, 512), (32000, 16))
"""Vocabularies and contexts at which every language model is checked."""
LARGEST = (32000, 512)
"""Vocabulary and context of one series per language model: growing heads under mup."""
RIGHT = {
    "head_dim": ("mup", "mup-half", "depth-mup", "completep", "spectral", "u-mup"),
    "heads": (
        "mup",
        "mup-half",
        "depth-mup",
        "completep",
        "spectral",
        "u-mup",
        "ntk",
        "hybrid",
        "maximal-update",
    ),
    "depth": ("depth-mup", "completep", "u-mup"),
}
"""Presets that must pass, by the size that grows."""
MORE_MODELS: dict[str, TransformerConfig] = {
    **MENDING,
    "lm, experts": replace(LM, experts=4),
    "lm, experts, shared": replace(LM, experts=4, shared_experts=1),
}
"""Encoder-decoders and models with experts, for which fewer presets have rules."""
MORE_RIGHT = {"head_dim": ("mup",), "heads": ("mup",), "depth": ("depth-mup",), "experts": ("mup",)}
"""Presets that must pass on `MORE_MODELS`, by the size that grows."""
GOAL = {"block.query": 0.5, "block.key": 0.5}
"""Power of the width by which a rule is made wrong, by parameter group; 1/4 for all others."""


@dataclass(frozen=True)
class Task:
    """Series of models that share their compiled programs, with the rules to try on them.

    Attributes:
        kind: "structures" or "own" for right presets, "mutants" for wrong rules.
        model: Key of `MODELS`, `MORE_MODELS` or `own_models.OWN_MODELS`.
        grow: Size that grows, such as "head_dim".
        inputs: Vocabulary and context; `None` for images and for a user's models.
        rules: Names of presets, or the wrong columns of a "mutants" task.
    """

    kind: str
    model: str
    grow: str
    inputs: tuple[int, int] | None
    rules: tuple[str, ...]

    @property
    def key(self) -> str:
        """Key of the task in the record."""
        inputs = "" if self.inputs is None else f" {self.inputs[0]}x{self.inputs[1]}"
        return f"{self.kind}: {self.model}{inputs} growing {self.grow}"


def tasks() -> list[Task]:
    """Return all series in the order in which they are run, which is shuffled by a fixed seed."""
    listed: list[Task] = []
    for grow, names in RIGHT.items():
        for model in MODELS:
            # u-mup has no rule for a tied table.
            rules = names
            if "tied" in model:
                rules = tuple(name for name in names if name != "u-mup")
            if MODELS[model].task == "images":
                listed.append(Task("structures", model, grow, None, rules))
            else:
                listed += [Task("structures", model, grow, inputs, rules) for inputs in INPUTS]

    language = [model for model in MODELS if MODELS[model].task == "tokens"]
    listed += [Task("structures", model, "heads", LARGEST, ("mup",)) for model in language]
    for grow, names in MORE_RIGHT.items():
        for model, config in MORE_MODELS.items():
            if grow != "experts" or config.experts is not None:
                listed.append(Task("structures", model, grow, INPUTS[0], names))

    listed += [Task("own", model, "width", None, ("mup",)) for model in own_models.OWN_MODELS]
    listed += [Task("mutants", "decoder", "head_dim", inputs, COLUMNS) for inputs in INPUTS]
    listed += [Task("mutants", "tied decoder", "head_dim", inputs, COLUMNS) for inputs in INPUTS]

    # A fixed order: what one stopped command has measured is a random sample of all series.
    random.Random(37).shuffle(listed)
    return listed


def run(task: Task) -> list[dict[str, Any]]:
    """Run one task and return one row of the record per rule."""
    if task.kind == "mutants":
        return _mutants(task)
    if task.kind == "own":
        return _own(task)
    return _structures(task)


def _structures(task: Task) -> list[dict[str, Any]]:
    """Train right presets on a model of the zoo and return one row per preset."""
    model = MODELS.get(task.model) or MORE_MODELS[task.model]
    keeps: set[str] = set()
    if task.inputs is not None:
        vocabulary, context = task.inputs
        keeps = {"vocab_size", "seq_len", "target_len"}
        changes: dict[str, Any] = {"vocab_size": vocabulary, "seq_len": context}
        model = replace(model, **changes)
    grown = check.grow(model, task.grow, SIZES, keeps)
    definitions = [definition(config) for config in grown]
    series = check.Series(definitions, _adam())
    batch = check.batch(grown[0])
    sizes = [2.0**count for count in range(SIZES)]

    rows = []
    for name in task.rules:
        base = None if presets.get(name).baseless else grown[0].base_sizes()
        preset = presets.get(name, base=base)
        accept = accepted(preset, (definitions[0], definitions[-1]))
        expected = theory.of(preset, definitions[0], definitions[-1], "adam", accept=accept)
        rate = check.peak_lr("adam", expected)
        findings = check.measure_and_judge(
            series, preset, batch, SEEDS, sizes, expected, peak_lr=rate
        )
        rows.append({"rule": name, **_judged(findings)})
    return rows


def accepted(preset: Preset, ends: tuple[Definition, Definition]) -> tuple[str, ...]:
    """Return the verdicts that count as right: lazy, if the preset means its features to vanish.

    Lazy means that features move less as the model grows.

    Args:
        ends: Smallest and largest model of the series. The preset's features must vanish from the
            first to the second.
    """
    first, last = ends
    features = preset.vanishing.get("features", ONE)
    growth, _ = theory.growth(first.sizes, last.sizes)
    return (theory.LAZY,) if features.growth(growth) < 0 else ()


def _own(task: Task) -> list[dict[str, Any]]:
    """Train mup on one of `own_models`, written as a user would, and return its row."""
    model = own_models.OWN_MODELS[task.model]
    definitions = model.definitions()
    findings = check.study(
        definitions, own_models.right(definitions), _adam(), model.batch(), SEEDS
    )
    return [{"rule": "mup", **_judged(findings)}]


def _mutants(task: Task) -> list[dict[str, Any]]:
    """Return the row of the right rule, which must pass, and of each wrong rule, which must not.

    A wrong rule that passes with three seeds is tried with `MORE_SEEDS`, as is the right one.
    """
    study = next(study for study in STUDIES if study.name == f"{task.model}, Adam")
    assert task.inputs is not None
    vocabulary, context = task.inputs
    changes = {**study.changes, "vocab_size": vocabulary, "seq_len": context}
    suite = Suite(replace(study, changes=changes), (0, 2))
    rows = [{"rule": "right", **_judged(suite.right(SEEDS))}]
    rows.append({"rule": f"right, {MORE_SEEDS} seeds", **_judged(suite.right(MORE_SEEDS))})

    # Each group once, in the order of the mutants.
    groups = list(dict.fromkeys(mutant.group for mutant in suite.mutants()))
    for group in groups:
        for column in task.rules:
            if task.model == "tied decoder" and group == "readout" and column != "multiplier":
                continue  # a tied readout has only a multiplier to get wrong
            mutant = Mutant(group, column, GOAL.get(group, 0.25))
            outcome = suite.run(mutant, SEEDS)
            if outcome.by is None:
                # The spread over three seeds may hide the error.
                outcome = suite.run(mutant, MORE_SEEDS)
            rows.append(
                {
                    "rule": f"{group} {column}",
                    "caught": outcome.by is not None,
                    "seeds": outcome.seeds,
                    "by": outcome.by,
                }
            )
    return rows


def _adam() -> OptimizerConfig:
    return OptimizerConfig(
        name="adam", peak_lr=OPTIMIZERS["adam"].check_lr, schedule="constant", eps=1e-12
    )


def _judged(findings: list[Finding]) -> dict[str, Any]:
    """Return whether a rule passes, its number of observables, and the failed ones in words."""
    failed = []
    for finding in findings:
        if not finding.ok:
            slopes = f"({finding.slope:+.2f}, theory {finding.expected.slope:+.2f})"
            failed.append(f"{finding.observable} @{finding.step} {finding.verdict} {slopes}")
    return {"passes": check.passes(findings), "observables": len(findings), "failed": failed}


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    tasks: int | None = None
    """Largest number of series to run; all by default."""
    only: tuple[Literal["structures", "mutants", "own"], ...] = ()
    """Kinds of series to run; all by default."""


def main() -> None:
    """Run the series that the record does not hold."""
    args = harness.parse(Options)
    record = recorded()
    todo = []
    for task in tasks():
        is_chosen = not args.only or task.kind in args.only
        if is_chosen and task.key not in record:
            todo.append(task)
    for task in todo[: args.tasks]:
        # Processor time does not depend on what else the machine does.
        started = time.process_time()
        rows = run(task)
        seconds = round(time.process_time() - started)
        record[task.key] = {**dataclasses.asdict(task), "cpu_s": seconds, "rows": rows}
        facts = {"command": COMMAND, "versions": harness.versions()}
        harness.write_record(RECORD, harness.with_rows(facts, "tasks", record))
        bad = [row["rule"] for row in rows if not _correct(row)]
        print(
            f"{task.key}: {len(rows)} rules, {seconds} s, not correct: {bad or 'none'}",
            flush=True,
        )
    print("python -m scripts.check.structures writes the page")


def recorded() -> dict[str, dict[str, Any]]:
    """Return the tasks of the record with their rows, by `Task.key`."""
    return dict(harness.read_rows(RECORD, "tasks"))


NAMES = {
    "structures": "right presets",
    "own": "a user's models",
    "mutants": "wrong rules, and right controls",
}
"""Kind of a task to its name on the page."""
OWN_INPUTS = "the model's own"
"""Name on the page of inputs that are not set by the campaign."""


def lines() -> list[str]:
    """Return the lines of the page's section on the campaign, as far as it is measured."""
    record = recorded()
    num_series = len(tasks())
    unfinished = ""
    if len(record) < num_series:
        unfinished = f" So far, {len(record)} are measured."

    columns = [_inputs(inputs) for inputs in (*INPUTS, LARGEST, None)]
    page = [
        "## Vocabularies and contexts of real models",
        "",
        f"`{COMMAND}` checks right presets, over ten steps and on more",
        "models, at each column's vocabulary size and context length. A user's models are not from the",
        f"zoo. Wrong rules are `mup` with one error. If they pass with {SEEDS} seeds, they are tried with",
        f"{MORE_SEEDS}. There are {num_series} series of growing models.{unfinished}",
        "",
    ]
    cells = [["correct checks", *columns]]
    for kind, name in NAMES.items():
        cells.append([name, *(_cell(record, kind, column) for column in columns)])
    page.append(table(cells))

    wrong: list[str] = []
    for task in record.values():
        wrong += _wrong_lines(task)
    if wrong:
        page += ["", "Not correct:", "", *wrong]
    return page


def _inputs(inputs: Sequence[int] | None) -> str:
    """Return the name of a vocabulary and context on the page."""
    if inputs is None:
        return OWN_INPUTS
    vocabulary, context = inputs
    return f"{vocabulary:,}, {context}"


def _cell(record: Mapping[str, Mapping[str, Any]], kind: str, column: str) -> str:
    """Return how many checks of a kind are correct at some inputs, or "" if there are none."""
    rows: list[dict[str, Any]] = []
    for task in record.values():
        if task["kind"] == kind and _inputs(task["inputs"]) == column:
            rows += task["rows"]
    if not rows:
        return ""
    return f"{sum(map(_correct, rows))} of {len(rows)}"


def _wrong_lines(task: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for every check of a task that is not correct, with what failed."""
    series = f"{task['kind']}, {task['model']}, {_inputs(task['inputs'])}, growing {task['grow']}"
    for row in task["rows"]:
        if not _correct(row):
            reasons = "; ".join(row.get("failed", ["not caught"]))
            yield f"- {series}: {row['rule']} {reasons}"


def _correct(row: dict[str, Any]) -> bool:
    """Return whether a right rule passes, or whether a wrong rule is caught."""
    return row["passes"] if "passes" in row else row["caught"]


if __name__ == "__main__":
    main()
