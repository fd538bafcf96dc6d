"""`mupax finetune [vit|lm|ed] FOLDER --from SOURCE`: a run on data of one's own that goes on from a trained model.

The source says the shape, the preset, the classes or the tokenizer, and what becomes of an image. What it cannot say has a
rule here, which a line states: the learning rate and the steps. Every flag of a recipe changes them.

The word before FOLDER says which family the source is to be of.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import UsageError
from mupax.presets.roles import RUN_AXES, Role
from mupax.train.config import cli, small_folders
from mupax.train.config.data import DataConfig
from mupax.train.config.preset import PresetConfig, base_parts, base_text, preset_for
from mupax.train.config.run import Config, InitConfig, LogConfig, OptimizerConfig
from mupax.train.reuse import trained
from mupax.train.reuse.source import WeightsError
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.configs import ModelConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.transformer import LoraConfig, TransformerConfig

FAMILIES = {"vit": "vit", "lm": "decoder", "ed": "encoder-decoder"}
"""How names of recipes begin, to the family that they are of."""
_DATA = {
    "vit": "give one that has a folder of images per class",
    "lm": "give a file or folder of text or records",
    "ed": "give a file or folder of text or records",
    None: "give one that has a folder of images per class, or text",
}

NAME = "finetune"
"""What such a run has as its recipe."""
SHARE = 0.3
"""Of the source's peak rate."""
MATRIX_RATE = 5e-5 * 768
"""Times 1 / width: the rate of a hidden matrix where the source says none, the default of transformers' Trainer at width 768."""
ADAPTERS_TIMES = 3.0
"""The rate of adapters over that of all parameters."""
EPOCHS, FEWEST, MOST = 10, 100, 2000
TEXT_STEPS = 200
_TEXT_BATCH, _IMAGE_BATCH = 16, 32


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The kind that stands first, where there is one and FOLDER behind it, and the other words.

    A lone `vit` is a folder of that name.
    """
    if len(argv) > 1 and argv[0] in FAMILIES and not argv[1].startswith("-"):
        return argv[0], [*argv[1:]]
    return None, [*argv]


def check_folder(kind: str | None, folder: Path, rest: Sequence[str]) -> None:
    """Raises UsageError where the folder is not there, or a word stands behind it.

    Args:
        kind: of the line; None where it says none.
        folder: as it was read.
        rest: the words that are none of the command's flags.
    """
    if rest and not rest[0].startswith("-"):
        near = difflib.get_close_matches(str(folder), FAMILIES, n=1)
        if kind is None and near:
            hint = f"did you mean finetune {near[0]} {rest[0]}?"
        else:
            hint = (
                f"write finetune FOLDER, or {', '.join(FAMILIES)} as the first word and then FOLDER"
            )
        raise UsageError(
            f"finetune has two words, {folder} and {rest[0]}, and takes one folder; {hint}"
        )
    if not folder.exists():
        raise UsageError(
            f"no {'folder' if kind in ('vit', None) else 'file or folder'} {folder}; {_DATA[kind]}"
        )


def check_source(kind: str | None, model: ModelConfig, source: Path) -> None:
    """Raises UsageError where the source is of another family than the line says.

    Args:
        kind: of the line; None where it says none.
        model: of the source.
        source: where it is.
    """
    if kind is None or model.family == FAMILIES[kind]:
        return
    other = next((word for word, family in FAMILIES.items() if family == model.family), None)
    write = f"write finetune {other} in its place, or" if other else "write"
    raise UsageError(
        f"finetune {kind} is for the family {FAMILIES[kind]}, and {source} holds a {model.family}; {write} no word before the folder"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune:
    """A run on data of one's own that goes on from a trained model; every flag of a recipe works here too.

    Images: FOLDER has a folder per class. Shape, preset, preprocessing and, where the classes are the source's own, the readout
    come from the source; other classes have a new readout. Text: FOLDER is text or records, read by the
    source's tokenizer; records that hold messages by its chat template, with a loss on answers.
    `finetune vit FOLDER`, `finetune lm FOLDER` and `finetune ed FOLDER` also say what the source has to be.
    The rate is 0.3 times the source's, or 5e-5 times 768 / width where it has none; ten epochs, 100 to 2,000 steps.
    With --lora.rank low-rank adapters alone are trained, and a new readout, at three times that rate; an export merges them.
    """

    folder: Annotated[conf.Positional[command_line.Place], conf.arg(metavar="FOLDER")]
    """Images in a folder per class; for a model of text, a file or folder of text."""
    source: Annotated[command_line.Place, conf.arg(name="from", metavar="SOURCE|ORG/NAME")]
    """A run, one of its steps, a folder that `mupax import` wrote, one of Hugging Face, or ORG/NAME of its hub."""
    revision: Annotated[str | None, conf.arg(metavar="BRANCH|TAG|COMMIT")] = None
    """Of a model of the hub; main unless given."""
    lora: LoraConfig = dataclasses.field(default=LoraConfig())


def command(argv: Sequence[str]) -> cli.Command:
    """Return the command that `mupax train` is to run. The rule of the rate is a line on stderr.

    Raises:
        UsageError, ConfigError, PresetError: flags that are wrong, or do not fit together.
        WeightsError, WorkdirError: no model there, or one that reads something else than the folder has.
        DataError: no images by class in the folder.
    """
    family, words = split(argv)
    args, rest = command_line.parse_known(Finetune, "mupax finetune", words)
    check_folder(family, args.folder, rest)
    from mupax.train.reuse.huggingface import hub

    origin = trained.describe(hub.local(args.source, args.revision))
    source = origin.exact_path
    model = origin.model
    check_source(family, model, source)
    has_tokenizer = any(word.partition("=")[0] == "--data.tokenizer" for word in rest)
    if not isinstance(model, TransformerConfig):
        if args.lora.rank is not None:
            raise command_line.UsageError(
                f"--lora.rank is for transformers of the zoo, and {source} is a {model.family}"
            )
    else:  # a source's own adapters are merged where it is read
        model = dataclasses.replace(model, lora=args.lora)
    if isinstance(model, ImageModel):
        start, what = _images(args.folder, origin, model)
    else:
        start, what = _text(args.folder, origin, model, has_tokenizer)
    run = cli.parse(
        NAME,
        lambda: start,
        rest,
        ["--from", "--revision", "--lora.rank", "--lora.alpha", "--lora.on"],
        False,
    )
    tokens = "conversations in tokens" if run.config.data.name.startswith("chat:") else "tokens"
    what = what or f"{tokens} of {run.config.data.tokenizer}"
    peak = run.config.optimizer.peak_lr
    times = "" if args.lora.rank is None else f"that of adapters, {ADAPTERS_TIMES:g} times "
    rate = f"{times}{rate_rule(origin)[1]}" if peak == start.optimizer.peak_lr else "as asked"
    what = what if args.lora.rank is None else f"adapters of rank {args.lora.rank}; {what}"
    jitter = run.config.data.transforms.jitter
    shown = "" if jitter is None else f"; jitter {jitter:g} in place of crops"
    terminal.note(f"finetune: {what}; rate {peak:.3g}, {rate}; {run.config.steps} steps{shown}")
    return run


def rate_rule(origin: TrainedModel) -> tuple[OptimizerConfig, str]:
    """The optimizer of a run that goes on from a source, and in words where its rate is from."""
    preset = preset_of_source(origin)
    named = f"{preset.name}{f' relative to {preset.base}' if preset.base else ' in absolute form'}"
    if origin.run is not None:
        before = origin.config.scaled_optimizer
        source = origin.model
        if origin.config.recipe != NAME:
            share, text = SHARE, f"{SHARE} times the source's {before.peak_lr:.3g}"
        elif isinstance(source, TransformerConfig) and source.lora.rank is not None:
            share = 1 / ADAPTERS_TIMES
            text = f"{share:.2g} times that of the source, itself fine-tuned by adapters,"
        else:
            share, text = 1.0, "that of the source, itself fine-tuned,"
        text = f"{text} under {named}"
        fields = {"schedule": "cosine", "decay_steps": None, "final_lr_fraction": 0.0}
        return dataclasses.replace(before, peak_lr=share * before.peak_lr, **fields), text
    model = origin.model
    resolved, sizes = preset_for(preset, model), model.sizes()
    spec = next(
        spec for spec in model.parameters().values() if spec.role in (Role.MLP_IN, Role.HIDDEN)
    )
    target = MATRIX_RATE / sizes["embed"]
    rate = resolved.scales(spec, sizes, "adam").lr
    assert isinstance(rate, float)
    peak = float(f"{target / rate:.6g}")
    return OptimizerConfig(
        peak_lr=peak, clip_norm=1.0
    ), f"so that matrices move at 5e-5 x 768 / width = {target:.3g} under {named}"


def preset_of_source(origin: TrainedModel) -> PresetConfig:
    """The source's preset without what is of its own batch and tokens, `sp` where it has none."""
    preset = origin.preset or PresetConfig(name="sp")
    name, sizes = base_parts(preset.base)
    base_sizes = base_text({axis: size for axis, size in sizes.items() if axis not in RUN_AXES})
    base = ",".join(part for part in ("" if name == "None" else name, base_sizes) if part) or None
    return dataclasses.replace(
        preset, base=base, joint="none", noise_scale=PresetConfig().noise_scale
    )


