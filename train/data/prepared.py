"""Finds, opens and prepares TFDS data sets in array_record. Whatever is missing is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.data import cache

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def data_dir(given: str | None) -> Path:
    """data.data_dir, or the folder of data sets in the cache."""
    return Path(given).expanduser() if given else cache.root() / "tfds"


def builder(name: str, given: str | None, version: str | None, note: cache.Note) -> tfds.core.DatasetBuilder:
    """An embedded data set, prepared if it is not.

    Args:
        name: class in builders.py.
        given: data.data_dir.
        version: name of the builder config: what its content depends on.
        note: told what takes time.

    Raises:
        DataError: the folder cannot be written.
    """
    base = cache.folder(base=data_dir(given))
    from train.data import builders

    kind = {"PythonCorpus": builders.PythonCorpus, "Digits": builders.Digits}[name]
    made: Any = kind(data_dir=base, config=builders.config(version), file_format="array_record")
    if not made.is_prepared():
        with cache.lock(base / f"{name}.lock", note):
            if not made.is_prepared():
                note(f"preparing {made.name} in {made.data_path}")
            builders.prepare(made)
    return made
