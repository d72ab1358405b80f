"""The expansion of a layer: one convention for A and B, found by differentiation, tested against brute force."""

import doctest
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nqflib import forms
from nqflib.forms import AutodiffStructure, QuadraticForm, check, expand
from nqflib.layers import MLP, MultiHeadAttention
from nqflib.structure import DenseStructure, DiagonalPairStructure, PairStructure
from nqflib.units import evaluate, unit_axes_of, unit_matrix, unit_parameters


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    S = normal(*shape, seed=seed)
    return 0.5 * (S + S.mT)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def random_form(n: int = 3, c: int = 2, p: int = 4) -> QuadraticForm:
    return QuadraticForm(
        normal(n, c, seed=1), normal(n, c, p, seed=2), symmetric(n, c, p, p, seed=3), symmetric(n, c, p, p, seed=4)
    )


class TwoBlocks(nn.Module):
    """A layer with weights u (d, k) and v (d, c) given by a function of (u, v, x)."""

    def __init__(
        self, function: Callable[[Tensor, Tensor, Tensor], Tensor], d: int = 6, k: int = 5, c: int = 2
    ) -> None:
        super().__init__()
        self.u = nn.Parameter(normal(d, k, seed=11))
        self.v = nn.Parameter(normal(d, c, seed=12))
        self.function = function
        self.unit_axes = {"u": 0, "v": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.u, self.v, x)


class Polynomial(nn.Module):
    """f of equation 20 with a cubic term on top, on given coefficients; x is the index of the sample."""

    def __init__(self, form: QuadraticForm, d: int) -> None:
        super().__init__()
        self.form = form
        self.W = nn.Parameter(normal(form.p, d, seed=13))
        self.unit_axes = {"W": 1}

    def forward(self, x: Tensor) -> Tensor:
        assert self.form.g is not None
        assert self.form.B is not None
        mu, M = self.W.sum(1), self.W @ self.W.T
        f = self.form.f0 + self.form.g @ mu + torch.einsum("ncij,i,j->nc", self.form.B, mu, mu)
        f = f + torch.einsum("ncij,ij->nc", self.form.A, M) + (self.W**3).sum() + mu.sum() ** 3
        return f[x]


# --- the form and its convention -------------------------------------------------------------------------


def test_the_form_is_equation_20_and_its_A_is_that_of_theorem_12_minus_B() -> None:
    form, W = random_form(), normal(4, 5, seed=7)
    assert form.g is not None
    assert form.B is not None
    columns = W.unbind(1)
    for n in range(form.n):
        for c in range(form.c):
            A12 = form.A[n, c] + form.B[n, c]
            theorem_12 = form.f0[n, c] + sum(form.g[n, c] @ w for w in columns) + sum(w @ A12 @ w for w in columns)
            for i, w in enumerate(columns):
                for j, other in enumerate(columns):
                    if i != j:
                        theorem_12 = theorem_12 + w @ form.B[n, c] @ other
            assert form(W)[n, c].item() == pytest.approx(float(theorem_12), rel=1e-12)


def test_the_form_depends_on_the_weights_only_through_their_two_moments() -> None:
    form, W = random_form(), normal(4, 6, seed=7)
    assert relative(form.from_moments(W @ W.T, W.sum(1)), form(W)) < 1e-14
    # A rotation of the units that keeps the vector 1 keeps M and mu.
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(6, 1, dtype=W.dtype), normal(6, 5, seed=8)], 1))
    inner, _ = torch.linalg.qr(normal(5, 5, seed=9))
    rotation = basis @ torch.block_diag(torch.ones(1, 1, dtype=W.dtype), inner) @ basis.T
    assert relative(form(W @ rotation), form(W)) < 1e-12
    assert relative(form(W @ torch.linalg.qr(normal(6, 6, seed=10))[0]), form(W)) > 1e-2  # but not any rotation


