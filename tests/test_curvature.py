"""Products against dense matrices from central differences of first derivatives, in float64."""

import doctest

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn
from torch.nn import functional as F

from nqflib import curvature as c
from nqflib import geometry, layers
from nqflib.lanczos import lanczos
from nqflib.language_model.optimizer import Adam
from nqflib.language_model.transformer import Architecture, Transformer, flatten
from nqflib.quadrature import gauss

G = torch.Generator
# torch's forward derivative of layer_norm is a scripted function, which it warns about.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def double(*shape, seed=0):
    return torch.randn(shape, generator=G().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """A module around a function of its parameters, each a random tensor."""

    def __init__(self, f, **shapes):
        super().__init__()
        for k, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, nn.Parameter(0.5 * double(*shape, seed=10 + k)))
        self.f = f

    def forward(self, x):
        return self.f(self, x)


def fused_attention(net, x):
    q, k, v = (x @ net.qkv).chunk(3, -1)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0] @ net.out


class Tied(nn.Module):
    """Embedding and unembedding are one parameter; another is never used; LayerNorm has gain and bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, dtype=torch.float64)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(double(*p.shape, seed=20 + k))
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.norm(F.gelu(x.cumsum(1))))


def tokens(*shape, high=7, seed=0):
    return torch.randint(high, shape, generator=G().manual_seed(seed))


def small_transformer(dtype=torch.float64):
    model = Transformer(Architecture(7, 4, 2, 2, 6, 6), generator=G().manual_seed(0), dtype=dtype)
    with torch.no_grad():
        model.unembedding.copy_(double(7, 4, seed=1))
    return model


def vision(layer, *shape, outputs):
    """Two ragged batches of a layer of paper 1 and of squared error."""
    return layer, [(double(n, *shape, seed=n), double(n, outputs, seed=n + 50)) for n in (3, 1)], c.SQUARED_ERROR


def language(model):
    pairs = [(tokens(n, t, seed=n), tokens(n, t, seed=n + 5)) for n, t in ((3, 6), (1, 4))]
    pairs[0][1][1, 3:] = c.IGNORED  # a sequence that is padded
    return model, pairs, c.CROSS_ENTROPY


def wide(f, **shapes):
    pairs = [(double(n, 4, 3, seed=n), double(n, 4, 2, seed=n + 9)) for n in (2, 1)]
    return Net(f, **shapes), pairs, c.SQUARED_ERROR


def cases():
    g = G().manual_seed(1)
    yield "mlp", vision(layers.MLP(3, 4, outputs=2, activation=torch.tanh, scale=0.7, generator=g), 3, outputs=2)
    yield "transformer", language(small_transformer())
    yield "tied, unused, layer norm", language(Tied())
    yield (
        "layer norm",
        wide(
            lambda net, x: F.layer_norm(x @ net.a, (3,), net.gain, net.bias) @ net.b,
            a=(3, 3),
            gain=(3,),
            bias=(3,),
            b=(3, 2),
        ),
    )
    yield "torch's attention", wide(fused_attention, qkv=(3, 9), out=(3, 2))
    for name, activation in {"gelu": F.gelu, "silu": F.silu, "relu squared": lambda x: F.relu(x) ** 2}.items():
        yield name, wide(lambda net, x, act=activation: act(x @ net.a) @ net.b, a=(3, 4), b=(4, 2))
    yield (
        "convolution",
        wide(
            lambda net, x: torch.tanh(F.conv1d(x, net.a, padding=1)).transpose(1, 2).reshape(-1, 4, 3) @ net.b,
            a=(4, 4, 3),
            b=(3, 2),
        ),
    )
    yield (
        "mixture",
        wide(lambda net, x: (x @ net.gate).sigmoid() * torch.sin(x @ net.expert), gate=(3, 2), expert=(3, 2)),
    )


CASES = dict(cases())


def dense(model, batches, loss, frozen=()):
    """G and H by central differences of outputs and of first derivatives, and the mean gradient."""
    params = {n: p.detach().clone() for n, p in model.named_parameters() if n not in frozen}
    rest = {n: p.detach() for n, p in model.named_parameters() if n in frozen}
    sizes = [p.numel() for p in params.values()]
    theta, h = torch.cat([p.flatten() for p in params.values()]), 1e-5

    def outputs(t, x):
        pieces = {n: v.view(p.shape) for (n, p), v in zip(params.items(), t.split(sizes), strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(model, pieces | rest, (x,))

    def loss_of(f, y):
        if loss is c.SQUARED_ERROR:
            return ((f - y) ** 2).sum()
        keep = y != c.IGNORED
        return -f.log_softmax(-1)[keep].gather(1, y[keep][:, None]).sum()

    count = sum(len(x) if loss is c.SQUARED_ERROR else int((y != c.IGNORED).sum()) for x, y in batches)

    def gradient(t):
        t = t.clone().requires_grad_()
        return torch.autograd.grad(sum(loss_of(outputs(t, x), y) for x, y in batches), t)[0] / count

    steps = h * torch.eye(theta.numel(), dtype=torch.float64)
    hessian = torch.stack([(gradient(theta + e) - gradient(theta - e)) / (2 * h) for e in steps])
    gauss_newton = torch.zeros_like(hessian)
    for x, y in batches:
        with torch.no_grad():
            jacobian = torch.stack(
                [((outputs(theta + e, x) - outputs(theta - e, x)) / (2 * h)).flatten() for e in steps]
            )
            f = outputs(theta, x)
        curved = torch.autograd.functional.hessian(lambda f, y=y: loss_of(f, y), f).reshape(f.numel(), f.numel())
        gauss_newton += jacobian @ curved @ jacobian.T / count
    return gauss_newton, hessian, gradient(theta)


@pytest.fixture(scope="module")
def references():
    return {name: dense(*case) for name, case in CASES.items()}


def test_the_example_in_the_module_runs():
    assert doctest.testmod(c).failed == 0
    assert doctest.testmod(geometry).failed == 0


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_matrices_in_every_way_and_plan(name, references):
    model, batches, loss = CASES[name]
    gauss_newton, hessian, gradient = references[name]
    v = double(2, len(gradient), seed=3)
    for way in ("reverse", "forward"):
        for plan in ("retain", "recompute"):
            ours = c.Curvature(model, batches, loss=loss, way=way, plan=plan)
            for _ in range(2):  # from the retained graphs the second time
                for found, matrix in ((ours.gauss_newton(v), gauss_newton), (ours.hessian(v), hessian)):
                    exact = v @ matrix
                    assert (found - exact).norm() < 1e-8 * exact.norm(), (way, plan)
            generic = c.Curvature(
                lambda p, x, m=model: torch.func.functional_call(m, p, (x,)),
                batches,
                loss=loss,
                parameters=dict(model.named_parameters()),
                way=way,
                plan=plan,
            )
            assert not generic.linearizes
            assert (generic.gauss_newton(v) - v @ gauss_newton).norm() < 1e-8 * (v @ gauss_newton).norm()
    torch.testing.assert_close(ours.gradient(), gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.hessian(v[0]), ours.hessian(v)[0], rtol=1e-12, atol=1e-12)


def test_torch_still_gets_layer_norm_wrong_in_the_order_that_is_not_offered(references):
    """When this fails, upstream is fixed and the module's warning can go."""
    model, batches, loss = CASES["layer norm"]
    ours = c.Curvature(model, batches, loss=loss)
    v = double(ours.n, seed=3)
    directions = ours._by_name(v)

    def slope(p):
        total = sum(((torch.func.functional_call(model, p, (x,)) - y) ** 2).sum() for x, y in batches)
        return total / 3

    wrong = torch.func.grad(lambda p: torch.func.jvp(slope, (p,), (directions,))[1])(ours.parameters)
    wrong = torch.cat([g.flatten() for g in wrong.values()])
    exact = references["layer norm"][1] @ v
    assert (wrong - exact).norm() > 0.01 * exact.norm()
    assert (ours.hessian(v) - exact).norm() < 1e-8 * exact.norm()


