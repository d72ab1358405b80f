"""Which hypothesis each layer at the edge of theorem 1 breaks, and that the layers are what they are called."""

import doctest

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nqflib import edge_cases
from nqflib.edge_cases import EDGE_CASES, EdgeCase, gated_linear_unit, normalized_units
from nqflib.forms import Report, check, expand

INPUTS, WIDTH = 3, 6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(case: EdgeCase) -> Tensor:
    return normal(4, 5, INPUTS) if case.patches else normal(4, INPUTS)


def report(name: str) -> Report:
    case = EDGE_CASES[name]
    module = case.module(normal(case.parameters(INPUTS), WIDTH, seed=1))
    return check(module, data(case), draws=2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "order"),
    [("tanh", 4), ("gelu", 3), ("hidden_bias", 4), ("normalized_inputs", 4), ("outer_tanh", 4), ("gated_unit", 3),
     ("linear_attention", 4)],
)  # fmt: skip
def test_these_layers_meet_every_hypothesis(name: str, order: float) -> None:
    found = report(name)
    assert not found.failures
    assert found.order == pytest.approx(order, abs=0.1)
    assert found.empty == (name in ("gated_unit", "linear_attention"))


@pytest.mark.parametrize(("name", "order"), [("fixed_bias", 3), ("output_bias", 4), ("softmax_mixture", 3)])
def test_these_break_the_gradient_condition_alone_and_have_the_form_of_theorem_12(name: str, order: float) -> None:
    found = report(name)
    assert [failure.split(":")[0] for failure in found.failures] == ["zero gradient at zero fails"]
    assert found.order == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize(("name", "kink"), [("relu", 2), ("leaky_relu", 2), ("max_pooling", 2), ("elu", 3)])
def test_these_have_a_kink_and_elu_keeps_its_order_all_the_same(name: str, kink: int) -> None:
    found = report(name)
    assert found.kink == kink
    assert found.order == pytest.approx(3 if name == "elu" else 2, abs=0.1)


def test_a_relu_after_the_sum_lowers_the_order_to_two() -> None:
    assert report("outer_relu").order == pytest.approx(2, abs=0.1)


def test_normalized_units_are_not_finite_at_zero_and_do_not_feel_the_scale_of_their_inputs() -> None:
    with pytest.raises(ValueError, match="not finite at W = 0"):
        report("normalized_units")
    W, x = normal(INPUTS + 1, WIDTH), normal(4, INPUTS)
    f = EDGE_CASES["normalized_units"].f
    smaller = torch.cat([1e-3 * W[:-1], W[-1:]])
    assert torch.allclose(f(W, x), f(smaller, x), rtol=1e-12)
    h = F.layer_norm(x @ W[:-1], (WIDTH,), eps=1e-5)
    assert torch.allclose(normalized_units(1e-5)(W, x), (torch.tanh(h) @ W[-1]).unsqueeze(1), rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in EDGE_CASES if name != "normalized_units"])
def test_every_layer_has_one_output_and_exchangeable_units(name: str) -> None:
    case = EDGE_CASES[name]
    W = normal(case.parameters(INPUTS), WIDTH, seed=3)
    f = case.f(W, data(case))
    assert f.shape == (4, 1)
    assert torch.allclose(case.f(W.flip(1), data(case)), f, rtol=1e-12)
    assert not torch.allclose(case.f(W.flip(0), data(case)), f, rtol=1e-2)


def test_a_gated_linear_unit_has_a_form_and_its_silu_relative_none() -> None:
    case = EdgeCase("gated linear unit", gated_linear_unit, parameters=lambda k: 2 * k + 1)
    x = normal(2, INPUTS)
    A = expand(case.module(normal(7, WIDTH)), x).A
    expected = torch.zeros_like(A)
    expected[..., 3:6, 6] = expected[..., 6, 3:6] = 0.25 * x[:, None]
    assert torch.allclose(A, expected, atol=1e-14)


def test_the_examples_in_the_documentation_hold() -> None:
    found = doctest.testmod(edge_cases)
    assert found.attempted > 0
    assert found.failed == 0
