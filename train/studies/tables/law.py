"""A law of the loss over model size N, tokens D, peak learning rate r and batch B, fitted to all runs of a table at once.

    L = E + A N^-a + C D^-c             size and length: Hoffmann et al. 2022 (2203.15556), approach 3
      + P r^-p B^q D^-s                 progress that a small rate does not make
      + S B^b D^-t                      few steps: a large batch (McCandlish et al. 2018, 1812.06162)
      + V r^v B^-w D^y N^z              noise of the gradient: a large rate at a small batch
      + U r^u B^k D^-l N^m              instability: a large rate, above all in short runs

or, of a table that has training FLOPs F alone, L = E + K F^-k. Each term is a product of powers, so the log of the loss is convex
in the logs of rate and batch: there is one best rate and batch, and both move with N and D. A factor whose axis does not vary in
the table is left out, and so is a term without one. Every number has a prior (`TERMS`), which decides what the runs leave open.

Runs of one model and length share an effect that no term explains; it is fitted too, around 0 (a random effect). The noise of a run
grows with the distance of its loss from the best one. What the runs leave open is the Gaussian around the fit (Laplace's
approximation), carried to losses to first order, since numbers of the law that cannot be told apart still agree on the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares

from mupax.train.studies.tables.table import RunTable, TableError

AXES = ("parameters", "tokens", "peak_lr", "batch_sequences", "flops")
"""Columns that the law is a function of."""
WINDOW = 0.12
"""Log of the loss over the best one of its model and length from which on a run is left out: it diverged, or nearly."""
LEAST_RUNS = 3
"""Settings, or runs of a table of one setting, that a law needs."""
SHARED, NEAR, FAR = 0.003, 0.0025, 0.1
"""First guesses: deviation of what a setting's runs share, of a run at the best rate, and what it grows by with the excess loss."""
LEAST_NEAR, LEAST_FAR = 0.0005, 0.02
"""Smallest values of the last two, since few runs may agree by chance."""
SHARED_PRIOR, SHARED_FREEDOM = 0.002, 2
"""Deviation that is expected of what a setting's runs share, as if so many settings had shown it."""
FAR_EXCESS = 0.03
"""Excess of the log loss from which on a run tells how the noise grows; runs below a third of it tell the noise at the best rate."""
ROUNDS = 3
"""Fits, each with the noise that the one before it left."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """A Gaussian: mean and standard deviation."""

    mean: float
    deviation: float


@dataclasses.dataclass(frozen=True)
class Term:
    """A product of powers that is added to the loss.

    Attributes:
        name: of the term.
        share: prior of the log of its size over the lowest loss of the table, at the table's middle.
        exponents: axis to the prior of its exponent.
        needs: axes that must vary in the table for this term.
    """

    name: str
    share: Prior
    exponents: Mapping[str, Prior] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()


TERMS = (
    Term("floor", Prior(math.log(0.5), 0.25)),
    Term("size", Prior(math.log(0.2), 1.0), {"parameters": Prior(-0.34, 0.1)}, ("parameters",)),
    Term("length", Prior(math.log(0.1), 1.0), {"tokens": Prior(-0.4, 0.15)}, ("tokens",)),
    Term("compute", Prior(math.log(0.5), 1.0), {"flops": Prior(-0.15, 0.1)}, ("flops",)),
    Term(
        "progress",
        Prior(math.log(0.1), 1.0),
        {
            "peak_lr": Prior(-0.2, 0.2),
            "batch_sequences": Prior(0.1, 0.2),
            "tokens": Prior(-0.28, 0.1),
        },
        ("peak_lr",),
    ),
    Term(
        "steps",
        Prior(math.log(0.005), 2.0),
        {"batch_sequences": Prior(1.0, 0.5), "tokens": Prior(-0.7, 0.5)},
        ("batch_sequences",),
    ),
    Term(
        "noise",
        Prior(math.log(0.005), 2.0),
        {
            "peak_lr": Prior(0.7, 0.5),
            "batch_sequences": Prior(-0.7, 0.5),
            "tokens": Prior(0.0, 0.5),
            "parameters": Prior(0.0, 0.2),
        },
        ("peak_lr",),
    ),
    Term(
        "instability",
        Prior(math.log(0.005), 2.0),
        {
            "peak_lr": Prior(1.0, 0.5),
            "batch_sequences": Prior(0.0, 0.5),
            "tokens": Prior(-0.5, 0.5),
            "parameters": Prior(0.0, 0.5),
        },
        ("peak_lr",),
    ),
)
"""The exponents of size are Hoffmann et al.'s. All others are guesses that only give a sign and an order of magnitude; half of
the loss as a floor is what published laws have at losses of 2 to 3 nats, and a quarter of it either way stays open."""


@dataclasses.dataclass(frozen=True)
class Form:
    """The terms that a table can say something about.

    Attributes:
        terms: of `TERMS`, with the exponents of axes that vary.
        axes: that vary, in the order of the columns of a design.
        centre: mean of the log2 of each axis over the settings [A].
        loss: lowest loss of the table.
    """

    terms: tuple[Term, ...]
    axes: tuple[str, ...]
    centre: np.ndarray
    loss: float

    @property
    def names(self) -> list[str]:
        """Names of the numbers of the law: a term's size, then its exponents."""
        return [
            name
            for term in self.terms
            for name in (term.name, *(f"{term.name}.{axis}" for axis in term.exponents))
        ]

    @property
    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of these numbers [P], [P]."""
        means: list[float] = []
        deviations: list[float] = []
        for term in self.terms:
            means += [term.share.mean, *(prior.mean for prior in term.exponents.values())]
            deviations += [
                term.share.deviation,
                *(prior.deviation for prior in term.exponents.values()),
            ]
        return np.array(means), np.array(deviations)

    def place(self, values: Mapping[str, np.ndarray | float]) -> np.ndarray:
        """Return log2 of runs over the centre [M, A].

        Args:
            values: of each axis of `axes`, broadcast against each other.
        """
        columns = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(values[axis], float)) for axis in self.axes)
        )
        return np.stack([np.log2(column) for column in columns], axis=1) - self.centre

    def log_loss(self, numbers: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log of the loss [M] and its derivatives by the numbers of the law [M, P].

        Args:
            numbers: of the law [P].
            place: of runs, as `place` returns it [M, A].
        """
        factors = np.zeros(
            (len(place), len(numbers))
        )  # derivatives of the log of the number's own term
        owner = np.zeros(len(numbers), int)
        column = 0
        for index, term in enumerate(self.terms):
            owner[column : column + 1 + len(term.exponents)] = index
            factors[:, column] = 1.0
            for offset, axis in enumerate(term.exponents, 1):
                factors[:, column + offset] = place[:, self.axes.index(axis)] * math.log(2)
            column += 1 + len(term.exponents)
        member = np.eye(len(self.terms))[owner]  # [P, terms]
        terms = np.exp((factors * numbers) @ member)  # [M, terms], over the lowest loss
        total = terms.sum(axis=1)
        shares = (terms / total[:, None])[:, owner]
        return np.log(total) + math.log(self.loss), shares * factors


