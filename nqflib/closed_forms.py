"""Solvable cases of the moment flow dM/dt = -(H M + M H) that are not one logistic equation a mode.

Proportional samples (theorem 4), orthogonal samples (theorem 5), an isotropic design (theorem 7), unifying
projectors (theorem 16) and two-factor models (corollary 4) of Ziyin et al. 2026. Orthogonal features
(theorem 6) are in `lotka_volterra`. The loss is L = (1/m) sum_mu (Tr[M A_mu] - y_mu)^2 throughout, its
gradient flow has H = (4/m) sum_mu Delta_mu A_mu with Delta_mu = Tr[M A_mu] - y_mu.

Example: an isotropic design of strength c = 1/4 learns M(infinity) = Y / (4c) for a positive Y.

>>> import numpy as np
>>> target = np.array([[2.0, 1.0], [1.0, 2.0]])
>>> np.round(isotropic(target, 0.25, 1e-12 * np.eye(2), [1e6])[0], 6)
array([[2., 1.],
       [1., 2.]])
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.linalg import solve_triangular

from nqflib.arguments import Array, as_times, as_vector
from nqflib.lotka_volterra import orthogonal_features


class SampleSolution(NamedTuple):
    """Solution of theorem 4 or 5."""

    latents: Array  # (T, s) xi_mu(t); s = 1 in theorem 4
    abundances: Array  # (T, K) z_k(t)
    residuals: Array  # (T, m) Delta_mu(t) = f_mu(t) - y_mu


class CommonEigenbasis(NamedTuple):
    """Structure matrices A_mu = P diag(lambda_mu) P^T that share their eigenvectors (assumption 1)."""

    basis: Array  # (p, p) P, one eigenvector a column
    eigenvalues: Array  # (m, p) lambda_muk


class ProjectorCoefficients(NamedTuple):
    """Growth and saturation of each projector of theorem 16."""

    growth: Array  # (a,) gamma_a
    saturation: Array  # (a,) kappa_a


def common_eigenbasis(structure_matrices: ArrayLike, *, tolerance: float = 1e-10) -> CommonEigenbasis:
    """Diagonalise commuting structure matrices together, so that `rates_and_competition` applies to them.

    Args:
        structure_matrices: (m, p, p), symmetric and commuting.
        tolerance: largest off-diagonal entry left in P^T A_mu P, relative to the largest entry of all A_mu.

    Raises:
        ValueError: when no common eigenbasis exists; the message says how far the best one is off.
    """
    stack = _stack(structure_matrices)
    # The eigenvectors of one generic combination diagonalise all. The cosines of different whole numbers have no
    # rational relation, so that modes told apart by any A_mu are told apart by the combination.
    mixed = np.tensordot(np.cos(np.arange(1.0, len(stack) + 1)), stack, 1)
    basis = np.linalg.eigh((mixed + mixed.T) / 2)[1]
    rotated = basis.T @ stack @ basis  # (m, p, p)
    eigenvalues = np.diagonal(rotated, axis1=1, axis2=2).copy()
    left = np.abs(rotated - eigenvalues[:, :, None] * np.eye(len(basis))).max()
    if left > tolerance * np.abs(stack).max():
        raise ValueError(f"structure_matrices have no common eigenbasis: an off-diagonal entry of {left} is left")
    return CommonEigenbasis(basis, eigenvalues)


def proportional_samples(
    eigenvalues: ArrayLike, coefficients: ArrayLike, targets: ArrayLike, abundance: ArrayLike, times: ArrayLike
) -> SampleSolution:
    """Solve the flow when A_mu = c_mu A: one latent drives every mode (Ziyin et al. 2026, theorem 4).

        z_k(t) = z_k(0) e^{-2 lambda_k xi(t)},   dxi/dt = a sum_j lambda_j z_j(0) e^{-2 lambda_j xi} - b,   xi(0) = 0
        a = (4/m) sum_mu c_mu^2,   b = (4/m) sum_mu c_mu y_mu

    Args:
        eigenvalues: (K,), lambda_k of A.
        coefficients: (m,), c_mu, not all zero.
        targets: (m,), y_mu.
        abundance: z_k(0) > 0, (K,) or one number.
        times: (T,), increasing and nonnegative.
    """
    spectrum = as_vector("eigenvalues", eigenvalues)
    c = as_vector("coefficients", coefficients)
    y = as_vector("targets", targets, c.size)
    z0 = as_vector("abundance", abundance, spectrum.size, positive=True)
    if not c.any():
        raise ValueError("coefficients must not all be zero")
    strength, pull = float(4 * np.mean(c**2)), float(4 * np.mean(c * y))
    t = as_times(times)
    latents = _latents(strength * spectrum[None], 2 * spectrum[None], np.log(z0), np.array([pull]), t)
    abundances = np.exp(np.log(z0) - 2 * latents * spectrum)
    return SampleSolution(latents, abundances, (abundances @ spectrum)[:, None] * c - y)


def orthogonal_samples(
    eigenvalues: ArrayLike, targets: ArrayLike, abundance: ArrayLike, times: ArrayLike
) -> SampleSolution:
    """Solve the flow when A_mu A_nu = 0: one independent latent a sample (Ziyin et al. 2026, theorem 5, eq. 36).

        z_k(t) = z_k(0) exp(-(8/m) sum_mu lambda_muk xi_mu(t))
        dxi_mu/dt = sum_k lambda_muk z_k(0) e^{-(8/m) lambda_muk xi_mu} - y_mu,   xi_mu(0) = 0

    Args:
        eigenvalues: (m, K), lambda_muk; every mode k belongs to at most one sample.
        targets: (m,), y_mu.
        abundance: z_k(0) > 0, (K,) or one number.
        times: (T,), increasing and nonnegative.
    """
    spectrum = np.asarray(eigenvalues, dtype=np.float64)
    if spectrum.ndim != 2 or spectrum.size == 0 or not np.isfinite(spectrum).all():
        raise ValueError(f"eigenvalues must be finite of shape (m, K), got {spectrum.shape}")
    shared = np.flatnonzero((spectrum != 0).sum(axis=0) > 1)
    if shared.size:
        raise ValueError(
            f"eigenvalues of orthogonal samples give each mode to one sample; mode {shared[0]} has several"
        )
    samples, modes = spectrum.shape
    y = as_vector("targets", targets, samples)
    z0 = as_vector("abundance", abundance, modes, positive=True)
    t = as_times(times)
    latents = _latents(spectrum, 8 / samples * spectrum, np.log(z0), y, t)
    abundances = np.exp(np.log(z0) - 8 / samples * latents @ spectrum)
    return SampleSolution(latents, abundances, abundances @ spectrum.T - y)


def _latents(weights: Array, exponents: Array, log_z0: Array, pull: Array, times: Array) -> Array:
    """Integrate du_s/dt = sum_k weights_sk exp(log_z0_k - exponents_sk u_s) - pull_s from 0; (T, s)."""
    # The right-hand side decreases in u_s, so the solution approaches its only zero from one side. A trial step
    # beyond that zero would overflow: the cap keeps it finite, and large enough to be refused.
    cap = np.log(np.abs(pull).max() + np.abs(weights).max()) + max(0.0, float(log_z0.max())) + 30

    def terms(u: Array) -> Array:
        return weights * np.exp(np.minimum(log_z0 - exponents * u[:, None], cap))

    solution = solve_ivp(
        lambda _, u: terms(u).sum(axis=1) - pull,
        (0.0, max(times[-1], np.finfo(float).tiny)),
        np.zeros(pull.size),
        method="LSODA",
        t_eval=times,
        jac=lambda _, u: -(exponents * terms(u)).sum(axis=1)[None],  # banded form of a diagonal
        lband=0,
        uband=0,
        rtol=1e-11,
        atol=1e-12,
    )
    if not solution.success or not np.isfinite(solution.y).all():
        raise RuntimeError(f"the latent equation stopped: {solution.message}")
    return solution.y.T


# ------------------------------------------------------------------------------------ isotropic


def isotropic(target: ArrayLike, strength: float, order_parameter: ArrayLike, times: ArrayLike) -> Array:
    """Solve dM/dt = Y M + M Y - 8 c M^2 for an isotropic design (Ziyin et al. 2026, theorem 7).

        M(t) = e^{Yt} M(0) [I + 8 c Phi(t) M(0)]^{-1} e^{Yt},   Phi(t) = int_0^t e^{2 Y s} ds

    The formula overflows once a positive eigenvalue of Y times t passes 350. Here it is evaluated as B B^T with
    bounded factors, so that any t is allowed and M(t) is positive semidefinite by construction.

    Args:
        target: (p, p) symmetric, Y = (4/m) sum_mu y_mu A_mu.
        strength: c > 0, see `isotropic_strength`.
        order_parameter: (p, p) symmetric positive semidefinite, M(0) = W W^T.
        times: (T,), increasing and nonnegative.

    Returns:
        (T, p, p), M(t).
    """
    y = _symmetric("target", target)
    m0 = _symmetric("order_parameter", order_parameter, len(y))
    if not (np.isfinite(strength) and strength > 0):
        raise ValueError(f"strength must be positive, got {strength}")
    t = as_times(times)
    growth, basis = np.linalg.eigh(y)
    growth, basis = growth[::-1], basis[:, ::-1]  # fastest first: the order of the rows of `factor` below

    # M(0) = L L^T in the basis of Y with L lower trapezoidal, rows sorted by growth. With E = e^{gamma t} and
    # D = sqrt(8 c Phi) the theorem reads M = E L (I + L^T D^2 L)^{-1} L^T E. Column j of L starts in row j or
    # later, so dividing it by s_j = max(1, D_j) leaves every entry of D L / s and E L / s bounded.
    factor = np.asarray(np.linalg.qr((basis.T @ _square_root(m0)).T, mode="r")).T  # (p, rank of M(0))
    rank = factor.shape[1]
    if rank == 0:
        return np.zeros((t.size, *y.shape))
    first_row = (factor != 0).argmax(axis=0)
    positive = np.maximum(growth, 0)
    out = np.empty((t.size, *y.shape))
    for i, time in enumerate(t):
        # ln D = positive t + rest. The differences of exponents are taken before they are multiplied by t, which
        # keeps their rounding errors from growing with it.
        rest = 0.5 * (np.log(8 * strength) + _log_bounded_phi(growth, time))
        saturated = (positive * time + rest > 0)[first_row]
        offset = np.where(saturated, positive[first_row], 0)
        log_s = np.where(saturated, rest[first_row], 0)  # ln s less offset t
        below = factor != 0  # above the first row of a column D/s may overflow, and counts for nothing
        top = factor * np.exp(np.where(below, (positive[:, None] - offset) * time + rest[:, None] - log_s, 0))
        ends = factor * np.exp(np.where(below, (growth[:, None] - offset) * time - log_s, 0))
        r = np.asarray(np.linalg.qr(np.vstack([top, np.diag(np.exp(-offset * time - log_s))]), mode="r"))
        b = basis @ solve_triangular(r.T, ends.T, lower=True).T  # (p, rank)
        out[i] = b @ b.T
    return out


def _log_bounded_phi(growth: Array, time: float) -> Array:
    """Return ln of e^{-2 max(gamma, 0) t} int_0^t e^{2 gamma s} ds, minus infinity at t = 0."""
    rate = 2 * np.abs(growth)
    flat = rate * time == 0
    with np.errstate(divide="ignore"):
        return np.log(np.where(flat, time, -np.expm1(-rate * time) / np.where(flat, 1, rate)))


def _square_root(matrix: Array) -> Array:
    """Return R with R R^T = matrix, (p, rank), accurate row by row when the diagonal spans many orders."""
    scale = np.sqrt(np.maximum(matrix.diagonal(), 0))
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    values, vectors = np.linalg.eigh(inverse[:, None] * matrix * inverse)
    negligible = 8 * len(matrix) * np.finfo(float).eps
    if values[0] < -1e6 * negligible or (np.abs(matrix[scale == 0]) > 0).any():
        raise ValueError("order_parameter of shape (p, p) must be positive semidefinite")
    kept = values > negligible
    return scale[:, None] * vectors[:, kept] * np.sqrt(values[kept])


def _symmetric(name: str, value: ArrayLike, size: int | None = None) -> Array:
    """Return a finite symmetric matrix, or raise ValueError."""
    matrix = np.asarray(value, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or size not in (None, len(matrix)):
        wanted = "(p, p)" if size is None else (size, size)
        raise ValueError(f"{name} must have shape {wanted}, got {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} must be finite")
    if np.abs(matrix - matrix.T).max() > 1e-10 * np.abs(matrix).max():
        raise ValueError(
            f"{name} must be symmetric, it differs from its transpose by {np.abs(matrix - matrix.T).max()}"
        )
    return (matrix + matrix.T) / 2


def _stack(structure_matrices: ArrayLike) -> Array:
    """Return finite structure matrices as (m, p, p), or raise ValueError."""
    stack = np.asarray(structure_matrices, dtype=np.float64)
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or stack.size == 0 or not np.isfinite(stack).all():
        raise ValueError(f"structure_matrices must be finite of shape (m, p, p), got {stack.shape}")
    return stack


def isotropic_strength(structure_matrices: ArrayLike, *, tolerance: float = 1e-8) -> float:
    """Return c of an isotropic design (1/m) sum A_ij A_kl = (c/2)(d_ik d_jl + d_il d_jk), or raise ValueError.

    Args:
        structure_matrices: (m, p, p), m >= p (p + 1) / 2.
        tolerance: largest deviation allowed, relative to c.
    """
    stack = _stack(structure_matrices)
    eye = np.eye(stack.shape[1])
    shape = (np.einsum("ik,jl->ijkl", eye, eye) + np.einsum("il,jk->ijkl", eye, eye)) / 2
    second_moment = np.einsum("mij,mkl->ijkl", stack, stack) / len(stack)
    strength = float((second_moment * shape).sum() / (shape**2).sum())
    deviation = np.abs(second_moment - strength * shape).max()
    if not deviation <= tolerance * strength:
        raise ValueError(f"structure_matrices are not isotropic: deviation {deviation} at c = {strength}")
    return strength


def task_matrix(structure_matrices: ArrayLike, targets: ArrayLike) -> Array:
    """Compute Y = (4/m) sum_mu y_mu A_mu, (p, p), the growth matrix of M near zero."""
    stack = _stack(structure_matrices)
    return 4 * np.tensordot(as_vector("targets", targets, len(stack)), stack, 1) / len(stack)


# ------------------------------------------------------------------- projectors and two factors


def projector_coefficients(
    structure_matrices: ArrayLike, targets: ArrayLike, projectors: ArrayLike, *, tolerance: float = 1e-8
) -> ProjectorCoefficients:
    """Return gamma_a, kappa_a of projectors that unify the solvable cases (Ziyin et al. 2026, theorem 16).

        Y Pi_a + Pi_a Y = 2 gamma_a Pi_a,   K(Pi_b) Pi_a + Pi_a K(Pi_b) = 2 kappa_a delta_ab Pi_a
        Y = (4/m) sum_mu y_mu A_mu,   K(X) = (4/m) sum_mu <A_mu, X> A_mu

    Args:
        structure_matrices: (m, p, p).
        targets: (m,).
        projectors: (a, p, p), symmetric Pi_a.
        tolerance: largest violation of the two conditions, relative to the size of Y and K.

    Raises:
        ValueError: when a condition is violated; the message says which.
    """
    stack, pi = _stack(structure_matrices), _stack(projectors)
    if pi.shape[1] != stack.shape[1]:
        raise ValueError(f"projectors must have shape (a, {stack.shape[1]}, {stack.shape[1]}), got {pi.shape}")
    y = task_matrix(stack, targets)
    overlaps = np.einsum("mij,bij->mb", stack, pi)
    k = 4 / len(stack) * np.einsum("mb,mij->bij", overlaps, stack)  # K(Pi_b)
    norms = (pi**2).sum(axis=(1, 2))

    grown = np.einsum("ij,ajk->aik", y, pi) + np.einsum("aij,jk->aik", pi, y)
    gamma = (grown * pi).sum(axis=(1, 2)) / norms / 2
    if np.abs(grown - 2 * gamma[:, None, None] * pi).max() > tolerance * max(np.abs(y).max(), 1e-300):
        raise ValueError("projectors violate Y Pi + Pi Y = 2 gamma Pi")

    pairs = np.einsum("bij,ajk->abik", k, pi) + np.einsum("aij,bjk->abik", pi, k)
    kappa = np.einsum("aaij,aij->a", pairs, pi) / norms / 2
    expected = np.einsum("ab,a,aij->abij", np.eye(len(pi)), 2 * kappa, pi)
    if np.abs(pairs - expected).max() > tolerance * np.abs(k).max():
        raise ValueError("projectors violate K(Pi_b) Pi_a + Pi_a K(Pi_b) = 2 kappa_a delta_ab Pi_a")
    return ProjectorCoefficients(gamma, kappa)


def projector_abundances(growth: ArrayLike, saturation: ArrayLike, abundance: ArrayLike, times: ArrayLike) -> Array:
    """Solve dz_a/dt = 2 z_a (gamma_a - kappa_a z_a) for M = sum_a z_a Pi_a (Ziyin et al. 2026, theorem 16); (T, a)."""
    gamma, kappa = as_vector("growth", growth), np.asarray(saturation, dtype=np.float64)
    return orthogonal_features(2 * gamma, 2 * kappa, abundance, times)


def two_factor(strengths: ArrayLike, input_variances: ArrayLike, abundance: ArrayLike, times: ArrayLike) -> Array:
    """Solve drho_a/dt = 4 rho_a (tau_a - c_a rho_a), the singular modes of a two-factor model (corollary 4).

        rho_a(t) = tau_a rho_a(0) / (c_a rho_a(0) + (tau_a - c_a rho_a(0)) e^{-4 tau_a t})

    With A = (1/2) [[0, S], [S^T, 0]], (1/m) sum y S = sum_a tau_a u_a v_a^T and (1/m) sum <S, u_a v_a^T> S =
    c_a u_a v_a^T, from a balanced start along u_a v_a^T (Ziyin et al. 2026; two-layer linear nets: Saxe et al. 2014).

    Args:
        strengths: (a,), tau_a.
        input_variances: (a,), c_a >= 0.
        abundance: rho_a(0) > 0, (a,) or one number.
        times: (T,), increasing and nonnegative.

    Returns:
        (T, a), rho_a(t), the singular values of the product of the two factors.
    """
    tau = as_vector("strengths", strengths)
    return orthogonal_features(4 * tau, 4 * as_vector("input_variances", input_variances, tau.size), abundance, times)
