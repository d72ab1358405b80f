"""Layers at the edge of theorem 1: each breaks one of its hypotheses, or only seems to.

Theorem 1 of Ziyin et al. 2026 asks for exchangeable units, three derivatives, and zero gradient at zero; among its
limitations the paper names ReLU, biases, normalization, and a nonlinearity after the sum over units. Here stand one
layer for each, with one output, as functions of W (p, d) and inputs x (n, k) or patches (n, P, k); the first k rows
of W are incoming weights u, the next is the outgoing weight v.

    >>> from nqflib.forms import check
    >>> case = EDGE_CASES["relu"]
    >>> report = check(case.module(torch.ones(case.parameters(2), 4).double()), torch.eye(2).double())
    >>> report.kink
    2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]
Function = Callable[[Tensor, Tensor], Tensor]  # W (p, d), x (n, ...) -> (n, 1)


@dataclass(frozen=True)
class EdgeCase:
    """A layer `f(W, x)` with its `title`; `parameters(k)` is p for k inputs.

    `patches` True means that x is (n, P, k) instead of (n, k).
    """

    title: str
    f: Function
    parameters: Callable[[int], int] = lambda k: k + 1
    patches: bool = False

    def module(self, W: Tensor) -> nn.Module:
        """The layer as a torch module of x with the one parameter W (p, d), as `nqflib.forms.check` takes it."""
        return _UnitFunction(self.f, W)


class _UnitFunction(nn.Module):
    def __init__(self, f: Function, W: Tensor) -> None:
        super().__init__()
        self.f, self.W = f, nn.Parameter(W.clone())
        self.unit_axes: dict[str, int | None] = {"W": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.W, x)


def perceptron(activation: Activation) -> Function:
    """sum_i v_i phi(u_i^T x)."""
    return lambda W, x: (activation(x @ W[:-1]) @ W[-1]).unsqueeze(1)


def convolution(activation: Activation) -> Function:
    """sum_i v_i sum_P phi(u_i^T x_P), for patches x (n, P, k)."""
    return lambda W, x: (activation(x @ W[:-1]).sum(1) @ W[-1]).unsqueeze(1)


def max_pooling(activation: Activation) -> Function:
    """sum_i v_i max_P phi(u_i^T x_P), for patches x (n, P, k)."""
    return lambda W, x: (activation(x @ W[:-1]).amax(1) @ W[-1]).unsqueeze(1)


def shifted_perceptron(shift: float) -> Function:
    """sum_i v_i tanh(u_i^T x + b), the same fixed b for all units."""
    return perceptron(lambda z: torch.tanh(z + shift))


def hidden_bias(W: Tensor, x: Tensor) -> Tensor:
    """sum_i v_i tanh(u_i^T x + b_i) with trained b: unit (u, b, v)."""
    return (torch.tanh(x @ W[:-2] + W[-2]) @ W[-1]).unsqueeze(1)


def output_bias(W: Tensor, x: Tensor) -> Tensor:
    """sum_i [v_i tanh(u_i^T x) + b_i] with trained b: unit (u, b, v)."""
    return (torch.tanh(x @ W[:-2]) @ W[-1] + W[-2].sum()).unsqueeze(1)


def normalized_inputs(W: Tensor, x: Tensor) -> Tensor:
    """A tanh perceptron behind a layer normalization of its input."""
    return perceptron(torch.tanh)(W, F.layer_norm(x, x.shape[-1:]))


def normalized_units(eps: float) -> Function:
    """sum_i v_i tanh(h_i), h the layer normalization of u_i^T x over the units, with `eps` under its root."""

    def f(W: Tensor, x: Tensor) -> Tensor:
        h = x @ W[:-1]
        centred = h - h.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + eps).sqrt()
        return (torch.tanh(centred / scale) @ W[-1]).unsqueeze(1)

    return f


def softmax_mixture(W: Tensor, x: Tensor) -> Tensor:
    """sum_i softmax_i(r^T x) theta_i^T x: linear experts that share a softmax gate; unit (r, theta)."""
    router, theta = W.chunk(2)
    return ((x @ router).softmax(1) * (x @ theta)).sum(1, keepdim=True)


def softmax_mixture_terms(x: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """g (n, 1, p), A and B (n, 1, p, p) of `softmax_mixture` with d experts.

    To first order softmax_i = 1/d + (r_i - r_mean)^T x/d, so that
    g = (0, x)/d,  A = S/d,  B = -S/d^2,  S = 1/2 [[0, x x^T], [x x^T, 0]].
    """
    n, k = x.shape
    S = x.new_zeros(n, 1, 2 * k, 2 * k)
    S[..., :k, k:] = S[..., k:, :k] = 0.5 * (x.unsqueeze(-1) * x.unsqueeze(-2)).unsqueeze(1)
    return torch.cat([torch.zeros_like(x), x], 1).unsqueeze(1) / d, S / d, -S / d**2


def outer(nonlinearity: Activation, layer: Function) -> Function:
    """nonlinearity(sum over units): not a sum over units any more, but as exchangeable."""
    return lambda W, x: nonlinearity(layer(W, x))


def gated_unit(W: Tensor, x: Tensor) -> Tensor:
    """sum_i v_i SiLU(u_i^T x) (t_i^T x), a SwiGLU layer with its readout; unit (u, t, v)."""
    gate, value = W[:-1].chunk(2)
    return ((F.silu(x @ gate) * (x @ value)) @ W[-1]).unsqueeze(1)


def gated_linear_unit(W: Tensor, x: Tensor) -> Tensor:
    """sum_i v_i sigmoid(u_i^T x) (t_i^T x); unit (u, t, v). The gates are half open at W = 0, so A does not vanish."""
    gate, value = W[:-1].chunk(2)
    return (((x @ gate).sigmoid() * (x @ value)) @ W[-1]).unsqueeze(1)


def linear_attention(W: Tensor, x: Tensor) -> Tensor:
    """sum_i o_i mean_P (q_i^T x_1)(k_i^T x_P)(v_i^T x_P), heads with one channel over tokens x (n, P, k)."""
    query, key, value = W[:-1].chunk(3)
    mixed = ((x @ key) * (x @ value)).mean(1) * (x[:, 0] @ query)
    return (mixed @ W[-1]).unsqueeze(1)


EDGE_CASES: dict[str, EdgeCase] = {
    "tanh": EdgeCase("tanh perceptron", perceptron(torch.tanh)),
    "gelu": EdgeCase("GELU perceptron", perceptron(F.gelu)),
    "hidden_bias": EdgeCase("trained hidden bias", hidden_bias, parameters=lambda k: k + 2),
    "fixed_bias": EdgeCase("fixed hidden bias 0.5", shifted_perceptron(0.5)),
    "output_bias": EdgeCase("trained output bias", output_bias, parameters=lambda k: k + 2),
    "normalized_inputs": EdgeCase("normalized input", normalized_inputs),
    "outer_tanh": EdgeCase("tanh after the sum", outer(lambda s: torch.tanh(s + 0.3), perceptron(torch.tanh))),
    "outer_relu": EdgeCase("ReLU after the sum", outer(F.relu, perceptron(torch.tanh))),
    "softmax_mixture": EdgeCase("linear experts, softmax gate", softmax_mixture, parameters=lambda k: 2 * k),
    "gated_unit": EdgeCase("SwiGLU with a readout", gated_unit, parameters=lambda k: 2 * k + 1),
    "linear_attention": EdgeCase(
        "linear attention, four matrices", linear_attention, parameters=lambda k: 3 * k + 1, patches=True
    ),
    "elu": EdgeCase("ELU perceptron", perceptron(F.elu)),
    "relu": EdgeCase("ReLU perceptron", perceptron(F.relu)),
    "leaky_relu": EdgeCase("leaky ReLU perceptron", perceptron(lambda z: F.leaky_relu(z, 0.1))),
    "max_pooling": EdgeCase("maximum pooling", max_pooling(torch.tanh), patches=True),
    "normalized_units": EdgeCase("normalized hidden units", normalized_units(0.0)),
}
