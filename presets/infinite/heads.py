"""One attention block with infinitely many heads: heads are sampled, the stream is exact.

    h~ = h + beta0 (N H)^(-1/2) sum over heads of W_O attention(q, k, v)
    f = w . (mean over positions of h~) / (gamma0 N H)

This is the model of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), section 2.1, at L = 1.
It has no MLP and no last norm, its read-in is frozen, and its output is centred. W_Q, W_K, W_V, W_O
and w learn by gradient descent at the rate eta0 gamma0^2 N H.

As H grows, q, k, v and o = (N H)^(-1/2) W_O' w become independent from head to head. The stream is
linear in Gaussian vectors, so its coordinates in these vectors are kept. W_O is revealed as in
`mupax.presets.infinite.dice`. Its outputs have infinite dimension, so everything fresh is a
coordinate of its own.

Shapes: P examples, S positions, R = P S tokens, G sampled heads, N head dimension, M coordinates of
the stream. <a, b> is a mean over entries.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from mupax.presets.infinite.dice import ROUNDING
from mupax.presets.infinite.layers import attend


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBlock:
    """Constants and learning rate of one attention block with infinitely many heads.

    N is the head dimension and H the number of heads, which is infinite.

    Attributes:
        head_dim: Head dimension N.
        alpha_a: Attention logits are N^-alpha_a q.k.
        gamma0: Divisor of the output. Smaller values are closer to the lazy limit.
        beta0: Factor on the branch.
        rate: Learning rate eta0, for the mean over examples of (f - target)^2 / 2.
    """

    head_dim: int
    alpha_a: float
    gamma0: float = 1.0
    beta0: float = 1.0
    rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Outputs and kernels of the infinite model before each step of training.

    P is the number of examples, and h~ is the stream after the block.

    Attributes:
        outputs: Outputs f, [steps, P].
        kernels: Products <h~, h~'> of the means over positions of two examples, [steps, P, P].
        attention: Mean over heads of the squared logits, and square of the mean of the logits over
            heads. Both are means over examples and pairs of positions, [steps, 2].
    """

    outputs: np.ndarray
    kernels: np.ndarray
    attention: np.ndarray


class Output:
    """Initial output matrix W_O / (N H)^(1/2), from the heads' attended values to the stream.

    It is a random matrix of which only products are drawn. G sampled heads of dimension N stand for
    the infinitely many. The residual stream of infinite width is held as M coordinates.

    Args:
        sampled: Number of entries over sampled heads, G N.
        coordinates: Number of coordinates that the stream has before.
        responses: Whether products with the matrix and its transpose are consistent. `False` is a
            control (`mupax.presets.infinite.dice.LazyGaussian`).
    """

    def __init__(
        self, sampled: int, coordinates: int, rng: np.random.Generator, *, responses: bool
    ) -> None:
        self.coordinates = coordinates
        self._rng = rng
        self._responses = responses
        # Directions over heads with their images, and of the stream with their preimages.
        self._heads = np.zeros((0, sampled))
        self._images = np.zeros((0, coordinates))
        self._stream = np.zeros((0, coordinates))
        self._preimages = np.zeros((0, sampled))

    def forward(self, y: np.ndarray) -> np.ndarray:
        """Return the products of the matrix with R vectors over heads, [R, M].

        The number M of the stream's coordinates grows by one for each new direction of y.

        Args:
            y: Vectors over heads [R, G N], for G sampled heads of dimension N.
        """
        sampled = y.shape[-1]
        coordinates, new = _coordinates(y, self._heads, sampled)
        self._images = _widened(self._images, len(new))
        self._stream = _widened(self._stream, len(new))
        # Fresh outputs are orthogonal to all that came before, in a stream of infinite dimension.
        fresh = np.eye(len(new), self.coordinates + len(new), self.coordinates)
        if self._responses:
            fresh += (new @ self._preimages.T / sampled) @ self._stream
        self.coordinates += len(new)
        self._heads = np.concatenate([self._heads, new])
        self._images = np.concatenate([self._images, fresh])
        return coordinates @ self._images

    def backward(self, w: np.ndarray) -> np.ndarray:
        """Return the product of the transpose with one vector of the stream, [G N].

        The result is for G sampled heads of dimension N. Its part along a new direction is drawn
        and kept.

        Args:
            w: Vector in coordinates of the stream, [M]. Coordinates that it lacks are 0.
        """
        w = _widened(w[None], self.coordinates - len(w))
        coordinates, new = _coordinates(w, self._stream, 1)
        sampled = self._heads.shape[-1]
        fresh = self._rng.standard_normal((len(new), sampled))
        if self._responses:
            fresh += (new @ self._images.T - fresh @ self._heads.T / sampled) @ self._heads
        self._stream = np.concatenate([self._stream, new])
        self._preimages = np.concatenate([self._preimages, fresh])
        return (coordinates @ self._preimages)[0]


