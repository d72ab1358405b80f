"""The mean-square edge: the whole recursion as one matrix, known limits, and runs of noisy regression."""

import math

import numpy as np
import pytest

from nqflib import stability

FLAT, DECAYING = np.ones(50), 1 / np.arange(1, 51)


def whole_recursion(rate, lam, batch, momentum):
    """The recursion of E[w w^T], E[w m^T], E[m m^T] on all modes, as one matrix, from Wick's theorem for the features.

    Built by applying one step to every basis element of the symmetric second moments, diagonal in the modes.
    """
    n, b, a = len(lam), momentum, 1 - momentum
    columns = []
    for e in np.eye(3 * n):
        ww, wm, mm = e.reshape(3, n)
        gg = lam**2 * ww + (lam**2 * ww + lam * np.sum(lam * ww)) / batch  # E[g^2], fourth moments of Gaussian features
        new_mm = b * b * mm + 2 * a * b * lam * wm + a * a * gg
        w_new_m = b * wm + a * lam * ww
        columns.append(np.concatenate([ww - 2 * rate * w_new_m + rate**2 * new_mm, w_new_m - rate * new_mm, new_mm]))
    return np.array(columns).T


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize("lam", [FLAT[:12], DECAYING[:12]], ids=["flat", "decaying"])
def test_at_the_edge_the_whole_recursion_has_spectral_radius_one(lam, batch, momentum):
    rate = stability.edge(lam, batch, momentum=momentum)
    radius = lambda factor: np.abs(np.linalg.eigvals(whole_recursion(factor * rate, lam, batch, momentum))).max()  # noqa: E731
    assert radius(1) == pytest.approx(1, abs=1e-9)
    assert radius(0.95) < 1 - 1e-4
    assert radius(1.05) > 1 + 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 64, 1e6, math.inf])
@pytest.mark.parametrize("lam", [FLAT[:12], DECAYING[:12], [1.0]], ids=["flat", "decaying", "one"])
def test_growth_is_the_logarithm_of_the_whole_recursions_spectral_radius(lam, batch, momentum):
    lam = np.array(lam)
    edge = stability.edge(lam, min(batch, 1e12), momentum=momentum)
    for factor in (0.01, 0.3, 0.99, 1.3, 5.0):
        radius = np.abs(np.linalg.eigvals(whole_recursion(factor * edge, lam, batch, momentum))).max()
        found = stability.growth(factor * edge, lam, batch, momentum=momentum)
        assert found == pytest.approx(math.log(radius), abs=1e-10)
        assert (found > 0) == (factor > 1)
    assert stability.growth(edge, lam, min(batch, 1e12), momentum=momentum) == pytest.approx(0, abs=1e-10)


def test_growth_of_repeated_modes_is_counted_and_modes_without_curvature_are_left_out():
    counted = stability.growth(0.3, [1.0, 0.2, 0.0], 3, momentum=0.9, multiplicity=[2, 7, 5])
    repeated = stability.growth(0.3, np.repeat([1.0, 0.2], [2, 7]), 3, momentum=0.9)
    assert counted == pytest.approx(repeated, rel=1e-10)
    one_mode = stability.growth(0.5, [1.0], 2)  # (1 - eta)^2 + 2 eta^2 / B, from E[x^4] = 3
    assert one_mode == pytest.approx(math.log(0.5**2 + 2 * 0.5**2 / 2), abs=1e-12)
    with pytest.raises(ValueError, match="positive entry"):
        stability.growth(0.3, [0.0], 3)


