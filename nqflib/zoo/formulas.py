"""f and A of the models that are quadratic in W for all W: f as its source writes it, A by hand.

Arguments: weights W (p, d) and inputs with the sample on the first axis; f is (n, c), A is (n, c, p, p). W stacks the
blocks of a unit: W = [U; V] has U above V, and column i is (u_i, v_i).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

KEY_DIM = 3  # d_k of the tied attention logit: its width, and the scale 1/sqrt(d_k)
OUTPUTS = 2  # outputs of the two-layer linear network
EMBEDDING = 2  # dimension K of the linear embedding
VALUE_DIM = 3  # d_v of the averaging attention head


def _rows_of_pair(W: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return W[:first], W[first:]


def bilinear_f(W: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a^T U V^T b for W = [U; V]."""
    U, V = _rows_of_pair(W, a.shape[1])
    return ((a @ U) * (b @ V)).sum(1, keepdim=True)


def off_diagonal(C: Tensor) -> Tensor:
    """1/2 [[0, C], [C^T, 0]] for C (n, c, q, r)."""
    q, r = C.shape[-2:]
    A = C.new_zeros(*C.shape[:-2], q + r, q + r)
    A[..., :q, q:] = 0.5 * C
    A[..., q:, :q] = 0.5 * C.mT
    return A


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def symmetric(S: Tensor) -> Tensor:
    return 0.5 * (S + S.mT)


def bilinear_A(a: Tensor, b: Tensor) -> Tensor:
    return off_diagonal(outer(a, b)).unsqueeze(1)


def square_f(W: Tensor, x: Tensor) -> Tensor:
    """sum_r (w_r^T x)^2."""
    return (x @ W).square().sum(1, keepdim=True)


def square_A(x: Tensor) -> Tensor:
    return outer(x, x).unsqueeze(1)


def rectangular_f(W: Tensor, S: Tensor) -> Tensor:
    U, V = _rows_of_pair(W, S.shape[1])
    return (S * (U @ V.T)).sum((1, 2)).unsqueeze(1)


def two_factor_diagonal_f(W: Tensor, x: Tensor) -> Tensor:
    u, v = _rows_of_pair(W, x.shape[1])
    return (x @ (u * v)).sum(1, keepdim=True)


def difference_diagonal_f(W: Tensor, x: Tensor) -> Tensor:
    u, v = _rows_of_pair(W, x.shape[1])
    return (x @ (u.square() - v.square())).sum(1, keepdim=True)


def _tied_direction(X: Tensor, c: Tensor) -> Tensor:
    """u = Sigma_X c for tokens X (n, N, D) and c (n, D)."""
    mean = X.mean(1)
    second = torch.einsum("nia,nib,nb->na", X, X, c) / X.shape[1]
    return second - mean * (mean * c).sum(1, keepdim=True)


def tied_f(W: Tensor, x: Tensor, X: Tensor, c: Tensor) -> Tensor:
    u = _tied_direction(X, c)
    return ((u @ W) * (x @ W)).sum(1, keepdim=True) / math.sqrt(KEY_DIM)


def tied_A(x: Tensor, X: Tensor, c: Tensor) -> Tensor:
    return symmetric(outer(x, _tied_direction(X, c))).unsqueeze(1) / math.sqrt(KEY_DIM)


def two_layer_linear_f(W: Tensor, x: Tensor) -> Tensor:
    Z1, Z2 = _rows_of_pair(W, x.shape[1])
    return x @ Z1 @ Z2.T


def two_layer_linear_A(outputs: int | None) -> Callable[[Tensor], Tensor]:
    """Per output m: 1/2 [[0, x e_m^T], [e_m x^T, 0]]; `outputs` None for as many as inputs."""

    def A(x: Tensor) -> Tensor:
        e = torch.eye(outputs or x.shape[1], dtype=x.dtype)
        return off_diagonal(outer(x.unsqueeze(1), e))

    return A


def _cross_moment(x: Tensor, y: Tensor) -> Tensor:
    """Gamma = mean over the batch of (x y^T + y x^T)/2, for two views (n, batch, D)."""
    return symmetric(x.mT @ y / x.shape[1])


def embedding_f(W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The entries (k, l) of C = E Gamma E^T for the embedding E (K, D) that W (K D, 1) flattens, (n, K^2)."""
    E = W.reshape(EMBEDDING, x.shape[-1])
    return (E @ _cross_moment(x, y) @ E.T).flatten(1)


def embedding_A(x: Tensor, y: Tensor) -> Tensor:
    gamma, K = _cross_moment(x, y), EMBEDDING
    E_kl = torch.eye(K * K, dtype=x.dtype).reshape(K * K, K, K)
    A = torch.einsum("ckl,nab->nckalb", E_kl, gamma)
    return symmetric(A.flatten(4, 5).flatten(2, 3))


def merged_attention_f(W: Tensor, X: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """sum_h v_h beta^T U_h x with beta = mean_i y_i x_i over the context X (n, N, D); W = [vec U; v]."""
    D = x.shape[1]
    U, v = W[:-1].reshape(D, D, -1), W[-1]
    beta = (y.unsqueeze(1) @ X).squeeze(1) / X.shape[1]
    return torch.einsum("h,na,abh,nb->n", v, beta, U, x).unsqueeze(1)


def merged_attention_A(X: Tensor, y: Tensor, x: Tensor) -> Tensor:
    beta = torch.einsum("ni,nia->na", y, X) / X.shape[1]
    return off_diagonal(outer(beta, x).flatten(1).unsqueeze(-1)).unsqueeze(1)


def factorization_machine_f(W: Tensor, x: Tensor) -> Tensor:
    pairs = torch.triu(outer(x, x), diagonal=1)  # x_i x_j for i < j
    return (pairs * (W @ W.T)).sum((1, 2)).unsqueeze(1)


def factorization_machine_A(x: Tensor) -> Tensor:
    return 0.5 * (outer(x, x) - torch.diag_embed(x.square())).unsqueeze(1)


def averaging_attention_f(W: Tensor, X: Tensor) -> Tensor:
    D, d = X.shape[2], W.shape[1]
    value, v = W[: D * VALUE_DIM].reshape(D, VALUE_DIM, d), W[D * VALUE_DIM :]
    return torch.einsum("nia,avh,vh->n", X, value, v).unsqueeze(1) / X.shape[1]


def averaging_attention_A(X: Tensor) -> Tensor:
    identity = torch.eye(VALUE_DIM, dtype=X.dtype)
    C = torch.einsum("na,vw->navw", X.mean(1), identity).flatten(1, 2)  # x_avg (x) I
    return off_diagonal(C).unsqueeze(1)
