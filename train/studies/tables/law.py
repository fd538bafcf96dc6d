"""Law of the loss over model size N, tokens D, peak rate r and batch B, fitted to a table of runs.

    L = E + A N^-a + C D^-c           size and length: Hoffmann et al. 2022 (2203.15556), approach 3
      + P r^-p B^q D^-s               too little progress: a small learning rate
      + S B^b D^-t                    few steps: a large batch (McCandlish et al. 2018, 1812.06162)
      + V r^v B^-w D^y N^z            noise of the gradient: a large rate at a small batch
      + U r^u B^k D^-l N^m            instability: a large rate, above all in short runs

The other letters are fitted and called the numbers of the law. A table that has training FLOPs F in
place of N and D gets L = E + K F^-k. N, D, r, B and F are called axes. Each term is a product of
powers, so the log of the loss is convex in the logs of rate and batch: there is one best rate and
batch, and both move with N and D. A factor whose axis does not vary in the table is left out, and
so is a term that needs such an axis. Every number has a prior (`TERMS`), which decides where the
runs say little.

Runs of one model and length are a setting. They share an effect that no term explains, which is
fitted, too, around 0 (a random effect). The noise of a run grows with the distance of its loss from
the best one of its setting. The uncertainty of the fit is a Gaussian around it (Laplace's
approximation). It is carried to losses to first order, since numbers of the law that cannot be told
apart still agree on the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares

from mupax.mappings import select_keys
from mupax.train.studies.tables.table import RunTable, TableError

AXES = ("parameters", "tokens", "peak_lr", "batch_sequences", "flops")
"""Columns of a table that the law of the loss is a function of, the axes of the law."""
WINDOW = 0.12
"""Largest excess of a run's log loss over that of the best run of the same model and length.

Runs above it are left out of the fit, because they diverged or nearly did.
"""
LEAST_RUNS = 3
"""Smallest number of runs with a finite loss that a law is fitted to."""
SHARED, NEAR, FAR = 0.003, 0.0025, 0.1
"""Values of the fields of `Noise` (log-loss deviations) in the first round of a fit."""
LEAST_NEAR, LEAST_FAR = 0.0005, 0.02
"""Smallest values of `Noise.near` and `Noise.far` in a fit, since few runs may agree by chance."""
SHARED_PRIOR, SHARED_FREEDOM = 0.002, 2
"""Prior of `Noise.shared`: the deviation, and its weight as a number of settings.

A setting is all runs of one model and length.
"""
FAR_EXCESS = 0.03
"""Excess of the log loss, over the best of its setting, above which a run determines `Noise.far`.

Runs with less than a third of it determine `Noise.near`.
"""
ROUNDS = 3
"""Number of rounds of a fit. Each fits the law with the noise that the round before estimated."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """Gaussian prior of a fitted number of the law: its mean and standard deviation."""

    mean: float
    deviation: float


@dataclasses.dataclass(frozen=True)
class Term:
    """Term of the law of the loss: a product of powers of axes, such as model size or batch.

    Attributes:
        name: Name of the term, as in the law that is printed.
        share: Prior of the natural log of the term's size in the middle of the table's range of
            every axis, divided by the lowest loss of the table.
        exponents: Axis to the prior of its exponent.
        needs: Axes that must vary in the table. Otherwise the law leaves the term out.
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
"""Terms of the law, with the prior of each number.

The exponents of size are those of Hoffmann et al. All others are guesses that only give a sign and
an order of magnitude. Published laws at losses of 2 to 3 nats have a floor of about half the loss.
The prior of the floor is this half, with a deviation of a quarter of it.
"""


