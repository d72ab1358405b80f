import doctest

import numpy as np
import pytest

from nqflib import lotka_volterra as lv
from nqflib import power_laws
from nqflib.power_laws import (
    effective_slope,
    feature_exponent,
    fit,
    fit_loss_law,
    fourier_exponent,
    local_slopes,
    sample_exponent,
    window_exponent,
)


def test_the_examples_in_the_module_hold():
    assert doctest.testmod(power_laws).failed == 0


def test_predicted_exponents_are_those_of_the_paper():
    assert feature_exponent(2, 0.8) == pytest.approx(1.25)
    assert sample_exponent(1.5, 1.6) == pytest.approx(1.25)
    assert [fourier_exponent(1.5, theta) for theta in (0, 0.5, 1)] == pytest.approx([4 / 3, 1, 0.8])


def test_a_fit_recovers_an_exact_power_law_and_its_error_is_zero():
    x = np.geomspace(1, 1e4, 50)
    result = fit(x, 3 * x**-1.25)
    assert result.exponent == pytest.approx(1.25, abs=1e-12)
    assert result.amplitude == pytest.approx(3)
    assert result.standard_error < 1e-12


def test_the_standard_error_of_a_fit_covers_independent_noise():
    rng = np.random.default_rng(0)
    x = np.geomspace(1, 1e3, 40)
    errors = []
    for _ in range(400):
        result = fit(x, x**-0.7 * np.exp(0.1 * rng.standard_normal(x.size)))
        errors.append((result.exponent - 0.7) / result.standard_error)
    assert np.std(errors) == pytest.approx(1, abs=0.12)


def test_a_fit_sees_its_window_only():
    x = np.geomspace(1, 1e4, 81)
    y = np.where(x < 100, x**-1.0, 100 * x**-2.0)
    assert fit(x, y, window=(1, 99)).exponent == pytest.approx(1)
    assert fit(x, y, window=(101, 1e4)).exponent == pytest.approx(2)
    centres, slopes = local_slopes(x, y, factor=4)
    assert slopes[centres < 45] == pytest.approx(1)
    assert slopes[centres > 220] == pytest.approx(2)


@pytest.mark.parametrize(("a1", "a2", "b0"), [(2.0, 0.8, 1.2), (1.5, 1.0, 0.5), (2.5, 1.2, 1.3)])
def test_the_window_formula_predicts_the_fit_of_the_exact_flow(a1, a2, b0):
    features = 100_000
    k = np.arange(1, features + 1.0)
    rates = k**-a2
    losses = k**-a1
    competition = rates**2 / (8 * losses)
    abundance = 1e-14 * k**-b0
    half = lv.half_saturation_times(rates, competition, abundance)
    times = np.geomspace(half[9], half[999], 60)
    excess = [
        float(
            np.sum(
                losses * (1 - lv.orthogonal_features(rates, competition, abundance, [t])[0] * competition / rates) ** 2
            )
        )
        for t in times
    ]
    fitted = fit(times, excess).exponent
    assert fitted == pytest.approx(window_exponent(a1, features, (10, 1000), (half[9], half[999])), rel=0.01)


def test_the_effective_slope_tends_to_the_exponent_and_is_the_derivative_of_the_tail():
    assert effective_slope(2, 0.8, 0, 1e9) == pytest.approx(1.25)
    assert effective_slope(2, 0.8, 1.2, 15.0) == pytest.approx(1.25)
    k = np.array([100.0, 100.0 * (1 + 1e-6)])
    log = 20 + (1.9 - 0.7 - 0.2) * -np.log(k / 100)  # ln(r/(C z0)) with r/C ~ k^(a2 - a1), z0 ~ k^-b0
    times = k**0.7 * log
    slope = -np.diff(np.log(k**-0.9))[0] / np.diff(np.log(times))[0]
    assert effective_slope(1.9, 0.7, 0.2, 20.0) == pytest.approx(slope, rel=1e-5)


def test_the_loss_law_finds_a_limit_that_is_there_and_shows_the_profile():
    t = np.geomspace(10, 1e4, 60)
    law = fit_loss_law(t, 2.5 + 30 * t**-1.0)
    assert law.limit == pytest.approx(2.5, abs=1e-4)
    assert law.exponent == pytest.approx(1, abs=1e-3)
    assert law.residual < 1e-4
    far = np.abs(law.profile_limits - 2.5) > 0.2
    assert law.profile_residuals[far].min() > 0.01
    assert np.ptp(law.profile_exponents) > 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: feature_exponent(1.0, 0.8), "a1 must exceed 1"),
        (lambda: sample_exponent(0.5, 1.0), "g1 must exceed 1/2"),
        (lambda: fourier_exponent(1.0, -1.0), "theta must not be negative"),
        (lambda: window_exponent(2.0, 100, (10, 100), (1.0, 2.0)), "window must satisfy"),
        (lambda: window_exponent(2.0, 100, (1, 10), (2.0, 1.0)), "times must be positive and increasing"),
        (lambda: effective_slope(2.0, 0.8, 0.0, [-1.0]), "logarithm must be positive"),
        (lambda: fit([1, 2, 3], [1, 2, 3], window=(2, 3)), "holds 2 points"),
        (lambda: fit([1, 2, 3], [1, -2, 3]), "must be positive"),
        (lambda: fit([1, 2, 3], [1, 2]), "y must"),
        (lambda: local_slopes([1, 2, 3], [3, 2, 1], factor=1.0), "factor must exceed 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
