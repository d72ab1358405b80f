"""Rules against known measures and moments, bands against the start's measure, rank curves against the true ranks."""

import doctest

import numpy as np
import pytest

from nqflib import quadrature as q


def lanczos(eigenvalues, start, depth):
    """alphas, betas in float64 of diag(eigenvalues) by textbook Lanczos with two full reorthogonalisations."""
    basis = np.empty((depth, start.size))
    alphas, betas = np.empty(depth), np.empty(depth)
    v = start / np.linalg.norm(start)
    for j in range(depth):
        basis[j] = v
        w = eigenvalues * v
        alphas[j] = v @ w
        for _ in range(2):
            w = w - (basis[: j + 1] @ w) @ basis[: j + 1]
        betas[j] = np.linalg.norm(w)
        v = w / betas[j]
    return alphas, betas


def spectrum(n):
    """Power law 1/i with six outliers, one of them negative."""
    return np.concatenate([[11, 6.5, 4.33, 2.75, 1.9, -0.63], 1 / np.arange(7.0, n + 1)])


def measure_above(eigenvalues, start, values):
    """sum over lambda_i > value of (q_i . v)^2."""
    order = np.argsort(eigenvalues)
    mass = start[order] ** 2
    cumulative = np.concatenate([np.cumsum(mass[::-1])[::-1], [0]])
    return cumulative[np.searchsorted(eigenvalues[order], values, side="right")] / cumulative[0]


def true_ranks(eigenvalues, values):
    return eigenvalues.size - np.searchsorted(np.sort(eigenvalues), values, side="right")


@pytest.fixture(scope="module")
def eight_starts():
    eigenvalues, generator = spectrum(4000), np.random.default_rng(0)
    starts = [generator.standard_normal(4000) for _ in range(8)]
    return eigenvalues, starts, [lanczos(eigenvalues, v, 100) for v in starts]


# ---------------------------------------------------------------------------------------- rules


def test_examples_in_the_module_run():
    assert doctest.testmod(q).failed == 0


def test_the_rule_has_unit_mass_and_the_first_2m_minus_1_moments_of_the_start():
    generator = np.random.default_rng(1)
    eigenvalues = np.sort(generator.uniform(-1, 1, 400))
    start = generator.standard_normal(400)
    m = 12
    rule = q.gauss(*lanczos(eigenvalues, start, m))
    mass = (start / np.linalg.norm(start)) ** 2
    assert abs(rule.weights.sum() - 1) < 1e-14
    for degree in range(2 * m):  # Chebyshev polynomials span the powers, and do not round as those do
        theirs = mass @ np.cos(degree * np.arccos(eigenvalues))
        ours = rule.weights @ np.cos(degree * np.arccos(rule.nodes))
        assert ours == pytest.approx(theirs, abs=1e-13), degree
    degree = 2 * m
    theirs = mass @ np.cos(degree * np.arccos(eigenvalues))
    assert abs(rule.weights @ np.cos(degree * np.arccos(rule.nodes)) - theirs) > 1e-4


def test_a_full_depth_rule_is_the_measure_itself():
    eigenvalues, start = np.array([-2.0, 0.5, 1.0, 7.0]), np.array([1.0, 2.0, 3.0, 4.0])
    rule = q.gauss(*lanczos(eigenvalues, start, 4))
    np.testing.assert_allclose(rule.nodes, eigenvalues, atol=1e-13)
    np.testing.assert_allclose(rule.weights, start**2 / 30, atol=1e-14)
    assert rule.residuals.max() < 1e-13


def test_residuals_bound_the_distance_to_an_eigenvalue(eight_starts):
    eigenvalues, _, runs = eight_starts
    for run in runs[:2]:
        rule = q.gauss(*run)
        distance = np.abs(eigenvalues[:, None] - rule.nodes).min(0)
        assert (distance <= rule.residuals + 1e-13).all()
        assert rule.residuals[50] > 1e-5  # the bulk is not resolved, so the bound is not vacuous


def test_a_radau_rule_has_its_node_unit_mass_and_one_moment_less():
    generator = np.random.default_rng(2)
    eigenvalues = np.sort(generator.uniform(-1, 1, 300))
    start = generator.standard_normal(300)
    alphas, betas = lanczos(eigenvalues, start, 6)
    mass = (start / np.linalg.norm(start)) ** 2
    for value in (-0.7, 0.123, 2.0):
        d = alphas[0] - value
        for a, b in zip(alphas[1:], betas[:-1], strict=True):
            d = a - value - b**2 / d
        full = np.diag(np.append(alphas, value + betas[-1] ** 2 / d)) + np.diag(betas, 1) + np.diag(betas, -1)
        nodes, vectors = np.linalg.eigh(full)
        assert np.abs(nodes - value).min() < 1e-12
        for degree in range(2 * 6 + 1):
            assert vectors[0] ** 2 @ nodes**degree == pytest.approx(mass @ eigenvalues**degree, abs=1e-12 * 2.0**degree)
        above, at = q.gauss_radau(alphas, betas, [value])
        assert above[0] == pytest.approx((vectors[0] ** 2)[nodes > value + 1e-9].sum(), abs=1e-13)
        assert at[0] == pytest.approx((vectors[0] ** 2)[np.argmin(np.abs(nodes - value))], abs=1e-13)


# ---------------------------------------------------------------------------------------- bands


