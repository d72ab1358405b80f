"""The learners of paper 1's Figure 5, by full-batch gradient descent on the mean-square loss.

    network             f(x) = s sum_k W_k tanh(s_k a_k psi_k(x)),   psi_k(x) = sqrt(2) cos(2 pi k x),   s_k = k^-theta
    its quadratic form  f(x) = s sum_k W_k s_k a_k psi_k(x)
    on the raw input    f(x) = b + sum_i v_i tanh(u_i x + c_i)
    target              y(x) = sum_k b_k psi_k(x),   b_k = k^-beta,   on x = j/M, j = 0 ... M - 1

(equations 50 and 296 of Ziyin et al. 2026). On this grid the psi_k are orthonormal for k < M/2, so the modes of
the quadratic form do not see each other: from a balanced start a_k = W_k the product rho_k = a_k W_k obeys

    drho_k/dt = 4 rho_k (tau_k - c_k rho_k),   tau_k = s s_k b_k,   c_k = (s s_k)^2        (corollary 4)

The gradients are written out, for several theta side by side: on arrays as small as these, automatic differentiation
is mostly overhead. The tests compare them with `layers.FourierMLP` and its `QuadraticTwin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nqflib import closed_forms
from nqflib.arguments import Array, as_times, as_vector
from nqflib.progress import progress


@dataclass(frozen=True)
class FourierTask:
    """What is to be learned, and by networks with which gains; one network for each theta."""

    thetas: Array  # (R,) the gains of network r are s_k = k^-theta_r
    beta: float  # the target's coefficients are b_k = k^-beta
    modes: int = 64  # P, even
    samples: int = 256  # M, a multiple of 4 and more than 2 P
    prefactor: float = 1.0  # s; the paper has P^-1/2

    def __post_init__(self) -> None:
        object.__setattr__(self, "thetas", as_vector("thetas", self.thetas))
        if self.modes < 2 or self.modes % 2:
            raise ValueError(f"modes must be even and at least 2, got {self.modes}")
        if self.samples % 4 or self.samples <= 2 * self.modes:
            raise ValueError(
                f"samples must be a multiple of 4 and more than 2 * modes = {2 * self.modes}, else the modes are not "
                f"orthogonal on the grid; got {self.samples}"
            )
        if not (math.isfinite(self.prefactor) and self.prefactor > 0):
            raise ValueError(f"prefactor must be positive, got {self.prefactor}")

    @property
    def target(self) -> Array:
        """b_k, (P,)."""
        return np.arange(1, self.modes + 1.0) ** -self.beta

    @property
    def gains(self) -> Array:
        """s s_k, (R, P)."""
        return self.prefactor * np.arange(1, self.modes + 1.0) ** -self.thetas[:, None]

    @property
    def strengths(self) -> Array:
        """tau_k = s s_k b_k, (R, P)."""
        return self.gains * self.target

    @property
    def exponents(self) -> Array:
        """The exponent (2 beta - 1) / (theta + beta) of the loss for infinitely many modes, (R,) (equation 298)."""
        return (2 * self.beta - 1) / (self.thetas + self.beta)

    def points(self) -> tuple[Array, Array]:
        """The grid x, (M,), and the target on it, (M,)."""
        x = np.arange(self.samples) / self.samples
        return x, self.target @ _features(x, np.arange(1, self.modes + 1.0))

    def closed_form_loss(self, abundance: ArrayLike, times: ArrayLike) -> Array:
        """The loss sum_k (b_k - s s_k rho_k(t))^2 of the quadratic form under gradient flow, (T, R) (corollary 4).

        Args:
            abundance: rho_k(0) > 0, broadcast to (R, P). From a start that is not balanced, (a_k + W_k)^2 / 4: the
                other half of the product, (a_k - W_k)^2 / 4, only decays.
            times: (T,), learning rate times steps.
        """
        t = as_times(times)
        start = np.broadcast_to(np.asarray(abundance, dtype=np.float64), self.gains.shape)
        loss = np.empty((t.size, self.thetas.size))
        for r, gains in enumerate(self.gains):
            rho = closed_forms.two_factor(self.strengths[r], gains**2, start[r], t)
            loss[:, r] = ((self.target - gains * rho) ** 2).sum(axis=1)
        return loss


def _features(x: Array, k: Array) -> Array:
    """psi_k(x), (..., P, J) for k (..., P) and x (J,)."""
    return math.sqrt(2) * np.cos(2 * math.pi * k[..., None] * x)


class History(NamedTuple):
    """A run at the recorded steps."""

    steps: Array  # (T,) whole numbers
    loss: Array  # (T, R) mean-square loss
    coefficients: Array  # (T, R, P) <f, psi_k>, the output's share of each mode


def log_spaced_steps(last: int, count: int) -> Array:
    """0 and up to `count` whole numbers from 1 to `last`, evenly spaced on a logarithmic axis as far as integers go."""
    if not 1 <= count <= last:
        raise ValueError(f"count must lie between 1 and last = {last}, got {count}")
    return np.unique([0, *np.round(np.geomspace(1, last, count))])


class _Grid(NamedTuple):
    """The grid folded twice, with the modes in two groups, odd k and even k.

    psi_k is even about 0, and about 1/4 it is even or odd as k is. So is every odd function of it, such as tanh. The
    points 0 ... M/4 therefore tell all, and the two groups are orthogonal whatever their weights: each has an error
    of its own, and the loss is the sum of their mean squares. This saves three quarters of the tanh.
    """

    psi: Array  # (2, P/2, J), J = M/4 + 1
    weights: Array  # (J,), the share of the grid's points that fold onto each; they add up to 1
    y: Array  # (2, J), the target's two parts

    @staticmethod
    def of(task: FourierTask) -> _Grid:
        psi = _features(np.arange(task.samples // 4 + 1) / task.samples, _by_parity(np.arange(1, task.modes + 1.0)))
        weights = np.full(psi.shape[-1], 4 / task.samples)
        weights[[0, -1]] /= 2
        return _Grid(psi, weights, _combine(_by_parity(task.target), psi))

    def project(self, values: Array) -> Array:
        """<values, psi_k>, (..., 2, P/2), of functions (..., 2, J)."""
        return _project(self.psi, self.weights * values)


def _combine(modes: Array, functions: Array) -> Array:
    """sum_k modes_k functions_k(x_j), (..., J), for (..., P) and (..., P, J)."""
    return (modes[..., None, :] @ functions)[..., 0, :]


def _project(functions: Array, values: Array) -> Array:
    """sum_j functions_k(x_j) values_j, (..., P), for (..., P, J) and (..., J)."""
    return (functions @ values[..., None])[..., 0]


def _by_parity(modes: Array) -> Array:
    """(..., P) with k = 1, 2, 3 ... to (..., 2, P/2), odd k first."""
    return modes.reshape(*modes.shape[:-1], -1, 2).swapaxes(-1, -2).copy()


def _in_order(modes: Array) -> Array:
    """The inverse of `_by_parity`."""
    return modes.swapaxes(-1, -2).reshape(*modes.shape[:-2], -1)


class _Learner(NamedTuple):
    """What gradient descent needs of a learner with weights a and W, both (R, 2, P/2)."""

    # (a, W) to an error of the learner's own kind, dL/da and dL/dW
    gradients: Callable[[Array, Array], tuple[Array, Array, Array]]
    # that error to the loss (R,) and <f, psi_k> (R, 2, P/2)
    observe: Callable[[Array], tuple[Array, Array]]


def _network(grid: _Grid, gains: Array, prefactor: float) -> _Learner:
    """The error is f - y at the grid's points, (R, 2, J)."""
    phi = gains[..., None] / prefactor * grid.psi  # (R, 2, P/2, J): s_k psi_k(x_j)
    h = np.empty_like(phi)
    step = 2 * prefactor * grid.weights

    def gradients(a: Array, W: Array) -> tuple[Array, Array, Array]:
        np.tanh(np.multiply(phi, a[..., None], out=h), out=h)
        delta = prefactor * _combine(W, h) - grid.y
        pull = step * delta
        dW = _project(h, pull)
        np.multiply(np.multiply(h, h, out=h), phi, out=h)  # tanh' = 1 - h^2; in place, to stay within the cache
        return delta, W * (_project(phi, pull) - _project(h, pull)), dW

    def observe(delta: Array) -> tuple[Array, Array]:
        return (grid.weights * delta**2).sum((1, 2)), grid.project(delta + grid.y)

    return _Learner(gradients, observe)


