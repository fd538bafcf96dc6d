"""`mupax finetune [vit|lm|ed] FOLDER --from SOURCE`: train a trained model further on own data.

The source gives the shape, the preset, the classes or the tokenizer, and the preprocessing of
images. The learning rate and the number of steps follow rules in this file, which the command
prints. Every flag of a recipe changes them. The word before FOLDER says which family the source
must be of.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import UsageError
from mupax.presets.roles import RUN_AXES, Role
from mupax.terminal import counted
from mupax.train.config import cli, small_folders
from mupax.train.config.data import DataConfig
from mupax.train.config.preset import PresetConfig, base_parts, base_text, preset_for
from mupax.train.config.run import Config, InitConfig, OptimizerConfig
from mupax.train.reuse import trained
from mupax.train.reuse.source import WeightsError
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.configs import ModelConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.transformer import LoraConfig, TransformerConfig

FAMILIES = {"vit": "vit", "lm": "decoder", "ed": "encoder-decoder"}
"""Model family by the word with which names of its recipes begin."""
_DATA = {
    "vit": "give one that has a folder of images per class",
    "lm": "give a file or folder of text or records",
    "ed": "give a file or folder of text or records",
    None: "give one that has a folder of images per class, or text",
}
"""Advice in the error for a folder that does not exist, by the family's word (`FAMILIES`)."""

NAME = "finetune"
"""Recipe name in the config of a fine-tuning run."""
SHARE = 0.3
"""Peak learning rate of fine-tuning, divided by that of the source's run."""
MATRIX_RATE = 5e-5 * 768
"""Learning rate of a hidden matrix times the width, for a source without a learning rate.

It is the default of transformers' Trainer at width 768.
"""
ADAPTERS_TIMES = 3.0
"""Learning rate for adapters alone, divided by the one for training all parameters."""
EPOCHS = 10
"""Number of epochs on images, within `MIN_STEPS` and `MAX_STEPS`."""
MIN_STEPS = 100
MAX_STEPS = 2000
TEXT_STEPS = 200
_TEXT_BATCH = 16
_IMAGE_BATCH = 32
_TEXT_FIELDS = ("separator", "special_tokens", "field", "noise", "noise_rate", "noise_span")
"""Fields of `DataConfig` that fine-tuning on text takes from the source's run."""


class _Defaults(NamedTuple):
    """Config of a fine-tuning run before flags, and a description of its data."""

    config: Config
    description: str
    """Data and readout in words. Empty for text."""


class _RateRule(NamedTuple):
    """Optimizer of a fine-tuning run, and the origin of its learning rate in words."""

    optimizer: OptimizerConfig
    origin: str


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split off the word for a model family (`vit`, `lm` or `ed`) with which arguments may begin.

    A first word without a folder behind it, as `vit` alone, is itself taken for a folder.

    Returns:
        The word, or `None` if the arguments do not begin with one, and the other arguments.
    """
    has_family = len(argv) > 1 and argv[0] in FAMILIES and not argv[1].startswith("-")
    if has_family:
        return argv[0], [*argv[1:]]
    return None, [*argv]


def check_folder(family: str | None, folder: Path, other_words: Sequence[str]) -> None:
    """Refuse a folder that does not exist, and a second word that is no flag.

    Args:
        family: "vit", "lm" or "ed" if the command line begins with this word, otherwise `None`.
        folder: first word of the command line after the family.
        other_words: words that are not flags of this command.

    Raises:
        UsageError: the message says what to write.
    """
    if other_words and not other_words[0].startswith("-"):
        hint = f"write finetune FOLDER, or {', '.join(FAMILIES)} as the first word and then FOLDER"
        near = difflib.get_close_matches(str(folder), FAMILIES, n=1)
        if family is None and near:
            hint = f"did you mean finetune {near[0]} {other_words[0]}?"
        raise UsageError(
            f"finetune has two words, {folder} and {other_words[0]}, and takes one folder; {hint}"
        )
    if not folder.exists():
        expected = "folder" if family in ("vit", None) else "file or folder"
        raise UsageError(f"no {expected} {folder}; {_DATA[family]}")


def check_source(family: str | None, model: ModelConfig, source: Path) -> None:
    """Refuse a source of another model family than the command line says.

    Args:
        family: "vit", "lm" or "ed" if the command line begins with this word, otherwise `None`.
        source: path of the source in the message.

    Raises:
        UsageError: the message says what to write.
    """
    if family is None or model.family == FAMILIES[family]:
        return
    write = "write"
    for word, name in FAMILIES.items():
        if name == model.family:
            write = f"write finetune {word} in its place, or"
            break
    raise UsageError(
        f"finetune {family} is for the family {FAMILIES[family]}, and {source} holds a "
        f"{model.family}; {write} no word before the folder"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """A run on data of one's own that goes on from a trained model; every flag of a recipe works here too.

    Images: FOLDER has a folder per class. Shape, preset, preprocessing and, where the classes are
    the source's own, the readout come from the source; other classes have a new readout. Text:
    FOLDER is text or records, read by the source's tokenizer; records that hold messages by its
    chat template, with a loss on answers. `finetune vit FOLDER`, `finetune lm FOLDER` and `finetune
    ed FOLDER` also say what the source has to be. The rate is 0.3 times the source's, or 5e-5 times
    768 / width where it has none; ten epochs, 100 to 2,000 steps. With --lora.rank low-rank
    adapters alone are trained, and a new readout, at three times that rate; an export merges them.
    The moving average of a source that keeps one is read; --no-init-ema reads its parameters.
    """

    folder: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="FOLDER")]
    """Images in a folder per class; for a model of text, a file or folder of text."""
    source: Annotated[command_line.Place, conf.arg(name="from", metavar="SOURCE|ORG/NAME")]
    """A run, one of its steps, a folder that `mupax import` wrote, one of Hugging Face, or ORG/NAME
    of its hub."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Revision of a model of the hub; main by default."""
    lora: LoraConfig = dataclasses.field(default=LoraConfig())


