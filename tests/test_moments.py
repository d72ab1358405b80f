"""The order-parameter dynamics against weights trained by automatic differentiation."""

import doctest
import math

import pytest
import torch
from torch import Tensor

from nqflib import moments
from nqflib.forms import QuadraticForm
from nqflib.moments import (
    Moments,
    advance,
    deep_outputs,
    loss_gradient,
    neural_tangent_kernel,
    outputs,
    squared_loss,
    train,
    train_deep,
)

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_form(n: int, c: int, p: int, generator: torch.Generator, mean_terms: bool = True) -> QuadraticForm:
    """A dense form of moderate size, with g and B unless `mean_terms` is False."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    A, B = draw(n, c, p, p), draw(n, c, p, p)
    g = draw(n, c, p) / 2 if mean_terms else None
    return QuadraticForm(draw(n, c), g, (A + A.mT) / (2 * p), (B + B.mT) / (20 * p**2) if mean_terms else None)


def descend_weights(form, W, y, *, eta, steps, loss=squared_loss, batches=None, momentum=0.0, weight_decay=0.0):
    """Every W along `torch.optim.SGD` on the form, the gradient by automatic differentiation: (steps + 1, p, d)."""
    W = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([W], lr=eta, momentum=momentum, weight_decay=weight_decay)
    parts = None if batches is None else [form[b] for b in batches]
    path = [W.detach().clone()]
    for step in range(steps):
        part, target = (form, y) if parts is None else (parts[step], y[batches[step]])
        optimizer.zero_grad()
        loss(part(W), target).backward()
        optimizer.step()
        path.append(W.detach().clone())
    return torch.stack(path)


def relative_errors(run, path: Tensor) -> tuple[float, float]:
    """Largest relative error of M and of mu over a trajectory recorded at every step."""
    M, mu = path @ path.mT, path.sum(2)
    error_M = (run.M - M).flatten(1).norm(dim=1) / M.flatten(1).norm(dim=1)
    error_mu = (run.mu - mu).norm(dim=1) / mu.norm(dim=1)
    return error_M.max().item(), error_mu.max().item()


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "steps"), [(0.0, 0.0, 1000), (0.9, 0.01, 200), (0.9, 0.0, 100), (0.0, 0.1, 200)]
)
def test_theorem_2_equals_training_the_weights(momentum, weight_decay, steps):
    generator = rng()
    form = random_form(16, 2, 4, generator)
    W = 0.05 * torch.randn(4, 32, generator=generator, dtype=F64)
    y = torch.randn(16, 2, generator=generator, dtype=F64)
    batches = torch.randint(16, (steps, 6), generator=generator)
    options = {"steps": steps, "batches": batches, "momentum": momentum, "weight_decay": weight_decay}
    run = train(form, Moments.of(W), y, eta=0.002, **options)
    path = descend_weights(form, W, y, eta=0.002, **options)
    assert run.outcome == "finished"
    assert run.steps.tolist() == list(range(steps + 1))
    assert max(relative_errors(run, path)) < 1e-12
    # The run went somewhere: it is not the agreement of two states that stayed where they were.
    assert (path[-1] - path[0]).norm() > 0.3 * path[0].norm()


@pytest.mark.parametrize("mean_terms", [True, False])
def test_full_batch_on_few_rows_equals_training_the_weights(mean_terms):
    generator = rng(1)
    V = torch.linalg.qr(torch.randn(7, 3, generator=generator, dtype=F64)).Q
    small = random_form(60, 2, 3, generator, mean_terms)
    g, B = (small.g @ V.T, V @ small.B @ V.T) if small.g is not None and small.B is not None else (None, None)
    form = QuadraticForm(small.f0, g, V @ small.A @ V.T, B)
    W = 0.1 * torch.randn(7, 24, generator=generator, dtype=F64)
    y = torch.randn(60, 2, generator=generator, dtype=F64)
    run = train(form, Moments.of(W), y, eta=0.01, steps=200, momentum=0.5)
    path = descend_weights(form, W, y, eta=0.01, steps=200, momentum=0.5)
    assert max(relative_errors(run, path)) < 1e-12


def test_one_step_of_equations_23_and_24_is_exact_at_any_learning_rate():
    generator = rng(2)
    form = random_form(5, 2, 3, generator)
    W = torch.randn(3, 8, generator=generator, dtype=F64, requires_grad=True)
    y = torch.randn(5, 2, generator=generator, dtype=F64)
    loss = squared_loss(form(W), y)
    (gradient,) = torch.autograd.grad(loss, W)
    W = W.detach()
    M, mu = W @ W.T, W.sum(1)
    v, H = loss_gradient(form, mu, 2 * (form(W) - y) / 5)
    torch.testing.assert_close(v[:, None] + H @ W, gradient, rtol=1e-13, atol=1e-13)
    for eta, decay in ((3.0, 0.0), (0.7, 0.4)):
        W_next = W - eta * (gradient + decay * W)
        M_next, mu_next = advance(M, mu, v, H, d=8, eta=eta, weight_decay=decay)
        torch.testing.assert_close(M_next, W_next @ W_next.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mu_next, W_next.sum(1), rtol=1e-12, atol=1e-12)


def test_weight_decay_shrinks_the_order_parameter_at_twice_its_rate():
    W = torch.randn(3, 6, generator=rng(3), dtype=F64)
    M, mu, zero = W @ W.T, W.sum(1), torch.zeros(3, 3, dtype=F64)
    M_next, mu_next = advance(M, mu, zero[0], zero, d=6, eta=1e-7, weight_decay=0.5)
    torch.testing.assert_close((M_next - M) / 1e-7, -2 * 0.5 * M, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close((mu_next - mu) / 1e-7, -0.5 * mu, rtol=1e-6, atol=1e-7)


def test_a_mode_far_below_another_keeps_its_digits_in_single_precision():
    """A mode of abundance 1e-9 beside one of 1 switches on at its own time only if M is kept as a square root."""
    angle = 0.6
    R = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=F64)
    form = QuadraticForm(torch.zeros(2, 1, dtype=F64), None, torch.einsum("ik,jk->kij", R, R)[:, None])
    W = R @ torch.diag(torch.tensor([1.0, 10**-4.5], dtype=F64))
    y = torch.ones(2, 1, dtype=F64)
    single = QuadraticForm(form.f0.float(), None, form.A.float())

    def half_time(M: Tensor) -> int:
        return int((torch.einsum("tij,i,j->t", M.to(F64), R[:, 1], R[:, 1]) < 0.5).sum())

    exact = half_time(train(form, Moments.of(W), y, eta=0.05, steps=400).M)
    rooted = half_time(train(single, Moments.of(W.float()), y.float(), eta=0.05, steps=400).M)
    M, mu, path = (W @ W.T).float(), W.sum(1).float(), []
    for _ in range(400):
        path.append(M)
        v, H = loss_gradient(single, mu, single.from_moments(M, mu) - y.float())
        M, mu = advance(M, mu, v, H, d=2, eta=0.05)
    recursive = half_time(torch.stack(path))
    assert exact < 400
    assert abs(rooted - exact) <= 1
    assert abs(recursive - exact) > 10


def test_weights_with_the_same_order_parameters_train_alike():
    generator = rng(4)
    form = random_form(8, 1, 3, generator)
    W = 0.2 * torch.randn(3, 10, generator=generator, dtype=F64)
    y = torch.randn(8, 1, generator=generator, dtype=F64)
    # An orthogonal matrix that fixes the vector of ones keeps M and mu and changes every unit.
    frame = torch.linalg.qr(torch.cat([torch.ones(10, 1, dtype=F64), torch.eye(10, dtype=F64)[:, 1:]], 1)).Q
    inner = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=F64)).Q
    turn = frame @ torch.block_diag(torch.ones(1, 1, dtype=F64), inner) @ frame.T
    one, two = (descend_weights(form, start, y, eta=0.01, steps=60)[-1] for start in (W, W @ turn))
    assert (one - two).norm() > 0.1 * one.norm()
    torch.testing.assert_close(form(one), form(two), rtol=1e-12, atol=1e-12)


def test_cross_entropy_and_a_learning_rate_schedule():
    generator = rng(5)
    form = random_form(12, 3, 3, generator)
    W = 0.3 * torch.randn(3, 6, generator=generator, dtype=F64)
    labels = torch.randint(3, (12,), generator=generator)
    loss = torch.nn.functional.cross_entropy
    run = train(form, Moments.of(W), labels, eta=lambda step: 0.2 if step < 10 else 0.05, steps=20, loss=loss)
    first = descend_weights(form, W, labels, eta=0.2, steps=10, loss=loss)
    then = descend_weights(form, first[-1], labels, eta=0.05, steps=10, loss=loss)
    assert max(relative_errors(run, torch.cat([first, then[1:]]))) < 1e-12


def test_a_run_goes_on_from_its_final_state_with_its_momentum():
    generator = rng(6)
    form = random_form(6, 1, 3, generator)
    start = Moments.of(0.3 * torch.randn(3, 9, generator=generator, dtype=F64))
    y = torch.randn(6, 1, generator=generator, dtype=F64)
    whole = train(form, start, y, eta=0.01, steps=30, momentum=0.9, record_every=7)
    assert whole.steps.tolist() == [0, 7, 14, 21, 28, 30]
    half = train(form, start, y, eta=0.01, steps=13, momentum=0.9)
    rest = train(form, half.final, y, eta=0.01, steps=17, momentum=0.9)
    torch.testing.assert_close(rest.final.factor, whole.final.factor, rtol=1e-13, atol=1e-14)


def test_outputs_along_a_trajectory_equal_the_form_on_each_state():
    generator = rng(7)
    form = random_form(6, 2, 3, generator)
    M, mu = torch.randn(4, 3, 3, generator=generator, dtype=F64), torch.randn(4, 3, generator=generator, dtype=F64)
    M = M + M.mT
    expected = torch.stack([form.from_moments(M[t], mu[t]) for t in range(4)])
    torch.testing.assert_close(outputs(form, M, mu), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("d", [2, 3, 50])
def test_moments_of_weights_and_of_order_parameters_agree(d):
    W = torch.randn(4, d, generator=rng(8), dtype=F64)
    for state in (Moments.of(W), Moments.from_order_parameters(W @ W.T, W.sum(1), d)):
        assert state.d == d
        torch.testing.assert_close(state.M, W @ W.T, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state.mu, W.sum(1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mean_terms", [True, False])
def test_proposition_8_equals_the_gram_matrix_of_the_jacobian(mean_terms):
    generator = rng(9)
    form, other = (random_form(n, 2, 3, generator, mean_terms) for n in (4, 3))
    W = torch.randn(3, 5, generator=generator, dtype=F64)
    J, J_other = (torch.func.jacrev(f)(W).flatten(2) for f in (form, other))  # (n, c, p d)
    kernel = neural_tangent_kernel(form, W @ W.T, W.sum(1), 5)
    torch.testing.assert_close(kernel, torch.einsum("xkw,ylw->xkyl", J, J), rtol=1e-12, atol=1e-12)
    kernel = neural_tangent_kernel(form, W @ W.T, W.sum(1), 5, other)
    torch.testing.assert_close(kernel, torch.einsum("xkw,ylw->xkyl", J, J_other), rtol=1e-12, atol=1e-12)


def residual_layer(strength: float, outputs: int):
    """h -> h + sum_i v_i (u_i^T h), with g and B of size `strength` that depend on h: all four coefficients at work."""

    def layer(h: Tensor) -> QuadraticForm:
        m, D = h.shape
        p = outputs + D
        A, B, g = h.new_zeros(m, outputs, p, p), h.new_zeros(m, outputs, p, p), h.new_zeros(m, outputs, p)
        for k in range(outputs):
            A[:, k, k, outputs:] = A[:, k, outputs:, k] = h / 2
            g[:, k, k] = strength * h.square().sum(1)
            B[:, k, k, k] = strength * torch.sin(h[:, 0])
        return QuadraticForm(h[:, :outputs], g, A, B)

    return layer


def test_theorem_14_equals_training_all_layers_of_a_stack():
    generator = rng(10)
    layers = [residual_layer(0.02, 3), residual_layer(0.03, 3), residual_layer(0.0, 2)]
    widths, sizes = (7, 12, 5), (6, 6, 5)
    x = torch.randn(10, 3, generator=generator, dtype=F64)
    y = torch.randn(10, 2, generator=generator, dtype=F64)
    weights = [
        (0.3 * torch.randn(p, d, generator=generator, dtype=F64)).requires_grad_()
        for p, d in zip(sizes, widths, strict=True)
    ]
    batches = torch.randint(10, (40, 5), generator=generator)
    states = [Moments.of(W.detach()) for W in weights]
    runs = train_deep(
        layers, x, states, y, eta=[0.02, 0.01, 0.03], steps=40, batches=batches, momentum=0.5, weight_decay=0.01
    )
    rates = [{"params": [W], "lr": lr} for W, lr in zip(weights, (0.02, 0.01, 0.03), strict=True)]
    optimizer = torch.optim.SGD(rates, lr=0.1, momentum=0.5, weight_decay=0.01)
    for step in range(41):
        h = x if step == 40 else x[batches[step]]
        for run, W in zip(runs, weights, strict=True):
            torch.testing.assert_close(run.M[step], (W @ W.T).detach(), rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(run.mu[step], W.sum(1).detach(), rtol=1e-12, atol=1e-13)
        for layer, W in zip(layers, weights, strict=True):
            h = layer(h)(W)
        if step < 40:
            optimizer.zero_grad()
            squared_loss(h, y[batches[step]]).backward()
            optimizer.step()
    predicted = deep_outputs(layers, x, [r.final.M for r in runs], [r.final.mu for r in runs])
    torch.testing.assert_close(predicted, h.detach(), rtol=1e-12, atol=1e-12)
    assert all((r.M[-1] - r.M[0]).norm() > 0.01 * r.M[0].norm() for r in runs)


def test_divergence_is_named_at_the_step_where_the_outputs_overflow():
    form = QuadraticForm(torch.zeros(1, 1, dtype=F64), None, torch.ones(1, 1, 1, 1, dtype=F64))
    W, y = torch.tensor([[2.0]], dtype=F64), torch.ones(1, 1, dtype=F64)
    path = descend_weights(form, W, y, eta=1.0, steps=20)
    f = path.flatten() ** 2
    first = int(f.isfinite().sum())
    run = train(form, Moments.of(W), y, eta=1.0, steps=20)
    assert run.outcome == f"diverged at step {first}"
    assert run.steps.tolist() == list(range(first))
    assert run.M.isfinite().all()
    torch.testing.assert_close(run.final.M.flatten(), f[first - 1 : first])


def test_wrong_arguments_are_refused_by_name():
    form = QuadraticForm(torch.zeros(2, 1), None, torch.eye(3).repeat(2, 1, 1, 1))
    state, y = Moments.of(torch.ones(3, 4)), torch.zeros(2, 1)
    good = {"eta": 0.1, "steps": 2}
    for change, message in (
        ({"eta": 0.0}, "eta must be positive, got 0.0"),
        ({"eta": lambda step: -1.0}, "eta must be positive, got -1.0"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"record_every": 0}, "record_every must be at least 1"),
        ({"loss": "hinge"}, 'loss must be "squared" or a function .* got "hinge"'),
        ({"batches": torch.zeros(1, 2, dtype=torch.long)}, "batches must hold one index tensor per step, 2, got 1"),
        ({"batches": torch.tensor([[0, 2], [0, 1]])}, r"batches must index samples 0..1, got 0..2 at step 0"),
        ({"batches": torch.zeros(2, 2)}, r"batches must give sample indices of shape \(m,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            train(form, state, y, **(good | change))
    with pytest.raises(ValueError, match=r"targets must have shape \(n, c\) = \(2, 1\), got \(2,\)"):
        train(form, state, y[:, 0], **good)
    with pytest.raises(ValueError, match=r"moments must have the form's p = 3 and dtype torch\.float32, got 2"):
        train(form, Moments.of(torch.ones(2, 4)), y, **good)
    with pytest.raises(ValueError, match=r"W must have shape \(p, d\)"):
        Moments.of(torch.ones(3))
    with pytest.raises(ValueError, match="must be positive semi-definite, its least eigenvalue is -8"):
        Moments.from_order_parameters(torch.ones(1, 1), torch.full((1,), 3.0), 1)
    with pytest.raises(ValueError, match=r"derivative must have shape \(n, c\)"):
        loss_gradient(form, torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="moments must have one entry per layer, 1, got 0"):
        train_deep([lambda h: form], y, [], y, **good)
    with pytest.raises(ValueError, match="eta must have one entry per layer, 1, got 2"):
        train_deep([lambda h: form], y, [state], y, **(good | {"eta": [0.1, 0.1]}))
    with pytest.raises(ValueError, match="A must be symmetric"):
        QuadraticForm(torch.zeros(2, 1), None, torch.ones(2, 1, 3, 3).triu())
    with pytest.raises(ValueError, match=r"M must have shape \(p, p\)"):
        neural_tangent_kernel(form, torch.eye(2), torch.zeros(3), 4)


def test_the_example_in_the_module_runs():
    assert doctest.testmod(moments).attempted > 0
    assert doctest.testmod(moments).failed == 0
