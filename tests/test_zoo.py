"""Every entry of the registry is the quadratic form that it says it is."""

import doctest
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nqflib import zoo
from nqflib.forms import QuadraticForm, expand
from nqflib.moments import advance, loss_gradient
from nqflib.zoo import CITATIONS, MODELS, Instance, SolvableModel

EXACT = [model for model in MODELS.values() if model.exactness == "exact"]
LEADING_ORDER = [model for model in MODELS.values() if model.exactness == "leading order"]
EXCHANGEABLE = [model for model in MODELS.values() if model.exchangeable]


def name(model: SolvableModel) -> str:
    return model.name


def sample(model: SolvableModel, seed: int = 0) -> Instance:
    return model.sample(torch.Generator().manual_seed(seed))


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def gradient(f, W: Tensor, y: Tensor) -> Tensor:
    """d/dW of L = mean over samples, sum over outputs, of (f - y)^2."""
    W = W.clone().requires_grad_()
    (f(W) - y).square().sum(1).mean().backward()
    assert W.grad is not None
    return W.grad


def targets(model: SolvableModel, drawn: Instance) -> Tensor:
    return torch.randn(
        model.f(drawn.W, *drawn.x).shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )


def test_the_registry_holds_the_seventeen_models_of_the_paper_and_more_than_eight_relatives() -> None:
    numbers = [model.number for model in MODELS.values()]
    assert numbers == sorted(set(numbers))
    assert set(range(1, 18)) <= set(numbers)
    assert len(set(numbers) & {18, 19, 20, 22, 23, 24, 25, 26, 27, 28, 31}) >= 8
    assert {model.number for model in MODELS.values() if not model.exchangeable} == {21, 30}


def test_every_citation_is_used_and_every_model_is_cited() -> None:
    used = {citation.key for model in MODELS.values() for citation in model.citations}
    assert used == set(CITATIONS)
    assert all(model.citations for model in MODELS.values())


@pytest.mark.parametrize("model", EXACT, ids=name)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_exact_model_is_its_form_for_all_weights(model: SolvableModel, seed: int) -> None:
    drawn = sample(model, seed)
    W = 3 * drawn.W
    # Two different words may share no latent direction, but not in every draw: f must not be zero throughout.
    assert relative(model.form(drawn)(W), model.f(W, *drawn.x)) < 1e-12


@pytest.mark.parametrize("model", LEADING_ORDER, ids=name)
def test_a_network_leaves_a_remainder_of_order_three_or_more(model: SolvableModel) -> None:
    drawn = sample(model)
    form = model.form(drawn)
    scales = 0.2 * 0.5 ** torch.arange(6, dtype=torch.float64)
    remainders = torch.stack([(model.f(s * drawn.W, *drawn.x) - form(s * drawn.W)).norm() for s in scales])
    log_s, log_r = scales.log(), remainders.log()
    slopes = log_r.diff() / log_s.diff()
    assert (slopes > 2.9).all()
    assert slopes[-1].item() == pytest.approx(4, abs=0.1)  # all activations here are odd, or the order is four anyway
    assert remainders[-1] > 1e-12 * model.f(scales[-1] * drawn.W, *drawn.x).norm()  # not exact


@pytest.mark.parametrize("model", MODELS.values(), ids=name)
def test_the_closed_form_equals_the_automatic_expansion(model: SolvableModel) -> None:
    drawn = sample(model)
    automatic = expand(model.module(drawn), drawn.x)
    closed = model.form(drawn)
    assert relative(automatic.A, closed.A) < 1e-12
    assert (automatic.f0 - closed.f0).abs().max() < 1e-12
    assert automatic.g is None or automatic.g.abs().max() < 1e-12 * closed.A.abs().max()
    assert automatic.B is None or automatic.B.abs().max() < 1e-12 * closed.A.abs().max()


