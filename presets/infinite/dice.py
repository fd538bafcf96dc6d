"""Gaussian matrices that are never made: each is drawn only along what it has acted on ("Householder dice", Lu 2021, 2101.07464).

W [m, n] has independent Normal(0, 1) entries. While W V = A and W' U = B are all that was asked of it, with orthonormal V and U, its law
along a new direction v is

    W v = U (B' v) + (1 - U U') g      with g fresh,

the mean field theory's response term and its Gaussian field. Nothing is estimated and nothing iterated: what is revealed has the law
of a matrix drawn at the start. A training step of gradient descent adds U M V', so a trained matrix is W + U M V' with a small M.
Memory is O((m + n) r) and time O((m + n) r^2) after r directions, in place of m n.

D draws (any leading axes: independent matrices side by side), R vectors, r directions, m outputs, n inputs. Vectors are rows.
"""

from __future__ import annotations

import numpy as np

ROUNDING = 30
"""What of a vector lies outside of known directions by so many roundings of its length, is rounding."""


def transposed(x: np.ndarray) -> np.ndarray:
    """[..., a, b] to [..., b, a]."""
    return np.swapaxes(x, -1, -2)


class Basis:
    """Orthonormal directions of one side of a matrix, [D..., r, size], which grow with the vectors that are looked at.

    Args:
        size: numbers of a vector.
        draws: leading axes.
        dtype: of all numbers.
    """

    def __init__(
        self, size: int, draws: tuple[int, ...] = (), dtype: type[np.floating] = np.float64
    ) -> None:
        self.rows = np.zeros((*draws, 0, size), dtype)

    def __len__(self) -> int:
        return self.rows.shape[-2]

    def coordinates(self, x: np.ndarray) -> np.ndarray:
        """Coordinates [D..., R, r] of vectors [D..., R, size] in the directions, to which those are added that they lack."""
        x = np.asarray(x, self.rows.dtype)
        inside = x @ transposed(self.rows)
        q, t = np.linalg.qr(transposed(x - inside @ self.rows))
        p, lengths, _ = np.linalg.svd(t)
        least = ROUNDING * np.finfo(x.dtype).eps * np.sqrt((x**2).sum((-1, -2)).max())
        count = min(int((lengths > least).sum(-1).max(initial=0)), x.shape[-1] - len(self))
        if not count:
            return inside
        new = transposed(q @ p[..., :count])
        new = new - (new @ transposed(self.rows)) @ self.rows  # twice is enough
        new = transposed(np.linalg.qr(transposed(new))[0])
        self.rows = np.concatenate([self.rows, new], axis=-2)
        return np.concatenate([inside, x @ transposed(new)], axis=-1)


