"""Compile the recipes made for pods, ahead of time, and write `docs/howto/pods.md` and `docs/evidence/pods.json`.

    python -m scripts.bench.pods [--only "lm-8b v5e:16x16"] [--json REPORT ...]

Needs the TPU compiler (extra `tpu`) but no TPU. Every pod takes minutes of one core; `--only` compiles one and keeps the
others of the committed file, `--json` takes reports that `mupax compile ... --json` wrote. Every report has the commit
of its program, which the page says beside its figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from mupax.command_line import Switch
from mupax.terminal import gib
from scripts import ROOT, harness
from scripts.bench import commits
from scripts.pages.markdown import table

PODS = (
    ("lm-8b", "v5p:4x4x4"),
    ("lm-8b", "v5e:16x16"),
    ("lm-8b", "v6e:16x16"),
    ("lm-30b-a3b", "v5p:4x4x4"),
    ("lm-30b-a3b", "v5e:16x16"),
    ("lm-1b", "v5e:8x8"),
    ("vit-h14", "v5e:4x4"),
)
COSTS = ((256, 2, 8, "float32"), (512, 4, 8, "bfloat16"))
"""Width, depth, batch and compute type of the decoders whose preset is counted."""
RECORD = ROOT / "docs" / "evidence" / "pods.json"
PAGE = ROOT / "docs" / "howto" / "pods.md"

INTRODUCTION = """# Pods

What `mupax compile RECIPE --topology ...` says of the recipes made for pods: the run's own step, compiled by the
TPU compiler for chips that are not here. Nothing on this page was measured on a TPU. Made by `python -m scripts.bench.pods`.

- **Memory** is what the compiler allocates on a chip; **expected** is the sum of `train/pods/estimates.py`, from sizes alone.
- **Step** is the longest of: products at the chip's peak, main memory traffic, collectives by rings over the links of their
  mesh axes, and the compiler's estimated cycles with trip counts where the chip's clock is known. Everything is taken to
  overlap, and attention kernels have no estimated cycles, so it is a bound from below, and **MFU** one from above.
