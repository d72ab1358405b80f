"""The singular limit against the flow at abundances down to 1e-300, brute force, and solved examples."""

from itertools import chain, combinations

import numpy as np
import pytest
from scipy import sparse

from nqflib import closed_forms as cf
from nqflib import lotka_volterra as lv
from nqflib.staircase import Ending, sample_wise_limit, staircase


def gaussian_problem(seed, samples=12, modes=8):
    """Rates G^T y and competition G^T G of Gaussian eigenvalues G (m, K) and Gaussian targets."""
    generator = np.random.default_rng(seed)
    eigenvalues = generator.standard_normal((samples, modes))
    return eigenvalues.T @ generator.standard_normal(samples), eigenvalues.T @ eigenvalues


def crowded_problem(seed):
    """The same competition with positive rates drawn at random: many extinctions, and returns."""
    _, competition = gaussian_problem(seed)
    return np.random.default_rng(1000 + seed).uniform(0.5, 1.5, 8), competition


def well_separated(steps, factor=1.1):
    return len(steps.times) < 2 or (steps.times[1:] / steps.times[:-1]).min() > factor


def expected_events(steps):
    """Events of the limit: for each jump tau and the set of (mode, +1 enters or -1 leaves)."""
    signs = [
        {(k, 1) for k in entered} | {(k, -1) for k in left}
        for entered, left in zip(steps.entered, steps.left, strict=True)
    ]
    return list(zip(steps.times, signs, strict=True))


def flow_events(rates, competition, steps, abundance):
    """Times at which the flow crosses half of the smallest abundance that a mode ever rests at: (t, mode, sign)."""
    scale = np.log(1 / abundance)
    times = np.linspace(0, 1.15 * steps.times[-1] * scale + 20, 1500)
    x = lv.flow(rates, competition, abundance, times).log_abundances
    speeds = rates - np.exp(x) @ competition.T
    resting = np.where(steps.equilibria > 0, steps.equilibria, np.inf).min(axis=0)
    levels = np.log(np.where(np.isfinite(resting), resting, resting.min()) / 2)
    events = []
    for k in range(len(rates)):
        above = x[:, k] >= levels[k]
        for i in np.flatnonzero(above[1:] != above[:-1]):
            ends = x[[i, i + 1], k] - levels[k]
            t = hermite_root(times[i], times[i + 1], *ends, *speeds[[i, i + 1], k])
            events.append((t, k, 1 if above[i + 1] else -1))
    return sorted(events)


def hermite_root(a, b, value_a, value_b, slope_a, slope_b):
    """The zero of the cubic through two values and slopes of opposite sign."""
    low, high, width = 0.0, 1.0, b - a
    for _ in range(60):
        s = (low + high) / 2
        cubic = (
            value_a * (1 + 2 * s) * (1 - s) ** 2
            + value_b * s**2 * (3 - 2 * s)
            + width * (slope_a * s * (1 - s) ** 2 - slope_b * s**2 * (1 - s))
        )
        low, high = (s, high) if (cubic > 0) == (value_a > 0) else (low, s)
    return a + width * (low + high) / 2


def rescaled_event_times(rates, competition, steps, abundance):
    """Rescaled times of the flow's events in the order of the limit's, or None if the sequences differ."""
    found = flow_events(rates, competition, steps, abundance)
    times = []
    for _, events in expected_events(steps):
        here, found = found[: len(events)], found[len(events) :]
        if {(k, sign) for _, k, sign in here} != events:
            return None
        times.append([t / np.log(1 / abundance) for t, _, _ in here])
    return None if found else times


# ------------------------------------------------------------------------------- solved examples


def test_without_competition_mode_k_enters_at_its_exponent_over_its_rate():
    steps = staircase([1.0, 0.5, -0.2, 0.25], np.ones(4), exponents=[1.0, 1.0, 1.0, 3.0])
    np.testing.assert_allclose(steps.switch_on_times(), [1, 2, np.inf, 12])
    assert steps.entered == ((0,), (1,), (3,))
    assert steps.left == ((), (), ())
    assert steps.ending is Ending.SETTLED
    np.testing.assert_allclose(steps.equilibria[-1], [1, 0.5, 0, 0.25])


def test_a_strong_mode_delays_a_weak_one_by_the_invasion_rate():
    # mode 1: height -1 + 0.8 tau until tau = 1, then the rate 0.8 - 0.6 * 1
    steps = staircase([1.0, 0.8], [[1.0, 0.6], [0.6, 1.0]])
    np.testing.assert_allclose(steps.times, [1, 2])
    np.testing.assert_allclose(steps.equilibria[-1], [0.8125, 0.3125])
    np.testing.assert_allclose(steps.log_heights([0.5, 1.0, 1.5]), [[-0.5, -0.6], [0, -0.2], [0, -0.1]])
    np.testing.assert_allclose(steps.abundances([0.5, 1.5])[:, 0], [0, 1])


