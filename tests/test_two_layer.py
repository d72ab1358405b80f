"""Gradients by hand equal automatic differentiation, and the optimizers equal torch's."""

import doctest

import numpy as np
import pytest
import torch

from nqflib import two_layer
from nqflib.two_layer import (
    LINEAR,
    RELU,
    SILU,
    TANH,
    Adam,
    Descent,
    Momentum,
    Run,
    crossing_steps,
    descend,
    descend_map,
    linear,
)

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((10, 3)), RNG.standard_normal((10, 2))
U, V = 0.5 * RNG.standard_normal((3, 4)), 0.5 * RNG.standard_normal((4, 2))
TORCH = {"tanh": torch.tanh, "silu": torch.nn.functional.silu, "relu": torch.relu, "linear": lambda z: 0.5 * z}
OURS = {"tanh": TANH, "silu": SILU, "relu": RELU, "linear": linear(0.5)}


def weights(f, U, V):
    return np.concatenate([U.ravel(), V.ravel()])


def torch_run(name: str, make_optimizer, steps: int) -> np.ndarray:
    parameters = [torch.tensor(W, requires_grad=True) for W in (U, V)]
    optimizer = make_optimizer(parameters)
    for _ in range(steps):
        f = TORCH[name](torch.tensor(X) @ parameters[0]) @ parameters[1]
        optimizer.zero_grad()
        (f - torch.tensor(Y)).square().sum(1).mean().backward()
        optimizer.step()
    return np.concatenate([W.detach().numpy().ravel() for W in parameters])


@pytest.mark.parametrize("name", list(OURS))
def test_gradient_descent_is_that_of_automatic_differentiation(name: str) -> None:
    run = descend(X, Y, U, V, OURS[name], Descent(0.05), steps=20, observe=weights)
    expected = torch_run(name, lambda p: torch.optim.SGD(p, 0.05), 20)
    assert np.abs(run.values[-1] - expected).max() < 1e-13


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Momentum(0.02), lambda p: torch.optim.SGD(p, 0.02, momentum=0.9)),
        (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    ],
    ids=["momentum", "adam"],
)
def test_the_optimizers_are_those_of_torch(ours, theirs) -> None:
    for _ in range(2):  # an optimizer starts afresh at step 0
        run = descend(X, Y, U, V, TANH, ours, steps=20, observe=weights)
        assert np.abs(run.values[-1] - torch_run("tanh", theirs, 20)).max() < 1e-12


def test_runs_side_by_side_are_the_runs_one_by_one() -> None:
    scales = np.array([0.1, 1.0])[:, None, None]
    both = descend(X, Y, scales * U, scales * V, TANH, Descent(0.05), steps=10, every=5, observe=lambda f, U, V: f)
    assert both.steps.tolist() == [0, 5, 10]
    for i, s in enumerate((0.1, 1.0)):
        alone = descend(X, Y, s * U, s * V, TANH, Descent(0.05), steps=10, every=5, observe=lambda f, U, V: f)
        assert np.abs(both.values[:, i] - alone.values).max() < 1e-14


def test_a_stack_of_maps_follows_automatic_differentiation() -> None:
    shapes = [(3, 5), (5, 4), (4, 6), (6, 2)]
    factors, target = [0.6 * RNG.standard_normal(shape) for shape in shapes], RNG.standard_normal((3, 2))
    run = descend_map(factors, target, 0.02, steps=15, observe=lambda T: T)
    Z = [torch.tensor(factor, requires_grad=True) for factor in factors]
    optimizer = torch.optim.SGD(Z, 0.02)
    for _ in range(15):
        optimizer.zero_grad()
        (torch.linalg.multi_dot(Z) - torch.tensor(target)).square().sum().backward()
        optimizer.step()
    assert np.abs(run.values[-1] - torch.linalg.multi_dot(Z).detach().numpy()).max() < 1e-13


def test_a_run_ends_when_it_is_told_to() -> None:
    run = descend(X, Y, U, V, TANH, Descent(0.05), steps=100, observe=lambda f, U, V: f[0, 0], until=lambda _: True)
    assert run.steps.tolist() == [0]


def test_wrong_shapes_and_divergence_are_refused() -> None:
    with pytest.raises(ValueError, match=r"U and V must have shapes \(..., 3, d\) and \(..., d, 2\)"):
        descend(X, Y, U.T, V, TANH, Descent(0.05), steps=1, observe=weights)
    with pytest.raises(ValueError, match="not finite at step"), np.errstate(all="ignore"):
        descend(X, Y, U, V, LINEAR, Descent(5.0), steps=1000, observe=lambda f, U, V: f)


def test_crossings_are_interpolated_in_both_directions_and_may_never_come() -> None:
    run = Run(np.array([0, 10, 20]), np.array([[0.0, 0.0, 2.0], [0.5, 0.1, 1.0], [1.5, 0.2, 0.0]]))
    assert crossing_steps(run, 0.75).tolist() == pytest.approx([12.5, np.inf, 0.0])
    assert crossing_steps(run, 0.5, falling=True).tolist() == pytest.approx([0.0, 0.0, 15.0])


def test_the_example_in_the_documentation_holds() -> None:
    found = doctest.testmod(two_layer, extraglobs={"np": np})
    assert found.attempted > 0
    assert found.failed == 0
