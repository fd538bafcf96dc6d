"""`python -m train compile RECIPE --topology v5e:16x16`: compile a recipe's step for a TPU pod, without a TPU.

The real TPU compiler (extra `tpu`) compiles the run's own step for devices that are not here, and says what a device
would need: memory, FLOPs, collectives, clock cycles. Every flag of the recipe applies. Nothing is allocated or trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import terminal
from mupax.terminal import gib

if TYPE_CHECKING:
    from rich.table import Table

    from mupax.train.config.run import Config


def parser() -> argparse.ArgumentParser:
    """The command's own flags; a recipe's flags stand beside them."""
    made = argparse.ArgumentParser(
        prog="python -m train compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Further flags are the recipe's: `python -m train RECIPE --help` lists them.",
    )
    made.add_argument("recipe", metavar="RECIPE", help="a recipe of `python -m train`")
    made.add_argument(
        "--topology", required=True, metavar="CHIP:AxB", help="v5e:16x16, v5p:4x4x4, v6e:16x16, v4:4x4x4, ..."
    )
    made.add_argument(
        "--slices", type=int, default=1, metavar="N", help="so many of them, joined by the slow network (1)"
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="write the report as JSON")
    made.add_argument("--hlo", type=Path, metavar="PATH", help="write the optimized program as text")
    made.add_argument(
        "--search", action="store_true", help="try meshes, remat policies and microbatches, and print the best that fit"
    )
    made.add_argument("--limit", type=int, default=6, metavar="N", help="with --search: compile at most so many (6)")
    return made


def main(argv: Sequence[str]) -> int:
    """Compile and print: 0 where the step fits, 1 where it does not, 2 on bad input."""
    try:
        args, rest = parser().parse_known_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    return run(args, _config(args, rest))


def _config(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    from mupax.train.config import cli
    from mupax.train.pods import topology
    from mupax.zoo.configs import ConfigError

    topology.chip_of(args.topology)
    if args.limit < 1:
        raise ConfigError(f"--limit is {args.limit}; write a whole number of at least 1")
    return cli.parse(args.recipe, cli.recipe(args.recipe), rest).config


def run(args: argparse.Namespace, config: Config) -> int:
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
