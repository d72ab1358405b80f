"""Checks of the arguments that `lotka_volterra`, `closed_forms`, `staircase` and `power_laws` share.

Each function returns its argument as float64 in the one shape that the caller computes with, or raises a
ValueError that names the argument, what was given, and what is valid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

Array = NDArray[np.float64]
# A competition matrix: (K, K) dense or sparse, or its diagonal (K,) when the modes do not interact.
Competition = ArrayLike | sparse.spmatrix | sparse.sparray


def as_vector(name: str, value: ArrayLike, length: int | None = None, *, positive: bool = False) -> Array:
    """Return `value` as a finite vector of `length`, a scalar being repeated, or raise ValueError."""
    vector = np.asarray(value, dtype=np.float64)
    wanted = "(K,)" if length is None else f"({length},)"
    if vector.ndim == 0 and length is not None:
        vector = np.full(length, float(vector))
    if vector.ndim != 1 or vector.size == 0 or (length is not None and vector.size != length):
        raise ValueError(f"{name} must have shape {wanted}, got {np.shape(value)}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{name} must be finite, got {vector[~np.isfinite(vector)][0]}")
    if positive and not (vector > 0).all():
        raise ValueError(f"{name} must be positive, got {vector.min()}; its shape is {wanted}")
    return vector


def as_rates(value: ArrayLike) -> Array:
    """Return the rates as a vector with at least one positive entry, or raise ValueError."""
    rates = as_vector("rates", value)
    if not (rates > 0).any():
        raise ValueError(f"rates of shape (K,) must have a positive entry, the largest is {rates.max()}")
    return rates


def as_competition(value: Competition, length: int) -> Any:
    """Return a finite competition as a diagonal (K,), a matrix (K, K) or a sparse csr_array, or raise ValueError."""
    matrix: Any = sparse.csr_array(value) if sparse.issparse(value) else np.asarray(value, dtype=np.float64)
    if matrix.shape not in ((length,), (length, length)):
        raise ValueError(
            f"competition must have shape ({length}, {length}), or ({length},) for its diagonal, "
            f"to match the {length} rates; got {matrix.shape}"
        )
    entries = matrix.data if sparse.issparse(matrix) else matrix
    if not np.isfinite(entries).all():
        raise ValueError("competition must be finite")
    diagonal = matrix if matrix.ndim == 1 else matrix.diagonal()
    if (diagonal < 0).any():
        raise ValueError(f"competition must have no negative diagonal entry, got {diagonal.min()}")
    return matrix


def as_times(value: ArrayLike) -> Array:
    """Return finite, nonnegative, increasing times, or raise ValueError."""
    times = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all():
        raise ValueError(f"times must be a finite vector (T,), got shape {times.shape}")
    if times[0] < 0 or (np.diff(times) < 0).any():
        raise ValueError("times must be nonnegative and increasing")
    return times
