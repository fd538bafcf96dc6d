"""Coordinate check: grow one size of a model, measure every size, and judge slopes against theory.

`study` is the complete check of one preset on any model. `mupax check` and tests of models use it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mupax.presets import Preset, PresetError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.presets.preset import WHOLE_MATRICES, MatrixSteps
from mupax.train.config import sizes
from mupax.train.config.run import OptimizerConfig
from mupax.train.core import factors, optimizer
from mupax.train.core.costs import fit
from mupax.train.core.factors import hyperparams
from mupax.train.core.step import StepInputs
from mupax.train.studies.check import groups, observables, theory
from mupax.train.studies.check.judge import (
    ENDS,
    LAYERS,
    Finding,
    judge,
    needs_seeds,
    passes,
)
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
    "measure_and_judge",
    "passes",
    "peak_lr",
    "require",
    "smallest",
    "study",
    "text",
    "tokens",
]

_WIDTH = 64
_HEADS = 4
_DEPTH = 2
_POSITIONS = 16
_VOCAB = 64
_EXAMPLES = 8
_LONGEST = 512
"""Longest context of a check. `own_inputs` shortens a longer one."""
_LARGEST_VOCAB = 2**15
"""Largest vocabulary of a check. `own_inputs` makes a larger one smaller."""
_LOGITS = 2**22
"""Number of logits of a batch above which `own_inputs` shortens the context.

At width 512 the products that make so many logits take half of the check's time.
"""
_LAZY_RATE = 0.125
"""Factor on the learning rate for presets under which features change less as the model grows.

For such presets theory gives the exponent only to first order in the change, so changes must be
small. Under `ntk` and Adam's usual learning rate the residual stream changed by its own size within
ten steps, and the slope was -0.30 in place of -1/2. At an eighth of that learning rate the stream
changed by 0.31 of its size, and the slope was -0.51 (ViT with QK-norm, heads growing).
"""
MORE_SEEDS = 4
"""Factor on the number of seeds when a check is repeated (`judge.needs_seeds`)."""
LEAST_GROWTH = 4
"""Smallest ratio of the largest to the smallest model size that a check accepts.

