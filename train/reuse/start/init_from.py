"""`--init-from PATH`: the state a run starts with, made from a checkpoint or from safetensors; and the table of what became of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from mupax import terminal
from mupax.disk import path_of
from mupax.train.checkpoints.workdir import read_record, with_tokenizer_of_source
from mupax.train.config.data import DataConfig
from mupax.train.config.record import from_json, to_json
from mupax.train.config.run import Config, InitConfig
from mupax.train.core import state
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.parallel.processes import Processes
from mupax.train.reuse import own_files, plain, runs, transplant
from mupax.train.reuse import source as pretrained
from mupax.train.reuse.outline import outline
from mupax.train.reuse.source import WeightsSource
from mupax.train.reuse.start.plan import InitError, Row, ScaledModel, plan
from mupax.zoo.definition import definition
from mupax.zoo.huggingface.weights import Params

_UNNAMED = DataConfig.tokenizer
"""data.tokenizer of a run that names none."""


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
    path = processes.broadcast("init_from", lambda: str(pretrained.located(path_of(start.init_from or ""))))
    return _with_tokenizer(dataclasses.replace(config, init=dataclasses.replace(start, init_from=path)))


def _with_tokenizer(config: Config) -> Config:
    """Return a new run's config with the tokenizer that lies beside the weights it starts from.

    A run that has the vocabulary of such weights, and names no tokenizer, reads their tokens: bytes would be other text.
    """
    if config.data.task != "tokens" or config.data.tokenizer != _UNNAMED:
        return config
    origin = outline(path_of(config.init.init_from or ""))
    if origin.run is not None or origin.model.task != "tokens" or origin.tokenizer == _UNNAMED:
        return config
    if not path_of(origin.tokenizer).is_file() or origin.model.sizes()["vocab"] != config.model.sizes()["vocab"]:
        return config
    separator = config.data.separator or origin.separator
    data = dataclasses.replace(config.data, tokenizer=origin.tokenizer, separator=separator)
    return dataclasses.replace(config, data=data)


def own_settings(config: Config) -> DataConfig:
    """Return a new run's settings of data, with the tokenizer and template of its source where both name the same ones.

    A file that is there is meant as it is: the same path may have named another one when the source was trained.

    Args:
        config: of the new run, whose `init.init_from` is given.

    Raises:
        WeightsError, JsonError, ConfigError, AssetsError: nothing of this kind there, or files that are not whole.
    """
    origin = outline(path_of(config.init.init_from or ""))
    if origin.run is None:
        return config.data
    before, facts = origin.run
    settings = own_files.settings(before.data, facts, origin.assets, config.data)
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
        source = pretrained.read(path_of(init.init_from), part="ema" if init.init_ema else "params")
        there = ScaledModel(source.model, definition(source.model), source.scales, source.logits)
        planned = plan(there, ScaledModel.of(program), init)
    except (InitError, plain.AbsorbError) as error:
        raise InitError(f"--init-from {init.init_from}: {error}") from error
    fresh = state.fresh_params(program.definition, config.seed, program.stds, planned.fresh())
    params = transplant.parameters(planned.moves, source.stored, fresh)
    moments = None
    notes = [*source.notes, *_notes(source, config, tokenizer)]
    if init.init_optimizer:
        if source.run is None:
            raise InitError(f"--init-optimizer: {init.init_from} holds no optimizer state, only weights; leave it out")
        if source.run[0].model != source.model:
            raise InitError(
                f"--init-optimizer: {init.init_from} trained low-rank adapters, which are merged into their matrices here; "
                "their moments are of no parameter of this run. Leave it out, or go on with that run by --resume"
            )
        old = runs.whole_state(path_of(init.init_from), runs.on_one_device(source.run[0])).opt_state
        moments = transplant.optimizer_state(planned.moves, old, program.abstract.opt_state, config.optimizer.name)
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


def show(console: Console, title: str, rows: list[Row], notes: list[str]) -> None:
    """Print the table of what became of every parameter.

    Args:
        console: where.
        title: above the table.
        rows: of the table.
        notes: below it.
    """
    table = [("parameter", "role", "there", "here", "", "why")]
    for row in rows:
        there, here = ("x".join(map(str, shape)) if shape is not None else "" for shape in (row.there, row.here))
        table.append((row.name, row.role, there, here, row.action, row.reason))
    actions = [row.action for row in rows]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    prose = map(terminal.wrapped, (title, counts, *(f"note: {note}" for note in notes)))
    for line in (next(prose), terminal.table(terminal.filled(table)), *prose):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def placed(value: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of the host on its devices and in its type; every process puts its part.

    Args:
        value: the whole array, on every process.
        leaf: shape, dtype and sharding that it is to have.
    """
    host = np.asarray(value).astype(leaf.dtype)
    assert leaf.sharding is not None
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])


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
        notes.append(f"the source's skips are folded: its norms' eps counts up to {times:.3g} times")
    return notes