def test_samples_of_a_form_can_be_selected_for_a_minibatch() -> None:
    form, W = random_form(), normal(4, 5, seed=7)
    assert torch.equal(form[[2, 0]](W), form(W)[[2, 0]])
    without = QuadraticForm(form.f0, None, form.A)
    assert torch.equal(without[1:](W), without(W)[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f0": normal(3)}, r"f0 must have shape \(n, c\), got \(3,\)"),
        ({"A": normal(3, 2, 4, 5)}, r"A must have shape \(n, c, p, p\) = \(3, 2, p, p\), got \(3, 2, 4, 5\)"),
        ({"A": normal(2, 2, 4, 4)}, "A must have shape"),
        ({"g": normal(3, 2, 5)}, r"g must have shape \(n, c, p\) = \(3, 2, 4\), got \(3, 2, 5\)"),
        ({"B": symmetric(3, 2, 5, 5)}, "B must have shape"),
        ({"A": normal(3, 2, 4, 4)}, r"A must be symmetric in its last two axes; max \|A - A\^T\| ="),
        ({"B": normal(3, 2, 4, 4)}, "B must be symmetric"),
        ({"A": torch.full((3, 2, 4, 4), math.nan, dtype=torch.float64)}, "A must be symmetric"),
        ({"g": normal(3, 2, 4).float()}, "g must have the dtype of f0"),
    ],
)
def test_a_malformed_form_is_refused_with_the_field_and_what_is_valid(change: dict, message: str) -> None:
    form = random_form()
    fields = {"f0": form.f0, "g": form.g, "A": form.A, "B": form.B} | change
    with pytest.raises(ValueError, match=message):
        QuadraticForm(**fields)


def test_weights_and_moments_of_another_size_are_refused() -> None:
    form = random_form()
    with pytest.raises(ValueError, match=r"W must have shape \(p, d\) = \(4, d\), got \(5, 3\)"):
        form(normal(5, 3))
    with pytest.raises(ValueError, match=r"M must have shape \(p, p\) = \(4, 4\), got \(5, 5\)"):
        form.from_moments(normal(5, 5), normal(4))
    with pytest.raises(ValueError, match=r"mu must have shape \(p,\) = \(4,\), got \(1, 4\)"):
        form.from_moments(normal(4, 4), normal(1, 4))


# --- where the units are ---------------------------------------------------------------------------------


def test_unit_i_stacks_slice_i_of_every_parameter_row_major_in_the_order_of_the_map() -> None:
    module = nn.ParameterDict({"late": nn.Parameter(normal(3, 2, 4)), "early": nn.Parameter(normal(4, 2, seed=1))})
    axes = {"early": 0, "late": -1}
    W = unit_matrix(module, axes)
    assert W.shape == (2 + 6, 4)
    for i in range(4):
        assert torch.equal(W[:, i], torch.cat([module["early"][i], module["late"][:, :, i].flatten()]))
    back = unit_parameters(module, W, axes)
    assert torch.equal(back["late"], module["late"])
    assert torch.equal(back["early"], module["early"])


def test_a_layer_without_exchangeable_units_is_one_unit() -> None:
    module = nn.ParameterDict({"a": nn.Parameter(normal(3)), "b": nn.Parameter(normal(2, 2))})
    W = unit_matrix(module, {"a": None, "b": None})
    assert W.shape == (7, 1)
    assert torch.equal(unit_parameters(module, W, {"a": None, "b": None})["b"], module["b"])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (None, "unit_axes is required"),
        ({"w": 0}, "unit_axes names 'w', which is not one of the parameters"),
        ({"weight": 2}, r"unit_axes\['weight'\] = 2 is not an axis of a parameter of shape \(3, 5\)"),
        ({"weight": 1, "bias": 0}, r"disagree about the number of units: \{'weight': 5, 'bias': 3\}"),
        ({"weight": 0, "bias": None}, "must be None for every parameter or for none"),
    ],
)
def test_a_wrong_unit_axis_is_refused(axes: dict | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unit_axes_of(nn.Linear(5, 3), axes)


def test_weights_with_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"W must have p = 7 rows.*got \(8, 6\)"):
        evaluate(TwoBlocks(lambda u, v, x: x @ u.T @ v), normal(8, 6), normal(3, 5))