Effects of finite size fall as 1/size. Over the first doubling alone a slope lies twice as far
from theory as over three doublings, over which the allowances for finite sizes were measured.
"""


class CheckModel(NamedTuple):
    """Model with inputs that are small enough for a check, and notes on what was made smaller.

    Attributes:
        model: Model with a smaller vocabulary and context, if necessary. An image model is
            unchanged, because `smallest` shrinks its images.
        written: Names of the fields that `smallest` must not change.
        notes: Sentence on every field that was made smaller or that `smallest` will make smaller.
    """

    model: ModelConfig
    written: set[str]
    notes: list[str]


def peak_lr(optimizer_name: str, expected: Mapping[theory.ObservableStep, Expected]) -> float:
    """Return the peak learning rate of a coordinate check, for the smallest model.

    It is the optimizer's `check_lr`, or an eighth of `check_lr` for a preset under which features
    change less as the model grows.

    Args:
        expected: Theory of the preset under check, from `theory.of`.
    """
    rate = OPTIMIZERS[optimizer_name].check_lr
    return rate * _LAZY_RATE if theory.is_lazy(expected) else rate


def smallest(model: ModelConfig, written: Collection[str] = ()) -> TransformerConfig:
    """Return a model of the same structure with width 64, 4 heads, depth 2 and 16 positions.

    It is the first of the growing models of a check. The vocabulary becomes 64, and images become
    8 x 8 pixels in patches of 2 x 2. Key heads keep their ratio to query heads. Layers are applied
    by a scan, and `centered` is switched off.

    Args:
        written: Names of the fields of `model` that keep their sizes.

    Raises:
        ConfigError: The model is no transformer, or the sizes do not fit together.
    """
    model = transformer(model, "growing one size")
    small: dict[str, int | None] = {
        "width": _WIDTH,
        "num_heads": _HEADS,
        "head_dim": None,
        "depth": _DEPTH,
    }
    if model.task == "tokens":
        small |= {"vocab_size": _VOCAB, "seq_len": _POSITIONS}
    else:
        small |= {"image_size": 8, "patch_size": 2}
    if model.denoises:
        small |= {"encoder_depth": None, "target_len": None}
    if "distance" in model.sizes() and "seq_len" not in written:
        # A batch then reads every row of the relative table.
        small |= {"distance_buckets": _POSITIONS // 2, "longest_distance": _POSITIONS}
    changes: dict[str, Any] = {}
    for name, size in small.items():
        if name not in written:
            changes[name] = size

    heads = changes.get("num_heads", model.num_heads)
    width = changes.get("width", model.width)
    if "num_kv_heads" not in written and model.num_kv_heads is not None:
        # The ratio of query to key heads is structure, so it stays at fewer heads.
        changes["num_kv_heads"] = max(1, heads * model.kv_heads // model.num_heads)
    if "mlp_ratio" not in written:
        # The hidden size is mlp_ratio * width and must be a whole number.
        changes["mlp_ratio"] = round(model.mlp_ratio * width) / width

    # Small models train for a few steps only, so compiling takes most of the time, and a scan
    # compiles fastest.
    compute = dataclasses.replace(model.compute, layers="scan")
    # Observables subtract the initial output themselves, whatever the model's own setting.
    return dataclasses.replace(model, compute=compute, centered=False, **changes)


def own_inputs(model: ModelConfig, written: Collection[str] = ()) -> CheckModel:
    """Return the model with its vocabulary, context and output length cut to a check's limits.

    The vocabulary is cut to 2**15 and lengths to 512 tokens. Lengths are shortened further, but not
    below 16 tokens, if a batch would have more than 2**22 logits. An image model is returned
    unchanged, with notes on what `smallest` will shrink.

    Args:
        written: Names of fields that the user wrote. They are not changed.
    """
    if model.task == "images":
        notes = _image_notes(model, written)
        return CheckModel(model, set(written), notes)

    limits = {"vocab_size": _LARGEST_VOCAB, "seq_len": _LONGEST}
    if model.denoises:
        limits["target_len"] = _LONGEST
    new_sizes = {name: getattr(model, name) for name in limits}
    for name, limit in limits.items():
        if name not in written and new_sizes[name] is not None:
            new_sizes[name] = min(new_sizes[name], limit)

    lengths = []
    for name, size in new_sizes.items():
        if name != "vocab_size" and size is not None:
            lengths.append(size)
    affordable = _affordable_length(new_sizes["vocab_size"], max(lengths))

    notes = []
    words = {"vocab_size": "vocabulary", "seq_len": "context", "target_len": "output length"}
    for name in limits:
        model_size = getattr(model, name)
        if model_size is None:
            continue
        if name != "vocab_size" and name not in written:
            new_sizes[name] = min(new_sizes[name], affordable)
        if model_size != new_sizes[name]:
            notes.append(_size_note(words[name], name, new_sizes[name], model_size))

    small_model = dataclasses.replace(model, **new_sizes)
    # The limited fields count as written. Otherwise `smallest` would set the vocabulary to 64 and
    # the context to 16 positions.
    return CheckModel(small_model, {*written, *limits}, notes)


def _image_notes(model: ModelConfig, written: Collection[str]) -> list[str]:
    """Return a note for each of image size and patch size that `smallest` changes."""
    small = smallest(model, written)
    notes = []
    for name in ("image_size", "patch_size"):
        model_size = getattr(model, name)
        new_size = getattr(small, name)
        if model_size != new_size:
            notes.append(_size_note(name.replace("_", " "), name, new_size, model_size))
    return notes


def _size_note(word: str, field: str, new_size: int, model_size: int) -> str:
    """Return a note on a size that was changed for the check, with the flag that keeps it."""
    flag = field.replace("_", "-")
    return f"{word} {new_size} in place of {model_size} (--model.{flag} {model_size} keeps it)"


def _affordable_length(vocab_size: int, longest: int) -> int:
    """Return the longest sequence length, in tokens, at which a check can afford the logits.

    The length doubles from 16 until it is at least `longest`, or until another doubling would give
    a batch more than `_LOGITS` logits. The result may be above `longest`.

    Args:
        longest: Longest sequence of the model, in tokens.
    """
    length = _POSITIONS
    while length < longest and _logits(vocab_size, 2 * length) <= _LOGITS:
        length *= 2
    return length


def _logits(vocab_size: int, length: int) -> int:
    """Return the number of logits of a batch whose sequences have `length` tokens."""
    return examples(length) * length * vocab_size


def grow(
    model: ModelConfig, axis: str, count: int, written: Collection[str] = ()
) -> list[TransformerConfig]:
    """Return `count` models, from `smallest(model)` on, whose size along `axis` doubles each time.

    Args:
        axis: "head_dim", "heads", "depth" (an encoder's, too, unless `written` has
            "encoder_depth"), "encoder_depth", "width" (doubles heads and head_dim in turn), "mlp",
            "experts", "expert_dim" or "kv_heads" (from 1, with 8 query heads unless `written` has
            "num_heads").
        written: Names of fields of the model that keep their sizes in the smallest model.

    Raises:
        ConfigError: No size has the name `axis`, the model has no such size, or there are more
            key heads than query heads.
    """
    start = smallest(model, written)
    if axis == "kv_heads":
        return _grow_key_heads(start, count, start.num_heads if "num_heads" in written else None)
    if axis not in sizes.AXES:
        raise ConfigError(
            f"no size is named {axis!r}; write {', '.join(sizes.AXES[:-1])} or {sizes.AXES[-1]}"
        )

    models = []
    for k in range(count):
        if axis == "width":
            # Width doubles each time: by head_dim if k is odd, by the number of heads if k is even.
            wider = sizes.grown(start, "heads", start.num_heads * 2 ** (k // 2))
            head_dim = wider.heads_dim * 2 ** ((k + 1) // 2)
            models.append(sizes.grown(wider, "head_dim", head_dim))
        else:
            models.append(sizes.grown(start, axis, sizes.of(start, axis) * 2**k))
    return models


def _grow_key_heads(
    start: TransformerConfig, count: int, num_heads: int | None
) -> list[TransformerConfig]:
    """Return `count` models with 1, 2, 4, ... key heads.

    Args:
        num_heads: Number of query heads in every model; 8 if `None`.

    Raises:
        ConfigError: The last model would have more key heads than query heads.
    """
    query_heads = 2 * _HEADS if num_heads is None else num_heads
    if 2 ** (count - 1) > query_heads:
        raise ConfigError(
            f"key heads grow from 1 to {query_heads}; "
            f"write --sizes {query_heads.bit_length()} or fewer"
        )
    variants = []
    for k in range(count):
        variants.append(dataclasses.replace(start, num_heads=query_heads, num_kv_heads=2**k))
    return variants


def batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the batch that every size trains on, drawn from a fixed seed.

    An image model gets 16 images of Gaussian noise with random labels. A language model gets
    sequences of random tokens from `tokens`. An encoder-decoder also gets tokens for its encoder,
    drawn from the first 64 of the vocabulary by the same law, with a mask of random padding.

    Args:
        model: Smallest model, whose inputs have the shapes of all sizes.
    """
    rng = np.random.default_rng(0)
    outputs = model.sizes()[model.output_axis]
    example = model.example()
    if model.task == "images":
        shape = (2 * _EXAMPLES, *example["inputs"].shape)
        targets = rng.integers(0, outputs, shape[0]).astype(np.int32)
        inputs = rng.standard_normal(shape).astype(np.float32)
        return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}

    length = example["inputs"].shape[0]
    if not model.denoises:
        return tokens(outputs, length, examples(length))

    lengths = {name: field.shape[0] for name, field in example.items()}
    count = examples(max(lengths.values()))
    decoded = tokens(outputs, lengths["targets"], count)
    # Source tokens are among the first 64 of the vocabulary, because gradients of cross-attention's
    # queries and keys are sums over distinct source tokens. With a vocabulary of 2,048 their slopes
    # up to width 256 were -0.72 in place of -0.57 (theory: -1/2).
    source = _zipf_tokens(rng, min(outputs, _VOCAB), (count, lengths["inputs"]))
    # Every source has at least one position, or the decoder would attend to padding alone.
    source_lengths = rng.integers(1, lengths["inputs"] + 1, (count, 1))
    mask = np.arange(lengths["inputs"]) < source_lengths
    return {
        "inputs": source,
        "input_mask": mask.astype(np.int32),
        "decoder_inputs": decoded["inputs"],
        "targets": decoded["targets"],
        "weights": decoded["weights"],
    }


