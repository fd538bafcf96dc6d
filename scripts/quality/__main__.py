"""Measure what a tuned preset is worth, and write docs/evidence/quality/ and its page quality.md.

    python -m scripts.quality [CELL ...] [--rates] [--render] [--list]

For every cell the command searches the base's constants and gives them to every arm. It searches an
arm's own constants, if the arm has some, at every size. It trains the resulting settings from
paired seeds, until the difference is known to ± 0.005 nats or the cell's seeds are used up. Rows
are saved as they finish, so the same command continues a cell that was stopped.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro.conf import Positional

from mupax.command_line import Switch
from mupax.train.parallel.processes import StopRequest
from scripts import harness
from scripts.quality import page, rates
from scripts.quality.cells import CELLS, MUP, OUT, RETUNED, Arm, Cell, octaves, reference_of
from scripts.quality.descent import Setting, setting
from scripts.quality.measuring import FINAL, FIRST, Measuring, without_curves
from scripts.quality.page import difference

HALF_WIDTH = 0.005
"""Half-width of a difference's 95 % interval, in nats, that needs no more seeds."""
PROBE = 2
"""Octaves by which a probed rate is raised and lowered."""
PICTURED = "head_dim-800"
"""Cell of the README's picture."""


class Probe(NamedTuple):
    """Gain of moving one group's rate in one direction at four times the base.

    Attributes:
        group: Group of parameters.
        octaves: Octaves by which the group's rate was moved.
        gains: Nats by which the loss fell, for every seed.
    """

    group: str
    octaves: float
    gains: list[float]

    @property
    def gain(self) -> float:
        """Mean gain over seeds, minus infinity if a run diverged."""
        mean = float(np.mean(self.gains))
        return mean if np.isfinite(mean) else -np.inf


def measure(cell: Cell, stop: StopRequest) -> None:
    """Train a cell, and write its result.json after every size of every arm."""
    work = Measuring(cell, stop)
    base = work.searched(cell.arms[0], cell.sizes[0], cell.start, cell.searched)
    study = Study(work, base)
    compared = [arm for arm in cell.arms if not arm.ablation]
    ablations = [arm for arm in cell.arms if arm.ablation]
    # Ablations matter least, so they come after all sizes of the other arms.
    for arms, size in itertools.product((compared, ablations), cell.sizes[1:]):
        for arm in arms:
            study.add_sizes(arm, size)
            if arm.probed and size == cell.probe_size and study.probe(arm):
                # A group joined the search: search the sizes so far again, with the new group.
                del study.settings[arm.label][1:]
                study.add_sizes(arm, size)
            _write(study)


def measure_rates(cell: Cell, stop: StopRequest) -> None:
    """Train the README picture's two arms at the rates around their own, and write rates.json."""
    record = json.loads((cell.folder / "result.json").read_text())
    work = Measuring(cell, stop)
    arms = {arm.label: arm for arm in cell.arms}
    curves = {}
    for label in (MUP, RETUNED):
        curves[label] = rates.measure(work, arms[label], rates.sizes_of(record, label))
    rates.write(cell.folder / "rates.json", cell, curves)


def draw_rates(cell: Cell) -> None:
    """Draw the README's picture from rates.json, if the cell has that file."""
    path = cell.folder / "rates.json"
    if path.exists():
        curves = rates.read(path)
        rates.draw(path.with_suffix(".png"), curves[MUP], curves[RETUNED])


