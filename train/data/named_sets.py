"""Further sets that a run evaluates on, by name (`data.evaluate`): their evaluation examples, in the run's own tokens and classes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mupax.train import data as sources
from mupax.train.data import cache
from mupax.train.data.interface import Data, DataError

if TYPE_CHECKING:
    from mupax.train.config.run import Config


def load(name: str, config: Config, data: Data, note: cache.Note = print) -> Data:
    """A set, prepared if it is not; its evaluation examples are those that its source has as data of a run.

    Args:
        name: in `config.data.evaluation_sets`.
        config: of the run.
        data: of the run, whose tokenizer and classes the set must have.
        note: told what takes time; the set's name stands before it.

    Raises:
        DataError: the set is missing or damaged, or has other tokens or classes; the text begins with its name.
    """
    run_data = config.data
    place = run_data.evaluation_sets[name]
    part = dataclasses.replace(run_data, name=place, evaluate=(), mix=(), stream=False)
    if (path := getattr(data.tokenizer, "path", None)) is not None:
        # The file that the run's data was opened with: bpe:SIZE would make another one of this text.
        part = dataclasses.replace(
            part, tokenizer=str(path), chat_template=data.config.chat_template
        )
    if place.startswith("text:") and not run_data.name.startswith(("text:", "mix")):
        part = dataclasses.replace(part, field=type(run_data).field)  # plain text has none
    if place.startswith("chat:") and not run_data.name.startswith("chat:"):
        part = dataclasses.replace(
            part, field=type(run_data).field
        )  # its messages are not where the texts of records are
    try:

        def note_of_set(text: str) -> None:
            note(f"{name}: {text}")

        if place.startswith("images:"):
            from mupax.train.data.sources import folders

            folder = folders.to_evaluate(place, data.facts)
            classes = data.class_names or folder.classes
            _check_classes(classes, folder.classes, some=True)
            folder = folder.labelled_as(classes)
            loaded: Data = folders.opened(folder, part, config.model, config.data_seed, note_of_set)
        else:
            loaded = sources.load(part, config.model, seed=config.data_seed, note=note_of_set)
        if (tokenizer := data.facts.get("tokenizer")) != (here := loaded.facts.get("tokenizer")):
            raise DataError(
                f"{place} is cut into tokens of {here}, and the run's data into those of {tokenizer}; leave it out"
            )
        _check_classes(data.class_names, loaded.class_names)
    except DataError as error:
        raise DataError(f"data.evaluate {name}: {error}") from error
    return loaded


def _check_classes(classes: list[str] | None, here: list[str] | None, some: bool = False) -> None:
    """Refuse classes that are not the run's: label 3 would mean something else.

    Args:
        classes: of the run.
        here: of the set.
        some: whether the set may have fewer.
    """
    if some and classes is not None and here is not None:
        from mupax.train.data.sources.folders import nfc

        if set(map(nfc, here)) <= set(map(nfc, classes)):
            return
    if classes is not None and here != classes:
        shown = (
            ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
            for names in (here or ["unknown"], classes)
        )
        raise DataError(
            "its classes are {}, and those of the run {}; give it the same classes, or leave it out".format(
                *shown
            )
        )
