"""Trained models opened for use: runs, steps of runs, imported weights and Hugging Face's folders.

Every command that takes the path of a model opens it here, so all commands accept the same paths.
They refuse a path with the same words, before data is read and before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mupax import command_line, disk, terminal
from mupax.disk import JsonError, is_remote, path_of, read_json
from mupax.presets.tuned import find as tuned
from mupax.train.checkpoints import saved_run
from mupax.train.checkpoints.assets import Assets
from mupax.train.checkpoints.checkpointer import named_step
from mupax.train.checkpoints.folder import CHECKPOINTS, WorkdirError, newest_record
from mupax.train.checkpoints.saved_run import LoadedRun
from mupax.train.checkpoints.workdir import check_complete, read_record
from mupax.train.config import cli
from mupax.train.config.data import DataConfig, PixelsConfig
from mupax.train.config.preset import PresetConfig, preset_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import model_from_json, preset_from_json
from mupax.train.config.run import Config
from mupax.train.config.sections import Step
from mupax.train.data.chats import templates
from mupax.train.data.chats.templates import Template
from mupax.train.reuse import image_input, own_files, source
from mupax.train.reuse.huggingface import preprocessor, text_ids, tokenizer_files
from mupax.train.reuse.image_input import ImageInput
from mupax.train.reuse.source import CONFIG, FORMAT, MODEL, WeightsError, WeightsSource
from mupax.zoo.configs import ModelConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import config as huggingface
from mupax.zoo.huggingface.tensorfile import Tensors

if TYPE_CHECKING:
    from mupax.train.data import Data
    from mupax.zoo.definition import Arrays

NO_DATA = {"tokens": "text:", "images": "images:"}
"""Value of data.name for weights without a run, by task: the kind of data, without a path."""
_BATCH = 8
"""Batch size in the config of weights without a run."""

TextIds = Mapping[str, int | list[int]]
"""Token ids by config.json's names, such as eos_token_id."""
AVERAGED = "the weights are the moving average, as in evaluations; --no-ema writes the parameters themselves"
"""Note of the commands that write a run's moving average to files (`--no-ema`)."""
READ = ("--data.", "--mesh.", "--model.compute.")
"""Flags of a run that `mupax eval` and `mupax noise` read."""


class Place(NamedTuple):
    """Kind and folder of the model at a path, read from its small files.

    `kind` is "run", "imported" for weights that `mupax import` wrote, or "published" for a folder
    of Hugging Face.
    """

    kind: Literal["run", "imported", "published"]
    path: Path
    """Workdir of the run or folder of one of its steps; or folder of weights, or a file in it."""
    folder: Path
    """Workdir of the run, or folder of the weights."""
    fields: Mapping[str, Any]
    """Content of model.json or of Hugging Face's config.json. Empty for a run."""


def locate(path: Path) -> Place:
    """Return the kind and folder of the model at a path, without reading its arrays.

    Raises:
        WeightsError: there is no model.
        WorkdirError: the path is in a run and names no checkpoint.
        JsonError: config.json or model.json is damaged.
        HalfMadeError: the command that makes the folder has not finished it.
    """
    folder, named = named_step(path.absolute())
    # A folder of weights may have the name of a step, but a step has no config.json of its own.
    if named is not None and not _has_weights(path):
        return Place("run", path, folder, {})

    folder = _folder_of(path)
    # A folder that a killed command left must not be taken for a model.
    check_complete(folder)
    weights = path if path.is_file() else folder
    if (folder / MODEL).is_file():
        return Place("imported", weights, folder, read_json(folder / MODEL))

    # A damaged config.json is no error yet: the run's checkpoints keep copies of its record.
    problem: JsonError | None = None
    fields: Mapping[str, Any] = {}
    try:
        fields = read_json(folder / CONFIG)
    except JsonError as error:
        problem = error
    # Only config.json of `transformers` has this key.
    if "model_type" in fields:
        return Place("published", weights, folder, fields)
    if "config" in fields or newest_record(folder / CHECKPOINTS):
        return Place("run", folder, folder, {})

    if disk.status(folder / CONFIG) is None:
        raise _nothing_at(path)
    if problem is not None:
        raise problem
    raise WeightsError(
        f"{folder / CONFIG} is neither a run's nor Hugging Face's, which has a model_type; "
        "give the folder of a model"
    )


