"""Memory, time and cost of a planned run: on chips by the TPU compiler where there is one, else by the formula in use, which is said."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mupax.terminal import gib
from mupax.train.config import cli
from mupax.train.config.record import command_of, words_of
from mupax.train.config.run import Config
from mupax.train.studies.forecast.points import Points
from mupax.train.studies.plan import ranges
from mupax.zoo import flops

if TYPE_CHECKING:
    from mupax.train.studies.plan.flags import Plan
    from mupax.train.studies.plan.numbers import Line


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run takes.

    Attributes:
        rows: of the plan's table.
        cautions: a sentence each.
        fits: whether the memory is enough, as far as that is known.
    """

    rows: tuple[Line, ...]
    cautions: tuple[str, ...] = ()
    fits: bool = True


def of(config: Config, args: Plan, studies: Sequence[Points]) -> tuple[Config, Cost]:
    """The run with its mesh and remat, and what it takes.

    Args:
        config: of the run.
        args: flags of the command.
        studies: rows whose speed is this machine's.
    """
    return _on_chips(config, args) if args.chips else (config, _here(config, args, studies))


def _on_chips(config: Config, args: Plan) -> tuple[Config, Cost]:
    from mupax.train.pods import topology

    assert args.chips is not None
    chip, count = topology.chip_of(args.chips), _count(args.chips) * args.slices
    where = f"{args.chips}" + (f" x {args.slices} slices" if args.slices > 1 else "")
    try:
        topology.ready()
    except topology.TopologyError as error:
        return config, _formula(config, args, count, chip, where, str(error))
    if args.limit:
        from mupax.train.pods import search

        # The batch stays: rate, steps and loss are of it.
        report: dict[str, Any] = search.search(config, args.chips, args.slices, args.limit, (1,))[0]
        config = _with_flags(config, shlex.split(report["flags"]))
    else:
        from mupax.train.pods.compiled import compile_for

        report = compile_for(config, args.chips, args.slices).report()
    line, peak, room = report["roofline"], report["peak_bytes_per_device"], report["hbm_bytes_per_device"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()) or "one device"
    compiler = f"TPU compiler for {where}"
    rows: list[Line] = [
        ("mesh", f"{mesh} ({count} chips)", "", compiler),
        ("remat", f"{report['compute']['remat']}, {report['accumulation_steps']} microbatches", "", compiler),
        ("memory", f"{gib(peak)} of {gib(room)} a chip", ranges.NONE, compiler),
    ]
    if not report["fits"]:
        return config, Cost(
            tuple(rows), (f"does not fit {where} by {gib(peak - room)}; write more chips or a smaller batch",), False
        )
    step, band = line["step_seconds"], None
    if args.tokens_per_second or args.mfu:
        step, source = _speed(config, args, count * chip.peak_flops)
    else:
        band, upper = ranges.of_roofline(step, line["mfu"])
        source = f"roofline of the compiled step, a bound from below (MFU at most {line['mfu']:.0%}), {upper}"
    return config, Cost((*rows, *_time(config, args, step, source, count, band)))


def _state_bytes(config: Config) -> int:
    """Return the bytes of a run's whole state, from shapes alone: parameters, moments, an average, and the gradients."""
    import jax

    from mupax.train.reuse import runs

    program = runs.on_one_device(config)
    leaves = jax.tree.leaves(program.abstract)
    gradients = [program.abstract.params[name] for name in program.trained]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in [*leaves, *gradients])


def _formula(config: Config, args: Plan, count: int, chip: Any, where: str, why: str) -> Cost:
    """Without the compiler: the state alone, over all chips, and the time at a utilization that is given."""
    state = _state_bytes(config) / count
    rows: list[Line] = [
        (
            "memory",
            f"{gib(int(state))} of {gib(chip.hbm_bytes)} a chip",
            f"at least {gib(int(state))}",
            "formula: state alone, split over all chips",
        )
    ]
    cautions = [f"memory of activations, mesh and remat are not known: {why}"]
    if not (args.mfu or args.tokens_per_second):
        cautions.append("time is not known without the compiler; write --mfu or --tokens-per-second")
        return Cost(tuple(rows), tuple(cautions), state < chip.hbm_bytes)
    step, source = _speed(config, args, count * chip.peak_flops)
    return Cost((*rows, *_time(config, args, step, source, count)), tuple(cautions), state < chip.hbm_bytes)


