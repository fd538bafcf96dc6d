"""`mupax eval RUN --tasks …`: tasks of the lm-eval harness, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import extras
from mupax.errors import MupaxError
from mupax.train.config.sections import Step


class TaskError(MupaxError):
    """Tasks that cannot be run, as asked. The text says what to write instead."""


def check() -> None:
    """Raises TaskError where the harness is not here."""
    extras.require("eval", "--tasks", TaskError)


def measured(
    path: Path,
    names: Sequence[str],
    *,
    folder: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    step: Step | None = None,
    average: bool | None = None,
    tokenizer: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Numbers by task: its metrics, their standard errors (`NAME_stderr`), and `examples`.

    Args:
        path: a run, one of its steps, or weights.
        names: of tasks, of the harness' own or of the folder.
        folder: of YAML files with tasks, in place of the harness' own.
        limit: examples of a task, at most.
        shots: examples shown before each; what the task says unless given.
        step, average, tokenizer: of the model, as `Texts` takes them.

    Raises:
        TaskError: no task of a name.
        MupaxError: no model there.
    """
    check()
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from mupax.train.reuse.harness.lm import Harness

    manager = TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        some = ", ".join(sorted(manager.all_tasks)[:8])
        raise TaskError(
            f"no task is named {unknown[0]}; {folder or 'the harness'} has {some} and others"
            if some
            else f"no task in {folder}"
        )
    results: Any = simple_evaluate(
        Harness(path, step, average, tokenizer),
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        num_fewshot=shots,
        bootstrap_iters=1000,
        log_samples=False,
    )
    counts = results["n-samples"]
    return {
        name: {**_numbers(of), "examples": counts[name]["effective"] if name in counts else None}
        for name, of in results["results"].items()
    }


def _numbers(of: dict[str, Any]) -> dict[str, float]:
    """Metrics without the name of the filter behind a comma, where it is none."""
    values = {
        name.removesuffix(",none").replace(",", " "): value
        for name, value in of.items()
        if "," in name
    }
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def rows(numbers: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A line a metric: task, metric, value with its standard error, examples."""
    lines = [["task", "metric", "value", "standard error", "examples"]]
    for task, of in numbers.items():
        for name, value in of.items():
            if name == "examples" or "_stderr" in name:
                continue
            first, *rest = name.split(" ")
            error = of.get(" ".join([f"{first}_stderr", *rest]))
            lines.append(
                [
                    task,
                    name,
                    f"{value:.4f}",
                    "" if error is None else f"{error:.4f}",
                    str(of["examples"] or ""),
                ]
            )
    return lines
