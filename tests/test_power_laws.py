"""Predicted exponents against the loss of the flow, fits against curves with a known law, floors against theirs."""

import numpy as np
import pytest
from scipy.optimize import curve_fit
from scipy.special import stdtrit

from nqflib import lotka_volterra as lv
from nqflib import power_laws as pl


def fourier_loss(theta, beta, abundance, window, modes=100_000, points=120):
    """Switch-on times of two modes, (2,), times (T,) between them and the exact excess loss, (T,).

    Rates 4 k^-(theta + beta) and final abundances k^(theta - beta), those of a target k^-beta seen at scales k^-theta.
    """
    k = np.arange(1.0, modes + 1)
    rates = 4 * k ** -(theta + beta)
    competition = rates / k ** (theta - beta)
    switch_on = lv.half_saturation_times(rates, competition, abundance)[[window[0] - 1, window[1] - 1]]
    times = np.geomspace(*switch_on, points)
    blocks = lv.orthogonal_features_in_blocks(rates, competition, abundance, times)
    return switch_on, times, sum(lv.excess_loss(rates[m], competition[m], z) for m, z in blocks)


# ----------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize(
    ("theta", "beta"),
    [(0, 0.75), (0, 1), (0, 1.5), (0.5, 0.75), (0.5, 1), (0.5, 1.5), (1, 0.75), (1, 1), (1, 1.5), (1, 2)],
)
def test_the_fit_to_the_exact_loss_is_within_one_percent_of_the_window_prediction(theta, beta):
    window = (10, 1000)
    switch_on, times, loss = fourier_loss(theta, beta, 1e-14, window)
    fitted = pl.fit_power_law(times, loss).exponent
    predicted = pl.window_exponent(2 * beta, 100_000, window, tuple(switch_on))
    assert fitted == pytest.approx(predicted, rel=0.01)
    asymptotic = pl.fourier_exponent(theta, beta)
    assert fitted == pytest.approx(asymptotic, rel=0.08)
    if (theta, beta) != (1, 1):  # where the correction matters it is the better prediction
        assert abs(fitted / predicted - 1) < 0.6 * abs(fitted / asymptotic - 1)


def test_the_asymptotic_exponent_is_reached_as_the_abundance_vanishes_and_the_modes_are_many():
    errors = []
    for abundance in (1e-8, 1e-30, 1e-300):
        _, times, loss = fourier_loss(0, 1.5, abundance, (10, 1000))
        errors.append(pl.fit_power_law(times, loss).exponent / pl.fourier_exponent(0, 1.5) - 1)
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 0.003


def test_the_exponents_of_the_two_papers_parametrisations_agree():
    assert pl.fourier_exponent(0.5, 1.5) == pytest.approx(pl.feature_wise_exponent(2 * 1.5, 0.5 + 1.5))
    assert pl.sample_wise_exponent(1.5, 2.0) == pytest.approx(pl.feature_wise_exponent(2 * 1.5, 2.0))
    assert pl.feature_wise_exponent(2.0, 0.8) == pytest.approx(1.25)


def test_sample_wise_exponent_is_that_of_the_staircase_of_many_samples():
    mu = np.arange(1.0, 1e6 + 1)
    times = np.geomspace(30.0, 300.0, 60)
    remaining = np.cumsum((mu**-3)[::-1])[::-1]  # sum of y^2 = mu^-3 from each sample on
    first_unlearned = np.searchsorted(mu**0.9, times, side="left")
    fitted = pl.fit_power_law(times, remaining[first_unlearned]).exponent
    assert fitted == pytest.approx(pl.sample_wise_exponent(1.5, 0.9), rel=0.01)


def test_window_prediction_with_infinitely_many_modes_and_exact_times_is_the_asymptotic_exponent():
    k1, k2 = 10.0, 100.0
    found = pl.window_exponent(2.0, np.inf, (k1, k2), (k1**0.8, k2**0.8))
    assert found == pytest.approx(pl.feature_wise_exponent(2.0, 0.8), rel=1e-12)


def test_local_exponent_is_the_window_prediction_of_a_narrow_window():
    a1, a2, b0, eps = 2.0, 0.8, 0.3, 1e-9

    def ratio(k):
        return np.log(k**-a2 * k**b0 / (k ** (a1 - 2 * a2) * eps))  # r / (C z0), C = r^2 / V up to a constant

    def switch_on(k):
        return ratio(k) * k**a2

    narrow = pl.window_exponent(a1, np.inf, (50.0, 50.001), (switch_on(50.0), switch_on(50.001)))
    assert pl.local_exponent(a1, a2, ratio(50.0), abundance_decay=b0) == pytest.approx(narrow, rel=1e-4)
    # no logarithm is left where z(0) falls as k^-(a1 - a2)
    assert pl.local_exponent(a1, a2, 15.9, abundance_decay=a1 - a2) == pytest.approx(1.25)
    assert pl.local_exponent(a1, a2, 1e9) == pytest.approx(1.25, rel=1e-8)


