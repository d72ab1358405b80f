"""Compression of a neural quadratic form: k_V + 1 units that train exactly like any larger number of them.

Training only ever reads M and mu inside the subspace V spanned by the vectors g(x) and the columns of A(x) and B(x)
of the training samples, of dimension k_V <= p. In an orthonormal basis V (p, k_V), d' = k_V + 1 units

    w'_i = V (V^T mu/d' + u_i),   U = L Z,   L L^T = C_V = (d/d') V^T (M - mu mu^T/d) V,   Z 1 = 0,   Z Z^T = I

have mu' = V V^T mu and M' = (d/d') V V^T M V V^T. With g' = g, B' = B, A' = (d'/d) A and eta' = (d/d') eta their
outputs on the training samples equal those of the d units at the start, and so they stay under SGD: d v eta and H eta
in theorem 2 are unchanged, hence also with momentum, and with weight decay gamma' = (d'/d) gamma.
Fewer units than k_V + 1 can carry only the d' - 1 largest modes of C_V; corollary 3 bounds what that costs.

Source: Ziyin et al. 2026, theorem 3 and corollary 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nqflib.forms import QuadraticForm
from nqflib.moments import Moments, Trajectory


@dataclass(frozen=True)
class Compression:
    """A form of few units, its weights, and the settings with which it trains like the original.

    Train `form` from `W` with rate `eta` and decay `weight_decay` (momentum and batches as in the original).
    `discarded` holds the eigenvalues of C_V that had no room, in descending order: empty if the width is k_V + 1
    or more, and then the training dynamics are the same up to rounding.
    """

    form: QuadraticForm  # A times d'/d
    W: Tensor  # (p, d')
    eta: float  # d/d' times the original's
    weight_decay: float  # d'/d times the original's
    basis: Tensor  # V (p, k_V), orthonormal columns
    discarded: Tensor  # (k_V + 1 - d',) or empty
    d: int  # units of the original

    @property
    def scale(self) -> float:
        """d'/d, the factor of A."""
        return self.W.shape[1] / self.d

    @property
    def initial_error(self) -> float:
        """|(d'/d) M' - M|_F + |mu' - mu| at the start, on the subspace V: (d'/d) sqrt(sum of discarded^2).

        The paper's equation 239 leaves out the factor d'/d (C itself is scaled by d/d'), so its bound is d/d' times
        looser than it needs to be.
        """
        return self.scale * self.discarded.square().sum().sqrt().item()


def training_subspace(form: QuadraticForm, *, tolerance: float | None = None) -> Tensor:
    """An orthonormal basis V (p, k_V) of the span of g(x) and the columns of A(x), B(x) over all samples and outputs.

    A direction counts if its singular value exceeds `tolerance` times the largest, g, A and B each measured against
    their own size; the default is 100 times the rounding unit. Pass a larger one for data of lower precision.
    Raises `ValueError` if the form does not depend on the weights at all.
    """
    if tolerance is None:
        tolerance = 100 * torch.finfo(form.A.dtype).eps
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1, got {tolerance}")
    triangles = []
    for tensor in (form.g, form.A, form.B):
        if tensor is not None and tensor.abs().max() > 0:
            triangle = torch.linalg.qr(tensor.reshape(-1, form.p), mode="r").R  # the same row space, p rows
            triangles.append(triangle / torch.linalg.matrix_norm(triangle, 2))
    if not triangles:
        raise ValueError("form must depend on the weights, but its g, A and B are zero on every sample")
    _, sizes, directions = torch.linalg.svd(torch.cat(triangles), full_matrices=False)
    return directions[sizes > tolerance * sizes[0]].T.contiguous()


def compress(
    form: QuadraticForm,
    W: Tensor | Moments,
    *,
    eta: float,
    weight_decay: float = 0.0,
    width: int | None = None,
    truncate: bool = False,
    basis: Tensor | None = None,
) -> Compression:
    """The form of few units that trains like `form` from `W` (theorem 3).

    Arguments: `form` on the training samples; `W` (p, d) or its order parameters; `eta` and `weight_decay` of the
    original; `width` the number of units d', k_V + 1 if None; `truncate` allows fewer than k_V + 1, which keeps
    the d' - 1 largest modes (corollary 3); `basis` a subspace V (p, k) to use instead of the training samples' own,
    as a layer inside a stack needs, whose subspace is taken over the whole trajectory (theorem 15).
    Raises `ValueError` if `width` is below k_V + 1 without `truncate` or not below d, if `basis` is not orthonormal,
    or if `eta` is not positive.
    """
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta}")
    moments = W if isinstance(W, Moments) else Moments.of(W)
    if moments.p != form.p:
        raise ValueError(f"W must have shape (p, d) with the form's p = {form.p}, got p = {moments.p}")
    V = training_subspace(form) if basis is None else _checked_basis(basis, form.p)
    k, d = V.shape[1], moments.d
    width = k + 1 if width is None else width
    if width < 1 or (width < k + 1 and not truncate):
        raise ValueError(
            f"width must be at least k_V + 1 = {k + 1}, got {width}; "
            "fewer units, at least 1, need truncate=True and are not exact (corollary 3)"
        )
    if width >= d:
        raise ValueError(f"width must be below the number of units d = {d}, got {width} (k_V + 1 = {k + 1})")
    # An SVD of the square root of the covariance keeps the digits of its small modes; C_V itself would not.
    modes, sizes, _ = torch.linalg.svd(V.T @ moments.factor[:, 1:], full_matrices=False)
    sizes, kept = sizes * math.sqrt(d / width), min(len(sizes), width - 1)
    U = (modes[:, :kept] * sizes[:kept]) @ _zero_sum_rows(width, V)[:kept]
    return Compression(
        form=replace(form, A=form.A * (width / d)),
        W=V @ ((V.T @ moments.mu)[:, None] / width + U),
        eta=eta * d / width,
        weight_decay=weight_decay * width / d,
        basis=V,
        discarded=sizes[kept:].square(),
        d=d,
    )


