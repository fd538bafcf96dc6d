"""Weights of the plain network, which every preset's weights can be made from, read from a disk.

The plain network is defined in `train/reuse/plain.py`. Reading executes no code from the files.
`train/reuse/trained.py` decides which reader a path needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mupax import MupaxError, memory
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.folder import first_of
from mupax.train.checkpoints.saved_run import LoadedRun
from mupax.train.config.preset import preset_for
from mupax.train.config.run import Config
from mupax.train.core.factors import resolve
from mupax.train.reuse import plain
from mupax.train.reuse.image_input import ImageInput
from mupax.zoo import families
from mupax.zoo.configs import ModelConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.tensorfile import Tensors
from mupax.zoo.huggingface.weights import Params
from mupax.zoo.lora import layer as lora
from mupax.zoo.transformer import LoraConfig, TransformerConfig

MODEL = "model.json"
"""File beside imported weights: the model's config, the preset they are stored under, scales."""
FORMAT = "mupax-weights-1"
"""Value of `format` in model.json."""
CONFIG = "config.json"
"""Name of the config file beside Hugging Face's weights, and of the record of a run."""
_CHECKED_VALUES = 1 << 20
"""Number of values that are checked for NaN at a time."""
_LARGEST_SCALE = 1e30


class WeightsError(MupaxError):
    """Missing weights, or weights that do not fit. The message says which and what to write."""


class WeightsSource(NamedTuple):
    """Stored weights of a model, and the factors that make them free of a preset's multipliers.

    A stored weight times its factor is a weight of the plain network (`plain.py`), from which the
    weights of any preset can be made.
    """

    model: ModelConfig
    stored: Params
    """Weights as the file holds them."""
    scales: plain.Scales
    """Factor that turns each stored weight into one of the plain network (`plain.scales`)."""
    preset: dict[str, Any]
    """Record of the weights' preset (`plain.preset_record`). Empty for Hugging Face's weights."""
    notes: list[str]
    """Sentences on tensors that were left out or added while reading."""
    run: tuple[Config, dict[str, Any]] | None = None
    """Config and data record of the run that holds the weights. `None` without a run.

    The config's model may have LoRA adapters. They are merged in `model` and `stored`.
    """
    images: ImageInput | None = None
    """Class names and preprocessing of an image model."""
    assets: Assets | None = None
    """Tokenizer, chat template and class names of the run. `None` without a run or if it is old."""
    text_ids: Mapping[str, int | list[int]] = MappingProxyType({})
    """Token ids that start, end and pad texts, by config.json's names. Empty for a run."""

    @property
    def params(self) -> Params:
        """Parameters of the plain network as float32 NumPy arrays, computed at each access.

        Each is the stored weight times its factor in `scales`.
        """
        return plain.absorb_multipliers(self.stored, self.scales)

    @property
    def logits(self) -> Any:
        """Scale of the attention logits: a number, or one per layer. By default head_dim^-0.5."""
        factors = self.preset.get("factors")
        standard = self.model.sizes().get("head_dim", 1) ** -0.5
        if not isinstance(factors, dict):
            return standard
        return factors.get("logits", standard)


def check_finite(params: Params, path: Path, *, is_run: bool) -> None:
    """Refuse weights that are NaN or infinite, because every result computed from them is NaN too.

    Args:
        path: path of the weights in the message.
        is_run: whether a run holds the weights. The message then advises an earlier step.

    Raises:
        WeightsError: a parameter has such values; the message names the parameters.
    """
    wrong = not_finite(params)
    if not wrong:
        return
    described = []
    for name, count in wrong.items():
        total = params[name].size
        described.append(f"{_printable(name)} ({count:,} of {total:,} values)")
    advice = "get the file again, or another version of it"
    if is_run:
        advice = "give an earlier step of the run"
    raise WeightsError(f"{path}: NaN or infinite values in {first_of(described)}; {advice}")