def even_batch(model: ModelConfig) -> dict[str, np.ndarray]:
    """Return a batch of 8 sequences whose tokens are drawn uniformly, from a fixed seed.

    A decoder's targets are the next tokens. The encoder input of an encoder-decoder has random
    padding. For an image model, return `batch(model)`.
    """
    if model.task == "images":
        return batch(model)

    rng = np.random.default_rng(0)
    outputs = model.sizes()[model.output_axis]
    example = model.example()
    length = example["inputs"].shape[0]
    if not model.denoises:
        drawn = rng.integers(0, outputs, (_EXAMPLES, length + 1)).astype(np.int32)
        targets = drawn[:, 1:]
        return {
            "inputs": drawn[:, :-1],
            "targets": targets,
            "weights": np.ones(targets.shape, np.float32),
        }

    fields = {}
    for name, field in example.items():
        shape = (_EXAMPLES, *field.shape)
        fields[name] = rng.integers(0, outputs, shape).astype(np.int32)
    mask = np.arange(length) < rng.integers(1, length + 1, (_EXAMPLES, 1))
    fields["input_mask"] = mask.astype(np.int32)
    fields["weights"] = np.ones(fields["weights"].shape, np.float32)
    return fields


def examples(length: int) -> int:
    """Return the number of sequences of `length` tokens in a batch: 128 // length, from 2 to 8."""
    return max(2, min(_EXAMPLES, _EXAMPLES * _POSITIONS // length))


def tokens(vocab_size: int, length: int, count: int = 8) -> dict[str, np.ndarray]:
    """Return random `inputs`, `targets` and `weights`, [count, length], from a fixed seed.

    Tokens are below `vocab_size`. Input token i has a frequency proportional to 1 / (i + 1), which
    is Zipf's law of words. Targets are drawn uniformly and independently of the inputs. All weights
    are 1.

    Inputs are not drawn evenly, because small widths would then be off the theory. An update of a
    matrix is a sum over tokens. It acts on each of K equally frequent tokens by K^-1/2 of its
    effect on a single one, which shows while the width is small against K. Even draws have K =
    min(vocabulary, tokens of the batch). Under Zipf's law K (the inverse of the sum of squared
    frequencies) is only 14 at a vocabulary of 64 and 73 at 32,000, at any context.
    """
    rng = np.random.default_rng(0)
    inputs = _zipf_tokens(rng, vocab_size, (count, length))
    targets = rng.integers(0, vocab_size, inputs.shape).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "weights": np.ones(targets.shape, np.float32)}


def _zipf_tokens(rng: np.random.Generator, vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return random int32 tokens; token i has a frequency proportional to 1 / (i + 1)."""
    frequencies = 1 / np.arange(1.0, vocab_size + 1)
    drawn = rng.choice(vocab_size, size=shape, p=frequencies / frequencies.sum())
    return drawn.astype(np.int32)


def digest(tree: Any) -> bytes:
    """Return the SHA-256 of a pytree's structure and of its leaves' shapes, dtypes and bytes."""
    leaves, structure = jax.tree.flatten(tree)
    parts = []
    for leaf in leaves:
        array = np.asarray(leaf)
        parts.append((np.shape(leaf), array.dtype.str, array.tobytes()))
    return hashlib.sha256(repr((structure, parts)).encode()).digest()


class Series:
    """Model at growing sizes, to be trained and measured under any preset.

    Presets are data to the compiled programs: each size compiles once, and once more for each
    setting of Muon's blocks and norms. Measurements are cached by size, seed, batch, optimizer
    hyperparameters, and the factors and initial stds that the preset gives.

    Args:
        config: Optimizer settings. The schedule should be constant.
        steps: Number of optimizer steps.

    Raises:
        MemoryLimitError: The host has too little memory for the largest size.
    """

    def __init__(
        self, definitions: Sequence[Definition], config: OptimizerConfig, steps: int = STEPS[-1]
    ) -> None:
        self.definitions = list(definitions)
        self.config = config
        self.steps = steps

        # One size is trained at a time, so the largest alone must fit.
        largest = max(definitions, key=lambda definition: definition.count())
        # Initial and trained parameters, their gradients, and at least one moment.
        fit.check_arrays(
            [largest.abstract] * 4,
            "parameters and state of the largest size",
            "Write fewer --sizes",
        )
        self._programs = [self._program(definition) for definition in definitions]
        self._programs_by_steps: dict[str, Any] = {}
        self._recorded: dict[tuple[str, int, bytes], list[dict[str, np.ndarray]]] = {}

    def numbers(self, preset: Preset) -> list[tuple[factors.Factors, dict[str, np.ndarray]]]:
        """Return a pair for every size: the preset's factors, and its initial stds by parameter."""
        numbers = []
        for definition in self.definitions:
            size_factors = factors.resolve(preset, definition, self.config.name, self.config.decay)
            numbers.append((size_factors, factors.init_stds(preset, definition)))
        return numbers

    def measure(
        self,
        preset: Preset,
        batch: Mapping[str, np.ndarray],
        seeds: int = 4,
        *,
        peak_lr: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Train every size from every seed, and return the observables by name.

        Observables are root mean squares, such as that of an activation, a gradient or the change
        of a weight. Values are float64 [sizes, seeds, steps + 1]. Measurements of earlier calls are
        reused. Gradients of shared biases that are nothing but rounding are left out.

        An observable that is recorded layer by layer has the root mean square over layers under its
        own name. The result also has its layers: under the name `LAYERS.format(name)` with a last
        axis of layers, or, if sizes differ in depth, under `ENDS.format(name)` with a last axis of
        the least and the greatest layer.

        Args:
            batch: `inputs`, `targets` and `weights` for every size, the same at every step.
            seeds: Number of initializations of every size, from seeds 0 to `seeds` - 1.
            peak_lr: Peak learning rate in place of that of `config`.

        Raises:
            PresetError: The sizes have different observables, so that no slope can be fitted.
        """
        config = self.config
        if peak_lr is not None:
            config = dataclasses.replace(config, peak_lr=peak_lr)
        records = self._records(preset, config, batch, seeds)
        # A grown model with other parameters would give rows that some sizes lack.
        if any(record.keys() != records[0].keys() for record in records):
            raise PresetError(
                "the models to compare have different parameters; grow sizes only, not structure"
            )

        measured: dict[str, np.ndarray] = {}
        for name in records[0]:
            values = [np.asarray(record[name], np.float64) for record in records]
            # [seeds, steps + 1] is one number per step; a third axis holds layers.
            if values[0].ndim > 2:
                if len({array.shape for array in values}) == 1:
                    measured[LAYERS.format(name)] = np.stack(values)
                else:
                    # Models of different depth have only their extreme layers to compare.
                    ends = []
                    for array in values:
                        ends.append(np.stack([array.min(-1), array.max(-1)], -1))
                    measured[ENDS.format(name)] = np.stack(ends)
                values = [np.sqrt(np.mean(array**2, axis=-1)) for array in values]
            measured[name] = np.stack(values)
        # After the loop, because `without_rounding` judges a gradient by its mean over layers.
        groups.without_rounding(measured, self.definitions[0].specs)
        return measured

    def _program(
        self, definition: Definition, matrix_steps: MatrixSteps = WHOLE_MATRICES
    ) -> Callable[..., dict[str, np.ndarray]]:
        """Return the function that trains and measures one size. It compiles at its first call."""
        tx = optimizer.build(self.config, definition.specs, matrix_steps)
        # The first updates of some optimizers only fill their state. Step 1 is the first that moves
        # parameters.
        still_steps = OPTIMIZERS[self.config.name].still_steps
        return observables.program(definition, tx, still_steps=still_steps)

    def _program_for(
        self, index: int, preset: Preset
    ) -> tuple[str, Callable[..., dict[str, np.ndarray]]]:
        """Return the compiled program of one size for a preset, and a key that names the program.

        One program serves all presets, except presets that set blocks or norms of Muon's steps.
        These get programs of their own, which are kept for later calls.

        Args:
            index: Index of the size in `definitions`.

        Returns:
            The key, which is a part of the keys of cached measurements, and the program.
        """
        definition = self.definitions[index]
        matrix_steps = preset.matrix_steps(definition.specs, definition.sizes, self.config.name)
        if matrix_steps == WHOLE_MATRICES:
            return str(index), self._programs[index]
        key = f"{index} {matrix_steps}"
        if key not in self._programs_by_steps:
            self._programs_by_steps[key] = self._program(definition, matrix_steps)
        return key, self._programs_by_steps[key]

    def _records(
        self,
        preset: Preset,
        config: OptimizerConfig,
        batch: Mapping[str, np.ndarray],
        seeds: int,
    ) -> list[dict[str, np.ndarray]]:
        """Return a dict of observables for every size, and train only what is not cached.

        Values are [seeds, steps + 1] or [seeds, steps + 1, layers].
        """
        # One more than the steps, because the last observation takes a step as well.
        hyper = hyperparams(config, self.steps + 1)
        records = []
        for index, (size_factors, stds) in enumerate(self.numbers(preset)):
            program_key, program = self._program_for(index, preset)
            data = (StepInputs(size_factors, hyper), stds, dict(batch))
            # Different presets can give a model the same values, such as two rules that differ only
            # along another axis. Such presets share their trainings.
            key = (program_key, self.steps, digest(data))
            trained = self._recorded.setdefault(key, [])
            # Earlier calls with fewer seeds are extended, not repeated.
            for seed in range(len(trained), seeds):
                trained.append(program(np.uint32(seed), *data, self.steps))

            stacked = {}
            for name in trained[0]:
                stacked[name] = np.stack([run[name] for run in trained[:seeds]])
            records.append(stacked)
        return records


def study(
    definitions: Sequence[Definition],
    preset: Preset,
    config: OptimizerConfig,
    batch: observables.Batch,
    seeds: int = 4,
    accept: Collection[str] = (),
) -> list[Finding]:
    """Check one preset on any model: measure every size, fit slopes, and judge them.

    Args:
        definitions: Model at sizes that grow by equal factors, from `mupax.zoo.definition.define`.
        config: Optimizer settings. The schedule should be constant. `peak_lr` gives a learning
            rate.
        batch: `inputs`, `targets` and `weights` for every size (see `mupax.train.core.step`).
        seeds: Number of initializations of every size, 4 by default. A check that fails narrowly
            is repeated from four times as many.
        accept: Troubles that do not fail the check, such as "lazy", because the paper of the preset
            wants them (`mupax.train.studies.check.theory.of`).

    Returns:
        A finding per measured observable and step that theory covers. `text` says what failed,
        and `require` raises an error if a finding failed.

    Raises:
        PresetError: Fewer than two models, or the largest is less than four times the smallest.
    """
    if len(definitions) < 2:
        raise PresetError(
            "a slope needs models of growing size; "
            "give study at least three, each twice the one before"
        )
    _, factor = theory.growth(definitions[0].sizes, definitions[-1].sizes)
    if factor < LEAST_GROWTH:
        raise PresetError(
            f"the largest model is {factor:g} times the smallest, which cannot tell an exponent "
            f"from what finite sizes add; give study models up to at least {LEAST_GROWTH} times, "
            f"such as three, each twice the one before"
        )

    doublings = len(definitions) - 1
    ratios = [factor ** (index / doublings) for index in range(len(definitions))]
    expected = theory.of(preset, definitions[0], definitions[-1], config.name, accept=accept)
    return measure_and_judge(Series(definitions, config), preset, batch, seeds, ratios, expected)


def measure_and_judge(
    series: Series,
    preset: Preset,
    batch: Mapping[str, np.ndarray],
    seeds: int,
    sizes: Sequence[float],
    expected: Mapping[theory.ObservableStep, Expected],
    *,
    peak_lr: float | None = None,
) -> list[Finding]:
    """Train every size of a series under a preset, and return a finding per observable and step.

    If the check fails and every failure is narrow (`Finding.fails_narrowly`), or if it passes and a
    slope is undecided (`Finding.is_undecided`), it is repeated from `MORE_SEEDS` times as many
    seeds, and the findings of the repetition are returned.

    Args:
        sizes: Size that grows, in each model of the series, or its ratio to the smallest.
        expected: Theory of the preset, from `theory.of`.
        peak_lr: Peak learning rate in place of that of the series.
    """
    measured = series.measure(preset, batch, seeds, peak_lr=peak_lr)
    findings = judge(measured, sizes, expected)
    if needs_seeds(findings):
        measured = series.measure(preset, batch, MORE_SEEDS * seeds, peak_lr=peak_lr)
        findings = judge(measured, sizes, expected)
    return findings
