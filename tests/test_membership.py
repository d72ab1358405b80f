"""The tests of a model see what is right, and what is wrong."""

import doctest
import math
from dataclasses import replace

import pytest
import torch

from nqflib import membership as module
from nqflib.membership import membership
from nqflib.zoo import MODELS


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_an_exact_model_passes_everything() -> None:
    found = membership(MODELS["bilinear_sequence_regression"], generator())
    assert found.structure < 1e-12
    assert found.deviation < 1e-12
    assert found.order == math.inf
    assert found.permutation is not None
    assert found.permutation < 1e-12
    assert found.steps < 1e-12


def test_a_network_has_a_remainder_of_order_four_and_steps_that_agree_to_the_square_of_its_weights() -> None:
    found = membership(MODELS["two_layer_mlp"], generator())
    assert found.structure < 1e-12
    assert found.order == pytest.approx(4, abs=0.1)
    assert found.deviation > 0.1
    assert 1e-6 < found.steps < 1e-2


def test_a_model_that_is_one_unit_has_no_permutation() -> None:
    assert membership(MODELS["linear_contrastive_embedding"], generator()).permutation is None


def test_a_wrong_matrix_fails_every_comparison() -> None:
    model = MODELS["quadratic_network"]
    found = membership(replace(model, A=lambda x: 2 * model.A(x)), generator())
    assert found.structure > 0.1
    assert found.deviation > 0.1
    assert found.steps > 0.1


def test_units_that_differ_are_seen() -> None:
    model = MODELS["quadratic_network"]

    def f(W, x):
        return (x @ W * torch.arange(1, W.shape[1] + 1)).square().sum(1, keepdim=True)

    found = membership(replace(model, f=f, number=99), generator())
    assert found.permutation is not None
    assert found.permutation > 0.01


def test_the_example_in_the_documentation_holds() -> None:
    found = doctest.testmod(module, extraglobs={"torch": torch})
    assert found.attempted > 0
    assert found.failed == 0
