"""Weights from elsewhere: of a run, of Hugging Face, or imported before; and into any preset's form.

Everything read becomes a `Source`: the weights of the plain network (`train/reuse/plain.py`), which every preset's weights can
be made from. Nothing that is read is executed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import Preset
from mupax.train.checkpoints import manifest
from mupax.train.checkpoints.workdir import CHECKPOINTS, RECORD
from mupax.train.config.record import from_json, model_from_json
from mupax.train.config.run import Config, MeshConfig, PresetConfig, preset_for
from mupax.train.core.factors import Factors, resolve
from mupax.train.reuse import plain as fold
from mupax.zoo import flops
from mupax.zoo.configs import ModelConfig
from mupax.zoo.definition import Definition, definition
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.tensorfile import Tensors, read_json
from mupax.zoo.huggingface.weights import Params

if TYPE_CHECKING:
    from mupax.train.core.state import TrainState

MODEL = "model.json"
"""Beside imported weights: the model, the preset whose form they are in, and what folds them."""

FORMAT = "mupax-weights-1"

CONFIG = "config.json"

LOGITS = "block.attention.logit_scale"
"""The factor of attention logits, by its name in a definition."""


class WeightsError(MupaxError):
    """Weights that are not there, or that do not fit. The text says which and what to write instead."""


class Source(NamedTuple):
    """Weights of the plain network, and the model they are of."""

    model: ModelConfig
    stored: Params
    """As they lie in the file."""
    scales: fold.Scales
    """What each is times as large in the plain network."""
    preset: dict[str, Any]
    """What is known of the preset they come from: `fields`, `described` and what was folded, `scales`. Empty for others'."""
    notes: list[str]
    """What was left out or added in reading, one sentence each."""
    run: tuple[Config, dict[str, Any]] | None = None
    """The run they come from, and what it recorded of its data."""

    @property
    def params(self) -> Params:
        """Those of the plain network: float32, multipliers folded."""
        return fold.fold(self.stored, self.scales)

    @property
    def logits(self) -> Any:
        """What attention logits are taken times there: a number, or one per layer."""
        factors, plain = self.preset.get("factors"), self.model.sizes().get("head_dim", 1) ** -0.5
        return factors.get(LOGITS, plain) if isinstance(factors, dict) else plain


def located(path: Path) -> Path:
    """The path, absolute; of a workdir, its newest step."""
    folder = path.absolute()
    folder = folder.parent if folder.name == CHECKPOINTS and (folder.parent / RECORD).is_file() else folder
    if (folder / CHECKPOINTS).is_dir() and (folder / RECORD).is_file():
        return folder / CHECKPOINTS / str(_newest(folder))
    return folder


def read(path: Path, step: int | None = None, *, part: Literal["params", "ema"] = "params") -> Source:
    """Weights from a path.

    Args:
        path: a run's workdir, one of its steps (workdir/checkpoints/STEP), a folder that `python -m zoo import` wrote, or a
            folder of Hugging Face (config.json and safetensors, whole or in parts).
        step: of a workdir, which checkpoint; the newest unless given.
        part: of a run, its parameters or their moving average.

    Raises:
        WeightsError, TensorFileError, ConfigError: nothing of this kind there, or files that do not fit together.
    """
    folder = path if path.is_dir() else path.parent
    if (folder.parent / RECORD).is_file() and folder.name == CHECKPOINTS:
        return read(folder.parent, step, part=part)
    if folder.name.isdigit() and folder.parent.name == CHECKPOINTS:
        return read(folder.parent.parent, int(folder.name), part=part)
    if (folder / MODEL).is_file():
        return _imported(_without_ema(path, part), read_json(folder / MODEL))
    if not (folder / CONFIG).is_file():
        raise WeightsError(
            f"{path}: no run and no weights there ({CONFIG} is missing); give a workdir, workdir/{CHECKPOINTS}/STEP, "
            "a folder of `python -m zoo import`, or one of Hugging Face with config.json and safetensors"
        )
    fields = read_json(folder / CONFIG)
    if "model_type" not in fields and "config" in fields:
        return _run(folder, fields, step, part)
    published = huggingface.from_huggingface(fields)
    _without_ema(path, part)
    loaded = weights.from_huggingface(Tensors(path), published)
    notes = [f"not read, and read by no model here: {_some(loaded.dropped)}"] if loaded.dropped else []
    notes += [f"not in the file, so zero: {_some(loaded.zeros)}"] if loaded.zeros else []
    return Source(published.model, loaded.params, fold.ones(loaded.params), {}, notes)