# --- the expansion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 5])
def test_expand_finds_the_coefficients_of_a_polynomial(d: int) -> None:
    form = random_form()
    found = expand(Polynomial(form, d), torch.arange(3))
    assert found.g is not None
    assert found.B is not None
    assert form.g is not None
    assert form.B is not None
    for got, expected in ((found.f0, form.f0), (found.g, form.g), (found.A, form.A), (found.B, form.B)):
        assert relative(got, expected) < 1e-12


def test_with_one_unit_the_whole_hessian_is_A() -> None:
    form = random_form()
    found = expand(Polynomial(form, 1), torch.arange(3))
    assert form.B is not None
    assert found.B is None
    assert relative(found.A, form.A + form.B) < 1e-12


def test_expand_agrees_with_the_full_hessian_by_reverse_differentiation_twice() -> None:
    """A layer with a gradient at zero and coupled units: a softmax over experts with a sigmoid inside."""
    module = TwoBlocks(lambda u, v, x: (x @ u.T).softmax(-1) @ torch.sigmoid(v) + torch.tanh(x @ u.T) @ v, d=4)
    x = normal(3, 5, seed=5)
    found = expand(module, x)
    assert found.g is not None
    assert found.B is not None
    p = found.p
    for n in range(3):
        for c in range(2):

            def output(flat: Tensor, n: int = n, c: int = c) -> Tensor:
                return evaluate(module, flat.reshape(p, 4), x[n : n + 1])[0, c]

            zero = torch.zeros(4 * p, dtype=torch.float64)
            hessian = torch.as_tensor(torch.autograd.functional.hessian(output, zero)).reshape(p, 4, p, 4)
            start = zero.clone().requires_grad_()
            gradient = torch.autograd.grad(output(start), start)[0].reshape(p, 4)
            assert (found.g[n, c] - gradient[:, 2]).abs().max() < 1e-14
            assert (found.B[n, c] - 0.5 * hessian[:, 1, :, 3]).abs().max() < 1e-14
            assert (found.A[n, c] + found.B[n, c] - 0.5 * hessian[:, 2, :, 2]).abs().max() < 1e-14


def test_the_number_of_derivatives_does_not_grow_with_the_width() -> None:
    calls = []
    for d in (3, 300):
        count = 0

        def function(u: Tensor, v: Tensor, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return torch.tanh(x @ u.T) @ v

        expand(TwoBlocks(function, d=d), normal(2, 5))
        calls.append(count)
    assert calls[0] == calls[1]


def test_a_module_with_one_output_may_return_a_vector() -> None:
    matrix = expand(TwoBlocks(lambda u, v, x: torch.tanh(x @ u.T) @ v, c=1), normal(3, 5))
    vector = expand(TwoBlocks(lambda u, v, x: (torch.tanh(x @ u.T) @ v)[:, 0], c=1), normal(3, 5))
    assert torch.equal(matrix.A, vector.A)
    with pytest.raises(ValueError, match=r"must return \(n,\) or \(n, c\) for n = 3 samples, got \(\)"):
        evaluate(TwoBlocks(lambda u, v, x: (x @ u.T @ v).sum()), normal(7, 6), normal(3, 5))


def test_parameters_that_are_not_units_are_constants_of_the_expansion() -> None:
    module = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)).double()
    form = expand(module, normal(3, 5), unit_axes={"0.weight": 0, "2.weight": 1})
    assert torch.equal(form.f0, module.get_parameter("2.bias").detach().expand(3, 2))
    assert not form.A.requires_grad
    assert form.g is None


def test_units_that_are_not_exchangeable_are_refused() -> None:
    fixed = normal(6, 6, seed=3)
    with pytest.raises(ValueError, match="not exchangeable"):
        expand(TwoBlocks(lambda u, v, x: torch.tanh(x @ u.T) @ fixed @ v), normal(3, 5))


def test_a_gradient_that_is_not_finite_at_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient of the module at W = 0 is not finite"):
        expand(TwoBlocks(lambda u, v, x: (x @ u.T).norm(dim=1, keepdim=True).sqrt() + 0 * v.sum()), normal(3, 5))


