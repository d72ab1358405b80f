"""The loss law L(T) = L_inf + A T^-gamma, and how little a loss curve may say about it.

For a given gamma the law is linear in L_inf and A, so that the sum of squared residuals of L is a function of gamma
alone,

    S(gamma) = min over L_inf >= 0, A >= 0 of sum_i (L_i - L_inf - A T_i^-gamma)^2
    R^2      = 1 - S / sum_i (L_i - mean)^2

and one curve answers both questions: which gamma is best, and which others are as good. `power_laws.profile_floor`
does the same for ln L and the other way round, profiling the floor. Source of the law: Meterez et al. 2026.

    >>> T = np.geomspace(1, 100, 30)
    >>> law = fit_loss_law(T, 2.5 + 1.5 * T**-0.7)
    >>> round(law.exponent, 3), round(law.floor, 3)
    (0.7, 2.5)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize_scalar
from scipy.special import stdtrit

from nqflib.arguments import Array, as_vector

EXPONENTS = (0.01, 10.0)  # gammas that are looked at; an interval that reaches an end is open there
_GRID = np.geomspace(*EXPONENTS, 120)


class LossLaw(NamedTuple):
    """The best law, and two intervals of exponents around it, in `EXPONENTS` at most."""

    floor: float  # L_inf
    amplitude: float  # A, of T in units of its geometric mean
    exponent: float  # gamma
    r2: float
    interval: tuple[float, float]  # by profile likelihood, errors of L independent and of one size
    equivalent: tuple[float, float]  # exponents whose best fit has an R^2 at most `tolerance` below the best


class FixedFloor(NamedTuple):
    """The best law with its floor given."""

    exponent: float
    r2: float


def fit_loss_law(
    tokens: ArrayLike,
    loss: ArrayLike,
    *,
    independent: int | None = None,
    confidence: float = 0.95,
    tolerance: float = 0.01,
) -> LossLaw:
    """Fit the law by least squares of L.

    Args:
        tokens: T, (n,), increasing and positive, n at least 5; any unit.
        loss: L, (n,), in nats.
        independent: how many of the n points are independent, above 3; n if not given. Averages of the weights that
            overlap have fewer, and an interval from all of them is too narrow.
        confidence: of `interval`, between 0 and 1.
        tolerance: of `equivalent`, a difference of R^2.

    Raises:
        ValueError: for curves or numbers that are not as above.
    """
    x, y = _curve(tokens, loss)
    n = x.size if independent is None else independent
    if not 3 < n <= x.size:
        raise ValueError(f"independent must lie in 4 to {x.size}, got {n}")
    if not (0 < confidence < 1 and tolerance > 0):
        raise ValueError(f"confidence must lie in (0, 1) and tolerance be positive, got {confidence} and {tolerance}")

    def squares(gamma: float) -> float:
        return _free_floor(x, y, gamma)[0]

    best = _smallest(squares, np.array([squares(gamma) for gamma in _GRID]))
    smallest, floor, amplitude = _free_floor(x, y, best)
    # Exact for a model linear in its three parameters: (n - 3)(S / S_min - 1) follows F with 1 and n - 3 degrees.
    level = smallest * (1 + float(stdtrit(n - 3, (1 + confidence) / 2)) ** 2 / (n - 3))
    total = float(np.sum((y - y.mean()) ** 2))
    rounding = 1e-24 * total  # the level for a curve that is exact
    return LossLaw(
        floor,
        amplitude,
        best,
        1 - smallest / total,
        _below(squares, best, level + rounding),
        _below(squares, best, smallest + tolerance * total),
    )


def fit_with_floor(tokens: ArrayLike, loss: ArrayLike, floor: float) -> FixedFloor:
    """The best gamma and its R^2 with L_inf = `floor`, in nats; arguments as for `fit_loss_law`."""
    x, y = _curve(tokens, loss)

    above = y - floor

    def squares(gamma: float | Array) -> Any:  # for one gamma, or a column of them (g, 1)
        power = np.exp(-gamma * x)
        amplitude = np.maximum(power @ above / (power * power).sum(-1), 0.0)
        return ((above - amplitude[..., None] * power) ** 2).sum(-1)

    best = _smallest(squares, squares(_GRID[:, None]))
    return FixedFloor(best, float(1 - squares(best) / np.sum((y - y.mean()) ** 2)))


def _curve(tokens: ArrayLike, loss: ArrayLike) -> tuple[Array, Array]:
    """ln T less its mean, and L."""
    t = as_vector("tokens", tokens, positive=True)
    y = as_vector("loss", loss, t.size)
    if t.size < 5 or (np.diff(t) <= 0).any():
        raise ValueError(f"tokens must be at least 5 increasing numbers, got {t.size}")
    x = np.log(t)
    return x - x.mean(), y


def _free_floor(x: Array, y: Array, gamma: float) -> tuple[float, float, float]:
    """S(gamma), and the floor and amplitude that reach it."""
    power = np.exp(-gamma * x)
    spread = power - power.mean()
    amplitude = max(float(spread @ y / (spread @ spread)), 0.0)
    floor = float(y.mean() - amplitude * power.mean())
    if floor < 0:  # the best floor is then zero, since S is convex in both
        floor, amplitude = 0.0, max(float(power @ y / (power @ power)), 0.0)
    return float(np.sum((y - floor - amplitude * power) ** 2)), floor, amplitude


def _smallest(squares: Callable[[float], float], values: Array) -> float:
    """Where `squares` is smallest, from its `values` on the grid and then between the neighbours of the best."""
    at = int(np.argmin(values))
    ends = (_GRID[max(at - 1, 0)], _GRID[min(at + 1, _GRID.size - 1)])
    found: Any = minimize_scalar(squares, bounds=ends, method="bounded", options={"xatol": 1e-9})
    return float(found.x) if found.fun <= values[at] else float(_GRID[at])


def _below(squares: Callable[[float], float], best: float, level: float) -> tuple[float, float]:
    """The ends of the interval around `best` in which `squares` stays below a level, within `EXPONENTS`."""
    return _end(squares, best, level, EXPONENTS[0]), _end(squares, best, level, EXPONENTS[1])


def _end(squares: Callable[[float], float], best: float, level: float, bound: float) -> float:
    inside = best
    for outside in np.geomspace(best, bound, _GRID.size)[1:]:
        if squares(outside) > level:
            crossing: Any = brentq(lambda gamma: squares(gamma) - level, inside, outside)
            return float(crossing)
        inside = outside
    return bound
