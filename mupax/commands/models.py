"""`mupax models list` and `mupax models describe NAME`: named models, and a model's parameters."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

from tyro import conf

from mupax import terminal
from mupax.command_line import Switch
from mupax.train.config import cli
from mupax.zoo import configs, families
from mupax.zoo.families import ModelConfig

COLUMNS = (
    "model",
    "family",
    "width",
    "depth",
    "heads",
    "head_dim",
    "mlp",
    "input",
    "parameters",
    "forward FLOPs",
)

SIZE_AXES = ("embed", "layers", "heads", "head_dim", "mlp")
"""Axes whose sizes `mupax models list` prints, in the order of `COLUMNS`."""

LEFT = ("model", "family", "input", "path", "role", "shape", "axes")
"""Columns of words, which align left. Columns of numbers align right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """Named models with sizes, parameters and FLOPs of one forward pass (the default command)."""

    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        """Print all named models as a table or as JSON, and return exit code 0."""
        if self.json:
            summaries = [_summary(name, configs.get(name)) for name in configs.CONFIGS]
            print(json.dumps(summaries, indent=2))
            return 0

        rows: list[Sequence[str]] = [COLUMNS]
        for name in configs.CONFIGS:
            model = configs.get(name)
            summary = _summary(name, model)
            sizes = [str(summary["sizes"].get(axis, "")) for axis in SIZE_AXES]
            parameters = terminal.si(summary["parameters"])
            flops = f"{terminal.si(summary['forward_flops'])} / {summary['per']}"
            rows.append([name, model.family, *sizes, model.input_text, parameters, flops])
        print(terminal.table(rows, left=LEFT))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Describe:
    """Every parameter of a model: path, role, shape, axes, count."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")]
    """A model of `mupax models`, or a recipe or config file that has the model. `--config FILE`
    does the same."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        """Print the model's sizes, parameters and FLOPs, as text or JSON. Return exit code 0."""
        model = cli.model_of(self.name)
        summary = _summary(self.name, model)
        tree = _tree(model)
        if self.json:
            print(json.dumps({**summary, "tree": tree}, indent=2))
            return 0

        sizes = ", ".join(f"{axis} {size}" for axis, size in summary["sizes"].items())
        terminal.say(f"{self.name}: {model.family}, {sizes}")
        rows = [["path", "role", "shape", "axes", "parameters"]]
        for leaf in tree:
            marked = [f"{axis}*" if axis in leaf["fan_in"] else axis for axis in leaf["axes"]]
            axes = " ".join(marked)
            shape = " ".join(map(str, leaf["shape"]))
            rows.append([leaf["path"], leaf["role"], shape, axes, f"{leaf['count']:,}"])
        rows.append(["total", "", "", "* fan-in", f"{summary['parameters']:,}"])
        terminal.say(f"\n{terminal.table(rows, left=LEFT)}\n")
        flops = terminal.si(summary["forward_flops"])
        # No space: the count ends with the prefix of the unit, as in 1.2 GFLOPs.
        terminal.say(f"{flops}FLOPs per {model.unit}, one forward pass")
        return 0


def _summary(name: str, model: ModelConfig) -> dict[str, Any]:
    """Return name, sizes, parameter count, FLOPs and config of a model, as values for JSON."""
    return {
        "name": name,
        "family": model.family,
        "sizes": model.sizes(),
        "parameters": families.params(model),
        "forward_flops": families.forward_flops(model),
        "per": model.unit,
        "config": dataclasses.asdict(model),
    }


def _tree(model: ModelConfig) -> list[dict[str, Any]]:
    """Return path, role, shape, axes, fan-in axes and count of each parameter, sorted by path."""
    sizes = model.sizes()
    leaves: list[dict[str, Any]] = []
    for path, spec in sorted(model.parameters().items()):
        # The role of a gain or bias also names the matrix that the parameter belongs to.
        role = f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value
        shape = [sizes[axis] for axis in spec.axes]
        leaves.append(
            {
                "path": path,
                "role": role,
                "shape": shape,
                "axes": list(spec.axes),
                "fan_in": list(spec.fan_in),
                "count": math.prod(shape),
            }
        )
    return leaves