def command(argv: Sequence[str]) -> cli.Command:
    """Return the command that `mupax train` runs for a fine-tuning command line.

    A source of the Hugging Face hub is downloaded. Data, learning rate and steps are printed to
    standard error.

    Raises:
        UsageError, ConfigError, PresetError: flags that are wrong, or do not fit together.
        WeightsError, WorkdirError: no model there, or one that reads another kind of data.
        DataError: no images by class in the folder.
    """
    family, words = split(argv)
    args, other_words = command_line.parse_known(Finetune, "mupax finetune", words)
    check_folder(family, args.folder, other_words)
    from mupax.train.reuse.huggingface import hub

    origin = trained.describe(hub.local(args.source, args.revision))
    model = origin.model
    check_source(family, model, origin.exact_path)
    if isinstance(model, TransformerConfig):
        # The source's own adapters are merged when it is read.
        model = dataclasses.replace(model, lora=args.lora)
    elif args.lora.rank is not None:
        raise UsageError(
            f"--lora.rank is for transformers of the zoo, and {origin.exact_path} is a "
            f"{model.family}"
        )

    if isinstance(model, ImageModel):
        defaults = _images(args.folder, origin, model)
    else:
        has_tokenizer = any(word.partition("=")[0] == "--data.tokenizer" for word in other_words)
        defaults = _text(args.folder, origin, model, has_tokenizer)
    steps = cli.value_of("--steps", other_words)
    # Other words than a number are refused when all flags are read.
    if steps is not None and steps.isdecimal() and int(steps) > 0:
        defaults = defaults._replace(config=_with_steps(defaults.config, int(steps)))
    named = cli.value_of("--data.name", other_words)
    # Checked before the flags are read, which may not fit the other data. KIND:FOLDER reads the
    # folder in another way than its files suggest.
    if named and named.partition(":")[2] != defaults.config.data.name.partition(":")[2]:
        raise UsageError(
            f"{args.folder} and --data.name {named} are two sets of data; leave --data.name out, "
            f"or write `mupax train RECIPE --init-from {args.source}` for data by name"
        )
    own_flags = ["--from", "--revision", "--lora.rank", "--lora.alpha", "--lora.on"]
    reader = cli.FlagReader(NAME, own_flags, ("--",))
    run = cli.parse(NAME, lambda: defaults.config, other_words, infers_sizes=False, reader=reader)
    if run.config.init.init_from != defaults.config.init.init_from:
        raise UsageError(
            f"--from {args.source} and --init-from {run.config.init.init_from} are two sources; "
            "leave --init-from out"
        )
    terminal.note(_summary(run.config, defaults, origin, args.lora))
    caution = _caution(run.config, defaults.config)
    if caution:
        terminal.note(caution)
    return run


