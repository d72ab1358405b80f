"""Contractions of structure matrices against the dense tensor, and what they keep."""

import pytest
import torch

from nqflib.contraction import FormContraction, SymmetricStack
from nqflib.forms import QuadraticForm

F64 = torch.float64


def symmetric(generator: torch.Generator, *shape: int) -> torch.Tensor:
    S = torch.randn(*shape, generator=generator, dtype=F64)
    return (S + S.mT) / 2


def perceptron(generator: torch.Generator, n: int, c: int, inputs: int, subspace: int) -> torch.Tensor:
    """A of c read-outs of hidden units, on inputs in a subspace: (n, c, p, p) with p = c + inputs."""
    x = torch.randn(n, subspace, generator=generator, dtype=F64)
    x = x @ torch.randn(subspace, inputs, generator=generator, dtype=F64)
    A = torch.zeros(n, c, c + inputs, c + inputs, dtype=F64)
    for k in range(c):
        A[:, k, k, c:] = A[:, k, c:, k] = x / 2
    return A


@pytest.mark.parametrize("kind", ["dense", "perceptron", "subspace"])
def test_both_contractions_equal_the_dense_ones(kind):
    generator = torch.Generator().manual_seed(0)
    S = (
        symmetric(generator, 30, 2, 5, 5)
        if kind == "dense"
        else perceptron(generator, 30, 2, 6, 6 if kind == "perceptron" else 2)
    )
    M, weights = symmetric(generator, *S.shape[2:]), torch.randn(30, 2, generator=generator, dtype=F64)
    stack = SymmetricStack.of(S, batch_size=30, steps=1000)
    torch.testing.assert_close(
        stack.inner(M, weights), weights + torch.einsum("ij,xkij->xk", M, S), rtol=1e-12, atol=1e-12
    )
    expected = 2 * torch.einsum("xk,xkij->ij", weights, S)
    torch.testing.assert_close(stack.twice_weighted_sum(weights), expected, rtol=1e-12, atol=1e-12)
    batch = torch.tensor([4, 4, 17])
    subset = stack.on(batch).inner(M, torch.zeros(3, 2, dtype=F64))
    torch.testing.assert_close(subset, torch.einsum("ij,xkij->xk", M, S[batch]), rtol=1e-12, atol=1e-12)


def test_numbers_kept_are_those_that_a_step_needs():
    generator = torch.Generator().manual_seed(1)
    dense = SymmetricStack.of(symmetric(generator, 30, 1, 5, 5), 30, 1000)
    assert dense.left.shape == (30, 15 + 1)  # upper triangle and the zero column
    layer = SymmetricStack.of(perceptron(generator, 30, 2, 6, 6), 30, 1000)
    assert layer.left.shape == (60, 2 * 6 + 1)
    plane = SymmetricStack.of(perceptron(generator, 30, 2, 6, 2), 30, 1000)
    assert plane.right is not None
    assert plane.left.shape == (60, 2 * 2)
    # A single use does not pay for the search of that basis.
    assert SymmetricStack.of(perceptron(generator, 30, 2, 6, 2), 30, 1).right is None


@pytest.mark.parametrize("terms", ["A", "gA", "AB", "gAB"])
def test_rotated_residuals_have_the_same_gradient(terms):
    generator = torch.Generator().manual_seed(2)
    n, c, p = 90, 1, 4
    g = torch.randn(n, c, p, generator=generator, dtype=F64) if "g" in terms else None
    B = symmetric(generator, n, c, p, p) if "B" in terms else None
    f0 = torch.randn(n, c, generator=generator, dtype=F64)
    form = QuadraticForm(f0, g, symmetric(generator, n, c, p, p), B)
    y, mu = torch.randn(n, c, generator=generator, dtype=F64), torch.randn(p, generator=generator, dtype=F64)
    M = symmetric(generator, p, p)
    whole = FormContraction.of(form, n, 1000)
    expected = whole.gradient(mu, 2 / n * (form.from_moments(M, mu) - y))
    for steps, rows in ((1000, sum({"g": p, "A": 11, "B": 11}[term] for term in terms)), (5, n)):
        residual = whole.residual(y, steps)
        r = residual.outputs(M, mu)
        assert len(r) == rows
        for ours, theirs in zip(residual.gradient(mu, r), expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
