"""How a run should lie on a pod: candidates by what is expected of them, then a few that differ compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mupax import terminal
from mupax.terminal import gib
from mupax.train.config.run import Config
from mupax.train.core.program import assemble
from mupax.train.parallel.mesh import MeshError
from mupax.train.pods import estimates, topology
from mupax.train.pods.candidates import BATCHES, Candidate, candidate, candidates
from mupax.train.pods.compiled import compile_for
from mupax.train.pods.refusals import RefusedError

ROOM = 0.75
"""Share of a chip's memory that may be expected to be taken: of lm-8b on v5e:8x8 the compiler took 1.1 to 1.4 times as much."""

MOST_ROWS = 1000
"""Configurations of a record that were estimated alone, the best first: there are tens of thousands for hundreds of chips."""


def search(
    config: Config,
    name: str,
    slices: int,
    limit: int,
    batches: Sequence[float] = BATCHES,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> list[dict[str, Any]]:
    """Reports of promising configurations of several kinds, compiled one by one; how it goes is printed.

    Args:
        config: the run; its mesh, batch, remat policy, microbatches, loss and attention blocks are replaced.
        name: topology.
        slices: how many of them.
        limit: programs to compile, one of them the run's own; the others are only estimated.
        batches: that are tried, as multiples of the run's own.
        keep: told the record of what was tried, before the first is compiled and after each.

    Returns:
        Reports of `mupax.train.pods.compiled.Compiled`, those that fit first, fastest first, with the flags that make them.

    Raises:
        MeshError: no mesh of these axes fits the model and batch.
        RefusedError: the compiler refuses all that were tried.
    """
    chip, devices = topology.chip_of(name), topology.devices(name, slices)
    tried = list(candidates(config, chip, devices, slices, batches))
    if not tried:
        raise MeshError(f"no mesh of {len(devices)} chips fits this model and batch; write another --data.batch-size")
    room = [one for one in tried if one.bytes <= ROOM * chip.hbm_bytes]
    # Where nothing is expected to fit, the smallest are tried: the estimate may be wrong.
    chosen = different(sorted(room or tried, key=lambda one: one.pace if room else one.bytes), limit)
    chosen = [candidate(config, chip, devices, slices), *chosen][: max(2, limit)]  # beside the run as it stands
    lowered = assemble(chosen[0].config, devices).trace_train().lower().as_text()
    seconds = len(chosen) * estimates.compile_seconds(len(lowered), estimates.operation_kib(config, chip))
    minutes = max(1, round(seconds / 60))
    terminal.say(
        f"{len(tried)} configurations, {len(room)} expected to fit; compiling {len(chosen)}: about {minutes} min of one core"
    )
    reports, refusals = [], []
    rows = record(tried, chosen, ROOM * chip.hbm_bytes)
    about = {"recipe": config.recipe, "topology": name, "slices": slices, "estimated": len(tried), "rows": rows}
    keep(about)
    for number, one in enumerate(chosen, 1):
        expected = f"(expected {one.seconds:.3g} s, {gib(one.bytes)})"
        terminal.say(f"{number}/{len(chosen)}  {one.words}  {expected}")
        try:
            report = compile_for(one.config, name, slices).report()
        except RefusedError as error:
            terminal.say(f"     {error}")
            refusals.append(error)
            rows[number - 1] |= {"outcome": "refused", "reason": str(error)}
            keep(about)
            continue
        step = report["roofline"] and f", {report['roofline']['step_seconds']:.3g} s"
        terminal.say(f"     {gib(report['peak_bytes_per_device'])}{step or ', does not fit'}")
        # Its own `flags` are the compiler's.
        report["compiler_flags"] = report.get("flags")
        mine = {"flags": one.words, "kinds": one.kinds, "expected_seconds": one.seconds, "topology": name}
        reports.append({**report, **mine, "slices": slices})
        figures = {name: report.get(name) for name in FIGURES}
        rows[number - 1] |= {"outcome": "compiled", **figures}
        keep(about)
    if not reports:
        raise refusals[-1]

    def pace(report: dict[str, Any]) -> float:
        return (report["roofline"] or {}).get("step_seconds", math.inf) / report["batch_size"]

    return sorted(reports, key=lambda report: (not report["fits"], pace(report)))


FIGURES = (
    *(
        "fits",
        "problems",
        "roofline",
        "peak_bytes_per_device",
        "argument_bytes_per_device",
        "temporary_bytes_per_device",
    ),
    *("estimated_cycles", "hbm_traffic_per_device", "compile_seconds"),
)
"""What a record has of a report."""


def record(tried: Sequence[Candidate], chosen: Sequence[Candidate], room: float) -> list[dict[str, Any]]:
    """A row of each candidate, those to be compiled first and in their order, then the `MOST_ROWS` best of the others.

    Args:
        tried: all that were estimated.
        chosen: those that are compiled.
        room: bytes of a chip that may be expected to be taken.
    """
    compiled = {id(one) for one in chosen}
    rest = sorted((one for one in tried if id(one) not in compiled), key=lambda one: (one.bytes > room, one.pace))
    return [
        {
            "flags": one.words,
            "expected_seconds": one.seconds,
            "expected_bytes": one.bytes,
            "expected_to_fit": one.bytes <= room,
            "outcome": "estimated",
        }
        for one in (*chosen, *rest[:MOST_ROWS])
    ]


def different(ranked: list[Candidate], limit: int) -> list[Candidate]:
    """The best candidate, then of each thing it decides the best that decides it otherwise, then the best of what is left.

    Near copies of the best would differ by less than the estimates are wrong; these show in which direction they are.

    Args:
        ranked: candidates, the best first.
        limit: most that are returned.
    """
    best = ranked[0].kinds
    variants = (next((one for one in ranked if one.kinds[name] != best[name]), None) for name in best)
    chosen = {id(one): one for one in (ranked[0], *variants, *ranked) if one is not None}
    return list(chosen.values())[:limit]


def table(reports: list[dict[str, Any]], title: str) -> str:
    """The reports of `search` as text, best first.

    Args:
        reports: of `search`.
        title: line above them.
    """
    rows = [("flags", "fits", "memory", "expected", "step", "alone", "bound", "MFU")]
    for report in reports:
        line = report["roofline"] or {}
        step, alone, bound, mfu = "----"
        if line:
            step, alone = (f"{line[name]:.3g} s" for name in ("step_seconds", "alone"))
            bound, mfu = line["bound"], f"{line['mfu']:.1%}"
        fits, memory = "yes" if report["fits"] else "no", gib(report["peak_bytes_per_device"])
        expected = f"{report['expected_seconds']:.3g} s"
        rows.append((report["flags"], fits, memory, expected, step, alone, bound.replace("_", " "), mfu))
    return f"{title}\n{terminal.table(rows, left=('flags', 'bound'))}"