def _images(folder: Path, origin: TrainedModel, model: ImageModel) -> tuple[Config, str]:
    from mupax.train.data.sources import folders

    assert origin.images is not None
    if not (folder.is_dir() and any(path.is_dir() for path in folder.iterdir())):
        what = "a file" if folder.is_file() else "a folder without folders"
        raise command_line.UsageError(
            f"{folder} is {what}, and {origin.exact_path} holds a model of images; give a folder that has a folder of "
            "images per class"
        )
    content = folders.split(folder)
    classes = content.classes
    differ = origin.images.difference(classes)
    steps = min(max(EPOCHS * math.ceil(len(content.train) / _IMAGE_BATCH), FEWEST), MOST)
    pixels = origin.images.pixels
    free = dataclasses.replace(pixels, resize=None)
    if free.resolved(model.image_size) == pixels:  # so that another image size has its own default
        pixels = free
    data = DataConfig(name=f"images:{folder}", batch_size=_IMAGE_BATCH, pixels=pixels)
    sizes = folders.sizes(data)
    side = sizes.side if sizes is not None else None
    if side is not None:
        facts = small_folders.FolderFacts(len(content.train), len(classes), model.channels, side)
        data = dataclasses.replace(data, transforms=small_folders.finetuning_transforms(facts))
    resized: Any = dataclasses.replace(model, num_classes=len(classes))
    readout = f"new, {differ}" if differ else "the source's"
    what = f"{len(content.train)} images of {len(classes)} classes, readout {readout}"
    return _config(folder, origin, resized, data, steps, ("readout",) if differ else ()), what