@pytest.mark.parametrize("model", EXCHANGEABLE, ids=name)
def test_permuting_the_units_leaves_f_unchanged(model: SolvableModel) -> None:
    drawn = sample(model)
    W = torch.randn(drawn.W.shape[0], 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    f = model.f(W, *drawn.x)
    for order in itertools.permutations(range(3)):
        assert relative(model.f(W[:, order], *drawn.x), f) < 1e-12
    assert relative(model.f(W.flip(0), *drawn.x), f) > 1e-3  # while the parameters of a unit are not exchangeable


@pytest.mark.parametrize("model", EXACT, ids=name)
def test_an_exact_model_sees_its_weights_only_through_their_second_moment(model: SolvableModel) -> None:
    drawn = sample(model)
    d = drawn.W.shape[1]
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    assert relative(model.f(drawn.W @ rotation, *drawn.x), model.f(drawn.W, *drawn.x)) < 1e-12


@pytest.mark.parametrize("model", EXACT, ids=name)
def test_one_gradient_step_of_an_exact_model_is_the_step_of_theorem_2(model: SolvableModel) -> None:
    drawn = sample(model)
    W, eta, y = drawn.W, 0.05, targets(model, drawn)
    stepped = W - eta * gradient(lambda W: model.f(W, *drawn.x), W, y)
    M, mu = step_of_theorem_2(model.form(drawn), W, y, eta)
    assert relative(M, stepped @ stepped.T) < 1e-12
    assert (mu - stepped.sum(1)).abs().max() < 1e-12 * stepped.abs().max()


@pytest.mark.parametrize("model", LEADING_ORDER, ids=name)
def test_one_gradient_step_of_a_network_approaches_the_step_of_theorem_2(model: SolvableModel) -> None:
    """The gradients differ by a factor 1 + O(s^2) for weights of size s, so dM does too."""
    drawn = sample(model)
    y, errors = targets(model, drawn), []
    for s in (0.04, 0.02, 0.01):
        W, eta = s * drawn.W, 0.05
        stepped = W - eta * gradient(lambda W: model.f(W, *drawn.x), W, y)
        M, _ = step_of_theorem_2(model.form(drawn), W, y, eta)
        errors.append(relative(M - W @ W.T, stepped @ stepped.T - W @ W.T))
    rates = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert errors[-1] < 1e-2
    assert all(rate == pytest.approx(2, abs=0.2) for rate in rates)


def step_of_theorem_2(form: QuadraticForm, W: Tensor, y: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    M, mu = W @ W.T, W.sum(1)
    derivative = 2 * (form.from_moments(M, mu) - y) / form.n
    v, H = loss_gradient(form, mu, derivative)
    return advance(M, mu, v, H, d=W.shape[1], eta=eta)


def test_models_of_degree_three_have_no_structure_matrix() -> None:
    """The traps: a linear network of depth three, and a gated unit with a trained down-projection."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W = torch.randn(9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    traps = {
        "depth three": lambda W, x: ((x @ W[:4]) * W[4:8].sum(0) * W[8]).sum(1, keepdim=True),
        "gated": lambda W, x: ((x @ W[:4]) * (x @ W[4:8]).sigmoid() * (x @ W[4:8]) * W[8]).sum(1, keepdim=True),
    }
    for f in traps.values():
        module = replace(MODELS["quadratic_network"], f=f).module(Instance(W, (x,)))
        assert not expand(module, x).A.any()
        assert f(W, x).abs().max() > 0.1


def test_the_tied_and_self_supervised_rows_of_the_table_count_rows_as_units() -> None:
    """With W of the paper, transposed here, M = W^T W: the value is the same for the paper's formula."""
    drawn = sample(MODELS["linear_ssl_augmentation"])
    paper_W, delta = drawn.W.T, drawn.x[0] - drawn.x[1]
    expected = torch.stack([(paper_W @ row).norm() ** 2 for row in delta])
    assert relative(MODELS["linear_ssl_augmentation"].f(drawn.W, *drawn.x)[:, 0], expected) < 1e-12

    drawn = sample(MODELS["tied_query_key"])
    x, X, c = drawn.x
    d_k = drawn.W.shape[1]
    for i in range(x.shape[0]):
        covariance = torch.cov(X[i].T, correction=0)
        logit = (covariance @ c[i]) @ drawn.W @ drawn.W.T @ x[i] / math.sqrt(d_k)
        assert MODELS["tied_query_key"].f(drawn.W, *drawn.x)[i, 0].item() == pytest.approx(logit.item(), rel=1e-12)


def test_the_example_in_the_documentation_holds() -> None:
    found = doctest.testmod(zoo)
    assert found.attempted > 0
    assert found.failed == 0
