"""Definition of what the study trains: its cells and their arms.

A cell is one model that grows along one axis for one number of steps. An arm is one way to set the
constants of every size.
"""

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
"""Folder of the cells' folders."""
STEP = {"lr": 0.5}
"""Octaves of one step of the search, for constants whose step is not `OCTAVE`."""
OCTAVE = 1.0
"""Octaves of one step of the search, for all other constants."""
LM = (
    "--model.width 64 --model.num-heads 4 --model.depth 2 --model.seq-len 64 --data.batch-size 8 "
    "--optimizer.name adam --optimizer.clip-norm None --optimizer.peak-lr 0.015625"
)
"""Flags of the language model at the base."""
VIT = (
    "--model.width 64 --model.num-heads 4 --model.depth 2 --data.batch-size 32 "
    "--optimizer.name adam --optimizer.peak-lr 0.00390625 --optimizer.clip-norm None"
)
"""Flags of the image model at the base."""
SMALL_LM = (
    "--model.width 32 --model.num-heads 2 --model.depth 1 --model.seq-len 32 --data.batch-size 8"
)
"""Flags of the model of the cells under Muon at the base."""
MUON = (
    f"{SMALL_LM} --optimizer.name muon --optimizer.clip-norm None --optimizer.weight-decay 0 "
    "--optimizer.peak-lr 0.03125 --optimizer.adam-lr 0.03125"
)
"""Flags of the language model under Muon at the base."""
SHIPPED = (
    # What `c_a=0.25` of the recipe does, by a constant that `sp` has, too.
    ("multipliers.block.query", 0.25),
    ("rates.readout", 2.48372),
    ("rates.token_embedding", 26.9087),
    ("stds.readout", 4.0),
    ("stds.token_embedding", 0.478802),
)
"""Constants of the recipe `lm-laptop`, which has Muon."""
GAINS = ("norm_gain", "block.norm_gain")
"""Parameter groups of the norms' gains."""

Constants = Callable[[float], Mapping[str, float]]
"""Function from growth (a size over the base's) to constants of the preset, by their names."""


def _no_constants(growth: float) -> Mapping[str, float]:
    """Return no constants at any size."""
    del growth
    return {}


@dataclass(frozen=True)
class Arm:
    """One way to set the constants of every size.

    Attributes:
        label: Name in records and on the page.
        preset: Name of the preset.
        tuned: Constants that are searched again at every size, starting from the size before. An
            arm without any uses the base's setting at every size.
        constants: Constants of the preset at a grown size, in addition to the setting's.
        ablation: Whether the arm is `mup` with one rule of `sp`, to be compared with `mup`.
        searches: Number of sizes after the base at which `tuned` is searched; later sizes use the
            last setting. None searches at all sizes.
        probed: Whether the rates of all other groups are probed at `Cell.probe_size`. Groups that
            gain enough join `tuned`.
        base_search_like: Label of a probed arm that stands before this one. The search at the base
            then has the groups, too, that joined that arm's search.
    """

    label: str
    preset: str = "mup"
    tuned: tuple[str, ...] = ()
    constants: Constants = _no_constants
    ablation: bool = False
    searches: int | None = None
    probed: bool = False
    base_search_like: str = ""