def _quadratic_form(grid: _Grid, gains: Array, target: Array) -> _Learner:
    """The error is that of the coefficients, (R, 2, P/2); the grid enters by its Gram matrix <psi_k, psi_l>."""
    gram = (grid.weights * grid.psi) @ grid.psi.swapaxes(-1, -2)  # (2, P/2, P/2)
    twice = 2 * gains

    def gradients(a: Array, W: Array) -> tuple[Array, Array, Array]:
        error = gains * a * W - target
        slope = twice * _combine(error, gram)
        return error, slope * W, slope * a

    def observe(error: Array) -> tuple[Array, Array]:
        return (error * _combine(error, gram)).sum((1, 2)), _combine(error + target, gram)

    return _Learner(gradients, observe)


def train(
    task: FourierTask,
    a: ArrayLike,
    W: ArrayLike,
    learning_rate: float,
    records: ArrayLike,
    *,
    quadratic: bool = False,
) -> History:
    """Train the network of every theta, or its quadratic form, by gradient descent from a_k, W_k.

    Args:
        a, W: initial weights, broadcast to (R, P).
        learning_rate: below 1 / (2 max_k tau_k), beyond which the quadratic form's fastest mode has no rest.
        records: increasing steps at which to record; the last one ends the run.
        quadratic: train the quadratic form.

    Raises:
        ValueError: the learning rate is not positive or beyond that bound.
        RuntimeError: the loss overflowed.
    """
    bound = 0.5 / task.strengths.max()
    if not 0 < learning_rate < bound:
        raise ValueError(f"learning_rate must lie between 0 and 1 / (2 max tau_k) = {bound:g}, got {learning_rate}")
    grid, gains = _Grid.of(task), _by_parity(task.gains)
    starts = [np.broadcast_to(np.asarray(start, dtype=np.float64), task.gains.shape) for start in (a, W)]
    a_now, W_now = map(_by_parity, starts)
    if quadratic:
        learner, label = _quadratic_form(grid, gains, _by_parity(task.target)), "quadratic forms"
    else:
        learner, label = _network(grid, gains, task.prefactor), "Fourier networks"
    steps = as_times(records)
    loss, coefficients, row = np.empty((steps.size, len(gains))), np.empty((steps.size, *task.gains.shape)), 0
    for step in progress(range(int(steps[-1]) + 1), label):
        error, da, dW = learner.gradients(a_now, W_now)
        if step == steps[row]:
            loss[row], projections = learner.observe(error)
            coefficients[row], row = _in_order(projections), row + 1
        a_now -= learning_rate * da
        W_now -= learning_rate * dW
    return History(steps, _finite(loss), coefficients)


