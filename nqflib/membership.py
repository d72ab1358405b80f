"""Whether a model of the registry is the quadratic form that it is said to be: every test at once.

>>> from nqflib.zoo import MODELS
>>> found = membership(MODELS["phase_retrieval"], torch.Generator().manual_seed(0))
>>> found.structure < 1e-12, found.deviation < 1e-12, found.steps < 1e-12
(True, True, True)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nqflib.forms import QuadraticForm, expand
from nqflib.moments import Moments, squared_loss, train
from nqflib.remainders import remainder
from nqflib.zoo import SolvableModel

_SMALL = 0.01  # weights at which a network's steps are compared with those of its form


@dataclass(frozen=True)
class Membership:
    """What the tests of one model found.

    `A` (n, c, p, p) the structure matrices by hand; `structure` their largest difference, over all entries, from
    automatic differentiation; `deviation` largest |f - form| over largest |f| at weights N(0, 1); `order` of the
    remainder as the weights shrink from 0.1 to 0.001, inf for an exact model; `permutation` largest change of f, over
    largest |f|, when its units are permuted, None where the model as a whole is one unit; `steps` largest difference of
    M = W W^T, relative to its largest change, between gradient descent on W and theorem 2.
    """

    A: Tensor
    structure: float
    deviation: float
    order: float
    permutation: float | None
    steps: float


def membership(model: SolvableModel, generator: torch.Generator, steps: int = 5, eta: float = 0.01) -> Membership:
    """Test one model on an instance drawn with `generator`.

    Exact models take `steps` gradient steps of size `eta` from weights N(0, 1) towards random targets, on the mean
    square loss, networks from weights a hundred times smaller: for these theorem 2 holds to leading order only.
    """
    drawn = model.sample(generator)
    exact = model.exactness == "exact"
    closed, automatic = model.form(drawn), expand(model.module(drawn), drawn.x)

    def f(W: Tensor) -> Tensor:
        return model.f(W, *drawn.x)

    order = math.inf
    if not exact:
        scales = torch.logspace(-3, -1, 9, dtype=torch.float64)
        order = remainder(f, closed, drawn.W.unsqueeze(0), scales, closed.f0).order
    permutation = None
    if model.exchangeable:
        three = torch.randn(drawn.W.shape[0], 3, generator=generator, dtype=torch.float64)
        permutation = max(_relative(f(three[:, units]), f(three)) for units in ([1, 0, 2], [1, 2, 0]))
    W = drawn.W if exact else _SMALL * drawn.W
    targets = torch.randn(closed.f0.shape, generator=generator, dtype=torch.float64)
    return Membership(
        A=closed.A,
        structure=(automatic.A - closed.A).abs().max().item(),
        deviation=_relative(closed(drawn.W), f(drawn.W)),
        order=order,
        permutation=permutation,
        steps=_step_error(f, closed, W, targets, steps, eta),
    )


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def _step_error(f, form: QuadraticForm, W: Tensor, targets: Tensor, steps: int, eta: float) -> float:
    predicted = train(form, Moments.of(W), targets, eta=eta, steps=steps).final.M
    moving = W
    for _ in range(steps):
        moving = moving.detach().requires_grad_()
        slope = torch.autograd.grad(squared_loss(f(moving), targets), moving)[0]
        moving = moving.detach() - eta * slope
    M = moving @ moving.T
    return ((predicted - M).abs().max() / (M - W @ W.T).abs().max()).item()
