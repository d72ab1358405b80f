"""What a quadratic form leaves out, and how fast it vanishes with the weights.

For a layer f and its form F the remainder is R(s) = f(s W) - F(s W), W fixed and s -> 0. Theorem 1 of Ziyin et al.
2026 says R = O(s^3), and O(s^4) where flipping the sign of one unit changes nothing; a layer without second
derivatives at W = 0 has no form, and then R ~ s^2 or worse for every candidate. Here a layer is any function of
W (p, d) that returns (n, c), so that several inputs and any bookkeeping of parameters fit.

    >>> scales = torch.logspace(-3, -1, 9, dtype=torch.float64)
    >>> zero = QuadraticForm(torch.zeros(1, 1).double(), None, torch.zeros(1, 1, 2, 2).double())
    >>> W = torch.ones(1, 2, 3, dtype=torch.float64)
    >>> round(remainder(lambda W: W.prod(0).sum().pow(2).reshape(1, 1), zero, W, scales).order, 6)
    4.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nqflib.forms import QuadraticForm

LayerFunction = Callable[[Tensor], Tensor]  # W (p, d) -> f (n, c)


@dataclass(frozen=True)
class Remainder:
    """|f - F| and |F - f0| of a layer at the weights s W: root mean squares over samples and draws of W.

    `scales` (S,) the values of s; `left` (S, c) the remainder of each output; `form` (S, c) the size of the form
    itself beyond its constant.
    """

    scales: Tensor
    left: Tensor
    form: Tensor

    @property
    def orders(self) -> Tensor:
        """The power of s with which each output's remainder vanishes, (c,): a least-squares slope of logarithms."""
        return _slopes(self.scales, self.left)

    @property
    def order(self) -> float:
        """The smallest order over the outputs."""
        return self.orders.min().item()

    @property
    def relative(self) -> Tensor:
        """Remainder over form, (S,), all outputs together."""
        return self.left.square().sum(1).sqrt() / self.form.square().sum(1).sqrt()

    @property
    def relative_order(self) -> float:
        """The power of s with which the relative error of the form vanishes."""
        return _slopes(self.scales, self.relative[:, None]).item()


def remainder(
    f: LayerFunction, form: Callable[[Tensor], Tensor], weights: Tensor, scales: Tensor, f0: Tensor | None = None
) -> Remainder:
    """The remainder of `form` at s W for every s of `scales` (S,) and every W of `weights` (draws, p, d).

    `form` maps W to (n, c), a `QuadraticForm` or more terms than that; `f0` (n, c) is f(0), by default computed. Raises
    `ValueError` if `weights` has no axis of draws, or if a scale is not positive.
    """
    if weights.ndim != 3:
        raise ValueError(f"weights must have shape (draws, p, d), got {tuple(weights.shape)}")
    if scales.ndim != 1 or not (scales > 0).all():
        raise ValueError(f"scales must be a vector of positive numbers, got {scales.tolist()}")
    with torch.no_grad():
        f0 = f(torch.zeros_like(weights[0])) if f0 is None else f0
        left, size = [], []
        for s in scales:
            values, forms = (torch.stack([g(s * W) for W in weights]) for g in (f, form))  # (draws, n, c)
            left.append((values - forms).square().mean((0, 1)).sqrt())
            size.append((forms - f0).square().mean((0, 1)).sqrt())
    return Remainder(scales, torch.stack(left), torch.stack(size))


def _slopes(scales: Tensor, values: Tensor) -> Tensor:
    """Least-squares slopes of ln `values` (S, c) against ln `scales` (S,)."""
    x = scales.log() - scales.log().mean()
    y = values.log()
    return x @ (y - y.mean(0)) / (x @ x)


