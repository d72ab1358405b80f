"""The written-out derivatives of the decoder against automatic differentiation of the same decoder."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp

from nqflib.language_model.linearization import linearize, loss_and_gradient
from nqflib.language_model.transformer import Architecture, Transformer, next_token_loss

SIZES = [
    Architecture(vocabulary=13, width=12, layers=3, heads=2, hidden=20, context=9),
    Architecture(vocabulary=7, width=8, layers=1, heads=1, hidden=4, context=9),
]


def case(size: Architecture, dtype: torch.dtype = torch.float64):
    """A model with a readout, and two windows of it."""
    generator = torch.Generator().manual_seed(7)
    model = Transformer(size, generator=generator, dtype=dtype)
    nn.init.normal_(model.unembedding, generator=generator)
    return model, torch.randint(size.vocabulary, (2, 10), generator=generator)


def random_like(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}


@pytest.mark.parametrize("length", [1, 5, 9])
@pytest.mark.parametrize("size", SIZES)
def test_both_products_equal_those_of_automatic_differentiation(size, length):
    model, windows = case(size)
    tokens, parameters = windows[:, :length], {n: p.detach() for n, p in model.named_parameters()}
    direction = random_like(parameters, 1)
    logits, tangent = jvp(lambda w: functional_call(model, w, (tokens,)), (parameters,), (direction,))
    at = model.linearize(parameters, tokens)
    torch.testing.assert_close(at.logits, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(at.jvp(direction), tangent, rtol=1e-11, atol=1e-11)

    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    expected = torch.autograd.grad((model(tokens) * cotangent).sum(), list(model.parameters()))
    for (name, gradient), reference in zip(at.vjp(cotangent).items(), expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11, msg=name)


def test_products_do_not_disturb_each_other():
    model, windows = case(SIZES[0])
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    at = linearize(model, parameters, windows[:, :-1])
    direction, cotangent = random_like(parameters, 1), torch.ones_like(at.logits)
    first, logits = at.jvp(direction), at.logits.clone()
    gradient = at.vjp(cotangent)
    assert torch.equal(at.jvp(direction), first)
    assert torch.equal(at.logits, logits)
    assert all(torch.equal(g, gradient[n]) for n, g in at.vjp(cotangent).items())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-5)])
def test_loss_and_gradient_equal_those_of_the_graph(dtype, tolerance):
    model, windows = case(SIZES[0], dtype)
    expected = next_token_loss(model, windows)
    loss, gradient = loss_and_gradient(model, dict(model.named_parameters()), windows)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    references = torch.autograd.grad(expected, list(model.parameters()))
    for (name, g), reference in zip(gradient.items(), references, strict=True):
        torch.testing.assert_close(g, reference, rtol=tolerance, atol=tolerance, msg=name)


def test_missing_names_and_half_precision_are_refused():
    model, windows = case(SIZES[0])
    parameters = dict(model.named_parameters())
    del parameters["blocks.1.mlp.up"]
    with pytest.raises(ValueError, match=r"missing are blocks\.1\.mlp\.up"):
        linearize(model, parameters, windows)
    with pytest.raises(ValueError, match=r"float32 or float64, got torch\.bfloat16"):
        linearize(model, {n: p.bfloat16() for n, p in model.named_parameters()}, windows)
    with pytest.raises(ValueError, match="at most 9 positions, got 10"):
        linearize(model, dict(model.named_parameters()), windows)
