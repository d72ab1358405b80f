"""The singular limit of the Lotka-Volterra flow: a staircase of equilibria as the initial abundance goes to 0.

In the rescaled time tau = t / ln(1/eps) every mode that is absent has a height u_k = ln z_k / ln(1/eps) < 0, and
the flow of `lotka_volterra` becomes, as eps -> 0, a sequence of straight lines and jumps:

- between jumps the abundances z rest at an equilibrium, and heights move at the invasion rates,

      du_k/dtau = w_k = r_k - sum_j C_kj z_j     where u_k < 0

- when a height reaches 0 its mode invades. The new equilibrium solves the linear complementarity problem on
  the modes with u_k = 0:   z >= 0,   w = r - C z <= 0,   z_k w_k = 0
- a mode that this leaves at z_k = 0 is extinct, and starts again from u_k = 0 at its rate w_k < 0.

For a symmetric positive semidefinite C, which is what a common eigenbasis gives, the flow restricted to the
allowed modes descends the convex function z^T C z / 2 - r^T z over z >= 0, so it can end only at that solution.
The same limit of diagonal linear networks is in Berthier, JMLR 24(171), 2023. Ziyin et al. 2026, section 6, treats
decoupled modes, where tau_k = 1/r_k; with competition that formula can be wrong in order and in number.

Example: the strong mode 0 suppresses mode 1, whose own rate alone would let it enter at tau = 1.25.

>>> steps = staircase([1.0, 0.8], [[1.0, 0.6], [0.6, 1.0]])
>>> steps.times.round(6), steps.entered
(array([1., 2.]), ((0,), (1,)))
>>> steps.abundances([0.5, 1.5, 2.5]).round(4).tolist()
[[0.0, 0.0], [1.0, 0.0], [0.8125, 0.3125]]
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from nqflib.arguments import Array, Competition, as_competition, as_rates, as_times, as_vector


class Ending(Enum):
    """Why a staircase ends."""

    SETTLED = "no absent mode grows any more: the last equilibrium is the limit of the flow"
    HORIZON = "the next jump lies beyond the requested horizon"


@dataclass(frozen=True)
class Staircase:
    """Limit of the flow as eps -> 0, in rescaled time; stage s lies between the jumps s - 1 and s."""

    times: Array  # (E,) tau of each jump
    entered: tuple[tuple[int, ...], ...]  # E tuples: modes that appear at each jump
    left: tuple[tuple[int, ...], ...]  # E tuples: modes that go extinct at each jump
    equilibria: Array  # (E + 1, K) z on each stage; the first is 0
    invasion_rates: Array  # (E + 1, K) w on each stage; 0 for a mode that is present
    heights: Array  # (E + 1, K) u at the start of each stage; 0 for a mode that is present
    ending: Ending

    def stages(self, tau: ArrayLike) -> np.ndarray:
        """Return the stage at each tau, (T,) integers; at a jump the stage after it."""
        return np.searchsorted(self.times, as_times(tau), side="right")

    def abundances(self, tau: ArrayLike) -> Array:
        """Return z at each tau, (T, K), constant between jumps."""
        return self.equilibria[self.stages(tau)]

    def log_heights(self, tau: ArrayLike) -> Array:
        """Return u_k = lim ln z_k / ln(1/eps) at each tau, (T, K), piecewise linear and at most 0."""
        stage = self.stages(tau)
        begin = np.concatenate([[0.0], self.times])[stage]
        return self.heights[stage] + (as_times(tau) - begin)[:, None] * self.invasion_rates[stage]

    def switch_on_times(self) -> Array:
        """Return the tau at which each mode first appears, (K,); infinite for one that does not."""
        first = np.full(self.equilibria.shape[1], np.inf)
        for tau, modes in zip(self.times[::-1], self.entered[::-1], strict=True):
            first[list(modes)] = tau
        return first


def staircase(
    rates: ArrayLike,
    competition: Competition,
    *,
    exponents: ArrayLike = 1.0,
    horizon: float = np.inf,
    tolerance: float = 1e-11,
) -> Staircase:
    """Compute the limit eps -> 0 of the flow that starts from z_k(0) = const_k eps^{b_k}, b_k > 0.

    Args:
        rates: (K,), r_k, at least one positive.
        competition: (K, K), symmetric positive semidefinite, or its diagonal (K,).
        exponents: b_k, (K,) or one number; 1 for the same small abundance in every mode.
        horizon: largest tau of interest.
        tolerance: an invasion rate below `tolerance` times the largest |r_k| counts as 0. It guards against the
            rounding of r - C z once the targets are fitted and every invasion rate should vanish.

    Raises:
        ValueError: for bad shapes or numbers, a competition that is not symmetric positive semidefinite, and a
            degenerate jump, as of two equal modes that enter at once: the abundances then depend on the constants in
            z(0) and not on the limit alone.
    """
    r = as_rates(rates)
    c = _symmetric_competition(competition, r.size)
    u = -as_vector("exponents", exponents, r.size, positive=True)
    small = tolerance * np.abs(r).max()
    z, w, tau = np.zeros(r.size), r.copy(), 0.0
    times, entered, left, equilibria, invasion, heights = [], [], [], [z], [w], [u]
    ending = Ending.SETTLED
    while True:
        rising = (w > small) & (u < 0)
        if not rising.any():
            break
        waits = np.full(r.size, np.inf)
        waits[rising] = -u[rising] / w[rising]
        wait = waits.min()
        if tau + wait > horizon:
            ending = Ending.HORIZON
            break
        tau += wait
        u = u + wait * w
        u[(waits <= wait * (1 + 1e-12)) | (z > 0)] = 0.0
        new = complementary_equilibrium(r, c, u == 0, start=z, tolerance=small)
        entered.append(tuple(np.flatnonzero((new > 0) & (z == 0)).tolist()))
        left.append(tuple(np.flatnonzero((new == 0) & (z > 0)).tolist()))
        z = new
        w = np.where(z > 0, 0.0, r - c @ z)
        idle = np.flatnonzero((u == 0) & (z == 0) & (w > -small))
        if idle.size:
            raise ValueError(
                f"degenerate: beside the modes {np.flatnonzero(z).tolist()} the modes {idle.tolist()} neither grow nor "
                "shrink, so that their abundances depend on the constants in z(0)"
            )
        times.append(tau)
        equilibria.append(z)
        invasion.append(w)
        heights.append(u)
    return Staircase(
        np.array(times),
        tuple(entered),
        tuple(left),
        np.array(equilibria),
        np.array(invasion),
        np.array(heights),
        ending,
    )


def complementary_equilibrium(
    rates: Array, competition: Array, allowed: np.ndarray, *, start: Array, tolerance: float
) -> Array:
    """Solve z >= 0, w = r - C z <= 0, z w = 0 on the allowed modes, with z = 0 on the others; (K,).

    This is the active-set method of Lawson and Hanson for the convex problem min z^T C z / 2 - r^T z, z >= 0,
    started from the equilibrium before the jump, so that a jump usually costs one or two small solves.

    Args:
        rates: (K,).
        competition: (K, K), symmetric positive definite on the modes that end up present.
        allowed: (K,) booleans.
        start: (K,), a feasible z that is an equilibrium of its own positive modes.
        tolerance: w_k up to this counts as 0.
    """
    z = start.copy()
    present = z > 0
    while True:
        w = rates - competition @ z
        candidates = allowed & ~present & (w > tolerance)
        if not candidates.any():
            return z
        present[np.argmax(np.where(candidates, w, -np.inf))] = True
        while True:
            target = _equilibrium(rates, competition, present)
            if (target[present] > 0).all():
                z = target
                break
            blocking = present & (target <= 0)
            ratios = np.full(z.size, np.inf)
            ratios[blocking] = z[blocking] / (z[blocking] - target[blocking])
            z = z + ratios.min() * (target - z)
            present &= ratios > ratios.min()
            z[~present] = 0.0


def _equilibrium(rates: Array, competition: Array, present: np.ndarray) -> Array:
    """Solve C z = r on the present modes; 0 elsewhere."""
    modes = np.flatnonzero(present)
    block = competition[np.ix_(modes, modes)]
    try:
        factor, lower = cho_factor(block)
    except LinAlgError:
        factor, lower = np.zeros_like(block), False
    if (factor.diagonal() ** 2 <= 1e-14 * block.diagonal()).any():
        raise ValueError(f"degenerate: the competition of the modes {modes.tolist()}, all present at once, is singular")
    z = np.zeros(rates.size)
    z[modes] = cho_solve((factor, lower), rates[modes])
    return z


def _symmetric_competition(value: Competition, size: int) -> Array:
    """Return a symmetric positive semidefinite competition as a dense matrix, or raise ValueError."""
    matrix = as_competition(value, size)
    if sparse.issparse(matrix):
        matrix = matrix.toarray()
    if matrix.ndim == 1:
        return np.diag(matrix)
    asymmetry = np.abs(matrix - matrix.T).max()
    if asymmetry > 1e-10 * np.abs(matrix).max():
        raise ValueError(f"competition must be symmetric, it differs from its transpose by {asymmetry}")
    matrix = (matrix + matrix.T) / 2
    lowest = np.linalg.eigvalsh(matrix)[0]
    if lowest < -1e-10 * np.abs(matrix).max():
        raise ValueError(f"competition must be positive semidefinite, its lowest eigenvalue is {lowest}")
    return matrix


def sample_wise_limit(tau: ArrayLike, growth: ArrayLike, targets: ArrayLike) -> Array:
    """Compute lim L(tau ln(1/eps)) = (1/m) sum_mu y_mu^2 [tau < 1/zeta_mu] of orthogonal samples (eq. 47).

    Args:
        tau: (T,), rescaled times.
        growth: (m,), zeta_mu = (8/m) max_k lambda_muk y_mu; a sample with zeta_mu <= 0 is never learned.
        targets: (m,), y_mu.

    Returns:
        (T,) mean-square loss.
    """
    zeta = as_rates(growth)
    y = as_vector("targets", targets, zeta.size)
    unlearned = as_times(tau)[:, None] * zeta < 1
    return (unlearned * y**2).mean(axis=1)
