"""The layers of paper 1 compute what the paper writes, and their structure matrices are those of its propositions."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nqflib.forms import check, expand
from nqflib.layers import (
    CNN,
    MLP,
    FourierMLP,
    Layer,
    MixtureOfExperts,
    MultiHeadAttention,
    QuadraticTwin,
    QueryKeyAttention,
    SingleHeadLogits,
    slope_at_zero,
)
from nqflib.stacks import DeepAttention, DeepMLP, balanced_form
from nqflib.units import evaluate, unit_matrix


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


N, D, TOKENS, OUTPUTS = 3, 5, 6, 2
FIXED = normal(OUTPUTS, D, seed=9)
SEQUENCE = (normal(N, D, seed=1), normal(N, TOKENS, D, seed=2))
IMAGES = (normal(N, 2, 4, 5, seed=3),)
VECTORS = (normal(N, D, seed=4),)
POINTS = (torch.rand(N, generator=generator(5), dtype=torch.float64),)

CASES: dict[str, tuple[Layer, tuple[Tensor, ...]]] = {
    "perceptron": (MLP(D, 4, OUTPUTS, activation=lambda z: torch.sin(2 * z), generator=generator()), VECTORS),
    "convolution": (CNN((2, 3), 4, OUTPUTS, channels=2, generator=generator()), IMAGES),
    "attention": (MultiHeadAttention(D, 3, OUTPUTS, key_dim=2, value_dim=3, generator=generator()), SEQUENCE),
    "query-key": (QueryKeyAttention(FIXED, 3, key_dim=2, generator=generator()), SEQUENCE),
    "logits": (SingleHeadLogits(FIXED, key_dim=3, generator=generator()), SEQUENCE),
    "experts": (MixtureOfExperts(D, 3, OUTPUTS, gate=F.gelu, generator=generator()), VECTORS),
    "fourier": (FourierMLP(4, 0.5, generator=generator()), POINTS),
}


def pair_matrix(p: int, rows: slice, columns: slice, C: Tensor) -> Tensor:
    A = torch.zeros(p, p, dtype=torch.float64)
    A[rows, columns] = 0.5 * C
    A[columns, rows] = 0.5 * C.T
    return A


# --- f as the paper writes it ----------------------------------------------------------------------------


def attention_weights(x: Tensor, X: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """softmax(X^T K^T Q x / sqrt(d_k)) for one sample and head; query and key (d_k, D), X (D, N) as in the paper."""
    return torch.softmax(X.T @ key.T @ query @ x / math.sqrt(query.shape[0]), 0)


def test_the_perceptron_is_the_sum_over_its_units() -> None:
    layer, (x,) = CASES["perceptron"]
    assert isinstance(layer, MLP)
    for n in range(N):
        expected = sum(v * torch.sin(2 * (u @ x[n])) for u, v in zip(layer.u, layer.v, strict=True))
        assert relative(layer(x)[n], torch.as_tensor(expected)) < 1e-13


@pytest.mark.parametrize(("stride", "patches"), [(1, 9), (2, 4)])
def test_the_convolution_sums_its_units_over_the_patches(stride: int, patches: int) -> None:
    layer = CNN((2, 3), 4, OUTPUTS, channels=2, stride=stride, generator=generator())
    (x,) = IMAGES
    for n in range(N):
        boxes = [x[n, :, i : i + 2, j : j + 3].flatten() for i in range(0, 3, stride) for j in range(0, 3, stride)]
        assert len(boxes) == patches
        hidden = torch.stack([torch.tanh(layer.kernel @ box) for box in boxes]).sum(0)
        assert relative(layer(x)[n], hidden @ layer.v) < 1e-13
        assert relative(layer.patch_sum(x)[n], torch.stack(boxes).sum(0)) < 1e-14


def test_multi_head_attention_is_equation_7_summed_over_heads() -> None:
    layer, (x, X) = CASES["attention"]
    assert isinstance(layer, MultiHeadAttention)
    for n in range(N):
        for c in range(OUTPUTS):
            total = torch.zeros((), dtype=torch.float64)
            for head in range(3):
                weights = attention_weights(x[n], X[n].T, layer.query[head].T, layer.key[head].T)
                total = total + layer.readout[head, c] @ layer.value[head].T @ X[n].T @ weights
            assert layer(x, X)[n, c].item() == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["query-key", "logits"])
def test_attention_with_a_fixed_readout_is_equations_9_and_11(name: str) -> None:
    layer, (x, X) = CASES[name]
    assert isinstance(layer, QueryKeyAttention | SingleHeadLogits)
    # The matrices W^Q and W^K (d_k, D) of each head; the single head's rows are its units.
    query = layer.query.mT if isinstance(layer, QueryKeyAttention) else layer.query.unsqueeze(0)
    key = layer.key.mT if isinstance(layer, QueryKeyAttention) else layer.key.unsqueeze(0)
    for n in range(N):
        expected = sum(
            (FIXED @ X[n].T @ attention_weights(x[n], X[n].T, q, k) for q, k in zip(query, key, strict=True)),
            start=torch.zeros(OUTPUTS, dtype=torch.float64),
        )
        assert relative(layer(x, X)[n], expected) < 1e-12


def test_the_mixture_of_experts_is_equation_13() -> None:
    layer, (x,) = CASES["experts"]
    assert isinstance(layer, MixtureOfExperts)
    for n in range(N):
        expected = sum(
            F.gelu(r @ x[n]) * torch.tanh(theta.reshape(OUTPUTS, D) @ x[n])
            for r, theta in zip(layer.router, layer.theta, strict=True)
        )
        assert relative(layer(x)[n], torch.as_tensor(expected)) < 1e-12


def test_the_fourier_perceptron_is_equation_50_and_its_features_are_orthonormal_on_the_grid() -> None:
    layer = FourierMLP(4, 0.5, generator=generator())
    for x, f in zip(POINTS[0], layer(POINTS[0])[:, 0], strict=True):
        expected = 0.0
        for k in range(1, 5):
            psi = math.sqrt(2) * math.cos(2 * math.pi * k * x.item())
            expected += layer.W[k - 1].item() * math.tanh(k**-0.5 * layer.a[k - 1].item() * psi) / math.sqrt(4)
        assert f.item() == pytest.approx(expected, rel=1e-12)
    grid = torch.arange(16, dtype=torch.float64) / 16
    features = FourierMLP(4, 0.0).features(grid)
    assert (features.T @ features / 16 - torch.eye(4)).abs().max() < 1e-14


# --- A as the propositions write it ----------------------------------------------------------------------


def test_proposition_1_couples_input_and_readout_of_a_perceptron() -> None:
    layer, (x,) = CASES["perceptron"]
    for n in range(N):
        for c in range(OUTPUTS):
            C = 2 * torch.outer(x[n], torch.eye(OUTPUTS, dtype=x.dtype)[c])  # phi'(0) = 2
            expected = pair_matrix(D + OUTPUTS, slice(0, D), slice(D, None), C)
            assert torch.equal(layer.structure(x).dense()[n, c], expected)


def test_proposition_2_couples_value_and_readout_through_the_mean_token_alone() -> None:
    """Paper: (1/2) x_avg (x) I on (vec W^V, v), and zero on the rows of W^Q and W^K."""
    layer = MultiHeadAttention(D, 3, key_dim=2, value_dim=3, generator=generator())
    x, X = SEQUENCE
    start, p = 2 * 2 * D, 2 * 2 * D + 3 * D + 3
    for n in range(N):
        C = torch.kron(X[n].mean(0)[:, None], torch.eye(3, dtype=torch.float64))
        expected = pair_matrix(p, slice(start, start + 3 * D), slice(start + 3 * D, p), C)
        assert relative(layer.structure(x, X).dense()[n, 0], expected) < 1e-14


@pytest.mark.parametrize("name", ["query-key", "logits"])
def test_propositions_3_and_4_couple_query_and_key_through_the_token_covariance(name: str) -> None:
    layer, (x, X) = CASES[name]
    copies, key_dim = (2, 2) if name == "query-key" else (1, 3)
    for n in range(N):
        for c in range(OUTPUTS):
            u = torch.cov(X[n].T, correction=0) @ FIXED[c]
            identity = torch.eye(copies, dtype=torch.float64)
            C = torch.kron(torch.outer(x[n], u), identity) / math.sqrt(key_dim)
            block = D * copies
            expected = pair_matrix(2 * block, slice(0, block), slice(block, None), C)
            assert relative(layer.structure(x, X).dense()[n, c], expected) < 1e-12


def test_proposition_5_couples_gate_and_expert_through_the_expert_gradient() -> None:
    """A two-parameter expert with a gradient written by hand: E = tanh(a x_1) + b x_2^2."""
    layer = MixtureOfExperts(
        D, 3, gate=F.gelu, expert=lambda x, t: torch.tanh(t[:1] * x[0]) + t[1:] * x[1] ** 2, expert_size=2
    )
    (x,) = VECTORS
    for n in range(N):
        G = torch.stack([x[n, 0], x[n, 1] ** 2])
        expected = pair_matrix(D + 2, slice(0, D), slice(D, None), 0.5 * torch.outer(x[n], G))  # gelu'(0) = 1/2
        assert relative(layer.structure(x).dense()[n, 0], expected) < 1e-14
    assert relative(expand(layer, x).A, layer.structure(x).dense()) < 1e-12


def test_proposition_6_is_the_perceptron_on_the_sum_of_the_patches() -> None:
    layer, (x,) = CASES["convolution"]
    assert isinstance(layer, CNN)
    perceptron = MLP(12, 4, OUTPUTS)
    assert relative(layer.structure(x).dense(), perceptron.structure(layer.patch_sum(x)).dense()) < 1e-14


def test_the_fourier_perceptron_couples_each_mode_with_its_own_readout() -> None:
    layer, (x,) = CASES["fourier"]
    A = layer.structure(x).dense()
    for n in range(N):
        for k in range(1, 5):
            psi = math.sqrt(2) * math.cos(2 * math.pi * k * x[n].item())
            assert A[n, 0, k - 1, 4 + k - 1].item() == pytest.approx(k**-0.5 * psi / (2 * math.sqrt(4)), rel=1e-12)
    assert (A[0, 0] != 0).sum() == 8


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_equals_the_automatic_expansion(name: str) -> None:
    layer, x = CASES[name]
    automatic, closed = expand(layer, x), layer.form(*x)
    assert relative(automatic.A, closed.A) < 1e-12
    assert (automatic.f0 - closed.f0).abs().max() < 1e-12
    for other in (automatic.g, automatic.B):
        assert other is None or other.abs().max() < 1e-13


@pytest.mark.parametrize("name", CASES)
def test_every_layer_meets_the_hypotheses_of_theorem_1(name: str) -> None:
    layer, x = CASES[name]
    found = check(layer, x, draws=2, generator=generator(1))
    assert found.failures == ()
    assert found.order == pytest.approx(3 if name == "experts" else 4, abs=0.1)  # gelu has a second derivative


# --- attention: query and key at order four --------------------------------------------------------------


def test_query_and_key_enter_a_head_at_order_four() -> None:
    layer, x = CASES["attention"]
    W = unit_matrix(layer).detach()
    without = W.clone()
    without[: 2 * 2 * D] = 0
    scales = 0.1 * 0.5 ** torch.arange(5, dtype=torch.float64)
    change = torch.stack([(evaluate(layer, s * W, x) - evaluate(layer, s * without, x)).norm() for s in scales])
    slopes = change.log().diff() / scales.log().diff()
    assert slopes.tolist() == pytest.approx([4] * 4, abs=0.01)
    # Without them the head is its quadratic form, for weights of any size.
    assert relative(evaluate(layer, without, x), layer.form(*x)(without)) < 1e-12


# --- twins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_twin_is_the_quadratic_form_at_the_layers_weights(name: str) -> None:
    layer, x = CASES[name]
    twin, W = QuadraticTwin(layer), unit_matrix(layer).detach()
    assert relative(twin(*x), layer.form(*x)(W)) < 1e-12
    # and so is its gradient in W: 2 A W, summed over samples and outputs.
    twin(*x).sum().backward()
    for parameter in twin.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert relative(unit_matrix(twin.layer), 2 * layer.form(*x).A.sum((0, 1)) @ W) < 1e-12


def test_a_twin_has_its_own_weights() -> None:
    layer, x = CASES["perceptron"]
    twin = QuadraticTwin(layer)
    before, on_x = layer(*x), twin.on(*x)
    assert on_x().any()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(*x), before)
    assert not on_x().any()  # the outputs on fixed inputs follow the weights


# --- deep stacks -----------------------------------------------------------------------------------------


def test_a_deep_perceptron_is_its_matrices_in_turn_and_its_twin_their_product() -> None:
    stack = DeepMLP.of_widths((8, 16, 12, 10, 1), generator=generator(), scale=0.3)
    x = normal(N, 8)
    first, second = stack.layers
    assert isinstance(first, MLP)
    assert isinstance(second, MLP)
    expected = torch.tanh(torch.tanh(x @ first.u.T) @ first.v @ second.u.T) @ second.v
    assert relative(stack(x), expected) < 1e-14
    assert relative(stack.twin()(x), x @ first.u.T @ first.v @ second.u.T @ second.v) < 1e-13


def test_a_deep_attention_stack_is_its_layers_in_turn_and_its_twin_a_map_of_the_mean_token() -> None:
    stack = DeepAttention.of_sizes(4, key_dim=3, value_dim=5, outputs=2, heads=2, scale=0.5, generator=generator())
    first, second = stack.first, stack.second
    assert isinstance(first, MultiHeadAttention)
    assert isinstance(second, MultiHeadAttention)
    X = normal(N, 6, 4)
    hidden = torch.stack([first(X[:, i], X) for i in range(6)], 1)
    assert relative(stack(X), second(hidden[:, -1], hidden)) < 1e-13
    linear = torch.eye(4, dtype=torch.float64)
    for layer in (first, second):
        linear = torch.einsum("hcv,hDv->cD", layer.readout, layer.value) @ linear
    assert relative(stack.twin()(X), X.mean(1) @ linear.T) < 1e-12
    assert stack.twin().first(X, X.unsqueeze(1)).shape == hidden.shape


def test_a_collapsed_stack_equals_the_deep_form_at_the_start_with_balanced_factors() -> None:
    deep_mlp = DeepMLP.of_widths((8, 16, 16, 16, 1), generator=generator(), scale=0.3)
    x = normal(N, 8)
    collapsed = deep_mlp.collapse(16, generator(1))
    assert relative(collapsed(x), deep_mlp.twin()(x)) < 1e-12
    u, v = collapsed.layer.get_parameter("u"), collapsed.layer.get_parameter("v")
    assert u.shape == (16, 8)
    T = v.T @ u
    assert relative(u.T @ u @ u.T @ u, T.T @ T) < 1e-12
    assert relative(v.T @ v @ v.T @ v, T @ T.T) < 1e-12
    assert (u.norm(dim=1) > 0).all()

    attention = DeepAttention.of_sizes(8, key_dim=8, value_dim=8, generator=generator(), scale=0.3)
    X = normal(N, 10, 8)
    assert relative(attention.collapse(8, generator(1))(X.mean(1)), attention.twin()(X)) < 1e-12
    with pytest.raises(ValueError, match=r"width must be at least min\(c, k\) = 3 to hold the map, got 2"):
        balanced_form(normal(3, 4), 2)


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "slope"),
    [
        (torch.tanh, 1.0),
        (F.gelu, 0.5),
        (F.silu, 0.5),
        (F.elu, 1.0),
        (torch.erf, 2 / math.sqrt(math.pi)),
        (torch.square, 0.0),
    ],
)
def test_the_slope_of_an_activation_at_zero_is_exact(activation, slope: float) -> None:
    assert slope_at_zero(activation) == pytest.approx(slope, rel=1e-15)


def test_activations_outside_the_propositions_are_refused_by_the_closed_form() -> None:
    (x,) = VECTORS
    with pytest.raises(ValueError, match=r"activation must be smooth at 0, got one-sided slopes 0 and 1"):
        MLP(D, 4, activation=F.relu).structure(x)
    with pytest.raises(ValueError, match=r"activation must vanish at 0, got 0\.5; forms\.expand handles"):
        MLP(D, 4, activation=torch.sigmoid).structure(x)
    with pytest.raises(ValueError, match="expert must vanish at theta = 0"):
        MixtureOfExperts(D, 3, expert=lambda x, t: torch.cos(t), expert_size=1).structure(x)


def test_sizes_and_fixed_vectors_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"every size must be at least 1, got shape \(0, 5\) for parameter 'u'"):
        MLP(5, 0)
    with pytest.raises(ValueError, match=r"fixed must have shape \(c, D\).*got \(5,\)"):
        QueryKeyAttention(normal(5), 3, key_dim=2)
    with pytest.raises(ValueError, match=r"widths must alternate .* got \(8, 16\)"):
        DeepMLP.of_widths((8, 16))
    with pytest.raises(ValueError, match="expert and expert_size must be given together"):
        MixtureOfExperts(5, 3, expert_size=2)


def test_layers_are_reproducible_and_their_weights_have_the_given_scale() -> None:
    first, second = (MLP(50, 100, generator=generator(3), scale=0.01) for _ in range(2))
    assert torch.equal(first.u, second.u)
    assert first.u.std().item() == pytest.approx(0.01, rel=0.05)
    assert isinstance(first.u, nn.Parameter)
