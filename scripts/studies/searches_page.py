"""The section of docs/transfer.md on searches that take less than a full grid, from docs/frugal.json and docs/search_cost.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mupax import disk
from scripts import ROOT
from scripts.pages.markdown import table

FRUGAL = """## Best rates alone, for less

```sh
mupax transfer lm-tiny --grow head_dim=16,32,64 --search frugal --dry-run
```

trains the smallest size as above, and every larger one at three rates an octave apart around where the smaller sizes lead, from one
seed; with the smallest size's curvature the slope between them gives the best rate. A size where that is uncertain has a second seed,
and one that its own noise leaves uncertain is searched in full (`train/studies/transfer/frugal.py`). There is no verdict on transfer.
Replayed on the rows of these studies (`python -m scripts.studies.frugal` of commit `8df49599`; {settings} sizes that have a best rate,
all orders of three seeds; within a quarter octave of the parabola of all rates and three seeds; cost in FLOPs, of those of all these runs):

| search | found | cost |
|---|---|---|
| frugal | {shipped} |
| one seed at all rates | {one} |
| two seeds at all rates | {two} |
| frugal, its three numbers chosen on all studies but the one that it is shown on | {alone} |
| frugal, chosen on the first four studies and shown on the {later_studies} later ones | {later} |

By study: {by_study}.
Chosen are the cheapest numbers that find 96 %. The vision transformer under SGD (depth) is the hard one: its seeds differ so much that
numbers chosen without having seen such noise find fewer of its best rates. Where all sizes
cost the same, as when the batch grows, the smallest's full search weighs more. The form of the method was found on all of these rows.
"""
"""The section that docs/frugal.json fills."""


def document() -> str:
    """The page's section on searches: the frugal one replayed on the studies' rows, and all of them trained beside the full grids."""
    return f"{_replayed()}\n{_trained(disk.read_json(ROOT / 'docs' / 'search_cost.json'))}\n"


def _replayed() -> str:
    """Return the part on the frugal search, from docs/frugal.json."""
    record = disk.read_json(ROOT / "docs" / "frugal.json")

    def cells(each: Sequence[Mapping[str, float]], settings: Sequence[int]) -> str:
        hit, cost = (
            sum(one[name] * n for one, n in zip(each, settings, strict=True)) / sum(settings)
            for name in ("within_a_quarter_octave", "cost")
        )
        return f"{hit:.1%} | {cost:.2f}"

    def held_out(chosen: Sequence[Mapping[str, Any]]) -> str:
        return cells([one["shown_on"] for one in chosen], [one["settings"] for one in chosen])

    whole = [record["shipped"]["all"], record["one_seed_on_the_whole_grid"], record["two_seeds_on_the_whole_grid"]]
    shipped, one, two = (cells([each], [1]) for each in whole)
    by_study = (
        f"{name} {each['within_a_quarter_octave']:.0%} at {each['cost']:.2f}"
        for name, each in record["shipped"]["by_study"].items()
    )
    alone = [one for one in record["held_out"] if len(one["held_out"]) == 1]
    (later,) = (one for one in record["held_out"] if len(one["held_out"]) > 1)
    return FRUGAL.format(
        settings=record["settings"]["all"], shipped=shipped, one=one, two=two, alone=held_out(alone), later=held_out([later]),
        later_studies=len(later["held_out"]), by_study=", ".join(by_study),
    )  # fmt: skip


def _trained(content: Mapping[str, Any]) -> str:
    frugal, tuned = content["frugal"], content["tune"]
    apart = max(abs(row["frugal"] - row["grid"]) for row in frugal["rates"])
    mean, half = tuned["less_grid"]
    rows = [
        ["search", "of the full grid's cost", "where it ends"],
        ["`transfer --search frugal`, three widths", f"{frugal['ratio']:.2f}", f"at most {apart:.2f} octaves from the grid's best rates"],
        [
            f"`tune`, {tuned['constants']} constants", f"{tuned['ratio']:.2f}",
            f"{mean:+.4f} ± {half:.4f} nats from the grid's best point, on {tuned['seeds']} fresh seeds",
        ],
    ]  # fmt: skip
    made_by = f"`{content['command']}` of commit `{content['commit']}`"
    return (
        f"{made_by} trains both searches beside both grids, with three seeds at every point of a grid:\n\n{table(rows)}"
    )
