"""Readers of files that may come from anyone: how to make, break and read the files of each.

`scripts.campaigns.fuzz` feeds broken files to every reader of `TARGETS`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.campaigns.injection.broken import broken_bytes, broken_header, broken_json

BreakFile = Callable[[bytes, random.Random], bytes]
"""Function that returns the bytes of a broken file, from the bytes of a good one."""


class Target(NamedTuple):
    """A reader, with the files that it reads.

    Attributes:
        make: Writes good files into a folder, and returns the path of the file to break.
        read: Reads the files of that folder as a command does.
        broken: Functions that break the file. For each broken file one of them is chosen.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    broken: tuple[BreakFile, ...]


def _words() -> str:
    """Return a text of 60 lines with 9 words each."""
    choose = random.Random(0)
    words = ("def", "return", "import", "class", "self", "value", "lambda", "yield")
    lines = []
    for _ in range(60):
        lines.append(" ".join(choose.choice(words) for _ in range(9)))
    return "\n".join(lines)


def _config() -> Any:
    """Return the config of a tiny run."""
    from mupax.train.config.recipes import RECIPES
    from mupax.zoo.configs import DecoderConfig

    model = DecoderConfig(width=8, depth=1, num_heads=2, vocab_size=256, seq_len=8)
    return replace(RECIPES["lm-tiny"](), model=model, steps=8, workdir=None)


# A run


def _run(folder: Path) -> Path:
    """Write config.json of a run that was resumed once, and return its path."""
    from mupax.train.checkpoints import workdir

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    data = {"name": "x", "digest": "d"}
    for steps in (6, 8):
        workdir.record(folder, replace(_config(), steps=steps), data, "mup", {}, steps)
    return folder / workdir.RECORD


def _resumed(folder: Path) -> None:
    """Read config.json of a run as `mupax train --resume` does. No step is trained."""
    from mupax.train.checkpoints import workdir
    from mupax.train.config.record import from_json
    from mupax.train.parallel.processes import Processes
    from mupax.train.reuse.start import init_from
    from mupax.train.run import resume

    config = replace(_config(), workdir=str(folder), resume=True)
    path, held = workdir.claim(config, Processes())
    config = init_from.settled(config, path, held, Processes())
    recorded = workdir.read_record(path)["config"]
    resume.check(recorded, config, 4)
    # A console prints the lines as UTF-8.
    "\n".join(resume.changes(recorded, config)).encode()
    workdir.record(path, config, {"name": "x", "digest": "d"}, "mup", {}, 4)
    from_json(recorded)


def _checkpoint(folder: Path) -> Path:
    """Write a checkpoint of step 4, and return the path of its manifest."""
    import jax.numpy as jnp

    from mupax.train.checkpoints import layout
    from mupax.train.checkpoints.checkpointer import Checkpoints
    from mupax.train.config.sections import CheckpointConfig
    from mupax.train.core.state import TrainState

    _run(folder)
    health_defaults = TrainState._field_defaults["health"]
    with Checkpoints(folder, CheckpointConfig(keep=2)) as checkpoints:
        health = {name: jnp.asarray(value) for name, value in health_defaults._asdict().items()}
        params = {"token": jnp.arange(12.0).reshape(3, 4)}
        state = TrainState(jnp.int32(4), params, (), None, health_defaults._replace(**health))
        checkpoints.save(4, state, {"digest": "d"})
    return folder / "checkpoints" / "4" / layout.MANIFEST


def _signed(content: bytes, choose: random.Random) -> bytes:
    """Return a manifest with broken values whose digest is right, so that readers go on."""
    from mupax.train.checkpoints import layout

    fields = json.loads(broken_json(content, choose))
    if isinstance(fields, dict) and isinstance(fields.get("manifest"), dict):
        # With a wrong digest, no reader would look at the broken values.
        fields["digest"] = layout._digest_of(fields["manifest"])
    return json.dumps(fields).encode()


