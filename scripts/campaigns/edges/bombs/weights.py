"""Samples of weights: headers, indices and configs that claim much, NaN, links, TFDS features."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.campaigns.edges.bombs.sample import (
    EITHER,
    LOADS,
    REFUSED,
    Sample,
    command,
    first_batches,
    mupax,
)

_CONFIG = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}

_IMPORT = command("import model --out imported")


def samples() -> Iterator[Sample]:
    """Yield every sample of weights, links and features."""
    yield Sample("weights: ordinary", "weights", _weights, _IMPORT, LOADS)
    yield from _values()
    yield from _headers()
    yield from _configs()
    yield from _links()
    yield from _features()


def _tensors() -> dict[str, Any]:
    """Return random tensors of the model of `_CONFIG`, by their names in GPT-2."""
    import numpy as np

    choose = np.random.default_rng(0)
    shapes = {"transformer.wte.weight": (32, 16), "transformer.wpe.weight": (16, 16)}
    for layer in range(2):
        block = f"transformer.h.{layer}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}{norm}.weight": (16,), f"{block}{norm}.bias": (16,)}
        shapes |= {f"{block}attn.c_attn.weight": (16, 48), f"{block}attn.c_attn.bias": (48,)}
        shapes |= {f"{block}attn.c_proj.weight": (16, 16), f"{block}attn.c_proj.bias": (16,)}
        shapes |= {f"{block}mlp.c_fc.weight": (16, 64), f"{block}mlp.c_fc.bias": (64,)}
        shapes |= {f"{block}mlp.c_proj.weight": (64, 16), f"{block}mlp.c_proj.bias": (16,)}
    shapes |= {"transformer.ln_f.weight": (16,), "transformer.ln_f.bias": (16,)}
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = choose.normal(size=shape).astype(np.float32)
    return tensors


def _weights(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write weights into `model`, and return its path.

    Args:
        tensors: Tensors by name. Default: `_tensors()`.
        **config: Fields of config.json that differ from `_CONFIG`.
    """
    from safetensors.numpy import save_file

    place = folder / "model"
    place.mkdir(exist_ok=True)
    save_file(_tensors() if tensors is None else tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({**_CONFIG, **config}))
    return place


def _describe(folder: Path) -> int:
    """Load the weights as `train.load` does, generate two tokens, and return the exit code."""
    from mupax import terminal

    os.environ["MUPAX_DATA"] = str(folder / "cache")

    @terminal.entry_point
    def generate(argv: list[str]) -> int:
        from mupax.train.reuse import model

        print(model.load(folder / "model", tokenizer="ids:32").generate("1 2 3", tokens=2))
        return 0

    return generate([])


def _init_from(folder: Path) -> int:
    """Train for one step from the weights, and return the exit code."""
    (folder / "text.txt").write_text("a text of words\n" * 300)
    words = (
        "lm-tiny --init-from model --data.name text:text.txt --steps 1 --workdir run "
        "--model.width 16 --model.depth 2 --model.num-heads 2 --model.seq-len 16 "
        "--model.vocab-size 32 --data.tokenizer ids:32"
    )
    return mupax(folder, "train", *words.split())


def _values() -> Iterator[Sample]:
    """Yield samples of weights with a value that is not finite."""
    import math

    for title, value in {"NaN": math.nan, "infinity": math.inf}.items():
        make = partial(_wrong_value, value=value)
        yield Sample(
            f"weights: {title} in an embedding, zoo import",
            "weights",
            make,
            _IMPORT,
            REFUSED,
            "token",
        )
    make = partial(_wrong_value, value=math.nan)
    yield Sample(
        "weights: NaN in an embedding, --init-from", "weights", make, _init_from, REFUSED, "token"
    )
    yield Sample(
        "weights: NaN in an embedding, train.load", "weights", make, _describe, REFUSED, "token"
    )
    half = partial(_wrong_value, value=math.nan, half=True)
    yield Sample("weights: NaN in half precision", "weights", half, _IMPORT, REFUSED, "token")


def _wrong_value(folder: Path, value: float, *, half: bool = False) -> None:
    """Write weights with one wrong value in the embedding.

    Args:
        half: Write the weights as float16. Default: false.
    """
    import numpy as np

    tensors = _tensors()
    tensors["transformer.wte.weight"][3, 5] = value
    if half:
        tensors = {name: array.astype(np.float16) for name, array in tensors.items()}
    _weights(folder, tensors)


def _raw(folder: Path, header: bytes, length: int | None = None, data: int = 64) -> None:
    """Write a safetensors file with any header.

    Args:
        length: Length that the file claims for the header. Default: the true one.
        data: Bytes of zeros after the header. Default: 64.
    """
    place = _weights(folder)
    size = len(header) if length is None else length
    (place / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + bytes(data))


