"""The Lotka-Volterra flow in x = ln z with a dense competition, dx/dt = r - C e^x, by LSODA.

The Jacobian is -C diag(e^x). Modes that overlap make it stiff in a single direction, for which no matrix has to be
factorised; otherwise LSODA gets it in full. `nqflib.lotka_volterra.flow` is the function to call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import ODEintWarning, odeint
from scipy.linalg import get_blas_funcs

from nqflib.arguments import Array


def solve_dense(r: Array, c: Array, x0: Array, times: Array, cap: float, tolerance: float) -> tuple[Array, int]:
    """Integrate dx/dt = r - C e^min(x, cap) from x0 (K,) at times[0].

    Arguments: `r` (K,), `c` (K, K), `x0` (K,), `times` (T,) increasing, `cap` a bound that x never reaches, and
    `tolerance`, the error of one step. Returns x (T, K) and the number of right-hand sides.
    Raises `RuntimeError` with LSODA's own message if it gives up.
    """
    # A product with a symmetric matrix is bound by memory: reading one triangle takes 0.6 of the time.
    symmetric = np.array_equal(c, c.T)
    columns = np.asfortranarray(c)
    symv: Any = get_blas_funcs("symv", dtype=np.float64)

    def compete(z: Array) -> Array:
        return symv(1.0, columns, z, lower=1) if symmetric else c @ z

    def abundances(x: Array) -> Array:
        return np.exp(np.minimum(x, cap))

    def derivative(x: Array, _: float) -> Array:
        return r - compete(abundances(x))

    def transposed_jacobian(x: Array, _: float) -> Array:
        return c.T * -abundances(x)[:, None]

    outlier = _outlier(c, compete) if symmetric else None
    if outlier is None:
        return _lsoda(derivative, x0, times, tolerance, Dfun=transposed_jacobian, col_deriv=True)
    # C = strength u u^T + small. A reflection H takes u to the first axis; there the Jacobian -H C diag(z) H is its
    # diagonal, a first row and something small, so that Newton's iteration with the diagonal alone converges in two or
    # three rounds and no matrix is ever factorised, which would be most of the time at K = 1,000.
    u, strength = outlier
    v = u.copy()
    v[0] += np.copysign(1.0, u[0])
    v *= np.sqrt(2) / np.linalg.norm(v)
    own = c.diagonal() - strength * u**2

    def reflect(a: Array) -> Array:
        return a - v * (v @ a)

    def diagonal(y: Array, _: float) -> Array:
        z = abundances(reflect(y))
        entries = -own * z
        entries[0] = -strength * (u**2 @ z)
        return entries[None]

    def reflected(y: Array, time: float) -> Array:
        return reflect(derivative(reflect(y), time))

    # With a looser tolerance LSODA falls back to its explicit method, which stability holds to steps several times
    # smaller: the tightest one costs the least.
    tight = min(tolerance, 1e-12)
    y, evaluations = _lsoda(reflected, reflect(x0), times, tight, Dfun=diagonal, ml=0, mu=0)
    return y - np.outer(y @ v, v), evaluations


def _outlier(c: Array, compete: Callable[[Array], Array]) -> tuple[Array, float] | None:
    """The eigenvector and eigenvalue of a symmetric C beside which all others are small, if there is one.

    Modes that overlap have one, close to the mean direction; it makes the flow stiff.
    """
    if len(c) < 100:  # factorising is cheap
        return None
    u = np.full(len(c), len(c) ** -0.5)
    for _ in range(6):
        u = compete(u)
        u /= np.linalg.norm(u)
    strength = float(u @ compete(u))
    rest = np.linalg.norm(c) ** 2 - strength**2  # of the squares of the other eigenvalues, if u is exact
    return (u, strength) if rest <= (0.05 * strength) ** 2 else None


def _lsoda(
    derivative: Callable[[Array, float], Array], x0: Array, times: Array, tolerance: float, **jacobian: Any
) -> tuple[Array, int]:
    """Call LSODA; x (T, K) and the number of right-hand sides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ODEintWarning)  # raised as an error below
        # The relative tolerance is as good as 0: an error of 1e-9 |ln z| in a mode that waits at 1e-30 would move
        # its switch-on by 70 times the tolerance.
        limits = {"rtol": 1e-13, "atol": tolerance, "mxstep": 1_000_000}
        x, report = odeint(derivative, x0, times, full_output=True, **limits, **jacobian)
    if report["message"] != "Integration successful.":
        raise RuntimeError(f"LSODA stopped: {report['message']}")
    return x, int(report["nfe"][-1])
