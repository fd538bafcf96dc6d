"""Measures what a tuned preset is worth: writes docs/evidence/quality/ and docs/evidence/quality.md.

    python -m scripts.quality [CELL ...] [--rates] [--render] [--list]

A cell searches the base's constants, gives them to every arm, searches an arm's own at every size where it has some, and trains what
they end at from paired seeds until the difference is known to ± 0.005 nats or the seeds end. Rows are kept as they finish: a cell
that was stopped goes on.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tyro.conf import Positional

from mupax.command_line import Switch
from mupax.train.parallel.processes import StopRequest
from mupax.train.studies.sweep.rows import COMPRESSED_NAME, Rows
from mupax.train.studies.sweep.sweep import Stopped
from scripts import harness
from scripts.quality import page, rates
from scripts.quality.cells import CELLS, MUP, OUT, RETUNED, Arm, Cell, octaves, reference_of
from scripts.quality.descent import Setting, setting
from scripts.quality.measuring import FINAL, FIRST, Measuring
from scripts.quality.page import difference

HALF_WIDTH = 0.005
"""Half-width of a difference that needs no more seeds, in nats."""
PROBE = 2
"""Octaves by which a probed rate is raised and lowered."""
PICTURED = "head_dim-800"
"""Cell of the README's picture."""


class Probe(NamedTuple):
    """One group's rate moved to one side at four times the base.

    Attributes:
        group: of parameters.
        octaves: by which its rate was moved.
        gains: nats per seed by which the loss fell.
    """

    group: str
    octaves: float
    gains: list[float]

    @property
    def gain(self) -> float:
        """Mean over seeds, minus infinity where a run diverged."""
        mean = float(np.mean(self.gains))
        return mean if np.isfinite(mean) else -np.inf


def measure(cell: Cell, stop: StopRequest) -> None:
    """Train a cell, and write its result.json after every size of an arm."""
    work = Measuring(cell, stop)
    base = work.searched(cell.arms[0], cell.sizes[0], cell.start, cell.searched)
    study = Study(work, work.seconds, {arm.label: [base] for arm in cell.arms})
    compared = [arm for arm in cell.arms if not arm.ablation]
    ablations = [arm for arm in cell.arms if arm.ablation]  # after all sizes of the others
    for arms, size in itertools.product((compared, ablations), cell.sizes[1:]):
        for arm in arms:
            study.add_size(arm, size)
            if arm.probed and size == cell.probe_size and study.probe(arm):
                # A group joined the search: search the sizes so far again, with it.
                study.settings[arm.label] = [base]
                for smaller in cell.sizes[1 : cell.sizes.index(size) + 1]:
                    study.add_size(arm, smaller)
            _write(study)


def measure_rates(cell: Cell, stop: StopRequest) -> None:
    """Train the two arms of the README's picture at the rates around their own, and write rates.json."""
    record = json.loads((cell.folder / "result.json").read_text())
    work = Measuring(cell, stop)
    arms = {arm.label: arm for arm in cell.arms}
    curves = {
        label: rates.measure(work, arms[label], rates.settings_of(record, label))
        for label in (MUP, RETUNED)
    }
    rates.write(cell.folder / "rates.json", cell, curves)


def draw_rates(cell: Cell) -> None:
    """Draw the README's picture from rates.json, if that is there."""
    path = cell.folder / "rates.json"
    if path.exists():
        curves = rates.read(path)
        rates.draw(path.with_suffix(".png"), curves[MUP], curves[RETUNED])


class Study:
    """Settings that a cell's arms have so far.

    Args:
        tuning: seconds that the search at the base took.
        settings: label of an arm to its setting at every size, the base first.
    """

    def __init__(self, work: Measuring, tuning: float, settings: dict[str, list[Setting]]) -> None:
        self.work = work
        self.tuning = tuning
        self.settings = settings
        self.probes: dict[str, list[Probe]] = {}
        self._joined: dict[str, tuple[str, ...]] = {}

    def tuned(self, arm: Arm) -> tuple[str, ...]:
        """Return the constants that are searched anew for an arm, those that joined by a probe included."""
        return arm.tuned + self._joined.get(arm.label, ())

    def add_size(self, arm: Arm, size: int) -> None:
        """Search an arm's setting at the next size, or repeat the last one if the arm is not tuned there."""
        own = self.settings[arm.label]
        if arm.tuned and (arm.searches is None or len(own) <= arm.searches):
            own.append(self.work.searched(arm, size, _ahead(own), self.tuned(arm)))
        else:
            own.append(own[-1])

    def probe(self, arm: Arm) -> bool:
        """Move the rate of every group that an arm does not search, and return whether one gained enough to join."""
        cell = self.work.cell
        size = cell.probe_size
        centre = self.settings[arm.label][cell.sizes.index(size)]
        probes: list[Probe] = []
        for group in cell.groups():
            constant = f"rates.{group}"
            if constant in arm.tuned:
                continue
            for side in (-PROBE, PROBE):
                moved = setting({**dict(centre), constant: dict(centre).get(constant, 0) + side})
                before, after = self.work.losses(arm, size, [centre, moved], FIRST)
                probes.append(Probe(group, side, [float(gain) for gain in before - after]))
        joined = sorted({f"rates.{probe.group}" for probe in probes if probe.gain > page.JOINS})
        self.probes[arm.label] = probes
        self._joined[arm.label] = tuple(joined)
        print(f"  {cell.name} {arm.label}: joined by {', '.join(joined) or 'no group'}", flush=True)
        return bool(joined)


