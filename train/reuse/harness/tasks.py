"""`mupax eval RUN --tasks …`: run tasks of the lm-eval harness and collect their metrics.

`train/run/eval_command.py` prints the rows. A script that calls the harness itself uses `Harness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mupax import MupaxError, extras
from mupax.train.config.sections import Step
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.texts import MAX_TOKENS, Texts

try:
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
except ImportError:
    # Without the extra `eval`, `check` says what to install before a `Harness` is made.
    LM = object


class Harness(LM):  # pyright: ignore[reportGeneralTypeIssues]
    """Decoder with the interface of a language model of the lm-eval harness.

        lm_eval.simple_evaluate(model=Harness("runs/lm-laptop"), tasks=["lambada_openai"])

    Args:
        path: a run, one of its steps, or weights.
        step: step of a run's checkpoint, by default the newest.
        average: whether to use the moving average, by default if the run keeps one.
        tokenizer: data.tokenizer of weights without a tokenizer beside them.
    """

    def __init__(
        self,
        path: Path | str,
        step: Step | None = None,
        average: bool | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self._texts = Texts(Path(path), step, average, tokenizer)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding writes it.

        Args:
            requests: requests of the harness, with arguments (context, continuation).

        Raises:
            TextError: a continuation has no token, or is longer than the model's context.
        """
        scores = self._texts.likelihoods([request.args for request in requests])
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the natural log-probability of each complete text at the start of a document.

        Args:
            requests: requests of the harness, with arguments (text,).
        """
        return self._texts.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text generated after each context, by default the likeliest tokens.

        The text ends before the first of the strings `until`, where a document ends, or at the
        largest number of tokens.

        Args:
            requests: requests of the harness, with arguments (context, options). Options are
                `until`, `max_gen_toks` or `max_new_tokens` (256 by default), `do_sample`,
                `temperature`, `top_k` and `top_p`. Tokens are drawn only with a temperature above
                0 and without `do_sample` False.
        """
        return [self._continued(*request.args) for request in requests]

    @property
    def tokenizer_name(self) -> str:
        """Key of the tokenizer, which changes with its content."""
        return self._texts.tokenizer.key

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        if isinstance(until, str):
            until = [until]
        temperature = 0.0
        if options.get("do_sample", True):
            temperature = float(options.get("temperature") or 0.0)
        sampling = None
        if temperature:
            # A top_k of 0 means that there is no limit, as in `transformers`.
            sampling = Sampling(temperature, options.get("top_k") or None, options.get("top_p"))
        # The YAML files of tasks use either of these two names.
        max_tokens = options.get("max_gen_toks") or options.get("max_new_tokens") or MAX_TOKENS
        return self._texts.continued(context, until, max_tokens=int(max_tokens), sampling=sampling)


_SHOWN = 8
"""Number of task names listed in a message."""


class TaskError(MupaxError):
    """Tasks that cannot run. The message says what to write instead."""


def check() -> None:
    """Raise `TaskError` if the lm-eval harness is not installed."""
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
    """Evaluate a model on tasks of the lm-eval harness and return the results by task.

    Keys of a task's results are "METRIC", or "METRIC FILTER" if the task filters its answers. The
    standard error of a metric has the same key with `_stderr` after METRIC. The key `examples` has
    the number of evaluated examples, or `None` for a group of tasks.

    Args:
        path: a run, one of its steps, or weights.
        names: names of tasks, of the harness or of `folder`.
        folder: folder of YAML files with tasks, in place of the harness' tasks.
        limit: largest number of examples per task, by default all.
        shots: number of examples in the prompt, by default the task's.
        step, average, tokenizer: see `Texts`.

    Raises:
        TaskError: a task does not exist, or the harness is not installed.
        MupaxError: no decoder at the path, or one without its tokenizer (see `Texts`).
    """
    check()
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        examples = ", ".join(sorted(manager.all_tasks)[:_SHOWN])
        if not examples:
            raise TaskError(f"no task in {folder}")
        source = folder or "the harness"
        raise TaskError(f"no task is named {unknown[0]}; {source} has {examples} and others")

    results: Any = simple_evaluate(
        Harness(path, step, average, tokenizer),
        tasks=list(names),
        task_manager=manager,
        limit=limit,
        num_fewshot=shots,
        # By default the harness resamples 100,000 times, for metrics whose error has no formula.
        bootstrap_iters=1000,
        log_samples=False,
    )
    counts = results["n-samples"]
    results_by_task: dict[str, dict[str, Any]] = {}
    for name, metrics in results["results"].items():
        # A group of tasks has no count of its own.
        num_examples = counts[name]["effective"] if name in counts else None
        results_by_task[name] = {**_numbers(metrics), "examples": num_examples}
    return results_by_task


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics by "METRIC FILTER", or by "METRIC" if the filter is `none`.

    Args:
        metrics: results of one task from the harness. Keys of metrics are "METRIC,FILTER"; other
            keys are ignored.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if "," in name and isinstance(value, int | float):
            values[name.removesuffix(",none").replace(",", " ")] = value
    return values


def rows(results_by_task: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a table with a header: task, metric, value, standard error and number of examples."""
    lines = [["task", "metric", "value", "standard error", "examples"]]
    for task, metrics in results_by_task.items():
        for name, value in metrics.items():
            if name == "examples" or "_stderr" in name:
                continue
            metric, *filters = name.split(" ")
            error = metrics.get(" ".join([f"{metric}_stderr", *filters]))
            error_text = "" if error is None else f"{error:.4f}"
            examples = str(metrics["examples"] or "")
            lines.append([task, name, f"{value:.4f}", error_text, examples])
    return lines
