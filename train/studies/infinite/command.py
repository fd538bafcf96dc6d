"""`mupax presets dynamics`: the infinite model's own loss curve, kernels and attention, and finite models of our own step beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.train.config import cli
from mupax.train.config.checks import at_least
from mupax.train.config.preset import with_group_constants
from mupax.train.studies.infinite import course, setup

if TYPE_CHECKING:
    import matplotlib.figure

    from mupax.train.studies.infinite.course import Course

PROG = "mupax presets dynamics"
MATRICES = 22
"""Vectors of a block that are recorded for each direction: of queries, keys and values 1 + 9, of the other three 4 each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics:
    """How a model with infinitely many heads learns a few images by heart: loss, kernels and attention, with error bars.

    Every initial matrix is drawn only along what it has acted on, so the network has the law of a dense one of its width, and an
    update of SGD is of low rank. The images are of the endless set unless --data.name names others; --model.*, --preset.*,
    --optimizer.* and --seed are those of the recipe.
    """

    model: Annotated[str, conf.arg(metavar="MODEL|RECIPE|FILE")] = "bordelon-vit"
    """A vision transformer of `mupax models` without gains and biases, a recipe, or a config file (also `--config FILE`); its heads grow
    to --heads."""
    steps: Annotated[int, conf.arg(metavar="N")] = 8
    """Steps of SGD, all on the same images."""
    images: Annotated[int, conf.arg(metavar="N")] = 2
    """Images."""
    heads: Annotated[int, conf.arg(metavar="H")] = 512
    """Heads that stand for infinitely many, from which they are H^-1/2 away, and their means 1/H."""
    draws: Annotated[int, conf.arg(metavar="N")] = 2
    """Independent networks, whose standard error is the error bar."""
    finite: Annotated[tuple[int, ...], conf.arg(metavar="H ...")] = ()
    """Also train models of so many heads by the zoo and our own step."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Initializations of each of those."""
    float64: Switch = False
    """Twice the digits in twice the memory."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw loss, kernels and attention (PNG)."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write all numbers as JSON."""
    dry_run: Switch = False
    """Say how large the network and its records are; train nothing."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "steps", "images", "heads")
        at_least("--", self, 2, "draws", "seeds")


def main(argv: Sequence[str]) -> int:
    """Trains, prints, draws, writes: the exit code 0."""
    args, rest = command_line.parse_known(Dynamics, PROG, with_group_constants(_with_model_flag(argv)))
    named = cli.is_recipe(args.model)
    recipe = args.model if named else "bordelon-vit"
    words = rest if named else ["--model", args.model, *rest]
    if recipe == "bordelon-vit" and not any(word.startswith("--data.name") for word in words):
        words = [*words, "--data.name", "shapes"]
    config = cli.parse(recipe, cli.recipe(recipe), words, command_line.flags(Dynamics)).config
    config = dataclasses.replace(config, steps=args.steps)
    setup.check(config)
    wide = setup.with_heads(config, args.heads)
    rank = setup.check_rank(wide, args.images)
    model: Any = wide.model
    size = terminal.gib(MATRICES * model.width * rank * model.depth * (8 if args.float64 else 4))
    terminal.say(
        f"{args.model} of N = {model.heads_dim}, L = {model.depth}, {args.heads} heads (width {model.width}) for infinitely many; "
        f"{args.images} images, {args.steps} steps; {rank} directions of every matrix, {size} of records"
    )
    if args.dry_run:
        return 0
    images, targets = course.examples(config, args.images)
    dtype = np.float64 if args.float64 else np.float32
    infinite = course.limit(config, images, targets, heads=args.heads, draws=args.draws, seed=config.seed, dtype=dtype)
    nets = {
        count: course.finite(setup.with_heads(config, count), images, targets, seeds=args.seeds)
        for count in args.finite
    }
    terminal.say(f"\n{terminal.table(rows(infinite, nets))}")
    if args.json:
        record = {"limit": _plain(infinite), "finite": {str(count): _plain(net) for count, net in nets.items()}}
        Path(args.json).write_text(json.dumps({"heads": args.heads, **record}) + "\n")
    if args.figure:
        picture(infinite, nets, f"{args.model}, N = {model.heads_dim}, L = {model.depth}").savefig(args.figure)
    return 0


def _with_model_flag(argv: Sequence[str]) -> list[str]:
    """Return a command line with `--model PATH` for `--config PATH`."""
    words = cli.with_file_first(argv)
    return ["--model", *words] if words and cli.is_file(words[0]) else words


def mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over networks, axis 0, and its standard error."""
    return values.mean(0), values.std(0, ddof=1) / len(values) ** 0.5


