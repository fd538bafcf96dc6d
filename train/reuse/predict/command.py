"""`mupax predict FOLDER IMAGES...`: the likeliest classes of image files, by a run or by weights from elsewhere."""

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
from mupax.train.checkpoints.command import ModelFlags

if TYPE_CHECKING:
    from mupax.train.reuse.image_input import ImageInput

_BATCH = 32
_LISTS = (".txt", ".lst", ".list")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict(ModelFlags):
    """The likeliest classes of image files, with probabilities.

    WORKDIR is a run, one of its steps, a folder that `mupax import` wrote, one of Hugging Face, or ORG/NAME of its hub.
    Images of any size and mode are read as evaluation reads them, by the preprocessing that lies beside the weights. Answers go
    to stdout, a line an image, as they are made; a file that cannot be read is named on stderr and left out, and the exit code
    is 2 then.
    """

    images: Annotated[
        conf.Positional[tuple[command_line.Place, ...]], conf.arg(metavar="IMAGES ...")
    ]
    """Image files, folders of them, or text files (.txt, .lst) with a path a line."""
    top: Annotated[int, conf.arg(metavar="K")] = 5
    """How many classes, the likeliest first."""
    json: Switch = False
    """A JSON object a line: image, and classes with class, label and probability."""


def main(argv: Sequence[str]) -> int:
    """Prints the answers; 0, or 2 where a file could not be read.

    Raises:
        UsageError: no such file, no image in a folder, or a text that lists none.
        WeightsError, WorkdirError, TensorFileError: no model of images there.
    """
    args = command_line.parse(Predict, "mupax predict", argv)
    if args.top < 1:
        raise command_line.UsageError(f"--top is {args.top}; write a whole number of at least 1")
    from mupax.train.reuse import trained
    from mupax.train.reuse.huggingface import hub
    from mupax.train.reuse.predict.classifier import classifier

    paths = files(args.images)
    opened = trained.open_model(hub.local(args.workdir, args.revision), args.step, args.average)
    model = classifier(opened, min(_BATCH, len(paths)))
    unread = 0
    for path, probabilities, error in model.predictions(paths):
        if probabilities is None:
            unread += 1
            terminal.note(f"left out: {error}")
            continue
        best = ranked(probabilities, args.top)
        print(
            as_json(path, best, model.images) if args.json else as_line(path, best, model.images),
            flush=True,
        )
    lost = f"; {unread} could not be read" if unread else ""
    terminal.note(f"{len(paths) - unread} of {len(paths)} images by {model.described}{lost}")
    return 2 if unread else 0


def files(places: Sequence[Path]) -> list[Path]:
    """The image files that words of the command line mean, in their order; a folder's sorted.

    Raises:
        UsageError: one of them means none.
    """
    from mupax.train.data.records.listing import files_below, summary
    from mupax.train.data.sources.folders import is_image, not_an_image

    paths: list[Path] = []
    for place in places:
        if place.is_dir():
            listing = files_below(place)
            inside = [path for _, path in listing.files if is_image(path.name)]
            if not inside:
                raise command_line.UsageError(
                    f"{place} has no image in it; give image files, or a folder that has some"
                )
            no_images = {
                name: not_an_image(path.name)
                for name, path in listing.files
                if not is_image(path.name)
            }
            for line in summary(listing.skipped | no_images):
                terminal.note(f"{place}: {line}")
            paths += inside
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


def _listed(text: Path) -> list[Path]:
    """The paths of a text, of which one at least is a file's."""
    try:
        lines = [line.strip() for line in text.read_text("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise command_line.UsageError(f"{text} is no text: {error}") from error
    if not any(Path(line).is_file() for line in lines):
        first = f"its first line is {lines[0]!r:.60}" if lines else "it is empty"
        raise command_line.UsageError(
            f"{text} lists no image file ({first}); write a path a line, as seen from here"
        )
    return [Path(line) for line in lines]


def ranked(probabilities: np.ndarray, top: int) -> list[tuple[int, float]]:
    """Label and probability of the likeliest classes.

    Args:
        probabilities: float64 [classes].
        top: how many, at most.
    """
    labels = np.argsort(-probabilities, kind="stable")[:top]
    return [(int(label), float(probabilities[label])) for label in labels]


def as_line(path: Path, best: list[tuple[int, float]], images: ImageInput) -> str:
    """An answer to read: the path, names and per cent.

    Args:
        path: of the image.
        best: of `ranked`.
        images: has the names.
    """
    from mupax.train.reuse.image_input import printable

    return f"{printable(str(path))}: {', '.join(f'{images.name(label)} {100 * p:.1f} %' for label, p in best)}"


def as_json(path: Path, best: list[tuple[int, float]], images: ImageInput) -> str:
    """An answer to read by a program; classes without names are called by their numbers.

    Args:
        path: of the image.
        best: of `ranked`.
        images: has the names.
    """
    names = images.class_names or [
        str(label) for label in range(1 + max(label for label, _ in best))
    ]
    classes: list[dict[str, Any]] = [
        {"class": names[label], "label": label, "probability": probability}
        for label, probability in best
    ]
    return json.dumps({"image": str(path), "classes": classes})
