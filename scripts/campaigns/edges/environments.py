"""Trials of runs that are resumed under another environment: flags, options, devices, versions.

A tiny run of which only the first checkpoint is left is resumed, in a forked process (`tiny_runs`),
under one change. A change that can change bits must be reported by a line `NAME: old -> new`, and
`--resume-exact` must refuse it and leave the folder as it was. If no line says that bits can
differ, the rows and the last checkpoint must be bitwise those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.campaigns import tiny_runs
from scripts.campaigns.edges import trial
from scripts.campaigns.edges.trial import BOUND_S, Ended, Outcome, Trial
from scripts.campaigns.injection.calls import Action, option, variable
from scripts.campaigns.tiny_runs import Session

STEPS = 8
"""Steps of a run."""
EVERY = 4
"""Steps between checkpoints."""

Edit = Callable[[dict[str, Any]], object]
"""Function that changes the record of a run (config.json) in place."""


@dataclass(frozen=True, kw_only=True)
class Case(tiny_runs.Case):
    """A decoder that trains on a text that all trials share.

    Attributes:
        shared: Folder with the text.
        more: Further flags.
    """

    shared: Path = Path()
    model: str = "decoder"
    processes: int = 1
    more: tuple[str, ...] = ()

    def argv(self, folder: Path, workdir: str, steps: int) -> list[str]:
        words = " ".join(super().argv(folder, workdir, steps))
        words = words.replace("every-steps 20", f"every-steps {EVERY}")
        words = words.replace(f"text:{folder / 'text.txt'}", f"text:{self.shared / 'text.txt'}")
        return [*words.split(), "--log.no-tensorboard", *self.more]


@dataclass(frozen=True)
class Change:
    """Change of the environment when a run is resumed.

    Attributes:
        name: Name of the trial.
        group: Group of the trial.
        told: Beginning of the line that must report the change. If empty, the change has no effect:
            no line may report one, and the result must stay bitwise equal.
        sick: Function that changes the environment. The resumed process calls it before mupax
            starts.
        edit: Function that changes config.json, as if the run had begun in another environment.
        more: Further flags of the resumed run.
        bits: True if the line must say that bits can differ.
        processes: Number of processes of the resumed run. The run begins with one.
    """

    name: str
    group: str
    told: str = ""
    sick: Action = int
    edit: Edit | None = None
    more: tuple[str, ...] = ()
    bits: bool = True
    processes: int = 1


def recorded(group: str, name: str, value: Any) -> Edit:
    """Return a function for `Change.edit` that sets one fact on the environment in config.json.

    Args:
        group: `versions`, or a key of config.json's `environment`, such as `devices`.
        name: Key of the fact in the group.
    """

    def edit(record: dict[str, Any]) -> None:
        owner = record if group == "versions" else record["environment"]
        owner[group][name] = value

    return edit


def one_core() -> None:
    """Restrict this process to one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