def _caution(config: Config, default: Config) -> str:
    """Return a caution if a default learning rate is for another preset or optimizer, else "".

    Args:
        config: config of the run, with its flags.
        default: config whose learning rate was chosen, before flags changed it.
    """
    rates = config.optimizer
    default_rates = default.optimizer
    if (rates.peak_lr, rates.adam_lr) != (default_rates.peak_lr, default_rates.adam_lr):
        return ""
    changes = []
    if rates.name != default_rates.name:
        changes.append(f"the optimizer {default_rates.name}, and this run has {rates.name}")
    # Learning rates are the same in every form of a preset.
    preset = dataclasses.replace(config.preset, form=default.preset.form)
    if preset != default.preset:
        changes.append("another preset, base or constants than this run's")
    if not changes:
        return ""
    return (
        f"caution: that rate is for {', and for '.join(changes)}; the same number is another step "
        "there: write --optimizer.peak-lr"
    )


def _summary(
    config: Config, defaults: _Defaults, origin: TrainedModel, adapters: LoraConfig
) -> str:
    """Return the line for the user on a fine-tuning run's data, learning rate and steps."""
    description = defaults.description
    if not description:
        is_chat = config.data.name.startswith("chat:")
        tokens = "conversations in tokens" if is_chat else "tokens"
        description = f"{tokens} of {config.data.tokenizer}"
    if adapters.rank is not None:
        description = f"adapters of rank {adapters.rank}; {description}"

    peak_lr = config.optimizer.peak_lr
    rate = "as asked"
    if peak_lr == defaults.config.optimizer.peak_lr:
        rate = rate_rule(origin).origin
        if adapters.rank is not None:
            rate = f"that of adapters, {ADAPTERS_TIMES:g} times {rate}"

    jitter = config.data.transforms.jitter
    crops = "" if jitter is None else f"; jitter {jitter:g} in place of crops"
    return (
        f"finetune: {description}; rate {peak_lr:.3g}, "
        f"{rate}; {counted(config.steps, 'step')}{crops}"
    )


def rate_rule(origin: TrainedModel) -> _RateRule:
    """Return the optimizer for fine-tuning a source, and the origin of its learning rate in words.

    For a run, it is the source's optimizer with a cosine schedule and 0.3 times its peak learning
    rate, or 1 times (1/3 with adapters) if the source was fine-tuned itself. For weights, the peak
    learning rate is such that hidden matrices get 5e-5 x 768 / width under the preset, and
    gradients are clipped at norm 1.
    """
    preset = preset_of_source(origin)
    named = f"{preset.name} in absolute form"
    if preset.base:
        named = f"{preset.name} relative to {preset.base}"

    model = origin.model
    if origin.run is not None:
        source_optimizer = origin.config.scaled_optimizer
        if origin.config.recipe != NAME:
            share = SHARE
            text = f"{SHARE} times the source's {source_optimizer.peak_lr:.3g}"
        elif isinstance(model, TransformerConfig) and model.lora.rank is not None:
            # The source trained adapters, at `ADAPTERS_TIMES` the learning rate of all parameters.
            share = 1 / ADAPTERS_TIMES
            text = f"{share:.2g} times that of the source, itself fine-tuned by adapters,"
        else:
            # The learning rate of a fine-tuned source is low enough already.
            share = 1.0
            text = "that of the source, itself fine-tuned,"
        optimizer = dataclasses.replace(
            _with_rates_times(source_optimizer, share),
            # The source's own schedule was made for the source's number of steps.
            schedule="cosine",
            decay_steps=None,
            final_lr_fraction=0.0,
        )
        return _RateRule(optimizer, f"{text} under {named}")

    # Choose the peak learning rate so that a hidden matrix gets the target learning rate under the
    # preset.
    resolved = preset_for(preset, model)
    sizes = model.sizes()
    # A model whose MLPs are all experts has no MLP_IN. A query matrix stands in for it.
    roles = (Role.MLP_IN, Role.HIDDEN, Role.QUERY)
    candidates = [spec for spec in model.parameters().values() if spec.role in roles]
    spec = min(candidates, key=lambda spec: roles.index(spec.role))
    target = MATRIX_RATE / sizes["embed"]
    rate = resolved.scales(spec, sizes, "adam").lr
    assert isinstance(rate, float)
    optimizer = OptimizerConfig(peak_lr=float(f"{target / rate:.6g}"), clip_norm=1.0)
    return _RateRule(
        optimizer,
        f"so that matrices move at 5e-5 x 768 / width = {target:.3g} under {named}",
    )


