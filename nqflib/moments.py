"""The exact training dynamics of a neural quadratic form, in its order parameters instead of its weights.

Under gradient descent a form with d units of p parameters moves through M = W W^T (p, p) and mu = W 1 (p,)
alone, whatever d is. With l'_x = dL/df_x summed over a batch and its outputs,

    v = sum_x l'_x (g_x + 2 B_x mu),   H = 2 sum_x l'_x A_x,   grad_W L = v 1^T + H W,
    mu -> mu - eta (d v + H mu),
    M  -> M - eta (v mu^T + mu v^T + H M + M H) + eta^2 (d v v^T + v mu^T H + H mu v^T + H M H)

(theorem 2 of Ziyin et al. 2026; `loss_gradient` and `advance` are these lines). Corollary 2 extends this to every
update that is linear in past gradients and past weights: momentum and weight decay, but not Adam.

`train` carries a square root of the order parameters rather than M itself. Let Q be an isometry of R^d onto R^r
that takes 1/sqrt(d) to the first axis e and loses nothing of W. Then

    Y = W Q^T = [mu/sqrt(d), L],   L L^T = M - mu mu^T/d,   M = Y Y^T,   mu = sqrt(d) Y e,   r <= p + 1,

and every update of corollary 2 passes through Q: the gradient becomes sqrt(d) v e^T + H Y, and a momentum buffer V
becomes V Q^T. That is the paper's W_t = P_t W_0 + Q_t 1^T in the coordinates where it is smallest, and it has three
advantages over recursions for M and for the cross-moments W V^T, V V^T, V 1 that momentum would add: M is positive
semi-definite at every step; a mode of abundance z beside one of abundance 1 keeps a relative precision of
eps/sqrt(z), as in the weights, not eps/z; and momentum and decay cost one line each.

    >>> form = QuadraticForm(f0=torch.zeros(1, 1), g=None, A=torch.ones(1, 1, 1, 1))     # f = W W^T
    >>> run = train(form, Moments.of(torch.tensor([[0.1, 0.2]])), torch.ones(1, 1), eta=0.01, steps=500)
    >>> round(run.final.M.item(), 4)
    1.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nqflib.contraction import FormContraction
from nqflib.forms import QuadraticForm

Loss = str | Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[Tensor] | Tensor | Callable[[int], Tensor] | None
Rate = float | Callable[[int], float]
Gradient = tuple[Tensor | None, Tensor]  # v (p,), None for zero, and H (p, p) of grad_W L = v 1^T + H W
Layer = Callable[[Tensor], QuadraticForm]  # h (m, D) of the layer below -> its form on those m samples


@dataclass(frozen=True)
class Moments:
    """The order parameters (M, mu) of d units, kept as a square root Y = [mu/sqrt(d), L] with M = Y Y^T.

    `factor` is Y (p, r), `d` the number of units, `buffer` the momentum buffer in the same coordinates, or None
    for zero. Make one with `Moments.of(W)` or `Moments.from_order_parameters(M, mu, d)`.
    """

    factor: Tensor  # (p, r), first column mu / sqrt(d)
    d: int
    buffer: Tensor | None = None  # (p, r)

    @classmethod
    def of(cls, W: Tensor) -> Moments:
        """The order parameters of weights `W` (p, d), one column per unit. Raises `ValueError` on another shape."""
        if W.ndim != 2 or 0 in W.shape:
            raise ValueError(f"W must have shape (p, d), one column per unit, got {tuple(W.shape)}")
        mean = W.mean(1, keepdim=True)
        # QR of the centred weights has a backward error relative to each row of W, which an
        # eigendecomposition of M would not have: small modes keep their digits.
        L = torch.linalg.qr((W - mean).T, mode="r").R.T
        return cls(torch.cat([mean * math.sqrt(W.shape[1]), L], 1), W.shape[1])

    @classmethod
    def from_order_parameters(cls, M: Tensor, mu: Tensor, d: int) -> Moments:
        """The state with given `M` (p, p), `mu` (p,) and number of units `d`.

        Raises `ValueError` if a shape is wrong or M - mu mu^T/d is not positive semi-definite: no units have these.
        """
        p = mu.numel()
        if mu.shape != (p,) or M.shape != (p, p) or d < 1:
            given = f"mu {tuple(mu.shape)}, M {tuple(M.shape)} and d = {d}"
            raise ValueError(f"mu must have shape (p,), M shape (p, p) and d be at least 1, got {given}")
        covariance = M - torch.outer(mu, mu) / d
        values, vectors = torch.linalg.eigh(0.5 * (covariance + covariance.T))
        if (least := values[0].item()) < -10 * p * torch.finfo(M.dtype).eps * M.abs().max():
            raise ValueError(f"M - mu mu^T / d must be positive semi-definite, its least eigenvalue is {least:.3g}")
        L = vectors * values.clamp_min(0).sqrt()
        return cls(torch.cat([mu[:, None] / math.sqrt(d), L], 1), d)

    @property
    def M(self) -> Tensor:
        """M = W W^T = Y Y^T, shape (p, p)."""
        return self.factor @ self.factor.T

    @property
    def mu(self) -> Tensor:
        """mu = W 1 = sqrt(d) Y e, shape (p,)."""
        return math.sqrt(self.d) * self.factor[:, 0]

    @property
    def p(self) -> int:
        """Number of parameters per unit."""
        return self.factor.shape[0]


@dataclass(frozen=True)
class Trajectory:
    """The order parameters at the recorded steps of one run.

    `steps` (T,) counts updates done, 0 first and the last state always last; `factors` (T, p, r) are the square
    roots Y; `final` is the state to go on from; `outcome` is "finished" or "diverged at step t", where t is the first
    step whose outputs are not finite (nothing from it on is recorded, `final` is the last finite state).
    """

    steps: Tensor
    factors: Tensor
    final: Moments
    outcome: str

    @property
    def M(self) -> Tensor:
        """M = W W^T at the recorded steps, shape (T, p, p)."""
        return self.factors @ self.factors.mT

    @property
    def mu(self) -> Tensor:
        """mu = W 1 at the recorded steps, shape (T, p)."""
        return math.sqrt(self.final.d) * self.factors[:, :, 0]


def loss_gradient(form: QuadraticForm, mu: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
    """v (p,) and H (p, p) of grad_W L = v 1^T + H W (theorem 2), from `mu` (p,) and `derivative` = dL/df (n, c).

    v = sum l' (g + 2 B mu), H = 2 sum l' A, summed over the samples of `form` (the batch) and its outputs.
    """
    if derivative.shape != form.f0.shape:
        raise ValueError(f"derivative must have shape (n, c) = {tuple(form.f0.shape)}, got {tuple(derivative.shape)}")
    H = 2 * torch.tensordot(derivative, form.A, dims=2)
    v = torch.zeros_like(mu)
    if form.g is not None:
        v = v + torch.tensordot(derivative, form.g, dims=2)
    if form.B is not None:
        v = v + 2 * torch.tensordot(derivative, form.B, dims=2) @ mu
    return v, H


def advance(
    M: Tensor, mu: Tensor, v: Tensor, H: Tensor, *, d: int, eta: float, weight_decay: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(M, mu) after one step W -> W - eta (v 1^T + H W + gamma W), equations 23 and 24, exact in eta.

    Weight decay gamma adds gamma I to H, so the first-order change of M is -2 eta gamma M (M is quadratic in W).
    `train` does the same in square-root form; this is the theorem to the letter.
    """
    if weight_decay:
        H = H + weight_decay * torch.eye(len(mu), dtype=H.dtype, device=H.device)
    Hmu = H @ mu
    first = torch.outer(v, mu) + H @ M
    second = torch.outer(v, Hmu)
    M_next = M - eta * (first + first.T) + eta**2 * (d * torch.outer(v, v) + second + second.T + H @ M @ H)
    return M_next, mu - eta * (d * v + Hmu)


