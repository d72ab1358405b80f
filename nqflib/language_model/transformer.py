"""The decoder of paper 2, in the parametrisation that carries one learning rate across width and depth.

    x_0 = E[token],   x <- x + attention(norm(x)) / L,   x <- x + mlp(norm(x)) / L,   logits = U norm(x),

with L layers, norm(x) = x / sqrt(mean(x^2) + 1e-6) without gains, rotary positions, queries and keys normalised per
head, a GELU perceptron that is not gated, and no biases. U starts at zero, so the first loss is ln V exactly. Attention
is written out, since fused kernels have neither a forward derivative nor a second backward one.

    >>> model = Transformer(Architecture(vocabulary=16, width=8, layers=2, heads=2, hidden=32, context=4))
    >>> windows = torch.tensor([[3, 1, 4, 1, 5]])
    >>> round(next_token_loss(model, windows).item(), 4) == round(math.log(16), 4)
    True

Source: Meterez et al. 2026; CompleteP (residual branches / L and the factors below) is due to Dey et al. 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from nqflib.language_model.linearization import Linearization

NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0
EMBEDDING_SCALE = 1 / 64  # multiplies the embedding's update at every width, as in the paper's code


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder.

    Arguments: `vocabulary` V, `width` D, `layers` L, `heads` H of D / H channels each, `hidden` M channels of the
    perceptron, `context` T tokens. Raises `ValueError` for a size below 1, for a D that H does not divide, and for an
    odd D / H, which rotary positions cannot pair up.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int
    context: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 heads = {2 * self.heads}, got {self.width}")

    @property
    def head_width(self) -> int:
        """K = D / H, channels of one head."""
        return self.width // self.heads

    @property
    def block_parameters(self) -> int:
        """L (4 D^2 + 2 D M), the parameters without embedding and unembedding."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.hidden)

    @property
    def parameters(self) -> int:
        """2 V D + L (4 D^2 + 2 D M)."""
        return 2 * self.vocabulary * self.width + self.block_parameters


class Factors(NamedTuple):
    """Per-tensor factors: the optimizer sees `pre` times the gradient, the weight moves by `post` times its update."""

    pre: float
    post: float