def _text(
    folder: Path, origin: TrainedModel, model: ModelConfig, has_tokenizer: bool
) -> tuple[Config, str]:
    source = origin.exact_path
    if folder.is_dir() and not has_tokenizer:
        from mupax.train.data.records.listing import files_below
        from mupax.train.data.sources.folders import is_image

        names = [name for name, _ in files_below(folder).files]
        if names and all(map(is_image, names)):
            raise WeightsError(
                f"{source} holds a {origin.model.family}, which reads text, and {folder} has images"
            )
    from mupax.train.data.chats import templates
    from mupax.train.data.chats.records import in_folder

    before = origin.config.data if origin.run else None
    if origin.model.denoises and before is None:
        raise WeightsError(
            f"{source} holds an {origin.model.family}, and not what noise it was trained on; start `mupax train ed-tiny` with "
            "--init-from and --data.noise"
        )
    text_fields = ("separator", "special_tokens", "field", "noise", "noise_rate", "noise_span")
    fields: dict[str, Any] = {}
    if before is not None:
        fields = {name: getattr(before, name) for name in text_fields}
    elif not has_tokenizer:
        fields = {"separator": origin.config.data.separator}
    tokenizer = "bytes" if has_tokenizer else _tokenizer(origin)
    chat = not (before and before.noise) and in_folder(folder)
    if chat and before is not None:
        template = origin.assets.chat_template if origin.assets is not None else None
        fields["chat_template"] = before.chat_template if template is None else str(template)
    elif chat and tokenizer == "bytes" and (origin.workdir / templates.FILE).is_file():
        fields["chat_template"] = str(
            origin.workdir / templates.FILE
        )  # of others it lies beside the tokenizer
    data = DataConfig(
        name=f"{'chat' if chat else 'text'}:{folder}",
        batch_size=_TEXT_BATCH,
        tokenizer=tokenizer,
        **fields,
    )
    return _config(folder, origin, model, data, TEXT_STEPS, ()), ""


def _tokenizer(origin: TrainedModel) -> str:
    """Return data.tokenizer that makes the source's tokens; raise WeightsError if it is not here."""
    name = origin.config.data.tokenizer
    if name == "bytes":
        return name
    file = origin.tokenizer_file()
    if file is None:
        raise WeightsError(
            f"the tokenizer of {origin.exact_path} is not here ({name}); give its file as --data.tokenizer FILE"
        )
    return str(file)


def _config(
    folder: Path,
    origin: TrainedModel,
    model: Any,
    data: DataConfig,
    steps: int,
    new: tuple[str, ...],
) -> Config:
    optimizer = dataclasses.replace(rate_rule(origin)[0], warmup_steps=steps // 10)
    trainable: tuple[str, ...] = ()
    if isinstance(model, TransformerConfig) and model.lora.rank is not None:
        optimizer = dataclasses.replace(optimizer, peak_lr=ADAPTERS_TIMES * optimizer.peak_lr)
        new = trainable = ("lora_a", "lora_b", *new)
    averaged = origin.config.ema.decay is not None
    return Config(
        recipe=NAME,
        model=model,
        data=data,
        preset=preset_of_source(origin),
        optimizer=optimizer,
        init=InitConfig(init_from=str(origin.exact_path), init_new=new, init_ema=averaged),
        log=LogConfig(eval_every_steps=max(1, steps // 4)),
        steps=steps,
        train_only=trainable,
        workdir=str(Path("runs") / f"finetune-{folder.absolute().name}"),
    )