class _Change(NamedTuple):
    """Change of the output matrix W_O in one step of gradient descent.

    It is a sum over P examples of error times readout times attended values.

    Attributes:
        error: Targets minus outputs, divided by the number of examples, [P].
        readout: Readout w before the step, in M coordinates of the stream, [M].
        values: Attended values of G heads of dimension N, a mean over positions, [P, G N].
    """

    error: np.ndarray
    readout: np.ndarray
    values: np.ndarray


class TrainedOutput:
    """Output matrix W_O / (N H)^(1/2) in training: its initial value and one change per step.

    Args:
        initial: Matrix before training, W_O / (N H)^(1/2).
        rate: Factor on the change of every step, eta0 gamma0 beta0 (`OneBlock`).
    """

    def __init__(self, initial: Output, rate: float) -> None:
        self.initial = initial
        self.rate = rate
        self._changes: list[_Change] = []

    def forward(self, y: np.ndarray) -> np.ndarray:
        """Return the products of the trained matrix with R vectors over heads, [R, M].

        The number M of the stream's coordinates grows by one for each new direction of y.

        Args:
            y: Vectors over heads [R, G N], for G sampled heads of dimension N.
        """
        branch = self.initial.forward(y)
        for change in self._changes:
            weights = self.rate * (change.error @ change.values @ y.T) / y.shape[-1]
            missing = self.initial.coordinates - len(change.readout)
            branch = branch + np.outer(weights, _widened(change.readout[None], missing))
        return branch

    def backward(self, w: np.ndarray) -> np.ndarray:
        """Return the product of the trained matrix's transpose with the readout, [G N].

        The result is for G sampled heads of dimension N.

        Args:
            w: Readout in coordinates of the stream, [M]. The stream gains coordinates in training,
                so M is at least that of the readouts passed to `step`.
        """
        o = self.initial.backward(w)
        for change in self._changes:
            overlap = change.readout @ w[: len(change.readout)]
            o = o + self.rate * overlap * (change.error @ change.values)
        return o

    def step(self, error: np.ndarray, readout: np.ndarray, values: np.ndarray) -> None:
        """Record the change of the matrix by one step of gradient descent.

        Args:
            error: Targets minus outputs, divided by the number P of examples, [P].
            readout: Readout before the step, in coordinates of the stream, [M].
            values: Attended values of G heads of dimension N, a mean over positions, [P, G N].
        """
        self._changes.append(_Change(error, readout, values))


