"""Endless data set of images of one striped shape in clutter, rendered by numpy alone.

A class is one of five shapes with one of two directions of its stripes. Everything else is random:
place, size, tilt and proportions, colours, which of shape and ground is lighter, the stripes' phase
and wavelength, light from a side, noise, dabs that hide parts, and fainter stripes behind in any
direction. All shapes have the same area. A pixel by itself therefore tells next to nothing, and a
shape or its stripes alone tell only half. A model learns the stripes first, then the shapes.

docs/evidence/shapes.json has the accuracy of a linear model and the speed of rendering.
docs/evidence/vision/larger.json has the accuracies of vision transformers. Image `index` of a
stream is a function of (seed, stream, index), up to the last bit of the sines of this machine's
numpy. No two indices start from the same random state.

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
"""Version of the images. A change of any image needs a new version."""
SHAPES = ("disc", "square", "triangle", "ring", "cross")
CLASSES = [f"{shape}, {texture}" for shape in SHAPES for texture in ("level", "upright")]
TRAIN = 0
EVAL = 1
LENGTH = 2**40
"""Number of images of a stream, such as the training images of one seed.

It is more than any run sees, and small enough that every index fits an int64 and a float's
mantissa.
"""
EVAL_IMAGES = 10_000
"""Default number of evaluation images. They are the same for every seed."""
_EVAL_SEED = 0
LINEAR_IMAGES = 20_000
"""Number of images that the linear reference model is fitted to."""
_DABS = 4
# Images that are drawn at once. Their pixels fit into the cache of a core.
_CHUNK = 32
# Increment of SplitMix64, 2^64 over the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15


class EndlessData(LabelledData):
    """Batches of images of striped shapes without end. No training image comes twice.

    Training image i of a run is image i of the stream `TRAIN` of the run's seed. Evaluation images
    are the same for every seed.

    Args:
        config: Data settings: sizes of batches and number of evaluation images.
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
        exists = indices < self.eval_size
        # A row past the end shows the first image again, with weight 0.
        inputs, targets = _batch(_EVAL_SEED, EVAL, np.where(exists, indices, 0))
        return {"inputs": inputs, "targets": targets, "weights": exists.astype(np.float32)}

    def references(self) -> list[Reference]:
        key = cache.digest(VERSION, f"{LINEAR_IMAGES} {self.eval_size}")
        score = cache.remembered(
            f"shapes-{key}", lambda: {"accuracy": linear_accuracy(LINEAR_IMAGES, self.eval_size)}
        )
        return [Reference("logistic regression", score["accuracy"], "accuracy")]


def linear_accuracy(train_images: int, eval_images: int) -> float:
    """Fit logistic regression to pixels, and return its accuracy on evaluation images.

    The model is fitted to training images of seed 0.

    Args:
        train_images: Number of training images, which are the first ones of the stream `TRAIN`.
        eval_images: Number of evaluation images, which are the first ones of the stream `EVAL`.
    """
    x, y = _batch(0, TRAIN, np.arange(train_images))
    # A pixel tells little. Without a strong penalty the many weights would fit noise.
    weights = images.fit_logistic(x.reshape(len(x), -1), y, inverse_penalty=1e-4, iterations=100)
    correct = 0.0
    for start in range(0, eval_images, 5000):
        x, y = _batch(_EVAL_SEED, EVAL, np.arange(start, min(start + 5000, eval_images)))
        correct += float((images.predict_logistic(weights, x.reshape(len(x), -1)) == y).sum())
    return correct / eval_images


def striped_shapes(
    config: DataConfig, model: ModelConfig, seed: int, note: cache.Note
) -> EndlessData:
    """Load the endless set of striped shapes. Nothing is augmented and nothing is prepared.

    The arguments are those of `mupax.train.data.load`.
    """
    vision = images.vision_model("shapes", model, CLASSES)
    images.check_size("shapes", vision, SIZE, channels=3)
    return EndlessData(config, seed)


