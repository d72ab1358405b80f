"""The decoder's derivatives written out: one pass, then any number of products with its Jacobian and its transpose.

    logits = f(theta),    jvp(v) = J v,    vjp(u) = J^T u,    J = df / dtheta at theta.

Automatic differentiation gives the same numbers at 1.4 to 3 times the cost: here the derivative of a norm, a softmax
and a GELU is applied in closed form, and the activations of the one pass serve every product. Three derivatives are
symmetric matrices, so one function serves both directions:

    norm      a = x r,  r = (mean(x^2) + eps)^(-1/2)    da = r (dx - a mean(a dx))
    softmax   p = softmax(s)                            dp = p (ds - sum(p ds))
    GELU      g = phi(u), each entry by itself          dg = phi'(u) du

Training, the surrogates of `taylor` and the Gauss-Newton products of `curvature` all go through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nqflib.language_model.transformer import NORM_EPS, Transformer

Parameters = Mapping[str, Tensor]

# Derivatives of softmax and GELU as single kernels: (direction, output, axis, dtype) and (direction, input).
_softmax_derivative = torch.ops.aten._softmax_backward_data
_gelu_derivative = torch.ops.aten.gelu_backward


class Linearization(NamedTuple):
    """A model at fixed parameters and tokens: `logits` (B, T, V), and its Jacobian in both directions.

    `jvp` takes a direction in the parameters (a tensor by each name) to a change of the logits (B, T, V); `vjp` takes
    a cotangent (B, T, V) to one tensor by each parameter's name.
    """

    logits: Tensor
    jvp: Callable[[Parameters], Tensor]
    vjp: Callable[[Tensor], dict[str, Tensor]]


class _Norm(NamedTuple):
    """x scaled to squared length c: a = x r, r = (|x|^2 / c + eps)^(-1/2).

    With c = C, the number of channels, this is the decoder's norm. Queries and keys have c = sqrt(C), and eps sqrt(C),
    so that their products are scores at once.
    """

    value: Tensor  # a
    inverse: Tensor  # r, one for each row
    square: float  # c

    @classmethod
    def of(cls, x: Tensor, square: float, eps: Tensor) -> _Norm:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass; a square and a mean take two
        inverse = torch.addcmul(eps, length, length, value=1 / square).rsqrt_()
        return cls(x * inverse, inverse, square)

    def derivative(self, direction: Tensor) -> Tensor:
        return self.derivative_(direction.clone())

    def derivative_(self, direction: Tensor) -> Tensor:
        """The same in place of `direction`."""
        return self._across_(direction).mul_(self.inverse)

    def add_derivative_(self, total: Tensor, direction: Tensor) -> Tensor:
        """Add the derivative to `total`; `direction` is used up."""
        return total.addcmul_(self._across_(direction), self.inverse)

    def _across_(self, direction: Tensor) -> Tensor:
        overlap = torch.linalg.vecdot(direction, self.value).unsqueeze(-1)
        return direction.addcmul_(self.value, overlap, value=-1 / self.square)


def _pairs(x: Tensor) -> Tensor:
    """(..., K) seen as K/2 complex channels."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@dataclass