class Study:
    """Settings that the arms of a cell have so far.

    Attributes:
        work: Trainer of the cell's runs.
        base: Setting of the base.
        tuning: Seconds of training that the search of `base` took.
        settings: Label of an arm to its settings, one per size from the base on. An arm with
            `Arm.base_search_like` has none before that arm is probed.
        probes: Label of an arm to the probes of its groups.
    """

    def __init__(self, work: Measuring, base: Setting) -> None:
        self.work = work
        self.base = base
        self.tuning = work.seconds
        self.settings: dict[str, list[Setting]] = {}
        for arm in work.cell.arms:
            self.settings[arm.label] = [] if arm.base_search_like else [base]
        self.probes: dict[str, list[Probe]] = {}
        self._joined: dict[str, tuple[str, ...]] = {}

    def tuned(self, arm: Arm) -> tuple[str, ...]:
        """Return the constants that an arm searches at every size, and those that a probe has added."""
        return arm.tuned + self._joined.get(arm.label, ())

    def add_sizes(self, arm: Arm, last: int) -> None:
        """Add an arm's settings at the sizes that it lacks, up to the size `last`.

        Nothing is added while the groups are unknown that the search at the base needs, or if there
        are none.
        """
        cell = self.work.cell
        settings = self.settings[arm.label]
        if not settings:
            joined = self._joined.get(arm.base_search_like, ())
            if not joined:
                return
            smallest = cell.sizes[0]
            constants = cell.searched + joined
            base_setting = self.work.searched(arm, smallest, self.base, constants, in_turn=True)
            settings.append(base_setting)
        for size in cell.sizes[len(settings) : cell.sizes.index(last) + 1]:
            self._add_size(arm, size)

    def _add_size(self, arm: Arm, size: int) -> None:
        """Add an arm's setting at the next size.

        The setting is searched if the arm is tuned at this size. Otherwise the last setting is kept.
        """
        settings = self.settings[arm.label]
        is_searched = bool(arm.tuned)
        if arm.searches is not None and len(settings) > arm.searches:
            is_searched = False
        if is_searched:
            start = _extrapolated(settings)
            # With the constants that joined, trying all neighbours at every move costs twice as much.
            in_turn = bool(self._joined.get(arm.label))
            constants = self.tuned(arm)
            settings.append(self.work.searched(arm, size, start, constants, in_turn=in_turn))
        else:
            settings.append(settings[-1])

    def probe(self, arm: Arm) -> bool:
        """Move the rate of every group that an arm does not search, and keep the gains.

        Groups that gain more than `page.JOINS` nats join the arm's search.

        Returns:
            Whether a group joined.
        """
        cell = self.work.cell
        size = cell.probe_size
        centre = self.settings[arm.label][cell.sizes.index(size)]
        values = dict(centre)
        probes: list[Probe] = []
        for group in cell.groups():
            constant = f"rates.{group}"
            if constant in arm.tuned:
                continue
            for step in (-PROBE, PROBE):
                moved = setting({**values, constant: values.get(constant, 0) + step})
                previous, after = self.work.losses(arm, size, [centre, moved], FIRST)
                probes.append(Probe(group, step, [float(gain) for gain in previous - after]))
        joined = sorted({f"rates.{probe.group}" for probe in probes if probe.gain > page.JOINS})
        self.probes[arm.label] = probes
        self._joined[arm.label] = tuple(joined)
        print(f"  {cell.name} {arm.label}: joined by {', '.join(joined) or 'no group'}", flush=True)
        return bool(joined)


def _extrapolated(settings: Sequence[Setting]) -> Setting:
    """Return the next size's start of search: the last setting, changed again as it last changed."""
    if len(settings) == 1:
        return settings[0]
    last = dict(settings[-1])
    previous = dict(settings[-2])
    names = last.keys() | previous.keys()
    return setting({name: 2 * last.get(name, 0) - previous.get(name, 0) for name in names})