def _with_rates_times(optimizer: OptimizerConfig, factor: float) -> OptimizerConfig:
    """Return an optimizer whose peak learning rates are `factor` times as high.

    Under Muon, `adam_lr` is multiplied, too, if it is set.
    """
    adam_lr = optimizer.adam_lr
    if adam_lr is not None:
        adam_lr *= factor
    return dataclasses.replace(optimizer, peak_lr=factor * optimizer.peak_lr, adam_lr=adam_lr)


def preset_of_source(origin: TrainedModel) -> PresetConfig:
    """Return the source's preset without the settings of its own batch and tokens.

    A source without a preset gets `sp`. The joint rules and noise scale of the source are dropped.
    """
    preset = origin.preset or PresetConfig(name="sp")
    name, sizes = base_parts(preset.base)
    # Batch and tokens of the source's run do not hold for this run.
    base_sizes = base_text({axis: size for axis, size in sizes.items() if axis not in RUN_AXES})
    parts = []
    if name != "None":
        parts.append(name)
    parts.append(base_sizes)
    base = ",".join(part for part in parts if part) or None
    return dataclasses.replace(
        preset, base=base, joint="none", noise_scale=PresetConfig().noise_scale
    )


def _images(folder: Path, origin: TrainedModel, model: ImageModel) -> _Defaults:
    """Return the defaults of a run on a folder of images per class.

    The run takes 10 epochs, but at least 100 and at most 2,000 steps. The readout is new unless the
    classes are the source's in the same order. A small folder of small images gets a light jitter
    in place of random crops.

    Raises:
        UsageError: the folder is a file, or has no folders in it.
        DataError: the folder has no images by class.
    """
    from mupax.train.data.sources import folders

    assert origin.images is not None
    if not (folder.is_dir() and any(path.is_dir() for path in folder.iterdir())):
        content = "a file" if folder.is_file() else "a folder without folders"
        raise UsageError(
            f"{folder} is {content}, and {origin.exact_path} holds a model of images; give a "
            "folder that has a folder of images per class"
        )
    images = folders.split(folder)
    num_images = len(images.train)
    num_classes = len(images.classes)
    steps = EPOCHS * math.ceil(num_images / _IMAGE_BATCH)
    steps = min(max(steps, MIN_STEPS), MAX_STEPS)

    pixels = origin.images.pixels
    without_resize = dataclasses.replace(pixels, resize=None)
    if without_resize.resolved(model.image_size) == pixels:
        # The source has the default resize, so another image size gets its own default.
        pixels = without_resize
    data = DataConfig(name=f"images:{folder}", batch_size=_IMAGE_BATCH, pixels=pixels)
    sizes = folders.sizes(data)
    side = sizes.side if sizes is not None else None
    if side is not None:
        facts = small_folders.FolderFacts(num_images, num_classes, model.channels, side)
        data = dataclasses.replace(data, transforms=small_folders.finetuning_transforms(facts))

    difference = origin.images.difference(images.classes)
    new_params = ("readout",) if difference else ()
    readout = f"new, {difference}" if difference else "the source's"
    resized: Any = dataclasses.replace(model, num_classes=num_classes)
    config = _config(folder, origin, resized, data, steps, new_params)
    inputs = f"{counted(num_images, 'image')} of {counted(num_classes, 'class')}"
    return _Defaults(config, f"{inputs}, readout {readout}")


