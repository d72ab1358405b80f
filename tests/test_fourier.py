import numpy as np
import pytest
import torch

from nqflib import lotka_volterra as lv
from nqflib.fourier import FourierTask, log_spaced_steps, train, train_raw
from nqflib.layers import FourierMLP, QuadraticTwin

THETAS = [0.0, 0.5, 1.0]


@pytest.fixture(autouse=True)
def quiet_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("NQF_PROGRESS", str(tmp_path / "progress"))


def task(**changes):
    return FourierTask(
        **{"thetas": np.array(THETAS), "beta": 1.5, "modes": 6, "samples": 32, "prefactor": 0.7} | changes
    )


def random_start(fourier, scale, seed=0):
    return scale * np.random.default_rng(seed).standard_normal((2, *fourier.gains.shape))


def descend(module, fourier, learning_rate, steps):
    """Losses and coefficients <f, psi_k> by automatic differentiation on the whole grid, before each step."""
    x, y = map(torch.from_numpy, fourier.points())
    k = torch.arange(1, fourier.modes + 1, dtype=torch.float64)
    psi = 2**0.5 * torch.cos(2 * torch.pi * k * x[:, None])
    optimizer = torch.optim.SGD(module.parameters(), learning_rate)
    losses, coefficients = [], []
    for _ in range(steps):
        f = module(x).squeeze(-1)
        loss = ((f - y) ** 2).mean()
        losses.append(loss.item())
        coefficients.append((psi.T @ f.detach() / len(x)).numpy())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array(losses), np.array(coefficients)


@pytest.mark.parametrize("quadratic", [False, True])
def test_training_is_automatic_differentiation_of_the_layer_on_the_whole_grid(quadratic):
    fourier = task()
    a, W = random_start(fourier, 0.8)
    run = train(fourier, a, W, 0.1, np.arange(30), quadratic=quadratic)
    for r, theta in enumerate(THETAS):
        layer = FourierMLP(fourier.modes, theta, prefactor=fourier.prefactor)
        with torch.no_grad():
            layer.a.copy_(torch.from_numpy(a[r]))
            layer.W.copy_(torch.from_numpy(W[r]))
        losses, coefficients = descend(QuadraticTwin(layer) if quadratic else layer, fourier, 0.1, 30)
        np.testing.assert_allclose(run.loss[:, r], losses, rtol=1e-12)
        np.testing.assert_allclose(run.coefficients[:, r], coefficients, atol=1e-13)


class RawNetwork(torch.nn.Module):
    def __init__(self, width, scale, rng, biases):
        super().__init__()
        uc, v = scale * rng.standard_normal((width, 2)), scale * rng.standard_normal(width)
        c, b = (uc[:, 1], scale * rng.standard_normal()) if biases else (np.zeros(width), 0.0)
        for name, value in {"u": uc[:, 0], "v": v, "c": c, "b": b}.items():
            weight = torch.tensor(value, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=biases or name in "uv"))

    def forward(self, x):
        return torch.tanh(x[:, None] * self.u + self.c) @ self.v[:, None] + self.b


@pytest.mark.parametrize("biases", [True, False])
def test_the_raw_network_trains_as_by_automatic_differentiation(biases):
    fourier = task(thetas=[0.0])
    ours = train_raw(
        fourier, 7, 0.9, 0.05, np.arange(60), np.random.default_rng(3), biases=biases, precision=np.float64
    )
    theirs, _ = descend(RawNetwork(7, 0.9, np.random.default_rng(3), biases), fourier, 0.05, 60)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    single = train_raw(fourier, 7, 0.9, 0.05, np.arange(60), np.random.default_rng(3), biases=biases)
    np.testing.assert_allclose(single, theirs, rtol=1e-5)


