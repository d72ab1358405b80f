"""The order of a remainder is the order that the layer was built with, and theorem 13's terms are its third order."""

import doctest

import pytest
import torch
from torch import Tensor

from nqflib import remainders
from nqflib.edge_cases import EDGE_CASES, softmax_mixture, softmax_mixture_terms
from nqflib.forms import QuadraticForm, expand
from nqflib.remainders import best_form, cubic_terms, remainder

SCALES = torch.logspace(-3, -1, 9, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def zero_form(n: int, p: int) -> QuadraticForm:
    return QuadraticForm(torch.zeros(n, 1).double(), None, torch.zeros(n, 1, p, p).double())


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_a_homogeneous_layer_has_its_degree_as_order(order: int) -> None:
    def f(W: Tensor) -> Tensor:
        return W.sum().abs().pow(order).reshape(1, 1)

    found = remainder(f, zero_form(1, 3), normal(2, 3, 4), SCALES)
    assert found.order == pytest.approx(order, abs=1e-9)


def test_each_output_has_an_order_and_the_relative_error_is_remainder_over_form() -> None:
    def f(W: Tensor) -> Tensor:
        s = W.square().sum()
        return torch.stack([s + s**2, s + s.pow(1.5)]).reshape(1, 2)

    A = torch.eye(2, dtype=torch.float64).expand(1, 2, 2, 2)
    found = remainder(f, QuadraticForm(torch.zeros(1, 2).double(), None, A), normal(1, 2, 3), SCALES)
    assert found.orders.tolist() == pytest.approx([4, 3], abs=1e-6)
    assert found.order == found.orders[1]
    size = normal(1, 2, 3).square().sum() * SCALES**2
    assert torch.allclose(found.relative, ((size + size**2) / 2).sqrt())  # sqrt(s^4 + s^3) over sqrt(2) s


def test_the_best_form_of_a_form_is_the_form() -> None:
    A = normal(3, 1, 4, 4)
    form = QuadraticForm(normal(3, 1, seed=1), None, A + A.mT)
    found = best_form(form, normal(50, 4, 5, seed=2), form.f0)
    assert torch.allclose(found.A, form.A, atol=1e-12)
    assert torch.equal(found.f0, form.f0)


def test_the_best_form_of_rectified_units_has_half_the_slope() -> None:
    x = normal(2, 2)
    found = best_form(lambda W: EDGE_CASES["relu"].f(W, x), normal(40_000, 3, 1, seed=3), torch.zeros(2, 1).double())
    expected = torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    expected[..., :2, 2] = expected[..., 2, :2] = 0.25 * x[:, None]
    assert (found.A - expected).abs().max() < 0.03


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6 draws"):
        best_form(zero_form(1, 3), normal(5, 3, 2), torch.zeros(1, 1).double())
    with pytest.raises(ValueError, match="draws, p, d"):
        remainder(zero_form(1, 3), zero_form(1, 3), normal(3, 2), SCALES)
    with pytest.raises(ValueError, match="at least 3"):
        cubic_terms(zero_form(1, 3), 3, 2)


def test_the_cubic_terms_of_a_cubic_layer_are_the_layer() -> None:
    """f = [sum_i (a^T w_i)^3] + (b^T mu)(sum_i (c^T w_i)^2) + (e^T mu)^3 has all three partitions."""
    a, b, c, e = normal(4, 3)

    def f(W: Tensor) -> Tensor:
        return ((a @ W).pow(3).sum() + (b @ W).sum() * (c @ W).square().sum() + (e @ W).sum() ** 3).reshape(1, 1)

    terms = cubic_terms(f, 3, 5)
    W = normal(3, 5, seed=4)
    assert torch.allclose(terms(W), f(W), rtol=1e-12)
    for missing in ("3", "2+1", "1+1+1"):
        rest = tuple(name for name in ("3", "2+1", "1+1+1") if name != missing)
        assert not torch.allclose(terms(W, rest), f(W), rtol=1e-2)


def test_all_three_partitions_raise_the_order_of_softmax_gated_experts_to_four() -> None:
    x, d = normal(2, 2), 5
    form = QuadraticForm(torch.zeros(2, 1).double(), *softmax_mixture_terms(x, d))
    terms, weights = cubic_terms(lambda W: softmax_mixture(W, x), 4, d), normal(2, 4, d, seed=5)

    def order(*partitions: str) -> float:
        added = (lambda W: form(W) + terms(W, partitions)) if partitions else form
        return remainder(lambda W: softmax_mixture(W, x), added, weights, SCALES).order

    assert order() == pytest.approx(3, abs=0.1)
    assert order("3", "2+1") == pytest.approx(3, abs=0.1)
    assert order("3", "2+1", "1+1+1") == pytest.approx(4, abs=0.1)


def test_the_terms_of_the_softmax_mixture_are_those_of_automatic_differentiation() -> None:
    x, d = normal(3, 2), 4
    automatic = expand(EDGE_CASES["softmax_mixture"].module(normal(4, d)), x)
    for closed, found in zip(softmax_mixture_terms(x, d), (automatic.g, automatic.A, automatic.B), strict=True):
        assert found is not None
        assert torch.allclose(closed, found, atol=1e-14)


def test_the_examples_in_the_documentation_hold() -> None:
    names = {"torch": torch, "remainder": remainder, "QuadraticForm": QuadraticForm}
    found = doctest.testmod(remainders, extraglobs=names)
    assert found.attempted > 0
    assert found.failed == 0
