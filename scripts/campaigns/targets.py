"""What reads files that may come from anyone: how each gets a good file, how it is broken, and everything that is done with it."""

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

Broken = Callable[[bytes, random.Random], bytes]


class Target(NamedTuple):
    """A reader."""

    make: Callable[[Path], Path]
    """Writes good files into a folder, and gives the one to break."""
    read: Callable[[Path], object]
    """Reads that folder as a command does."""
    broken: tuple[Broken, ...]
    """How the file is broken, in turn."""


def _words() -> str:
    choose, words = (
        random.Random(0),
        ("def", "return", "import", "class", "self", "value", "lambda", "yield"),
    )
    return "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(60))


def _config() -> Any:
    from mupax.train.config.recipes import RECIPES
    from mupax.zoo.configs import DecoderConfig

    config, model = (
        RECIPES["lm-tiny"](),
        DecoderConfig(width=8, depth=1, num_heads=2, vocab_size=256, seq_len=8),
    )
    return replace(config, model=model, steps=8, workdir=None)


# A run


def _run(folder: Path) -> Path:
    from mupax.train.checkpoints import workdir

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for steps in (6, 8):  # two parts
        workdir.record(
            folder, replace(_config(), steps=steps), {"name": "x", "digest": "d"}, "mup", {}, steps
        )
    return folder / workdir.RECORD


def _resumed(folder: Path) -> None:
    from mupax.train.checkpoints import workdir
    from mupax.train.config.record import from_json
    from mupax.train.parallel.processes import Processes
    from mupax.train.reuse.start import init_from
    from mupax.train.run import resume

    config = replace(_config(), workdir=str(folder), resume=True)
    path, held = workdir.claim(config, Processes())
    config, before = (
        init_from.settled(config, path, held, Processes()),
        workdir.read_record(path)["config"],
    )
    resume.check(before, config, 4)
    "\n".join(resume.changes(before, config)).encode()
    workdir.record(path, config, {"name": "x", "digest": "d"}, "mup", {}, 4)
    from_json(before)


def _checkpoint(folder: Path) -> Path:
    import jax.numpy as jnp

    from mupax.train.checkpoints import layout
    from mupax.train.checkpoints.checkpointer import Checkpoints
    from mupax.train.config.sections import CheckpointConfig
    from mupax.train.core.state import TrainState

    _run(folder)
    with Checkpoints(folder, CheckpointConfig(keep=2)) as checkpoints:
        health = {
            name: jnp.asarray(value)
            for name, value in TrainState._field_defaults["health"]._asdict().items()
        }
        params = {"token": jnp.arange(12.0).reshape(3, 4)}
        state = TrainState(
            jnp.int32(4), params, (), None, TrainState._field_defaults["health"]._replace(**health)
        )
        checkpoints.save(4, state, {"digest": "d"})
    return folder / "checkpoints" / "4" / layout.MANIFEST


def _signed(content: bytes, choose: random.Random) -> bytes:
    """A manifest with other values and the digest of those."""
    from mupax.train.checkpoints import layout

    fields = json.loads(broken_json(content, choose))
    if isinstance(fields, dict) and isinstance(fields.get("manifest"), dict):
        fields["digest"] = layout._digest_of(fields["manifest"])
    return json.dumps(fields).encode()


def _verified(folder: Path) -> None:
    from mupax.train.checkpoints import command, saved_run
    from mupax.train.checkpoints.folder import newest_record

    newest_record(folder / "checkpoints")
    (row,) = command._checkpoints(folder, None, verify=True)
    " ".join(command._cells(row | {"best": False, "stays_as": None}, [])).encode()
    saved_run.find(folder).verified()


def _metrics(folder: Path) -> Path:
    from mupax.train.run.report import metrics

    shutil.rmtree(folder, ignore_errors=True)
    with metrics.MetricsWriter(folder) as writer:
        for step in range(1, 7):
            row = {
                "step": step,
                "loss": 2.0 / step,
                "lr": 0.1,
                "grad_norm": 1.0,
                "tokens": 8,
                "seconds": 0.1,
            }
            writer.write(row if step != 3 else {**row, "loss": float("nan")})
        writer.write({"step": 6, "eval_loss": 1.0, "eval_accuracy": 0.5})
    return writer.path


def _reported(folder: Path) -> None:
    from mupax.terminal import rich_console
    from mupax.train.run.report import finish, metrics

    metrics.has_evaluation(folder, 6)
    finish.summary(
        rich_console(file=io.StringIO()), folder / "metrics.jsonl", name="x", seconds=1.0, facts={}
    )
    metrics.MetricsWriter(folder, resume_step=5).close()


def _points(folder: Path) -> Path:
    from mupax.train.studies.sweep.rows import Row, Rows

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rows = Rows(folder)
    for k in range(3):
        rows.add(
            Row(str(k), "python -m train", 2.5, None, k or None, (3.0, 2.5), 20, 1.5, "in turn")
        )
    return rows.path


def _swept(folder: Path) -> None:
    from mupax.train.studies.sweep.rows import Rows

    for row in Rows(folder, lambda text: None).values():
        json.dumps(row.to_json(), allow_nan=False)


# Presets


def _tuned(folder: Path) -> Path:
    from mupax.presets.tuned import find

    return Path(
        shutil.copy(next(iter(sorted(find.FOLDER.glob("mup.*.json")))), folder / "mup.x.json")
    )


