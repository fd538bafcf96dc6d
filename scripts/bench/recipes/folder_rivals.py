"""Train a rival on a folder of images within a budget of CPU seconds.

    python -m scripts.bench.recipes.folder_rivals logistic|cnn FOLDER --seconds 60 [--seed 0]
        [--side 32]

The rivals are logistic regression and a small convolutional network in PyTorch. FOLDER has
`train/CLASS` and `test/CLASS`. The budget covers the complete process: start, imports, decoding,
choice of settings, training and evaluation. The command prints one line of JSON.

Needs NumPy, Pillow, scikit-learn and, for cnn, PyTorch. The models use nothing of mupax, so that an
environment of their own can run them. PyTorch takes one thread: two would wait for each other at
every layer, and waiting counts as CPU time.
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

from mupax.command_line import Switch
from scripts import harness

# NumPy's libraries read these variables when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from PIL import Image

HELD_OUT = 5
"""Every fifth training image is held out to choose settings of the logistic regression."""
REGULARIZATIONS = (0.001, 0.01, 0.1, 1.0)
"""Values of C, the inverse of the regularization's strength, to try."""
BATCH = 64
EVALUATION_RESERVE = 0.03
"""Share of the budget that is reserved for the evaluation of the network."""


class Images(NamedTuple):
    """Images of a folder, all of one size, with their labels."""

    train_x: np.ndarray
    """uint8 [N, side, side, channels]."""
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load(folder: Path, side: int | None) -> Images:
    """Return all images of a folder.

    Args:
        folder: Folder with `train/CLASS` and `test/CLASS`.
        side: Pixels of a side that images are scaled to; `None` leaves them as they are.
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
    """Return an image as uint8 [side, side, 1 or 3 channels], on white if it is transparent."""
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
    """Train a logistic regression and return its row.

    Features and regularization are chosen by accuracy on held-out training images. The choice ends
    when 60 % of the budget are used.

    Args:
        seconds: Budget of CPU seconds of the process.

    Returns:
        `accuracy` on the test images, the chosen `settings` in words, and `tried`, the held-out
        accuracy by settings.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    feature_sets: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "pixels": _pixels,
        "small pixels": _small_pixels,
        "gradients": _gradients,
        "gradients and small pixels": _gradients_and_small_pixels,
    }
    held_out = np.arange(len(images.train_y)) % HELD_OUT == 0
    best: tuple[float, str, float] | None = None
    tried: dict[str, float] = {}
    for name, features in feature_sets.items():
        scaler = StandardScaler().fit(features(images.train_x))
        x = scaler.transform(features(images.train_x))
        for c in REGULARIZATIONS:
            if time.process_time() > 0.6 * seconds:
                break
            model = LogisticRegression(C=c, max_iter=200, tol=1e-3)
            model.fit(x[~held_out], images.train_y[~held_out])
            score = float(model.score(x[held_out], images.train_y[held_out]))
            tried[f"{name} {c:g}"] = round(score, 4)
            if best is None or score > best[0]:
                best = score, name, c

    # The best settings are trained on all training images.
    assert best is not None
    _, name, c = best
    features = feature_sets[name]
    scaler = StandardScaler().fit(features(images.train_x))
    model = LogisticRegression(C=c, max_iter=200, tol=1e-3)
    model.fit(scaler.transform(features(images.train_x)), images.train_y)
    accuracy = model.score(scaler.transform(features(images.test_x)), images.test_y)
    return {"accuracy": float(accuracy), "settings": f"{name}, C {c:g}", "tried": tried}


def _pixels(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1) / 255.0


def _small_pixels(x: np.ndarray) -> np.ndarray:
    return _pixels(_halved(x))


def _gradients_and_small_pixels(x: np.ndarray) -> np.ndarray:
    return np.concatenate([_gradients(x), _small_pixels(x)], 1)


def _halved(x: np.ndarray) -> np.ndarray:
    """Return images at half the side, each pixel the mean of four. An odd side stays as it is."""
    if x.shape[1] % 2:
        return x
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).mean((2, 4))


def _gradients(x: np.ndarray) -> np.ndarray:
    """Return histograms of gradients in nine unsigned directions (HOG, Dalal and Triggs 2005).

    A cell is a quarter, a seventh or an eighth of the side.
    """
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