def test_figure_3_right_needs_the_window_prediction():
    k = np.arange(1.0, 1001)
    rates, strengths, start = k**-0.8, k**-2.0, 1e-6 * k**-1.2
    competition = rates**2 / (8 * strengths)
    switch_on = lv.half_saturation_times(rates, competition, start)
    times = np.geomspace(switch_on[9], switch_on[99], 300)
    loss = lv.excess_loss(rates, competition, lv.orthogonal_features(rates, competition, start, times))
    fitted = pl.fit_power_law(times, loss).exponent
    assert fitted == pytest.approx(1.301, abs=0.002)
    assert fitted == pytest.approx(pl.window_exponent(2, 1000, (10, 100), (switch_on[9], switch_on[99])), rel=0.01)


# ----------------------------------------------------------------------------------------- fits


def test_an_exact_power_law_is_recovered_with_no_uncertainty():
    times = np.geomspace(1, 1e4, 50)
    fit = pl.fit_power_law(times, 3 * times**-0.7)
    assert fit.exponent == pytest.approx(0.7, rel=1e-12)
    assert fit.amplitude == pytest.approx(3, rel=1e-12)
    assert fit.uncertainty < 1e-12
    assert fit.residual < 1e-13
    np.testing.assert_allclose(pl.local_exponents(times, 3 * times**-0.7).exponents, 0.7, rtol=1e-9)


def test_the_window_and_the_resampling_do_what_they_say():
    times = np.concatenate([np.linspace(1, 10, 500), np.geomspace(10.01, 1000, 40)])
    loss = np.where(times < 10, times**-1.0, 10 * times**-2.0)
    assert pl.fit_power_law(times, loss, window=(1, 9.9)).exponent == pytest.approx(1, rel=1e-9)
    assert pl.fit_power_law(times, loss, window=(11, 1000)).exponent == pytest.approx(2, rel=1e-9)
    crowded = pl.fit_power_law(times, loss).exponent
    even = pl.fit_power_law(times, loss, points=400).exponent
    assert crowded < even - 0.15  # 500 of the 540 records lie in the first decade
    # least squares of the bent line y = -x, -2 x + c on [0, 1], [1, 3] (decades), in closed form
    x = np.linspace(0, 3, 100_001)
    assert even == pytest.approx(-np.polyfit(x, np.where(x < 1, -x, 1 - 2 * x), 1)[0], abs=0.01)


def test_the_jackknife_error_is_the_scatter_of_fits_to_correlated_noise():
    generator = np.random.default_rng(0)
    times = np.geomspace(1, 1e3, 200)
    exponents, errors = [], []
    for _ in range(300):
        steps = np.repeat(0.1 * generator.standard_normal(40), 5)  # noise that lasts for five records
        fit = pl.fit_power_law(times, times**-1.0 * np.exp(steps))
        exponents.append(fit.exponent)
        errors.append(fit.uncertainty)
    scatter = np.std(exponents)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(scatter, rel=0.25)
    # the textbook error of the same fits takes 200 independent residuals and is too small by the root of 5
    textbook = 0.1 / np.sqrt(200) / np.std(np.log(times))
    assert scatter > 1.8 * textbook


def test_the_uncertainty_is_the_jackknife_formula_over_two_blocks():
    times = np.exp(np.array([0.0, 1.0, 3.0, 4.0]))
    loss = np.exp([0.0, -1.0, -2.0, -4.0])  # slope -1 in the first block alone, -2 in the second
    assert pl.fit_power_law(times, loss, blocks=2).uncertainty == pytest.approx(np.sqrt(1 / 2 * (0.25 + 0.25)))


def test_local_exponents_see_a_bend():
    times = np.geomspace(1, 1e4, 400)
    loss = np.where(times < 100, times**-0.5, 10 * times**-1.0)
    found = pl.local_exponents(times, loss, factor=10, count=31)
    assert found.exponents[0] == pytest.approx(0.5, abs=1e-3)
    assert found.exponents[-1] == pytest.approx(1.0, abs=1e-3)
    assert found.times[0] == pytest.approx(np.sqrt(10))
    assert np.ptp(found.exponents) == pytest.approx(0.5, abs=2e-3)


# --------------------------------------------------------------------------------------- floors


def test_an_exact_floor_is_recovered_to_ten_digits():
    times = np.geomspace(1, 1e4, 60)
    profile = pl.profile_floor(times, 0.3 + 2 * times**-0.7)
    assert profile.floor == pytest.approx(0.3, rel=1e-10)
    assert profile.exponent == pytest.approx(0.7, rel=1e-9)
    assert profile.amplitude == pytest.approx(2, rel=1e-9)
    assert profile.outcome is pl.Floor.DETERMINED
    assert profile.interval == pytest.approx((0.3, 0.3), rel=1e-9)


