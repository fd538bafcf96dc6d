"""What is compared: a cell is one model growing along one axis at one horizon, an arm one way to set its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mupax.train.config import cli
from mupax.train.config.preset import PresetConfig
from mupax.train.config.run import Config
from mupax.train.studies.transfer import study
from scripts import ROOT

OUT = ROOT / "docs" / "evidence" / "quality"
STEP = {"lr": 0.5}
"""Octaves between neighbours of the search; of every other constant `OCTAVE`."""
OCTAVE = 1.0
LM = (
    "--model.width 64 --model.num-heads 4 --model.depth 2 --model.seq-len 64 --data.batch-size 8 --optimizer.name adam "
    "--optimizer.clip-norm None --optimizer.peak-lr 0.015625"
)
VIT = (
    "--model.width 64 --model.num-heads 4 --model.depth 2 --data.batch-size 32 --optimizer.name adam --optimizer.peak-lr 0.00390625 "
    "--optimizer.clip-norm None"
)
GAINS = ("norm_gain", "block.norm_gain")

Setting = Mapping[str, int]
"""Constant to its value in steps of `STEP` octaves from the recipe's; 0 where it is missing."""
Constants = Callable[[float], Mapping[str, float]]
"""Constants of the preset beside those of a setting, from the grown size over the base's."""


@dataclass(frozen=True)
class Arm:
    """One way to set the numbers of every size.

    Attributes:
        label: for a person.
        preset: its name.
        tuned: constants searched anew at every size, from the size before on; none: the base's setting transfers.
        constants: of the preset, from the grown size over the base's.
        ablation: whether it is `mup` with one rule as `sp` has it, held against `mup` alone.
        searches: sizes after the base at which `tuned` is searched, later ones take the last's setting; all unless given.
        probed: whether the rates of all other groups are probed at four times the base; those that gain join `tuned`.
    """

    label: str
    preset: str = "mup"
    tuned: tuple[str, ...] = ()
    constants: Constants = lambda m: {}
    ablation: bool = False
    searches: int | None = None
    probed: bool = False


@dataclass(frozen=True)
class Cell:
    """One model, one axis, one horizon.

    Attributes:
        name: of its folder.
        recipe: that is changed by `words`.
        words: flags of a run.
        axis: what grows.
        sizes: of it; the first is the base.
        searched: constants that are tuned at the base, once, for every arm.
        arms: the first is the one that every other is held against, but ablations.
        start: where the search at the base begins.
        finalists: of a search (`descend`).
        most: seeds of a comparison, at most.
    """

    name: str
    recipe: str
    words: str
    axis: str
    sizes: tuple[int, ...]
    searched: tuple[str, ...]
    arms: tuple[Arm, ...]
    start: tuple[tuple[str, int], ...] = ()
    finalists: int | None = None
    most: int = 12

    @property
    def folder(self) -> Path:
        """Where its rows are."""
        return OUT / self.name

    @property
    def probe_size(self) -> int:
        """Size at which the rates of all other groups are probed: four times the base."""
        return self.sizes[2]

    def groups(self) -> tuple[str, ...]:
        """Groups of the model's parameters that have a learning rate, in alphabetical order."""
        model = self.config(self.arms[0], self.sizes[0], {}, 0).model
        return tuple(sorted({spec.group for spec in model.parameters().values()}))

    def config(self, arm: Arm, size: int, setting: Setting, seed: int) -> Config:
        """The run of one point.

        Args:
            arm: whose rules.
            size: of the axis.
            setting: the constants.
            seed: of the initialization; all points see the same batches.
        """
        config = cli.parse(self.recipe, cli.recipe(self.recipe), self.words.split()).config
        values = {name: 2.0 ** (STEP.get(name, OCTAVE) * n) for name, n in setting.items()}
        factors = (
            dict(arm.constants(size / self.sizes[0])) if size > self.sizes[0] else {}
        )  # a rule is none at the base
        rate = config.optimizer.peak_lr * values.pop("lr", 1.0)
        for name, value in values.items():
            factors[name] = factors.get(name, 1.0) * value
        overrides = {
            name: value for name, value in factors.items() if value != 1 or name not in values
        }
        constants = tuple(f"{name}={value:.10g}" for name, value in sorted(overrides.items()))
        preset = PresetConfig(name=arm.preset, constants=constants)
        planned = study.plan(
            config, self.axis, (self.sizes[0], max(size, 2 * self.sizes[0])), preset, arm.label
        )
        grown = planned.configs[0 if size == self.sizes[0] else -1]
        return replace(
            grown,
            seed=seed,
            workdir=None,
            data=replace(grown.data, seed=grown.data_seed),
            optimizer=replace(grown.optimizer, peak_lr=rate),
        )


def _each(groups: tuple[str, ...], value: Callable[[float], float]) -> Constants:
    return lambda m: {f"rates.{group}": value(m) for group in groups}