class LazyGaussian:
    """A matrix W with independent Normal(0, 1) entries, revealed along the directions of its two sides as they grow.

    Args:
        inputs: directions that W is applied to; several matrices may share them.
        outputs: directions that W' is applied to.
        rng: where from.
        responses: whether products of one kind know of those of the other. Without, W and W' are two unrelated matrices: a
            control that must not agree with a network.
    """

    def __init__(
        self, inputs: Basis, outputs: Basis, rng: np.random.Generator, *, responses: bool = True
    ) -> None:
        self.inputs, self.outputs, self.responses, self._rng = inputs, outputs, responses, rng
        self._images = np.zeros(
            (*inputs.rows.shape[:-2], 0, outputs.rows.shape[-1]), inputs.rows.dtype
        )
        self._preimages = np.zeros(
            (*inputs.rows.shape[:-2], 0, inputs.rows.shape[-1]), inputs.rows.dtype
        )

    def forward(self, coordinates: np.ndarray) -> np.ndarray:
        """W x [D..., R, m] of vectors with these `inputs.coordinates` [D..., R, r]."""
        self._images = self._revealed(self.inputs, self._images, self.outputs, self._preimages)
        return coordinates @ self._images[..., : coordinates.shape[-1], :]

    def backward(self, coordinates: np.ndarray) -> np.ndarray:
        """W' y [D..., R, n] of vectors with these `outputs.coordinates` [D..., R, r]."""
        self._preimages = self._revealed(self.outputs, self._preimages, self.inputs, self._images)
        return coordinates @ self._preimages[..., : coordinates.shape[-1], :]

    def matrix(self) -> np.ndarray:
        """All of W [D..., m, n], which is small: it reveals what is left."""
        *draws, _, size = self.inputs.rows.shape
        return transposed(
            self.forward(
                self.inputs.coordinates(np.broadcast_to(np.eye(size), (*draws, size, size)))
            )
        )

    def _revealed(
        self, here: Basis, images: np.ndarray, there: Basis, preimages: np.ndarray
    ) -> np.ndarray:
        """Images of all directions here, [D..., r, size there], with the `preimages` [D..., r', size here] of directions there."""
        new = here.rows[..., images.shape[-2] :, :]
        if not new.shape[-2]:
            return images
        fresh = self._rng.standard_normal((*new.shape[:-1], there.rows.shape[-1]), images.dtype)
        if self.responses:
            directions = there.rows[..., : preimages.shape[-2], :]
            fresh += (new @ transposed(preimages) - fresh @ transposed(directions)) @ directions
        return np.concatenate([images, fresh], axis=-2)


class Weight:
    """A trained matrix, std * W at the start, and changed by heavy-ball gradient descent: std * W + U M V'.

    Args:
        dice: W.
        std: of its entries at the start.
        rate: learning rate.
        momentum: decay of the sum of gradients.
    """

    def __init__(self, dice: LazyGaussian, std: float, rate: float, momentum: float = 0.0) -> None:
        self.dice, self.std, self.rate, self.momentum = dice, std, rate, momentum
        self._change = self._sum = np.zeros(
            (*dice.inputs.rows.shape[:-2], 0, 0), dice.inputs.rows.dtype
        )
        self._gradient = self._change

    def forward(self, coordinates: np.ndarray, *, initial: bool = False) -> np.ndarray:
        """The product with vectors of these `inputs.coordinates`.

        Args:
            coordinates: [D..., R, r].
            initial: of the matrix as it was at the start.
        """
        product = self.std * self.dice.forward(coordinates)
        rank = min(coordinates.shape[-1], self._change.shape[-1])
        if initial or not rank:
            return product
        change = coordinates[..., :rank] @ transposed(self._change)[..., :rank, :]
        return product + change @ self.dice.outputs.rows[..., : change.shape[-1], :]

    def backward(self, gradient: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        """The gradient of the input [D..., R, n]; keeps that of the matrix until `step`.

        Args:
            gradient: of the product, [D..., R, m].
            coordinates: of the input.
        """
        back = self.dice.outputs.coordinates(gradient)
        self._gradient = _sum(self._gradient, transposed(back) @ coordinates)
        product = self.std * self.dice.backward(back)
        rank = min(back.shape[-1], self._change.shape[-2])
        change = back[..., :rank] @ self._change[..., :rank, :]
        return product + change @ self.dice.inputs.rows[..., : change.shape[-1], :]

    def step(self) -> None:
        """Move along the gradients kept since the last step."""
        self._sum = _sum(self.momentum * self._sum, self._gradient)
        self._change = _sum(self._change, -self.rate * self._sum)
        self._gradient = np.zeros_like(self._gradient)


def _sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of two matrices, each with zeros where the other is larger."""
    shape = (*y.shape[:-2], *(max(pair) for pair in zip(x.shape[-2:], y.shape[-2:], strict=True)))
    total = np.zeros(shape, y.dtype)
    total[..., : x.shape[-2], : x.shape[-1]] = x
    total[..., : y.shape[-2], : y.shape[-1]] += y
    return total