def _checked_basis(basis: Tensor, p: int) -> Tensor:
    if basis.ndim != 2 or basis.shape[0] != p or not 1 <= basis.shape[1] <= p:
        raise ValueError(f"basis must have shape (p, k) with p = {p} and 1 <= k <= p, got {tuple(basis.shape)}")
    gram = basis.T @ basis
    if not torch.allclose(gram, torch.eye(len(gram), dtype=gram.dtype, device=gram.device), atol=1e-6):
        raise ValueError("basis must have orthonormal columns, V^T V = I")
    return basis


def _zero_sum_rows(width: int, like: Tensor) -> Tensor:
    """Z (width - 1, width) with Z 1 = 0 and Z Z^T = I: the cosine transform without its constant.

    Any such Z will do; this one spreads each mode over all units, so that none starts much larger than the rest.
    """
    row = torch.arange(1, width, dtype=like.dtype, device=like.device)[:, None]
    column = torch.arange(width, dtype=like.dtype, device=like.device)
    return math.sqrt(2 / width) * torch.cos(math.pi * row * (column + 0.5) / width)


def statistics_error(compression: Compression, M: Tensor, mu: Tensor, M_small: Tensor, mu_small: Tensor) -> Tensor:
    """|(d'/d) M' - M|_F + |mu' - mu|_2 on the subspace V, which is all that the outputs see (corollary 3).

    Arguments: order parameters `M` (..., p, p), `mu` (..., p) of the original and `M_small`, `mu_small` of the
    compressed form, for instance along two trajectories. Returns shape (...).
    """
    V = compression.basis
    error_M = V.T @ (compression.scale * M_small - M) @ V
    return error_M.flatten(-2).norm(dim=-1) + ((mu_small - mu) @ V).norm(dim=-1)


def error_bound(compression: Compression, *, eta: float, lipschitz: float, steps: Tensor) -> Tensor:
    """Corollary 3: `statistics_error` <= initial_error exp(eta L t) after t = `steps` (T,) updates at rate `eta`.

    `eta` is the original's rate, `lipschitz` the constant L of the update per unit of eta (`lipschitz_constant`).
    Returns shape (T,). The bound lets the error grow at its fastest rate for the whole run, so it is loose.
    """
    if not (eta > 0 and lipschitz >= 0):
        raise ValueError(f"eta must be positive and lipschitz at least 0, got {eta} and {lipschitz}")
    return compression.initial_error * torch.exp(eta * lipschitz * steps.to(torch.float64))


def lipschitz_constant(compression: Compression, original: Trajectory, compressed: Trajectory, *, eta: float) -> float:
    """The smallest L for which the updates of two runs differ by at most eta L times their difference (equation 241).

    It is the local Lipschitz constant of corollary 3 along these two runs, max_t |Delta s'_t - Delta s_t|/(eta |s'_t -
    s_t|) for s = (M, mu) on V, M' scaled by d'/d, and makes the bound as tight as it can be. A constant that is known
    before the runs, such as a bound on the Jacobian of the update, is larger still.

    Arguments: trajectories recorded at every step by SGD on the same batches; `eta` the original's rate.
    Raises `ValueError` if a trajectory skips steps, or if the compression is exact: then only rounding differs.
    """
    steps = min(len(original.steps), len(compressed.steps)) - 1
    if steps < 1 or original.steps[steps] != steps or compressed.steps[steps] != steps:
        raise ValueError("original and compressed must be recorded at every step (record_every=1), at least one step")
    if compression.initial_error == 0:
        raise ValueError("compression must be truncated: an exact one has no error whose growth could be measured")
    V = compression.basis
    M = V.T @ (compression.scale * compressed.M[: steps + 1] - original.M[: steps + 1]) @ V
    mu = (compressed.mu[: steps + 1] - original.mu[: steps + 1]) @ V
    difference = M.flatten(1).norm(dim=1) + mu.norm(dim=1)
    change = M.diff(dim=0).flatten(1).norm(dim=1) + mu.diff(dim=0).norm(dim=1)
    return (change / difference[:-1]).max().item() / eta