def norm(x: Tensor) -> Tensor:
    """x / sqrt(mean over the last axis of x^2 + 1e-6), computed in at least float32 and returned in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


def rotary_turns(positions: int, channels: int) -> Tensor:
    """exp(i t 10000^(-2j/K)) for position t and pair j of the K channels; (positions, K/2), complex128.

    Source: Su et al. 2021.
    """
    frequency = ROTARY_BASE ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (2j, 2j + 1) of x (..., T, K) by `turns` (..., T, K/2), complex of at least x's precision."""
    pairs = torch.view_as_complex(x.to(turns.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, queries and keys normalised per head before they are turned."""

    def __init__(self, size: Architecture) -> None:
        super().__init__()
        self.heads, self.head_width = size.heads, size.head_width
        self.qkv = nn.Parameter(torch.empty(3 * size.width, size.width))
        self.out = nn.Parameter(torch.empty(size.width, size.width))

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor, fused: bool) -> Tensor:
        B, T, D = x.shape
        qkv = F.linear(x, self.qkv).view(B, T, 3, self.heads, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, K) each
        q, k = rotate(norm(q), turns), rotate(norm(k), turns)
        if fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q * self.head_width**-0.5) @ k.mT + mask  # (B, H, T, T)
            y = scores.softmax(-1) @ v
        return F.linear(y.transpose(1, 2).reshape(B, T, D), self.out)


class Perceptron(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, size: Architecture) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(size.hidden, size.width))
        self.down = nn.Parameter(torch.empty(size.width, size.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class Block(nn.Module):
    """One layer: x + attention(norm(x)) / L, then x + mlp(norm(x)) / L."""

    def __init__(self, size: Architecture) -> None:
        super().__init__()
        self.branch = 1 / size.layers
        self.attention, self.mlp = Attention(size), Perceptron(size)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor, fused: bool) -> Tensor:
        x = torch.add(x, self.attention(norm(x), turns, mask, fused), alpha=self.branch)
        return torch.add(x, self.mlp(norm(x)), alpha=self.branch)


class Transformer(nn.Module):
    """The decoder: tokens (B, T) int64, T at most `size.context`, to logits (B, T, V).

    Arguments: `size`; `generator` draws the weights (None: torch's default one); `dtype`; `fused` takes torch's fused
    attention, which is faster and takes less memory on a GPU but has first derivatives in reverse only.

    Weights are drawn in float64 and then rounded, so that two dtypes start from the same ones: embedding N(0, 1),
    query, key, value and up N(0, 1/D), attention output N(0, 1/D) (sqrt(D)/(HK), HK = D), down N(0, D/M^2),
    unembedding zero.
    """

    _turns: Tensor
    mask: Tensor

    def __init__(
        self,
        size: Architecture,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.size, self.fused = size, fused
        self.embedding = nn.Parameter(torch.empty(size.vocabulary, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.unembedding = nn.Parameter(torch.empty(size.vocabulary, size.width))
        self.to(dtype)
        self.shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        # Stored as pairs of reals, since `Module.to(dtype)` would cut off an imaginary part.
        turns = torch.view_as_real(rotary_turns(size.context, size.head_width))
        self.register_buffer("_turns", turns, persistent=False)  # (T, K/2, 2), float64
        causal = torch.full((size.context, size.context), -math.inf, dtype=dtype).triu(1)
        self.register_buffer("mask", causal, persistent=False)
        self._draw(generator)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[-1]
        if self.size.context < T:
            raise ValueError(f"tokens must have at most {self.size.context} positions, got {T}")
        x = F.embedding(tokens, self.embedding)  # (B, T, D)
        turns, mask = self.turns(T, x.dtype), self.mask[:T, :T]
        for block in self.blocks:
            x = block(x, turns, mask, self.fused)
        return F.linear(norm(x), self.unembedding)

    def turns(self, positions: int, dtype: torch.dtype) -> Tensor:
        """The turns of the first `positions` positions, complex (T, K/2), for activations of `dtype`."""
        real = self._turns[:positions].to(torch.promote_types(dtype, torch.float32))
        return torch.view_as_complex(real)

    def factors(self) -> dict[str, Factors]:
        """The factors (pre, post) of every parameter, by name.

        embedding (D, 1/64); query, key, value (L D, 1/D); attention output (L D, 1/D); up (L M, 1/D); down
        (L D, 1/M); unembedding (1, 1/D). Adam divides the gradient by its size, so `pre` matters through its eps only.
        """
        D, L, M = self.size.width, self.size.layers, self.size.hidden
        of_kind = {
            "embedding": Factors(D, EMBEDDING_SCALE),
            "qkv": Factors(L * D, 1 / D),
            "out": Factors(L * D, 1 / D),
            "up": Factors(L * M, 1 / D),
            "down": Factors(L * D, 1 / M),
            "unembedding": Factors(1, 1 / D),
        }
        return {name: of_kind[name.rpartition(".")[2]] for name, _ in self.named_parameters()}

    def linearize(self, parameters: Mapping[str, Tensor], tokens: Tensor) -> Linearization:
        """The model at `parameters` on `tokens` (B, T) with its Jacobian in both directions, written out by hand.

        Returns (logits, jvp, vjp), see `nqflib.language_model.linearization.linearize`, which this calls.
        """
        from nqflib.language_model import linearization  # which is written in terms of this module

        return linearization.linearize(self, parameters, tokens)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        D, M = self.size.width, self.size.hidden
        std = {"embedding": 1.0, "qkv": D**-0.5, "out": D**-0.5, "up": D**-0.5, "down": D**0.5 / M, "unembedding": 0.0}
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            scale = std[name.rpartition(".")[2]]
            draw = (
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) if scale else parameter.zero_()
            )
            parameter.copy_(scale * draw)


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """All tensors in one vector, in the mapping's order."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def unflatten(vector: Tensor, model: Transformer) -> dict[str, Tensor]:
    """Views of `vector` (n,) in the shapes of the model's parameters, by name, in the model's order."""
    pieces = vector.split([shape.numel() for shape in model.shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(model.shapes.items(), pieces, strict=True)}


def next_token_loss(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats, over windows (B, T + 1) int64: position t predicts t + 1."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)), windows[:, 1:].flatten()
    )