def _batch(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Render images, and return them as float32 [B, H, W, C] in [-1, 1] with labels int32 [B].

    The arguments are those of `render`.
    """
    raw, labels = render(seed, stream, indices)
    return normalized(raw.astype(np.float32), WHOLE), labels


def render(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Render images, uint8 [B, 32, 32, 3], and return them with their labels, int32 [B].

    An image depends on the seed, the stream and its own index alone.

    Args:
        stream: `TRAIN` or `EVAL`.
        indices: Index of each image in the stream, in [0, LENGTH), int64 [B].
    """
    images_BHWC = np.empty((len(indices), SIZE, SIZE, 3), np.uint8)
    labels = np.empty(len(indices), np.int32)
    for start in range(0, len(indices), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        random = _Random(seed, stream, indices[chunk])
        chunk_labels, pixels_BPC = _draw(random)
        labels[chunk] = chunk_labels
        images_BHWC[chunk] = pixels_BPC.reshape(-1, SIZE, SIZE, 3)
    return images_BHWC, labels


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash each uint64 of an array by the finalizer of SplitMix64.

    Different numbers have different hashes. See Steele, Lea and Flood (2014). The constants are
    those of Stafford's variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Random:
    """Source of random numbers for B images, with one SplitMix64 generator per image.

    Every draw advances the generators of all images. Images of different indices start from
    different states, because `_mix` is one to one.
    """

    def __init__(self, seed: int, stream: int, indices: np.ndarray) -> None:
        # The seed is hashed: with small numbers as keys, XOR would only reorder the same indices.
        key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0]
        # Mixed, because neighbouring states would give correlated streams.
        self._states_B = _mix(indices.astype(np.uint64) ^ key)
        self._offset = 0

    def words(self, count: int) -> np.ndarray:
        """Draw uint64 [B, count]."""
        first = self._offset + 1
        numbers = np.arange(first, first + count, dtype=np.uint64)
        self._offset += count
        return _mix(self._states_B[:, None] + numbers * np.uint64(_GOLDEN))

    def uniform(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Draw float32 [B, *shape] in [low, high)."""
        # float32 has 24 bits of mantissa.
        bits = (self.words(math.prod(shape)) >> np.uint64(40)).astype(np.float32)
        unit = bits * np.float32(2**-24)
        return (np.float32(low) + np.float32(high - low) * unit).reshape(-1, *shape)

    def bytes(self, *shape: int) -> np.ndarray:
        """Draw uint8 [B, *shape]. The product of `shape` must be a multiple of 8."""
        words = self.words(math.prod(shape) // 8)
        # Little-endian on every machine, so that images do not depend on it.
        return words.astype("<u8").view(np.uint8).reshape(-1, *shape)


def _draw(rng: _Random) -> tuple[np.ndarray, np.ndarray]:
    """Render one image per generator. Return labels, int32 [B], and pixels, uint8 [B, P, C]."""
    label_B = (rng.uniform(0, len(CLASSES), 1)[:, 0]).astype(np.int32)
    line = np.arange(SIZE, dtype=np.float32) - np.float32((SIZE - 1) / 2)
    y_P = np.repeat(line, SIZE)[None]
    x_P = np.tile(line, SIZE)[None]

    # The order of draws is part of the data set: every draw moves the generators.
    ground_angle_B1 = rng.uniform(0, 2 * np.pi, 1)
    ground_BPC = _striped(rng, x_P, y_P, ground_angle_B1, contrast=(0.0, 0.08))
    across_B1 = np.float32(np.pi / 2) * (label_B[:, None] % 2 == 0)
    figure_angle_B1 = across_B1 + rng.uniform(-0.3, 0.3, 1)
    figure_BPC = _striped(rng, x_P, y_P, figure_angle_B1, contrast=(0.25, 0.4))
    inside_BP = _inside(rng, x_P, y_P, label_B // 2)
    ground_BPC += inside_BP[..., None] * (figure_BPC - ground_BPC)

    for _ in range(_DABS):
        x = rng.uniform(-SIZE / 2, SIZE / 2, 1)
        y = rng.uniform(-SIZE / 2, SIZE / 2, 1)
        over_BP = _soft((x_P - x) ** 2 + (y_P - y) ** 2, rng.uniform(1, 2.5, 1) ** 2, 0.25)
        ground_BPC += over_BP[..., None] * (rng.uniform(0.2, 0.8, 1, 3) - ground_BPC)

    angle = rng.uniform(0, 2 * np.pi, 1)
    slope = rng.uniform(0, 0.015, 1)
    level = rng.uniform(0.85, 1.1, 1)
    light_BP = level + slope * (np.cos(angle) * x_P + np.sin(angle) * y_P)
    ground_BPC *= (255 * light_BP)[..., None]

    strength = rng.uniform(0.0, 0.15, 1, 1)
    noise = rng.bytes(SIZE * SIZE, 3).astype(np.float32) - np.float32(127.5)
    ground_BPC += strength * noise
    return label_B, np.clip(ground_BPC, 0, 255).astype(np.uint8)


def _striped(
    rng: _Random,
    x_P: np.ndarray,
    y_P: np.ndarray,
    angle_B1: np.ndarray,
    contrast: tuple[float, float],
) -> np.ndarray:
    """Render stripes of two random colours over complete images, float32 [B, P, C].

    Values are brightnesses, mostly from 0 (black) to 1 (white). They are not clipped.

    Args:
        rng: Random numbers, which choose the colours, the wavelength and the phase.
        x_P: Horizontal place of each pixel from the centre of the image, in pixels, [1, P].
        y_P: Vertical place of each pixel from the centre of the image, in pixels, [1, P].
        angle_B1: Angle in radians, from the x axis, along which the colours alternate, [B, 1].
        contrast: Range from which the distance of the two colours from their mean is drawn.
    """
    k = 2 * np.pi / rng.uniform(4, 6.5, 1)
    k_x = k * np.cos(angle_B1)
    k_y = k * np.sin(angle_B1)
    wave_BP = np.sin(k_x * x_P + k_y * y_P + rng.uniform(0, 2 * np.pi, 1))
    # Clipped, a sine is a stripe with soft edges.
    np.clip(3 * wave_BP, -1, 1, out=wave_BP)
    mean_BC = rng.uniform(0.35, 0.65, 1) + rng.uniform(-0.12, 0.12, 3)
    towards_BC = rng.uniform(*contrast, 1) * rng.uniform(0.4, 1.6, 3)
    return mean_BC[:, None] + wave_BP[..., None] * towards_BC[:, None]


def _inside(rng: _Random, x_P: np.ndarray, y_P: np.ndarray, shape_B: np.ndarray) -> np.ndarray:
    """Place a shape of random size, tilt and proportions in each image. Return its coverage.

    The coverage is the approximate share of each pixel that is inside of the shape, float32 [B, P].

    Args:
        x_P: Horizontal place of each pixel from the centre of the image, in pixels, [1, P].
        y_P: Vertical place of each pixel from the centre of the image, in pixels, [1, P].
        shape_B: Index in `SHAPES` of each image's shape, int [B].
    """
    centre_x = rng.uniform(-4, 4, 1)
    centre_y = rng.uniform(-4, 4, 1)
    angle = rng.uniform(-0.3, 0.3, 1)
    stretch = np.exp(rng.uniform(-0.15, 0.15, 1))
    size = rng.uniform(12, 18, 1)  # Square root of the area, in pixels.

    # (u, v) are coordinates in which the shape has area 1 and is upright.
    x_BP = x_P - centre_x
    y_BP = y_P - centre_y
    cos = np.cos(angle) / size
    sin = np.sin(angle) / size
    u_BP = (cos * x_BP + sin * y_BP) * stretch
    v_BP = (cos * y_BP - sin * x_BP) / stretch

    distance_BP = np.empty_like(u_BP)
    for shape, signed_distance in enumerate((_disc, _square, _triangle, _ring, _cross)):
        is_shape = shape_B == shape
        distance_BP[is_shape] = signed_distance(u_BP[is_shape], v_BP[is_shape])
    return _soft(distance_BP * size, np.float32(0), 1.0)


def _soft(value: np.ndarray, edge: Any, sharpness: float) -> np.ndarray:
    """Return 1 for values below the edge and 0 for values above, with a ramp from 1 to 0 between.

    The ramp is linear, has the width 1 / sharpness, and has its middle at the edge.
    """
    return np.clip(np.float32(sharpness) * (edge - value) + np.float32(0.5), 0, 1)


# Each function below returns roughly the signed distance from the points (u, v) to the edge of a
# shape of area 1 about the origin. It is negative inside of the shape.


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
    width = 0.36
    # Half the length of a bar, for which the cross has area 1.
    arm = np.sqrt(1 / (4 * (2 * 0.36 - 0.36**2)))
    longer = np.maximum(np.abs(u), np.abs(v))
    shorter = np.minimum(np.abs(u), np.abs(v))
    return np.maximum(longer - np.float32(arm), shorter - np.float32(width * arm))