MUP = "mup"
SP = "sp, rate and readout's rate tuned anew"
RETUNED = "sp, rate, readout's and embedding's rate tuned anew"
HALF = Arm("mup-half, readout std m^-1/2", "mup-half", constants=lambda m: {"readout_width": -0.5})
"""Attention's logits as `sp` has them, too."""
ANEW = Arm(
    "mup, readout std m^-1/2, rate and readout's rate tuned anew",
    tuned=("lr", "rates.readout"),
    constants=lambda m: {"readout_width": -0.5},
)
"""What is lost by tuning at the base alone, apart from what the rules lose."""
TWICE = replace(ANEW, label="mup, readout std m^-1/2, tuned at twice the base", searches=1)
WIDTH_ARMS = (
    Arm(
        "mup, readout std and embedding rate m^-1/2",
        constants=lambda m: {"readout_width": -0.5, "embedding_width": -0.5},
    ),
    Arm("mup, readout std m^-1/2", constants=lambda m: {"readout_width": -0.5}),
    Arm(MUP),
    HALF,
    ANEW,
    TWICE,
    Arm(SP, "sp", ("lr", "rates.readout")),
    Arm(
        "embedding's rate as sp has it",
        "mup",
        ("lr",),
        _each(("token_embedding",), lambda m: 1 / m),
        ablation=True,
    ),
    Arm(
        "gains' rates as sp has them", "mup", ("lr",), _each(GAINS, lambda m: 1 / m), ablation=True
    ),
    Arm(
        "readout's std as sp has it",
        "mup",
        ("lr",),
        lambda m: {"readout_width": -0.5},
        ablation=True,
    ),
    Arm(
        "attention's logits as sp has them",
        "mup",
        ("lr",),
        lambda m: {"c_a": m**0.5},
        ablation=True,
    ),
)
HEADS_ARMS = tuple(arm for arm in WIDTH_ARMS[:-1] if arm is not HALF)
"""As many heads more, logits scale alike under both."""
DEPTH_ARMS = (
    Arm("depth-mup, alpha_L 1", "depth-mup", constants=lambda m: {"alpha_l": 1.0}),
    Arm("depth-mup", "depth-mup"),
    Arm(SP, "sp", ("lr", "rates.readout")),
)
SEARCHED = ("lr", "rates.readout", "rates.token_embedding", "stds.readout")
VIT_SEARCHED = ("lr", "rates.readout", "rates.patch_embedding", "stds.readout")
SHORT = (("lr", -1), ("rates.readout", 3), ("rates.token_embedding", 4), ("stds.readout", -1))
"""Where 100 steps of the language model end at the base, and the search of 800 begins."""
VIT_SHORT = (("lr", 1), ("rates.patch_embedding", 4), ("rates.readout", 3), ("stds.readout", 1))
IMAGE_ARM = replace(WIDTH_ARMS[0], label=WIDTH_ARMS[1].label)
"""First arm of image cells. `embedding_width` changes token embeddings alone, so with images both arms are one; rows have both constants."""


def _retuned(embedding: str) -> Arm:
    """Return `sp` with every constant that matters searched anew.

    Args:
        embedding: group of the parameter that reads the inputs.
    """
    searched = ("lr", "rates.readout", f"rates.{embedding}")
    return Arm(RETUNED, "sp", searched, probed=True)


_SP = next(arm for arm in WIDTH_ARMS if arm.label == SP)
LONG_ARMS = (*WIDTH_ARMS[:3], _SP, _retuned("token_embedding"))
"""Of runs that take eight times as long: what is asked, and what a readout that starts as 1/m does."""
LONG_IMAGE_ARMS = (IMAGE_ARM, WIDTH_ARMS[2], _SP, _retuned("patch_embedding"))
WIDE, MORE, DEEP = (16, 32, 64, 128), (4, 8, 16, 32), (2, 4, 8, 16)


def _horizon(words: str, steps: int) -> str:
    """The run at so many steps: a fifth of it warms up, as in the transfer studies."""
    return f"{words} --steps {steps} --optimizer.warmup-steps {steps // 5}"


def _cells() -> dict[str, Cell]:
    cells: list[Cell] = []
    for axis, sizes, arms in (
        ("head_dim", WIDE, WIDTH_ARMS),
        ("heads", MORE, HEADS_ARMS),
        ("depth", DEEP, DEPTH_ARMS),
    ):
        cells.append(Cell(f"{axis}-100", "lm-tiny", _horizon(LM, 100), axis, sizes, SEARCHED, arms))
    short = (IMAGE_ARM, *WIDTH_ARMS[2:7])
    cells.append(
        Cell("vit-100", "vit-endless", _horizon(VIT, 100), "head_dim", WIDE, VIT_SEARCHED, short)
    )
    long = (
        ("head_dim", WIDE, LONG_ARMS, 8),
        ("heads", MORE, LONG_ARMS, 8),
        ("depth", DEEP, DEPTH_ARMS, 12),
    )
    for axis, sizes, arms, most in long:  # in depth seeds differ by more
        run = _horizon(LM, 800)
        cells.append(
            Cell(
                f"{axis}-800",
                "lm-tiny",
                run,
                axis,
                sizes,
                SEARCHED,
                arms,
                SHORT,
                finalists=2,
                most=most,
            )
        )
    images = _horizon(VIT, 800)
    cells.append(
        Cell(
            "vit-800",
            "vit-endless",
            images,
            "head_dim",
            WIDE,
            VIT_SEARCHED,
            LONG_IMAGE_ARMS,
            VIT_SHORT,
            finalists=2,
            most=8,
        )
    )
    return {cell.name: cell for cell in cells}


CELLS = _cells()


def reference_of(cell: Cell, arm: Arm) -> Arm:
    """What an arm is held against: `mup` where it restores one of its rules, else the cell's first arm."""
    return next(one for one in cell.arms if one.label == MUP) if arm.ablation else cell.arms[0]


def octaves(setting: Setting) -> dict[str, float]:
    """The setting as log2 of its factors; what is not searched is left out."""
    return {name: STEP.get(name, OCTAVE) * n for name, n in setting.items() if n}


def rate(config: Config) -> float:
    """log2 of a point's peak learning rate."""
    return math.log2(config.optimizer.peak_lr)
