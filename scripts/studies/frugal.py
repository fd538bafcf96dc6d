"""Replays the frugal search for best rates on the rows of the committed studies, without training: writes docs/frugal.json.

    python -m scripts.studies.frugal [--quiet]

Every size of every study is a setting, whose reference is the parabola through all its rates and the first three seeds. A study is
replayed for each order of the three seeds. Cost is in training FLOPs, of those of all rates and three seeds. A size that has no best
rate by all its rates and seeds is trained but not judged. The control replays the plain study with one seed in place of three.
The search's numbers are the cheapest that find `ENOUGH` on some studies, and are shown on others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mupax.train.config import record, sizes
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer import frugal
from mupax.train.studies.transfer.fit import STEP, Curve, fit
from mupax.train.studies.transfer.frugal import Frugal
from mupax.train.studies.transfer.study import Point, Study
from mupax.zoo import flops
from scripts import ROOT

OUT = ROOT / "docs" / "frugal.json"
SEEDS = 3
NEAR = 0.25
"""Octaves from the reference that count as found."""
CHOICES = {
    "ONE_SEED": (0.08, 0.1, 0.12, 0.13, 0.14, 0.16, 0.2),
    "TWO_SEEDS": (0.2, 0.3, 0.4),
    "AGREE": (0.12, 0.15, 0.2),
}
"""What is chosen on some studies and shown on the others."""
ENOUGH = 0.96
"""Share of the best rates that a choice must find, a hundredth more than is asked of it where it was not made."""
CHOSEN_ON = ("depth", "depth-adam", "head_dim", "heads")
"""Studies that the search's numbers are chosen on."""
LATER = ("batch", "tokens", "ed-heads", "moe-width", "moe-experts", "moe-experts-sgd", "tied-start")
"""Studies that they are shown on."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A study whose rows are there.

    Attributes:
        name: its folder.
        study: with the configs of its sizes.
        rows: of every point with one of the first seeds, at rates that have all of them.
        cost: FLOPs of a run, per size.
        reference: log2 of the best rate, per size; nan where all rates and seeds have none.
    """

    name: str
    study: Study
    rows: dict[Point, Row]
    cost: tuple[float, ...]
    reference: tuple[float, ...]


def recorded(names: Sequence[str] = CHOSEN_ON) -> Iterator[Recorded]:
    """The committed studies; one whose rows all are another's is left out.

    Args:
        names: of the studies.
    """
    key_sets: list[set[str]] = []
    for file in (ROOT / "docs" / "transfer" / name / "transfer.json" for name in names):
        lines = (file.parent / "points.jsonl").read_text().splitlines()
        rows = {row.key: row for row in map(_row, lines)}
        content = json.loads(file.read_text())
        start = record.from_json(content["config"])
        for study in content["studies"]:
            points_of, configs, reference = dict[Point, Row](), [], []
            for at, size in enumerate(study["sizes"]):
                points = [p for p in size["points"] if p["seed"] < SEEDS]
                of_rate = {x: [p for p in points if p["log2_lr"] == x] for x in {p["log2_lr"] for p in points}}
                whole = {x: sorted(ps, key=lambda p: p["seed"]) for x, ps in of_rate.items() if len(ps) == SEEDS}
                points_of |= {(at, round(x / STEP), p["seed"]): rows[p["key"]] for x, ps in whole.items() for p in ps}
                configs.append(sizes.grown_run(start, study["axis"], size["size"]))
                losses = np.array([[rows[p["key"]].loss for p in whole[x]] for x in sorted(whole)])
                reference.append(fit(Curve(np.array(sorted(whole)), losses, SEEDS), SEEDS).optimum)
            keys = {row.key for row in points_of.values()}
            if keys in key_sets:
                continue
            key_sets.append(keys)
            grown = tuple(size["size"] for size in study["sizes"])
            of = Study(label=study["preset"], axis=study["axis"], sizes=grown, configs=tuple(configs))
            cost = tuple(float(flops.train_flops(c.model) * c.steps * c.data.batch_size) for c in configs)
            yield Recorded(file.parent.name, of, points_of, cost, tuple(reference))


def replay(one: Recorded, order: Sequence[int], seeds: int = SEEDS, *, plain: bool = False) -> dict[str, Any]:
    """The errors (octaves) of every size's best rate that has a reference, and the cost as a share of all rates and three seeds.

    Args:
        one: a study.
        order: of its seeds.
        seeds: at every rate of a size that is searched in full.
        plain: search every size in full.
    """
    grid = tuple(frozenset(int(rate) for i, rate, _ in one.rows if i == at) for at in range(len(one.cost)))
    search = Frugal(one.study, seeds, grid=grid)
    if plain:
        all_points = set(one.rows)
        search.rows = {p: one.rows[p[0], p[1], order[p[2]]] for p in all_points if p[2] < seeds}
        optima = [fit(search.curve(at), seeds).optimum for at in range(len(one.cost))]
    else:
        while points := search.next_points(seeds, math.inf):
            search.rows |= {(at, rate, seed): one.rows[at, rate, order[seed]] for at, rate, seed in points}
        optima = [optimum.value for optimum in search.state()[1]]
    cost = sum(one.cost[at] for at, _, _ in search.rows) / sum(one.cost[at] for at, _, _ in one.rows)
    errors = [
        value - reference for value, reference in zip(optima, one.reference, strict=True) if np.isfinite(reference)
    ]
    return {"errors": errors, "cost": cost, "runs": len(search.rows) / len(one.rows)}