@dataclasses.dataclass(frozen=True)
class Form:
    """Functional form of the law for a table: its terms and axes, without fitted numbers.

    Shapes: M runs, A axes, P fitted numbers of the law.

    Attributes:
        terms: Terms of `TERMS` that the table can determine, with the exponents of axes that vary.
        axes: Axes that vary in the table. Arrays of shape [..., A] have them in this order.
        centre: Midpoint between the smallest and the largest log2 of each axis in the table [A].
        loss: Lowest loss of the table, in nats.
    """

    terms: tuple[Term, ...]
    axes: tuple[str, ...]
    centre: np.ndarray
    loss: float

    @property
    def names(self) -> list[str]:
        """Names of the fitted numbers of the law, such as "size" and "size.parameters".

        For each term there is its size, then its exponents.
        """
        names = []
        for term in self.terms:
            names.append(term.name)
            names += [f"{term.name}.{axis}" for axis in term.exponents]
        return names

    @property
    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Prior means and standard deviations of the fitted numbers, in the order of `names`."""
        means: list[float] = []
        deviations: list[float] = []
        for term in self.terms:
            for prior in (term.share, *term.exponents.values()):
                means.append(prior.mean)
                deviations.append(prior.deviation)
        return np.array(means), np.array(deviations)

    def place(self, values: Mapping[str, np.ndarray | float]) -> np.ndarray:
        """Return the coordinates of M runs in the law: log2 of each axis minus `centre` [M, A].

        Args:
            values: Number or array [M] for each axis of `axes`, broadcast against each other.
        """
        numbers = []
        for axis in self.axes:
            numbers.append(np.atleast_1d(np.asarray(values[axis], float)))
        columns = np.broadcast_arrays(*numbers)
        return np.stack([np.log2(column) for column in columns], axis=1) - self.centre

    def log_loss(self, numbers: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the natural log of the loss of M runs, and its derivatives by the P numbers.

        Args:
            numbers: Numbers of the law, in the order of `names` [P].
            place: Coordinates of the runs, from `Form.place` [M, A].

        Returns:
            Log losses [M], and derivatives [M, P].
        """
        # `factors` has the derivative of the log of a number's own term by this number, [M, P].
        factors = np.zeros((len(place), len(numbers)))
        owner = np.zeros(len(numbers), int)
        column = 0
        for index, term in enumerate(self.terms):
            owner[column : column + 1 + len(term.exponents)] = index
            factors[:, column] = 1.0
            for offset, axis in enumerate(term.exponents, 1):
                factors[:, column + offset] = place[:, self.axes.index(axis)] * math.log(2)
            column += 1 + len(term.exponents)
        member = np.eye(len(self.terms))[owner]  # [P, terms]
        terms = np.exp((factors * numbers) @ member)  # [M, terms], relative to the lowest loss
        total = terms.sum(axis=1)
        shares = (terms / total[:, None])[:, owner]
        # d log(sum of terms) = the terms' shares times the derivatives of their logs.
        return np.log(total) + math.log(self.loss), shares * factors


@dataclasses.dataclass(frozen=True)
class Noise:
    """Standard deviations of the natural log of the loss around the law.

    A setting is all runs of one model and length. The excess of a run is the log of its loss, minus
    the log of the best loss of its setting.

    Attributes:
        shared: Deviation of the effect that all runs of a setting share.
        near: Deviation of a run at the best learning rate and batch of its setting.
        far: Increase of the deviation of a run per unit of its excess.
    """

    shared: float = SHARED
    near: float = NEAR
    far: float = FAR

    def of_run(self, excess: np.ndarray) -> np.ndarray:
        """Return the standard deviation of the log loss of each of M runs, `near + far * excess`.

        Args:
            excess: Log of each run's loss, minus the log of the best loss of its setting [M].
                Numbers below 0 count as 0.
        """
        return self.near + self.far * np.maximum(excess, 0.0)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted law of the loss with its uncertainty.

    Shapes: M runs, K settings (all runs of one model and length), P fitted numbers of the law.

    Attributes:
        table: Table that the law was fitted to, without runs that diverged or nearly did.
        form: Terms and axes of the law.
        numbers: Fitted numbers of the law in the order of `form.names` [P].
        covariance: Covariance of the numbers [P, P].
        noise: Noise of settings and runs.
        effects: Difference of each setting's log losses from the law, shared by its runs [K].
        effect_variances: Variances of `effects` that are left after the fit [K].
        setting: Index of each run's setting [M].
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
        """Return the fitted log loss of M runs, and its derivatives by the numbers of the law.

        Args:
            values: Number or array [M] for each axis of the law, broadcast against each other.

        Returns:
            Natural logs of losses [M], and derivatives [M, P] in the order of `numbers`.
        """
        return self.form.log_loss(self.numbers, self.form.place(values))

    def grid(self, values: Mapping[str, float], per_octave: int = 4) -> dict[str, np.ndarray]:
        """Return a grid of learning rates and batches for one model size and length.

        They range from the smallest to the largest of the table.

        Args:
            values: Number of each axis of the law other than learning rate and batch.
            per_octave: Number of points per octave of learning rate and of batch.

        Returns:
            Array of the numbers of all M points, for each axis of the law. A learning rate or batch
            that does not vary in the table is no axis.
        """
        ranges = []
        searched = []
        for axis in ("peak_lr", "batch_sequences"):
            if axis in self.form.axes:
                searched.append(axis)
        for axis in searched:
            logs = np.log2(self.table.values[axis])
            count = max(2, round((logs.max() - logs.min()) * per_octave) + 1)
            ranges.append(np.linspace(logs.min(), logs.max(), count))
        mesh = np.meshgrid(*ranges, indexing="ij") if ranges else [np.zeros(1)]
        points: dict[str, np.ndarray] = {}
        for axis in self.form.axes:
            if axis not in searched:
                points[axis] = np.full(mesh[0].size, float(values[axis]))
        for axis, logs in zip(searched, mesh, strict=False):
            points[axis] = 2.0 ** logs.ravel()
        return points