# --- structure operators ---------------------------------------------------------------------------------


def pair() -> PairStructure:
    return PairStructure(normal(3, 1, 4), normal(3, 2, 3, seed=1), start_a=2, start_b=11, copies=2, size=18)


@pytest.mark.parametrize(
    "structure",
    [pair(), DiagonalPairStructure(normal(3, 2, 9)), DenseStructure(symmetric(3, 2, 18, 18))],
    ids=["pair", "diagonal pair", "dense"],
)
def test_products_traces_and_dense_matrices_of_a_structure_agree(structure) -> None:
    dense, W = structure.dense(), normal(18, 5, seed=4)
    assert torch.equal(dense, dense.mT)
    assert relative(structure.matvec(W), dense @ W) < 1e-14
    assert relative(structure.quadratic(W), torch.einsum("ncij,ij->nc", dense, W @ W.T)) < 1e-13


def test_a_pair_structure_is_the_kronecker_block_of_its_factors() -> None:
    structure = pair()
    expected = torch.zeros(3, 2, 18, 18, dtype=torch.float64)
    for n in range(3):
        for c in range(2):
            C = torch.kron(torch.outer(structure.a[n, 0], structure.b[n, c]), torch.eye(2, dtype=torch.float64))
            expected[n, c, 2:10, 11:17] = 0.5 * C
            expected[n, c, 11:17, 2:10] = 0.5 * C.T
    assert torch.equal(structure.dense(), expected)


def test_blocks_that_overlap_or_stick_out_and_matrices_that_are_not_symmetric_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks 0:4 and 3:5 must be disjoint within 0:6"):
        PairStructure(normal(1, 4), normal(1, 2), 0, 3, 1, 6)
    with pytest.raises(ValueError, match="blocks 0:4 and 5:7 must be disjoint within 0:6"):
        PairStructure(normal(1, 4), normal(1, 2), 0, 5, 1, 6)
    with pytest.raises(ValueError, match="A must be symmetric"):
        DenseStructure(normal(2, 4, 4))
    with pytest.raises(ValueError, match=r"W must have shape \(p, columns\) = \(18, columns\), got \(17, 2\)"):
        pair().quadratic(normal(17, 2))


def test_products_by_differentiation_agree_with_the_dense_expansion() -> None:
    module = TwoBlocks(lambda u, v, x: (x @ u.T).softmax(-1) @ v + torch.tanh(x @ u.T) @ v)  # B is not zero
    x, W = normal(3, 5), normal(7, 6, seed=2)
    operator, form = AutodiffStructure(module, x), expand(module, x)
    assert form.B is not None
    assert relative(operator.matvec(W), form.A @ W) < 1e-13
    assert relative(operator.dense(), form.A) < 1e-13


def test_a_head_with_thousands_of_parameters_is_applied_without_its_matrix() -> None:
    layer = MultiHeadAttention(40, 2, key_dim=20, value_dim=40)
    x = (normal(2, 40), normal(2, 5, 40, seed=1))
    operator, v = AutodiffStructure(layer, x), normal(3240, 1, seed=2)
    assert operator.p == 3240
    largest = 0

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            largest = max(largest, result.numel() if isinstance(result, Tensor) else 0)
            return result

    with Largest():
        closed = layer.structure(*x).matvec(v)
        automatic = operator.matvec(v)
    assert 3240 < largest < 3240**2 / 10
    assert relative(automatic, closed) < 1e-12


# --- the hypotheses --------------------------------------------------------------------------------------


def mlp(activation: Callable[[Tensor], Tensor]) -> TwoBlocks:
    return TwoBlocks(lambda u, v, x: activation(x @ u.T) @ v)


