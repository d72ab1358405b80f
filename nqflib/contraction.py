"""Contractions of the structure matrices of a form: what a step of the order parameters costs.

One step of theorem 2 needs two contractions, Tr[M A_xk] for every sample and output and sum_xk l'_xk A_xk. On the
dense tensor (n, c, p, p) they cost 2 n c p^2 multiplications and, worse, two passes over n c p^2 numbers. Most
forms have far fewer: A is symmetric (half), the layers' A have blocks of zeros (a perceptron's couples a unit's
incoming with its outgoing weights only), and data on a subspace make the samples' A linearly dependent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nqflib.forms import QuadraticForm


@dataclass(frozen=True)
class SymmetricStack:
    """Symmetric matrices S_xk, given as (n, c, p, p), as one matrix with a column per entry that is ever non-zero.

    A pair (i, j), (j, i) is one column and holds their sum, 2 S_ij, as a trace needs it. Where the columns are
    linearly dependent (data on a subspace), the matrix is kept as `left` (n c, r) times `right` (r, q) if that makes
    a step cheaper, else as `left` (n c, q) with `right` None. The last column is zero and stands for every entry
    that was dropped.
    """

    left: Tensor
    right: Tensor | None
    shape: tuple[int, int]  # (n, c)
    entries: Tensor  # (q,) flat index i p + j of the entry in a column, i <= j
    twice: Tensor | None  # (q,) 2 on the diagonal, 1 off it: from a column's value to 2 S_ij; None if all are 1
    position: Tensor  # (p p,) column of every entry

    @classmethod
    def of(cls, matrices: Tensor, batch_size: int, steps: int) -> SymmetricStack:
        """The stack of `matrices` (n, c, p, p), arranged for `steps` steps on `batch_size` samples each."""
        n, c, p, _ = matrices.shape
        flat = matrices.reshape(n * c, p * p)
        used = (flat != 0).any(0).view(p, p)
        i, j = (used | used.T).triu().nonzero(as_tuple=True)
        q, diagonal = len(i) + 1, i == j
        left = torch.empty(n * c, q, dtype=flat.dtype, device=flat.device)
        torch.mul(flat.index_select(1, i * p + j), torch.where(diagonal, 1, 2), out=left[:, :-1])
        left[:, -1] = 0
        position = torch.full((p, p), q - 1, device=flat.device)
        position[i, j] = position[j, i] = torch.arange(q - 1, device=flat.device)
        entries = torch.cat([i * p + j, i.new_zeros(1)])
        twice = torch.cat([torch.where(diagonal, 2, 1), i.new_ones(1)]).to(flat) if diagonal.any() else None
        # A step reads 2 N q numbers with one matrix and 2 (N r + r q) with two: factor if that saves a third, and
        # if there are enough steps to pay for the search.
        rows = batch_size * c
        largest = int(0.67 * rows * q / (rows + q))
        right = _row_basis(left, largest) if steps > 2 * largest else None
        if right is not None:
            left = left @ right.T
        return cls(left, right, (n, c), entries, twice, position.flatten())

    def on(self, batch: Tensor) -> SymmetricStack:
        """The stack of the samples with indices `batch` (m,)."""
        n, c = self.shape
        left = self.left.view(n, -1).index_select(0, batch).view(len(batch) * c, -1)
        return replace(self, left=left, shape=(len(batch), c))

    def inner(self, M: Tensor, offset: Tensor) -> Tensor:
        """offset + Tr[M S_xk], shape (n, c), for symmetric `M` (p, p) and `offset` (n, c)."""
        phi = M.reshape(-1).index_select(0, self.entries)
        if self.right is not None:
            phi = self.right @ phi
        return torch.addmv(offset.reshape(-1), self.left, phi).view(self.shape)

    def twice_weighted_sum(self, weights: Tensor) -> Tensor:
        """2 sum_xk weights_xk S_xk, shape (p, p), for `weights` (n, c)."""
        total = weights.reshape(-1) @ self.left
        if self.right is not None:
            total = total @ self.right
        if self.twice is not None:
            total = total * self.twice
        p = math.isqrt(len(self.position))
        return total.index_select(0, self.position).view(p, p)


def _row_basis(matrix: Tensor, largest: int) -> Tensor | None:
    """An orthonormal basis (r, q) of the rows of `matrix` (N, q), or None if r exceeds `largest`.

    The rows' span is that of a few more than r random combinations of them, with probability one; the number of
    combinations that stand out of rounding after Gram-Schmidt is r. The cost is that of about `largest` steps.
    """
    if largest < 1:
        return None
    generator = torch.Generator(device=matrix.device).manual_seed(0)
    shape = min(largest + 8, len(matrix)), len(matrix)
    mix = torch.randn(shape, generator=generator, dtype=matrix.dtype, device=matrix.device)
    basis, triangle = torch.linalg.qr((mix @ matrix).T)
    sizes = triangle.diagonal().abs()
    rank = int((sizes > max(matrix.shape) * torch.finfo(matrix.dtype).eps * sizes.max()).sum())
    return basis[:, :rank].T.contiguous() if 0 < rank <= largest else None


@dataclass(frozen=True)
class FormContraction:
    """A form arranged for training: outputs from (M, mu), and v and H of theorem 2 from the loss derivative."""

    f0: Tensor  # (n, c)
    g: Tensor | None  # (n, c, p)
    A: SymmetricStack
    B: SymmetricStack | None

    @classmethod
    def of(cls, form: QuadraticForm, batch_size: int = 1, steps: int = 1) -> FormContraction:
        """The contraction of `form`, arranged for `steps` steps on `batch_size` samples each."""
        B = None if form.B is None else SymmetricStack.of(form.B, batch_size, steps)
        return cls(form.f0, form.g, SymmetricStack.of(form.A, batch_size, steps), B)

    def on(self, batch: Tensor) -> FormContraction:
        """The contraction on the samples with indices `batch` (m,)."""
        g = None if self.g is None else self.g.index_select(0, batch)
        B = None if self.B is None else self.B.on(batch)
        return FormContraction(self.f0.index_select(0, batch), g, self.A.on(batch), B)

    def residual(self, targets: Tensor, steps: int) -> FormContraction:
        """A contraction with outputs r such that (1/n) sum (f - y)^2 = (1/2) sum r^2 + constant, hence dL/dr = r.

        r = sqrt(2/n) Q^T (f - y). The sum keeps its gradient when the n c residuals are multiplied by an orthogonal
        matrix; with the coefficients of (mu, mu mu^T, M) factored as Q R, Q^T leaves one row per column of R and a
        constant. Unlike normal equations R^T R this does not square the condition number. Q is I where there are
        not more residuals than columns, or `steps` are too few to repay the factorisation.
        """
        scale = math.sqrt(2 / len(self.f0))
        stacks = [self.A] if self.B is None else [self.A, self.B]
        blocks = [scale * stack.left for stack in stacks]
        if self.g is not None:
            blocks.append(scale * self.g.flatten(0, 1))
        sizes = [block.shape[1] for block in blocks]
        offset = scale * (self.f0 - targets).reshape(-1, 1)
        if sum(sizes) < len(offset) and steps >= 2 * sum(sizes):
            Q, R = torch.linalg.qr(torch.cat(blocks, 1))
            blocks, offset = [block.contiguous() for block in R.split(sizes, 1)], Q.T @ offset
        A, *B = [replace(stack, left=left, shape=offset.shape) for stack, left in zip(stacks, blocks, strict=False)]
        g = None if self.g is None else blocks[-1][:, None]
        return FormContraction(offset, g, A, B[0] if B else None)

    @property
    def reads_mu(self) -> bool:
        """Whether the form depends on mu at all; if not, `mu` may be None below."""
        return self.g is not None or self.B is not None

    def outputs(self, M: Tensor, mu: Tensor | None) -> Tensor:
        """f0 + g^T mu + mu^T B mu + Tr[M A], shape (n, c), for `M` (p, p) and `mu` (p,)."""
        f = self.A.inner(M, self.f0)
        if self.g is not None and mu is not None:
            f = f + self.g @ mu
        if self.B is not None and mu is not None:
            f = self.B.inner(torch.outer(mu, mu), f)
        return f

    def gradient(self, mu: Tensor | None, derivative: Tensor) -> tuple[Tensor | None, Tensor]:
        """v = sum l' (g + 2 B mu), None for zero, and H = 2 sum l' A, from `derivative` = dL/df (n, c)."""
        H = self.A.twice_weighted_sum(derivative)
        v = None if self.g is None else derivative.reshape(-1) @ self.g.flatten(0, 1)
        if self.B is not None and mu is not None:
            quadratic = self.B.twice_weighted_sum(derivative) @ mu
            v = quadratic if v is None else v + quadratic
        return v, H
