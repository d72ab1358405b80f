"""Traps of curvature spectra that users of other tools fell into: wrong numbers without a word, above all."""

import numpy as np
import pytest
import torch
from scipy.fft import dct
from test_lanczos import N, known_spectrum, localised, spread_out, start
from torch import nn

from nqflib.curvature import SQUARED_ERROR, Curvature
from nqflib.lanczos import Stop, lanczos, random_starts
from nqflib.quadrature import gauss

# torch's forward derivative has a scripted function in it, which it warns about.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def pairs(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (3, 2)) for n in sizes]


# --------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_no_grad_around_an_evaluation_does_not_turn_products_into_zeros(way):
    """'element 0 of tensors does not require grad', or no error and a zero Hessian."""
    ours = [Curvature(network(), pairs(5), loss=SQUARED_ERROR, way=way) for _ in range(2)]
    v = torch.ones(ours[0].n, dtype=torch.float64)
    names = ("hessian", "gauss_newton")
    expected = [ours[0].gradient(), *(getattr(ours[0], name)(v) for name in names)]
    with torch.no_grad():
        found = [ours[1].gradient(), *(getattr(ours[1], name)(v) for name in names)]
    assert all(x.abs().max() > 0.1 for x in expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ours[1].hessian(v)


def test_batches_that_change_from_pass_to_pass_are_refused():
    """'The eigenvalue changes with the number of iterations': every product saw another minibatch."""
    x, y = pairs(12)[0]
    kinds = {"shuffle": True, "batch_size": 4}, {"shuffle": False, "batch_size": 4}
    data = torch.utils.data.TensorDataset(x, y)
    shuffled, fixed = (torch.utils.data.DataLoader(data, **kind) for kind in kinds)
    with pytest.raises(ValueError, match="batches must give the same pairs at every pass; shuffling or augmentation"):
        Curvature(network(), shuffled, loss=SQUARED_ERROR)
    ours = Curvature(network(), fixed, loss=SQUARED_ERROR, plan="recompute")
    v = torch.ones(ours.n, dtype=torch.float64)
    assert torch.equal(ours.hessian(v), ours.hessian(v))


def test_weights_that_move_under_a_retained_graph_are_noticed():
    """A spectrum of weights that are no longer there, since the graph was kept while training went on."""
    model = network()
    ours = Curvature(model, pairs(5), loss=SQUARED_ERROR, plan="retain")
    v = torch.ones(ours.n, dtype=torch.float64)
    ours.hessian(v)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours.hessian(v)


# -------------------------------------------------------------------------------------- iteration


@pytest.mark.parametrize("method", ["delayed", "twice"])
def test_the_loop_asks_for_no_number_between_two_looks_at_the_flags(method, monkeypatch):
    """'.item() for alpha and beta in every step costs 60 % on a GPU'."""
    asked, seen = [], []
    for name in ("item", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "tolist"):
        original = getattr(torch.Tensor, name)

        def counting(self, *rest, _original=original, **options):
            asked.append(0)
            return _original(self, *rest, **options)

        monkeypatch.setattr(torch.Tensor, name, counting)
    eigenvalues = known_spectrum(500)

    def operator(v):
        seen.append(len(asked))
        return eigenvalues * v

    lanczos(operator, start(500), 31, method=method, fetch_every=32)
    assert asked  # at the end
    assert seen[0] == seen[-1]


@pytest.mark.parametrize("method", ["delayed", "twice"])
def test_a_small_beta_in_float32_is_not_taken_for_a_breakdown(method):
    """A threshold of sqrt(eps) ends runs that have much to say, or replaces good vectors by random ones."""
    eigenvalues = 0.6 ** torch.arange(400.0)
    run = lanczos(lambda v: eigenvalues * v, start(400, torch.float32), 60, method=method)
    assert run.stop is Stop.INVARIANT
    assert run.betas[:-1].min() < 1e-4 < torch.finfo(torch.float32).eps ** 0.5  # of ||A|| = 1
    assert run.basis.gram_error(run.alphas.size) < 2e-6
    np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes[:-16:-1], eigenvalues[:15], atol=3e-7)


@pytest.mark.parametrize("depth", [20, 60, 120])
def test_a_multiple_eigenvalue_has_the_weight_of_its_eigenspace_and_never_more_copies_than_it_has(depth):
    """Copies that come and go with the number of pairs asked for: rounding brings the further ones in."""
    eigenvalues = torch.linspace(-1, 1, 300, dtype=torch.float64)
    eigenvalues[-3:] = 4
    v = start(300)
    run = lanczos(lambda q: eigenvalues * q, v, depth)
    rule = gauss(run.alphas, run.betas)
    top = rule.nodes > 3
    assert top.sum() == 1 if depth == 20 else 1 <= top.sum() <= 3
    np.testing.assert_allclose(rule.nodes[top], 4, rtol=1e-13)
    mass = v[-3:].square().sum() / v.square().sum()
    assert rule.weights[top].sum() == pytest.approx(mass.item(), rel=1e-12)


def test_a_long_localised_spectrum_stays_orthogonal_in_float32():
    """Norms and projections summed in float32 lose digits with the length of the vectors."""
    n = 200_000
    run = lanczos(localised(torch.float32, n), start(n, torch.float32), 40)
    assert run.basis.gram_error(40) < 1.5e-5  # 1e-4 with sums over whole rows
    rule, true = gauss(run.alphas, run.betas), known_spectrum(n).numpy()
    assert np.abs(rule.nodes[:-6:-1] - np.sort(true)[:-6:-1]).max() < 1e-6 * true.max()


@pytest.mark.parametrize("format", [torch.float16, torch.bfloat16])
def test_rounding_the_basis_leaves_an_effective_dimension_alone(format):
    """sum_i (q_i . v)^2 lambda^2 / (lambda^2 + s^2) is half off if the operator is given the rounded vector."""
    exact = np.square(known_spectrum().numpy())
    signs = torch.randn(N, generator=torch.Generator().manual_seed(0)).sign().double()
    v = start(dtype=torch.float32)
    mass = dct((signs * v.double()).numpy(), norm="ortho") ** 2
    run = lanczos(spread_out(torch.float32), v, 150, basis_dtype=format)
    rule = gauss(run.alphas, run.betas)
    for small in (1e-1, 1e-2, 1e-3):
        truth = np.sum(mass / mass.sum() * exact / (exact + small**2))
        found = np.sum(rule.weights * rule.nodes**2 / (rule.nodes**2 + small**2))
        assert found == pytest.approx(truth, rel=1e-3)


def test_starts_are_left_as_they_were():
    """A start that the tool normalises in place, so that the next run is of another vector."""
    v = random_starts(1, 50, torch.Generator().manual_seed(0))[0]
    before = v.clone()
    lanczos(lambda q: q.mul(2), v, 5)
    assert torch.equal(v, before)
