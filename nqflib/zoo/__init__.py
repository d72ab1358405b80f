"""The registry of solvable models: seventeen of paper 1 and the relatives that its form explains as well.

Every entry is f(W; x) = f(0; x) + Tr[W W^T A(x)], for all W or to leading order at W = 0, with A written down by hand.

    >>> import torch
    >>> model = MODELS["quadratic_network"]
    >>> sample = model.sample(torch.Generator().manual_seed(0))
    >>> f = model.f(sample.W, *sample.x)
    >>> torch.allclose(f, model.form(sample)(sample.W))
    True

Numbers 1-16 are the rows of table 3 of Ziyin et al. 2026 and 17 its proposition 4; the others are related models.
Not here, because their degree in the trained parameters at W = 0 is above two: linear networks of depth three, tensor
factorisation, quadratic activations with a trained readout, linear attention with query, key and value all trained,
gated units with a trained down-projection; nor rectified units, which have no second derivative at 0.
"""

from __future__ import annotations

from nqflib.zoo.citations import CITATIONS, Citation
from nqflib.zoo.exact import EXACT
from nqflib.zoo.leading_order import LEADING_ORDER
from nqflib.zoo.model import Instance, SolvableModel

MODELS: dict[str, SolvableModel] = {
    model.name: model for model in sorted((*EXACT, *LEADING_ORDER), key=lambda model: model.number)
}

__all__ = ["CITATIONS", "MODELS", "Citation", "Instance", "SolvableModel"]