def _verified(folder: Path) -> None:
    """Read a run's checkpoints by all readers of a manifest: list, verify and find the newest."""
    from mupax.train.checkpoints import command, saved_run
    from mupax.train.checkpoints.folder import newest_record

    newest_record(folder / "checkpoints")
    (row,) = command._checkpoints(folder, None, verify=True)
    " ".join(command._cells(row | {"best": False, "stays_as": None}, [])).encode()
    saved_run.find(folder).verified()


def _metrics(folder: Path) -> Path:
    """Write the metrics of six steps, one of which has a NaN loss, and return their path."""
    from mupax.train.run.report import metrics

    shutil.rmtree(folder, ignore_errors=True)
    with metrics.MetricsWriter(folder) as writer:
        for step in range(1, 7):
            row = {
                "step": step,
                "loss": float("nan") if step == 3 else 2.0 / step,
                "lr": 0.1,
                "grad_norm": 1.0,
                "tokens": 8,
                "seconds": 0.1,
            }
            writer.write(row)
        writer.write({"step": 6, "eval_loss": 1.0, "eval_accuracy": 0.5})
    return writer.path


def _reported(folder: Path) -> None:
    """Read metrics.jsonl as `mupax train` does when a run ends and when it is resumed."""
    from mupax.terminal import rich_console
    from mupax.train.run.report import finish, metrics

    metrics.has_evaluation(folder, 6)
    console = rich_console(file=io.StringIO())
    finish.summary(console, folder / "metrics.jsonl", name="x", seconds=1.0, facts={})
    metrics.MetricsWriter(folder, resume_step=5).close()


def _points(folder: Path) -> Path:
    """Write three points of a sweep, and return the path of their file."""
    from mupax.train.studies.sweep.rows import Row, Rows

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = Rows(folder)
    for number in range(3):
        curve = (3.0, 2.5)
        key = str(number)
        row = Row(key, "python -m train", 2.5, None, number or None, curve, 20, 1.5, "in turn")
        rows.add(row)
    return rows.path


def _swept(folder: Path) -> None:
    """Read the points of a sweep, and write each as JSON without NaN and infinity."""
    from mupax.train.studies.sweep.rows import Rows

    for row in Rows(folder, lambda text: None).values():
        json.dumps(row.to_json(), allow_nan=False)


# Presets


def _tuned(folder: Path) -> Path:
    """Copy a tuned preset of the package, and return the path of the copy."""
    from mupax.presets.tuned import find

    # The order of `glob` depends on the file system.
    source = min(find.FOLDER.glob("mup.*.json"))
    return Path(shutil.copy(source, folder / "mup.x.json"))


def _measured(folder: Path) -> Path:
    """Write a measured preset for the tiny model, and return its path."""
    from mupax.presets.rule import Scales
    from mupax.presets.tuned import measured

    model = _config().model
    halves = dict.fromkeys([field.name for field in dataclasses.fields(Scales)], 0.5)
    scales = {spec.group: Scales(**halves) for spec in model.parameters().values()}
    table = measured.Table(
        scales=scales,
        logits=0.5,
        residual=(((1.0, 0.5), (1.0, 0.5)),),
        sizes=model.sizes(),
        optimizer="adamw",
    )
    measured.save(table, folder / "table.json")
    return folder / "table.json"