def form_of(table: RunTable) -> Form:
    """Return the form of the law for a table, with the terms and exponents of axes that vary.

    Raises:
        TableError: All runs have one size and length.
    """
    logs = {}
    for axis in AXES:
        if axis in table.values:
            logs[axis] = np.log2(table.values[axis])
    varying_axes = []
    for axis, column in logs.items():
        # 1e-3 octaves, because a count computed twice may differ in its last digits.
        if column.max() - column.min() > 1e-3:
            varying_axes.append(axis)
    varying = tuple(varying_axes)
    if not {"parameters", "tokens", "flops"} & set(varying):
        same = []
        for axis in ("parameters", "tokens"):
            if axis in table.values:
                same.append(f"{axis} {table.values[axis][0]:,.0f}")
        sizes = ", ".join(same)
        raise TableError(
            f"{table.source}: all runs have one size and length ({sizes}), and a law of the loss "
            "over them needs runs of two at least; add runs of another model or another number of "
            "tokens"
        )
    terms: list[Term] = []
    for term in TERMS:
        if any(axis not in varying for axis in term.needs):
            continue
        exponents = select_keys(term.exponents, varying)
        terms.append(dataclasses.replace(term, exponents=exponents))
    # Axes are centred at their middle, because the size of a term there does not depend on its
    # exponents.
    middles = []
    for axis in varying:
        middles.append((logs[axis].max() + logs[axis].min()) / 2)
    return Form(tuple(terms), varying, np.array(middles), math.exp(float(table.log_loss.min())))


def settings_of(table: RunTable) -> np.ndarray:
    """Return the index of each run's setting [M], from 0. A setting is one model and length."""
    columns = []
    for axis in ("parameters", "tokens", "flops"):
        if axis in table.values:
            columns.append(table.values[axis])
    _, index = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    # Some releases of NumPy 2 return the inverse with more dimensions if an axis is given.
    return np.asarray(index).reshape(-1)


def lowest_of(table: RunTable) -> np.ndarray:
    """Return the lowest log loss of each setting [K], by the index that `settings_of` gives it.

    A setting is all runs of one model and length.
    """
    setting = settings_of(table)
    lowest = np.full(setting.max() + 1, math.inf)
    # `at` counts repeated indices, which plain indexing would not.
    np.minimum.at(lowest, setting, table.log_loss)
    return lowest


def fitted(table: RunTable, form: Form | None = None) -> Fit:
    """Fit the law of the loss to the runs of a table, in rounds that also estimate the noise.

    Args:
        table: Runs. Runs that diverged or nearly did are left out (`WINDOW`).
        form: Terms of the law, by default those of `form_of`.

    Raises:
        TableError: All runs have one size and length, or fewer than 3 runs are left.
    """
    table = table.subset(np.isfinite(table.log_loss))
    if len(table.log_loss):
        table = table.subset(table.log_loss - lowest_of(table)[settings_of(table)] < WINDOW)
    if len(table.log_loss) < LEAST_RUNS:
        raise TableError(
            f"{table.source}: a law needs {LEAST_RUNS} runs that did not diverge, and it has "
            f"{len(table.log_loss)}"
        )
    form = form or form_of(table)
    setting = settings_of(table)
    excess = table.log_loss - lowest_of(table)[setting]
    # Excess needs a law and a law needs noise, so the first round guesses.
    noise = Noise()
    # The first fit knows excess only from measured losses; later ones use the law's own minimum.
    fit = _once(table, form, setting, noise, excess, None)
    for _ in range(ROUNDS - 1):
        predicted, _ = fit.log_loss(table.values)
        lowest = []
        for index in range(setting.max() + 1):
            losses, _ = fit.log_loss(fit.grid(_setting_values(table, setting, index)))
            lowest.append(losses.min())
        excess = np.maximum(predicted - np.array(lowest)[setting], 0.0)
        missed = np.abs(predicted + fit.effects[setting] - table.log_loss)
        noise = _noise(fit, missed, excess)
        fit = _once(table, form, setting, noise, excess, fit.numbers)
    return fit


def _setting_values(table: RunTable, setting: np.ndarray, index: int) -> dict[str, float]:
    """Return the numbers of the first run of setting number `index`, by column.

    Args:
        setting: Index of each run's setting [M].
    """
    first = int(np.argmax(setting == index))
    row = {}
    for axis, column in table.values.items():
        row[axis] = float(column[first])
    return row