class _Layer:
    """One block: its weights and what its pass left behind. Rows are the N = B T tokens; heads are (B H, T, K)."""

    name: str
    heads: tuple[int, int, int, int]  # B, T, H, K
    branch: float  # 1 / L
    turns: Tensor  # (T, K/2), complex
    eps: Tensor  # (2,), of the norms of rows and of heads, on the weights' device
    qkv: Tensor  # weights, (3 D, D), (D, D), (M, D), (D, M)
    out: Tensor
    up: Tensor
    down: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(N, D) to (N, D), keeping the activations."""
        self.input = self.norm(x)
        qkv = self.split(F.linear(self.input.value, self.qkv))
        self.query_key = _Norm.of(self.turn(qkv[:2]), self.heads[3] ** 0.5, self.eps[1])
        self.q, self.k = self.merge_heads(self.query_key.value)
        self.v = self.merge_heads(qkv[2].contiguous())
        # Keys and values are kept transposed as well: products with them are twice as fast then.
        self.k_transposed, self.v_transposed = self.k.mT.contiguous(), self.v.mT.contiguous()
        scores = torch.baddbmm(mask.expand(len(self.q), *mask.shape), self.q, self.k_transposed)
        self.attention = scores.softmax(-1)  # (B H, T, T)
        self.mixed = self.to_rows(self.attention @ self.v)
        x = torch.addmm(x, self.mixed, self.out.T, alpha=self.branch)
        self.middle = self.norm(x)
        self.hidden = F.linear(self.middle.value, self.up)  # (N, M)
        self.active = F.gelu(self.hidden)
        return torch.addmm(x, self.active, self.down.T, alpha=self.branch)

    def jvp(self, dx: Tensor, direction: Parameters) -> Tensor:
        """The change of the output, for a change `dx` of the input and `direction` of the weights."""
        d_qkv, d_out, d_up, d_down = (direction[f"{self.name}.{key}"] for key in _WEIGHTS)
        dqkv = self.split(self.input.derivative(dx) @ self.qkv.T + self.input.value @ d_qkv.T)
        dq, dk = self.merge_heads(self.query_key.derivative_(self.turn(dqkv[:2])))
        dscores = (dq @ self.k_transposed).baddbmm_(self.q, dk.mT)
        dattention = _softmax_derivative(dscores, self.attention, -1, dscores.dtype)
        dv = self.merge_heads(dqkv[2].contiguous())
        dmixed = self.to_rows((dattention @ self.v).baddbmm_(self.attention, dv))
        dx = dx.addmm(dmixed, self.out.T, alpha=self.branch).addmm_(self.mixed, d_out.T, alpha=self.branch)
        dhidden = (self.middle.derivative(dx) @ self.up.T).addmm_(self.middle.value, d_up.T)
        dactive = _gelu_derivative(dhidden, self.hidden)
        return dx.addmm(dactive, self.down.T, alpha=self.branch).addmm_(self.active, d_down.T, alpha=self.branch)

    def vjp(self, dx: Tensor, gradient: dict[str, Tensor]) -> Tensor:
        """The cotangent of the input, in place of `dx` of the output; those of the weights go into `gradient`."""
        g_down = (dx.T @ self.active).mul_(self.branch)  # the branch's factor goes to small matrices, not to all rows
        dhidden = _gelu_derivative(dx @ (self.down * self.branch), self.hidden)
        g_up = dhidden.T @ self.middle.value
        self.middle.add_derivative_(dx, dhidden @ self.up)
        g_out = (dx.T @ self.mixed).mul_(self.branch)
        dmixed = self.merge_heads(self.split(dx @ (self.out * self.branch))[0].contiguous())
        dscores = _softmax_derivative(dmixed @ self.v_transposed, self.attention, -1, dmixed.dtype)
        dqk = torch.empty_like(self.query_key.value)  # (2, B, H, T, K)
        dq, dk = self.merge_heads(dqk)
        torch.bmm(dscores, self.k, out=dq)
        torch.bmm(dscores.mT, self.q, out=dk)
        dqkv = dx.new_empty(len(dx), 3 * dx.shape[1])  # (N, 3 D)
        parts = self.split(dqkv)
        torch.mul(_pairs(self.query_key.derivative_(dqk)), self.turns.conj(), out=_pairs(parts[:2]))
        parts[2] = (self.attention.mT @ dmixed).view_as(parts[2])
        g_qkv = dqkv.T @ self.input.value
        gradient.update(zip((f"{self.name}.{key}" for key in _WEIGHTS), (g_qkv, g_out, g_up, g_down), strict=True))
        return self.input.add_derivative_(dx, dqkv @ self.qkv)

    def norm(self, x: Tensor) -> _Norm:
        """The decoder's norm of rows (N, D)."""
        return _Norm.of(x, x.shape[-1], self.eps[0])

    def turn(self, x: Tensor) -> Tensor:
        """Rotary positions for (..., T, K), into contiguous memory; the norm after it is that before it."""
        turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(_pairs(x), self.turns, out=_pairs(turned))
        return turned

    def split(self, rows: Tensor) -> Tensor:
        """(N, c D) seen as (c, B, H, T, K)."""
        B, T, H, K = self.heads
        return rows.view(B, T, -1, H, K).permute(2, 0, 3, 1, 4)

    def merge_heads(self, x: Tensor) -> Tensor:
        """(..., B, H, T, K) to (..., B H, T, K)."""
        return x.flatten(-4, -3)

    def to_rows(self, x: Tensor) -> Tensor:
        """(B H, T, K) to (N, D)."""
        B, T, H, K = self.heads
        return x.view(B, H, T, K).transpose(1, 2).reshape(B * T, H * K)


