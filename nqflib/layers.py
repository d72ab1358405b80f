"""The layers that paper 1 expands, as plain torch modules without biases, each with its closed-form A(x).

    two-layer perceptron (P1)      f = sum_i v_i phi(u_i^T x)
    multi-head attention (P2)      f = sum_i v_i^T W^V_i X softmax(X^T W^K_i^T W^Q_i x / sqrt(d_k))
    query-key-only heads (P3)      f = sum_i c^T X softmax(X^T W^K_i^T W^Q_i x / sqrt(d_k))
    logits of a single head (P4)   as P3 with one head; units are the d_k rows of W^Q and W^K
    mixture of experts (P5)        f = sum_i psi(r_i^T x) E(x; Theta_i)
    convolution, sum pooling (P6)  f = sum_i v_i sum_p phi(k_i^T x_p)
    Fourier perceptron (eq. 50)    f = s sum_k W_k tanh(s_k a_k psi_k(x)), whose units are not exchangeable

(propositions 1-6 and equation 50 of Ziyin et al. 2026, with several outputs as in corollary 1). Tokens are rows
here: a context X is (..., N, D), the transpose of the paper's. Every layer has `unit_axes` (see `nqflib.units`),
`structure(*x)`, its A(x) as factors, and `offset(*x)`, its f at W = 0; `QuadraticTwin(layer)` is the
neural quadratic form with the same parameters, to be trained beside it.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn import functional as F

from nqflib.forms import QuadraticForm
from nqflib.structure import DiagonalPairStructure, PairStructure, Structure
from nqflib.units import unit_matrix

Activation = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A layer of exchangeable units with a known structure matrix.

    Weights are drawn from N(0, `scale`^2) with `generator`, in float64; `.float()` and `.to(device)` work as ever.
    """

    unit_axes: dict[str, int | None]
    outputs: int

    def __init__(self, shapes: dict[str, tuple[int, ...]], scale: float, generator: torch.Generator | None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if any(size < 1 for size in shape):
                raise ValueError(f"every size must be at least 1, got shape {shape} for parameter {name!r}")
            weight = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(weight))
        self.unit_axes = dict.fromkeys(shapes, 0)

    @abstractmethod
    def structure(self, *x: Tensor) -> Structure:
        """A(x), of shape (..., c, p, p) when dense."""

    def offset(self, *x: Tensor) -> Tensor:
        """f at W = 0, shape (..., c); zero unless a layer says otherwise."""
        return x[0].new_zeros(1, self.outputs)

    def form(self, *x: Tensor) -> QuadraticForm:
        """The dense quadratic form on samples `x`; for p in the thousands use `structure` or `QuadraticTwin`."""
        A = self.structure(*x).dense()
        return QuadraticForm(self.offset(*x).expand(A.shape[:2]), None, A, None)


class QuadraticTwin(nn.Module):
    """The neural quadratic form of `layer`, f0(x) + Tr[W W^T A(x)], with its own copy of the layer's parameters.

    Called and trained like the layer; costs O(p d) per sample. Source: Ziyin et al. 2026, theorem 1.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)

    def forward(self, *x: Tensor) -> Tensor:
        return self.on(*x)()

    def on(self, *x: Tensor) -> Callable[[], Tensor]:
        """The outputs on fixed inputs as a function of the current weights: A(x) is computed once, for full batches."""
        f0, A = self.layer.offset(*x), self.layer.structure(*x)
        return lambda: f0 + A.quadratic(unit_matrix(self.layer))


def slope_at_zero(activation: Activation) -> float:
    """phi'(0). Raises `ValueError` unless phi(0) = 0 and phi has no kink at 0, as propositions 1, 5 and 6 require."""
    at_zero, h = torch.zeros((), dtype=torch.float64), 1e-6
    value = activation(at_zero).item()
    if value != 0.0:
        raise ValueError(f"activation must vanish at 0, got {value:.3g}; forms.expand handles the general case (g, B)")
    right, left = activation(at_zero + h).item() / h, (0.0 - activation(at_zero - h).item()) / h
    if abs(right - left) > 1e-4 * max(1.0, abs(right), abs(left)):
        raise ValueError(
            f"activation must be smooth at 0, got one-sided slopes {left:.3g} and {right:.3g}; no quadratic form exists"
        )
    with torch.enable_grad():
        at_zero.requires_grad_()
        return torch.autograd.grad(activation(at_zero), at_zero)[0].item()