def train(
    form: QuadraticForm,
    moments: Moments,
    targets: Tensor,
    *,
    eta: Rate,
    steps: int,
    loss: Loss = "squared",
    batches: Batches = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    record_every: int = 1,
) -> Trajectory:
    """Train d units by their order parameters: exact SGD, momentum and weight decay (theorem 2, corollary 2).

        V <- momentum V + grad_W L + weight_decay W,   W <- W - eta V,   V = 0 at first,

    the convention of `torch.optim.SGD`. The cost of a step does not depend on d.

    Arguments: `form` on n samples; `moments` the initial state; `targets` (n, c), or whatever `loss` takes, first
    axis samples; `eta` learning rate or a function of the step; `loss` either "squared", the mean over the batch's
    samples of the sum over outputs of (f - y)^2 (no factor 1/2), or a function (f (m, c), targets (m, ...)) -> scalar
    such as `torch.nn.functional.cross_entropy`; `batches` sample indices (m,) for every step, as a sequence or a
    pure function of the step, None for all samples; `record_every` thins the record.
    Raises `ValueError` naming the argument that is wrong.
    """
    value = _loss(loss, targets, form.n, form.c)
    batch_at = _batches_at(batches, steps, form.n)
    if moments.p != form.p or moments.factor.dtype != form.f0.dtype:
        given = f"{moments.p} and {moments.factor.dtype}"
        raise ValueError(f"moments must have the form's p = {form.p} and dtype {form.f0.dtype}, got {given}")
    batch_size = form.n if batch_at is None or steps < 1 else len(batch_at(0))
    contraction, derivative = FormContraction.of(form, batch_size, steps), _derivative(value)
    if batch_at is None and value is squared_loss:
        contraction, derivative = contraction.residual(targets, steps), lambda r, y, m: r

    def gradient(step: int, states: list[Moments]) -> list[Gradient] | None:
        part, y, m = contraction, targets, form.n
        if batch_at is not None:
            batch = batch_at(step)
            part, y, m = contraction.on(batch), targets[batch], len(batch)
        mu = states[0].mu if contraction.reads_mu else None
        f = part.outputs(states[0].M, mu)
        # One reduction to one number: a sum is finite only if every output is.
        return [part.gradient(mu, derivative(f, y, m))] if math.isfinite(f.sum().item()) else None

    options = {"steps": steps, "momentum": momentum, "weight_decay": weight_decay, "record_every": record_every}
    return _descend(gradient, [moments], [eta], **options)[0]


