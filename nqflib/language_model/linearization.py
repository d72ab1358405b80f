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

from nqflib.language_model.transformer import NORM_EPS, Transformer, rotate

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
    value: Tensor  # a
    inverse: Tensor  # r, one for each row

    @classmethod
    def of(cls, x: Tensor) -> _Norm:
        inverse = x.square().mean(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
        return cls(x * inverse, inverse)

    def derivative(self, direction: Tensor) -> Tensor:
        overlap = torch.linalg.vecdot(direction, self.value).unsqueeze(-1)
        return direction.addcmul(self.value, overlap, value=-1 / direction.shape[-1]).mul_(self.inverse)


@dataclass
class _Layer:
    """One block: its weights and what its pass left behind. Rows are the N = B T tokens; heads are (B H, T, K)."""

    name: str
    heads: tuple[int, int, int, int]  # B, T, H, K
    branch: float  # 1 / L
    turns: Tensor  # (2, 1, 1, T, K/2) of queries and keys
    qkv: Tensor  # weights, (3 D, D), (D, D), (M, D), (D, M)
    out: Tensor
    up: Tensor
    down: Tensor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(N, D) to (N, D), keeping the activations."""
        self.input = _Norm.of(x)
        qkv = self.split(self.input.value @ self.qkv.T)
        self.query_key = _Norm.of(qkv[:2])
        self.q, self.k = self.merge_heads(rotate(self.query_key.value, self.turns))
        self.v = self.merge_heads(qkv[2])
        scores = torch.baddbmm(mask.expand(len(self.q), *mask.shape), self.q, self.k.mT)
        self.attention = scores.softmax(-1)  # (B H, T, T)
        self.mixed = self.to_rows(self.attention @ self.v)
        x = torch.addmm(x, self.mixed, self.out.T, alpha=self.branch)
        self.middle = _Norm.of(x)
        self.hidden = self.middle.value @ self.up.T  # (N, M)
        self.active = F.gelu(self.hidden)
        return torch.addmm(x, self.active, self.down.T, alpha=self.branch)

    def jvp(self, dx: Tensor, direction: Parameters) -> Tensor:
        """The change of the output, for a change `dx` of the input and `direction` of the weights."""
        d_qkv, d_out, d_up, d_down = (direction[f"{self.name}.{key}"] for key in _WEIGHTS)
        dqkv = self.split(self.input.derivative(dx) @ self.qkv.T + self.input.value @ d_qkv.T)
        dq, dk = self.merge_heads(rotate(self.query_key.derivative(dqkv[:2]), self.turns))
        dscores = (dq @ self.k.mT).baddbmm_(self.q, dk.mT)
        dattention = _softmax_derivative(dscores, self.attention, -1, dscores.dtype)
        dmixed = self.to_rows((dattention @ self.v).baddbmm_(self.attention, self.merge_heads(dqkv[2])))
        dx = dx.addmm(dmixed, self.out.T, alpha=self.branch).addmm_(self.mixed, d_out.T, alpha=self.branch)
        dhidden = (self.middle.derivative(dx) @ self.up.T).addmm_(self.middle.value, d_up.T)
        dactive = _gelu_derivative(dhidden, self.hidden)
        return dx.addmm(dactive, self.down.T, alpha=self.branch).addmm_(self.active, d_down.T, alpha=self.branch)

    def vjp(self, dx: Tensor, gradient: dict[str, Tensor]) -> Tensor:
        """The cotangent of the input, from `dx` of the output; those of the weights are put into `gradient`."""
        branch = dx * self.branch
        g_down = branch.T @ self.active
        dhidden = _gelu_derivative(branch @ self.down, self.hidden)
        g_up = dhidden.T @ self.middle.value
        dx = dx + self.middle.derivative(dhidden @ self.up)
        branch = dx * self.branch
        g_out = branch.T @ self.mixed
        dmixed = self.merge_heads(self.split(branch @ self.out)[0])
        dscores = _softmax_derivative(dmixed @ self.v.mT, self.attention, -1, dmixed.dtype)
        dqkv = dx.new_empty(len(dx), 3 * dx.shape[1])  # (N, 3 D)
        dqk = torch.stack([dscores @ self.k, dscores.mT @ self.q]).unflatten(1, self.heads[::2])
        self.split_view(dqkv)[:2] = self.query_key.derivative(rotate(dqk, self.turns.conj()))
        self.split_view(dqkv)[2] = (self.attention.mT @ dmixed).unflatten(0, self.heads[::2])
        g_qkv = dqkv.T @ self.input.value
        gradient.update(zip((f"{self.name}.{key}" for key in _WEIGHTS), (g_qkv, g_out, g_up, g_down), strict=True))
        return dx + self.input.derivative(dqkv @ self.qkv)

    def split_view(self, rows: Tensor) -> Tensor:
        """(N, c D) seen as (c, B, H, T, K)."""
        B, T, H, K = self.heads
        return rows.view(B, T, -1, H, K).permute(2, 0, 3, 1, 4)

    def split(self, rows: Tensor) -> Tensor:
        """The same, contiguous."""
        return self.split_view(rows).contiguous()

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
    names = [name for name, _ in model.named_parameters()]
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
    # The turns of the queries carry the scale 1 / sqrt(K) of the scores.
    scale = torch.tensor([size.head_width**-0.5, 1.0], dtype=E.dtype, device=E.device).view(2, 1, 1, 1, 1)
    turns = model.turns(T, E.dtype) * scale
    mask = model.mask[:T, :T].to(E.dtype)
    heads = (B, T, size.heads, size.head_width)
    blocks = [f"blocks.{layer}" for layer in range(size.layers)]
    layers = [_Layer(b, heads, 1 / size.layers, turns, *(weights[f"{b}.{key}"] for key in _WEIGHTS)) for b in blocks]
    x = E[rows]  # (N, D)
    for layer in layers:
        x = layer.forward(x, mask)
    last = _Norm.of(x)

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
        dx = last.derivative(du @ U)
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
    residual = log_p.exp_()  # the gradient of the cross-entropy in the logits is softmax minus target
    residual.scatter_add_(1, targets, residual.new_full(targets.shape, -1.0)).div_(len(targets))
    return loss, at.vjp(residual)
