"""`mupax models list` and `mupax models describe NAME`: named models, and the parameter tree of one."""

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

LEFT = ("model", "family", "input", "path", "role", "shape", "axes")
"""Columns of words; the others hold numbers and align right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """Names, sizes, parameters, FLOPs of one forward pass (what no command does)."""

    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        """0 when printed."""
        summaries = [_summary(name, model) for name, model in configs.CONFIGS.items()]
        if self.json:
            print(json.dumps(summaries, indent=2))
            return 0
        rows: list[Sequence[str]] = [COLUMNS]
        for row in summaries:
            sizes = [
                str(row["sizes"].get(axis, ""))
                for axis in ("embed", "layers", "heads", "head_dim", "mlp")
            ]
            costs = [
                terminal.si(row["parameters"]),
                f"{terminal.si(row['forward_flops'])} / {row['per']}",
            ]
            rows.append(
                [
                    row["name"],
                    row["family"],
                    *sizes,
                    configs.CONFIGS[row["name"]].input_text,
                    *costs,
                ]
            )
        print(terminal.table(rows, left=LEFT))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Describe:
    """Every parameter of a model: path, role, shape, axes, count."""

    name: Annotated[conf.Positional[str], conf.arg(metavar="MODEL|RECIPE|FILE")]
    """A model of `mupax models`, or a recipe or config file, for its model; `--config FILE` says the same."""
    json: Switch = False
    """Print JSON."""

    def run(self) -> int:
        """0 when printed."""
        model = cli.model_of(self.name)
        summary, tree = _summary(self.name, model), _tree(model)
        if self.json:
            print(json.dumps({**summary, "tree": tree}, indent=2))
            return 0
        sizes = ", ".join(f"{axis} {size}" for axis, size in summary["sizes"].items())
        terminal.say(f"{self.name}: {model.family}, {sizes}")
        rows = [["path", "role", "shape", "axes", "parameters"]]
        for leaf in tree:
            axes = " ".join(f"{axis}*" if axis in leaf["fan_in"] else axis for axis in leaf["axes"])
            rows.append(
                [
                    leaf["path"],
                    leaf["role"],
                    " ".join(map(str, leaf["shape"])),
                    axes,
                    f"{leaf['count']:,}",
                ]
            )
        rows.append(["total", "", "", "* fan-in", f"{summary['parameters']:,}"])
        terminal.say(f"\n{terminal.table(rows, left=LEFT)}\n")
        terminal.say(
            f"{terminal.si(summary['forward_flops'])}FLOPs per {model.unit}, one forward pass"
        )
        return 0


def _summary(name: str, model: ModelConfig) -> dict[str, Any]:
    """Sizes, parameters and FLOPs of a model, plain values."""
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
    """One row per parameter: path, role, shape, axes, fan_in, count."""
    sizes = model.sizes()
    return [
        {
            "path": path,
            "role": f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value,
            "shape": (shape := [sizes[axis] for axis in spec.axes]),
            "axes": list(spec.axes),
            "fan_in": list(spec.fan_in),
            "count": math.prod(shape),
        }
        for path, spec in sorted(model.parameters().items())
    ]