@dataclasses.dataclass(frozen=True)
class Noise:
    """Standard deviations of the log of the loss.

    Attributes:
        shared: of what all runs of a setting share.
        near: of a run at the best rate and batch.
        far: what that grows by with the log of the loss over the best one.
    """

    shared: float = SHARED
    near: float = NEAR
    far: float = FAR

    def of_run(self, excess: np.ndarray) -> np.ndarray:
        """Return the deviation of runs at an excess of the log loss over the best one."""
        return self.near + self.far * np.maximum(excess, 0.0)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law with what the runs leave open.

    Attributes:
        table: it was fitted to, without runs beyond `WINDOW`.
        form: its terms.
        numbers: of the law [P].
        covariance: of these [P, P].
        noise: of settings and runs.
        effects: what the runs of each setting share beyond the law [K].
        effect_variances: what the runs leave open of these [K].
        setting: index of each run's setting [M].
    """

    table: RunTable
    form: Form
    numbers: np.ndarray
    covariance: np.ndarray
    noise: Noise
    effects: np.ndarray
    effect_variances: np.ndarray
    setting: np.ndarray

    def log_loss(self, values: Mapping[str, np.ndarray | float]) -> tuple[np.ndarray, np.ndarray]:
        """Return the log of the loss of runs [M] and its derivatives by the numbers of the law [M, P]."""
        return self.form.log_loss(self.numbers, self.form.place(values))

    def grid(self, values: Mapping[str, float], per_octave: int = 4) -> dict[str, np.ndarray]:
        """Return every rate and batch within the table's, at one size and length.

        Args:
            values: of the other axes.
            per_octave: points of each axis.
        """
        ranges = []
        searched = [axis for axis in ("peak_lr", "batch_sequences") if axis in self.form.axes]
        for axis in searched:
            logs = np.log2(self.table.values[axis])
            count = max(2, round((logs.max() - logs.min()) * per_octave) + 1)
            ranges.append(np.linspace(logs.min(), logs.max(), count))
        mesh = np.meshgrid(*ranges, indexing="ij") if ranges else [np.zeros(1)]
        points: dict[str, np.ndarray] = {
            axis: np.full(mesh[0].size, float(values[axis]))
            for axis in self.form.axes
            if axis not in searched
        }
        for axis, logs in zip(searched, mesh, strict=False):
            points[axis] = 2.0 ** logs.ravel()
        return points


def form_of(table: RunTable) -> Form:
    """Return the terms that a table can say something about.

    Raises:
        TableError: no axis varies.
    """
    logs = {axis: np.log2(table.values[axis]) for axis in AXES if axis in table.values}
    varying = tuple(axis for axis, column in logs.items() if column.max() - column.min() > 1e-3)
    if not {"parameters", "tokens", "flops"} & set(varying):
        sizes = ", ".join(
            f"{axis} {table.values[axis][0]:,.0f}"
            for axis in ("parameters", "tokens")
            if axis in table.values
        )
        raise TableError(
            f"{table.source}: all runs have one size and length ({sizes}), and a law of the loss over them needs runs of two at least; "
            "add runs of another model or another number of tokens"
        )
    terms: list[Term] = []
    for term in TERMS:
        if any(axis not in varying for axis in term.needs):
            continue
        exponents = {axis: prior for axis, prior in term.exponents.items() if axis in varying}
        terms.append(dataclasses.replace(term, exponents=exponents))
    centre = np.array([(logs[axis].max() + logs[axis].min()) / 2 for axis in varying])
    return Form(tuple(terms), varying, centre, math.exp(float(table.log_loss.min())))


def settings_of(table: RunTable) -> np.ndarray:
    """Return the index of each run's setting [M]: runs of one model and length are one."""
    columns = [
        table.values[axis] for axis in ("parameters", "tokens", "flops") if axis in table.values
    ]
    _, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.asarray(index).reshape(-1)


