"""Compile recipes for pods and write their section of docs/howto/launch.md.

    python -m scripts.bench.pods [--only "lm-8b v5e:16x16"] [--json REPORT ...]

Needs the TPU compiler (extra `tpu`) but no TPU. A pod takes minutes of one core. `--only` compiles
one pod and keeps the others of docs/evidence/pods.json. `--json` takes reports that
`mupax compile ... --json` wrote. Every report has the commit of its program, which the page shows.
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
from scripts.pages.markdown import table, write_section

PODS = (
    ("lm-8b", "v5p:4x4x4"),
    ("lm-8b", "v5e:16x16"),
    ("lm-8b", "v6e:16x16"),
    ("lm-30b-a3b", "v5p:4x4x4"),
    ("lm-30b-a3b", "v5e:16x16"),
    ("lm-1b", "v5e:8x8"),
    ("vit-h14", "v5e:4x4"),
    ("lm-8b", "h100:8x8"),
    ("lm-1b", "h100:8"),
    ("gpt2-c4", "h100:2x8"),
    ("gpt2-c4", "h100:8"),
    ("vit-b16-imagenet", "h100:8"),
)
"""Recipes and topologies to compile, in the order of the page."""
COSTS = ((256, 2, 8, "float32"), (512, 4, 8, "bfloat16"))
"""Width, depth, batch size and compute type of the decoders whose preset cost is counted."""
RECORD = ROOT / "docs" / "evidence" / "pods.json"
PAGE = ROOT / "docs" / "howto" / "launch.md"

INTRODUCTION = """## Does it fit a pod?

Compile the run's own step for TPUs (extra `tpu`) or GPUs (extra `cuda`), without having one:

```text
mupax compile lm-8b --topology v5e:16x16
mupax compile lm-1b --topology h100:8
```

`h100:8` means one host with eight GPUs, `h100:2x8` two such hosts. `compile` prints memory,
collectives, the largest temporary arrays and a lower bound on the time of a step. These are results
of `python -m scripts.bench.pods` (full reports: `docs/evidence/pods.json`). No step was run:
"""
COLUMNS = """
- **memory** is what one chip needs, of what the chip has: allocated by the compiler on TPUs,
  estimated on GPUs. JAX uses the share `XLA_PYTHON_CLIENT_MEM_FRACTION` (0.75) of a GPU's memory.
- **expected** is the needed memory by array sizes alone (`train/pods/estimates.py`).
- **cycles** are the compiler's estimate for a TPU's step, without attention kernels.
- **step at least** is the longest of these times: matrix products at the chip's peak, main-memory
  traffic, each network's collectives, and cycles (not on v6e, whose clock is not known). A
  network's collectives that overlap no matrix products are added, unless this network's time is the
  longest. Rows of 41173a6 leave this addition out.
- **program** is the compiled commit. Do not compare rows of different commits.
"""


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Compile only this pod, written as "RECIPE TOPOLOGY"."""
    json: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Take this report of `mupax compile` in place of compiling."""
    preset_cost: Switch = False
    """Count the cost of a preset on TPU again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the chosen pods, write the record and the page, and return the exit code 0."""
    args = harness.parse(Options, argv)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"pods": []}
    reports = {(r["recipe"], r["topology"]): r for r in record["pods"]}
    for path in args.json:
        report = json.loads(path.read_text())
        reports[report["recipe"], report["topology"]] = {**report, "program": commits.head(ROOT)}

    selection: Sequence[tuple[str, ...]] = PODS
    if args.only or args.json or args.preset_cost:
        selection = [tuple(words.split()) for words in args.only]
    for recipe, topology in selection:
        reports[recipe, topology] = compiled(recipe, topology)
    if args.preset_cost or not (args.only or args.json):
        record["preset_cost"] = [preset_cost(*case) for case in COSTS]

    record["pods"] = [reports[pod] for pod in PODS if pod in reports]
    for report in record["pods"]:
        report.setdefault("program", commits.first_committed(report, ROOT))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_section(PAGE, "pods", document(record))
    return 0


def compiled(recipe: str, topology: str) -> dict[str, Any]:
    """Compile a recipe's step for a topology and return its report with the checkout's commit."""
    from mupax.train.pods import topology as topologies

    # Before JAX is imported.
    topologies.ready(topology)
    from mupax.train.config.recipes import RECIPES
    from mupax.train.pods.compiled import compile_for

    report = compile_for(RECIPES[recipe](), topology).report()
    return {"topology": topology, "slices": 1, "program": commits.head(ROOT), **report}


def preset_cost(width: int, depth: int, batch_size: int, dtype: str) -> dict[str, Any]:
    """Compile a decoder's step with and without a preset for one v5e chip; compare the costs.

    Returns:
        The arguments by name, and `ratio`: FLOPs and bytes with the preset over those without, as
        the TPU compiler counts them.
    """
    from mupax.train.pods import topology

    devices = topology.devices("v5e:2x2")[:1]
    from mupax.train.core.program import assemble
    from scripts.bench.step import preset_cost as bench

    preset = "depth-mup"
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
    """Return the section of the page.

    Args:
        record: Content of docs/evidence/pods.json, with the keys `pods` and `preset_cost`.
    """
    pods = record["pods"]
    lines = [INTRODUCTION, _summary(pods), COLUMNS]
    if record.get("preset_cost"):
        lines += _preset_cost(record["preset_cost"])
    return "\n".join(lines).rstrip() + "\n"


def _summary(pods: Sequence[dict[str, Any]]) -> str:
    """Return the table of the pods."""
    head = (
        "recipe",
        "pod",
        "batch",
        "memory, GiB",
        "expected, GiB",
        "cycles",
        "step at least, s",
        "MFU at most",
        "program",
    )
    rows = []
    for r in pods:
        roofline = r["roofline"]
        used = gib(r["peak_bytes_per_device"]).removesuffix(" GiB")
        memory = f"{used} of {gib(r['hbm_bytes_per_device']).removesuffix(' GiB')}"
        expected = gib(sum(r["expected_bytes_per_device"].values()))
        program = "not known"
        if r.get("program"):
            program = f"{r['program']['commit']}, {r['program']['date']}"
        rows.append(
            (
                r["recipe"],
                r["topology"],
                str(r["batch_size"]),
                memory if r["fits"] else f"{memory} (does not fit)",
                expected.removesuffix(" GiB"),
                f"{r['estimated_cycles']:,}" if r.get("platform") != "gpu" else "-",
                f"{roofline['step_seconds']:.2f}",
                f"{roofline['mfu']:.0%}",
                program,
            )
        )
    return table([head, *rows])


def _preset_cost(costs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the page on the cost of a preset."""
    rows: list[Sequence[str]] = [
        ("width", "depth", "batch", "compute", "preset", "FLOPs", "bytes"),
    ]
    for cost in costs:
        rows.append(
            (
                str(cost["width"]),
                str(cost["depth"]),
                str(cost["batch_size"]),
                cost["dtype"],
                cost["preset"],
                f"{cost['ratio']['flops']:.4f}",
                f"{cost['ratio']['bytes']:.4f}",
            )
        )
    return [
        "A preset costs no step time. FLOPs and bytes of the unrolled step with the preset over",
        "those of the same model without factors under `optax.adamw`, as the TPU compiler counts",
        "them for one v5e chip (`python -m scripts.bench.pods --preset-cost`):",
        "",
        table(rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
