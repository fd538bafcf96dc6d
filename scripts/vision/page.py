"""The page docs/vision.md from what `scripts.vision.transforms`, `scripts.vision.larger` and `scripts.vision.finetune` measured.

python -m scripts.vision.page
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts import ROOT
from scripts.quality.page import difference
from scripts.vision import finetune, hands, larger, rows, transforms

OUT = ROOT / "docs" / "vision.md"


def main() -> int:
    """Write the page."""
    OUT.write_text(page(*(rows.read(study.OUT) for study in (transforms, larger, finetune))))
    return 0


def page(
    transformed: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]
) -> str:
    """The page's text.

    Args:
        transformed: rows of `scripts.vision.transforms`.
        sizes: rows of `scripts.vision.larger`.
        tuned: rows of `scripts.vision.finetune`.
    """
    return "\n".join(
        [HEAD, *_transforms(transformed), LARGER, *_larger(sizes), LARGER_TAIL, MIDDLE, *_tuned(tuned), TAIL]
    )


def _apart(values: Mapping[int, float], baseline: Mapping[int, float], scale: float, digits: int) -> str:
    """Mean of paired differences, by seed, with the half-width of its 95 % t interval where there are two seeds."""
    seeds = sorted(values.keys() & baseline.keys())
    apart = [scale * (values[seed] - baseline[seed]) for seed in seeds]
    if not apart:
        return ""
    if len(apart) == 1:
        return f"{apart[0]:+.{digits}f} (one seed)"
    mean, _, half = difference(apart)
    return f"{mean:+.{digits}f} ± {half:.{digits}f}"


def _by(rows: Sequence[Mapping[str, Any]], *keys: str, value: str) -> dict[tuple, dict[int, float]]:
    groups: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row in rows:
        groups[tuple(row[key] for key in keys)][row["seed"]] = row[value]
    return groups


def _transforms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    accuracies = _by(rows, "task", "arm", value="accuracy")
    lines = [f"| accuracy, % | {' | '.join(transforms.TASKS)} |", f"|---|{'---|' * len(transforms.TASKS)}"]
    for arm in transforms.ARMS:
        cells = []
        for task in transforms.TASKS:
            plain, own = accuracies[task, transforms.NONE], accuracies[task, arm]
            mean = f"{100 * np.mean(list(plain.values())):.1f} ({len(plain)} seeds)" if plain else ""
            cells.append(mean if arm == transforms.NONE else _apart(own, plain, 100, 1))
        if any(cells):
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _larger(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    losses, accuracies = (_by(runs, "arm", "model", value=value) for value in ("loss", "accuracy"))
    lines = ["| constants | model | accuracy, % | loss, nats | less that of width 64 |", "|---|---|---|---|---|"]
    for arm, model in itertools.product(larger.ARMS, larger.MODELS):
        if own := losses.get((arm, model)):
            accuracy = 100 * np.mean(list(accuracies[arm, model].values()))
            mean = f"{np.mean(list(own.values())):.3f} ({len(own)} seed{'s' * (len(own) > 1)})"
            base = larger.TUNED if arm == larger.DEEP else arm  # at that depth one model
            apart = "" if model == larger.TINY else _apart(own, losses.get((base, larger.TINY), {}), 1, 3)
            lines.append(f"| {arm} | {model} | {accuracy:.1f} | {mean} | {apart} |")
    return lines


def best(rows: Sequence[Mapping[str, Any]], task: str, arm: str) -> float | None:
    """The rate of an arm with the least mean loss, over seeds that all of its rates have; None for one that has a rule.

    Args:
        rows: of `scripts.vision.finetune`.
        task, arm: their names.
    """
    every = _by(rows, "task", "arm", "rate", value="loss")
    losses = {rate: of for (where, name, rate), of in every.items() if (where, name) == (task, arm)}
    shared = set.intersection(*(set(of) for of in losses.values()))
    return min(losses, key=lambda rate: float(np.mean([losses[rate][seed] for seed in shared])))


def _tuned(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| task | arm | rate | accuracy, % | loss, nats | fine-tuning's loss less this |",
        "|---|---|---|---|---|---|",
    ]
    first = next(iter(finetune.ARMS))
    for task in finetune.NAMES:
        of = [row for row in rows if row["task"] == task]
        ours = _by(of, "arm", value="loss")[first,]
        for arm in (name for name in {**finetune.ARMS, **hands.ARMS} if any(row["arm"] == name for row in of)):
            rate = best(of, task, arm)
            chosen = [row for row in of if (row["arm"], row["rate"]) == (arm, rate)]
            losses = {row["seed"]: row["loss"] for row in chosen}
            accuracy = 100 * np.mean([row["accuracy"] for row in chosen])
            rates = {row["rate"] for row in of if row["arm"] == arm}
            rate_text = "as shipped" if rate is None else f"{rate:g}, the best of {len(rates)}"
            mean = f"{np.mean(list(losses.values())):.3f} ({len(losses)} seeds)"
            apart = "" if arm == first else _apart(ours, losses, 1, 3)
            lines.append(f"| {task} | {arm} | {rate_text} | {accuracy:.1f} | {mean} | {apart} |")
    return lines


HEAD = f"""# What the vision transforms are worth, a larger model, and fine-tuning

