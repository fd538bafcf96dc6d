"""The coordinate check: grow one size, measure every size, and hold what is seen against the theory of the preset."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.presets import Preset, PresetError
from mupax.train.config import sizes
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, optimizer
from mupax.train.core.costs import fit
from mupax.train.core.step import StepInputs
from mupax.train.studies.check import groups, observables, theory
from mupax.train.studies.check.judge import ENDS, LAYERS, Finding, judge, passes
from mupax.train.studies.check.theory import STEPS, Expected
from mupax.zoo.definition import Definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.transformer import TransformerConfig, transformer

__all__ = ["Expected", "Finding", "Series", "batch", "grow", "judge", "passes", "smallest", "study"]

_WIDTH, _HEADS, _DEPTH, _POSITIONS, _VOCAB, _EXAMPLES = 64, 4, 2, 16, 64, 8


def smallest(model: ModelConfig, written: Collection[str] = ()) -> TransformerConfig:
    """The model's structure at the check's smallest size: width 64, 4 heads, depth 2, 16 positions.

    Args:
        model: whose structure.
        written: fields of it that keep their sizes.

    Raises:
        ConfigError: not a transformer, or sizes that do not fit together.
    """
    model = transformer(model, "growing one size")
    inputs = {"tokens": {"vocab_size": _VOCAB, "seq_len": _POSITIONS}, "images": {"image_size": 8, "patch_size": 2}}
    small = {"width": _WIDTH, "num_heads": _HEADS, "head_dim": None, "depth": _DEPTH, **inputs[model.task]}
    if model.denoises:
        small |= {"encoder_depth": None, "target_len": None}
    if "distance" in model.sizes():  # so that every row of a relative table is seen
        small |= {"distance_buckets": _POSITIONS // 2, "longest_distance": _POSITIONS}
    small = {name: size for name, size in small.items() if name not in written}
    heads, width = small.get("num_heads", model.num_heads), small.get("width", model.width)
    if "num_kv_heads" not in written and model.num_kv_heads is not None:
        small["num_kv_heads"] = max(1, heads * model.kv_heads // model.num_heads)
    if "mlp_ratio" not in written:
        small["mlp_ratio"] = round(model.mlp_ratio * width) / width
    # A few steps of small models: what takes time is compiling them.
    compute = dataclasses.replace(model.compute, layers="scan")
    return dataclasses.replace(model, compute=compute, centered=False, **small)


def grow(model: ModelConfig, axis: str, count: int, written: Collection[str] = ()) -> list[TransformerConfig]:
    """`count` models from the smallest on, one size doubling.

    Args:
        model: whose structure.
        axis: head_dim, heads, depth (an encoder's too, unless that is written), encoder_depth alone, width (heads and head_dim in
            turn), mlp alone, or kv_heads alone (of 8 query heads).
        count: how many.
        written: fields of the model whose sizes the smallest has too.
    """
    start = smallest(model, written)
    if axis == "kv_heads":
        most = start.num_heads if "num_heads" in written else 2 * _HEADS
        if 2 ** (count - 1) > most:
            raise ConfigError(f"key heads grow from 1 to {most}; write --sizes {most.bit_length()} or fewer")
        return [dataclasses.replace(start, num_heads=most, num_kv_heads=2**k) for k in range(count)]
    if axis not in sizes.AXES:
        raise ConfigError(f"no size is named {axis!r}; write {', '.join(sizes.AXES[:-1])} or {sizes.AXES[-1]}")
    if axis != "width":
        return [sizes.grown(start, axis, sizes.of(start, axis) * 2**k) for k in range(count)]
    wider = [sizes.grown(start, "heads", start.num_heads * 2 ** (k // 2)) for k in range(count)]
    return [sizes.grown(one, "head_dim", one.heads_dim * 2 ** ((k + 1) // 2)) for k, one in enumerate(wider)]


def batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Random inputs with random labels, from a fixed seed: what every size trains on."""
    rng = np.random.default_rng(0)
    outputs, example = model.sizes()[model.output_axis], model.example()["inputs"].shape
    if model.denoises:
        shapes = {name: (_EXAMPLES, *of.shape) for name, of in model.example().items()}
        fields = {name: rng.integers(0, outputs, shape).astype(np.int32) for name, shape in shapes.items()}
        mask = np.arange(example[0]) < rng.integers(1, example[0] + 1, (_EXAMPLES, 1))
        return fields | {"input_mask": mask.astype(np.int32), "weights": np.ones(shapes["weights"], np.float32)}
    if model.task == "images":
        shape = (2 * _EXAMPLES, *example)
        targets = rng.integers(0, outputs, shape[0]).astype(np.int32)
        inputs = rng.standard_normal(shape).astype(np.float32)
    else:
        tokens = rng.integers(0, outputs, (_EXAMPLES, example[0] + 1)).astype(np.int32)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def digest(tree: Any) -> bytes:
    """Hash of a tree of arrays: equal where names, shapes, dtypes and bytes are."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [(np.shape(leaf), np.asarray(leaf).dtype.str, np.asarray(leaf).tobytes()) for leaf in leaves]
    return hashlib.sha256(repr((structure, parts)).encode()).digest()


class Series:
    """A model at growing sizes, ready to be measured under any preset.

    Each size compiles once, whatever the number of steps and seeds, and trains once from a seed under equal numbers.

    Args:
        definitions: the model at growing sizes.
        config: optimizer; its schedule should be constant.
        steps: optimizer steps.
    """

    def __init__(self, definitions: Sequence[Definition], config: OptimizerConfig, steps: int = STEPS[-1]) -> None:
        self.definitions, self.config, self.steps = list(definitions), config, steps
        largest = max(definitions, key=lambda one: one.count())
        # Initial and trained parameters, their gradients, and at least one moment.
        fit.check_arrays([largest.abstract] * 4, "parameters and state of the largest size", "Write fewer --sizes")
        self._programs = [observables.program(d, optimizer.build(config, d.specs)) for d in definitions]
        self._recorded: dict[tuple[int, int, bytes], list[dict[str, np.ndarray]]] = {}

    def numbers(self, preset: Preset) -> list[tuple[factors.Factors, dict[str, np.ndarray]]]:
        """All that a preset sets in the programs: factors and initial stds, a pair per size."""
        name, decay = self.config.name, self.config.decay
        return [(factors.resolve(preset, d, name, decay), factors.init_stds(preset, d)) for d in self.definitions]

    def measure(self, preset: Preset, batch: Mapping[str, np.ndarray], seeds: int = 4) -> dict[str, np.ndarray]:
        """Every observable at every size.

        Args:
            preset: relative to the smallest size.
            batch: one batch that every size takes.
            seeds: initializations per size.

        Returns:
            Observable to float64 [sizes, seeds, steps + 1], over layers; and layer by layer (`LAYERS`) with an axis of layers, last,
            or where sizes differ in depth (`ENDS`) of the one that has the least and the one that has the most.

        Raises:
            PresetError: the sizes show different observables, so no slope can be fitted.
        """
        hyper = optimizer.hyper(self.config, self.steps + 1)
        recorded: list[dict[str, np.ndarray]] = []
        for size, (program, (size_factors, stds)) in enumerate(zip(self._programs, self.numbers(preset), strict=True)):
            numbers = StepInputs(size_factors, hyper), stds, dict(batch)
            # Equal numbers are equal trainings: of presets that are one rule along an axis, of all at the base.
            trained = self._recorded.setdefault((size, self.steps, digest(numbers)), [])
            for seed in range(len(trained), seeds):
                trained.append(program(np.uint32(seed), *numbers, self.steps))
            recorded.append({name: np.stack([one[name] for one in trained[:seeds]]) for name in trained[0]})
        if any(one.keys() != recorded[0].keys() for one in recorded):
            raise PresetError("the models to compare have different parameters; grow sizes only, not structure")
        measured: dict[str, np.ndarray] = {}
        for name in recorded[0]:
            each = [np.asarray(one[name], np.float64) for one in recorded]
            if each[0].ndim > 2 and len({one.shape for one in each}) == 1:
                measured[LAYERS.format(name)] = np.stack(each)
            elif each[0].ndim > 2:
                measured[ENDS.format(name)] = np.stack([np.stack([one.min(-1), one.max(-1)], -1) for one in each])
            if each[0].ndim > 2:
                each = [np.sqrt(np.mean(one**2, axis=-1)) for one in each]
            measured[name] = np.stack(each)
        groups.without_rounding(measured, self.definitions[0].specs)
        return measured


def study(
    definitions: Sequence[Definition],
    preset: Preset,
    config: OptimizerConfig,
    batch: observables.Batch,
    seeds: int = 4,
    accept: Collection[str] = (),
) -> list[Finding]:
    """The whole check of one preset on any model: measure at every size, fit, and hold against theory.

    Args:
        definitions: the model at sizes that grow evenly, from `mupax.zoo.definition.define`.
        preset: relative to the smallest size.
        config: optimizer; its schedule should be constant.
        batch: `inputs`, `targets`, `weights` for every size (see `mupax.train.core.step`).
        seeds: initializations per size.
        accept: trouble that the preset's source wants (`mupax.train.studies.check.theory.of`).
    """
    _, factor = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    ratios = [factor ** (i / (len(definitions) - 1)) for i in range(len(definitions))]
    expected = theory.of(preset, definitions[0], definitions[-1], config.name, accept=accept)
    return judge(Series(definitions, config).measure(preset, batch, seeds), ratios, expected)
