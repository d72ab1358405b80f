"""Training weights themselves, step by step, so that a theory of the steps can be held against them.

    run = train(f, [W], targets, rule=Descent(0.01, momentum=0.9), steps=2000, observe=lambda: f(slice(None)))

trains any differentiable f of the parameters by automatic differentiation and keeps what `observe` returns. Two runs
from the same start on the same batches, a layer and its quadratic form for example, differ by what their functions
differ. The rules are those of `torch.optim.SGD` and `torch.optim.Adam`, written out because a page needs a dozen
lines of them and their import costs seconds.

    >>> w = torch.tensor(0.0, requires_grad=True)
    >>> run = train(lambda _: w.view(1, 1), [w], torch.ones(1, 1), rule=Descent(0.25), steps=2, observe=lambda: w)
    >>> run.observed.tolist(), run.outcome
    ([0.0, 0.5, 0.75], 'finished')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nqflib.moments import squared_loss

Samples = Tensor | slice


class Rule(Protocol):
    """An optimizer: `step` changes the parameters in place, and keeps what it needs to remember."""

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None: ...


@dataclass
class Descent:
    """Gradient descent, V <- momentum V + gradient + weight_decay W, W <- W - rate V, V = 0 at first."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    buffers: list[Tensor] = field(default_factory=list)

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        changes = list(gradients)
        if self.weight_decay:
            changes = [g.add(w, alpha=self.weight_decay) for w, g in zip(parameters, gradients, strict=True)]
        if self.momentum:
            old = self.buffers or [torch.zeros_like(v) for v in changes]
            changes = [v.add(b, alpha=self.momentum) for v, b in zip(changes, old, strict=True)]
            self.buffers = changes
        for w, v in zip(parameters, changes, strict=True):
            w.sub_(v, alpha=self.rate)


@dataclass
class Adam:
    """Adam with bias correction (Kingma and Ba 2015), every weight divided by its own root mean square gradient."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    count: int = 0
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if not self.count:
            self.means = [torch.zeros_like(g) for g in gradients]
            self.squares = [torch.zeros_like(g) for g in gradients]
        self.count += 1
        first, second = (1 - beta**self.count for beta in self.betas)
        for w, g, mean, square in zip(parameters, gradients, self.means, self.squares, strict=True):
            mean.lerp_(g, 1 - self.betas[0])
            square.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
            w.addcdiv_(mean, (square / second).sqrt_().add_(self.eps), value=-self.rate / first)


class Run(NamedTuple):
    """What one training run left: `steps` (T,), `observed` (T, ...), and "finished" or "diverged at step t"."""

    steps: Tensor
    observed: Tensor
    outcome: str


def train(
    f: Callable[[Samples], Tensor],
    parameters: Sequence[Tensor],
    targets: Tensor,
    *,
    rule: Rule,
    steps: int,
    observe: Callable[[], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor] = squared_loss,
    batches: Sequence[Tensor] | None = None,
    every: int = 1,
) -> Run:
    """Train `parameters` in place on the loss of f, and observe them.

    Arguments: `f(samples)` the outputs (m, c) on those samples, a differentiable function of `parameters`, which must
    be leaves that require gradients; `targets` (n, c); `rule` a fresh `Descent` or `Adam`; `loss(f, y)` a scalar, by
    default the mean over samples of the sum over outputs of (f - y)^2; `batches` indices (m,) of each step, None for
    all samples; `observe()` a tensor, called before the first step, after every `every` steps, and after the last.
    A run stops, and says so in `outcome`, at the first step whose loss is not finite.
    Raises `ValueError` if `steps` or `every` is out of range or there are fewer batches than steps.
    """
    if steps < 0 or every < 1:
        raise ValueError(f"steps must be at least 0 and every at least 1, got {steps} and {every}")
    if batches is not None and len(batches) < steps:
        raise ValueError(f"batches must hold one index tensor per step, {steps}, got {len(batches)}")
    times, observed, outcome = [0], [observe().detach().clone()], "finished"
    for step in range(steps):
        samples = slice(None) if batches is None else batches[step]
        value = loss(f(samples), targets[samples])
        if not math.isfinite(value.item()):
            outcome = f"diverged at step {step}"
            break
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
        with torch.no_grad():
            rule.step(parameters, gradients)
            if (step + 1) % every == 0 or step + 1 == steps:
                times.append(step + 1)
                observed.append(observe().detach().clone())
    return Run(torch.tensor(times), torch.stack(observed), outcome)


def mean_first_basis(d: int) -> Tensor:
    """An orthonormal basis (d, d) whose first column is the vector of ones over sqrt(d).

    W times it is a square root of the moments of d units, [mu / sqrt(d), L], that stays exact where d <= p.
    """
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    one = torch.eye(d, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([torch.ones(d, 1, dtype=torch.float64), one[:, : d - 1]], 1)).Q
    return basis * basis[0, 0].sign()


def rotation_about_the_mean(d: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (d, d) that fixes the vector of ones: W and W Q have the same W W^T and W 1."""
    if d < 2:
        raise ValueError(f"d must be at least 2, got {d}")
    basis, turn = mean_first_basis(d), torch.eye(d, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(torch.randn(d - 1, d - 1, generator=generator, dtype=torch.float64)).Q
    return basis @ turn @ basis.T