X = normal(5, 5, seed=21)
FIXED = normal(6, seed=22)
GOOD = {
    "tanh": (mlp(torch.tanh), 4),
    "GELU": (mlp(F.gelu), 3),
    "SiLU": (mlp(F.silu), 3),
    "linear": (mlp(lambda z: z), math.inf),
    "a smooth function of the sum over units": (
        TwoBlocks(lambda u, v, x: torch.tanh(torch.tanh(x @ u.T) @ v + 0.3)),
        4,
    ),
}
NO_ZGZ = {
    "sigmoid": (mlp(torch.sigmoid), 4),
    "softplus": (mlp(F.softplus), 3),
    "softmax gate over linear experts": (TwoBlocks(lambda u, v, x: (x @ u.T).softmax(-1) @ v), 3),
}
KINKS = {
    "ReLU": (mlp(F.relu), 2),
    "leaky ReLU": (mlp(F.leaky_relu), 2),
    "maximum over patches": (
        TwoBlocks(lambda u, v, x: torch.maximum(torch.tanh(x @ u.T), torch.tanh(x.flip(1) @ u.T)) @ v),
        2,
    ),
    "normalised pre-activations": (
        TwoBlocks(lambda u, v, x: torch.tanh(F.layer_norm(x @ u.T, (6,), eps=1e-30)) @ v),
        1,
    ),
}


def report(module: nn.Module):
    return check(module, X, draws=2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", GOOD)
def test_a_smooth_layer_without_biases_meets_every_hypothesis(name: str) -> None:
    module, order = GOOD[name]
    found = report(module)
    assert found.failures == ()
    assert found.order == order if order == math.inf else abs(found.order - order) < 0.1
    assert found.order_error < 0.05
    assert not found.empty


@pytest.mark.parametrize("name", NO_ZGZ)
def test_a_gradient_at_zero_is_reported_and_its_form_still_has_order_three(name: str) -> None:
    module, order = NO_ZGZ[name]
    found = report(module)
    assert len(found.failures) == 1
    assert "zero gradient at zero fails" in found.failures[0]
    assert found.zero_gradient_error > 0.1
    assert abs(found.order - order) < 0.1


@pytest.mark.parametrize("name", KINKS)
def test_a_kink_is_reported_with_the_derivative_that_jumps_and_spoils_the_remainder(name: str) -> None:
    module, kink = KINKS[name]
    found = report(module)
    assert found.kink == kink
    assert any(f"smoothness fails: derivatives of order {kink}" in failure for failure in found.failures)
    assert found.order == pytest.approx(2, abs=0.1)
    assert any("remainder is of order" in failure for failure in found.failures)


def test_a_jump_of_the_third_derivative_breaks_the_hypothesis_but_not_the_form() -> None:
    found = report(mlp(F.elu))
    assert found.kink == 3
    assert found.order == pytest.approx(3, abs=0.1)
    assert len(found.failures) == 1


def test_an_even_kink_that_no_ray_sees_shows_in_the_remainder() -> None:
    found = report(TwoBlocks(lambda u, v, x: (x @ u.T).abs() @ v.abs()))
    assert found.kink is None
    assert found.failures == ("the remainder is of order 2.00, not 3 or more",)


def test_units_with_fixed_unequal_readouts_are_reported_as_not_exchangeable() -> None:
    found = report(TwoBlocks(lambda u, v, x: (torch.tanh(x @ u.T) * FIXED) @ v))
    assert found.exchange_error > 0.1
    assert "exchangeability fails" in found.failures[0]
    assert "exchangeability fails" in str(found)


def test_a_gated_unit_meets_the_hypotheses_with_an_empty_form() -> None:
    found = report(TwoBlocks(lambda u, v, x: (F.silu(x @ u.T) * (x @ u.T)) @ v))
    assert found.failures == ()
    assert found.empty
    assert "the form is empty" in str(found)
    assert found.order == pytest.approx(3, abs=0.1)


def test_a_layer_without_a_value_at_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="module is not finite at W = 0"):
        report(TwoBlocks(lambda u, v, x: F.normalize(x @ u.T, eps=0.0) @ v))


def test_the_hypotheses_cannot_be_tested_in_single_precision() -> None:
    with pytest.raises(ValueError, match=r"module must be in float64 for this test, its units are torch\.float32"):
        check(MLP(5, 3).float(), X.float())


def test_the_example_in_the_documentation_holds() -> None:
    found = doctest.testmod(forms)
    assert found.attempted > 0
    assert found.failed == 0
