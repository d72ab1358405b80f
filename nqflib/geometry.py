"""Curvature as an optimizer sees it: products with P^(1/2) C P^(1/2) for a diagonal preconditioner P.

    P = pre post / (sqrt(nu^) + eps)   ("adam")    or    pre post   ("raw")

with the factors of the parametrisation and Adam's corrected second moment nu^.

    >>> import torch
    >>> product = preconditioned(lambda v: 2 * v, torch.tensor([4.0, 9.0]))
    >>> product(torch.ones(2)).tolist()
    [8.0, 18.0]

Source: the code of Meterez et al. 2026; the cap is ours.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from nqflib.curvature import Product


def adam_geometry(second_moment: Tensor, pre: Tensor, post: Tensor, *, eps: float = 1e-8) -> Tensor:
    """P = pre post / (sqrt(nu^) + eps), (n,), from the corrected second moment nu^ of pre times the gradient.

    `pre` and `post` hold each parameter's factors; post includes the embedding's scale, and the learning rate is in
    neither. Source: the code of Meterez et al. 2026.
    """
    return pre * post / (second_moment.sqrt() + eps)


def raw_geometry(pre: Tensor, post: Tensor) -> Tensor:
    """P = pre post, (n,): what gradient descent sees in a parametrisation with factors; not the identity."""
    return pre * post


def capped(P: Tensor, quantile: float = 0.95) -> tuple[Tensor, float]:
    """P (n,) with entries above its quantile replaced by it, and that quantile.

    Rare tokens and dead neurons have a tiny nu^, and a few huge entries of P then rule the preconditioned curvature.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile must lie in (0, 1], got {quantile}")
    cap = P.kthvalue(max(1, int(np.ceil(quantile * P.numel())))).values  # torch.quantile ends at 16 million entries
    return P.minimum(cap), cap.item()


def preconditioned(product: Product, P: Tensor) -> Product:
    """v -> P^(1/2) C P^(1/2) v for v (n,) or (k, n), with the diagonal P (n,). The matching gradient is P^(1/2) g."""
    if not (P.isfinite().all() and (P >= 0).all()):
        raise ValueError("P must be finite and not negative")
    root = P.sqrt()
    return lambda v: root * product(root * v)