def test_a_pure_power_law_allows_only_an_upper_bound_on_the_floor():
    times = np.geomspace(1, 1e3, 40)
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(40))
    profile = pl.profile_floor(times, times**-0.5 * noise)
    assert profile.outcome is pl.Floor.UPPER_BOUND
    assert profile.interval[0] == 0 < profile.interval[1] < 0.02


def test_the_interval_covers_the_true_floor_as_often_as_it_says():
    generator = np.random.default_rng(2)
    times = np.geomspace(1, 1e4, 40)
    covered = 0
    for _ in range(40):
        values = (0.3 + 2 * times**-0.7) * np.exp(0.01 * generator.standard_normal(40))
        low, high = pl.profile_floor(times, values, confidence=0.8, count=3).interval
        covered += low <= 0.3 <= high
    assert 0.64 <= covered / 40 <= 0.96  # 0.8 with a standard error of 0.06


def test_the_profile_is_the_least_sum_of_squares_given_each_floor():
    times = np.geomspace(1, 1e3, 30)
    values = (0.2 + times**-0.6) * np.exp(0.02 * np.random.default_rng(3).standard_normal(30))
    profile = pl.profile_floor(times, values, count=9)
    gammas = np.linspace(0.4, 0.9, 301)
    best = []
    for floor in (*profile.floors, profile.floor):
        # brute force over gamma and a fine grid of amplitudes
        power = times ** -gammas[:, None]
        squares = [
            np.min(np.sum((np.log(floor + a * power) - np.log(values)) ** 2, axis=1))
            for a in np.linspace(0.8, 1.2, 201)
        ]
        best.append(min(squares))
    deviances = 30 * np.log(np.array(best[:-1]) / best[-1])
    np.testing.assert_allclose(profile.deviances, deviances, atol=0.02)


def test_fewer_independent_points_widen_the_interval():
    times = np.geomspace(1, 1e3, 40)
    values = (0.2 + times**-0.6) * np.exp(0.02 * np.random.default_rng(4).standard_normal(40))
    all_points = pl.profile_floor(times, values, count=3).interval
    ten = pl.profile_floor(times, values, independent=10, count=3).interval
    expected = stdtrit(7, 0.975) / np.sqrt(7) / (stdtrit(37, 0.975) / np.sqrt(37))
    assert (ten[1] - ten[0]) / (all_points[1] - all_points[0]) == pytest.approx(expected, rel=0.05)


def test_a_floor_above_the_smallest_noisy_value_is_found_as_a_general_fit_finds_it():
    times = np.geomspace(1, 1e4, 40)
    values = (0.3 + 2 * times**-0.9) * np.exp(0.01 * np.random.default_rng(5).standard_normal(40))
    profile = pl.profile_floor(times, values, count=3)
    found, covariance = curve_fit(lambda t, f, a, g: np.log(f + a * t**-g), times, np.log(values), (0.3, 2, 0.9))
    assert values.min() < profile.floor == pytest.approx(found[0], rel=1e-6)
    assert profile.exponent == pytest.approx(found[2], rel=1e-5)
    half_width = np.sqrt(covariance[0, 0]) * stdtrit(37, 0.975)
    assert np.array(profile.interval) - profile.floor == pytest.approx([-half_width, half_width], rel=0.02)


# ------------------------------------------------------------------------------------- bad input

T = np.geomspace(1, 100, 30)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pl.fit_power_law(T, -T), "values must be positive"),
        (lambda: pl.fit_power_law(T[::-1], T), "times must be increasing"),
        (lambda: pl.fit_power_law(T, T[:5]), r"values must have shape \(30,\), got \(5,\)"),
        (lambda: pl.fit_power_law(T, T, blocks=1), "blocks must be at least 2"),
        (lambda: pl.fit_power_law(T, T, window=(50, 10)), "window must be increasing"),
        (lambda: pl.fit_power_law(T, T, window=(0.1, 10), points=50), "window must be increasing and within"),
        (lambda: pl.local_exponents(T, T, factor=1e6), "factor must lie between 1 and 100"),
        (lambda: pl.window_exponent(2, 1000, (100, 10), (1.0, 2.0)), "window must satisfy"),
        (lambda: pl.window_exponent(2, 1000, (10, 100), (2.0, 1.0)), "two finite, increasing times"),
        (lambda: pl.feature_wise_exponent(1.0, 0.8), "strength_decay must be positive"),
        (lambda: pl.local_exponent(2.0, 0.8, -1.0), "log_ratio must be positive"),
        (lambda: pl.profile_floor(T, 1 / T, lowest=1.0), "lowest in"),
        (lambda: pl.profile_floor(T, 1 / T, confidence=1.5), "confidence must lie in"),
        (lambda: pl.profile_floor(T, 1 / T, independent=3), "independent must exceed"),
        (lambda: pl.profile_floor(T, T), "values must fall with time"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
