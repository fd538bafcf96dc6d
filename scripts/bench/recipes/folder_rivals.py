"""Rivals on a folder of images within a budget of CPU seconds: logistic regression, and a small convolutional network in PyTorch.

    python -m scripts.bench.recipes.folder_rivals logistic|cnn FOLDER --seconds 60 [--seed 0] [--side 32]

FOLDER has `train/CLASS` and `test/CLASS`. The budget holds the whole process: start, imports, decoding, the choice of
settings, training and evaluation. Prints one line of JSON. Needs NumPy, Pillow, scikit-learn and, for cnn, PyTorch; nothing of
mupax, so that another environment can run it. PyTorch takes one thread: two would wait for one another at every layer, and
waiting counts as CPU time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tyro.conf import Positional

from scripts import harness

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from PIL import Image

HELD_OUT = 5
"""Every so many training images chooses settings of the logistic regression."""
REGULARIZATIONS = (0.001, 0.01, 0.1, 1.0)
BATCH = 64
EVALUATION_RESERVE = 0.03
"""Share of the budget that is kept for evaluating the network."""


class Images(NamedTuple):
    """The images of a folder, all of one size."""

    train_x: np.ndarray
    """uint8 [N, side, side, channels]."""
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load(folder: Path, side: int | None) -> Images:
    """Decode all images of a folder.

    Args:
        folder: with `train` and `test`.
        side: pixels that images are scaled to; the first image's own unless given.
    """
    classes = sorted(path.name for path in (folder / "train").iterdir())
    arrays: list[np.ndarray] = []
    for part in ("train", "test"):
        pixels = []
        labels = []
        for label, name in enumerate(classes):
            for file in sorted((folder / part / name).iterdir()):
                pixels.append(_decoded(file, side))
                labels.append(label)
        channels = 1 if all(array.shape[-1] == 1 for array in pixels) else 3
        arrays.append(
            np.stack([np.broadcast_to(array, (*array.shape[:2], channels)) for array in pixels])
        )
        arrays.append(np.array(labels))
    return Images(*arrays)


def _decoded(file: Path, side: int | None) -> np.ndarray:
    image = Image.open(file)
    if image.mode in ("RGBA", "LA", "P", "PA"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if image.mode in ("L", "1") else "RGB")
    if side is not None and image.size != (side, side):
        image = image.resize((side, side), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def logistic(images: Images, seconds: float) -> dict[str, Any]:
    """Train a logistic regression on the features and at the regularization that do best on held-out training images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    sets: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "pixels": _pixels,
        "small pixels": lambda x: _pixels(_halved(x)),
        "gradients": _gradients,
        "gradients and small pixels": lambda x: np.concatenate(
            [_gradients(x), _pixels(_halved(x))], 1
        ),
    }
    held = np.arange(len(images.train_y)) % HELD_OUT == 0
    best: tuple[float, str, float] | None = None
    tried: dict[str, float] = {}
    for name, features in sets.items():
        scaler = StandardScaler().fit(features(images.train_x))
        x = scaler.transform(features(images.train_x))
        for c in REGULARIZATIONS:
            if time.process_time() > 0.6 * seconds:
                break
            model = LogisticRegression(C=c, max_iter=200, tol=1e-3)
            model.fit(x[~held], images.train_y[~held])
            score = float(model.score(x[held], images.train_y[held]))
            tried[f"{name} {c:g}"] = round(score, 4)
            if best is None or score > best[0]:
                best = score, name, c
    assert best is not None
    _, name, c = best
    scaler = StandardScaler().fit(sets[name](images.train_x))
    model = LogisticRegression(C=c, max_iter=200, tol=1e-3)
    model.fit(scaler.transform(sets[name](images.train_x)), images.train_y)
    accuracy = model.score(scaler.transform(sets[name](images.test_x)), images.test_y)
    return {"accuracy": float(accuracy), "settings": f"{name}, C {c:g}", "tried": tried}


def _pixels(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1) / 255.0


def _halved(x: np.ndarray) -> np.ndarray:
    """Return images of half the side, each pixel the mean of four; those of an odd side as they are."""
    if x.shape[1] % 2:
        return x
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))


def _gradients(x: np.ndarray) -> np.ndarray:
    """Return histograms of nine unsigned directions in cells of a quarter to an eighth of a side (Dalal and Triggs 2005)."""
    grey = x.mean(-1)
    down = np.gradient(grey, axis=1)
    along = np.gradient(grey, axis=2)
    size = np.hypot(down, along)
    direction = np.floor(np.mod(np.arctan2(down, along), np.pi) / np.pi * 9).clip(0, 8)
    cells = 8
    if grey.shape[1] < 16:
        cells = 4
    elif grey.shape[1] % 7 == 0:
        cells = 7
    side = grey.shape[1] // cells * cells
    width = side // cells
    rows = []
    for bin_ in range(9):
        part = np.where(direction == bin_, size, 0)[:, :side, :side]
        rows.append(part.reshape(len(x), cells, width, cells, width).sum((2, 4)))
    histograms = np.stack(rows, -1)
    histograms /= (
        np.linalg.norm(histograms, axis=-1, keepdims=True) + 0.1 * histograms.mean() + 1e-9
    )
    return histograms.reshape(len(x), -1)