def test_the_quadratic_form_approaches_corollary_4_in_proportion_to_the_step():
    fourier = task(prefactor=1.0)

    def distance(learning_rate):
        records = np.round(np.linspace(0, 40, 60) / learning_rate)
        run = train(fourier, 1e-3, 1e-3, learning_rate, records, quadratic=True)
        return np.abs(run.loss - fourier.closed_form_loss(1e-6, learning_rate * records)).max()

    coarse, fine = distance(0.01), distance(0.005)
    assert fine < 0.02
    assert coarse / fine == pytest.approx(2, rel=0.1)


def test_a_start_that_is_not_balanced_grows_from_the_square_of_its_mean():
    fourier = task(prefactor=1.0)
    a, W = random_start(fourier, 1e-4, seed=5)
    records = np.arange(0, 8001, 400)
    run = train(fourier, a, W, 0.005, records, quadratic=True)
    theory = fourier.closed_form_loss((a + W) ** 2 / 4, 0.005 * records)
    assert np.abs(run.loss - theory).max() < 0.03  # the step's share, as in the test above
    assert np.abs(run.loss - fourier.closed_form_loss(1e-8, 0.005 * records)).max() > 0.1


def test_the_closed_form_is_theorem_6_with_the_abundances_of_the_growing_half():
    fourier, t = task(), np.linspace(0, 50, 9)
    for r, gains in enumerate(fourier.gains):
        rates, competition = 4 * fourier.strengths[r], 2 * gains**2  # lambda = s s_k psi_k / 2, z = 2 rho
        z = lv.orthogonal_features(rates, competition, 2e-4, t)
        loss = lv.excess_loss(rates, competition, z)
        np.testing.assert_allclose(fourier.closed_form_loss(1e-4, t)[:, r], loss, rtol=1e-12)


def test_the_exponent_is_that_of_infinitely_many_modes_from_vanishing_weights():
    fourier = task(modes=4096, samples=8196, prefactor=1.0)
    ends = (1 / (4 * fourier.strengths))[:, [49, 399]]
    for r, (begin, end) in enumerate(ends):
        logarithm = 700  # ln(1/rho(0)), about the largest that double precision allows
        t = np.array([begin, end]) * logarithm
        loss = fourier.closed_form_loss(np.exp(-logarithm), t)[:, r]
        measured = -np.log(loss[1] / loss[0]) / np.log(t[1] / t[0])
        assert measured == pytest.approx(fourier.exponents[r], rel=0.02)


def test_just_below_the_largest_learning_rate_the_quadratic_form_settles():
    fourier = task(thetas=[0.5], modes=2)
    bound = 0.5 / fourier.strengths.max()
    run = train(fourier, 0.01, 0.01, 0.95 * bound, [0, 500], quadratic=True)
    assert run.loss[-1, 0] < 1e-10
    with pytest.raises(ValueError, match=r"learning_rate must lie between 0 and .* = 0.714"):
        train(fourier, 0.01, 0.01, 1.01 * bound, [0, 1])


def test_training_leaves_the_given_weights_alone():
    fourier = task(modes=2)
    a = np.full(fourier.gains.shape, 0.1)
    train(fourier, a, a, 0.1, [0, 5])
    assert (a == 0.1).all()


def test_log_spaced_steps_begin_with_the_start_and_every_early_step():
    steps = log_spaced_steps(30_000, 400)
    assert steps[:10].tolist() == list(range(10))
    assert steps[-1] == 30_000
    assert np.abs(np.diff(np.log(steps[steps > 1000])) - np.log(30_000) / 399).max() < 2e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": 7}, "modes must be even"),
        ({"samples": 34}, "multiple of 4"),
        ({"samples": 12}, "more than 2 \\* modes = 12"),
        ({"prefactor": 0.0}, "prefactor must be positive"),
        ({"thetas": [np.nan]}, "thetas must be finite"),
    ],
)
def test_tasks_without_orthogonal_modes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        task(**changes)


def test_a_raw_network_that_diverges_says_so():
    with np.errstate(all="ignore"), pytest.raises(RuntimeError, match="smaller learning rate"):
        train_raw(task(thetas=[0.0]), 50, 1.0, 1e30, [0, 100], np.random.default_rng(0))