def best_form(f: LayerFunction, weights: Tensor, f0: Tensor) -> QuadraticForm:
    """The form f0 + Tr[M A] closest to a layer over given weights, in the mean square.

    For layers that have no second derivatives at 0: whatever A is used instead, it does not do better than this one.
    Arguments: `weights` (draws, p, d), many more draws than the p (p + 1)/2 entries of A; `f0` (n, c). Raises
    `ValueError` if there are fewer draws than entries. The forms of rectified units come out with half the slope.
    """
    draws, p, _ = weights.shape
    i, j = torch.triu_indices(p, p)
    if draws < len(i):
        raise ValueError(f"weights must hold at least {len(i)} draws, one for each entry of A, got {draws}")
    with torch.no_grad():
        M = weights @ weights.mT
        values = torch.stack([f(W) - f0 for W in weights])  # (draws, n, c)
        entries = torch.linalg.lstsq(M[:, i, j], values.flatten(1)).solution.T.reshape(*f0.shape, -1)
    A = torch.zeros(*f0.shape, p, p, dtype=weights.dtype)
    A[..., i, j] = entries / 2  # the two halves of an off-diagonal entry, or of a diagonal one, are added back below
    return QuadraticForm(f0, None, A + A.mT)


@dataclass(frozen=True)
class CubicTerms:
    """The third-order terms of a layer of exchangeable units, one for each partition of three.

        f_3(W) = 1/6 sum_i T3[w_i, w_i, w_i] + 1/2 sum_{i != j} T21[w_i, w_i, w_j]
               + 1/6 sum_{i, j, k distinct} T111[w_i, w_j, w_k],

    the T being third derivatives at W = 0 in one, two and three units, each (n, c, p, p, p).
    Source: Ziyin et al. 2026, theorem 13, for k = 3.
    """

    T3: Tensor
    T21: Tensor
    T111: Tensor

    def __call__(self, W: Tensor, partitions: tuple[str, ...] = ("3", "2+1", "1+1+1")) -> Tensor:
        """The terms of the named partitions at `W` (p, d), shape (n, c)."""
        mu, M = W.sum(1), W @ W.T
        three = torch.einsum("ai,bi,ci->abc", W, W, W)  # sum_i w_i w_i w_i
        pair = torch.einsum("ab,c->abc", M, mu) - three  # sum_{i != j} w_i w_i w_j
        # Distinct indices: all triples, less the three ways in which exactly two agree, less those where all do.
        mixed = pair + pair.permute(0, 2, 1) + pair.permute(2, 1, 0)
        distinct = torch.einsum("a,b,c->abc", mu, mu, mu) - mixed - three
        sums = {"3": (self.T3, three, 6), "2+1": (self.T21, pair, 2), "1+1+1": (self.T111, distinct, 6)}
        return sum(
            (torch.tensordot(T, S, dims=3) / k for T, S, k in (sums[name] for name in partitions)), W.new_zeros(1)
        )


def cubic_terms(f: LayerFunction, p: int, d: int) -> CubicTerms:
    """The third derivatives of a layer at W = 0 in one, two and three of its units, by automatic differentiation.

    `p` parameters for each of `d` units, at least three. The cost is about 2 p^2 derivatives for every sample and
    output, whatever d is. Raises `ValueError` for fewer units.
    """
    if d < 3:
        raise ValueError(f"d must be at least 3, so that there are three different units, got {d}")
    three = torch.zeros(p, 3, dtype=torch.float64, requires_grad=True)
    values = f(torch.cat([three, three.new_zeros(p, d - 3)], 1))
    found = [_third_derivatives(value, three) for value in values.flatten()]
    T3, T21, T111 = (torch.stack(parts).reshape(*values.shape, p, p, p) for parts in zip(*found, strict=True))
    return CubicTerms(T3, T21, T111)


def _third_derivatives(value: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d^3/dw_1^3, d^3/dw_1^2 dw_2 and d^3/dw_1 dw_2 dw_3 of a number that depends on `W` (p, 3), each (p, p, p)."""

    def gradient(y: Tensor) -> Tensor:
        if not y.requires_grad:  # a derivative that is constant
            return torch.zeros_like(W)
        return torch.autograd.grad(y, W, create_graph=True, materialize_grads=True)[0]

    p, first = W.shape[0], gradient(value)
    thirds = W.new_zeros(3, p, p, p)
    for a in range(p):
        second = gradient(first[a, 0])
        for b in range(p):
            same, other = gradient(second[b, 0]).detach(), gradient(second[b, 1]).detach()
            thirds[0, a, b], thirds[1, a, b], thirds[2, a, b] = same[:, 0], same[:, 1], other[:, 2]
    return thirds[0], thirds[1], thirds[2]