def without_curves(folder: Path) -> None:
    """Rewrite a cell's rows without their curves, three quarters of the file, which nothing here reads.

    Args:
        folder: of the cell.
    """
    rows = Rows(folder)
    if any(row.curve for row in rows.values()):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            bare = Rows(Path(name))
            for row in rows.values():
                bare.add(replace(row, curve=()))
            bare.path.replace(rows.path)
            (folder / COMPRESSED_NAME).unlink(missing_ok=True)


def _ahead(own: Sequence[Setting]) -> Setting:
    """Where the next size's search begins: as far on as the last one moved."""
    if len(own) == 1:
        return own[0]
    last, before = dict(own[-1]), dict(own[-2])
    return setting(
        {name: 2 * last.get(name, 0) - before.get(name, 0) for name in last.keys() | before.keys()}
    )


def _write(study: Study) -> None:
    """Train what each comparison lacks of its seeds, and write result.json."""
    work = study.work
    settings = study.settings
    cell = work.cell
    arms = []
    for arm in cell.arms:
        sizes = []
        for size, own in zip(cell.sizes, settings[arm.label], strict=False):
            seeds = FINAL
            against = _paired(work, arm, size, own, settings, seeds)
            unprobed = arm.probed and arm.label not in study.probes  # its setting may change
            most = FINAL if arm.ablation or unprobed else cell.most
            while against is not None and difference(against)[2] > HALF_WIDTH and seeds < most:
                seeds += 1
                against = _paired(work, arm, size, own, settings, seeds)
            sizes.append(
                {
                    "size": size,
                    "octaves": octaves(dict(own)),
                    "losses": [],
                    "reference_minus_this": None
                    if against is None
                    else [float(f"{d:.4g}") for d in against],
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
    for arm, one in (
        (arm, one) for arm, row in zip(cell.arms, arms, strict=True) for one in row["sizes"]
    ):
        own = settings[arm.label][cell.sizes.index(one["size"])]
        losses = work.trained(
            arm, one["size"], own
        )  # more of a reference than it had when its own row was made
        one["losses"] = [float(f"{loss:.6g}") if np.isfinite(loss) else None for loss in losses]
    record = {
        "cell": cell.name,
        "axis": cell.axis,
        "recipe": f"{cell.recipe} {cell.words}",
        "searched": list(cell.searched),
        "tuning_seconds": round(study.tuning, 1),
        "train_seconds": round(work.seconds, 1),
        "arms": arms,
        "probes": {
            label: [_probe_record(probe) for probe in probes]
            for label, probes in study.probes.items()
        },
    }
    (cell.folder / "result.json").write_text(json.dumps(record, indent=1) + "\n")


def _probe_record(probe: Probe) -> dict[str, Any]:
    """Return a probe as JSON has it; a gain is None where a run diverged."""
    gains = [float(f"{gain:.4g}") if np.isfinite(gain) else None for gain in probe.gains]
    return {"group": probe.group, "octaves": probe.octaves, "gains": gains}


def _paired(
    work: Measuring,
    arm: Arm,
    size: int,
    own: Setting,
    settings: dict[str, list[Setting]],
    seeds: int,
) -> np.ndarray | None:
    """The reference's losses less an arm's, seed by seed; None where one diverged or the reference has no such size."""
    reference, at = reference_of(work.cell, arm), work.cell.sizes.index(size)
    losses = work.losses(arm, size, [own], seeds)[0]
    if arm is reference or at >= len(settings[reference.label]):
        return None
    theirs = work.losses(reference, size, [settings[reference.label][at]], seeds)[0]
    apart = theirs - losses
    return apart if np.isfinite(apart).all() else None


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    cells: Positional[tuple[str, ...]] = ()
    rates: Switch = False
    render: Switch = False
    """Train nothing: write the page from what is there."""
    list: Switch = False
    """Print the cells."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells that are asked for, all unless named, and write the page; 0 when all are done."""
    args = harness.parse(Options, argv)
    harness.check_names(args.cells, CELLS, "cell")
    if args.list:
        for cell in CELLS.values():
            print(
                f"{cell.name}: {cell.axis} {', '.join(map(str, cell.sizes))}; {len(cell.arms)} arms; {cell.recipe} {cell.words}"
            )
        return 0
    if not args.render:
        with StopRequest() as stop:
            stop.defer()
            try:
                if args.rates:
                    measure_rates(CELLS[PICTURED], stop)
                    without_curves(CELLS[PICTURED].folder)
                else:
                    for name in args.cells or CELLS:
                        measure(CELLS[name], stop)
                        without_curves(CELLS[name].folder)
            except Stopped:
                print("stopped; what was trained is saved, and the same command goes on")
                return stop.exit_code
    draw_rates(CELLS[PICTURED])
    path = OUT.with_suffix(".md")
    path.write_text(page.markdown(page.records()))
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
