"""`mupax compile RECIPE --topology v5e:16x16`: compile a recipe's step for a TPU pod, without a TPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.disk import path_of
from mupax.terminal import gib
from mupax.train.config import cli
from mupax.train.config.checks import at_least
from mupax.train.config.run import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """A recipe's step compiled for a TPU pod, without a TPU.

    The real TPU compiler (extra `tpu`) compiles the run's own step for devices that are not here, and says what a device
    would need: memory, FLOPs, collectives, clock cycles. Every flag of the recipe applies (`mupax train RECIPE --help`
    lists them). Nothing is allocated or trained.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train`, or a config file; `--config FILE` says the same."""
    topology: Annotated[str, conf.arg(metavar="CHIP:AxB")]
    """v5e:16x16, v5p:4x4x4, v6e:16x16, v7x:4x4x4, v4:4x4x4, ..."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """So many of them, joined by the slow network."""
    json: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the report as JSON."""
    hlo: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the optimized program as text."""
    search: Switch = False
    """Try meshes, remat policies, microbatches, batches, losses and attention blocks; compile a few that differ, print the best that fit.
    All that was tried is written beside the workdir, WORKDIR.search-CHIP-AxB.json."""
    limit: Annotated[int, conf.arg(metavar="N")] = 6
    """With --search: compile at most so many."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "slices", "limit")


def main(argv: Sequence[str]) -> int:
    """Compiles and prints: 0 where the step fits, 1 where it does not; raises as `mupax.train.config.cli.parse`."""
    args, rest = command_line.parse_known(Compile, "mupax compile", cli.with_file_first(argv))
    from mupax.train.pods import topology

    topology.chip_of(args.topology)
    config = cli.parse(
        args.recipe, cli.recipe(args.recipe), rest, command_line.flags(Compile)
    ).config
    topology.ready()
    where = f"{config.recipe} on {args.topology}" + (
        f" x {args.slices} slices" if args.slices > 1 else ""
    )
    if args.search:
        from mupax.train.pods import search

        file = record_of(config, args.topology, args.slices)

        def keep(record: dict[str, Any]) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record, indent=1) + "\n")

        report: Any = search.search(config, args.topology, args.slices, args.limit, keep=keep)
        fits = report[0]["fits"]
        print(search.table(report, where))
        terminal.say(f"all that was tried, with estimates, figures and refusals: {file}")
    else:
        from mupax.train.pods.compiled import compile_for

        compiled = compile_for(config, args.topology, args.slices)
        report = {"topology": args.topology, "slices": args.slices, **compiled.report()}
        fits = compiled.fits
        if args.hlo is not None:
            args.hlo.write_text(compiled.text)
        print("\n\n".join(_tables(report, where)))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if fits else 1


def record_of(config: Config, topology: str, slices: int) -> Any:
    """Where a search writes what it tried: beside the run's workdir, which must be empty when a run starts.

    Args:
        config: of the run.
        topology, slices: that is searched for.
    """
    folder = (config.workdir or f"runs/{config.recipe}").rstrip("/")
    times = f"-x{slices}" if slices > 1 else ""
    return path_of(f"{folder}.search-{topology.replace(':', '-').replace(' ', '-')}{times}.json")


def _tables(report: dict[str, Any], where: str) -> list[str]:
    """A report for people."""
    peak, room = report["peak_bytes_per_device"], report["hbm_bytes_per_device"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    chips = f"{report['devices']} chips" + (
        f" in {report['slices']} slices" if report["slices"] > 1 else ""
    )
    parts, expected = report["accumulation_steps"], report["expected_bytes_per_device"]
    facts = {
        "mesh": f"{mesh} ({chips})",
        "parameters": f"{report['parameters']:,}",
        "batch": f"{report['batch_size']}" + (f" in {parts} microbatches" if parts > 1 else ""),
        "compute": ", ".join(f"{name} {value}" for name, value in report["compute"].items()),
        "loss": _loss(report["loss"]),
        "memory": f"{gib(peak)} of {gib(room)}: "
        + (
            f"fits, {gib(room - peak)} to spare"
            if report["fits"]
            else f"does not fit by {gib(peak - room)}"
        ),
        "expected": f"{gib(sum(expected.values()))}: "
        + ", ".join(f"{name} {gib(n)}" for name, n in expected.items()),
    }
    if roofline := report["roofline"]:
        sizes = [
            f"{n} {gib(report[f'{n}_bytes_per_device'])}"
            for n in ("argument", "temporary", "output", "code")
        ]
        model, traced = report["flops_per_step"], report["traced_flops_per_step"]
        cycles = f"{roofline['cycles']:.3g} s" if roofline["cycles"] else "clock not published"
        names = [
            "compute",
            "memory",
            "network",
            *(["slow_network"] if report["slices"] > 1 else []),
        ]
        times = ", ".join(f"{name.replace('_', ' ')} {roofline[name]:.3g}" for name in names)
        bound = roofline["bound"].replace("_", " ")
        sent, alone = (
            sum(row[name] for row in report["collectives"])
            for name in ("wire_bytes", "alone_bytes")
        )
        facts |= {
            "of it": f"{', '.join(sizes)} (output in place of arguments)",
            "arguments": f"{report['arguments_over_expected']:.2f} of state and batch",
            "FLOPs a step": f"{model:.3g} of the model, {traced:.3g} with recomputation",
            "memory traffic": f"{gib(report['hbm_traffic_per_device'])} a step and chip",
            "estimated cycles": f"{report['estimated_cycles']:,}, {cycles}",
            "sent": f"{gib(sent)} by a chip: {gib(sent - alone)} beside computation, {gib(alone)} alone",
            "step time": f"at least {roofline['step_seconds']:.3g} s, bound by {bound} ({times}; alone {roofline['alone']:.3g})",
            "MFU": f"at most {roofline['mfu']:.1%}",
        }
    facts |= {f"problem {number}": problem for number, problem in enumerate(report["problems"], 1)}
    facts["compiled in"] = f"{report['compile_seconds']} s"
    summary = f"{where}\n{terminal.table(list(facts.items()))}"
    if not report["fits"]:
        return [summary]
    rows: list[tuple[str, ...]] = [
        ("kind", "axes", "in loops of", "runs", "bytes", "sent", "alone")
    ]
    for row in report["collectives"]:
        axes, loops = (" x ".join(map(str, row[name])) for name in ("axes", "loop_trips"))
        sizes = (
            f"{row['executions']:,}",
            *(gib(row[name]) for name in ("bytes", "wire_bytes", "alone_bytes")),
        )
        kind = f"{row['kind']} (gathers)" if row["gathers"] else row["kind"]
        rows.append(
            (kind, f"{axes} (slices)" if row["between_slices"] else axes, loops or "-", *sizes)
        )
    live = [("bytes", "shape", "made by", "at")]
    for row in report["temporaries"]:
        live.append(
            (gib(row["bytes"]), row["shape"], _maker(row["op_name"]) or row["name"], row["source"])
        )
    return [
        summary,
        f"collectives of one step, per chip\n{terminal.table(rows, rows[0][:3])}",
        f"temporaries of at least 1 % at the peak\n{terminal.table(live, live[0][1:])}",
    ]


def _loss(loss: dict[str, Any]) -> str:
    """How the loss is computed, and why where that was left to `auto`."""
    exponentials = f", exponentials of {loss['kept']} kept" if loss["kind"] == "vocab" else ""
    how = loss["kind"] + (f" in {loss['parts']} parts{exponentials}" if loss["parts"] > 1 else "")
    above = ", ".join(f"{kind} by {gib(size)}" for kind, size in loss["raises_peak_by"].items())
    return (
        f"{how}; of what auto may be, {above} above the layers' peak"
        if len(loss["raises_peak_by"]) > 1
        else how
    )


def _maker(op_name: str) -> str:
    """The operation and the pass that an array is of, from where in the traced program it was made."""
    *path, operation = op_name.split("/")
    if "rematted_computation" in path:
        return f"{operation}, recomputed"
    return (
        f"{operation}, backward"
        if any(part.startswith("transpose") for part in path)
        else operation
    )
