"""Random Gaussian matrices that are drawn only along the directions to which they are applied.

This is the "Householder dice" method (Lu 2021, 2101.07464). W [m, n] has independent Normal(0, 1)
entries, and ' is the transpose. Suppose that only W V = A and W' U = B are known so far, with
orthonormal V and U. Then W acts on a new direction v as

    W v = U (B' v) + (1 - U U') g      with a fresh Gaussian g.

The two terms are the response term and the Gaussian field of mean field theory. Nothing is
estimated and nothing is iterated: what is revealed has the law of a matrix that was drawn at the
start. A step of gradient descent adds U M V', so a trained matrix is W + U M V' with a small M.
After r directions the memory is O((m + n) r) and the time O((m + n) r^2), in place of m n.

Shapes: D draws (any leading axes: independent matrices side by side), R vectors, r directions, m
outputs, n inputs. Vectors are rows.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 30
"""Largest length of a vector outside of the known directions that counts as rounding error.

It is in units of the floating-point precision (machine epsilon) times the length of the vectors.
"""


def transposed(x: np.ndarray) -> np.ndarray:
    """Swap the last two axes of an array: [..., a, b] becomes [..., b, a]."""
    return np.swapaxes(x, -1, -2)


class Basis:
    """Growing set of orthonormal directions, for the vectors on one side of a matrix.

    A vector outside of the known directions adds a direction.

    Args:
        size: Number of entries of a vector, which is one side of the matrix.
        draws: Leading axes [D...] of all arrays, for independent matrices side by side.

    Attributes:
        rows: Directions [D..., r, size].
    """

    def __init__(
        self, size: int, draws: tuple[int, ...] = (), dtype: type[np.floating] = np.float64
    ) -> None:
        self.rows = np.zeros((*draws, 0, size), dtype)

    def __len__(self) -> int:
        return self.rows.shape[-2]

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """Return the coordinates of vectors in the basis, after adding directions that it lacks.

        Args:
            x: Vectors [D..., R, size].

        Returns:
            Coordinates [D..., R, r], where r is the number of directions, the new ones included.
        """
        x = np.asarray(x, self.rows.dtype)
        inside = x @ transposed(self.rows)
        outside = x - inside @ self.rows
        # QR first, so that the SVD is of R x R numbers, however large the side is.
        q, t = np.linalg.qr(transposed(outside))
        # Singular values are lengths outside of the known directions.
        p, lengths, _ = np.linalg.svd(t)
        length = np.sqrt((x**2).sum((-1, -2)).max())
        least = ROUNDING * np.finfo(x.dtype).eps * length
        missing = int((lengths > least).sum(-1).max(initial=0))
        # There are no more directions than entries, whatever rounding says.
        count = min(missing, x.shape[-1] - len(self))
        if not count:
            return inside
        new = transposed(q @ p[..., :count])
        # One projection leaves a rounding error along the old directions; two are enough.
        new = new - (new @ transposed(self.rows)) @ self.rows
        new = transposed(np.linalg.qr(transposed(new))[0])
        self.rows = np.concatenate([self.rows, new], axis=-2)
        return np.concatenate([inside, x @ transposed(new)], axis=-1)


class LazyGaussian:
    """Random matrix W with independent Normal(0, 1) entries, drawn only where it is used.

    Products with W and with its transpose W' are drawn when a new direction is first used, and
    kept. They have the law of a matrix that was drawn at the start.

    Args:
        inputs: Directions that W is applied to. Several matrices may share them.
        outputs: Directions that W' is applied to. Several matrices may share them.
        responses: Whether products with W and with W' are consistent. Without responses W and W'
            are two unrelated matrices, a control that must not agree with a network.
    """

    def __init__(
        self, inputs: Basis, outputs: Basis, rng: np.random.Generator, *, responses: bool = True
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.responses = responses
        self._rng = rng
        draws = inputs.rows.shape[:-2]
        dtype = inputs.rows.dtype
        self._images = np.zeros((*draws, 0, outputs.rows.shape[-1]), dtype)
        self._preimages = np.zeros((*draws, 0, inputs.rows.shape[-1]), dtype)

    def forward(self, coordinates: np.ndarray) -> np.ndarray:
        """Return the products W x for R vectors x, [D..., R, m].

        W has m outputs. Products with directions that are new in `inputs` are drawn first and kept.

        Args:
            coordinates: Coordinates of the vectors, from `inputs.coordinates`, [D..., R, r].
        """
        self._images = self._revealed(self.inputs, self._images, self.outputs, self._preimages)
        # The coordinates may have been computed before the last directions were added. Along these
        # they are 0.
        return coordinates @ self._images[..., : coordinates.shape[-1], :]

    def backward(self, coordinates: np.ndarray) -> np.ndarray:
        """Return the products W' y of the transpose with R vectors y, [D..., R, n].

        W has n inputs. Products with directions that are new in `outputs` are drawn first and kept.

        Args:
            coordinates: Coordinates of the vectors, from `outputs.coordinates`, [D..., R, r].
        """
        self._preimages = self._revealed(self.outputs, self._preimages, self.inputs, self._images)
        return coordinates @ self._preimages[..., : coordinates.shape[-1], :]

    def matrix(self) -> np.ndarray:
        """Draw all that is missing of W, and return W as an array [D..., m, n].

        Only small matrices fit into memory.
        """
        *draws, _, size = self.inputs.rows.shape
        units = np.broadcast_to(np.eye(size), (*draws, size, size))
        columns = self.forward(self.inputs.coordinates(units))
        return transposed(columns)

    def _revealed(
        self, side: Basis, images: np.ndarray, far_side: Basis, far_images: np.ndarray
    ) -> np.ndarray:
        """Return the products of the matrix with all directions of one side, drawing missing ones.

        Args:
            side: Directions [D..., r, size] that are mapped.
            images: Known products with the first directions of `side`, [D..., r, size of far side].
            far_side: Directions [D..., r', size of far side] of the other side.
            far_images: Known products of the transpose with the first directions of `far_side`,
                [D..., r', size].
        """
        new = side.rows[..., images.shape[-2] :, :]
        if not new.shape[-2]:
            return images
        fresh = self._rng.standard_normal((*new.shape[:-1], far_side.rows.shape[-1]), images.dtype)
        if self.responses:
            # Along known directions of the far side the image is known: replace the fresh part.
            directions = far_side.rows[..., : far_images.shape[-2], :]
            far_products = new @ transposed(far_images)
            fresh += (far_products - fresh @ transposed(directions)) @ directions
        return np.concatenate([images, fresh], axis=-2)


class Weight:
    """Trained matrix with a random start, std * W + U M V'.

    W is a lazy Gaussian. U M V' is the change by heavy-ball gradient descent, kept as a small
    matrix M between the known directions U of outputs and V of inputs.

    Args:
        dice: W, with entries of standard deviation 1.
        std: Standard deviation of the entries at the start, the factor on W.
        momentum: Factor on the running sum of gradients at every step.
    """

    def __init__(self, dice: LazyGaussian, std: float, rate: float, momentum: float = 0.0) -> None:
        self.dice = dice
        self.std = std
        self.rate = rate
        self.momentum = momentum
        # M, the running sum and the gradient in coordinates of the two sides, [D..., m side, n
        # side]. They grow with the directions.
        draws = dice.inputs.rows.shape[:-2]
        self._change = np.zeros((*draws, 0, 0), dice.inputs.rows.dtype)
        self._sum = self._change
        self._gradient = self._change

    def forward(self, coordinates: np.ndarray, *, initial: bool = False) -> np.ndarray:
        """Return the products of the matrix with R vectors, [D..., R, m].

        Args:
            coordinates: Coordinates of the vectors, from `inputs.coordinates`, [D..., R, r].
            initial: Whether to use the matrix before training.
        """
        product = self.std * self.dice.forward(coordinates)
        rank = min(coordinates.shape[-1], self._change.shape[-1])
        if initial or not rank:
            return product
        change = coordinates[..., :rank] @ transposed(self._change)[..., :rank, :]
        return product + change @ self.dice.outputs.rows[..., : change.shape[-1], :]

    def backward(self, gradient: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        """Backpropagate through the matrix. Its own gradient is added to those kept for `step`.

        Args:
            gradient: Gradient of the products, [D..., R, m].
            coordinates: Coordinates of the inputs, as for `forward`.

        Returns:
            Gradient of the inputs, [D..., R, n].
        """
        output_coordinates = self.dice.outputs.coordinates(gradient)
        self._gradient = _padded_sum(self._gradient, transposed(output_coordinates) @ coordinates)
        product = self.std * self.dice.backward(output_coordinates)
        rank = min(output_coordinates.shape[-1], self._change.shape[-2])
        change = output_coordinates[..., :rank] @ self._change[..., :rank, :]
        return product + change @ self.dice.inputs.rows[..., : change.shape[-1], :]

    def step(self) -> None:
        """Take a heavy-ball step with the gradients since the last step, and clear them."""
        self._sum = _padded_sum(self.momentum * self._sum, self._gradient)
        self._change = _padded_sum(self._change, -self.rate * self._sum)
        self._gradient = np.zeros_like(self._gradient)


def _padded_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Add two matrices of different shapes, each padded with zeros at the end of its axes."""
    rows = max(x.shape[-2], y.shape[-2])
    columns = max(x.shape[-1], y.shape[-1])
    total = np.zeros((*y.shape[:-2], rows, columns), y.dtype)
    total[..., : x.shape[-2], : x.shape[-1]] = x
    total[..., : y.shape[-2], : y.shape[-1]] += y
    return total
