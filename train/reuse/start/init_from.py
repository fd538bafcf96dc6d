"""Initial state of a run from a checkpoint or safetensors (`--init-from PATH`), and its table.

Every parameter is kept, converted, resized, new or dropped. The function of the source is kept
wherever the two models have the same parameters, whatever their presets: both are the plain network
of `train/reuse/plain.py`, and a parameter moves by the ratio of its scales under the two presets.
Every other difference is refused unless the command line names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mupax import MupaxError, terminal
from mupax.disk import path_of
from mupax.presets import ParamSpec
from mupax.train.checkpoints.folder import first_of
from mupax.train.checkpoints.workdir import read_record, with_tokenizer_of_source
from mupax.train.config.checks import chosen
from mupax.train.config.data import DataConfig
from mupax.train.config.record import from_json, to_json
from mupax.train.config.run import Config, InitConfig
from mupax.train.core import state
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes
from mupax.train.reuse import own_files, plain, runs, trained, transplant
from mupax.train.reuse.source import WeightsSource
from mupax.train.reuse.transplant import (
    ParamTransfer,
    Plan,
    Row,
    ScaledModel,
    Shape,
    TransplantError,
    check_unmovable,
    placed,
    role_of,
)
from mupax.zoo.definition import definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.huggingface.weights import Params

_UNNAMED = DataConfig.tokenizer
"""Default of data.tokenizer. A run with this value counts as one that names no tokenizer."""
RESIZABLE = ("position", "source", "vocab", "classes")
"""Logical axes that `--init-resize` can lengthen or cut, keeping their first entries.

The grid of image positions is interpolated instead."""

UNSEEN = (
    "activation", "branch_activation", "norm", "norm_eps", "positions", "rope_theta",
    "rope_scaling", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "rope_original_len", "window", "full_every", "window_theta", "post_norm", "attention_softcap",
    "logit_softcap", "parallel", "rotary_fraction", "embedding_norm", "shared", "longest_distance",
    "qk_norm", "qk_norm_kind", "pool", "registers", "active_experts", "routing", "patch_size",
    "channels",
)  # fmt: skip
"""Fields of a model's config that change its function, but not always the shapes of parameters.

