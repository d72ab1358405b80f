"""Two-layer perceptrons and deep linear maps under full-batch descent, many runs at once, gradients by hand.

    f = phi(x U) V,   L = mean over samples, sum over outputs, of (f - y)^2,
    dL/dV = (2/n) phi(x U)^T (f - y),   dL/dU = (2/n) x^T [(f - y) V^T * phi'(x U)].

Weights U (..., k, d) and V (..., d, c) may have leading axes: runs from different initial scales then cost one pass.
With phi linear of slope phi'(0) this is the network's quadratic form (proposition 1 of Ziyin et al. 2026), trained
like the network.

    >>> x = np.eye(2)
    >>> U, V = np.full((2, 3), 0.1), np.full((3, 1), 0.1)
    >>> run = descend(x, x[:, :1], U, V, LINEAR, Descent(0.1), steps=200, observe=lambda f, U, V: f[0, 0])
    >>> print(run.values[-1].round(3))
    1.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nqflib.progress import progress

Array = NDArray[np.float64]


class Activation(NamedTuple):
    """phi, and phi' as a function of z and phi(z)."""

    value: Callable[[Array], Array]
    slope: Callable[[Array, Array], Array]


def _sigmoid(z: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * z)  # exp of a large argument would overflow


def linear(slope: float) -> Activation:
    """phi(z) = slope z: with slope = phi'(0) the quadratic form of a perceptron with phi(0) = 0."""
    return Activation(lambda z: slope * z, lambda z, _: np.full_like(z, slope))


def _silu_slope(z: Array, value: Array) -> Array:
    gate = _sigmoid(z)
    return gate + value * (1 - gate)


TANH = Activation(np.tanh, lambda _, value: 1 - value**2)
SILU = Activation(lambda z: z * _sigmoid(z), _silu_slope)
RELU = Activation(lambda z: np.maximum(z, 0), lambda z, _: (z > 0).astype(z.dtype))
LINEAR = linear(1.0)


class Update(Protocol):
    """An optimizer: called with the step (0 first), the weights and their gradients; returns the new weights."""

    def __call__(self, step: int, weights: list[Array], gradients: list[Array]) -> list[Array]: ...


@dataclass(frozen=True)
class Descent:
    """W - rate * gradient."""

    rate: float

    def __call__(self, step: int, weights: list[Array], gradients: list[Array]) -> list[Array]:
        return [W - self.rate * slope for W, slope in zip(weights, gradients, strict=True)]


class Momentum:
    """V <- beta V + gradient, W <- W - rate V, V = 0 at first."""

    def __init__(self, rate: float, beta: float = 0.9) -> None:
        self.rate, self.beta, self.buffers = rate, beta, []

    def __call__(self, step: int, weights: list[Array], gradients: list[Array]) -> list[Array]:
        old = self.buffers if step else [0.0] * len(weights)
        self.buffers = [self.beta * V + slope for V, slope in zip(old, gradients, strict=True)]
        return [W - self.rate * V for W, V in zip(weights, self.buffers, strict=True)]