@pytest.mark.parametrize(("factor", "momentum"), [(0.5, 0.0), (1.2, 0.0), (0.5, 0.9), (1.5, 0.9)])
def test_the_mean_loss_of_many_runs_grows_at_this_rate_and_a_typical_one_slower(factor, momentum):
    lam, batch, runs = FLAT[:30], 8, 1000
    rate = factor * stability.edge(lam, batch, momentum=momentum)
    generator = np.random.default_rng(0)
    w, m, losses = np.ones((runs, len(lam))), np.zeros((runs, len(lam))), []
    for _ in range(60):
        x = generator.standard_normal((runs, batch, len(lam))) * np.sqrt(lam)
        m = momentum * m + (1 - momentum) * np.einsum("rbi,rbj,rj->ri", x, x, w, optimize=True) / batch
        w = w - rate * m
        losses.append(np.sum(lam * w**2, axis=1) / 2)
    steps = range(20, 60)
    mean = np.polyfit(steps, np.log(np.mean(losses[20:], axis=1)), 1)[0]
    assert mean == pytest.approx(stability.growth(rate, lam, batch, momentum=momentum), rel=0.1)
    assert np.polyfit(steps, np.median(np.log(losses[20:]), axis=1), 1)[0] < mean


def test_without_momentum_the_gain_is_the_known_sum():
    rate, batch = 0.3, 5
    known = np.sum(rate * DECAYING / batch / (2 - (1 + 1 / batch) * rate * DECAYING))
    assert stability.gain(rate, DECAYING, batch) == pytest.approx(known, rel=1e-12)
    assert math.isinf(stability.gain(2.0, DECAYING, batch))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_large_and_small_batches_have_their_limits(momentum):
    assert stability.edge(DECAYING, 1e9, momentum=momentum) == pytest.approx(
        stability.full_batch_edge(1.0, momentum=momentum), rel=1e-6
    )
    small = stability.edge(DECAYING, 1e-6, momentum=momentum) / 1e-6  # x = eta / B with sum x l / (2 - x l) = 1
    assert np.sum(small * DECAYING / (2 - small * DECAYING)) == pytest.approx(1, rel=1e-4)
    many = stability.edge([1.0], 1e-6, momentum=momentum, multiplicity=[10_000.0])
    assert many == pytest.approx(stability.small_batch_edge(10_000, 1e-6), rel=2e-4)
    assert stability.full_batch_edge(2.0, momentum=0.9) == pytest.approx(19)


def test_multiplicities_stand_for_repeated_modes_and_modes_without_curvature_do_not_count():
    repeated = np.repeat([1.0, 0.2, 0.0], [2, 7, 5])
    counted = stability.edge([1.0, 0.2, 0.0], 3, momentum=0.9, multiplicity=[2, 7, 5])
    assert counted == pytest.approx(stability.edge(repeated, 3, momentum=0.9), rel=1e-10)


def measured_edge(lam, batch, momentum, seeds, steps, factors):
    """The rate, in units of the predicted edge, between the last with under half of the seeds unstable and the next."""
    edge = stability.edge(lam, batch, momentum=momentum)
    ratios = stability.largest_ratios(lam, edge * factors, batch, momentum=momentum, steps=steps, seeds=seeds)
    unstable = (ratios > 4).mean(1) >= 0.5
    assert not unstable[0]
    assert unstable[-1]
    first = int(np.argmax(unstable))
    return math.sqrt(factors[first - 1] * factors[first])


@pytest.mark.parametrize(("lam", "batch", "momentum"), [
    (FLAT, 1, 0.0), (FLAT, 16, 0.0), (DECAYING, 4, 0.0), (DECAYING, 64, 0.0), (FLAT, 4, 0.9), (FLAT, 64, 0.9),
])  # fmt: skip
def test_noisy_regression_becomes_unstable_at_the_edge(lam, batch, momentum):
    factors = np.geomspace(0.8, 1.25, 10)
    assert measured_edge(lam, batch, momentum, seeds=5, steps=400, factors=factors) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], 0.0), "batch must be positive"),
        (([1.0, -1.0], 4), "not negative"),
        (([0.0], 4), "positive entry"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        stability.edge(*arguments)
    with pytest.raises(ValueError, match=r"momentum in \[0, 1\)"):
        stability.gain(0.1, [1.0], 4, momentum=1.0)
