"""`--init-from PATH`: the state a run starts with, made from a checkpoint or from safetensors; and the table of what became of it.

Every parameter is kept, converted, resized, new or dropped. The function of the source is kept wherever the two models have the
same parameters, whatever their presets: both are the plain network of `train/reuse/plain.py`, and a parameter moves by the ratio
of what the two presets take it times. Everything else is refused unless the command line names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mupax.disk import path_of
from mupax.errors import MupaxError
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
"""data.tokenizer of a run that names none."""
RESIZABLE = ("position", "source", "vocab", "classes")
"""Axes whose first entries can be kept (of images' positions: the grid interpolated)."""

UNSEEN = (
    "activation", "branch_activation", "norm", "norm_eps", "positions", "rope_theta", "rope_scaling", "rope_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_len", "window", "full_every", "window_theta",
    "post_norm", "attention_softcap",
    "logit_softcap", "parallel", "rotary_fraction", "embedding_norm", "shared",
    "longest_distance", "qk_norm", "qk_norm_kind", "pool", "registers", "active_experts", "routing",
    "patch_size", "channels",
)  # fmt: skip
"""Fields of a model that change its function and that the shapes of parameters need not show."""

GROWING = ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers", "memory", "encoder_layers")


class InitError(MupaxError):
    """A checkpoint that a run cannot start from, as asked. The text says what differs and what to write."""


class Start(NamedTuple):
    """What a run starts with, on the host."""

    params: Params
    """float32."""
    opt_state: Any
    """None where it starts anew."""
    rows: list[Row]
    notes: list[str]


def settled(config: Config, folder: Path, held: bool, processes: Processes) -> Config:
    """The config with the source it is to have: the exact step, for a new run; what it recorded, for one gone on with.

    A run that has a checkpoint never reads the source again; one that was stopped before its first starts from it once more.

    Args:
        config: as it was asked for.
        folder: of the run.
        held: whether it holds a run to go on with.
        processes: of the run; the first looks the source up for all.
    """
    start = config.init
    if held:
        record = read_record(folder)["config"]
        recorded = record.get("init")
        init = from_json({**to_json(config), "init": recorded}).init if recorded else InitConfig()
        now = to_json(config)
        resumed = with_tokenizer_of_source(now, record)
        config = config if resumed is now else from_json(resumed)
        return dataclasses.replace(config, init=init)
    if start.init_from is None:
        return config
    path = processes.broadcast(
        "init_from", lambda: str(trained.describe(path_of(start.init_from or "")).exact_path)
    )
    return _with_tokenizer(
        dataclasses.replace(config, init=dataclasses.replace(start, init_from=path))
    )


def _with_tokenizer(config: Config) -> Config:
    """Return a new run's config with the tokenizer that lies beside the weights it starts from.

    A run that has the vocabulary of such weights, and names no tokenizer, reads their tokens: bytes would be other text.
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
    """Return a new run's settings of data, with the tokenizer and template of its source where both name the same ones.

    A file that is there is meant as it is: the same path may have named another one when the source was trained.

    Args:
        config: of the new run, whose `init.init_from` is given.

    Raises:
        WeightsError, JsonError, ConfigError, AssetsError: nothing of this kind there, or files that are not whole.
    """
    origin = trained.describe(path_of(config.init.init_from or ""))
    if origin.run is None:
        return config.data
    settings = own_files.settings(origin.config.data, origin.facts, origin.assets, config.data)
    there: dict[str, str] = {}
    for name in ("tokenizer", "chat_template"):
        word = getattr(config.data, name)
        if word is not None and path_of(word).is_file():
            there[name] = word
    return dataclasses.replace(settings, **there)


def prepare(program: Program, tokenizer: str | None = None) -> Start:
    """Read the source of a run and fit its weights to the run. Nothing is written or put on devices.

    Args:
        program: of the run.
        tokenizer: key of the tokenizer that made the run's tokens, where it is known.

    Raises:
        InitError, TransplantError: it does not fit; the text says what differs and which flags name it.
        WeightsError, JsonError, TensorFileError, ConfigError: nothing of this kind there, or files that are not whole.
    """
    config = program.config
    init = config.init
    assert init.init_from is not None
    try:
        source = trained.read(path_of(init.init_from), part="ema" if init.init_ema else "params")
        there = ScaledModel(source.model, definition(source.model), source.scales, source.logits)
        planned = plan(there, ScaledModel.of(program), init)
    except (InitError, TransplantError, plain.AbsorbError) as error:
        raise InitError(f"--init-from {init.init_from}: {error}") from error
    fresh = state.fresh_params(program.definition, config.seed, program.stds, planned.fresh())
    params = transplant.parameters(planned.moves, source.stored, fresh)
    moments = None
    notes = [*source.notes, *_notes(source, config, tokenizer)]
    if init.init_optimizer:
        if source.run is None:
            raise InitError(
                f"--init-optimizer: {init.init_from} holds no optimizer state, only weights; leave it out"
            )
        if source.run[0].model != source.model:
            raise InitError(
                f"--init-optimizer: {init.init_from} trained low-rank adapters, which are merged into their matrices here; "
                "their moments are of no parameter of this run. Leave it out, or go on with that run by --resume"
            )
        old = runs.whole_state(path_of(init.init_from), runs.on_one_device(source.run[0])).opt_state
        moments = transplant.optimizer_state(
            planned.moves, old, program.abstract.opt_state, config.optimizer.name
        )
        notes += transplant.overshoot_notes(config.scaled_optimizer) if planned.fresh() else []
    return Start(params, moments, planned.rows, notes)


def initial_state(program: Program, start: Start) -> TrainState:
    """The state at step 0, every array in its type and on its devices.

    Args:
        program: of the run.
        start: of `prepare`, for this program.
    """
    abstract = program.abstract
    params = {name: placed(start.params[name], leaf) for name, leaf in abstract.params.items()}
    state = program.initializer.started(params)
    if start.opt_state is None:
        return state
    return state._replace(opt_state=jax.tree.map(placed, start.opt_state, abstract.opt_state))


def _notes(source: WeightsSource, config: Config, tokenizer: str | None) -> list[str]:
    notes: list[str] = []
    folder = None if config.init.init_from is None else Path(config.init.init_from)
    if source.run is None and Path(config.data.tokenizer).parent == folder:
        notes.append(f"tokens are those of {config.data.tokenizer}, beside the source")
    if source.run is not None and config.data.task == "tokens":
        before, facts = source.run
        name = before.data.tokenizer
        here = config.data.tokenizer
        key = facts.get("tokenizer")
        differ = name != here if key is None or tokenizer is None else key != tokenizer
        if differ:
            notes.append(
                f"the source reads tokens of {name} and this run of {here}; the same numbers are other text then"
            )
    if isinstance(times := source.preset.get("norm_eps_times"), float):
        notes.append(
            f"the source's skips are folded: its norms' eps counts up to {times:.3g} times"
        )
    return notes


def plan(there: ScaledModel, here: ScaledModel, init: InitConfig) -> Plan:
    """How a run starts from a source.

    Args:
        there: the source.
        here: the run.
        init: what may be new, resized, dropped, or differ.

    Raises:
        InitError: the two differ in something that was not named; the text has the flags that name it.
        ConfigError: a pattern that means no parameter.
    """
    _check_models(there.model, here.model, init.init_change)
    check_unmovable(there, here)
    specs, before = here.definition.specs, there.definition
    new = chosen(init.init_new, specs, "--init-new")
    resize = chosen(init.init_resize, specs, "--init-resize")
    drop = chosen(init.init_drop, before.specs, "--init-drop")
    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    refused: list[tuple[str, str, str]] = []
    for name, spec in specs.items():
        role, shape = role_of(spec), here.definition.abstract[name].shape
        source = "token" if name == "readout" and there.model.tied_readout else name
        old = before.abstract[source].shape if source in before.specs else None
        old = old[::-1] if old is not None and source != name else old
        if name in new:
            rows.append(Row(name, role, old, shape, "new", "asked for"))
        elif old is None:
            refused.append((f"{name} {shape} is not there", "--init-new", name))
        elif old == shape or (name in resize and _differing(spec, old, shape) <= set(RESIZABLE)):
            moves[name] = _move(name, source, old, shape, there, here)
            rows.append(Row(name, role, old, shape, *_action(moves[name], old, shape, there, here)))
        else:
            flag = (
                "--init-resize"
                if _differing(spec, old, shape) <= {"position", "vocab"}
                else "--init-new"
            )
            refused.append((f"{name} is {old} there and {shape} here", flag, name))
    for name, spec in before.specs.items():
        if name not in specs and name in drop:
            rows.append(
                Row(name, role_of(spec), before.abstract[name].shape, None, "dropped", "asked for")
            )
        elif name not in specs:
            refused.append(
                (f"{name} {before.abstract[name].shape} is not here", "--init-drop", name)
            )
    if refused:
        raise InitError(_refusal(refused, there.model, here.model))
    return Plan(moves, rows)


def _check_models(there: ModelConfig, here: ModelConfig, allowed: Sequence[str]) -> None:
    if there.family != here.family:
        raise InitError(
            f"it is a {there.family}, and this run trains a {here.family}; give --model one of its family"
        )
    if there.centered or here.centered:
        raise InitError(
            "a centred model is its network minus that of its first step, which no checkpoint holds; "
            "write --model.no-centered, and give a source that is not centred"
        )
    if unknown := [field for field in allowed if field not in UNSEEN]:
        raise InitError(f"--init-change {unknown[0]}: write one of {', '.join(UNSEEN)}")
    learned = getattr(here, "positions", None) == "learned" == getattr(there, "positions", None)
    free = {*allowed, "rope_theta"} if here.sizes().get("position") and learned else allowed
    if wrong := [
        f for f in UNSEEN if f not in free and getattr(there, f, None) != getattr(here, f, None)
    ]:
        fields = [
            f"model.{f} is {getattr(there, f)} there and {getattr(here, f)} here" for f in wrong
        ]
        flags = " ".join(f"--model.{f.replace('_', '-')} {getattr(there, f)}" for f in wrong)
        raise InitError(
            f"{'; '.join(fields)}\nthe same weights are another function then; write {flags}, or to start from them all the "
            f"same --init-change {' '.join(wrong)}"
        )


def _move(
    name: str, source: str, old: Shape, shape: Shape, there: ScaledModel, here: ScaledModel
) -> ParamTransfer:
    """A parameter that comes from the source's, resized where the shapes differ."""
    along = tuple(transplant.first(a, b) for a, b in zip(old, shape, strict=True))
    scale = transplant.ratio(there.scales[source], here.scales[name])
    move = ParamTransfer(source=source, along=along, scale=scale, transposed=source != name)
    before, after = there.model, here.model
    if old == shape or name != "position" or not (before.position_grid and after.position_grid):
        return move
    return dataclasses.replace(
        move,
        along=tuple(map(np.arange, shape)),
        prepared=lambda position: transplant.resized(position, before, after),
        moments_along=(np.full(shape[0], -1), np.arange(shape[1])),
    )


def _action(
    move: ParamTransfer, old: Shape, shape: Shape, there: ScaledModel, here: ScaledModel
) -> tuple[str, str]:
    """Action and reason."""
    if move.moments_along is not None:
        sides = [f"{model.position_grid}^2" for model in (there.model, here.model)]
        action, reason = "resized", [f"bicubic, {' to '.join(sides)} patches"]
    elif old != shape:
        sizes = [(a, b) for a, b in zip(old, shape, strict=True) if a != b]
        reason = [
            f"first {min(a, b)} kept, {b - a} new" if b > a else f"first {b} of {a} kept"
            for a, b in sizes
        ]
        action = "resized"
    elif move.transposed:
        action, reason = "converted", ["the embedding it was tied to"]
    else:
        return (
            ("converted", f"{move.times}, the presets' multipliers") if move.times else ("kept", "")
        )
    return action, ", ".join([*reason, move.times] if move.times else reason)


def _differing(spec: ParamSpec, old: Shape, shape: Shape) -> set[str]:
    if len(old) != len(shape):
        return {"rank"}
    return {axis for axis, a, b in zip(spec.axes, old, shape, strict=True) if a != b}


def _refusal(refused: list[tuple[str, str, str]], there: ModelConfig, here: ModelConfig) -> str:
    text = first_of([differs for differs, _, _ in refused], "; ")
    growth = [here.sizes().get(axis, 0) - there.sizes().get(axis, 0) for axis in GROWING]
    if min(growth) >= 0 < max(growth):
        return f"{text}\nthis model is larger: `mupax grow` makes the checkpoint one of it, with the same function"
    flags = {
        flag: [n for _, f, n in refused if f == flag]
        for flag in ("--init-new", "--init-resize", "--init-drop")
    }
    words = " ".join(f"{flag} {' '.join(names)}" for flag, names in flags.items() if names)
    return f"{text}\nto start all the same, add {words}"
