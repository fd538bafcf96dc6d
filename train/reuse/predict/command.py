"""`mupax predict WORKDIR IMAGES...`: the likeliest classes of image files, by any trained model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.terminal import counted
from mupax.train.checkpoints.command import ModelFlags

if TYPE_CHECKING:
    from mupax.train.reuse.image_input import ImageInput

_BATCH_SIZE = 32
_LISTS = (".txt", ".lst", ".list")
"""Suffixes of text files with one path per line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict(ModelFlags):
    """The likeliest classes of image files, with probabilities.

    WORKDIR is a run, one of its steps, a folder that `mupax import` wrote, one of Hugging Face, or
    ORG/NAME of its hub. Images of any size and mode are preprocessed as in evaluation, by the
    settings beside the weights. The answers go to stdout, one line per image. A file that cannot be
    read is named on stderr and left out, and the exit code is then 2.
    """

    images: Annotated[
        conf.Positional[tuple[command_line.Place, ...]], conf.arg(metavar="IMAGES ...")
    ]
    """Image files, folders of images, or text files (.txt, .lst) with one path per line."""
    top: Annotated[int, conf.arg(metavar="K")] = 5
    """Number of classes to print, the likeliest first."""
    json: Switch = False
    """Print one JSON object per line: image, and classes with class, label and probability."""


def main(argv: Sequence[str]) -> int:
    """Print the likeliest classes of image files.

    Returns:
        The exit code: 0, or 2 if a file could not be read or has logits that are not finite.

    Raises:
        UsageError: A path does not exist, or a folder or list has no images.
        WeightsError, WorkdirError, TensorFileError: There is no readable model of images.
    """
    args = command_line.parse(Predict, "mupax predict", argv)
    if args.top < 1:
        raise command_line.UsageError(f"--top is {args.top}; write a whole number of at least 1")
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import hub
    from mupax.train.reuse.predict.classifier import classifier

    paths = files(args.images)
    source = hub.local(args.workdir, args.revision)
    trained_model = trained.open_model(source, args.step, args.average)
    # Rows of padding cost as much as images, so a few files get a small batch.
    model = classifier(trained_model, min(_BATCH_SIZE, len(paths)))
    num_failed = 0
    for path, probabilities, error in model.predictions(paths):
        if probabilities is None:
            num_failed += 1
            terminal.note(f"left out: {error}")
            continue
        best = ranked(probabilities, args.top)
        if args.json:
            line = as_json(path, best, model.images)
        else:
            line = as_line(path, best, model.images)
        # Flushed, so that a program at the other end of a pipe gets each answer at once.
        print(line, flush=True)

    summary = f"{len(paths) - num_failed} of {counted(len(paths), 'image')} by {model.described}"
    if num_failed:
        summary += f"; {num_failed} without an answer"
    terminal.note(summary)
    return 2 if num_failed else 0


def files(places: Sequence[Path]) -> list[Path]:
    """Return the image files that the command line names, and all image files below its folders.

    They come in the order of the command line, those of a folder sorted. Files of a folder that are
    no images are left out and summarized on standard error. Other files are not checked.

    Args:
        places: Image files, folders, or text files with one path per line.

    Raises:
        UsageError: A path does not exist, or a folder or list has no images.
    """
    paths: list[Path] = []
    for place in places:
        if place.is_dir():
            paths += _images_below(place)
        elif not place.exists():
            raise command_line.UsageError(
                f"no file or folder {place}; write images, folders, or texts with a path a line"
            )
        elif place.suffix.lower() in _LISTS:
            paths += _listed(place)
        else:
            paths.append(place)
    if not paths:
        raise command_line.UsageError(
            "no images are named; write image files, folders, or texts with a path a line"
        )
    return paths


def _images_below(folder: Path) -> list[Path]:
    """Return the image files below a folder, and print a summary of its other files.

    Raises:
        UsageError: there is no image.
    """
    from mupax.train.data.records.listing import files_below, summary
    from mupax.train.data.sources.folders import is_image, not_an_image

    listing = files_below(folder)
    paths = []
    skipped = {}
    for name, path in listing.files:
        if is_image(path.name):
            paths.append(path)
        else:
            skipped[name] = not_an_image(path.name)
    if not paths:
        raise command_line.UsageError(
            f"{folder} has no image in it; give image files, or a folder that has some"
        )
    for line in summary(listing.skipped | skipped):
        terminal.note(f"{folder}: {line}")
    return paths


def _listed(text: Path) -> list[Path]:
    """Return the paths in a text file, one per line that is not blank.

    Raises:
        UsageError: the file is not UTF-8, or none of its paths is a file.
    """
    try:
        # Editors on Windows write a byte order mark, which would become part of the first path.
        content = text.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise command_line.UsageError(f"{text} is no text: {error}") from error
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    if not any(Path(line).is_file() for line in lines):
        first = f"its first line is {lines[0]!r:.60}" if lines else "it is empty"
        raise command_line.UsageError(
            f"{text} lists no image file ({first}); write a path a line, as seen from here"
        )
    return [Path(line) for line in lines]


def ranked(probabilities: np.ndarray, top: int) -> list[tuple[int, float]]:
    """Return label and probability of the `top` likeliest classes, the likeliest first.

    Args:
        probabilities: float64 [classes].
    """
    # A stable sort puts the lower label first where probabilities are equal.
    labels = np.argsort(-probabilities, kind="stable")[:top]
    return [(int(label), float(probabilities[label])) for label in labels]


def as_line(path: Path, best: list[tuple[int, float]], images: ImageInput) -> str:
    """Return a line to read: the path, and names of classes with their probabilities in percent.

    Args:
        best: Result of `ranked`.
    """
    from mupax.train.reuse.image_input import printable

    shares = [f"{images.name(label)} {100 * probability:.1f} %" for label, probability in best]
    return f"{printable(str(path))}: {', '.join(shares)}"


def as_json(path: Path, best: list[tuple[int, float]], images: ImageInput) -> str:
    """Return a line of JSON for programs. Classes without names are called by their labels.

    Args:
        best: Result of `ranked`.
    """
    classes: list[dict[str, Any]] = []
    for label, probability in best:
        name = images.class_names[label] if images.class_names else str(label)
        classes.append({"class": name, "label": label, "probability": probability})
    return json.dumps({"image": str(path), "classes": classes})
