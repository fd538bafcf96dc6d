"""An endless set of images: one striped shape in clutter, rendered from (seed, index) by numpy alone.

A class is one of five shapes with one of two directions of its stripes. Everything else is left to chance: place, size,
tilt and proportions, colours, which of shape and ground is lighter, the stripes' phase and wavelength, light from a side,
noise, dabs that hide parts, and fainter stripes behind, in any direction. All shapes have the same area. So a pixel
tells next to nothing by itself, and a shape or its stripes alone only half; a model finds the stripes first, then shapes.

docs/evidence/shapes.json says how hard that is for a linear model and how fast images are drawn, docs/evidence/vision/larger.json what vision
transformers make of them. Image `index` of a stream is a function of (seed, stream, index), up to the
last bit of the sines of this machine's numpy, and no two indices start from the same random state.

Shapes: B images, P = SIZE * SIZE pixels in rows, C = 3 colours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.data import cache, images, interface
from mupax.train.data.images import WHOLE, LabelledData, normalized
from mupax.train.data.interface import ALL_ROWS, Batch, Reference
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

SIZE = 32
VERSION = "shapes-1"
"""Names what is drawn; a change of any image is a new version."""
SHAPES = ("disc", "square", "triangle", "ring", "cross")
CLASSES = [f"{shape}, {texture}" for shape in SHAPES for texture in ("level", "upright")]
TRAIN, EVAL = 0, 1
LENGTH = 2**40
"""Images of a stream: more than any run sees, few enough for every index to fit an int64 and a float's mantissa."""
EVAL_IMAGES = 10_000
"""Evaluation images, the same for every seed; data.eval_examples takes the first so many, or more."""
_EVAL_SEED = 0
LINEAR_IMAGES = 20_000
"""Images that the linear model beside a run is fitted to."""
_DABS = 4
_CHUNK = 32  # images drawn at once: their pixels fit in a core's cache
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's step


class EndlessData(LabelledData):
    """Striped shapes: image i of a run is image i of its seed's stream, and no image comes twice.

    Args:
        config: sizes of batches, and how many evaluation images.
        seed: seed of the training stream.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        eval_size = config.eval_examples or EVAL_IMAGES
        facts = {"digest": cache.digest(VERSION), "classes": len(CLASSES)}
        super().__init__(
            config,
            facts={**facts, "train_images": LENGTH, "eval_images": eval_size},
            train_size=LENGTH,
            eval_size=eval_size,
            class_names=CLASSES,
        )
        self.seed = seed

    def shown(
        self, k: int, rows: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        raw, labels = render(self.seed, TRAIN, examples)
        return raw.astype(np.float32), labels

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        counts = indices < self.eval_size
        # A row past the end shows the first image again, at weight 0.
        inputs, targets = _batch(_EVAL_SEED, EVAL, np.where(counts, indices, 0))
        return {"inputs": inputs, "targets": targets, "weights": counts.astype(np.float32)}

    def references(self) -> list[Reference]:
        key = cache.digest(VERSION, f"{LINEAR_IMAGES} {self.eval_size}")
        score = cache.remembered(
            f"shapes-{key}", lambda: {"accuracy": linear_accuracy(LINEAR_IMAGES, self.eval_size)}
        )
        return [Reference("logistic regression", score["accuracy"], "accuracy")]


def linear_accuracy(train_images: int, eval_images: int) -> float:
    """Accuracy on evaluation images of multinomial logistic regression on pixels, fitted to training images of seed 0.

    Args:
        train_images, eval_images: how many, the first of each stream.
    """
    x, y = _batch(0, TRAIN, np.arange(train_images))
    # Weak pixels want a strong penalty: without one the many weights fit chance alone.
    weights = images.fit_logistic(x.reshape(len(x), -1), y, inverse_penalty=1e-4, iterations=100)
    correct = 0.0
    for start in range(0, eval_images, 5000):
        x, y = _batch(_EVAL_SEED, EVAL, np.arange(start, min(start + 5000, eval_images)))
        correct += float((images.predict_logistic(weights, x.reshape(len(x), -1)) == y).sum())
    return correct / eval_images


def striped_shapes(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> EndlessData:
    """The endless set of striped shapes as batches; there is nothing to augment and nothing to prepare.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them.
    """
    vision = images.vision_model("shapes", model, CLASSES)
    images.check_size("shapes", vision, SIZE, channels=3)
    return EndlessData(config, seed)


def _batch(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [b, H, W, C] in [-1, 1] and int32 [b]."""
    raw, labels = render(seed, stream, indices)
    return normalized(raw.astype(np.float32), WHOLE), labels