`--data.transforms.*`, `--model.drop-path` and `--optimizer.layer-decay` are described in [data.md](data.md). Differences are paired by
seed, with a 95 % t interval; where it holds zero nothing is shown either way.

## With and without each transform

Three tasks, models of width 32 and depth 2, 400 steps of 64 images: scikit-learn's digits (18 epochs), the first
{transforms.FASHION_IMAGES:,} images of Fashion-MNIST (13 epochs), and the endless drawings, where no image comes twice. The first row is the
accuracy on images never trained on without any of them, the others are what each adds to it. Made by `python -m scripts.vision.transforms`.

The models are small and far from fitting their images in so few steps, so what makes images harder costs accuracy:
RandAugment and all of them together on the digits and on clothes, cutmix on clothes. Mixup, label smoothing, drop path and repeats do
nothing that three seeds show. A transform is for long runs that learn their images by heart, which these are not.
"""
LARGER = """
## A larger model of the endless images

`vit-endless`, 2000 steps of 64 images, none twice, scored on 5,000 others, under `mup` with base width 64. As shipped every constant of the
preset is 1. **Tuned** is the preset `mup:vit-endless-v1`: the rate, the rates of patches and readout and the readout's std, searched
together at width 64 and depth 2 (`mupax presets tuned mup:vit-endless-v1`), and given to the larger models as they are. Made by
`python -m scripts.vision.larger`.
"""
LARGER_TAIL = """
As shipped, the model of twice the width and depth ends above the small one. Half and twice the rate do not change that; what reads the
patches and what writes the classes at a faster rate does: at the rate of all they move too slowly for 2000 steps. Tuned at width 64, both
models of two layers end far below what they are as shipped. The one twice as deep does so in one seed of three: `mup` has no rule for depth,
and the tuned rate leaves less room than the shipped one. With branches of L^-1, and nothing else changed, the larger model ends below
the small one in every seed. So train with the preset of all that grows."""
MIDDLE = """
## Fine-tuning, a linear probe, and training from scratch

A ViT of width 32 and depth 2 trained by `vit-fashion --data.augment` on five kinds of clothes for 1,000 steps; then 100 steps on ten images
of each of five classes, scored on 200 others of each. Fine-tuning has the rate that is shipped; the probe (`--train-only readout`) and
training from scratch have the best of several by the scores themselves, which is in their favour. Below zero in the last column
fine-tuning is ahead. Made by `python -m scripts.vision.finetune`.

In the third task the source knows the classes: `vit-digits` without the last three forms, fine-tuned for 100 steps on four digits of each class
of those, turned by 20 degrees, and scored on the other 342 of them. Adapters are `--lora.rank 8` at the rate that is shipped.
"""
TAIL = """
Whether fine-tuning wins depends on what the source knows. Where it knows the classes, it beats training from scratch and the probe at
the best of their rates, and no interval holds zero. Where it has only seen five others of a kind, fine-tuning is not shown to beat
training from scratch: with the shipped rate it comes to where that is at the best of three rates, which nobody knows beforehand, and
its mean is ahead of the probe's; three seeds do not settle that. Tried too, with one seed, and lost: other digits after a source that
knows five (width 64, eight images of each: 0.95 nats, from scratch 0.50), and the digits of other hands in negative (1.27, from scratch
1.18). The sources are small models of a minute's training: they say nothing about sources trained on millions of images.
"""

if __name__ == "__main__":
    sys.exit(main())
