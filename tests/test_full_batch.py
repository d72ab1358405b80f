"""On fixed inputs the layers and their forms give the outputs and the gradients of the plain forward pass."""

import pytest
import torch
from torch import Tensor

from nqflib.full_batch import ReadoutHeads, form_on, layer_on
from nqflib.layers import CNN, MLP, FourierMLP, Layer, MultiHeadAttention, QuadraticTwin, QueryKeyAttention


def case(name: str) -> tuple[Layer, tuple[Tensor, ...]]:
    """A layer with weights of scale 0.5, far from its form, and inputs whose sizes all differ."""
    generator = torch.Generator().manual_seed(0)
    options = {"scale": 0.5, "generator": generator}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = normal(7, 5), normal(7, 6, 5)
    return {
        "perceptron": lambda: (MLP(5, 4, 3, **options), (normal(7, 5),)),
        "convolution": lambda: (CNN((2, 3), 4, 5, **options), (normal(7, 1, 5, 7),)),
        "channels and stride": lambda: (CNN((2, 3), 4, 5, channels=2, stride=2, **options), (normal(7, 2, 6, 9),)),
        "query-key": lambda: (QueryKeyAttention(normal(3, 5), 2, key_dim=4, **options), tokens),
        "multi-head": lambda: (MultiHeadAttention(5, 2, 3, key_dim=4, value_dim=8, **options), tokens),
    }[name]()


NAMES = ["perceptron", "convolution", "channels and stride", "query-key", "multi-head"]


def assert_same_outputs_and_gradients(ours, ours_layer: Layer, theirs, theirs_layer: Layer) -> None:
    with torch.no_grad():  # the functions must follow weights that change under them
        for parameters in (ours_layer.parameters(), theirs_layer.parameters()):
            for weight in parameters:
                weight.mul_(1.25)
    torch.testing.assert_close(ours(), theirs(), rtol=1e-12, atol=1e-13)
    pairs = zip(
        *(
            torch.autograd.grad((f() ** 3).sum(), list(m.parameters()), materialize_grads=True)
            for f, m in ((ours, ours_layer), (theirs, theirs_layer))
        ),
        strict=True,
    )
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_on_fixed_inputs_is_the_layer(name):
    layer, x = case(name)
    again, _ = case(name)
    assert_same_outputs_and_gradients(layer_on(layer, *x), layer, lambda: again(*x), again)


@pytest.mark.parametrize("name", NAMES)
def test_its_form_on_fixed_inputs_is_the_quadratic_twin(name):
    layer, x = case(name)
    twin = QuadraticTwin(layer)
    assert_same_outputs_and_gradients(form_on(layer, *x), layer, lambda: twin(*x), twin.layer)
    assert (layer_on(layer, *x)() - form_on(layer, *x)()).abs().max() > 1e-3  # or the two tests would be one


def test_a_structure_without_pairs_is_refused():
    layer = FourierMLP(3, 0.5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="FourierMLP has a DiagonalPairStructure"):
        form_on(layer, torch.zeros(2, dtype=torch.float64))


def test_heads_with_readouts_of_their_own_are_the_sum_of_one_head_layers():
    generator = torch.Generator().manual_seed(1)
    x, X, readout = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((7, 5), (7, 6, 5), (3, 5)))
    heads = ReadoutHeads(readout, key_dim=4, scale=0.5, generator=generator)
    singles = [QueryKeyAttention(readout[h : h + 1], 1, key_dim=4) for h in range(3)]
    with torch.no_grad():
        for h, single in enumerate(singles):
            single.query.copy_(heads.query[h : h + 1])
            single.key.copy_(heads.key[h : h + 1])
    torch.testing.assert_close(layer_on(heads, x, X)(), sum(s(x, X) for s in singles), rtol=1e-12, atol=1e-13)
    twins = sum(QuadraticTwin(s)(x, X) for s in singles)
    torch.testing.assert_close(form_on(heads, x, X)(), twins, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match=r"readout must have shape \(heads, D\), got \(5,\)"):
        ReadoutHeads(readout[0], key_dim=4, scale=0.5, generator=generator)
