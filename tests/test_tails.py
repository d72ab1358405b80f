"""Exponents and breaks against spectra that were made with known ones, and intervals by how often they hold them."""

import doctest
import os

import numpy as np
import pytest
from test_quadrature import lanczos, spectrum

from nqflib import tails
from nqflib.quadrature import Locked, RankCurve, rank_curve

SEEDS = int(os.environ.get("NQF_SEEDS", "10"))
N, DEPTH, BREAK, ALPHA, BETA = 4000, 150, 40, 1.0, 0.5
WINDOW = (2 * BREAK, N / 2)


def reflected(vectors, x):
    """x after the Householder reflections of `vectors`: a rotation that hides the eigenbasis."""
    for v in vectors:
        x = x - 2 * (v @ x) * v
    return x


def hidden_lanczos(eigenvalues, start, reflections):
    """Lanczos on Q diag(eigenvalues) Q^T, with Q the product of the reflections, from Q start."""

    class Hidden:
        def __mul__(self, x):
            return reflected(reflections, eigenvalues * reflected(reflections[::-1], x))

    return lanczos(Hidden(), reflected(reflections, start), DEPTH)


@pytest.fixture(scope="module")
def fits():
    """Tail, break and source of one random start and one gradient, for every seed."""
    i = np.arange(1.0, N + 1)
    eigenvalues = np.where(i < BREAK, (i / BREAK) ** -0.4, (i / BREAK) ** -ALPHA)
    found = []
    for seed in range(SEEDS):
        generator = np.random.default_rng([11, seed])
        reflections = generator.standard_normal((20, N))
        reflections /= np.linalg.norm(reflections, axis=1)[:, None]
        gradient = np.sqrt(2 * eigenvalues * i**-BETA) * generator.standard_normal(N)
        curve = rank_curve([hidden_lanczos(eigenvalues, generator.standard_normal(N), reflections)], N)
        run = hidden_lanczos(eigenvalues, gradient, reflections)
        found.append((
            tails.tail(curve, WINDOW),
            tails.spectral_break(curve, (BREAK / 8, N / 2)),
            tails.source(run, float(np.linalg.norm(gradient)), curve, WINDOW),
        ))  # fmt: skip
    return found


def coverage(intervals, truth):
    return np.mean([low <= truth <= high for low, high in intervals])


def half_width(intervals):
    return np.median([high - low for low, high in intervals]) / 2


def test_examples_in_the_module_run():
    assert doctest.testmod(tails).failed == 0


def test_intervals_of_the_tail_exponent_hold_it(fits):
    intervals = [tail.interval for tail, _, _ in fits]
    assert coverage(intervals, ALPHA) >= 0.88
    assert half_width(intervals) <= 0.06
    assert np.mean([tail.exponent for tail, _, _ in fits]) == pytest.approx(ALPHA, abs=0.03)
    assert 0.5 < np.mean([tail.misfit for tail, _, _ in fits]) < 1.5  # the covariance has the right size


def test_intervals_of_the_break_hold_it(fits):
    intervals = [found.interval for _, found, _ in fits]
    assert coverage(intervals, BREAK) >= 0.88
    assert half_width(intervals) <= 0.3 * BREAK
    assert all(found.below < 0.5 < 0.9 < found.above and found.gain > 0.9 for _, found, _ in fits)


def test_intervals_of_the_source_exponent_hold_it(fits):
    intervals = [source.interval for _, _, source in fits]
    assert coverage(intervals, BETA) >= 0.88
    assert half_width(intervals) <= 0.155  # 0.15 over a hundred seeds


def made_curve(values, index, starts=1):
    """A rank curve without noise, by the index of the eigenvalue at each value."""
    return RankCurve(values, index - 0.5, index - 0.5, 0 * values, Locked(0, 0), starts, 10**6)


def test_a_power_law_without_a_break_shows_none():
    values = np.geomspace(1e-4, 1, 200)
    found = tails.spectral_break(made_curve(values, values ** (-1 / 0.8)), (10, 5000))
    assert found.below == pytest.approx(0.8, abs=1e-3)
    assert found.above == pytest.approx(0.8, abs=1e-3)
    assert found.interval == (10, 5000)


def test_eigenvalues_between_the_values_of_a_curve():
    values = np.geomspace(1e-4, 1, 60)
    found = tails.eigenvalues_at(made_curve(values, values ** (-1 / 0.8)), [10, 123.4, 1000])
    np.testing.assert_allclose(found, np.array([10, 123.4, 1000]) ** -0.8, rtol=1e-9)


def test_a_tail_that_bends_is_not_one_power_law():
    values = np.geomspace(1e-4, 1, 400)
    x = -np.log(values)
    curve = made_curve(values, np.exp(1.25 * x - 0.035 * x**2), starts=8)  # ln r bends
    fit = tails.tail(curve, (20, float(curve.ranks.max() / 2)))
    assert fit.misfit > 2
    assert np.ptp(fit.slopes) > 0.3
    exact = 1 / np.sqrt(1.25**2 - 4 * 0.035 * np.log(fit.ranks))  # -dx / d ln r
    np.testing.assert_allclose(fit.slopes, exact, rtol=0.01)
    assert fit.ranks[0] == pytest.approx(40, rel=1e-6)


def test_more_starts_give_a_narrower_interval():
    eigenvalues, generator = spectrum(4000), np.random.default_rng(0)
    runs = [lanczos(eigenvalues, generator.standard_normal(4000), 100) for _ in range(8)]
    one, all_ = (tails.tail(rank_curve(part, 4000), (30, 1000)) for part in (runs[:1], runs))
    assert np.ptp(all_.interval) < 0.6 * np.ptp(one.interval)
    assert all_.interval[0] < 1 < all_.interval[1]


def test_the_source_curve_of_a_known_gradient_has_its_terms():
    i = np.arange(1.0, 3001)
    eigenvalues = i**-1.0
    gradient = np.sqrt(2 * eigenvalues * i**-0.5)  # g^2 / (2 lambda) = i^-0.5
    run = lanczos(eigenvalues, gradient, 80)
    generator = np.random.default_rng(4)
    runs = [lanczos(eigenvalues, generator.standard_normal(3000), 80) for _ in range(6)]
    curve = rank_curve(runs, 3000, np.geomspace(2e-4, 1.1, 150))
    found = tails.source_curve(run, float(np.linalg.norm(gradient)), curve, (15, 800), bands=12)
    assert found.ranks.size == 12
    np.testing.assert_allclose(found.terms, found.ranks**-0.5, rtol=0.3)
    assert (np.diff(found.errors) < 0).all()  # more eigenvalues in a band, less noise


def test_windows_outside_of_the_curve_are_refused():
    values = np.geomspace(1e-4, 1, 50)
    curve = RankCurve(values, 1 / values, 1 / values, 0 * values, Locked(0, 0), 1, 10**6)
    for call in (tails.tail, tails.spectral_break):
        with pytest.raises(ValueError, match=r"window must lie within the ranks of positive eigenvalues \(1.5 to"):
            call(curve, (0.1, 50))
    with pytest.raises(ValueError, match="window must lie within the ranks"):
        tails.source_curve(([1.0], [0.0]), 1.0, curve, (0.1, 50))