def _entry(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    """Return the entry of a float32 tensor in a header."""
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def _headers() -> Iterator[Sample]:
    """Yield samples of safetensors with wrong headers and indices."""
    headers: dict[str, Callable[[Path], object]] = {
        "a header of 2^63 bytes": partial(_raw, header=b"{}", length=2**63),
        "a header of 90 MB that is not there": partial(_raw, header=b"{}", length=90_000_000),
        "a shape of 10^18": partial(
            _raw, header=json.dumps({"a": _entry([10**18], 0, 64)}).encode()
        ),
        "a shape that overflows": partial(
            _raw, header=json.dumps({"a": _entry([2**33, 2**33], 0, 64)}).encode()
        ),
        # If tensors may overlap, a small file can unpack to much.
        "tensors that overlap": partial(
            _raw, header=json.dumps({"a": _entry([16], 0, 64), "b": _entry([16], 0, 64)}).encode()
        ),
        "offsets beyond the file": partial(
            _raw, header=json.dumps({"a": _entry([16], 0, 10**12)}).encode()
        ),
        "100,000 tensors": _many_tensors,
        "a shape of a million axes": partial(
            _raw, header=json.dumps({"a": _entry([1] * 1_000_000, 0, 4)}).encode(), data=4
        ),
        # A parser that calls itself for each level would crash.
        "a header nested a million deep": partial(
            _raw, header=b'{"a":' * 1_000_000 + b"}" * 1_000_000
        ),
        "8 MB of metadata": partial(
            _raw,
            header=json.dumps({"__metadata__": {str(i): "x" for i in range(500_000)}}).encode(),
            data=0,
        ),
        "an index of 300,000 tensors": _many_in_index,
        "an index that leads out of the folder": partial(
            _index, file="../../../etc/passwd.safetensors"
        ),
        "an index of numbers": partial(_index, file=7),
        "an index nested 100,000 deep": _deep_index,
        # Reading a pickle runs code that is in it.
        "a pickle": _pickle,
    }
    for title, make in headers.items():
        yield Sample(f"safetensors: {title}", "weights", make, _IMPORT, REFUSED)


def _many_tensors(folder: Path) -> None:
    """Write a safetensors file of 100,000 tensors."""
    header = {f"tensor {i}": _entry([1], 4 * i, 4 * i + 4) for i in range(100_000)}
    _raw(folder, json.dumps(header).encode(), data=400_000)


def _index(folder: Path, file: Any) -> None:
    """Write weights with an index that names `file` for every tensor."""
    place = _weights(folder)
    (place / "model.safetensors").rename(place / "part.safetensors")
    names = [*_tensors()]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _many_in_index(folder: Path) -> None:
    """Write weights with an index of 300,000 tensors."""
    place = _weights(folder)
    (place / "model.safetensors").rename(place / "part.safetensors")
    index = {"weight_map": {f"t{i}": "part.safetensors" for i in range(300_000)}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _deep_index(folder: Path) -> None:
    """Write an index that is nested 100,000 deep."""
    place = _weights(folder)
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.json").write_text("[" * 100_000 + "]" * 100_000)


def _pickle(folder: Path) -> None:
    """Write weights whose file has the name of a pickle."""
    place = _weights(folder)
    (place / "model.safetensors").rename(place / "pytorch_model.bin")


def _configs() -> Iterator[Sample]:
    """Yield samples of config.json with sizes that are too large or no sizes."""
    fields: dict[str, dict[str, Any]] = {
        "a million layers": {"n_layer": 1_000_000},
        "10^12 layers": {"n_layer": 10**12},
        "a width of 10^9": {"n_embd": 10**9},
        "10^12 tokens": {"vocab_size": 10**12},
        "10^9 positions": {"n_positions": 10**9},
        "a billion heads": {"n_head": 10**9},
        "negative sizes": {"n_embd": -16},
        "a size of 1,000 digits": {"n_embd": 10**999},
        "a list as a size": {"n_embd": [16]},
    }
    for title, changed in fields.items():
        make = partial(_weights, **changed)
        yield Sample(f"config.json: {title}", "weights", make, _IMPORT, REFUSED)
    vit = {
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    make = partial(_weights, **vit, id2label={str(i): f"class {i}" for i in range(200_000)})
    yield Sample("config.json: 200,000 classes", "weights", make, _IMPORT, REFUSED)
    yield Sample("config.json: nested 100,000 deep", "weights", _deep_config, _IMPORT, REFUSED)
    yield Sample("config.json: 9 MB of lists", "weights", _wide_config, _IMPORT, EITHER)


def _deep_config(folder: Path) -> None:
    """Write weights with a config.json that is nested 100,000 deep."""
    (_weights(folder) / "config.json").write_text(
        '{"model_type":"gpt2","x":' + "[" * 100_000 + "]" * 100_000 + "}"
    )


def _wide_config(folder: Path) -> None:
    """Write weights with a config.json that has a list of 3 million objects."""
    text = json.dumps(_CONFIG)[:-1] + ', "x": [' + "{}," * 3_000_000 + "{}]}"
    (_weights(folder) / "config.json").write_text(text)


def _links() -> Iterator[Sample]:
    """Yield samples of folders with symbolic links, which must not lead to files outside."""
    read = command("push model --to me/model --dry-run")
    for name in ("README.md", "vocab.txt", "secret.json", "tokenizer.model"):
        make = partial(_linked, name=name)
        yield Sample(f"push: {name} is a link to a secret", "links", make, read, REFUSED, name)
    yield Sample("push: the folder of a link", "links", _link_of_link, read, REFUSED, "README.md")
    yield Sample("push: a link that stays inside", "links", _inner_link, read, LOADS, "README.md")
    yield Sample(
        "push: the cache of the hub",
        "links",
        _hub_cache,
        command("push link --to me/model --dry-run"),
        LOADS,
        "config.json",
    )
    linked_import = partial(_linked, name="vocab.txt")
    yield Sample(
        "zoo import: vocab.txt is a link to a secret",
        "links",
        linked_import,
        _IMPORT,
        REFUSED,
        "vocab.txt",
    )


def _linked(folder: Path, name: str) -> None:
    """Write weights, with a link of this name to a secret outside of their folder."""
    (folder / "secret").write_text("a secret of the user's\n")
    place = _weights(folder)
    (place / name).symlink_to("../secret")


def _link_of_link(folder: Path) -> None:
    """Write weights with a link to a link to a secret."""
    _linked(folder, "LICENSE")
    (folder / "model" / "README.md").symlink_to("LICENSE")


def _inner_link(folder: Path) -> None:
    """Write weights with a link that leads to a file of the same folder."""
    place = _weights(folder)
    (place / "card").write_text("# A model\n")
    (place / "README.md").symlink_to("card")


def _hub_cache(folder: Path) -> None:
    """Write weights as the cache of the hub does: links to blobs, in a folder behind a link."""
    place = _weights(folder)
    blobs = folder / "hub" / "models--a--b" / "blobs"
    snapshot = folder / "hub" / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in place.iterdir():
        shutil.copy(file, blobs / file.name.encode().hex())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name.encode().hex()}")
    (folder / "link").symlink_to(snapshot)


def _features() -> Iterator[Sample]:
    """Yield samples of TFDS data sets whose features.json names a class that must not be used."""
    prefix = "tensorflow_datasets.core.features."
    texts: dict[str, dict[str, Any]] = {
        "a module of the folder": {"pythonClassName": "stranger.Feature"},
        "a module of the folder, in the older form": {"type": "stranger.Feature", "content": {}},
        "a module of the folder, in a sequence": {
            "pythonClassName": f"{prefix}sequence_feature.Sequence",
            "sequence": {"feature": {"python_class_name": "stranger.Feature"}},
        },
        # Its import opens a browser.
        "a module of Python": {"pythonClassName": "antigravity.Feature"},
        "a module of TFDS that is no feature": {
            "pythonClassName": "tensorflow_datasets.testing.mocking.Feature"
        },
    }
    for title, feature in texts.items():
        make = partial(_data_set, feature=feature)
        yield Sample(
            f"features.json: {title}", "TFDS", make, _read_data_set, REFUSED, "features.json"
        )
    deep = partial(_data_set, feature=None)
    yield Sample("features.json: nested 100,000 deep", "TFDS", deep, _read_data_set, REFUSED)


def _data_set(folder: Path, feature: dict[str, Any] | None) -> None:
    """Write a TFDS data set, and a module `stranger` whose import would end the process.

    Args:
        feature: Entry of the feature in features.json, which names a class; `None` for a file that
            is nested 100,000 deep.
    """
    (folder / "stranger.py").write_text("raise SystemExit('the code of a stranger ran')\n")
    place = folder / "sets" / "words" / "1.0.0"
    place.mkdir(parents=True)
    split = {"name": "train", "shardLengths": ["1"], "numBytes": "10"}
    facts = {"name": "words", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (place / "dataset_info.json").write_text(json.dumps(facts))
    if feature is None:
        (place / "features.json").write_text(
            '{"featuresDict":' + "[" * 100_000 + "]" * 100_000 + "}"
        )
        return
    features = {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {"text": feature}},
    }
    (place / "features.json").write_text(json.dumps(features))


def _read_data_set(folder: Path) -> int:
    """Load the data set of `_data_set`, and return the exit code."""
    import sys

    # `python -m mupax` has the working directory there.
    sys.path.insert(0, str(folder))
    return first_batches(folder, "words", data_dir=str(folder / "sets"))