_WEIGHTS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


@torch.no_grad()
def linearize(model: Transformer, parameters: Parameters, tokens: Tensor) -> Linearization:
    """The decoder at `parameters` on `tokens` (B, T) int64, ready for products with its Jacobian.

    Arguments: `model` gives the sizes only; `parameters` maps every parameter's name to a tensor, float32 or float64.
    Raises `ValueError` if a name is missing, and for half precision, in which these products would mean little.
    """
    names = model.shapes
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(f"parameters must name every parameter of the model; missing are {', '.join(missing)}")
    weights = {name: parameters[name].detach() for name in names}
    E, U = weights["embedding"], weights["unembedding"]
    if E.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"parameters must be float32 or float64, got {E.dtype}")
    (B, T), rows, size = tokens.shape, tokens.reshape(-1), model.size
    if size.context < T:
        raise ValueError(f"tokens must have at most {size.context} positions, got {T}")
    turns = model.turns(T, E.dtype)
    mask = model.mask[:T, :T].to(E.dtype)
    eps = E.new_tensor([NORM_EPS, NORM_EPS * size.head_width**0.5])
    heads = (B, T, size.heads, size.head_width)
    blocks = [f"blocks.{layer}" for layer in range(size.layers)]
    layers = [
        _Layer(b, heads, 1 / size.layers, turns, eps, *(weights[f"{b}.{key}"] for key in _WEIGHTS)) for b in blocks
    ]
    x = E[rows]  # (N, D)
    for layer in layers:
        x = layer.forward(x, mask)
    last = _Norm.of(x, size.width, eps[0])

    @torch.no_grad()
    def jvp(direction: Parameters) -> Tensor:
        dx = direction["embedding"][rows]
        for layer in layers:
            dx = layer.jvp(dx, direction)
        return (last.derivative(dx) @ U.T).addmm_(last.value, direction["unembedding"].T).view(B, T, -1)

    @torch.no_grad()
    def vjp(cotangent: Tensor) -> dict[str, Tensor]:
        du = cotangent.reshape(B * T, -1)
        gradient = {"unembedding": du.T @ last.value}
        dx = last.derivative_(du @ U)
        for layer in reversed(layers):
            dx = layer.vjp(dx, gradient)
        gradient["embedding"] = torch.ops.aten.embedding_dense_backward(dx, rows, len(E), -1, False)
        return {name: gradient[name] for name in names}

    return Linearization((last.value @ U.T).view(B, T, -1), jvp, vjp)


@torch.no_grad()
def loss_and_gradient(model: Transformer, parameters: Parameters, windows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`next_token_loss` at `parameters` of windows (B, T + 1), and its gradient by name, without building a graph."""
    at = linearize(model, parameters, windows[:, :-1])
    targets = windows[:, 1:].reshape(-1, 1)
    log_p = at.logits.flatten(0, 1).log_softmax(-1)  # (N, V)
    loss = -log_p.gather(1, targets).mean()
    residual = log_p.exp_()  # the gradient of the summed cross-entropy in the logits is softmax minus target
    residual.scatter_add_(1, targets, residual.new_full(targets.shape, -1.0))
    gradient = at.vjp(residual)
    for g in gradient.values():  # sums, divided last: they are smaller than the logits
        g /= len(targets)
    return loss, gradient