def _folder_of(path: Path) -> Path:
    """Return the model's folder for a path that is not a step of a run.

    The folder of a safetensors file and of a run's `checkpoints` is the parent. Any other path is
    returned unchanged, even if nothing is there.

    Raises:
        WeightsError: the path is a file that holds no weights.
        WorkdirError: the path is in the folder of a run's checkpoints and is not a checkpoint.
    """
    if _has_weights(path):
        return path
    if path.name == CHECKPOINTS:
        return path.parent
    parent = path.absolute().parent
    if parent.name == CHECKPOINTS and (parent.parent / CONFIG).is_file():
        raise WorkdirError(
            f"{path} is no checkpoint: the name of one is its step. With an ending after it, it is "
            "being saved, or was left by a run that was ended; "
            f"give {path.parent.parent} for the newest one"
        )
    if not path.is_file():
        return path
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return path.parent
    raise WeightsError(
        f"{path} is a file, and no safetensors; give the folder of a run or of weights"
    )


def _has_weights(folder: Path) -> bool:
    """Return whether a folder has a model.json or config.json, which a run's checkpoint has not."""
    return (folder / MODEL).is_file() or (folder / CONFIG).is_file()


def _nothing_at(path: Path) -> WeightsError:
    """Return the error for a path without a model, with advice on what to give instead."""
    name = str(path)
    if name in RECIPES:
        return WeightsError(
            f"{name} is a recipe, and no run; train it by `mupax train {name}`, "
            "and give its workdir"
        )
    if name in tuned.files():
        return WeightsError(
            f"{name} is a tuned preset, and no run; train with --preset {name}, "
            "and give the workdir"
        )
    text = (
        f"{path}: no run and no weights there ({CONFIG} is missing); give a workdir, "
        f"workdir/{CHECKPOINTS}/STEP, a folder of `mupax import`, or one of Hugging Face with "
        "config.json and safetensors"
    )
    if not path.exists():
        text += "; `hf download ORG/NAME --local-dir FOLDER` brings one from the hub"
    return WeightsError(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Trained model whose config and small files are read. Its arrays are read on request."""

    place: Place
    path: Path
    """Path as the user wrote it."""
    workdir: Path
    """Workdir of the run, or folder of the weights."""
    config: Config
    """Config of the run. Its `ema` is off if `params` reads the plain parameters.

    For weights without a run, a made-up config with their model and preset, and data without a path
    (`NO_DATA`).
    """
    facts: dict[str, Any]
    """Record of the run's data. For weights, the class names alone."""
    run: LoadedRun | None = None
    """Opened checkpoint of the run. `None` for weights without a run."""
    preset: PresetConfig | None = None
    """Preset of the run or of the imported folder. `None` for Hugging Face's weights."""
    images: ImageInput | None = None
    """Class names and preprocessing of an image model."""
    assets: Assets | None = None
    """Tokenizer, chat template and class names of the run. `None` for weights and old runs."""
    text_ids: TextIds = dataclasses.field(default_factory=dict)
    """Token ids that start, end and pad the texts of weights. Empty for a run."""
    notes: tuple[str, ...] = ()
    """Sentences on defaults that stand in for missing image preprocessing."""

    @property
    def model(self) -> ModelConfig:
        """The model's config."""
        return self.config.model

    @property
    def step(self) -> int | None:
        """Number of optimizer steps of the checkpoint. `None` for weights."""
        return None if self.run is None else self.run.step

    @property
    def weights(self) -> Literal["params", "ema"]:
        """Part of the checkpoint that `params` reads. Always "params" for weights without a run."""
        return "params" if self.run is None else self.run.weights

    @property
    def keeps_average(self) -> bool:
        """True for a run that keeps a moving average, which `plain_weights` can read."""
        return self.run is not None and self.config.ema.decay is not None

    def written_part(self, plain: bool) -> Literal["params", "ema"]:
        """Return the part that is written to files: the average of a run that keeps one.

        Args:
            plain: True if `--no-ema` asks for the parameters themselves.

        Raises:
            WeightsError: `plain` for weights, which have no moving average to leave out.
        """
        if plain and self.run is None:
            raise WeightsError(_without_run(self.path, ["--no-ema"]))
        return "ema" if self.keeps_average and not plain else "params"

    @property
    def described(self) -> str:
        """Path, step and part of the weights in words. Without a run, the path alone."""
        if self.step is None:
            return str(self.path)
        part = "its moving average" if self.weights == "ema" else "its parameters"
        return f"step {self.step} of {self.path}, {part}"

    @property
    def exact_path(self) -> Path:
        """Absolute path that names these weights even after the run saves newer ones."""
        if self.run is None:
            return self.place.path.absolute()
        # The workdir alone would mean the newest step, which a run that goes on replaces.
        return self.workdir / CHECKPOINTS / str(self.run.step)

    def params(self, abstract: Any) -> Arrays:
        """Return the parameters as the config's preset stores them, each array in its sharding.

        Notes on the weights are printed to standard error.

        Args:
            abstract: abstract state of a program of `config`: shapes, dtypes and shardings.

        Raises:
            WeightsError, TensorFileError: weights that do not fit, are NaN or infinite, or a
                damaged file. The values of a run are not checked.
            WorkdirError, ForeignError, DiskError, MemoryLimitError: see `LoadedRun.params`.
        """
        if self.run is not None:
            return self.run.params(abstract)
        import jax

        from mupax.train.core.factors import resolve
        from mupax.train.reuse import transplant
        from mupax.zoo.definition import definition

        model = definition(self.model)
        factors = resolve(preset_of(self.config), model)
        plain_weights = self.plain_weights()
        for note in plain_weights.notes:
            terminal.note(f"note: {note}")
        # Weights without a run take the form of the preset on the host.
        placed = transplant.place(plain_weights, model, factors)
        return {
            name: jax.device_put(placed[name], leaf.sharding)
            for name, leaf in abstract.params.items()
        }

    def plain_weights(self, part: Literal["params", "ema"] = "params") -> WeightsSource:
        """Return the stored weights, and factors that make them free of multipliers, on the host.

        `WeightsSource.params` of the result has the weights of a network without multipliers, each
        the stored array times its factor. Class names, assets and notes of this model come along.

        Args:
            part: Part of a run that is read, whichever part `weights` names. Weights without a run
                have only "params".

        Raises:
            WeightsError, TensorFileError, WorkdirError: There is no such part, files do not fit
                together, or values are NaN or infinite.
        """
        run = self.run
        if part == "ema" and run is None:
            raise WeightsError(
                f"{self.path}: holds weights, and no moving average beside them; "
                "leave --init-ema out"
            )
        if part == "ema" and self.config.ema.decay is None:
            raise WeightsError(
                f"{self.workdir}: the run kept no moving average (ema.decay is None); "
                "leave --init-ema out"
            )

        if run is not None:
            weights = source.trained(run._replace(weights=part))
            weights = weights._replace(run=(self.config, self.facts))
        elif self.place.kind == "imported":
            weights = source.imported(self.place.path, self.model, self.place.fields)
        else:
            weights = source.published(self.place.path, self.place.fields)

        weights = weights._replace(
            notes=[*weights.notes, *self.notes],
            images=self.images,
            assets=self.assets,
            text_ids=self.text_ids,
        )
        source.check_finite(weights.stored, self.path, is_run=run is not None)
        return weights

    def asset_files(self) -> dict[str, bytes]:
        """Return the content of the run's assets by file name, to copy into a new run.

        The result is empty for weights and for a run of an older version, which have no assets.

        Raises:
            AssetsError: an asset is missing or damaged.
        """
        return {} if self.assets is None else self.assets.files()

    def tokenizer(self) -> Any:
        """Return the model's tokenizer, from the run's own file or the file beside weights.

        It is opened anew at each call. The run's data is opened only if `data.tokenizer` alone does
        not name a file: for a run of an older version whose tokenizer is not in the cache.

        Raises:
            DataError: the tokenizer is missing, or it is not the one that made the run's tokens.
        """
        from mupax.train import data as data_sources
        from mupax.train.data.text import named_tokenizers

        config = self.config
        name = config.data.tokenizer
        tokenizer: Any = named_tokenizers.opened(name, config.data.separator)
        if tokenizer is None:
            # Standard output belongs to the answer of the command, such as generated text.
            note = functools.partial(print, file=sys.stderr)
            data = data_sources.load(config.data, config.model, seed=config.data_seed, note=note)
            tokenizer = data.tokenizer
        # The same name can stand for another tokenizer on another machine.
        key = self.facts.get("tokenizer")
        if key not in (None, tokenizer.key):
            raise data_sources.DataError(
                f"the run's tokens are those of {key}, and data.tokenizer {name} is "
                f"{tokenizer.key} here; put the run's tokenizer.json into {self.workdir}/assets"
            )
        return tokenizer

    def tokenizer_file(self) -> Path | None:
        """Return the path of the tokenizer.json that makes the model's tokens.

        A run keeps the file among its assets. For a run of an older version the cache is searched.
        The result is `None` if the file is lost or holds another tokenizer than the run's, or if
        tokens are bytes or the model reads images.

        Raises:
            AssetsError: the file among the assets is missing or damaged.
        """
        from mupax.train.data.text import tokenizer

        data = self.config.data
        if self.model.task != "tokens" or data.tokenizer == "bytes":
            return None
        if self.run is None:
            file = path_of(data.tokenizer)
            return file if file.is_file() else None

        file = path_of(own_files.settings(data, self.facts, self.assets).tokenizer)
        if not file.is_file():
            return None
        # The file of the recorded name may hold another tokenizer by now.
        key = tokenizer.Subwords(file, data.separator).key
        return file if key == self.facts.get("tokenizer") else None

    def template(self, file: str | None = None) -> Template | None:
        """Return the model's chat template, or `None` if it has none.

        Args:
            file: path of a template, by default of the model's own.

        Raises:
            DataError: the file is missing or damaged, or holds no template.
        """
        data = self.config.data
        return templates.find(data.tokenizer, file or data.chat_template, dated=True)

    def check_decoder(self, command: str) -> None:
        """Raise `WeightsError` if the model is not a decoder, which `command` needs.

        Args:
            command: command for the message, such as "eval --tasks".
        """
        if not self.model.generates:
            raise self._other_family(command, "decoders")

    def check_writes(self) -> None:
        """Raise `WeightsError` if the model cannot write text, which `generate` needs."""
        if not (self.model.generates or self.model.denoises):
            raise self._other_family("generate", "decoders and encoder-decoders")

    def check_images(self) -> None:
        """Raise `WeightsError` if the model does not read images, which `predict` needs."""
        if not isinstance(self.model, ImageModel):
            raise self._other_family("predict", "models of images")

    def _other_family(self, command: str, families: str) -> WeightsError:
        family = self.model.family
        reads = "text; `mupax generate` is"
        if self.model.task == "images":
            reads = "images; `mupax predict` is"
        article = "an" if family[:1] in "aeiou" else "a"
        return WeightsError(
            f"{self.path} holds {article} {family}, and {command} is for {families}; "
            f"this model reads {reads} for it"
        )


def describe(
    path: Path,
    step: Step | None = None,
    average: bool | None = None,
    *,
    needs_run: bool = False,
    needs_metrics: bool = False,
) -> TrainedModel:
    """Return the model at a path: its config and small files are read, its arrays are not.

    The config of a run is returned as it was recorded.

    Args:
        path: a run's workdir, one of its steps (workdir/checkpoints/STEP,
            workdir/checkpoints/best), a folder that `mupax import` wrote, or a folder of Hugging
            Face (config.json and safetensors, one file or several).
        step: step of a run's checkpoint, or "best"; by default the newest.
        average: whether to open the moving average, by default if the run keeps one.
        needs_run: whether to refuse weights, which have no optimizer state and no data.
        needs_metrics: whether to refuse a run whose own metric is of a module that is gone, because
            its config is to be trained further.

    Raises:
        WeightsError, WorkdirError, JsonError, HalfMadeError: no model at the path (see `locate`),
            no such step, or no moving average.
        TensorFileError, ConfigError: tensors are missing or damaged, or a config is not valid.
    """
    place = locate(path)
    if place.kind == "run":
        run = saved_run.find(place.path, step, average, needs_metrics=needs_metrics)
        return _of_run(path, place, run)
    if needs_run:
        raise WeightsError(
            f"{path} holds weights, and no run; `mupax train RECIPE --init-from {path}` makes a "
            "run that starts from them"
        )
    flags = []
    if step is not None:
        flags.append("--step")
    if average is not None:
        flags.append("--ema" if average else "--no-ema")
    if flags:
        raise WeightsError(_without_run(path, flags))
    return _of_weights(path, place)


def _without_run(path: Path, flags: Sequence[str]) -> str:
    """Return the message for weights whose command line has flags that only a run answers to."""
    return (
        f"{path} holds weights, and no run with steps or a moving average; "
        f"leave {' and '.join(flags)} out"
    )


def open_model(
    path: Path,
    step: Step | None = None,
    average: bool | None = None,
    *,
    needs_run: bool = False,
    tokenizer: str | None = None,
    separator: str | None = None,
) -> TrainedModel:
    """Return the model at a path, with the tokenizer and chat template that belong to it.

    Its arrays are not read. The returned config of a run has the paths of the tokenizer and chat
    template in the run's own folder, if there are any. `describe` returns the names that were
    recorded, which may stand for other files on this machine.

    Args:
        path, step, average, needs_run: See `describe`.
        tokenizer: Tokenizer of weights, written as `--data.tokenizer`. By default the file beside
            the weights. With another one, the separator beside the weights is not used.
        separator: Token that ends a document, for weights. By default that of their tokenizer.

    Raises:
        UsageError: A tokenizer or separator is given for a run, which has its own.
        AssetsError: The run's own tokenizer is missing or damaged.
        MupaxError: See `describe`.
    """
    model = describe(path, step, average, needs_run=needs_run)
    changes: dict[str, Any] = {}
    if tokenizer is not None:
        changes["tokenizer"] = tokenizer
    if separator is not None:
        changes["separator"] = separator

    data = model.config.data
    if model.run is not None:
        data = own_files.settings(data, model.run.facts, model.assets)
        if changes:
            raise command_line.UsageError(
                f"--data.{next(iter(changes))} is for weights alone, and the run in {path} has "
                "its own; leave it out"
            )
    if tokenizer is not None:
        # The separator beside the weights is a token of their own tokenizer.
        data = dataclasses.replace(data, separator=None)
    data = dataclasses.replace(data, **changes)
    # No command that uses a model shows images in TensorBoard. A run's number of them would be
    # compared with the smaller batches of such commands, and refused.
    log = dataclasses.replace(model.config.log, images=None)
    config = dataclasses.replace(model.config, data=data, log=log)
    return dataclasses.replace(model, config=config)


def read(
    path: Path, step: Step | None = None, *, part: Literal["params", "ema"] = "params"
) -> WeightsSource:
    """Return the stored weights at a path, and factors that make them free of multipliers.

    Args:
        path, step: see `describe`.
        part: parameters or moving average of a run.

    Raises:
        MupaxError: see `describe` and `TrainedModel.plain_weights`.
    """
    return describe(path, step).plain_weights(part)


def _of_run(path: Path, place: Place, run: LoadedRun) -> TrainedModel:
    assets = run.assets()
    facts = dict(run.facts)
    if assets:
        facts.update(assets.facts)
    model = run.config.model
    return TrainedModel(
        place=place,
        path=path,
        workdir=run.workdir,
        config=run.config,
        facts=facts,
        run=run,
        preset=run.config.preset,
        images=_recorded_images(facts, model, run.workdir),
        assets=assets,
    )


def _of_weights(path: Path, place: Place) -> TrainedModel:
    folder = place.folder
    fields = place.fields
    preset = None
    notes: list[str] = []
    if place.kind == "imported":
        model = _imported_model(folder, fields)
        record = fields.get("preset")
        preset_fields = record.get("fields") if isinstance(record, Mapping) else None
        preset = preset_from_json(preset_fields or {})
        images = _recorded_images(fields, model, folder / MODEL)
        ids: Any = fields.get("text_ids", {})
        reads_bytes = fields.get("tokenizer") == "bytes"
    else:
        model = huggingface.from_huggingface(fields).model
        images, notes = _published_images(folder, fields, model)
        ids = _published_ids(folder, fields, model)
        exported = fields.get("mupax")
        reads_bytes = isinstance(exported, Mapping) and exported.get("tokenizer") == "bytes"

    if not isinstance(ids, Mapping):
        ids = {}
    # Damaged files are refused early. Files of a bucket would have to be downloaded for that.
    if not is_remote(place.path):
        Tensors(place.path)
    # Commands read the model's inputs by these settings, as they do for a run.
    data = DataConfig(
        name=NO_DATA[model.task],
        batch_size=_BATCH,
        pixels=PixelsConfig() if images is None else images.pixels,
        noise="sentinels" if model.denoises else None,
        **_text_settings(folder, model, reads_bytes, ids),
    )
    config = Config(
        recipe="weights",
        model=model,
        data=data,
        preset=preset or PresetConfig(name="sp"),
        steps=1,
    )
    facts: dict[str, Any] = {}
    if images is not None and images.class_names is not None:
        facts["class_names"] = list(images.class_names)
    return TrainedModel(
        place=place,
        path=path,
        workdir=folder,
        config=config,
        facts=facts,
        preset=preset,
        images=images,
        text_ids=ids,
        notes=tuple(notes),
    )


def _text_settings(
    folder: Path, model: ModelConfig, reads_bytes: bool, ids: TextIds
) -> dict[str, Any]:
    """Return the tokenizer, separator or chat template of weights, as fields of `DataConfig`.

    The result is empty for a model of images. A model of bytes without a tokenizer.json has at
    most the chat template of its folder. Any other model of text gets the path of tokenizer.json,
    even if there is no such file.

    Args:
        reads_bytes: whether the record beside the weights says that tokens are bytes.
        ids: token ids by config.json's names, of which the end of a text is read.
    """
    file = folder / tokenizer_files.TOKENIZER
    if model.task != "tokens":
        return {}
    if reads_bytes and not file.exists():
        template = folder / templates.FILE
        return {"chat_template": str(template)} if template.is_file() else {}
    separator = tokenizer_files.separator_beside(folder, ids) if model.generates else None
    return {"tokenizer": str(file), "separator": separator}


def _imported_model(folder: Path, record: Mapping[str, Any]) -> ModelConfig:
    if record.get("format") != FORMAT:
        raise WeightsError(
            f"{folder}: {MODEL} has format {record.get('format')!r:.40}; "
            f"this version reads {FORMAT}"
        )
    return model_from_json(record.get("model", {}))


def _recorded_images(
    record: Mapping[str, Any], model: ModelConfig, file: Path
) -> ImageInput | None:
    """Return class names and preprocessing from a record, or `None` for a model of text.

    Args:
        record: data record of a run, or content of model.json.
        file: path of the record in error messages.
    """
    if not isinstance(model, ImageModel):
        return None
    return image_input.recorded(record, model, str(file))


def _published_images(
    folder: Path, fields: Mapping[str, Any], model: ModelConfig
) -> tuple[ImageInput | None, list[str]]:
    """Return class names and preprocessing beside Hugging Face's weights, and notes on defaults.

    For a model of text, the result is `(None, [])`. There is a note if no preprocessor file is
    there.
    """
    if not isinstance(model, ImageModel):
        return None, []
    file = folder / preprocessor.FILE
    processor = read_json(file) if file.is_file() else None
    images = preprocessor.from_huggingface(fields, processor, model)
    if processor is not None:
        return images, []
    interpolation = images.pixels.interpolation
    note = (
        f"no {preprocessor.FILE}: images are taken to be squashed to the model's size, "
        f"{interpolation}, mean and deviation a half"
    )
    return images, [note]


def _published_ids(folder: Path, fields: Mapping[str, Any], model: ModelConfig) -> TextIds:
    """Return the token ids that start, end and pad texts of Hugging Face's weights, by name.

    The result is empty for a model of images.
    """
    if model.denoises:
        return dict(text_ids.recorded(folder, fields))
    if model.task != "tokens":
        return {}
    return text_ids.of_decoder(fields, model.sizes()["vocab"])


def check_read(command: str, takes: str, run_flags: Sequence[str]) -> None:
    """Refuse flags of a run that `mupax eval` and `mupax noise` do not read.

    Args:
        command: Name of the command, `eval` or `noise`.
        takes: Flags of the command itself, as the message lists them.
        run_flags: Words of the command line without the flags in `takes`.

    Raises:
        UsageError: A flag does not begin with one of `READ`.
    """
    for word in run_flags:
        if word.startswith("--") and not word.startswith(READ):
            flag = word.partition("=")[0]
            raise command_line.UsageError(
                f"{command} does not read {flag}; it takes {takes}, and a run's {', '.join(READ)}*"
            )


def with_flags(command: str, saved: TrainedModel, run_flags: Sequence[str]) -> TrainedModel:
    """Return the model with its config changed by flags, for `mupax eval` and `mupax noise`.

    If `--data.tokenizer` names the recorded tokenizer of the run, the run's own file is used. For
    weights without a run, `--data.tokenizer` also drops their `data.separator`. If `--data.name`
    names other data, `data.mix` and perhaps `data.field` are dropped (`with_other_data`).

    Args:
        command: Name of the command, such as `eval`.
        run_flags: Flags of a run (`READ`), without the command's own flags.

    Raises:
        UsageError, ConfigError: A flag does not exist, or a value does not fit.
    """
    start = with_other_data(saved.config, run_flags)
    tokenizer = cli.value_of("--data.tokenizer", run_flags)
    if tokenizer is not None and saved.step is None:
        # The separator of weights is a token of their own tokenizer.
        start = dataclasses.replace(start, data=dataclasses.replace(start.data, separator=None))
    reader = cli.FlagReader(command, (), READ)
    config = cli.parse(command, lambda: start, run_flags, infers_sizes=False, reader=reader).config
    is_run = saved.step is not None
    if tokenizer is not None and is_run and tokenizer == recorded_tokenizer(saved.workdir):
        # The flag names the run's own tokenizer. `bpe:SIZE` would make another one from other text.
        data = dataclasses.replace(config.data, tokenizer=saved.config.data.tokenizer)
        config = dataclasses.replace(config, data=data)
    return dataclasses.replace(saved, config=config)


def check_fits(saved: TrainedModel, data: Data) -> None:
    """Refuse data of which a token or a label means something else than in the model's training.

    Args:
        saved: Opened model or run, whose config names the data (`with_flags`).

    Raises:
        DataError: The data has other tokens or classes than the model.
    """
    from mupax.train.data import DataError

    name = saved.config.data.name
    model_tokenizer = saved.facts.get("tokenizer")
    data_tokenizer = data.facts.get("tokenizer")
    if model_tokenizer is not None and model_tokenizer != data_tokenizer:
        raise DataError(
            f"the model was trained on tokens of {model_tokenizer}, and {name} is cut into those "
            f"of {data_tokenizer}; give --data.tokenizer the run's own, as bytes or the path of "
            "its tokenizer.json"
        )
    model_classes = saved.facts.get("class_names")
    if model_classes:
        check_classes(model_classes, data.class_names, saved, name)


def check_classes(
    model_classes: Sequence[str], data_classes: Sequence[str] | None, saved: TrainedModel, name: str
) -> None:
    """Refuse data whose classes are not those of the run, because label 3 would mean another class.

    Args:
        model_classes: Classes of the run, in the order of their labels.
        data_classes: Classes of the data, in the order of their labels. `None` counts as no
            classes.
        saved: Opened model, for the path in the message.
        name: `data.name` of the data, for the message.

    Raises:
        DataError: The classes differ, or are in another order.
    """
    from mupax.train.data import DataError

    if list(model_classes) == list(data_classes or ()):
        return
    command = shlex.join(
        ["mupax", "finetune", name.removeprefix("images:"), "--from", str(saved.workdir)]
    )
    raise DataError(
        f"the classes of the run in {saved.workdir} are {_listed(model_classes)}, and those of "
        f"{name} {_listed(data_classes or ())}; give it folders of the same names, or fine-tune on "
        f"them: `{command}`"
    )


def _listed(classes: Sequence[str]) -> str:
    """Return the names of the first eight classes, joined by commas, with "…" if there are more."""
    text = ", ".join(classes[:8])
    if len(classes) > 8:
        text += " …"
    return image_input.printable(text)


def recorded_tokenizer(workdir: Path) -> str | None:
    """Return `data.tokenizer` as config.json of the run has it, or `None` if it has none.

    Raises:
        WorkdirError: The folder holds no run.
    """
    return read_record(workdir)["config"].get("data", {}).get("tokenizer")


def with_other_data(config: Config, words: Sequence[str]) -> Config:
    """Return the config without settings that fit only the run's data, if flags name other data.

    `data.mix` is emptied, and `data.field` is reset if the new kind of data has another field or
    none. `data.name` itself is not changed here. If the flags name no other data, the config is
    returned unchanged.

    Args:
        words: Flags of the command. `--data.name` names the data.
    """
    data = config.data
    name = cli.value_of("--data.name", words)
    if name is None or name == data.name:
        return config
    kind = name.partition(":")[0]
    run_kind = data.name.partition(":")[0]
    field = data.field
    # The field of the run then does not fit: plain text has no fields, and chats have a field of
    # their own.
    if kind != run_kind and (kind == "text" or run_kind == "chat"):
        field = type(data).field
    return dataclasses.replace(config, data=dataclasses.replace(data, mix=(), field=field))
