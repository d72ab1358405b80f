"""Deep stacks of layers, and what becomes of them when every layer, or the whole, is a quadratic form.

A stack h^(l) = layer_l(h^(l-1)) of L layers has two reductions: the L-layer form, each layer replaced by its own
quadratic twin, and a 1-layer form that computes the same function at the start but has no product of small
factors. Each layer's form is linear in its input here, so the L-layer form is a deep linear map T_L ... T_1 of x (of
the mean token for attention), and the 1-layer form is a two-layer linear map with balanced factors of that product.
Source: Ziyin et al. 2026, appendix B.4 and the experiment of its four-layer perceptron and two-layer attention.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from nqflib.layers import MLP, Activation, MultiHeadAttention, QuadraticTwin


class DeepMLP(nn.Module):
    """Perceptrons in series: f = mlp_L(... mlp_1(x)). Called with x (n, k), returns (n, c)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @classmethod
    def of_widths(
        cls,
        widths: tuple[int, ...],
        *,
        activation: Activation = torch.tanh,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> DeepMLP:
        """The stack with `widths` (k, hidden, k', hidden', ..., c): 8-16-16-16-1 is two perceptrons, 4 matrices.

        The activation acts inside each perceptron and not between them. Raises `ValueError` unless `widths` has an
        odd length of at least 3.
        """
        if len(widths) < 3 or len(widths) % 2 == 0:
            raise ValueError(
                f"widths must alternate (inputs, hidden, ..., outputs), an odd number of them, got {widths}"
            )
        sizes = zip(pairwise(widths[::2]), widths[1::2], strict=True)
        return cls(*(MLP(k, d, c, activation=activation, scale=scale, generator=generator) for (k, c), d in sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def twin(self) -> DeepMLP:
        """The L-layer form: every perceptron replaced by its quadratic twin, with copies of the weights."""
        return DeepMLP(*(QuadraticTwin(layer) for layer in self.layers))  # pyright: ignore[reportArgumentType]

    def collapse(self, width: int, generator: torch.Generator | None = None) -> QuadraticTwin:
        """The 1-layer form on x with `width` units, equal to `twin()` at these weights."""
        first = self.layers[0]
        assert isinstance(first, MLP)
        with torch.no_grad():
            return balanced_form(self.twin()(torch.eye(first.u.shape[1], dtype=first.u.dtype)).T, width, generator)


class DeepAttention(nn.Module):
    """Two attention layers: the first answers at every token, the second with the last token as its query.

    Called with tokens X (n, N, D), returns (n, c).
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, X: Tensor) -> Tensor:
        hidden = self.first(X, X.unsqueeze(-3))  # every token is a query: (n, N, D'), the context shared
        return self.second(hidden[..., -1, :], hidden)

    @classmethod
    def of_sizes(
        cls,
        dim: int,
        *,
        key_dim: int,
        value_dim: int,
        outputs: int = 1,
        heads: int = 1,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> DeepAttention:
        """Tokens and hidden tokens of `dim`, both layers with the same heads; the second has `outputs`."""
        first, second = (
            MultiHeadAttention(dim, heads, c, key_dim=key_dim, value_dim=value_dim, scale=scale, generator=generator)
            for c in (dim, outputs)
        )
        return cls(first, second)

    def twin(self) -> DeepAttention:
        """The 2-layer form: both layers replaced by their quadratic twins, with copies of the weights."""
        return DeepAttention(QuadraticTwin(self.first), QuadraticTwin(self.second))  # pyright: ignore[reportArgumentType]

    def collapse(self, width: int, generator: torch.Generator | None = None) -> QuadraticTwin:
        """The 1-layer form on the MEAN token, with `width` units, equal to `twin()` at these weights."""
        assert isinstance(self.first, MultiHeadAttention)
        value = self.first.value
        with torch.no_grad():
            tokens = torch.eye(value.shape[1], dtype=value.dtype).unsqueeze(1)  # one-token contexts e_j
            return balanced_form(self.twin()(tokens).T, width, generator)


def balanced_form(T: Tensor, width: int, generator: torch.Generator | None = None) -> QuadraticTwin:
    """The two-layer linear form x -> T x with balanced factors Z_1 Z_1^T = (T^T T)^(1/2), Z_2 Z_2^T = (T T^T)^(1/2).

    T (c, k) = Z_2 Z_1^T from its singular value decomposition; a random rotation (by `generator`) spreads the rank
    over all `width` units, which changes nothing under gradient descent but keeps units from being exactly zero for
    coordinate-wise optimizers. Raises `ValueError` if `width` is less than min(c, k).
    """
    c, k = T.shape
    rank = min(c, k)
    if width < rank:
        raise ValueError(f"width must be at least min(c, k) = {rank} to hold the map, got {width}")
    left, values, right = torch.linalg.svd(T, full_matrices=False)
    rotation, _ = torch.linalg.qr(torch.randn(width, rank, generator=generator, dtype=T.dtype))
    layer = MLP(k, width, c, activation=_identity)
    with torch.no_grad():
        layer.u.copy_(rotation @ (values.sqrt()[:, None] * right))
        layer.v.copy_(rotation @ (values.sqrt()[:, None] * left.T))
    return QuadraticTwin(layer)


def _identity(x: Tensor) -> Tensor:
    return x
