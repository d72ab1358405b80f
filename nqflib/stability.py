"""Where noisy training of a quadratic becomes unstable: learning rate against batch size, for Gaussian features.

The loss is 1/2 mean (x.w - y)^2 with features x ~ N(0, H) and a batch of B fresh samples a step; l_i are H's
eigenvalues. With averaged momentum b (0 for plain gradient descent),

    m <- b m + (1 - b) g,    w <- w - eta m,    E[g_i^2] = (1 + 1/B) l_i^2 E[w_i^2] + (l_i / B) sum_j l_j E[w_j^2],

so (E[w_i^2], E[w_i m_i], E[m_i^2]) of each mode obey a linear recursion of their own, and the sum over j couples all
modes by one number T. Training is stable in mean square if each mode is, and if the T that all modes return for T = 1,
their `gain`, is below 1. Without momentum that is

    sum_i (eta l_i / B) / (2 - (1 + 1/B) eta l_i) < 1.

How fast the mean loss grows beyond the edge, or falls inside it, is the spectral radius r of the whole recursion
(`growth` is ln r). With s <- R_i s + u_i T for the three moments s of a mode, r is the largest radius of the R_i, or if
there is one the root above it of the secular equation, whose left side at r = 1 is the gain:

    sum_i l_i [(r - R_i)^-1 u_i]_1 = 1.

For a preconditioner P read l_i as the eigenvalues of P^(1/2) H P^(1/2). The Gaussian assumption enters through the
fourth moments alone; a language model's per-sample gradients are not Gaussian, and the first thing to blame for a
difference.

    >>> round(edge([1.0, 0.5], batch=1), 9) == round((9 - 17**0.5) / 8, 9)          # the root of 4 e^2 - 9 e + 4 = 0
    True

Sources: the mean-square analysis of least squares is classical (Bach and Moulines 2013); with averaged momentum it is
worked out here. Meterez et al. 2026 compare their grids with such lines.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from nqflib.arguments import Array, as_vector


def gain(
    rate: float, eigenvalues: ArrayLike, batch: float, *, momentum: float = 0.0, multiplicity: ArrayLike | None = None
) -> float:
    """The T that the modes return for T = 1, infinite if a mode is unstable by itself; below 1 is stable.

    Args:
        rate: eta > 0.
        eigenvalues: l_i >= 0, (n,), of the curvature that the optimizer sees.
        batch: B > 0, samples a step; infinity is allowed.
        momentum: b in [0, 1), averaged: m <- b m + (1 - b) g.
        multiplicity: how many modes each value stands for, (n,), 1 if not given. The nodes and weights of a Gauss rule
            times N serve as eigenvalues and multiplicity.
    """
    lam, count = _spectrum(eigenvalues, multiplicity)
    _check(rate, batch, momentum)
    lam, count = lam[lam > 0], count[lam > 0]
    R, u = _recursion(rate, lam, batch, momentum)
    if np.abs(np.linalg.eigvals(R)).max(initial=0.0) >= 1:
        return math.inf
    returned = np.linalg.solve(np.eye(3) - R, u[:, :, None])[:, 0, 0]  # E[w_i^2] for T = 1
    return float(np.sum(count * lam * returned))


def growth(
    rate: float, eigenvalues: ArrayLike, batch: float, *, momentum: float = 0.0, multiplicity: ArrayLike | None = None
) -> float:
    """ln r per step, by which the mean loss grows in the long run: 0 at the `edge`, above 0 beyond it.

    This is the exponent of the mean over all runs, which a few that grow fast dominate; by Jensen's inequality a
    typical run grows slower, if at all. Noise of the targets does not enter, modes without curvature do not count.
    Arguments as for `gain`. Raises `ValueError` without a positive eigenvalue.
    """
    lam, count = _spectrum(eigenvalues, multiplicity)
    _check(rate, batch, momentum)
    lam, count = lam[lam > 0], count[lam > 0]
    if not lam.size:
        raise ValueError("eigenvalues must have a positive entry")
    R, u = _recursion(rate, lam, batch, momentum)
    own = float(np.abs(np.linalg.eigvals(R)).max())
    if math.isinf(batch):
        return math.log(own)

    def returned(log_r: float) -> float:  # by Cramer's rule, since the matrix may be singular
        M = math.exp(log_r) * np.eye(3) - R
        forced = np.concatenate([u[:, :, None], M[:, :, 1:]], -1)
        with np.errstate(divide="ignore"):
            return float(np.sum(count * lam * np.linalg.det(forced) / np.linalg.det(M)))

    # Noise that enters a mode leaves a covariance at every later step, and no negative one: from the mode's own radius
    # on the sum is positive and falls, so that there is at most one root. Below a radius that rounding put too high it
    # is negative.
    low, offset = math.log(own), 1e-14
    while returned(low + offset) < 0:
        offset *= 10
    low += offset
    if returned(low) <= 1:
        return math.log(own)
    high = low + 1
    while returned(high) > 1:
        high += high - low
    root: Any = brentq(lambda log_r: math.atan(returned(log_r)) - math.pi / 4, low, high, xtol=1e-14)
    return float(root)


def edge(
    eigenvalues: ArrayLike, batch: float, *, momentum: float = 0.0, multiplicity: ArrayLike | None = None
) -> float:
    """The learning rate at which training stops being stable; arguments as for `gain`.

    Raises `ValueError` without a positive eigenvalue.
    """
    lam, count = _spectrum(eigenvalues, multiplicity)
    _check(1.0, batch, momentum)
    if not (lam > 0).any():
        raise ValueError("eigenvalues must have a positive entry")
    most = full_batch_edge(lam.max(), momentum=momentum)

    def excess(log_rate: float) -> float:
        g = gain(math.exp(log_rate), lam, batch, momentum=momentum, multiplicity=count)
        return math.atan(g) - math.pi / 4 if math.isfinite(g) else math.pi / 4

    low = math.log(min(most, batch * 2 / float(np.sum(count * lam)))) - math.log(4)
    root: Any = brentq(excess, low, math.log(most), xtol=1e-13)
    return math.exp(root)


def full_batch_edge(largest: float, *, momentum: float = 0.0) -> float:
    """2 (1 + b) / ((1 - b) l_1): the edge without noise, 2 / l_1 for plain descent and 38 / l_1 for b = 0.9."""
    return 2 * (1 + momentum) / ((1 - momentum) * largest)


def small_batch_edge(trace: float, batch: float) -> float:
    """2 B / sum_i l_i: the edge for small batches and many modes of which none stands out, with or without momentum."""
    return 2 * batch / trace


def largest_ratios(
    eigenvalues: ArrayLike,
    rates: ArrayLike,
    batch: int,
    *,
    momentum: float = 0.0,
    noise: float = 0.1,
    steps: int = 400,
    seeds: int = 10,
    seed: int = 0,
) -> Array:
    """Largest loss over the first loss in runs of noisy linear regression, (rates, seeds).

    The loss is that of the expectation, sum_i l_i w_i^2 / 2 plus noise^2 / 2, from w_i = 1. All rates of one seed see
    the same samples. A run above 1e100 counts as infinite. Close below the edge the loss settles at the noise times
    gain / (1 - gain), so a bound on the ratio is met early if `noise` is not small beside the first loss.
    """
    lam, rates = as_vector("eigenvalues", eigenvalues), as_vector("rates", rates)
    ratios = np.ones((len(rates), seeds))
    for k in range(seeds):
        generator = np.random.default_rng([seed, k])
        w, m = np.ones((len(rates), len(lam))), np.zeros((len(rates), len(lam)))
        first = np.sum(lam) / 2 + noise**2 / 2
        for _ in range(steps):
            x = generator.standard_normal((batch, len(lam))) * np.sqrt(lam)
            residual = w @ x.T - noise * generator.standard_normal(batch)
            m = momentum * m + (1 - momentum) * residual @ x / batch
            w = w - rates[:, None] * m
            ratio = (np.sum(lam * w**2, axis=1) / 2 + noise**2 / 2) / first
            ratios[:, k] = np.maximum(ratios[:, k], np.where(ratio < 1e100, ratio, np.inf))
            lost = np.isinf(ratios[:, k])
            w[lost], m[lost] = 0, 0
            if lost.all():
                break
    return ratios


def _spectrum(eigenvalues: ArrayLike, multiplicity: ArrayLike | None) -> tuple[Array, Array]:
    lam = as_vector("eigenvalues", eigenvalues)
    count = np.ones_like(lam) if multiplicity is None else as_vector("multiplicity", multiplicity)
    if (lam < 0).any() or count.shape != lam.shape or (count < 0).any():
        raise ValueError("eigenvalues and multiplicity must be of one length and not negative")
    return lam, count


def _check(rate: float, batch: float, momentum: float) -> None:
    if not (rate > 0 and batch > 0 and 0 <= momentum < 1):
        raise ValueError(f"rate and batch must be positive and momentum in [0, 1), got {rate}, {batch} and {momentum}")


def _recursion(rate: float, lam: Array, batch: float, momentum: float) -> tuple[Array, Array]:
    """R (n, 3, 3) and u (n, 3) of s <- R s + u T for s = (E[w^2], eta E[w m], eta^2 E[m^2]).

    With eta in the moments all entries are of one size, and eigenvalues good to the last digits at any rate.
    """
    b, a, x = momentum, 1 - momentum, rate * lam
    zero, one = np.zeros_like(x), np.ones_like(x)
    squared = np.stack([a * a * (1 + 1 / batch) * x * x, 2 * a * b * x, b * b * one], -1)  # eta^2 E[m'^2]
    crossed = np.stack([a * x, b * one, zero], -1)  # eta E[w m']
    weight = np.stack([one, zero, zero], -1)
    R = np.stack([weight - 2 * crossed + squared, crossed - squared, squared], -2)
    forced = a * a * rate * x / batch  # eta^2 E[m'^2] for T = 1
    return R, np.stack([forced, -forced, forced], -1)