@dataclass(frozen=True)
class Cell:
    """One model that grows along one axis for one number of steps.

    Attributes:
        name: Name of the cell and of its folder.
        recipe: Name of the recipe that `words` change.
        words: Flags of a run, in one string.
        axis: Size that grows.
        sizes: Values of the axis in ascending order; the first is the base.
        searched: Constants that are tuned once, at the base, for every arm.
        arms: Arms of the cell. All others are compared with the first one, except ablations.
        start: Setting (constants with steps of the search) at which the search at the base begins.
        constants: Factors on constants of the preset at every size, in every arm.
        finalists: Number of settings that a search compares on all seeds; see `descend`.
        max_seeds: Largest number of seeds of a comparison.
    """

    name: str
    recipe: str
    words: str
    axis: str
    sizes: tuple[int, ...]
    searched: tuple[str, ...]
    arms: tuple[Arm, ...]
    start: tuple[tuple[str, int], ...] = ()
    constants: tuple[tuple[str, float], ...] = ()
    finalists: int | None = None
    max_seeds: int = 12

    @property
    def folder(self) -> Path:
        """Folder of the cell's rows and result.json."""
        return OUT / self.name

    @property
    def probe_size(self) -> int:
        """Size at which the rates of all other groups are probed: four times the base."""
        return self.sizes[2]

    def groups(self) -> tuple[str, ...]:
        """Return the model's parameter groups that have a learning rate, in alphabetical order."""
        model = self.config(self.arms[0], self.sizes[0], {}, 0).model
        return tuple(sorted({spec.group for spec in model.parameters().values()}))

    def config(self, arm: Arm, size: int, setting: Mapping[str, int], seed: int) -> Config:
        """Return the configuration of one run.

        Args:
            setting: Name of a constant to its distance from the recipe's value, in steps of the
                search. A missing constant keeps the recipe's value.
            seed: Seed of the initialization. All runs see the same batches.
        """
        base_size = self.sizes[0]
        config = cli.parse(self.recipe, cli.recipe(self.recipe), self.words.split()).config

        values = {name: 2.0 ** (STEP.get(name, OCTAVE) * n) for name, n in setting.items()}
        # The two peak rates are no constants of a preset. Only Muon has the second one.
        rates = {"peak_lr": config.optimizer.peak_lr * values.pop("lr", 1.0)}
        if config.optimizer.adam_lr is not None:
            rates["adam_lr"] = config.optimizer.adam_lr * values.pop("adam_lr", 1.0)
        factors = dict(self.constants)
        # At the base all arms are one model, so an arm's constants apply to larger sizes only.
        own_constants = arm.constants(size / base_size) if size > base_size else {}
        for name, value in (*own_constants.items(), *values.items()):
            factors[name] = factors.get(name, 1.0) * value
        overrides = {}
        for name, factor in factors.items():
            is_unchanged = name in values and factor == 1
            if not is_unchanged:
                overrides[name] = factor
        constants = tuple(f"{name}={value:.10g}" for name, value in sorted(overrides.items()))

        preset = PresetConfig(name=arm.preset, constants=constants)
        # A plan needs a second, larger size even for the base.
        sizes = (base_size, max(size, 2 * base_size))
        planned = study.plan(config, self.axis, sizes, preset, arm.label)
        grown = planned.configs[0 if size == base_size else -1]
        return replace(
            grown,
            seed=seed,
            workdir=None,
            data=replace(grown.data, seed=grown.data_seed),
            optimizer=replace(grown.optimizer, **rates),
        )


def _half_readout(growth: float) -> Mapping[str, float]:
    """Return constants with which the readout's std falls as m^-1/2 in the growth m."""
    del growth
    return {"readout_width": -0.5}


def _half_readout_and_embedding(growth: float) -> Mapping[str, float]:
    """Return constants with which the readout's std and the embedding's rate fall as m^-1/2."""
    del growth
    return {"readout_width": -0.5, "embedding_width": -0.5}


def _falling_readout_rate(growth: float) -> Mapping[str, float]:
    """Return the factor with which the readout's rate falls as m^-2, where `mup` has m^-1."""
    return {"rates.readout": 1 / growth}


def _sp_embedding_rate(growth: float) -> Mapping[str, float]:
    """Return the factor that gives `mup` the token embedding's rate of `sp`."""
    return {"rates.token_embedding": 1 / growth}


def _sp_gain_rates(growth: float) -> Mapping[str, float]:
    """Return the factors that give `mup` the rates of `sp` for the gains of norms."""
    return {f"rates.{group}": 1 / growth for group in GAINS}


def _sp_attention_logits(growth: float) -> Mapping[str, float]:
    """Return the constant that gives `mup` the attention logits of `sp`."""
    return {"c_a": growth**0.5}


def _alpha_l_1(growth: float) -> Mapping[str, float]:
    """Return the constant that gives `depth-mup` branches of L^-1."""
    del growth
    return {"alpha_l": 1.0}


