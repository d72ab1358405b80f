"""What an entry of the registry is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nqflib.forms import QuadraticForm
from nqflib.zoo.citations import Citation


@dataclass(frozen=True)
class Instance:
    """Generated weights `W` (p, d) and inputs `x`, a tuple of tensors with the sample on the first axis."""

    W: Tensor
    x: tuple[Tensor, ...]


@dataclass(frozen=True)
class SolvableModel:
    """A model that is a neural quadratic form, exactly or to leading order.

    `number` in the registry and `name`, its key; `title`, and `formula` and `structure`, f and A in LaTeX;
    `f(W, *x)` -> (n, c) for W (p, d); `A(*x)` -> (n, c, p, p), the closed form; `exactness`; `units`, what the columns
    of W are (where the source takes ROWS as units, W here is its transpose and M = W W^T is its W^T W);
    `exchangeable` False means that the model as a whole is one unit, d = 1; `sample(generator)` draws an instance with
    weights N(0, 1); `citations`.
    """

    number: int
    name: str
    title: str
    formula: str
    structure: str
    f: Callable[..., Tensor]
    A: Callable[..., Tensor]
    exactness: Literal["exact", "leading order"]
    units: str
    sample: Callable[[torch.Generator], Instance]
    citations: tuple[Citation, ...]
    exchangeable: bool = True

    def form(self, sample: Instance) -> QuadraticForm:
        """The closed-form quadratic form on the samples of an instance, with f0 = f(0; x) and no g or B."""
        return QuadraticForm(self.f(torch.zeros_like(sample.W), *sample.x), None, self.A(*sample.x), None)

    def module(self, sample: Instance) -> nn.Module:
        """The model as a torch module of x with one parameter, W, at the instance's weights; see `nqflib.units`."""
        return _UnitModule(self.f, sample.W)


class _UnitModule(nn.Module):
    def __init__(self, f: Callable[..., Tensor], W: Tensor) -> None:
        super().__init__()
        self.f = f
        self.W = nn.Parameter(W.clone())
        self.unit_axes: dict[str, int | None] = {"W": 1}

    def forward(self, *x: Tensor) -> Tensor:
        return self.f(self.W, *x)