def _printable(name: str) -> str:
    """Return at most 60 characters of a name from a file, in ASCII without control characters."""
    return ascii(name)[1:-1][:60]


def not_finite(params: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of NaN or infinite values of each parameter that has any."""
    counts = {name: _count_not_finite(np.asarray(value)) for name, value in params.items()}
    return {name: count for name, count in counts.items() if count}


def _count_not_finite(value: np.ndarray) -> int:
    """Return the number of values that are NaN or infinite."""
    flat = np.asarray(value).reshape(-1)
    count = 0
    for start in range(0, flat.size, _CHECKED_VALUES):
        # In chunks, because a float32 copy of a complete bfloat16 matrix may not fit in memory.
        chunk = flat[start : start + _CHECKED_VALUES].astype(np.float32)
        # NaN and infinity times 0 are NaN. So the dot product with zeros is NaN if any value is not
        # finite, and is faster than `isfinite` of every value.
        with np.errstate(invalid="ignore"):
            is_finite = not np.isnan(np.dot(chunk, np.zeros_like(chunk)))
        if not is_finite:
            count += int(np.count_nonzero(~np.isfinite(chunk)))
    return count


def imported(path: Path, model: ModelConfig, record: Mapping[str, Any]) -> WeightsSource:
    """Return the weights in a folder that `mupax import` wrote, with the scales in its model.json.

    Args:
        path: the folder, or its file of tensors.
        model: config of the model that model.json describes.
        record: content of model.json, of which `preset` is read.

    Raises:
        WeightsError: tensors and model.json do not fit together.
        TensorFileError: the file of tensors is missing or damaged.
        MemoryLimitError: the weights do not fit into memory as float32.
    """
    preset = record.get("preset")
    files = Tensors(path)
    # Counted first: a model may be built only if it is no larger than the file.
    count = sum(math.prod(shape) for shape in files.shapes.values())
    if families.params(model) != count:
        raise WeightsError(f"{path}: the tensors are not the parameters of the model in {MODEL}")
    error = f"{path}: the weights are of another model than {MODEL} says"
    check_shapes(files.shapes, definition(model), error)
    _check_memory(files, path)

    scales = _scales(preset, files)
    params = {name: files.read(name) for name in files.shapes}
    return WeightsSource(model, params, scales, dict(preset), [])  # pyright: ignore


def published(path: Path, fields: Mapping[str, Any]) -> WeightsSource:
    """Return the weights in a folder of Hugging Face, renamed to mupax's parameters.

    They need no multipliers, so every scale is 1. The notes name tensors that were not
    read, and parameters that the file lacks and that are set to zero.

    Args:
        path: the folder, or its file of tensors.
        fields: content of `config.json`.

    Raises:
        ConfigError: `config.json` describes a model that mupax does not have.
        TensorFileError: a tensor is missing, unknown, of another shape or damaged.
        MemoryLimitError: the weights do not fit into memory as float32.
    """
    described = huggingface.from_huggingface(fields)
    files = Tensors(path)
    _check_memory(files, path)
    loaded = weights.from_huggingface(files, described)

    notes = []
    if loaded.dropped:
        notes.append(f"not read, and read by no model here: {first_of(loaded.dropped)}")
    if loaded.zeros:
        notes.append(f"not in the file, so zero: {first_of(loaded.zeros)}")
    scales = dict.fromkeys(loaded.params, np.ones(()))
    return WeightsSource(described.model, loaded.params, scales, {}, notes)


def trained(run: LoadedRun) -> WeightsSource:
    """Return the weights of a run's step on the host, with LoRA adapters merged into the matrices.

    `run.weights` says whether the parameters or their moving average are read.

    Raises:
        WorkdirError, ForeignError, DiskError, MemoryLimitError: see `LoadedRun.params`.
    """
    config = run.config
    preset = preset_for(config.preset, config.model)
    model = definition(config.model)
    factors = resolve(preset, model, preset.optimizers[0])

    # NumPy arrays stand for a program's abstract state, so the weights are read onto the host.
    empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in model.abstract.items()}
    average = {name: np.empty(weight.shape, np.float32) for name, weight in empty.items()}
    params = run.params(SimpleNamespace(params=empty, ema=average))

    record = {**plain.preset_record(config.preset, preset, model, factors), "step": run.step}
    scales = plain.scales(model, factors)
    if not isinstance(config.model, TransformerConfig) or not config.model.lora.rank:
        return WeightsSource(config.model, params, scales, record, [])

    # Adapters are added to their matrices in the plain network, where no multipliers intervene.
    adapters = config.model.lora
    absorbed = lora.merged(plain.absorb_multipliers(params, scales), adapters.scale)
    scales = {name: scales[name] for name in absorbed}
    record["scales"] = {name: plain.number(scale) for name, scale in scales.items()}
    notes = [f"adapters of rank {adapters.rank} are merged into their matrices"]
    merged = dataclasses.replace(config.model, lora=LoraConfig())
    # Readers multiply stored weights by their scales, so the merged ones are divided by them.
    return WeightsSource(merged, plain.restore_multipliers(absorbed, scales), scales, record, notes)


def _scales(preset: Any, files: Tensors) -> plain.Scales:
    """Return the scales in a preset's record as arrays, [] or [layers], for every tensor.

    The last norm's gain is included without a tensor if its recorded scale is not 1.

    Args:
        preset: JSON value of any type from model.json.

    Raises:
        WeightsError: a tensor has no scale, or one that is not finite, zero, or of a wrong length.
    """
    recorded = preset.get("scales") if isinstance(preset, Mapping) else None
    if not isinstance(recorded, Mapping):
        raise WeightsError(f"{files.path}: {MODEL} has no preset.scales")

    scales: plain.Scales = {}
    # The last norm's gain may have a scale and no tensor: it then stands for a tied
    # readout's multiplier alone.
    for name in [*files.shapes, plain.GAIN]:
        default = 1.0 if name == plain.GAIN else None
        value = recorded.get(name, default)
        if isinstance(value, list):
            # One scale per layer, so the lengths must agree.
            values = value
            fits = name in files.shapes and [len(value)] == list(files.shapes[name][:1])
        else:
            values = [value]
            fits = True
        if not fits or not all(_is_scale(number) for number in values):
            raise WeightsError(f"{files.path}: {MODEL} has no usable scale for {name[:60]!a}")
        scales[name] = np.asarray(value, np.float64)

    # A scale of this name would add a gain to a model that has none.
    if plain.GAIN not in files.shapes and scales[plain.GAIN] == 1:
        del scales[plain.GAIN]
    return scales


def _is_scale(number: Any) -> bool:
    # bool is a subclass of int and no number here.
    return type(number) in (int, float) and 0 < abs(number) < _LARGEST_SCALE


def _check_memory(files: Tensors, path: Path) -> None:
    """Raise `MemoryLimitError` if the weights do not fit into host memory as float32."""
    count = sum(math.prod(shape) for shape in files.shapes.values())
    # Arrays become float32 when multipliers are absorbed, whatever dtype the file has.
    bytes_needed = count * np.dtype(np.float32).itemsize
    memory.check(
        bytes_needed,
        f"the weights in {path}",
        "Take a machine with more memory, or a smaller model",
    )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], model: Definition, error: str) -> None:
    """Refuse tensors whose names or shapes differ from a model's parameters.

    Args:
        shapes: shapes by tensor name, from a file that anybody may have written.
        error: beginning of the message, which goes on with the names that differ.

    Raises:
        WeightsError: the message names the tensors that differ.
    """
    expected = {name: leaf.shape for name, leaf in model.abstract.items()}
    differing = []
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            shape = shapes.get(name, "missing")
            model_shape = expected.get(name, "has none")
            differing.append(f"{_printable(name)} is {shape} and the model's {model_shape}")
    if differing:
        raise WeightsError(f"{error}: {first_of(differing, '; ')}")