def render(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [B, 32, 32, 3] and labels int32 [B], each whatever the others are.

    Args:
        seed, stream: with the index, all that an image depends on; the stream is `TRAIN` or `EVAL`.
        indices: int64 [B], in [0, LENGTH).
    """
    images_BHWC = np.empty((len(indices), SIZE, SIZE, 3), np.uint8)
    labels = np.empty(len(indices), np.int32)
    for start in range(0, len(indices), _CHUNK):
        here = slice(start, start + _CHUNK)
        labels[here], pixels_BPC = _draw(_Random(seed, stream, indices[here]))
        images_BHWC[here] = pixels_BPC.reshape(-1, SIZE, SIZE, 3)
    return images_BHWC, labels


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014; constants of Stafford's variant 13) of uint64 of any shape."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Random:
    """The random numbers of some images: SplitMix64 from a state each, taken in the same order for all.

    The states of different indices are different, since mixing is one to one.
    """

    def __init__(self, seed: int, stream: int, indices: np.ndarray) -> None:
        key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
        self._states_B, self._offset = _mix(indices.astype(np.uint64) ^ key), 0

    def words(self, count: int) -> np.ndarray:
        """uint64 [B, count]."""
        steps = np.arange(self._offset + 1, self._offset + count + 1, dtype=np.uint64) * np.uint64(
            _GOLDEN
        )
        self._offset += count
        return _mix(self._states_B[:, None] + steps)

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        """float32 [B, *shape] in [low, high)."""
        unit = (self.words(math.prod(shape)) >> np.uint64(40)).astype(np.float32) * np.float32(
            2**-24
        )
        return (np.float32(low) + np.float32(high - low) * unit).reshape(-1, *shape)

    def bytes(self, *shape: int) -> np.ndarray:
        """uint8 [B, *shape]; the product of shape is a multiple of 8."""
        return self.words(math.prod(shape) // 8).astype("<u8").view(np.uint8).reshape(-1, *shape)


def _draw(rng: _Random) -> tuple[np.ndarray, np.ndarray]:
    """Labels int32 [B] and pixels uint8 [B, P, C]."""
    label_B = (rng.uniform(0, len(CLASSES), 1)[:, 0]).astype(np.int32)
    line = np.arange(SIZE, dtype=np.float32) - np.float32((SIZE - 1) / 2)
    y_P, x_P = np.repeat(line, SIZE)[None], np.tile(line, SIZE)[None]

    ground_BPC = _striped(rng, x_P, y_P, rng.uniform(0, 2 * np.pi, 1), contrast=(0.0, 0.08))
    across_B1 = np.float32(np.pi / 2) * (label_B[:, None] % 2 == 0)
    figure_BPC = _striped(
        rng, x_P, y_P, across_B1 + rng.uniform(-0.3, 0.3, 1), contrast=(0.25, 0.4)
    )
    inside_BP = _inside(rng, x_P, y_P, label_B // 2)
    ground_BPC += inside_BP[..., None] * (figure_BPC - ground_BPC)
    for _ in range(_DABS):
        x, y = (rng.uniform(-SIZE / 2, SIZE / 2, 1) for _ in range(2))
        over_BP = _soft((x_P - x) ** 2 + (y_P - y) ** 2, rng.uniform(1, 2.5, 1) ** 2, 0.25)
        ground_BPC += over_BP[..., None] * (rng.uniform(0.2, 0.8, 1, 3) - ground_BPC)

    angle, slope, level = (
        rng.uniform(0, 2 * np.pi, 1),
        rng.uniform(0, 0.015, 1),
        rng.uniform(0.85, 1.1, 1),
    )
    light_BP = level + slope * (np.cos(angle) * x_P + np.sin(angle) * y_P)
    ground_BPC *= (255 * light_BP)[..., None]
    strength = rng.uniform(0.0, 0.15, 1, 1)
    ground_BPC += strength * (rng.bytes(SIZE * SIZE, 3).astype(np.float32) - np.float32(127.5))
    return label_B, np.clip(ground_BPC, 0, 255).astype(np.uint8)


def _striped(
    rng: _Random,
    x_P: np.ndarray,
    y_P: np.ndarray,
    angle_B1: np.ndarray,
    contrast: tuple[float, float],
) -> np.ndarray:
    """Stripes of two colours over the whole image, float32 [B, P, C]; the colours vary along the angle."""
    k = 2 * np.pi / rng.uniform(4, 6.5, 1)
    wave_BP = np.sin(
        (k * np.cos(angle_B1)) * x_P + (k * np.sin(angle_B1)) * y_P + rng.uniform(0, 2 * np.pi, 1)
    )
    np.clip(3 * wave_BP, -1, 1, out=wave_BP)
    mean_BC = rng.uniform(0.35, 0.65, 1) + rng.uniform(-0.12, 0.12, 3)
    towards_BC = rng.uniform(*contrast, 1) * rng.uniform(0.4, 1.6, 3)
    return mean_BC[:, None] + wave_BP[..., None] * towards_BC[:, None]


def _inside(rng: _Random, x_P: np.ndarray, y_P: np.ndarray, shape_B: np.ndarray) -> np.ndarray:
    """How much of each pixel the shape covers, float32 [B, P] in [0, 1]; every shape has the same area."""
    centre_x, centre_y = (rng.uniform(-4, 4, 1) for _ in range(2))
    angle, stretch = rng.uniform(-0.3, 0.3, 1), np.exp(rng.uniform(-0.15, 0.15, 1))
    size = rng.uniform(12, 18, 1)  # the root of the area, in pixels
    x_BP, y_BP = x_P - centre_x, y_P - centre_y
    cos, sin = np.cos(angle) / size, np.sin(angle) / size
    u_BP, v_BP = (cos * x_BP + sin * y_BP) * stretch, (cos * y_BP - sin * x_BP) / stretch
    far_BP = np.empty_like(u_BP)
    for which, distance in enumerate((_disc, _square, _triangle, _ring, _cross)):
        here = shape_B == which
        far_BP[here] = distance(u_BP[here], v_BP[here])
    return _soft(far_BP * size, np.float32(0), 1.0)


def _soft(value: np.ndarray, edge: Any, sharpness: float) -> np.ndarray:
    """1 below the edge, 0 above it, and linear over 1 / sharpness between."""
    return np.clip(np.float32(sharpness) * (edge - value) + np.float32(0.5), 0, 1)


# Signed distances, about, to the edge of a shape of area 1 about the origin; negative inside.


def _disc(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) - np.float32(np.sqrt(1 / np.pi))


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(u), np.abs(v)) - np.float32(0.5)


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    sides = np.maximum(np.float32(np.sqrt(3) / 2) * np.abs(u) - np.float32(0.5) * v, v)
    return sides - np.float32(27**-0.25)


def _ring(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    outer = np.sqrt(1 / (0.75 * np.pi))
    return np.abs(np.hypot(u, v) - np.float32(0.75 * outer)) - np.float32(0.25 * outer)


def _cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    arm, width = np.sqrt(1 / (4 * (2 * 0.36 - 0.36**2))), 0.36
    longer, shorter = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
    return np.maximum(longer - np.float32(arm), shorter - np.float32(width * arm))