def lowest_of(table: RunTable) -> np.ndarray:
    """Return the lowest log loss of each setting [K]."""
    setting = settings_of(table)
    lowest = np.full(setting.max() + 1, math.inf)
    np.minimum.at(lowest, setting, table.log_loss)
    return lowest


def fitted(table: RunTable, form: Form | None = None) -> Fit:
    """Return the law of a table.

    Args:
        table: of runs.
        form: the terms; those of `form_of` unless given.

    Raises:
        TableError: all runs have one size and length, or fewer than three runs have a finite loss.
    """
    table = table.subset(np.isfinite(table.log_loss))
    if len(table.log_loss):
        table = table.subset(table.log_loss - lowest_of(table)[settings_of(table)] < WINDOW)
    if len(table.log_loss) < LEAST_RUNS:
        raise TableError(
            f"{table.source}: a law needs {LEAST_RUNS} runs that did not diverge, and it has {len(table.log_loss)}"
        )
    form = form or form_of(table)
    setting = settings_of(table)
    excess = table.log_loss - lowest_of(table)[setting]
    noise = Noise()
    fit = _once(table, form, setting, noise, excess, None)
    for _ in range(ROUNDS - 1):
        predicted, _ = fit.log_loss(table.values)
        lowest = np.array(
            [
                fit.log_loss(fit.grid(_setting_values(table, setting, k)))[0].min()
                for k in range(setting.max() + 1)
            ]
        )
        excess = np.maximum(predicted - lowest[setting], 0.0)
        noise = _noise(fit, np.abs(predicted + fit.effects[setting] - table.log_loss), excess)
        fit = _once(table, form, setting, noise, excess, fit.numbers)
    return fit


