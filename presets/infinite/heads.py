"""One attention block with infinitely many heads of dimension N: only heads are sampled, the stream is exact.

    h~ = h + beta0 (N H)^(-1/2) sum over heads of W_O attention(q, k, v)      f = w . (mean over positions of h~) / (gamma0 N H)

The model of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), section 2.1, at L = 1 without an MLP and a last norm, its
read-in frozen and its output centred; W_Q, W_K, W_V, W_O and w learn by gradient descent at the rate eta0 gamma0^2 N H. As H grows,
q, k, v and o = (N H)^(-1/2) W_O' w become independent from head to head; the stream is linear in Gaussian vectors, so that it is
kept as coordinates in them. W_O is revealed as in `mupax.presets.infinite.dice`, the dimension of its outputs infinite:
what is fresh there is a coordinate of its own.

P examples, S positions, R = P S, G sampled heads, N head dimension, M coordinates of the stream. <a, b> is a mean over entries.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mupax.presets.infinite.dice import ROUNDING
from mupax.presets.infinite.layers import attend


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBlock:
    """The model and its training.

    Attributes:
        head_dim: N.
        alpha_a: attention logits are N^-alpha_a q.k.
        gamma0, beta0: of readout and branch.
        rate: eta0, for the mean over examples of (f - target)^2 / 2.
    """

    head_dim: int
    alpha_a: float
    gamma0: float = 1.0
    beta0: float = 1.0
    rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Outputs and kernels before each step of training.

    Attributes:
        outputs: f, [steps, P].
        kernels: <h~, h~'> of the means over positions, [steps, P, P].
        attention: mean over heads of the logits' square, and square of their mean over heads, both mean over examples and pairs
            of positions, [steps, 2].
    """

    outputs: np.ndarray
    kernels: np.ndarray
    attention: np.ndarray


