"""Multinomial logistic regression, the reference beside models of images."""

from __future__ import annotations

import numpy as np


def fit(x: np.ndarray, y: np.ndarray, *, inverse_penalty: float, iterations: int) -> np.ndarray:
    """Fit logistic regression by L-BFGS and return its weights, float [features + 1, classes]; the last row is the biases.

    Args:
        x: features [examples, features].
        y: classes from 0, all of them present [examples].
        inverse_penalty: C, where squared weights but biases cost 1 / (2 C) beside the summed loss.
        iterations: of L-BFGS at most.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    features = _with_ones(x)
    targets = np.eye(int(y.max()) + 1, dtype=features.dtype)[y]
    penalty = np.full((features.shape[1], 1), 1 / inverse_penalty, features.dtype)
    penalty[-1] = 0

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        # NumPy would widen float32 features to float64 at every product.
        weights = flat.reshape(features.shape[1], -1).astype(features.dtype)
        log_probs = log_softmax(features @ weights, axis=1)
        loss = (penalty * weights**2).sum() / 2 - (targets * log_probs).sum()
        gradient = features.T @ (np.exp(log_probs) - targets) + penalty * weights
        return float(loss) / len(x), gradient.ravel().astype(float) / len(x)

    start = np.zeros(features.shape[1] * targets.shape[1])
    limits = {"maxiter": iterations, "gtol": 1e-4, "maxls": 50, "ftol": 64 * np.finfo(float).eps}
    found = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=limits)
    return found.x.reshape(features.shape[1], -1)


def predict(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the likeliest class of every example.

    Args:
        weights: as `fit` returns them.
        x: features [examples, features].
    """
    return (_with_ones(x) @ weights).argmax(1)


def _with_ones(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1), x.dtype)])