def _setting_values(table: RunTable, setting: np.ndarray, index: int) -> dict[str, float]:
    """Return the values of a setting's first run."""
    first = int(np.argmax(setting == index))
    return {axis: float(column[first]) for axis, column in table.values.items()}


def _once(
    table: RunTable,
    form: Form,
    setting: np.ndarray,
    noise: Noise,
    excess: np.ndarray,
    start: np.ndarray | None,
) -> Fit:
    """Return the most probable law at a given noise, and the Gaussian around it."""
    place = form.place(table.values)
    mean, deviation = form.prior
    count = len(mean)
    member = np.eye(setting.max() + 1)[setting]  # [M, K]
    seed_variance = (table.seed_deviation or 0.0) ** 2
    scale = np.sqrt(noise.of_run(excess) ** 2 + seed_variance / table.seeds)
    means = np.concatenate([mean, np.zeros(member.shape[1])])
    deviations = np.concatenate([deviation, np.full(member.shape[1], noise.shared)])

    def residuals(unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted, slopes = form.log_loss(unknowns[:count], place)
        return (predicted + member @ unknowns[count:] - table.log_loss) / scale, np.hstack(
            [slopes, member]
        ) / scale[:, None]

    def cost(unknowns: np.ndarray) -> np.ndarray:
        residual = residuals(unknowns)[0]
        return np.concatenate([_pseudo_huber(residual), (unknowns - means) / deviations])

    def slopes(unknowns: np.ndarray) -> np.ndarray:
        residual, derivatives = residuals(unknowns)
        return np.concatenate(
            [_pseudo_huber_slope(residual)[:, None] * derivatives, np.diag(1 / deviations)]
        )

    first = means.copy()
    if start is not None:
        first[:count] = start
    solution = least_squares(cost, first, jac=slopes, max_nfev=200)  # pyright: ignore[reportArgumentType]
    residual, derivatives = residuals(solution.x)
    weight = 1 / np.sqrt(1 + residual**2)
    precision = (derivatives * weight[:, None]).T @ derivatives + np.diag(deviations**-2.0)
    covariance = np.linalg.inv(precision)
    return Fit(
        table=table,
        form=form,
        numbers=solution.x[:count],
        covariance=covariance[:count, :count],
        noise=noise,
        effects=solution.x[count:],
        effect_variances=np.diag(covariance)[count:],
        setting=setting,
    )


def _pseudo_huber(residual: np.ndarray) -> np.ndarray:
    """Return values whose squares grow linearly with large residuals, so that single runs do not bend the law."""
    return np.sign(residual) * np.sqrt(2 * (np.sqrt(1 + residual**2) - 1))


def _pseudo_huber_slope(residual: np.ndarray) -> np.ndarray:
    """Return the derivative of `_pseudo_huber`."""
    root = np.sqrt(1 + residual**2)
    value = np.sqrt(2 * (root - 1))
    return np.where(value < 1e-4, 1.0, np.abs(residual) / (root * np.maximum(value, 1e-12)))


def _noise(fit: Fit, missed: np.ndarray, excess: np.ndarray) -> Noise:
    """Return the noise that a fit leaves, by medians, which single runs do not move.

    Args:
        fit: with the effects of settings.
        missed: absolute residuals of the runs' log losses [M].
        excess: of the predicted log losses over the best one [M].
    """
    normal = 0.6745  # the median of a standard normal's absolute value
    near_runs = excess < FAR_EXCESS / 3
    far_runs = excess > FAR_EXCESS
    near = fit.noise.near
    if near_runs.sum() > LEAST_RUNS:
        near = max(LEAST_NEAR, float(np.median(missed[near_runs])) / normal)
    far = fit.noise.far
    if far_runs.sum() > LEAST_RUNS:
        growth = (float(np.median(missed[far_runs])) / normal - near) / float(
            np.median(excess[far_runs])
        )
        far = max(LEAST_FAR, growth)
    squares = float((fit.effects**2 + fit.effect_variances).sum())
    freedom = SHARED_FREEDOM + len(fit.effects)
    shared = math.sqrt((SHARED_FREEDOM * SHARED_PRIOR**2 + squares) / freedom)
    return Noise(shared, near, far)