def _text(folder: Path, origin: TrainedModel, model: ModelConfig, has_tokenizer: bool) -> _Defaults:
    """Return the defaults of a run on text, records or conversations: 200 steps.

    Conversations are read by the source's chat template, other text by its tokenizer alone. A
    source trained on span corruption reads conversations as other text. A source's run passes on
    its separator, special tokens, text field and noise (`_TEXT_FIELDS`), but the field only where
    the folder has it. Weights without a run pass on their separator alone, and only if the command
    line names no tokenizer.

    Args:
        has_tokenizer: whether the command line names a tokenizer.

    Raises:
        WeightsError: the folder has only images, the source's tokenizer is lost, or the source is
            an encoder-decoder without a run.
    """
    source = origin.exact_path
    if folder.is_dir() and not has_tokenizer:
        from mupax.train.data.records.listing import files_below
        from mupax.train.data.sources.folders import is_image

        names = [name for name, _ in files_below(folder).files]
        # A single file of another kind is enough to read the folder as text.
        if names and all(map(is_image, names)):
            raise WeightsError(
                f"{source} holds a {origin.model.family}, which reads text, and {folder} has images"
            )
    from mupax.train.data.chats import templates
    from mupax.train.data.chats.records import in_folder

    source_data = origin.config.data if origin.run else None
    if origin.model.denoises and source_data is None:
        raise WeightsError(
            f"{source} holds an {origin.model.family}, and not what noise it was trained on; "
            "start `mupax train ed-tiny` with --init-from and --data.noise"
        )

    fields: dict[str, Any] = {}
    if source_data is not None:
        fields = {name: getattr(source_data, name) for name in _TEXT_FIELDS}
    elif not has_tokenizer:
        fields["separator"] = origin.config.data.separator
    # A placeholder if the command line has a tokenizer, which is read after the defaults.
    tokenizer = "bytes" if has_tokenizer else _tokenizer(origin)

    # A source trained on span corruption reads conversations as documents.
    is_chat = not (source_data and source_data.noise) and in_folder(folder)
    if source_data is not None and not _has_field_of(source_data, folder, is_chat):
        del fields["field"]
    if is_chat and source_data is not None:
        template = origin.assets.chat_template if origin.assets is not None else None
        fields["chat_template"] = source_data.chat_template if template is None else str(template)
    elif is_chat and tokenizer == "bytes":
        # With a tokenizer file the template lies beside that file and is found there.
        template_file = origin.workdir / templates.FILE
        if template_file.is_file():
            fields["chat_template"] = str(template_file)

    data_kind = "chat" if is_chat else "text"
    data = DataConfig(
        name=f"{data_kind}:{folder}", batch_size=_TEXT_BATCH, tokenizer=tokenizer, **fields
    )
    return _Defaults(_config(folder, origin, model, data, TEXT_STEPS, ()), "")


def _has_field_of(source_data: DataConfig, folder: Path, is_chat: bool) -> bool:
    """Return whether the records of a folder are read by the `field` of the source's run.

    A field of text is none of messages, and plain text has no fields.

    Args:
        folder: file or folder of text, records or conversations.
        is_chat: whether the folder is read as conversations.
    """
    from mupax.train.data.sources.training_texts import has_records

    source_is_chat = source_data.name.startswith("chat:")
    if is_chat or source_is_chat:
        return is_chat and source_is_chat
    return has_records(str(folder), source_data.field)


def _tokenizer(origin: TrainedModel) -> str:
    """Return the value of data.tokenizer that makes the source's tokens.

    Raises:
        WeightsError: the tokenizer's file is lost.
    """
    name = origin.config.data.tokenizer
    if name == "bytes":
        return name
    file = origin.tokenizer_file()
    if file is None:
        raise WeightsError(
            f"the tokenizer of {origin.exact_path} is not here ({name}); give its file as "
            "--data.tokenizer FILE"
        )
    return str(file)


def _config(
    folder: Path,
    origin: TrainedModel,
    model: Any,
    data: DataConfig,
    steps: int,
    new_params: tuple[str, ...],
) -> Config:
    """Return the config of a fine-tuning run, with a warmup of a tenth of its steps.

    With adapters, only they and `new_params` are trained, at three times the learning rate.

    Args:
        folder: data of the run, whose name the workdir gets.
        model: config of the model, with the number of classes and adapters of this run.
        new_params: patterns of parameters that do not come from the source (`init_new`).
    """
    optimizer = rate_rule(origin).optimizer
    train_only: tuple[str, ...] = ()
    if isinstance(model, TransformerConfig) and model.lora.rank is not None:
        optimizer = _with_rates_times(optimizer, ADAPTERS_TIMES)
        new_params = ("lora_a", "lora_b", *new_params)
        train_only = new_params
    init = InitConfig(
        init_from=str(origin.exact_path),
        init_new=new_params,
        # Other commands, too, take the moving average for a run that keeps one.
        init_ema=origin.config.ema.decay is not None,
    )
    config = Config(
        recipe=NAME,
        model=model,
        data=data,
        preset=preset_of_source(origin),
        optimizer=optimizer,
        init=init,
        steps=steps,
        train_only=train_only,
        workdir=str(Path("runs") / f"finetune-{folder.absolute().name}"),
    )
    return _with_steps(config, steps)


def _with_steps(config: Config, steps: int) -> Config:
    """Return the config of a run of `steps` steps, with a warmup and evaluations to match.

    The warmup is a tenth of the steps. A quarter of them lies between two evaluations.
    """
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=steps // 10)
    log = dataclasses.replace(config.log, eval_every_steps=max(1, steps // 4))
    return dataclasses.replace(config, steps=steps, optimizer=optimizer, log=log)