def train_raw(
    task: FourierTask,
    width: int,
    scale: float,
    learning_rate: float,
    records: ArrayLike,
    rng: np.random.Generator,
    *,
    biases: bool = True,
    precision: type[np.floating] = np.float32,
) -> Array:
    """Train a tanh network that sees x itself, f(x) = b + sum_i v_i tanh(u_i x + c_i), on the target of `task`.

    Args:
        width: hidden units.
        scale: standard deviation of all initial weights and biases.
        records: increasing steps at which to record; the last one ends the run.
        biases: False leaves out b and c_i.
        precision: of the weights. No formula predicts this run, so single precision will do; it takes half the time,
            and double precision moves the slopes by less than a percent.

    Returns:
        (T,) the mean-square loss at those steps.

    Raises:
        RuntimeError: the loss overflowed; the learning rate is too large.
    """
    x, y = (values.astype(precision) for values in task.points())
    inputs = np.stack([x, np.full_like(x, biases)])  # (2, M)
    u = (scale * rng.standard_normal((width, 2))).astype(precision)  # (d, 2), the second column being c
    v = (scale * rng.standard_normal(width)).astype(precision)
    b = scale * rng.standard_normal() if biases else 0.0
    h, squared = np.empty((width, x.size), precision), np.empty((width, x.size), precision)
    steps = as_times(records)
    loss, row = np.empty(steps.size), 0
    for step in progress(range(int(steps[-1]) + 1), "network on the raw input"):
        np.tanh(np.matmul(u, inputs, out=h), out=h)
        np.multiply(h, h, out=squared)
        delta = v @ h + precision(b) - y
        if step == steps[row]:
            loss[row], row = np.mean(delta**2, dtype=np.float64), row + 1
        pull = 2 * learning_rate / x.size * delta
        back = inputs * pull  # (2, M)
        du = v[:, None] * (back.sum(axis=1) - squared @ back.T)
        v -= h @ pull
        u -= du
        b -= biases * float(pull.sum())
    return _finite(loss)


def _finite(loss: Array) -> Array:
    if not np.isfinite(loss).all():
        raise RuntimeError("the loss overflowed; use a smaller learning rate")
    return loss
