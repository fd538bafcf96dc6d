"""Weights of the plain network, which every preset's weights can be made from, and what reads them from a disk.

The plain network is that of `train/reuse/plain.py`. Nothing that is read is executed. `train/reuse/trained.py` finds what lies at a path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mupax import memory
from mupax.errors import MupaxError
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
"""Beside imported weights: the model, the preset whose form they are in, and what folds them."""
FORMAT = "mupax-weights-1"
"""Format of model.json."""
CONFIG = "config.json"
"""Beside published weights."""
_CHECKED_VALUES = 1 << 20


class WeightsError(MupaxError):
    """Weights that are not there, or that do not fit. The text says which and what to write instead."""


class WeightsSource(NamedTuple):
    """Weights of the plain network, and the model they are of."""

    model: ModelConfig
    stored: Params
    """As they lie in the file."""
    scales: plain.Scales
    """What each is times as large in the plain network."""
    preset: dict[str, Any]
    """What is known of the preset they come from: `fields`, `described` and what was folded, `scales`. Empty for others'."""
    notes: list[str]
    """What was left out or added in reading, one sentence each."""
    run: tuple[Config, dict[str, Any]] | None = None
    """The run they come from, whose model may have adapters that are merged here, and what it recorded of its data."""
    images: ImageInput | None = None
    """Class names and preprocessing of a model of images."""
    assets: Assets | None = None
    """The run's own tokenizer, chat template and class names; None of weights alone and of runs of older versions."""
    text_ids: Mapping[str, int | list[int]] = MappingProxyType({})
    """Tokens that start, end and pad the texts of published weights, by config.json's names; empty for a run."""

    @property
    def params(self) -> Params:
        """Parameters of the plain network: float32, multipliers folded."""
        return plain.absorb_multipliers(self.stored, self.scales)

    @property
    def logits(self) -> Any:
        """What attention logits are taken times there: a number, or one per layer."""
        factors, standard = (
            self.preset.get("factors"),
            self.model.sizes().get("head_dim", 1) ** -0.5,
        )
        return factors.get("logits", standard) if isinstance(factors, dict) else standard


def check_finite(params: Params, path: Path, *, is_run: bool) -> None:
    """Refuse weights that are NaN or infinite: whatever is computed or trained from them is NaN too.

    Args:
        params: by name.
        path: of the weights, for the message.
        is_run: whether they are of a run, which may have better ones in an earlier step.

    Raises:
        WeightsError: a parameter has such values; the text names the parameters.
    """
    wrong = not_finite(params)
    if wrong:
        named = [
            f"{ascii(name)[1:-1][:60]} ({count:,} of {params[name].size:,} values)"
            for name, count in wrong.items()
        ]
        advice = (
            "give an earlier step of the run"
            if is_run
            else "get the file again, or another version of it"
        )
        raise WeightsError(f"{path}: NaN or infinite values in {first_of(named)}; {advice}")


def not_finite(params: Mapping[str, Any]) -> dict[str, int]:
    """Return the parameters that have NaN or infinite values, with their number."""
    counts = {name: _not_finite(np.asarray(value)) for name, value in params.items()}
    return {name: count for name, count in counts.items() if count}


def _not_finite(value: np.ndarray) -> int:
    """Return how many values are NaN or infinite."""
    flat = np.asarray(value).reshape(-1)
    count = 0
    for start in range(0, flat.size, _CHECKED_VALUES):
        chunk = flat[start : start + _CHECKED_VALUES].astype(np.float32)
        # Times zero, a NaN or infinite value is NaN: one product is quicker than a look at each value.
        with np.errstate(invalid="ignore"):
            is_finite = not np.isnan(np.dot(chunk, np.zeros_like(chunk)))
        if not is_finite:
            count += int(np.count_nonzero(~np.isfinite(chunk)))
    return count


def imported(path: Path, model: ModelConfig, record: Mapping[str, Any]) -> WeightsSource:
    """Return the weights of a folder that `mupax import` wrote.

    Args:
        path: the folder, or its file of tensors.
        model: the model that model.json describes.
        record: content of model.json.
    """
    preset = record.get("preset")
    files = Tensors(path)
    # Counted first: a model may be built only if it is no larger than the file.
    if families.params(model) != sum(math.prod(shape) for shape in files.shapes.values()):
        raise WeightsError(f"{path}: the tensors are not the parameters of the model in {MODEL}")
    check_shapes(
        files.shapes,
        definition(model),
        f"{path}: the weights are of another model than {MODEL} says",
    )
    _check_memory(files, path)
    scales = _scales(preset, files)
    params = {name: files.read(name) for name in files.shapes}
    return WeightsSource(model, params, scales, dict(preset), [])  # pyright: ignore


