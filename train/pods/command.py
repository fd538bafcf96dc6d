"""`python -m train compile RECIPE --topology v5e:16x16`: compile a recipe's step for a TPU pod, without a TPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.terminal import gib
from mupax.train.config import cli
from mupax.train.config.checks import at_least

if TYPE_CHECKING:
    from rich.table import Table

    from mupax.train.config.run import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """A recipe's step compiled for a TPU pod, without a TPU.

    The real TPU compiler (extra `tpu`) compiles the run's own step for devices that are not here, and says what a device
    would need: memory, FLOPs, collectives, clock cycles. Every flag of the recipe applies (`python -m train RECIPE --help`
    lists them). Nothing is allocated or trained.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE")]
    """A recipe of `python -m train`."""
    topology: Annotated[str, conf.arg(metavar="CHIP:AxB")]
    """v5e:16x16, v5p:4x4x4, v6e:16x16, v4:4x4x4, ..."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """So many of them, joined by the slow network."""
    json: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the report as JSON."""
    hlo: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the optimized program as text."""
    search: Switch = False
    """Try meshes, remat policies and microbatches, and print the best that fit."""
    limit: Annotated[int, conf.arg(metavar="N")] = 6
    """With --search: compile at most so many."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "slices", "limit")


def main(argv: Sequence[str]) -> int:
    """Compiles and prints: 0 where the step fits, 1 where it does not; raises as `mupax.train.config.cli.parse`."""
    args, rest = command_line.parse_known(Compile, "python -m train compile", argv)
    from mupax.train.pods import topology

    topology.chip_of(args.topology)
    return run(args, cli.parse(args.recipe, cli.recipe(args.recipe), rest, command_line.flags(Compile)).config)


def run(args: Compile, config: Config) -> int:
    """Compile one configuration, or search for a better one; print and write."""
    from mupax.train.pods import topology

    topology.ready()
    console = terminal.console()
    where = f"{args.topology}" + (f" x {args.slices} slices" if args.slices > 1 else "")
    if args.search:
        from mupax.train.pods import search as compile_search

        reports = compile_search.search(config, args.topology, args.slices, args.limit, console)
        console.print(compile_search.table(reports, f"{config.recipe} on {where}"))
        found: Any = reports
        fits = bool(reports) and reports[0]["fits"]
    else:
        from mupax.train.pods.compiled import compile_for

        compiled = compile_for(config, args.topology, args.slices)
        found = {"topology": args.topology, "slices": args.slices, **compiled.report()}
        if args.hlo is not None:
            args.hlo.write_text(compiled.text)
        for table in tables(found, where):
            console.print(table)
            console.print()
        fits = found["fits"]
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if fits else 1


def tables(report: dict[str, Any], where: str) -> list[Table]:
    """A report for people."""
    from rich.table import Table

    peak, room = report["peak_bytes_per_device"], report["hbm_bytes_per_device"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    summary = Table(title=f"{report['recipe']} on {where}", title_justify="left", show_header=False, box=None)
    rows = {
        "mesh": f"{mesh} ({report['devices']} chips)",
        "parameters": f"{report['parameters']:,}",
        "batch": f"{report['batch_size']}"
        + (f" in {n} microbatches" if (n := report["accumulation_steps"]) > 1 else ""),
        "compute": ", ".join(f"{name} {value}" for name, value in report["compute"].items()),
        "memory": f"{gib(peak)} of {gib(room)}: "
        + (f"fits, {gib(room - peak)} to spare" if report["fits"] else f"does not fit by {gib(peak - room)}"),
        "expected": f"{gib(sum(report['expected_bytes_per_device'].values()))}: "
        + ", ".join(f"{name} {gib(size)}" for name, size in report["expected_bytes_per_device"].items()),
    }
    if roofline := report["roofline"]:
        sizes = {name: report[f"{name}_bytes_per_device"] for name in ("argument", "temporary", "output", "code")}
        rows |= {
            "of it": ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())
            + " (output in place of arguments)",
            "FLOPs a step": f"{report['flops_per_step']:.3g} of the model, {report['traced_flops_per_step']:.3g} with recomputation",
            "memory traffic": f"{gib(report['hbm_traffic_per_device'])} a step and chip",
            "estimated cycles": f"{report['estimated_cycles']:,}"
            + (f", {roofline['cycles']:.3g} s" if roofline["cycles"] else ", clock not published"),
            "step time": f"at least {roofline['step_seconds']:.3g} s, bound by {roofline['bound'].replace('_', ' ')} (compute "
            f"{roofline['compute']:.3g}, memory {roofline['memory']:.3g}, network {roofline['network']:.3g}"
            + (f", slow network {roofline['slow_network']:.3g}" if roofline["slow_network"] else "")
            + ")",
            "MFU": f"at most {roofline['mfu']:.1%}",
        }
    for number, problem in enumerate(report["problems"], 1):
        rows[f"problem {number}"] = problem
    rows["compiled in"] = f"{report['compile_seconds']} s"
    for name, value in rows.items():
        summary.add_row(name, value)
    return [summary, *([_collectives(report), _temporaries(report)] if report["fits"] else [])]


def _collectives(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="collectives of one step, per chip", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("kind", "axes", "in loops of", "executions", "bytes", "sent"):
        table.add_column(column, justify="right" if column in ("executions", "bytes", "sent") else "left")
    for row in report["collectives"]:
        table.add_row(
            row["kind"],
            " x ".join(row["axes"]),
            " x ".join(map(str, row["loop_trips"])) or "-",
            f"{row['executions']:,}",
            gib(row["bytes"]),
            gib(row["wire_bytes"]),
        )
    return table


def _temporaries(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="temporaries of at least 1 % at the peak", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("bytes", "shape", "made by", "at"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for row in report["temporaries"]:
        table.add_row(gib(row["bytes"]), row["shape"], row["op_name"] or row["name"], row["source"])
    return table