def test_the_bands_hold_each_starts_own_measure_at_all_400_values(eight_starts):
    eigenvalues, starts, runs = eight_starts
    values = q.symlog_values(-0.7, 11.5)
    for start, run in zip(starts, runs, strict=True):
        band = q.measure_band(run[0], run[1], values)
        truth = measure_above(eigenvalues, start, values)
        assert ((band.lower <= truth) & (truth <= band.upper)).all()
        assert (np.diff(band.lower) <= 0).all()
        assert (np.diff(band.upper) <= 0).all()
        assert np.median(band.upper - band.lower) < 0.01  # not vacuous


def test_the_bands_of_a_single_start_do_not_hold_the_count(eight_starts):
    eigenvalues, _, runs = eight_starts
    values = np.geomspace(1 / 50.5, 1 / 12.5, 20)
    truth = true_ranks(eigenvalues, values)
    held = []
    for run in runs:
        band = q.measure_band(run[0], run[1], values)
        held.append(((4000 * band.lower <= truth) & (truth <= 4000 * band.upper)).all())
    assert not any(held)  # they bound what the start sees, whose sampling noise is far larger


def test_a_value_that_is_a_node_and_a_finished_run_are_no_exceptions():
    alphas, betas = [2.0, 2.0], [1.0, 0.5]
    above, at = q.gauss_radau(alphas, betas, [1.0, 3.0])  # the nodes of the Gauss rule
    np.testing.assert_allclose([above, at], [[0.5, 0], [0.5, 0.5]], atol=1e-12)
    finished = q.measure_band(alphas, [1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(finished.lower, [1, 0.5, 0.5, 0, 0], atol=1e-13)
    np.testing.assert_allclose(finished.upper, [1, 1, 0.5, 0.5, 0], atol=1e-13)


# ---------------------------------------------------------------------------------------- ranks


def test_the_rank_curve_holds_the_true_ranks_and_its_locked_ranks_are_exact(eight_starts):
    eigenvalues, _, runs = eight_starts
    curve = q.rank_curve(runs, 4000)
    truth = true_ranks(eigenvalues, curve.values)
    lower, upper = curve.band()
    inside = (lower - 1e-6 <= truth) & (truth <= upper + 1e-6)
    assert inside.mean() >= 0.9
    assert curve.locked.top >= 8
    assert curve.locked.bottom >= 1
    exact = curve.sampling == 0
    top = exact & (truth < curve.locked.top)
    assert top.sum() > 50
    np.testing.assert_array_equal(curve.ranks[top], truth[top])
    bottom = truth == 4000 - 1  # above the one negative eigenvalue
    np.testing.assert_array_equal(curve.ranks[bottom & exact], 3999)
    assert (np.diff(curve.ranks) <= 1e-9).all()


def test_the_sampling_deviation_is_the_scatter_of_single_starts_counts(eight_starts):
    eigenvalues, _, _ = eight_starts
    generator = np.random.default_rng(3)
    counts = []
    for _ in range(400):
        mass = generator.standard_normal(4000) ** 2
        counts.append(4000 * mass[eigenvalues > 1 / 200.5].sum() / mass.sum())
    r = true_ranks(eigenvalues, 1 / 200.5)
    assert np.std(counts) == pytest.approx(np.sqrt(2 * r * (1 - r / 4000)), rel=0.1)
    curve = q.rank_curve(eight_starts[2], 4000, [1 / 200.5])
    assert curve.sampling[0] == pytest.approx(np.sqrt(2 * curve.ranks[0] * (1 - curve.ranks[0] / 4000) / 8))


def test_node_ranks_of_a_fully_resolved_spectrum_are_whole_numbers_within_a_sixth():
    eigenvalues = 0.9 ** np.arange(30.0)
    ranks, nodes = q.node_ranks(q.gauss(*lanczos(eigenvalues, np.ones(30), 30)), 30)
    np.testing.assert_allclose(nodes, eigenvalues, rtol=1e-10)
    np.testing.assert_allclose(ranks, np.arange(1, 31), atol=0.14)


def test_the_density_integrates_to_one_and_that_per_decade_to_the_positive_mass(eight_starts):
    rules = [q.gauss(*run) for run in eight_starts[2][:3]]
    x = np.linspace(-3, 14, 40_001)
    assert np.trapezoid(q.density(rules, x, 0.02), x) == pytest.approx(1, abs=1e-6)
    positive = np.mean([rule.weights[rule.nodes > 0].sum() for rule in rules])
    decades = np.linspace(-8, 2, 8001)
    ours = np.trapezoid(q.density(rules, 10.0**decades, 0.05, decades=True), decades)
    assert ours == pytest.approx(positive, abs=1e-6)
    assert positive < 1


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: q.gauss([1.0, 2.0], [1.0]), r"betas must have shape \(2,\)"),
        (lambda: q.gauss([1.0, np.nan], [1.0, 1.0]), "alphas must be finite"),
        (lambda: q.gauss([1.0], [-1.0]), "betas must not be negative"),
        (lambda: q.rank_curve([], 10), "runs must hold at least one"),
        (lambda: q.rank_curve([([1.0, 2.0], [1.0, 1.0])], 1), "size must be the dimension"),
        (lambda: q.symlog_values(2.0, 1.0), "low < high"),
        (lambda: q.density([], [1.0], 0.1), "rules must not be empty"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