def test_a_mode_that_enters_can_drive_out_the_one_before_it():
    # C = [[1, 1.5], [1.5, 4]]: mode 1 cannot bear mode 0, whose final abundance alone is 1.8; mode 1 enters first
    steps = staircase([1.8, 2.0], [[1.0, 1.5], [1.5, 4.0]])
    assert steps.entered == ((1,), (0,))
    assert steps.left == ((), (1,))
    first, rate = 0.5, 1.8 - 1.5 * 0.5
    np.testing.assert_allclose(steps.times, [first, first + (1 - 1.8 * first) / rate])
    np.testing.assert_allclose(steps.equilibria, [[0, 0], [0, 0.5], [1.8, 0]])
    later = steps.times[-1] + 1
    np.testing.assert_allclose(steps.log_heights([later])[0, 1], 2.0 - 1.5 * 1.8)


def test_the_horizon_ends_the_staircase_before_the_next_jump():
    whole = staircase([1.0, 0.5], np.ones(2))
    cut = staircase([1.0, 0.5], np.ones(2), horizon=1.5)
    assert cut.ending is Ending.HORIZON
    np.testing.assert_allclose(cut.times, whole.times[:1])


def test_sparse_dense_and_diagonal_competition_give_one_staircase():
    rates, diagonal = [1.0, 0.7, 0.3], np.array([1.0, 2.0, 1.0])
    for competition in (np.diag(diagonal), sparse.diags_array(diagonal)):
        np.testing.assert_allclose(staircase(rates, competition).times, staircase(rates, diagonal).times)


# --------------------------------------------------------------------------------- the structure


@pytest.mark.parametrize("seed", range(25))
def test_every_stage_solves_the_complementarity_problem_of_its_allowed_modes(seed):
    rates, competition = crowded_problem(seed)
    steps = staircase(rates, competition)
    for z, heights, speeds in zip(steps.equilibria[1:], steps.heights[1:], steps.invasion_rates[1:], strict=True):
        allowed = np.flatnonzero(heights == 0)
        subsets = chain.from_iterable(combinations(allowed, n) for n in range(len(allowed) + 1))
        solutions = []
        for subset in map(list, subsets):
            trial = np.zeros(8)
            trial[subset] = np.linalg.solve(competition[np.ix_(subset, subset)], rates[subset])
            growth = (rates - competition @ trial)[allowed]
            if (trial >= 0).all() and growth.max() < 1e-9:
                solutions.append(trial)
        assert len(solutions) == 1  # brute force over all subsets finds one, as C is positive definite
        np.testing.assert_allclose(z, solutions[0], atol=1e-10)
        np.testing.assert_allclose(np.where(z > 0, 0, rates - competition @ z), speeds, atol=1e-10)


@pytest.mark.parametrize("seed", range(10))
def test_heights_are_continuous_and_never_positive(seed):
    steps = staircase(*crowded_problem(seed))
    assert steps.ending is Ending.SETTLED
    assert (steps.invasion_rates[-1] <= 0).all()
    lengths = np.diff(np.concatenate([[0], steps.times]))
    ends = steps.heights[:-1] + lengths[:, None] * steps.invasion_rates[:-1]
    np.testing.assert_allclose(ends, steps.heights[1:], atol=1e-12)
    assert steps.heights.max() <= 0


def test_extinctions_and_returns_occur_among_the_problems_tested():
    all_steps = [staircase(*crowded_problem(seed)) for seed in range(25)]
    assert sum(len(modes) for steps in all_steps for modes in steps.left) >= 5
    entries = [list(chain.from_iterable(steps.entered)) for steps in all_steps]
    assert any(len(modes) > len(set(modes)) for modes in entries)  # one that had left is back


def test_with_more_modes_than_samples_the_staircase_stops_when_the_targets_are_fitted():
    generator = np.random.default_rng(3)
    eigenvalues = generator.standard_normal((5, 12))
    targets = eigenvalues @ np.concatenate([generator.uniform(0.5, 1, 3), np.zeros(9)])
    steps = staircase(*lv.rates_and_competition(eigenvalues, targets))
    assert steps.ending is Ending.SETTLED
    np.testing.assert_allclose(eigenvalues @ steps.equilibria[-1], targets, atol=1e-9)
    losses = ((steps.equilibria @ eigenvalues.T - targets) ** 2).sum(axis=1)
    assert (np.diff(losses) < 0).all()


