"""Neural quadratic forms: the second-order expansion of a layer made of exchangeable units.

A layer with d units of p parameters each is a function f(W; x) of W in R^{p x d}, one COLUMN w_i per
unit. Near W = 0 it is, up to O(|W|^3),

    f(W; x) = f0(x) + g(x)^T mu + mu^T B(x) mu + Tr[M A(x)],   mu = W 1 = sum_i w_i,   M = W W^T = sum_i w_i w_i^T.

One convention for A and B throughout (equation 20 of Ziyin et al. 2026): B couples every pair of units, a
unit with itself included, and A is what a single unit has beyond that. In derivatives at W = 0,

    B = 1/2 d^2 f / dw_1 dw_2,    A = 1/2 d^2 f / dw_1^2 - B.

Theorem 12 of the paper splits sum_i w_i^T A w_i + sum_{i != j} w_i^T B w_j instead; its A is A + B here. When
the gradient of f in a unit vanishes at that unit's zero whatever the others are (ZGZ, theorem 1), g = 0 and
B = 0 and only the structure matrix A is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jacrev, jvp, vmap

from nqflib.structure import Structure, require_symmetric
from nqflib.units import Inputs, UnitAxes, evaluate, unit_axes_of, unit_matrix


@dataclass(frozen=True)
class QuadraticForm:
    """A neural quadratic form on n samples, with c outputs and p parameters per unit.

        f(W) = f0 + g^T mu + mu^T B mu + Tr[M A],   mu = W 1,   M = W W^T,   W of shape (p, d).

    Arguments: `f0` (n, c) values at W = 0; `g` (n, c, p) or None for zero; `A` (n, c, p, p) symmetric
    structure matrices; `B` (n, c, p, p) symmetric or None for zero. The convention for A and B is the
    module's. Raises `ValueError` naming the field whose shape, dtype or symmetry is wrong.
    Source: Ziyin et al. 2026, theorems 1 and 12, equation 20, corollary 1 (one A per output).
    """

    f0: Tensor  # (n, c)
    g: Tensor | None  # (n, c, p)
    A: Tensor  # (n, c, p, p)
    B: Tensor | None = None  # (n, c, p, p)

    def __post_init__(self) -> None:
        if self.f0.ndim != 2:
            raise ValueError(f"f0 must have shape (n, c), got {tuple(self.f0.shape)}")
        n, c = self.f0.shape
        if self.A.ndim != 4 or self.A.shape[:2] != (n, c) or self.A.shape[2] != self.A.shape[3]:
            raise ValueError(f"A must have shape (n, c, p, p) = ({n}, {c}, p, p), got {tuple(self.A.shape)}")
        p = self.A.shape[-1]
        if self.g is not None and self.g.shape != (n, c, p):
            raise ValueError(f"g must have shape (n, c, p) = ({n}, {c}, {p}), got {tuple(self.g.shape)}")
        if self.B is not None and self.B.shape != self.A.shape:
            raise ValueError(f"B must have shape (n, c, p, p) = {tuple(self.A.shape)}, got {tuple(self.B.shape)}")
        for name, value in (("g", self.g), ("A", self.A), ("B", self.B)):
            if value is not None and value.dtype != self.f0.dtype:
                raise ValueError(f"{name} must have the dtype of f0, {self.f0.dtype}, got {value.dtype}")
        require_symmetric("A", self.A)
        if self.B is not None:
            require_symmetric("B", self.B)

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.f0.shape[0]

    @property
    def c(self) -> int:
        """Number of outputs."""
        return self.f0.shape[1]

    @property
    def p(self) -> int:
        """Number of parameters per unit."""
        return self.A.shape[-1]

    def __getitem__(self, samples: Tensor | slice | list[int]) -> QuadraticForm:
        """The form on a subset of the samples, for minibatches; `samples` indexes the first axis."""
        g = None if self.g is None else self.g[samples]
        B = None if self.B is None else self.B[samples]
        return QuadraticForm(self.f0[samples], g, self.A[samples], B)

    def __call__(self, W: Tensor) -> Tensor:
        """f(W), shape (n, c), for weights `W` of shape (p, d): one column per unit."""
        if W.ndim != 2 or W.shape[0] != self.p:
            raise ValueError(f"W must have shape (p, d) = ({self.p}, d), got {tuple(W.shape)}")
        return self.from_moments(W @ W.T, W.sum(1))

    def from_moments(self, M: Tensor, mu: Tensor) -> Tensor:
        """f0 + g^T mu + mu^T B mu + Tr[M A], shape (n, c), from `M` (p, p) and `mu` (p,)."""
        if M.shape != (self.p, self.p):
            raise ValueError(f"M must have shape (p, p) = ({self.p}, {self.p}), got {tuple(M.shape)}")
        if mu.shape != (self.p,):
            raise ValueError(f"mu must have shape (p,) = ({self.p},), got {tuple(mu.shape)}")
        f = self.f0 + torch.tensordot(self.A, M, dims=2)
        if self.g is not None:
            f = f + self.g @ mu
        if self.B is not None:
            f = f + self.B @ mu @ mu
        return f


class AutodiffStructure(Structure):
    """A(x) of any module by Hessian-vector products at W = 0; `matvec` never forms a p x p matrix.

        A v = 1/2 (H_11 - H_21) v,   H_ij = d^2 f / dw_i dw_j at W = 0

    (H_21 vanishes under ZGZ, and is absent when d = 1). One column costs one forward derivative of the n c
    gradients, whatever the width. Arguments: `module`, `x`, `unit_axes` as in `expand`; `chunk` columns are
    differentiated at once.
    """

    def __init__(self, module: nn.Module, x: Inputs, unit_axes: UnitAxes | None = None, chunk: int = 16) -> None:
        self.module = module
        self.samples = x if isinstance(x, tuple) else (x,)
        self.unit_axes = unit_axes_of(module, unit_axes)
        self.chunk = chunk
        self.zero = torch.zeros_like(unit_matrix(module, self.unit_axes).detach())  # (p, d)

    @property
    def p(self) -> int:
        return self.zero.shape[0]

    def value(self) -> Tensor:
        """f at W = 0, shape (n, c)."""
        with torch.no_grad():
            return evaluate(self.module, self.zero, self.samples, self.unit_axes)

    def gradients(self, first: Tensor) -> Tensor:
        """df/dw_i, (n, c, p, k), with the first k units at `first` (p, k) and the rest at 0."""

        def one_sample(units: Tensor, sample: tuple[Tensor, ...]) -> Tensor:
            W = torch.cat([units, self.zero[:, first.shape[1] :]], 1)
            return evaluate(self.module, W, tuple(s.unsqueeze(0) for s in sample), self.unit_axes)[0]

        return vmap(jacrev(one_sample), in_dims=(None, 0))(first, self.samples)

    def second_derivatives(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """H_11 v and H_21 v for the columns of `v` (p, k), each (n, c, p, k); H_21 v = 0 when d = 1."""
        self._require_rows("v", v)
        pair = self.zero[:, :2]  # by exchangeability two units hold all second derivatives

        def push(column: Tensor) -> Tensor:
            tangent = torch.cat([column[:, None], pair[:, 1:]], 1)
            return jvp(self.gradients, (pair,), (tangent,))[1]  # (n, c, p, 1 or 2)

        moved = vmap(push, in_dims=1, out_dims=-1, chunk_size=self.chunk)(v)
        same = moved[..., 0, :]
        return same, moved[..., 1, :] if pair.shape[1] == 2 else torch.zeros_like(same)

    def matvec(self, v: Tensor) -> Tensor:
        same, other = self.second_derivatives(v)
        return 0.5 * (same - other)

    def dense(self) -> Tensor:
        A = self.matvec(torch.eye(self.p, dtype=self.zero.dtype, device=self.zero.device))
        return 0.5 * (A + A.mT)


def expand(module: nn.Module, x: Inputs, *, unit_axes: UnitAxes | None = None, chunk: int = 16) -> QuadraticForm:
    """The quadratic form of `module` on the samples `x`, by automatic differentiation at W = 0.

        f0 = f(0),  g = df/dw_1,  B = 1/2 d^2 f/dw_1 dw_2,  A = 1/2 d^2 f/dw_1^2 - B

    By exchangeability two units' coordinates suffice; with one unit (d = 1) B = 0. Arguments: `module` is any
    torch module f(W; x) that treats samples independently and returns (n,) or (n, c); `x` a tensor (n, ...) or a
    tuple of them; `unit_axes` says where the units are (default: the module's own, see `nqflib.units`). g and
    B come back as None where they vanish identically. For A without a p x p matrix use `AutodiffStructure`.
    Raises `ValueError` if d^2 f/dw_1 dw_2 is not symmetric (then the two units are not exchangeable), or if a
    derivative at 0 is not finite. Nothing else is verified here; `check` does that.
    Source: Ziyin et al. 2026, theorem 12 (equation 20 for the split of A and B).

        >>> layer = nn.Sequential(nn.Linear(2, 5, bias=False), nn.Tanh(), nn.Linear(5, 1, bias=False))
        >>> expand(layer, torch.tensor([[3.0, 4.0]]), unit_axes={"0.weight": 0, "2.weight": 1}).A[0, 0]
        tensor([[0.0000, 0.0000, 1.5000],
                [0.0000, 0.0000, 2.0000],
                [1.5000, 2.0000, 0.0000]])
    """
    operator = AutodiffStructure(module, x, unit_axes, chunk)
    g = operator.gradients(operator.zero[:, :1])[..., 0]
    same, other = operator.second_derivatives(torch.eye(operator.p, dtype=g.dtype, device=g.device))
    for name, derivative in (("gradient", g), ("second derivative", same), ("mixed derivative", other)):
        if not derivative.isfinite().all():
            raise ValueError(f"the {name} of the module at W = 0 is not finite; the expansion does not exist")
    try:
        require_symmetric("d^2 f / dw_1 dw_2", other)
    except ValueError as error:
        raise ValueError(f"the units named in unit_axes are not exchangeable: {error}") from None
    B = 0.25 * (other + other.mT)
    A = 0.25 * (same + same.mT) - B
    g, A, B = g.detach(), A.detach(), B.detach()  # parameters that are not units may require gradients
    return QuadraticForm(operator.value(), g if g.any() else None, A, B if B.any() else None)


@dataclass(frozen=True)
class Report:
    """Which hypotheses of theorem 1 a module meets on its samples, and how well its quadratic form does.

    `exchange_error`: largest |f(W P) - f(W)| over random permutations P, relative to max |f - f(0)|;
    `zero_gradient_error`: largest |df/dw_i| at w_i = 0 with random other units, relative to that at random w_i;
    `kink`: lowest order k <= 3 at which the one-sided k-th derivatives at W = 0 differ, None if they all agree;
    `order` +- `order_error`: exponent of |f(s W) - form(s W)| in s and its standard error; inf if the remainder is
    rounding error, nan if there is no form; `empty`: the form is constant, so that f starts at that order;
    `failures`: a sentence for each hypothesis or conclusion that fails.
    """

    exchange_error: float
    zero_gradient_error: float
    kink: int | None
    order: float
    order_error: float
    empty: bool
    failures: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "; ".join(self.failures) or "all hypotheses of theorem 1 hold"
        empty = ", and the form is empty" if self.empty else ""
        return f"{verdict} (remainder of order {self.order:.3g} +- {self.order_error:.2g}{empty})"


def check(
    module: nn.Module,
    x: Inputs,
    *,
    unit_axes: UnitAxes | None = None,
    scale: float = 0.1,
    draws: int = 4,
    generator: torch.Generator | None = None,
) -> Report:
    """Test the hypotheses of theorem 1 for `module` on the samples `x`, and the order of what its form leaves out.

    Exchangeability of the units, zero gradient at zero (ZGZ), three derivatives at W = 0, and
    |f(s W) - form(s W)| ~ s^order for s = 1, 1/2, ..., 1/64. A module that fails ZGZ alone still has a form, with
    g and B (theorem 12), and order >= 3. Arguments: as in `expand`; `scale` standard deviation of the random
    weights; `draws` of them. Smoothness is tested on rays through W = 0 only. Raises `ValueError` unless the module is
    in float64 (a remainder of order 4 drowns in float32) and finite at W = 0.
    """
    axes = unit_axes_of(module, unit_axes)
    zero = torch.zeros_like(unit_matrix(module, axes).detach())
    if zero.dtype != torch.float64:
        raise ValueError(f"module must be in float64 for this test, its units are {zero.dtype}")
    weights = [scale * _normal_like(zero, generator) for _ in range(draws)]

    def f(W: Tensor) -> Tensor:
        with torch.no_grad():
            return evaluate(module, W, x, axes)

    f0 = f(zero)
    if not f0.isfinite().all():
        raise ValueError(
            "the module is not finite at W = 0 (a normalisation without epsilon?); no expansion exists there"
        )
    change = max((f(W) - f0).abs().max().item() for W in weights)
    permuted = [W[:, torch.randperm(W.shape[1], generator=generator)] for W in weights]
    exchange = max((f(W) - f(P)).abs().max().item() for W, P in zip(weights, permuted, strict=True))
    exchange_error = exchange / change if change else exchange

    zero_gradient_error = _zero_gradient_error(lambda W: evaluate(module, W, x, axes), weights, generator)
    kink = next((k for k in (1, 2, 3) if _one_sided_derivatives_differ(f, weights, k)), None)
    try:
        form = expand(module, x, unit_axes=axes)
        order, order_error = _remainder_order(f, form, weights)
        empty = form.g is None and form.B is None and not form.A.any()
    except ValueError:  # not exchangeable, or a derivative is not finite: there is no form
        order, order_error, empty = math.nan, math.nan, False
    failures = []
    if exchange_error > 1e-9:
        failures.append(f"exchangeability fails: permuting units changes f by {exchange_error:.2g} of its size")
    if zero_gradient_error > 1e-9:
        failures.append(f"zero gradient at zero fails: {zero_gradient_error:.2g} of the gradient at random weights")
    if kink is not None:
        failures.append(f"smoothness fails: derivatives of order {kink} at W = 0 differ from side to side")
    if not order > 3 - max(0.1, 3 * order_error):
        failures.append(f"the remainder is of order {order:.2f}, not 3 or more")
    return Report(exchange_error, zero_gradient_error, kink, order, order_error, empty, tuple(failures))


def _zero_gradient_error(
    f: Callable[[Tensor], Tensor], weights: list[Tensor], generator: torch.Generator | None
) -> float:
    """max |df/dw_i| along random directions at w_i = 0, over the same at random w_i; other units random."""
    at_zero, at_random = 0.0, 0.0
    for W in weights:
        unit = int(torch.randint(W.shape[1], (), generator=generator))
        direction, without = torch.zeros_like(W), W.clone()
        direction[:, unit] = _normal_like(W[:, unit], generator)
        without[:, unit] = 0
        at_zero = max(at_zero, jvp(f, (without,), (direction,))[1].abs().max().item())
        at_random = max(at_random, jvp(f, (W,), (direction,))[1].abs().max().item())
    return at_zero / at_random if at_random else at_zero


def _normal_like(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _halvings(count: int) -> Tensor:
    return 0.5 ** torch.arange(count, dtype=torch.float64)


def _slope(log_x: Tensor, log_y: Tensor) -> tuple[float, float]:
    """Least-squares slope and its standard error."""
    dx = log_x - log_x.mean()
    slope = (dx @ log_y / (dx @ dx)).item()
    residual = log_y - log_y.mean() - slope * dx
    return slope, (residual @ residual / (len(dx) - 2) / (dx @ dx)).sqrt().item()


def _one_sided_derivatives_differ(f: Callable[[Tensor], Tensor], weights: list[Tensor], k: int) -> bool:
    """Whether k-th forward and backward differences at 0 along the weights fail to meet as their step shrinks.

    Where k + 1 derivatives exist they differ by O(h); a jump of the k-th derivative keeps them apart.
    """
    steps = _halvings(7)
    gaps, noise = torch.zeros_like(steps), 0.0
    for W in weights:
        for i, h in enumerate(steps.tolist()):
            ahead = torch.stack([f(j * h * W) for j in range(k + 1)])
            behind = torch.stack([f(-j * h * W) for j in range(k + 1)])
            signs = torch.tensor([(-1.0) ** (k - j) * math.comb(k, j) for j in range(k + 1)]).to(W)
            difference = torch.tensordot(signs, ahead - (-1) ** k * behind, dims=1) / h**k
            gaps[i] += difference.square().mean().item()
            noise = max(noise, torch.finfo(W.dtype).eps * ahead.abs().max().item() * 2**k / h**k)
    if gaps[-1].sqrt() < 100 * noise:
        return False
    return _slope(steps[-4:].log(), 0.5 * gaps[-4:].log())[0] < 0.5


def _remainder_order(f: Callable[[Tensor], Tensor], form: QuadraticForm, weights: list[Tensor]) -> tuple[float, float]:
    """Exponent of the remainder f - form as the weights shrink, with its standard error; (inf, 0) if it is rounding."""
    scales = _halvings(7)
    remainders, noise = torch.zeros_like(scales), torch.zeros_like(scales)
    for W in weights:
        for i, s in enumerate(scales.tolist()):
            value = f(s * W)
            remainders[i] += (value - form(s * W)).square().mean().item() / len(weights)
            noise[i] = max(noise[i].item(), torch.finfo(W.dtype).eps * value.abs().max().item())
    remainders = remainders.sqrt()
    resolved = remainders > 1e3 * noise
    if resolved.sum() < 3:
        return math.inf, 0.0
    return _slope(scales[resolved].log(), remainders[resolved].log())