- **Program** is the commit whose step was compiled, and its day: figures of different programs are not to be compared.
"""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Compile only this pod."""
    json: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Take a report from a file."""
    preset_cost: Switch = False
    """Count again what a preset costs on TPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, write both files; returns the exit code 0."""
    args = harness.parse(Options, argv)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"pods": []}
    reports = {(r["recipe"], r["topology"]): r for r in record["pods"]}
    for path in args.json:
        report = json.loads(path.read_text())
        reports[report["recipe"], report["topology"]] = {**report, "program": commits.head(ROOT)}
    selection = [tuple(words.split()) for words in args.only or ()]
    for recipe, topology in selection if args.only or args.json or args.preset_cost else PODS:
        reports[recipe, topology] = compiled(recipe, topology)
    if args.preset_cost or not (args.only or args.json):
        record["preset_cost"] = [preset_cost(*case) for case in COSTS]
    record["pods"] = [reports[pod] for pod in PODS if pod in reports]
    for report in record["pods"]:
        report.setdefault("program", commits.first_committed(report, ROOT))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(document(record))
    return 0


def compiled(recipe: str, topology: str) -> dict[str, Any]:
    """The report of one pod."""
    from mupax.train.pods import topology as topologies

    topologies.ready()
    from mupax.train.config.recipes import RECIPES
    from mupax.train.pods.compiled import compile_for

    report = compile_for(RECIPES[recipe](), topology).report()
    return {"topology": topology, "slices": 1, "program": commits.head(ROOT), **report}


def preset_cost(
    width: int, depth: int, batch_size: int, dtype: str, preset: str = "depth-mup"
) -> dict[str, Any]:
    """FLOPs and bytes of the unrolled step on one v5e chip, with a preset over without, as the compiler counts them."""
    from mupax.train.pods import topology

    devices = topology.devices("v5e:2x2")[:1]
    from mupax.train.core.program import assemble
    from scripts.bench.step import preset_cost as bench

    config = bench.config_of(width, depth, batch_size, preset)
    # Attention as ordinary products: a kernel's FLOPs are not in the compiler's count.
    compute = replace(config.model.compute, dtype=dtype, attention="xla")
    program = assemble(replace(config, model=replace(config.model, compute=compute)), devices)
    about = {
        "width": width,
        "depth": depth,
        "batch_size": batch_size,
        "dtype": dtype,
        "preset": preset,
    }
    return {**about, "ratio": bench.ratios(program)}


def document(record: dict[str, Any]) -> str:
    """The page."""
    pods = record["pods"]
    lines = [INTRODUCTION, _summary(pods)]
    if old := [
        f"{report['recipe']} on {report['topology']}" for report in pods if "flags" not in report
    ]:
        lines += [
            "",
            f"Of earlier programs, without `--vmem-kib` 32768 on v5e and v5p, and with v5p as a mesh without links around: {', '.join(old)}.",
        ]
    if chunked := [
        f"{report['recipe']} on {report['topology']}" for report in pods if "loss" not in report
    ]:
        lines += ["", f"Of these the loss went by chunks of tokens: {', '.join(chunked)}."]
    for report in pods:
        lines += [
            "",
            f"## {report['recipe']} on {report['topology']}",
            "",
            *_memory(report),
            "",
            _collectives(report),
        ]
        lines += ["", _temporaries(report)]
    if cost := record.get("preset_cost"):
        lines += ["", *_preset_cost(cost)]
    return "\n".join(lines).rstrip() + "\n"


def _summary(pods: Sequence[dict[str, Any]]) -> str:
    head = (
        "recipe",
        "pod",
        "parameters",
        "batch",
        "memory",
        "of",
        "expected",
        "FLOPs a step",
        "step",
        "bound by",
        "MFU",
        "program",
    )
    rows = []
    for r in pods:
        line = r["roofline"]
        rows.append((
            r["recipe"], r["topology"], f"{r['parameters'] / 1e9:.2f} B", str(r["batch_size"]),
            gib(r["peak_bytes_per_device"]) + ("" if r["fits"] else " (does not fit)"), gib(r["hbm_bytes_per_device"]),
            gib(sum(r["expected_bytes_per_device"].values())), f"{r['flops_per_step']:.3g}",
            f"≥ {line['step_seconds']:.2f} s", line["bound"].replace("_", " "), f"≤ {line['mfu']:.0%}",
            "{commit}, {date}".format_map(r["program"]) if r.get("program") else "not known",
        ))  # fmt: skip
    return table([head, *rows])


def _memory(report: dict[str, Any]) -> list[str]:
    terms = ", ".join(
        f"{name} {gib(size)}" for name, size in report["expected_bytes_per_device"].items() if size
    )
    cycles = report["estimated_cycles"]
    return [
        f"Mesh {' x '.join(f'{a} {n}' for a, n in report['mesh'].items())}; arguments "
        f"{gib(report['argument_bytes_per_device'])}, temporaries {gib(report['temporary_bytes_per_device'])}, code "
        f"{gib(report['code_bytes_per_device'])} a chip; {gib(report['spare_bytes_per_device'])} to spare. Expected: {terms}: "
        f"the compiler allocates {report['peak_over_expected']:.2f} times their sum. {cycles:,} estimated cycles; "
        f"{report['traced_flops_per_step']:.3g} FLOPs with recomputation.",
    ]


def _collectives(report: dict[str, Any]) -> str:
    head = ("collective", "axes", "in loops of", "executions", "bytes", "sent by a chip")
    rows = [
        (
            row["kind"],
            ", ".join(row["axes"]),
            " x ".join(map(str, row["loop_trips"])) or "-",
            f"{row['executions']:,}",
            gib(row["bytes"]),
            gib(row["wire_bytes"]),
        )
        for row in report["collectives"]
    ]
    return table([head, *rows])


def _temporaries(report: dict[str, Any]) -> str:
    rows = [
        (gib(t["bytes"]), f"`{t['shape']}`", f"`{t['op_name'] or t['name']}`", t["source"])
        for t in report["temporaries"]
    ]
    return table([("temporary at the peak", "shape", "made by", "at"), *rows])


def _preset_cost(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ("width", "depth", "batch", "compute", "preset", "FLOPs", "bytes")
    lines = [
        (
            str(r["width"]), str(r["depth"]), str(r["batch_size"]), r["dtype"], r["preset"],
            f"{r['ratio']['flops']:.4f}", f"{r['ratio']['bytes']:.4f}",
        )
        for r in rows
    ]  # fmt: skip
    return [
        "## What a preset costs",
        "",
        "FLOPs and bytes of the unrolled step with the preset over those of the same model without factors under "
        "`optax.adamw`, as the TPU compiler counts them for one v5e chip (`python -m scripts.bench.pods --preset-cost`).",
        "",
        table([head, *lines]),
    ]


if __name__ == "__main__":
    sys.exit(main())
