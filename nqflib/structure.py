"""Structure matrices A(x) kept as factors: products, Tr[W W^T A] and the dense matrix of one symmetric form.

A layer's A(x) is p x p with p in the thousands for an attention head, but it is a few vectors: the
feedforward form (equation 17 of Ziyin et al. 2026) with a rank-one coupling,

    A = 1/2 [[0, C], [C^T, 0]],   C = a b^T (x) I_k,

so that Tr[W W^T A] = sum over units of <a^T W_a, b^T W_b> costs O(p d) and no p x p matrix is ever formed.
Every class offers `matvec`, `quadratic` and `dense`; leading axes (samples) and outputs are batched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Structure(ABC):
    """Symmetric structure matrices A(x) of shape (..., c, p, p), one per sample and output."""

    @property
    @abstractmethod
    def p(self) -> int:
        """Parameters per unit."""

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """A v, shape (..., c, p, k), for the k columns of `v` (p, k)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """A as a tensor of shape (..., c, p, p)."""

    def quadratic(self, W: Tensor) -> Tensor:
        """Tr[W W^T A] = sum_i w_i^T A w_i, shape (..., c), for units `W` of shape (p, d)."""
        return (self.matvec(W) * W).sum((-2, -1))

    def _require_rows(self, name: str, value: Tensor) -> None:
        if value.ndim != 2 or value.shape[0] != self.p:
            raise ValueError(f"{name} must have shape (p, columns) = ({self.p}, columns), got {tuple(value.shape)}")


@dataclass(frozen=True)
class DenseStructure(Structure):
    """A given in full, `A` of shape (..., c, p, p); refused unless symmetric."""

    A: Tensor

    def __post_init__(self) -> None:
        if self.A.ndim < 3 or self.A.shape[-1] != self.A.shape[-2]:
            raise ValueError(f"A must have shape (..., c, p, p), got {tuple(self.A.shape)}")
        require_symmetric("A", self.A)

    @property
    def p(self) -> int:
        return self.A.shape[-1]

    def matvec(self, v: Tensor) -> Tensor:
        self._require_rows("v", v)
        return self.A @ v

    def dense(self) -> Tensor:
        return self.A


@dataclass(frozen=True)
class PairStructure(Structure):
    """Two blocks of the unit coupled by a rank-one matrix, repeated: A = 1/2 [[0, C], [C^T, 0]], C = a b^T (x) I_k.

    The unit's rows `start_a` ... hold a q x k block (row-major: entry (i, l) at start_a + i k + l) and
    `start_b` ... an r x k block; Tr[W W^T A] = sum_i sum_l (a^T W_a)_l (b^T W_b)_l. All other rows are zero.
    Arguments: `a` (..., c, q) and `b` (..., c, r), broadcast against each other (an axis of length 1 is
    never copied); `copies` k; `size` p, the parameters per unit. Raises `ValueError` unless the blocks are
    disjoint and within 0 ... p.
    """

    a: Tensor
    b: Tensor
    start_a: int
    start_b: int
    copies: int
    size: int

    @property
    def p(self) -> int:
        return self.size

    def __post_init__(self) -> None:
        ends = [self._rows_a.stop, self._rows_b.stop]
        overlap = self.start_a < ends[1] and self.start_b < ends[0]
        if overlap or min(self.start_a, self.start_b) < 0 or max(ends) > self.p:
            raise ValueError(
                f"blocks {self.start_a}:{ends[0]} and {self.start_b}:{ends[1]} must be disjoint within 0:{self.p}"
            )

    @property
    def _rows_a(self) -> slice:
        return slice(self.start_a, self.start_a + self.a.shape[-1] * self.copies)

    @property
    def _rows_b(self) -> slice:
        return slice(self.start_b, self.start_b + self.b.shape[-1] * self.copies)

    def _contract(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """a^T W_a and b^T W_b, each of shape (..., c, k * columns)."""
        A_side = self.a @ W[self._rows_a].reshape(self.a.shape[-1], -1)
        B_side = self.b @ W[self._rows_b].reshape(self.b.shape[-1], -1)
        return A_side, B_side

    def quadratic(self, W: Tensor) -> Tensor:
        self._require_rows("W", W)
        A_side, B_side = self._contract(W)
        return (A_side * B_side).sum(-1)

    def matvec(self, v: Tensor) -> Tensor:
        self._require_rows("v", v)
        A_side, B_side = self._contract(v)  # (..., c, k * columns)
        lead = torch.broadcast_shapes(self.a.shape[:-1], self.b.shape[:-1])
        product = v.new_zeros(*lead, self.p, v.shape[1])
        half_a = 0.5 * self.a.unsqueeze(-1) * B_side.unsqueeze(-2)  # (..., c, q, k * columns)
        half_b = 0.5 * self.b.unsqueeze(-1) * A_side.unsqueeze(-2)
        product[..., self._rows_a, :] = half_a.reshape(*half_a.shape[:-2], -1, v.shape[1])
        product[..., self._rows_b, :] = half_b.reshape(*half_b.shape[:-2], -1, v.shape[1])
        return product

    def dense(self) -> Tensor:
        return self.matvec(torch.eye(self.p, dtype=self.a.dtype, device=self.a.device))


@dataclass(frozen=True)
class DiagonalPairStructure(Structure):
    """Two halves of the unit coupled entry by entry: A = 1/2 [[0, Diag(c)], [Diag(c), 0]], p = 2 q.

    Tr[W W^T A] = sum_i sum_k c_k W_{k,i} W_{q+k,i}. Argument: `coupling` (..., c, q).
    """

    coupling: Tensor

    @property
    def p(self) -> int:
        return 2 * self.coupling.shape[-1]

    def quadratic(self, W: Tensor) -> Tensor:
        self._require_rows("W", W)
        first, second = W.chunk(2)
        return self.coupling @ (first * second).sum(1)

    def matvec(self, v: Tensor) -> Tensor:
        self._require_rows("v", v)
        first, second = v.chunk(2)
        half = 0.5 * self.coupling.unsqueeze(-1)  # (..., c, q, 1)
        return torch.cat([half * second, half * first], -2)

    def dense(self) -> Tensor:
        return self.matvec(torch.eye(self.p, dtype=self.coupling.dtype, device=self.coupling.device))


def require_symmetric(name: str, matrices: Tensor) -> None:
    """Raise `ValueError` naming `name` unless the last two axes are symmetric to rounding error."""
    asymmetry = (matrices - matrices.mT).abs().amax().item() if matrices.numel() else 0.0
    size = matrices.abs().amax().item() if matrices.numel() else 0.0
    if not asymmetry <= 100 * torch.finfo(matrices.dtype).eps * size:  # also refuses NaN
        raise ValueError(
            f"{name} must be symmetric in its last two axes; max |{name} - {name}^T| = {asymmetry:.3g} "
            f"with max |{name}| = {size:.3g} (a quadratic form only sees (1/2)({name} + {name}^T))"
        )
