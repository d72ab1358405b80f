"""Theorem 3: compressed modules trained beside the wide ones, the controls that break it, and corollary 3."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nqflib.compression import (
    compress,
    error_bound,
    lipschitz_constant,
    statistics_error,
    training_subspace,
)
from nqflib.forms import QuadraticForm
from nqflib.moments import Moments, squared_loss, train

F64 = torch.float64
OUTPUTS, INPUTS, SUBSPACE = 3, 12, 5  # inputs lie on a subspace of dimension 5: k_V = 8, 9 units suffice


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(x: Tensor, slope: float, offset: float) -> QuadraticForm:
    """f_k = sum_i v_ik (offset + slope u_i^T x), units (v, u): tanh has slope 1, the sigmoid 1/4 and offset 1/2."""
    n, p = len(x), OUTPUTS + x.shape[1]
    A, g = x.new_zeros(n, OUTPUTS, p, p), x.new_zeros(n, OUTPUTS, p)
    for k in range(OUTPUTS):
        A[:, k, k, OUTPUTS:] = A[:, k, OUTPUTS:, k] = slope * x / 2
        g[:, k, k] = offset
    return QuadraticForm(x.new_zeros(n, OUTPUTS), g if offset else None, A)


def network(W: Tensor, x: Tensor, slope: float, offset: float) -> Tensor:
    """The same function as a layer, with no order parameter in sight."""
    return slope * (x @ W[OUTPUTS:]) @ W[:OUTPUTS].T + offset * W[:OUTPUTS].sum(1)


def problem(d: int, seed: int = 0, n: int = 60):
    generator = rng(seed)
    plane = torch.randn(SUBSPACE, INPUTS, generator=generator, dtype=F64)
    x = torch.randn(n, SUBSPACE, generator=generator, dtype=F64) @ plane / 3
    y = x @ torch.randn(INPUTS, OUTPUTS, generator=generator, dtype=F64)
    W = 0.05 * torch.randn(OUTPUTS + INPUTS, d, generator=generator, dtype=F64)
    return x, y, W


def train_network(W, x, y, *, slope, offset, eta, batches, momentum=0.0, weight_decay=0.0):
    """Outputs on all of x before every step of `torch.optim.SGD` and at the end: (steps + 1, n, c)."""
    W = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([W], lr=eta, momentum=momentum, weight_decay=weight_decay)
    seen = []
    for batch in batches:
        f = network(W, x, slope, offset)
        seen.append(f.detach())
        optimizer.zero_grad()
        squared_loss(f[batch], y[batch]).backward()
        optimizer.step()
    return torch.stack([*seen, network(W, x, slope, offset).detach()])


@pytest.mark.parametrize(
    ("slope", "offset", "d", "eta", "momentum", "weight_decay"),
    [
        (1.0, 0.0, 4096, 0.02, 0.0, 0.0),
        (0.25, 0.5, 4096, 2 / 4096, 0.0, 0.0),
        (1.0, 0.0, 256, 0.005, 0.9, 0.0),
        (0.25, 0.5, 256, 2 / 256, 0.0, 0.05),
    ],
)
def test_theorem_3_nine_units_predict_like_d_at_every_step(slope, offset, d, eta, momentum, weight_decay):
    x, y, W = problem(d)
    small = compress(perceptron(x, slope, offset), W, eta=eta, weight_decay=weight_decay)
    assert small.W.shape == (OUTPUTS + INPUTS, 9)
    assert small.discarded.numel() == 0
    batches = torch.randint(len(x), (250, 16), generator=rng(1))
    wide = train_network(
        W, x, y, slope=slope, offset=offset, eta=eta, batches=batches, momentum=momentum, weight_decay=weight_decay
    )
    # A of the compressed form is A d'/d, so its layer has slope d'/d; g is as it was.
    few = train_network(
        small.W,
        x,
        y,
        slope=slope * small.scale,
        offset=offset,
        eta=small.eta,
        batches=batches,
        momentum=momentum,
        weight_decay=small.weight_decay,
    )
    assert (wide - few).abs().max() < 1e-11
    assert (wide[-1] - wide[0]).abs().max() > 0.5


def test_without_the_mean_the_rate_or_the_last_unit_it_fails():
    x, y, W = problem(256)
    form, batches = perceptron(x, 0.25, 0.5), torch.randint(60, (100, 16), generator=rng(1))
    small = compress(form, W, eta=2 / 256)
    settings = {"slope": 0.25 * small.scale, "offset": 0.5, "batches": batches}
    wide = train_network(W, x, y, slope=0.25, offset=0.5, eta=2 / 256, batches=batches)

    def deviation(start: Tensor, eta: float) -> float:
        return (train_network(start, x, y, eta=eta, **settings) - wide).abs().max().item()

    assert deviation(small.W, small.eta) < 1e-12
    assert deviation(small.W - small.W.mean(1, keepdim=True), small.eta) > 0.1
    assert deviation(small.W, 2 / 256) > 0.1
    fewer = compress(form, W, eta=2 / 256, width=8, truncate=True)
    settings["slope"] = 0.25 * fewer.scale
    assert deviation(fewer.W, fewer.eta) > 1e-6


@pytest.mark.parametrize("width", [9, 14])
def test_compressed_order_parameters_are_the_projected_ones(width):
    x, _, W = problem(64)
    form = perceptron(x, 0.25, 0.5)
    small = compress(form, W, eta=0.1, width=width)
    V = small.basis
    torch.testing.assert_close(V.T @ V, torch.eye(8, dtype=F64), rtol=1e-12, atol=1e-12)
    projected = 64 / width * V @ V.T @ W @ W.T @ V @ V.T
    torch.testing.assert_close(small.W @ small.W.T, projected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(small.W.sum(1), V @ V.T @ W.sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(small.form.A, form.A * width / 64)
    assert small.eta == pytest.approx(0.1 * 64 / width)
    torch.testing.assert_close(small.form(small.W), form(W), rtol=1e-12, atol=1e-12)
    from_moments = compress(form, Moments.of(W), eta=0.1, width=width)
    torch.testing.assert_close(from_moments.form(from_moments.W), form(W), rtol=1e-12, atol=1e-12)


def test_it_holds_on_inputs_of_the_training_subspace_and_not_off_it():
    x, y, W = problem(128)
    batches = torch.randint(60, (60, 16), generator=rng(2))
    small = compress(perceptron(x, 1.0, 0.0), W, eta=0.02)
    inside = torch.randn(5, 60, generator=rng(3), dtype=F64) @ x / 60
    outside = torch.randn(5, INPUTS, generator=rng(4), dtype=F64)
    seen = torch.cat([x, inside, outside])
    targets = torch.cat([y, torch.zeros(10, OUTPUTS, dtype=F64)])
    wide = train_network(W, seen, targets, slope=1.0, offset=0.0, eta=0.02, batches=batches)
    few = train_network(small.W, seen, targets, slope=small.scale, offset=0.0, eta=small.eta, batches=batches)
    assert (wide - few)[:, :65].abs().max() < 1e-12
    assert (wide - few)[:, 65:].abs().max() > 0.1


def test_the_subspace_is_the_span_of_g_and_the_columns_of_A_and_B():
    x, _, _ = problem(8)
    assert training_subspace(perceptron(x, 1.0, 0.0)).shape == (15, 8)
    e = torch.eye(6, dtype=F64)
    zero = torch.zeros(1, 1, dtype=F64)
    A = torch.outer(e[0] + e[1], e[0] + e[1])[None, None]
    g = (e[2] + e[3])[None, None]
    # A term below the rounding of the others still has its say in the gradient: mu may be large.
    B = 1e-18 * torch.outer(e[4], e[4])[None, None]
    V = training_subspace(QuadraticForm(zero, g, A, B))
    expected = torch.stack([(e[0] + e[1]) / 2**0.5, (e[2] + e[3]) / 2**0.5, e[4]], 1)
    torch.testing.assert_close(V @ V.T, expected @ expected.T, rtol=1e-12, atol=1e-12)


def truncated_runs(width: int, steps: int = 120):
    """A dense form of p = 5 with modes of very different size, and its compression to `width` units, both trained."""
    generator = rng(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)  # noqa: E731
    A, B = draw(20, 2, 5, 5), draw(20, 2, 5, 5)
    form = QuadraticForm(draw(20, 2), draw(20, 2, 5), (A + A.mT) / 10, (B + B.mT) / 500)
    W = draw(5, 64) * torch.tensor([1.0, 0.5, 0.25, 0.1, 0.05], dtype=F64)[:, None] / 16
    y, batches = draw(20, 2), torch.randint(20, (steps, 8), generator=generator)
    small = compress(form, W, eta=0.002, width=width, truncate=True)
    wide_run = train(form, Moments.of(W), y, eta=0.002, steps=steps, batches=batches)
    small_run = train(small.form, Moments.of(small.W), y, eta=small.eta, steps=steps, batches=batches)
    return W, small, wide_run, small_run


def test_corollary_3_truncated_compressions_stay_within_the_bound():
    largest = []
    for width in (1, 2, 3, 4, 5):
        W, small, wide, few = truncated_runs(width)
        error = statistics_error(small, wide.M, wide.mu, few.M, few.mu)
        # The error at the start by definition, and by the eigenvalues of the covariance that had no room.
        direct = (width / 64 * small.W @ small.W.T - W @ W.T).norm() + (small.W.sum(1) - W.sum(1)).norm()
        covariance = 64 / width * (W @ W.T - torch.outer(W.sum(1), W.sum(1)) / 64)
        eigenvalues = torch.linalg.eigvalsh(covariance).flip(0)
        torch.testing.assert_close(small.discarded, eigenvalues[width - 1 :], rtol=1e-9, atol=1e-12)
        assert small.initial_error == pytest.approx(direct.item(), rel=1e-9)
        assert error[0].item() == pytest.approx(direct.item(), rel=1e-9)
        L = lipschitz_constant(small, wide, few, eta=0.002)
        bound = error_bound(small, eta=0.002, lipschitz=L, steps=wide.steps)
        assert (error <= bound * (1 + 1e-9)).all()
        # And L is not so large that anything would pass: some step grows at that rate to within a factor of 5.
        assert (error[1:] / error[:-1] - 1).abs().max() > 0.2 * 0.002 * L
        largest.append(error.max().item())
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] < 0.01 * largest[0]


def test_the_printed_prefactor_of_corollary_3_is_d_over_width_too_large():
    _, small, wide, few = truncated_runs(3, steps=1)
    error = statistics_error(small, wide.M, wide.mu, few.M, few.mu)[0].item()
    printed = small.discarded.square().sum().sqrt().item()
    assert printed == pytest.approx(64 / 3 * error, rel=1e-9)


def test_theorem_15_a_stack_compressed_layer_by_layer():
    """Two linear layers with a skip; V of the second is all of R^p, as its inputs move during training."""
    generator = rng(6)
    x, y = torch.randn(12, 3, generator=generator, dtype=F64), torch.randn(12, 3, generator=generator, dtype=F64)
    weights = [0.2 * torch.randn(6, 40, generator=generator, dtype=F64) for _ in range(2)]
    layer = perceptron(x, 1.0, 0.0)
    small = [compress(layer, W, eta=0.02, basis=torch.eye(6, dtype=F64)) for W in weights]
    assert [s.W.shape[1] for s in small] == [7, 7]

    def run(starts: list[Tensor], slopes: list[float], rates: list[float]) -> Tensor:
        leaves = [W.clone().requires_grad_() for W in starts]
        optimizer = torch.optim.SGD([{"params": [W], "lr": r} for W, r in zip(leaves, rates, strict=True)], lr=1.0)
        seen = []
        for _ in range(80):
            h = x + network(leaves[0], x, slopes[0], 0.0)
            h = h + network(leaves[1], h, slopes[1], 0.0)
            seen.append(h.detach())
            optimizer.zero_grad()
            squared_loss(h, y).backward()
            optimizer.step()
        return torch.stack(seen)

    wide = run(weights, [1.0, 1.0], [0.02, 0.02])
    few = run([s.W for s in small], [s.scale for s in small], [s.eta for s in small])
    assert (wide - few).abs().max() < 1e-12
    assert (wide[-1] - wide[0]).abs().max() > 0.3


def test_wrong_arguments_are_refused_by_name():
    x, _, W = problem(32)
    form = perceptron(x, 1.0, 0.0)
    for change, message in (
        ({"width": 8}, r"width must be at least k_V \+ 1 = 9, got 8; .* truncate=True"),
        ({"width": 0, "truncate": True}, "width must be at least"),
        ({"width": 32}, "width must be below the number of units d = 32, got 32"),
        ({"eta": 0.0}, "eta must be positive, got 0.0"),
        ({"basis": torch.ones(15, 2, dtype=F64)}, "basis must have orthonormal columns"),
        ({"basis": torch.ones(3, 2, dtype=F64)}, r"basis must have shape \(p, k\) with p = 15"),
    ):
        with pytest.raises(ValueError, match=message):
            compress(form, W, **({"eta": 0.1} | change))
    with pytest.raises(ValueError, match=r"W must have shape \(p, d\) with the form's p = 15, got p = 14"):
        compress(form, W[1:], eta=0.1)
    with pytest.raises(ValueError, match="width must be below the number of units d = 9"):
        compress(form, W[:, :9], eta=0.1)
    with pytest.raises(ValueError, match="A must be symmetric"):
        compress(replace(form, A=form.A.triu()), W, eta=0.1)
    with pytest.raises(ValueError, match="form must depend on the weights"):
        training_subspace(replace(form, A=0 * form.A))
    with pytest.raises(ValueError, match="tolerance must be between 0 and 1, got 2"):
        training_subspace(form, tolerance=2)
    _, small, wide, few = truncated_runs(6, steps=2)
    with pytest.raises(ValueError, match="compression must be truncated"):
        lipschitz_constant(small, wide, few, eta=0.002)
    with pytest.raises(ValueError, match="eta must be positive and lipschitz at least 0"):
        error_bound(small, eta=0.0, lipschitz=1.0, steps=wide.steps)