class Adam:
    """Adam with its usual constants and bias corrections (Kingma and Ba 2015, algorithm 1)."""

    def __init__(self, rate: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.rate, self.beta1, self.beta2, self.eps, self.moments = rate, beta1, beta2, eps, []

    def __call__(self, step: int, weights: list[Array], gradients: list[Array]) -> list[Array]:
        old = self.moments if step else [(0.0, 0.0)] * len(weights)
        self.moments = [
            (self.beta1 * m + (1 - self.beta1) * slope, self.beta2 * v + (1 - self.beta2) * slope**2)
            for (m, v), slope in zip(old, gradients, strict=True)
        ]
        first, second = 1 - self.beta1 ** (step + 1), 1 - self.beta2 ** (step + 1)
        return [
            W - self.rate * (m / first) / (np.sqrt(v / second) + self.eps)
            for W, (m, v) in zip(weights, self.moments, strict=True)
        ]


class Run(NamedTuple):
    """What was observed: `steps` (T,), 0 first, and `values` (T, ...)."""

    steps: NDArray[np.int64]
    values: Array


def descend(
    x: Array,
    y: Array,
    U: Array,
    V: Array,
    activation: Activation,
    update: Update,
    *,
    steps: int,
    observe: Callable[[Array, Array, Array], Any],
    every: int = 1,
    until: Callable[[Any], bool] = lambda _: False,
    label: str = "training",
) -> Run:
    """Train f = phi(x U) V on all samples for at most `steps` steps.

    Arguments: `x` (n, k), `y` (n, c); `U` (..., k, d), `V` (..., d, c); `observe(f, U, V)` is recorded before the first
    step and then every `every` steps; the run ends when `until(observed)` holds, or after `steps`.
    Raises `ValueError` if the shapes do not fit or the outputs stop being finite.
    """
    if U.shape[-2:] != (x.shape[1], V.shape[-2]) or V.shape[-1] != y.shape[1]:
        raise ValueError(
            f"U and V must have shapes (..., {x.shape[1]}, d) and (..., d, {y.shape[1]}), got {U.shape} and {V.shape}"
        )
    recorded, values = [], []
    for step in progress(range(steps + 1), label):
        z = x @ U
        hidden = activation.value(z)
        residual = hidden @ V - y
        if step % every == 0 or step == steps:
            recorded.append(step)
            values.append(observe(residual + y, U, V))
            if not np.isfinite(values[-1]).all():
                raise ValueError(f"the outputs are not finite at step {step}; update needs a smaller rate")
            if until(values[-1]):
                break
        residual *= 2 / len(x)
        back = (residual @ V.swapaxes(-1, -2)) * activation.slope(z, hidden)
        U, V = update(step, [U, V], [x.T @ back, hidden.swapaxes(-1, -2) @ residual])
    return Run(np.array(recorded), np.array(values))


def descend_map(
    factors: list[Array],
    target: Array,
    rate: float,
    *,
    steps: int,
    observe: Callable[[Array], Any],
    every: int = 1,
    until: Callable[[Any], bool] = lambda _: False,
    label: str = "training",
) -> Run:
    """Train T = Z_1 Z_2 ... Z_m on |T - target|_F^2 by gradient descent: a stack of perceptron forms on white inputs.

    `factors` Z_1 ... Z_m, whose leading axes are runs; `observe(T)` and `until` as in `descend`. Two layers in a row
    without skip connections are four factors.
    """
    recorded, values = [], []
    for step in progress(range(steps + 1), label):
        left = [np.eye(factors[0].shape[-2])]  # Z_1 ... Z_(i-1)
        for Z in factors:
            left.append(left[-1] @ Z)
        if step % every == 0 or step == steps:
            recorded.append(step)
            values.append(observe(left[-1]))
            if until(values[-1]):
                break
        right = 2 * (left[-1] - target).swapaxes(-1, -2)  # Z_(i+1) ... Z_m times the gradient's transpose
        moved = []
        for Z, before in zip(factors[::-1], left[-2::-1], strict=True):
            moved.append(Z - rate * (right @ before).swapaxes(-1, -2))
            right = Z @ right
        factors = moved[::-1]
    return Run(np.array(recorded), np.array(values))


def crossing_steps(run: Run, level: float, *, falling: bool = False) -> Array:
    """The step, interpolated, at which each observed number first rises (or falls) to `level`; inf if it never does."""
    sign = -1.0 if falling else 1.0
    values = sign * (run.values - level)
    above = values >= 0
    first = above.argmax(0)
    reached = above.any(0)
    after = np.take_along_axis(values, first[None], 0)[0]
    before = np.take_along_axis(values, np.maximum(first - 1, 0)[None], 0)[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(first > 0, before / (before - after), 0.0)
    lower = run.steps[np.maximum(first - 1, 0)]
    return np.where(reached, lower + part * (run.steps[first] - lower), np.inf)
