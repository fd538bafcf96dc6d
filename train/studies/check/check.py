"""The coordinate check: grow one size, measure every size, and hold what is seen against the theory of the preset."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mupax.presets import Preset, PresetError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config import sizes
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, optimizer
from mupax.train.core.costs import fit
from mupax.train.core.factors import hyperparams
from mupax.train.core.step import StepInputs
from mupax.train.studies.check import groups, observables, theory
from mupax.train.studies.check.judge import ENDS, LAYERS, Finding, judge, passes
from mupax.train.studies.check.report import require, text
from mupax.train.studies.check.theory import STEPS, Expected
from mupax.zoo.definition import Definition
from mupax.zoo.families import ConfigError, ModelConfig
from mupax.zoo.transformer import TransformerConfig, transformer

__all__ = [
    "Expected",
    "Finding",
    "Series",
    "batch",
    "grow",
    "judge",
    "passes",
    "require",
    "smallest",
    "study",
    "text",
    "tokens",
]

_WIDTH, _HEADS, _DEPTH, _POSITIONS, _VOCAB, _EXAMPLES = 64, 4, 2, 16, 64, 8
_LONGEST = 512
_LARGEST_VOCAB = 2**15
"""Context and vocabulary above which `own_inputs` makes them smaller."""
_LOGITS = 2**22
"""Logits of a batch above which it makes the context smaller: at width 512 their products take half of the check's time."""
LEAST_GROWTH = 4
"""How many times as large the largest size must be. What finite sizes add falls as 1/size: over the first doubling alone a slope
strays by twice what it does over three, which is what allowances are measured over."""


def smallest(model: ModelConfig, written: Collection[str] = ()) -> TransformerConfig:
    """The model's structure at the check's smallest size: width 64, 4 heads, depth 2, 16 positions.

    Args:
        model: whose structure.
        written: fields of it that keep their sizes.

    Raises:
        ConfigError: not a transformer, or sizes that do not fit together.
    """
    model = transformer(model, "growing one size")
    inputs = {
        "tokens": {"vocab_size": _VOCAB, "seq_len": _POSITIONS},
        "images": {"image_size": 8, "patch_size": 2},
    }
    small = {
        "width": _WIDTH,
        "num_heads": _HEADS,
        "head_dim": None,
        "depth": _DEPTH,
        **inputs[model.task],
    }
    if model.denoises:
        small |= {"encoder_depth": None, "target_len": None}
    if (
        "distance" in model.sizes() and "seq_len" not in written
    ):  # so that every row of a relative table is seen
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


def own_inputs(
    model: ModelConfig, written: Collection[str] = ()
) -> tuple[ModelConfig, set[str], list[str]]:
    """Return a model to check in place of this one: with its vocabulary and context as far as a check can afford them.

    Args:
        model: as the user has named it.
        written: fields that the user has written, which are left as they are.

    Returns:
        The model, the fields of it that keep their sizes, and a sentence about each that was made smaller.
    """
    keeps = set(written)
    notes = []
    if model.task == "images":
        small = smallest(model, written)
        for name in ("image_size", "patch_size"):
            own = getattr(model, name)
            used = getattr(small, name)
            if own != used:
                flag = name.replace("_", "-")
                notes.append(
                    f"{name.replace('_', ' ')} {used} in place of {own} (--model.{flag} {own} keeps it)"
                )
        return model, keeps, notes
    limits = {"vocab_size": _LARGEST_VOCAB, "seq_len": _LONGEST}
    if model.denoises:
        limits["target_len"] = _LONGEST
    sizes_used = {name: getattr(model, name) for name in limits}
    for name, most in limits.items():
        if name not in written and sizes_used[name] is not None:
            sizes_used[name] = min(sizes_used[name], most)
    longest = max(
        size for name, size in sizes_used.items() if name != "vocab_size" and size is not None
    )
    affordable = _POSITIONS
    while affordable < longest and _logits(sizes_used["vocab_size"], 2 * affordable) <= _LOGITS:
        affordable *= 2
    for name in limits:
        own = getattr(model, name)
        if name != "vocab_size" and name not in written and own is not None:
            sizes_used[name] = min(sizes_used[name], affordable)
        if own != sizes_used[name]:
            word = {"vocab_size": "vocabulary", "seq_len": "context"}.get(name, "output length")
            flag = name.replace("_", "-")
            notes.append(
                f"{word} {sizes_used[name]} in place of {own} (--model.{flag} {own} keeps it)"
            )
        keeps.add(name)
    return dataclasses.replace(model, **sizes_used), keeps, notes


