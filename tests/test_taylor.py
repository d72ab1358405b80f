"""The surrogates against Taylor series by automatic differentiation, and on models that they describe exactly."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

from nqflib.curvature import CROSS_ENTROPY, SQUARED_ERROR
from nqflib.taylor import Expansion

DOUBLE = {"dtype": torch.float64}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def network():
    """Two layers with an unused parameter, and a batch for cross-entropy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, **DOUBLE)))
    batch = normal(7, 3, seed=1), torch.arange(7) % 4
    return model, batch


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def unflat(vector, like):
    pieces = vector.split([t.numel() for t in like.values()])
    return {name: piece.view_as(t) for (name, t), piece in zip(like.items(), pieces, strict=True)}


def brute_force(kind, model, batch, start, loss, delta):
    """Loss and gradient at delta, from the surrogate written as one function of a vector."""
    x, y = batch

    def outputs(v):
        return functional_call(model, unflat(v, start), (x,))

    theta = flat(start)
    terms = loss.terms(outputs(theta), y)
    L = lambda v: loss.value(outputs(v), y) / terms  # noqa: E731
    f0, J = outputs(theta), jacrev(outputs)(theta)
    if kind == "prox":
        told = lambda d: loss.value(f0 + J @ d, y) / terms  # noqa: E731
    elif kind == "quad":
        of_outputs = lambda f: loss.value(f.view_as(f0), y) / terms  # noqa: E731
        slope, bent = jacrev(of_outputs)(f0.flatten()), hessian(of_outputs)(f0.flatten())
        flat_J = J.reshape(-1, len(theta))

        def told(d):
            change = flat_J @ d
            return of_outputs(f0.flatten()) + slope @ change + change @ bent @ change / 2

    elif kind == "hquad":
        # torch.func.hessian is wrong for layer_norm in torch 2.13.
        g, H = jacrev(L)(theta), torch.autograd.functional.hessian(L, theta)
        told = lambda d: L(theta) + g @ d + d @ H @ d / 2  # noqa: E731
    else:
        told = lambda d: L(theta + d)  # noqa: E731
    return told(delta), jacrev(told)(delta)


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, SQUARED_ERROR], ids=["cross-entropy", "squared error"])
@pytest.mark.parametrize("kind", ["none", "prox", "quad", "hquad"])
def test_loss_and_gradient_are_those_of_the_series(kind, loss):
    model, (x, y) = network()
    batch = (x, y if loss is CROSS_ENTROPY else normal(7, 4, seed=2))
    start = {name: p.detach() for name, p in model.named_parameters()}
    delta = 0.3 * normal(len(flat(start)), seed=3)
    value, gradient = Expansion(model, start, batch, loss=loss).surrogate(kind, unflat(delta, start))
    expected_value, expected = brute_force(kind, model, batch, start, loss, delta)
    torch.testing.assert_close(value, expected_value.to(value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flat(gradient), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["none", "prox", "quad"])
def test_a_model_that_linearizes_itself_gives_the_same_with_fewer_passes(kind):
    from nqflib.language_model.transformer import Architecture, Transformer

    model = Transformer(
        Architecture(vocabulary=11, width=8, layers=2, heads=2, hidden=12, context=6),
        generator=torch.Generator().manual_seed(0), **DOUBLE,
    )  # fmt: skip
    start = {name: p.detach() + 0.1 * normal(*p.shape, seed=5) for name, p in model.named_parameters()}
    delta = {name: 0.05 * normal(*p.shape, seed=6) for name, p in start.items()}
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    calls = []

    class Counting:
        def linearize(self, *arguments):
            calls.append("pass")
            f, jvp, vjp = model.linearize(*arguments)
            return f, lambda v: (calls.append("jvp"), jvp(v))[1], lambda u: (calls.append("vjp"), vjp(u))[1]

    at = Expansion(Counting(), start, batch)
    own = at.surrogate(kind, delta)
    generic = Expansion(lambda p, x: functional_call(model, p, (x,)), start, batch).surrogate(kind, delta)
    torch.testing.assert_close(own[0], generic[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flat(own[1]), flat(generic[1]), rtol=1e-9, atol=1e-12)
    assert calls == (["pass", "vjp"] if kind == "none" else ["pass", "jvp", "vjp"])
    at.prox(delta)
    at.quad(delta)  # the pass at theta0 is shared
    assert calls.count("pass") == 1 + (kind == "none")


def linear(p, x):
    return x @ p["w"] + p["b"]


def descend(kind, batches, loss, steps=1000, rate=0.05):
    """Plain SGD on a surrogate for `steps` batches; every tenth delta."""
    start = {"w": normal(4, 3, seed=1), "b": normal(3, seed=2)}
    delta = {name: torch.zeros_like(p) for name, p in start.items()}
    kept = []
    for step in range(steps):
        _, gradient = Expansion(linear, start, batches[step % len(batches)], loss=loss).surrogate(kind, delta)
        delta = {name: d - rate * gradient[name] for name, d in delta.items()}
        if step % 10 == 9:
            kept.append(flat(delta))
    return torch.stack(kept)


@pytest.mark.parametrize(
    ("kind", "loss", "targets"),
    [
        ("prox", CROSS_ENTROPY, lambda i: torch.arange(6).roll(i) % 3),
        ("prox", SQUARED_ERROR, lambda i: normal(6, 3, seed=20 + i)),
        ("quad", SQUARED_ERROR, lambda i: normal(6, 3, seed=20 + i)),
        ("hquad", SQUARED_ERROR, lambda i: normal(6, 3, seed=20 + i)),
    ],
)
def test_a_linear_model_trains_as_its_surrogate_for_a_thousand_steps(kind, loss, targets):
    batches = [(normal(6, 4, seed=10 + i), targets(i)) for i in range(5)]
    true, told = descend("none", batches, loss), descend(kind, batches, loss)
    assert true[-1].norm() > 1
    assert (told - true).abs().max() < 1e-10


def test_the_quadratic_model_of_cross_entropy_is_another_one_even_for_a_linear_model():
    batches = [(normal(6, 4, seed=10 + i), torch.arange(6) % 3) for i in range(5)]
    assert (
        descend("quad", batches, CROSS_ENTROPY, 100) - descend("none", batches, CROSS_ENTROPY, 100)
    ).abs().max() > 0.1


def test_an_unknown_surrogate_is_refused():
    with pytest.raises(ValueError, match="kind must be none, prox, quad or hquad, got 'linear'"):
        Expansion(linear, {}, (torch.ones(1), torch.ones(1))).surrogate("linear", {})
