"""Layers and their quadratic forms on fixed inputs, as functions of the current weights, for full-batch training.

    outputs, form = layer_on(layer, x), form_on(layer, x)      # then outputs() equals layer(x), form() its form

What does not depend on the weights is computed once, and weights are multiplied with each other before they meet the
samples: a step of full-batch training then multiplies smaller matrices than the plain forward pass does.

    convolution   f = (sum_p phi(x_p K^T)) v               the patches x_p are cut once
    attention     f = sum_i softmax(X K_i Q_i^T x) X V_i   K_i Q_i^T x is formed before it meets the N tokens
    form          Tr[W W^T A] = a^T (W_a W_b^T) b           for A = 1/2 [[0, a b^T], [b a^T, 0]] (x) I

The sources of the layers are in `nqflib.layers`, of the factors a and b in `nqflib.structure`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nqflib.layers import CNN, Layer, MultiHeadAttention, QueryKeyAttention, covariance_times
from nqflib.structure import PairStructure
from nqflib.units import unit_matrix

Outputs = Callable[[], Tensor]


class ReadoutHeads(nn.Module):
    """Attention heads, each with a fixed readout of its own: f = sum_h c_h^T X softmax(X^T K_h^T Q_h x / sqrt(d_k)).

    The heads differ by what is fixed and are not exchangeable; the form is the sum of
    their forms (proposition 3 of Ziyin et al. 2026, one head at a time). Buffer `readout` (h, D); parameters `query`,
    `key` (h, D, d_k), drawn from N(0, `scale`^2). Inputs x (n, D), X (n, N, D); one output.
    """

    readout: Tensor

    def __init__(self, readout: Tensor, *, key_dim: int, scale: float, generator: torch.Generator | None) -> None:
        super().__init__()
        if readout.ndim != 2:
            raise ValueError(f"readout must have shape (heads, D), got {tuple(readout.shape)}")
        self.register_buffer("readout", readout)
        shape = (*readout.shape, key_dim)
        self.query, self.key = (
            nn.Parameter(scale * torch.randn(shape, generator=generator, dtype=readout.dtype)) for _ in range(2)
        )


def layer_on(layer: Layer | ReadoutHeads, *x: Tensor) -> Outputs:
    """The outputs (n, c) of `layer` on the inputs `x`, at whatever weights it has when called."""
    if isinstance(layer, ReadoutHeads):
        return _readout_heads_on(layer, *x)
    if isinstance(layer, CNN):
        return _convolution_on(layer, *x)
    if isinstance(layer, QueryKeyAttention):
        return _query_key_on(layer, *x)
    if isinstance(layer, MultiHeadAttention):
        return _multi_head_on(layer, *x)
    return lambda: layer(*x)


def form_on(layer: Layer | ReadoutHeads, *x: Tensor) -> Outputs:
    """The outputs (n, c) of the quadratic form f0(x) + Tr[W W^T A(x)] at the current weights of `layer`.

    Raises `TypeError` unless the layer's structure is a `PairStructure` whose factor a is the same for all outputs.
    """
    if isinstance(layer, ReadoutHeads):
        return _readout_heads_form_on(layer, *x)
    A = layer.structure(*x)
    if not isinstance(A, PairStructure) or A.a.ndim != 3 or A.a.shape[1] != 1:
        wanted = "a PairStructure with a of shape (n, 1, q)"
        raise TypeError(f"layer must have {wanted}, {type(layer).__name__} has a {type(A).__name__}")
    f0, a, (q, r) = layer.offset(*x), A.a.squeeze(1), (A.a.shape[-1], A.b.shape[-1])

    def outputs() -> Tensor:
        W = unit_matrix(layer)
        W_a, W_b = (W[start : start + size * A.copies] for start, size in ((A.start_a, q), (A.start_b, r)))
        product = W_a.reshape(q, -1) @ W_b.reshape(r, -1).T
        half = a @ product  # (n, r)
        # b is (c, r) where it is the same for all samples, else (n, c, r)
        return f0 + (half @ A.b.T if A.b.ndim == 2 else torch.bmm(A.b, half.unsqueeze(-1)).squeeze(-1))

    return outputs


def _convolution_on(layer: CNN, x: Tensor) -> Outputs:
    down, across = layer.kernel_size
    patches = x.unfold(-2, down, layer.stride).unfold(-2, across, layer.stride)  # (n, channels, rows, columns, kh, kw)
    rows = patches.movedim(1, 3).flatten(3).flatten(1, 2).contiguous()  # (n, patches, channels * kh * kw)
    return lambda: layer.activation(rows @ layer.kernel.T).sum(1) @ layer.v


def _keys(query: Tensor, key: Tensor, x: Tensor) -> Tensor:
    """K_h Q_h^T x / sqrt(d_k), shape (n, h, D), of heads with `query` and `key` (h, D, d_k), for x (n, D)."""
    bilinear = query @ key.mT / query.shape[-1] ** 0.5  # (h, D, D)
    return (x @ bilinear.movedim(0, 1).flatten(1)).view(len(x), *bilinear.shape[:2])


def _weights(query: Tensor, key: Tensor, x: Tensor, X: Tensor) -> Tensor:
    """Attention weights (n, h, N), for x (n, D) and X (n, N, D)."""
    return torch.bmm(_keys(query, key, x), X.mT).softmax(-1)


def _readout_heads_on(layer: ReadoutHeads, x: Tensor, X: Tensor) -> Outputs:
    read = layer.readout @ X.mT  # (n, h, N)
    return lambda: (_weights(layer.query, layer.key, x, X) * read).sum((1, 2)).unsqueeze(1)


def _readout_heads_form_on(layer: ReadoutHeads, x: Tensor, X: Tensor) -> Outputs:
    f0, u = X.mean(1) @ layer.readout.sum(0), covariance_times(X, layer.readout)  # (n,) and (n, h, D)
    return lambda: (f0 + (_keys(layer.query, layer.key, x) * u).sum((1, 2))).unsqueeze(1)


def _query_key_on(layer: QueryKeyAttention, x: Tensor, X: Tensor) -> Outputs:
    read = X @ layer.fixed.T  # (n, N, c)
    return lambda: torch.bmm(_weights(layer.query, layer.key, x, X).sum(1, keepdim=True), read).squeeze(1)


def _multi_head_on(layer: MultiHeadAttention, x: Tensor, X: Tensor) -> Outputs:
    def outputs() -> Tensor:
        mixed = torch.bmm(_weights(layer.query, layer.key, x, X), X)  # (n, h, D)
        return mixed.flatten(1) @ (layer.value @ layer.readout.mT).flatten(0, 1)  # (n, h * D) @ (h * D, c)

    return outputs