They must be equal in source and run, unless `--init-change` names them."""

GROWING = ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers", "memory", "encoder_layers")
"""Axes that `mupax grow` can enlarge."""


class InitError(MupaxError):
    """A checkpoint that a run cannot start from. The message says what differs."""


class Start(NamedTuple):
    """Initial parameters and optimizer state of a run, on the host."""

    params: Params
    """Parameters, float32."""
    opt_state: Any
    """Optimizer state. `None` if the optimizer starts anew."""
    rows: list[Row]
    notes: list[str]


class _Refusal(NamedTuple):
    """Difference of one parameter from the source, which the user has not allowed by its name.

    Attributes:
        difference: words for the message, such as "readout (8, 4) is missing from the source".
        flag: `--init-new`, `--init-resize` or `--init-drop`. The user allows the difference by
            naming the parameter behind this flag.
        name: name of the parameter in the run, or in the source for `--init-drop`.
    """

    difference: str
    flag: str
    """Flag that would allow the difference."""
    name: str


def settled(config: Config, folder: Path, held: bool, processes: Processes) -> Config:
    """Return the config with an exact `init.init_from`, the source that the run starts from.

    A new run gets the path of the source's exact step. If the source is weights, the run also gets
    the tokenizer beside them by default. A run that continues gets the source and the tokenizer
    that it recorded. A run that has a checkpoint never reads the source again. A run that was
    stopped before its first checkpoint starts from the source once more. Every process of the run
    must call this function. A caution says if a run that continues has another source than the
    config names.

    Args:
        folder: workdir of the run. It is read only if `held`.
        held: whether the folder holds a run to continue.
        processes: processes of the run. The first one looks the source up for all.

    Raises:
        MupaxError: a new run's source does not exist or cannot be read (see `trained.describe`).
    """
    start = config.init
    if held:
        record = read_record(folder)["config"]
        recorded_init = record.get("init")
        init = InitConfig()
        if recorded_init:
            init = from_json({**to_json(config), "init": recorded_init}).init
        is_other = start.init_from is not None and not _is_source(start.init_from, init.init_from)
        if is_other and processes.leader:
            begin = init.init_from or "fresh parameters"
            terminal.note(
                f"caution: the run in {folder} started from {begin} and goes on, so that "
                f"--init-from {start.init_from} is not read; give another --workdir to start from it"
            )
        current = to_json(config)
        resumed = with_tokenizer_of_source(current, record)
        # `with_tokenizer_of_source` returns its argument where nothing changes.
        if resumed is not current:
            config = from_json(resumed)
        return dataclasses.replace(config, init=init)

    if start.init_from is None:
        return config
    # The source may save a newer step meanwhile. All processes must start from the same one.
    path = processes.broadcast(
        "init_from", lambda: str(trained.describe(path_of(start.init_from or "")).exact_path)
    )
    exact = dataclasses.replace(start, init_from=path)
    return _with_tokenizer(dataclasses.replace(config, init=exact))


def _is_source(path: str, recorded: str | None) -> bool:
    """Return whether a path names the recorded source of a run, perhaps without its step.

    Args:
        recorded: exact path of the source (`settled`), or `None` for fresh parameters.
    """
    if recorded is None:
        return False
    source = path_of(recorded)
    # The recorded path of a run is WORKDIR/checkpoints/STEP, and that of weights may be a file.
    return path_of(path).absolute() in (source, source.parent, source.parent.parent)


def _with_tokenizer(config: Config) -> Config:
    """Return a new run's config with the tokenizer beside the weights that it starts from.

    This applies to a run that names no tokenizer and has the vocabulary of the weights. If it names
    no separator, it gets that of the weights, too. The config of any other run, and of a run that
    starts from another run, is returned unchanged.
    """
    if config.data.task != "tokens" or config.data.tokenizer != _UNNAMED:
        return config
    origin = trained.describe(path_of(config.init.init_from or ""))
    file = origin.tokenizer_file() if origin.run is None else None
    if file is None or origin.model.sizes()["vocab"] != config.model.sizes()["vocab"]:
        return config
    separator = config.data.separator or origin.config.data.separator
    data = dataclasses.replace(config.data, tokenizer=str(file), separator=separator)
    return dataclasses.replace(config, data=data)


def own_settings(config: Config) -> DataConfig:
    """Return a new run's data settings with the tokenizer and chat template files of its source.

    A file of the source is used if both runs name the same tokenizer or template. If the new run
    names a file that exists, this file is used: it may differ from the one that the source was
    trained with. The settings are returned unchanged if the source is weights without a run.

    Args:
        config: config of the new run, with `init.init_from`.

    Raises:
        WeightsError, JsonError, ConfigError, AssetsError: no model at the path, or damaged files.
    """
    origin = trained.describe(path_of(config.init.init_from or ""))
    # Only a run keeps its own tokenizer and template files. Weights without a run have none.
    if origin.run is None:
        return config.data
    settings = own_files.settings(origin.config.data, origin.facts, origin.assets, config.data)
    existing: dict[str, str] = {}
    for name in ("tokenizer", "chat_template"):
        value = getattr(config.data, name)
        if value is not None and path_of(value).is_file():
            existing[name] = value
    return dataclasses.replace(settings, **existing)


def prepare(program: Program, tokenizer: str | None = None) -> Start:
    """Read the source of a run and return the run's initial parameters, table and notes.

    The optimizer state is read only with `init.init_optimizer`. Nothing is written, and no array is
    placed in the run's shardings yet.

    Args:
        program: program of the run, whose config has `init.init_from`. With several processes, each
            one reads the complete source.
        tokenizer: key of the tokenizer that made the run's tokens. `None` if unknown.

    Raises:
        InitError: the source does not fit. The message says what differs and which flags name it.
        WeightsError, JsonError, TensorFileError, ConfigError: no model there, or damaged files.
    """
    config = program.config
    init = config.init
    assert init.init_from is not None
    try:
        source = trained.read(path_of(init.init_from), part="ema" if init.init_ema else "params")
        source_model = ScaledModel(
            source.model, definition(source.model), source.scales, source.logits
        )
        planned = plan(source_model, ScaledModel.of(program), init)
    except (InitError, TransplantError, plain.AbsorbError) as error:
        raise InitError(f"--init-from {init.init_from}: {error}") from error

    # Initial values are drawn only for parameters with new entries, to save memory and time.
    fresh = state.fresh_params(program.definition, config.seed, program.stds, planned.fresh())
    params = transplant.parameters(planned.moves, source.stored, fresh)
    notes = [*source.notes, *_notes(source, config, tokenizer)]
    moments = None
    if init.init_optimizer:
        moments = _optimizer_state(program, source, planned)
        if planned.fresh():
            notes += transplant.overshoot_notes(config.scaled_optimizer)
    return Start(params, moments, planned.rows, notes)


def _optimizer_state(program: Program, source: WeightsSource, planned: Plan) -> Any:
    """Read the optimizer state of the source's run and transfer it to the new run's parameters.

    Raises:
        InitError: the source is weights without a run, or its adapters were merged.
        TransplantError: the runs have different optimizers.
    """
    config = program.config
    path = config.init.init_from
    assert path is not None
    if source.run is None:
        raise InitError(
            f"--init-optimizer: {path} holds no optimizer state, only weights; leave it out"
        )
    source_config, _ = source.run
    # Merged adapters make the model of the weights another one than the run's.
    if source_config.model != source.model:
        raise InitError(
            f"--init-optimizer: {path} trained low-rank adapters, which are merged into their "
            "matrices here; their moments are of no parameter of this run. Leave it out, or go on "
            "with that run by --resume"
        )
    old = runs.whole_state(path_of(path), runs.on_one_device(source_config)).opt_state
    return transplant.optimizer_state(
        planned.moves, old, program.abstract.opt_state, config.optimizer.name
    )


def initial_state(program: Program, start: Start) -> TrainState:
    """Return the state at step 0, every array in its dtype and on its devices.

    Every process of the run must call it. The optimizer state starts anew if `start` has none.

    Args:
        start: result of `prepare` for this program.
    """
    abstract = program.abstract
    params = {name: placed(start.params[name], leaf) for name, leaf in abstract.params.items()}
    state = program.initializer.started(params)
    if start.opt_state is None:
        return state
    return state._replace(opt_state=jax.tree.map(placed, start.opt_state, abstract.opt_state))


def _notes(source: WeightsSource, config: Config, tokenizer: str | None) -> list[str]:
    """Return notes for the user on the run's tokenizer, the moving average, and inexact norms.

    There is a note if the run takes the tokenizer beside the source, if source and run have
    different tokenizers, if the source keeps a moving average, and if absorbed multipliers of skip
    connections change the eps of norms.

    Args:
        tokenizer: key of the run's tokenizer. With `None`, names of tokenizers are compared.
    """
    notes: list[str] = []
    folder = None if config.init.init_from is None else Path(config.init.init_from)
    if source.run is None and Path(config.data.tokenizer).parent == folder:
        notes.append(f"tokens are those of {config.data.tokenizer}, beside the source")

    if source.run is not None and config.data.task == "tokens":
        source_config, facts = source.run
        source_name = source_config.data.tokenizer
        name = config.data.tokenizer
        source_key = facts.get("tokenizer")
        # Keys identify the content. Names are compared where a key is unknown.
        if source_key is None or tokenizer is None:
            differ = source_name != name
        else:
            differ = source_key != tokenizer
        if differ:
            notes.append(
                f"the source reads tokens of {source_name} and this run of {name}; "
                "the same numbers are other text then"
            )

    if source.run is not None and source.run[0].ema.decay is not None:
        if config.init.init_ema:
            notes.append(
                "the weights are the source's moving average, as in evaluations; --no-init-ema "
                "takes the parameters of its last step"
            )
        else:
            notes.append(
                "the weights are the source's parameters; --init-ema takes its moving average, "
                "which evaluations use"
            )

    eps_times = source.preset.get("norm_eps_times")
    if isinstance(eps_times, float):
        notes.append(
            f"the source's skips are folded: its norms' eps counts up to {eps_times:.3g} times"
        )
    return notes


def plan(source: ScaledModel, target: ScaledModel, init: InitConfig) -> Plan:
    """Return the plan by which a run's parameters are made from a source.

    Args:
        source: model of the source under its preset.
        target: model of the run under its preset.
        init: flags that name the parameters that may be new, resized or dropped, and the fields of
            the model that may differ.

    Raises:
        InitError: a difference that no flag allows. The message has the flags that would.
        TransplantError: no parameter can absorb a scale of the preset.
        ConfigError: a pattern that matches no parameter.
    """
    _check_models(source.model, target.model, init.init_change)
    check_unmovable(source, target)
    specs = target.definition.specs
    source_definition = source.definition
    new = chosen(init.init_new, specs, "--init-new")
    resize = chosen(init.init_resize, specs, "--init-resize")
    drop = chosen(init.init_drop, source_definition.specs, "--init-drop")

    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    # Refusals are collected, so that one message lists all flags.
    refused: list[_Refusal] = []
    for name, spec in specs.items():
        role = role_of(spec)
        shape = target.definition.abstract[name].shape
        # An untied readout starts as the transposed token embedding of a tied source.
        is_untied = name == "readout" and source.model.tied_readout
        source_name = "token" if is_untied else name
        old_shape = None
        if source_name in source_definition.specs:
            old_shape = source_definition.abstract[source_name].shape
            if is_untied:
                # The token embedding is [vocab, embed] and a readout is [embed, vocab].
                old_shape = old_shape[::-1]

        if name in new:
            rows.append(Row(name, role, old_shape, shape, "new", "asked for"))
            continue
        if old_shape is None:
            refused.append(
                _Refusal(f"{name} {shape} is missing from the source", "--init-new", name)
            )
            continue
        differing = _differing(spec, old_shape, shape)
        is_same = _is_same(name, old_shape, shape, source.model, target.model)
        if is_same or (name in resize and differing <= set(RESIZABLE)):
            moves[name] = _move(name, source_name, old_shape, shape, source, target)
            action, reason = _action(moves[name], old_shape, shape, source, target)
            rows.append(Row(name, role, old_shape, shape, action, reason))
            continue
        # One row per position or token can be kept without the others. Along other axes a part of
        # the parameter is useless, so the advice is a new parameter.
        can_resize = differing <= {"position", "vocab"}
        flag = "--init-resize" if can_resize else "--init-new"
        difference = f"{name} is {old_shape} in the source and {shape} in this run"
        if old_shape == shape:
            old_side = source.model.position_grid
            new_side = target.model.position_grid
            difference = (
                f"{name} has {old_side}^2 patches in the source and {new_side}^2 in this run"
            )
        refused.append(_Refusal(difference, flag, name))

    for name, spec in source_definition.specs.items():
        if name in specs:
            continue
        shape = source_definition.abstract[name].shape
        if name in drop:
            rows.append(Row(name, role_of(spec), shape, None, "dropped", "asked for"))
        else:
            refused.append(
                _Refusal(f"{name} {shape} is missing from this run", "--init-drop", name)
            )

    if refused:
        raise InitError(_refusal_text(refused, source.model, target.model))
    return Plan(moves, rows)


def _check_models(source: ModelConfig, target: ModelConfig, allowed: Sequence[str]) -> None:
    """Raise `InitError` if a field in `UNSEEN` differs, or for different families of models.

    The error is also raised for a centred model, and for a name in `allowed` that is not in
    `UNSEEN`.

    Args:
        allowed: fields of `UNSEEN` that may differ (`--init-change`).
    """
    if source.family != target.family:
        raise InitError(
            f"the source is of the model family {source.family}, and this run trains one of the "
            f"family {target.family}; write a recipe and --model of the family {source.family}, or "
            "another --init-from"
        )
    if source.centered or target.centered:
        raise InitError(
            "a centred model is its network minus that of its first step, which no checkpoint "
            "holds; write --model.no-centered, and give a source that is not centred"
        )
    unknown = [field for field in allowed if field not in UNSEEN]
    if unknown:
        raise InitError(f"--init-change {unknown[0]}: write one of {', '.join(UNSEEN)}")

    ignored = set(allowed)
    source_positions = getattr(source, "positions", None)
    target_positions = getattr(target, "positions", None)
    if target.sizes().get("position") and source_positions == target_positions == "learned":
        # Learned positions do not rotate, so the rotary base has no effect.
        ignored.add("rope_theta")

    differing: dict[str, tuple[Any, Any]] = {}
    for field in UNSEEN:
        old_value = getattr(source, field, None)
        new_value = getattr(target, field, None)
        if field not in ignored and old_value != new_value:
            differing[field] = (old_value, new_value)
    if not differing:
        return
    sentences = []
    flags = []
    for field, (old_value, new_value) in differing.items():
        sentences.append(f"model.{field} is {old_value} in the source and {new_value} in this run")
        flags.append(f"--model.{field.replace('_', '-')} {old_value}")
    raise InitError(
        f"{'; '.join(sentences)}\nwith this the same weights compute another function; write "
        f"{' '.join(flags)}, or --init-change {' '.join(differing)} to start from them anyway"
    )


def _move(
    name: str,
    source_name: str,
    old_shape: Shape,
    shape: Shape,
    source: ScaledModel,
    target: ScaledModel,
) -> ParamTransfer:
    """Return the transfer of one parameter, resized if the shapes differ.

    The positions of an image model are interpolated, any other axis keeps its first entries. A
    parameter from a source of another name (the tied embedding) is transposed.
    """
    source_model = source.model
    target_model = target.model
    scale = transplant.ratio(source.scales[source_name], target.scales[name])
    is_same = _is_same(name, old_shape, shape, source_model, target_model)
    if is_same or not _is_image_grid(name, source_model, target_model):
        along = [
            transplant.first_entries(old_size, size)
            for old_size, size in zip(old_shape, shape, strict=True)
        ]
        is_transposed = source_name != name
        return ParamTransfer(
            source=source_name, along=tuple(along), scale=scale, transposed=is_transposed
        )
    # The grid is interpolated first, so that every entry of the new shape has a value. Moments of
    # interpolated positions start at 0.
    return ParamTransfer(
        source=source_name,
        along=tuple(np.arange(size) for size in shape),
        scale=scale,
        prepare=lambda position: transplant.resized(position, source_model, target_model),
        moments_along=(np.full(shape[0], -1), np.arange(shape[1])),
    )


def _is_same(
    name: str, old_shape: Shape, shape: Shape, source: ModelConfig, target: ModelConfig
) -> bool:
    """Return whether a parameter has the same shape and grid of patches in both models."""
    # Tables of different grids can have one shape, because registers have rows, too.
    if _is_image_grid(name, source, target) and source.position_grid != target.position_grid:
        return False
    return old_shape == shape


def _is_image_grid(name: str, source: ModelConfig, target: ModelConfig) -> bool:
    """Return whether a parameter has the positions of image patches in both models."""
    return bool(name == "position" and source.position_grid and target.position_grid)


def _action(
    move: ParamTransfer,
    old_shape: Shape,
    shape: Shape,
    source: ScaledModel,
    target: ScaledModel,
) -> tuple[str, str]:
    """Return `action` and `reason` of a transferred parameter's row in the table (`Row`)."""
    reasons = []
    if move.moments_along is not None:
        action = "resized"
        old_side = source.model.position_grid
        new_side = target.model.position_grid
        if old_side != new_side:
            reasons.append(f"bicubic, {old_side}^2 to {new_side}^2 patches")
        # The other rows of a table of positions are of the class token and registers.
        old_leading = old_shape[0] - old_side**2
        new_leading = shape[0] - new_side**2
        if new_leading > old_leading:
            reasons.append(f"{new_leading - old_leading} rows of class token or registers new")
        elif new_leading < old_leading:
            reasons.append(f"{old_leading - new_leading} rows of class token or registers dropped")
    elif old_shape != shape:
        action = "resized"
        for old_size, size in zip(old_shape, shape, strict=True):
            if size > old_size:
                reasons.append(f"first {old_size} kept, {size - old_size} new")
            elif size < old_size:
                reasons.append(f"first {size} of {old_size} kept")
    elif move.transposed:
        action = "converted"
        reasons.append("the embedding it was tied to")
    elif move.times:
        return "converted", f"{move.times}, the presets' multipliers"
    else:
        return "kept", ""

    if move.times:
        reasons.append(move.times)
    return action, ", ".join(reasons)