def network(
    images: Images, seconds: float, seed: int, width: int, rate: float, shift: float, turn: float
) -> dict[str, Any]:
    """Train a residual convolutional network until the budget ends; the rate follows a cosine over the time that is left.

    AdamW, batch norm, label smoothing, random shifts and, of images in colour, mirroring.

    Args:
        seconds: CPU seconds of the process.
        seed: of weights, order and augmentation.
        width: channels of the first stage; those of the next are twice and four times as many.
        rate: peak of the learning rate.
        shift: largest shift, as a share of a side.
        turn: strength of turning and scaling; 0 only shifts.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    classes = int(images.train_y.max()) + 1
    side = images.train_x.shape[1]
    channels = images.train_x.shape[3]

    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    class Residual(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.body = nn.Sequential(block(size, size, 1), block(size, size, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x)

    first = 1 if side < 32 else 2
    model = nn.Sequential(
        block(channels, width, first),
        block(width, 2 * width, 2),
        block(2 * width, 4 * width, 2 if side > 8 else 1),
        Residual(4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    ).to(memory_format=torch.channels_last)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    train_x = torch.from_numpy(images.train_x.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2)
    train_y = torch.from_numpy(images.train_y)
    pad = round(shift * side)
    padded = nn.functional.pad(train_x, (pad, pad, pad, pad), mode="replicate")
    began = time.process_time()
    end = seconds * (1 - EVALUATION_RESERVE)
    order: list[int] = []
    steps = 0
    while (now := time.process_time()) < end:
        share = (now - began) / (end - began)
        current = rate * min(1.0, share / 0.1) * (0.5 + 0.5 * np.cos(np.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = current
        if len(order) < BATCH:
            order += rng.permutation(len(train_y)).tolist()
        rows, order = order[:BATCH], order[BATCH:]
        x = _shifted(padded[rows], side, pad, rng)
        if channels == 3:
            mirrored = torch.from_numpy(rng.random(len(x)) < 0.5)[:, None, None, None]
            x = torch.where(mirrored, x.flip(3), x)
        if turn:
            x = _turned(x, turn, rng)
        optimizer.zero_grad()
        loss_of(model(x.contiguous(memory_format=torch.channels_last)), train_y[rows]).backward()
        optimizer.step()
        steps += 1
    model.eval()
    right = 0
    test_x = torch.from_numpy(images.test_x.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2)
    with torch.no_grad():
        for start in range(0, len(test_x), 200):
            answers = model(test_x[start : start + 200]).argmax(1).numpy()
            right += int((answers == images.test_y[start : start + 200]).sum())
    epochs = steps * BATCH / len(train_y)
    settings = f"width {width}, rate {rate:g}, shift {shift:g}, turn {turn:g}, side {side}"
    return {
        "accuracy": right / len(test_x),
        "settings": settings,
        "steps": steps,
        "epochs": round(epochs, 1),
    }


def _shifted(padded: Any, side: int, pad: int, rng: np.random.Generator) -> Any:
    """Return each image of a padded batch at a random place, [B, C, side, side]."""
    import torch  # pyright: ignore[reportMissingImports]

    if not pad:
        return padded
    places = rng.integers(0, 2 * pad + 1, (len(padded), 2))
    return torch.stack(
        [
            image[:, down : down + side, right : right + side]
            for image, (down, right) in zip(padded, places, strict=True)
        ]
    )


def _turned(x: Any, strength: float, rng: np.random.Generator) -> Any:
    """Return images turned by up to 20 degrees and scaled by up to a fifth, times a strength."""
    import torch  # pyright: ignore[reportMissingImports]

    angle = (2 * rng.random(len(x)) - 1) * strength * np.pi / 9
    scale = np.exp((2 * rng.random(len(x)) - 1) * strength * 0.2)
    zeros = np.zeros(len(x))
    rows = [
        np.stack([scale * np.cos(angle), -scale * np.sin(angle), zeros], -1),
        np.stack([scale * np.sin(angle), scale * np.cos(angle), zeros], -1),
    ]
    matrix = torch.from_numpy(np.stack(rows, 1).astype(np.float32))
    grid = torch.nn.functional.affine_grid(matrix, list(x.shape), align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    rival: Positional[Literal["logistic", "cnn"]]
    folder: Positional[Path]
    seconds: float
    """CPU seconds of the process."""
    seed: int = 0
    side: int | None = None
    """Pixels that images are scaled to."""
    width: int = 32
    """Network's channels of the first stage."""
    rate: float = 0.003
    """Network's peak learning rate."""
    shift: float = 0.125
    """Network's largest shift."""
    turn: float = 0.0
    """Network's strength of turning and scaling."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train one rival and print its row."""
    args = harness.parse(Options, argv)
    images = load(args.folder, args.side)
    if args.rival == "logistic":
        row = logistic(images, args.seconds)
    else:
        row = network(images, args.seconds, args.seed, args.width, args.rate, args.shift, args.turn)
    row["cpu_seconds"] = round(time.process_time(), 1)
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