def outputs(form: QuadraticForm, M: Tensor, mu: Tensor) -> Tensor:
    """f (..., n, c) of a form at order parameters `M` (..., p, p) and `mu` (..., p), such as a trajectory's."""
    if M.shape != (*mu.shape, form.p) or mu.shape[-1:] != (form.p,):
        given = f"M {tuple(M.shape)} and mu {tuple(mu.shape)}"
        raise ValueError(f"M must have shape (..., p, p) and mu (..., p) with p = {form.p}, got {given}")
    many = torch.vmap(FormContraction.of(form).outputs)(M.reshape(-1, form.p, form.p), mu.reshape(-1, form.p))
    return many.view(*mu.shape[:-1], form.n, form.c)


def neural_tangent_kernel(
    form: QuadraticForm, M: Tensor, mu: Tensor, d: int, other: QuadraticForm | None = None
) -> Tensor:
    """The empirical neural tangent kernel <grad_W f_x, grad_W f_x'> from the order parameters alone.

        Theta = d u^T u' + 2 u^T A' mu + 2 mu^T A u' + 4 Tr[A A' M],   u = g + 2 B mu.

    Arguments: `form` on n samples, `other` on n' samples (None: the same), `M` (p, p), `mu` (p,), `d` units.
    Returns (n, c, n', c). Source: Ziyin et al. 2026, proposition 8.
    """
    other = form if other is None else other
    if other.p != form.p or M.shape != (form.p, form.p) or mu.shape != (form.p,):
        given = f"M {tuple(M.shape)}, mu {tuple(mu.shape)} and other with p = {other.p}"
        raise ValueError(f"M must have shape (p, p), mu (p,) and other the same p, {form.p}; got {given}")

    def rows(side: QuadraticForm) -> tuple[Tensor, Tensor, Tensor]:
        A = side.A.flatten(0, 1)  # (n c, p, p)
        u = torch.zeros_like(A[..., 0]) if side.g is None else side.g.flatten(0, 1)
        if side.B is not None:
            u = u + 2 * side.B.flatten(0, 1) @ mu
        return u, A @ mu, A

    (u, Amu, A), (u_other, Amu_other, A_other) = rows(form), rows(other)
    trace = (A @ M).flatten(1) @ A_other.flatten(1).T  # Tr[A A' M] = <A M, A'> as A' is symmetric
    kernel = d * u @ u_other.T + 2 * u @ Amu_other.T + 2 * Amu @ u_other.T + 4 * trace
    return kernel.view(form.n, form.c, other.n, other.c)