def rows(limit: Course, nets: Mapping[int, Course]) -> list[list[str]]:
    """A line per step: losses, C(t, t), C(t, 0) over the root of both own, root mean square attention logits, and how far they agree.

    Args:
        limit: the infinite model.
        nets: finite models by heads.
    """

    def cell(values: np.ndarray) -> list[str]:
        return [f"{x:.4f} ± {e:.4f}" for x, e in zip(*mean(values), strict=True)]

    own = np.einsum("ztt->zt", limit.memory)
    columns = {
        "step": [str(step) for step in range(own.shape[1])],
        "loss, infinite": cell(limit.losses),
        **{f"loss, H = {count}": cell(net.losses) for count, net in nets.items()},
        "C(t, t)": cell(own),
        "C(t, 0) / root": cell(limit.memory[:, 0] / np.sqrt(own * own[:, :1])),
        "attention logits, rms": cell(np.sqrt(limit.attention[..., 0].mean(-1))),
        "the same in all heads": cell(np.sqrt(limit.attention[..., 1].mean(-1))),
    }
    return [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]


def picture(limit: Course, nets: Mapping[int, Course], title: str) -> matplotlib.figure.Figure:
    """Loss, C(t, s) and attention logits by layer over steps.

    Args:
        limit: the infinite model.
        nets: finite models by heads, beside its loss.
        title: above all.
    """
    from matplotlib.figure import Figure

    from mupax.train.run.report.plotting import BLUE, GREY, INK, ORANGE, style

    figure = Figure(figsize=(13, 3.8), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    left, middle, right = figure.subplots(1, 3)
    steps = np.arange(limit.losses.shape[1])
    for one, name in (
        (left, "Loss, nats"),
        (middle, "Kernels C(t, s), each line an s"),
        (right, "Attention logits, rms"),
    ):
        style(one, 0, int(steps[-1]))
        one.set_title(name, fontsize=10, color=INK, loc="left")
        one.set_xlabel("step t", fontsize=9)
    for fade, (count, net) in zip(np.linspace(0.4, 0.9, len(nets)), sorted(nets.items()), strict=True):
        left.plot(steps, net.losses.T, color=ORANGE, alpha=fade / 3, linewidth=0.8)
        left.plot(steps, net.losses.mean(0), color=ORANGE, alpha=fade, label=f"our step, H = {count}")
    middle_loss, error = mean(limit.losses)
    left.errorbar(steps, middle_loss, error, color=BLUE, capsize=2, label="infinitely many heads")
    for step in steps:
        middle.plot(steps, limit.memory.mean(0)[step], color=BLUE, alpha=0.25 + 0.75 * step / steps[-1])
    for layer, (squares, of_mean) in enumerate(np.moveaxis(np.sqrt(limit.attention.mean(0)), 0, -1)):
        fade = 0.4 + 0.6 * (layer + 1) / limit.attention.shape[2]
        right.plot(steps, squares, color=BLUE, alpha=fade, label="all" if fade == 1 else None)
        right.plot(steps, of_mean, "--", color=GREY, alpha=fade, label="their mean over heads" if fade == 1 else None)
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False, title="layers faint to full", title_fontsize=8)
    return figure


def _plain(of: Course) -> dict[str, Any]:
    return {name: np.asarray(x).round(6).tolist() for name, x in vars(of).items()}