MUP = "mup"
SP = "sp, rate and readout's rate tuned anew"
RETUNED = "sp, rate, readout's and embedding's rate tuned anew"
MORE = "more constants at the base"
HALF = Arm("mup-half, readout std m^-1/2", "mup-half", constants=_half_readout)
"""Arm whose attention logits and readout std are those of `sp`."""
ANEW = Arm(
    "mup, readout std m^-1/2, rate and readout's rate tuned anew",
    tuned=("lr", "rates.readout"),
    constants=_half_readout,
)
"""Arm that keeps the rules of `mup` and tunes at every size, to show what tuning once loses."""
TWICE = replace(ANEW, label="mup, readout std m^-1/2, tuned at twice the base", searches=1)
"""Arm that is tuned at the base and at the next size."""
WIDTH_ARMS = (
    Arm(
        "mup, readout std and embedding rate m^-1/2",
        constants=_half_readout_and_embedding,
    ),
    Arm("mup, readout std m^-1/2", constants=_half_readout),
    Arm(MUP),
    HALF,
    ANEW,
    TWICE,
    Arm(SP, "sp", ("lr", "rates.readout")),
    Arm("embedding's rate as sp has it", "mup", ("lr",), _sp_embedding_rate, ablation=True),
    Arm("gains' rates as sp has them", "mup", ("lr",), _sp_gain_rates, ablation=True),
    Arm("readout's std as sp has it", "mup", ("lr",), _half_readout, ablation=True),
    Arm("attention's logits as sp has them", "mup", ("lr",), _sp_attention_logits, ablation=True),
)
"""Arms of cells that grow in head dimension for 100 steps."""
HEADS_ARMS = tuple(arm for arm in WIDTH_ARMS[:-1] if arm is not HALF)
"""Arms of cells that grow in heads; attention logits then scale alike under `mup` and `sp`."""
DEPTH_ARMS = (
    Arm("depth-mup, alpha_L 1", "depth-mup", constants=_alpha_l_1),
    Arm("depth-mup", "depth-mup"),
    Arm(SP, "sp", ("lr", "rates.readout")),
)
"""Arms of cells that grow in depth."""
SEARCHED = ("lr", "rates.readout", "rates.token_embedding", "stds.readout")
"""Constants of language models that are tuned at the base."""
VIT_SEARCHED = ("lr", "rates.readout", "rates.patch_embedding", "stds.readout")
"""Constants of image models that are tuned at the base."""
SHORT = (("lr", -1), ("rates.readout", 3), ("rates.token_embedding", 4), ("stds.readout", -1))
"""Best setting of the language model over 100 steps. The search over 800 steps begins there."""
VIT_SHORT = (("lr", 1), ("rates.patch_embedding", 4), ("rates.readout", 3), ("stds.readout", 1))
"""Best setting of the image model over 100 steps. The search over 800 steps begins there."""
# `embedding_width` changes token embeddings alone, so the first two arms are the same for images.
# The arm keeps both constants, because the rows that were trained so have both.
IMAGE_ARM = replace(WIDTH_ARMS[0], label=WIDTH_ARMS[1].label)
"""First arm of image cells."""


def _retuned(embedding: str) -> Arm:
    """Return `sp` with every constant that matters searched at every size.

    Args:
        embedding: Group of the parameter that reads the inputs.
    """
    searched = ("lr", "rates.readout", f"rates.{embedding}")
    return Arm(RETUNED, "sp", searched, probed=True)


def _with_more_constants(arm: Arm) -> Arm:
    """Return an arm of `mup` that tunes at the base what `RETUNED` tunes at every size."""
    return replace(arm, label=f"{arm.label}, {MORE}", base_search_like=RETUNED)


_SP = next(arm for arm in WIDTH_ARMS if arm.label == SP)
LONG_ARMS = (
    *WIDTH_ARMS[:3],
    _SP,
    _retuned("token_embedding"),
    _with_more_constants(WIDTH_ARMS[0]),
    _with_more_constants(WIDTH_ARMS[2]),
)
"""Arms of language models over 800 steps. They are few, because runs take eight times as long."""
LONG_IMAGE_ARMS = (
    IMAGE_ARM,
    WIDTH_ARMS[2],
    _SP,
    _retuned("patch_embedding"),
    _with_more_constants(WIDTH_ARMS[1]),
    _with_more_constants(WIDTH_ARMS[2]),
)
"""Arms of image models over 800 steps."""
MUON_ARMS = (
    *WIDTH_ARMS[:3],
    Arm("mup, readout's rate m^-2", constants=_falling_readout_rate),
    Arm(
        "sp, both peak rates, readout's and embedding's rate tuned anew",
        "sp",
        ("lr", "adam_lr", "rates.readout", "rates.token_embedding"),
        probed=True,
    ),
)
"""Arms of the language model under Muon."""
HEAD_DIMS = (16, 32, 64, 128)
HEADS = (4, 8, 16, 32)
DEPTHS = (2, 4, 8, 16)
MUON_HEADS = (2, 4, 8, 16)