_AVX2 = "--xla_cpu_max_isa=AVX2"
_FSDP = ("--mesh.data", "1", "--mesh.fsdp", "4")
_OLD = ["avx_of_old"]
_DEVICES = "--xla_force_host_platform_device_count"
CHANGES = (
    Change("nothing changes", "same"),
    Change(
        "a folder of dumps", "same", sick=variable("XLA_FLAGS", "--xla_dump_to=/tmp/processes-dump")
    ),
    Change("compilations are logged", "same", sick=option("jax_log_compiles", True)),
    Change("tracebacks are not filtered", "same", sick=option("jax_traceback_filtering", "off")),
    Change("no cache of programs", "same", sick=option("jax_enable_compilation_cache", False)),
    Change(
        "time limit of collectives",
        "same",
        sick=variable("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=99"),
    ),
    Change(
        "other python",
        "version",
        "python: 3.9.1 -> ",
        edit=recorded("versions", "python", "3.9.1"),
        bits=False,
    ),
    Change(
        "other orbax",
        "version",
        "orbax-checkpoint: 0.1 -> ",
        edit=recorded("versions", "orbax-checkpoint", "0.1"),
        bits=False,
    ),
    Change("other jax", "version", "jax: 0.1 -> ", edit=recorded("versions", "jax", "0.1")),
    Change(
        "other jaxlib", "version", "jaxlib: 0.1 -> ", edit=recorded("versions", "jaxlib", "0.1")
    ),
    Change("other flax", "version", "flax: 0.1 -> ", edit=recorded("versions", "flax", "0.1")),
    Change(
        "other code of mupax",
        "version",
        "mupax's code: beef -> ",
        edit=lambda record: record["environment"].update(code="beef"),
    ),
    Change(
        "AVX2 at most", "XLA_FLAGS", f"XLA_FLAGS: none -> {_AVX2}", variable("XLA_FLAGS", _AVX2)
    ),
    Change(
        "SSE4.2 at most",
        "XLA_FLAGS",
        "XLA_FLAGS: none -> --xla_cpu_max_isa=SSE4_2",
        variable("XLA_FLAGS", "--xla_cpu_max_isa=SSE4_2"),
    ),
    Change(
        "fast math",
        "XLA_FLAGS",
        "XLA_FLAGS: none -> ",
        variable("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    ),
    Change(
        "no optimization",
        "XLA_FLAGS",
        "XLA_FLAGS: none -> ",
        variable("XLA_FLAGS", "--xla_backend_optimization_level=0"),
    ),
    Change(
        "fewer flags than before",
        "XLA_FLAGS",
        f"XLA_FLAGS: {_AVX2} -> none",
        edit=recorded("variables", "XLA_FLAGS", _AVX2),
    ),
    Change("64 bits", "option", "jax_enable_x64: False -> True", option("jax_enable_x64", True)),
    Change(
        "other random numbers",
        "option",
        "jax_default_prng_impl: threefry2x32 -> rbg",
        option("jax_default_prng_impl", "rbg"),
    ),
    Change(
        "not partitionable",
        "option",
        "jax_threefry_partitionable: True -> False",
        option("jax_threefry_partitionable", False),
    ),
    Change(
        "coarse products",
        "option",
        "jax_default_matmul_precision: None -> bfloat16",
        option("jax_default_matmul_precision", "bfloat16"),
    ),
    Change(
        "fewer optimizations",
        "option",
        "jax_disable_most_optimizations: False -> True",
        option("jax_disable_most_optimizations", True),
    ),
    Change(
        "other layout of seeds",
        "option",
        "jax_random_seed_offset: 0 -> 3",
        option("jax_random_seed_offset", 3),
    ),
    Change("two devices", "devices", "devices: 1 -> 2", variable("XLA_FLAGS", f"{_DEVICES}=2")),
    Change(
        "four devices, split",
        "devices",
        "mesh: one device -> fsdp=4",
        variable("XLA_FLAGS", f"{_DEVICES}=4"),
        more=_FSDP,
    ),
    Change("two processes", "devices", "processes: 1 -> 2", processes=2),
    Change(
        "other kind of device",
        "devices",
        "device kind: TPU v4 -> cpu",
        edit=recorded("devices", "device kind", "TPU v4"),
    ),
    Change("one core", "processor", "processor's cores: ", one_core),
    Change(
        "other instructions",
        "processor",
        "processor's instructions: avx_of_old -> ",
        edit=recorded("processor", "instructions", _OLD),
    ),
    Change(
        "other model",
        "processor",
        "processor's model: Another -> ",
        edit=recorded("processor", "model", "Another"),
    ),
    Change(
        "nothing recorded",
        "older run",
        "the run has no record of its environment",
        edit=lambda record: record.pop("environment"),
    ),
    Change(
        "microbatches",
        "config",
        "changed since: accumulation_steps 2 -> 4",
        more=("--accumulation-steps", "4"),
    ),
)
_RECORD = "config.json"


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return two trials of each change: a plain resume, and one with `--resume-exact`."""
    named = []
    for change in CHANGES:
        resume = partial(goes_on, change=change, shared=shared)
        resume_exactly = partial(exactly, change=change, shared=shared)
        named.append(Trial(change.name, change.group, resume))
        named.append(Trial(f"{change.name}, exactly", change.group, resume_exactly))
    return named


def control(shared: Path) -> dict[str, Any]:
    """Return the result of the uninterrupted run. The first trial trains it."""
    if not (shared / "text.txt").exists():
        tiny_runs.prepare_forks(shared)
    return tiny_runs.undisturbed(Case(shared=shared), shared, STEPS, "control", 8 * BOUND_S)


def begun(folder: Path, change: Change, shared: Path) -> Path:
    """Copy the uninterrupted run as it was at its first checkpoint, and apply `change.edit`.

    Returns:
        Workdir of the copy.
    """
    control(shared)
    workdir = folder / "run"
    shutil.copytree(shared / "control", workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    rows = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    # The steps up to the first checkpoint have one row each.
    (workdir / "metrics.jsonl").write_text("".join(rows[:EVERY]))
    if change.edit is not None:
        record = json.loads((workdir / _RECORD).read_text())
        change.edit(record)
        (workdir / _RECORD).write_text(json.dumps(record))
    return workdir


def ended(folder: Path, shared: Path, change: Change, more: Sequence[str]) -> list[Ended]:
    """Resume the run in `folder/run` under a change, and return the end of each process."""
    case = Case(shared=shared, processes=change.processes, more=(*change.more, *more))
    # All processes change, because they refuse one that differs from the others.
    sick = dict.fromkeys(range(change.processes), change.sick)
    session = Session(case, folder, "run", STEPS, sick, log="again")
    codes = session.wait(4 * BOUND_S)
    return [Ended(code, session.output(index), 0.0) for index, code in enumerate(codes)]


def lines_of(output: str) -> list[str]:
    """Return the lines of an output that report a change of the environment."""
    pattern = re.compile(r"bits (can differ|stay the same)|no record of its env")
    return [line for line in output.splitlines() if pattern.search(line)]


def goes_on(folder: Path, change: Change, shared: Path) -> Outcome:
    """Resume a run under a change, and judge its end.

    If the result is not bitwise equal, a line must say that bits can differ. A line must report the
    change exactly if `change.told` is set.
    """
    workdir = begun(folder, change, shared)
    processes = ended(folder, shared, change, ())
    for process in processes:
        outcome = trial.judge(process, [0])
        if outcome.verdict != "ok":
            return outcome
    output = processes[0].output
    is_same = not tiny_runs.differences(tiny_runs.run_result(workdir, STEPS), control(shared))
    bits = "the right bits" if is_same else "other bits"
    lines = lines_of(output)
    if change.told and change.told not in output:
        return Outcome("silent", f"{bits}, and no line {change.told!r}; told: {lines}")
    if not change.told and lines:
        return Outcome("wrong", f"told without a reason: {lines}")

    can_differ = any("can differ" in line for line in lines)
    # The lines of these groups imply that bits can differ.
    can_differ = can_differ or change.group in ("older run", "config")
    if not is_same and not can_differ:
        detail = f"other bits, though no line says that they can differ; told: {lines}"
        return Outcome("silent", detail)
    if change.told and change.bits != can_differ:
        return Outcome("wrong", f"says the wrong effect: {lines}")
    return Outcome("ok", f"{bits}; told: {lines[0] if lines else 'nothing'}")


def exactly(folder: Path, change: Change, shared: Path) -> Outcome:
    """Resume a run under a change with `--resume-exact`.

    A change that can change bits must be refused, and the folder must stay as it was. Otherwise the
    run must go on with the same bits.
    """
    workdir = begun(folder, change, shared)
    record = (workdir / _RECORD).read_bytes()
    is_refused = bool(change.told) and change.bits
    outcome = Outcome("ok")
    for process in ended(folder, shared, change, ("--resume-exact",)):
        outcome = trial.judge(process, [2 if is_refused else 0])
        if outcome.verdict != "ok":
            return outcome
    if is_refused:
        if (workdir / _RECORD).read_bytes() != record or tiny_runs.latest_step(workdir) != EVERY:
            return Outcome("lost", "refused, but the folder is not as it was")
        return Outcome("ok", outcome.detail)
    names = tiny_runs.differences(tiny_runs.run_result(workdir, STEPS), control(shared))
    if names:
        return Outcome("silent", f"other bits: {names[:3]}")
    return Outcome("ok", "went on, the right bits")
