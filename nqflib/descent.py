"""Full-batch training of any model by gradient descent, momentum or Adam, in the same words for a layer and its form.

    losses = descend(lambda: layer(x), layer.parameters(), y, optimizer="adam", rate=1e-3, steps=400)
    losses = descend(twin.on(x), twin.parameters(), y, optimizer="adam", rate=1e-3, steps=400)

The updates are those of `torch.optim.SGD` and `torch.optim.Adam` with their defaults; `torch.optim` itself is left
alone because the first step of any of its optimizers imports a compiler for several seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from nqflib.moments import squared_loss

OPTIMIZERS = ("gd", "momentum", "adam")
MOMENTUM = 0.9
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def descend(
    outputs: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    targets: Tensor,
    *,
    optimizer: str,
    rate: float,
    steps: int,
    watch: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Train in place and return the loss before every step and after the last, shape (steps + 1,).

        gd         W <- W - rate G,   G = dL/dW
        momentum   V <- 0.9 V + G,    W <- W - rate V
        adam       W <- W - rate m^ / (sqrt(v^) + 1e-8), with 0.9 and 0.999

    L is the mean over samples of the sum over outputs of (f - y)^2. Arguments: `outputs` () -> f (n, c) at the
    current weights; `parameters` what is trained; `targets` y (n, c); `watch` is called with the number of updates
    done before each step and after the last. From the step at which the loss is not finite the losses are inf and
    nothing is trained any more. Raises `ValueError` for an unknown optimizer or a rate that is not positive.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if not rate > 0:
        raise ValueError(f"rate must be positive, got {rate}")
    weights = list(parameters)
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    losses = np.full(steps + 1, np.inf)
    for step in range(steps + 1):
        loss = squared_loss(outputs(), targets)
        losses[step] = loss.item()
        if not isfinite(losses[step]):
            losses[step] = np.inf
            break
        if watch is not None:
            watch(step)
        if step == steps:
            break
        # A parameter that a form does not see (the query of attention) keeps its place with a zero gradient.
        slopes = torch.autograd.grad(loss, weights, materialize_grads=True)
        with torch.no_grad():
            for w, slope, m, v in zip(weights, slopes, first, second, strict=True):
                if optimizer == "gd":
                    w.sub_(slope, alpha=rate)
                elif optimizer == "momentum":
                    w.sub_(m.mul_(MOMENTUM).add_(slope), alpha=rate)
                else:
                    m.lerp_(slope, 1 - BETA1)
                    v.mul_(BETA2).addcmul_(slope, slope, value=1 - BETA2)
                    unbiased = (v / (1 - BETA2 ** (step + 1))).sqrt_().add_(EPS)
                    w.addcdiv_(m, unbiased, value=-rate / (1 - BETA1 ** (step + 1)))
    return losses


def half_time(losses: np.ndarray) -> float:
    """The number of steps after which a loss has fallen to half of its first value, between steps by a line.

    Argument: `losses` (T,) at every step. Returns inf if it never does.
    """
    below = losses <= losses[0] / 2
    if not below.any():
        return float("inf")
    after = int(below.argmax())
    before = losses[after - 1]
    return after - 1 + float((before - losses[0] / 2) / (before - losses[after]))