def test_ragged_batches_weigh_by_their_size():
    model, batches, loss = CASES["transformer"]
    whole = batches[:1]
    split = [(x[None], y[None]) for x, y in zip(*whole[0], strict=True)]
    v = double(c.Curvature(model, whole, loss=loss).n, seed=4)
    for product in ("hessian", "gauss_newton"):
        one, many = (getattr(c.Curvature(model, b, loss=loss), product)(v) for b in (whole, split))
        torch.testing.assert_close(one, many, rtol=1e-11, atol=1e-13)
    assert c.Curvature(model, whole).value() == pytest.approx(c.Curvature(model, split).value(), rel=1e-13)


def test_frozen_parameters_are_left_out_and_stay_fixed(references):
    model, batches, loss = CASES["transformer"]
    frozen = ("embedding", "blocks.0.attention.qkv")
    names = [n for n, _ in model.named_parameters() if n not in frozen]
    ours = c.Curvature(model, batches, loss=loss, names=names)
    v = double(ours.n, seed=5)
    keep = torch.cat([torch.full((p.numel(),), n in names) for n, p in model.named_parameters()])
    for product, matrix in (("gauss_newton", references["transformer"][0]), ("hessian", references["transformer"][1])):
        exact = matrix[keep][:, keep] @ v
        assert (getattr(ours, product)(v) - exact).norm() < 1e-8 * exact.norm()