def train(
    block: OneBlock,
    kernel: np.ndarray,
    targets: np.ndarray,
    *,
    steps: int,
    heads: int,
    rng: np.random.Generator,
    responses: bool = True,
) -> Trajectory:
    """Train one attention block with infinitely many heads, and return its trajectory.

    Every step is on all P examples of S positions. All weights except the read-in are trained.
    The loss is the mean over examples of (f - target)^2 / 2.

    Args:
        block: Constants and learning rate of the block.
        kernel: Products <h, h'> of the stream before the block, [P, S, P, S]. As a matrix of P S
            rows it must be positive semidefinite.
        targets: Targets [P].
        steps: Number of steps of gradient descent.
        heads: Number of sampled heads G. The sampling error goes as G^-1/2.
        responses: Whether products with a matrix and its transpose are consistent. `False` is a
            control (`mupax.presets.infinite.dice.LazyGaussian`).
    """
    examples, positions = kernel.shape[:2]
    tokens = examples * positions
    n = block.head_dim
    # The rate eta0 gamma0^2 N H times the factor 1/(gamma0 N H) of the output.
    readout_rate = block.rate * block.gamma0
    rate = readout_rate * block.beta0
    # The gradients of queries and keys have the factor N^-alpha_a already; their rule is
    # N^(2 alpha_a - 2).
    logit_rate = rate * n ** (2 * block.alpha_a - 2)

    kernel = kernel.reshape(tokens, tokens)
    root = np.sqrt(np.diag(kernel))
    normed = kernel / np.outer(root, root)  # <LN h, LN h'>
    # Tokens may be linearly dependent, which the Cholesky factors do not allow.
    jitter = 1e-12 * np.eye(tokens)
    factor = np.linalg.cholesky(normed + jitter)
    # [G, R, N] each, correlated over tokens as the normed stream is.
    q, k, v = (factor @ rng.standard_normal((heads, tokens, n)) for _ in range(3))
    stream = np.linalg.cholesky(kernel + jitter)  # h in coordinates [R, M]
    # The readout starts independent of the stream: its direction is one more coordinate.
    w = np.eye(1, tokens + 1, tokens)[0]
    output = TrainedOutput(Output(heads * n, tokens + 1, rng, responses=responses), rate)

    def pooled(x: np.ndarray) -> np.ndarray:
        """Average over the S positions: rows [P S, ...] become [P, ...]."""
        return x.reshape(examples, positions, -1).mean(1)

    def by_example(x: np.ndarray) -> np.ndarray:
        """Split tokens into examples: [G, P S, N] becomes [P, G, S, N]."""
        return x.reshape(heads, examples, positions, n).swapaxes(0, 1)

    def correlated(x: np.ndarray) -> np.ndarray:
        """Reshape gradients [P, G, S, N] to [G, P S, N], times the correlations of tokens."""
        return normed @ x.swapaxes(0, 1).reshape(heads, tokens, n)

    outputs = []
    kernels = []
    attention = []
    for _ in range(steps):
        values, logits, vjp = attend(by_example(q), by_example(k), by_example(v), n**-block.alpha_a)
        y = values.transpose(0, 2, 1, 3).reshape(tokens, heads * n)
        branch = output.forward(y)
        # The branch may have added coordinates of the stream. In these, older vectors are 0.
        missing = output.initial.coordinates - len(w)
        w = _widened(w[None], missing)[0]
        stream = _widened(stream, output.initial.coordinates - stream.shape[-1])
        features = pooled(stream + block.beta0 * branch)
        outputs.append(features @ w / block.gamma0)
        kernels.append(features @ features.T)
        attention.append(((logits**2).mean(), (logits.mean(1) ** 2).mean()))

        error = (targets - outputs[-1]) / examples
        o = output.backward(w)
        per_position = error[:, None, None, None] * o.reshape(heads, 1, n) / positions
        dvalues = per_position * np.ones((examples, heads, positions, n))
        dq, dk, dv = vjp(dvalues)
        q = q + logit_rate * correlated(dq)
        k = k + logit_rate * correlated(dk)
        v = v + rate * correlated(dv)
        output.step(error, w, pooled(y))
        w = w + readout_rate * error @ features
    return Trajectory(np.array(outputs), np.array(kernels), np.array(attention))


def _coordinates(x: np.ndarray, basis: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates of vectors in a basis, and the directions that the basis lacks.

    Directions are orthonormal under x.y / weight.

    Args:
        x: Vectors [R, size].
        basis: Directions [r, size].
        weight: Divisor of the products x.y, such as the number of entries.

    Returns:
        Coordinates in old and new directions, [R, r + new], and the new directions, [new, size].
    """
    root = np.sqrt(weight)
    outside = x - (x @ basis.T / weight) @ basis
    q, t = np.linalg.qr(outside.T / root)
    # Singular values are lengths outside of the known directions.
    p, lengths, _ = np.linalg.svd(t)
    least = ROUNDING * np.finfo(x.dtype).eps * np.linalg.norm(x) / root
    count = int((lengths > least).sum())
    new = (q @ p[:, :count]).T * root
    # A second projection takes out what rounding has left along the old directions.
    new = new - (new @ basis.T / weight) @ basis
    new = np.linalg.qr(new.T)[0].T * root
    return x @ np.concatenate([basis, new]).T / weight, new


def _widened(x: np.ndarray, count: int) -> np.ndarray:
    """Append `count` coordinates of value 0 to vectors [R, M]."""
    return np.pad(x, ((0, 0), (0, count)))