def _once(
    table: RunTable,
    form: Form,
    setting: np.ndarray,
    noise: Noise,
    excess: np.ndarray,
    start: np.ndarray | None,
) -> Fit:
    """Return the most probable law for a given noise, with the covariance of its numbers.

    The effects that the runs of a setting share are fitted at the same time. Large residuals count
    less (pseudo-Huber).

    Args:
        setting: Index of each run's setting, its model and length [M].
        excess: Log of each run's loss, minus the log of the best loss of its setting [M]. The noise
            depends on it.
        start: Numbers of the law at which the search starts [P]; the prior means by default.
    """
    place = form.place(table.values)
    mean, deviation = form.prior
    count = len(mean)
    member = np.eye(setting.max() + 1)[setting]  # [M, K]
    seed_variance = (table.seed_deviation or 0.0) ** 2
    scale = np.sqrt(noise.of_run(excess) ** 2 + seed_variance / table.seeds)
    means = np.concatenate([mean, np.zeros(member.shape[1])])
    # Effects are unknowns with a prior of their own, fitted together with the law.
    deviations = np.concatenate([deviation, np.full(member.shape[1], noise.shared)])

    def residuals(unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted, slopes = form.log_loss(unknowns[:count], place)
        missed = predicted + member @ unknowns[count:] - table.log_loss
        derivatives = np.hstack([slopes, member])
        return missed / scale, derivatives / scale[:, None]

    def cost(unknowns: np.ndarray) -> np.ndarray:
        residual, _ = residuals(unknowns)
        return np.concatenate([_pseudo_huber(residual), (unknowns - means) / deviations])

    def slopes(unknowns: np.ndarray) -> np.ndarray:
        residual, derivatives = residuals(unknowns)
        run_slopes = _pseudo_huber_slope(residual)[:, None] * derivatives
        return np.concatenate([run_slopes, np.diag(1 / deviations)])

    first = means.copy()
    if start is not None:
        first[:count] = start
    solution = least_squares(
        cost,
        first,
        jac=slopes,  # pyright: ignore[reportArgumentType]
        max_nfev=200,
    )
    residual, derivatives = residuals(solution.x)
    # Weights of iteratively reweighted least squares for pseudo-Huber.
    weight = 1 / np.sqrt(1 + residual**2)
    precision = (derivatives * weight[:, None]).T @ derivatives + np.diag(deviations**-2.0)
    # Laplace's approximation: the inverse curvature at the most probable law.
    covariance = np.linalg.inv(precision)
    return Fit(
        table=table,
        form=form,
        numbers=solution.x[:count],
        # The effects of settings are marginalized by leaving out their rows after the inverse.
        covariance=covariance[:count, :count],
        noise=noise,
        effects=solution.x[count:],
        effect_variances=np.diag(covariance)[count:],
        setting=setting,
    )


def _pseudo_huber(residual: np.ndarray) -> np.ndarray:
    """Shrink large residuals, so that their squares grow only linearly, and return all residuals.

    A single run with a large residual then does not distort the fit.
    """
    return np.sign(residual) * np.sqrt(2 * (np.sqrt(1 + residual**2) - 1))


def _pseudo_huber_slope(residual: np.ndarray) -> np.ndarray:
    """Return the derivative of `_pseudo_huber` at each residual."""
    root = np.sqrt(1 + residual**2)
    value = np.sqrt(2 * (root - 1))
    # At 0 the derivative is 0 / 0, and its limit is 1.
    return np.where(value < 1e-4, 1.0, np.abs(residual) / (root * np.maximum(value, 1e-12)))


def _noise(fit: Fit, missed: np.ndarray, excess: np.ndarray) -> Noise:
    """Estimate the noise for the next round of a fit, from the residuals and effects of this one.

    `near` and `far` use medians, so that single runs do not move them. Each keeps the value of the
    round before if at most `LEAST_RUNS` runs determine it.

    Args:
        fit: Law with the effects of settings, fitted with the noise of the round before.
        missed: Absolute residuals of the runs' log losses [M].
        excess: Predicted log loss of each run, minus the best one of its setting [M].
    """
    # Median of the absolute value of a standard normal variable.
    normal = 0.6745
    near_runs = excess < FAR_EXCESS / 3
    far_runs = excess > FAR_EXCESS
    near = fit.noise.near
    if near_runs.sum() > LEAST_RUNS:
        near = max(LEAST_NEAR, float(np.median(missed[near_runs])) / normal)
    far = fit.noise.far
    if far_runs.sum() > LEAST_RUNS:
        far_deviation = float(np.median(missed[far_runs])) / normal
        growth = (far_deviation - near) / float(np.median(excess[far_runs]))
        far = max(LEAST_FAR, growth)
    # Estimated effects are shrunk to 0, and adding their variances makes up for it. The prior
    # counts like `SHARED_FREEDOM` further settings.
    squares = float((fit.effects**2 + fit.effect_variances).sum())
    freedom = SHARED_FREEDOM + len(fit.effects)
    shared = math.sqrt((SHARED_FREEDOM * SHARED_PRIOR**2 + squares) / freedom)
    return Noise(shared, near, far)
