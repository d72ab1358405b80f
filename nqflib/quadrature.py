"""What a tridiagonal matrix says about a spectrum: Gauss and Gauss-Radau rules, ranks with bands, densities.

m steps of Lanczos on a symmetric matrix C with start v give T = tridiag(alphas, betas). With C q_i = lambda_i q_i,

    mu = sum_i (q_i . v)^2 delta(lambda_i),      int p dmu = sum_j w_j p(theta_j)   for every p of degree 2 m - 1,

theta_j being the eigenvalues of T and w_j the squared first components of its eigenvectors (v has length 1). mu is the
measure *of the start*: for a Gaussian start N mu(above lambda) counts eigenvalues on average, with a variance that no
depth removes; for the gradient |g|^2 mu is the gradient's energy in the eigenbasis.

`alphas` (m,) is the diagonal and `betas` (m,) the off-diagonal followed by the length of the residual vector, which the
bounds need. Only NumPy and SciPy are used. Exponents are in `nqflib.tails`.

    >>> rule = gauss([2.0, 2.0], [1.0, 0.0])
    >>> rule.nodes.round(12).tolist(), rule.weights.round(12).tolist()
    ([1.0, 3.0], [0.5, 0.5])

Sources: Golub and Meurant 1994 (rules and bounds); Meterez et al. 2026 (the rank curve, read from their code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import eigh_tridiagonal

from nqflib.arguments import Array, as_vector

LOCKED = 1e-6  # residual over |theta| below which a Ritz value counts as an eigenvalue
_ROUNDING = 1e-13  # of T's entries and of sums of weights, beside which bounds would have no width

Run = tuple[ArrayLike, ArrayLike]  # alphas, betas


class Rule(NamedTuple):
    """A Gauss rule; arrays (m,) in increasing order of the nodes."""

    nodes: Array  # Ritz values theta_j
    weights: Array  # w_j, summing to 1
    residuals: Array  # |C y_j - theta_j y_j| of the Ritz vectors: an eigenvalue is at most this far away


class Locked(NamedTuple):
    """How many Ritz values at either end are eigenvalues to `LOCKED` of their size, without a gap."""

    bottom: int
    top: int


class MeasureBand(NamedTuple):
    """Bounds of the start's own measure strictly above each value, arrays (K,); values increase, bounds fall."""

    values: Array
    lower: Array
    upper: Array

    @property
    def middle(self) -> Array:
        return (self.lower + self.upper) / 2


@dataclass(frozen=True)
class RankCurve:
    """How many of N eigenvalues lie above each value, from one or several random starts; arrays (K,)."""

    values: Array  # increasing
    lower: Array  # average over the starts of the lower bound of what each start sees
    upper: Array
    sampling: Array  # standard deviation of that average about the true rank; 0 where ranks are locked
    locked: Locked  # by every start
    starts: int
    size: int  # N

    @property
    def ranks(self) -> Array:
        """The middle of the bounds."""
        return (self.lower + self.upper) / 2

    def band(self, deviations: float = 2.0) -> tuple[Array, Array]:
        """The bounds, widened by so many standard deviations of the sampling, within [0, N]."""
        wide = deviations * self.sampling
        return np.maximum(self.lower - wide, 0), np.minimum(self.upper + wide, self.size)


# ---------------------------------------------------------------------------------------- rules


def _tridiagonal(run: Run) -> tuple[Array, Array]:
    """Return alphas (m,) and betas (m,) as float64, or raise ValueError."""
    alphas = as_vector("alphas", run[0])
    betas = as_vector("betas", run[1], alphas.size)
    if (betas < 0).any():
        raise ValueError(f"betas must not be negative, got {betas.min()}")
    return alphas, betas


def _eigen(diagonal: Array, off_diagonal: Array) -> tuple[Array, Array]:
    if not off_diagonal.size:
        return diagonal, np.ones((1, 1))
    found: Any = eigh_tridiagonal(diagonal, off_diagonal)
    return found


def gauss(alphas: ArrayLike, betas: ArrayLike) -> Rule:
    """Return the Gauss rule of the start's measure: exact for polynomials of degree 2 m - 1.

    Args:
        alphas: (m,), the diagonal of T.
        betas: (m,), its off-diagonal and then the length of the residual.
    """
    a, b = _tridiagonal((alphas, betas))
    nodes, vectors = _eigen(a, b[:-1])
    return Rule(nodes, vectors[0] ** 2, b[-1] * np.abs(vectors[-1]))