def _logits(vocab_size: int, length: int) -> int:
    """Return how many logits a batch of this context has."""
    return examples(length) * length * vocab_size


def grow(
    model: ModelConfig, axis: str, count: int, written: Collection[str] = ()
) -> list[TransformerConfig]:
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
            raise ConfigError(
                f"key heads grow from 1 to {most}; write --sizes {most.bit_length()} or fewer"
            )
        return [dataclasses.replace(start, num_heads=most, num_kv_heads=2**k) for k in range(count)]
    if axis not in sizes.AXES:
        raise ConfigError(
            f"no size is named {axis!r}; write {', '.join(sizes.AXES[:-1])} or {sizes.AXES[-1]}"
        )
    if axis != "width":
        return [sizes.grown(start, axis, sizes.of(start, axis) * 2**k) for k in range(count)]
    wider = [sizes.grown(start, "heads", start.num_heads * 2 ** (k // 2)) for k in range(count)]
    return [
        sizes.grown(one, "head_dim", one.heads_dim * 2 ** ((k + 1) // 2))
        for k, one in enumerate(wider)
    ]


def batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return what every size trains on, from a fixed seed: images of noise with random labels, or `tokens`."""
    rng = np.random.default_rng(0)
    outputs, example = model.sizes()[model.output_axis], model.example()["inputs"].shape
    if model.task == "images":
        shape = (2 * _EXAMPLES, *example)
        targets = rng.integers(0, outputs, shape[0]).astype(np.int32)
        inputs = rng.standard_normal(shape).astype(np.float32)
        return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}
    if not model.denoises:
        return tokens(outputs, example[0], examples(example[0]))
    lengths = {name: field.shape[0] for name, field in model.example().items()}
    count = examples(max(lengths.values()))
    decoded = tokens(outputs, lengths["targets"], count)
    source = _ranks(rng, outputs, (count, lengths["inputs"]))
    mask = np.arange(lengths["inputs"]) < rng.integers(1, lengths["inputs"] + 1, (count, 1))
    return {
        "inputs": source,
        "input_mask": mask.astype(np.int32),
        "decoder_inputs": decoded["inputs"],
        "targets": decoded["targets"],
        "weights": decoded["weights"],
    }


def even_batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return a batch as `batch` does, whose tokens are drawn evenly, in eight sequences: for studies that grow the context."""
    if model.task == "images":
        return batch(model)
    rng = np.random.default_rng(0)
    outputs = model.sizes()[model.output_axis]
    example = model.example()["inputs"].shape
    if not model.denoises:
        drawn = rng.integers(0, outputs, (_EXAMPLES, example[0] + 1)).astype(np.int32)
        targets = drawn[:, 1:]
        return {
            "inputs": drawn[:, :-1],
            "targets": targets,
            "weights": np.ones(targets.shape, np.float32),
        }
    shapes = {name: (_EXAMPLES, *field.shape) for name, field in model.example().items()}
    fields = {
        name: rng.integers(0, outputs, shape).astype(np.int32) for name, shape in shapes.items()
    }
    mask = np.arange(example[0]) < rng.integers(1, example[0] + 1, (_EXAMPLES, 1))
    return fields | {
        "input_mask": mask.astype(np.int32),
        "weights": np.ones(shapes["weights"], np.float32),
    }


def examples(length: int) -> int:
    """Return how many sequences of this length a batch has: 128 tokens' worth, and at least two."""
    return max(2, min(_EXAMPLES, _EXAMPLES * _POSITIONS // length))


def tokens(vocab_size: int, length: int, count: int = 8) -> dict[str, np.ndarray]:
    """Return a batch that a language model of any vocabulary and context can be checked on: `inputs`, `targets`, `weights`.

    Token i comes as often as 1 / (i + 1), as Zipf's law has it of words; targets are random. An update of a matrix is a sum
    over tokens. It acts on each of K equally frequent ones by K^-1/2 of what it does to one alone, which is seen while the
    width is small against K. Evenly drawn tokens have K = min(vocabulary, tokens of the batch), soon more than the smallest
    width. By Zipf's law K (the inverse of the sum of squared frequencies) is 14 at a vocabulary of 64 and 73 at 32,000,
    whatever the context.

    Args:
        length: positions of a sequence.
        count: sequences.
    """
    rng = np.random.default_rng(0)
    inputs = _ranks(rng, vocab_size, (count, length))
    targets = rng.integers(0, vocab_size, inputs.shape).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def _ranks(rng: np.random.Generator, vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return tokens drawn by Zipf's law, int32."""
    frequencies = 1 / np.arange(1.0, vocab_size + 1)
    drawn = rng.choice(vocab_size, size=shape, p=frequencies / frequencies.sum())
    return drawn.astype(np.int32)


def digest(tree: Any) -> bytes:
    """Hash of a tree of arrays: equal where names, shapes, dtypes and bytes are."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [
        (np.shape(leaf), np.asarray(leaf).dtype.str, np.asarray(leaf).tobytes()) for leaf in leaves
    ]
    return hashlib.sha256(repr((structure, parts)).encode()).digest()


class Series:
    """A model at growing sizes, ready to be measured under any preset.

    Each size compiles once, whatever the number of steps and seeds, and trains once from a seed under equal numbers.

    Args:
        definitions: the model at growing sizes.
        config: optimizer; its schedule should be constant.
        steps: optimizer steps.
    """

    def __init__(
        self, definitions: Sequence[Definition], config: OptimizerConfig, steps: int = STEPS[-1]
    ) -> None:
        self.definitions, self.config, self.steps = list(definitions), config, steps
        largest = max(definitions, key=lambda one: one.count())
        # Initial and trained parameters, their gradients, and at least one moment.
        fit.check_arrays(
            [largest.abstract] * 4,
            "parameters and state of the largest size",
            "Write fewer --sizes",
        )
        still_steps = OPTIMIZERS[config.name].still_steps
        self._programs = []
        for definition in definitions:
            tx = optimizer.build(config, definition.specs)
            self._programs.append(observables.program(definition, tx, still_steps=still_steps))
        self._recorded: dict[tuple[int, int, bytes], list[dict[str, np.ndarray]]] = {}

    def numbers(self, preset: Preset) -> list[tuple[factors.Factors, dict[str, np.ndarray]]]:
        """All that a preset sets in the programs: factors and initial stds, a pair per size."""
        name, decay = self.config.name, self.config.decay
        return [
            (factors.resolve(preset, d, name, decay), factors.init_stds(preset, d))
            for d in self.definitions
        ]

    def measure(
        self, preset: Preset, batch: Mapping[str, np.ndarray], seeds: int = 4
    ) -> dict[str, np.ndarray]:
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
        hyper = hyperparams(self.config, self.steps + 1)
        recorded: list[dict[str, np.ndarray]] = []
        for size, (program, (size_factors, stds)) in enumerate(
            zip(self._programs, self.numbers(preset), strict=True)
        ):
            numbers = StepInputs(size_factors, hyper), stds, dict(batch)
            # Equal numbers are equal trainings: of presets that are one rule along an axis, of all at the base.
            trained = self._recorded.setdefault((size, self.steps, digest(numbers)), [])
            for seed in range(len(trained), seeds):
                trained.append(program(np.uint32(seed), *numbers, self.steps))
            recorded.append(
                {name: np.stack([one[name] for one in trained[:seeds]]) for name in trained[0]}
            )
        if any(one.keys() != recorded[0].keys() for one in recorded):
            raise PresetError(
                "the models to compare have different parameters; grow sizes only, not structure"
            )
        measured: dict[str, np.ndarray] = {}
        for name in recorded[0]:
            each = [np.asarray(one[name], np.float64) for one in recorded]
            if each[0].ndim > 2 and len({one.shape for one in each}) == 1:
                measured[LAYERS.format(name)] = np.stack(each)
            elif each[0].ndim > 2:
                measured[ENDS.format(name)] = np.stack(
                    [np.stack([one.min(-1), one.max(-1)], -1) for one in each]
                )
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

    Returns:
        A finding per observable and step. `text` says what failed, and `require` raises an error that does.

    Raises:
        PresetError: fewer than two models, or the largest is less than four times the smallest.
    """
    if len(definitions) < 2:
        raise PresetError(
            "a slope needs models of growing size; give study at least three, each twice the one before"
        )
    _, factor = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    if factor < LEAST_GROWTH:
        raise PresetError(
            f"the largest model is {factor:g} times the smallest, which cannot tell an exponent from what finite sizes add; "
            f"give study models up to at least {LEAST_GROWTH} times, such as three, each twice the one before"
        )
    ratios = [factor ** (i / (len(definitions) - 1)) for i in range(len(definitions))]
    expected = theory.of(preset, definitions[0], definitions[-1], config.name, accept=accept)
    return judge(Series(definitions, config).measure(preset, batch, seeds), ratios, expected)
