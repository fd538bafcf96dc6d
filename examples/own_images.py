"""From images of one's own to answers elsewhere: a model, fine-tuned on a folder of classes, answers for files here and in `transformers`.

    python examples/own_images.py

in a new folder: digits 0 to 4, which come with mupax, train a source; 5 to 9 are the images of one's own. Each line
that it prints can be typed with another folder, and `--from` takes a folder of Hugging Face, too. Flags go to both trainings, such as
`--steps 150`. The last part needs `transformers` and is left out where that is not installed.
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

# --model, because the model that is chosen for a small folder makes patches by convolutions, which an export cannot write.
SOURCE = (
    "vit-digits --model vit-tiny --data.name images:theirs --data.pixels.fit squash --data.no-augment "
    "--model.num-classes 5 --workdir runs/source"
)
TUNE = "finetune vit mine --from runs/source --data.no-augment --workdir runs/mine"
ABSENT = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


def digits(folder: Path, labels: range, most: int) -> None:
    """Handwritten digits as image files, a folder per class.

    Args:
        folder: made here.
        labels: which digits.
        most: how many of each.
    """
    data = read_digits()
    for label in labels:
        (folder / str(label)).mkdir(parents=True)
        for number, pixels in enumerate(data.pixels[data.labels == label][:most]):
            image = Image.fromarray(np.round(pixels * 255.0 / 16).astype(np.uint8))
            image.save(folder / str(label) / f"{number}.png")


def run(words: str) -> str:
    """What a command prints; its line is shown first.

    Raises:
        SystemExit: it failed.
    """
    print(f"$ mupax {words}", flush=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = mupax(shlex.split(words))
    if code:
        raise SystemExit(code)
    return out.getvalue()


def elsewhere(folder: Path, files: list[str]) -> list[dict[str, float]]:
    """Probabilities by class name of image files, as `transformers` computes them with an exported folder.

    Args:
        folder: of `mupax export`.
        files: images.
    """
    import torch
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    images = [Image.open(file) for file in files]
    with torch.no_grad():
        logits = model(**processor(images, return_tensors="pt")).logits
    names = model.config.id2label
    return [{names[i]: float(p) for i, p in enumerate(row)} for row in logits.softmax(-1)]


def main(more: str = "") -> float | None:
    """All of it, in the present folder; the largest difference of a probability, None without `transformers`.

    Args:
        more: further flags of both trainings.
    """
    if ABSENT:
        print(
            f"not installed: {' and '.join(ABSENT)}; the last part is left out, until pip install 'mupax[torch]'"
        )
    digits(Path("theirs"), range(5), 60)
    digits(Path("mine"), range(5, 10), 40)
    run(f"train {SOURCE} {more}")
    run(f"{TUNE} {more}")
    print(run("eval runs/mine"))
    rows = [json.loads(line) for line in run("predict runs/mine mine --top 5 --json").splitlines()]
    right = [row["classes"][0]["class"] == Path(row["image"]).parent.name for row in rows]
    print(f"{sum(right)} of {len(rows)} images are called what their folder is")
    run("export runs/mine --out exported")
    if ABSENT:
        return None
    theirs = elsewhere(Path("exported"), [row["image"] for row in rows])
    difference = max(
        abs(one["probability"] - there[one["class"]])
        for row, there in zip(rows, theirs, strict=True)
        for one in row["classes"]
    )
    print(
        f"transformers says the same: no probability of {5 * len(rows)} differs by more than {difference:.1e}"
    )
    return difference


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