def deep_outputs(layers: Sequence[Layer], inputs: Tensor, M: Sequence[Tensor], mu: Sequence[Tensor]) -> Tensor:
    """The outputs h^(L) (n, D_L) of a stack of forms on `inputs` (n, D_0), from the order parameters of its layers.

    h^(l) = f0 + g^T mu + mu^T B mu + Tr[M A], M, mu of layer l and f0, g, A, B = layers[l](h^(l-1)) (definition 2).
    """
    h = inputs
    for layer, M_layer, mu_layer in zip(layers, M, mu, strict=True):
        h = layer(h).from_moments(M_layer, mu_layer)
    return h


def train_deep(
    layers: Sequence[Layer],
    inputs: Tensor,
    moments: Sequence[Moments],
    targets: Tensor,
    *,
    eta: Rate | Sequence[Rate],
    steps: int,
    loss: Loss = "squared",
    batches: Batches = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    record_every: int = 1,
) -> list[Trajectory]:
    """Train every layer of a stack of forms by its order parameters, one trajectory a layer (theorem 14).

    Each layer obeys theorem 2 with v = sum dL/dh_k (g_k + 2 B_k mu) = dL/dmu and H = sum 2 dL/dh_k A_k = 2 dL/dM:
    automatic differentiation through the order parameters gives both, and no width enters.

    Arguments: `layers[l]` maps h^(l-1) (m, D) to the form of layer l on those m samples, differentiably;
    `inputs` (n, D_0); `moments` one state a layer; `eta` one rate, or one a layer (theorem 15 needs that). The
    rest, and what is raised, as in `train`.
    """
    etas: list[Rate] = [*eta] if isinstance(eta, Sequence) else [eta] * len(layers)
    for name, given in (("moments", len(moments)), ("eta", len(etas))):
        if given != len(layers):
            raise ValueError(f"{name} must have one entry per layer, {len(layers)}, got {given}")
    with torch.no_grad():
        probe = deep_outputs(layers, inputs[:1], [m.M for m in moments], [m.mu for m in moments])
    value = _loss(loss, targets, len(inputs), probe.shape[1])
    batch_at = _batches_at(batches, steps, len(inputs))

    def gradient(step: int, states: list[Moments]) -> list[Gradient] | None:
        batch = slice(None) if batch_at is None else batch_at(step)
        with torch.enable_grad():
            M = [state.M.requires_grad_() for state in states]
            mu = [state.mu.requires_grad_() for state in states]
            f = deep_outputs(layers, inputs[batch], M, mu)
            if not math.isfinite(f.sum().item()):
                return None
            slopes = torch.autograd.grad(value(f, targets[batch]), [*M, *mu], materialize_grads=True)
        return [(v, H + H.T) for H, v in zip(slopes[: len(M)], slopes[len(M) :], strict=True)]

    options = {"steps": steps, "momentum": momentum, "weight_decay": weight_decay, "record_every": record_every}
    return _descend(gradient, list(moments), etas, **options)


def squared_loss(f: Tensor, y: Tensor) -> Tensor:
    """L = (1/m) sum over samples and outputs of (f - y)^2, for f and y of shape (m, c)."""
    return (f - y).square().sum() / len(f)