def locked_ends(rule: Rule, tolerance: float = LOCKED) -> Locked:
    """Count the Ritz values whose residual is below `tolerance` |theta|, contiguous from each end.

    An eigenvalue of higher multiplicity counts once, since a Krylov space holds one vector of its eigenspace, until
    rounding has brought in others: at great depth it may count up to its multiplicity.
    """
    good = rule.residuals < tolerance * np.abs(rule.nodes)
    if good.all():
        return Locked(0, good.size)
    return Locked(int(np.argmin(good)), int(np.argmin(good[::-1])))


def gauss_radau(alphas: ArrayLike, betas: ArrayLike, values: ArrayLike) -> tuple[Array, Array]:
    """Return for each value the mass strictly above it and the mass at it, (K,) each, of the rule with a node there.

    The rule has m + 1 nodes, from T extended by beta_m and a last diagonal entry lambda + beta_m^2 / d_m, with
    d_1 = alpha_1 - lambda, d_j = alpha_j - lambda - beta_(j-1)^2 / d_(j-1).
    """
    a, b = _tridiagonal((alphas, betas))
    at = as_vector("values", values)
    d = a[0] - at
    with np.errstate(divide="ignore", over="ignore"):  # d = 0 gives an infinite quotient and the right next d
        for alpha, beta in zip(a[1:], b[:-1], strict=True):
            d = alpha - at - beta**2 / d
        last = at + b[-1] ** 2 / d if b[-1] else at
    above, mass = np.empty_like(at), np.empty_like(at)
    for k, entry in enumerate(last):
        if np.isfinite(entry):
            nodes, vectors = _eigen(np.append(a, entry), b)
        else:  # the value is a node of the Gauss rule, which is the rule sought
            nodes, vectors = _eigen(a, b[:-1])
        weights, chosen = vectors[0] ** 2, int(np.argmin(np.abs(nodes - at[k])))
        above[k], mass[k] = weights[chosen + 1 :].sum(), weights[chosen]
    return above, mass


def measure_band(alphas: ArrayLike, betas: ArrayLike, values: ArrayLike) -> MeasureBand:
    """Bound the start's own measure mu(strictly above lambda) = sum over lambda_i > lambda of (q_i . v)^2.

    Among all measures with these 2 m moments the Gauss-Radau rule with a node at lambda has the least mass above lambda
    and the most at or above it (Chebyshev, Markov, Stieltjes). The bounds hold for the measure of the *start*, whatever
    its meaning, and are widened by the rounding of a sum of weights.

    Args:
        alphas, betas: as in `gauss`.
        values: (K,), sorted here.
    """
    at = np.sort(as_vector("values", values))
    above, mass = gauss_radau(alphas, betas, at)
    # The measure falls with lambda, so a bound at one value bounds the others on its side too.
    lower = np.maximum.accumulate(above[::-1])[::-1]
    upper = np.minimum.accumulate(above + mass)
    return MeasureBand(at, np.maximum(lower - _ROUNDING, 0), np.minimum(upper + _ROUNDING, 1))


def symlog_values(low: float, high: float, count: int = 400, linear: float = 1e-8) -> Array:
    """`count` increasing values from `low` to `high`, even in sign(x) ln(1 + |x| / linear)."""
    if not (np.isfinite([low, high]).all() and low < high and linear > 0 and count > 1):
        raise ValueError(f"low < high, count > 1 and linear > 0 are needed, got {low}, {high}, {count}, {linear}")
    ends = np.sign([low, high]) * np.log1p(np.abs([low, high]) / linear)
    even = np.linspace(ends[0], ends[1], count)
    return np.sign(even) * linear * np.expm1(np.abs(even))


# ---------------------------------------------------------------------------------------- ranks


def _size(size: int, m: int) -> int:
    if not (isinstance(size, (int, np.integer)) and size >= m):
        raise ValueError(f"size must be the dimension of the matrix, an integer of at least the depth {m}, got {size}")
    return int(size)