def judged(studies: Sequence[Recorded], *, seeds: int = SEEDS, plain: bool = False) -> dict[str, float]:
    """Share of settings found, and mean cost, over all orders of the seeds.

    Args:
        studies: to replay.
        seeds: as `replay`.
        plain: as `replay`.
    """
    orders = list(itertools.permutations(range(SEEDS)))
    each = [replay(one, order, seeds, plain=plain) for one in studies for order in orders]
    errors = np.array([error for one in each for error in one["errors"]])
    hit = float(np.mean(np.abs(np.nan_to_num(errors, nan=np.inf)) <= NEAR))
    weights = [len(one["errors"]) for one in each]
    costs = {
        name: round(float(np.average([one[name] for one in each], weights=weights)), 4) for name in ("cost", "runs")
    }
    return {"within_a_quarter_octave": round(hit, 4), **costs}


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, choose on some studies and show on the others, and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.studies.frugal", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args(argv)
    studies = {name: list(recorded([name])) for name in (*CHOSEN_ON, *LATER)}
    settings = {name: _settings(each) for name, each in studies.items()}
    shipped = {name: getattr(frugal, name) for name in CHOICES}
    by_choice: list[tuple[dict[str, float], dict[str, dict[str, float]]]] = []
    try:
        for values in itertools.product(*CHOICES.values()):
            choice = dict(zip(CHOICES, values, strict=True))
            _set(choice)
            by_choice.append((choice, {name: judged(each) for name, each in studies.items()}))
    finally:
        _set(shipped)
    held_out = []
    for out in (LATER, *((name,) for name in studies)):
        inside = [name for name in studies if name not in out]
        choice, each = _chosen(by_choice, inside, settings)
        held_out.append({
            "held_out": list(out), "chosen": choice, "chosen_on": _mean(each, inside, settings),
            "shown_on": _mean(each, list(out), settings), "settings": sum(settings[name] for name in out),
        })  # fmt: skip
    on = {"chosen_on": CHOSEN_ON, "later": LATER, "all": tuple(studies)}
    rows = {group: [one for name in names for one in studies[name]] for group, names in on.items()}
    summary = {
        "command": "python -m scripts.studies.frugal",
        "settings": {group: _settings(each) for group, each in rows.items()},
        "orders_of_seeds": math.factorial(SEEDS),
        "shipped": {
            **shipped,
            **{group: judged(each) for group, each in rows.items()},
            "by_study": {name: judged(each) for name, each in studies.items()},
        },
        "one_seed_on_the_whole_grid": judged(rows["all"], seeds=1, plain=True),
        "two_seeds_on_the_whole_grid": judged(rows["all"], seeds=2, plain=True),
        "held_out": held_out,
        "frontier": _frontier([(choice, _mean(each, list(studies), settings)) for choice, each in by_choice]),
    }
    OUT.write_text(json.dumps(summary, indent=1) + "\n")
    if not args.quiet:
        print(json.dumps({name: summary[name] for name in summary if name != "frontier"}, indent=1))
    return 0


def _settings(studies: Sequence[Recorded]) -> int:
    return sum(bool(np.isfinite(reference)) for one in studies for reference in one.reference)


def _set(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(frugal, name, value)


def _row(line: str) -> Row:
    fields = json.loads(line)
    fields.pop("digest", None)
    return Row.from_json(fields)


def _mean(each: dict[str, dict[str, float]], names: Sequence[str], weights: dict[str, int]) -> dict[str, float]:
    own = [weights[name] for name in names]
    return {key: round(float(np.average([each[n][key] for n in names], weights=own)), 4) for key in each[names[0]]}


def _chosen(
    by_choice: Sequence[tuple[dict[str, float], dict[str, dict[str, float]]]],
    names: Sequence[str],
    weights: dict[str, int],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The cheapest choice that finds `ENOUGH` on some studies; the one that finds most where none does."""

    def order(pair: tuple[dict[str, float], dict[str, dict[str, float]]]) -> tuple[bool, float]:
        mean = _mean(pair[1], names, weights)
        enough = mean["within_a_quarter_octave"] >= ENOUGH
        return not enough, mean["cost"] if enough else -mean["within_a_quarter_octave"]

    return min(by_choice, key=order)


def _frontier(choices: Sequence[tuple[dict[str, float], dict[str, float]]]) -> list[dict[str, Any]]:
    """Choices that find more than every cheaper one."""
    best, frontier = 0.0, []
    for choice, scores in sorted(choices, key=lambda pair: pair[1]["cost"]):
        if scores["within_a_quarter_octave"] > best:
            best = scores["within_a_quarter_octave"]
            frontier.append({**choice, **scores})
    return frontier


if __name__ == "__main__":
    raise SystemExit(main())
