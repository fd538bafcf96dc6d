"""A trained model of any origin, opened for use: a step of a run, or weights alone, which lie in a folder of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mupax import terminal
from mupax.disk import JsonError, read_json
from mupax.train.checkpoints import saved_run
from mupax.train.config.data import DataConfig, PixelsConfig
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.run import Config
from mupax.train.config.sections import Step
from mupax.train.data.chats import templates
from mupax.train.reuse import own_files
from mupax.train.reuse.outline import CONFIG, MODEL, WeightsError, outline

if TYPE_CHECKING:
    from mupax.zoo.definition import Arrays

NO_DATA = {"tokens": "text:", "images": "images:"}
"""data.name of weights, which say what they read and not where it is."""
_BATCH = 8


class LoadedWeights(NamedTuple):
    """Weights without a run; beside its `params` it has what `saved_run.LoadedRun` has."""

    workdir: Path
    """Where they lie."""
    config: Config
    """Of a run with this model and preset, whose data have no place (`NO_DATA`)."""
    facts: dict[str, Any]
    """Names of classes, where there are."""
    step: None = None
    weights: Literal["params"] = "params"

    def params(self, abstract: Any) -> Arrays:
        """The weights as the config's preset has them, each in its sharding; what was left out or added is said on stderr.

        Args:
            abstract: the state of a program of `config`.

        Raises:
            WeightsError, TensorFileError: weights that do not fit, or a damaged file.
        """
        import jax

        from mupax.train.core.factors import resolve
        from mupax.train.reuse import source
        from mupax.zoo.definition import definition

        model = definition(self.config.model)
        factors = resolve(preset_of(self.config), model)
        weights = source.read(self.workdir)
        for note in weights.notes:
            terminal.note(f"note: {note}")
        placed = source.place(weights, model, factors)
        return {name: jax.device_put(placed[name], leaf.sharding) for name, leaf in abstract.params.items()}


def described(opened: saved_run.LoadedRun | LoadedWeights, path: Path) -> str:
    """Which weights they are, in words.

    Args:
        opened: of `find`.
        path: as it was written.
    """
    if opened.step is None:
        return str(path)
    return f"step {opened.step} of {path}, {'its moving average' if opened.weights == 'ema' else 'its parameters'}"


def find(
    path: Path, step: Step | None = None, average: bool | None = None, *, writes: bool = False
) -> saved_run.LoadedRun | LoadedWeights:
    """Open what a path names, without its arrays. The config of a run names the run's own tokenizer and chat template.

    Args:
        path: a run's workdir, one of its steps, a folder that `mupax import` wrote, or one of Hugging Face.
        step: of a run, which checkpoint, or best; the newest unless given.
        average: whether the moving average is meant; where the run has one, unless given.
        writes: whether weights of an encoder-decoder are to write alone, for which the noise of its training need not be known.

    Raises:
        WorkdirError, ConfigError, JsonError: as `saved_run.find`; or an asset of the run is missing or damaged.
        WeightsError: a step or an average of weights that have none, or weights of an encoder-decoder, which reads text with noise.
    """
    if not _is_weights(path):
        return run_of(path, step, average)
    if step is not None or average is not None:
        raise WeightsError(
            f"{path} holds weights, and no run with steps or a moving average; leave --step and --ema out"
        )
    origin = outline(path)
    model, images = origin.model, origin.images
    if model.denoises and not writes:
        raise WeightsError(
            f"{path} holds an {model.family}, and not what noise it was trained on; start `mupax train ed-tiny` with --init-from "
            "and --data.noise, and use that run"
        )
    data = DataConfig(
        name=NO_DATA[model.task],
        batch_size=_BATCH,
        tokenizer=origin.tokenizer,
        separator=origin.separator,
        pixels=PixelsConfig() if images is None else images.pixels,
        noise="sentinels" if model.denoises else None,
    )
    if data.tokenizer == "bytes" and model.task == "tokens" and (path / templates.FILE).is_file():
        data = dataclasses.replace(data, chat_template=str(path / templates.FILE))
    config = Config(recipe="weights", model=model, data=data, preset=origin.preset or PresetConfig(name="sp"), steps=1)
    names = None if images is None else images.class_names
    return LoadedWeights(path, config, {} if names is None else {"class_names": list(names)})


def run_of(path: Path, step: Step | None = None, average: bool | None = None) -> saved_run.LoadedRun:
    """Return a step of a run, without its arrays. Its config names the run's own tokenizer and chat template.

    Args:
        path: a run's workdir, or one of its steps.
        step: which checkpoint, or best; the newest unless given.
        average: whether the moving average is meant; where the run has one, unless given.

    Raises:
        WorkdirError, ConfigError, JsonError: as `saved_run.find`; or an asset of the run is missing or damaged.
    """
    run = saved_run.find(path, step, average)
    own = run.assets()
    data = own_files.settings(run.config.data, run.facts, own)
    facts = {**run.facts, **(own.facts if own else {})}
    return run._replace(config=dataclasses.replace(run.config, data=data), facts=facts)


def _is_weights(path: Path) -> bool:
    if (path / MODEL).is_file():
        return True
    try:
        return (path / CONFIG).is_file() and "model_type" in read_json(path / CONFIG)
    except JsonError:
        return False  # a run, whose record may lie in its checkpoints too