def _trained_with(kind: str, folder: Path) -> None:
    """Read the preset in a folder, and compute the tiny model's scales under it.

    Args:
        kind: Kind of the preset, `tuned` or `measured`.

    Raises:
        AssertionError: A scale is not finite in float32.
        FileNotFoundError: The folder has no preset.
    """
    from mupax.presets.tuned import find
    from mupax.train.config import tuned
    from mupax.train.config.preset import preset_of

    config = _config()
    config = replace(config, preset=replace(config.preset, base=None))
    path = next(folder.glob("*.json"), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has no file *.json with a {kind} preset")
    if kind == "measured":
        config = replace(config, preset=replace(config.preset, name=f"measured:{path}"))
    else:
        config, _, study = tuned.applied(config, ["--preset", f"mup:{path}"], "8")
        assert study is not None
        f"{find.summary(study)}\n{find.described(study)}".encode()
        tuned.check(study, config)
    preset = preset_of(config)
    sizes = config.model.sizes()
    for spec in config.model.parameters().values():
        scales = preset.scales(spec, sizes, config.optimizer.name)
        values = np.hstack([np.float32(value) for value in vars(scales).values()])
        # This is no error of the project, so that it counts as a traceback.
        if not np.isfinite(values).all():
            raise AssertionError(f"{scales} has no numbers that float32 holds")


# Weights in the format of Hugging Face


def _weights(folder: Path, file: str, *, parts: bool = False, imported: bool = False) -> Path:
    """Write the weights of a tiny decoder, and return the path of one of their files.

    Args:
        file: Name of the file whose path is returned.
        parts: Write shards of at most 500 bytes, with an index.
        imported: Write the weights as `mupax import` does instead.
    """
    from mupax.train.config.run import PresetConfig
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import files
    from mupax.zoo.configs import DecoderConfig
    from mupax.zoo.definition import definition
    from mupax.zoo.huggingface import weights
    from mupax.zoo.huggingface.config import to_huggingface
    from mupax.zoo.huggingface.tensorfile import write_tensors

    model = DecoderConfig(
        width=4, depth=2, num_heads=2, mlp_ratio=1.5, vocab_size=7, seq_len=3, tied=True
    )
    draw = np.random.default_rng(0)
    params = {}
    for name, leaf in definition(model).abstract.items():
        params[name] = draw.standard_normal(leaf.shape, np.float32)
    target = folder / "hf" if imported else folder
    target.mkdir(exist_ok=True)
    shard_bytes = 500 if parts else 10**9
    write_tensors(target, weights.to_huggingface(model, params), shard_bytes=shard_bytes)
    (target / "config.json").write_text(json.dumps(to_huggingface(model)))
    if imported:
        read = trained.read(target)
        shutil.rmtree(target)
        files.write_imported(read, PresetConfig(name="mup"), folder, "hf")
    return folder / file


def _converted(folder: Path) -> None:
    """Read the weights of a folder and write them in the format of Hugging Face."""
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import files

    files.write_huggingface(trained.read(folder), folder / "out", "float32")
    shutil.rmtree(folder / "out")


# Data


def _loaded(name: str, model: Any, **fields: Any) -> None:
    """Load data as a run does, and make three training batches and all evaluation batches.

    Args:
        name: `data.name`, such as text:PATH.
        **fields: Further fields of `DataConfig`.
    """
    from mupax.train import data
    from mupax.train.config.data import DataConfig

    config = DataConfig(name=name, batch_size=2, eval_batch_size=2, **fields)
    try:
        with data.reading():
            loaded = data.load(config, model, seed=0, note=lambda text: None)
            for step in range(3):
                loaded.train_batch(step)
            list(loaded.eval_batches())
    finally:
        # The cache of one broken file must not serve the next.
        shutil.rmtree(os.environ["MUPAX_DATA"], ignore_errors=True)


def _text(folder: Path) -> Path:
    """Write two texts, and return the path of the first."""
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{_words()} å € 𝄞\n{name}")
    return folder / "a.txt"


def _tokenizer(folder: Path) -> Path:
    """Train a tokenizer of 300 tokens, and return the path of its file."""
    from mupax.train.data.text.named_tokenizers import train_bpe

    _text(folder)
    train_bpe([_words().encode()], 300).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _tokenized(folder: Path) -> None:
    """Read a tokenizer.json, and encode and decode three texts."""
    from mupax.train.data.text.tokenizer import Subwords

    tokenizer = Subwords(folder / "tokenizer.json")
    for ids in tokenizer.encode([_words().encode(), b"", "\ufeffå €".encode()]):
        tokenizer.decode(ids)


def _images(folder: Path, ending: str) -> Path:
    """Write eight images of two classes, and return the path of the first."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number in range(8):
        label = ("cat", "dog")[number % 2]
        path = folder / "images" / label / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (13, 11, 3), np.uint8)).save(path)
    return folder / "images" / "cat" / f"0.{ending}"


def _vit() -> Any:
    """Return the config of a tiny vision transformer with two classes."""
    from mupax.zoo.configs import ViTConfig

    return ViTConfig(
        width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=2
    )


def _npz(folder: Path) -> Path:
    """Write a part of CIFAR-5m with three images, and return its path."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (3, 32, 32, 3), np.uint8)
    np.savez_compressed(folder / "part0.npz", X=images, Y=np.arange(3))
    return folder / "part0.npz"


def _parts(folder: Path) -> None:
    """Read all examples of a part of CIFAR-5m."""
    from mupax.train.data.sources.cifar5m import examples

    list(examples(folder / "part0.npz"))


def _records(folder: Path, file: str, name: str = "digits") -> Path:
    """Write the digits as a data set of TFDS, and return the path of one of its files.

    Args:
        file: Pattern of the file's name. The first match is returned.
        name: Name of the data set. Default: `digits`, which mupax writes itself.
    """
    from mupax.train.data.records import builders

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    builders.embedded(builders.Digits, str(folder), lambda text: None)
    (folder / "digits").rename(folder / name)
    # The order of `glob` depends on the file system.
    return min(folder.glob(f"{name}/*/{file}"))


def _digits(folder: Path, name: str = "digits") -> None:
    """Load a data set of TFDS as a run does."""
    from mupax.zoo import configs

    _loaded(name, configs.get("vit-tiny"), data_dir=str(folder))


def _load_text(folder: Path) -> None:
    """Load the text of a folder as a run does."""
    _loaded(f"text:{folder}", _config().model)


def _load_images(folder: Path) -> None:
    """Load the images of a folder as a run does."""
    _loaded(f"images:{folder / 'images'}", _vit())


TARGETS: dict[str, Target] = {
    "config.json of a run": Target(_run, _resumed, (broken_json, broken_bytes)),
    "manifest of a checkpoint": Target(
        _checkpoint, _verified, (broken_json, broken_bytes, _signed)
    ),
    "metrics.jsonl": Target(_metrics, _reported, (broken_bytes,)),
    "points.jsonl of a sweep": Target(_points, _swept, (broken_bytes,)),
    "tuned preset": Target(_tuned, partial(_trained_with, "tuned"), (broken_json, broken_bytes)),
    "measured preset": Target(
        _measured, partial(_trained_with, "measured"), (broken_json, broken_bytes)
    ),
    "safetensors": Target(
        partial(_weights, file="model.safetensors"), _converted, (broken_header, broken_bytes)
    ),
    "index of safetensors": Target(
        partial(_weights, file="model.safetensors.index.json", parts=True),
        _converted,
        (broken_json, broken_bytes),
    ),
    "config.json of Hugging Face": Target(
        partial(_weights, file="config.json"), _converted, (broken_json, broken_bytes)
    ),
    "imported model": Target(
        partial(_weights, file="model.json", imported=True), _converted, (broken_json, broken_bytes)
    ),
    "tokenizer.json": Target(_tokenizer, _tokenized, (broken_json, broken_bytes)),
    "text": Target(_text, _load_text, (broken_bytes,)),
    "PNG image": Target(partial(_images, ending="png"), _load_images, (broken_bytes,)),
    "JPEG image": Target(partial(_images, ending="jpg"), _load_images, (broken_bytes,)),
    "npz": Target(_npz, _parts, (broken_bytes,)),
    "records": Target(partial(_records, file="*array_record*"), _digits, (broken_bytes,)),
    "description of records": Target(
        partial(_records, file="dataset_info.json"), _digits, (broken_json, broken_bytes)
    ),
    "description of others' records": Target(
        partial(_records, file="dataset_info.json", name="mnist"),
        partial(_digits, name="mnist"),
        (broken_json, broken_bytes),
    ),
    "features of others' records": Target(
        partial(_records, file="features.json", name="mnist"),
        partial(_digits, name="mnist"),
        (broken_json, broken_bytes),
    ),
}
"""Every reader by its name in the record."""