def _descend(
    gradient: Callable[[int, list[Moments]], list[Gradient] | None],
    states: list[Moments],
    rates: list[Rate],
    *,
    steps: int,
    momentum: float,
    weight_decay: float,
    record_every: int,
) -> list[Trajectory]:
    """Train every layer by `gradient(step, states)`, which gives None where the outputs are not finite."""
    for name, value, valid, allowed in (
        ("steps", steps, steps >= 0, "at least 0"),
        ("record_every", record_every, record_every >= 1, "at least 1"),
        ("momentum", momentum, 0 <= momentum < 1, "in [0, 1)"),
        ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
    ):
        if not valid:
            raise ValueError(f"{name} must be {allowed}, got {value}")
    rates_at = [eta if callable(eta) else lambda _, eta=eta: eta for eta in rates]
    recorded: list[tuple[int, list[Moments]]] = []
    previous, done, outcome = states, steps, "finished"
    with torch.no_grad():
        for step in range(steps):
            slopes = gradient(step, states)
            if slopes is None:
                states, done, outcome = previous, max(step - 1, 0), f"diverged at step {step}"
                break
            if step % record_every == 0:
                recorded.append((step, states))
            previous = states
            states = [
                _step(state, v, H, eta(step), momentum, weight_decay)
                for state, (v, H), eta in zip(states, slopes, rates_at, strict=True)
            ]
        if outcome == "finished" and not all(bool(s.factor.isfinite().all()) for s in states):
            states, done, outcome = previous, steps - 1, f"diverged at step {steps}"
    if not recorded or recorded[-1][0] != done:
        recorded.append((done, states))
    times = torch.tensor([step for step, _ in recorded])
    return [
        Trajectory(times, torch.stack([layers[k].factor for _, layers in recorded]), state, outcome)
        for k, state in enumerate(states)
    ]


def _step(state: Moments, v: Tensor | None, H: Tensor, eta: float, momentum: float, weight_decay: float) -> Moments:
    """One update of the square root Y, the gradient being sqrt(d) v e^T + H Y."""
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta}")
    Y, root = state.factor, math.sqrt(state.d)
    if not momentum:  # no buffer to keep: one product does it
        Y = torch.addmm(Y, H, Y, beta=1 - eta * weight_decay, alpha=-eta)
        if v is not None:
            Y[:, 0].add_(v, alpha=-eta * root)
        return Moments(Y, state.d)
    V = torch.addmm(Y, H, Y, beta=weight_decay)
    if v is not None:
        V[:, 0].add_(v, alpha=root)
    if state.buffer is not None:
        V.add_(state.buffer, alpha=momentum)
    return Moments(torch.add(Y, V, alpha=-eta), state.d, V)


def _batches_at(batches: Batches, steps: int, n: int) -> Callable[[int], Tensor] | None:
    """The batch of each step as checked sample indices; None for all samples."""
    if batches is None:
        return None
    if not callable(batches) and len(batches) < steps:
        raise ValueError(f"batches must hold one index tensor per step, {steps}, got {len(batches)}")

    def batch_at(step: int) -> Tensor:
        batch = batches(step) if callable(batches) else batches[step]
        if batch.ndim != 1 or len(batch) == 0 or batch.is_floating_point() or batch.dtype == torch.bool:
            given = f"{tuple(batch.shape)} {batch.dtype} at step {step}"
            raise ValueError(f"batches must give sample indices of shape (m,), got {given}")
        least, most = torch.aminmax(batch)
        if least < 0 or most >= n:
            raise ValueError(f"batches must index samples 0..{n - 1}, got {int(least)}..{int(most)} at step {step}")
        return batch

    return batch_at


def _loss(loss: Loss, targets: Tensor, n: int, c: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as a function of outputs and targets, after checking the targets against it."""
    if loss == "squared":
        if targets.shape != (n, c):
            raise ValueError(f"targets must have shape (n, c) = ({n}, {c}), got {tuple(targets.shape)}")
        return squared_loss
    if isinstance(loss, str):
        raise ValueError(f'loss must be "squared" or a function (f, targets) -> scalar, got "{loss}"')
    if len(targets) != n:
        raise ValueError(f"targets must have one row per sample, n = {n}, got shape {tuple(targets.shape)}")
    return loss


def _derivative(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """dL/df (m, c) as a function of outputs, targets and the number of samples m."""
    if loss is squared_loss:
        return lambda f, y, m: (f - y).mul_(2 / m)

    def derivative(f: Tensor, y: Tensor, m: int) -> Tensor:
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            return torch.autograd.grad(loss(leaf, y), leaf)[0]

    return derivative