def published(path: Path, fields: Mapping[str, Any]) -> WeightsSource:
    """Return the weights of a folder of Hugging Face.

    Args:
        path: the folder, or its file of tensors.
        fields: content of config.json.
    """
    described = huggingface.from_huggingface(fields)
    files = Tensors(path)
    _check_memory(files, path)
    loaded = weights.from_huggingface(files, described)
    notes = (
        [f"not read, and read by no model here: {first_of(loaded.dropped)}"]
        if loaded.dropped
        else []
    )
    notes += [f"not in the file, so zero: {first_of(loaded.zeros)}"] if loaded.zeros else []
    return WeightsSource(
        described.model, loaded.params, dict.fromkeys(loaded.params, np.ones(())), {}, notes
    )


def trained(run: LoadedRun) -> WeightsSource:
    """Return the weights of a run's step, with adapters merged into their matrices."""
    config = run.config
    preset = preset_for(config.preset, config.model)
    model = definition(config.model)
    factors = resolve(preset, model, preset.optimizers[0])
    empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in model.abstract.items()}
    average = {name: np.empty(w.shape, np.float32) for name, w in empty.items()}
    params = run.params(SimpleNamespace(params=empty, ema=average))
    record = {**plain.preset_record(config.preset, preset, model, factors), "step": run.step}
    scales = plain.scales(model, factors)
    merged = config.model
    if not isinstance(merged, TransformerConfig) or not merged.lora.rank:
        return WeightsSource(merged, params, scales, record, [])
    absorbed = lora.merged(plain.absorb_multipliers(params, scales), merged.lora.scale)
    scales = {name: scales[name] for name in absorbed}
    record["scales"] = {name: plain.number(scale) for name, scale in scales.items()}
    notes = [f"adapters of rank {merged.lora.rank} are merged into their matrices"]
    merged = dataclasses.replace(merged, lora=LoraConfig())
    return WeightsSource(merged, plain.restore_multipliers(absorbed, scales), scales, record, notes)


def _scales(preset: Any, files: Tensors) -> plain.Scales:
    """The record's scales, checked: a finite number per tensor, or one for each of its first axis."""
    recorded = preset.get("scales") if isinstance(preset, Mapping) else None
    if not isinstance(recorded, Mapping):
        raise WeightsError(f"{files.path}: {MODEL} has no preset.scales")
    scales: plain.Scales = {}
    for name in [*files.shapes, plain.GAIN]:
        value = recorded.get(name, 1.0 if name == plain.GAIN else None)
        numbers = value if isinstance(value, list) else [value]
        fits = not isinstance(value, list) or (
            name in files.shapes and [len(value)] == list(files.shapes[name][:1])
        )
        if not fits or not all(type(n) in (int, float) and 0 < abs(n) < 1e30 for n in numbers):
            raise WeightsError(f"{files.path}: {MODEL} has no usable scale for {name[:60]!a}")
        scales[name] = np.asarray(value, np.float64)
    if plain.GAIN not in files.shapes and scales[plain.GAIN] == 1:
        del scales[plain.GAIN]
    return scales


def _check_memory(files: Tensors, path: Path) -> None:
    """Refuse weights that do not fit into memory, where they are float32."""
    count = sum(math.prod(shape) for shape in files.shapes.values())
    bytes_needed = count * np.dtype(np.float32).itemsize
    memory.check(
        bytes_needed,
        f"the weights in {path}",
        "Take a machine with more memory, or a smaller model",
    )


def check_shapes(shapes: Mapping[str, tuple[int, ...]], model: Definition, error: str) -> None:
    """Raises WeightsError where shapes are not a model's; `error` begins the message. Names may be of strangers."""
    target = {name: leaf.shape for name, leaf in model.abstract.items()}
    differing = [
        f"{ascii(name)[1:-1][:60]} is {shapes.get(name, 'missing')} and the model's {target.get(name, 'has none')}"
        for name in sorted(target.keys() | shapes.keys())
        if target.get(name) != shapes.get(name)
    ]
    if differing:
        raise WeightsError(f"{error}: {first_of(differing, '; ')}")