def _here(config: Config, args: Plan, studies: Sequence[Points]) -> Cost:
    """On the devices of this process."""
    from mupax.train.core.program import assemble
    from mupax.train.parallel.mesh import described
    from mupax.train.pods import estimates

    program = assemble(config)
    expected = sum(estimates.expected(program).values())
    kind = program.mesh.devices.flat[0].device_kind
    memory, most = ranges.memory(expected)
    rows: list[Line] = [
        ("mesh", f"{described(program.mesh.shape)} ({kind})", "", "this machine"),
        ("remat", config.model.compute.remat, "", f"recipe {config.recipe}"),
        (
            "memory",
            f"about {gib(expected)} a device",
            memory,
            f"formula of train/pods/estimates.py, from sizes; {most}",
        ),
    ]
    settings = [setting for points in studies for setting in points.settings if setting.seconds > 0]
    if args.tokens_per_second or args.mfu:
        from mupax.train.parallel import hardware

        peak = hardware.peak_flops(kind, config.model.compute.dtype)
        if args.tokens_per_second is None and peak is None:
            return Cost(
                tuple(rows), (f"time is not known: nothing is known of the peak of {kind}; write --tokens-per-second",)
            )
        return Cost((*rows, *_time(config, args, *_speed(config, args, (peak or 0) * program.mesh.size), 1)))
    if not settings:
        return Cost(
            tuple(rows), ("time is not known: write --tokens-per-second, or a study of this machine behind --from",)
        )
    products = [flops.train_flops(setting.config.model) * setting.tokens for setting in settings]
    speeds = [product / setting.seconds for product, setting in zip(products, settings, strict=True)]
    speed = speeds[products.index(max(products))]
    step = _step_flops(config) / speed
    band, spread = ranges.of_settings(step, speed, speeds)
    source = ", ".join(
        filter(None, [f"{speed:.3g} FLOP/s of the study's largest rows, wherever these were trained", spread])
    )
    return Cost((*rows, *_time(config, args, step, source, 1, band)))


def _speed(config: Config, args: Plan, peak: float) -> tuple[float, str]:
    """Seconds of a step, and where that is from."""
    if args.tokens_per_second:
        seconds = config.data.batch_size * config.model.units / args.tokens_per_second
        return seconds, f"--tokens-per-second {args.tokens_per_second:g}"
    assert args.mfu is not None
    return _step_flops(config) / (peak * args.mfu), f"--mfu {args.mfu:g}"


def _step_flops(config: Config) -> float:
    return flops.train_flops(config.model) * config.data.batch_size * config.model.units


def _time(config: Config, args: Plan, step: float, source: str, count: int, band: ranges.Range = None) -> list[Line]:
    """Time, FLOPs and cost.

    Args:
        config: of the run.
        args: has the price.
        step: seconds of one.
        source: of these.
        count: devices that are paid for.
        band: seconds of a step, lowest and highest.
    """
    seconds = config.steps * step
    unit, name = (3600, "h") if seconds >= 3600 else (60, "min") if seconds > 60 else (1, "s")
    rows: list[Line] = [
        (
            "time",
            f"{seconds / unit:,.1f} {name}, {step:.3g} s a step",
            ranges.text(band, config.steps / unit, f"{{:,.1f}} {name}"),
            source,
        ),
        ("FLOPs", f"{_step_flops(config) * config.steps:.3g}", "", "counted, without recomputation"),
    ]
    if args.price is not None:
        hours = seconds / 3600
        bill = count * args.price
        from_ = f"{count} x {hours:,.2f} h at {args.price:g} an hour"
        rows.append(("cost", f"{hours * bill:,.2f}", ranges.text(band, config.steps / 3600 * bill, "{:,.2f}"), from_))
    return rows


def _with_flags(config: Config, flags: Sequence[str]) -> Config:
    """The run with flags of a mesh, put behind those that make it."""
    argv = words_of(command_of(config))[2:]  # without `train` and the recipe
    return dataclasses.replace(
        cli.parse(config.recipe, cli.recipe(config.recipe), [*argv, *flags]).config, workdir=None
    )


def _count(chips: str) -> int:
    return math.prod(map(int, chips.partition(":")[2].split("x")))
