"""Taylor surrogates of training: the loss of each batch, expanded at fixed parameters theta0.

With delta = theta - theta0, outputs f(theta, x), f0 and J = df/dtheta at theta0, and a loss l(f, y),

    none     l(f(theta0 + delta))                              the network itself
    prox     l(f0 + J delta)                                   the network linearised; convex in delta if l is
    quad     l(f0) + <l', J delta> + 1/2 <J delta, l'' J delta>   l' and l'' at f0: the Gauss-Newton quadratic
    hquad    L + <dL, delta> + 1/2 <delta, H delta>            with the Hessian of the batch's loss L(theta)

each divided by the number of outputs. `hquad` is unbounded below along negative curvature. Source: Meterez et al. 2026
for `none`, `prox` and `quad` ("linearized model", with "quadratic loss"), read from their code; `hquad` is ours.

    >>> import torch
    >>> from nqflib.curvature import SQUARED_ERROR
    >>> model = lambda p, x: torch.tanh(x @ p["w"])
    >>> batch = torch.tensor([[1.0, 2.0]]).double(), torch.ones(1, 1).double()
    >>> at = Expansion(model, {"w": torch.zeros(2, 1).double()}, batch, loss=SQUARED_ERROR)
    >>> loss, gradient = at.quad({"w": torch.tensor([[0.5], [0.0]]).double()})     # (0.5 - 1)^2 and 2 (0.5 - 1) x
    >>> loss.item(), gradient["w"].flatten().tolist()
    (0.25, [-1.0, -2.0])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nqflib.curvature import CROSS_ENTROPY, Batch, OutputLoss, Parameters, linearize

Surrogate = Literal["none", "prox", "quad", "hquad"]
Value = tuple[Tensor, Parameters]  # the loss () and its gradient in delta, by name


class Expansion:
    """The loss of one batch and its surrogates around theta0; each takes delta by name, and gives loss and gradient.

    Args:
        model: a module, whose own parameters play no part; or a function f(parameters, inputs). One with
            `linearize(parameters, inputs) -> (logits, jvp, vjp)` is differentiated by it, except in `hquad`.
        parameters: theta0 by name, every parameter of the model.
        batch: (inputs, targets).
        loss: of the outputs.

    `prox` and `quad` share one pass at theta0, and take one product with J and one with its transpose each.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Parameters, Any], Tensor],
        parameters: Mapping[str, Tensor],
        batch: Batch,
        *,
        loss: OutputLoss = CROSS_ENTROPY,
    ) -> None:
        self.model, self.loss = model, loss
        self.start = {name: p.detach() for name, p in parameters.items()}
        self.inputs, self.targets = batch

    def surrogate(self, kind: Surrogate, delta: Mapping[str, Tensor]) -> Value:
        """`none`, `prox`, `quad` or `hquad` at delta. Raises `ValueError` for another kind."""
        if kind not in ("none", "prox", "quad", "hquad"):
            raise ValueError(f"kind must be none, prox, quad or hquad, got {kind!r}")
        return getattr(self, kind)(delta)

    def none(self, delta: Mapping[str, Tensor]) -> Value:
        """The loss of the network at theta0 + delta."""
        f, _, vjp = self._linearized({name: p + delta[name] for name, p in self.start.items()})
        return self._pulled_back(f, self.loss.value(f, self.targets), self.loss.gradient(f, self.targets), vjp)

    def prox(self, delta: Mapping[str, Tensor]) -> Value:
        """The loss of the outputs linearised in delta."""
        f0, jvp, vjp = self._at_start
        f = f0 + jvp(dict(delta))
        return self._pulled_back(f, self.loss.value(f, self.targets), self.loss.gradient(f, self.targets), vjp)

    def quad(self, delta: Mapping[str, Tensor]) -> Value:
        """The loss of the outputs to second order in their linear change: g + G delta with Gauss-Newton's G."""
        f0, jvp, vjp = self._at_start
        change = jvp(dict(delta))
        slope, bent = self.loss.gradient(f0, self.targets), self.loss.hessian(f0, self.targets, change)
        value = self.loss.value(f0, self.targets) + ((slope + bent / 2) * change).sum()
        return self._pulled_back(f0, value, slope + bent, vjp)

    def hquad(self, delta: Mapping[str, Tensor]) -> Value:
        """The loss to second order in delta: g + H delta with the Hessian of the batch."""
        value, leaves, gradient = self._with_graph
        along = torch.stack([(g * delta[name]).sum() for name, g in gradient.items()]).sum()
        bent = torch.autograd.grad(
            [along], list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        result, total = {}, value.detach().clone()
        for (name, g), h in zip(gradient.items(), bent, strict=True):
            result[name] = g.detach() + h
            total += ((g.detach() + h / 2) * delta[name]).sum()
        return total, result

    @cached_property
    def _at_start(self) -> Any:
        return self._linearized(self.start)

    @cached_property
    def _with_graph(self) -> tuple[Tensor, Parameters, Parameters]:
        leaves = {name: p.clone().requires_grad_() for name, p in self.start.items()}
        with torch.enable_grad():
            f = self._outputs(leaves)
            value = self.loss.value(f, self.targets) / self.loss.terms(f, self.targets)
            gradient = torch.autograd.grad(
                value, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
        return value, leaves, dict(zip(leaves, gradient, strict=True))

    def _linearized(self, parameters: Parameters) -> Any:
        own = getattr(self.model, "linearize", None)
        return own(parameters, self.inputs) if callable(own) else linearize(self._outputs, parameters)

    def _outputs(self, parameters: Parameters) -> Tensor:
        if isinstance(self.model, nn.Module):
            return functional_call(self.model, parameters, (self.inputs,))
        return self.model(parameters, self.inputs)

    def _pulled_back(self, f: Tensor, value: Tensor, cotangent: Tensor, vjp: Any) -> Value:
        terms = self.loss.terms(f, self.targets)
        return value / terms, vjp(cotangent / terms)
