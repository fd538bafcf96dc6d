"""Evaluation sets of `data.evaluate`, which a run evaluates in addition to its own data.

A set has the evaluation examples of another source. It is tokenized with the run's tokenizer, and
has the run's classes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mupax.train import data as sources
from mupax.train.data import cache
from mupax.train.data.interface import Data, DataError

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig
    from mupax.train.config.run import Config


def load(name: str, config: Config, data: Data, note: cache.Note = print) -> Data:
    """Return the data of an evaluation set. Prepare the data if needed.

    The evaluation examples are those that a run would have if it trained on this source.

    Args:
        name: Key of `config.data.evaluation_sets`.
        data: Data of the run. The set must have the same tokenizer and classes.
        note: Function that takes one line of text about work that takes long. The line begins with
            the set's name.

    Raises:
        DataError: The set is missing or damaged, or has other tokens or classes. The message has
            the set's name.
    """
    source = config.data.evaluation_sets[name]
    set_config = _set_config(source, config.data, data)

    def note_of_set(text: str) -> None:
        note(f"{name}: {text}")

    try:
        if source.startswith("images:"):
            loaded = _load_folder(source, set_config, config, data, note_of_set)
        else:
            loaded = sources.load(set_config, config.model, seed=config.data_seed, note=note_of_set)
        _check_tokenizer(source, data, loaded)
        _check_classes(data.class_names, loaded.class_names)
    except DataError as error:
        raise DataError(f"data.evaluate {name}: {error}") from error
    return loaded


def _set_config(source: str, run_data: DataConfig, data: Data) -> DataConfig:
    """Return the data settings of an evaluation set: the run's settings with another source.

    Mixture and streaming are off. The set uses the tokenizer file that the run's data has opened.
    `field` gets its default where the run's `field` would not fit: for text:PATH unless the run
    reads text:PATH or a mixture and the set has records with it, and for chat:PATH unless the run
    reads chat:PATH.

    Args:
        source: Source of the set, as data.name takes it.
        data: Data of the run, whose tokenizer file is used.
    """
    set_config = dataclasses.replace(run_data, name=source, evaluate=(), mix=(), stream=False)
    tokenizer_path = getattr(data.tokenizer, "path", None)
    if tokenizer_path is not None:
        # The file that the run's data was opened with: bpe:SIZE would train another tokenizer here.
        set_config = dataclasses.replace(
            set_config, tokenizer=str(tokenizer_path), chat_template=data.config.chat_template
        )
    default_field = type(run_data).field
    if source.startswith("text:") and run_data.field != default_field:
        from mupax.train.data.sources.training_texts import has_records

        # `text:` may have no records, and then a field other than the default is refused.
        path = source.partition(":")[2]
        may_fit = run_data.name.startswith(("text:", "mix"))
        if not (may_fit and has_records(path, run_data.field)):
            set_config = dataclasses.replace(set_config, field=default_field)
    if source.startswith("chat:") and not run_data.name.startswith("chat:"):
        # The run's `field` names a text. Conversations are in another field, by default `messages`.
        set_config = dataclasses.replace(set_config, field=default_field)
    return set_config


def _load_folder(
    source: str, set_config: DataConfig, config: Config, data: Data, note: cache.Note
) -> Data:
    """Load a folder's images with the run's labels and return its data.

    The folder may have only some of the run's classes.

    Raises:
        DataError: The folder has a class that the run does not have.
    """
    from mupax.train.data.sources import folders

    folder = folders.to_evaluate(source, data.facts)
    classes = data.class_names or folder.classes
    _check_classes(classes, folder.classes, some=True)
    folder = folder.labelled_as(classes)
    return folders.opened(folder, set_config, config.model, config.data_seed, note)


def _check_tokenizer(source: str, data: Data, loaded: Data) -> None:
    """Raise `DataError` if the set has another tokenizer than the run.

    Args:
        source: Name of the set's source, for the message.
        data: Data of the run. Its facts name its tokenizer.
        loaded: Data of the set, which must have the same tokenizer.
    """
    run_tokenizer = data.facts.get("tokenizer")
    set_tokenizer = loaded.facts.get("tokenizer")
    if run_tokenizer != set_tokenizer:
        raise DataError(
            f"{source} is cut into tokens of {set_tokenizer}, and the run's data into those of "
            f"{run_tokenizer}; leave it out"
        )


def _check_classes(
    run_classes: list[str] | None, set_classes: list[str] | None, some: bool = False
) -> None:
    """Raise `DataError` if the set has other classes than the run.

    With other classes, a label such as 3 would not mean the same class in both.

    Args:
        run_classes: Names of the run's classes by label. None skips the check.
        set_classes: Names of the set's classes by label. None for text.
        some: True if the set may have fewer classes than the run, in any order.
    """
    if some and run_classes is not None and set_classes is not None:
        from mupax.train.data.sources.folders import nfc

        if set(map(nfc, set_classes)) <= set(map(nfc, run_classes)):
            return
    if run_classes is not None and set_classes != run_classes:
        raise DataError(
            f"its classes are {_listed(set_classes or ['unknown'])}, and those of the run "
            f"{_listed(run_classes)}; give it the same classes, or leave it out"
        )


def _listed(names: list[str]) -> str:
    """Return the first eight names, joined by commas, with "…" if there are more."""
    listed = ", ".join(names[:8])
    return f"{listed} …" if len(names) > 8 else listed