def test_sums_over_many_micro_batches_do_not_lose_the_last_ones():
    model = nn.Linear(1, 1, bias=False)
    x = [torch.tensor([[4096.0]])] + [torch.tensor([[0.5]])] * 300  # each adds less than half a unit to 2^25
    batches = [(x, torch.zeros(1, 1)) for x in x]
    exact = 2 * (4096.0**2 + 0.25 * 300) / 301
    for sums in ("float64", "compensated"):
        ours = c.Curvature(model, batches, loss=c.SQUARED_ERROR, sums=sums, plan="recompute")
        assert ours.gauss_newton(torch.ones(1)).item() == pytest.approx(exact, rel=2e-7)
    plain = torch.tensor(2 * 4096.0**2)
    for _ in range(300):
        plain += 0.5
    assert abs(plain.item() / 301 / exact - 1) > 1e-6


def test_the_geometries_and_the_cap():
    model = small_transformer()
    adam = Adam.start(model, flatten({n: p.detach() for n, p in model.named_parameters()}))
    nu = double(len(adam.weights), seed=6).square() * 1e-6
    P = geometry.adam_geometry(nu, adam.pre, adam.post)
    embedding = 7 * 4
    np.testing.assert_allclose(P[:embedding], 4 / 64 / (nu[:embedding].sqrt() + 1e-8), rtol=1e-12)
    unembedding = geometry.raw_geometry(adam.pre, adam.post)[embedding : 2 * embedding]
    np.testing.assert_allclose(unembedding, 1 / 4, rtol=1e-12)
    cap, value = geometry.capped(P)
    assert (value < P).double().mean().item() == pytest.approx(0.05, abs=1 / len(P))
    assert cap.max().item() == value
    torch.testing.assert_close(cap[value >= P], P[value >= P])
    root = P.sqrt()
    matrix = double(len(P), len(P), seed=7)
    v = double(2, len(P), seed=8)
    product = geometry.preconditioned(lambda u: u @ (matrix + matrix.T), P)
    torch.testing.assert_close(product(v), v @ (torch.diag(root) @ (matrix + matrix.T) @ torch.diag(root)))


def test_scipy_and_lanczos_agree_on_the_hessians_largest_eigenvalues(references):
    model, batches, loss = CASES["transformer"]
    ours = c.Curvature(model, batches, loss=loss)
    operator = c.as_linear_operator(ours.hessian, ours.n, torch.float64)
    exact = torch.linalg.eigvalsh(references["transformer"][1])
    largest = eigsh(operator, 4, which="LA", return_eigenvectors=False, v0=np.ones(ours.n))
    np.testing.assert_allclose(np.sort(largest), exact[-4:], rtol=1e-7)
    run = lanczos(ours.hessian, double(ours.n, seed=9), 80)
    np.testing.assert_allclose(gauss(run.alphas, run.betas).nodes[-4:], exact[-4:], rtol=1e-7)
    V = double(ours.n, 3, seed=10).numpy()
    np.testing.assert_allclose(operator @ V, references["transformer"][1].numpy() @ V, atol=1e-7)


