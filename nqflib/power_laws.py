"""Power laws of the loss in training time: predicted exponents, fits with uncertainty, and the floor of a loss.

Many modes with power-law rates r_k = k^-a2 and strengths V_k = k^-a1 make the excess loss fall as

    E(t) ~ t^-gamma,   gamma = (a1 - 1)/a2     as the initial abundance goes to 0 (Ziyin et al. 2026, eq. 46)

A fit at finite abundance, in a finite window and with finitely many modes has another exponent, which
`window_exponent` predicts. Exponents here are positive for a falling loss.

Example: with the paper's a1 = 2, a2 = 0.8 and 1000 modes, the last mode makes the law between modes 10 and 100
steeper than 1.25 even though every switch-on time is exactly proportional to k^0.8.

>>> feature_wise_exponent(2.0, 0.8)
1.25
>>> round(window_exponent(2.0, 1000, (10, 100), (10**0.8, 100**0.8)), 3)
1.302
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, least_squares
from scipy.special import stdtrit

from nqflib.arguments import Array, as_vector


class LocalExponents(NamedTuple):
    """Exponents in windows that slide along the curve."""

    times: Array  # (N,) geometric middle of each window
    exponents: Array  # (N,)


@dataclass(frozen=True)
class PowerLawFit:
    """Least squares of ln L on ln t: L ~ amplitude t^-exponent."""

    exponent: float
    amplitude: float
    uncertainty: float  # standard error of the exponent by the jackknife over contiguous blocks of the window
    residual: float  # root mean square of ln L less the line
    points: int


class Floor(Enum):
    """What the data say about the floor of a loss."""

    DETERMINED = "the data bound the floor from both sides"
    UPPER_BOUND = "the lowest floor allowed fits as well: only an upper bound is known"
    UNDETERMINED = "every floor fits as well: the data do not fall enough to tell"


@dataclass(frozen=True)
class FloorProfile:
    """Profile of L = L_inf + A t^-gamma over L_inf, the errors of ln L being independent and of one size."""

    floor: float  # best L_inf
    exponent: float  # gamma at the best floor
    amplitude: float  # A at the best floor
    interval: tuple[float, float]  # profile-likelihood interval of L_inf at the confidence asked for
    exponent_interval: tuple[float, float]  # gamma at its two ends
    outcome: Floor
    floors: Array  # (N,) floors from a little below the interval to a little above it
    exponents: Array  # (N,) best gamma given each floor
    deviances: Array  # (N,) n ln(S/S_min), S the sum of squared residuals of ln L


# -------------------------------------------------------------------------------- predictions


def _positive(**values: float) -> None:
    """Raise ValueError unless every value is finite and positive."""
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive, got {value}")


def feature_wise_exponent(strength_decay: float, rate_decay: float) -> float:
    """Return (a1 - 1)/a2 for V_k ~ k^-a1, a1 > 1, and rates ~ k^-a2 (Ziyin et al. 2026, eq. 46)."""
    _positive(strength_decay=strength_decay - 1, rate_decay=rate_decay)
    return (strength_decay - 1) / rate_decay


def sample_wise_exponent(target_decay: float, growth_decay: float) -> float:
    """Return (2 g1 - 1)/g2 for y_mu ~ mu^-g1, g1 > 1/2, and zeta_mu ~ mu^-g2 (Ziyin et al. 2026, eq. 49)."""
    _positive(target_decay=target_decay - 0.5, growth_decay=growth_decay)
    return (2 * target_decay - 1) / growth_decay


def fourier_exponent(theta: float, beta: float) -> float:
    """Return (2 beta - 1)/(theta + beta), the Fourier MLP with scales k^-theta and target k^-beta (appendix C)."""
    _positive(beta=beta - 0.5, theta_plus_beta=theta + beta)
    return (2 * beta - 1) / (theta + beta)


def window_exponent(
    strength_decay: float, modes: float, window: tuple[float, float], switch_on: tuple[float, float]
) -> float:
    """Predict the exponent of a fit between the switch-on times of two modes, with finitely many modes.

        -ln[tail(k2)/tail(k1)] / ln[t_k2/t_k1],   tail(k) = k^(1-a1) - K^(1-a1)

    The tail is the loss still to be learned when mode k switches on. It holds the effect of the last mode K, and the
    times, taken at each mode's own initial abundance, hold that of a finite abundance.

    Args:
        strength_decay: a1 > 1 of V_k ~ k^-a1.
        modes: K, the number of modes; infinity is allowed.
        window: (k1, k2), 1 <= k1 < k2 < K.
        switch_on: (t_k1, t_k2), for instance from `lotka_volterra.half_saturation_times`.
    """
    k1, k2 = window
    t1, t2 = switch_on
    _positive(strength_decay=strength_decay - 1, switch_on=t1)
    if not 1 <= k1 < k2 < modes:
        raise ValueError(f"window must satisfy 1 <= k1 < k2 < modes = {modes}, got {window}")
    if not t1 < t2 < np.inf:
        raise ValueError(f"switch_on must be two finite, increasing times, got {switch_on}")
    power = 1 - strength_decay
    tails = np.array([k1, k2], dtype=np.float64) ** power - np.float64(modes) ** power
    return float(-np.log(tails[1] / tails[0]) / np.log(t2 / t1))


def local_exponent(
    strength_decay: float, rate_decay: float, log_ratio: ArrayLike, *, abundance_decay: float = 0.0
) -> Array:
    """Predict the local slope k_eff of infinitely many modes at a finite abundance (appendix, eq. 292).

        k_eff = (a1 - 1) / (a2 - (a1 - a2 - b0)/ln(r_k / (C_kk z_k(0)))),   z_k(0) ~ k^-b0

    The paper prints it for b0 = 0. It follows from d ln t_k / d ln k with t_k = ln(r_k/(C_kk z_k(0)))/r_k.

    Args:
        strength_decay, rate_decay: a1 > 1 and a2 > 0.
        log_ratio: ln(r_k / (C_kk z_k(0))) of the mode that switches on at the time in question; any shape.
        abundance_decay: b0.

    Returns:
        Exponents in the shape of `log_ratio`; infinite or negative where t_k does not grow with k.
    """
    _positive(strength_decay=strength_decay - 1, rate_decay=rate_decay)
    ratio = np.asarray(log_ratio, dtype=np.float64)
    if not (ratio > 0).all():
        raise ValueError("log_ratio must be positive: z_k(0) is to be below r_k / C_kk")
    with np.errstate(divide="ignore"):
        return (strength_decay - 1) / (rate_decay - (strength_decay - rate_decay - abundance_decay) / ratio)


# --------------------------------------------------------------------------------------- fits


def _curve(times: ArrayLike, values: ArrayLike, least: int) -> tuple[Array, Array]:
    """Return ln t and ln L of a curve of at least `least` points with increasing times, or raise ValueError."""
    t = as_vector("times", times, positive=True)
    loss = as_vector("values", values, t.size, positive=True)
    if (np.diff(t) <= 0).any():
        raise ValueError("times must be increasing")
    if t.size < least:
        raise ValueError(f"at least {least} points are needed, got {t.size}")
    return np.log(t), np.log(loss)


def _in_window(x: Array, y: Array, window: tuple[float, float] | None, points: int | None) -> tuple[Array, Array]:
    """Cut ln t, ln L to a window of times, and resample evenly in ln t if `points` is given."""
    if window is not None:
        _positive(window=window[0])
        begin, end = np.log(window)
        if not begin < end or (points is not None and (begin < x[0] - 1e-9 or end > x[-1] + 1e-9)):
            raise ValueError(f"window must be increasing and within the times {np.exp(x[[0, -1]])}, got {window}")
    else:
        begin, end = x[0], x[-1]
    if points is not None:
        grid = np.linspace(begin, end, points)
        return grid, np.interp(grid, x, y)
    inside = (x >= begin) & (x <= end)
    return x[inside], y[inside]


def fit_power_law(
    times: ArrayLike,
    values: ArrayLike,
    *,
    window: tuple[float, float] | None = None,
    points: int | None = None,
    blocks: int = 10,
) -> PowerLawFit:
    """Fit L ~ A t^-gamma by least squares of ln L on ln t.

    The uncertainty is the jackknife's standard error over `blocks` contiguous pieces of the window, each left out in
    turn. The textbook error of a slope takes the residuals as independent, and a staircase breaks that: its residuals
    keep their sign for a whole step. The jackknife tolerates any dependence shorter than a block. It does not know
    of a bend of the whole curve; compare `local_exponents` for that.

    Args:
        times: (T,), increasing and positive.
        values: (T,), positive.
        window: (t1, t2); the whole curve if not given.
        points: resample to this many points evenly spaced in ln t, so that dense records do not weigh more; the
            records in the window are taken as they are if not given.
        blocks: at least 2.
    """
    x, y = _in_window(*_curve(times, values, 3), window, points)
    if blocks < 2 or x.size < 2 * blocks:
        raise ValueError(f"blocks must be at least 2 with two points each, got {blocks} blocks of {x.size} points")
    slope, intercept = np.polyfit(x, y, 1)
    owner = np.minimum(((x - x[0]) / (x[-1] - x[0]) * blocks).astype(int), blocks - 1)
    present = np.unique(owner)
    if present.size < 2:
        raise ValueError("window must hold points in at least two blocks")
    without = np.array([np.polyfit(x[owner != block], y[owner != block], 1)[0] for block in present])
    variance = (present.size - 1) / present.size * ((without - without.mean()) ** 2).sum()
    residual = float(np.sqrt(np.mean((y - slope * x - intercept) ** 2)))
    return PowerLawFit(-float(slope), float(np.exp(intercept)), float(np.sqrt(variance)), residual, x.size)


def local_exponents(
    times: ArrayLike,
    values: ArrayLike,
    *,
    factor: float = 10.0,
    window: tuple[float, float] | None = None,
    count: int = 50,
) -> LocalExponents:
    """Fit the exponent in `count` windows [s, factor s] that slide along the curve.

    Their spread says whether there is one power law. Over less than a decade a staircase shows its single steps.

    Args:
        times, values, window: as in `fit_power_law`.
        factor: ratio of the ends of each window, above 1.
        count: number of windows, evenly spaced in ln t.
    """
    x, y = _curve(times, values, 3)
    begin, end = (x[0], x[-1]) if window is None else np.log(window)
    width = np.log(factor) if factor > 1 else np.nan
    if not width < end - begin:
        raise ValueError(
            f"factor must lie between 1 and {np.exp(end - begin):.3g}, the ratio of the ends, got {factor}"
        )
    starts = np.linspace(begin, end - width, count)
    slopes = np.empty(count)
    for i, start in enumerate(starts):
        piece = _in_window(x, y, (np.exp(start), np.exp(start + width)), 60)
        slopes[i] = -np.polyfit(*piece, 1)[0]
    return LocalExponents(np.exp(starts + width / 2), slopes)


# -------------------------------------------------------------------------------------- floors


def profile_floor(
    times: ArrayLike,
    values: ArrayLike,
    *,
    lowest: float = 0.0,
    confidence: float = 0.95,
    independent: int | None = None,
    count: int = 41,
) -> FloorProfile:
    """Profile the floor L_inf of L = L_inf + A t^-gamma by least squares of ln L.

    For each floor, S is the smallest sum over A > 0 and gamma > 0 of (ln L - ln(L_inf + A t^-gamma))^2. The interval
    holds the floors whose deviance n ln(S/S_min), that of Gaussian errors of ln L of one unknown size, is below the
    quantile of its distribution.

    Args:
        times: (T,), increasing and positive, at least 5.
        values: (T,), positive.
        lowest: smallest floor allowed, not negative.
        confidence: of the interval, between 0 and 1.
        independent: number n > 3 of independent points, T if not given. A smooth curve recorded densely has far
            fewer, and the interval is then too narrow by the root of the ratio.
        count: number of floors in the returned profile.
    """
    x, y = _curve(times, values, 5)
    n = x.size if independent is None else independent
    if not n > 3:
        raise ValueError(f"independent must exceed the 3 parameters of the curve, got {n}")
    if not (0 < confidence < 1 and 0 <= lowest < np.exp(y.min())):
        raise ValueError(
            f"confidence must lie in (0, 1), got {confidence}, and lowest in [0, {np.exp(y.min())}), got {lowest}"
        )
    origin = x.mean()
    x = x - origin  # amplitudes at the middle of the curve keep A and gamma apart
    floor, start = _best_floor(x, y, lowest)
    smallest = _squares(x, y, floor, start)[0]
    # The level that is exact for a model linear in its three parameters: (n - 3)(S/S_min - 1) is then F-distributed
    # with 1 and n - 3 degrees of freedom, the square of Student's t. For many points it is the chi-squared quantile.
    level = n * float(np.log1p(stdtrit(n - 3, (1 + confidence) / 2) ** 2 / (n - 3)))
    rounding = x.size * 1e-30  # the rounding of an exact curve: below that no two floors can be told apart

    def deviance(value: float) -> float:
        return n * float(np.log((_squares(x, y, value, start)[0] + rounding) / (smallest + rounding)))

    top = float(np.exp(y.max()))
    ends = [_crossing(deviance, level, floor, bound) for bound in (lowest, top)]
    margin = 0.5 * (ends[1] - ends[0])
    floors = np.linspace(max(lowest, ends[0] - margin), min(top, ends[1] + margin), count)
    scanned = [_squares(x, y, value, start) for value in floors]
    best, low, high = (_squares(x, y, value, start)[1] for value in (floor, *ends))
    outcome = Floor.DETERMINED if ends[0] > lowest else Floor.UPPER_BOUND
    return FloorProfile(
        floor=floor,
        exponent=float(np.exp(best[1])),
        amplitude=float(np.exp(best[0] + np.exp(best[1]) * origin)),
        interval=(ends[0], ends[1]),
        exponent_interval=(float(np.exp(low[1])), float(np.exp(high[1]))),
        outcome=Floor.UNDETERMINED if ends[1] >= top else outcome,
        floors=floors,
        exponents=np.exp([p[1] for _, p in scanned]),
        deviances=n * np.log((np.array([s for s, _ in scanned]) + rounding) / (smallest + rounding)),
    )


def _squares(x: Array, y: Array, floor: float, start: Array) -> tuple[float, Array]:
    """Return S and (ln A, ln gamma) of the best curve with this floor."""
    log_floor = np.log(floor) if floor > 0 else -np.inf

    def residuals(p: Array) -> Array:
        return np.logaddexp(log_floor, p[0] - np.exp(min(p[1], 5)) * x) - y

    def jacobian(p: Array) -> Array:
        gamma = np.exp(min(p[1], 5))  # beyond e^5 the power is a step at any resolution, and exp would overflow
        log_power = p[0] - gamma * x
        share = np.exp(log_power - np.logaddexp(log_floor, log_power))
        return np.stack([share, -share * gamma * x], axis=1)

    derivative: Any = jacobian
    found = least_squares(residuals, start, derivative, method="lm", xtol=1e-11, ftol=1e-11, gtol=1e-11)
    return float(2 * found.cost), found.x


def _best_floor(x: Array, y: Array, lowest: float) -> tuple[float, Array]:
    """Return the best floor, at least `lowest`, and its (ln A, ln gamma)."""
    # Given gamma the curve is linear in floor and A: scan gamma by weighted linear least squares, then polish.
    loss = np.exp(y)
    trials = []
    for gamma in np.geomspace(1e-2, 10, 40):
        power = np.exp(-gamma * x)
        columns = np.stack([1 / loss, power / loss], axis=1)
        floor, amplitude = np.linalg.lstsq(columns, np.ones_like(loss), rcond=None)[0]
        if floor < lowest:
            floor, shape = lowest, columns[:, 1]
            amplitude = shape @ (1 - floor / loss) / (shape @ shape)
        if amplitude > 0:
            fit = floor * columns[:, 0] + amplitude * columns[:, 1]
            trials.append((np.sum((fit - 1) ** 2), floor, np.log(amplitude), np.log(gamma)))
    if not trials:
        raise ValueError("values must fall with time: no L_inf + A t^-gamma with A > 0 comes near them")
    _, floor, log_amplitude, log_gamma = min(trials)

    def residuals(p: Array) -> Array:
        return np.log(p[0] + np.exp(p[1] - np.exp(p[2]) * x)) - y

    begin = np.array([max(floor, lowest + 1e-3 * (loss.min() - lowest)), log_amplitude, log_gamma])
    bounds = ([lowest, -np.inf, -np.inf], [np.inf, np.inf, 5.0])
    scale = np.array([loss.min(), 1.0, 1.0])
    found = least_squares(residuals, begin, bounds=bounds, x_scale=scale, xtol=1e-15, ftol=1e-15, gtol=1e-15).x
    at_lowest, p = _squares(x, y, lowest, found[1:])  # an optimum on the bound is approached but not reached
    if at_lowest <= np.sum(residuals(found) ** 2):
        return lowest, p
    return float(found[0]), found[1:]


def _crossing(deviance: Callable[[float], float], level: float, floor: float, bound: float) -> float:
    """Return where the deviance passes `level` on the way from the best floor to `bound`, or `bound` if it does not."""
    inside, share = floor, 1e-9
    while deviance(outside := floor + share * (bound - floor)) <= level:
        if share == 1:
            return float(bound)
        inside, share = outside, min(4 * share, 1.0)
    crossing: Any = brentq(lambda value: deviance(value) - level, inside, outside)
    return float(crossing)