def rank_curve(
    runs: Sequence[Run], size: int, values: ArrayLike | None = None, *, tolerance: float = LOCKED
) -> RankCurve:
    """Count the eigenvalues above each value from random starts, with bounds and the sampling's deviation.

    The k locked Ritz values weigh 1 each, so their ranks are exact; the other N - k are spread over each start's own
    measure, bounded by Gauss-Radau rules, and averaged over the S starts. A Gaussian start counts r eigenvalues with a
    relative noise, which its own bounds do not know:

        sd = sqrt(2 r (1 - r/N) / S)

    Args:
        runs: (alphas, betas) of each start; every start Gaussian, or uniform on the sphere.
        size: N.
        values: (K,); 400 symlog values over the Ritz values' range if not given.
        tolerance: residual over |theta| of a locked Ritz value.
    """
    if not runs:
        raise ValueError("runs must hold at least one (alphas, betas)")
    rules = [gauss(*run) for run in runs]
    N = _size(size, max(rule.nodes.size for rule in rules))
    ends = [locked_ends(rule, tolerance) for rule in rules]
    bottom, top = min(e.bottom for e in ends), min(e.top for e in ends)
    if values is None:
        low, high = min(r.nodes[0] for r in rules), max(r.nodes[-1] for r in rules)
        margin = 1e-3 * (high - low) or 1.0
        values = symlog_values(low - margin, high + margin)
    at = np.sort(as_vector("values", values))
    exact = np.mean([np.concatenate([r.nodes[:bottom], r.nodes[r.nodes.size - top :]]) for r in rules], axis=0)
    lowest, highest = exact[:bottom], exact[bottom:]
    bounds = np.mean([_ranks_of(run, r, at, N, bottom, top) for run, r in zip(runs, rules, strict=True)], axis=0)
    at_head = at >= (highest[0] if top else np.inf)
    at_foot = at < (lowest[-1] if bottom else -np.inf)
    counted = np.where(at_head, (highest > at[:, None]).sum(1), N - (lowest <= at[:, None]).sum(1)).astype(np.float64)
    inside = ~(at_head | at_foot)
    lower, upper = (np.where(inside, b, counted) for b in bounds)
    r = (lower + upper) / 2
    sampling = np.where(inside, np.sqrt(2 * r * np.maximum(1 - r / N, 0) / len(runs)), 0)
    return RankCurve(at, lower, upper, sampling, Locked(bottom, top), len(runs), N)


def _ranks_of(run: Run, rule: Rule, at: Array, N: int, bottom: int, top: int) -> tuple[Array, Array]:
    """Bounds of one start's count, with the locked ends taken out of its measure and put back as whole eigenvalues."""
    band = measure_band(*run, at)
    last = rule.weights.size - top
    at_top, rest = rule.weights[last:].sum(), rule.weights[bottom:last].sum()
    if rest <= _ROUNDING:
        return np.full(at.size, float(top)), np.full(at.size, float(N - bottom))
    lower, upper = (top + (N - top - bottom) * np.clip((b - at_top) / rest, 0, 1) for b in (band.lower, band.upper))
    return lower, upper


def node_ranks(rule: Rule, size: int, *, tolerance: float = LOCKED) -> tuple[Array, Array]:
    """Return (ranks, nodes), nodes falling: the rank curve of one random start as the paper draws it.

    Locked nodes weigh 1, the others share the rest of N by their weights. With cumulative weights e_0 = 0, e_1, ...
    node j has rank sqrt((e_(j-1) + 1/2) (e_j + 1/2)). For the negative end, pass the rule of -C.
    """
    N, ends = _size(size, rule.nodes.size), locked_ends(rule, tolerance)
    counts = rule.weights.copy()
    free = slice(ends.bottom, counts.size - ends.top)
    counts[: ends.bottom] = counts[free.stop :] = 1
    counts[free] *= (N - ends.bottom - ends.top) / max(counts[free].sum(), np.finfo(np.float64).tiny)
    edges = np.concatenate([[0], np.cumsum(counts[::-1])]) + 0.5
    return np.sqrt(edges[:-1] * edges[1:]), rule.nodes[::-1].copy()


# -------------------------------------------------------------------------------------- density


def density(rules: Sequence[Rule], values: ArrayLike, width: float, *, decades: bool = False) -> Array:
    """Return the spectral density (K,) of the average over `rules`, smoothed by a Gaussian, at `values` (K,).

        sum_j w_j exp(-(x - theta_j)^2 / (2 width^2)) / sqrt(2 pi width^2)

    Its integral is 1; multiply by N for counts. With `decades`, x = log10(value) and `width` is in decades: the density
    per decade of the positive part, whose integral is that part's mass.
    """
    at = as_vector("values", values, positive=decades)
    if not (rules and width > 0):
        raise ValueError(f"rules must not be empty and width be positive, got {len(rules)} rules and width {width}")
    total = np.zeros(at.size)
    for rule in rules:
        nodes, weights = rule.nodes, rule.weights
        if decades:
            nodes, weights = np.log10(nodes[nodes > 0]), weights[nodes > 0]
        x = (np.log10(at) if decades else at)[:, None] - nodes
        total += np.exp(-0.5 * (x / width) ** 2) @ weights
    return total / (len(rules) * width * np.sqrt(2 * np.pi))