def _standard_basis(like: Tensor, c: int) -> Tensor:
    return torch.eye(c, dtype=like.dtype, device=like.device)


class MLP(Layer):
    """Two-layer perceptron without biases: f_m = sum_i v_im phi(u_i^T x). Unit i is (u_i, v_i), p = k + c.

    A_m = (phi'(0)/2) [[0, x e_m^T], [e_m x^T, 0]]. Input x (..., k); parameters `u` (d, k), `v` (d, c).
    Source: proposition 1.
    """

    u: nn.Parameter
    v: nn.Parameter

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int = 1,
        *,
        activation: Activation = torch.tanh,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__({"u": (width, inputs), "v": (width, outputs)}, scale, generator)
        self.activation, self.outputs = activation, outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x @ self.u.T) @ self.v  # (..., d) @ (d, c)

    def structure(self, *x: Tensor) -> PairStructure:
        k = x[0].shape[-1]
        a = slope_at_zero(self.activation) * x[0].unsqueeze(-2)  # (..., 1, k)
        return PairStructure(a, _standard_basis(a, self.outputs), 0, k, 1, k + self.outputs)


class CNN(Layer):
    """One convolution, an activation, a sum over all patches and a readout, without biases (P6).

    f_m = sum_i v_im sum_p phi(k_i^T x_p); A as for the perceptron with x replaced by sum_p x_p. Images x are
    (n, channels, height, width); no padding. Parameters `kernel` (d, channels * kh * kw), `v` (d, c).
    Source: proposition 6.
    """

    kernel: nn.Parameter
    v: nn.Parameter

    def __init__(
        self,
        kernel_size: tuple[int, int],
        width: int,
        outputs: int = 1,
        *,
        channels: int = 1,
        stride: int = 1,
        activation: Activation = torch.tanh,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        m = channels * math.prod(kernel_size)
        super().__init__({"kernel": (width, m), "v": (width, outputs)}, scale, generator)
        self.kernel_size, self.channels, self.stride = kernel_size, channels, stride
        self.activation, self.outputs = activation, outputs

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.reshape(-1, self.channels, *self.kernel_size)
        hidden = self.activation(F.conv2d(x, kernel, stride=self.stride))  # (n, d, patches down, patches across)
        return hidden.sum((-2, -1)) @ self.v

    def patch_sum(self, x: Tensor) -> Tensor:
        """sum_p x_p, shape (n, channels * kh * kw), through a view: the patches are never stored."""
        down, across = self.kernel_size
        patches = x.unfold(-2, down, self.stride).unfold(-2, across, self.stride)
        return patches.sum((-4, -3)).flatten(1)  # (n, channels, kh, kw) -> (n, m)

    def structure(self, *x: Tensor) -> PairStructure:
        a = slope_at_zero(self.activation) * self.patch_sum(x[0]).unsqueeze(-2)  # (n, 1, m)
        m = a.shape[-1]
        return PairStructure(a, _standard_basis(a, self.outputs), 0, m, 1, m + self.outputs)


def _attend(query: Tensor, key: Tensor, x: Tensor, X: Tensor) -> Tensor:
    """Attention weights (..., h, N) of heads with `query`, `key` (h, D, d_k), for x (..., D) and X (..., N, D)."""
    q = torch.einsum("...D,hDk->...hk", x, query)
    k = torch.einsum("...ND,hDk->...hNk", X, key)
    return (torch.einsum("...hk,...hNk->...hN", q, k) / math.sqrt(query.shape[-1])).softmax(-1)


class MultiHeadAttention(Layer):
    """Attention of a query token x over a context X, summed over heads (P2).

    f_m = sum_i v_im^T W^V_i X softmax(X^T W^K_i^T W^Q_i x / sqrt(d_k)); unit i is head i, its query, key, value and
    readout. A_m couples value and readout alone, (1/2) x_avg e_m^T (x) I_dv, x_avg the mean token: a head starts as an
    average, and query and key enter at order 4. Inputs x (..., D), X (..., N, D), leading axes broadcast.
    Parameters `query`, `key` (h, D, d_k), `value` (h, D, d_v), `readout` (h, c, d_v). Source: proposition 2.
    """

    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    readout: nn.Parameter

    def __init__(
        self,
        dim: int,
        heads: int,
        outputs: int = 1,
        *,
        key_dim: int,
        value_dim: int,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        query_or_key = (heads, dim, key_dim)
        shapes = {
            "query": query_or_key,
            "key": query_or_key,
            "value": (heads, dim, value_dim),
            "readout": (heads, outputs, value_dim),
        }
        super().__init__(shapes, scale, generator)
        self.outputs = outputs

    def forward(self, x: Tensor, X: Tensor) -> Tensor:
        weights = _attend(self.query, self.key, x, X)
        mixed = torch.einsum("...hN,...ND->...hD", weights, X)
        return torch.einsum("...hD,hDv,hcv->...c", mixed, self.value, self.readout)

    def offset(self, *x: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(x[0].shape[:-1], x[1].shape[:-2])
        return x[0].new_zeros(*lead, self.outputs)

    def structure(self, *x: Tensor) -> PairStructure:
        a = x[1].mean(-2).unsqueeze(-2)  # (..., 1, D)
        queries_and_keys = self.query[0].numel() + self.key[0].numel()
        readout = queries_and_keys + self.value[0].numel()
        p = readout + self.readout[0].numel()
        return PairStructure(a, _standard_basis(a, self.outputs), queries_and_keys, readout, self.value.shape[-1], p)


class _MergedReadout(Layer):
    """Shared by P3 and P4: query and key are trained, value and readout are merged into `fixed` (c, D)."""

    query: nn.Parameter
    key: nn.Parameter
    fixed: Tensor

    def __init__(
        self, fixed: Tensor, shape: tuple[int, ...], key_dim: int, scale: float, generator: torch.Generator | None
    ) -> None:
        super().__init__({"query": shape, "key": shape}, scale, generator)
        self.register_buffer("fixed", fixed)
        self.outputs, self.key_dim = fixed.shape[0], key_dim

    def structure(self, *x: Tensor) -> PairStructure:
        a = x[0].unsqueeze(-2) / math.sqrt(self.key_dim)  # (..., 1, D)
        block = self.query[0].numel()
        return PairStructure(a, covariance_times(x[1], self.fixed), 0, block, block // a.shape[-1], 2 * block)


class QueryKeyAttention(_MergedReadout):
    """Attention heads whose value and readout are merged into a fixed vector per output (P3).

    f_m = sum_i c_m^T X softmax(X^T W^K_i^T W^Q_i x / sqrt(d_k)); unit i is head i, its query and key.
    A_m = 1/(2 sqrt(d_k)) [[0, x u_m^T (x) I], [u_m x^T (x) I, 0]], u_m = Sigma_X c_m, Sigma_X the covariance of the
    tokens; f(0) = d c_m^T x_avg. Inputs x (..., D), X (..., N, D); `fixed` (c, D) holds the c_m, the same for every
    head (else the heads are not exchangeable). Parameters `query`, `key` (h, D, d_k). Source: proposition 3.
    """

    def __init__(
        self,
        fixed: Tensor,
        heads: int,
        *,
        key_dim: int,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        _require_merged(fixed)
        super().__init__(fixed, (heads, fixed.shape[1], key_dim), key_dim, scale, generator)

    def forward(self, x: Tensor, X: Tensor) -> Tensor:
        weights = _attend(self.query, self.key, x, X).sum(-2)  # over heads, (..., N)
        return torch.einsum("...N,...ND,cD->...c", weights, X, self.fixed)

    def offset(self, *x: Tensor) -> Tensor:
        return self.query.shape[0] * x[1].mean(-2) @ self.fixed.T


class SingleHeadLogits(_MergedReadout):
    """One attention head whose units are the d_k key-query channels, not the head (P4).

    f_m = c_m^T X softmax(X^T W^K^T W^Q x / sqrt(d_k)); unit i is row i of W^Q and of W^K, p = 2 D, d = d_k.
    A_m = 1/(2 sqrt(d_k)) [[0, x u_m^T], [u_m x^T, 0]], u_m = Sigma_X c_m; f(0) = c_m^T x_avg.
    Inputs and `fixed` as in `QueryKeyAttention`; parameters `query`, `key` (d_k, D). Source: proposition 4.
    """

    def __init__(
        self, fixed: Tensor, *, key_dim: int, scale: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        _require_merged(fixed)
        super().__init__(fixed, (key_dim, fixed.shape[1]), key_dim, scale, generator)

    def forward(self, x: Tensor, X: Tensor) -> Tensor:
        weights = _attend(self.query.T.unsqueeze(0), self.key.T.unsqueeze(0), x, X).squeeze(-2)  # (..., N)
        return torch.einsum("...N,...ND,cD->...c", weights, X, self.fixed)

    def offset(self, *x: Tensor) -> Tensor:
        return x[1].mean(-2) @ self.fixed.T


def _require_merged(fixed: Tensor) -> None:
    if fixed.ndim != 2:
        raise ValueError(f"fixed must have shape (c, D), a merged value-readout per output, got {tuple(fixed.shape)}")


def covariance_times(X: Tensor, fixed: Tensor) -> Tensor:
    """u_m = Sigma_X c_m, shape (..., c, D): the token covariance of X (..., N, D) times the rows of `fixed` (c, D)."""
    centred = X - X.mean(-2, keepdim=True)
    return (fixed @ centred.mT) @ centred / X.shape[-2]


Expert = Callable[[Tensor, Tensor], Tensor]


class MixtureOfExperts(Layer):
    """Experts with independent smooth gates (P5): f = sum_i psi(r_i^T x) E(x; Theta_i); unit i is (r_i, Theta_i).

    A_m = (psi'(0)/2) [[0, x G_m^T], [G_m x^T, 0]], G_m = dE_m/dTheta at Theta = 0. `expert(x, theta)` maps one
    input (k,) and `expert_size` parameters to (c,), with E(x; 0) = 0; by default E = tanh(Theta x) with Theta
    (c, k). Input x (n, k); parameters `router` (d, k), `theta` (d, expert_size). Source: proposition 5.
    """

    router: nn.Parameter
    theta: nn.Parameter

    def __init__(
        self,
        inputs: int,
        experts: int,
        outputs: int = 1,
        *,
        gate: Activation = torch.tanh,
        expert: Expert | None = None,
        expert_size: int | None = None,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if (expert is None) != (expert_size is None):
            raise ValueError("expert and expert_size must be given together: the function and its number of parameters")
        size = outputs * inputs if expert_size is None else expert_size
        super().__init__({"router": (experts, inputs), "theta": (experts, size)}, scale, generator)
        self.gate, self.outputs = gate, outputs
        self.expert = expert or (lambda x, theta: torch.tanh(theta.reshape(outputs, inputs) @ x))

    def forward(self, x: Tensor) -> Tensor:
        answers = vmap(vmap(self.expert, (None, 0)), (0, None))(x, self.theta)  # (n, d, c)
        return torch.einsum("nd,ndc->nc", self.gate(x @ self.router.T), answers)

    def structure(self, *x: Tensor) -> PairStructure:
        zero = torch.zeros_like(self.theta[0])
        if vmap(self.expert, (0, None))(x[0], zero).any():
            raise ValueError("expert must vanish at theta = 0, else the gates' gradient does not (ZGZ fails)")
        G = vmap(jacrev(self.expert, 1), (0, None))(x[0], zero)  # (n, c, expert_size)
        a = slope_at_zero(self.gate) * x[0].unsqueeze(-2)  # (n, 1, k)
        return PairStructure(a, G, 0, a.shape[-1], 1, a.shape[-1] + G.shape[-1])


class FourierMLP(Layer):
    """Perceptron on Fourier features, one hidden unit per mode: f = s sum_k W_k tanh(s_k a_k psi_k(x)).

    psi_k(x) = sqrt(2) cos(2 pi k x), s_k = k^-theta, k = 1 ... P; s = `prefactor`, 1/sqrt(P) by default as in the
    paper. The hidden units differ, so the layer as a whole is one unit (d = 1): w = (a, W), p = 2 P, and
    A = (1/2) [[0, Diag], [Diag, 0]] with diagonal s s_k psi_k(x). Input x (n,) in [0, 1); parameters `a`, `W` (P,).
    Source: equations 50 and 296.
    """

    a: nn.Parameter
    W: nn.Parameter

    def __init__(
        self,
        modes: int,
        theta: float,
        *,
        prefactor: float | None = None,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__({"a": (modes,), "W": (modes,)}, scale, generator)
        self.unit_axes = {"a": None, "W": None}
        self.prefactor = modes**-0.5 if prefactor is None else prefactor
        self.theta, self.outputs = theta, 1

    def features(self, x: Tensor) -> Tensor:
        """s_k psi_k(x), shape (n, P)."""
        k = torch.arange(1, self.a.shape[0] + 1, dtype=x.dtype, device=x.device)
        return k**-self.theta * math.sqrt(2) * torch.cos(2 * math.pi * k * x.unsqueeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.prefactor * torch.tanh(self.a * self.features(x)) @ self.W.unsqueeze(-1)

    def structure(self, *x: Tensor) -> DiagonalPairStructure:
        return DiagonalPairStructure(self.prefactor * self.features(x[0]).unsqueeze(-2))
