"""Own images, from files to answers in `transformers`: a model is trained, fine-tuned and exported.

    python examples/own_images.py

Run it in a new folder. Digits 0 to 4, which come with mupax, train a source model; digits 5 to 9
stand for your own images. Each line that it prints can be typed with another folder, and `--from`
takes a Hugging Face folder, too. Flags go to both trainings, such as `--steps 150`. The last part
needs `transformers` and is left out without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shlex
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mupax.__main__ import main as mupax
from mupax.train.data.images import read_digits

SOURCE = (
    # The model for a small folder makes patches by convolutions, which an export cannot write.
    "vit-digits --model vit-tiny "
    "--data.name images:theirs --data.pixels.fit squash --data.no-augment "
    "--model.num-classes 5 --workdir runs/source"
)
"""Words after `mupax train` that train the source model."""
TUNE = "finetune vit mine --from runs/source --data.no-augment --workdir runs/mine"
"""Words after `mupax` that fine-tune the source model on the own images."""
ABSENT = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
"""Packages that are not installed. The comparison with `transformers` needs both."""


def digits(folder: Path, labels: range, count: int) -> None:
    """Write handwritten digits as PNG files, in one folder for each class.

    Args:
        count: Largest number of images for each digit.
    """
    data = read_digits()
    for label in labels:
        (folder / str(label)).mkdir(parents=True)
        for number, pixels in enumerate(data.pixels[data.labels == label][:count]):
            image = Image.fromarray(np.round(pixels * 255.0 / 16).astype(np.uint8))
            image.save(folder / str(label) / f"{number}.png")


def run(words: str) -> str:
    """Print a command line, run it, and return its output.

    Args:
        words: Words of the command after `mupax`.

    Raises:
        SystemExit: The command failed.
    """
    print(f"$ mupax {words}", flush=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = mupax(shlex.split(words))
    if code:
        raise SystemExit(code)
    return output.getvalue()


def transformers_probabilities(folder: Path, files: list[str]) -> list[dict[str, float]]:
    """Return class name to probability for each image, computed by `transformers`.

    Args:
        folder: Folder that `mupax export` wrote.
        files: Paths of image files, in the order of the result.
    """
    import torch
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    images = [Image.open(file) for file in files]
    with torch.no_grad():
        logits = model(**processor(images, return_tensors="pt")).logits
    names = model.config.id2label
    rows = []
    for probabilities in logits.softmax(-1):
        rows.append({names[index]: float(value) for index, value in enumerate(probabilities)})
    return rows


def main(flags: str = "") -> float | None:
    """Train, fine-tune, evaluate and export in the current folder, then compare probabilities.

    Args:
        flags: Additional flags of both trainings, such as `--steps 150`.

    Returns:
        Largest difference between a class probability of mupax and of `transformers`, or `None` if
        a package for the comparison is missing.
    """
    if ABSENT:
        print(
            f"not installed: {' and '.join(ABSENT)}; the last part is left out, until "
            "pip install 'mupax[torch]'"
        )
    digits(Path("theirs"), range(5), 60)
    digits(Path("mine"), range(5, 10), 40)
    run(f"train {SOURCE} {flags}")
    run(f"{TUNE} {flags}")
    print(run("eval runs/mine"))

    lines = run("predict runs/mine mine --top 5 --json").splitlines()
    rows = [json.loads(line) for line in lines]
    right = [row["classes"][0]["class"] == Path(row["image"]).parent.name for row in rows]
    print(f"{sum(right)} of {len(rows)} images are called what their folder is")

    run("export runs/mine --out exported")
    if ABSENT:
        return None
    expected = transformers_probabilities(Path("exported"), [row["image"] for row in rows])
    differences = []
    for row, probabilities in zip(rows, expected, strict=True):
        for answer in row["classes"]:
            differences.append(abs(answer["probability"] - probabilities[answer["class"]]))
    difference = max(differences)
    print(
        f"transformers says the same: no probability of {5 * len(rows)} differs by more than "
        f"{difference:.1e}"
    )
    return difference


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
