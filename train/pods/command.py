"""`mupax compile RECIPE --topology v5e:16x16`: compile a step for TPUs or GPUs, without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, disk, terminal
from mupax.command_line import Switch
from mupax.disk import path_of
from mupax.terminal import gib
from mupax.train.config import cli
from mupax.train.config.checks import at_least, check_outputs
from mupax.train.config.run import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """A recipe's step compiled for a TPU pod or for GPUs, without any of them.

    The real compiler (extra `tpu` or `cuda`) compiles the run's own step for devices that are not
    here, and says what a device would need: memory, FLOPs, collectives, clock cycles of a TPU.
    Every flag of the recipe applies (`mupax train RECIPE --help` lists them). Nothing is allocated
    or trained.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train`, or a config file; `--config FILE` says the same."""
    topology: Annotated[str, conf.arg(metavar="CHIP:SHAPE")]
    """TPUs as v5e:16x16, v5p:4x4x4, v6e:16x16, v7x:4x4x4, v4:4x4x4; GPUs as h100:8 for one host,
    h100:2x8 for two, and a100, h200, b200."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """So many slices of TPUs, joined by the slow network."""
    json: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the report as JSON."""
    hlo: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the optimized program as text."""
    search: Switch = False
    """Try meshes, remat policies, microbatches, batches, losses and attention blocks; compile a few
    that differ, print the best that fit. All that was tried is written beside the workdir,
    WORKDIR.search-CHIP-AxB.json."""
    limit: Annotated[int, conf.arg(metavar="N")] = 6
    """With --search: compile at most so many, one of them as configured."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "slices")
        # One of the compiled programs is the run as configured, so a search needs at least two.
        at_least("--", self, 2, "limit")
        if self.search and self.hlo is not None:
            raise command_line.UsageError(
                "--hlo writes one program, and --search compiles several; leave one out"
            )


def main(argv: Sequence[str]) -> int:
    """Compile a recipe's step, or several with `--search`, and print the report.

    The report is written to `--json` if it is given. Without `--search`, the program is written to
    `--hlo` if it is given.

    Returns:
        0 if the step, or the best of a search, fits. 1 if it does not.

    Raises:
        MupaxError: The flags, the recipe or the topology cannot be used, or the compiler refuses
            the step.
    """
    args, remaining = command_line.parse_known(Compile, "mupax compile", cli.with_file_first(argv))
    check_outputs(args, "json", "hlo")
    from mupax.train.pods import topology

    # The chip is not used here: a wrong topology is refused before the recipe is read.
    topology.chip_of(args.topology)
    recipe = cli.recipe(args.recipe)
    parsed = cli.parse(args.recipe, recipe, remaining, command_line.flags(Compile))
    cli.refuse_session_flags("mupax compile", parsed)
    config = parsed.config
    # Sets the environment, so it comes before JAX is imported.
    topology.ready(args.topology)
    title = f"{config.recipe} on {args.topology}"
    if args.slices > 1:
        title += f" x {args.slices} slices"

    if args.search:
        report = _search(args, config, title)
        fits = report[0]["fits"]
    else:
        report = _compile(args, config, title)
        fits = report["fits"]
    if args.json is not None:
        args.json.write_text(disk.json_text(report, indent=1) + "\n")
    return 0 if fits else 1


def _search(args: Compile, config: Config, title: str) -> list[dict[str, Any]]:
    """Compile several configurations, print their table and return their reports, best first.

    All that was tried is written to `record_of`, again after each compilation.
    """
    from mupax.train.pods import search

    file = record_of(config, args.topology, args.slices)

    def keep(record: dict[str, Any]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(disk.json_text(record, indent=1) + "\n")

    reports = search.search(config, args.topology, args.slices, args.limit, keep=keep)
    print(search.table(reports, title))
    terminal.say(f"all that was tried, with estimates, figures and refusals: {file}")
    return reports


def _compile(args: Compile, config: Config, title: str) -> dict[str, Any]:
    """Compile the configuration as given, print its tables and return its report.

    The program is written to `--hlo` if it is given and the compiler made one. It makes none for a
    step that does not fit on TPUs. For a step that does not fit on GPUs, the report names the
    smallest topology that would do (`would_fit`), if there is one. Nothing is compiled for that.
    """
    from mupax.train.pods.compiled import compile_for

    compiled = compile_for(config, args.topology, args.slices)
    report = {"topology": args.topology, "slices": args.slices, **compiled.report()}
    if compiled.chip.gpu is not None and not compiled.fits:
        from mupax.train.pods import search

        smallest = search.smallest_that_fits(config, compiled.chip)
        if smallest is not None:
            name, plan = smallest
            report["would_fit"] = {"topology": name, "flags": plan.words, "bytes": plan.bytes}
    if args.hlo is not None:
        if compiled.text:
            args.hlo.write_text(compiled.text)
        else:
            terminal.note(f"{args.hlo} is not written: the compiler made no program that fits")
    print("\n\n".join(_tables(report, title)))
    return report


def record_of(config: Config, topology: str, slices: int) -> Any:
    """Return the path of a search's record.

    The record is written next to the run's workdir, which must be empty when a run starts.

    Args:
        topology: Topology, such as v5e:16x16.
        slices: Number of slices, joined by the slow network.
    """
    folder = (config.workdir or f"runs/{config.recipe}").rstrip("/")
    name = topology.replace(":", "-").replace(" ", "-")
    suffix = f"-x{slices}" if slices > 1 else ""
    return path_of(f"{folder}.search-{name}{suffix}.json")


def _tables(report: dict[str, Any], title: str) -> list[str]:
    """Return a report as texts, one per table.

    The tables are a summary and, if the step fits, collectives and temporaries.

    Args:
        title: First line of the summary, such as "lm-8b on v5e:16x16".
    """
    facts = _facts(report)
    if report["roofline"]:
        facts |= _roofline_facts(report)
    if "would_fit" in report:
        fitting = report["would_fit"]
        facts["would fit"] = (
            f"{fitting['topology']} {fitting['flags']} (expected {gib(fitting['bytes'])} a GPU)"
        )
    for number, problem in enumerate(report["problems"], 1):
        facts[f"problem {number}"] = problem
    facts["compiled in"] = f"{report['compile_seconds']} s"
    summary = f"{title}\n{terminal.table(list(facts.items()))}"
    if not report["fits"]:
        return [summary]

    collectives = _collective_rows(report)
    temporaries = _temporary_rows(report)
    return [
        summary,
        f"collectives of one step, per chip\n{terminal.table(collectives, collectives[0][:3])}",
        "temporaries of at least 1 % at the peak\n"
        f"{terminal.table(temporaries, temporaries[0][1:])}",
    ]


def _facts(report: dict[str, Any]) -> dict[str, str]:
    """Return the lines of a summary that every report has."""
    peak = report["peak_bytes_per_device"]
    limit = report["hbm_bytes_per_device"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    chips = f"{report['devices']} chips"
    if report["slices"] > 1:
        chips += f" in {report['slices']} slices"
    batch = f"{report['batch_size']}"
    if report["accumulation_steps"] > 1:
        batch += f" in {report['accumulation_steps']} microbatches"
    if report["fits"]:
        result = f"fits, {gib(limit - peak)} to spare"
    else:
        result = f"does not fit by {gib(peak - limit)}"
    if report["platform"] == "gpu":
        result += f" (an estimate; JAX leaves arrays {gib(limit)} of {gib(report['memory_bytes_per_device'])})"
    expected = report["expected_bytes_per_device"]
    terms = ", ".join(f"{name} {gib(size)}" for name, size in expected.items())
    return {
        "mesh": f"{mesh} ({chips})",
        "parameters": f"{report['parameters']:,}",
        "batch": batch,
        "compute": ", ".join(f"{name} {value}" for name, value in report["compute"].items()),
        "loss": _loss(report["loss"]),
        "memory": f"{gib(peak)} of {gib(limit)}: {result}",
        "expected": f"{gib(sum(expected.values()))}: {terms}",
    }


def _roofline_facts(report: dict[str, Any]) -> dict[str, str]:
    """Return the lines of a summary for a step with a compiled program: sizes, FLOPs and times."""
    roofline = report["roofline"]
    kinds = ("argument", "temporary", "output", "code")
    sizes = []
    for kind in kinds:
        sizes.append(f"{kind} {gib(report[f'{kind}_bytes_per_device'])}")
    is_gpu = report["platform"] == "gpu"
    clock = f"{roofline['cycles']:.3g} s" if roofline["cycles"] else "clock not published"
    resources = ["compute", "memory", "network"]
    if roofline["slow_network"]:
        resources.append("slow_network")
    figures = []
    for name in resources:
        figures.append(f"{name.replace('_', ' ')} {roofline[name]:.3g}")
    times = ", ".join(figures)
    bound = roofline["bound"].replace("_", " ")
    sent = sum(row["wire_bytes"] for row in report["collectives"])
    sent_alone = sum(row["alone_bytes"] for row in report["collectives"])
    model_flops = f"{report['flops_per_step']:.3g} of the model"
    traced_flops = f"{report['traced_flops_per_step']:.3g} with recomputation"
    overlapped = f"{gib(sent - sent_alone)} beside computation"
    step_time = f"at least {roofline['step_seconds']:.3g} s, bound by {bound}"
    waited = roofline["alone"] + roofline["slow_alone"]
    if is_gpu:
        sizes.append(f"workspace of attention {gib(report['workspace_bytes_per_device'])}")
    facts = {
        "of it": f"{', '.join(sizes)} (output in place of arguments)",
        "arguments": f"{report['arguments_over_expected']:.2f} of state and batch",
        "FLOPs a step": f"{model_flops}, {traced_flops}",
        "memory traffic": f"{gib(report['hbm_traffic_per_device'])} a step and chip",
        "estimated cycles": f"{report['estimated_cycles']:,}, {clock}",
        "sent": f"{gib(sent)} by a chip: {overlapped}, {gib(sent_alone)} alone",
        "step time": f"{step_time} ({times}; alone {waited:.3g})",
        "MFU": f"at most {roofline['mfu']:.1%}",
    }
    if is_gpu:
        # The GPU compiler estimates no cycles, so the entry would show 0.
        del facts["estimated cycles"]
        flags = ", ".join(
            f"{name}={value}" for name, value in report["flags_without_a_gpu"].items()
        )
        facts["not as in a run"] = (
            "products by cuBLASLt and not chosen by timing, no Triton kernels of norms and softmax "
            f"(memory up to 3 % less, traffic 4 %): {flags}"
        )
    return facts


def _collective_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of collectives: a header, and a row per kind, axes and loop."""
    rows: list[tuple[str, ...]] = [
        ("kind", "axes", "in loops of", "runs", "bytes", "sent", "alone")
    ]
    for row in report["collectives"]:
        kind = f"{row['kind']} (gathers)" if row["gathers"] else row["kind"]
        axes = " x ".join(row["axes"])
        if row["between_slices"]:
            axes += " (slices)"
        loops = " x ".join(str(trips) for trips in row["loop_trips"]) or "-"
        sizes = [gib(row[name]) for name in ("bytes", "wire_bytes", "alone_bytes")]
        rows.append((kind, axes, loops, f"{row['executions']:,}", *sizes))
    return rows


def _temporary_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of temporaries: a header, and a row per array."""
    rows: list[tuple[str, ...]] = [("bytes", "shape", "made by", "at")]
    for row in report["temporaries"]:
        maker = _maker(row["op_name"]) or row["name"]
        rows.append((gib(row["bytes"]), row["shape"], maker, row["source"]))
    return rows


def _loss(loss: dict[str, Any]) -> str:
    """Return a text on how the loss is computed, such as "vocab in 4 parts".

    If `auto` weighed several implementations, the bytes by which each raises the peak are added.
    """
    text = loss["kind"]
    if loss["parts"] > 1:
        text += f" in {loss['parts']} parts"
        if loss["kind"] == "vocab":
            text += f", exponentials of {loss['kept']} kept"
    if len(loss["raises_peak_by"]) <= 1:
        return text
    raises = []
    for kind, size in loss["raises_peak_by"].items():
        raises.append(f"{kind} by {gib(size)}")
    costs = ", ".join(raises)
    return f"{text}; of what auto may be, {costs} above the layers' peak"


def _maker(op_name: str) -> str:
    """Return the operation that made an array and its pass, such as "dot_general, backward".

    An operation of the forward pass has no addition.
    """
    *path, operation = op_name.split("/")
    if "rematted_computation" in path:
        return f"{operation}, recomputed"
    if any(part.startswith("transpose") for part in path):
        return f"{operation}, backward"
    return operation