def load_weights(path: Path, definition: Definition, factors: Factors) -> dict[str, np.ndarray]:
    """Parameters for a model under a preset, from weights in any form.

    Args:
        path: as for `read`.
        definition: the model; its activation, eps and positions are the caller's to match (`read(path).model`).
        factors: of the preset the parameters are for.

    Returns:
        One array per parameter of the definition, in its type.

    Raises:
        WeightsError: the file is of another model; the text names what differs.
    """
    return place(read(path), definition, factors)


def place(source: Source, definition: Definition, factors: Factors) -> dict[str, np.ndarray]:
    """`load_weights` of weights already read."""
    differ = source.logits != logits_of(definition, factors)
    if not source.model.absorbs_logit_scale and differ:
        raise WeightsError(
            "queries are normalized without gains (qk_norm): no weight can carry another scale of the logits"
        )
    by, params = fold.scales(definition, factors), dict(source.params)
    if (
        fold.GAIN in params
        and fold.GAIN not in definition.abstract
        and (params[fold.GAIN] == np.float32(by.get(fold.GAIN, 1))).all()
    ):
        del params[fold.GAIN]  # the readout's multiplier alone, which this model has as such
    wanted = {name: leaf.shape for name, leaf in definition.abstract.items()}
    found = {name: value.shape for name, value in params.items()}
    differing = [
        f"{name} is {found.get(name, 'missing')} and the model's {wanted.get(name, 'has none')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        raise WeightsError(f"the weights are of another model: {_some(differing, '; ')}")
    placed = fold.unfold(params, by)
    return {name: np.asarray(placed[name], leaf.dtype) for name, leaf in definition.abstract.items()}


def _imported(path: Path, record: Mapping[str, Any]) -> Source:
    if record.get("format") != FORMAT:
        raise WeightsError(f"{path}: {MODEL} has format {record.get('format')!r:.40}; this version reads {FORMAT}")
    model, preset = model_from_json(record.get("model", {})), record.get("preset")
    files = Tensors(path)
    # Counted first: a model may be built only if it is no larger than the file.
    if flops.params(model) != sum(math.prod(shape) for shape in files.shapes.values()):
        raise WeightsError(f"{path}: the tensors are not the parameters of the model in {MODEL}")
    _check_shapes(path, files.shapes, definition(model), MODEL)
    by = _scales(preset, files)
    return Source(model, {name: files.read(name) for name in files.shapes}, by, dict(preset), [])  # pyright: ignore


def logits_of(definition: Definition, factors: Factors) -> Any:
    """What a preset takes attention logits times: a number, or one per layer where they differ."""
    numbers = factors.forward.get(LOGITS)
    return definition.sizes.get("head_dim", 1) ** -0.5 if numbers is None else _plain(numbers)


def whole_state(path: Path, config: Config) -> TrainState:
    """The whole training state of a run's step, on one device of this process.

    Args:
        path: workdir/checkpoints/STEP.
        config: of the run, as it recorded it.

    Raises:
        WeightsError: the checkpoint holds another state than the config says.
    """
    import jax
    from orbax.checkpoint import v1 as ocp

    from mupax.train.core.program import assemble
    from mupax.train.core.state import TrainState

    # One device serves any run: restoring places the arrays anew.
    abstract = assemble(dataclasses.replace(config, mesh=MeshConfig(data=1)), jax.local_devices()[:1]).abstract.arrays()
    stored = _metadata(path)
    shapes, wanted = (
        [(jax.tree_util.keystr(at), leaf.shape) for at, leaf in jax.tree.leaves_with_path(tree)]
        for tree in (stored, abstract)
    )
    if [shape for _, shape in shapes] != [shape for _, shape in wanted]:
        raise WeightsError(f"{path}: the checkpoint holds another state than {RECORD} says")
    return TrainState(**ocp.load(str(path.absolute()), abstract))


def _newest(workdir: Path) -> int:
    steps = manifest.steps(workdir / CHECKPOINTS)
    if not steps:
        raise WeightsError(f"{workdir}: the run has no checkpoint yet")
    return max(steps)


def _without_ema(path: Path, part: str) -> Path:
    if part == "ema":
        raise WeightsError(
            f"{path}: holds weights of one kind, and no moving average beside them; leave --init-ema out"
        )
    return path


def _run(workdir: Path, recorded: Mapping[str, Any], step: int | None, part: str) -> Source:
    config, facts = from_json(recorded["config"]), recorded.get("data")
    if part == "ema" and config.ema.decay is None:
        raise WeightsError(f"{workdir}: the run kept no moving average (ema.decay is None); leave --init-ema out")
    step = _newest(workdir) if step is None else step
    if not (workdir / CHECKPOINTS / str(step)).is_dir():
        raise WeightsError(f"{workdir}: the run has no checkpoint of step {step}")
    try:
        manifest.verified(workdir / CHECKPOINTS / str(step))
    except manifest.DamagedError as error:
        raise WeightsError(
            f"{workdir}: checkpoint {step} is damaged: {error}; give an older one as {workdir / CHECKPOINTS}/STEP"
        ) from error
    preset, model = preset_for(config.preset, config.model), definition(config.model)
    factors = resolve(preset, model, preset.optimizers[0])
    params = _checkpoint(workdir / CHECKPOINTS / str(step), model, part)
    record = {**preset_record(config.preset, preset, model, factors), "step": step}
    run = (config, facts if isinstance(facts, dict) else {})
    return Source(config.model, params, fold.scales(model, factors), record, [], run)


def _checkpoint(folder: Path, model: Definition, part: str = "params") -> dict[str, np.ndarray]:
    """The parameters of a training state (or their average), without the rest of it."""
    import jax
    from orbax.checkpoint import v1 as ocp

    stored = _metadata(folder)
    _check_shapes(folder, {name: leaf.shape for name, leaf in stored[part].items()}, model, RECORD)

    def wanted(leaf: Any) -> np.ndarray:
        return np.empty(leaf.shape, leaf.dtype)

    abstract = {
        name: jax.tree.map(wanted if name == part else lambda _: ocp.PLACEHOLDER, tree) for name, tree in stored.items()
    }
    return dict(ocp.load(str(folder.absolute()), abstract)[part])


def _metadata(folder: Path) -> Any:
    """Shapes of what a checkpoint holds."""
    from orbax.checkpoint import v1 as ocp

    try:
        manifest.verified(folder)
        stored: Any = ocp.metadata(str(folder.absolute())).metadata
        [leaf.shape for leaf in stored["params"].values()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{folder}: not a whole checkpoint: {error}") from error
    return stored


def preset_record(given: PresetConfig, preset: Preset, model: Definition, factors: Factors) -> dict[str, Any]:
    """What is written beside weights: the preset, its forward factors, and what each weight is taken times to be plain.

    `norm_eps_times` stands there where the stream's skips were folded: up to so many times the eps of a norm counts, which
    is the one thing that no weight can carry.
    """
    skips = [factors.forward[name] for name, kind in _forward(model, factors).items() if kind == "skip"]
    inexact = {"norm_eps_times": float(np.prod(skips[0], dtype=np.float64) ** -2)} if skips else {}
    return {
        **inexact,
        "described": preset.describe(),
        "fields": {name: value for name, value in dataclasses.asdict(given).items() if value not in (None, (), False)},
        "base": dict(preset.base) if preset.base else None,
        "factors": {kind: _plain(factors.forward[name]) for name, kind in _forward(model, factors).items()},
        "scales": fold.to_json(fold.scales(model, factors)),
    }


def _forward(model: Definition, factors: Factors) -> dict[str, str]:
    return {name: declared["kind"] for name, declared in model.factors.items() if name in factors.forward}


def _plain(numbers: np.ndarray) -> Any:
    return float(numbers.flat[0]) if np.ptp(numbers) == 0 else np.asarray(numbers).tolist()


def _scales(preset: Any, files: Tensors) -> fold.Scales:
    """The record's scales, checked: a finite number per tensor, or one for each of its first axis."""
    given = preset.get("scales") if isinstance(preset, Mapping) else None
    if not isinstance(given, Mapping):
        raise WeightsError(f"{files.path}: {MODEL} has no preset.scales")
    found: fold.Scales = {}
    for name in [*files.shapes, fold.GAIN]:
        value = given.get(name, 1.0 if name == fold.GAIN else None)
        numbers = value if isinstance(value, list) else [value]
        fits = not isinstance(value, list) or (name in files.shapes and [len(value)] == list(files.shapes[name][:1]))
        if not fits or not all(type(n) in (int, float) and 0 < abs(n) < 1e30 for n in numbers):
            raise WeightsError(f"{files.path}: {MODEL} has no usable scale for {name[:60]!a}")
        found[name] = np.asarray(value, np.float64)
    if fold.GAIN not in files.shapes and found[fold.GAIN] == 1:
        del found[fold.GAIN]
    return found


def _check_shapes(path: Path, shapes: Mapping[str, Any], model: Definition, record: str) -> None:
    wanted = {name: leaf.shape for name, leaf in model.abstract.items()}
    if wrong := sorted(name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name)):
        shown = _some([ascii(name)[1:-1][:60] for name in wrong])
        raise WeightsError(f"{path}: the weights are of another model than {record} says: they differ in {shown}")


def _some(names: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - 3} more" if len(names) > 3 else ""
    return between.join(names[:3]) + more