def _write(study: Study) -> None:
    """Train the seeds that each comparison lacks, and write result.json."""
    work = study.work
    cell = work.cell
    differences: dict[tuple[str, int], np.ndarray | None] = {}
    for arm in cell.arms:
        for size, own_setting in zip(cell.sizes, study.settings[arm.label], strict=False):
            differences[arm.label, size] = _compared(study, arm, size, own_setting)

    # Losses are read after all comparisons, which may have trained more seeds of a reference.
    arms = []
    for arm in cell.arms:
        sizes = []
        for size, own_setting in zip(cell.sizes, study.settings[arm.label], strict=False):
            losses = work.trained(arm, size, own_setting)
            sizes.append(
                {
                    "size": size,
                    "octaves": octaves(dict(own_setting)),
                    "losses": [_rounded(loss, 6) for loss in losses],
                    "reference_minus_this": _rounded_differences(differences[arm.label, size]),
                }
            )
        arms.append(
            {
                "label": arm.label,
                "tuned": list(study.tuned(arm)),
                "ablation": arm.ablation,
                "reference": reference_of(cell, arm).label,
                "sizes": sizes,
            }
        )
    probes = {}
    for label, arm_probes in study.probes.items():
        probes[label] = [_probe_record(probe) for probe in arm_probes]
    record = {
        "cell": cell.name,
        "axis": cell.axis,
        "recipe": f"{cell.recipe} {cell.words}",
        "searched": list(cell.searched),
        "tuning_seconds": round(study.tuning, 1),
        "train_seconds": round(work.seconds, 1),
        "arms": arms,
        "probes": probes,
    }
    (cell.folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")


def _rounded(value: float, digits: int) -> float | None:
    """Return a number to so many significant digits, `None` if it is not finite."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None


def _rounded_differences(differences: np.ndarray | None) -> list[float] | None:
    if differences is None:
        return None
    return [float(f"{value:.4g}") for value in differences]


def _probe_record(probe: Probe) -> dict[str, Any]:
    """Return a probe as JSON has it; a gain is `None` where a run diverged."""
    gains = [_rounded(gain, 4) for gain in probe.gains]
    return {"group": probe.group, "octaves": probe.octaves, "gains": gains}


def _compared(study: Study, arm: Arm, size: int, own_setting: Setting) -> np.ndarray | None:
    """Compare an arm with its reference on as many seeds as the difference needs.

    Returns:
        As `_paired_differences`.
    """
    cell = study.work.cell
    # An arm that is still to be probed may change its setting, so it gets no more seeds yet.
    is_unprobed = arm.probed and arm.label not in study.probes
    max_seeds = FINAL if arm.ablation or is_unprobed else cell.max_seeds
    seeds = FINAL
    differences = _paired_differences(study, arm, size, own_setting, seeds)
    while (
        differences is not None
        and difference(differences).half_width > HALF_WIDTH
        and seeds < max_seeds
    ):
        seeds += 1
        differences = _paired_differences(study, arm, size, own_setting, seeds)
    return differences


def _paired_differences(
    study: Study, arm: Arm, size: int, own_setting: Setting, seeds: int
) -> np.ndarray | None:
    """Return the reference's losses less an arm's [seeds].

    The result is `None` for the reference itself, where a run diverged, and where the reference has
    no setting of this size yet.
    """
    work = study.work
    reference = reference_of(work.cell, arm)
    reference_settings = study.settings[reference.label]
    index = work.cell.sizes.index(size)
    losses = work.losses(arm, size, [own_setting], seeds)[0]
    if arm is reference or index >= len(reference_settings):
        return None
    reference_losses = work.losses(reference, size, [reference_settings[index]], seeds)[0]
    differences = reference_losses - losses
    return differences if np.isfinite(differences).all() else None


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    cells: Positional[tuple[str, ...]] = ()
    """Cells to train; all by default."""
    rates: Switch = False
    """Train the curves of loss against learning rate of the README's picture."""
    render: Switch = False
    """Train nothing: write the page from the results that are there."""
    list: Switch = False
    """Print the cells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 when all cells are done."""
    args = harness.parse(Options, argv)
    harness.check_names(args.cells, CELLS, "cell")
    if args.list:
        for cell in CELLS.values():
            sizes = ", ".join(map(str, cell.sizes))
            run = f"{cell.recipe} {cell.words}"
            print(f"{cell.name}: {cell.axis} {sizes}; {len(cell.arms)} arms; {run}")
        return 0
    if not args.render:
        code = harness.run_study(lambda stop: _train(args, stop))
        if code:
            return code
    draw_rates(CELLS[PICTURED])
    path = OUT.with_suffix(".md")
    path.write_text(page.markdown(page.records()))
    shown = path
    if path.is_relative_to(Path.cwd()):
        shown = path.relative_to(Path.cwd())
    print(f"wrote {shown}")
    return 0


def _train(args: Options, stop: StopRequest) -> None:
    """Train what the flags ask for.

    Raises:
        Stopped: A signal ended the training; finished rows are saved.
    """
    if args.rates:
        measure_rates(CELLS[PICTURED], stop)
        without_curves(CELLS[PICTURED].folder)
        return
    for name in args.cells or CELLS:
        measure(CELLS[name], stop)
        without_curves(CELLS[name].folder)


if __name__ == "__main__":
    raise SystemExit(main())
