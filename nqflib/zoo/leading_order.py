"""The registry's networks, whose quadratic form is the leading order at W = 0; built on `nqflib.layers`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nqflib.layers import (
    CNN,
    MLP,
    FourierMLP,
    Layer,
    MixtureOfExperts,
    MultiHeadAttention,
    QueryKeyAttention,
    SingleHeadLogits,
)
from nqflib.units import evaluate, unit_matrix
from nqflib.zoo.citations import cite
from nqflib.zoo.model import Instance, SolvableModel

_FIXED = torch.tensor([[1.0, -0.5, 0.3, 0.8], [0.2, 0.9, -1.1, 0.4]], dtype=torch.float64)  # merged value-readouts
_SAMPLES = 3


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64)


def _network(
    number: int,
    name: str,
    title: str,
    layer: Layer,
    inputs: tuple[Callable[[torch.Generator], Tensor], ...],
    *,
    formula: str,
    structure: str,
    units: str,
    citations: tuple[str, ...],
    exchangeable: bool = True,
) -> SolvableModel:
    """An entry whose f and A are those of `layer`; only the layer's sizes and fixed vectors matter, not its weights."""

    def sample(generator: torch.Generator) -> Instance:
        W = torch.randn(unit_matrix(layer).shape, generator=generator, dtype=torch.float64)
        return Instance(W, tuple(draw(generator) for draw in inputs))

    return SolvableModel(
        number=number,
        name=name,
        title=title,
        formula=formula,
        structure=structure,
        f=lambda W, *x: evaluate(layer, W, x),
        A=lambda *x: layer.structure(*x).dense(),
        exactness="leading order",
        units=units,
        sample=sample,
        citations=cite(*citations),
        exchangeable=exchangeable,
    )


_TOKENS = (_normal(_SAMPLES, 4), _normal(_SAMPLES, 6, 4))  # a query token and a context of 6 tokens

LEADING_ORDER: tuple[SolvableModel, ...] = (
    _network(
        9, "two_layer_mlp", "Two-layer perceptron", MLP(4, 5, 2), (_normal(_SAMPLES, 4),),
        formula=r"\sum_i v_i\,\phi(u_i^\top x)",
        structure=r"\frac{\phi'(0)}{2}\begin{bmatrix}0 & x\\ x^\top & 0\end{bmatrix}",
        units="hidden units (u_i, v_i)",
        citations=("fukumizu1996regularity", "radhakrishnan2024mechanism"),
    ),
    _network(
        10, "one_layer_cnn", "Convolution with sum pooling", CNN((2, 3), 4, 2), (_normal(_SAMPLES, 1, 4, 5),),
        formula=r"\sum_i v_i \sum_p \phi(k_i^\top x_p)",
        structure=r"\frac{\phi'(0)}{2}\begin{bmatrix}0 & \sum_p x_p\\ \sum_p x_p^\top & 0\end{bmatrix}",
        units="channels (k_i, v_i)",
        citations=("krizhevsky2012imagenet", "du2018gradient", "cao2019tight"),
    ),
    _network(
        11, "mixture_of_experts", "Mixture of experts with independent gates", MixtureOfExperts(4, 3, 2),
        (_normal(_SAMPLES, 4),),
        formula=r"\sum_i \psi(r_i^\top x)\,E(x;\Theta_i)",
        structure=r"\frac{\psi'(0)}{2}\begin{bmatrix}0 & xG^\top\\ Gx^\top & 0\end{bmatrix},\;G=\nabla_\Theta E(x;0)",
        units="experts (r_i, Theta_i)",
        citations=("shazeer2017outrageously", "nguyen2024sigmoid"),
    ),
    _network(
        12, "multi_head_attention", "Multi-head attention",
        MultiHeadAttention(4, 3, 2, key_dim=2, value_dim=3), _TOKENS,
        formula=r"\sum_i v_i^\top W^V_i X\,\mathrm{softmax}\big(X^\top W_i^{K\top} W_i^Q x/\sqrt{d_k}\big)",
        structure=r"\frac12\begin{bmatrix}0 & x_{\rm avg}\otimes I_{d_v}\\ x_{\rm avg}^\top\otimes I_{d_v} & 0"
        r"\end{bmatrix}\text{ on }(W^V, v)",
        units="heads (W^Q, W^K, W^V, v)",
        citations=("vaswani2017attention",),
    ),
    _network(
        13, "query_key_attention", "Query-key-only attention heads", QueryKeyAttention(_FIXED, 3, key_dim=2), _TOKENS,
        formula=r"\sum_i c^\top X\,\mathrm{softmax}\big(X^\top W_i^{K\top} W_i^Q x/\sqrt{d_k}\big)",
        structure=r"\frac{1}{2\sqrt{d_k}}\begin{bmatrix}0 & xu^\top\otimes I\\ ux^\top\otimes I & 0\end{bmatrix},"
        r"\;u=\Sigma_X c",
        units="heads (W^Q, W^K)",
        citations=("tarzanagh2023max", "pan2024dissecting", "maulensoto2025attention"),
    ),
    _network(
        17, "single_head_logits", "Logits of a single attention head", SingleHeadLogits(_FIXED, key_dim=3), _TOKENS,
        formula=r"c^\top X\,\mathrm{softmax}\big(X^\top W^{K\top} W^Q x/\sqrt{d_k}\big)",
        structure=r"\frac{1}{2\sqrt{d_k}}\begin{bmatrix}0 & xu^\top\\ ux^\top & 0\end{bmatrix},\;u=\Sigma_X c",
        units="ROWS of (W^Q, W^K) in the source: the key-query channels, W here the transpose",
        citations=("ziyin2026nqf",),
    ),
    _network(
        30, "fourier_mlp", "Fourier perceptron", FourierMLP(4, 0.5),
        (lambda generator: torch.rand(_SAMPLES, generator=generator, dtype=torch.float64),),
        formula=r"P^{-1/2}\sum_k W_k \tanh(s_k a_k \psi_k(x))",
        structure=r"\bigoplus_k \frac{s_k\psi_k(x)}{2\sqrt P}\begin{bmatrix}0 & 1\\ 1 & 0\end{bmatrix}",
        units="the whole layer is one unit: its hidden units see different features",
        citations=("ziyin2026nqf",),
        exchangeable=False,
    ),
)  # fmt: skip