def _measured(folder: Path) -> Path:
    from mupax.presets.rule import Scales
    from mupax.presets.tuned import measured

    model, names = _config().model, [field.name for field in dataclasses.fields(Scales)]
    scales = {
        spec.group: Scales(**dict.fromkeys(names, 0.5)) for spec in model.parameters().values()
    }
    table = measured.Table(
        scales=scales,
        logits=0.5,
        residual=(((1.0, 0.5), (1.0, 0.5)),),
        sizes=model.sizes(),
        optimizer="adamw",
    )
    measured.save(table, folder / "table.json")
    return folder / "table.json"


def _trained_with(word: str, folder: Path) -> None:
    from mupax.presets.tuned import find
    from mupax.train.config import tuned
    from mupax.train.config.preset import preset_of

    config = _config()
    config = replace(config, preset=replace(config.preset, base=None))
    path = next(folder.glob("*.json"))
    if word == "measured":
        config = replace(config, preset=replace(config.preset, name=f"measured:{path}"))
    else:
        config, _, study = tuned.applied(config, ["--preset", f"mup:{path}"], "8")
        assert study is not None
        f"{find.summary(study)}\n{find.described(study)}".encode()
        tuned.check(study, config)
    preset, sizes = preset_of(config), config.model.sizes()
    for spec in config.model.parameters().values():
        scales = preset.scales(spec, sizes, config.optimizer.name)
        numbers = np.hstack([np.float32(value) for value in vars(scales).values()])
        if not np.isfinite(numbers).all():
            raise AssertionError(f"{scales} has no numbers that float32 holds")


# Weights of others


def _weights(folder: Path, file: str, *, parts: bool = False, imported: bool = False) -> Path:
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
    params = {
        name: draw.standard_normal(leaf.shape, np.float32)
        for name, leaf in definition(model).abstract.items()
    }
    target = folder / "hf" if imported else folder
    target.mkdir(exist_ok=True)
    write_tensors(
        target, weights.to_huggingface(model, params), shard_bytes=500 if parts else 10**9
    )
    (target / "config.json").write_text(json.dumps(to_huggingface(model)))
    if imported:
        read = trained.read(target)
        shutil.rmtree(target)
        files.write_imported(read, PresetConfig(name="mup"), folder, "hf")
    return folder / file


def _converted(folder: Path) -> None:
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import files

    files.write_huggingface(trained.read(folder), folder / "out", "float32")
    shutil.rmtree(folder / "out")


# Data


def _loaded(name: str, model: Any, **fields: Any) -> None:
    from mupax.train import data
    from mupax.train.config.data import DataConfig

    config = DataConfig(name=name, batch_size=2, eval_batch_size=2, **fields)
    try:
        with data.reading():
            loaded = data.load(config, model, seed=0, note=lambda text: None)
            for k in range(3):
                loaded.train_batch(k)
            list(loaded.eval_batches())
    finally:
        shutil.rmtree(os.environ["MUPAX_DATA"], ignore_errors=True)


def _text(folder: Path) -> Path:
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{_words()} å € 𝄞\n{name}")
    return folder / "a.txt"


def _tokenizer(folder: Path) -> Path:
    from mupax.train.data.text.named_tokenizers import train_bpe

    _text(folder)
    train_bpe([_words().encode()], 300).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _tokenized(folder: Path) -> None:
    from mupax.train.data.text.tokenizer import Subwords

    tokenizer = Subwords(folder / "tokenizer.json")
    for ids in tokenizer.encode([_words().encode(), b"", "\ufeffå €".encode()]):
        tokenizer.decode(ids)


def _images(folder: Path, ending: str) -> Path:
    from PIL import Image

    draw = np.random.default_rng(0)
    for k in range(8):
        path = folder / "images" / ("cat", "dog")[k % 2] / f"{k}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (13, 11, 3), np.uint8)).save(path)
    return folder / "images" / "cat" / f"0.{ending}"


def _vit() -> Any:
    from mupax.zoo.configs import ViTConfig

    return ViTConfig(
        width=6, depth=1, num_heads=1, image_size=12, patch_size=4, channels=3, num_classes=2
    )


def _npz(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (3, 32, 32, 3), np.uint8), np.arange(3)
    np.savez_compressed(folder / "part0.npz", X=x, Y=y)
    return folder / "part0.npz"


def _parts(folder: Path) -> None:
    from mupax.train.data.sources.cifar5m import examples

    list(examples(folder / "part0.npz"))


def _records(folder: Path, file: str, name: str = "digits") -> Path:
    from mupax.train.data.records import builders

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    builders.embedded(builders.Digits, str(folder), lambda text: None)
    (folder / "digits").rename(folder / name)
    return next(iter(sorted(folder.glob(f"{name}/*/{file}"))))


def _digits(folder: Path, name: str = "digits") -> None:
    from mupax.zoo import configs

    _loaded(name, configs.get("vit-tiny"), data_dir=str(folder))


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
    "text": Target(
        _text, lambda folder: _loaded(f"text:{folder}", _config().model), (broken_bytes,)
    ),
    "PNG image": Target(
        partial(_images, ending="png"),
        lambda folder: _loaded(f"images:{folder / 'images'}", _vit()),
        (broken_bytes,),
    ),
    "JPEG image": Target(
        partial(_images, ending="jpg"),
        lambda folder: _loaded(f"images:{folder / 'images'}", _vit()),
        (broken_bytes,),
    ),
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
