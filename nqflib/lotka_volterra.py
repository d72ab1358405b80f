"""Generalised Lotka-Volterra flow of a neural quadratic form, and the cases that have a closed form.

When the structure matrices A_mu = P Lambda_mu P^T of all samples share one eigenbasis P, the
abundances z_k = (P^T M P)_kk of the modes obey

    dz_k/dt = z_k (r_k - sum_j C_kj z_j),   r_k = (8/m) sum_mu lambda_muk y_mu,
                                            C_kj = (8/m) sum_mu lambda_muk lambda_muj

under gradient flow on L = (1/m) sum_mu (Tr[M A_mu] - y_mu)^2, M = W W^T (Ziyin et al. 2026, section 5).
Sums of squares here carry the factor 1/m and no 1/2; `abundance` is z_k(0), not the scale of the weights.

Example: two modes that do not compete, each reaching half of r/C at its own time.

>>> import numpy as np
>>> rates, competition = np.array([1.0, 0.25]), np.array([1.0, 1.0])
>>> times = half_saturation_times(rates, competition, abundance=1e-5)
>>> np.round(times, 3)
array([11.513, 40.507])
>>> np.round(orthogonal_features(rates, competition, 1e-5, times).diagonal(), 3)
array([0.5  , 0.125])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.integrate import solve_ivp

from nqflib.arguments import Array, Competition, as_competition, as_rates, as_times, as_vector
from nqflib.dense_flow import solve_dense


class Rates(NamedTuple):
    """Coefficients of the flow."""

    rates: Array  # (K,) r_k, per unit of time
    competition: Array  # (K, K) C_kj, per unit of time and abundance


@dataclass(frozen=True)
class Trajectory:
    """Solution of the flow at the requested times."""

    times: Array  # (T,)
    log_abundances: Array  # (T, K) ln z_k(t)
    evaluations: int  # right-hand sides computed; 0 where a closed form was used

    @property
    def abundances(self) -> Array:
        """z_k(t), (T, K); an abundance below 1e-308 reads 0 here but not in `log_abundances`."""
        return np.exp(self.log_abundances)


# ------------------------------------------------------------------------- from data to the flow


def rates_and_competition(eigenvalues: ArrayLike, targets: ArrayLike) -> Rates:
    """Compute r = (8/m) lambda^T y and C = (8/m) lambda^T lambda (Ziyin et al. 2026, section 5).

    Args:
        eigenvalues: (m, K), lambda_muk of the structure matrix of sample mu in the common eigenbasis.
        targets: (m,), y_mu less the module's output at W = 0.
    """
    spectrum = np.asarray(eigenvalues, dtype=np.float64)
    if spectrum.ndim != 2 or spectrum.size == 0 or not np.isfinite(spectrum).all():
        raise ValueError(f"eigenvalues must be finite of shape (m, K), got {spectrum.shape}")
    samples = len(spectrum)
    y = as_vector("targets", targets, samples)
    # The product is formed first: BLAS then returns an exactly symmetric matrix, which `flow` multiplies faster.
    return Rates(8 / samples * (spectrum.T @ y), 8 / samples * (spectrum.T @ spectrum))


# ----------------------------------------------------------------------------------- the flow


def flow(
    rates: ArrayLike, competition: Competition, abundance: ArrayLike, times: ArrayLike, *, tolerance: float = 1e-9
) -> Trajectory:
    """Integrate dz_k/dt = z_k (r_k - sum_j C_kj z_j) in the variables x_k = ln z_k.

    In x an abundance of 1e-30 is as easy as one of 1, and a long wait costs a few steps. A diagonal
    competition is solved in closed form, a dense one by LSODA (`nqflib.dense_flow`) and a sparse one by
    Radau, both with the Jacobian -C diag(z).

    Args:
        rates: (K,), r_k, at least one positive.
        competition: (K, K) dense or SciPy sparse, or (K,) for a diagonal one.
        abundance: z_k(0) > 0, (K,) or one number for all.
        times: (T,), increasing and nonnegative.
        tolerance: error of one step in ln z, that is relative error of z, from 1e-12 to 1e-2. The error of the whole
            solution is some ten times larger.

    Raises:
        ValueError: for a wrong shape, a number that is not finite, or an abundance that is not positive.
        RuntimeError: when the integrator gives up; the message is its own.
    """
    r = as_rates(rates)
    coupling = as_competition(competition, r.size)
    z0 = as_vector("abundance", abundance, r.size, positive=True)
    t = as_times(times)
    if not 1e-12 <= tolerance <= 1e-2:
        raise ValueError(f"tolerance must lie between 1e-12 and 1e-2, got {tolerance}")
    if coupling.ndim == 1:
        divisor = _log_divisor(*_decoupled(r, coupling, z0, t))
        return Trajectory(t, np.log(z0) + np.minimum(r, 0) * t[:, None] - divisor, 0)
    # A trial step may shoot far above the equilibrium. Without a cap exp overflows there, and LSODA reports
    # success over NaN; with it the trial has a finite, large error and is refused.
    diagonal = coupling.diagonal()
    smallest = diagonal[diagonal > 0].min() if (diagonal > 0).any() else 1.0
    cap = max(float(np.log(np.abs(r).max() / smallest)), float(np.log(z0).max())) + 30
    solve = _solve_sparse if sparse.issparse(coupling) else solve_dense
    stops, position = np.unique(np.append(0.0, t), return_inverse=True)
    if stops.size == 1:
        return Trajectory(t, np.tile(np.log(z0), (t.size, 1)), 0)
    x, evaluations = solve(r, coupling, np.log(z0), stops, cap, tolerance)
    if not np.isfinite(x).all():
        raise RuntimeError("the integrator returned numbers that are not finite")
    return Trajectory(t, x[position[1:]], evaluations)


def _solve_sparse(
    r: Array, c: sparse.csr_array, x0: Array, times: Array, cap: float, tolerance: float
) -> tuple[Array, int]:
    """Integrate dx/dt = r - C e^x by Radau with sparse factorisations; x (T, K) and the right-hand sides."""
    columns: Any = sparse.csc_array(c)
    repeats = np.diff(columns.indptr)

    def derivative(_: float, x: Array) -> Array:
        return r - c @ np.exp(np.minimum(x, cap))

    def jacobian(_: float, x: Array) -> sparse.csc_array:
        entries = -columns.data * np.repeat(np.exp(np.minimum(x, cap)), repeats)
        return sparse.csc_array((entries, columns.indices, columns.indptr), shape=c.shape)

    span, step = (0.0, times[-1]), 30 * tolerance  # Radau's step errors are far below what it estimates
    solution = solve_ivp(derivative, span, x0, "Radau", times, jac=jacobian, rtol=1e-12, atol=step)
    if not solution.success:
        raise RuntimeError(f"Radau stopped: {solution.message}")
    return solution.y.T, int(solution.nfev)


def gradient_descent(
    rates: ArrayLike,
    competition: Competition,
    abundance: ArrayLike,
    learning_rate: float,
    steps: ArrayLike,
) -> Array:
    """Iterate z_k <- z_k (1 + (eta/2) (r_k - sum_j C_kj z_j))^2, which is full-batch gradient descent on W exactly.

    From dW = -eta H W with H = (4/m) sum_mu Delta_mu A_mu = -(1/2) diag(r - C z) in the common eigenbasis.

    Args:
        learning_rate: eta > 0.
        steps: (T,) increasing integers, the steps at which z is returned.

    Returns:
        (T, K) abundances.
    """
    r = as_rates(rates)
    coupling = as_competition(competition, r.size)
    z = as_vector("abundance", abundance, r.size, positive=True).copy()
    if not (np.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")
    wanted = as_times(steps)
    if (wanted != np.round(wanted)).any():
        raise ValueError("steps must be whole numbers")
    product = np.multiply if coupling.ndim == 1 else np.matmul
    out = np.empty((wanted.size, r.size))
    done = 0
    for row, step in enumerate(wanted.astype(int)):
        for _ in range(step - done):
            z *= (1 + learning_rate / 2 * (r - product(coupling, z))) ** 2
        done = step
        out[row] = z
    return out


# ------------------------------------------------------------------------- orthogonal features


def orthogonal_features(
    rates: ArrayLike, competition: ArrayLike, abundance: ArrayLike, times: ArrayLike, *, out: Array | None = None
) -> Array:
    """Solve the decoupled flow dz_k/dt = z_k (r_k - C_kk z_k) (Ziyin et al. 2026, theorem 6).

        z_k(t) = r_k z_k(0) / (C_kk z_k(0) + (r_k - C_kk z_k(0)) e^{-r_k t}),   z_k(0) / (1 + C_kk z_k(0) t) if r_k = 0

    Args:
        rates: (K,), r_k of any sign.
        competition: (K,), C_kk >= 0.
        abundance: z_k(0) > 0, (K,) or one number.
        times: (T,), increasing and nonnegative.
        out: (T, K), written to and returned if given.

    Returns:
        (T, K) abundances. `orthogonal_features_in_blocks` does the same for more modes than fit in memory.
    """
    r, c, z0, t = _decoupled(rates, competition, abundance, times)
    if out is None:
        out = np.empty((t.size, r.size))
    elif out.shape != (t.size, r.size):
        raise ValueError(f"out must have shape {(t.size, r.size)}, got {out.shape}")
    for block in _blocks(r.size, 16384):
        _logistic(r[block], c[block], z0[block], t, out[:, block])
    return out


def orthogonal_features_in_blocks(
    rates: ArrayLike, competition: ArrayLike, abundance: ArrayLike, times: ArrayLike, *, block: int = 16384
) -> Iterator[tuple[slice, Array]]:
    """Yield `orthogonal_features` for `block` modes at a time as (modes, abundances (T, block)).

    The array is the same one each time, to be used or copied before the next block: a million modes at 200 times
    take 30 MB instead of 1.6 GB.
    """
    r, c, z0, t = _decoupled(rates, competition, abundance, times)
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    buffer = np.empty((t.size, min(block, r.size)))
    for modes in _blocks(r.size, block):
        view = buffer[:, : modes.stop - modes.start]
        _logistic(r[modes], c[modes], z0[modes], t, view)
        yield modes, view


def _decoupled(
    rates: ArrayLike, competition: ArrayLike, abundance: ArrayLike, times: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    """Check the arguments of the decoupled flow."""
    r = as_vector("rates", rates)
    c = as_vector("competition", competition, r.size)
    if (c < 0).any():
        raise ValueError(f"competition must not be negative, got {c.min()}")
    if (r[c == 0] > 0).any():
        raise ValueError("competition must be positive where the rate is: such a mode would grow without bound")
    return r, c, as_vector("abundance", abundance, r.size, positive=True), as_times(times)


def _blocks(size: int, block: int) -> Iterator[slice]:
    """Cut range(size) into slices of at most `block`."""
    return (slice(start, min(start + block, size)) for start in range(0, size, block))


def _logistic(r: Array, c: Array, z0: Array, t: Array, out: Array) -> None:
    """Write z into `out` (T, K): one exponential, two products, a sum and a quotient a value, row by row in cache."""
    with np.errstate(divide="ignore", invalid="ignore"):
        start = c * z0 / r  # z(0) as a fraction of the final abundance
    growing = (r > 0) & (start <= 1)
    rest = 1 - start
    with np.errstate(all="ignore"):  # columns that are not growing are written below
        for row, time in zip(out, t, strict=True):
            np.multiply(r, -time, out=row)
            np.exp(row, out=row)
            row *= rest
            row += start
            np.divide(z0, row, out=row)
    if not growing.all():
        others = ~growing
        divisor = _log_divisor(r[others], c[others], z0[others], t)
        out[:, others] = z0[others] * np.exp(np.minimum(r[others], 0) * t[:, None] - divisor)


def _log_divisor(r: Array, c: Array, z0: Array, t: Array) -> Array:
    """Return ln of z(0) e^{min(r, 0) t} / z(t), (T, K), for rates of any sign."""
    # z = z0 e^{rt} / (1 + c z0 (e^{rt} - 1)/r), a growing exponential being divided out of both halves.
    decay = np.exp(-np.abs(r) * t[:, None])
    integral = np.where(r == 0, t[:, None], -np.expm1(-np.abs(r) * t[:, None]) / np.where(r == 0, 1, np.abs(r)))
    return np.log(np.where(r > 0, decay, 1.0) + c * z0 * integral)


# ------------------------------------------------------------------------------ switch-on times


def leading_switch_on_times(growth: ArrayLike, abundance: ArrayLike, *, factor: float = 1.0) -> Array:
    """Compute the leading order t_k = ln(1/z_k(0)) / (a zeta_k) as z(0) -> 0 (Ziyin et al. 2026, eqs. 43 and 153).

    Args:
        growth: (K,), zeta_k: r_k (theorem 6, factor 1), the eigenvalue gamma_k of Y (theorem 7, factor 2), or
            (8/m) max_k lambda_muk y_mu (theorem 5, factor 1).
        abundance: z_k(0) in (0, 1), (K,) or one number.
        factor: a, the rate at which ln z grows in units of zeta.

    Returns:
        (K,) times; infinite for a mode whose growth is not positive.
    """
    zeta = as_rates(growth)
    z0 = as_vector("abundance", abundance, zeta.size, positive=True)
    times = np.full(zeta.size, np.inf)
    on = zeta > 0
    times[on] = -np.log(z0[on]) / (factor * zeta[on])
    return times


def half_saturation_times(
    rates: ArrayLike,
    competition: ArrayLike,
    abundance: ArrayLike,
    *,
    exact: bool = False,
    learning_rate: float | None = None,
) -> Array:
    """Predict when a mode without competitors reaches half of its final abundance r_k / C_kk.

        t_k = (1/r_k) ln(r_k / (C_kk z_k(0)))                  the paper's form (Ziyin et al. 2026, figure 3)
        t_k = (1/r_k) ln(r_k / (C_kk z_k(0)) - 1)              exact=True: exact for the flow
        t_k = eta ln(r_k / (C_kk z_k(0)) - 1) / (2 ln(1 + eta r_k/2))   with a learning rate eta: gradient descent

    The last form counts time as eta times steps; it takes the growth factor per step near z = 0 from the map.

    Args:
        rates: (K,), r_k.
        competition: (K,), C_kk, or the (K, K) matrix whose diagonal is meant.
        abundance: z_k(0) > 0, (K,) or one number.

    Returns:
        (K,) times; infinite where r_k <= 0 and negative where z_k(0) already exceeds the half.
    """
    r = as_rates(rates)
    matrix = as_competition(competition, r.size)
    c = as_vector("competition", matrix if matrix.ndim == 1 else matrix.diagonal(), r.size, positive=True)
    z0 = as_vector("abundance", abundance, r.size, positive=True)
    times = np.full(r.size, np.inf)
    on = r > 0
    ratio = r[on] / (c[on] * z0[on])
    if not exact and learning_rate is None:
        times[on] = np.log(ratio) / r[on]
        return times
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.where(ratio > 1, np.log(ratio - 1), -np.inf)  # above r/C the half is never crossed
    rate = r[on] if learning_rate is None else 2 / learning_rate * np.log1p(learning_rate * r[on] / 2)
    times[on] = odds / rate
    return times


def first_crossings(times: ArrayLike, values: ArrayLike, levels: ArrayLike) -> Array:
    """Find when each curve first reaches its level from below, by linear interpolation between records.

    Args:
        times: (T,), increasing.
        values: (T, K), one curve a column.
        levels: (K,) or one number.

    Returns:
        (K,) times; infinite for a curve that stays below its level.
    """
    t = as_times(times)
    curves = np.asarray(values, dtype=np.float64)
    if curves.ndim != 2 or len(curves) != t.size:
        raise ValueError(f"values must have shape ({t.size}, K), got {curves.shape}")
    level = as_vector("levels", levels, curves.shape[1])
    out = np.full(level.size, np.inf)
    for k, curve in enumerate(curves.T):
        above = np.flatnonzero(curve >= level[k])
        if above.size:
            i = above[0]
            out[k] = t[0] if i == 0 else np.interp(level[k], curve[i - 1 : i + 1], t[i - 1 : i + 1])
    return out


# -------------------------------------------------------------------------------------- losses


def mode_losses(rates: ArrayLike, competition: ArrayLike) -> Array:
    """Compute V_k = r_k^2 / (8 C_kk), the mean-square loss that mode k removes (Ziyin et al. 2026, theorem 6).

    The appendix has the constant 1/8; the main text leaves it out.
    """
    r = as_vector("rates", rates)
    return r**2 / (8 * as_vector("competition", competition, r.size, positive=True))


def excess_loss(rates: ArrayLike, competition: ArrayLike, abundances: ArrayLike) -> Array:
    """Compute E(t) = sum_k V_k (1 - z_k(t) C_kk / r_k)^2 of decoupled modes (Ziyin et al. 2026, section 6).

    Args:
        abundances: (T, K) z_k(t).

    Returns:
        (T,) mean-square loss above its final value.
    """
    r = as_vector("rates", rates)
    c = as_vector("competition", competition, r.size, positive=True)
    return ((r - c * np.asarray(abundances)) ** 2 / (8 * c)).sum(axis=-1)
