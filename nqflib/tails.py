"""Exponents of a spectrum from Lanczos runs, with intervals that know how noisy a random start is.

A rank curve r(lambda) from S Gaussian starts counts with independent errors in disjoint bands of eigenvalues, each of
variance 2 (number in the band) / S. So the relative errors e_i of the ranks r_i have

    cov(e_i, e_j) = (2 / S) (1 / max(r_i, r_j) - 1 / N),

beside what the bounds leave open (their middle errs by a tenth of that, as measured on power laws) and half an
eigenvalue. Fits are least squares in ln lambda against ln r with this covariance: the residuals of a rank curve hang
together over the whole window, and an ordinary fit would promise too much. If the residuals are larger than the
covariance says, since the law itself is not exact, the interval is widened in proportion.

    >>> import numpy as np
    >>> from nqflib.quadrature import Locked, RankCurve
    >>> values = np.geomspace(1e-4, 1, 200)
    >>> ranks = values ** (-1 / 0.8) - 0.5                                      # lambda = r^-0.8
    >>> curve = RankCurve(values, ranks, ranks, 0 * ranks, Locked(0, 0), 1, 1_000_000)
    >>> round(tail(curve, (10, 5000)).exponent, 3)
    0.8

Source: Meterez et al. 2026 fit such exponents by eye or by ordinary least squares; covariance and intervals are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from nqflib.arguments import Array
from nqflib.power_laws import local_exponents
from nqflib.quadrature import RankCurve, Run, measure_band

_POINTS = 12  # of a fit; more would only resolve the smoothing of the quadrature
_CONFIDENCE = 0.95
_OPENING = 0.1  # standard deviation of the middle of the bounds, of their opening: 0.06 to 0.10 for depths of 60 to 150


class TailFit(NamedTuple):
    """lambda_r ~ r^-exponent in a window of ranks."""

    exponent: float
    interval: tuple[float, float]  # 95 %
    coefficient: float  # lambda = coefficient r^-exponent
    misfit: float  # mean square of the residuals over what the covariance expects; far above 1: not one power law
    ranks: Array  # (n,) middle of each sliding window of a factor of 4
    slopes: Array  # (n,) exponent in each; empty where the window is narrower than that


class BreakFit(NamedTuple):
    """lambda_r ~ r^-below up to the rank of the break and ~ r^-above beyond it, continuous there."""

    rank: float
    interval: tuple[float, float]  # 95 %; its ends are the window's where the break cannot be told
    below: float
    above: float
    gain: float  # how much better than one power law: 1 - (sum of squares with) / (without the break)


class SourceCurve(NamedTuple):
    """Energy of the gradient per eigenvalue, over twice the eigenvalue, in bands of eigenvalues; arrays (B,)."""

    ranks: Array
    eigenvalues: Array
    terms: Array  # g_r^2 / (2 lambda_r)
    errors: Array  # standard deviation of ln terms, as far as the starts and the bounds go


class SourceFit(NamedTuple):
    """g_r^2 / (2 lambda_r) ~ r^-exponent in a window of ranks."""

    exponent: float
    interval: tuple[float, float]  # 95 %
    curve: SourceCurve


def tail(curve: RankCurve, window: tuple[float, float]) -> TailFit:
    """Fit one power law between two ranks. Raises `ValueError` for a window outside the positive part of the curve."""
    r, y, covariance = _points(curve, window)
    x = np.log(r)
    fit = _least_squares(np.stack([np.ones_like(x), -x], 1), y, covariance)
    alpha, wide = fit.values[1], fit.widths[1]
    slopes = (np.empty(0), np.empty(0))
    if window[1] / window[0] > 4 * (1 + 1e-9):
        ranks, log_values, _ = _steps(curve)
        slopes = local_exponents(ranks, np.exp(log_values), factor=4.0, window=window)
    return TailFit(alpha, (alpha - wide, alpha + wide), float(np.exp(fit.values[0])), fit.misfit, *slopes)


def eigenvalues_at(curve: RankCurve, ranks: ArrayLike) -> Array:
    """The positive eigenvalues (K,) at these ranks, by the middle of the bounds, with straight lines in logarithms."""
    at, log_values, _ = _steps(curve)
    return np.exp(np.interp(np.log(ranks), np.log(at), log_values))


def spectral_break(curve: RankCurve, window: tuple[float, float]) -> BreakFit:
    """Fit two power laws that meet at a rank within the window, by profiling the sum of squares over that rank.

    The interval holds the ranks whose sum of squares is within the quantile of F(1, points - 4) of the least one.
    """
    r, y, covariance = _points(curve, window, 2 * _POINTS)
    x = np.log(r)
    whitened = np.linalg.cholesky(np.linalg.inv(covariance)).T
    candidates = np.exp(np.linspace(x[2], x[-3], 121))
    squares, slopes = [], []
    for rank in candidates:
        beyond = np.maximum(x - np.log(rank), 0)
        design = whitened @ np.stack([np.ones_like(x), -x, -beyond], 1)
        values = np.linalg.lstsq(design, whitened @ y, rcond=None)[0]
        squares.append(((whitened @ y - design @ values) ** 2).sum())
        slopes.append((values[1], values[1] + values[2]))
    one = _least_squares(np.stack([np.ones_like(x), -x], 1), y, covariance)
    best = int(np.argmin(squares))
    freedom = x.size - 4
    scale = max(squares[best] / freedom, 1.0)
    inside = candidates[np.array(squares) <= squares[best] + float(stdtrit(freedom, 0.975)) ** 2 * scale]
    ends = (
        float(inside[0]) if inside[0] > candidates[0] else float(window[0]),
        float(inside[-1]) if inside[-1] < candidates[-1] else float(window[1]),
    )
    gain = 1 - squares[best] / (one.misfit * (x.size - 2))
    below, above = map(float, slopes[best])
    return BreakFit(float(candidates[best]), ends, below, above, float(gain))


def source_curve(
    gradient: Run, gradient_norm: float, curve: RankCurve, window: tuple[float, float], *, bands: int = 20
) -> SourceCurve:
    """Return g_r^2 / (2 lambda_r) against the rank r, in bands of positive eigenvalues.

    In each band it is (energy of the gradient) / (number of eigenvalues) / (2 lambda), from the measure of the run that
    started at the gradient and from the rank curve of random starts; lambda is the geometric middle of the band. The
    recipe is ours: the paper's code for this curve is not public.

    Args:
        gradient: (alphas, betas) of the run whose start was the (preconditioned) gradient.
        gradient_norm: |g|.
        curve: of the same operator.
        window: first and last rank.
        bands: number of bands, even in ln lambda; those without a rank or without energy are left out.
    """
    positive = curve.values > 0
    values, ranks = curve.values[positive], curve.ranks[positive]
    if not (values.size > 1 and ranks[-1] <= window[0] < window[1] <= ranks[0]):
        raise ValueError(f"window must lie within the ranks of positive eigenvalues, got {window}")
    ends = np.interp([-window[1], -window[0]], -ranks, values)
    edges = np.geomspace(ends[0], ends[1], bands + 1)
    band = measure_band(*gradient, edges)
    energy, open_energy = gradient_norm**2 * band.middle, gradient_norm**2 * (band.upper - band.lower)
    at_edges = np.interp(edges, values, ranks)
    open_ranks = np.interp(edges, values, (curve.upper - curve.lower)[positive])
    count, held = -np.diff(at_edges), -np.diff(energy)
    middle = np.sqrt(edges[:-1] * edges[1:])
    keep = (count > 0) & (held > 0)
    index = np.sqrt((at_edges[:-1] + 0.5) * (at_edges[1:] + 0.5))
    terms = held / np.where(keep, count, 1) / (2 * middle)
    # Each component of the gradient counts as one Gaussian draw, and so does each component of a start.
    drawn = 2 / np.maximum(count, 1) * (1 + 1 / curve.starts)
    opened = sum(
        (wide[:-1] ** 2 + wide[1:] ** 2) / np.where(keep, part, 1) ** 2
        for wide, part in ((open_energy, held), (open_ranks, count))
    )
    errors = np.sqrt(drawn + _OPENING**2 * opened)
    return SourceCurve(*(part[keep][::-1] for part in (index, middle, terms, errors)))


def source(
    gradient: Run, gradient_norm: float, curve: RankCurve, window: tuple[float, float], *, bands: int = 20
) -> SourceFit:
    """Fit the source exponent between two ranks; arguments as for `source_curve`."""
    found = source_curve(gradient, gradient_norm, curve, window, bands=bands)
    if found.ranks.size < 4:
        raise ValueError(f"window must hold at least 4 bands with ranks and energy, got {found.ranks.size}")
    x = np.log(found.ranks)
    fit = _least_squares(np.stack([np.ones_like(x), -x], 1), np.log(found.terms), np.diag(found.errors**2))
    return SourceFit(fit.values[1], (fit.values[1] - fit.widths[1], fit.values[1] + fit.widths[1]), found)


class _Fit(NamedTuple):
    values: list[float]
    widths: list[float]  # half of the 95 % intervals
    misfit: float


def _least_squares(design: Array, y: Array, covariance: Array) -> _Fit:
    whitened = np.linalg.cholesky(np.linalg.inv(covariance)).T
    A, b = whitened @ design, whitened @ y
    values = np.linalg.lstsq(A, b, rcond=None)[0]
    freedom = y.size - design.shape[1]
    misfit = float(((b - A @ values) ** 2).sum() / freedom)
    widths = np.sqrt(np.diag(np.linalg.inv(A.T @ A)) * max(misfit, 1.0))
    return _Fit(values.tolist(), (float(stdtrit(freedom, (1 + _CONFIDENCE) / 2)) * widths).tolist(), misfit)


def _points(curve: RankCurve, window: tuple[float, float], count: int = _POINTS) -> tuple[Array, Array, Array]:
    """Ranks (P,) even in ln r, ln lambda there, and its covariance (P, P) up to what the exponent's size changes."""
    ranks, log_values, opening = _steps(curve)
    if ranks.size < 3 or not ranks[0] <= window[0] < window[1] <= ranks[-1]:
        within = f"{ranks[0]:.3g} to {ranks[-1]:.3g}" if ranks.size else "none"
        raise ValueError(f"window must lie within the ranks of positive eigenvalues ({within}), got {window}")
    r = np.geomspace(*window, count)
    y = np.interp(np.log(r), np.log(ranks), log_values)
    opening = np.interp(r, ranks, opening)
    largest, smallest = np.maximum(r[:, None], r), np.minimum(r[:, None], r)
    free = np.maximum(1 - curve.locked.top / smallest, 0)  # locked eigenvalues are counted without noise
    relative = 2 / curve.starts * np.maximum(1 / largest - 1 / curve.size, 0) * free
    relative += np.diag((_OPENING * opening / r) ** 2 + (0.5 / r) ** 2)
    steepness = max(float(-np.polyfit(np.log(r), y, 1)[0]), 1e-3)
    return r, y, steepness**2 * relative


def _steps(curve: RankCurve) -> tuple[Array, Array, Array]:
    """Rising ranks of the positive eigenvalues, the mean of ln lambda over the values at each, and of the opening."""
    positive = (curve.values > 0) & (curve.ranks > 0)
    # r eigenvalues lie above a value between those of index r and r + 1: the middle of a step has index r + 1/2.
    steps, owner = np.unique(curve.ranks[positive], return_inverse=True)
    held = np.bincount(owner)
    log_values = np.bincount(owner, np.log(curve.values[positive])) / held
    return steps + 0.5, log_values, np.bincount(owner, (curve.upper - curve.lower)[positive]) / held