def _with_steps(words: str, steps: int) -> str:
    """Return a run's flags with its number of steps; a fifth of them warms up, as in transfer."""
    return f"{words} --steps {steps} --optimizer.warmup-steps {steps // 5}"


def _short_lm_cell(axis: str, sizes: tuple[int, ...], arms: tuple[Arm, ...]) -> Cell:
    """Return a cell of the language model over 100 steps."""
    return Cell(
        name=f"{axis}-100",
        recipe="lm-tiny",
        words=_with_steps(LM, 100),
        axis=axis,
        sizes=sizes,
        searched=SEARCHED,
        arms=arms,
    )


def _long_lm_cell(axis: str, sizes: tuple[int, ...], arms: tuple[Arm, ...], max_seeds: int) -> Cell:
    """Return a cell of the language model over 800 steps."""
    return Cell(
        name=f"{axis}-800",
        recipe="lm-tiny",
        words=_with_steps(LM, 800),
        axis=axis,
        sizes=sizes,
        searched=SEARCHED,
        arms=arms,
        start=SHORT,
        finalists=2,
        max_seeds=max_seeds,
    )


def _cells() -> dict[str, Cell]:
    """Return all cells by their names, in the order in which they are trained."""
    cells = (
        _short_lm_cell("head_dim", HEAD_DIMS, WIDTH_ARMS),
        _short_lm_cell("heads", HEADS, HEADS_ARMS),
        _short_lm_cell("depth", DEPTHS, DEPTH_ARMS),
        Cell(
            name="vit-100",
            recipe="vit-endless",
            words=_with_steps(VIT, 100),
            axis="head_dim",
            sizes=HEAD_DIMS,
            searched=VIT_SEARCHED,
            arms=(IMAGE_ARM, *WIDTH_ARMS[2:7]),
        ),
        _long_lm_cell("head_dim", HEAD_DIMS, LONG_ARMS, max_seeds=8),
        _long_lm_cell("heads", HEADS, LONG_ARMS, max_seeds=8),
        # Seeds differ by more in depth than in width.
        _long_lm_cell("depth", DEPTHS, DEPTH_ARMS, max_seeds=12),
        Cell(
            name="vit-800",
            recipe="vit-endless",
            words=_with_steps(VIT, 800),
            axis="head_dim",
            sizes=HEAD_DIMS,
            searched=VIT_SEARCHED,
            arms=LONG_IMAGE_ARMS,
            start=VIT_SHORT,
            finalists=2,
            max_seeds=8,
        ),
        Cell(
            name="muon-100",
            recipe="lm-tiny",
            words=_with_steps(MUON, 100),
            axis="heads",
            sizes=MUON_HEADS,
            searched=("lr", "adam_lr", *SEARCHED[1:]),
            arms=MUON_ARMS,
            start=(("adam_lr", 1), ("rates.token_embedding", 3)),
            finalists=2,
        ),
        Cell(
            name="muon-shipped-100",
            recipe="lm-laptop",
            words=_with_steps(SMALL_LM, 100),
            axis="heads",
            sizes=MUON_HEADS,
            # Nothing is searched at the base.
            searched=(),
            arms=MUON_ARMS,
            constants=SHIPPED,
        ),
    )
    return {cell.name: cell for cell in cells}


CELLS = _cells()
"""Name of a cell to the cell."""


def reference_of(cell: Cell, arm: Arm) -> Arm:
    """Return the arm that `arm` is compared with: `mup` for an ablation, else the first arm.

    Raises:
        LookupError: `arm` is an ablation, and the cell has no arm `mup`.
    """
    if not arm.ablation:
        return cell.arms[0]
    for reference in cell.arms:
        if reference.label == MUP:
            return reference
    labels = ", ".join(option.label for option in cell.arms)
    raise LookupError(f"the ablation {arm.label!r} needs an arm {MUP!r} beside it, not {labels}")


def octaves(setting: Mapping[str, int]) -> dict[str, float]:
    """Return a setting in octaves (log2 of the factors), without constants that are unchanged."""
    return {name: STEP.get(name, OCTAVE) * n for name, n in setting.items() if n}


def rate(config: Config) -> float:
    """Return log2 of a run's peak learning rate."""
    return math.log2(config.optimizer.peak_lr)