# ------------------------------------------------------------------------------ against the flow


def test_the_flow_at_1e_30_enters_and_leaves_in_the_order_of_the_limit():
    """The error of the rescaled times is const / ln(1/eps): halved from 1e-15 to 1e-30, removed by extrapolation."""
    ratios, extrapolated, compared = [], [], 0
    for seed in range(200):
        rates, competition = gaussian_problem(seed)
        steps = staircase(rates, competition)
        if not well_separated(steps):
            continue
        compared += 1
        fine = rescaled_event_times(rates, competition, steps, 1e-30)
        assert fine is not None, f"another sequence of entries and exits at seed {seed}"
        coarse = rescaled_event_times(rates, competition, steps, 1e-15) if seed < 60 else None
        if coarse is None:  # at 1e-15 neighbouring events may still swap
            continue
        largest = [
            max(np.abs(np.array(times) / tau - 1).max() for times, tau in zip(found, steps.times, strict=True))
            for found in (fine, coarse)
        ]
        ratios.append(largest[0] / largest[1])
        limits = [2 * np.mean(a) - np.mean(b) for a, b in zip(fine, coarse, strict=True)]
        extrapolated.append(np.abs(np.array(limits) / steps.times - 1).max())
    assert compared >= 120
    assert len(ratios) >= 35
    # The error is const / ln(1/eps) up to terms that vanish exponentially: the ratio is 1/2, mostly from below.
    assert np.median(ratios) < 0.5 + 1e-7
    assert np.quantile(ratios, 0.9) < 0.501
    assert np.median(extrapolated) < 1e-4


def test_the_sequence_with_extinctions_and_a_return_is_that_of_the_flow():
    found = 0
    for seed in range(60):
        rates, competition = crowded_problem(seed)
        steps = staircase(rates, competition)
        if not any(steps.left) or not well_separated(steps, 1.03):
            continue
        found += 1
        times = rescaled_event_times(rates, competition, steps, 1e-300)
        assert times is not None, seed
        np.testing.assert_allclose([np.mean(t) for t in times], steps.times, rtol=0.03)
    assert found >= 3


@pytest.mark.parametrize("abundance", [1e-4, 1e-30, 1e-300])
def test_log_abundances_of_the_flow_follow_the_heights(abundance):
    rates, competition = crowded_problem(1)
    steps = staircase(rates, competition)
    tau = np.linspace(0, 1.5 * steps.times[-1], 400)
    scale = np.log(1 / abundance)
    heights = lv.flow(rates, competition, abundance, tau * scale).log_abundances / scale
    assert np.abs(heights - steps.log_heights(tau)).max() < 8 / scale


def test_sample_wise_limit_is_that_of_theorem_5():
    targets = np.array([2.0, 1.0, 0.5])
    spectrum = np.kron(np.eye(3), [1.0, 2.0])
    growth = 8 / 3 * 2.0 * targets
    tau = np.array([0.5, 0.95, 1.05, 1.9, 2.1, 3.9, 4.1]) / growth[0]
    times = tau * np.log(1e300)
    solved = cf.orthogonal_samples(spectrum, targets, 1e-300, times).residuals
    np.testing.assert_allclose(sample_wise_limit(tau, growth, targets), (solved**2).mean(axis=1), atol=1e-7)


# ------------------------------------------------------------------------------------- bad input


def test_modes_that_cannot_be_told_apart_are_a_named_degeneracy():
    with pytest.raises(ValueError, match=r"degenerate: beside the modes \[0\] the modes \[1\] neither grow nor shrink"):
        staircase([1.0, 1.0], np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"degenerate: the competition of the modes \[0, 1\].*is singular"):
        staircase([1.0, 1.9], [[1.0, 2.0], [2.0, 4.0]], exponents=[1.0, 1.9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 1.0], [[1.0, 0.5], [0.2, 1.0]]), "competition must be symmetric"),
        (([1.0, 1.0], [[1.0, 2.0], [2.0, 1.0]]), "competition must be positive semidefinite"),
        (([1.0, 1.0], np.ones((2, 3))), r"competition must have shape \(2, 2\).*got \(2, 3\)"),
        (([-1.0, 0.0], np.eye(2)), "rates of shape .* must have a positive entry"),
        (([1.0, np.nan], np.eye(2)), "rates must be finite"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        staircase(*arguments)


def test_exponents_must_be_positive():
    with pytest.raises(ValueError, match="exponents must be positive"):
        staircase([1.0], [1.0], exponents=0.0)