def network(images: Images, options: Options) -> dict[str, Any]:
    """Train a residual convolutional network until the budget ends and return its row.

    Uses AdamW, label smoothing, random shifts and, for images in colour, mirroring. The learning
    rate follows a cosine over the time that is left after a warm-up over its first tenth.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    classes = int(images.train_y.max()) + 1
    side = images.train_x.shape[1]
    channels = images.train_x.shape[3]

    class ChannelNorm(nn.Module):
        """RMSNorm over the channels of each pixel, with a gain and a bias."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(size, 1, 1))
            self.bias = nn.Parameter(torch.zeros(size, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean_square = x.square().mean(1, keepdim=True)
            return x * torch.rsqrt(mean_square + 1e-6) * self.gain + self.bias

    norm = ChannelNorm if options.norm == "channel" else nn.BatchNorm2d

    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        # The norm behind it has a bias.
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, norm(outputs), nn.ReLU(inplace=True))

    class Residual(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.body = nn.Sequential(block(size, size, 1), block(size, size, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x)

    first = 1 if side < 32 else 2
    model = nn.Sequential(
        block(channels, options.width, first),
        block(options.width, 2 * options.width, 2),
        block(2 * options.width, 4 * options.width, 2 if side > 8 else 1),
        Residual(4 * options.width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * options.width, classes),
    ).to(memory_format=torch.channels_last)
    decayed = []
    vectors = []
    for weight in model.parameters():
        if weight.ndim > 1:
            decayed.append(weight)
        else:
            vectors.append(weight)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    train_x = torch.from_numpy(images.train_x.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2)
    train_y = torch.from_numpy(images.train_y)
    pad = round(options.shift * side)
    padded = nn.functional.pad(train_x, (pad, pad, pad, pad), mode="replicate")
    began = time.process_time()
    end = options.seconds * (1 - EVALUATION_RESERVE)
    order: list[int] = []
    steps = 0
    while True:
        now = time.process_time()
        if now >= end:
            break
        share = (now - began) / (end - began)
        current = options.rate * min(1.0, share / 0.1) * (0.5 + 0.5 * np.cos(np.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = current
        if len(order) < BATCH:
            order += rng.permutation(len(train_y)).tolist()
        rows = order[:BATCH]
        order = order[BATCH:]
        x = _shifted(padded[rows], side, pad, rng)
        if channels == 3:
            mirrored = torch.from_numpy(rng.random(len(x)) < 0.5)[:, None, None, None]
            x = torch.where(mirrored, x.flip(3), x)
        if options.turn:
            x = _turned(x, options.turn, rng)
        labels = train_y[rows]
        partner_labels = labels
        own_share = 1.0
        if options.cutmix:
            partners = torch.from_numpy(rng.permutation(len(x)))
            x, own_share = _pasted(x, partners, rng)
            partner_labels = labels[partners]
        optimizer.zero_grad()
        logits = model(x.contiguous(memory_format=torch.channels_last))
        own_loss = loss_of(logits, labels)
        partner_loss = loss_of(logits, partner_labels)
        (own_share * own_loss + (1 - own_share) * partner_loss).backward()
        optimizer.step()
        steps += 1

    model.eval()
    num_correct = 0
    test_x = torch.from_numpy(images.test_x.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2)
    with torch.no_grad():
        for start in range(0, len(test_x), 200):
            predictions = model(test_x[start : start + 200]).argmax(1).numpy()
            num_correct += int((predictions == images.test_y[start : start + 200]).sum())
    epochs = steps * BATCH / len(train_y)
    settings = f"width {options.width}, rate {options.rate:g}, shift {options.shift:g}"
    settings += f", turn {options.turn:g}, side {side}"
    if options.cutmix:
        settings += ", cutmix"
    if options.norm == "channel":
        settings += ", norm over channels"
    return {
        "accuracy": num_correct / len(test_x),
        "settings": settings,
        "steps": steps,
        "epochs": round(epochs, 1),
    }


def _shifted(padded: Any, side: int, pad: int, rng: np.random.Generator) -> Any:
    """Return a random crop of each image of a padded batch, [B, C, side, side]."""
    import torch  # pyright: ignore[reportMissingImports]

    if not pad:
        return padded
    corners = rng.integers(0, 2 * pad + 1, (len(padded), 2))
    crops = []
    for image, (top, left) in zip(padded, corners, strict=True):
        crops.append(image[:, top : top + side, left : left + side])
    return torch.stack(crops)


def _turned(x: Any, strength: float, rng: np.random.Generator) -> Any:
    """Return images rotated by up to 20 degrees and scaled by up to a fifth, times `strength`."""
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


def _pasted(x: Any, partners: Any, rng: np.random.Generator) -> tuple[Any, float]:
    """Return images with a rectangle of other images, and the share of each image that stays.

    The rectangle is the same for all images of the batch.

    Args:
        x: Images [B, C, side, side].
        partners: Index of the image that each image gets its rectangle from, [B].
    """
    side = x.shape[-1]
    length = side * np.sqrt(rng.random())
    row, column = rng.random(2) * side
    top = round(max(row - length / 2, 0))
    bottom = round(min(row + length / 2, side))
    left = round(max(column - length / 2, 0))
    right = round(min(column + length / 2, side))
    pasted = x.clone()
    pasted[:, :, top:bottom, left:right] = x[partners, :, top:bottom, left:right]
    return pasted, 1 - (bottom - top) * (right - left) / side**2


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    rival: Positional[Literal["logistic", "cnn"]]
    """Rival to train."""
    folder: Positional[Path]
    """Folder with train/CLASS and test/CLASS."""
    seconds: float
    """Budget of CPU seconds of the process."""
    seed: int = 0
    """Seed of the network."""
    side: int | None = None
    """Pixels of a side that images are scaled to. Off by default."""
    width: int = 32
    """Channels of the network's first stage."""
    rate: float = 0.003
    """Peak learning rate of the network."""
    shift: float = 0.125
    """Largest random shift for the network, as a share of a side."""
    turn: float = 0.0
    """Strength of random rotation and scaling for the network. Off by default."""
    cutmix: Switch = False
    """Paste a rectangle of another image of the batch into each image, and mix the labels by area
    (Yun et al. 2019, with alpha 1)."""
    norm: Literal["batch", "channel"] = "batch"
    """Norm behind the network's convolutions: batch norm, or RMSNorm over the channels of a
    pixel."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train one rival, print its row and return the exit code 0."""
    args = harness.parse(Options, argv)
    images = load(args.folder, args.side)
    if args.rival == "logistic":
        row = logistic(images, args.seconds)
    else:
        row = network(images, args)
    row["cpu_seconds"] = round(time.process_time(), 1)
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
