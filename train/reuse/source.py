"""Weights from elsewhere: of a run, of Hugging Face, or imported before; and into any preset's form.

Everything read becomes a `Source`: the weights of the plain network (`train/reuse/plain.py`), which every preset's weights can
be made from. Nothing that is read is executed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from mupax import memory
from mupax.train.checkpoints import saved_run
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.checkpointer import BEST, named_step
from mupax.train.checkpoints.folder import first_of
from mupax.train.checkpoints.workdir import CHECKPOINTS, RECORD
from mupax.train.config.preset import preset_for
from mupax.train.config.run import Config
from mupax.train.config.sections import Step
from mupax.train.core.factors import Factors, resolve
from mupax.train.reuse import plain
from mupax.train.reuse.image_input import ImageInput
from mupax.train.reuse.outline import (
    MODEL,
    RunRecord,
    WeightsError,
    checked_model,
    images_of,
    opened,
    published_ids,
    published_images,
    recorded_run,
)
from mupax.zoo import families
from mupax.zoo.configs import ModelConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.tensorfile import Tensors
from mupax.zoo.huggingface.weights import Params
from mupax.zoo.lora import layer as lora
from mupax.zoo.transformer import LoraConfig, TransformerConfig

_CHECKED_VALUES = 1 << 20


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
        factors, standard = self.preset.get("factors"), self.model.sizes().get("head_dim", 1) ** -0.5
        return factors.get("logits", standard) if isinstance(factors, dict) else standard


def located(path: Path) -> Path:
    """The path, absolute; of a workdir, its newest step."""
    folder, step = named_step(path.absolute())
    if step == BEST:
        return folder / CHECKPOINTS / str(saved_run.find(folder, BEST).step)
    folder = path.absolute()
    folder = folder.parent if folder.name == CHECKPOINTS and (folder.parent / RECORD).is_file() else folder
    if (folder / CHECKPOINTS).is_dir() and (folder / RECORD).is_file():
        return folder / CHECKPOINTS / str(saved_run.find(folder).step)
    return folder


def read(path: Path, step: Step | None = None, *, part: Literal["params", "ema"] = "params") -> WeightsSource:
    """Weights from a path.

    Args:
        path: a run's workdir, one of its steps (workdir/checkpoints/STEP, workdir/checkpoints/best), a folder that
            `mupax import` wrote, or a folder of Hugging Face (config.json and safetensors, whole or in parts).
        step: of a workdir, which checkpoint, or best; the newest unless given.
        part: of a run, its parameters or their moving average.

    Raises:
        WeightsError, WorkdirError, JsonError, TensorFileError, ConfigError: nothing of this kind there, files that do not fit
            together, or values that are NaN or infinite.
    """
    source = _read(path, step, part)
    check_finite(source.stored, path, is_run=source.run is not None)
    return source


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
            f"{ascii(name)[1:-1][:60]} ({count:,} of {params[name].size:,} values)" for name, count in wrong.items()
        ]
        advice = "give an earlier step of the run" if is_run else "get the file again, or another version of it"
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


def _read(path: Path, step: Step | None, part: Literal["params", "ema"]) -> WeightsSource:
    folder, fields, step = opened(path, step)
    if isinstance(fields, RunRecord):
        return _run(folder, fields, step, part)
    if part == "ema":
        raise WeightsError(f"{path}: holds weights, and no moving average beside them; leave --init-ema out")
    if (folder / MODEL).is_file():
        return _imported(path, fields)
    published = huggingface.from_huggingface(fields)
    images, note = published_images(folder, fields, published.model)
    files = Tensors(path)
    _check_memory(files, path)
    loaded = weights.from_huggingface(files, published)
    notes = [f"not read, and read by no model here: {first_of(loaded.dropped)}"] if loaded.dropped else []
    notes += [f"not in the file, so zero: {first_of(loaded.zeros)}"] if loaded.zeros else []
    scales = dict.fromkeys(loaded.params, np.ones(()))
    ids = published_ids(folder, fields, published.model)
    return WeightsSource(published.model, loaded.params, scales, {}, [*notes, *note], images=images, text_ids=ids)


def place(source: WeightsSource, definition: Definition, factors: Factors) -> dict[str, np.ndarray]:
    """Parameters for a model under a preset, one array per parameter in its type, from weights in any form.

    Args:
        source: what `read` gave.
        definition: the model; its activation, eps and positions are the caller's to match (`source.model`).
        factors: of the preset the parameters are for.

    Raises:
        WeightsError: the weights are of another model; the text names what differs.
    """
    differ = source.logits != plain.logits_of(definition, factors)
    if not source.model.absorbs_logit_scale and differ:
        raise WeightsError(
            "queries are normalized without gains (qk_norm): no weight can carry another scale of the logits"
        )
    by, params, gain = plain.scales(definition, factors), dict(source.params), plain.GAIN
    if gain in params and gain not in definition.abstract and (params[gain] == np.float32(by.get(gain, 1))).all():
        del params[gain]  # the readout's multiplier alone, which this model has as such
    shapes = {name: value.shape for name, value in params.items()}
    _check_shapes(shapes, definition, "the weights are of another model")
    placed = plain.restore_multipliers(params, by)
    return {name: np.asarray(placed[name], leaf.dtype) for name, leaf in definition.abstract.items()}


def _imported(path: Path, record: Mapping[str, Any]) -> WeightsSource:
    model, preset = checked_model(path, record), record.get("preset")
    files = Tensors(path)
    # Counted first: a model may be built only if it is no larger than the file.
    if families.params(model) != sum(math.prod(shape) for shape in files.shapes.values()):
        raise WeightsError(f"{path}: the tensors are not the parameters of the model in {MODEL}")
    _check_shapes(files.shapes, definition(model), f"{path}: the weights are of another model than {MODEL} says")
    _check_memory(files, path)
    by, params = _scales(preset, files), {name: files.read(name) for name in files.shapes}
    images, ids = images_of(record, model, path), record.get("text_ids", {})
    return WeightsSource(model, params, by, dict(preset), [], images=images, text_ids=ids)  # pyright: ignore


def _run(
    workdir: Path, recorded: Mapping[str, Any], step: Step | None, part: Literal["params", "ema"]
) -> WeightsSource:
    config, facts = recorded_run(recorded)
    if part == "ema" and config.ema.decay is None:
        raise WeightsError(f"{workdir}: the run kept no moving average (ema.decay is None); leave --init-ema out")
    run = saved_run.find(workdir, step, part == "ema")
    preset, model = preset_for(config.preset, config.model), definition(config.model)
    factors = resolve(preset, model, preset.optimizers[0])
    empty = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in model.abstract.items()}
    average = {name: np.empty(w.shape, np.float32) for name, w in empty.items()}
    params = run.params(SimpleNamespace(params=empty, ema=average))
    record = {**plain.preset_record(config.preset, preset, model, factors), "step": run.step}
    own = run.assets()
    facts |= own.facts if own else {}
    images, by, notes = images_of(facts, config.model, workdir), plain.scales(model, factors), []
    whole_model = config.model
    if isinstance(whole_model, TransformerConfig) and whole_model.lora.rank:
        rank, scale = whole_model.lora.rank, whole_model.lora.scale
        whole_model = dataclasses.replace(whole_model, lora=LoraConfig())
        whole = lora.merged(plain.absorb_multipliers(params, by), scale)
        by, notes = {name: by[name] for name in whole}, [f"adapters of rank {rank} are merged into their matrices"]
        record["scales"] = {name: plain.number(scale) for name, scale in by.items()}
        params = plain.restore_multipliers(whole, by)
    return WeightsSource(whole_model, params, by, record, notes, (config, facts), images, own)


def _scales(preset: Any, files: Tensors) -> plain.Scales:
    """The record's scales, checked: a finite number per tensor, or one for each of its first axis."""
    recorded = preset.get("scales") if isinstance(preset, Mapping) else None
    if not isinstance(recorded, Mapping):
        raise WeightsError(f"{files.path}: {MODEL} has no preset.scales")
    scales: plain.Scales = {}
    for name in [*files.shapes, plain.GAIN]:
        value = recorded.get(name, 1.0 if name == plain.GAIN else None)
        numbers = value if isinstance(value, list) else [value]
        fits = not isinstance(value, list) or (name in files.shapes and [len(value)] == list(files.shapes[name][:1]))
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
    memory.check(bytes_needed, f"the weights in {path}", "Take a machine with more memory, or a smaller model")


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], model: Definition, error: str) -> None:
    """Raises WeightsError where shapes are not a model's; `error` begins the message. Names may be of strangers."""
    target = {name: leaf.shape for name, leaf in model.abstract.items()}
    differing = [
        f"{ascii(name)[1:-1][:60]} is {shapes.get(name, 'missing')} and the model's {target.get(name, 'has none')}"
        for name in sorted(target.keys() | shapes.keys())
        if target.get(name) != shapes.get(name)
    ]
    if differing:
        raise WeightsError(f"{error}: {first_of(differing, '; ')}")