def _differing(spec: ParamSpec, old_shape: Shape, shape: Shape) -> set[str]:
    """Return the axes whose sizes differ, or "rank" if the number of dimensions does."""
    if len(old_shape) != len(shape):
        return {"rank"}
    differing = set()
    for axis, old_size, size in zip(spec.axes, old_shape, shape, strict=True):
        if old_size != size:
            differing.add(axis)
    return differing


def _refusal_text(refused: list[_Refusal], source: ModelConfig, target: ModelConfig) -> str:
    """Return the error message for differing parameters, with the flags that allow the differences.

    If the new model is only larger, the message names `mupax grow` in place of flags.
    """
    text = first_of([refusal.difference for refusal in refused], "; ")
    # A model that is larger along some axes and smaller along none can grow.
    growth = [target.sizes().get(axis, 0) - source.sizes().get(axis, 0) for axis in GROWING]
    if min(growth) >= 0 < max(growth):
        return (
            f"{text}\nthis model is larger: `mupax grow` makes the checkpoint one of it, with the "
            "same function"
        )
    words = []
    for flag in ("--init-new", "--init-resize", "--init-drop"):
        names = [refusal.name for refusal in refused if refusal.flag == flag]
        if names:
            words.append(f"{flag} {' '.join(names)}")
    return f"{text}\nto start all the same, add {' '.join(words)}"