def test_the_plan_follows_the_memory_and_the_trial_picks_the_faster_way():
    model, batches, loss = CASES["transformer"]
    assert c.Curvature(model, batches, loss=loss).plan == "retain"
    assert c.Curvature(model, batches, loss=loss, memory=1000).plan == "recompute"
    timed = c.Curvature(model, batches, loss=loss, way="timed")
    assert set(timed.trial) == {"reverse", "forward"}
    assert timed.trial[timed.way] == min(timed.trial.values())
    doubled = c.Curvature(model, batches * 2, loss=loss)
    assert doubled.retained_bytes == pytest.approx(2 * timed.retained_bytes, rel=0.01)


def test_a_retained_graph_is_built_once_and_a_recomputed_one_at_every_product():
    calls = []

    def model(p, x):
        calls.append(0)
        return torch.tanh(x @ p["w"])

    batches = [(double(3, 4), double(3, 2))]
    for plan, expected in (("retain", 1), ("recompute", 5)):
        ours = c.Curvature(model, batches, loss=c.SQUARED_ERROR, parameters={"w": double(4, 2)}, plan=plan)
        ours.value()
        ours.hessian(double(3, 8))
        calls.clear()
        for _ in range(5):
            ours.hessian(double(3, 8))  # three vectors share one pass
        assert len(calls) == (0 if plan == "retain" else expected)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("plan", ["retain", "recompute"])
def test_memory_stays_flat_over_50_products_and_no_gradients_are_left_behind(plan):
    model = Transformer(Architecture(64, 32, 2, 2, 64, 32), generator=G().manual_seed(0))
    x = tokens(16, 33, high=64)
    ours = c.Curvature(model, [(x[:, :-1], x[:, 1:])], plan=plan)
    v = torch.ones(ours.n)
    for _ in range(5):
        ours.hessian(v)
    before = resident()
    for _ in range(50):
        ours.hessian(v)
    assert resident() - before < 12 << 20
    assert 50 * ours.retained_bytes > 200 << 20  # what 50 graphs left behind would take
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, b: c.Curvature(m, iter(b)), "batches must give the same pairs at every pass"),
        (lambda m, b: c.Curvature(m, []), "batches must hold at least one pair"),
        (lambda m, b: c.Curvature(m, b, plan="keep"), "plan must be one of auto, retain, recompute"),
        (lambda m, b: c.Curvature(m, b, names=["wieght"]), "names must be among embedding"),
        (lambda m, b: c.Curvature(lambda p, x: x, b), "parameters must be given by name"),
        (lambda m, b: c.Curvature(m, b).hessian(torch.ones(3)), "vectors must have shape"),
        (lambda m, b: c.Curvature(nn.Sequential(m, nn.Dropout()), b), "switch dropout off by .eval"),
        (lambda m, b: c.Curvature(small_transformer().requires_grad_(False), b), "no parameter requires a gradient"),
        (lambda m, b: geometry.capped(torch.ones(3), 1.5), "quantile must lie in"),
        (lambda m, b: geometry.preconditioned(lambda v: v, -torch.ones(3)), "P must be finite and not negative"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    model, batches, _ = CASES["transformer"]
    with pytest.raises(ValueError, match=message):
        call(model, batches)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_products_are_those_of_the_cpu():
    model, batches, loss = CASES["transformer"]
    here = c.Curvature(model, batches, loss=loss)
    there = c.Curvature(small_transformer().cuda(), batches, loss=loss)
    v = double(here.n, seed=11)
    for product in ("hessian", "gauss_newton"):
        torch.testing.assert_close(
            getattr(there, product)(v.cuda()).cpu(), getattr(here, product)(v), rtol=1e-10, atol=1e-12
        )