class Output:
    """W_O / (N H)^(1/2) at the start: from vectors over heads [R, G N] to the stream [R, M], and back.

    Args:
        sampled: G N.
        coordinates: that the stream has before.
        rng: where from.
        responses: see `mupax.presets.infinite.dice.LazyGaussian`.
    """

    def __init__(
        self, sampled: int, coordinates: int, rng: np.random.Generator, *, responses: bool
    ) -> None:
        self._rng, self._responses, self.coordinates = rng, responses, coordinates
        self._heads, self._images = np.zeros((0, sampled)), np.zeros((0, coordinates))
        self._stream, self._preimages = np.zeros((0, coordinates)), np.zeros((0, sampled))

    def forward(self, y: np.ndarray) -> np.ndarray:
        """[R, G N] to [R, M], with as many coordinates more as y has directions that are new."""
        at, new = _coordinates(y, self._heads, y.shape[-1])
        self._images, self._stream = (_widened(x, len(new)) for x in (self._images, self._stream))
        fresh = np.eye(len(new), self.coordinates + len(new), self.coordinates)
        if self._responses:
            fresh += (new @ self._preimages.T / y.shape[-1]) @ self._stream
        self.coordinates += len(new)
        self._heads, self._images = (
            np.concatenate([self._heads, new]),
            np.concatenate([self._images, fresh]),
        )
        return at @ self._images

    def backward(self, w: np.ndarray) -> np.ndarray:
        """Of one vector of the stream [M], [G N]."""
        w = _widened(w[None], self.coordinates - len(w))
        at, new = _coordinates(w, self._stream, 1)
        sampled = self._heads.shape[-1]
        fresh = self._rng.standard_normal((len(new), sampled))
        if self._responses:
            fresh += (new @ self._images.T - fresh @ self._heads.T / sampled) @ self._heads
        self._stream, self._preimages = (
            np.concatenate([self._stream, new]),
            np.concatenate([self._preimages, fresh]),
        )
        return (at @ self._preimages)[0]


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
    """The course of the infinite model on all examples at every step.

    Args:
        block: the model.
        kernel: <h, h'> of the stream before the block, [P, S, P, S].
        targets: [P].
        steps: of gradient descent.
        heads: sampled heads G; what is left of the sampling goes as G^-1/2.
        rng: where from.
        responses: without, the control that must not agree.
    """
    examples, positions = kernel.shape[:2]
    tokens, n, scale = examples * positions, block.head_dim, block.rate * block.gamma0
    kernel = kernel.reshape(tokens, tokens)
    root = np.sqrt(np.diag(kernel))
    normed = kernel / np.outer(root, root)  # <LN h, LN h'>
    factor = np.linalg.cholesky(normed + 1e-12 * np.eye(tokens))
    # [G, P, S, N] each, correlated over tokens as the stream is.
    q, k, v = (factor @ rng.standard_normal((heads, tokens, n)) for _ in range(3))
    stream = np.linalg.cholesky(kernel + 1e-12 * np.eye(tokens))  # h in coordinates [R, M]
    w = np.eye(1, tokens + 1, tokens)[0]
    output = Output(heads * n, tokens + 1, rng, responses=responses)
    pushes: list[
        tuple[np.ndarray, np.ndarray, np.ndarray]
    ] = []  # of W_O: errors [P], readout [M], pooled values [P, G N]
    outputs, kernels, attention = [], [], []

    def pooled(x: np.ndarray) -> np.ndarray:
        return x.reshape(examples, positions, -1).mean(1)

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, examples, positions, n).swapaxes(0, 1)  # [P, G, S, N]

    def mixed(x: np.ndarray) -> np.ndarray:
        """[P, G, S, N] to [G, R, N], each token's gradient seen by the tokens that it is correlated with."""
        return normed @ x.swapaxes(0, 1).reshape(heads, tokens, n)

    for _ in range(steps):
        values, logits, back = attend(split(q), split(k), split(v), n**-block.alpha_a)
        y = values.transpose(0, 2, 1, 3).reshape(tokens, heads * n)
        branch = output.forward(y)
        for error, readout, before in pushes:
            change = scale * block.beta0 * (error @ before @ y.T) / (heads * n)
            branch = branch + np.outer(
                change, _widened(readout[None], output.coordinates - len(readout))
            )
        w, stream = (_widened(x, output.coordinates - x.shape[-1]) for x in (w[None], stream))
        w, after = w[0], pooled(stream + block.beta0 * branch)
        outputs.append(after @ w / block.gamma0)
        kernels.append(after @ after.T)
        attention.append(((logits**2).mean(), (logits.mean(1) ** 2).mean()))
        error = (targets - outputs[-1]) / examples
        o = output.backward(w)
        for before_error, readout, before in pushes:
            o = o + scale * block.beta0 * (readout @ w[: len(readout)]) * (before_error @ before)
        slopes = (error[:, None, None, None] * o.reshape(heads, 1, n) / positions) * np.ones(
            (examples, heads, positions, n)
        )
        dq, dk, dv = back(slopes)
        rate = scale * block.beta0
        # Of queries and keys the gradient has N^-alpha_a already, their rule N^(2 alpha_a - 2).
        q, k = (
            q + rate * n ** (2 * block.alpha_a - 2) * mixed(dq),
            k + rate * n ** (2 * block.alpha_a - 2) * mixed(dk),
        )
        v = v + rate * mixed(dv)
        pushes.append((error, w, pooled(y)))
        w = w + scale * error @ after
    return Trajectory(np.array(outputs), np.array(kernels), np.array(attention))


def _coordinates(x: np.ndarray, basis: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of x [R, size] in `basis` [r, size] and what it adds, and those added; orthonormal under x.y / weight."""
    root = np.sqrt(weight)
    q, t = np.linalg.qr((x - (x @ basis.T / weight) @ basis).T / root)
    p, lengths, _ = np.linalg.svd(t)
    new = (
        q
        @ p[:, : int((lengths > ROUNDING * np.finfo(x.dtype).eps * np.linalg.norm(x) / root).sum())]
    ).T * root
    new = new - (new @ basis.T / weight) @ basis
    new = np.linalg.qr(new.T)[0].T * root
    return x @ np.concatenate([basis, new]).T / weight, new


def _widened(x: np.ndarray, by: int) -> np.ndarray:
    """[R, M] with so many coordinates more, which are 0."""
    return np.pad(x, ((0, 0), (0, by)))
